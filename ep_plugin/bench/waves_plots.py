"""Pictures of ``ep-bench waves``: the sweep (report, Figure 24) and the kernels of a step by stream (Figure 23)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..waves.tuned import Shape
from .waves_arguments import KINDS
from .waves_trace import MOVEMENTS

COLOURS = {"none": "#333333", "wave_sequential": "#e08214", "wave_overlapped": "#1b7837"}
MARKS = {1: "o", 2: "s", 4: "^", 8: "D"}
PHASES = {
    "plan": "#9e9ac8",
    "dispatch": "#3182bd",
    "combine": "#31a354",
    "combine backward": "#9ecae1",
    "dispatch backward": "#a1d99b",
}
EXPERTS = "#d8b365"


def plot_sweep(result: dict[str, Any], shape: Shape, path: Path) -> None:
    """Milliseconds against the width of communication: the forward, and forward and backward; a line for each schedule
    and number of waves, quartiles as bars."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 5.5), layout="constrained")
    FigureCanvasAgg(figure)
    points = [p for p in result["points"] if shape.fits(p)]
    widths = sorted({p["schedule"]["width"] for p in points})
    place = {width: i for i, width in enumerate(widths)}
    for axes, time in zip(figure.subplots(1, 2), ("forward", "step"), strict=True):
        lines: dict[tuple[str, int], list[dict[str, Any]]] = {}
        for p in points:
            s = p["schedule"]
            lines.setdefault((s["kind"], 1 if s["kind"] == "none" else s["waves"]), []).append(p)
        for (kind, waves), own in sorted(lines.items(), key=lambda item: (KINDS.index(item[0][0]), item[0][1])):
            best: dict[int, dict[str, Any]] = {}
            for p in own:  # of several settings of spare, the best
                width = p["schedule"]["width"]
                if width not in best or p[time]["median"] < best[width][time]["median"]:
                    best[width] = p
            x = [place[w] for w in sorted(best)]
            y = [best[w][time]["median"] for w in sorted(best)]
            low = [best[w][time]["median"] - best[w][time]["low"] for w in sorted(best)]
            high = [best[w][time]["high"] - best[w][time]["median"] for w in sorted(best)]
            label = kind if kind == "none" else f"{kind}, {_waves(waves)}"
            axes.errorbar(
                x, y, yerr=[[max(0, v) for v in low], [max(0, v) for v in high]], label=label, color=COLOURS[kind],
                marker=MARKS.get(waves, "x"), markersize=4, linewidth=2 if kind == "none" else 1, capsize=2,
                alpha=1 if kind == "none" else 0.85,
            )  # fmt: skip
        axes.set_xticks(range(len(widths)), ["default" if w == 0 else str(w) for w in widths])
        axes.set_xlabel("width: programs of the kernels that cross the link")
        axes.set_ylabel("ms, the slowest rank's median")
        axes.set_title({"forward": "forward", "step": "forward and backward"}[time])
        axes.grid(alpha=0.3)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize=8, frameon=False)
    figure.suptitle(_title(result), fontsize=10)
    figure.savefig(path, dpi=120)


def plot_timelines(result: dict[str, Any], path: Path) -> None:
    """The kernels of a forward and of a step of each schedule, a lane for each stream, on one axis of time."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    timelines = {name: t for name, t in result["timelines"].items() if t["kernels"]}
    lanes = [len({k["stream"] for k in t["kernels"]}) for t in timelines.values()]
    figure = Figure(figsize=(14, 1.4 + 0.35 * sum(lanes) + 0.5 * len(lanes)), layout="constrained")
    FigureCanvasAgg(figure)
    rows = figure.subplots(len(timelines), 1, squeeze=False, gridspec_kw={"height_ratios": lanes})[:, 0]
    longest = {
        what: max(t["whole"] for name, t in timelines.items() if name.endswith(what)) for what in ("forward", "step")
        if any(name.endswith(what) for name in timelines)
    }  # fmt: skip
    for axes, (name, t) in zip(rows, timelines.items(), strict=True):
        streams = sorted({k["stream"] for k in t["kernels"]}, key=lambda s: (len(str(s)), str(s)))
        for k in t["kernels"]:
            colour = PHASES.get(k["what"], EXPERTS)
            axes.barh(streams.index(k["stream"]), k["end"] - k["begin"], 0.8, k["begin"], color=colour, linewidth=0)
        s = t["schedule"]
        waves = "" if s["kind"] == "none" else f", {_waves(s['waves'])}"
        axes.set_title(
            f"{name} (width {s['width'] or 'default'}{waves}): {t['whole']:.2f} ms, communication {t['comm']:.2f},"
            f" experts {t['gemm']:.2f}, both {t['both']:.2f}",
            fontsize=8, loc="left",
        )  # fmt: skip
        axes.set_yticks(range(len(streams)), [f"stream {s}" for s in streams], fontsize=7)
        axes.set_xlim(0, longest["step" if name.endswith("step") else "forward"] * 1.01)
        axes.invert_yaxis()
    rows[-1].set_xlabel("ms since the step's first kernel; kernels that wait for a peer are left out")
    patches = [Patch(color=PHASES[m], label=m) for m in MOVEMENTS]
    figure.legend(
        handles=[*patches, Patch(color=EXPERTS, label="experts")], loc="outside lower center", ncols=6, frameon=False
    )
    figure.suptitle(_title(result), fontsize=10)
    figure.savefig(path, dpi=120)


def _waves(number: int) -> str:
    return "1 wave" if number == 1 else f"{number} waves"


def _title(result: dict[str, Any]) -> str:
    return (
        f"T={result['tokens']} D={result['hidden_size']} F={result['width']} K={result['top_k']}"
        f" E={result['num_experts']} EP={result['world']} {result['dtype'].removeprefix('torch.')},"
        f" {result['routes']} routes, {result['device']}"
    )
