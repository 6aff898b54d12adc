"""The MXFP8 codec on any device: torch references on CPU, Triton kernels on GPUs, the same bits.

``offsets`` int64 [E_l + 1] bounds the rows that are converted: those before offsets[-1], which on a GPU only the device
reads. Rows past it stay unwritten. None: all rows.

Legend: R rows (padding included), D values of a row, C = D/32 blocks of a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..kernels import mxfp8 as reference
from ..kernels.mxfp8 import record_bytes, record_width

Form = Literal["plain", "records", "rowwise"]


@dataclass(frozen=True)
class Operand:
    """Rows as an expert GEMM takes them.

    ``plain``: data [R, D] of a float dtype. ``records``: data uint8 [R, D + D/32]. ``rowwise``: data float8_e4m3fn [R,
    D] with one power of two per row in ``scales`` float32 [R]."""

    form: Form
    data: Tensor
    scales: Tensor | None = None


def valid(offsets: Tensor | None, rows: int) -> int:
    """How many rows to convert, on CPU."""
    return rows if offsets is None else int(offsets[-1])


def count(offsets: Tensor | None) -> Tensor | None:
    """int64 [1] on the device."""
    return None if offsets is None else offsets[-1:]


def quantize(
    x: Tensor,
    rounding: str = "rceil",
    *,
    row_weight: Tensor | None = None,
    offsets: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """``x`` [R, D] of a float dtype (times ``row_weight`` [R], in float32) → records uint8 [R, D + D/32], in ``out`` if
    given.

    Raises ``ValueError`` unless D is a multiple of 32.
    """
    if out is None:
        out = torch.empty((x.shape[0], record_bytes(x.shape[1])), dtype=torch.uint8, device=x.device)
    if x.is_cuda:
        from ..kernels.mxfp8_triton import quantize as kernel

        weight = None if row_weight is None else row_weight.to(torch.float32).contiguous()
        kernel(x.contiguous(), out, rounding, row_weight=weight, num_rows=count(offsets))
        return out
    n = valid(offsets, x.shape[0])
    weight = None if row_weight is None else row_weight[:n]
    reference.quantize_torch(x[:n], rounding, row_weight=weight, out=out[:n])
    return out


def dequantize(records: Tensor, dtype: torch.dtype, *, offsets: Tensor | None = None) -> Tensor:
    """Records uint8 [R, D + D/32] → [R, D] in ``dtype``."""
    out = torch.empty((records.shape[0], record_width(records.shape[1])), dtype=dtype, device=records.device)
    if records.is_cuda:
        from ..kernels.mxfp8_triton import dequantize as kernel

        kernel(records.contiguous(), out, num_rows=count(offsets))
        return out
    n = valid(offsets, records.shape[0])
    reference.dequantize_torch(records[:n], out=out[:n])
    return out


def empty_rowwise(rows: int, width: int, device: torch.device) -> Operand:
    data = torch.empty((rows, width), dtype=torch.float8_e4m3fn, device=device)
    return Operand("rowwise", data, torch.empty(rows, dtype=torch.float32, device=device))


def empty_operand(form: Form, rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Operand:
    """An unwritten operand of ``rows`` rows of ``width`` values; a plain one in ``dtype``."""
    if form == "rowwise":
        return empty_rowwise(rows, width, device)
    if form == "records":
        return Operand(form, torch.empty((rows, record_bytes(width)), dtype=torch.uint8, device=device))
    return Operand(form, torch.empty((rows, width), dtype=dtype, device=device))


def quantize_rowwise(x: Tensor, rounding: str = "rceil", *, offsets: Tensor | None = None) -> Operand:
    """``x`` [R, D] of a float dtype → the rowwise form."""
    out = empty_rowwise(x.shape[0], x.shape[1], x.device)
    assert out.scales is not None
    if x.is_cuda:
        from ..kernels.mxfp8_triton import quantize_rowwise as kernel

        kernel(x.contiguous(), out.data.view(torch.uint8), out.scales, rounding, num_rows=count(offsets))
        return out
    n = valid(offsets, x.shape[0])
    out.data[:n], out.scales[:n] = reference.quantize_rowwise_torch(x[:n], rounding)
    return out


def rescale(records: Tensor, *, offsets: Tensor | None = None) -> Operand:
    """Records uint8 [R, D + D/32] → the rowwise form, an exponent shift."""
    out = empty_rowwise(records.shape[0], record_width(records.shape[1]), records.device)
    assert out.scales is not None
    if records.is_cuda:
        from ..kernels.mxfp8_triton import rescale as kernel

        kernel(records.contiguous(), out.data.view(torch.uint8), out.scales, num_rows=count(offsets))
        return out
    n = valid(offsets, records.shape[0])
    out.data[:n], out.scales[:n] = reference.rescale_torch(records[:n])
    return out


def swizzle_scales(scales: Tensor, offsets: Tensor) -> Tensor:
    """Scale bytes uint8 [R, C] → the tiles of 128 rows × 4 blocks that block-scaled GEMMs read, each group of rows from
    a tile of its own: uint8 [rows padded for every group, ⌈C/4⌉·4]."""
    if not scales.is_cuda:
        return reference.swizzle_scales_torch(scales, offsets)
    from ..kernels.mxfp8_triton import swizzle_scales as kernel

    rows = reference.swizzled_rows(scales.shape[0], offsets.numel() - 1)
    out = scales.new_empty((rows, -(-scales.shape[1] // reference.TILE_COLUMNS) * reference.TILE_COLUMNS))
    kernel(scales, offsets, out)
    return out


def as_form(rows: Tensor, form: Form, rounding: str, *, dtype: torch.dtype, offsets: Tensor | None = None) -> Operand:
    """Rows that arrived, records (uint8) or plain [R, D], in the ``form`` a GEMM takes; plain ones in ``dtype``."""
    records = rows.dtype == torch.uint8
    if form == "records":
        return Operand(form, rows if records else quantize(rows, rounding, offsets=offsets))
    if form == "rowwise":
        return rescale(rows, offsets=offsets) if records else quantize_rowwise(rows, rounding, offsets=offsets)
    return Operand(form, dequantize(rows, dtype, offsets=offsets) if records else rows.to(dtype))


@dataclass(frozen=True)
class Received:
    """Rows on the expert rank: ``rows`` as they travelled (records or plain), and forms of them that the movement has
    made already, in the pass that put the rows in order."""

    rows: Tensor | None
    made: tuple[Operand, ...] = ()

    def operand(self, form: Form, rounding: str, *, dtype: torch.dtype, offsets: Tensor | None = None) -> Operand:
        """The rows in ``form``, converted only if the movement has not made it."""
        for operand in self.made:
            if operand.form == form:
                return operand
        if self.rows is None:
            raise RuntimeError(
                f"rows were received as {[o.form for o in self.made]}, and {form} cannot be made of that"
            )
        return as_form(self.rows, form, rounding, dtype=dtype, offsets=offsets)
