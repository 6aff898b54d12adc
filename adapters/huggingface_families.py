"""How each family of transformers' MoE modules stores its experts and calls them.

Most models of transformers 5 share one form, the experts module of ``huggingface_experts``. A family says what differs:
which parameters belong to experts, how they are divided over ranks, which call is replaced, how its arguments become
routes. A module is taken for what its class and signature say only after ``check_layout`` has compared the replaced
call with the module's own on small random experts.

Legend: T tokens, K routes per token, E experts, E_l of this rank, D hidden size, F expert width, R rows.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..dispatch import Dispatched
from ..experts import Activation, WeightAt, grouped_linear, weighted_activation
from ..topology import experts_of
from .huggingface_experts import (
    ARGUMENTS,
    PER_EXPERT,
    ExpertsLayout,
    activation_of,
    is_experts,
    layout_of,
    signature,
)

Foreign = Any
"""A module of transformers, of which we read what its class is known to have."""
Route = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Tokens [..., D], expert ids [T, K] (−1: no route) and weights [T, K] → the experts' weighted sum [..., D]."""
OverRows = Callable[[Tensor, Tensor, "Tensor | None"], Tensor]
"""A module's own code over rows [R, D], the local expert of each [R] in ascending order, and weights [R] or None."""

# Names of K in configs.
TOP_K = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_top_k", "moe_k")
SMALL_EXPERTS, SMALL_HIDDEN, SMALL_WIDTH, SMALL_TOKENS, SMALL_TOP_K = 3, 8, 6, 12, 2


@dataclass(frozen=True)
class Share:
    """How a parameter of the whole model is divided over the ranks of the EP_MP group, along its first dimension.

    It holds ``rows`` rows of each of ``experts`` experts and then ``tail`` rows of none. With ``expert``, it belongs to
    that expert alone and is whole on the rank of that expert.
    """

    experts: int
    rows: int = 1
    tail: int = 0
    expert: int | None = None

    def check(self, name: str, ep: int) -> None:
        """``ValueError`` when the rows of no expert cannot be divided over ``ep`` ranks."""
        if self.tail % ep:
            raise ValueError(f"{name} ends in {self.tail} rows of no expert, not divisible by the EP degree {ep}")

    def owner(self, ep: int) -> int:
        """The EP_MP rank that holds a parameter of one expert."""
        assert self.expert is not None
        return self.expert // (self.experts // ep)

    def own(self, whole: Tensor, ep: int, rank: int) -> Tensor:
        """What ``rank`` of ``ep`` keeps of ``whole``; a view where that is one slice."""
        assert self.expert is None
        mine, end = experts_of(self.experts, ep, rank), self.experts * self.rows
        rows = whole[mine.start * self.rows : mine.stop * self.rows]
        if not self.tail:
            return rows
        step = self.tail // ep
        return torch.cat([rows, whole[end + rank * step : end + (rank + 1) * step]])

    def whole(self, parts: Sequence[Tensor]) -> Tensor:
        """The inverse of ``own``, from the parts of all ranks."""
        end = self.experts // len(parts) * self.rows
        return torch.cat([part[:end] for part in parts] + [part[end:] for part in parts if self.tail])


def whole_shape(parameter: nn.Parameter) -> torch.Size:
    """The shape of a parameter that is whole, or of whose experts only this rank's were loaded."""
    return torch.Size((getattr(parameter, "whole_experts", parameter.shape[0]), *parameter.shape[1:]))


