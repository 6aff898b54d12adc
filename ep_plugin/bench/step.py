"""``ep-bench step``: when does EP end a training step earlier? Microbatches against the step's end (report, Figure 12).

EP adds dispatch and combine to every microbatch, and takes gradient synchronisation and update of most experts away
from the end of the step. A stack of layers, each a dense projection, a router and experts, trains on the same fixed
routes without EP and over each backend:

    step(n) = n · (forward and backward) + gradient sync + update

The gradients lie in one buffer for each group of ranks that sums them: without EP all of them over all ranks; with EP
the dense ones over all ranks, and the experts' nowhere, since EP spans them. Sync follows the last backward, so all of
it is exposed. Figures are milliseconds, medians over repeats, of the slowest rank.

Legend: T tokens of a rank, D hidden size, E experts, n microbatches of a step.
"""

from __future__ import annotations

import argparse
import functools
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..config import EPConfig
from ..dispatch import Dispatcher, build_dispatcher
from ..experts import GroupedMLP
from ..layer import moe_step
from .inputs import Inputs, backend
from .timing import measure

NO_EP = "no EP"


@dataclass
class Phases:
    """Milliseconds of one way's parts, and of whole steps by their number of microbatches."""

    forward_backward: float
    sync: float
    update: float
    steps: dict[int, float] = field(default_factory=dict)

    @property
    def boundary(self) -> float:
        """What a step pays once."""
        return self.sync + self.update

    def step(self, microbatches: float) -> float:
        """A step of that many microbatches by its parts."""
        return microbatches * self.forward_backward + self.boundary


def crossover(without: Phases, ep: Phases) -> float:
    """The number of microbatches at which a step with EP takes as long as one ``without``, by their parts.

    With EP it ends earlier below that number: 0 where EP never does, infinity where it always does."""
    saved, added = without.boundary - ep.boundary, ep.forward_backward - without.forward_backward
    if added <= 0:
        return math.inf if saved >= 0 else 0.0
    return max(saved / added, 0.0)


def measured_crossover(without: Phases, ep: Phases) -> tuple[float, float]:
    """The measured numbers of microbatches between which EP stops to be faster: (last at which it is, first at which
    it is not); 0 and infinity stand for none."""
    faster = [n for n in ep.steps if ep.steps[n] < without.steps[n]]
    slower = [n for n in ep.steps if n not in faster]
    return max(faster, default=0), min((n for n in slower if n > max(faster, default=0)), default=math.inf)


class Layer(nn.Module):
    """A dense projection, router weights and this rank's experts, with a residual stream around them."""

    def __init__(self, hidden: int, width: int, experts: int, local: int, dtype: torch.dtype, device: torch.device):
        super().__init__()
        self.dense = nn.Linear(hidden, hidden, bias=False, dtype=dtype, device=device)
        self.router = nn.Linear(hidden, experts, bias=False, dtype=dtype, device=device)
        self.experts = GroupedMLP(local, hidden, width, dtype=dtype, device="meta").to_empty(device=device)
        for parameter in self.experts.parameters():
            nn.init.normal_(parameter, std=parameter.shape[2] ** -0.5)

    def forward(self, x: Tensor, idx: Tensor, dispatcher: Dispatcher[Any], name: str) -> Tensor:
        x = x + self.dense(x)
        weight = self.router(x).softmax(-1, dtype=torch.float32).gather(1, idx.clamp(min=0).long())
        return x + moe_step(dispatcher, x, idx, weight, self.experts, layer=name)


class Step:
    """A training step of a stack of layers over ``dispatcher``; ``ep``: the experts are spread over all ranks."""

    def __init__(self, name: str, dispatcher: Dispatcher[Any], inputs: Inputs, args: argparse.Namespace, ep: bool):
        self.name, self.dispatcher, self.inputs = name, dispatcher, inputs
        device, dtype = inputs.x.device, inputs.x.dtype
        local = dispatcher.num_local_experts
        self.layers = [Layer(args.hidden, args.width, args.experts, local, dtype, device) for _ in range(args.layers)]
        experts = [p for layer in self.layers for p in layer.experts.parameters()]
        dense = [p for layer in self.layers for p in (*layer.dense.parameters(), *layer.router.parameters())]
        self.parameters = dense + experts
        self.summed = _flat_gradients(dense if ep else self.parameters)  # over all ranks
        self.own = _flat_gradients(experts if ep else [])
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-5, fused=device.type == "cuda")
        self.grad = torch.randn_like(inputs.x)

    def forward_backward(self) -> None:
        x = self.inputs.x
        for number, layer in enumerate(self.layers):
            x = layer(x, self.inputs.idx, self.dispatcher, f"{self.name}.{number}")
        x.backward(self.grad)

    def sync(self) -> None:
        if self.summed.numel():
            dist.all_reduce(self.summed)
            self.summed /= dist.get_world_size()

    def update(self) -> None:
        self.optimizer.step()
        self.summed.zero_()
        self.own.zero_()

    def whole(self, microbatches: int) -> None:
        for _ in range(microbatches):
            self.forward_backward()
        self.sync()
        self.update()


def _flat_gradients(parameters: list[nn.Parameter]) -> Tensor:
    """One buffer of which every parameter's gradient is a view, so that it is sent in one piece and never copied."""
    if not parameters:
        return torch.empty(0)
    like = parameters[0]
    flat = torch.zeros(sum(p.numel() for p in parameters), dtype=like.dtype, device=like.device)
    for parameter, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        parameter.grad = part.view_as(parameter)
    return flat


