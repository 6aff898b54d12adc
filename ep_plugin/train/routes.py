"""What the router chose, seen at the door of the experts: load, and flips between two runs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class RouteRecorder:
    """Watches the expert ids that each experts module is called with.

    ``take`` returns those of the forwards since the last ``take``, int16 [layers, T, K].
    """

    def __init__(self, modules: list[nn.Module]) -> None:
        self._routes: list[Tensor] = []
        self._handles = [m.register_forward_pre_hook(self._record, with_kwargs=True) for m in modules]

    def _record(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch._C._current_graph_task_id() != -1:
            return  # a recomputation, in backward
        routes = kwargs["top_k_index"] if "top_k_index" in kwargs else args[1]
        self._routes.append(routes.detach().to(torch.int16))

    def take(self) -> Tensor:
        """Routes int16 [layers, T, K] of the step, in the order of the layers; ``RuntimeError`` if no layer ran."""
        if not self._routes:
            raise RuntimeError("no experts module ran since the routes were last taken")
        routes, self._routes = torch.stack(self._routes), []
        return routes

    def close(self) -> None:
        """Stop watching."""
        for handle in self._handles:
            handle.remove()


def expert_load(routes: Tensor, num_experts: int) -> Tensor:
    """Routes that name each expert, float64 [layers, E], from ``routes`` [layers, T, K]."""
    layers = len(routes)
    ids = routes.reshape(layers, -1).long()
    load = torch.zeros(layers, num_experts, dtype=torch.float64, device=routes.device)
    return load.scatter_add_(1, ids, torch.ones_like(ids, dtype=torch.float64))


def flipped_routes(a: Tensor, b: Tensor) -> int:
    """How many routes of ``a`` [..., K] go to an expert that the same token of ``b`` does not use; order within K is
    free.
    """
    return int((a[..., :, None] != b[..., None, :]).all(-1).sum())
