"""What Megatron's contract needs around our dispatchers: dense routes as top-k routes, exactly N rows, padding per
expert, and tensors whose storage a schedule may free.

Legend: T local tokens, E experts, E_l experts of this rank, K routes per token (the bound), R rows received, D hidden
size.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..dispatch import Dispatcher, RouteState
from ..dispatch.base import Arrived, CombineRows, DispatchRows

KERNEL_DEVICES: tuple[str, ...] = ("cuda",)


def routes_from_map(routing_map: Tensor, probs: Tensor, max_routes: int) -> tuple[Tensor, Tensor]:
    """Top-k form of a dense routing: int64 ids [T, K] (ascending in a token, −1 past its routes) and weights [T, K].

    ``routing_map`` bool [T, E], ``probs`` [T, E] (differentiable), ``max_routes`` K. A token may have fewer routes. One
    with more is an error: ``ValueError`` on CPU, a device-side assertion on a GPU, where the host does not wait for the
    map.
    """
    if routing_map.device.type in KERNEL_DEVICES and importlib.util.find_spec("triton") is not None:
        topk_idx, weights, most = _DenseRoutes.apply(probs, routing_map, max_routes)
        if max_routes < routing_map.shape[1]:
            _check_bound(most <= max_routes, max_routes)
        return topk_idx, weights
    tokens, experts = routing_map.shape
    column = routing_map.cumsum(1)  # 1 for the first route of a token
    if tokens and max_routes < experts:
        _check_bound((column[:, -1] <= max_routes).all(), max_routes, column[:, -1].max())
    ids = torch.arange(experts, device=routing_map.device).expand(tokens, experts)
    topk_idx = ids.new_full((tokens, max_routes + 1), -1)
    column = torch.where(routing_map, column - 1, max_routes)  # what is no route lands in a column that is cut off
    topk_idx = topk_idx.scatter_(1, column, ids)[:, :max_routes].contiguous()
    weights = probs.gather(1, topk_idx.clamp(min=0))
    return topk_idx, weights.masked_fill(topk_idx < 0, 0)


def _check_bound(fits: Tensor, max_routes: int, most: Tensor | None = None) -> None:
    message = (
        f"a token of the routing map has more than {max_routes} routes, the bound of this dispatcher: pass"
        " max_routes=<the most that a token may have>"
    )
    if fits.device.type == "cuda":
        torch._assert_async(fits, message)
    elif not fits:
        raise ValueError(message if most is None else f"{message} (one has {int(most)})")


class _DenseRoutes(torch.autograd.Function):
    """``routes_from_map`` in one kernel; gives besides, int32 [1], the most routes of a token where that is more than
    the bound, else 0."""

    @staticmethod
    def forward(ctx: Any, probs: Tensor, routing_map: Tensor, max_routes: int) -> tuple[Tensor, Tensor, Tensor]:
        from ..kernels.dense_routes_triton import dense_routes

        routing_map = routing_map.contiguous()
        topk_idx = torch.empty((len(routing_map), max_routes), dtype=torch.int64, device=probs.device)
        weights = probs.new_empty(topk_idx.shape)
        most = torch.zeros(1, dtype=torch.int32, device=probs.device)
        dense_routes(routing_map, probs.contiguous(), topk_idx, weights, most)
        ctx.mark_non_differentiable(topk_idx, most)
        ctx.save_for_backward(routing_map)
        return topk_idx, weights, most

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _ids: Tensor, grad: Tensor, _most: Tensor) -> tuple[Tensor, None, None]:
        from ..kernels.dense_routes_triton import dense_routes_backward

        (routing_map,) = ctx.saved_tensors
        dprobs = grad.new_empty(routing_map.shape)
        dense_routes_backward(routing_map, grad.contiguous(), dprobs)
        return dprobs, None, None


class HostOffsets:
    """Row offsets int64 [E_l + 1] on the host: one pinned copy that starts now and is waited for when asked for."""

    def __init__(self, offsets: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if offsets.device.type != "cuda":
            self._host = offsets
            return
        self._host = torch.empty(offsets.shape, dtype=offsets.dtype, pin_memory=True)
        self._host.copy_(offsets, non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record()

    def get(self) -> Tensor:
        """int64 [E_l + 1] on CPU; waits for the copy."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        return self._host


