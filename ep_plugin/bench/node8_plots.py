"""The pictures of ``node8`` beside those of ``ep-bench``: totals of all backends, and memory beside equation 9."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .node8_memory import GIB, Memory, expected
from .node8_verdict import OF_BARE
from .step import NO_EP

COLOURS = {"nccl": "0.6", "block": "#fdae6b", "rowwise": "#31a354", "rowwise:route": "#a1d99b", "deepep": "#6baed6"}


def plot_totals(results: dict[str, dict[str, Any]], path: Path) -> None:
    """Dispatch and combine of every backend at every hidden size, milliseconds; a line at the target."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for place, result in enumerate(results.values()):
        totals = {name: figures["total_ms"] for name, figures in (result["peers"] | result["backends"]).items()}
        for number, (name, total) in enumerate(totals.items()):
            x = place + (number - (len(totals) - 1) / 2) * 0.16
            axes.bar(x, total, 0.15, color=COLOURS.get(name, "0.4"))
            axes.text(x, total, f"{total:.3g}", ha="center", va="bottom", fontsize=8)
        if "nccl" in totals:
            axes.plot([place - 0.45, place + 0.45], [OF_BARE * totals["nccl"]] * 2, "k--", linewidth=1)
    first = next(iter(results.values()))
    for name in dict.fromkeys(n for result in results.values() for n in (*result["peers"], *result["backends"])):
        axes.bar(0, 0, color=COLOURS.get(name, "0.4"), label="two bare all-to-alls" if name == "nccl" else name)
    axes.plot([], [], "k--", label=f"{OF_BARE} × the bare ones")
    axes.legend(fontsize=8)
    axes.set_xticks(range(len(results)), [f"D={hidden}" for hidden in results])
    axes.set_ylabel("ms, route map + dispatch + combine")
    axes.set_title(
        f"T={first['tokens']} K={first['top_k']} E={first['num_experts']} EP={first['world']}, {first['device']}",
        fontsize=10,
    )
    figure.savefig(path, dpi=120)


def plot_memory(ways: list[Memory], path: Path) -> None:
    """Bytes of a rank by EP degree: state, the rest of the peak, symmetric memory; a mark where equation 9 expects the
    whole."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 1.5 + 0.6 * len(ways)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    without = next((way for way in ways if way.ep == 1), None)
    parts = {"weights, gradients, moments": "#3182bd", "rest of the peak": "#9ecae1", "symmetric heap": "#31a354"}
    for row, way in enumerate(ways):
        left = 0.0
        for nbytes, colour in zip((way.state, way.peak - way.state, way.heap), parts.values(), strict=True):
            axes.barh(row, nbytes / GIB, 0.6, left, color=colour)
            left += nbytes / GIB
        axes.text(left, row, f" {left:.3g} GiB", va="center")
        if without is not None and way.ep > 1:
            axes.plot([expected(without, way.ep).total / GIB] * 2, [row - 0.4, row + 0.4], "k", linewidth=2)
    for name, colour in parts.items():
        axes.barh(0, 0, color=colour, label=name)
    axes.plot([], [], "k", linewidth=2, label="expected by equation 9")
    figure.legend(fontsize=8, loc="outside lower center", ncols=4, frameon=False)
    axes.set_yticks(range(len(ways)), [NO_EP if way.ep == 1 else f"EP{way.ep} {way.backend}" for way in ways])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.15 * max(way.total for way in ways) / GIB)
    axes.set_xlabel("GiB of a rank")
    figure.savefig(path, dpi=120)
