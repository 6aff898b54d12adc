"""SwiGLU between the two projections of an expert, from and to MXFP8, as Triton kernels (see mxfp8_swiglu.py).

A program makes whole rows. Where a row gets one scale, the largest magnitude is needed before the first element can be
written: a program then holds the row at once if it fits, else it computes it twice.

Legend: R rows of which tensors hold RB >= R, F expert width.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import torch
from torch import Tensor

from . import mxfp8_swiglu as constants
from .fast_launch import fast
from .mxfp8 import BLOCK as SIZE
from .mxfp8 import record_bytes
from .mxfp8_triton import check_record, rows_of
from .mxfp8_triton_common import (
    load_float32,
    load_values,
    magnitude_bits,
    power_of_two,
    scale_bytes,
    store_values,
    to_elements,
)
from .triton_common import Launch, narrow, require_contiguous, tl, triton

BY_BLOCK = Launch(4224, block=1024)
BY_ROW = Launch(2112, warps=8)  # where a row gets one scale
LONGEST = 4096  # values of a row that a program holds at once

_LOG2_E = tl.constexpr(constants.LOG2_E)
_C1, _C2, _C3, _C4, _C5 = (tl.constexpr(c) for c in constants.EXP2)
_MAGIC = tl.constexpr(constants.MAGIC)
_MAGIC_BITS = tl.constexpr(constants.MAGIC_BITS)


@triton.jit
def _sigmoid(x):
    z = tl.minimum(tl.maximum(x * -_LOG2_E, -125.0), 125.0)
    shifted = z + _MAGIC
    f = z - (shifted - _MAGIC)
    p = ((((f * _C5 + _C4) * f + _C3) * f + _C2) * f + _C1) * f + 1.0
    power = ((shifted.to(tl.int32, bitcast=True) - _MAGIC_BITS + 127) << 23).to(tl.float32, bitcast=True)
    return tl.div_rn(tl.full((), 1.0, tl.float32), p * power + 1.0)


@triton.jit
def _store_plain(pointer, values, group, inside):
    cols = group[:, None] * 32 + tl.arange(0, 32)[None, :]
    tl.store(pointer + cols, narrow(values, pointer.dtype.element_ty), mask=inside[:, None])


@triton.jit
def _store_elements(pointer, values, scale, group, inside):
    cols = group[:, None] * 32 + tl.arange(0, 32)[None, :]
    tl.store(pointer + cols, to_elements(values, scale), mask=inside[:, None])


@triton.jit
def _row_scale(pointer, largest, CEIL: tl.constexpr):
    """The scale byte of a row from the ``largest`` magnitude bits of its blocks; stores the scale."""
    scale = tl.maximum(scale_bytes(tl.max(largest, axis=0), CEIL), 1)
    tl.store(pointer, power_of_two(scale))
    return scale


@triton.jit
def _hidden(up, weight, group, inside, F: tl.constexpr):
    gate = load_float32(up, group, inside)
    linear = load_float32(up + F, group, inside)
    return gate * _sigmoid(gate) * linear * weight


@fast
@triton.jit(do_not_specialize=["bound"])
def _swiglu(
    up,
    weights,
    saved,
    hidden,
    records,
    data,
    scales,
    num_rows,
    bound,
    F: tl.constexpr,
    CEIL: tl.constexpr,
    N: tl.constexpr,
):
    blocks: tl.constexpr = (F // 32 + N - 1) // N
    for row in range(tl.program_id(0).to(tl.int64), rows_of(num_rows, bound), tl.num_programs(0)):
        source = up + row * (2 * F)
        weight = 1.0  # exact as a factor
        if weights is not None:
            weight = tl.load(weights + row)
        if data is not None and blocks > 1:
            largest = tl.zeros((N,), tl.int32)
            for block in range(blocks):
                group = block * N + tl.arange(0, N)
                values = _hidden(source, weight, group, group < F // 32, F)
                largest = tl.maximum(largest, tl.max(magnitude_bits(values), axis=1))
            scale = _row_scale(scales + row, largest, CEIL)
        for block in range(blocks):
            group = block * N + tl.arange(0, N)
            inside = group < F // 32
            gate = load_float32(source, group, inside)
            linear = load_float32(source + F, group, inside)
            values = gate * _sigmoid(gate) * linear * weight
            if saved is not None:
                record = saved + row * (2 * F + F // 16)
                store_values(record, gate, group, inside, 2 * F, 0, CEIL)
                store_values(record, linear, group, inside, 2 * F, F, CEIL)
            if hidden is not None:
                _store_plain(hidden + row * F, values, group, inside)
            if records is not None:
                store_values(records + row * (F + F // 32), values, group, inside, F, 0, CEIL)
            if data is not None:
                if blocks == 1:
                    scale = _row_scale(scales + row, tl.max(magnitude_bits(values), axis=1), CEIL)
                _store_elements(data + row * F, values, scale, group, inside)


def swiglu(
    up: Tensor,
    weights: Tensor | None = None,
    *,
    saved: Tensor | None = None,
    hidden: Tensor | None = None,
    records: Tensor | None = None,
    data: Tensor | None = None,
    scales: Tensor | None = None,
    rounding: str = "rceil",
    num_rows: Tensor | None = None,
    launch: Launch | None = None,
) -> None:
    """h = gate·σ(gate)·linear·weight of ``up`` [RB, 2F] (``weights`` float32 [RB]), into whatever is given:

    ``hidden`` [RB, F] of a float dtype; ``records`` uint8 [RB, F + F/32]; ``data`` uint8 [RB, F] (E4M3) with ``scales``
    float32 [RB], one per row; and ``saved`` uint8 [RB, 2F + F/16], the records of ``up`` itself for backward.
    """
    require_contiguous(
        up=up, weights=weights, saved=saved, hidden=hidden, records=records, data=data, scales=scales, num_rows=num_rows
    )
    rows, width = up.shape[0], up.shape[1] // 2
    _check_width(up)
    if saved is not None:
        check_record(saved, rows, 2 * width)
    if records is not None:
        check_record(records, rows, width)
    if (data is None) != (scales is None):
        raise ValueError("data and scales go together")
    if not rows:
        return
    launch = launch or (BY_BLOCK if data is None else BY_ROW)
    block = launch.columns(width, LONGEST)
    _swiglu[launch.grid(rows)](
        up,
        weights,
        saved,
        hidden,
        records,
        data,
        scales,
        num_rows,
        rows,
        F=width,
        CEIL=rounding == "rceil",
        N=block // SIZE,
        **launch.options,
    )


@triton.jit
def _gradients(saved, dhidden, weight, group, inside, F: tl.constexpr):
    """The hidden row without its weight, the gradients of gate and linear, and that of the weighted hidden row."""
    gate = load_values(saved, group, 2 * F, 0, F)
    linear = load_values(saved, group, 2 * F, F, F)
    grad = load_float32(dhidden, group, inside)
    sigmoid = _sigmoid(gate)
    swish = gate * sigmoid
    weighted = grad * weight
    dgate = weighted * linear * (swish * (1.0 - sigmoid) + sigmoid)
    return swish * linear, dgate, weighted * swish, grad


@fast
@triton.jit(do_not_specialize=["bound"])
def _swiglu_backward(
    saved,
    dhidden,
    weights,
    hidden,
    dup,
    records,
    data,
    scales,
    dweights,
    num_rows,
    bound,
    F: tl.constexpr,
    CEIL: tl.constexpr,
    N: tl.constexpr,
):
    blocks: tl.constexpr = (F // 32 + N - 1) // N
    for row in range(tl.program_id(0).to(tl.int64), rows_of(num_rows, bound), tl.num_programs(0)):
        record = saved + row * (2 * F + F // 16)
        grads = dhidden + row * F
        weight = 1.0
        if weights is not None:
            weight = tl.load(weights + row)
        if data is not None and blocks > 1:
            largest = tl.zeros((N,), tl.int32)
            for block in range(blocks):
                group = block * N + tl.arange(0, N)
                _, dgate, dlinear, _ = _gradients(record, grads, weight, group, group < F // 32, F)
                bits = tl.maximum(magnitude_bits(dgate), magnitude_bits(dlinear))
                largest = tl.maximum(largest, tl.max(bits, axis=1))
            scale = _row_scale(scales + row, largest, CEIL)
        dots = tl.zeros((N, 32), tl.float32)
        for block in range(blocks):
            group = block * N + tl.arange(0, N)
            inside = group < F // 32
            values, dgate, dlinear, grad = _gradients(record, grads, weight, group, inside, F)
            if dweights is not None:
                dots += grad * values
            if hidden is not None:
                _store_plain(hidden + row * F, values * weight, group, inside)
            if dup is not None:
                _store_plain(dup + row * (2 * F), dgate, group, inside)
                _store_plain(dup + row * (2 * F) + F, dlinear, group, inside)
            if records is not None:
                out = records + row * (2 * F + F // 16)
                store_values(out, dgate, group, inside, 2 * F, 0, CEIL)
                store_values(out, dlinear, group, inside, 2 * F, F, CEIL)
            if data is not None:
                if blocks == 1:
                    bits = tl.maximum(magnitude_bits(dgate), magnitude_bits(dlinear))
                    scale = _row_scale(scales + row, tl.max(bits, axis=1), CEIL)
                _store_elements(data + row * (2 * F), dgate, scale, group, inside)
                _store_elements(data + row * (2 * F) + F, dlinear, scale, group, inside)
        if dweights is not None:
            tl.store(dweights + row, tl.sum(tl.sum(dots, axis=1), axis=0))


def swiglu_backward(
    saved: Tensor,
    dhidden: Tensor,
    weights: Tensor | None = None,
    *,
    hidden: Tensor | None = None,
    dup: Tensor | None = None,
    records: Tensor | None = None,
    data: Tensor | None = None,
    scales: Tensor | None = None,
    dweights: Tensor | None = None,
    rounding: str = "rceil",
    num_rows: Tensor | None = None,
    launch: Launch | None = None,
) -> None:
    """From the records of ``up`` that ``swiglu`` saved and ``dhidden`` [RB, F], the gradient of h, into what is given:

    ``hidden`` [RB, F]: h again. The gradient of ``up`` as ``dup`` [RB, 2F] of a float dtype, as ``records`` uint8 [RB,
    2F + F/16], as ``data`` uint8 [RB, 2F] (E4M3) with ``scales`` float32 [RB]. ``dweights`` float32 [RB], whose sums
    over F run in an order of their own.
    """
    require_contiguous(saved=saved, dhidden=dhidden, weights=weights, hidden=hidden, dup=dup)
    require_contiguous(records=records, data=data, scales=scales, dweights=dweights, num_rows=num_rows)
    rows, width = dhidden.shape
    check_record(saved, rows, 2 * width)
    if records is not None:
        check_record(records, rows, 2 * width)
    if (data is None) != (scales is None):
        raise ValueError("data and scales go together")
    if dup is not None:
        _check_width(dup)
    if not rows:
        return
    launch = launch or (BY_BLOCK if data is None else BY_ROW)
    block = launch.columns(width, LONGEST)
    _swiglu_backward[launch.grid(rows)](
        saved,
        dhidden,
        weights,
        hidden,
        dup,
        records,
        data,
        scales,
        dweights,
        num_rows,
        rows,
        F=width,
        CEIL=rounding == "rceil",
        N=block // SIZE,
        **launch.options,
    )


def _check_width(up: Tensor) -> None:
    """A block must not hold gate and linear values together."""
    if up.shape[1] % 2 or up.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(f"gate and linear halves are needed in a float dtype, not {list(up.shape)} {up.dtype}")
    record_bytes(up.shape[1] // 2)