class ExactDispatch(torch.autograd.Function):
    """``DispatchRows`` whose results are the first R rows, R from ``rows_known()``, called when the rows are under way.

    A slice of the padded rows would cost backward a pass over all of them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        topk_weight: Tensor,
        dispatcher: Dispatcher[Any],
        state: RouteState,
        arrived: Arrived,
        rows_known: Callable[[int], int],
    ) -> tuple[Tensor, Tensor]:
        rows, weights = DispatchRows.forward(ctx, x, topk_weight, dispatcher, state, arrived)
        exact = rows_known(rows.shape[0])
        return rows[:exact], weights[:exact]

    @staticmethod
    def backward(ctx: Any, grad_rows: Tensor, grad_weights: Tensor) -> tuple[Tensor | None, ...]:
        return *DispatchRows.backward(ctx, grad_rows, grad_weights), None


class ExactCombine(torch.autograd.Function):
    """``CombineRows`` over exactly R rows: the gradient has as many, however many the dispatcher's buffers hold."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, dispatcher: Dispatcher[Any], state: RouteState) -> Tensor:
        ctx.num_rows = y.shape[0]
        return CombineRows.forward(ctx, y, None, dispatcher, state)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_y, _, *rest = CombineRows.backward(ctx, grad)
        return None if grad_y is None else grad_y[: ctx.num_rows], *rest


class Rearrange(torch.autograd.Function):
    """Rows [n, ...] to other places [m, ...], both ways as reads: ``source`` int64 [m] is the row that each place takes
    (−1: zeros), ``place`` int64 [n] the inverse (−1: the row is not taken).

    ``Rearrange.apply(rows, source, place)``; no place may take a row that another takes too.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, source: Tensor, place: Tensor) -> Tensor:
        ctx.save_for_backward(place)
        return _take(rows, source)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (place,) = ctx.saved_tensors
        return _take(grad, place), None, None


def _take(rows: Tensor, index: Tensor) -> Tensor:
    if rows.shape[0] == 0:
        return rows.new_zeros((index.numel(), *rows.shape[1:]))
    empty = (index < 0).view(-1, *(1,) * (rows.dim() - 1))
    return rows.index_select(0, index.clamp(min=0)).masked_fill_(empty, 0)


class Padding:
    """Every expert's rows padded with zero rows: expert e gets ``sizes[e]`` of them.

    ``offsets`` int64 [E_l + 1] of the dense rows, on their device; ``held`` ≥ offsets[-1], the rows that their tensor
    holds; ``sizes`` int64 [E_l] on the CPU, none smaller than the expert's rows (``ValueError`` on CPU, a device-side
    assertion on a GPU). ``pad`` and ``unpad`` are each other's inverse on [held, ...] and [sum(sizes), ...], and
    differentiable; what lies past offsets[-1] is lost.
    """

    def __init__(self, offsets: Tensor, held: int, sizes: Tensor) -> None:
        device = offsets.device
        counts, room = offsets.diff(), sizes.to(device, non_blocking=True)
        fits = (counts <= room).all()
        message = "an expert received more rows than its padded capacity"
        if device.type == "cuda":
            torch._assert_async(fits, message)
        elif not fits:
            raise ValueError(f"{message}: rows {counts.tolist()}, capacity {sizes.tolist()}")
        ends = room.cumsum(0)
        starts, last = ends - room, sizes.numel() - 1
        index = torch.arange(int(sizes.sum()), device=device)
        expert = torch.bucketize(index, ends, right=True).clamp_(max=last)
        within = index - starts[expert]
        self.source = torch.where(within < counts[expert], offsets[expert] + within, -1)
        index = torch.arange(held, device=device)
        expert = torch.bucketize(index, offsets[1:], right=True).clamp_(max=last)
        self.place = torch.where(index < offsets[-1], index - offsets[expert] + starts[expert], -1)

    def pad(self, rows: Tensor) -> Tensor:
        """[R, ...] → [sum(sizes), ...]."""
        padded: Tensor = Rearrange.apply(rows, self.source, self.place)
        return padded

    def unpad(self, rows: Tensor) -> Tensor:
        """[sum(sizes), ...] → [R, ...]."""
        dense: Tensor = Rearrange.apply(rows, self.place, self.source)
        return dense


class Hide(torch.autograd.Function):
    """A stand-in with the shape and the gradient of ``x`` and a storage of one element, which anyone may free.

    Megatron's 1F1B schedule frees the storage of what it hands from one call to the next; ``x`` itself goes by the
    side, and ``Reveal`` joins them again.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.new_empty(1).expand(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Reveal(torch.autograd.Function):
    """``hidden`` (detached) with its gradient going to the ``stand_in``."""

    @staticmethod
    def forward(ctx: Any, stand_in: Tensor, hidden: Tensor) -> Tensor:
        if hidden.device.type == "cuda":
            hidden.record_stream(torch.cuda.current_stream(hidden.device))  # made on another stream, perhaps
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, None
