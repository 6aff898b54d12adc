"""Checks of the gated activation's kernels against their references, for the interpreter and for GPUs.

Legend: R rows, F expert width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ep_plugin.kernels.gated_swish import GatedSwish, gated_swish_backward_torch, gated_swish_torch

SHAPES = {
    "swiglu": GatedSwish(),
    "interleaved": GatedSwish(interleaved=True),
    "clamped": GatedSwish(alpha=1.702, limit=2.0, offset=1.0),
    "gpt_oss": GatedSwish(alpha=1.702, limit=2.0, offset=1.0, interleaved=True),
}


def same(got: Tensor, want: Tensor, what: object) -> None:
    """Bit for bit, NaN being NaN; names the first bad place."""
    bad = ~((got.cpu() == want) | (got.cpu().isnan() & want.isnan()))
    if bad.any():
        at = tuple(bad.nonzero()[0].tolist())
        raise AssertionError(f"{what}: {int(bad.sum())} differ, first at {at}: {got[at]} is not {want[at]}")


def inputs(shape: GatedSwish, width: int, dtype: torch.dtype, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """up [R, 2F] with large, tiny, infinite and NaN values; dhidden [R, F]; weights [R]."""
    g = torch.Generator().manual_seed(width)
    up = torch.randn(rows, 2 * width, generator=g) * torch.exp2(torch.randint(-6, 6, (rows, 1), generator=g).float())
    gate, linear = shape.split(up)
    gate[0, 1], linear[1, 2], up[2], gate[3, 1] = float("inf"), float("nan"), 0.0, -200.0
    gate[4, 3], linear[4, 3] = 1e30, 1e30
    gate[5, 0], up[6] = float("nan"), 1e-30
    return up.to(dtype), torch.randn(rows, width, generator=g).to(dtype), torch.rand(rows, generator=g)


def check(device: str, name: str, width: int, dtype: torch.dtype, *, rows: int = 12, valid: int = 10) -> None:
    """Forward and backward of one shape, with and without weights, out of place and in place."""
    from ep_plugin.kernels.gated_swish_triton import gated_swish, gated_swish_backward

    shape, what = SHAPES[name], (name, width, dtype)
    up, dhidden, some = inputs(shape, width, dtype, rows)
    count = torch.tensor([valid], device=device)
    mark = 7.0
    for weights in (None, some):
        w = None if weights is None else weights.to(device)
        up_there, grad = up.to(device), dhidden.to(device)
        hidden = torch.full((rows, width), mark, dtype=dtype, device=device)
        gated_swish(up_there, w, hidden, shape, num_rows=count)
        same(hidden[:valid], gated_swish_torch(up, weights, shape)[:valid].to(dtype), ("hidden", *what))
        assert (hidden[valid:] == mark).all(), ("hidden past the rows", *what)

        want, want_weights = gated_swish_backward_torch(up, dhidden, weights, shape)
        dup = torch.full((rows, 2 * width), mark, dtype=dtype, device=device)
        dweights = None if weights is None else torch.full((rows,), mark, device=device)
        again = torch.full_like(hidden, mark)
        placed = (torch.arange(rows, device=device), None, again)
        gated_swish_backward(up_there, w, grad, shape, dup=dup, dweights=dweights, placed=placed, num_rows=count)
        same(again, hidden.cpu(), ("hidden again", *what))
        same(dup[:valid], want[:valid].to(dtype), ("dup", *what))
        assert (dup[valid:] == mark).all(), ("dup past the rows", *what)
        assert torch.equal(up_there.cpu().nan_to_num(), up.nan_to_num()), ("up was written", *what)
        if dweights is not None and want_weights is not None:
            fine = want_weights[:valid].isfinite()
            largest = float(want_weights[:valid][fine].abs().max())
            torch.testing.assert_close(
                dweights[:valid].cpu(), want_weights[:valid], rtol=1e-4, atol=1e-5 * largest, equal_nan=True
            )
            assert not dweights[valid:].any(), ("dweights past the rows", *what)
            alone = torch.full((rows,), mark, device=device)
            gated_swish_backward(up_there, w, grad, shape, dweights=alone)  # every row, and no dup
            same(alone[:valid], dweights[:valid].cpu(), ("dweights alone", *what))
        gated_swish_backward(up_there, w, grad, shape, dup=up_there, num_rows=count)
        same(up_there, torch.cat([dup[:valid], up.to(device)[valid:]]).cpu(), ("in place", *what))


def check_scaled(device: str, width: int, dtype: torch.dtype, *, rows: int = 12, valid: int = 10) -> None:
    """Rows times weights and the gradient of the weights, of which rows past the valid ones are NaN."""
    from ep_plugin.kernels.scale_rows import scale_rows, scale_rows_torch

    g = torch.Generator().manual_seed(width)
    values, other = (torch.randn(rows, width, generator=g).to(dtype) for _ in range(2))
    weights = torch.rand(rows, generator=g)
    for t in (values, other, weights):
        t[valid:] = float("nan")
    want, want_dots = scale_rows_torch(values, weights, other, valid)
    count = torch.tensor([valid], device=device)
    out, dots = scale_rows(values.to(device), weights.to(device), other.to(device), rows, count)
    same(out[:valid], want[:valid], ("scaled", width, dtype))
    assert dots is not None and want_dots is not None and not dots[valid:].any()
    torch.testing.assert_close(dots.cpu(), want_dots, rtol=1e-4, atol=1e-4)
    alone, none = scale_rows(values.to(device), weights.to(device), None, valid, count)
    assert none is None and not alone[valid:].any()
    same(alone[:valid], want[:valid], ("scaled alone", width, dtype))


def check_all(device: str, *, thorough: bool) -> None:
    """Every shape and dtype; widths of one block, of several, and of no whole number of 16 bytes."""
    for name in SHAPES:
        check(device, name, 40, torch.bfloat16)
        check(device, name, 1536, torch.bfloat16)
        if thorough:
            for width in (33, 768, 2048, 4096, 4100):
                check(device, name, width, torch.bfloat16, rows=300, valid=257)
    check(device, "swiglu", 33, torch.float16)
    check(device, "gpt_oss", 33, torch.float32)
    for width, dtype in ((33, torch.float16), (40, torch.bfloat16), (1536, torch.bfloat16), (33, torch.float32)):
        check_scaled(device, width, dtype)
