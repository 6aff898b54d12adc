"""One recorded case: the same steps, on a GPU while they are recorded and on CPU while they are replayed."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ep_plugin.dispatch.deepep import DeepEPDispatcher
from tests.deepep_recording import CASES, MOST, SHAPE
from tests.moe import Problem, make_inputs


def problem_of(case: str) -> Problem:
    return Problem(**SHAPE, dtype=torch.bfloat16, weight_dtype=torch.float32, **CASES[case])  # type: ignore[arg-type]


def build(case: str, library: Any, device: torch.device) -> DeepEPDispatcher:
    problem = problem_of(case)
    config = problem.config("deepep", "output" if case == "weighted sum" else "hidden", max_tokens=MOST)
    return DeepEPDispatcher(
        config, group=dist.group.WORLD, library=library, num_experts=problem.num_experts, top_k=problem.top_k,
        hidden_size=problem.hidden, dtype=problem.dtype, device=device, rank=dist.get_rank(),
        world=dist.get_world_size(),
    )  # fmt: skip


def step(case: str, dispatcher: DeepEPDispatcher) -> dict[str, Tensor]:
    """Forward and backward around experts that double their rows, which every device does alike."""
    inputs = make_inputs(problem_of(case))[dispatcher.rank]
    x, idx, weight, upstream = (t.to(dispatcher.device) for t in vars(inputs).values())
    x, weight = x.requires_grad_(), weight.requires_grad_()
    state = dispatcher.plan(idx, layer=case)
    d = dispatcher.dispatch(state, x, weight)
    weighted = dispatcher.config.weight_at == "output"
    y = d.rows * 2
    if not weighted:  # the weights' gradient is one column of the rows', without a sum
        y = torch.cat([y[:, :1] + d.weights.unsqueeze(1).to(y.dtype), y[:, 1:]], 1)
    out = dispatcher.combine(state, y, d.weights if weighted else None)
    out.backward(upstream)
    valid = int(d.offsets[-1])
    assert x.grad is not None and weight.grad is not None and d.route_of_row is not None
    return {
        "rows": d.rows[:valid].detach(), "weights": d.weights[:valid].detach(), "offsets": d.offsets,
        "route_of_row": d.route_of_row[:valid], "out": out.detach(), "dx": x.grad, "dweight": weight.grad,
    }  # fmt: skip
