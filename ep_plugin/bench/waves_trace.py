"""Which kernels of a step run beside which, from a trace of the profiler (report, equation 10 and Figure 23).

A kernel is communication if it was launched in a movement of rows (plan, dispatch, combine and their backward), else it
belongs to the experts. T of either is the time in which at least one such kernel runs. Kernels that only wait for a
peer do not count: they would make whatever they wait for look like communication.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from .spans import LAUNCHES, ON_DEVICE, Trace, _ranges, record

WAITS = ("_wait", "_receive")  # names of kernels that wait for peers (kernels.sync_triton)
SPIN = "spin_kernel"  # of torch.cuda._sleep
SPIN_CYCLES = 200_000_000  # a tenth of a second: the host enqueues a whole step, slowed by the profiler
MOVEMENTS = ("plan", "dispatch", "combine", "combine backward", "dispatch backward")

Intervals = list[tuple[float, float]]


@dataclass
class Kernel:
    """Milliseconds since the step's first kernel; ``what``: the phase it was launched in, "" for autograd's own."""

    what: str
    stream: Any
    begin: float
    end: float

    @property
    def moves(self) -> bool:
        return self.what in MOVEMENTS


@dataclass
class Account:
    """One step of a schedule: milliseconds in which communication runs, experts run, both run, and of the whole."""

    schedule: dict[str, Any]
    comm: float
    gemm: float
    both: float
    whole: float
    kernels: list[Kernel] = field(default_factory=list)

    @property
    def exposed(self) -> float:
        """Milliseconds in which communication runs alone."""
        return self.comm - self.both

    def against(self, wave: Account) -> str:
        """Equation 10 in words: this step without waves, ``wave`` with them."""
        hidden = 0.0 if not wave.comm else wave.both / wave.comm
        return (
            f"T_comm {self.comm:.3f} -> {wave.comm:.3f} ms, T_gemm {self.gemm:.3f} -> {wave.gemm:.3f} ms"
            f" ({100 * (wave.gemm / max(self.gemm, 1e-9) - 1):+.1f} %), whole {self.whole:.3f} -> {wave.whole:.3f} ms;"
            f" {100 * hidden:.0f} % of the schedule's communication runs beside experts"
        )


def account(fn: Callable[[], object], device: torch.device, schedule: dict[str, Any]) -> Account:
    """Collective: record three calls of ``fn``, each behind an idle kernel that lets the host get ahead, and account
    for the one of middle length."""

    def ahead() -> None:
        if device.type == "cuda":
            torch.cuda._sleep(SPIN_CYCLES)
        fn()

    found = [account_of(kernels, schedule) for kernels in kernels_of(record(ahead, device, calls=3))]
    return sorted(found, key=lambda a: a.whole)[len(found) // 2]


def kernels_of(trace: Trace) -> list[list[Kernel]]:
    """The kernels of every step of a trace of ``spans.record``; on CPU, where there are none, the spans themselves."""
    events = trace["traceEvents"]
    ranges = _ranges(events)
    starts = [r.start for r in ranges]
    launches = {e["args"].get("correlation"): float(e["ts"]) for e in events if e.get("cat") in LAUNCHES}
    work: list[tuple[Any, Any, float, float]] = []  # range, stream, begin, end
    for event in events:
        if event.get("cat") not in ON_DEVICE or event["name"].startswith(WAITS) or SPIN in event["name"]:
            continue
        time = launches.get(event["args"].get("correlation"))
        place = -1 if time is None else bisect_right(starts, time) - 1
        owner = None if time is None or place < 0 else ranges[place].innermost(time)
        if owner is not None:
            begin = float(event["ts"])
            work.append((owner, event["args"].get("stream"), begin, begin + float(event["dur"])))
    if not work:
        work = [(r, "host", r.start, r.end) for r in ranges if r.parent is not None and r.parent.parent is None]
    steps: dict[int, list[tuple[str, Any, float, float]]] = {}
    for owner, stream, begin, end in work:
        steps.setdefault(id(_root(owner)), []).append((owner.path.partition(" > ")[0], stream, begin, end))
    return [_since_the_first(step) for step in steps.values()]


def _since_the_first(step: list[tuple[str, Any, float, float]]) -> list[Kernel]:
    first = min(begin for _, _, begin, _ in step)
    kernels = [Kernel(p, s, (begin - first) / 1e3, (end - first) / 1e3) for p, s, begin, end in step]
    return sorted(kernels, key=lambda k: k.begin)


def _root(one: Any) -> Any:
    while one.parent is not None:
        one = one.parent
    return one


def account_of(kernels: list[Kernel], schedule: dict[str, Any]) -> Account:
    """The times of one step's ``kernels``."""
    comm = union([(k.begin, k.end) for k in kernels if k.moves])
    gemm = union([(k.begin, k.end) for k in kernels if not k.moves])
    whole = max((k.end for k in kernels), default=0.0) - min((k.begin for k in kernels), default=0.0)
    return Account(schedule, length(comm), length(gemm), length(intersection(comm, gemm)), whole, kernels)


def union(intervals: Intervals) -> Intervals:
    """Disjoint ascending intervals that cover the same."""
    found: Intervals = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


def intersection(a: Intervals, b: Intervals) -> Intervals:
    """Where both of two lists of disjoint ascending intervals are."""
    found: Intervals = []
    i = j = 0
    while i < len(a) and j < len(b):
        begin, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if begin < end:
            found.append((begin, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return found


def length(intervals: Intervals) -> float:
    """The sum of the intervals' lengths."""
    return sum(end - begin for begin, end in intervals)
