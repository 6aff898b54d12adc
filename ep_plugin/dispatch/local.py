"""No expert parallelism: permute routes into expert order on the rank that holds every expert."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..kernels.fan_out import fan_out_torch, row_routes_torch
from ..kernels.reduce import accumulation_dtype, sum_routes
from ..routing import build_route_map, count_routes
from .base import Arrived, Dispatcher, RouteState


class LocalDispatcher(Dispatcher[RouteState]):
    """``dispatcher='local'``: the token-source rank is the expert rank."""

    name = "local"

    def plan(self, topk_idx: Tensor, *, layer: str = "", x: Tensor | None = None) -> RouteState:
        with self.guard("plan", layer):
            topk_idx = self.check_routes(topk_idx)
            counts = count_routes(topk_idx, self.num_experts)[None]
            tokens = counts.new_full((1,), topk_idx.shape[0])
            return RouteState(layer, build_route_map(topk_idx, counts, tokens, rank=0, capacity=self.config.capacity))

    def send(self, state: RouteState, x: Tensor, topk_weight: Tensor, arrived: Arrived) -> tuple[Tensor, Tensor]:
        routes = self._routes(state)
        arrived.route_of_row = routes
        weights = topk_weight.to(accumulation_dtype(x.dtype)).reshape(-1).index_select(0, routes)
        return fan_out_torch(x, routes, self.top_k), weights

    def give_back(
        self, state: RouteState, y: Tensor, weights: Tensor | None, keep: bool
    ) -> tuple[Tensor, Tensor | None]:
        if weights is not None and self.config.weight_at == "output":
            weights = self._by_route(state, weights)
        elif weights is not None:
            weights = weights.to(accumulation_dtype(y.dtype))
        dest = state.map
        out = sum_routes(y, dest.dest_row, dest.dest_rank, 1, weights)
        return out, self._by_route(state, y) if keep else None

    def send_grad(self, state: RouteState, grad: Tensor, scale: Tensor | None) -> Tensor:
        routes = self._routes(state)
        return fan_out_torch(grad, routes, self.top_k, None if scale is None else scale.reshape(-1)[routes])

    def return_grad(
        self, state: RouteState, grad_rows: Tensor | None, grad_weights: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        dest = state.map
        grad_x = None if grad_rows is None else sum_routes(grad_rows, dest.dest_row, dest.dest_rank, 1)
        return grad_x, None if grad_weights is None else self._by_route(state, grad_weights)

    def stats(self) -> dict[str, Any]:
        """bytes_sent: nothing leaves this rank."""
        return {"bytes_sent": 0}

    def _routes(self, state: RouteState) -> Tensor:
        num_rows = state.num_rows
        rows = int(state.map.offsets[-1]) if num_rows is None else num_rows
        return row_routes_torch(state.map.dest_row[None], state.map.tokens, rows)

    @staticmethod
    def _by_route(state: RouteState, rows: Tensor) -> Tensor:
        """[T, K, …]: each route's entry of ``rows`` [R, …], zero where there is no route."""
        index = state.map.dest_row
        if not rows.shape[0]:
            return rows.new_zeros((*index.shape, *rows.shape[1:]))
        there = (index >= 0).view(*index.shape, *[1] * (rows.dim() - 1))
        return torch.where(there, rows[index.clamp(min=0).long()], 0)
