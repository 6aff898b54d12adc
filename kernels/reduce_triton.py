"""Sums of expert rows back into token order, as Triton kernels (see reduce.py for the order of every sum).

Legend: T local tokens, K routes per token, M ranks, R expert rows of which buffers hold RB >= R, D row width, T_max
tokens of a stripe.

A route that is not there adds +0.0 through a masked load rather than being branched around, so that all loads of a
token are under way at once. That changes no bit: a sum that starts from +0.0 is never −0.0.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import torch
from torch import Tensor

from .fast_launch import fast
from .peers import Peers
from .reduce import accumulation_dtype
from .sync_triton import ChunkSignal, last_signals, next_tile, part_edge
from .triton_common import (
    PEER_INTEGERS,
    RANGE_INTEGERS,
    Launch,
    cdiv,
    narrow,
    peer_address,
    require_contiguous,
    rows_at,
    tl,
    triton,
    triton_dtype,
    widen,
)

REDUCE = Launch(264, block=2048)  # an eighth of what an H200 holds: the rest is for sums of chunks that have arrived
SUM = Launch(4224, block=2048)  # many small programs: the sums wait for memory
GET = Launch(1056, block=1024)


@triton.jit
def _weighted_row(y, row, valid, cols, mask, weights, D: tl.constexpr, ACC: tl.constexpr):
    """Row ``row`` of ``y`` (times its weight) in the accumulation dtype, zero unless ``valid``; ``mask``: columns."""
    value = widen(tl.load(y + row * D + cols, mask=mask, other=0.0), ACC)
    if weights is not None:
        value = value * tl.load(weights + row, mask=valid, other=0.0)
    return value


@fast
@triton.jit(do_not_specialize=[*PEER_INTEGERS, *RANGE_INTEGERS, "bound", "rank", "signal_offset"])
def _pre_reduce_put(
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
    ACC: tl.constexpr,
    CHUNKS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    blocks: tl.constexpr = (D + BLOCK - 1) // BLOCK
    end = begin + length
    posted = tl.full((), 0, tl.int64)
    if arrivals is not None:
        posted = tl.load(counter)
    for chunk in range(CHUNKS):
        low = tl.maximum(tl.minimum(part_edge(t_max, chunk, CHUNKS), end), begin)
        high = tl.maximum(tl.minimum(part_edge(t_max, chunk + 1, CHUNKS), end), begin)
        tiles = (high - low + ROWS - 1) // ROWS  # of one source
        tile = next_tile(arrivals, chunk, -1, CHUNKS)
        while tile < tiles * sources:
            source = (first_source + tile // tiles + tl.zeros((), tl.int64)) % world
            address = peer_address(base, handles, handle_stride, max_handle, offset, source)
            t = (low.to(tl.int64) + tile % tiles * ROWS + tl.arange(0, ROWS))[:, None]
            token = source * t_max + t
            there = t < tl.minimum(tl.load(tokens + source), high)
            for block in tl.static_range(blocks):
                cols = (block * BLOCK + tl.arange(0, BLOCK))[None, :]
                total = tl.zeros((ROWS, BLOCK), ACC)
                any_row = t < 0
                for k in tl.static_range(K):
                    row = tl.load(local_rows + token * K + k, mask=there, other=-1).to(tl.int64)
                    valid = (row >= 0) & (row < bound)
                    any_row = any_row | valid
                    total += _weighted_row(y, row, valid, cols, valid & (cols < D), weights, D, ACC)
                if address != 0:
                    out = rows_at(address, y) + (rank * t_max + t) * D + cols
                    tl.store(out, narrow(total, y.dtype.element_ty), mask=any_row & (cols < D))
            tile = next_tile(arrivals, chunk, tile, CHUNKS)
        if arrivals is not None:
            last = last_signals(arrivals + chunk, tl.num_programs(0), posted + chunk + 1, signal_base, signal_offset, M)
            if last:
                tl.store(arrivals + CHUNKS + chunk, 0)
            if last & (chunk == CHUNKS - 1):
                tl.store(counter, posted + CHUNKS)  # every program has read it


def pre_reduce_put(
    y: Tensor,
    local_rows: Tensor,
    tokens: Tensor,
    peers: Peers,
    rank: int,
    weights: Tensor | None = None,
    *,
    first_source: int = 0,
    sources: int | None = None,
    begin: int = 0,
    end: int | None = None,
    signal: ChunkSignal | None = None,
    launch: Launch = REDUCE,
) -> None:
    """Sum this rank's rows of every token and write the partial at its source, as ``pre_reduce_put_torch``.

    ``y`` [RB, D]; ``local_rows`` int32 [M, T_max, K]; ``tokens`` int64 [M]; ``peers`` [M, T_max, D] at each source, of
    which this rank writes [``rank``]; ``weights`` [RB], one per row of ``y``, in the accumulation dtype. Only
    ``sources`` sources from ``first_source`` on (counted round the end) and tokens [``begin``, ``end``) are moved. With
    ``signal`` each chunk of tokens is signalled when its last partial is on its way.
    """
    require_contiguous(y=y, local_rows=local_rows, tokens=tokens, weights=weights)
    world, t_max, top_k = local_rows.shape
    sources = world if sources is None else sources
    end = t_max if end is None else min(end, t_max)
    if (end <= begin or not sources) and signal is None:
        return
    width = y.shape[1]
    block = launch.columns(width)
    rows = launch.rows(block, y.element_size(), end - begin)
    launch = launch.of_whole_lanes(rows * block, y.element_size())
    chunks = 1 if signal is None else signal.chunks
    _pre_reduce_put[launch.grid(cdiv(max(1, end - begin), rows))](
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
        ACC=triton_dtype(accumulation_dtype(y.dtype)),
        CHUNKS=chunks,
        ROWS=rows,
        BLOCK=block,
        **launch.options,
    )


@fast
@triton.jit(do_not_specialize=["t_max", "begin", "end", "own_rank", "bound"])
def _sum_partials(
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
    ACC: tl.constexpr,
    BLOCK: tl.constexpr,
):
    blocks: tl.constexpr = (D + BLOCK - 1) // BLOCK
    first = begin * blocks + tl.program_id(0).to(tl.int64)
    for item in range(first, end * blocks, tl.num_programs(0)):
        t = item // blocks
        cols = (item % blocks) * BLOCK + tl.arange(0, BLOCK)
        named = tl.full((), 0, tl.int64)  # bit p: a route of the token names rank p
        own = tl.zeros((BLOCK,), ACC)
        for k in tl.static_range(K):
            rank = tl.load(dest_rank + t * K + k).to(tl.int64)
            named = named | tl.where(rank >= 0, tl.full((), 1, tl.int64) << tl.maximum(rank, 0), 0)
            if y is not None:
                q = tl.load(dest_row + t * K + k).to(tl.int64)
                valid = (rank == own_rank) & (q >= 0) & (q < bound)
                own += _weighted_row(y, q, valid, cols, cols < tl.where(valid, D, 0), weights, D, ACC)
        own = widen(narrow(own, out.dtype.element_ty), ACC)
        total = tl.zeros((BLOCK,), ACC)
        for p in tl.static_range(M):
            fetch = ((named >> p) & 1) != 0
            if y is not None:
                fetch = fetch & (p != own_rank)
            row = partials + (p * t_max + t) * D + cols
            partial = widen(tl.load(row, mask=cols < tl.where(fetch, D, 0), other=0.0), ACC)
            if y is not None:
                partial = tl.where(p == own_rank, own, partial)
            total += partial
        tl.store(out + t * D + cols, narrow(total, out.dtype.element_ty), mask=cols < D)


def sum_partials(
    partials: Tensor,
    dest_rank: Tensor,
    out: Tensor,
    *,
    y: Tensor | None = None,
    dest_row: Tensor | None = None,
    weights: Tensor | None = None,
    own_rank: int = -1,
    begin: int = 0,
    end: int | None = None,
    launch: Launch = SUM,
) -> None:
    """``out[t]`` = the sum over ranks, ascending, of the token's partials, as ``sum_partials_torch``.

    ``partials`` [M, T_max, D]; ``dest_rank`` int32 [T, K]; ``out`` [T, D]. With ``y`` [RB, D] and ``dest_row`` int32
    [T, K] the partial of ``own_rank`` is not read but made here from this rank's expert rows (times ``weights`` [RB] in
    the accumulation dtype), rounded as if it had been stored. Only tokens [``begin``, ``end``) are summed.
    """
    require_contiguous(partials=partials, dest_rank=dest_rank, out=out, y=y, dest_row=dest_row, weights=weights)
    if (y is None) != (dest_row is None) or (y is None and weights is not None):
        raise ValueError("the own partial needs y and dest_row (and its weights, if any) together")
    end = out.shape[0] if end is None else end
    if end <= begin:
        return
    world, t_max, width = partials.shape
    block = launch.columns(width)
    launch = launch.of_whole_lanes(block, out.element_size())
    _sum_partials[launch.grid((end - begin) * cdiv(width, block))](
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
        ACC=triton_dtype(accumulation_dtype(out.dtype)),
        BLOCK=block,
        **launch.options,
    )


@fast
@triton.jit(do_not_specialize=[*PEER_INTEGERS, "num_rows", "begin", "end"])
def _get_reduce(
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
    ACC: tl.constexpr,
    BLOCK: tl.constexpr,
):
    blocks: tl.constexpr = (D + BLOCK - 1) // BLOCK
    first = begin * blocks + tl.program_id(0).to(tl.int64)
    for item in range(first, end * blocks, tl.num_programs(0)):
        t = item // blocks
        cols = (item % blocks) * BLOCK + tl.arange(0, BLOCK)
        named = tl.full((), 0, tl.int64)  # bit p: a route of the token names rank p
        for k in tl.static_range(K):
            rank = tl.load(dest_rank + t * K + k).to(tl.int64)
            named = named | tl.where(rank >= 0, tl.full((), 1, tl.int64) << tl.maximum(rank, 0), 0)
            if gathered is not None:
                if rank < 0:
                    nothing = tl.zeros((BLOCK,), gathered.dtype.element_ty)
                    tl.store(gathered + (t * K + k) * D + cols, nothing, mask=cols < D)
        total = tl.zeros((BLOCK,), ACC)
        for p in range(M):
            if ((named >> p) & 1) != 0:
                address = peer_address(base, handles, handle_stride, max_handle, offset, p)
                rows = rows_at(address, out)
                partial = tl.zeros((BLOCK,), ACC)
                for k in tl.static_range(K):
                    row = tl.load(dest_row + t * K + k).to(tl.int64)
                    here = tl.load(dest_rank + t * K + k) == p
                    valid = here & (row >= 0) & (row < num_rows) & (address != 0)
                    values = tl.load(rows + row * D + cols, mask=cols < tl.where(valid, D, 0), other=0.0)
                    if gathered is not None:
                        tl.store(gathered + (t * K + k) * D + cols, values, mask=cols < tl.where(here, D, 0))
                    wide = widen(values, ACC)
                    if weights is not None:
                        wide = wide * tl.load(weights + t * K + k, mask=valid, other=0.0)
                    partial += wide
                total += widen(narrow(partial, out.dtype.element_ty), ACC)
        tl.store(out + t * D + cols, narrow(total, out.dtype.element_ty), mask=cols < D)


def get_reduce(
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
    """Pull every route's row and sum them into ``out`` [T, D], as ``get_reduce_torch``.

    ``peers`` [num_rows, D] on each rank; ``dest_rank``, ``dest_row`` int32 [T, K]; ``weights`` [T, K] in the
    accumulation dtype; ``gathered`` [T, K, D] also keeps the rows, as ``get_rows_torch``. Only tokens [``begin``,
    ``end``) are pulled.
    """
    require_contiguous(dest_rank=dest_rank, dest_row=dest_row, weights=weights, out=out, gathered=gathered)
    end = out.shape[0] if end is None else end
    if end <= begin:
        return
    width = out.shape[1]
    block = launch.columns(width)
    launch = launch.of_whole_lanes(block, out.element_size())
    _get_reduce[launch.grid((end - begin) * cdiv(width, block))](
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
        ACC=triton_dtype(accumulation_dtype(out.dtype)),
        BLOCK=block,
        **launch.options,
    )


def sum_routes_triton(
    rows: Tensor, index: Tensor, dest_rank: Tensor, world: int, weights: Tensor | None = None
) -> Tensor:
    """As ``sum_routes_torch``: every rank's rows are pulled from this one tensor."""
    out = rows.new_empty((index.shape[0], rows.shape[1]))
    rows, peers = all_here(rows, world)
    weights = None if weights is None else weights.to(accumulation_dtype(rows.dtype)).contiguous()
    places = dest_rank.contiguous(), index.to(torch.int32).contiguous()
    get_reduce(peers, *places, weights, out, num_rows=rows.shape[0])
    return out


def all_here(rows: Tensor, world: int) -> tuple[Tensor, Peers]:
    """``rows`` as kernels want them, which must outlive their launch, and ``world`` peers that all have these."""
    rows = rows.contiguous()
    if rows.data_ptr() % 16:  # kernels move 16 bytes at a time
        rows = rows.clone()
    return rows, Peers(torch.full((world,), rows.data_ptr(), dtype=torch.int64, device=rows.device))  # no copy there
