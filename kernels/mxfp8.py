"""MXFP8: blocks of 32 values as E4M3 elements and one power of two, as torch operations.

A row of D values is one record of D + D/32 bytes: the D elements, then the D/32 scale bytes (E8M0: byte b is
2^(b − 127), 255 is NaN). The blocks lie along the row, which is the contracted axis of the GEMM that reads it.

Two rules give a block's scale from a, the largest magnitude in it (OCP Microscaling Formats 1.0, section 6.3, and what
tensor-core libraries do):
    floor   2^(⌊log2 a⌋ − 8): values between 448 and 512 times the scale saturate.
    rceil   the least power of two that is not below a/448 (both in float32): nothing saturates.
Elements are rounded to nearest even and saturate at ±448. A block with a NaN or an Inf gets scale 255 and elements 7F,
so that it decodes to NaN everywhere: an overflow stays visible.

A second form gives a whole row one power of two ("rowwise"), which FP8 GEMMs without block scales can read.

Legend: R rows, D values of a row, C = D/32 blocks of a row, E_l groups of rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 32
TILE_ROWS, TILE_COLUMNS = 128, 4  # of the scales' tiles

_NAN_SCALE, _NAN_ELEMENT, _LARGEST = 255, 0x7F, 448.0
_INFINITY_BITS = 0x7F800000


def record_bytes(width: int) -> int:
    """Bytes of a record of ``width`` values. ``ValueError`` unless ``width`` is a positive multiple of 32."""
    if width < BLOCK or width % BLOCK:
        raise ValueError(f"MXFP8 rows are blocks of {BLOCK} values; a width of {width} is not a multiple of {BLOCK}")
    return width + width // BLOCK


def record_width(nbytes: int) -> int:
    """Values in a record of ``nbytes`` bytes; the inverse of ``record_bytes``."""
    width = nbytes * BLOCK // (BLOCK + 1)
    if width < BLOCK or record_bytes(width // BLOCK * BLOCK) != nbytes:
        raise ValueError(f"no record has {nbytes} bytes: they have 33 for every {BLOCK} values")
    return width


def split_records(records: Tensor) -> tuple[Tensor, Tensor]:
    """uint8 [R, D + D/32] → the elements [R, D] (float8_e4m3fn) and the scale bytes [R, D/32] (uint8), as views."""
    width = record_width(records.shape[-1])
    return records[..., :width].view(torch.float8_e4m3fn), records[..., width:]


def scale_bytes_torch(bits: Tensor, rounding: str) -> Tensor:
    """Scale bytes (int32) of blocks whose largest magnitude has these float32 ``bits`` (int32, sign cleared)."""
    if rounding == "floor":
        scale = ((bits >> 23) - 8).clamp(min=0)
    else:
        d = (bits.view(torch.float32) * torch.tensor(1 / 448, dtype=torch.float32)).view(torch.int32)
        exponent, mantissa = d >> 23, d & 0x7FFFFF
        # Subnormal d: 2^-127 (byte 0) holds up to half of the mantissa's range.
        scale = torch.where(exponent == 0, (mantissa > 0x400000).int(), exponent + (mantissa != 0).int())
    return torch.where(bits >= _INFINITY_BITS, _NAN_SCALE, scale)


def power_of_two_torch(scale: Tensor) -> Tensor:
    """Scale bytes → float32 2^(b − 127); NaN for 255."""
    bits = torch.where(scale == 0, 0x400000, scale.int() << 23)
    return torch.where(scale == _NAN_SCALE, 0x7FC00000, bits).view(torch.float32)


def elements_torch(values: Tensor, scale: Tensor) -> Tensor:
    """float32 ``values`` over 2^(scale − 127), rounded to E4M3 (uint8), saturating; 7F where the scale is 255."""
    inverse = torch.where(scale < 254, (254 - scale) << 23, 0x400000).view(torch.float32)
    # Clamped first: the cast gives NaN above the largest number in some versions of torch.
    rounded = (values * inverse).clamp(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn).view(torch.uint8)
    return rounded.masked_fill(scale == _NAN_SCALE, _NAN_ELEMENT)


def _magnitude_bits(values: Tensor) -> Tensor:
    return values.view(torch.int32) & 0x7FFFFFFF


def quantize_torch(
    x: Tensor, rounding: str = "rceil", *, row_weight: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """[R, D] (times ``row_weight`` [R], in float32) → records uint8 [R, D + D/32], into ``out`` if given.

    ``x`` float32, bfloat16 or float16. The product with the weight is not rounded before it is quantised.
    """
    nbytes = record_bytes(x.shape[-1])
    values = x.to(torch.float32)
    if row_weight is not None:
        values = values * row_weight.to(torch.float32).unsqueeze(-1)
    blocks = values.unflatten(-1, (x.shape[-1] // BLOCK, BLOCK))
    scale = scale_bytes_torch(_magnitude_bits(blocks).amax(-1), rounding)
    if out is None:
        out = torch.empty((*x.shape[:-1], nbytes), dtype=torch.uint8, device=x.device)
    out[..., : x.shape[-1]] = elements_torch(blocks, scale.unsqueeze(-1)).flatten(-2)
    out[..., x.shape[-1] :] = scale
    return out


def dequantize_torch(records: Tensor, dtype: torch.dtype = torch.float32, *, out: Tensor | None = None) -> Tensor:
    """Records [R, D + D/32] → [R, D]. Exact in float32, and in bfloat16 down to its smallest number."""
    data, scale = split_records(records)
    blocks = data.to(torch.float32).unflatten(-1, (scale.shape[-1], BLOCK)) * power_of_two_torch(scale).unsqueeze(-1)
    values = blocks.flatten(-2)
    return values.to(dtype) if out is None else out.copy_(values)


def quantize_rowwise_torch(x: Tensor, rounding: str = "rceil") -> tuple[Tensor, Tensor]:
    """[R, D] → elements float8_e4m3fn [R, D] and one float32 power of two per row [R] (at least 2^-126)."""
    values = x.to(torch.float32)
    largest = _magnitude_bits(values).amax(-1) if x.shape[-1] else values.new_zeros(x.shape[:-1], dtype=torch.int32)
    # A subnormal scale would be flushed to zero by the GEMM.
    scale = scale_bytes_torch(largest, rounding).clamp(min=1)
    return elements_torch(values, scale.unsqueeze(-1)).view(torch.float8_e4m3fn), power_of_two_torch(scale)


def rescale_torch(records: Tensor) -> tuple[Tensor, Tensor]:
    """Records → elements float8_e4m3fn [R, D] with one float32 power of two per row [R], the largest of its blocks'.

    Elements of blocks with smaller scales lose the bits that fall below the row's grid; a poisoned block poisons the
    row."""
    scale = split_records(records)[1].amax(-1).int().clamp(min=1)
    values = dequantize_torch(records)
    return elements_torch(values, scale.unsqueeze(-1)).view(torch.float8_e4m3fn), power_of_two_torch(scale)


def swizzled_rows(rows: int, groups: int) -> int:
    """Rows that ``groups`` groups of together at most ``rows`` rows may need when each starts on a tile of 128."""
    return (rows + groups * (TILE_ROWS - 1)) // TILE_ROWS * TILE_ROWS


def swizzle_scales_torch(scales: Tensor, offsets: Tensor, out: Tensor | None = None) -> Tensor:
    """Scale bytes [R, C] in the order block-scaled GEMMs read them: tiles of 128 rows × 4 blocks, 512 bytes each.

    Group e owns rows offsets[e]:offsets[e+1] and starts on a tile of its own. Inside a group, (r, c) goes to byte
    ((r // 128)·⌈C/4⌉ + c // 4)·512 + (r % 32)·16 + (r % 128 // 32)·4 + c % 4. Gives uint8 [swizzled_rows(R, E_l),
    ⌈C/4⌉·4]; what no scale fills is 0 (2^-127), so that nothing there can turn a zero into NaN.
    """
    rows, columns = scales.shape
    tiles = -(-columns // TILE_COLUMNS)
    if out is None:
        out = scales.new_empty((swizzled_rows(rows, offsets.numel() - 1), tiles * TILE_COLUMNS))
    out.zero_()
    flat, first = out.view(-1), 0
    bounds = offsets.tolist()
    for start, end in zip(bounds, bounds[1:], strict=False):
        r = torch.arange(end - start, device=scales.device)[:, None]
        c = torch.arange(columns, device=scales.device)
        tile = (first + r // TILE_ROWS) * tiles + c // TILE_COLUMNS
        flat[tile * 512 + r % 32 * 16 + r % TILE_ROWS // 32 * 4 + c % TILE_COLUMNS] = scales[start:end]
        first += -(-(end - start) // TILE_ROWS)
    return out