class Family:
    """The experts module of transformers 5, and what other families change about it.

    ``entry`` is the method whose call is replaced. ``weight_at``: where the model's own code applies router weights, if
    not to the experts' output.
    """

    entry = "forward"
    weight_at: WeightAt | None = None
    stored = "[E, …] parameters"
    runs_rows = True  # the module's own code can run on rows with one route each

    def fits(self, module: Foreign) -> bool:
        """Whether ``module`` is one of this family."""
        return is_experts(module)

    def experts(self, module: Foreign) -> int:
        """E of a module that is whole, or whose experts were loaded by rank (``whole_experts`` on its parameters)."""
        return getattr(self._down(module), "whole_experts", self.here(module))

    def here(self, module: Foreign) -> int:
        """How many experts the module holds now: E_l once it is cut."""
        return self._down(module).shape[0]

    def width(self, module: Foreign) -> int:
        """The width of the rows that travel: D."""
        down = self._down(module)
        return down.shape[2] if getattr(module, "is_transposed", False) else down.shape[1]

    def _down(self, module: Foreign) -> nn.Parameter:
        return module.get_parameter("down_proj")

    def top_k(self, module: Foreign, parent: nn.Module | None) -> int | None:
        """K as the module's config or the block around it says; None where they do not, or not alike."""
        config = getattr(module, "config", None)
        found = {value for key in TOP_K if isinstance(value := getattr(config, key, None), int)}
        if not found:
            for holder in (parent, getattr(parent, "router", None), getattr(parent, "gate", None)):
                if isinstance(value := getattr(holder, "top_k", None), int):
                    found.add(value)
        return found.pop() if len(found) == 1 else None

    def parameters(self, name: str, module: Foreign) -> dict[str, nn.Parameter]:
        """The experts' parameters by their name in ``module``.

        Raises ``ValueError`` for a parameter or buffer of the module itself of which it is not known. (Those of its
        children, such as a norm that all experts share, are replicated like any other.)
        """
        found = {key: p for key, p in module._parameters.items() if p is not None}
        experts = self.here(module)
        strange = [key for key, p in found.items() if key not in PER_EXPERT or p.shape[0] != experts]
        strange += [key for key, buffer in module._buffers.items() if buffer is not None]
        if strange:
            raise ValueError(
                f"{name} ({type(module).__name__}) holds {', '.join(strange)}, not known to have one row for each of"
                f" its {experts} experts; known: {', '.join(PER_EXPERT)}"
            )
        return found

    def share(self, module: Foreign, key: str) -> Share:
        """How the parameter ``key`` of the whole ``module`` is divided."""
        return Share(self.experts(module))

    def cut(self, module: Foreign, parameters: dict[str, nn.Parameter], ep: int, rank: int) -> None:
        """Cut the whole module down to the experts of ``rank`` and free the others."""
        shares = {key: self.share(module, key) for key in parameters}
        if ep > 1:
            for key, parameter in parameters.items():
                if hasattr(parameter, "whole_experts"):
                    continue  # loaded like this
                parameter.data = shares[key].own(parameter.data, ep, rank).clone()

    def layout(self, name: str, module: Foreign) -> ExpertsLayout:
        """How our grouped MLP reads the experts. Raises ``NotOurs`` when it does not know what they compute."""
        return layout_of(name, module)

    def over_rows(self, name: str, module: Foreign) -> OverRows:
        """The module's own code for its local experts, over rows that each have one route."""
        module.num_experts = self.here(module)
        return functools.partial(one_route_per_row, module.forward)

    def own(self, module: Foreign) -> Callable[..., Any]:
        """The replaced method as the module's class spells it, without transformers' choice of implementations."""
        return inspect.unwrap(getattr(type(module), self.entry)).__get__(module)

    def replacement(self, module: Foreign, route: Route) -> Callable[..., Any]:
        """What takes the place of the replaced method."""
        arguments = inspect.signature(getattr(module, self.entry))
        experts = self.experts(module)

        def forward(*args: Any, **kwargs: Any) -> Tensor:
            hidden_states, idx, weights = arguments.bind(*args, **kwargs).args
            return route(hidden_states, idx.masked_fill(idx == experts, -1), weights)

        return forward

    def small(self, name: str, module: Foreign) -> tuple[nn.Module, tuple[Any, ...]]:
        """A copy of ``module`` with 3 small random experts in float64, and arguments for its replaced method."""
        draw = Draw()
        small: Foreign = copy.copy(module)
        small.num_experts = SMALL_EXPERTS
        layout = self.layout(name, small)
        inner = layout.activation.inputs_per_output * SMALL_WIDTH
        shapes: dict[str | None, tuple[int, ...]] = {
            layout.up: (inner, SMALL_HIDDEN),
            layout.down: (SMALL_HIDDEN, SMALL_WIDTH),
            layout.up_bias: (inner,),
            layout.down_bias: (SMALL_HIDDEN,),
        }
        if layout.transposed:
            shapes |= {layout.up: (SMALL_HIDDEN, inner), layout.down: (SMALL_WIDTH, SMALL_HIDDEN)}
        small._parameters = {
            key: draw.parameter(SMALL_EXPERTS, *shape) for key, shape in shapes.items() if key is not None
        }
        return small, (draw.tokens(), draw.ids(), draw.weights())


