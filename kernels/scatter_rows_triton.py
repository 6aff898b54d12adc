"""Rows to other places, as a Triton kernel that moves the valid rows alone (see scatter_rows.py)."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from torch import Tensor

from .fast_launch import fast
from .triton_common import Launch, cdiv, require_contiguous, tl, triton

SCATTER = Launch(1056)


@fast
@triton.jit(do_not_specialize=["bound", "rows_out"])
def _scatter_rows(rows, targets, out, num_rows, bound, rows_out, D: tl.constexpr, BLOCK: tl.constexpr):
    blocks: tl.constexpr = (D + BLOCK - 1) // BLOCK
    count = tl.minimum(tl.maximum(tl.load(num_rows), 0), bound)
    for item in range(tl.program_id(0).to(tl.int64), count * blocks, tl.num_programs(0)):
        row = item // blocks
        cols = (item % blocks) * BLOCK + tl.arange(0, BLOCK)
        target = tl.load(targets + row).to(tl.int64)
        if (target >= 0) & (target < rows_out):
            tl.store(out + target * D + cols, tl.load(rows + row * D + cols, mask=cols < D), mask=cols < D)


def scatter_rows(rows: Tensor, targets: Tensor, out: Tensor, num_rows: Tensor, *, launch: Launch = SCATTER) -> None:
    """``out[targets[r]] = rows[r]`` for the first ``num_rows`` (int64 [1]) rows, as ``scatter_rows_torch``.

    ``rows`` [RB, D]; ``targets`` int64 [RB]; ``out`` [any, D] of the same dtype. Targets outside ``out`` are skipped.
    """
    require_contiguous(rows=rows, targets=targets, out=out)
    if not rows.numel():
        return
    width = rows.shape[1]
    block = launch.columns(width)
    launch = launch.of_whole_lanes(block, rows.element_size())
    _scatter_rows[launch.grid(rows.shape[0] * cdiv(width, block))](
        rows, targets, out, num_rows, rows.shape[0], out.shape[0], D=width, BLOCK=block, **launch.options
    )
