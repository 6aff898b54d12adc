"""What of the documentation is made from the code: figures, the settings reference, the list of error messages.

mkdocs calls ``on_files``; ``python docs/hooks.py`` draws the figures into docs/figures, where they are kept.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import textwrap
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FIGURES = ROOT / "docs" / "figures"
GREY, RED = "#999999", "#d62728"


# Figures


def figures() -> dict[str, str]:
    """Every figure by its file name, as SVG."""
    from ep_plugin.drawing import topology_svg
    from ep_plugin.topology import layout

    return {
        "topology.svg": topology_svg(layout(8, ep=4), 16),
        "folding.svg": topology_svg(layout(8, tp=2, cp=2, ep=4), 16),
        "route_map.svg": route_map_svg(),
        "leases.svg": leases_svg(),
    }


def route_map_svg() -> str:
    """Where the routes of two ranks' tokens land, from ``build_route_map`` under ``policy='rank'``."""
    import torch

    from ep_plugin.config import CapacityConfig
    from ep_plugin.drawing import COLOURS, Svg
    from ep_plugin.routing import build_route_map, count_routes

    experts, ranks, k = 4, 2, 2
    ids = [torch.tensor([[0, 2], [0, 1], [0, 3]]), torch.tensor([[1, 0], [3, 2]])]
    capacity = CapacityConfig("rank", 1.0)
    counts = torch.stack([count_routes(i, experts) for i in ids])
    tokens = torch.tensor([len(i) for i in ids])
    maps = [build_route_map(i, counts, tokens, rank=rank, capacity=capacity) for rank, i in enumerate(ids)]
    svg = Svg()
    svg.text(
        8, 18, f"policy='rank', factor={capacity.factor}: ceil(f·K·ΣT / M) = ceil(1·{k}·5 / 2) = 5 rows a rank", size=13
    )
    svg.text(20, 44, "tokens at their sources")
    svg.text(420, 44, "rows of the expert ranks, in expert order")
    row_at: dict[tuple[int, int], tuple[float, float]] = {}
    y = 56.0
    for rank in range(ranks):
        offsets = maps[rank].offsets.tolist()
        svg.text(420, y + 14, f"expert rank {rank}", size=11, fill="#555")
        y += 20
        for local in range(experts // ranks):
            for row in range(offsets[local], offsets[local + 1]):
                svg.box(420, y, 150, 22, COLOURS[rank * 2 + local])
                svg.text(495, y + 15, f"row {row}: expert {rank * 2 + local}", fill="white", middle=True)
                row_at[rank, row] = (420, y + 11)
                y += 25
        y += 10
    y = 56.0
    for source in range(ranks):
        svg.text(20, y + 14, f"source rank {source}", size=11, fill="#555")
        y += 20
        dest = maps[source]
        for token, chosen in enumerate(ids[source].tolist()):
            svg.box(20, y, 150, 22, GREY)
            svg.text(95, y + 15, f"t{token} → experts {', '.join(map(str, chosen))}", fill="white", middle=True)
            for route in range(k):
                rank, row = int(dest.dest_rank[token, route]), int(dest.dest_row[token, route])
                from_y = y + 7 + 8 * route
                if rank < 0:
                    svg.line(170, from_y, 230, from_y, RED, arrow=True)
                    svg.text(236, from_y + 4, f"expert {chosen[route]}: dropped", fill=RED, size=11)
                else:
                    svg.line(170, from_y, *row_at[rank, row], "#666", arrow=True)
            y += 34
        y += 14
    return str(svg)


def leases_svg() -> str:
    """Which layer leases which payload slot while three layers run forward and backward, then the last two of them
    checkpointed: sampled from a dispatcher of one process."""
    import torch
    import torch.distributed as dist
    from torch.utils.checkpoint import checkpoint

    from ep_plugin.config import EPConfig
    from ep_plugin.dispatch import build_dispatcher
    from ep_plugin.drawing import COLOURS, Svg
    from ep_plugin.layer import moe_step

    alone = not dist.is_initialized()
    if alone:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dispatcher: Any = build_dispatcher(
        EPConfig(form="route", max_tokens=4, slots=3),
        num_experts=2,
        top_k=1,
        hidden_size=4,
        dtype=torch.float32,
        group=dist.new_group([dist.get_rank()]) if not alone else None,
    )
    pool, steps = dispatcher.payload, []
    owner: dict[int, int] = {}

    def sample(title: str, layer: int) -> None:
        pool.stats()
        leased = {place.index for place in pool._places if place.leased}
        for index in leased - set(owner):
            owner[index] = layer
        for index in set(owner) - leased:
            del owner[index]
        steps.append((title, dict(owner)))

    class Mark(torch.autograd.Function):
        """Samples when its layer's backward is through."""

        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, layer: int) -> torch.Tensor:
            ctx.layer = layer
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
            sample(f"backward {ctx.layer}", ctx.layer)
            return grad, None

    def layer(x: torch.Tensor, number: int) -> torch.Tensor:
        weight = torch.nn.Parameter(torch.ones(4))
        routes = torch.zeros(len(x), 1, dtype=torch.long)

        def experts(d: Any, _: str) -> torch.Tensor:
            sample(f"{'again' if torch._C._current_graph_task_id() != -1 else 'forward'} {number}", number)
            out: torch.Tensor = d.rows * weight
            return out

        return moe_step(dispatcher, Mark.apply(x, number), routes, torch.ones(len(x), 1), experts)

    x = torch.ones(4, 4, requires_grad=True)
    layer(layer(layer(x, 0), 1), 2).sum().backward()
    plain = len(steps)

    def rest(x: torch.Tensor) -> torch.Tensor:
        return layer(layer(x, 1), 2)

    checkpoint(rest, layer(x, 0), use_reentrant=False).sum().backward()
    dispatcher.close()
    if alone:
        dist.destroy_process_group()

    svg, column = Svg(), 74
    svg.text(8, 18, "payload slots leased by layer, from forward to the weight gradient", size=13)
    for index in range(3):
        svg.text(8, 70 + 30 * index, f"slot {index}")
    for number, (title, held) in enumerate(steps):
        x0 = 60 + number * column + (16 if number >= plain else 0)
        svg.text(x0 + column / 2, 42, title, size=10, middle=True)
        for index, who in held.items():
            svg.box(x0, 54 + 30 * index, column, 24, COLOURS[who])
            svg.text(x0 + column / 2, 70 + 30 * index, f"layer {who}", fill="white", size=11, middle=True)
    svg.text(60, 160, "plain", size=11, fill="#555")
    svg.text(
        60 + plain * column + 16,
        160,
        "layers 1 and 2 checkpointed: they lease again when run again",
        size=11,
        fill="#555",
    )
    return str(svg)


