"""The state dict of the unpatched model, from models whose experts are divided over ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ..topology import ProcessGroups
from .huggingface_families import Share


@dataclass(frozen=True)
class Part:
    """One parameter of the whole model of which a rank has a part: how it is divided, and its whole shape."""

    share: Share
    shape: torch.Size


def gather(
    state: dict[str, Tensor], parts: dict[str, Part], groups: ProcessGroups | None, all_ranks: bool
) -> dict[str, Tensor]:
    """``state`` with every parameter of ``parts`` whole; collective over the EP_MP group.

    On the CPU and on data-parallel rank 0 only (``{}`` elsewhere), unless ``all_ranks``. What is not gathered may share
    memory with ``state``.
    """
    if groups is None or groups.layout.ep_mp == 1:
        mine = all_ranks or groups is None or dist.get_rank(groups.dp) == 0
        return {name: _alone(name, tensor, parts) for name, tensor in state.items()} if mine else {}
    if not all_ranks and dist.get_global_rank(groups.ep_mp, 0) != dist.get_global_rank(groups.dp, 0):
        return {}
    wanted = all_ranks or dist.get_rank(groups.dp) == 0
    full: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if name not in parts:
            if wanted:
                full[name] = tensor.cpu()
        elif parts[name].share.expert is None:
            pieces = _collect(tensor, groups, all_ranks, wanted)
            if pieces:
                full[name] = parts[name].share.whole(pieces)
    single = {name: part for name, part in parts.items() if part.share.expert is not None}
    for name, part in single.items():
        owned = _from_owner(name, part, state, groups, all_ranks, single)
        if owned is not None:
            full[name] = owned
    return full


def _alone(name: str, tensor: Tensor, parts: dict[str, Part]) -> Tensor:
    """On the CPU; a parameter of one expert is a view of a larger tensor, so it is copied."""
    alone = name in parts and parts[name].share.expert is not None
    return tensor.detach().clone().cpu() if alone else tensor.cpu()


def _collect(tensor: Tensor, groups: ProcessGroups, all_ranks: bool, wanted: bool) -> list[Tensor]:
    """Every rank's part, on the CPU, where ``wanted``."""
    group = groups.ep_mp
    pieces = [torch.empty_like(tensor) for _ in range(groups.layout.ep_mp)] if wanted else None
    if all_ranks:
        dist.all_gather(pieces, tensor.contiguous(), group=group)
    else:
        dist.gather(tensor.contiguous(), pieces, dist.get_global_rank(group, 0), group=group)
    return [piece.cpu() for piece in pieces or ()]


def _from_owner(
    name: str, part: Part, state: dict[str, Tensor], groups: ProcessGroups, all_ranks: bool, single: dict[str, Part]
) -> Tensor | None:
    """A parameter of one expert, from the rank that holds it."""
    group, rank = groups.ep_mp, dist.get_rank(groups.ep_mp)
    owner = part.share.owner(groups.layout.ep_mp)
    if name in state:
        tensor = state[name].contiguous()
    else:
        like = next(tensor for key, tensor in state.items() if key in single)
        tensor = torch.empty(part.shape, dtype=like.dtype, device=like.device)
    if all_ranks:
        dist.broadcast(tensor, dist.get_global_rank(group, owner), group=group)
    elif owner != 0 and rank == owner:
        dist.send(tensor, dist.get_global_rank(group, 0), group=group)
    elif owner != 0 and rank == 0:
        dist.recv(tensor, dist.get_global_rank(group, owner), group=group)
    return tensor.detach().clone().cpu() if all_ranks or rank == 0 else None
