"""How a step is timed: medians per rank, the largest over ranks, and the time of each named span."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from .spans import Span, mean_over_ranks, meet, read_spans, record

SPIN_CYCLES = (
    20_000_000  # the GPU idles this long (10 ms at 2 GHz) before a timed region, while the host enqueues all of it
)


@dataclass
class Timing:
    """Milliseconds. ``median``: the largest over ranks of each rank's median; ``low`` and ``high``: quartiles on that
    rank; ``spans``: the named ranges of a step, means over ranks."""

    median: float
    low: float
    high: float
    spans: list[Span] = field(default_factory=list)

    @property
    def phases(self) -> dict[str, float]:
        """Each span's time: the device's where it has any, else the host's."""
        on_device = any(s.device_ms for s in self.spans)
        return {s.path: s.device_ms if on_device else s.host_ms for s in self.spans}

    def as_dict(self) -> dict[str, float]:
        """Without the spans."""
        return {"median": self.median, "low": self.low, "high": self.high}


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
    (``queue=False`` for work that waits for the host by nature). ``phases`` profiles extra calls and reads their
    spans."""
    for _ in range(warmup):
        fn()
    times = [_once(fn, device, queue) for _ in range(repeats)]
    quartiles = statistics.quantiles(times, n=4) if len(times) > 1 else [times[0]] * 3
    median, low, high = _slowest([statistics.median(times), quartiles[0], quartiles[2]])
    return Timing(median, low, high, mean_over_ranks(read_spans(record(fn, device))) if phases else [])


def measure_host(fn: Callable[[], object], device: torch.device, *, repeats: int = 20) -> float:
    """Milliseconds until ``fn`` returns, whatever the device still has to do: median, the largest over ranks."""
    times = []
    for _ in range(repeats):
        meet(device)
        start = time.perf_counter()
        fn()
        times.append((time.perf_counter() - start) * 1e3)
    meet(device)
    return _slowest([statistics.median(times)])[0]


def _slowest(own: list[float]) -> list[float]:
    """The largest over ranks of ``own`` by its first number; collective."""
    if not dist.is_initialized():
        return own
    everyone: list[list[float]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, own)
    return max(everyone)


def _once(fn: Callable[[], object], device: torch.device, queue: bool) -> float:
    meet(device)
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
