"""How a batch is cut into waves, and where the rows of a wave lie among the rows of the whole batch.

Legend: T local tokens, K routes per token, W waves, M ranks, E_l experts of one rank, R_w rows of one wave, R rows of
all waves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Wave:
    """Tokens [``begin``, ``end``) of this rank with the routes of ``topk_idx`` [end − begin, K], −1 where the route is
    dropped or belongs to another wave; local experts [``first``, ``last``) of every rank."""

    topk_idx: Tensor
    begin: int
    end: int
    first: int
    last: int

    @property
    def tokens(self) -> slice:
        return slice(self.begin, self.end)

    @property
    def experts(self) -> slice:
        return slice(self.first, self.last)


def token_edges(num_tokens: int, waves: int) -> list[int]:
    """W + 1 ascending edges; no wave is larger than the first, which has ⌈T / W⌉ tokens."""
    return [-(-num_tokens * w // waves) for w in range(waves + 1)]


def expert_edges(num_local_experts: int, waves: int) -> list[int]:
    """W + 1 ascending edges of local experts. Raises ``ValueError`` for more waves than experts."""
    if waves > num_local_experts:
        raise ValueError(
            f"schedule.waves={waves} by expert, but a rank has {num_local_experts} experts: use at most that many"
            " waves, or schedule.by='token'"
        )
    return [num_local_experts * w // waves for w in range(waves + 1)]


def split_routes(topk_idx: Tensor, waves: int, by: str, num_local_experts: int) -> list[Wave]:
    """The waves of ``topk_idx`` [T, K] (global expert ids, −1: no route), by ``token`` or by ``expert``."""
    num_tokens = topk_idx.shape[0]
    if by == "token":
        edges = token_edges(num_tokens, waves)
        return [
            Wave(topk_idx[begin:end], begin, end, 0, num_local_experts)
            for begin, end in zip(edges[:-1], edges[1:], strict=True)
        ]
    local = torch.where(topk_idx >= 0, topk_idx % num_local_experts, -1)
    edges = expert_edges(num_local_experts, waves)
    return [
        Wave(torch.where((local >= first) & (local < last), topk_idx, -1), 0, num_tokens, first, last)
        for first, last in zip(edges[:-1], edges[1:], strict=True)
    ]


@dataclass(frozen=True)
class WholeRows:
    """Where rows of waves lie among those of the whole batch.

    ``targets``: of each wave int64 [R_w], the row of the whole batch that each of its rows is, −1 for padding;
    ``offsets`` int64 [E_l + 1] of the whole batch; ``bound``: rows that buffers of the whole batch need."""

    targets: list[Tensor]
    offsets: Tensor
    bound: int


def whole_rows(offsets: Sequence[Tensor], bounds: Sequence[int], segments: Sequence[Tensor] | None = None) -> WholeRows:
    """The rows of all waves in one expert-contiguous order.

    ``offsets``: int64 [E_l + 1] of each wave; ``bounds``: the rows that its tensors hold. ``segments``: int64 [E_l, M]
    of each wave, its rows by (expert, source); with them the order is (expert, source, wave, row of the wave), which
    for waves of consecutive tokens is the order without waves, else (expert, wave, row of the wave)."""
    counts = torch.stack([o.diff() for o in offsets] if segments is None else [s.reshape(-1) for s in segments])
    ends, total = counts.cumsum(1), counts.sum(0)
    first = total.cumsum(0) - total + counts.cumsum(0) - counts  # of each wave's part of each segment
    shift = first - (ends - counts)
    targets = []
    for wave, (own, bound) in enumerate(zip(offsets, bounds, strict=True)):
        row = torch.arange(bound, device=own.device)
        segment = torch.bucketize(row, ends[wave], right=True).clamp_(max=total.numel() - 1)
        target = row + shift[wave][segment]
        inside = (row < own[-1]) & (target < sum(bounds))  # more were counted where buffers overflow
        targets.append(torch.where(inside, target, -1))
    whole: Tensor = torch.stack(list(offsets)).sum(0)
    return WholeRows(targets, whole, sum(bounds))
