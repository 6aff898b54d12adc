"""Kernels are compiled for shapes of a layer, not for numbers of tokens."""

from __future__ import annotations

import sys

import pytest
import torch

from ep_plugin.config import CapacityConfig, EPConfig
from ep_plugin.dispatch import build_dispatcher
from tests.gpu.step import Step

E, D, MOST = 16, 256, 300


def compiled() -> int:
    """Variants of our kernels in this process."""
    total = 0
    for name, module in list(sys.modules.items()):
        if not name.startswith("ep_plugin.kernels."):
            continue
        for function in vars(module).values():
            caches = getattr(function, "device_caches", None)
            if caches is not None and getattr(function, "__module__", None) == name:
                total += sum(len(entry[0]) for entry in caches.values())
    return total


@pytest.mark.parametrize("form", ["dedup", "route"])
def test_kernels_are_not_compiled_for_every_number_of_tokens(ranks, heap, form):
    """Fault (seen elsewhere): a compilation for each of the numbers of tokens from 1 to 300."""
    rank, world, device = ranks
    dispatcher = build_dispatcher(
        EPConfig(form=form, max_tokens=MOST), num_experts=E, top_k=4, hidden_size=D, dtype=torch.bfloat16,
        device=device, heap=heap,
    )  # fmt: skip

    def step(tokens: int) -> None:
        case = Step(tokens, world, device, max_tokens=tokens, hidden=D, dtype=torch.bfloat16, capacity=CapacityConfig())
        x = case.xs[rank].requires_grad_()
        weight = case.ws[rank].requires_grad_()
        state = dispatcher.plan(case.idxs[rank])
        d = dispatcher.dispatch(state, x, weight)
        dispatcher.combine(state, d.rows * d.weights.unsqueeze(1).to(d.rows.dtype)).sum().backward()

    for tokens in (1, 16, 31, 300):  # what Triton tells apart: 1, multiples of 16, the rest
        step(tokens)
    torch.cuda.synchronize()
    before = compiled()
    assert before > 0
    for tokens in range(1, MOST + 1, 7):
        step(tokens)
    torch.cuda.synchronize()
    assert compiled() <= before + 4
    dispatcher.check()
    dispatcher.close()
