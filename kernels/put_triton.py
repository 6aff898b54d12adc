"""One-sided writes of token rows into other ranks' memory, as Triton kernels (see put.py for what each one does).

Legend: T local tokens, K routes per token, M ranks, D row width. A destination rank outside [0, M) or a row outside the
destination's rows is skipped. Rows are moved in blocks of columns; one work item is one (token, block).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import torch
from torch import Tensor

from .fast_launch import fast
from .peers import Peers
from .sync_triton import ChunkSignal, last_signals, next_tile, part_edge
from .triton_common import (
    PEER_INTEGERS,
    Launch,
    cdiv,
    narrow,
    next_power_of_2,
    peer_address,
    require_contiguous,
    rows_at,
    tl,
    triton,
    triton_dtype,
    widen,
)

# A row per route: nothing runs beside it, so all multiprocessors write at once.
PUT = Launch(132, warps=32, tile=1 << 17)
# One row per rank: few programs that each take a multiprocessor whole and have 128 KiB under way fill the link. Their
# stores wait for it, and would hold up those of every other program on the same multiprocessor.
UNIQUE = Launch(24, warps=32, tile=1 << 17)
META = Launch(1024)


@fast
@triton.jit(do_not_specialize=[*PEER_INTEGERS, "num_rows", "num_tokens"])
def _put_rows(
    x,
    base,
    handles,
    handle_stride,
    max_handle,
    offset,
    num_rows,
    dest_rank,
    dest_row,
    scale,
    num_tokens,
    M: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    BY_ROUTE: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK: tl.constexpr,
):
    blocks: tl.constexpr = (D + BLOCK - 1) // BLOCK
    first = tl.program_id(0).to(tl.int64)
    for item in range(first, num_tokens * blocks, tl.num_programs(0)):
        t = item // blocks
        cols = (item % blocks) * BLOCK + tl.arange(0, BLOCK)
        if not BY_ROUTE:
            values = tl.load(x + t * D + cols, mask=cols < D)
        for k in tl.static_range(K):
            rank = tl.load(dest_rank + t * K + k)
            row = tl.load(dest_row + t * K + k).to(tl.int64)
            if (rank >= 0) & (rank < M) & (row >= 0) & (row < num_rows):
                address = peer_address(base, handles, handle_stride, max_handle, offset, rank)
                if address != 0:
                    if BY_ROUTE:
                        values = tl.load(x + (t * K + k) * D + cols, mask=cols < D)
                    moved = values
                    if scale is not None:
                        moved = narrow(widen(values, ACC) * tl.load(scale + t * K + k), values.dtype)
                    tl.store(rows_at(address, x) + row * D + cols, moved, mask=cols < D)


def put_rows(
    x: Tensor,
    peers: Peers,
    dest_rank: Tensor,
    dest_row: Tensor,
    scale: Tensor | None = None,
    *,
    num_rows: int,
    launch: Launch = PUT,
) -> None:
    """One row per route, as ``put_rows_torch``; rows outside [0, ``num_rows``) are not written.

    ``x`` [T, D] or [T, K, D]; ``peers`` [num_rows, D] on each rank; ``dest_rank``, ``dest_row`` int32 [T, K]; ``scale``
    [T, K] in the accumulation dtype.
    """
    require_contiguous(x=x, dest_rank=dest_rank, dest_row=dest_row, scale=scale)
    num_tokens, top_k = dest_rank.shape
    if not num_tokens:
        return
    width = x.shape[-1]
    block = launch.columns(width)
    launch = launch.of_whole_lanes(block, x.element_size())
    _put_rows[launch.grid(num_tokens * cdiv(width, block))](
        x,
        *peers.arguments,
        num_rows,
        dest_rank,
        dest_row,
        scale,
        num_tokens,
        M=peers.world,
        K=top_k,
        D=width,
        BY_ROUTE=x.dim() == 3,
        ACC=None if scale is None else triton_dtype(scale.dtype),
        BLOCK=block,
        **launch.options,
    )


@fast
@triton.jit(do_not_specialize=[*PEER_INTEGERS, "first_row", "begin", "end", "skip_rank", "t_max", "signal_offset"])
def _put_unique(
    x,
    base,
    handles,
    handle_stride,
    max_handle,
    offset,
    first_row,
    routes,
    routes_token_stride,
    routes_stride,
    begin,
    end,
    skip_rank,
    t_max,
    arrivals,
    counter,
    signal_base,
    signal_offset,
    PER_RANK: tl.constexpr,
    M: tl.constexpr,
    K: tl.constexpr,
    LANES: tl.constexpr,
    D: tl.constexpr,
    CHUNKS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    blocks: tl.constexpr = (D + BLOCK - 1) // BLOCK
    lane = tl.arange(0, LANES)[None, :]
    posted = tl.full((), 0, tl.int64)
    if arrivals is not None:
        posted = tl.load(counter)
    for chunk in range(CHUNKS):
        low = tl.maximum(tl.minimum(part_edge(t_max, chunk, CHUNKS), end), begin)
        high = tl.maximum(tl.minimum(part_edge(t_max, chunk + 1, CHUNKS), end), begin)
        tile = next_tile(arrivals, chunk, -1, CHUNKS)
        while tile * ROWS < high - low:
            t = (low.to(tl.int64) + tile * ROWS + tl.arange(0, ROWS))[:, None]
            where = routes + t * routes_token_stride + lane * routes_stride
            route = tl.load(where, mask=(t < high) & (lane < K), other=-1).to(tl.int64)
            rank = tl.where(route >= 0, route // PER_RANK, -1)
            for block in tl.static_range(blocks):
                cols = (block * BLOCK + tl.arange(0, BLOCK))[None, :]
                values = tl.load(x + t * D + cols, mask=(t < high) & (cols < D))
                for p in tl.static_range(M):
                    if p != skip_rank:
                        address = peer_address(base, handles, handle_stride, max_handle, offset, p)
                        if address != 0:
                            wanted = tl.max((rank == p).to(tl.int32), 1, keep_dims=True) != 0
                            out = rows_at(address, x) + (first_row + t) * D + cols
                            tl.store(out, values, mask=wanted & (cols < D))
            tile = next_tile(arrivals, chunk, tile, CHUNKS)
        if arrivals is not None:
            last = last_signals(arrivals + chunk, tl.num_programs(0), posted + chunk + 1, signal_base, signal_offset, M)
            if last:
                tl.store(arrivals + CHUNKS + chunk, 0)
            if last & (chunk == CHUNKS - 1):
                tl.store(counter, posted + CHUNKS)  # every program has read it


def put_unique(
    x: Tensor,
    peers: Peers,
    routes: Tensor,
    first_row: int,
    begin: int = 0,
    end: int | None = None,
    *,
    experts_per_rank: int = 1,
    skip_rank: int = -1,
    signal: ChunkSignal | None = None,
    launch: Launch = UNIQUE,
) -> None:
    """Tokens [``begin``, ``end``) once to every rank that a route of theirs names, as ``put_unique_torch``.

    ``x`` [T, D]; ``peers`` [M·T_max, D] on each rank; ``routes`` [T, K], any integer dtype and strides: destination
    ranks, or expert ids with ``experts_per_rank`` experts on each rank, so that rows can cross before the route map
    exists. ``skip_rank`` receives nothing. With ``signal`` the tokens move chunk by chunk, and each chunk is signalled
    when its last row is on its way.
    """
    require_contiguous(x=x)
    end = x.shape[0] if end is None else end
    if end <= begin and signal is None:
        return
    width = x.shape[1]
    block = launch.columns(width)
    rows = launch.rows(block, x.element_size(), end - begin)
    launch = launch.of_whole_lanes(rows * block, x.element_size())
    _put_unique[launch.grid(cdiv(max(1, end - begin), rows))](
        x,
        *peers.arguments,
        first_row,
        routes,
        routes.stride(0),
        routes.stride(1),
        begin,
        end,
        skip_rank,
        end if signal is None else signal.max_tokens,
        *ChunkSignal.arguments(signal),
        PER_RANK=experts_per_rank,
        M=peers.world,
        K=routes.shape[1],
        LANES=next_power_of_2(routes.shape[1]),
        D=width,
        CHUNKS=1 if signal is None else signal.chunks,
        ROWS=rows,
        BLOCK=block,
        **launch.options,
    )


@fast
@triton.jit(do_not_specialize=[*PEER_INTEGERS, "w_handle_stride", "w_max_handle", "w_offset", "first_row", "routes"])
def _put_meta(
    dest_rank,
    dest_row,
    weights,
    base,
    handles,
    handle_stride,
    max_handle,
    offset,
    w_base,
    w_handles,
    w_handle_stride,
    w_max_handle,
    w_offset,
    first_row,
    routes,
    M: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    for tile in range(start, routes, tl.num_programs(0) * BLOCK):
        i = tile + tl.arange(0, BLOCK)
        inside = i < routes
        rank = tl.load(dest_rank + i, mask=inside, other=-1)
        row = tl.load(dest_row + i, mask=inside, other=-1)
        if weights is not None:
            weight = tl.load(weights + i, mask=inside, other=0)
        for p in range(M):
            address = peer_address(base, handles, handle_stride, max_handle, offset, p)
            if address != 0:
                tl.store(rows_at(address, dest_row) + first_row * K + i, tl.where(rank == p, row, -1), mask=inside)
            if weights is not None:
                address = peer_address(w_base, w_handles, w_handle_stride, w_max_handle, w_offset, p)
                if address != 0:
                    here = tl.where(rank == p, weight, 0)
                    tl.store(rows_at(address, weights) + first_row * K + i, here, mask=inside)


def put_meta(
    dest_rank: Tensor,
    dest_row: Tensor,
    weights: Tensor | None,
    peer_rows: Peers,
    peer_weights: Peers | None,
    first_row: int,
    *,
    launch: Launch = META,
) -> None:
    """Tell every rank where its copies of the tokens go and their weights, as ``put_meta_torch``.

    ``dest_rank``, ``dest_row`` int32 [T, K]; ``weights`` [T, K] in the accumulation dtype, which is the dtype of
    ``peer_weights`` [M·T_max, K]; ``peer_rows`` int32 [M·T_max, K].
    """
    require_contiguous(dest_rank=dest_rank, dest_row=dest_row, weights=weights)
    if (weights is None) != (peer_weights is None):
        raise ValueError("weights and peer_weights go together")
    if not dest_rank.numel():
        return
    block = launch.block or 256
    _put_meta[launch.grid(cdiv(dest_rank.numel(), block))](
        dest_rank,
        dest_row,
        weights,
        *peer_rows.arguments,
        *(peer_weights or peer_rows).arguments,
        first_row,
        dest_rank.numel(),
        M=peer_rows.world,
        K=dest_rank.shape[1],
        BLOCK=block,
        **launch.options,
    )


@fast
@triton.jit(do_not_specialize=[*PEER_INTEGERS, "num_rows", "first", "routes"])
def _put_values(
    values,
    base,
    handles,
    handle_stride,
    max_handle,
    offset,
    num_rows,
    dest_rank,
    dest_row,
    first,
    routes,
    DTYPE: tl.constexpr,
    M: tl.constexpr,
    BLOCK: tl.constexpr,
):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    for tile in range(start, routes, tl.num_programs(0) * BLOCK):
        i = tile + tl.arange(0, BLOCK)
        rank = tl.load(dest_rank + i, mask=i < routes, other=-1)
        row = tl.load(dest_row + i, mask=i < routes, other=-1).to(tl.int64)
        if values is None:
            value = (first + i).to(DTYPE)
        else:
            value = tl.load(values + i, mask=i < routes)
        for p in range(M):
            address = peer_address(base, handles, handle_stride, max_handle, offset, p)
            if address != 0:
                here = (rank == p) & (row >= 0) & (row < num_rows)
                tl.store(address.to(tl.pointer_type(DTYPE), bitcast=True) + row, value, mask=here)


def put_values(
    values: Tensor | None,
    peers: Peers,
    dest_rank: Tensor,
    dest_row: Tensor,
    *,
    num_rows: int,
    first: int = 0,
    launch: Launch = META,
) -> None:
    """One scalar per route, as ``put_values_torch``; without ``values`` the int64 route ids ``first`` + t·K + k.

    ``values`` [T, K] of the dtype of ``peers`` [num_rows]; ``dest_rank``, ``dest_row`` int32 [T, K].
    """
    require_contiguous(values=values, dest_rank=dest_rank, dest_row=dest_row)
    if not dest_rank.numel():
        return
    block = launch.block or 256
    _put_values[launch.grid(cdiv(dest_rank.numel(), block))](
        values,
        *peers.arguments,
        num_rows,
        dest_rank,
        dest_row,
        first,
        dest_rank.numel(),
        DTYPE=triton_dtype(torch.int64 if values is None else values.dtype),
        M=peers.world,
        BLOCK=block,
        **launch.options,
    )
