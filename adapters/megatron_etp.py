"""Expert tensor parallelism: the ranks of an ETP group hold slices of the same experts, so each needs all their rows.

Legend: R rows of this rank, E_l experts of the group, ETP its size.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.moe.moe_utils import sort_chunks_by_idxs
from torch import Tensor


def gather_rows(rows: Tensor, weights: Tensor, counts: Tensor, group: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The rows of all ETP ranks in expert-contiguous order, inside an expert by rank.

    ``rows`` [R, H] and ``weights`` [R] in expert-contiguous order, ``counts`` int64 [E_l] of them on the CPU. Gives
    rows, weights and the counts of every rank, int64 [ETP, E_l] on the CPU.
    """
    size = dist.get_world_size(group)
    own = counts.to(rows.device)
    every = own.new_empty((size, own.numel()))
    dist.all_gather(list(every), own, group=group)
    every = every.cpu()
    sizes = every.sum(1).tolist()
    rows = gather_from_sequence_parallel_region(rows, group=group, output_split_sizes=sizes)
    weights = gather_from_sequence_parallel_region(weights, group=group, output_split_sizes=sizes)
    order = torch.arange(every.numel()).view_as(every).t().reshape(-1)
    rows, weights = sort_chunks_by_idxs(rows, every.reshape(-1), order, probs=weights)
    return rows, weights, every


def scatter_rows(rows: Tensor, counts: Tensor, group: Any, dtype: torch.dtype) -> Tensor:
    """The way back of ``gather_rows``: the sum over the ETP ranks of this rank's rows, [R, H], summed in ``dtype``.

    ``rows`` [sum(counts), H] are this slice's share of the experts' outputs; ``counts`` as ``gather_rows`` gave them.
    """
    order = torch.arange(counts.numel()).view(counts.shape[1], counts.shape[0]).t().reshape(-1)
    rows, _ = sort_chunks_by_idxs(rows, counts.t().reshape(-1), order)
    summed = reduce_scatter_to_sequence_parallel_region(
        rows.to(dtype), group=group, input_split_sizes=counts.sum(1).tolist()
    )
    return summed.to(rows.dtype)
