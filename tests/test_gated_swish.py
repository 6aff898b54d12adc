"""The fused gated activation: kernels against their references, references and node against plain autograd."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ep_plugin.dispatch.base import Dispatched
from ep_plugin.experts import Activation, GroupedMLP, weighted_activation
from ep_plugin.kernels.gated_swish import GatedSwish, gated_swish_backward_torch, gated_swish_torch
from tests import dist
from tests.gated_swish_cases import SHAPES

R, WIDTH = 13, 24


@pytest.mark.parametrize("name", SHAPES)
def test_references_are_the_activations_that_experts_name(name: str) -> None:
    """A wrong term of the gradient, a clamp on the wrong side, halves or weights exchanged."""
    shape = SHAPES[name]
    g = torch.Generator().manual_seed(0)
    up = (torch.randn(R, 2 * WIDTH, generator=g) * 2).requires_grad_()
    weights, dhidden = torch.rand(R, generator=g).requires_grad_(), torch.randn(R, WIDTH, generator=g)
    if shape == GatedSwish(interleaved=shape.interleaved):
        activation = Activation(interleaved=shape.interleaved)
    else:
        activation = Activation.clamped_swiglu(limit=2.0, interleaved=shape.interleaved)
    assert activation.gated_swish == shape
    hidden = activation(up) * weights[:, None]
    dup, dweights = torch.autograd.grad(hidden, (up, weights), dhidden)
    torch.testing.assert_close(gated_swish_torch(up.detach(), weights.detach(), shape), hidden.detach())
    ours = gated_swish_backward_torch(up.detach(), dhidden, weights.detach(), shape)
    torch.testing.assert_close(ours[0], dup)
    torch.testing.assert_close(ours[1], dweights)


def test_only_activations_that_the_kernels_compute_are_given_to_them() -> None:
    """Another function computed as SwiGLU."""
    assert Activation("swish").gated_swish == Activation(function=F.silu).gated_swish == GatedSwish()
    assert Activation(function=torch.nn.SiLU()).gated_swish == GatedSwish()
    assert Activation("quick_gelu", limit=3.0).gated_swish == GatedSwish(1.702, 3.0)
    others = (
        Activation("gelu"),
        Activation("silu", gated=False),
        Activation(function=torch.sigmoid),
        Activation(whole=lambda up: up[:, ::2]),
    )
    assert [a.gated_swish for a in others] == [None] * 4


class _Case:
    """bfloat16 experts over rows of which the device alone knows how many are valid; NaN past them."""

    def __init__(self, activation: Activation, *, recompute: bool) -> None:
        g = torch.Generator().manual_seed(3)
        self.valid, bound, hidden = 11, R, 16
        rows, weights = torch.randn(bound, hidden, generator=g).bfloat16(), torch.rand(bound, generator=g)
        rows[self.valid :], weights[self.valid :] = float("nan"), float("nan")
        offsets = torch.tensor([0, 4, 4, self.valid])
        self.d = Dispatched(rows.requires_grad_(), weights.requires_grad_(), offsets, None)
        self.mlp = GroupedMLP(
            3, hidden, WIDTH, activation=activation, seed=1, dtype=torch.bfloat16, recompute_hidden=recompute
        )
        self.dy = torch.randn(bound, hidden, generator=g).bfloat16()
        self.dy[self.valid :] = float("nan")

    def gradients(self, y: Tensor, **options: bool) -> list[Tensor]:
        inputs = (self.d.rows, self.d.weights, *self.mlp.parameters())
        return list(torch.autograd.grad(y, inputs, self.dy, **options))


def _experts_with_kernels(rank: int, world: int) -> None:
    from ep_plugin.experts import activation as module
    from ep_plugin.kernels import gated_swish_triton as kernels

    launch, launched = kernels.gated_swish, []

    def counted(*args: Any, **options: Any) -> None:
        launched.append(args)
        launch(*args, **options)

    kernels.gated_swish = counted
    activations = [Activation(), Activation("quick_gelu"), Activation.clamped_swiglu(limit=0.5)]
    for activation in activations:
        for recompute in (False, True):
            case = _Case(activation, recompute=recompute)
            v = case.valid
            module.KERNEL_DEVICES = ("cuda",)
            plain = case.mlp(case.d, "hidden")
            expected = case.gradients(plain)
            module.KERNEL_DEVICES = ("cuda", "cpu")
            y = case.mlp(case.d, "hidden")
            first = case.gradients(y, retain_graph=True)
            second = case.gradients(y)  # the first must have left what the second reads
            assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
            again = checkpoint(
                lambda rows, c=case: c.mlp(replace(c.d, rows=rows), "hidden"), case.d.rows, use_reentrant=False
            )
            recomputed = case.gradients(again)
            assert all(torch.equal(a, b) for a, b in zip(first, recomputed, strict=True))
            for ours, theirs in zip([y[:v], *first], [plain[:v], *expected], strict=True):
                assert ours.isfinite().all()
                torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2 * float(theirs.detach().abs().max()))
            assert not first[0][v:].any() and not first[1][v:].any()
            assert len(launched) == (6 if recompute else 3)
            launched.clear()

    up = torch.randn(R, 2 * WIDTH).bfloat16().requires_grad_()
    owned = up * 1
    (dup,) = torch.autograd.grad(
        weighted_activation(owned, None, torch.tensor([0, R]), Activation(), consume=True).sum(), owned
    )
    assert dup.data_ptr() == owned.data_ptr(), "the gradient takes the place of what nobody reads again"
    # What a caller owns is not written to, even in the last backward.
    up, weights = torch.randn(R, 2 * WIDTH).bfloat16().requires_grad_(), torch.rand(R)
    before, offsets = up.detach().clone(), torch.tensor([0, R])
    weighted_activation(up, weights, offsets, Activation()).sum().backward()
    assert torch.equal(up.detach(), before) and up.grad is not None
    with torch.no_grad():
        halves = weighted_activation(up[::2], None, torch.tensor([0, 7]), Activation())  # rows that do not lie together
    torch.testing.assert_close(halves, weighted_activation(up, None, offsets, Activation()).detach()[::2])


def _kernels(rank: int, world: int) -> None:
    """Of two processes the first looks at the kernels alone, the second at experts that use them."""
    import warnings

    from ep_plugin.kernels import scale_rows
    from tests.gated_swish_cases import check_all

    warnings.simplefilter("ignore")  # numpy's, on NaN and Inf
    scale_rows.KERNEL_DEVICES = ("cuda", "cpu")
    if rank == 0:
        check_all("cpu", thorough=False)
    else:
        _experts_with_kernels(rank, world)


def test_kernels_equal_their_references_bit_for_bit() -> None:
    """A wrong rounding, column, row bound or sum in a kernel; memory that a second backward or its owner still needs
    is written; a recomputed hidden row differs."""
    pytest.importorskip("triton")
    dist.run_apart(_kernels, 2, TRITON_INTERPRET="1")


def _compiled(rank: int, world: int) -> None:
    import triton.runtime
    from triton.backends.compiler import GPUTarget
    from triton.runtime.jit import JITFunction

    class Hopper:
        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int) -> int:
            return 0

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", 90, 32)

    triton.runtime.driver.set_active(Hopper())
    run, found = JITFunction.run, []

    def compile_only(self, *args, grid, warmup, **kwargs):
        found.append(run(self, *args, grid=grid, warmup=True, **kwargs))
        return found[-1]

    JITFunction.run = compile_only
    from ep_plugin.kernels.gated_swish_triton import gated_swish, gated_swish_backward

    rows, width = 64, 2048
    up, hidden = (torch.zeros(rows, w, dtype=torch.bfloat16) for w in (2 * width, width))
    weights, count = torch.zeros(rows), torch.zeros(1, dtype=torch.int64)
    for name, shape in SHAPES.items():
        gated_swish(up, weights, hidden, shape, num_rows=count)
        gated_swish_backward(up, weights, hidden, shape, dup=up, dweights=weights, num_rows=count)
        assert len(found) == 2
        for kernel in found:
            ptx = kernel.asm["ptx"]
            assert kernel.asm["cubin"]
            for operation in ("ld", "st"):
                widths = re.findall(rf"\b{operation}\.global(?:\.v([24]))?\.b(\d+)", ptx)
                sizes = {int(vector or 1) * int(bits) // 8 for vector, bits in widths}
                assert 16 in sizes and not sizes & {1, 2}, f"{name}: {operation} of {sizes} bytes"
            assert not re.search(r"\bfma\.rn\.(bf16|f16|f32)", ptx), f"{name} fuses a product with a sum"
        found.clear()


@pytest.mark.slow
def test_kernels_compile_for_hopper() -> None:
    """Code that only the interpreter takes; rows that move 2 bytes at a time; fused sums, which are not torch's."""
    pytest.importorskip("triton")
    dist.run_apart(_compiled, 1, TRITON_INTERPRET="0")
