"""Pictures of a layout of ranks, as text and as SVG; needs neither torch nor a drawing library."""

from __future__ import annotations

from html import escape

from .topology import Layout, span_text

COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#e45756", "#72b7b2", "#b279a2", "#9d755d", "#eeca3b")
BOX, GAP, LEFT, LINE = 46, 6, 120, 15
MOST_RANKS = 64  # of a pipeline stage, in one picture


class Svg:
    """Shapes of an SVG picture, in pixels."""

    def __init__(self) -> None:
        self._shapes: list[str] = []
        self._width = self._height = 0.0

    def box(self, x: float, y: float, width: float, height: float, fill: str, *, dashed: bool = False) -> None:
        """A filled rectangle; ``dashed``: its outline alone."""
        style = f'fill="none" stroke="{fill}" stroke-dasharray="4 3"' if dashed else f'fill="{fill}"'
        self._shapes.append(f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" {style}/>')
        self._grow(x + width, y + height)

    def text(self, x: float, y: float, text: str, *, fill: str = "#222", size: int = 12, middle: bool = False) -> None:
        """``text`` whose baseline is at ``y``."""
        anchor = ' text-anchor="middle"' if middle else ""
        self._shapes.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{fill}"{anchor}>{escape(text, quote=False)}</text>'
        )
        self._grow(x + len(text) * size * (0.3 if middle else 0.6), y + 4)

    def line(self, x1: float, y1: float, x2: float, y2: float, stroke: str = "#888", *, arrow: bool = False) -> None:
        """A line, with an arrow's head at its end if asked."""
        head = ' marker-end="url(#head)"' if arrow else ""
        self._shapes.append(f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{stroke}"{head}/>')
        self._grow(max(x1, x2), max(y1, y2))

    def _grow(self, x: float, y: float) -> None:
        self._width, self._height = max(self._width, x), max(self._height, y)

    def __str__(self) -> str:
        width, height = round(self._width + 12), round(self._height + 12)
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
            ' font-family="sans-serif">\n<defs><marker id="head" markerWidth="8" markerHeight="8" refX="7" refY="3"'
            ' orient="auto"><path d="M0,0 L7,3 L0,6 z" fill="#888"/></marker></defs>\n'
            f'<rect width="{width}" height="{height}" fill="white"/>\n'
        )
        return head + "\n".join(self._shapes) + "\n</svg>\n"


def _stage(layout: Layout, stage: int) -> list[int]:
    return [rank for rank in range(layout.world_size) if layout.coordinate(rank)["pp"] == stage]


def topology_svg(layout: Layout, num_experts: int | None = None) -> str:
    """Every pipeline stage twice: as the grid of dense layers, and as the grid of experts over the same ranks.

    Colours are DP ranks above (one colour sees the same data) and EP_MP groups below (one colour exchanges token rows).
    Raises ``ValueError`` for stages of more than ``MOST_RANKS`` ranks."""
    per_stage = layout.world_size // layout.pp
    if per_stage > MOST_RANKS:
        raise ValueError(f"a stage of {per_stage} ranks does not fit a picture; {MOST_RANKS} do: draw a smaller world")
    svg = Svg()
    svg.text(8, 20, layout.equation(), size=13)
    y = 36.0
    for stage in range(layout.pp):
        if layout.pp > 1:
            svg.text(8, y + 14, f"pipeline stage {stage}", size=13)
            y += 22
        ranks = _stage(layout, stage)
        groups = list(dict.fromkeys(layout.group_of("ep_mp", rank) for rank in ranks))
        for title, lines in (("dense layers", ("tp", "cp", "dp")), ("experts", ("etp", "ep_mp", "ep_dp"))):
            svg.text(8, y + 18, title)
            svg.text(8, y + 18 + LINE, "· ".join(lines), fill="#666", size=10)
            height = 4 + LINE * (3 if num_experts and title == "experts" else 2)
            for column, rank in enumerate(ranks):
                place = layout.coordinate(rank)
                x = LEFT + column * (BOX + GAP)
                number = place["dp"] if title == "dense layers" else groups.index(layout.group_of("ep_mp", rank))
                svg.box(x, y, BOX, height, COLOURS[number % len(COLOURS)])
                svg.text(x + BOX / 2, y + 14, str(rank), fill="white", size=13, middle=True)
                where = "·".join(str(place[axis]) for axis in lines)
                svg.text(x + BOX / 2, y + 14 + LINE, where, fill="white", size=10, middle=True)
                if num_experts and title == "experts":
                    said = span_text(layout.experts(rank, num_experts))
                    svg.text(x + BOX / 2, y + 14 + 2 * LINE, f"E {said}", fill="white", size=9, middle=True)
            y += height + GAP
        y += GAP
    svg.text(
        8, y + 8, "colour above: a DP rank, its own data; below: an EP_MP group, which exchanges token rows", size=10
    )
    return str(svg)


def topology_text(layout: Layout, num_experts: int | None = None) -> str:
    """The same as text: one column a rank; dense coordinates tp·cp·dp, then the EP_MP group (a letter) with the rank
    in it, and the experts."""
    lines = [layout.equation()]
    for stage in range(layout.pp):
        ranks = _stage(layout, stage)
        groups = list(dict.fromkeys(layout.group_of("ep_mp", rank) for rank in ranks))
        rows: dict[str, list[str]] = {"rank": [str(rank) for rank in ranks]}
        places = [layout.coordinate(rank) for rank in ranks]
        rows["tp·cp·dp"] = [f"{p['tp']}·{p['cp']}·{p['dp']}" for p in places]
        rows["EP_MP group"] = [
            f"{_letter(groups.index(layout.group_of('ep_mp', rank)))}{p['ep_mp']}"
            for rank, p in zip(ranks, places, strict=True)
        ]
        if layout.etp > 1:
            rows["etp"] = [str(p["etp"]) for p in places]
        if num_experts:
            rows["experts"] = [span_text(layout.experts(rank, num_experts)) for rank in ranks]
        title = max(map(len, rows))
        wide = max(len(cell) for cells in rows.values() for cell in cells)
        fits = max(1, (110 - title) // (wide + 1))
        lines.append("" if layout.pp == 1 else f"\npipeline stage {stage}")
        for first in range(0, len(ranks), fits):
            for name, cells in rows.items():
                part = " ".join(cell.rjust(wide) for cell in cells[first : first + fits])
                lines.append(f"{name.ljust(title)} | {part}")
            lines.append("")
    return "\n".join(lines).rstrip()


def _letter(number: int) -> str:
    """A, B, …, Z, AA, AB, …"""
    text = ""
    number += 1
    while number:
        number, digit = divmod(number - 1, 26)
        text = chr(ord("A") + digit) + text
    return text
