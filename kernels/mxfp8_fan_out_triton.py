"""From staged records to rows that a GEMM reads, in one pass, as a Triton kernel (see fan_out.py for the movement).

Legend: M ranks, T_max tokens of a stripe, K routes per token, R expert rows of which buffers hold RB >= R, D row width,
W = D + D/32 bytes of a record.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from torch import Tensor

from .fast_launch import fast
from .mxfp8 import BLOCK as SIZE
from .mxfp8 import record_width
from .mxfp8_triton import row_scale, rows_of
from .mxfp8_triton_common import load_values, power_of_two, to_elements
from .triton_common import RANGE_INTEGERS, Launch, narrow, next_power_of_2, require_contiguous, tl, triton

FAN_OUT = Launch(2112)
ROWS = Launch(16384)  # few rows for each, since those of one part are not spread evenly


def block_of(launch: Launch, plain: bool) -> int:
    """Columns that a program moves at once: 16 bytes of what is written for each of its threads."""
    return launch.block or launch.warps * 32 * (8 if plain else 16)


@triton.jit
def _converted(record, group, scale, rows, data, D: tl.constexpr):
    """Blocks ``group`` of a record as they are written to ``rows`` and to ``data``; what is not wanted is not made."""
    values = load_values(record, group, D, 0, D)
    plain = values
    elements = values
    if rows is not None:
        plain = narrow(values, rows.dtype.element_ty)
    if data is not None:
        elements = to_elements(values, scale)
    return plain, elements


@fast
@triton.jit(do_not_specialize=[*RANGE_INTEGERS, "bound", "own_rank", "own_tokens"])
def _fan_out_records(
    stage,
    own,
    local_rows,
    tokens,
    rows,
    data,
    scales,
    weights,
    weights_out,
    routes_out,
    bound,
    first_source,
    sources,
    world,
    begin,
    length,
    t_max,
    own_rank,
    own_tokens,
    K: tl.constexpr,
    D: tl.constexpr,
    GROUPS: tl.constexpr,
    N: tl.constexpr,
):
    W: tl.constexpr = D + D // 32
    first = tl.program_id(0).to(tl.int64)
    for i in range(sources):
        source = (first_source + i + tl.zeros((), tl.int64)) % world
        count = tl.minimum(tl.load(tokens + source) - begin, length)
        for item in range(first, count, tl.num_programs(0)):
            t = begin + item
            token = source * t_max + t
            wanted = tl.load(local_rows + token * K) >= 0
            for k in tl.static_range(1, K):
                wanted = wanted | (tl.load(local_rows + token * K + k) >= 0)
            record = stage + token * W
            if own is not None:
                if source == own_rank:
                    record = own + tl.minimum(t, own_tokens - 1) * W
            if wanted:
                _write_token(
                    record, local_rows, token * K, rows, data, scales, weights, weights_out, routes_out, bound,
                    K, D, GROUPS, N,
                )  # fmt: skip


@triton.jit
def _write_token(
    record,
    local_rows,
    route,
    rows,
    data,
    scales,
    weights,
    weights_out,
    routes_out,
    bound,
    K: tl.constexpr,
    D: tl.constexpr,
    GROUPS: tl.constexpr,
    N: tl.constexpr,
):
    """A token's record in the rows of all its routes, of which ``route`` is the first."""
    scale = tl.full((), 1, tl.int32)
    if data is not None:
        scale = row_scale(record, D, GROUPS)
    for block in range((D // 32 + N - 1) // N):
        group = block * N + tl.arange(0, N)
        inside = (group < D // 32)[:, None]
        cols = group[:, None] * 32 + tl.arange(0, 32)[None, :]
        plain, elements = _converted(record, group, scale, rows, data, D)
        for k in tl.static_range(K):
            row = tl.load(local_rows + route + k).to(tl.int64)
            there = row + tl.zeros((N, 1), tl.int64)
            kept = (there >= 0) & (there < bound) & inside
            # Under masks, not branches: those Triton 3.6 cannot compile around a cast that is shared.
            if rows is not None:
                tl.store(rows + there * D + cols, plain, mask=kept)
            if data is not None:
                tl.store(data + there * D + cols, elements, mask=kept)
            if (row >= 0) & (row < bound):
                if block == 0:
                    if data is not None:
                        tl.store(scales + row, power_of_two(scale))
                    if weights is not None:
                        tl.store(weights_out + row, tl.load(weights + route + k))
                    if routes_out is not None:
                        tl.store(routes_out + row, route + k)


def fan_out_records(
    stage: Tensor,
    local_rows: Tensor,
    tokens: Tensor,
    *,
    rows: Tensor | None = None,
    data: Tensor | None = None,
    scales: Tensor | None = None,
    weights: Tensor | None = None,
    weights_out: Tensor | None = None,
    route_of_row: Tensor | None = None,
    own: Tensor | None = None,
    own_rank: int = -1,
    first_source: int = 0,
    sources: int | None = None,
    begin: int = 0,
    end: int | None = None,
    launch: Launch = FAN_OUT,
) -> None:
    """Write every staged token's record, decoded or rescaled, to its rows: read once, stored as often as it has routes.

    ``stage`` uint8 [M·T_max, W]. Written where given: ``rows`` [RB, D] of a float dtype (as ``dequantize_torch``),
    ``data`` uint8 [RB, D] (E4M3) with ``scales`` float32 [RB] (as ``rescale_torch``). ``own`` uint8 [T, W]: the records
    of ``own_rank``'s tokens are read from here instead of the stage. The other arguments are those of ``fan_out``.
    """
    require_contiguous(stage=stage, local_rows=local_rows, tokens=tokens, rows=rows, data=data, scales=scales, own=own)
    if (weights is None) != (weights_out is None):
        raise ValueError("weights and weights_out go together")
    if (data is None) != (scales is None):
        raise ValueError("data and scales go together")
    out = rows if rows is not None else data
    if out is None:
        raise ValueError("nothing to write: give rows, or data and scales")
    world, t_max, top_k = local_rows.shape
    sources = world if sources is None else sources
    end = t_max if end is None else min(end, t_max)
    if end <= begin or not sources:
        return
    width = record_width(stage.shape[1])
    if out.shape[1] != width or (rows is not None and data is not None and rows.shape != data.shape):
        raise ValueError(f"records of {width} values do not fit rows of {out.shape[1]}")
    block = block_of(launch, rows is not None)
    _fan_out_records[launch.grid(end - begin)](
        stage,
        own,
        local_rows,
        tokens,
        rows,
        data,
        scales,
        weights,
        weights_out,
        route_of_row,
        out.shape[0],
        first_source,
        sources,
        world,
        begin,
        end - begin,
        t_max,
        own_rank,
        0 if own is None else own.shape[0],
        K=top_k,
        D=width,
        GROUPS=next_power_of_2(width // SIZE),
        N=block // SIZE,
        **launch.options,
    )


@fast
@triton.jit(do_not_specialize=["bound", "begin", "end", "t_max", "skip_source"])
def _convert_arrived(
    records,
    routes,
    rows,
    data,
    scales,
    num_rows,
    bound,
    begin,
    end,
    t_max,
    skip_source,
    K: tl.constexpr,
    D: tl.constexpr,
    GROUPS: tl.constexpr,
    N: tl.constexpr,
):
    blocks: tl.constexpr = (D // 32 + N - 1) // N
    for row in range(tl.program_id(0).to(tl.int64), rows_of(num_rows, bound), tl.num_programs(0)):
        route = tl.load(routes + row)
        token = route // K
        t = token % t_max
        if (route >= 0) & (t >= begin) & (t < end) & (token // t_max != skip_source):
            record = records + row * (D + D // 32)
            scale = tl.full((), 1, tl.int32)
            if data is not None:
                scale = row_scale(record, D, GROUPS)
                tl.store(scales + row, power_of_two(scale))
            for block in range(blocks):
                group = block * N + tl.arange(0, N)
                inside = (group < D // 32)[:, None]
                cols = group[:, None] * 32 + tl.arange(0, 32)[None, :]
                plain, elements = _converted(record, group, scale, rows, data, D)
                if rows is not None:
                    tl.store(rows + row * D + cols, plain, mask=inside)
                if data is not None:
                    tl.store(data + row * D + cols, elements, mask=inside)


def convert_arrived(
    records: Tensor,
    routes: Tensor,
    num_rows: Tensor,
    *,
    top_k: int,
    max_tokens: int,
    rows: Tensor | None = None,
    data: Tensor | None = None,
    scales: Tensor | None = None,
    begin: int = 0,
    end: int | None = None,
    skip_source: int = -1,
    launch: Launch = ROWS,
) -> None:
    """Decode or rescale, in place of arrival, the rows whose tokens lie in [``begin``, ``end``) at their sources,
    ``skip_source`` left out.

    ``records`` uint8 [RB, W]; ``routes`` int64 [RB] = (source·``max_tokens`` + t)·``top_k`` + k; ``num_rows`` int64 [1]
    on the device. Outputs as in ``fan_out_records``.
    """
    require_contiguous(records=records, routes=routes, rows=rows, data=data, scales=scales)
    out = rows if rows is not None else data
    if out is None or (data is None) != (scales is None):
        raise ValueError("give rows, or data and scales, or all three")
    bound, width = out.shape
    if records.shape[0] < bound or record_width(records.shape[1]) != width:
        raise ValueError(f"records {list(records.shape)} do not fit rows {list(out.shape)}")
    if not bound:
        return
    _convert_arrived[launch.grid(bound)](
        records,
        routes,
        rows,
        data,
        scales,
        num_rows,
        bound,
        begin,
        max_tokens if end is None else end,
        max_tokens,
        skip_source,
        K=top_k,
        D=width,
        GROUPS=next_power_of_2(width // SIZE),
        N=block_of(launch, rows is not None) // SIZE,
        **launch.options,
    )
