"""Sums of expert rows where MXFP8 records travel, as Triton kernels (see mxfp8_reduce.py and reduce_triton.py).

Legend: T local tokens, K routes per token, M ranks, R expert rows of which buffers hold RB >= R, D row width, W = D +
D/32 bytes of a record, T_max tokens of a stripe. Tiles are [N blocks, 32].
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import torch
from torch import Tensor

from .fast_launch import fast
from .mxfp8 import BLOCK as SIZE
from .mxfp8 import record_bytes, record_width
from .mxfp8_triton_common import (
    bytes_at,
    load_blocks,
    load_float32,
    load_values,
    magnitude_bits,
    scale_bytes,
    store_values,
    to_elements,
    to_values,
)
from .peers import Peers
from .reduce_triton import all_here
from .sync_triton import ChunkSignal, last_signals, part_edge
from .triton_common import (
    PEER_INTEGERS,
    RANGE_INTEGERS,
    Launch,
    cdiv,
    narrow,
    peer_address,
    require_contiguous,
    tl,
    triton,
    widen,
)

REDUCE = Launch(528, block=2048)  # all of them resident, so that a chunk is signalled before the next is begun
SUM = Launch(4224, block=1024)  # 16 bytes of bfloat16 for each of 128 threads
GET = Launch(1056, block=1024)


@triton.jit
def _weighted_row(y, row, valid, group, weights, D: tl.constexpr):
    """Row ``row`` of ``y`` (times its weight) in float32, zero unless ``valid``."""
    value = load_float32(y + row * D, group, group < tl.where(valid, D // 32, 0))
    if weights is not None:
        value = value * tl.load(weights + row, mask=valid, other=0.0)
    return value


@triton.jit
def _put_partial(
    address, partial, y, weights, rows, bound, group, K: tl.constexpr, D: tl.constexpr, CEIL: tl.constexpr
):
    """Sum the K rows of ``y`` that are named at pointer ``rows``; write it as record ``partial`` at ``address`` if any
    is there."""
    total = tl.zeros((group.shape[0], 32), tl.float32)
    any_row = address < 0
    for k in tl.static_range(K):
        row = tl.load(rows + k).to(tl.int64)
        valid = (row >= 0) & (row < bound)
        any_row = any_row | valid
        total += _weighted_row(y, row, valid, group, weights, D)
    if any_row & (address != 0):
        record = bytes_at(address) + partial * (D + D // 32)
        store_values(record, total, group, group < D // 32, D, 0, CEIL)


@fast
@triton.jit(do_not_specialize=[*PEER_INTEGERS, *RANGE_INTEGERS, "bound", "rank", "signal_offset"])
def _pre_reduce_put_records(
    y,
    weights,
    local_rows,
    tokens,
    base,
    handles,
    handle_stride,
    max_handle,
    offset,
    bound,
    rank,
    first_source,
    sources,
    world,
    begin,
    length,
    t_max,
    arrivals,
    counter,
    signal_base,
    signal_offset,
    M: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    CEIL: tl.constexpr,
    CHUNKS: tl.constexpr,
    N: tl.constexpr,
):
    blocks: tl.constexpr = (D // 32 + N - 1) // N
    first = tl.program_id(0).to(tl.int64)
    end = begin + length
    posted = tl.full((), 0, tl.int64)
    if arrivals is not None:
        posted = tl.load(counter)
    for chunk in range(CHUNKS):
        low = tl.maximum(tl.minimum(part_edge(t_max, chunk, CHUNKS), end), begin)
        high = tl.maximum(tl.minimum(part_edge(t_max, chunk + 1, CHUNKS), end), begin)
        for i in range(sources):
            source = (first_source + i + tl.zeros((), tl.int64)) % world
            address = peer_address(base, handles, handle_stride, max_handle, offset, source)
            count = tl.minimum(tl.load(tokens + source), high) - low
            for item in range(first, count * blocks, tl.num_programs(0)):
                t = low + item // blocks
                group = (item % blocks) * N + tl.arange(0, N)
                token = source * t_max + t
                rows = local_rows + token * K
                _put_partial(address, rank * t_max + t, y, weights, rows, bound, group, K, D, CEIL)
        if arrivals is not None:
            last = last_signals(arrivals + chunk, tl.num_programs(0), posted + chunk + 1, signal_base, signal_offset, M)
            if last & (chunk == CHUNKS - 1):
                tl.store(counter, posted + CHUNKS)  # every program has read it


def pre_reduce_put_records(
    y: Tensor,
    local_rows: Tensor,
    tokens: Tensor,
    peers: Peers,
    rank: int,
    weights: Tensor | None = None,
    rounding: str = "rceil",
    *,
    first_source: int = 0,
    sources: int | None = None,
    begin: int = 0,
    end: int | None = None,
    signal: ChunkSignal | None = None,
    launch: Launch = REDUCE,
) -> None:
    """Sum this rank's rows of every token and write the quantised partial at its source, as
    ``pre_reduce_put_records_torch``.

    ``y`` [RB, D]; ``peers`` uint8 [M, T_max, W] at each source; ``weights`` float32 [RB], one per row of ``y``; the
    other arguments are those of ``pre_reduce_put``.
    """
    require_contiguous(y=y, local_rows=local_rows, tokens=tokens, weights=weights)
    world, t_max, top_k = local_rows.shape
    sources = world if sources is None else sources
    end = t_max if end is None else min(end, t_max)
    if (end <= begin or not sources) and signal is None:
        return
    width = y.shape[1]
    record_bytes(width)
    block = launch.columns(width)
    _pre_reduce_put_records[launch.grid(max(1, end - begin) * cdiv(width, block))](
        y,
        weights,
        local_rows,
        tokens,
        *peers.arguments,
        y.shape[0],
        rank,
        first_source,
        sources,
        world,
        begin,
        end - begin,
        t_max,
        *ChunkSignal.arguments(signal),
        M=world,
        K=top_k,
        D=width,
        CEIL=rounding == "rceil",
        CHUNKS=1 if signal is None else signal.chunks,
        N=block // SIZE,
        **launch.options,
    )


@triton.jit
def _once_quantised(values, CEIL: tl.constexpr):
    """What float32 [N, 32] is after a record has carried it."""
    scale = scale_bytes(tl.max(magnitude_bits(values), axis=1), CEIL)[:, None]
    return to_values(to_elements(values, scale), scale)


@fast
@triton.jit(do_not_specialize=["t_max", "begin", "end", "own_rank", "bound"])
def _sum_partial_records(
    partials,
    dest_rank,
    out,
    t_max,
    begin,
    end,
    y,
    dest_row,
    weights,
    own_rank,
    bound,
    M: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    CEIL: tl.constexpr,
    N: tl.constexpr,
):
    blocks: tl.constexpr = (D // 32 + N - 1) // N
    first = begin * blocks + tl.program_id(0).to(tl.int64)
    for item in range(first, end * blocks, tl.num_programs(0)):
        t = item // blocks
        group = (item % blocks) * N + tl.arange(0, N)
        named = tl.full((), 0, tl.int64)  # bit p: a route of the token names rank p
        own = tl.zeros((N, 32), tl.float32)
        for k in tl.static_range(K):
            rank = tl.load(dest_rank + t * K + k).to(tl.int64)
            named = named | tl.where(rank >= 0, tl.full((), 1, tl.int64) << tl.maximum(rank, 0), 0)
            if y is not None:
                q = tl.load(dest_row + t * K + k).to(tl.int64)
                valid = (rank == own_rank) & (q >= 0) & (q < bound)
                own += _weighted_row(y, q, valid, group, weights, D)
        own = _once_quantised(own, CEIL)
        total = tl.zeros((N, 32), tl.float32)
        for p in tl.static_range(M):
            fetch = ((named >> p) & 1) != 0
            if y is not None:
                fetch = fetch & (p != own_rank)
            record = partials + (p * t_max + t) * (D + D // 32)
            partial = load_values(record, tl.where(fetch, group, D), D, 0, D)
            if y is not None:
                partial = tl.where(p == own_rank, own, partial)
            total += partial
        cols = group[:, None] * 32 + tl.arange(0, 32)[None, :]
        tl.store(out + t * D + cols, narrow(total, out.dtype.element_ty), mask=(group < D // 32)[:, None])


def sum_partial_records(
    partials: Tensor,
    dest_rank: Tensor,
    out: Tensor,
    *,
    y: Tensor | None = None,
    dest_row: Tensor | None = None,
    weights: Tensor | None = None,
    own_rank: int = -1,
    rounding: str = "rceil",
    begin: int = 0,
    end: int | None = None,
    launch: Launch = SUM,
) -> None:
    """``out[t]`` = the sum over ranks, ascending, of the token's partials, as ``sum_partial_records_torch``.

    ``partials`` uint8 [M, T_max, W]; the other arguments are those of ``sum_partials``: with ``y`` the own rank's
    partial is made here, quantised as if it had travelled.
    """
    require_contiguous(partials=partials, dest_rank=dest_rank, out=out, y=y, dest_row=dest_row, weights=weights)
    if (y is None) != (dest_row is None) or (y is None and weights is not None):
        raise ValueError("the own partial needs y and dest_row (and its weights, if any) together")
    end = out.shape[0] if end is None else end
    if end <= begin:
        return
    world, t_max, nbytes = partials.shape
    width = record_width(nbytes)
    block = launch.columns(width)
    _sum_partial_records[launch.grid((end - begin) * cdiv(width, block))](
        partials,
        dest_rank,
        out,
        t_max,
        begin,
        end,
        y,
        dest_row,
        weights,
        own_rank,
        0 if y is None else y.shape[0],
        M=world,
        K=dest_rank.shape[1],
        D=width,
        CEIL=rounding == "rceil",
        N=block // SIZE,
        **launch.options,
    )


@triton.jit
def _sum_records(
    records,
    route,
    rank,
    dest_rank,
    dest_row,
    num_rows,
    good,
    group,
    weights,
    gathered,
    K: tl.constexpr,
    D: tl.constexpr,
):
    """The sum of a token's K ``records`` of one rank (times their weights), which are also ``gathered``; ``route`` is
    its first."""
    total = tl.zeros((group.shape[0], 32), tl.float32)
    for k in tl.static_range(K):
        row = tl.load(dest_row + route + k).to(tl.int64)
        here = tl.load(dest_rank + route + k) == rank
        valid = here & (row >= 0) & (row < num_rows) & good
        wanted = tl.where(valid, group, D)
        data, scale = load_blocks(records + row * (D + D // 32), wanted, D, 0, D)
        value = to_values(data, scale[:, None])
        if gathered is not None:
            kept = gathered + (route + k) * (D + D // 32)
            mine = wanted < D // 32
            cols = group[:, None] * 32 + tl.arange(0, 32)[None, :]
            tl.store(kept + cols, data, mask=mine[:, None])
            tl.store(kept + D + group, scale.to(tl.uint8), mask=mine)
        if weights is not None:
            value = value * tl.load(weights + route + k, mask=valid, other=0.0)
        total += value
    return total


@fast
@triton.jit(do_not_specialize=[*PEER_INTEGERS, "num_rows", "begin", "end"])
def _get_reduce_records(
    base,
    handles,
    handle_stride,
    max_handle,
    offset,
    num_rows,
    dest_rank,
    dest_row,
    weights,
    out,
    gathered,
    begin,
    end,
    M: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    N: tl.constexpr,
):
    blocks: tl.constexpr = (D // 32 + N - 1) // N
    first = begin * blocks + tl.program_id(0).to(tl.int64)
    for item in range(first, end * blocks, tl.num_programs(0)):
        t = item // blocks
        group = (item % blocks) * N + tl.arange(0, N)
        named = tl.full((), 0, tl.int64)  # bit p: a route of the token names rank p
        for k in tl.static_range(K):
            rank = tl.load(dest_rank + t * K + k).to(tl.int64)
            named = named | tl.where(rank >= 0, tl.full((), 1, tl.int64) << tl.maximum(rank, 0), 0)
        total = tl.zeros((N, 32), tl.float32)
        for p in range(M):
            if ((named >> p) & 1) != 0:
                address = peer_address(base, handles, handle_stride, max_handle, offset, p)
                rows = bytes_at(address)
                partial = _sum_records(
                    rows, t * K, p, dest_rank, dest_row, num_rows, address != 0, group, weights, gathered, K, D
                )
                total += widen(narrow(partial, out.dtype.element_ty), tl.float32)
        cols = group[:, None] * 32 + tl.arange(0, 32)[None, :]
        tl.store(out + t * D + cols, narrow(total, out.dtype.element_ty), mask=(group < D // 32)[:, None])


def get_reduce_records(
    peers: Peers,
    dest_rank: Tensor,
    dest_row: Tensor,
    weights: Tensor | None,
    out: Tensor,
    *,
    num_rows: int,
    gathered: Tensor | None = None,
    begin: int = 0,
    end: int | None = None,
    launch: Launch = GET,
) -> None:
    """Pull every route's record and sum them into ``out`` [T, D], as ``get_reduce_records_torch``.

    ``peers`` uint8 [num_rows, W] on each rank; ``dest_rank``, ``dest_row`` int32 [T, K]; ``weights`` float32 [T, K].
    ``gathered`` uint8 [T, K, W], zeroed, receives the records themselves. Only tokens [``begin``, ``end``) are pulled.
    """
    require_contiguous(dest_rank=dest_rank, dest_row=dest_row, weights=weights, out=out, gathered=gathered)
    end = out.shape[0] if end is None else end
    if end <= begin:
        return
    width = out.shape[1]
    record_bytes(width)
    block = launch.columns(width)
    _get_reduce_records[launch.grid((end - begin) * cdiv(width, block))](
        *peers.arguments,
        num_rows,
        dest_rank,
        dest_row,
        weights,
        out,
        gathered,
        begin,
        end,
        M=peers.world,
        K=dest_rank.shape[1],
        D=width,
        N=block // SIZE,
        **launch.options,
    )


def sum_route_records_triton(
    records: Tensor, index: Tensor, dest_rank: Tensor, world: int, weights: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """As ``sum_route_records``: every rank's records are pulled from this one tensor."""
    out = torch.empty((index.shape[0], record_width(records.shape[1])), dtype=dtype, device=records.device)
    records, peers = all_here(records, world)
    weights = None if weights is None else weights.to(torch.float32).contiguous()
    places = dest_rank.contiguous(), index.to(torch.int32).contiguous()
    get_reduce_records(peers, *places, weights, out, num_rows=records.shape[0])
    return out
