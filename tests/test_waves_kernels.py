"""The kernels that put rows of a wave among those of the whole batch: under Triton's interpreter, and compiled for
Hopper."""

from __future__ import annotations

import re

import pytest
import torch

from tests import dist

pytest.importorskip("triton")


def _cases() -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]]:
    """rows [RB, D], targets [RB], out [any, D] and the number of valid rows."""
    g = torch.Generator().manual_seed(0)
    cases = []
    for rows, width, valid, bound in ((9, 64, 6, 12), (5, 33, 5, 5), (4, 2050, 0, 7)):
        targets = torch.randperm(bound, generator=g)[:rows]
        targets = torch.cat([targets, targets.new_full((max(0, rows - bound),), -1)])
        targets[valid:] = -1
        if valid > 2:
            targets[1] = -1
        values = torch.randn(rows, width, generator=g).to(torch.bfloat16)
        cases.append((values, targets, torch.full((bound, width), float("nan"), dtype=torch.bfloat16), valid))
    return cases


def _interpreted(rank: int, world: int) -> None:
    from ep_plugin.kernels.gated_swish import GatedSwish
    from ep_plugin.kernels.gated_swish_triton import gated_swish, gated_swish_backward
    from ep_plugin.kernels.scatter_rows import scatter_rows_torch
    from ep_plugin.kernels.scatter_rows_triton import scatter_rows

    for rows, targets, out, valid in _cases():
        want, count = out.clone(), torch.tensor([valid])
        scatter_rows_torch(rows, targets, want)
        scatter_rows(rows, targets, out, count)
        assert torch.equal(out.isnan(), want.isnan()) and torch.equal(out.nan_to_num(), want.nan_to_num())

    g = torch.Generator().manual_seed(1)
    for shape in (GatedSwish(), GatedSwish(1.702, 1.0, 1.0, True)):
        up, grad = torch.randn(6, 64, generator=g).bfloat16(), torch.randn(6, 32, generator=g).bfloat16()
        weights, count = torch.rand(6, generator=g), torch.tensor([4])
        dup, hidden = torch.zeros_like(up), torch.zeros_like(grad)
        gated_swish(up, weights, hidden, shape, num_rows=count)
        gated_swish_backward(up, weights, grad, shape, dup=dup, num_rows=count)
        targets = torch.tensor([7, -1, 0, 3, -1, -1])
        dup_placed, hidden_placed = torch.full((9, 64), 5.0).bfloat16(), torch.full((9, 32), 5.0).bfloat16()
        again, placed = torch.zeros_like(up), (targets, dup_placed, hidden_placed)
        gated_swish_backward(up, weights, grad, shape, dup=again, placed=placed, num_rows=count)
        assert torch.equal(again[:4], dup[:4])
        for got, rows in ((dup_placed, dup), (hidden_placed, hidden)):
            want = torch.full_like(got, 5.0)
            scatter_rows_torch(rows, targets, want)
            assert torch.equal(got, want), shape


def _compiled(rank: int, world: int) -> None:
    import triton.runtime
    from triton.backends.compiler import GPUTarget
    from triton.runtime.jit import JITFunction

    class Hopper:
        """A driver that knows its target and launches nothing."""

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int) -> int:
            return 0

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", 90, 32)

        def get_active_torch_device(self) -> torch.device:
            return torch.device("cpu")

    triton.runtime.driver.set_active(Hopper())
    launch, found = JITFunction.run, []

    def compile_only(self, *args, grid, warmup, **kwargs):
        found.append(launch(self, *args, grid=grid, warmup=True, **kwargs))
        return found[-1]

    JITFunction.run = compile_only
    from ep_plugin.kernels.gated_swish import GatedSwish
    from ep_plugin.kernels.gated_swish_triton import gated_swish_backward
    from ep_plugin.kernels.scatter_rows_triton import scatter_rows

    up, hidden = (torch.zeros(64, w, dtype=torch.bfloat16) for w in (1536, 768))
    weights, count, targets = torch.zeros(64), torch.zeros(1, dtype=torch.int64), torch.zeros(64, dtype=torch.int64)
    scatter_rows(up, targets, up, count)
    for placed in ((targets, up, hidden), (targets, None, hidden), (targets, up, None)):
        gated_swish_backward(up, weights, hidden, GatedSwish(), dup=up, dweights=weights, placed=placed, num_rows=count)
    assert len(found) == 4
    for kernel in found:
        assert kernel.asm["cubin"]
    ptx = found[0].asm["ptx"]
    for operation in ("ld", "st"):  # rows go 16 bytes a thread
        widths = re.findall(rf"\b{operation}\.global(?:\.v([24]))?\.b(\d+)", ptx)
        assert any(int(v or 1) * int(b) == 128 for v, b in widths), widths


def test_rows_are_put_where_they_belong() -> None:
    """Fault: a row past the valid ones or without a place is written; a placed row differs from the plain one."""
    dist.run_apart(_interpreted, 1, TRITON_INTERPRET="1")


def test_they_compile_for_hopper() -> None:
    """Fault: what the interpreter takes, the compiler does not; rows moved in small pieces."""
    dist.run_apart(_compiled, 1, TRITON_INTERPRET="0")
