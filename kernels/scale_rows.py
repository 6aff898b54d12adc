"""Rows times their weights, and the gradient of the weights.

Legend: R rows (padding included), D row width.
"""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

from .reduce import accumulation_dtype

KERNEL_DEVICES: tuple[str, ...] = ("cuda",)


def scale_rows_torch(rows: Tensor, weights: Tensor, other: Tensor | None, valid: int) -> tuple[Tensor, Tensor | None]:
    """``rows`` [R, D] times ``weights`` [R], in acc dtype and rounded once; ⟨rows[r], other[r]⟩ in acc dtype [R], where
    ``other`` [R, D] is given. Rows from ``valid`` on are not read, and zero in both results."""
    acc = accumulation_dtype(rows.dtype)
    out, part = torch.empty_like(rows, memory_format=torch.contiguous_format), rows[:valid].to(acc)
    out[:valid] = part * weights[:valid, None].to(acc)
    out[valid:].zero_()
    if other is None:
        return out, None
    dots = torch.zeros(rows.shape[0], dtype=acc, device=rows.device)
    dots[:valid] = (part * other[:valid].to(acc)).sum(-1)
    return out, dots


def scale_rows(
    rows: Tensor, weights: Tensor, other: Tensor | None, valid: int, num_rows: Tensor
) -> tuple[Tensor, Tensor | None]:
    """``scale_rows_torch``; on a GPU one pass over the first ``num_rows`` (int64 [1]) rows. Rows between them and
    ``valid`` are then unspecified in the first result, and zero in the second."""
    kernel = rows.device.type in KERNEL_DEVICES and accumulation_dtype(rows.dtype) == torch.float32
    if not kernel or importlib.util.find_spec("triton") is None:
        out, dots = scale_rows_torch(rows, weights, other, valid)
        if dots is not None and valid:
            index = torch.arange(dots.shape[0], device=dots.device)
            dots = dots.where(index < num_rows, 0)  # what stands past them may be no number
        return out, dots
    from .scale_rows_triton import scale_rows as launch

    rows = rows.contiguous()
    out = torch.empty_like(rows)
    dots = None if other is None else torch.empty(rows.shape[0], dtype=torch.float32, device=rows.device)
    launch(
        rows, weights.to(torch.float32).contiguous(), None if other is None else other.contiguous(), out, dots, num_rows
    )
    out[valid:].zero_()
    return out, dots
