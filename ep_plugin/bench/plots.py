"""The picture of a benchmark: every backend's phases side by side (report, Table 7 and Figure 17)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .layer import REST

HOST_WAIT = "host split lists"  # the host's time counts for it, also on GPUs: block's device idles meanwhile
COLOURS = {  # by kind: layout transforms, collectives, rows moved by rowwise, its map and waits, experts
    "local permute": "#fdd0a2",
    "global permute": "#fdae6b",
    "global unpermute": "#fd8d3c",
    "local unpermute and merge": "#d94801",
    "all-to-all": "#3182bd",
    "exchange": "#9ecae1",
    HOST_WAIT: "#de2d26",
    "put": "#74c476",
    "cross": "#238b45",
    "fan-out": "#c7e9c0",
    "stage": "#e5f5e0",
    "get and reduce": "#31a354",
    "reduce and put": "#41ab5d",
    "sum": "#a1d99b",
    "deepep dispatch": "#238b45",
    "deepep combine": "#31a354",
    "rows": "#c7e9c0",
    "weights": "#e5f5e0",
    "count": "#dadaeb",
    "route map": "#9e9ac8",
    "wait": "#ffeda0",
    "experts": "#8c6d31",
    REST: "#bd9e39",
    "rest of a phase": "0.85",
}


def plot_phases(result: dict[str, Any], path: Path) -> None:
    """Write a PNG to ``path`` of a result of ``ep-bench dispatch`` or ``layer``.

    One bar a backend: its spans one after another, as long as they are on the device (on CPU: on the host). What other
    streams do behind it is a thin bar under its phase. Means over ranks.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    backends = result["backends"]
    on_device = any(span["device_ms"] for figures in backends.values() for span in figures["spans"])
    figure = Figure(figsize=(13, 1.6 + 1.0 * len(backends)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    shown: dict[str, str] = {}
    longest = max(sum(_length(s, on_device) for s in figures["spans"]) for figures in backends.values())
    for row, figures in enumerate(backends.values()):
        left = 0.0
        begins: dict[str, float] = {}
        for span in figures["spans"]:
            phase, _, inner = span["path"].partition(" > ")
            begins.setdefault(phase, left)
            name = _label(span["path"], figures["spans"], result["what"])
            colour = shown[name] = COLOURS.get(name, "0.6")
            length = _length(span, on_device)
            hatch = "//" if inner == HOST_WAIT else None
            axes.barh(row, length, 0.55, left, color=colour, edgecolor="white", linewidth=0.5, hatch=hatch)
            if span["side_ms"]:
                axes.barh(row + 0.36, span["side_ms"], 0.12, begins[phase], color=colour)
            if length > 0.035 * longest:
                axes.text(left + length / 2, row, f"{length:.2g}", ha="center", va="center", fontsize=8)
            left += length
        ends = [*list(begins.values())[1:], left]
        for (phase, begin), end in zip(begins.items(), ends, strict=True):
            axes.plot([begin, begin], [row - 0.42, row + 0.28], color="0.3", linewidth=0.8)
            if end - begin > 0.012 * len(phase) * longest:
                axes.text(begin, row - 0.3, f" {phase}", fontsize=7, va="bottom", color="0.3")
        axes.text(left, row, f" {left:.3g} ms", va="center", fontweight="bold")
    axes.set_yticks(range(len(backends)), list(backends))
    axes.invert_yaxis()
    axes.set_xlim(0, longest * 1.1)
    axes.set_xlabel(f"ms, {'device' if on_device else 'host'} time of each phase, mean over ranks and calls")
    axes.set_title(
        f"{result['what']}: T={result['tokens']} D={result['hidden_size']} K={result['top_k']}"
        f" E={result['num_experts']} EP={result['world']} {result['dtype'].removeprefix('torch.')},"
        f" {result['routes']} routes, {result['device']}",
        fontsize=10,
    )
    handles = [Patch(facecolor=c, label=n, hatch="//" if n == HOST_WAIT else None) for n, c in shown.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=6, fontsize=8, frameon=False)
    figure.savefig(path, dpi=120)


def _length(span: dict[str, Any], on_device: bool) -> float:
    waits = span["path"].endswith(HOST_WAIT)
    length: float = span["device_ms"] if on_device and not waits else span["host_ms"]
    return max(length, 0.0)


def _label(path: str, spans: list[dict[str, Any]], what: str) -> str:
    """What a span is called in the legend: the innermost name; the rest of a phase that has inner spans by itself."""
    if not path:
        return REST if what == "layer" else "between the phases"
    if any(other["path"].startswith(f"{path} > ") for other in spans):
        return "rest of a phase"
    return path.rpartition(" > ")[2]
