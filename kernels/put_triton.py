"""One-sided writes of token rows into other ranks' memory, as Triton kernels (see put.py for what each one does).

Legend: T local tokens, K routes per token, M ranks, D row width. A destination rank outside [0, M) or a row outside the
destination's rows is skipped. Rows are moved in blocks of columns; one work item is one (token, block).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import torch
from torch import Tensor

from .peers import Peers
from .triton_common import (
    PEER_INTEGERS,
    Launch,
    narrow,
    peer_address,
    require_contiguous,
    rows_at,
    tl,
    triton,
    triton_dtype,
    widen,
)

PUT = Launch(264)  # two programs on each of 132 multiprocessors fill the link
META = Launch(1024)


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
    _put_rows[launch.grid(num_tokens * triton.cdiv(width, block))](
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


@triton.jit(do_not_specialize=[*PEER_INTEGERS, "first_row", "begin", "end", "skip_rank", "own_rank", "num_rows"])
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
    dest_row,
    own_rows,
    own_rank,
    num_rows,
    PER_RANK: tl.constexpr,
    M: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    blocks: tl.constexpr = (D + BLOCK - 1) // BLOCK
    first = begin * blocks + tl.program_id(0).to(tl.int64)
    for item in range(first, end * blocks, tl.num_programs(0)):
        t = item // blocks
        cols = (item % blocks) * BLOCK + tl.arange(0, BLOCK)
        values = tl.load(x + t * D + cols, mask=cols < D)
        done = tl.full((), 0, tl.int64)  # bit p: rank p has the token
        for k in tl.static_range(K):
            route = tl.load(routes + t * routes_token_stride + k * routes_stride).to(tl.int64)
            rank = tl.where(route >= 0, route // PER_RANK, -1)
            bit = tl.full((), 1, tl.int64) << tl.maximum(rank, 0)
            if (rank >= 0) & (rank < M) & (rank != skip_rank) & ((done & bit) == 0):
                address = peer_address(base, handles, handle_stride, max_handle, offset, rank)
                if address != 0:
                    tl.store(rows_at(address, x) + (first_row + t) * D + cols, values, mask=cols < D)
            if rank < M:
                done = done | tl.where(rank >= 0, bit, 0)
            if own_rows is not None:
                row = tl.load(dest_row + t * K + k).to(tl.int64)
                if (rank == own_rank) & (row >= 0) & (row < num_rows):
                    tl.store(own_rows + row * D + cols, values, mask=cols < D)


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
    dest_row: Tensor | None = None,
    own_rows: Tensor | None = None,
    own_rank: int = -1,
    launch: Launch = PUT,
) -> None:
    """Tokens [``begin``, ``end``) once to every rank that a route of theirs names, as ``put_unique_torch``.

    ``x`` [T, D]; ``peers`` [M·T_max, D] on each rank; ``routes`` [T, K], any integer dtype and strides: destination
    ranks, or expert ids with ``experts_per_rank`` experts on each rank, so that rows can cross before the route map
    exists. ``skip_rank`` receives nothing. ``own_rows`` [rows, D] with ``dest_row`` int32 [T, K] and ``routes`` that
    are ranks: the rows of ``own_rank`` also go straight into expert order, from the same read of ``x``.
    """
    require_contiguous(x=x, dest_row=dest_row, own_rows=own_rows)
    if own_rows is not None and (dest_row is None or experts_per_rank != 1):
        raise ValueError("own_rows needs dest_row, and routes that are destination ranks (experts_per_rank=1)")
    end = x.shape[0] if end is None else end
    if end <= begin:
        return
    width = x.shape[1]
    block = launch.columns(width)
    _put_unique[launch.grid((end - begin) * triton.cdiv(width, block))](
        x,
        *peers.arguments,
        first_row,
        routes,
        routes.stride(0),
        routes.stride(1),
        begin,
        end,
        skip_rank,
        dest_row,
        own_rows,
        own_rank,
        0 if own_rows is None else own_rows.shape[0],
        PER_RANK=experts_per_rank,
        M=peers.world,
        K=routes.shape[1],
        D=width,
        BLOCK=block,
        **launch.options,
    )


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
    _put_meta[launch.grid(triton.cdiv(dest_rank.numel(), block))](
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
    _put_values[launch.grid(triton.cdiv(dest_rank.numel(), block))](
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