class Draw:
    """Random float64 numbers, the same on every rank."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)

    def __call__(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def parameter(self, *shape: int) -> nn.Parameter:
        return nn.Parameter(self(*shape))

    def linear(self, inputs: int, outputs: int, bias: bool = False) -> nn.Linear:
        linear = nn.Linear(inputs, outputs, bias=bias, dtype=torch.float64, device="cpu")
        linear.weight = self.parameter(outputs, inputs)
        if bias:
            linear.bias = self.parameter(outputs)
        return linear

    def tokens(self, count: int = SMALL_TOKENS) -> Tensor:
        return 4 * self(count, SMALL_HIDDEN)  # large enough to reach the clamps that models have

    def ids(self, experts: int = SMALL_EXPERTS, top_k: int = SMALL_TOP_K) -> Tensor:
        return torch.stack([torch.randperm(experts, generator=self.generator)[:top_k] for _ in range(SMALL_TOKENS)])

    def weights(self, top_k: int = SMALL_TOP_K) -> Tensor:
        return self(SMALL_TOKENS, top_k)


def one_route_per_row(forward: Any, rows: Tensor, experts: Tensor, weights: Tensor | None) -> Tensor:
    """An experts module's ``forward`` over rows [R, D] of its experts [R]: each row is a token with one route."""
    weights = rows.new_ones(len(rows)) if weights is None else weights
    if len(rows):
        out: Tensor = forward(rows, experts[:, None], weights[:, None])
        return out.reshape(rows.shape)
    # Some implementations cut the graph where there is no row, and this rank would leave its peers alone in backward.
    rows, weights = torch.cat([rows, rows.new_zeros(1, rows.shape[1])]), torch.cat([weights, weights.new_zeros(1)])
    return one_route_per_row(forward, rows, experts.new_zeros(1), weights)[:0]


def sizes(experts: Tensor, count: int) -> list[int]:
    """How many rows each of ``count`` local experts has; on the host."""
    return torch.bincount(experts, minlength=count).tolist()


def weighted(rows: Tensor, weights: Tensor | None) -> Tensor:
    """rows [R, D] times weights [R], as transformers does: in the wider dtype, rounded to that of the rows."""
    return rows if weights is None else (rows * weights[:, None]).to(rows.dtype)


