"""The gated activation of experts and its backward, one pass each, as Triton kernels (see gated_swish.py).

Only the device knows how many rows there are; no other row is read, and none but those of the weights' gradient
written. A program takes 16 bytes a thread of the gate, of the linear half and of the gradient at once.

Legend: R rows of which tensors hold RB >= R, F expert width.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import torch
from torch import Tensor

from .fast_launch import fast
from .gated_swish import GatedSwish
from .mxfp8_swiglu_triton import _sigmoid
from .mxfp8_triton import rows_of
from .triton_common import Launch, cdiv, narrow, require_contiguous, tl, triton, widen

FORWARD = Launch(2112)
BACKWARD = Launch(2112)
LONGEST = 1024  # columns of a row that a program takes at once
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@triton.jit
def _load_halves(up, block, F: tl.constexpr, PAIRS: tl.constexpr, BLOCK: tl.constexpr):
    """Gate and linear columns ``block``·BLOCK … of a row of ``up``, float32, zero past F."""
    if PAIRS:
        cols = block * (2 * BLOCK) + tl.arange(0, 2 * BLOCK)
        both = widen(tl.load(up + cols, mask=cols < 2 * F, other=0.0), tl.float32)
        gate, linear = tl.split(tl.reshape(both, [BLOCK, 2]))
    else:
        cols = block * BLOCK + tl.arange(0, BLOCK)
        gate = widen(tl.load(up + cols, mask=cols < F, other=0.0), tl.float32)
        linear = widen(tl.load(up + F + cols, mask=cols < F, other=0.0), tl.float32)
    return gate, linear


@triton.jit
def _bend(raw_gate, raw_linear, ALPHA: tl.constexpr, LIMIT: tl.constexpr, OFFSET: tl.constexpr):
    """Gate and linear half clamped and moved, and the sigmoid. NaN stays NaN."""
    gate, linear = raw_gate, raw_linear
    if LIMIT is not None:
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        linear = tl.where(linear > LIMIT, LIMIT, tl.where(linear < -LIMIT, -LIMIT, linear))
    if OFFSET != 0:
        linear = linear + OFFSET
    if ALPHA != 1:
        return gate, linear, _sigmoid(gate * ALPHA)
    return gate, linear, _sigmoid(gate)


@fast
@triton.jit(do_not_specialize=["bound"])
def _gated_swish(
    up,
    weights,
    hidden,
    num_rows,
    bound,
    F: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    OFFSET: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    blocks: tl.constexpr = (F + BLOCK - 1) // BLOCK
    for item in range(tl.program_id(0).to(tl.int64), rows_of(num_rows, bound) * blocks, tl.num_programs(0)):
        row = item // blocks
        block = item % blocks
        raw_gate, raw_linear = _load_halves(up + row * (2 * F), block, F, PAIRS, BLOCK)
        gate, linear, sigmoid = _bend(raw_gate, raw_linear, ALPHA, LIMIT, OFFSET)
        values = gate * sigmoid * linear
        if weights is not None:
            values = values * tl.load(weights + row)
        cols = block * BLOCK + tl.arange(0, BLOCK)
        tl.store(hidden + row * F + cols, narrow(values, hidden.dtype.element_ty), mask=cols < F)


def gated_swish(
    up: Tensor,
    weights: Tensor | None,
    hidden: Tensor,
    shape: GatedSwish,
    *,
    num_rows: Tensor | None = None,
    launch: Launch = FORWARD,
) -> None:
    """``hidden`` [RB, F] = the gated activation of ``up`` [RB, 2F], times ``weights`` float32 [RB], rounded once.

    ``num_rows`` int64 [1] on the device: rows past it are neither read nor written (None: all RB).
    """
    require_contiguous(up=up, weights=weights, hidden=hidden, num_rows=num_rows)
    _check(up, hidden, weights)
    rows, width = hidden.shape
    if not hidden.numel():
        return
    block = launch.columns(width, LONGEST)
    launch = launch.of_whole_lanes(block, up.element_size())
    _gated_swish[launch.grid(rows * cdiv(width, block))](
        up, weights, hidden, num_rows, rows, F=width, BLOCK=block, **_constants(shape), **launch.options
    )


@fast
@triton.jit(do_not_specialize=["bound"])
def _gated_swish_backward(
    up,
    weights,
    dhidden,
    dup,
    dweights,
    targets,
    dup_placed,
    hidden_placed,
    num_rows,
    bound,
    F: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    OFFSET: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    blocks: tl.constexpr = (F + BLOCK - 1) // BLOCK
    first = tl.program_id(0).to(tl.int64)
    rows = rows_of(num_rows, bound)
    for row in range(first, rows, tl.num_programs(0)):
        weight = 1.0  # exact as a factor
        if weights is not None:
            weight = tl.load(weights + row)
        target = row
        if targets is not None:
            target = tl.load(targets + row).to(tl.int64)
        dots = tl.zeros((BLOCK,), tl.float32)
        for block in range(blocks):
            cols = block * BLOCK + tl.arange(0, BLOCK)
            grad = widen(tl.load(dhidden + row * F + cols, mask=cols < F, other=0.0), tl.float32)
            raw_gate, raw_linear = _load_halves(up + row * (2 * F), block, F, PAIRS, BLOCK)
            gate, linear, sigmoid = _bend(raw_gate, raw_linear, ALPHA, LIMIT, OFFSET)
            swish = gate * sigmoid
            if dweights is not None:
                dots += grad * (swish * linear)
            if hidden_placed is not None:
                values = narrow(swish * linear * weight, hidden_placed.dtype.element_ty)
                tl.store(hidden_placed + target * F + cols, values, mask=cols < tl.where(target >= 0, F, 0))
            if dup is not None:
                weighted = grad * weight
                bent = swish
                if ALPHA != 1:
                    bent = swish * ALPHA
                dgate = weighted * linear * (bent * (1.0 - sigmoid) + sigmoid)
                dlinear = weighted * swish
                if LIMIT is not None:
                    dgate = tl.where(raw_gate <= LIMIT, dgate, 0.0)
                    dlinear = tl.where((raw_linear >= -LIMIT) & (raw_linear <= LIMIT), dlinear, 0.0)
                out = dup + row * (2 * F)
                if PAIRS:
                    both = narrow(tl.reshape(tl.join(dgate, dlinear), [2 * BLOCK]), dup.dtype.element_ty)
                    wide = block * (2 * BLOCK) + tl.arange(0, 2 * BLOCK)
                    tl.store(out + wide, both, mask=wide < 2 * F)
                    if dup_placed is not None:
                        there = wide < tl.where(target >= 0, 2 * F, 0)
                        tl.store(dup_placed + target * (2 * F) + wide, both, mask=there)
                else:
                    dgate, dlinear = narrow(dgate, dup.dtype.element_ty), narrow(dlinear, dup.dtype.element_ty)
                    tl.store(out + cols, dgate, mask=cols < F)
                    tl.store(out + F + cols, dlinear, mask=cols < F)
                    if dup_placed is not None:
                        there = cols < tl.where(target >= 0, F, 0)
                        tl.store(dup_placed + target * (2 * F) + cols, dgate, mask=there)
                        tl.store(dup_placed + target * (2 * F) + F + cols, dlinear, mask=there)
        if dweights is not None:
            tl.store(dweights + row, tl.sum(dots, axis=0))
    if dweights is not None:
        for row in range(rows + first, bound, tl.num_programs(0)):
            tl.store(dweights + row, 0.0)


def gated_swish_backward(
    up: Tensor,
    weights: Tensor | None,
    dhidden: Tensor,
    shape: GatedSwish,
    *,
    dup: Tensor | None = None,
    dweights: Tensor | None = None,
    placed: tuple[Tensor, Tensor | None, Tensor | None] | None = None,
    num_rows: Tensor | None = None,
    launch: Launch = BACKWARD,
) -> None:
    """The gradients of ``gated_swish`` into what is given: ``dup`` [RB, 2F], which may be ``up`` itself, and
    ``dweights`` float32 [RB], zero past ``num_rows``, whose sums over F run in an order of their own. ``placed``: int64
    [RB] targets, −1 or a row of what follows, and where row r of ``dup`` and of what ``gated_swish`` gave goes besides:
    to row targets[r] of [any, 2F] and [any, F], or None.
    """
    targets, dup_placed, hidden_placed = placed or (None, None, None)
    require_contiguous(targets=targets, dup_placed=dup_placed, hidden_placed=hidden_placed)
    require_contiguous(up=up, weights=weights, dhidden=dhidden, dup=dup, dweights=dweights)
    _check(up, dhidden, weights)
    rows, width = dhidden.shape
    if not rows:
        return
    block = launch.columns(width, LONGEST)
    launch = launch.of_whole_lanes(block, up.element_size())
    _gated_swish_backward[launch.grid(rows)](
        up,
        weights,
        dhidden,
        dup,
        dweights,
        targets,
        dup_placed,
        hidden_placed,
        num_rows,
        rows,
        F=width,
        BLOCK=block,
        **_constants(shape),
        **launch.options,
    )


def _constants(shape: GatedSwish):
    return {"ALPHA": shape.alpha, "LIMIT": shape.limit, "OFFSET": shape.offset, "PAIRS": shape.interleaved}


def _check(up: Tensor, hidden: Tensor, weights: Tensor | None) -> None:
    rows, width = hidden.shape
    if tuple(up.shape) != (rows, 2 * width) or up.dtype not in DTYPES:
        raise ValueError(f"up must be [{rows}, {2 * width}] of {DTYPES}, not {list(up.shape)} {up.dtype}")
    if weights is not None and (tuple(weights.shape) != (rows,) or weights.dtype != torch.float32):
        raise ValueError(f"weights must be float32 [{rows}], not {weights.dtype} {list(weights.shape)}")
