"""The autograd node of an MoE step in waves, with MXFP8 rows: ``node.py`` over the phases of ``mxfp8.node``.

Legend: T local tokens, K routes per token, D hidden size, F expert width, G = 2F if gated else F, R rows of all waves,
RB >= R rows that buffers hold.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..dispatch.base import Arrived
from ..experts import Activation
from ..experts.mlp import ExpertMLP
from ..kernels.scatter_rows import scatter_rows
from ..mxfp8 import activation as between
from ..mxfp8.gemm import RowGroups
from ..mxfp8.node import Backward, _add_bias, _Context
from .lanes import EXPERTS, Lanes, Spared, drive
from .node import Step, joined, rows_of_all
from .split import Wave


def check_width(mlp: ExpertMLP) -> None:
    """``ValueError`` for experts that cannot be quantised in blocks of 32."""
    width = mlp.down.shape[1 if mlp.transposed else 2]
    if width % 32:
        raise ValueError(f"experts of width {width} cannot be quantised in blocks of 32: use a multiple of 32")


@dataclass
class _Sent:
    """One wave between its dispatch and its combine."""

    state: Any
    received: Any
    weights: Tensor
    arrived: Arrived
    y: Tensor | None = None
    kept_up: Tensor | None = None
    gathered: Tensor | None = None


class WaveMXFP8(torch.autograd.Function):
    """``x`` [T, D] and ``topk_weight`` [T, K] → [T, D]."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        topk_weight: Tensor,
        up: Tensor,
        down: Tensor,
        up_bias: Tensor | None,
        down_bias: Tensor | None,
        step: Step,
        activation: Activation,
        transposed: bool,
    ) -> Tensor:
        d: Any = step.inner
        gemm, weight_at, needs, waves = d.gemm, d.config.weight_at, ctx.needs_input_grad, step.waves
        x, weight, into_up = x.detach().contiguous(), topk_weight.detach(), 1 if transposed else 2
        sent: list[_Sent] = []
        outs: list[Tensor] = []

        with torch.autocast(x.device.type, enabled=False), step.forward_lanes() as pipeline:

            def there(i: int) -> Any:
                own, by_token = x[waves[i].tokens], weight[waves[i].tokens]
                state, arrived = step.state(i, own), Arrived()
                with d.guard("dispatch", step.layer):
                    d.check_rows(state, own, by_token)
                    received, weights = d.receive(state, own, by_token.contiguous(), arrived)
                sent.append(_Sent(state, received, weights, arrived))
                return received, weights

            def experts(i: int) -> Any:
                s = sent[i]
                with d.guard("experts", step.layer):
                    layout = RowGroups(s.state.map.offsets, s.state.num_rows, d.dtype)
                    offsets = layout.offsets
                    operand = s.received.operand(gemm.form, gemm.rounding, dtype=d.dtype, offsets=offsets)
                    with pipeline.beside_others(True):
                        projected = gemm.product(operand, up, layout, into_up)
                    _add_bias(layout, projected, up_bias, None)
                    at_hidden = s.weights if weight_at == "hidden" else None
                    hidden, s.kept_up = between.forward(
                        projected, at_hidden, activation, gemm.form, gemm.rounding, offsets=offsets
                    )
                    with pipeline.beside_others(False):
                        s.y = gemm.product(hidden, down, layout, into_up)
                    _add_bias(layout, s.y, down_bias, at_hidden)
                return s.y

            def back(i: int) -> Any:
                s = sent[i]
                with d.guard("combine", step.layer):
                    by_route = {"output": s.weights, "source": weight[waves[i].tokens]}.get(weight_at)
                    out, s.gathered = d.give_back(s.state, s.y, by_route, weight_at == "source" and needs[1])
                s.y = None
                outs.append(out)
                return out, s.gathered

            drive(pipeline, there, experts, back)

        saved: list[Tensor | None] = []
        contexts: list[tuple[Wave, _Context, int]] = []
        for wave, s in zip(waves, sent, strict=True):
            rebuild, tensors = s.arrived.rebuild, s.state.tensors()
            kept_rows: tuple[Tensor | None, ...] = ()
            if needs[2]:
                kept_rows = (s.received.rows,) if rebuild is None else rebuild.tensors
            again = None if rebuild is None else rebuild.rows
            context = _Context(
                d, step.layer, type(s.state), activation, transposed, again, len(tensors), topk_weight.dtype
            )
            contexts.append((wave, context, len(kept_rows)))
            saved += [*tensors, s.weights, s.kept_up, s.gathered, *kept_rows]
        ctx.waves = (contexts, step.lanes, step.spare, step.by, step.ordered)
        out = joined(outs, step.by)
        # Last: a recompute under checkpointing may end here.
        ctx.save_for_backward(topk_weight, up, down, up_bias, down_bias, *saved)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        contexts, lanes, spare, by, ordered = ctx.waves
        with torch.autocast(grad.device.type, enabled=False):
            found = _backward(contexts, lanes, spare, by, ordered, ctx.saved_tensors, ctx.needs_input_grad, grad)
        return (*found, None, None, None)


