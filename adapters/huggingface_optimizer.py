"""Optimizer state spread over the replicas of what it belongs to, by torch's ZeroRedundancyOptimizer.

Each rank of an EP_DP group steps a share of the experts that the group holds alike and sends the result to the others;
dense parameters are shared out over DP in the same way. The parameters are those of the optimizer on every rank alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from .huggingface import PatchedModel

Groups = list[dict[str, Any]]


class ReplicaShardedOptimizer(torch.optim.Optimizer):
    """Several optimizers, each of some of the parameters, as one with the parameter groups that were asked for.

    ``sources``: of every group of every one of ``optimizers`` the group here whose settings it follows."""

    def __init__(
        self,
        groups: Groups,
        defaults: dict[str, Any],
        optimizers: list[torch.optim.Optimizer],
        sources: list[list[int]],
    ) -> None:
        super().__init__(groups, defaults)
        self.optimizers, self.sources = optimizers, sources
        for optimizer, followed in zip(optimizers, sources, strict=True):
            for group, source in zip(optimizer.param_groups, followed, strict=True):  # settings that the class adds
                self.param_groups[source] = {**group, **self.param_groups[source]}

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Step all; collective over the groups that share their state."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for optimizer, sources in zip(self.optimizers, self.sources, strict=True):
            for group, source in zip(optimizer.param_groups, sources, strict=True):
                group |= {key: value for key, value in self.param_groups[source].items() if key != "params"}
            optimizer.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """This rank's share, for this rank alone; ``PatchedModel.save_training_state`` writes all."""
        return {"shares": [part.state_dict() for part in parts_of(self)]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what ``state_dict`` gave on this rank."""
        for part, share in zip(parts_of(self), state_dict["shares"], strict=True):
            part.load_state_dict(share)


def shard_optimizer(
    handle: PatchedModel,
    optimizer_class: type[torch.optim.Optimizer],
    params: Iterable[nn.Parameter] | Groups | None = None,
    **defaults: Any,
) -> ReplicaShardedOptimizer:
    """``optimizer_class(params, **defaults)`` with its state shared out over the ranks that hold the same parameters.

    Collective, after DDP or FSDP2. ``params``: parameters or groups, as for any optimizer; None is all that are
    trainable. Parameters that FSDP2 shards keep their state where they are. Raises ``ValueError`` in a single process.
    """
    if handle.groups is None:
        raise ValueError("in a single process there is nothing to share the optimizer's state with")
    given = [p for p in handle.model.parameters() if p.requires_grad] if params is None else list(params)
    groups: Groups = given if given and isinstance(given[0], dict) else [{"params": given}]  # type: ignore[assignment]
    experts = {id(p) for p in handle.expert_parameters.values()}

    def kind(parameter: nn.Parameter) -> str:
        return "fsdp" if isinstance(parameter, DTensor) else "experts" if id(parameter) in experts else "dense"

    made: list[torch.optim.Optimizer] = []
    sources: list[list[int]] = []
    for wanted, over in (("dense", handle.groups.dp), ("experts", handle.groups.ep_dp), ("fsdp", None)):
        parts = [{**group, "params": [p for p in group["params"] if kind(p) == wanted]} for group in groups]
        sources.append([number for number, part in enumerate(parts) if part["params"]])
        parts = [parts[number] for number in sources[-1]]
        if not parts:
            sources.pop()
        elif over is None or dist.get_world_size(over) == 1:
            made.append(optimizer_class(parts, **defaults))
        else:
            made.append(ZeroRedundancyOptimizer(parts, optimizer_class, process_group=over, **defaults))
    return ReplicaShardedOptimizer(groups, defaults, made, sources)


def parts_of(optimizer: Any) -> list[torch.optim.Optimizer]:
    """The plain optimizers that step this rank's share, inside ``optimizer`` and the wrappers around it."""
    if isinstance(optimizer, ReplicaShardedOptimizer):
        return [part for inner in optimizer.optimizers for part in parts_of(inner)]
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        return [optimizer.optim]
    inner = getattr(optimizer, "optimizer", None)
    return parts_of(inner) if isinstance(inner, torch.optim.Optimizer) else [optimizer]
