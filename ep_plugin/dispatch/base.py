"""What every dispatcher is: routes in, expert rows out, and back.

Legend: T local tokens, K routes per token, E experts, M = EP_MP degree, E_l = E/M experts of this rank, D hidden size,
R rows received, T_max = the most tokens a source may have.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..config import EPConfig, check_shape
from ..kernels.reduce import accumulation_dtype
from ..kernels.scale_rows import scale_rows
from ..routing import RouteMap, drop_metrics
from .spans import span


@dataclass
class Rebuild:
    """How to make the expert rows again in backward from fewer bytes than the rows themselves.

    ``tensors`` are saved by whoever needs the rows in backward; ``rows(tensors, num_rows)`` gives [R, D] again.
    """

    tensors: tuple[Tensor, ...]
    rows: Callable[[tuple[Tensor, ...], int | None], Tensor]


@dataclass
class Arrived:
    """What ``send`` has beside the rows; see ``Dispatched``."""

    route_of_row: Tensor | None = None
    rebuild: Rebuild | None = None
    output: Tensor | None = None


@dataclass
class Dispatched:
    """Rows on the expert rank, in expert-contiguous order.

    ``rows`` [R, D] wire dtype; ``weights`` [R] router weight of each row, float32 (float64 for float64 rows),
    differentiable; ``offsets`` int64 [E_l + 1], expert e of this rank owns rows offsets[e]:offsets[e+1]; ``num_rows``
    is R on the host, or None where only the device knows it (then rows and weights are padded to a bound and
    ``offsets[-1]`` is R); ``route_of_row`` int64 [R] = (source·T_max + t)·K + k. ``rebuild``: keep its tensors for
    backward rather than ``rows``. ``output`` [>= R, D]: where the down projection should write (None: anywhere)."""

    rows: Tensor
    weights: Tensor
    offsets: Tensor
    num_rows: int | None
    route_of_row: Tensor | None = None
    rebuild: Rebuild | None = None
    output: Tensor | None = None

    @property
    def tokens_per_expert(self) -> Tensor:
        """int64 [E_l] rows of each expert of this rank."""
        return self.offsets[1:] - self.offsets[:-1]


@dataclass
class RouteState:
    """Everything one (layer, microbatch) needs between plan and the end of its backward. Dispatchers subclass it.

    It holds no tensor that carries gradient: those travel through arguments and returns. Autograd saves ``tensors()``
    and makes the state again from them, so that activation checkpointing drops and recomputes it like any other saved
    tensor."""

    layer: str
    map: RouteMap

    @property
    def num_tokens(self) -> int:
        """T of this rank."""
        return self.map.dest_rank.shape[0]

    @property
    def num_rows(self) -> int | None:
        """R where the host knows it."""
        return int(self.map.offsets[-1]) if self.map.offsets.device.type == "cpu" else None

    def tensors(self) -> tuple[Tensor, ...]:
        """What backward needs."""
        m = self.map
        return (m.dest_rank, m.dest_row, m.counts, m.accepted, m.tokens, m.offsets)

    @classmethod
    def restore(cls, layer: str, tensors: tuple[Tensor, ...]) -> RouteState:
        """The inverse of ``tensors``."""
        return cls(layer, RouteMap(*tensors))


class RouteOverflow(RuntimeError):
    """Dropless routes did not fit the buffers of a step, and were skipped on every rank: discard the step, call
    ``Dispatcher.regrow(rows)`` on all ranks and run it again. ``rows``: what an expert rank would have needed."""

    def __init__(self, message: str, rows: int) -> None:
        super().__init__(message)
        self.rows = rows


StateT = TypeVar("StateT", bound=RouteState)


class Dispatcher(ABC, Generic[StateT]):
    """Moves token rows to the ranks that store their experts and back.

    The three calls of one step are ``plan``, ``dispatch`` and ``combine``; all ranks of the EP_MP group make the same
    calls in the same order. Gradients of the rows travel the same way back. One dispatcher serves all layers of one
    shape."""

    name: str
    moves_both_gradients = True
    """Dispatch backward moves the gradients of rows and of weights whichever this rank needs, since another rank may
    need the other; False where the ranks tell each other what they move."""
    can_overflow = False
    """Whether ``check`` may raise ``RouteOverflow``; the same on all ranks."""

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

    def expect(self, num_tokens: int) -> None:
        """Collective, before a forward pass: its layers have ``num_tokens`` tokens on this rank. Buffers that were made
        for fewer than the most of all ranks grow. Nothing to do where they are made to measure, or by the settings."""

    def check_routes(self, topk_idx: Tensor) -> Tensor:
        """``topk_idx`` [T, K] of any integer dtype as int64, or as it is where int32: −1 or E may not be numbers of
        narrower or unsigned ones. ``ValueError`` quoting what does not fit this dispatcher."""
        if topk_idx.dim() != 2 or topk_idx.shape[1] != self.top_k:
            raise ValueError(f"topk_idx has shape {tuple(topk_idx.shape)}; expected [T, {self.top_k}]")
        if topk_idx.is_floating_point() or topk_idx.is_complex() or topk_idx.dtype == torch.bool:
            raise ValueError(f"topk_idx has dtype {topk_idx.dtype}; expected an integer dtype")
        self._check_device("topk_idx", topk_idx)
        return topk_idx if topk_idx.dtype == torch.int32 else topk_idx.to(torch.int64)

    def _check_device(self, name: str, tensor: Tensor) -> None:
        its, mine = tensor.device, self.device
        if its.type != mine.type or not (mine.index is None or its.index is None or its.index == mine.index):
            raise ValueError(f"{name} is on {tensor.device}; this dispatcher moves rows on {self.device}")

    def check_x(self, num_tokens: int, x: Tensor) -> None:
        """``ValueError`` quoting what does not fit in ``x`` [T, D] of a plan of ``num_tokens`` tokens."""
        if x.shape != (num_tokens, self.hidden_size):
            raise ValueError(
                f"x has shape {tuple(x.shape)}; the routes are of {num_tokens} tokens of hidden size {self.hidden_size}"
            )
        if x.dtype != self.dtype:
            raise ValueError(f"x has dtype {x.dtype}; this dispatcher was built for {self.dtype}")
        self._check_device("x", x)

    def check_rows(self, state: StateT, x: Tensor, topk_weight: Tensor) -> None:
        """``ValueError`` quoting what does not fit the plan in ``x`` [T, D] or ``topk_weight`` [T, K]."""
        self.check_x(state.num_tokens, x)
        if topk_weight.shape != (state.num_tokens, self.top_k):
            raise ValueError(
                f"topk_weight has shape {tuple(topk_weight.shape)}; expected ({state.num_tokens}, {self.top_k})"
            )
        if not topk_weight.dtype.is_floating_point:
            raise ValueError(f"topk_weight has dtype {topk_weight.dtype}; expected a floating-point dtype")
        self._check_device("topk_weight", topk_weight)

    @abstractmethod
    def plan(self, topk_idx: Tensor, *, layer: str = "", x: Tensor | None = None) -> StateT:
        """Exchange counts and build the route map.

        ``topk_idx`` integer [T, K] of global expert ids, −1 for no route; a token may name an expert twice; T may
        differ between ranks and be 0. ``layer`` names the caller in errors and traces. ``x`` [T, D], if it is what
        ``dispatch`` will get and nothing changes it before: its rows may start to move while the map is built. Raises
        ``ValueError`` for an id outside [−1, E)."""

    def dispatch(self, state: StateT, x: Tensor, topk_weight: Tensor) -> Dispatched:
        """Move ``x`` [T, D] to its experts. Differentiable in ``x`` and ``topk_weight`` [T, K] (any float dtype).

        Raises ``ValueError`` for shapes or dtypes that do not fit the plan.
        """
        arrived = Arrived()
        rows, weights = DispatchRows.apply(x, topk_weight, self, state, arrived)
        return Dispatched(rows, weights, state.map.offsets, state.num_rows, **vars(arrived))

    def combine(self, state: StateT, y: Tensor, weights: Tensor | None = None) -> Tensor:
        """Sum expert outputs ``y`` [R, D] back into token order, [T, D]. Differentiable in ``y`` and ``weights``.

        ``weights``: ``Dispatched.weights`` under ``weight_at='output'``, ``topk_weight`` under ``'source'``, else None
        (the experts applied them). A (token, rank) partial is summed in float32 (float64 for float64 rows) in
        ascending k and rounded once to the rows' dtype; partials are summed likewise in ascending rank and rounded
        once."""
        out: Tensor = CombineRows.apply(y, weights, self, state)
        return out

    @contextmanager
    def guard(self, phase: str, layer: str) -> Iterator[None]:
        """Around every step: names it in a trace, and tells the peers when this rank fails in it.

        Not around ``Function.apply``: what it saves afterwards may raise to end a checkpoint's recompute early."""
        with span(f"{phase}/{layer}" if layer else phase):
            try:
                yield
            except BaseException as error:
                self.fail(phase, layer, error)
                raise

    def fail(self, phase: str, layer: str, error: BaseException) -> None:
        """Stop the peers, who would otherwise wait for this rank. The base has no peers to tell."""

    # One movement of rows for each direction; dispatchers implement these four.

    @abstractmethod
    def send(self, state: StateT, x: Tensor, topk_weight: Tensor, arrived: Arrived) -> tuple[Tensor, Tensor]:
        """Dispatch forward: rows [R, D] and weights [R]; fills ``arrived``."""

    @abstractmethod
    def give_back(self, state: StateT, y: Tensor, weights: Tensor | None, keep: bool) -> tuple[Tensor, Tensor | None]:
        """Combine forward: [T, D], and, if ``keep``, every route's row [T, K, D] for the weight's gradient at the
        source."""

    @abstractmethod
    def send_grad(self, state: StateT, grad: Tensor, scale: Tensor | None) -> Tensor:
        """Combine backward: the gradient [T, D] of each row's token (times ``scale`` [T, K]), [R, D]."""

    @abstractmethod
    def return_grad(
        self, state: StateT, grad_rows: Tensor | None, grad_weights: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Dispatch backward: gradients of x [T, D] and of topk_weight [T, K] from those of rows [R, D] and weights
        [R]."""

    def check_combine(self, state: StateT, y: Tensor, weights: Tensor | None) -> None:
        """``ValueError`` when ``y`` does not fit, or ``weights`` is missing or would count twice under
        ``weight_at``."""
        rows = state.num_rows
        if y.dim() != 2 or y.shape[1] != self.hidden_size or (rows is not None and y.shape[0] != rows):
            raise ValueError(
                f"y has shape {tuple(y.shape)}; expected [{'R' if rows is None else rows}, {self.hidden_size}]"
            )
        if y.dtype != self.dtype:
            raise ValueError(f"y has dtype {y.dtype}; this dispatcher was built for {self.dtype}")
        self._check_device("y", y)
        needed = self.config.weight_at in ("output", "source")
        if needed != (weights is not None):
            raise ValueError(
                f"combine(weights={'None' if weights is None else 'tensor'}) does not fit"
                f" weight_at={self.config.weight_at!r}: 'output' takes Dispatched.weights, 'source' takes"
                f" topk_weight, 'hidden' and 'input' take None"
            )

    def metrics(self, state: StateT) -> dict[str, Tensor]:
        """Device tensors of one step: drop_rate, expert_load, buffer use (``routing.drop_metrics``)."""
        return drop_metrics(state.map)

    def check(self) -> None:
        """Raise what could not be raised when it happened; to be called before an optimizer step.

        Where nothing waits for the device, a late peer or an overflow of dropless buffers is found only here.
        """

    def regrow(self, rows: int) -> None:
        """Collective, after a ``RouteOverflow`` whose step was discarded: room for ``rows`` rows of an expert rank.

        No tensor of a step may be alive. Nothing to do where buffers are made to measure.
        """

    def stats(self) -> dict[str, Any]:
        """Counters of this dispatcher since it was built: bytes sent to other ranks, slots in use and at peak."""
        return {}

    def close(self) -> None:
        """Release what was made collectively; called on all ranks in the same order. Idempotent."""


class DispatchRows(torch.autograd.Function):
    """Rows out; gradients of rows and of their weights back."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, topk_weight: Tensor, dispatcher: Dispatcher[Any], state: RouteState, arrived: Arrived
    ) -> tuple[Tensor, Tensor]:
        with dispatcher.guard("dispatch", state.layer):
            dispatcher.check_rows(state, x, topk_weight)
            rows, weights = dispatcher.send(state, x.detach(), topk_weight.detach(), arrived)
        ctx.dispatcher, ctx.layer, ctx.kind, ctx.weight_dtype = dispatcher, state.layer, type(state), topk_weight.dtype
        ctx.save_for_backward(*state.tensors())
        return rows, weights

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_rows: Tensor, grad_weights: Tensor) -> tuple[Tensor | None, ...]:
        dispatcher: Dispatcher[Any] = ctx.dispatcher
        with dispatcher.guard("dispatch backward", ctx.layer):
            need_x, need_weight = ctx.needs_input_grad[:2]
            state = ctx.kind.restore(ctx.layer, ctx.saved_tensors)
            both = dispatcher.moves_both_gradients
            grad_x, grad_weight = dispatcher.return_grad(
                state, grad_rows if need_x or both else None, grad_weights if need_weight or both else None
            )
            return (
                grad_x if need_x else None,
                grad_weight.to(ctx.weight_dtype) if need_weight and grad_weight is not None else None,
                None,
                None,
                None,
            )


