"""One autograd node for dispatch → experts → combine with MXFP8 rows.

One node, because the gradients of the dispatched rows may take the place of those rows (``rowwise``): the node decides
what is read before what is written. Forward: quantise, PUT, up projection, keep the records of its output, activation
and quantise, down projection, quantise, return and sum. Backward: the router weight's gradient where it belongs to the
source, quantise the gradient, PUT, down projection's gradients, activation's, up projection's input gradient, decode
the dispatched rows, up projection's weight gradient, and only then the gradients' way back.

Kept between the two, besides parameters: the records of the dispatched rows (in the dedup form those of the unique
rows, [M·T_max, W]), the records of the up projection's output [R, G + G/32], the rows' weights [R], the route map; at
``weight_at='source'`` also what came back of every route [T, K, W]. All of it is in autograd's saved tensors, so that
checkpointing drops and makes it again, leases of slots included.

Legend: T local tokens, K routes per token, E_l experts of this rank, D hidden size, F expert width, G = 2F if gated
else F, R rows received, W bytes of a record of D values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..dispatch.base import Arrived, Dispatcher, RouteState
from ..experts import Activation, ExpertMLP
from ..experts.groups import column
from . import activation as between
from .codec import Form, as_form
from .gemm import RowGroups

MXFP8Dispatcher = Dispatcher[Any]  # one of ``dispatchers``


def mxfp8_moe_step(
    dispatcher: MXFP8Dispatcher,
    x: Tensor,
    topk_idx: Tensor,
    topk_weight: Tensor,
    experts: Any,
    *,
    layer: str = "",
    observe: Callable[[RouteState], None] | None = None,
) -> Tensor:
    """``layer.moe_step`` as one node with MXFP8 rows: dispatch ``x`` [T, D] by ``topk_idx`` [T, K] (−1: no route), run
    ``experts``, combine; gives [T, D]. ``experts``: ``experts.GroupedMLP``, or anything whose ``mlp()`` gives an
    ``ExpertMLP``.

    Differentiable once in ``x``, ``topk_weight`` [T, K] and the experts' parameters. Backward may run once: with
    ``retain_graph=True`` the second time is an error where the saved rows' slot has been written again. Under
    ``torch.compile`` the whole step is one graph break and runs as it is. Raises ``ValueError`` for inputs that do not
    fit the dispatcher or the codec."""
    if torch.compiler.is_dynamo_compiling():  # waits for peers and leases cannot be traced
        step = torch.compiler.disable(_moe_step)
        return step(dispatcher, x, topk_idx, topk_weight, experts, layer, observe)
    return _moe_step(dispatcher, x, topk_idx, topk_weight, experts, layer, observe)


def _moe_step(
    dispatcher: MXFP8Dispatcher,
    x: Tensor,
    topk_idx: Tensor,
    topk_weight: Tensor,
    experts: Any,
    layer: str,
    observe: Callable[[RouteState], None] | None,
) -> Tensor:
    state = dispatcher.plan(topk_idx, layer=layer, x=x)
    if observe is not None:
        with dispatcher.guard("observe", layer):
            observe(state)
    with dispatcher.guard("experts", layer):
        mlp = parameters_of(experts)
    return mxfp8_mlp(
        dispatcher,
        state,
        x,
        topk_weight,
        mlp.up,
        mlp.down,
        up_bias=mlp.up_bias,
        down_bias=mlp.down_bias,
        activation=mlp.activation,
        transposed=mlp.transposed,
    )


def parameters_of(experts: Any) -> ExpertMLP:
    """What ``experts`` consist of; ``ValueError`` for experts that are not computed by this project."""
    mlp = getattr(experts, "mlp", None)
    if mlp is None:
        raise ValueError(
            "precision='mxfp8' computes the experts itself, between rows that travel quantised, and so needs"
            f" experts.GroupedMLP or the like, not {type(experts).__name__}: use those, or precision='bf16'"
        )
    found: ExpertMLP = mlp()
    return found


def mxfp8_mlp(
    dispatcher: MXFP8Dispatcher,
    state: RouteState,
    x: Tensor,
    topk_weight: Tensor,
    up: Tensor,
    down: Tensor,
    *,
    activation: Activation,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    transposed: bool = False,
) -> Tensor:
    """The node for one planned ``state``: dispatch, grouped MLP, combine; [T, D].

    ``up`` [E_l, G, D] and ``down`` [E_l, D, F], or [E_l, D, G] and [E_l, F, D] if ``transposed``; biases [E_l, G] and
    [E_l, D]. F and D must be multiples of 32."""
    width = down.shape[1 if transposed else 2]
    if width % 32:
        with dispatcher.guard("experts", state.layer):
            raise ValueError(f"experts of width {width} cannot be quantised in blocks of 32: use a multiple of 32")
    step = _Step(dispatcher, state, activation, transposed)
    out: Tensor = _MXFP8Experts.apply(x, topk_weight, up, down, up_bias, down_bias, step)
    return out


@dataclass(frozen=True)
class _Step:
    """The arguments of one call that autograd does not see."""

    dispatcher: Any
    state: Any  # of the dispatcher's kind
    activation: Activation
    transposed: bool

    @property
    def into_up(self) -> int:
        """The axis of the up weight that its product contracts in forward; the other one in backward."""
        return 1 if self.transposed else 2


@dataclass(frozen=True)
class _Context:
    """What backward knows besides its saved tensors."""

    dispatcher: Any
    layer: str
    kind: type[RouteState]
    activation: Activation
    transposed: bool
    rebuild: Callable[[tuple[Tensor, ...], int | None], Tensor] | None
    state_tensors: int
    weight_dtype: torch.dtype


class _MXFP8Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        topk_weight: Tensor,
        up: Tensor,
        down: Tensor,
        up_bias: Tensor | None,
        down_bias: Tensor | None,
        step: _Step,
    ) -> Tensor:
        d, state, act = step.dispatcher, step.state, step.activation
        gemm, weight_at, needs = d.gemm, d.config.weight_at, ctx.needs_input_grad
        with torch.autocast(x.device.type, enabled=False):
            arrived = Arrived()
            with d.guard("dispatch", state.layer):
                d.check_rows(state, x, topk_weight)
                received, weights = d.receive(state, x.detach(), topk_weight.detach(), arrived)
            with d.guard("experts", state.layer):
                layout = RowGroups(state.map.offsets, state.num_rows, d.dtype)
                offsets, into_up = layout.offsets, step.into_up
                operand = received.operand(gemm.form, gemm.rounding, dtype=d.dtype, offsets=offsets)
                projected = gemm.product(operand, up, layout, into_up)
                del operand
                _add_bias(layout, projected, up_bias, None)
                at_hidden = weights if weight_at == "hidden" else None
                hidden, kept_up = between.forward(projected, at_hidden, act, gemm.form, gemm.rounding, offsets=offsets)
                del projected
                y = gemm.product(hidden, down, layout, into_up)
                del hidden
                _add_bias(layout, y, down_bias, at_hidden)
            with d.guard("combine", state.layer):
                by_route = {"output": weights, "source": topk_weight.detach()}.get(weight_at)
                keep = weight_at == "source" and needs[1]
                out, gathered = d.give_back(state, y, by_route, keep)
        rebuild = arrived.rebuild
        kept_rows: tuple[Tensor | None, ...] = ()
        if needs[2]:
            kept_rows = (received.rows,) if rebuild is None else rebuild.tensors
        tensors = state.tensors()
        ctx.context = _Context(
            d,
            state.layer,
            type(state),
            act,
            step.transposed,
            rebuild.rows if rebuild is not None else None,  # the function alone: it must hold no tensor
            len(tensors),
            topk_weight.dtype,
        )
        at_source = topk_weight if weight_at == "source" else None
        # Last: a recompute under checkpointing may end here.
        parameters = (up, down, up_bias, down_bias)
        ctx.save_for_backward(*tensors, *parameters, weights, kept_up, at_source, gathered, *kept_rows)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        with torch.autocast(grad.device.type, enabled=False):
            return Backward(ctx.context, ctx.saved_tensors, ctx.needs_input_grad, grad).run()


class Backward:
    """The backward of one node, step by step; ``run`` says in which order."""

    def __init__(self, context: _Context, saved: tuple[Any, ...], needs: tuple[bool, ...], grad: Tensor) -> None:
        self.c, self.needs = context, needs
        self.d, n = context.dispatcher, context.state_tensors
        self.state: Any = context.kind.restore(context.layer, saved[:n])
        self.up, self.down, self.up_bias, self.down_bias = saved[n : n + 4]
        self.weights, self.kept_up, self.topk_weight, self.gathered = saved[n + 4 : n + 8]
        self.kept_rows: tuple[Tensor, ...] = saved[n + 8 :]
        self.grad = grad.to(self.d.dtype).contiguous()
        self.gemm = self.d.gemm
        self.layout = RowGroups(self.state.map.offsets, self.state.num_rows, self.d.dtype)
        self.into_up = 1 if context.transposed else 2
        self.at_source = self.topk_weight is not None
        self.moves_both = self.d.moves_both_gradients and self.d.world > 1
        self.dx: Tensor | None = None
        self.dweight: Tensor | None = None
        self.dup: Tensor | None = None
        self.ddown: Tensor | None = None
        self.dup_bias: Tensor | None = None
        self.ddown_bias: Tensor | None = None

    def run(self) -> tuple[Tensor | None, ...]:
        """Everything; the rows that were dispatched are read before their slot is written."""
        with self.d.guard("combine backward", self.c.layer):
            self.combine()
        with self.d.guard("experts backward", self.c.layer):
            self.down_projection()
            self.activation()
            self.up_projection_input()
            self.up_projection_weight()
        with self.d.guard("dispatch backward", self.c.layer):
            self.dispatch()
        return self.dx, self.dweight, self.dup, self.ddown, self.dup_bias, self.ddown_bias, None

    def combine(self) -> None:
        """The gradient of every row, as it travelled."""
        scale = None
        if self.topk_weight is not None:
            scale = self.topk_weight.to(torch.float32)
            if self.gathered is not None:
                t, k, wide = self.gathered.shape
                rows = self.d.wires.combine.decode(self.gathered.view(t * k, wide))
                rows = rows.view(t, k, self.d.hidden_size).float()
                self.dweight = (rows * self.grad.float().unsqueeze(1)).sum(2).to(self.c.weight_dtype)
        self.plain_needed = self.needs[3] or self.down_bias is not None
        forms: list[Form] = [self.gemm.form, "plain"] if self.plain_needed else [self.gemm.form]
        self.received = self.d.receive_grad(self.state, self.grad, scale, forms)

    def down_projection(self) -> None:
        """The gradient of the hidden rows. Under ``hidden`` and ``output`` the router weight is still missing in it."""
        gemm, offsets = self.gemm, self.layout.offsets
        operand = self.received.operand(gemm.form, gemm.rounding, dtype=self.d.dtype, offsets=offsets)
        self.grad_plain: Tensor | None = None
        if self.plain_needed:
            plain = self.received.operand("plain", gemm.rounding, dtype=self.d.dtype, offsets=offsets)
            self.grad_plain = plain.data
        del self.received
        self.dhidden = gemm.product(operand, self.down, self.layout, 3 - self.into_up)

    def activation(self) -> None:
        """Gradients of the up projection's output and of the router weight; the down projection's weight gradient.

        An output weight w is as good as a hidden one here: w·(down·h) = down·(w·h)."""
        gemm, weights = self.gemm, None if self.at_source else self.weights
        found = between.backward(
            self.kept_up,
            self.dhidden,
            weights,
            self.c.activation,
            gemm.form,
            gemm.rounding,
            offsets=self.layout.offsets,
        )
        del self.dhidden
        self.dprojected, self.operand, self.dots = found.dup, found.operand, found.dweights
        grad = self.grad_plain
        if self.needs[3] and grad is not None:
            self.ddown = self._weight_gradient("down", grad, found.hidden)
        if self.down_bias is not None and grad is not None:
            groups = self.layout.sums(grad.shape[0])
            if self.needs[5]:
                self.ddown_bias = groups.sum(grad, column(weights, torch.float32)).to(self.down_bias.dtype)
            if self.dots is not None:
                self.dots = self.dots + groups.dot_bias(grad, self.down_bias.to(grad.dtype))
        if self.up_bias is not None and self.needs[4]:
            groups = self.layout.sums(self.dprojected.shape[0])
            self.dup_bias = groups.sum(self.dprojected, None).to(self.up_bias.dtype)
        del self.grad_plain

    def up_projection_input(self) -> None:
        """The gradient of the dispatched rows."""
        self.drows: Tensor | None = None
        if self.needs[0] or self.moves_both:
            self.drows = self.gemm.product(self.operand, self.up, self.layout, 3 - self.into_up)
        del self.operand

    def up_projection_weight(self) -> None:
        """Reads the dispatched rows, for the last time."""
        if not self.needs[2]:
            return
        rebuild, n = self.c.rebuild, self.layout.num_rows
        rows = self.kept_rows[0] if rebuild is None else rebuild(self.kept_rows, n)
        plain = as_form(rows, "plain", self.gemm.rounding, dtype=self.d.dtype, offsets=self.layout.offsets)
        self.dup = self._weight_gradient("up", self.dprojected, plain.data)

    def dispatch(self) -> None:
        """The gradients' way back. Where they take the slot of the dispatched rows, those are gone after this."""
        dots = self.dots if self.needs[1] or self.moves_both else None  # None at the source too, which has its own
        dx, dweight = self.d.return_grad(self.state, self.drows, dots)
        self.dx = dx if self.needs[0] else None
        if dweight is not None and self.needs[1]:
            self.dweight = dweight.to(self.c.weight_dtype)

    def _weight_gradient(self, name: str, grad: Tensor, rows: Tensor) -> Tensor:
        """Of the projection ``name``, up or down (both may be one tensor)."""
        left, right = (rows, grad) if self.c.transposed else (grad, rows)
        return self.gemm.weight_gradient(left, right, getattr(self, name), self.layout)


def _add_bias(layout: RowGroups, rows: Tensor, bias: Tensor | None, weights: Tensor | None) -> None:
    """rows[r] += bias of its expert (times weights[r]), in place."""
    if bias is not None:
        layout.sums(rows.shape[0]).add_bias(rows, bias.detach().to(rows.dtype), column(weights, torch.float32))
