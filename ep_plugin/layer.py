"""One MoE step: routes in, combined rows out. This is what adapters call.

Legend: T local tokens, K routes per token, E_l experts of this rank, D hidden size, R rows received.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .dispatch import Dispatched, Dispatcher, RouteState
from .experts import WeightAt
from .watch import before_host_looks


class Experts(Protocol):
    """Experts of this rank over expert-contiguous rows; ``experts.GroupedMLP`` is one.

    Takes the rows and where the router weight goes: under ``input`` and ``hidden`` it applies ``d.weights`` itself,
    under ``output`` and ``source`` the dispatcher does. Returns [R, D]."""

    def __call__(self, d: Dispatched, weight_at: WeightAt) -> Tensor: ...


class ForeignExperts:
    """Experts of someone else as ``Experts``: ``fn(rows [R, D], expert_of_row int64 [R], weights [R] or None) -> [R,
    D]``.

    ``expert_of_row`` counts this rank's experts from 0. ``weights`` is None where the dispatcher applies them. R is
    exact, which is a host copy where the row count is only known on the device."""

    def __init__(self, fn: Callable[[Tensor, Tensor, Tensor | None], Tensor]) -> None:
        self.fn = fn

    def __call__(self, d: Dispatched, weight_at: WeightAt) -> Tensor:
        before_host_looks(d.offsets.device)  # ``fn`` may do so too
        num_rows = int(d.offsets[-1]) if d.num_rows is None else d.num_rows
        counts = d.tokens_per_expert
        experts = torch.arange(counts.numel(), device=counts.device).repeat_interleave(counts, output_size=num_rows)
        weights = d.weights[:num_rows] if weight_at in ("input", "hidden") else None
        return self.fn(d.rows[:num_rows], experts, weights)


class _Connected(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, rows: Tensor) -> Tensor:
        return y.view_as(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def connected(y: Tensor, rows: Tensor) -> Tensor:
    """``y`` [R, D] itself, in whose graph ``rows`` [R, D] always are, though they may get no gradient from it.

    Experts that loop over those with rows give a constant where there are none. Without this, autograd would skip the
    dispatch's backward on that rank alone, and its peers would wait for it."""
    out: Tensor = _Connected.apply(y, rows)
    return out


def moe_step(
    dispatcher: Dispatcher[Any],
    x: Tensor,
    topk_idx: Tensor,
    topk_weight: Tensor,
    experts: Experts,
    *,
    layer: str = "",
    observe: Callable[[RouteState], None] | None = None,
) -> Tensor:
    """Dispatch ``x`` [T, D] by ``topk_idx`` [T, K] (−1: no route), run ``experts``, combine; gives [T, D].

    Differentiable in ``x``, ``topk_weight`` [T, K] and the experts' parameters. ``layer`` names the caller in errors
    and traces; ``observe`` is given the route state, for metrics. Under ``torch.compile`` the whole step is one graph
    break and runs as it is. Raises ``ValueError`` for inputs that do not fit the dispatcher."""
    if torch.compiler.is_dynamo_compiling():  # waits for peers and leases cannot be traced
        step = torch.compiler.disable(_moe_step)
        return step(dispatcher, x, topk_idx, topk_weight, experts, layer, observe)
    return _moe_step(dispatcher, x, topk_idx, topk_weight, experts, layer, observe)


def _moe_step(
    dispatcher: Dispatcher[Any],
    x: Tensor,
    topk_idx: Tensor,
    topk_weight: Tensor,
    experts: Experts,
    layer: str,
    observe: Callable[[RouteState], None] | None,
) -> Tensor:
    if dispatcher.config.schedule.kind != "none":
        from .waves import WaveDispatcher, wave_moe_step

        assert isinstance(dispatcher, WaveDispatcher)  # nothing else is built for a schedule
        return wave_moe_step(dispatcher, x, topk_idx, topk_weight, experts, layer, observe)
    if dispatcher.config.precision == "mxfp8":
        from .mxfp8.node import mxfp8_moe_step

        return mxfp8_moe_step(dispatcher, x, topk_idx, topk_weight, experts, layer=layer, observe=observe)
    weight_at: WeightAt = dispatcher.config.weight_at  # type: ignore[assignment]  # validated
    state = dispatcher.plan(topk_idx, layer=layer, x=x)
    if observe is not None:
        with dispatcher.guard("observe", layer):
            observe(state)
    dispatched = dispatcher.dispatch(state, x, topk_weight)
    with dispatcher.guard("experts", layer):
        y = connected(experts(dispatched, weight_at), dispatched.rows)
    weights = {"output": dispatched.weights[: y.shape[0]], "source": topk_weight}.get(weight_at)
    del dispatched  # what backward does not keep is free before the way back
    return dispatcher.combine(state, y, weights)
