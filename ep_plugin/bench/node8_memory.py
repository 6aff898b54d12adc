"""The memory of ``node8``: peak of a stack of MoE layers without EP and at an EP degree (report, Table 6, equation 9).

The model and its step are those of ``ep-bench step``; where EP spans fewer ranks than there are, the experts' gradients
are summed over their replicas. Expected at EP_MP = M, from the run without EP,

    parameters of experts on a rank   P_E / M
    peak                              peak without EP − (1 − 1/M) · P_E · B

with B bytes for a parameter's weight, its gradient and both moments of AdamW.
"""

from __future__ import annotations

import argparse
import functools
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..config import EPConfig
from ..dispatch import Dispatcher, build_dispatcher
from ..topology import ProcessGroups
from .inputs import Inputs, backend
from .step import NO_EP, Step
from .timing import measure

TENSORS_OF_A_PARAMETER = 4  # weight, gradient, two moments
GIB = 1 << 30


@dataclass
class Memory:
    """One way's figures, the largest over ranks: parameters and bytes of a rank, milliseconds of a step of one
    microbatch.

    ``state``: weights, gradients and moments. ``peak``: the most that tensors took from torch's allocator since before
    the model was made. ``heap``: symmetric memory beside it."""

    ep: int
    backend: str
    expert_parameters: int
    bytes_per_parameter: int
    state: int
    peak: int
    heap: int
    step_ms: float
    tokens_per_s: float

    @property
    def total(self) -> int:
        """Bytes of a rank."""
        return self.peak + self.heap


@dataclass
class Expected:
    """What equation 9 makes of the run without EP; units as in ``Memory``."""

    expert_parameters: int
    state: int
    total: int


def expected(without: Memory, ep: int) -> Expected:
    """At the degree ``ep``; see the top of this file."""
    kept = without.expert_parameters // ep
    saved = (without.expert_parameters - kept) * without.bytes_per_parameter
    return Expected(kept, without.state - saved, without.total - saved)


class FoldedStep(Step):
    """A step whose experts are spread over EP_MP and replicated over EP_DP; ``groups`` None: no EP."""

    def __init__(
        self,
        name: str,
        dispatcher: Dispatcher[Any],
        inputs: Inputs,
        args: argparse.Namespace,
        groups: ProcessGroups | None,
    ) -> None:
        super().__init__(name, dispatcher, inputs, args, ep=groups is not None)
        self.groups = groups

    def sync(self) -> None:
        super().sync()
        if self.groups is not None:
            # What all of EP_MP sent is in it already: over the replicas, then divided by the whole DP degree.
            dist.all_reduce(self.own, group=self.groups.ep_dp)
            self.own /= dist.get_world_size()

    @property
    def expert_parameters(self) -> int:
        return sum(p.numel() for layer in self.layers for p in layer.experts.parameters())

    @property
    def state(self) -> int:
        """Bytes of weights, gradients and moments as they are, not as they should be."""
        tensors = [t for p in self.parameters for t in (p, p.grad) if t is not None]
        tensors += [t for kept in self.optimizer.state.values() for t in kept.values() if t.numel() > 1]
        return sum(t.numel() * t.element_size() for t in tensors)


def measure_memory(name: str, groups: ProcessGroups | None, args: argparse.Namespace, device: torch.device) -> Memory:
    """Train two steps over the backend ``name`` on the EP groups of ``groups`` (None: no EP); collective over WORLD."""
    inputs = Inputs.make(args, device)
    made: dict[str, Any] = {}

    def train() -> None:
        made["dispatcher"] = dispatcher = build_dispatcher(
            _config(name, groups, args),
            **inputs.shape,
            dtype=inputs.x.dtype,
            group=None if groups is None else groups.ep_mp,
            device=device,
        )
        made["step"] = step = FoldedStep(name, dispatcher, inputs, args, groups)
        for _ in range(2):
            step.whole(1)
        dispatcher.check()

    peak = peak_of(train, device)
    dispatcher, step = made["dispatcher"], made["step"]
    heap = getattr(dispatcher, "heap", None)
    symmetric = 0 if heap is None else sum(buffer.nbytes for buffer in heap._buffers)
    ms = measure(functools.partial(step.whole, 1), device, repeats=args.repeats, warmup=1, queue=False).median
    largest = torch.tensor([step.expert_parameters, step.state, peak, symmetric])
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    dispatcher.close()
    parameters, state, most, of_heap = largest.tolist()
    return Memory(
        ep=1 if groups is None else groups.layout.ep,
        backend=name,
        expert_parameters=parameters,
        bytes_per_parameter=TENSORS_OF_A_PARAMETER * inputs.x.element_size(),
        state=state,
        peak=most,
        heap=of_heap,
        step_ms=ms,
        tokens_per_s=args.tokens / ms * 1e3,
    )


def _config(name: str, groups: ProcessGroups | None, args: argparse.Namespace) -> EPConfig:
    if groups is None:
        return EPConfig(dispatcher="local")
    config = backend(name, heap=args.heap, max_tokens=args.tokens, slots=args.layers)
    # Uniform routes give a rank T·K rows, give or take √(T·K).
    config.capacity.factor = 1 + round(8 * (args.tokens * args.top_k) ** -0.5 + 0.005, 2)
    return config


def peak_of(fn: Callable[[], None], device: torch.device) -> int:
    """The most bytes that tensors on ``device`` took at a time during ``fn``, beyond those that were there before."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        fn()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        fn()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    events = sorted((e for e in events if e.get("name") == "[memory]"), key=lambda e: float(e["ts"]))
    if not events:
        return 0
    # The profiler's sum keeps what an earlier profile saw made and did not see freed.
    before = events[0]["args"]["Total Allocated"] - events[0]["args"]["Bytes"]
    return int(max(e["args"]["Total Allocated"] for e in events) - before)


def told(memory: Memory, without: Memory | None) -> str:
    """One line for people: a way's figures and, where the run without EP is there, what it makes expect."""
    way = NO_EP if memory.ep == 1 else f"EP{memory.ep} {memory.backend}"
    line = (
        f"{way:18s} experts {memory.expert_parameters / 1e6:9.3f} M parameters   state {memory.state / GIB:8.4f} GiB"
        f"   peak {memory.peak / GIB:8.4f} + heap {memory.heap / GIB:.4f} GiB   {memory.tokens_per_s:.0f} tokens/s/rank"
    )
    if without is None or memory.ep == 1:
        return line
    e = expected(without, memory.ep)
    return (
        f"{line}\n{'  by equation 9':18s} experts {e.expert_parameters / 1e6:9.3f} M parameters   state"
        f" {e.state / GIB:8.4f} GiB   peak {e.total / GIB:8.4f} GiB"
        f" (measured {(memory.total - e.total) / GIB:+.4f}, saved {(without.total - memory.total) / GIB:.4f})"
    )
