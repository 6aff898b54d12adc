"""Rows that are quantised on their way into other ranks' memory, as a Triton kernel (see put.py for the movement).

Legend: T local tokens, K routes per token, M ranks, D row width, W = D + D/32 bytes of a record. A destination rank
outside [0, M) or a row outside the destination's rows is skipped.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import torch
from torch import Tensor

from .fast_launch import fast
from .mxfp8 import BLOCK as SIZE
from .mxfp8 import record_bytes
from .mxfp8_triton_common import bytes_at, magnitude_bits, scale_bytes, to_elements
from .peers import Peers
from .sync_triton import ChunkSignal, last_signals, next_tile, part_edge
from .triton_common import PEER_INTEGERS, Launch, cdiv, peer_address, require_contiguous, tl, triton, widen

# Few wide programs keep stores that wait for the link out of the way of the rows that stay, which are made beside them.
PUT = Launch(48, warps=32, tile=1 << 14)
WEIGHTED = Launch(132, warps=8)  # each route is quantised anew, so one row at a time, and only for routes that leave


@fast
@triton.jit(do_not_specialize=[*PEER_INTEGERS, "num_rows", "num_tokens", "skip_rank", "t_max", "signal_offset"])
def _quantize_put_rows(
    x,
    base,
    handles,
    handle_stride,
    max_handle,
    offset,
    num_rows,
    dest_rank,
    dest_row,
    weights,
    num_tokens,
    skip_rank,
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
    ROWS: tl.constexpr,
    N: tl.constexpr,
):
    posted = tl.full((), 0, tl.int64)
    if arrivals is not None:
        posted = tl.load(counter)
    for chunk in range(CHUNKS):
        low = tl.minimum(part_edge(t_max, chunk, CHUNKS), num_tokens)
        high = tl.minimum(part_edge(t_max, chunk + 1, CHUNKS), num_tokens)
        tile = next_tile(arrivals, chunk, -1, CHUNKS)
        while tile * ROWS < high - low:
            t = low.to(tl.int64) + tile * ROWS + tl.arange(0, ROWS)
            _put_tile(
                x, t, t < high, base, handles, handle_stride, max_handle, offset, num_rows, dest_rank, dest_row,
                weights, skip_rank, M, K, D, CEIL, N,
            )  # fmt: skip
            tile = next_tile(arrivals, chunk, tile, CHUNKS)
        if arrivals is not None:
            last = last_signals(arrivals + chunk, tl.num_programs(0), posted + chunk + 1, signal_base, signal_offset, M)
            if last:
                tl.store(arrivals + CHUNKS + chunk, 0)
            if last & (chunk == CHUNKS - 1):
                tl.store(counter, posted + CHUNKS)  # every program has read it


@triton.jit
def _put_tile(
    x,
    t,
    there,
    base,
    handles,
    handle_stride,
    max_handle,
    offset,
    num_rows,
    dest_rank,
    dest_row,
    weights,
    skip_rank,
    M: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    CEIL: tl.constexpr,
    N: tl.constexpr,
):
    """All records of the tokens ``t`` [ROWS] that are ``there``.

    Blocks, and routes with weights, are loops of the GPU: the compiler takes time by the square of what it unrolls."""
    for block in range((D // 32 + N - 1) // N):
        group = block * N + tl.arange(0, N)[None, :]
        cols = group[:, :, None] * 32 + tl.arange(0, 32)[None, None, :]
        inside = (there[:, None] & (group < D // 32))[:, :, None]
        values = widen(tl.load(x + t[:, None, None] * D + cols, mask=inside, other=0.0), tl.float32)
        if weights is None:
            scale = scale_bytes(tl.max(magnitude_bits(values), axis=2), CEIL)
            elements = to_elements(values, scale[:, :, None])
            for k in tl.static_range(K):
                record, wanted = _record_at(
                    t * K + k, there, base, handles, handle_stride, max_handle, offset, num_rows, dest_rank, dest_row,
                    skip_rank, M, D,
                )  # fmt: skip
                _store(record, wanted, elements, scale, block, D, N)
        else:
            for k in range(K):
                record, wanted = _record_at(
                    t * K + k, there, base, handles, handle_stride, max_handle, offset, num_rows, dest_rank, dest_row,
                    skip_rank, M, D,
                )  # fmt: skip
                if tl.max(wanted.to(tl.int32), 0) != 0:
                    product = values * tl.load(weights + t * K + k, mask=there, other=0)[:, None, None]
                    scale = scale_bytes(tl.max(magnitude_bits(product), axis=2), CEIL)
                    _store(record, wanted, to_elements(product, scale[:, :, None]), scale, block, D, N)


@triton.jit
def _record_at(
    route,
    there,
    base,
    handles,
    handle_stride,
    max_handle,
    offset,
    num_rows,
    dest_rank,
    dest_row,
    skip_rank,
    M: tl.constexpr,
    D: tl.constexpr,
):
    """Where the record of each ``route`` [ROWS] begins, of tokens that are ``there``, and whether it is written."""
    rank = tl.load(dest_rank + route, mask=there, other=-1)
    row = tl.load(dest_row + route, mask=there, other=-1).to(tl.int64)
    wanted = (rank >= 0) & (rank < M) & (rank != skip_rank) & (row >= 0) & (row < num_rows)
    address = peer_address(base, handles, handle_stride, max_handle, offset, tl.where(wanted, rank, 0))
    return bytes_at(address) + row * (D + D // 32), wanted & (address != 0)


@triton.jit
def _store(record, wanted, elements, scale, block, D: tl.constexpr, N: tl.constexpr):
    """Part ``block`` of the records at pointers ``record`` [ROWS] that are ``wanted``: uint8 [ROWS, N, 32] and their
    scales int32 [ROWS, N], four of them in a word where words are aligned: a warp then writes those of 4,096 values at
    once."""
    group = block * N + tl.arange(0, N)[None, :]
    cols = group[:, :, None] * 32 + tl.arange(0, 32)[None, None, :]
    kept = wanted[:, None] & (group < D // 32)
    tl.store(record[:, None, None] + cols, elements, mask=kept[:, :, None])
    if D % 128 == 0 and N % 4 == 0:
        word = block * (N // 4) + tl.arange(0, N // 4)[None, :]
        bytes4 = tl.reshape(scale, (scale.shape[0], N // 4, 4)) << (tl.arange(0, 4) * 8)[None, None, :]
        where = (record + D).to(tl.pointer_type(tl.int32), bitcast=True)
        tl.store(where[:, None] + word, tl.sum(bytes4, axis=2), mask=wanted[:, None] & (word < D // 128))
    else:
        tl.store(record[:, None] + D + group, scale.to(tl.uint8), mask=kept)


def quantize_put_rows(
    x: Tensor,
    peers: Peers,
    dest_rank: Tensor,
    dest_row: Tensor,
    weights: Tensor | None = None,
    rounding: str = "rceil",
    *,
    num_rows: int,
    skip_rank: int = -1,
    signal: ChunkSignal | None = None,
    launch: Launch | None = None,
) -> None:
    """One record per route: ``x`` [T, D] is read once, quantised, and written to every row that its routes name.

    ``peers`` uint8 [num_rows, W] on each rank; ``dest_rank``, ``dest_row`` int32 [T, K]. ``weights`` float32 [T, K]:
    each route's record is of x times its weight, the product not rounded before. Equal to ``put_rows_torch`` of
    ``quantize_torch``; ``skip_rank`` receives nothing. With ``signal`` the tokens move chunk by chunk, each signalled
    when its last row is on its way. ``launch``: ``PUT``, or ``WEIGHTED`` with weights.
    """
    require_contiguous(x=x, dest_rank=dest_rank, dest_row=dest_row, weights=weights)
    num_tokens, top_k = dest_rank.shape
    if not num_tokens and signal is None:
        return
    width = x.shape[1]
    record_bytes(width)
    launch = launch or (PUT if weights is None else WEIGHTED)
    block = launch.columns(width)
    rows = launch.rows(block, 1, num_tokens)
    launch = launch.of_whole_lanes(rows * block, 1)
    _quantize_put_rows[launch.grid(cdiv(max(1, num_tokens), rows))](
        x,
        *peers.arguments,
        num_rows,
        dest_rank,
        dest_row,
        weights,
        num_tokens,
        skip_rank,
        num_tokens if signal is None else signal.max_tokens,
        *ChunkSignal.arguments(signal),
        M=peers.world,
        K=top_k,
        D=width,
        CEIL=rounding == "rceil",
        CHUNKS=1 if signal is None else signal.chunks,
        ROWS=rows,
        N=block // SIZE,
        **launch.options,
    )


def as_words(records: Tensor) -> Tensor:
    """The same memory in the widest integers that divide a record, for kernels that only move it: [R, W / itemsize].

    Narrow elements would leave threads with less than 16 bytes each.
    """
    for dtype in (torch.int64, torch.int32, torch.int16):
        if records.shape[-1] % dtype.itemsize == 0:
            return records.view(dtype)
    return records
