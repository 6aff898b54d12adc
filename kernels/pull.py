"""One-sided reads of token rows by the expert rank: fan-out by GET, which is measured beside PUT (report, Figure 19).

Legend: T tokens of a source, M ranks, R expert rows, D row width."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def pull_rows_torch(peers: Sequence[Tensor], source_rank: Tensor, source_row: Tensor, out: Tensor) -> None:
    """``out[i] = peers[source_rank[i]][source_row[i]]``; −1 pulls nothing, and what is not pulled keeps its old bytes.

    ``peers[p]`` [T of p, D]; ``source_rank``, ``source_row`` int32 [R]; ``out`` [at least R, D]."""
    for rank, rows in enumerate(peers):
        here = (source_rank == rank).nonzero().squeeze(1)
        if here.numel():
            out.index_copy_(0, here, torch.index_select(rows, 0, source_row[here].long()))
