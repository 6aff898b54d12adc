"""Dispatchers whose rows travel as MXFP8 records: the movements of ``dispatch`` with other rows in them.

Rows that only move (dispatch forward, combine backward) are quantised before they leave and stay records on the expert
rank. Where rows are summed on the way back, what travels is quantised once: each row where one row per route comes
back, the float32 sum of a token's rows where the expert rank sums them (dedup).

``local`` quantises too, though nothing leaves: it is what the others compare with.

Legend: T local tokens, K routes per token, D hidden size, R rows received, W width of a row on the wire.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..config import EPConfig, MXFP8Config
from ..dispatch.base import Arrived, RouteState
from ..dispatch.block import BlockDispatcher, BlockState
from ..dispatch.local import LocalDispatcher
from ..heap import Heap
from ..kernels.fan_out import fan_out_torch
from ..kernels.mxfp8_reduce import sum_route_records
from ..kernels.reduce import sum_routes
from .deepep import DeepEPMXFP8
from .gemm import choose_gemm
from .movements import MXFP8Movements, Wire, Wires
from .rowwise import RowwiseMXFP8

if TYPE_CHECKING:  # needs Triton
    from .rowwise_device import DeviceRowwiseMXFP8

MovementsT = TypeVar("MovementsT", bound=MXFP8Movements)


def _sum_routes(rows: Tensor, index: Tensor, state: RouteState, world: int, w: Tensor | None, wire: Wire) -> Tensor:
    """``sum_routes`` of rows that came back as ``wire`` says; ``index`` [T, K]: the row of each route."""
    if wire.records:
        return sum_route_records(rows, index, state.map.dest_rank, world, w, wire.plain)
    return sum_routes(rows, index, state.map.dest_rank, world, w)


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
        return _sum_routes(rows, state.sent_row, state, self.world, weights, wire)

    def send_grad(self, state: BlockState, grad: Tensor, scale: Tensor | None) -> Tensor:
        wire = self.wires.combine_backward
        if scale is None:
            return super().send_grad(state, wire.encode(grad), None)
        rows = wire.encode(self.fan_out(state, grad, None), weights=scale.reshape(-1)[state.send_routes])
        return self._to_experts(state, rows)

    def return_grad(
        self, state: BlockState, grad_rows: Tensor | None, grad_weights: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        rows = None if grad_rows is None else self.wires.dispatch_backward.encode(grad_rows)
        return super().return_grad(state, rows, grad_weights)


def build_mxfp8_dispatcher(
    config: EPConfig, mxfp8: MXFP8Config | None = None, **arguments: Any
) -> LocalMXFP8 | BlockMXFP8 | RowwiseMXFP8 | DeviceRowwiseMXFP8:
    """``build_dispatcher`` of ``config`` with ``precision='mxfp8'``, and with ``mxfp8`` where given."""
    from ..dispatch import build_dispatcher

    dispatcher = build_dispatcher(replace(config, precision="mxfp8", mxfp8=mxfp8 or config.mxfp8), **arguments)
    assert isinstance(dispatcher, MXFP8Movements)
    return dispatcher  # type: ignore[return-value]


class Precision:
    """What the dispatchers of one ``config`` have beside the plain ones: wires and GEMM, checked before anything is
    made.

    ``ValueError`` for a hidden size that is no multiple of 32, a dtype that is not carried, a GEMM that ``device``
    cannot run."""

    def __init__(
        self,
        config: EPConfig,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
        wrap: Callable[[type[Any]], type[Any]] = lambda cls: cls,
    ) -> None:
        self.config, self.mxfp8, self.wrap = config, config.mxfp8, wrap
        self.wires = Wires.of(config.mxfp8, hidden_size, dtype)
        if device.type == "cuda" and dtype != torch.bfloat16:
            raise ValueError(f"MXFP8 on GPUs carries bfloat16 rows, not {dtype}")
        self.gemm = choose_gemm(config.mxfp8, device)

    def local(self, **shape: Any) -> LocalMXFP8:
        return self._with(LocalMXFP8(self.config, **shape))

    def block(self, group: dist.ProcessGroup | None, **shape: Any) -> BlockMXFP8:
        return self._with(self.wrap(BlockMXFP8)(self.config, group=group, **shape))

    def deepep(self, **shape: Any) -> DeepEPMXFP8:
        own: dict[str, Any] = dict(mxfp8=self.mxfp8, wires=self.wires, gemm=self.gemm, **shape)
        return self.wrap(DeepEPMXFP8)(self.config, **own)

    def rowwise(self, heap: Heap, **shape: Any) -> RowwiseMXFP8 | DeviceRowwiseMXFP8:
        own: dict[str, Any] = dict(heap=heap, mxfp8=self.mxfp8, wires=self.wires, gemm=self.gemm, **shape)
        if heap.host_visible:
            return self.wrap(RowwiseMXFP8)(self.config, **own)
        from .rowwise_device import DeviceRowwiseMXFP8

        return self.wrap(DeviceRowwiseMXFP8)(self.config, **own)

    def _with(self, dispatcher: MovementsT) -> MovementsT:
        dispatcher.set_mxfp8(self.mxfp8, self.wires, self.gemm)
        return dispatcher
