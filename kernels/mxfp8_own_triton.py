"""A rank's own tokens, quantised straight into its own rows, as a Triton kernel: the part of ``quantize_put_rows`` that
crosses no link, and what ``convert_arrived`` makes of it, in one pass.

Legend: T tokens, K routes per token, RB expert rows, D row width, W = D + D/32 bytes of a record.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from torch import Tensor

from .fast_launch import fast
from .mxfp8 import BLOCK as SIZE
from .mxfp8 import record_width
from .mxfp8_triton_common import load_float32, magnitude_bits, power_of_two, round_to_elements, scale_bytes, to_elements
from .triton_common import Launch, narrow, next_power_of_2, require_contiguous, tl, triton

OWN = Launch(1056, warps=32)  # at most so many warps: 16 values for each thread


@triton.jit
def _forms(values, rows, data, CEIL: tl.constexpr):
    """A row float32 [N, 32] as elements and scales of a record, as a plain row, and as elements with one scale; what is
    not wanted is not made."""
    scale = scale_bytes(tl.max(magnitude_bits(values), axis=1), CEIL)
    elements = to_elements(values, scale[:, None])
    decoded = round_to_elements(values, scale[:, None])
    largest = tl.maximum(tl.max(scale, axis=0), 1)
    plain = decoded
    rescaled = elements
    if rows is not None:
        plain = narrow(decoded, rows.dtype.element_ty)
    if data is not None:
        rescaled = to_elements(decoded, largest)
    return elements, scale.to(tl.uint8), plain, rescaled, power_of_two(largest)


@triton.jit
def _write(row, made, records, rows, data, scales, D: tl.constexpr, N: tl.constexpr):
    """What ``_forms`` made, at ``row``, unless that is negative."""
    elements, exponents, plain, rescaled, row_scale = made
    group = tl.arange(0, N)
    cols = group[:, None] * 32 + tl.arange(0, 32)[None, :]
    # Under masks, not branches: those Triton 3.6 cannot compile around a cast that is shared.
    kept = (row + tl.zeros((N,), tl.int64) >= 0) & (group < D // 32)
    record = records + row * (D + D // 32)
    tl.store(record + cols, elements, mask=kept[:, None])
    tl.store(record + D + group, exponents, mask=kept)
    if rows is not None:
        tl.store(rows + row * D + cols, plain, mask=kept[:, None])
    if data is not None:
        tl.store(data + row * D + cols, rescaled, mask=kept[:, None])
        if row >= 0:
            tl.store(scales + row, row_scale)


@fast
@triton.jit(do_not_specialize=["bound", "num_tokens", "own_rank"])
def _quantize_own_rows(
    x,
    records,
    rows,
    data,
    scales,
    bound,
    dest_rank,
    dest_row,
    weights,
    num_tokens,
    own_rank,
    K: tl.constexpr,
    D: tl.constexpr,
    CEIL: tl.constexpr,
    N: tl.constexpr,
):
    group = tl.arange(0, N)
    for t in range(tl.program_id(0).to(tl.int64), num_tokens, tl.num_programs(0)):
        values = load_float32(x + t * D, group, group < D // 32)
        if weights is None:
            made = _forms(values, rows, data, CEIL)
            for k in tl.static_range(K):
                row = _own_row(dest_rank, dest_row, t * K + k, own_rank, bound)
                _write(row, made, records, rows, data, scales, D, N)
        else:
            for k in range(K):  # of the GPU: the compiler takes time by the square of what it unrolls
                row = _own_row(dest_rank, dest_row, t * K + k, own_rank, bound)
                if row >= 0:
                    weighted = _forms(values * tl.load(weights + t * K + k), rows, data, CEIL)
                    _write(row, weighted, records, rows, data, scales, D, N)


@triton.jit
def _own_row(dest_rank, dest_row, route, own_rank, bound):
    """The row of a route that stays, else −1."""
    row = tl.load(dest_row + route).to(tl.int64)
    return tl.where((tl.load(dest_rank + route) == own_rank) & (row < bound), row, -1)


def quantize_own_rows(
    x: Tensor,
    records: Tensor,
    dest_rank: Tensor,
    dest_row: Tensor,
    weights: Tensor | None = None,
    rounding: str = "rceil",
    *,
    own_rank: int,
    rows: Tensor | None = None,
    data: Tensor | None = None,
    scales: Tensor | None = None,
    launch: Launch = OWN,
) -> None:
    """The records of the routes of ``x`` [T, D] that stay, in ``records`` uint8 [RB, W] at their ``dest_row``.

    ``dest_rank``, ``dest_row`` int32 [T, K]: routes of other ranks than ``own_rank``, or of rows outside the records,
    are skipped. ``weights`` float32 [T, K] as in ``quantize_put_rows``. Also written where given, in the same places:
    ``rows`` [RB, D] of a float dtype, ``data`` uint8 [RB, D] with ``scales`` float32 [RB], as in ``convert_arrived``.
    """
    require_contiguous(x=x, records=records, dest_rank=dest_rank, dest_row=dest_row, weights=weights)
    require_contiguous(rows=rows, data=data, scales=scales)
    if (data is None) != (scales is None):
        raise ValueError("data and scales go together")
    num_tokens, top_k = dest_rank.shape
    bound, width = records.shape[0], x.shape[1]
    if record_width(records.shape[1]) != width:
        raise ValueError(f"records {list(records.shape)} do not fit rows {list(x.shape)}")
    for out in (rows, data):
        if out is not None and out.shape != (bound, width):
            raise ValueError(f"rows {list(out.shape)} do not fit records {list(records.shape)}")
    if not num_tokens or not bound:
        return
    block = next_power_of_2(width)
    launch = launch.of_whole_lanes(block, 1)
    _quantize_own_rows[launch.grid(num_tokens)](
        x,
        records,
        rows,
        data,
        scales,
        bound,
        dest_rank,
        dest_row,
        weights,
        num_tokens,
        own_rank,
        K=top_k,
        D=width,
        CEIL=rounding == "rceil",
        N=block // SIZE,
        **launch.options,
    )
