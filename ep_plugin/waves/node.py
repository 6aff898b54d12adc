"""The autograd node of an MoE step in waves, with plain rows: dispatch, experts and combine of every wave.

One node, because it decides in which order waves go through their stages, backward as forward: the gradient of wave
i + 1 travels to its experts while those of wave i are differentiated and the gradient of wave i − 1 travels back.
Weight gradients need no communication and none waits for them, so they come last, beside the last rows on their way
back. By token they are one product each over the rows of all waves, put in one order: what a product over each wave
and a sum of these would cost in passes over the weights' gradients exceeds what overlap can win, and the sums over a
microbatch's rows stay in the GEMM's float32. One wave has nothing to put in order, and is cut by expert.

By token, hidden rows are made again in backward, where they are put in that order too. Everything kept is in autograd's
saved tensors, the lease of the slot included.

Legend: T local tokens, K routes per token, E_l experts of this rank, D hidden size, F expert width, G = 2F if gated
else F, R_w rows of one wave, R rows of all waves, RB >= R rows that buffers hold.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..dispatch.base import Arrived, Dispatcher, RouteState
from ..experts.activation import Placed
from ..experts.groups import Groups
from ..kernels.reduce import accumulation_dtype
from ..kernels.scatter_rows import scatter_rows
from .experts import Gradients, WaveMLP
from .lanes import EXPERTS, THERE, Lanes, Mark, Pipeline, drive
from .split import Wave, WholeRows, whole_rows


@dataclass
class Step:
    """The arguments of one call that autograd does not see.

    ``states``: of the waves planned so far; ``plan`` makes that of another one from its x. ``ordered``: rows of an
    expert are in the order (source, t·K+k)."""

    inner: Dispatcher[Any]
    lanes: Lanes
    layer: str
    waves: list[Wave]
    by: str
    plan: Callable[[int, Tensor], RouteState]
    ordered: bool
    spare: int  # multiprocessors that GEMMs leave to communication
    states: list[RouteState] = field(default_factory=list)

    def forward_lanes(self) -> AbstractContextManager[Pipeline]:
        """For the forward pass, where one wave has nothing to run beside."""
        return self.lanes.open(len(self.waves), self.spare, overlapped=len(self.waves) > 1)

    def state(self, wave: int, x: Tensor) -> Any:
        """The route state of ``wave``, whose tokens are ``x`` [T_w, D]."""
        if wave == len(self.states):
            self.states.append(self.plan(wave, x))
        return self.states[wave]


@dataclass
class _Sent:
    """One wave between its dispatch and its combine."""

    state: Any
    rows: Tensor
    weights: Tensor
    arrived: Arrived
    y: Tensor | None = None
    projected: Tensor | None = None
    hidden: Tensor | None = None


OTHERS = 4  # saved tensors of a wave besides its state's and its rows


@dataclass(frozen=True)
class _Kept:
    """What backward knows of one wave besides its saved tensors."""

    wave: Wave
    kind: type[RouteState]
    rebuild: Callable[[tuple[Tensor, ...], int | None], Tensor] | None
    lengths: tuple[int, int]  # of the state's tensors and of the kept rows'


class WaveExperts(torch.autograd.Function):
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
        mlp: WaveMLP,
    ) -> Tensor:
        needs = ctx.needs_input_grad
        inner, layer, waves, weight_at = step.inner, step.layer, step.waves, step.inner.config.weight_at
        of_weights = needs[1] or moves_both(inner)
        x, topk_weight = x.detach().contiguous(), topk_weight.detach()
        sent: list[_Sent] = []
        outs: list[Tensor] = []
        kept_back: list[Tensor | None] = []

        with torch.autocast(x.device.type, enabled=False), step.forward_lanes() as pipeline:

            def there(i: int) -> tuple[Tensor, Tensor]:
                own = x[waves[i].tokens]
                state, arrived = step.state(i, own), Arrived()
                with inner.guard("dispatch", layer):
                    by_token = topk_weight[waves[i].tokens]
                    inner.check_rows(state, own, by_token)
                    rows, weights = inner.send(state, own, by_token, arrived)
                sent.append(_Sent(state, rows, weights, arrived))
                return rows, weights

            def experts(i: int) -> None:
                s, wave = sent[i], waves[i]
                with inner.guard("experts", layer):
                    offsets = s.state.map.offsets[wave.first : wave.last + 1]
                    made = mlp.of(wave.experts).forward(
                        s.rows, s.weights, offsets, s.state.num_rows, s.arrived.output, pipeline.beside_others
                    )
                s.y, s.projected, s.arrived.output = made.y, made.projected, None
                s.hidden = made.hidden if needs[3] and step.by == "expert" else None
                if s.arrived.rebuild is not None:
                    s.rows = s.rows.new_empty(0)  # where rows can be made again, they are free now
                pipeline.hold(made)

            def back(i: int) -> tuple[Tensor, Tensor | None]:
                s, y = sent[i], sent[i].y
                assert y is not None
                with inner.guard("combine", layer):
                    by_route = {"output": s.weights, "source": topk_weight[waves[i].tokens]}.get(weight_at)
                    inner.check_combine(s.state, y, by_route)
                    out, gathered = inner.give_back(s.state, y, by_route, weight_at == "source" and needs[1])
                outs.append(out)
                kept_back.append(y if weight_at == "output" and of_weights else gathered)
                s.y = None
                return out, gathered

            drive(pipeline, there, experts, back)

        saved: list[Tensor | None] = []
        kept: list[_Kept] = []
        for i, s in enumerate(sent):
            rebuild = s.arrived.rebuild
            rows_kept: tuple[Tensor, ...] = ()
            if needs[2] or (weight_at == "input" and of_weights):
                rows_kept = (s.rows,) if rebuild is None else tuple(rebuild.tensors)
            tensors = s.state.tensors()
            saved += [*tensors, s.weights, s.projected, s.hidden, kept_back[i], *rows_kept]
            again = None if rebuild is None else rebuild.rows  # the function alone: it must hold no tensor
            kept.append(_Kept(waves[i], type(s.state), again, (len(tensors), len(rows_kept))))
        ctx.step = (inner, step.lanes, step.spare, layer, step.by, step.ordered, kept)
        ctx.mlp = (mlp.activation, mlp.transposed, mlp.backend, mlp.dtype)
        ctx.weight_dtype = topk_weight.dtype
        out = joined(outs, step.by)
        # Last: a recompute under checkpointing may end here.
        ctx.save_for_backward(topk_weight, up, down, up_bias, down_bias, *saved)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        with torch.autocast(grad.device.type, enabled=False):
            return _Backward(ctx, grad.contiguous()).run()


def moves_both(inner: Dispatcher[Any]) -> bool:
    """Whether another rank may need gradients of weights, or of rows, that this one does not."""
    return inner.moves_both_gradients and inner.world > 1


def joined(parts: Sequence[Tensor], by: str) -> Tensor:
    """One tensor of every wave's [T_w, ·]: one after another by token, else their sum, rounded once."""
    if len(parts) == 1:
        return parts[0]
    if by == "token":
        return torch.cat(list(parts))
    total = parts[0].to(accumulation_dtype(parts[0].dtype))
    for part in parts[1:]:
        total = total + part
    return total.to(parts[0].dtype)


