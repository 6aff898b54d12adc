"""The fused gated activation on a GPU: kernels against the CPU references bit for bit, and the experts over them."""

from __future__ import annotations

import pytest
import torch

from ep_plugin.experts import Activation, weighted_activation
from ep_plugin.experts import activation as experts_activation
from ep_plugin.kernels.gated_swish import GatedSwish, gated_swish_backward_torch, gated_swish_torch
from tests import gated_swish_cases

Ranks = tuple[int, int, torch.device]


def test_kernels_equal_the_cpu_references(ranks: Ranks) -> None:
    """A GPU that rounds, flushes or treats NaN otherwise; rows past the valid ones that are touched."""
    with torch.cuda.device(ranks[2]):
        gated_swish_cases.check_all(f"cuda:{ranks[2].index}", thorough=True)


def test_more_elements_than_32_bits_count(ranks: Ranks) -> None:
    """A row offset in 32 bits: 2^31 elements of up are passed at row 524,288 of 2 x 2048."""
    from ep_plugin.kernels.gated_swish_triton import gated_swish, gated_swish_backward

    device, width, rows, last = ranks[2], 2048, 524_288 + 300, 300
    g = torch.Generator().manual_seed(0)
    tail = torch.randn(last, 2 * width, generator=g).bfloat16()
    dtail, weights = torch.randn(last, width, generator=g).bfloat16(), torch.rand(last, generator=g)
    up = torch.zeros(rows, 2 * width, dtype=torch.bfloat16, device=device)
    dhidden, hidden = (torch.zeros(rows, width, dtype=torch.bfloat16, device=device) for _ in range(2))
    by_row = torch.ones(rows, device=device)
    up[-last:], dhidden[-last:], by_row[-last:] = tail.to(device), dtail.to(device), weights.to(device)
    shape = GatedSwish()
    gated_swish(up, by_row, hidden, shape)
    gated_swish_cases.same(hidden[-last:], gated_swish_torch(tail, weights).bfloat16(), "hidden")
    assert not hidden[:-last].any()
    gated_swish_backward(up, by_row, dhidden, shape, dup=up)
    want, _ = gated_swish_backward_torch(tail, dtail, weights)
    gated_swish_cases.same(up[-last:], want.bfloat16(), "dup, in place")
    assert not up[:-last].any()


@pytest.mark.parametrize("activation", [Activation(), Activation.clamped_swiglu()], ids=["swiglu", "gpt_oss"])
def test_experts_take_the_kernels(ranks: Ranks, activation: Activation) -> None:
    """The torch operations run on GPUs, or the kernels give other numbers than they."""
    device = ranks[2]
    up = torch.randn(600, 1024, device=device, dtype=torch.bfloat16, requires_grad=True)
    weights = torch.rand(600, device=device, requires_grad=True)
    offsets, dhidden = torch.tensor([0, 300, 513], device=device), torch.randn(600, 512, device=device).bfloat16()
    results = []
    for devices in ((), ("cuda",)):
        experts_activation.KERNEL_DEVICES = devices
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            hidden = weighted_activation(up, weights, offsets, activation)
            grads = torch.autograd.grad(hidden, (up, weights), dhidden)
            torch.cuda.synchronize(device)
        names = {e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA}
        assert any("gated_swish" in name for name in names) == bool(devices), names
        results.append([t[:513].detach() for t in (hidden, *grads)])
    for ours, theirs in zip(*reversed(results), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=1e-2 * float(theirs.abs().max()))