# Settings


def settings_page() -> str:
    """The settings of ``EPConfig`` and of the launcher, from their dataclasses."""
    from ep_plugin import config
    from ep_plugin.train import settings

    lines = [
        "# Settings",
        "",
        "Made from the dataclasses of `ep_plugin/config.py` and `ep_plugin/train/settings.py`. In recipes the first are"
        " under `ep.`: `ep.capacity.policy=rank`. Every value is checked before anything is made; an error quotes the"
        " value and what would be right.",
        "",
    ]
    done: set[type] = set()
    for module, first in ((config, [config.EPConfig]), (settings, [])):
        classes = [
            c for _, c in inspect.getmembers(module, dataclasses.is_dataclass) if c.__module__ == module.__name__
        ]
        for cls in [*first, *sorted(classes, key=_line_of)]:
            if cls not in done:
                done.add(cls)
                lines += _settings_of(cls, module)
    return "\n".join(lines)


def _line_of(cls: type) -> int:
    return inspect.getsourcelines(cls)[1]


def _settings_of(cls: Any, module: Any) -> list[str]:
    text = inspect.cleandoc(cls.__doc__ or "").replace("``", "`")
    lines = [f"## {cls.__name__}", "", text, "", "| setting | type | default | choices |", "|---|---|---|---|"]
    choices = _choices(cls, module)
    for field in dataclasses.fields(cls):
        if field.default is not dataclasses.MISSING:
            default = repr(field.default)
        elif field.default_factory is not dataclasses.MISSING:
            made = field.default_factory()
            default = f"see {type(made).__name__}" if dataclasses.is_dataclass(made) else repr(made)
        else:
            default = "required"
        kind = str(field.type).replace("|", "\\|")
        allowed = ", ".join(f"`{choice}`" for choice in choices.get(field.name, ()))
        lines.append(f"| `{field.name}` | `{kind}` | {_code(default)} | {allowed} |")
    return [*lines, ""]


def _choices(cls: Any, module: Any) -> dict[str, tuple[str, ...]]:
    """What ``validate`` allows: the constants it hands to ``one_of``."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    except OSError:
        return {}
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "one_of" and len(node.args) == 3:
            name, _, constant = node.args
            if isinstance(name, ast.Constant) and isinstance(constant, ast.Name):
                found[str(name.value).rpartition(".")[2]] = getattr(module, constant.id)
    return found


def _code(text: str) -> str:
    return text if text == "required" or text.startswith("see ") else f"`{text}`"


# Error messages


@dataclasses.dataclass(frozen=True)
class Message:
    """An error that the code raises: its type, its words (… for what is filled in), and where."""

    kind: str
    words: str
    file: str
    line: int


def messages() -> list[Message]:
    """Every message of a ``raise`` in the package whose words stand in the code."""
    found = []
    folders = [ROOT / "ep_plugin", ROOT / "adapters", ROOT / "kernels"]
    files = sorted({file.resolve() for folder in folders for file in folder.rglob("*.py")})
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
                words = _words(node.exc.args[0])
                if words and re.search(r"[a-z]{3}", words):
                    kind = ast.unparse(node.exc.func).rpartition(".")[2]
                    found.append(Message(kind, words, str(file.relative_to(ROOT)), node.lineno))
    return found


def _words(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(_words(v) if isinstance(v, ast.Constant) else "…" for v in node.values)
    if isinstance(node, ast.BinOp):
        return _words(node.left) + _words(node.right)
    return "…"


def messages_page() -> str:
    """All messages by the file that raises them, for the search of this site."""
    lines = [
        "# All error messages",
        "",
        "Every error that the package raises, by its words; `…` stands for a value."
        " [Troubleshooting](troubleshooting.md) says more of those that are met most.",
        "",
    ]
    file = ""
    for message in messages():
        if message.file != file:
            file = message.file
            lines += [f"## `{file}`", ""]
        words = message.words.replace("`", "'").replace("\n", " ")
        lines += [f"- **{message.kind}**: `{words}`"]
    return "\n".join([*lines, ""])


# mkdocs


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages to the site."""
    from mkdocs.structure.files import File

    for name, text in (("settings.md", settings_page()), ("messages.md", messages_page())):
        files.append(File.generated(config, name, content=text))
    return files


def main() -> None:
    """Draw the figures."""
    FIGURES.mkdir(exist_ok=True)
    for name, svg in figures().items():
        (FIGURES / name).write_text(svg)


if __name__ == "__main__":
    main()