class DenseWeights(Family):
    """gpt_oss before transformers 5: the weights [T, E] of all experts, of which the ids choose K."""

    def fits(self, module: Foreign) -> bool:
        if not is_experts(module) or signature(module)[2] != ARGUMENTS[2][1]:
            return False
        try:
            check_layout("", module, self)
        except ValueError:
            return False
        return True

    def layout(self, name: str, module: Foreign) -> ExpertsLayout:
        alpha, limit = getattr(module, "alpha", 1.702), getattr(module, "limit", 7.0)
        return ExpertsLayout(
            "gate_up_proj",
            "down_proj",
            "gate_up_proj_bias",
            "down_proj_bias",
            True,
            Activation.clamped_swiglu(alpha=alpha, limit=limit),
        )

    def width(self, module: Foreign) -> int:
        return self._down(module).shape[2]

    def over_rows(self, name: str, module: Foreign) -> OverRows:
        experts = self.here(module)

        def forward(rows: Tensor, experts_of_row: Tensor, weights: Tensor) -> Tensor:
            dense = weights.new_zeros(len(rows), experts).scatter(1, experts_of_row, weights)
            out: Tensor = own(rows, experts_of_row, dense)
            return out

        own = module.forward
        return functools.partial(one_route_per_row, forward)

    def replacement(self, module: Foreign, route: Route) -> Callable[..., Any]:
        def forward(hidden_states: Tensor, router_indices: Tensor, routing_weights: Tensor) -> Tensor:
            return route(hidden_states, router_indices, routing_weights.gather(1, router_indices))

        return forward

    def small(self, name: str, module: Foreign) -> tuple[nn.Module, tuple[Any, ...]]:
        copied, (x, ids, _) = super().small(name, module)
        small: Foreign = copied
        small.hidden_size, small.expert_dim, small.intermediate_size = SMALL_HIDDEN, SMALL_WIDTH, SMALL_WIDTH
        return small.train(), (x[None], ids, Draw().weights(SMALL_EXPERTS))


class Dbrx(Family):
    """Three parameters [E·F, D] in a child: gate, up, and down in the transposed order."""

    stored = "[E·F, D] parameters"

    def fits(self, module: Foreign) -> bool:
        return type(module).__name__ == "DbrxExperts"

    def here(self, module: Foreign) -> int:
        return self._down(module).shape[0] // module.ffn_hidden_size

    def width(self, module: Foreign) -> int:
        return self._down(module).shape[1]

    def _down(self, module: Foreign) -> nn.Parameter:
        return module.get_parameter("mlp.w2")

    def parameters(self, name: str, module: Foreign) -> dict[str, nn.Parameter]:
        return {f"mlp.{key}": module.get_parameter(f"mlp.{key}") for key in ("w1", "v1", "w2")}

    def share(self, module: Foreign, key: str) -> Share:
        return Share(self.experts(module), rows=module.ffn_hidden_size)

    def layout(self, name: str, module: Foreign) -> ExpertsLayout:
        activation = activation_of(name, module, module.mlp.activation_fn, gated=True)
        return DbrxLayout("mlp.v1", "mlp.w2", None, None, False, activation)

    def small(self, name: str, module: Foreign) -> tuple[nn.Module, tuple[Any, ...]]:
        draw, small = Draw(), copy.copy(module)
        small.num_experts, small.ffn_hidden_size, small.hidden_size = SMALL_EXPERTS, SMALL_WIDTH, SMALL_HIDDEN
        mlp = copy.copy(module.mlp)
        shape = (SMALL_EXPERTS * SMALL_WIDTH, SMALL_HIDDEN)
        mlp._parameters = {key: draw.parameter(*shape) for key in ("w1", "v1", "w2")}
        small._modules = {"mlp": mlp}
        return small, (draw.tokens()[None], draw.ids(), draw.weights())


class DbrxLayout(ExpertsLayout):
    """Gate and up are two parameters, read as [E_l, F, D] in place."""

    def run(self, module: Foreign, d: Dispatched, weight_at: WeightAt) -> Tensor:
        shape = (-1, module.ffn_hidden_size, d.rows.shape[1])
        gate, up, down = (module.get_parameter(f"mlp.{key}").to(d.rows.dtype).view(shape) for key in ("w1", "v1", "w2"))
        kwargs: dict[str, Any] = {"num_rows": d.num_rows}
        projected = [grouped_linear(d.rows, w, d.offsets, saved_rows=d.rebuild, **kwargs) for w in (gate, up)]
        weights = d.weights if weight_at == "hidden" else None
        hidden = weighted_activation(torch.cat(projected, 1), weights, d.offsets, self.activation, **kwargs)
        return grouped_linear(hidden, down, d.offsets, transposed=True, **kwargs)


