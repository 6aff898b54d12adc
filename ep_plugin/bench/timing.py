"""How a step is timed: medians per rank, the largest over ranks, and the time of each named span."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

import torch
import torch.distributed as dist

SPIN_CYCLES = (
    20_000_000  # the GPU idles this long (10 ms at 2 GHz) before a timed region, while the host enqueues all of it
)


@dataclass
class Timing:
    """Milliseconds. ``median``: the largest over ranks of each rank's median; ``low`` and ``high``: quartiles on that
    rank; ``phases``: mean per call of each span, largest over ranks."""

    median: float
    low: float
    high: float
    phases: dict[str, float] = field(default_factory=dict)

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


def measure(
    fn: Callable[[], object],
    device: torch.device,
    *,
    repeats: int = 20,
    warmup: int = 5,
    phases: bool = False,
    queue: bool = True,
) -> Timing:
    """Time ``fn``, which all ranks call together.

    On a GPU by events, each call behind a short idle kernel so that the host's launches are not part of it
    (``queue=False`` for work that waits for the host by nature). ``phases`` profiles extra calls and reads the spans
    named ``ep/…``."""
    for _ in range(warmup):
        fn()
    times = [_once(fn, device, queue) for _ in range(repeats)]
    quartiles = statistics.quantiles(times, n=4) if len(times) > 1 else [times[0]] * 3
    own = [statistics.median(times), quartiles[0], quartiles[2]]
    everyone: list[list[float]] = [own]
    if dist.is_initialized():
        gathered: list[list[float] | None] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, own)
        everyone = [g for g in gathered if g is not None]
    median, low, high = max(everyone)
    return Timing(median, low, high, _phases(fn, device) if phases else {})


def _meet(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    if dist.is_initialized():
        dist.barrier()


def _once(fn: Callable[[], object], device: torch.device, queue: bool) -> float:
    _meet(device)
    if device.type == "cpu":
        start = time.perf_counter()
        fn()
        return (time.perf_counter() - start) * 1e3
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    if queue:
        torch.cuda._sleep(SPIN_CYCLES)
    if dist.is_initialized():  # the ranks' GPUs start together, whatever their hosts did
        dist.all_reduce(torch.zeros(1, device=device))
    first.record()
    fn()
    last.record()
    torch.cuda.synchronize(device)
    return first.elapsed_time(last)


def _phases(fn: Callable[[], object], device: torch.device, calls: int = 5) -> dict[str, float]:
    cuda = device.type == "cuda"
    activities = [torch.profiler.ProfilerActivity.CPU]
    if cuda:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    _meet(device)
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(calls):
            _meet(device)
            fn()
        _meet(device)
    spans = {}
    for event in profile.key_averages():
        if event.key.startswith("ep/"):
            total = event.device_time_total if cuda else event.cpu_time_total
            spans[event.key.removeprefix("ep/")] = total / calls / 1e3
    if not dist.is_initialized():
        return spans
    gathered: list[dict[str, float] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, spans)
    names = dict.fromkeys(name for g in gathered if g for name in g)
    return {name: max(g.get(name, 0.0) for g in gathered if g) for name in names}
