"""Profiles of a benchmark: the time of every named range, and traces for Perfetto.

A trace is what ``torch.profiler`` writes: Chrome's trace-event JSON. Times are in microseconds there, in milliseconds
here.
"""

from __future__ import annotations

import json
import re
import tempfile
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ..dispatch.spans import span

Trace = dict[str, Any]
STEP = "step"  # the range around each profiled call
LAUNCHES, ON_DEVICE = ("cuda_runtime", "cuda_driver"), ("kernel", "gpu_memcpy", "gpu_memset")


@dataclass
class Span:
    """One named range, mean per call, without the ranges inside it: the spans of a step add up to the step.

    ``path``: the phase, then what it does inside ("dispatch > put"); "" is what no range covers. ``host_ms``: on the
    host's clock. ``device_ms``: what it launched, on the caller's stream or while that one had nothing to do (NCCL's
    collectives, which have a stream of their own); ``side_ms``: on other streams, hidden by the caller's. Both are 0 on
    CPU."""

    path: str
    host_ms: float = 0.0
    device_ms: float = 0.0
    side_ms: float = 0.0


class _Work(NamedTuple):
    """A kernel or copy on a device."""

    stream: Any
    start: float
    end: float


@dataclass
class _Range:
    path: str
    start: float
    end: float
    parent: _Range | None
    host: float = 0.0
    launched: list[_Work] = field(default_factory=list)

    def innermost(self, time: float) -> _Range | None:
        """Of this range and those around it, the innermost that is open at ``time``."""
        here: _Range | None = self
        while here is not None and here.end <= time:
            here = here.parent
        return here


