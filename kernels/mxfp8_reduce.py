"""Sums of expert rows back into token order where MXFP8 records travel (see reduce.py for the movements themselves).

What travels is quantised once: the sum of a token's rows on an expert rank straight from its float32 value (dedup
form), or each row (one row per route). Whoever receives it sums decoded values in float32, in the order of reduce.py.
The own rank's part takes the same way, so that a token's result does not depend on where it lives.

Legend: T local tokens, K routes per token, M ranks, R expert rows, D row width, W = D + D/32 bytes of a record, T_max
tokens of a stripe.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .mxfp8 import dequantize_torch, quantize_torch, record_width
from .reduce import has_kernel, partial_sums_torch, sum_partials_torch


def pre_reduce_put_records_torch(
    y: Tensor,
    local_rows: Tensor,
    tokens: Sequence[int],
    peers: Sequence[Tensor],
    rank: int,
    weights: Tensor | None = None,
    rounding: str = "rceil",
) -> None:
    """As ``pre_reduce_put_torch``, the partials quantised: ``peers[r]`` uint8 [M, T_max, W] at source r.

    ``y`` [R, D]; ``local_rows`` int32 [M, T_max, K]; ``tokens`` T of every source; ``weights`` [M, T_max, K].
    """
    y = y.to(torch.float32)  # partial sums come in the dtype of the rows: not rounded before they are quantised
    for source, num_tokens in enumerate(tokens):
        index = local_rows[source, :num_tokens]
        t = (index >= 0).any(1).nonzero().squeeze(1)
        if not t.numel():
            continue
        w = None if weights is None else weights[source].index_select(0, t)
        sums = partial_sums_torch(y, index.index_select(0, t), w)
        peers[source][rank].index_copy_(0, t, quantize_torch(sums, rounding))


def sum_partial_records_torch(partials: Tensor, dest_rank: Tensor, dtype: torch.dtype) -> Tensor:
    """As ``sum_partials_torch`` over records uint8 [M, T_max, W]; gives [T, D] in ``dtype``, rounded once."""
    return sum_partials_torch(dequantize_torch(partials), dest_rank).to(dtype)


def get_reduce_records_torch(
    peers: Sequence[Tensor],
    dest_rank: Tensor,
    dest_row: Tensor,
    weights: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """As ``get_reduce_torch`` over records: ``peers[p]`` uint8 [rows of p, W]; gives [T, D] in ``dtype``.

    ``weights`` float32 [T, K]. A (token, rank) partial is rounded to ``dtype``, as where rows travel unquantised.
    """
    total = torch.zeros((dest_rank.shape[0], record_width(peers[0].shape[1])), device=dest_rank.device)
    for rank, records in enumerate(peers):
        here = torch.where(dest_rank == rank, dest_row, -1)
        routes = (here >= 0).nonzero()
        if not routes.numel():
            continue
        t, k = routes.unbind(1)
        values = dequantize_torch(records.index_select(0, here[t, k].long()))
        index = torch.full_like(here, -1, dtype=torch.int64)
        index[t, k] = torch.arange(len(t), device=index.device)
        total += partial_sums_torch(values, index, weights).to(dtype).to(torch.float32)
    return total.to(dtype)


def sum_route_records(
    records: Tensor, index: Tensor, dest_rank: Tensor, world: int, weights: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """[T, D] in ``dtype`` from records uint8 [any, W] that lie at the source; the rest as in ``reduce.sum_routes``."""
    if not has_kernel(records, world):
        return get_reduce_records_torch([records] * world, dest_rank, index, weights, dtype)
    from .mxfp8_reduce_triton import sum_route_records_triton

    return sum_route_records_triton(records, index, dest_rank, world, weights, dtype)
