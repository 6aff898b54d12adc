"""One model on many ranks: replicated by DDP, with its experts replicated too or sharded by the plugin."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..adapters.huggingface import patch_model
from ..adapters.huggingface_state import TrainingState
from ..topology import Layout, ProcessGroups
from .model import experts_modules
from .overflow import Overflows
from .settings import RunConfig


class Replicated:
    """Every rank holds the whole model. ``model`` is the transformers model, ``forward_model`` what the loop calls."""

    def __init__(self, model: nn.Module, world: int, device: torch.device) -> None:
        self.model = model
        self.experts = experts_modules(model)
        ids = [device.index] if device.type == "cuda" else None
        self.forward_model = DistributedDataParallel(model, device_ids=ids) if world > 1 else model
        self.overflows = Overflows([])

    @property
    def parameters_per_rank(self) -> int:
        """Parameters that this rank stores."""
        return sum(p.numel() for p in self.model.parameters())

    @property
    def expert_parameters_per_rank(self) -> int:
        """Parameters of routed experts that this rank stores: P_E / M_E (report, equation 9)."""
        return sum(p.numel() for module in self.experts.values() for p in module.parameters())

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Have ``optimizer`` step on reduced gradients only; DDP has reduced them already."""

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Clip by the norm of the whole model's gradient and return that norm, a scalar."""
        return torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)

    def full_state_dict(self) -> dict[str, Tensor]:
        """The whole model's parameters by transformers' names; collective."""
        return self.model.state_dict()

    def training_state(self, optimizer: torch.optim.Optimizer) -> TrainingState:
        """What writes and reads ``optimizer``'s state."""
        return TrainingState(self.model, optimizer, weights=False)

    def drop_rate(self) -> Tensor:
        """Dropped routes / routes asked in the last forward, over the layers: a float64 scalar."""
        return torch.zeros((), dtype=torch.float64)

    def bytes_sent(self) -> int | None:
        """Row bytes that this rank sent to others since the start; None where a dispatcher does not count them."""
        return 0

    def close(self) -> None:
        """Release what was made collectively; called by all ranks."""


class ExpertParallel(Replicated):
    """The experts are sharded by the plugin; the rest of the model is replicated."""

    def __init__(self, model: nn.Module, config: RunConfig, layout: Layout, device: torch.device) -> None:
        self.groups = ProcessGroups.create(layout)
        self.handle = patch_model(model, config.ep, self.groups)
        super().__init__(model, layout.world_size, device)
        self.overflows = Overflows(self.handle.dispatchers)

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        self.handle.attach(optimizer)

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        return self.handle.clip_grad_norm_(max_norm)

    def full_state_dict(self) -> dict[str, Tensor]:
        return self.handle.full_state_dict()

    def training_state(self, optimizer: torch.optim.Optimizer) -> TrainingState:
        return TrainingState(self.model, optimizer, self.handle.parts, self.groups.ep_mp, weights=False)

    def drop_rate(self) -> Tensor:
        return self.handle.metrics().drop_rate

    def bytes_sent(self) -> int | None:
        return self.handle.metrics().bytes_sent

    def close(self) -> None:
        self.handle.close()
        self.groups.destroy()


def parallelize(model: nn.Module, config: RunConfig, layout: Layout, device: torch.device) -> Replicated:
    """Put ``model`` on the ranks as ``config`` asks; collective over WORLD."""
    if config.patch_experts:
        return ExpertParallel(model, config, layout, device)
    return Replicated(model, layout.world_size, device)
