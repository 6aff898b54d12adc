"""Between rows and MXFP8 records, as Triton kernels (see mxfp8.py for the rules; results are bit-equal).

Legend: R rows of which tensors hold RB >= R, D values of a row, C = D/32 blocks of a row, E_l groups of rows. Where
``num_rows`` (int64 [1] on the device) is given, R is read there and rows past it are neither read nor written;
otherwise R = RB.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from torch import Tensor

from .fast_launch import fast
from .mxfp8 import BLOCK as SIZE
from .mxfp8 import record_bytes, record_width
from .mxfp8_triton_common import (
    load_float32,
    load_values,
    magnitude_bits,
    power_of_two,
    scale_bytes,
    store_values,
    to_elements,
)
from .triton_common import Launch, cdiv, narrow, next_power_of_2, require_contiguous, tl, triton

ENCODE = Launch(4224, block=2048)
DECODE = Launch(4224, block=1024)  # 16 bytes of bfloat16 for each of 128 threads
ROWS = Launch(4224, block=1024)  # a program makes whole rows
SWIZZLE = Launch(1056)


@triton.jit
def rows_of(num_rows, bound):
    """How many rows there are, as int64."""
    rows = bound + tl.zeros((), tl.int64)
    if num_rows is not None:
        rows = tl.minimum(tl.maximum(tl.load(num_rows), 0), rows)
    return rows


@fast
@triton.jit(do_not_specialize=["bound"])
def _quantize(x, records, row_weight, num_rows, bound, D: tl.constexpr, CEIL: tl.constexpr, N: tl.constexpr):
    blocks: tl.constexpr = (D // 32 + N - 1) // N
    first = tl.program_id(0).to(tl.int64)
    for item in range(first, rows_of(num_rows, bound) * blocks, tl.num_programs(0)):
        row = item // blocks
        group = (item % blocks) * N + tl.arange(0, N)
        inside = group < D // 32
        values = load_float32(x + row * D, group, inside)
        if row_weight is not None:
            values = values * tl.load(row_weight + row)
        store_values(records + row * (D + D // 32), values, group, inside, D, 0, CEIL)


def quantize(
    x: Tensor,
    records: Tensor,
    rounding: str = "rceil",
    *,
    row_weight: Tensor | None = None,
    num_rows: Tensor | None = None,
    launch: Launch = ENCODE,
) -> None:
    """``x`` [RB, D] (times ``row_weight`` float32 [RB]) → ``records`` uint8 [RB, D + D/32], as ``quantize_torch``."""
    require_contiguous(x=x, records=records, row_weight=row_weight)
    rows, width = x.shape
    check_record(records, rows, width)
    if not rows:
        return
    block = launch.columns(width)
    _quantize[launch.grid(rows * cdiv(width, block))](
        x, records, row_weight, num_rows, rows, D=width, CEIL=rounding == "rceil", N=block // SIZE, **launch.options
    )


@fast
@triton.jit(do_not_specialize=["bound"])
def _dequantize(records, out, num_rows, bound, D: tl.constexpr, N: tl.constexpr):
    blocks: tl.constexpr = (D // 32 + N - 1) // N
    first = tl.program_id(0).to(tl.int64)
    for item in range(first, rows_of(num_rows, bound) * blocks, tl.num_programs(0)):
        row = item // blocks
        group = (item % blocks) * N + tl.arange(0, N)
        values = load_values(records + row * (D + D // 32), group, D, 0, D)
        cols = group[:, None] * 32 + tl.arange(0, 32)[None, :]
        tl.store(out + row * D + cols, narrow(values, out.dtype.element_ty), mask=(group < D // 32)[:, None])


def dequantize(records: Tensor, out: Tensor, *, num_rows: Tensor | None = None, launch: Launch = DECODE) -> None:
    """``records`` uint8 [RB, D + D/32] → ``out`` [RB, D] of any float dtype, as ``dequantize_torch``."""
    require_contiguous(records=records, out=out)
    rows, width = out.shape
    check_record(records, rows, width)
    if not rows:
        return
    block = launch.columns(width)
    _dequantize[launch.grid(rows * cdiv(width, block))](
        records, out, num_rows, rows, D=width, N=block // SIZE, **launch.options
    )


@fast
@triton.jit(do_not_specialize=["bound"])
def _quantize_rowwise(x, data, scales, num_rows, bound, D: tl.constexpr, CEIL: tl.constexpr, N: tl.constexpr):
    blocks: tl.constexpr = (D // 32 + N - 1) // N
    for row in range(tl.program_id(0).to(tl.int64), rows_of(num_rows, bound), tl.num_programs(0)):
        largest = tl.zeros((N,), tl.int32)
        for block in range(blocks):
            group = block * N + tl.arange(0, N)
            values = load_float32(x + row * D, group, group < D // 32)
            largest = tl.maximum(largest, tl.max(magnitude_bits(values), axis=1))
        scale = tl.maximum(scale_bytes(tl.max(largest, axis=0), CEIL), 1)
        tl.store(scales + row, power_of_two(scale))
        for block in range(blocks):
            group = block * N + tl.arange(0, N)
            inside = group < D // 32
            values = load_float32(x + row * D, group, inside)  # from the cache
            cols = group[:, None] * 32 + tl.arange(0, 32)[None, :]
            tl.store(data + row * D + cols, to_elements(values, scale), mask=inside[:, None])


def quantize_rowwise(
    x: Tensor,
    data: Tensor,
    scales: Tensor,
    rounding: str = "rceil",
    *,
    num_rows: Tensor | None = None,
    launch: Launch = ROWS,
) -> None:
    """``x`` [RB, D] → ``data`` uint8 [RB, D] (E4M3) and ``scales`` float32 [RB], as ``quantize_rowwise_torch``."""
    require_contiguous(x=x, data=data, scales=scales)
    rows, width = x.shape
    record_bytes(width)
    if not rows:
        return
    block = launch.columns(width)
    _quantize_rowwise[launch.grid(rows)](
        x, data, scales, num_rows, rows, D=width, CEIL=rounding == "rceil", N=block // SIZE, **launch.options
    )


@triton.jit
def row_scale(record, D: tl.constexpr, GROUPS: tl.constexpr):
    """The largest scale byte (int32, at least 1) of the record of width D; GROUPS is a power of two >= D/32."""
    group = tl.arange(0, GROUPS)
    scale = tl.load(record + D + group, mask=group < D // 32, other=0).to(tl.int32)
    return tl.maximum(tl.max(scale, axis=0), 1)


@fast
@triton.jit(do_not_specialize=["bound"])
def _rescale(records, data, scales, num_rows, bound, D: tl.constexpr, GROUPS: tl.constexpr, N: tl.constexpr):
    blocks: tl.constexpr = (D // 32 + N - 1) // N
    for row in range(tl.program_id(0).to(tl.int64), rows_of(num_rows, bound), tl.num_programs(0)):
        record = records + row * (D + D // 32)
        scale = row_scale(record, D, GROUPS)
        tl.store(scales + row, power_of_two(scale))
        for block in range(blocks):
            group = block * N + tl.arange(0, N)
            cols = group[:, None] * 32 + tl.arange(0, 32)[None, :]
            elements = to_elements(load_values(record, group, D, 0, D), scale)
            tl.store(data + row * D + cols, elements, mask=(group < D // 32)[:, None])


def rescale(
    records: Tensor, data: Tensor, scales: Tensor, *, num_rows: Tensor | None = None, launch: Launch = ROWS
) -> None:
    """``records`` uint8 [RB, D + D/32] → ``data`` uint8 [RB, D] (E4M3), ``scales`` float32 [RB], as
    ``rescale_torch``."""
    require_contiguous(records=records, data=data, scales=scales)
    rows, width = data.shape
    check_record(records, rows, width)
    if not rows:
        return
    block = launch.columns(width)
    groups = next_power_of_2(width // SIZE)
    _rescale[launch.grid(rows)](
        records, data, scales, num_rows, rows, D=width, GROUPS=groups, N=block // SIZE, **launch.options
    )


@fast
@triton.jit(do_not_specialize=["stride", "bound", "tiles", "groups"])
def _swizzle(scales, offsets, out, stride, bound, tiles, groups, C: tl.constexpr):
    """One program, one tile of 128 rows × 4 blocks at a time."""
    across: tl.constexpr = (C + 3) // 4
    i = tl.arange(0, 512)
    in_row = i % 16 // 4 * 32 + i // 16
    for tile in range(tl.program_id(0).to(tl.int64), tiles * across, tl.num_programs(0)):
        band = tile // across
        # The group whose tiles hold this band, and the band's first row in it.
        begin = tl.full((), 0, tl.int64)
        end = tl.full((), 0, tl.int64)
        bands = tl.full((), 0, tl.int64)
        for e in range(groups):
            start = tl.load(offsets + e)
            stop = tl.load(offsets + e + 1)
            here = (stop - start + 127) // 128
            mine = (band >= bands) & (band < bands + here)
            begin = tl.where(mine, start + (band - bands) * 128, begin)
            end = tl.where(mine, tl.minimum(stop, bound), end)
            bands += here
        row = begin + in_row
        col = tile % across * 4 + i % 4
        value = tl.load(scales + row * stride + col, mask=(row < end) & (col < C), other=0)
        tl.store(out + tile * 512 + i, value)


def swizzle_scales(scales: Tensor, offsets: Tensor, out: Tensor, *, launch: Launch = SWIZZLE) -> None:
    """``scales`` uint8 [RB, C] (rows may lie apart) → ``out`` uint8 [swizzled_rows(RB, E_l), ⌈C/4⌉·4], as
    ``swizzle_scales_torch``; ``offsets`` int64 [E_l + 1] on the device."""
    require_contiguous(offsets=offsets, out=out)
    if scales.stride(1) != 1:
        raise ValueError(f"scales {list(scales.shape)} have strides {scales.stride()}; a row's must lie together")
    if not out.numel():
        return
    columns = scales.shape[1]
    _swizzle[launch.grid(out.numel() // 512)](
        scales,
        offsets,
        out,
        scales.stride(0),
        scales.shape[0],
        out.shape[0] // 128,
        offsets.numel() - 1,
        C=columns,
        **launch.options,
    )


def check_record(records: Tensor, rows: int, width: int) -> None:
    """``ValueError`` unless ``records`` are ``rows`` rows of ``width`` values."""
    if tuple(records.shape) != (rows, record_bytes(width)):
        raise ValueError(
            f"records {list(records.shape)} of {record_width(records.shape[-1])} values do not fit [{rows}, {width}]"
        )