class Unpacked:
    """One wave in backward."""

    def __init__(self, kept: _Kept, layer: str, saved: tuple[Any, ...]) -> None:
        n, rows = kept.lengths
        self.wave, self.rebuild = kept.wave, kept.rebuild
        self.state: Any = kept.kind.restore(layer, saved[:n])
        self.weights, self.projected, self.hidden, self.kept = saved[n : n + OTHERS]
        self.rows_kept: tuple[Tensor, ...] = saved[n + OTHERS : n + OTHERS + rows]
        self.offsets: Tensor = self.state.map.offsets[kept.wave.first : kept.wave.last + 1]
        self.grad_y: Tensor | None = None
        self.grad_weights: Tensor | None = None
        self.found: Gradients | None = None
        self.groups: Groups | None = None
        self.made: Tensor | None = None

    @property
    def bound(self) -> int:
        """Rows that this wave's tensors hold."""
        return int(self.projected.shape[0])

    def rows(self) -> Tensor:
        """The dispatched rows [R_w, D]; made again once, where they were not kept."""
        if self.made is None:
            kept = self.rows_kept
            self.made = kept[0] if self.rebuild is None else self.rebuild(kept, self.state.num_rows)
        return self.made


class _Backward:
    """The backward of one node; ``run`` says in which order."""

    def __init__(self, ctx: Any, grad: Tensor) -> None:
        self.inner, self.lanes, self.spare, self.layer, self.by, ordered, kept = ctx.step
        self.needs, self.grad, self.weight_dtype = ctx.needs_input_grad, grad, ctx.weight_dtype
        self.topk_weight, up, down, up_bias, down_bias, *saved = ctx.saved_tensors
        self.weight_at: str = self.inner.config.weight_at
        activation, transposed, backend, dtype = ctx.mlp
        self.mlp = WaveMLP(up, down, up_bias, down_bias, activation, transposed, self.weight_at, backend, dtype)
        self.waves: list[Unpacked] = []
        for each in kept:
            length = sum(each.lengths) + OTHERS
            self.waves.append(Unpacked(each, self.layer, tuple(saved[:length])))
            del saved[:length]
        self.acc = accumulation_dtype(grad.dtype)
        self.dx: list[Tensor] = []
        self.dweight: list[Tensor] = []
        self.weights_of_projections = self.needs[2] or self.needs[3]
        self.whole: Whole | None = None
        if self.by == "token" and self.weights_of_projections:
            self.whole = Whole(self.waves, self.mlp, self.inner, ordered, self.needs)
        self.by_wave: list[tuple[Tensor | None, Tensor | None]] = []

    def run(self) -> tuple[Tensor | None, ...]:
        with self.lanes.open(len(self.waves), self.spare) as pipeline:
            self.pipeline = pipeline
            self.placed: Mark = None
            again = self.needs[2] and self.whole is None and self.waves[0].rebuild is not None
            meanwhile = self.first_rows if again else None
            drive(pipeline, self.combine, self.experts, self.dispatch, self.after_experts, meanwhile)
            pipeline.run(EXPERTS, self.weight_gradients, self.placed)
        need_x, need_weight, need_up, need_down, need_up_bias, need_down_bias = self.needs[:6]
        dx = joined(self.dx, self.by) if need_x else None
        dweight = joined(self.dweight, self.by).to(self.weight_dtype) if need_weight else None
        dup, ddown = self._projections()
        return (
            dx,
            dweight,
            dup if need_up else None,
            ddown if need_down else None,
            self._bias("up_bias") if need_up_bias else None,
            self._bias("down_bias") if need_down_bias else None,
            None,
            None,
        )

    def first_rows(self) -> None:
        """Make the first wave's rows while its gradient crosses: the one waits for memory, the other for the link."""
        with self.inner.guard("experts backward", self.layer):
            self.waves[0].rows()

    def combine(self, i: int) -> Any:
        """The gradient of wave i's tokens to its rows; then, where no one waits, into the order of the whole batch."""
        w = self.waves[i]
        with self.inner.guard("combine backward", self.layer):
            grad = self.grad[w.wave.tokens]
            if self.weight_at == "source":
                scale = self.topk_weight[w.wave.tokens].to(self.acc)
                w.grad_y = self.inner.send_grad(w.state, grad, scale)
                if w.kept is not None:
                    self.dweight.append((w.kept.to(self.acc) * grad.to(self.acc).unsqueeze(1)).sum(2))
            elif self.weight_at == "output":
                rows = self.inner.send_grad(w.state, grad, None).to(self.acc)
                w.grad_y = (rows * w.weights.unsqueeze(1)).to(grad.dtype)
                if w.kept is not None:
                    w.grad_weights = (rows * w.kept.to(self.acc)).sum(1)
            else:
                w.grad_y = self.inner.send_grad(w.state, grad, None)
        return w.grad_y, w.grad_weights

    def experts(self, i: int) -> Any:
        """From the gradient of the experts' output to that of the dispatched rows."""
        w = self.waves[i]
        assert w.grad_y is not None
        with self.inner.guard("experts backward", self.layer):
            of_weights = self.needs[1] or moves_both(self.inner)
            rows = w.rows() if self.weight_at == "input" and of_weights else None
            place = None if self.whole is None else self.whole.place(i)
            w.groups = self.mlp.groups(w.offsets, w.state.num_rows, w.bound)
            w.found = self.mlp.of(w.wave.experts).backward(
                w.grad_y, rows, w.weights, w.projected, w.groups, w.state.num_rows, place, self.pipeline.beside_others
            )
        if not self.needs[2]:
            w.made = None
        return w.found, rows

    def after_experts(self, i: int, made: Mark) -> None:
        """Wave i's factors of the weight gradients that can be placed or multiplied already."""
        if not self.weights_of_projections:
            return
        if self.whole is not None:
            whole = self.whole
            _, self.placed = self.pipeline.run(
                THERE, lambda: whole.rows(i), made if self.weight_at == "input" else None
            )
        else:
            self.pipeline.run(EXPERTS, lambda: self._products(self.waves[i]))

    def dispatch(self, i: int) -> Any:
        """The gradients of wave i's rows and weights back to their tokens."""
        w = self.waves[i]
        assert w.found is not None
        both = moves_both(self.inner)
        rows = w.found.rows if self.needs[0] or both else None
        weights = w.grad_weights if self.weight_at == "output" else w.found.weights
        if weights is None and both:
            weights = torch.zeros_like(w.weights)
        with self.inner.guard("dispatch backward", self.layer):
            dx, dweight = self.inner.return_grad(w.state, rows, weights if self.needs[1] or both else None)
        if dx is not None:
            self.dx.append(dx)
        if dweight is not None and self.weight_at != "source":
            self.dweight.append(dweight)
        return dx, dweight

    def weight_gradients(self) -> None:
        """By token: the products over the rows of all waves."""
        if self.whole is None:
            return
        with self.inner.guard("experts backward", self.layer):
            with self.pipeline.spared():
                self.whole.down_gradient(self.needs[3])
            self.whole.up_gradient(self.needs[2])

    def _products(self, w: Unpacked) -> None:
        """By expert: the weight gradients of wave w's experts."""
        groups = w.groups
        assert w.found is not None and groups is not None
        mlp, dup, ddown = self.mlp.of(w.wave.experts), None, None
        with self.inner.guard("experts backward", self.layer):
            if self.needs[3]:
                with self.pipeline.spared():
                    ddown = mlp.outer(groups, w.hidden, w.found.y).to(self.mlp.down.dtype)
            if self.needs[2]:
                rows = mlp.operand(w.rows(), w.weights, groups.valid)
                with self.pipeline.spared(not self.needs[3]):
                    dup = mlp.outer(groups, rows, w.found.projected).to(self.mlp.up.dtype)
                w.made = None
        self.by_wave.append((dup, ddown))

    def _projections(self) -> tuple[Tensor | None, Tensor | None]:
        if self.whole is not None:
            return self.whole.dup, self.whole.ddown
        if len(self.by_wave) < 2:  # one is all: a copy of all weight gradients would cost more than overlap wins
            return self.by_wave[0] if self.by_wave else (None, None)
        dup, ddown = (None if parts[0] is None else torch.cat(parts) for parts in zip(*self.by_wave, strict=True))
        return dup, ddown

    def _bias(self, name: str) -> Tensor:
        parts = [getattr(w.found, name) for w in self.waves]
        total: Tensor = torch.cat(parts) if self.by == "expert" else torch.stack(parts).sum(0)
        return total.to(getattr(self.mlp, name).dtype)