class LongcatFlash(Family):
    """Ids from E on are identity experts, computed where the token is. ``gate_up_proj`` has unused rows for them."""

    stored = "[E, …] parameters, identity experts"
    runs_rows = False

    def fits(self, module: Foreign) -> bool:
        return type(module).__name__ == "LongcatFlashExperts" and getattr(module, "gate_up_proj", None) is not None

    def parameters(self, name: str, module: Foreign) -> dict[str, nn.Parameter]:
        return {key: module.get_parameter(key) for key in ("gate_up_proj", "down_proj")}

    def share(self, module: Foreign, key: str) -> Share:
        experts = self.experts(module)
        return Share(experts, tail=module.get_parameter(key).shape[0] - experts)

    def layout(self, name: str, module: Foreign) -> ExpertsLayout:
        activation = activation_of(name, module, module.act_fn, gated=True)
        return LongcatLayout("gate_up_proj", "down_proj", None, None, False, activation)

    def replacement(self, module: Foreign, route: Route) -> Callable[..., Any]:
        experts = self.experts(module)  # before it is cut

        def forward(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
            identity = top_k_index >= experts
            dtype = torch.promote_types(top_k_weights.dtype, hidden_states.dtype)
            weight = (top_k_weights.to(dtype) * identity).sum(-1, keepdim=True)
            out = route(hidden_states, top_k_index.masked_fill(identity, -1), top_k_weights)
            return out + (hidden_states * weight).to(out.dtype)

        return forward

    def small(self, name: str, module: Foreign) -> tuple[nn.Module, tuple[Any, ...]]:
        draw, small, zero = Draw(), copy.copy(module), 2
        small.num_routed_experts, small.zero_expert_num = SMALL_EXPERTS, zero
        small.total_experts = SMALL_EXPERTS + zero
        small._parameters = {
            "gate_up_proj": draw.parameter(SMALL_EXPERTS + zero, 2 * SMALL_WIDTH, SMALL_HIDDEN),
            "down_proj": draw.parameter(SMALL_EXPERTS, SMALL_HIDDEN, SMALL_WIDTH),
        }
        return small, (draw.tokens(), draw.ids(SMALL_EXPERTS + zero), draw.weights())


class LongcatLayout(ExpertsLayout):
    """Without the rows of identity experts."""

    def tensors(self, module: Foreign) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        up, down, _, _ = super().tensors(module)
        return up[: down.shape[0]], down, None, None


class Llama4(Family):
    """A block that scales what its experts read by the router, and gives each of them all tokens (zeros mostly)."""

    stored = "[E, …] parameters"
    weight_at: WeightAt | None = "input"

    def fits(self, module: Foreign) -> bool:
        return type(module).__name__ == "Llama4TextMoe"

    def _down(self, module: Foreign) -> nn.Parameter:
        return module.get_parameter("experts.down_proj")

    def width(self, module: Foreign) -> int:
        return self._down(module).shape[2]

    def top_k(self, module: Foreign, parent: nn.Module | None) -> int | None:
        return module.top_k

    def parameters(self, name: str, module: Foreign) -> dict[str, nn.Parameter]:
        return {key: module.get_parameter(key) for key in ("experts.gate_up_proj", "experts.down_proj")}

    def layout(self, name: str, module: Foreign) -> ExpertsLayout:
        activation = activation_of(name, module, module.experts.act_fn, gated=True)
        return ExpertsLayout("experts.gate_up_proj", "experts.down_proj", None, None, True, activation)

    def over_rows(self, name: str, module: Foreign) -> OverRows:
        experts, own = self.here(module), module.experts

        def forward(rows: Tensor, experts_of_row: Tensor, weights: Tensor | None) -> Tensor:
            counts = sizes(experts_of_row, experts)
            most = max(*counts, 1)
            first = torch.tensor([0, *counts[:-1]], device=rows.device).cumsum(0)
            place = experts_of_row * most + torch.arange(len(rows), device=rows.device) - first[experts_of_row]
            blocks = rows.new_zeros(experts * most, rows.shape[1]).index_copy(0, place, weighted(rows, weights))
            out: Tensor = own(blocks)[place]
            return out

        return forward

    def replacement(self, module: Foreign, route: Route) -> Callable[..., Any]:
        def forward(hidden_states: Tensor) -> tuple[Tensor, Tensor]:
            x = hidden_states.reshape(-1, module.hidden_dim)
            scores, logits = module.router(x)
            idx = logits.topk(module.top_k, dim=1).indices
            return module.shared_expert(x) + route(x, idx, scores.gather(1, idx)), logits

        return forward

    def small(self, name: str, module: Foreign) -> tuple[nn.Module, tuple[Any, ...]]:
        draw, small = Draw(), copy.copy(module)
        experts, router = copy.copy(module.experts), copy.copy(module.router)
        small.hidden_dim, small.num_experts, small.top_k = SMALL_HIDDEN, SMALL_EXPERTS, SMALL_TOP_K
        experts.num_experts, experts.hidden_size, experts.expert_dim = SMALL_EXPERTS, SMALL_HIDDEN, SMALL_WIDTH
        experts._parameters = {
            "gate_up_proj": draw.parameter(SMALL_EXPERTS, SMALL_HIDDEN, 2 * SMALL_WIDTH),
            "down_proj": draw.parameter(SMALL_EXPERTS, SMALL_WIDTH, SMALL_HIDDEN),
        }
        router._parameters = {"weight": draw.parameter(SMALL_EXPERTS, SMALL_HIDDEN), "bias": None}
        router.num_experts, router.top_k = SMALL_EXPERTS, SMALL_TOP_K
        shared = draw.linear(SMALL_HIDDEN, SMALL_HIDDEN)
        small._modules = {"experts": experts, "router": router, "shared_expert": shared}
        return small, (draw(1, SMALL_TOKENS, SMALL_HIDDEN),)


class JetMoe(Family):
    """A block of two ``ParallelExperts`` that sorts rows by expert itself."""

    stored = "[E, …] parameters"

    def fits(self, module: Foreign) -> bool:
        return type(module).__name__ == "JetMoeMoE"

    def _down(self, module: Foreign) -> nn.Parameter:
        return module.get_parameter("output_linear.weight")

    def top_k(self, module: Foreign, parent: nn.Module | None) -> int | None:
        return module.router.top_k

    def parameters(self, name: str, module: Foreign) -> dict[str, nn.Parameter]:
        return {key: module.get_parameter(key) for key in ("input_linear.weight", "output_linear.weight")}

    def layout(self, name: str, module: Foreign) -> ExpertsLayout:
        activation = activation_of(name, module, module.activation, gated=True)
        return ExpertsLayout("input_linear.weight", "output_linear.weight", None, None, False, activation)

    def over_rows(self, name: str, module: Foreign) -> OverRows:
        experts = self.here(module)
        for linear in (module.input_linear, module.output_linear):
            linear.num_experts = experts

        def forward(rows: Tensor, experts_of_row: Tensor, weights: Tensor | None) -> Tensor:
            counts = sizes(experts_of_row, experts)
            gate, up = module.input_linear(rows, counts).chunk(2, dim=-1)
            return weighted(module.output_linear(module.activation(gate) * up, counts), weights)

        return forward

    def replacement(self, module: Foreign, route: Route) -> Callable[..., Any]:
        def forward(layer_input: Tensor) -> Tensor:
            x = layer_input.reshape(-1, layer_input.shape[-1])
            order, _, sorted_gates, counts, _ = module.router(x)
            sorted_ids = torch.arange(len(counts), device=x.device).repeat_interleave(
                torch.tensor(counts, device=x.device), output_size=order.numel()
            )
            ids = torch.empty_like(order).index_copy(0, order, sorted_ids)
            gates = torch.zeros_like(sorted_gates).index_copy(0, order, sorted_gates)
            shape = (x.shape[0], -1)
            return route(layer_input, ids.view(shape), gates.view(shape)) + module.bias

        return forward

    def small(self, name: str, module: Foreign) -> tuple[nn.Module, tuple[Any, ...]]:
        draw, small, router = Draw(), copy.copy(module), copy.copy(module.router)
        small.input_size, small.hidden_size = SMALL_HIDDEN, SMALL_WIDTH
        small._parameters = {"bias": draw.parameter(SMALL_HIDDEN)}
        linears = []
        for linear, shape in (
            (module.input_linear, (2 * SMALL_WIDTH, SMALL_HIDDEN)),
            (module.output_linear, (SMALL_HIDDEN, SMALL_WIDTH)),
        ):
            linears.append(_small_parallel_experts(linear, draw.parameter(SMALL_EXPERTS, *shape)))
        router.num_experts, router.top_k, router.input_size = SMALL_EXPERTS, SMALL_TOP_K, SMALL_HIDDEN
        router._modules = {"layer": draw.linear(SMALL_HIDDEN, SMALL_EXPERTS)}
        children = {"input_linear": linears[0], "output_linear": linears[1], "router": router}
        small._modules = {**module._modules, **children}
        return small, (draw(1, SMALL_TOKENS, SMALL_HIDDEN),)


def _small_parallel_experts(module: Foreign, weight: nn.Parameter) -> nn.Module:
    small = copy.copy(module)
    small._parameters = {"weight": weight}
    small.num_experts = weight.shape[0]
    return small


class ParallelExperts(Family):
    """One linear map per expert over rows that the caller has sorted: jetmoe's attention experts.

    Each row travels as a token with one route of weight 1, as wide as the wider side of the map.
    """

    stored = "[E, …] parameters, one linear map"

    def fits(self, module: Foreign) -> bool:
        weight = module._parameters.get("weight")
        return weight is not None and weight.dim() == 3 and signature(module) == ["inputs", "expert_size"]

    def _down(self, module: Foreign) -> nn.Parameter:
        return module.get_parameter("weight")

    def width(self, module: Foreign) -> int:
        return max(self._down(module).shape[1:])

    def top_k(self, module: Foreign, parent: nn.Module | None) -> int | None:
        return 1

    def parameters(self, name: str, module: Foreign) -> dict[str, nn.Parameter]:
        return {"weight": self._down(module)}

    def layout(self, name: str, module: Foreign) -> ExpertsLayout:
        return LinearLayout("weight", "weight", None, None, False, Activation("identity", gated=False))

    def over_rows(self, name: str, module: Foreign) -> OverRows:
        experts, own = self.here(module), module.forward
        module.num_experts = experts

        def forward(rows: Tensor, experts_of_row: Tensor, weights: Tensor | None) -> Tensor:
            out = own(rows[:, : self._down(module).shape[2]], sizes(experts_of_row, experts))
            return weighted(nn.functional.pad(out, (0, rows.shape[1] - out.shape[1])), weights)

        return forward

    def replacement(self, module: Foreign, route: Route) -> Callable[..., Any]:
        width, outputs = self.width(module), self._down(module).shape[1]

        def forward(inputs: Tensor, expert_size: list[int]) -> Tensor:
            counts = torch.tensor(expert_size, device=inputs.device)
            ids = torch.arange(len(expert_size), device=inputs.device).repeat_interleave(
                counts, output_size=len(inputs)
            )
            rows = nn.functional.pad(inputs, (0, width - inputs.shape[1]))
            return route(rows, ids[:, None], rows.new_ones(len(rows), 1))[:, :outputs]

        return forward

    def small(self, name: str, module: Foreign) -> tuple[nn.Module, tuple[Any, ...]]:
        draw = Draw()
        small = _small_parallel_experts(module, draw.parameter(SMALL_EXPERTS, SMALL_WIDTH, SMALL_HIDDEN))
        return small, (draw.tokens(), [5, 0, SMALL_TOKENS - 5])


class LinearLayout(ExpertsLayout):
    """One linear map; rows are padded to the wider side."""

    def run(self, module: Foreign, d: Dispatched, weight_at: WeightAt) -> Tensor:
        weight = module.get_parameter("weight").to(d.rows.dtype)
        inputs = d.rows if weight.shape[2] == d.rows.shape[1] else d.rows[:, : weight.shape[2]].contiguous()
        saved = d.rebuild if inputs is d.rows else None
        factor = d.weights if weight_at in ("input", "hidden") else None
        out = grouped_linear(inputs, weight, d.offsets, row_weight=factor, num_rows=d.num_rows, saved_rows=saved)
        return nn.functional.pad(out, (0, d.rows.shape[1] - out.shape[1]))


def check_layout(name: str, module: Foreign, family: Family | None = None) -> None:
    """Run the replaced method of the module's class and ours on the same small random experts in float64;
    ``ValueError`` where they differ.

    The layout is read from marks, so a module that does more than its marks say must not pass. The weights of
    ``module`` are neither read nor changed. Raises ``NotOurs`` where our grouped MLP is not used.
    """
    family = family_of(module) or GENERIC if family is None else family
    small, arguments = family.small(name, module)
    layout = family.layout(name, small)
    with torch.no_grad():
        try:
            theirs = family.own(small)(*arguments)
        except Exception as error:
            raise unknown(name, module, f"its {family.entry} fails on three small experts ({error})") from error
        route = functools.partial(_local_route, layout, small, family)
        ours = family.replacement(small, route)(*arguments)
    one, two = (out[0] if isinstance(out, tuple) else out for out in (ours, theirs))
    difference = float((one.reshape(two.shape) - two).abs().max() / two.abs().max())
    if not difference < 1e-4:  # some models compute in float32 whatever they are given
        raise unknown(
            name,
            module,
            f"on small experts its {family.entry} and ours differ by {difference:.1e} of the largest output",
        )


def _local_route(
    layout: ExpertsLayout, module: Foreign, family: Family, x: Tensor, idx: Tensor, weights: Tensor
) -> Tensor:
    """A ``Route`` over experts that are all here."""
    flat, ids, top_k = x.reshape(-1, x.shape[-1]), idx.reshape(-1), idx.shape[1]
    order = ids.argsort(stable=True)[int((ids < 0).sum()) :]
    ends = torch.bincount(ids[order], minlength=family.experts(module)).cumsum(0)
    d = Dispatched(
        flat[order // top_k], weights.reshape(-1)[order].double(), torch.cat([ends.new_zeros(1), ends]), len(order)
    )
    rows = layout.run(module, d, family.weight_at or "hidden")
    return torch.zeros_like(flat).index_add_(0, order // top_k, rows).view(x.shape)


def unknown(name: str, module: Foreign, why: str) -> ValueError:
    """The error for a module that does something that is not known here."""
    return ValueError(
        f"the layout of {name} ({type(module).__name__}) is not known: {why}. experts='foreign' runs the module's own"
        " forward on the rows that arrive"
    )


GENERIC = Family()


def families() -> tuple[Family, ...]:
    """All families, the particular ones first."""
    from .huggingface_separate import SEPARATE

    return (Dbrx(), LongcatFlash(), Llama4(), JetMoe(), ParallelExperts(), *SEPARATE, DenseWeights(), GENERIC)


def family_of(module: Foreign) -> Family | None:
    """The family of an experts module, or of the block around experts; None: neither."""
    return next((family for family in families() if family.fits(module)), None)


def find_sites(model: nn.Module) -> dict[str, tuple[nn.Module, Family]]:
    """The modules of ``model`` whose call is replaced, by name, in the order in which they are registered."""
    found: dict[str, tuple[nn.Module, Family]] = {}
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}." if outer else "") for outer in found)
        if not inside and (family := family_of(module)) is not None:
            found[name] = module, family
    return found


def similar_modules(model: nn.Module) -> Iterator[str]:
    """Modules that seem to hold experts but are of no family, with how they are called, for an error message."""
    known = find_sites(model)
    for name, module in model.named_modules():
        inside = any(name == outer or name.startswith(f"{outer}.") for outer in known)
        if not inside and type(module).__name__.endswith("Experts"):
            yield f"{name} ({type(module).__name__}, forward({', '.join(signature(module))}))"
