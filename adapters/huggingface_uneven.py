"""Ranks with different numbers of batches: those that run out go on with work that counts for nothing.

A rank's experts are needed as long as any rank of its group computes, so it cannot leave the loop early; DDP's join,
which stands in for gradients alone, is not enough.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

import torch
import torch.distributed as dist

from ..topology import ProcessGroups

Batch = TypeVar("Batch")


def even_batches(batches: Iterable[Batch], groups: ProcessGroups) -> Iterator[tuple[Batch, float]]:
    """This rank's batches, each with weight 1.0; then its last one with weight 0.0 until every rank has run out.

    Multiply the loss by the weight. Every rank goes through the loop equally often; the loss stays the mean over all
    ranks, to which a rank without batches adds nothing (as under DDP's join). One small all-reduce a batch over the
    data-parallel group. Raises ``ValueError`` on all ranks where one has no batch at all.
    """
    backend = dist.get_backend(groups.dp)
    device = torch.device("cuda" if backend == "nccl" else "cpu")
    source = iter(batches)
    last: Batch | None = None
    started = False
    while True:
        try:
            last, weight = next(source), 1.0
        except StopIteration:
            weight = 0.0
        left = torch.tensor([weight, -weight], device=device)
        dist.all_reduce(left, dist.ReduceOp.MAX, group=groups.dp)
        most, least = left[0].item(), -left[1].item()
        if not started and most != least:
            raise ValueError(
                "some rank has no batch at all, so nothing that it could run while the others need its experts"
                f" (this one has {'none' if weight == 0 else 'some'}): give every rank at least one"
            )
        if most == 0:
            return
        started = True
        yield last, weight  # type: ignore[misc]  # not None once started
