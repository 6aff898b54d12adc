"""What goes between our routes and DeepEP's: distinct experts in a token, the route of each expanded row.

DeepEP stops the GPU where a token names an expert twice, so a repeated expert becomes one route with the sum of its
weights. It writes where rows came from as ``recv_src_metadata`` int32 [N, 2 + K], one line per (token, rank) received:
source·B + t, a word of its own, then the expanded row of each of the token's K routes, −1 for those to other ranks.

Legend: T local tokens, K routes per token, E experts, E_l experts of a rank, N lines of metadata, R rows received of
which buffers hold RB >= R, D hidden size, B the tokens per rank that DeepEP was told.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Bits of the flags word, beside those of route_map_triton.
BAD_ID = 2  # the same as there: an expert id outside [−1, E); taken as −1
REPEATED = 8  # a token names an expert twice
MISPLACED = 16  # DeepEP received other rows than were planned


def distinct_experts_torch(topk_idx: Tensor, num_experts: int, flags: Tensor) -> tuple[Tensor, Tensor]:
    """``topk_idx`` [T, K], any integer dtype and strides → ``(ids int64 [T, K], first int32 [T, K])``.

    ``first[t, k]`` is the first route of token t to the expert of route k, −1 where there is none; ``ids`` keeps those
    first routes and is −1 elsewhere. An id outside [−1, E) is no route. ``flags`` int32 [1]: ``BAD_ID`` and
    ``REPEATED`` are set where they apply."""
    given = topk_idx.to(torch.int64)
    top_k = given.shape[1]
    if ((given < -1) | (given >= num_experts)).any():
        flags |= BAD_ID
    there = (given >= 0) & (given < num_experts)
    column = torch.arange(top_k, device=given.device)
    same = (given.unsqueeze(2) == given.unsqueeze(1)) & there.unsqueeze(1)
    first = torch.where(same, column, top_k).amin(2)
    first = torch.where(there, first, -1)
    if (there & (first != column)).any():
        flags |= REPEATED
    return torch.where(first == column, given, -1).contiguous(), first.to(torch.int32).contiguous()


def merge_weights_torch(weights: Tensor, first: Tensor) -> Tensor:
    """Router weights [T, K], any float dtype and strides → float32 [T, K]: each first route's sum over its repeats.

    0 elsewhere."""
    index = first.long()
    values = weights.to(torch.float32).masked_fill(index < 0, 0)
    return torch.zeros_like(values, memory_format=torch.contiguous_format).scatter_add_(1, index.clamp(min=0), values)


def spread_gradients_torch(grads: Tensor, first: Tensor) -> Tensor:
    """The backward of ``merge_weights``: float32 [T, K] of first routes → that of every route, 0 where there is
    none."""
    index = first.long()
    return grads.gather(1, index.clamp(min=0)).masked_fill(index < 0, 0)


def arrived_torch(
    metadata: Tensor, lines: Tensor, ends: Tensor, offsets: Tensor, routes: Tensor, weights: Tensor, flags: Tensor
) -> None:
    """What follows a dispatch: ``routes[row] = (source·B + t)·K + k`` for every row that ``metadata`` int32 [N, 2 + K]
    names; past the rows received, routes −1 and weights 0.

    ``lines`` int32 [1]: how many lines are written, the others hold anything. ``ends`` int32 [E_l]: where DeepEP says
    that each expert's rows end, ``offsets`` int64 [E_l + 1] the ranges that were planned; ``MISPLACED`` is set in
    ``flags`` where they differ. ``routes`` int64 [RB], ``weights`` float32 [RB]."""
    metadata, rows = metadata[: int(lines)].long(), int(offsets[-1])
    top_k = metadata.shape[1] - 2
    found = metadata[:, :1] * top_k + torch.arange(top_k, device=metadata.device)
    valid = metadata[:, 2:] >= 0
    routes[rows:], weights[rows:] = -1, 0
    routes[metadata[:, 2:][valid]] = found[valid]
    if not torch.equal(ends.long(), offsets[1:]):
        flags |= MISPLACED


def scale_rows_torch(rows: Tensor, weights: Tensor, num_rows: Tensor) -> Tensor:
    """``rows`` [RB, D] times ``weights`` float32 [RB], the first ``num_rows`` int64 [1] of them; the others are
    uninitialised. Rounded once, to the rows' dtype."""
    out, n = torch.empty_like(rows), int(num_rows)
    out[:n] = (rows[:n].to(weights.dtype) * weights[:n].unsqueeze(1)).to(rows.dtype)
    return out
