"""What every dispatcher is: routes in, expert rows out, and back.

Legend: T local tokens, K routes per token, E experts, M = EP_MP degree, E_l = E/M experts of this rank, D hidden size,
R rows received, T_max = the most tokens a source may have.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..config import EPConfig, check_shape
from ..routing import RouteMap, drop_metrics


def acc_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that sums of rows are taken in: float64 for float64 rows, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass
class Rebuild:
    """How to make the expert rows again in backward from fewer bytes than the rows themselves.

    ``tensors`` are saved by whoever needs the rows in backward; ``rows(tensors, num_rows)`` gives [R, D] again.
    """

    tensors: tuple[Tensor, ...]
    rows: Callable[[tuple[Tensor, ...], int | None], Tensor]


@dataclass
class Dispatched:
    """Rows on the expert rank, in expert-contiguous order.

    ``rows`` [R, D] wire dtype; ``weights`` [R] router weight of each row, float32 (float64 for float64 rows), differentiable;
    ``offsets`` int64 [E_l + 1], expert e of this rank owns rows offsets[e]:offsets[e+1]; ``num_rows`` is R on the host, or None
    where only the device knows it (then rows and weights are padded to a bound and ``offsets[-1]`` is R);
    ``route_of_row`` int64 [R] = (source·T_max + t)·K + k. ``rebuild``: keep its tensors for backward rather than ``rows``.
    ``output`` [>= R, D]: where the down projection should write (None: anywhere).
    """

    rows: Tensor
    weights: Tensor
    offsets: Tensor
    num_rows: int | None
    route_of_row: Tensor
    rebuild: Rebuild | None = None
    output: Tensor | None = None

    @property
    def tokens_per_expert(self) -> Tensor:
        """int64 [E_l] rows of each expert of this rank."""
        return self.offsets[1:] - self.offsets[:-1]


@dataclass
class RouteState:
    """Everything one (layer, microbatch) needs between plan and the end of its backward. Dispatchers subclass it.

    It holds no tensor that carries gradient: those travel through arguments and returns.
    """

    map: RouteMap
    layer: str
    num_tokens: int


class Dispatcher(ABC):
    """Moves token rows to the ranks that store their experts and back.

    The three calls of one step are ``plan``, ``dispatch`` and ``combine``; all ranks of the EP_MP group make the same calls in the
    same order. Gradients of the rows travel the same way back. One dispatcher serves all layers of one shape.
    """

    name: str

    def __init__(
        self,
        config: EPConfig,
        *,
        num_experts: int,
        top_k: int,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
        rank: int,
        world: int,
    ) -> None:
        check_shape(num_experts=num_experts, top_k=top_k, hidden_size=hidden_size, ep=world)
        self.config = config
        self.num_experts, self.top_k, self.hidden_size = num_experts, top_k, hidden_size
        self.dtype, self.device = dtype, device
        self.rank, self.world = rank, world
        self.num_local_experts = num_experts // world

    def check_routes(self, topk_idx: Tensor) -> None:
        """``ValueError`` quoting what does not fit this dispatcher in ``topk_idx`` [T, K]."""
        if topk_idx.dim() != 2 or topk_idx.shape[1] != self.top_k:
            raise ValueError(f"topk_idx has shape {tuple(topk_idx.shape)}; expected [T, {self.top_k}]")
        if topk_idx.dtype.is_floating_point or topk_idx.dtype == torch.bool:
            raise ValueError(f"topk_idx has dtype {topk_idx.dtype}; expected an integer dtype")

    def check_rows(self, state: RouteState, x: Tensor, topk_weight: Tensor) -> None:
        """``ValueError`` quoting what does not fit the plan in ``x`` [T, D] or ``topk_weight`` [T, K]."""
        if x.shape != (state.num_tokens, self.hidden_size):
            raise ValueError(
                f"x has shape {tuple(x.shape)}; the routes are of {state.num_tokens} tokens of hidden size {self.hidden_size}"
            )
        if x.dtype != self.dtype:
            raise ValueError(f"x has dtype {x.dtype}; this dispatcher was built for {self.dtype}")
        if topk_weight.shape != (state.num_tokens, self.top_k):
            raise ValueError(
                f"topk_weight has shape {tuple(topk_weight.shape)}; expected ({state.num_tokens}, {self.top_k})"
            )
        if not topk_weight.dtype.is_floating_point:
            raise ValueError(f"topk_weight has dtype {topk_weight.dtype}; expected a floating-point dtype")

    @abstractmethod
    def plan(self, topk_idx: Tensor, *, layer: str = "") -> RouteState:
        """Exchange counts and build the route map.

        ``topk_idx`` integer [T, K] of global expert ids, −1 for no route; a token may name an expert twice; T may differ between
        ranks and be 0. ``layer`` names the caller in errors and traces. Raises ``ValueError`` for an id outside [−1, E).
        """

    @abstractmethod
    def dispatch(self, state: RouteState, x: Tensor, topk_weight: Tensor) -> Dispatched:
        """Move ``x`` [T, D] to its experts. Differentiable in ``x`` and ``topk_weight`` [T, K] (any float dtype)."""

    @abstractmethod
    def combine(self, state: RouteState, y: Tensor, weights: Tensor | None = None) -> Tensor:
        """Sum expert outputs ``y`` [R, D] back into token order, [T, D].

        ``weights``: ``Dispatched.weights`` under ``weight_at='output'``, ``topk_weight`` under ``'source'``, else None (the
        experts applied them). A (token, rank) partial is summed in ``acc_dtype`` in ascending k and rounded once to the dtype of the rows;
        partials are summed in ``acc_dtype`` in ascending rank and rounded once.
        """

    def check_combine(self, state: RouteState, weights: Tensor | None) -> None:
        """``ValueError`` when ``weights`` is missing where ``weight_at`` needs it, or given where it would count twice."""
        needed = self.config.weight_at in ("output", "source")
        if needed != (weights is not None):
            raise ValueError(
                f"combine(weights={'None' if weights is None else 'tensor'}) does not fit weight_at={self.config.weight_at!r}:"
                " 'output' takes Dispatched.weights, 'source' takes topk_weight, 'hidden' and 'input' take None"
            )

    def metrics(self, state: RouteState) -> dict[str, Tensor]:
        """Device tensors of one step: drop_rate, expert_load, buffer use (``routing.drop_metrics``)."""
        return drop_metrics(state.map)

    def stats(self) -> dict[str, Any]:
        """Counters of this dispatcher since it was built: bytes sent to other ranks, slots in use and at peak."""
        return {}

    def close(self) -> None:
        """Release what was made collectively; called on all ranks in the same order. Idempotent."""
