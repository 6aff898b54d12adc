"""Rows that are quantised on their way into other ranks' memory, as a Triton kernel (see put.py for the movement).

Legend: T local tokens, K routes per token, M ranks, D row width, W = D + D/32 bytes of a record. A destination rank
outside [0, M) or a row outside the destination's rows is skipped.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import torch
from torch import Tensor

from .mxfp8 import BLOCK as SIZE
from .mxfp8 import record_bytes
from .mxfp8_triton_common import bytes_at, load_float32, magnitude_bits, scale_bytes, store_values, to_elements
from .peers import Peers
from .sync_triton import ChunkSignal, last_signals, part_edge
from .triton_common import PEER_INTEGERS, Launch, peer_address, require_contiguous, tl, triton

PUT = Launch(132, warps=8)  # 16 bytes of a record for each thread, for the whole of a row of 4096 values


@triton.jit(do_not_specialize=[*PEER_INTEGERS, "num_rows", "num_tokens", "t_max", "signal_offset"])
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
    posted = tl.full((), 0, tl.int64)
    if arrivals is not None:
        posted = tl.load(counter)
    for chunk in range(CHUNKS):
        low = tl.minimum(part_edge(t_max, chunk, CHUNKS), num_tokens)
        high = tl.minimum(part_edge(t_max, chunk + 1, CHUNKS), num_tokens)
        first = low.to(tl.int64) * blocks + tl.program_id(0)
        for item in range(first, high.to(tl.int64) * blocks, tl.num_programs(0)):
            t = item // blocks
            group = (item % blocks) * N + tl.arange(0, N)
            inside = group < D // 32
            cols = group[:, None] * 32 + tl.arange(0, 32)[None, :]
            values = load_float32(x + t * D, group, inside)
            scale = scale_bytes(tl.max(magnitude_bits(values), axis=1), CEIL)
            elements = to_elements(values, scale[:, None])
            exponents = scale.to(tl.uint8)
            for k in tl.static_range(K):
                rank = tl.load(dest_rank + t * K + k)
                row = tl.load(dest_row + t * K + k).to(tl.int64)
                if (rank >= 0) & (rank < M) & (row >= 0) & (row < num_rows):
                    address = peer_address(base, handles, handle_stride, max_handle, offset, rank)
                    if address != 0:
                        record = bytes_at(address) + row * (D + D // 32)
                        if weights is not None:
                            store_values(record, values * tl.load(weights + t * K + k), group, inside, D, 0, CEIL)
                        else:
                            tl.store(record + cols, elements, mask=inside[:, None])
                            tl.store(record + D + group, exponents, mask=inside)
        if arrivals is not None:
            last = last_signals(arrivals + chunk, tl.num_programs(0), posted + chunk + 1, signal_base, signal_offset, M)
            if last & (chunk == CHUNKS - 1):
                tl.store(counter, posted + CHUNKS)  # every program has read it


def quantize_put_rows(
    x: Tensor,
    peers: Peers,
    dest_rank: Tensor,
    dest_row: Tensor,
    weights: Tensor | None = None,
    rounding: str = "rceil",
    *,
    num_rows: int,
    signal: ChunkSignal | None = None,
    launch: Launch = PUT,
) -> None:
    """One record per route: ``x`` [T, D] is read once, quantised, and written to every row that its routes name.

    ``peers`` uint8 [num_rows, W] on each rank; ``dest_rank``, ``dest_row`` int32 [T, K]. ``weights`` float32 [T, K]:
    each route's record is of x times its weight, the product not rounded before. Equal to ``put_rows_torch`` of
    ``quantize_torch``. With ``signal`` the tokens move chunk by chunk, each signalled when its last row is on its way.
    """
    require_contiguous(x=x, dest_rank=dest_rank, dest_row=dest_row, weights=weights)
    num_tokens, top_k = dest_rank.shape
    if not num_tokens and signal is None:
        return
    width = x.shape[1]
    record_bytes(width)
    block = launch.columns(width)
    launch = launch.of_whole_lanes(block, 1)
    _quantize_put_rows[launch.grid(max(1, num_tokens) * triton.cdiv(width, block))](
        x,
        *peers.arguments,
        num_rows,
        dest_rank,
        dest_row,
        weights,
        num_tokens,
        num_tokens if signal is None else signal.max_tokens,
        *ChunkSignal.arguments(signal),
        M=peers.world,
        K=top_k,
        D=width,
        CEIL=rounding == "rceil",
        CHUNKS=1 if signal is None else signal.chunks,
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