def run(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Collective. Prints tables on rank 0, draws the picture if asked for, and returns the figures."""
    inputs = Inputs.make(args, device)
    result = inputs.describe(args) | {"width": args.width, "layers": args.layers, "microbatches": args.microbatches}
    phases: dict[str, Phases] = {}
    for name in (NO_EP, *args.backends.split(",")):
        ep = name != NO_EP
        config = backend(name, heap=args.heap, max_tokens=args.tokens) if ep else EPConfig(dispatcher="local")
        config.capacity.factor = float(dist.get_world_size())  # room for any routes
        dispatcher = build_dispatcher(config, **inputs.shape, dtype=inputs.x.dtype, device=device)
        phases[name] = measure_step(Step(name, dispatcher, inputs, args, ep), args)
        dispatcher.check()
        dispatcher.close()
    result["backends"] = {
        name: asdict(p) | ({"crossover": crossover(phases[NO_EP], p)} if name != NO_EP else {})
        for name, p in phases.items()
    }
    if dist.get_rank() == 0:
        _print(phases, args.microbatches)
        if args.plot is not None:
            plot_steps(phases, result, Path(args.plot))
    return result


def measure_step(step: Step, args: argparse.Namespace) -> Phases:
    """Its parts and whole steps."""
    device, queue = step.inputs.x.device, step.dispatcher.name != "block"

    def median(part: Callable[[], None], warmup: int) -> float:
        return measure(part, device, repeats=args.repeats, warmup=warmup, queue=queue).median

    phases = Phases(median(step.forward_backward, 2), median(step.sync, 1), median(step.update, 1))
    for microbatches in args.microbatches:
        phases.steps[microbatches] = median(functools.partial(step.whole, microbatches), 0)
    return phases


def _print(phases: dict[str, Phases], microbatches: list[int]) -> None:
    head = "".join(f"{f'step of {n}':>12s}" for n in microbatches)
    print(f"{'ms':16s}{'fwd + bwd':>12s}{'grad sync':>12s}{'update':>12s}{head}")
    for name, p in phases.items():
        numbers = (p.forward_backward, p.sync, p.update, *p.steps.values())
        print(f"{name:16s}" + "".join(f"{number:12.2f}" for number in numbers))
    for name, p in phases.items():
        if name != NO_EP:
            print(f"{name}: {told_crossover(phases[NO_EP], p)}")


def told_crossover(without: Phases, ep: Phases) -> str:
    """The crossover in words, by measured steps and by their parts."""
    last, first = measured_crossover(without, ep)
    parts = crossover(without, ep)
    by_parts = "never" if parts == 0 else "always" if parts == math.inf else f"up to {parts:.1f}"
    if last == 0:
        measured = "EP ends no measured step earlier"
    elif first == math.inf:
        measured = f"EP ends every measured step earlier from {min(ep.steps)} to {max(ep.steps)} microbatches"
    else:
        measured = f"EP ends the step earlier up to {last:g} microbatches, and no longer from {first:g}"
    return f"{measured}; by the parts {by_parts}"


def plot_steps(phases: dict[str, Phases], result: dict[str, Any], path: Path) -> None:
    """Write a PNG to ``path``: the step's parts in order, as in the report's Figure 12, and steps by microbatches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    colours = {"fwd + bwd": "#9ecae1", "grad sync": "#fdae6b", "update": "#a1d99b"}
    figure = Figure(figsize=(14, 1.8 + 0.9 * len(phases)), layout="constrained")
    FigureCanvasAgg(figure)
    lanes, curves = figure.subplots(1, 2, width_ratios=[3, 2])
    shown = 2
    for row, p in enumerate(phases.values()):
        left = 0.0
        parts = [("fwd + bwd", p.forward_backward)] * shown + [("grad sync", p.sync), ("update", p.update)]
        for what, length in parts:
            lanes.barh(row, length, 0.6, left, color=colours[what], edgecolor="white")
            left += length
        lanes.text(left, row, f" {left:.3g} ms", va="center")
    lanes.set_yticks(range(len(phases)), list(phases))
    lanes.invert_yaxis()
    lanes.set(xlabel="ms", title=f"a step of {shown} microbatches")
    lanes.set_xlim(0, 1.12 * max(p.step(shown) for p in phases.values()))
    for what, colour in colours.items():
        lanes.bar(0, 0, color=colour, label=what)
    lanes.legend(loc="lower right")
    for name, p in phases.items():
        numbers = list(p.steps)
        (line,) = curves.plot(numbers, list(p.steps.values()), "o", label=name)
        curves.plot([0, *numbers], [p.step(n) for n in (0, *numbers)], color=line.get_color(), linewidth=1)
        meets = crossover(phases[NO_EP], p) if name != NO_EP else math.inf
        if 0 < meets <= max(numbers):
            curves.axvline(meets, color=line.get_color(), linestyle=":")
            curves.text(meets, 0, f" {meets:.1f}", color=line.get_color(), va="bottom")
    curves.set(
        xlabel="microbatches of a step", ylabel="ms", title="dots: measured; lines: by the parts", ylim=(0, None)
    )
    curves.legend()
    figure.suptitle(
        f"T={result['tokens']} D={result['hidden_size']} F={result['width']} K={result['top_k']}"
        f" E={result['num_experts']} {result['layers']} layers, {result['world']} ranks, {result['device']}",
        fontsize=10,
    )
    figure.savefig(path, dpi=120)
