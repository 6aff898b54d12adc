"""The picture of a launch: loss curves and expert load."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .loop import Curve


def plot(curves: Sequence[Curve], entropy: float, path: Path) -> None:
    """Write a PNG to ``path``: losses with the unigram ``entropy`` (nats), load of the fullest expert over the steps,
    and the last step's routes per expert, summed over the layers.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    losses, fullest, load = figure.subplots(1, 3)
    # Curves that agree lie on each other: thinner lines on top keep all of them visible.
    widths = [1.5 + 2.5 * (len(curves) - 1 - i) for i in range(len(curves))]
    for curve, width in zip(curves, widths, strict=True):
        steps = [step.step for step in curve.steps]
        label = f"{curve.name} (EP_MP {curve.layout.ep_mp} × EP_DP {curve.layout.ep_dp})"
        losses.plot(steps, curve.losses, label=label, linewidth=width)
        fullest.plot(steps, [step.expert_load for step in curve.steps], label=curve.name, linewidth=width)
    losses.axhline(entropy, color="grey", linestyle="--", label="unigram entropy")
    losses.set(title="Loss", xlabel="step", ylabel="nats per byte")
    losses.legend()
    fullest.set(title="Fullest expert", xlabel="step", ylabel="routes / mean", ylim=(1, None))
    share = 0.8 / len(curves)
    for i, curve in enumerate(curves):
        if curve.load is not None:
            routes = curve.load.sum(0)
            places = [expert + (i - (len(curves) - 1) / 2) * share for expert in range(len(routes))]
            load.bar(places, (routes / routes.sum()).tolist(), width=share, label=curve.name)
    load.set(title="Expert load, last step", xlabel="expert", ylabel="share of routes")
    load.legend()
    figure.savefig(path, dpi=110)
