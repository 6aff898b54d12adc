"""One movement of rows beside the experts, on independent data (report, Table 9): what overlap could win at most.

The dispatch (map included) or the combine of a batch runs on a stream of its own while the experts' forward of another
batch runs on the caller's. Both alone, one after the other, and beside each other; T_comm, T_gemm, their stretched
forms and the makespan of equation 10.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..config import ScheduleConfig
from ..dispatch import Dispatched
from ..waves.lanes import EXPERTS, THERE, Lanes
from ..waves.step import usual_spare
from .timing import meet

if TYPE_CHECKING:
    from .waves import Bench

SPIN = 20_000_000


@dataclass
class Pair:
    """Milliseconds, medians of the slowest rank. ``sequential`` and ``overlapped``: makespans."""

    movement: str
    width: int
    spare: int
    comm: float
    gemm: float
    comm_stretched: float
    gemm_stretched: float
    sequential: float
    overlapped: float


@torch.no_grad()
def measure_pairs(
    bench: Bench, args: argparse.Namespace, earlier: list[dict[str, Any]], in_time: Callable[[], bool]
) -> list[dict[str, Any]]:
    """Collective; only on GPUs. Adds the widths that ``earlier`` has not, prints a line for each."""
    found = list(earlier)
    done = {(p["movement"], p["width"], p["spare"]) for p in found}
    for width in args.widths:
        spares = [usual_spare(width, args.width) if s == "auto" else int(s) for s in args.spares.split(",")]
        if all((m, width, s) in done for m in ("dispatch", "combine") for s in spares) or not in_time():
            continue
        parts = _Parts(bench, width)
        for spare in spares:
            for name, movement in (("dispatch", parts.dispatch), ("combine", parts.combine)):
                pair = _measure(name, width, spare, movement, parts.experts, bench.device, args.repeats)
                found.append(asdict(pair))
                if dist.get_rank() == 0:
                    print(
                        f"{name:9s} width {width:3d} spare {spare:2d}: alone {pair.comm:.3f} + {pair.gemm:.3f},"
                        f" stretched {pair.comm_stretched:.3f} and {pair.gemm_stretched:.3f}"
                        f" ({100 * (pair.gemm_stretched / pair.gemm - 1):+.1f} %); one after the other"
                        f" {pair.sequential:.3f}, beside each other {pair.overlapped:.3f}"
                        f" ({100 * (pair.overlapped / pair.sequential - 1):+.1f} %)",
                        flush=True,
                    )
        parts.close()
    return found


class _Parts:
    """The two movements and the experts of one forward, which need nothing of each other any more."""

    def __init__(self, bench: Bench, width: int) -> None:
        self.dispatcher = bench.dispatcher(ScheduleConfig(width=width))
        self.inputs, self.step = bench.inputs, bench.step(self.dispatcher, "bench")
        self.weight_at: Any = self.dispatcher.config.weight_at
        self.state, self.arrived = self.dispatch()
        self.y = self.experts()

    def dispatch(self) -> tuple[Any, Dispatched]:
        state = self.dispatcher.plan(self.inputs.idx, layer="pair", x=self.inputs.x)
        return state, self.dispatcher.dispatch(state, self.inputs.x, self.inputs.weight)

    def combine(self) -> Tensor:
        weights = self.arrived.weights if self.weight_at == "output" else None
        return self.dispatcher.combine(self.state, self.y, weights)

    def experts(self) -> Tensor:
        return self.step.experts(self.arrived, self.weight_at)

    def close(self) -> None:
        del self.state, self.arrived, self.y
        self.dispatcher.check()
        self.dispatcher.close()


def _measure(
    name: str,
    width: int,
    spare: int,
    movement: Callable[[], Any],
    gemm: Callable[[], Any],
    device: torch.device,
    repeats: int,
) -> Pair:
    one, beside = Lanes(device, overlapped=False), Lanes(device, overlapped=True)
    rows: list[list[float]] = []
    for i in range(repeats + 2):
        alone = _run(one, 0, movement, None, device)
        product = _run(one, 0, None, gemm, device)
        both = _run(one, 0, movement, gemm, device)
        over = _run(beside, spare, movement, gemm, device)
        if i >= 2:
            rows.append([alone[0], product[1], over[0], over[1], both[2], over[2]])
    medians = [statistics.median(column) for column in zip(*rows, strict=True)]
    everyone: list[list[float]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, medians)
    return Pair(name, width, spare, *(max(column) for column in zip(*everyone, strict=True)))


def _run(
    lanes: Lanes, spare: int, movement: Callable[[], Any] | None, gemm: Callable[[], Any] | None, device: torch.device
) -> tuple[float, float, float]:
    """Milliseconds of the movement, of the experts, and from the first's begin to the last's end."""
    meet(device)
    torch.cuda._sleep(SPIN)
    dist.all_reduce(torch.zeros(1, device=device))
    events = [torch.cuda.Event(enable_timing=True) for _ in range(6)]

    def timed(work: Callable[[], Any], first: int) -> Callable[[], Any]:
        def run() -> Any:
            events[first].record()
            made = work()
            events[first + 1].record()
            return made

        return run

    events[0].record()
    with lanes.open(1, spare) as pipeline:
        # The experts first, as in a schedule: their programs take their places before communication does.
        if gemm is not None and lanes.streams:
            with pipeline.spared():
                pipeline.run(EXPERTS, timed(gemm, 3))
        if movement is not None:
            pipeline.run(THERE, timed(movement, 1))
        if gemm is not None and not lanes.streams:
            pipeline.run(EXPERTS, timed(gemm, 3))
    events[5].record()
    torch.cuda.synchronize(device)
    comm = 0.0 if movement is None else events[1].elapsed_time(events[2])
    product = 0.0 if gemm is None else events[3].elapsed_time(events[4])
    return comm, product, events[0].elapsed_time(events[5])
