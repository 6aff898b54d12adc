"""``ep-bench layer``: a whole MoE step of every backend, forward and backward, with each phase's time and a trace.

The step is ``moe_step`` with this project's experts: plan, dispatch, experts, combine. The router is not in it. All
backends apply the router weight inside the experts, so that they do the same matrix products.

Legend: T tokens of a rank, K routes per token, D hidden size, F expert width.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..config import LaunchConfig
from ..dispatch import Dispatcher, build_dispatcher
from ..experts import GroupedMLP
from ..layer import moe_step
from .dispatch import print_spans, room
from .inputs import Inputs, backend
from .spans import Trace, gather_traces, mean_over_ranks, read_spans, record
from .timing import measure, measure_host

REST = "experts backward and autograd"  # what no span covers in a step


class Step:
    """One MoE layer of ``dispatcher`` and its training step on a rank's ``inputs``."""

    def __init__(self, name: str, dispatcher: Dispatcher[Any], inputs: Inputs, width: int) -> None:
        self.name, self.dispatcher, self.inputs = name, dispatcher, inputs
        x, local = inputs.x, dispatcher.num_local_experts
        # Initial values that every sharding shares are drawn on the host, which takes long for large experts.
        experts = GroupedMLP(local, dispatcher.hidden_size, width, dtype=x.dtype, device="meta")
        self.experts = experts.to_empty(device=x.device)
        for parameter in self.experts.parameters():
            torch.nn.init.normal_(parameter, std=parameter.shape[2] ** -0.5)
        self.x, self.weight = x.clone().requires_grad_(), inputs.weight.clone().requires_grad_()
        self.grad = torch.randn_like(x)

    def forward(self) -> Tensor:
        return moe_step(self.dispatcher, self.x, self.inputs.idx, self.weight, self.experts, layer=self.name)

    def step(self) -> None:
        for tensor in (self.x, self.weight, *self.experts.parameters()):
            tensor.grad = None
        self.forward().backward(self.grad)


def run(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Collective. Prints a table on rank 0, writes the trace if asked for, and returns the figures."""
    inputs = Inputs.make(args, device)
    result = inputs.describe(args) | {"width": args.width}
    # A product of each row with both projections, the up one twice as wide for its gate; two more each in backward.
    result["flops"] = 18 * int((inputs.idx >= 0).sum()) * args.hidden * args.width
    traces = []
    for name in args.backends.split(","):
        config = backend(name, heap=args.heap, max_tokens=args.tokens, launch=LaunchConfig(table=args.table))
        config.capacity.factor = room(inputs.idx, dist.get_world_size(), args.experts)
        dispatcher = build_dispatcher(config, **inputs.shape, dtype=inputs.x.dtype, device=device)
        figures, trace = measure_layer(Step(name, dispatcher, inputs, args.width), repeats=args.repeats)
        dispatcher.check()
        dispatcher.close()
        figures["tflops"] = result["flops"] / figures["step_ms"] / 1e9
        result["backends"][name] = figures
        traces.append(trace)
        if dist.get_rank() == 0:
            _print(name, figures)
    if args.trace is not None:
        trace_of_all = gather_traces(traces)
        if trace_of_all is not None:
            Path(args.trace).write_text(json.dumps(trace_of_all))
    return result


def measure_layer(step: Step, *, repeats: int) -> tuple[dict[str, Any], Trace]:
    """Milliseconds of the forward and of the whole step, on the device and for the host to issue; the spans of a step;
    and the trace they were read from.

    On CPU device and host are one."""
    device, queue = step.x.device, step.dispatcher.name != "block"
    forward = measure(step.forward, device, repeats=repeats, queue=queue)
    whole = measure(step.step, device, repeats=repeats, queue=queue)
    trace = record(step.step, device, calls=3)
    figures: dict[str, Any] = {
        "forward": forward.as_dict(),
        "step": whole.as_dict(),
        "forward_ms": forward.median,
        "step_ms": whole.median,
        "backward_ms": whole.median - forward.median,
        "host_ms": measure_host(step.step, device, repeats=repeats) if device.type == "cuda" else whole.median,
        "spans": [asdict(s) for s in mean_over_ranks(read_spans(trace))],
    }
    return figures, trace


def _print(name: str, figures: dict[str, Any]) -> None:
    print(
        f"{name:14s} forward {figures['forward_ms']:8.3f} ms   backward {figures['backward_ms']:8.3f} ms   step"
        f" {figures['step_ms']:8.3f} ms ({figures['tflops']:.3g} TFLOP/s of the experts)   host"
        f" {figures['host_ms']:8.3f} ms"
    )
    print_spans(figures["spans"], REST)
