"""One-sided writes of token rows into other ranks' memory (report, Table 8: dispatch forward, combine backward).

Legend: T local tokens, K routes per token, M ranks, D row width. ``peers`` is one tensor per rank: that rank's region
as mapped here. A destination of −1 is skipped, so what is not written keeps its old bytes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def put_rows_torch(
    x: Tensor, peers: Sequence[Tensor], dest_rank: Tensor, dest_row: Tensor, scale: Tensor | None = None
) -> None:
    """One row per route: ``peers[dest_rank[t, k]][dest_row[t, k]] = x[t] (* scale[t, k])``.

    ``x`` [T, D] or [T, K, D]; ``peers[p]`` [rows of p, D]; ``dest_rank``, ``dest_row`` int32 [T, K]; ``scale`` [T, K],
    in whose dtype the product is taken before it is rounded to the rows' dtype."""
    for rank, rows in enumerate(peers):
        t, k = (dest_rank == rank).nonzero(as_tuple=True)
        if not t.numel():
            continue
        values = x[t, k] if x.dim() == 3 else x.index_select(0, t)
        if scale is not None:
            values = (values.to(scale.dtype) * scale[t, k].unsqueeze(1)).to(x.dtype)
        rows.index_copy_(0, dest_row[t, k].long(), values)


def put_values_torch(values: Tensor, peers: Sequence[Tensor], dest_rank: Tensor, dest_row: Tensor) -> None:
    """One scalar per route: ``peers[dest_rank[t, k]][dest_row[t, k]] = values[t, k]``, ``peers[p]`` [rows of p]."""
    for rank, out in enumerate(peers):
        t, k = (dest_rank == rank).nonzero(as_tuple=True)
        if t.numel():
            out.index_copy_(0, dest_row[t, k].long(), values[t, k].to(out.dtype))


def put_unique_torch(x: Tensor, peers: Sequence[Tensor], dest_rank: Tensor, first_row: int) -> None:
    """One row per (token, rank): ``peers[p][first_row + t] = x[t]`` for every rank p that a route of token t names.

    ``x`` [T, D]; ``peers[p]`` [M·T_max, D]; ``dest_rank`` int32 [T, K]; ``first_row`` = source · T_max, the source's
    stripe."""
    for rank, stage in enumerate(peers):
        t = (dest_rank == rank).any(1).nonzero().squeeze(1)
        if t.numel() == x.shape[0]:
            stage[first_row : first_row + x.shape[0]] = x
        elif t.numel():
            stage.index_copy_(0, t + first_row, x.index_select(0, t))


def put_meta_torch(
    dest_rank: Tensor,
    dest_row: Tensor,
    weights: Tensor | None,
    peer_rows: Sequence[Tensor],
    peer_weights: Sequence[Tensor] | None,
    first_row: int,
) -> None:
    """Tell every rank p where its copies of the tokens go: its rows, −1 for routes of other ranks, and their weights.

    ``peer_rows[p]`` int32 [M·T_max, K], ``peer_weights[p]`` [M·T_max, K]; the source's stripe [first_row, first_row +
    T) is written whole, so that no reader sees an old entry."""
    stripe = slice(first_row, first_row + dest_rank.shape[0])
    for rank, rows in enumerate(peer_rows):
        here = dest_rank == rank
        rows[stripe] = torch.where(here, dest_row, -1)
        if weights is not None and peer_weights is not None:
            peer_weights[rank][stripe] = torch.where(here, weights, 0).to(peer_weights[rank].dtype)
