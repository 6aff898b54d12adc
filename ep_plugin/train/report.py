"""The end of a launch as text: loss curves, their differences, and a table with one line per variant."""

from __future__ import annotations

from collections.abc import Sequence

from ..metrics import human_bytes
from .compare import Difference
from .loop import Curve

BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """``values`` as at most ``width`` bars between their least and greatest; NaN is a gap."""
    picked = [values[i * len(values) // width] for i in range(width)] if len(values) > width else list(values)
    finite = [v for v in picked if v == v]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((v - low) * scale)] if v == v else " " for v in picked)


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells as aligned columns, the first to the left and the others to the right; the first row is the
    header.
    """
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join([row[0].ljust(widths[0]), *cells[1:]]).rstrip())
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])


def loss_table(curves: Sequence[Curve], lines: int = 8) -> str:
    """Losses at about ``lines`` steps, a column per variant, with a sparkline of each whole curve below."""
    steps = [step.step for step in curves[0].steps]
    shown = sorted({round(i * (len(steps) - 1) / max(lines - 1, 1)) for i in range(lines)})
    rows = [["step", *(c.name for c in curves)]]
    rows += [[str(steps[i]), *(f"{c.losses[i]:.5f}" for c in curves)] for i in shown]
    sparks = [f"{c.name:<16} {sparkline(c.losses)}  {c.losses[0]:.3f} → {c.losses[-1]:.3f}" for c in curves]
    return "\n".join([table(rows), "", *sparks])


def difference_lines(first: Curve, differences: Sequence[Difference]) -> str:
    """One sentence per compared variant."""
    return "\n".join(
        f"{d.name} against {first.name}: losses differ by at most {d.loss:.2e} at any step, and by"
        f" {d.last:+.3%} in the mean of the last ones;"
        f" {d.flipped:,} of {d.routes:,} routes flipped"
        for d in differences
    )


def summary(curves: Sequence[Curve]) -> str:
    """One line per variant: degrees, parameters, rate, final loss, drops, traffic."""
    rows = [
        ["run", "dispatcher", "EP_MP", "EP_DP", "DP", "params/rank", "expert params/rank"]
        + ["tokens/s", "final loss", "dropped", "moved/step"]
    ]
    for c in curves:
        degrees = [str(c.layout.ep_mp), str(c.layout.ep_dp), str(c.layout.dp)]
        sizes = [f"{c.parameters_per_rank:,}", f"{c.expert_parameters_per_rank:,}"]
        rates = [f"{c.tokens_per_s:,.0f}", f"{c.losses[-1]:.4f}", f"{c.mean('drop_rate'):.2%}"]
        rows.append([c.name, c.dispatcher, *degrees, *sizes, *rates, human_bytes(c.mean("bytes_moved"))])
    return table(rows)
