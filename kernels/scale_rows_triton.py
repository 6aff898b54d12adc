"""Rows times their weights, and the gradient of the weights, in one pass over the valid rows, as a Triton kernel (see
scale_rows.py).

Legend: R rows of which tensors hold RB >= R, D row width.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from torch import Tensor

from .fast_launch import fast
from .mxfp8_triton import rows_of
from .triton_common import Launch, narrow, require_contiguous, tl, triton, widen

SCALE = Launch(2112)
LONGEST = 1024  # columns of a row that a program takes at once


@fast
@triton.jit(do_not_specialize=["bound"])
def _scale_rows(rows, weights, other, out, dots, num_rows, bound, D: tl.constexpr, BLOCK: tl.constexpr):
    blocks: tl.constexpr = (D + BLOCK - 1) // BLOCK
    first = tl.program_id(0).to(tl.int64)
    count = rows_of(num_rows, bound)
    for row in range(first, count, tl.num_programs(0)):
        weight = tl.load(weights + row)
        sums = tl.zeros((BLOCK,), tl.float32)
        for block in range(blocks):
            cols = block * BLOCK + tl.arange(0, BLOCK)
            values = widen(tl.load(rows + row * D + cols, mask=cols < D, other=0.0), tl.float32)
            if dots is not None:
                sums += values * widen(tl.load(other + row * D + cols, mask=cols < D, other=0.0), tl.float32)
            if out is not None:
                tl.store(out + row * D + cols, narrow(values * weight, out.dtype.element_ty), mask=cols < D)
        if dots is not None:
            tl.store(dots + row, tl.sum(sums, axis=0))
    if dots is not None:
        for row in range(count + first, bound, tl.num_programs(0)):
            tl.store(dots + row, 0.0)


def scale_rows(
    rows: Tensor,
    weights: Tensor,
    other: Tensor | None,
    out: Tensor | None,
    dots: Tensor | None,
    num_rows: Tensor | None,
    *,
    launch: Launch = SCALE,
) -> None:
    """``out`` [RB, D] = ``rows`` [RB, D] times ``weights`` float32 [RB], rounded once; ``dots`` float32 [RB] = their
    dot products with the rows of ``other`` [RB, D], zero past ``num_rows`` (int64 [1]; None: all are valid)."""
    require_contiguous(rows=rows, weights=weights, other=other, out=out, dots=dots)
    if not rows.shape[0]:
        return
    width = rows.shape[1]
    block = launch.columns(width, LONGEST)
    launch = launch.of_whole_lanes(block, rows.element_size())
    _scale_rows[launch.grid(rows.shape[0])](
        rows, weights, other, out, dots, num_rows, rows.shape[0], D=width, BLOCK=block, **launch.options
    )