def rows_of_all(states: list[Any], bounds: list[int], inner: Dispatcher[Any], ordered: bool) -> WholeRows:
    """``whole_rows`` of the waves with these ``states``, whose tensors hold ``bounds`` rows; ``ordered`` as in Step."""
    segments = None
    if ordered:
        me, world = inner.rank, inner.world
        segments = [state.map.accepted.view(world, world, -1)[:, me].t() for state in states]
    return whole_rows([state.map.offsets for state in states], bounds, segments)


class Whole:
    """The factors of the weight gradients over the rows of all waves: memory for them, and what fills it."""

    def __init__(
        self, waves: list[Unpacked], mlp: WaveMLP, inner: Dispatcher[Any], ordered: bool, needs: tuple[bool, ...]
    ) -> None:
        self.waves, self.mlp, self.needs = waves, mlp, needs
        self.inner: Any = inner
        self.where = rows_of_all([w.state for w in waves], [w.bound for w in waves], inner, ordered)
        numbers = [w.state.num_rows for w in waves]
        self.num_rows = None if None in numbers else sum(n for n in numbers if n is not None)
        device, dtype, bound = mlp.up.device, mlp.dtype, self.where.bound
        width = waves[0].projected.shape[1]
        inputs, hidden = mlp.up.shape[1 if mlp.transposed else 2], mlp.down.shape[1 if mlp.transposed else 2]

        def empty(columns: int, needed: bool) -> Tensor | None:
            return torch.empty(bound, columns, dtype=dtype, device=device) if needed else None

        self.rows_in, self.projected = empty(inputs, needs[2]), empty(width, needs[2])
        self.hidden, self.grad_y = empty(hidden, needs[3]), empty(inputs, needs[3])
        self.dup: Tensor | None = None
        self.ddown: Tensor | None = None

    def place(self, i: int) -> Placed:
        """Where the gradients that wave i's experts make go besides."""
        return Placed(self.where.targets[i], self.projected, self.hidden)

    def rows(self, i: int) -> Any:
        """Wave i's dispatched rows and the gradient of its experts' output, in the order of the whole batch."""
        w, target = self.waves[i], self.where.targets[i]
        grad, rows, last = w.grad_y, None, w.offsets[-1:]
        if self.grad_y is not None and grad is not None:
            scatter_rows(grad.to(self.mlp.dtype), target[: grad.shape[0]], self.grad_y, last)
        weighted = self.mlp.weight_at == "input"
        if self.rows_in is not None and (weighted or not self.inner.place_rows(w.rows_kept, target, self.rows_in)):
            rows, w.made = w.rows(), None
            valid = rows.shape[0] if w.state.num_rows is None else w.state.num_rows
            rows = self.mlp.operand(rows, w.weights, valid)
            scatter_rows(rows, target[: rows.shape[0]], self.rows_in, last)
        return rows

    def down_gradient(self, needed: bool) -> None:
        if needed and self.hidden is not None and self.grad_y is not None:
            groups = self.mlp.groups(self.where.offsets, self.num_rows, self.where.bound)
            self.ddown = self.mlp.outer(groups, self.hidden, self.grad_y).to(self.mlp.down.dtype)

    def up_gradient(self, needed: bool) -> None:
        if needed and self.rows_in is not None and self.projected is not None:
            groups = self.mlp.groups(self.where.offsets, self.num_rows, self.where.bound)
            self.dup = self.mlp.outer(groups, self.rows_in, self.projected).to(self.mlp.up.dtype)