class CombineRows(torch.autograd.Function):
    """Sums out; gradients of expert outputs, and of the weights where combine applied them, back."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, weights: Tensor | None, dispatcher: Dispatcher[Any], state: RouteState) -> Tensor:
        at_source = dispatcher.config.weight_at == "source"
        keep = at_source and weights is not None and ctx.needs_input_grad[1]
        with dispatcher.guard("combine", state.layer):
            dispatcher.check_combine(state, y, weights)
            out, gathered = dispatcher.give_back(state, y.detach(), None if weights is None else weights.detach(), keep)
        ctx.dispatcher, ctx.layer, ctx.kind, ctx.at_source = dispatcher, state.layer, type(state), at_source
        ctx.rows = y.shape[0]  # experts of someone else give exactly R rows where ours give the bound
        saved = (weights, gathered if at_source else y) if weights is not None else ()
        ctx.save_for_backward(*state.tensors(), *saved)
        ctx.extra = len(saved)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        dispatcher: Dispatcher[Any] = ctx.dispatcher
        with dispatcher.guard("combine backward", ctx.layer):
            tensors = ctx.saved_tensors
            state = ctx.kind.restore(ctx.layer, tensors[: len(tensors) - ctx.extra])
            grad = grad.contiguous()
            if not ctx.extra:
                return dispatcher.send_grad(state, grad, None)[: ctx.rows], None, None, None
            weights, kept = tensors[-2:]
            acc = accumulation_dtype(grad.dtype)
            if ctx.at_source:
                grad_y = dispatcher.send_grad(state, grad, weights.to(acc))[: ctx.rows]
                if kept is None:
                    return grad_y, None, None, None
                grad_w = (kept.to(acc) * grad.to(acc).unsqueeze(1)).sum(2)
                return grad_y, grad_w.to(weights.dtype), None, None
            rows = dispatcher.send_grad(state, grad, None)[: ctx.rows]
            valid = ctx.rows if state.num_rows is None else state.num_rows
            grad_y, dots = scale_rows(rows, weights, kept, valid, state.map.offsets[-1:])
            return grad_y, None if dots is None else dots.to(weights.dtype), None, None
