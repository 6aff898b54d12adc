"""Rows to other places."""

from __future__ import annotations

from torch import Tensor


def scatter_rows_torch(rows: Tensor, targets: Tensor, out: Tensor) -> None:
    """``out[targets[r]] = rows[r]`` where ``targets[r]`` >= 0.

    ``rows`` [R, D]; ``targets`` int64 [R], distinct where not negative; ``out`` [any, D] of the same dtype.
    """
    valid = targets >= 0
    if bool(valid.all()):
        out.index_copy_(0, targets, rows)
    else:
        out.index_copy_(0, targets[valid], rows[valid])


def scatter_rows(rows: Tensor, targets: Tensor, out: Tensor, num_rows: Tensor) -> None:
    """``scatter_rows_torch`` for the first ``num_rows`` (int64 [1]) rows; on a GPU a kernel, without a look from the
    host."""
    if not rows.is_cuda:
        scatter_rows_torch(rows, targets, out)
        return
    from .scatter_rows_triton import scatter_rows as kernel

    kernel(rows.contiguous(), targets, out, num_rows)