def meet(device: torch.device) -> None:
    """Ranks and their devices have done everything so far."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    if dist.is_initialized():
        dist.barrier()


def record(fn: Callable[[], object], device: torch.device, calls: int = 5) -> Trace:
    """The trace of ``calls`` calls of ``fn``, which all ranks make together."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    meet(device)
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(calls):
            meet(device)
            with span(STEP):
                fn()
        meet(device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        trace: Trace = json.loads(path.read_text())
    return trace


def read_spans(trace: Trace) -> list[Span]:
    """Every range of a trace of ``record``, in the order they first begin; "" last.

    A kernel belongs to the innermost range that was open when the host launched it.
    """
    events = trace["traceEvents"]
    ranges = _ranges(events)
    _assign_work(ranges, events)
    main = _main_stream(ranges)
    busy = _union([w for r in ranges for w in r.launched if w.stream == main])
    calls = sum(r.parent is None for r in ranges)
    spans = {path: Span(path) for path in dict.fromkeys(r.path for r in ranges)}
    for r in ranges:
        s = spans[r.path]
        s.host_ms += r.host / calls / 1e3
        for work in r.launched:
            hidden = 0.0 if work.stream == main else _overlap(work, busy)
            s.device_ms += (work.end - work.start - hidden) / calls / 1e3
            s.side_ms += hidden / calls / 1e3
    return sorted(spans.values(), key=lambda s: s.path == "")


def _assign_work(ranges: list[_Range], events: list[dict[str, Any]]) -> None:
    """Give every kernel and copy to the innermost range in which the host launched it."""
    starts = [r.start for r in ranges]
    launches = {e["args"].get("correlation"): float(e["ts"]) for e in events if e.get("cat") in LAUNCHES}
    for event in events:
        time = launches.get(event["args"].get("correlation")) if event.get("cat") in ON_DEVICE else None
        place = -1 if time is None else bisect_right(starts, time) - 1
        if time is None or place < 0:
            continue
        owner, start = ranges[place].innermost(time), float(event["ts"])
        if owner is not None:
            owner.launched.append(_Work(event["args"].get("stream"), start, start + float(event["dur"])))


def _ranges(events: list[dict[str, Any]]) -> list[_Range]:
    """The steps of a trace and the ranges inside them, by start. Autograd's thread runs while the caller waits, so
    that times alone say what is inside what."""
    named = [e for e in events if e.get("cat") == "user_annotation" and e.get("name", "").startswith("ep/")]
    ranges: list[_Range] = []
    for event in sorted(named, key=lambda e: (float(e["ts"]), -float(e["dur"]))):
        start, name = float(event["ts"]), event["name"].removeprefix("ep/").split("/")[0]  # without the layer
        parent = ranges[-1].innermost(start) if ranges else None
        if parent is None and name != STEP:
            continue
        path = "" if parent is None else f"{parent.path} > {name}".removeprefix(" > ")
        new = _Range(path, start, start + float(event["dur"]), parent, float(event["dur"]))
        if parent is not None:
            parent.host -= new.host
        ranges.append(new)
    return ranges


def _main_stream(ranges: list[_Range]) -> Any:
    """The caller's stream: the one that most ranges use."""
    uses = Counter(stream for _, stream in {(r.path, w.stream) for r in ranges for w in r.launched})
    return max(uses, key=lambda stream: uses[stream], default=None)


def _union(work: list[_Work]) -> list[tuple[float, float]]:
    """When any of ``work`` runs: disjoint intervals, ascending."""
    found: list[tuple[float, float]] = []
    for _, start, end in sorted(work, key=lambda w: w.start):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def union_of(trace: Trace, kind: re.Pattern[str]) -> list[tuple[float, float]]:
    """When any kernel or copy whose name matches ``kind`` runs, microseconds: disjoint intervals, ascending."""
    events = (e for e in trace["traceEvents"] if e.get("cat") in ON_DEVICE and kind.search(e["name"]))
    return _union([_Work(None, float(e["ts"]), float(e["ts"]) + float(e["dur"])) for e in events])


def _overlap(work: _Work, busy: list[tuple[float, float]]) -> float:
    """How long ``work`` runs inside the intervals ``busy``."""
    first = max(0, bisect_right(busy, (work.start, float("inf"))) - 1)
    total = 0.0
    for start, end in islice(busy, first, None):
        if start >= work.end:
            break
        total += max(0.0, min(end, work.end) - max(start, work.start))
    return total


def mean_over_ranks(own: list[Span]) -> list[Span]:
    """Collective: the mean of every rank's spans, on all ranks."""
    if not dist.is_initialized():
        return own
    world = dist.get_world_size()
    gathered: list[list[Span]] = [[] for _ in range(world)]
    dist.all_gather_object(gathered, own)
    mean: dict[str, Span] = {}
    for s in (s for spans in gathered for s in spans):
        m = mean.setdefault(s.path, Span(s.path))
        m.host_ms += s.host_ms / world
        m.device_ms += s.device_ms / world
        m.side_ms += s.side_ms / world
    return sorted(mean.values(), key=lambda s: s.path == "")


def gather_traces(own: list[Trace]) -> Trace | None:
    """Collective: one trace of all that all ranks recorded, on rank 0; None elsewhere."""
    rank, world = dist.get_rank(), dist.get_world_size()
    gathered: list[list[Trace]] | None = [[] for _ in range(world)] if rank == 0 else None
    dist.gather_object(own, gathered)
    return None if gathered is None else merge(gathered)


def merge(by_rank: list[list[Trace]]) -> Trace:
    """One trace of every rank's traces, on one clock; processes and devices are named by their rank."""
    first = by_rank[0][0]
    base = first.get("baseTimeNanoseconds", 0)
    events: list[dict[str, Any]] = []
    for rank, traces in enumerate(by_rank):
        processes: dict[Any, int] = {}
        for number, trace in enumerate(traces):
            shift = (trace.get("baseTimeNanoseconds", 0) - base) / 1e3
            for event in map(dict, trace["traceEvents"]):
                if "pid" in event:
                    event["pid"] = processes.setdefault(event["pid"], rank * 1000 + len(processes))
                if "ts" in event:
                    event["ts"] = float(event["ts"]) + shift
                if "id" in event:  # of the arrow from a launch to its kernel
                    event["id"] = f"{rank}:{number}:{event['id']}"
                if event.get("name") == "process_name":
                    event["args"] = {"name": f"rank {rank}: {event['args']['name']}"}
                if event.get("name") == "process_sort_index":
                    event["args"] = {"sort_index": rank}
                events.append(event)
    return {**first, "traceEvents": events}
