"""Ranks that hold the same model must start from the same weights.

Experts that were loaded shard by shard (``whole_experts`` on the parameter) are the same on the ranks of EP_DP alone.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..topology import ProcessGroups

CHUNK = 1 << 22  # elements weighed at once: 32 MiB of int64


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from ((name, p.detach()) for name, p in model.named_parameters())
    yield from model.named_buffers()


def fingerprint(tensor: Tensor) -> Tensor:
    """An int64 scalar that depends on every bit of ``tensor`` and on its place; made on the tensor's device."""
    bits = tensor.contiguous().reshape(-1)
    if bits.dtype == torch.bool:
        bits = bits.to(torch.uint8)
    elif bits.is_complex():
        bits = torch.view_as_real(bits).reshape(-1)
    if bits.dtype.is_floating_point:
        bits = bits.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[bits.element_size()])
    total = torch.full((), bits.numel(), dtype=torch.int64, device=tensor.device)
    for start in range(0, bits.numel(), CHUNK):
        part = bits[start : start + CHUNK].to(torch.int64)
        place = torch.arange(start, start + part.numel(), device=part.device)
        total += _scramble(_scramble(part) ^ place).sum()  # wraps around
    return total


def _scramble(x: Tensor) -> Tensor:
    """A bijection of int64 in which every bit of the input changes about half of the bits of the output."""
    for shift, odd in ((30, 0x3F58476D1CE4E5B9), (27, 0x14D049BB133111EB)):
        x = (x ^ (x >> shift)) * odd
    return x ^ (x >> 31)


def check_same_start(model: nn.Module, groups: ProcessGroups) -> None:
    """Compare every parameter and buffer with the ranks that hold the same; ``ValueError`` on all ranks naming the
    first that differs."""
    names, tensors = zip(*_tensors(model), strict=True)
    mine = torch.stack([fingerprint(tensor) for tensor in tensors])
    loaded = _sharded(model)
    sharded = torch.tensor([name in loaded for name in names], device=mine.device)
    different = torch.where(sharded, _differs(mine, groups.ep_dp), _differs(mine, groups.dp)).int()
    dist.all_reduce(different, dist.ReduceOp.MAX, group=groups.dp)
    found = [name for name, differs in zip(names, different.tolist(), strict=True) if differs]
    if found:
        raise ValueError(
            f"{len(found)} of {len(names)} parameters and buffers differ between data-parallel ranks,"
            f" {found[0]} first: load the same weights or seed alike on every rank, or pass broadcast=True to take"
            " those of the first rank"
        )


def _sharded(model: nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if hasattr(parameter, "whole_experts")}


def _differs(mine: Tensor, group: dist.ProcessGroup) -> Tensor:
    low, high = mine.clone(), mine.clone()
    dist.all_reduce(low, dist.ReduceOp.MIN, group=group)
    dist.all_reduce(high, dist.ReduceOp.MAX, group=group)
    return low != high


def broadcast_start(model: nn.Module, groups: ProcessGroups) -> None:
    """Give every rank the parameters and buffers of the first rank that holds the same."""
    sharded = _sharded(model)
    for name, tensor in _tensors(model):
        group = groups.ep_dp if name in sharded else groups.dp
        sent = tensor.contiguous()
        dist.broadcast(sent, dist.get_global_rank(group, 0), group=group)
        if sent is not tensor:
            tensor.copy_(sent)
