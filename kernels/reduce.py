"""Sums of expert rows back into token order (report, Table 8: combine forward, dispatch backward).

One arithmetic for every dispatcher: a (token, rank) partial is summed in the accumulation dtype in ascending k and
rounded once to the rows' dtype; partials are summed in the accumulation dtype in ascending rank and rounded once.

Legend: T local tokens, K routes per token, M ranks, R expert rows, D row width, T_max tokens of a stripe.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

import torch
from torch import Tensor

from .peers import MAX_PEERS

KERNEL_DEVICES: tuple[str, ...] = ("cuda",)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64 rows, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _add_rows(total: Tensor, index: Tensor, rows: Tensor) -> None:
    """``total[index] += rows`` for distinct indices."""
    if total.is_cuda:  # index_add_ is made of atomics there, which turn subnormal sums into zero
        total.index_copy_(0, index, total.index_select(0, index) + rows)
    else:
        total.index_add_(0, index, rows)


def partial_sums_torch(rows: Tensor, index: Tensor, weights: Tensor | None = None) -> Tensor:
    """``out[s] = Σ_k rows[index[s, k]] (* weights[s, k])`` over index >= 0, in ascending k, rounded once to the rows'
    dtype.

    ``rows`` [R, D]; ``index`` integer [S, K]; ``weights`` [S, K] in the accumulation dtype. Gives [S, D], zero where
    no index is."""
    total = rows.new_zeros((index.shape[0], rows.shape[1]), dtype=accumulation_dtype(rows.dtype))
    for k in range(index.shape[1]):
        s = (index[:, k] >= 0).nonzero().squeeze(1)
        if not s.numel():
            continue
        values = rows.index_select(0, index[s, k].long()).to(total.dtype)
        if weights is not None:
            values *= weights[s, k].unsqueeze(1)
        _add_rows(total, s, values)
    return total.to(rows.dtype)


def pre_reduce_put_torch(
    y: Tensor,
    local_rows: Tensor,
    tokens: Sequence[int],
    peers: Sequence[Tensor],
    rank: int,
    weights: Tensor | None = None,
) -> None:
    """Sum this rank's rows of every token and write the partial at the token's source: ``peers[r][rank, t]``.

    ``y`` [R, D]; ``local_rows`` int32 [M, T_max, K]; ``tokens`` T of every source; ``peers[r]`` [M, T_max, D] at
    source r; ``weights`` [M, T_max, K]. Tokens without a row here are not written."""
    for source, num_tokens in enumerate(tokens):
        index = local_rows[source, :num_tokens]
        t = (index >= 0).any(1).nonzero().squeeze(1)
        if not t.numel():
            continue
        w = None if weights is None else weights[source].index_select(0, t)
        peers[source][rank].index_copy_(0, t, partial_sums_torch(y, index.index_select(0, t), w))


def put_scalars_torch(
    values: Tensor, local_rows: Tensor, tokens: Sequence[int], peers: Sequence[Tensor], rank: int
) -> None:
    """Return one scalar per route to the token's source: ``peers[r][rank, t, k] = values[local_rows[r, t, k]]``.

    ``values`` [R]; ``peers[r]`` [M, T_max, K]; routes of other ranks are not written.
    """
    for source, num_tokens in enumerate(tokens):
        index = local_rows[source, :num_tokens]
        t, k = (index >= 0).nonzero(as_tuple=True)
        peers[source][rank, t, k] = values[index[t, k].long()].to(peers[source].dtype)


def sum_partials_torch(partials: Tensor, dest_rank: Tensor) -> Tensor:
    """[T, D]: the sum over ranks, ascending, of ``partials`` [M, T_max, D] where a route of the token names the
    rank."""
    num_tokens = dest_rank.shape[0]
    total = partials.new_zeros((num_tokens, partials.shape[2]), dtype=accumulation_dtype(partials.dtype))
    for rank in range(partials.shape[0]):
        t = (dest_rank == rank).any(1).nonzero().squeeze(1)
        if t.numel() == num_tokens:
            total += partials[rank, :num_tokens].to(total.dtype)
        elif t.numel():
            _add_rows(total, t, partials[rank].index_select(0, t).to(total.dtype))
    return total.to(partials.dtype)


def take_scalars_torch(returned: Tensor, dest_rank: Tensor) -> Tensor:
    """[T, K]: ``returned[dest_rank[t, k], t, k]`` from [M, T_max, K], 0 where there is no route."""
    t = torch.arange(dest_rank.shape[0], device=dest_rank.device)[:, None]
    k = torch.arange(dest_rank.shape[1], device=dest_rank.device)
    return torch.where(dest_rank >= 0, returned[dest_rank.clamp(min=0).long(), t, k], 0)


def sum_routes_torch(
    rows: Tensor, index: Tensor, dest_rank: Tensor, world: int, weights: Tensor | None = None
) -> Tensor:
    """[T, D] from rows that lie at the source: the same partials and the same order of sums as the expert ranks would
    make.

    ``rows`` [any, D]; ``index`` [T, K] row of each route, −1 for none; ``dest_rank`` int32 [T, K]; ``weights`` [T, K].
    """
    total = rows.new_zeros((index.shape[0], rows.shape[1]), dtype=accumulation_dtype(rows.dtype))
    for rank in range(world):
        here = torch.where(dest_rank == rank, index, -1)
        t = (here >= 0).any(1).nonzero().squeeze(1)
        if t.numel():
            w = None if weights is None else weights.index_select(0, t)
            _add_rows(total, t, partial_sums_torch(rows, here.index_select(0, t), w).to(total.dtype))
    return total.to(rows.dtype)


def has_kernel(rows: Tensor, world: int) -> bool:
    """Whether ``rows`` of ``world`` ranks can be summed by a kernel here."""
    return rows.device.type in KERNEL_DEVICES and world <= MAX_PEERS and importlib.util.find_spec("triton") is not None


def sum_routes(rows: Tensor, index: Tensor, dest_rank: Tensor, world: int, weights: Tensor | None = None) -> Tensor:
    """``sum_routes_torch``; on GPUs as one kernel, bit-equal, that the host does not wait for (groups of at most
    ``MAX_PEERS`` ranks, with Triton)."""
    if not has_kernel(rows, world):
        return sum_routes_torch(rows, index, dest_rank, world, weights)
    from .reduce_triton import sum_routes_triton

    return sum_routes_triton(rows, index, dest_rank, world, weights)


def get_reduce_torch(
    peers: Sequence[Tensor], dest_rank: Tensor, dest_row: Tensor, weights: Tensor | None = None
) -> Tensor:
    """[T, D]: pull ``peers[dest_rank[t, k]][dest_row[t, k]]`` and sum, (token, rank) partials first.

    ``peers[p]`` [rows of p, D]; ``weights`` [T, K] in the accumulation dtype.
    """
    num_tokens, width = dest_rank.shape[0], peers[0].shape[1]
    total = peers[0].new_zeros((num_tokens, width), dtype=accumulation_dtype(peers[0].dtype))
    for rank, rows in enumerate(peers):
        here = torch.where(dest_rank == rank, dest_row, -1)
        t = (here >= 0).any(1).nonzero().squeeze(1)
        if t.numel():
            w = None if weights is None else weights.index_select(0, t)
            _add_rows(total, t, partial_sums_torch(rows, here.index_select(0, t), w).to(total.dtype))
    return total.to(peers[0].dtype)


def get_rows_torch(peers: Sequence[Tensor], dest_rank: Tensor, dest_row: Tensor) -> Tensor:
    """[T, K, D]: pull every route's row; zero where there is no route."""
    out = peers[0].new_zeros((*dest_rank.shape, peers[0].shape[1]))
    for rank, rows in enumerate(peers):
        t, k = (dest_rank == rank).nonzero(as_tuple=True)
        if t.numel():
            out[t, k] = rows.index_select(0, dest_row[t, k].long())
    return out


def get_values_torch(peers: Sequence[Tensor], dest_rank: Tensor, dest_row: Tensor) -> Tensor:
    """[T, K]: pull one scalar per route from ``peers[p]`` [rows of p]; zero where there is no route."""
    out = peers[0].new_zeros(dest_rank.shape)
    for rank, values in enumerate(peers):
        t, k = (dest_rank == rank).nonzero(as_tuple=True)
        if t.numel():
            out[t, k] = values[dest_row[t, k].long()]
    return out
