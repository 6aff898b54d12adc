"""Dispatchers whose rows travel as MXFP8 records: the movements of ``dispatch`` with other rows in them.

Rows that only move (dispatch forward, combine backward) are quantised before they leave and stay records on the expert
rank. Where rows are summed on the way back, what travels is quantised once: each row where one row per route comes
back, the float32 sum of a token's rows where the expert rank sums them (dedup).

``local`` quantises too, though nothing leaves: it is what the others compare with.

Legend: T local tokens, K routes per token, D hidden size, R rows received, W width of a row on the wire.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..config import EPConfig, check_shape
from ..dispatch.base import Arrived, RouteState
from ..dispatch.block import BlockDispatcher, BlockState
from ..dispatch.local import LocalDispatcher
from ..heap import Heap, open_heap
from ..kernels.fan_out import fan_out_torch
from ..kernels.mxfp8_reduce import get_reduce_records_torch
from ..kernels.reduce import sum_routes_torch
from .config import MXFP8Config
from .gemm import choose_gemm
from .movements import MXFP8Movements, Wire, Wires
from .rowwise import RowwiseMXFP8


def _sum_routes(rows: Tensor, index: Tensor, state: RouteState, world: int, w: Tensor | None, wire: Wire) -> Tensor:
    """``sum_routes_torch`` of rows that came back as ``wire`` says; ``index`` [T, K]: the row of each route."""
    if wire.records:
        return get_reduce_records_torch([rows] * world, state.map.dest_rank, index, w, wire.plain)
    return sum_routes_torch(rows, index, state.map.dest_rank, world, w)


class LocalMXFP8(MXFP8Movements, LocalDispatcher):
    """``local``."""

    def send(self, state: RouteState, x: Tensor, topk_weight: Tensor, arrived: Arrived) -> tuple[Tensor, Tensor]:
        return super().send(state, self.wires.dispatch.encode(x), topk_weight, arrived)

    def give_back(
        self, state: RouteState, y: Tensor, weights: Tensor | None, keep: bool
    ) -> tuple[Tensor, Tensor | None]:
        wire = self.wires.combine
        if weights is not None:
            at_output = self.config.weight_at == "output"
            weights = self._by_route(state, weights) if at_output else weights.to(torch.float32)
        rows = wire.encode(y)
        out = _sum_routes(rows, state.map.dest_row, state, 1, weights, wire)
        return out, self._by_route(state, rows) if keep else None

    def send_grad(self, state: RouteState, grad: Tensor, scale: Tensor | None) -> Tensor:
        wire, routes = self.wires.combine_backward, self._routes(state)
        if scale is None:
            return fan_out_torch(wire.encode(grad), routes, self.top_k)
        return wire.encode(fan_out_torch(grad, routes, self.top_k), weights=scale.reshape(-1)[routes])

    def return_grad(
        self, state: RouteState, grad_rows: Tensor | None, grad_weights: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        wire, grad_x = self.wires.dispatch_backward, None
        if grad_rows is not None:
            grad_x = _sum_routes(wire.encode(grad_rows), state.map.dest_row, state, 1, None, wire)
        return grad_x, None if grad_weights is None else self._by_route(state, grad_weights)


class BlockMXFP8(MXFP8Movements, BlockDispatcher):
    """``block``: the same exchanges, of records."""

    def send(self, state: BlockState, x: Tensor, topk_weight: Tensor, arrived: Arrived) -> tuple[Tensor, Tensor]:
        return super().send(state, self.wires.dispatch.encode(x), topk_weight, arrived)

    def give_back(
        self, state: BlockState, y: Tensor, weights: Tensor | None, keep: bool
    ) -> tuple[Tensor, Tensor | None]:
        return super().give_back(state, self.wires.combine.encode(y), weights, keep)

    def merge(self, state: BlockState, rows: Tensor, weights: Tensor | None) -> Tensor:
        wire = Wire(rows.dtype == torch.uint8, self.hidden_size, self.dtype, self.mxfp8.rounding)
        return _sum_routes(rows, self._sent_row(state), state, self.world, weights, wire)

    def send_grad(self, state: BlockState, grad: Tensor, scale: Tensor | None) -> Tensor:
        wire = self.wires.combine_backward
        if scale is None:
            return super().send_grad(state, wire.encode(grad), None)
        routes = state.send_routes
        rows = wire.encode(fan_out_torch(grad, routes, self.top_k), weights=scale.reshape(-1)[routes])
        return self._to_experts(state, rows)

    def return_grad(
        self, state: BlockState, grad_rows: Tensor | None, grad_weights: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        rows = None if grad_rows is None else self.wires.dispatch_backward.encode(grad_rows)
        return super().return_grad(state, rows, grad_weights)


def build_mxfp8_dispatcher(
    config: EPConfig,
    mxfp8: MXFP8Config,
    *,
    num_experts: int,
    top_k: int,
    hidden_size: int,
    dtype: torch.dtype,
    group: dist.ProcessGroup | None = None,
    device: torch.device | str = "cpu",
    heap: Heap | None = None,
) -> LocalMXFP8 | BlockMXFP8 | RowwiseMXFP8:
    """``build_dispatcher`` for rows that travel as ``mxfp8`` says, with the expert GEMM it names.

    ``hidden_size`` must be a multiple of 32 and ``dtype`` bfloat16 (on CPU float32 and float16 too). Raises
    ``ValueError`` for what does not fit, before anything is made."""
    config.validate()
    mxfp8.validate(config.dispatcher)
    device = torch.device(device)
    wires = Wires.of(mxfp8, hidden_size, dtype)
    if device.type == "cuda" and dtype != torch.bfloat16:
        raise ValueError(f"MXFP8 on GPUs carries bfloat16 rows, not {dtype}")
    if config.weight_at == "input":
        raise ValueError(
            "weight_at='input' multiplies rows that are already quantised; MXFP8 takes 'hidden', 'output' or 'source'"
        )
    if config.dispatcher == "rowwise" and device.type != "cpu":
        raise ValueError(f"dispatcher='rowwise' moves MXFP8 rows on CPU only so far, not on {device.type}; use 'block'")
    gemm = choose_gemm(mxfp8, device)
    kwargs: dict[str, Any] = dict(
        num_experts=num_experts, top_k=top_k, hidden_size=hidden_size, dtype=dtype, device=device, rank=0, world=1
    )
    if config.dispatcher == "local":
        local = LocalMXFP8(config, **kwargs)
        local.set_mxfp8(mxfp8, wires, gemm)
        return local
    if not dist.is_initialized():
        raise ValueError(
            f"dispatcher={config.dispatcher!r} needs torch.distributed; start with torchrun, or use 'local'"
        )
    kwargs |= {"rank": dist.get_rank(group), "world": dist.get_world_size(group)}
    check_shape(num_experts=num_experts, top_k=top_k, hidden_size=hidden_size, ep=kwargs["world"])
    if config.dispatcher == "block":
        block = BlockMXFP8(config, group=group, **kwargs)
        block.set_mxfp8(mxfp8, wires, gemm)
        return block
    owns_heap = heap is None
    if heap is None:
        heap = open_heap(config.heap, group, device, config.timeout_s)
    return RowwiseMXFP8(config, heap=heap, owns_heap=owns_heap, mxfp8=mxfp8, wires=wires, gemm=gemm, **kwargs)