@dataclass
class _Factors:
    """The two factors of one weight gradient, over the rows of all waves."""

    rows: Tensor
    grad: Tensor


class _WaveBackward(Backward):
    """The phases of one wave. Factors of weight gradients are put at the rows ``targets`` of those of all waves; None:
    kept as they are, which are those of all waves."""

    targets: Tensor | None = None
    up_factors: _Factors | None = None
    down_factors: _Factors | None = None

    def _weight_gradient(self, name: str, grad: Tensor, rows: Tensor) -> Any:
        factors = self.up_factors if name == "up" else self.down_factors
        assert factors is not None  # asked for only where the gradient is needed
        if self.targets is None:
            factors.rows, factors.grad = rows, grad
            return
        last = self.layout.offsets[-1:]
        scatter_rows(rows, self.targets[: rows.shape[0]], factors.rows, last)
        scatter_rows(grad, self.targets[: grad.shape[0]], factors.grad, last)

    def experts(self, spared: Spared) -> None:
        """Everything between the gradient's arrival and its way back."""
        with spared(True):
            self.down_projection()
        self.activation()
        with spared(False):
            self.up_projection_input()
        self.up_projection_weight()


def _backward(
    contexts: list[tuple[Wave, _Context, int]],
    lanes: Lanes,
    spare: int,
    by: str,
    ordered: bool,
    saved: tuple[Any, ...],
    needs: tuple[bool, ...],
    grad: Tensor,
) -> tuple[Tensor | None, ...]:
    topk_weight, up, down, up_bias, down_bias, *rest = saved
    d = contexts[0][1].dispatcher
    grad = grad.to(d.dtype).contiguous()
    waves: list[_WaveBackward] = []
    for wave, context, kept in contexts:
        n = context.state_tensors
        state, (weights, kept_up, gathered), kept_rows = rest[:n], rest[n : n + 3], rest[n + 3 : n + 3 + kept]
        rest = rest[n + 3 + kept :]
        at_source = topk_weight[wave.tokens] if d.config.weight_at == "source" else None
        own = (*state, up, down, up_bias, down_bias, weights, kept_up, at_source, gathered, *kept_rows)
        waves.append(_WaveBackward(context, own, needs, grad[wave.tokens]))
    into, bound, layout = 1 if contexts[0][1].transposed else 2, 0, waves[0].layout
    replaced = d.name == "rowwise" and d.config.form == "route"  # the dispatched rows, by their gradients
    if len(waves) > 1 or replaced:
        where = rows_of_all([w.state for w in waves], [int(w.kept_up.shape[0]) for w in waves], d, ordered)
        bound, numbers = where.bound, [w.state.num_rows for w in waves]
        layout = RowGroups(where.offsets, None if None in numbers else sum(numbers), d.dtype)
        for w, targets in zip(waves, where.targets, strict=True):
            w.targets = targets

    def factors(weight: Tensor) -> _Factors:
        rows, gradients = weight.shape[into], weight.shape[3 - into]
        return _Factors(grad.new_empty(bound, rows), grad.new_empty(bound, gradients))

    up_factors, down_factors = factors(up) if needs[2] else None, factors(down) if needs[3] else None
    for w in waves:
        w.up_factors, w.down_factors = up_factors, down_factors
    gradients: dict[str, Tensor] = {}

    def product(name: str, factors: _Factors | None, weight: Tensor) -> None:
        if factors is not None:
            pair = (factors.rows, factors.grad) if into == 1 else (factors.grad, factors.rows)
            gradients[name] = d.gemm.weight_gradient(*pair, weight, layout)

    layer = contexts[0][1].layer
    with lanes.open(len(waves), spare) as pipeline:

        def combine(i: int) -> Any:
            with d.guard("combine backward", layer):
                waves[i].combine()
            return waves[i].received

        def experts(i: int) -> Any:
            w = waves[i]
            with d.guard("experts backward", layer):
                w.experts(pipeline.beside_others)
            return w.drows, w.dots

        def dispatch(i: int) -> Any:
            with d.guard("dispatch backward", layer):
                waves[i].dispatch()
            return waves[i].dx, waves[i].dweight

        drive(pipeline, combine, experts, dispatch)

        def weight_gradients() -> None:
            with d.guard("experts backward", layer):
                with pipeline.spared():
                    product("down", down_factors, down)
                product("up", up_factors, up)

        pipeline.run(EXPERTS, weight_gradients)

    def all_of(name: str) -> list[Tensor]:
        return [found for found in (getattr(w, name) for w in waves) if found is not None]

    def bias(name: str, like: Tensor | None) -> Tensor | None:
        parts = all_of(name)
        if like is None or not parts:
            return None
        return torch.stack(parts).float().sum(0).to(like.dtype)

    dx, dweight = all_of("dx"), all_of("dweight")
    return (
        joined(dx, by) if dx else None,
        joined(dweight, by) if dweight else None,
        gradients.get("up"),
        gradients.get("down"),
        bias("dup_bias", up_bias),
        bias("ddown_bias", down_bias),
    )
