"""Experts that are modules of their own: switch_transformers and nllb_moe, and most models before transformers 5.

The linear maps of this rank's experts become views of one tensor per projection, so that the grouped MLP reads them
without a copy. Parameters stay single and keep their names; experts of other ranks leave the model.

Legend: T tokens, K routes each, E experts, E_l of this rank, D hidden size, F expert width, G = 2F if gated, else F.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from .huggingface_experts import ExpertsLayout, NotOurs, activation_of, signature
from .huggingface_families import (
    SMALL_EXPERTS,
    SMALL_HIDDEN,
    SMALL_TOKENS,
    SMALL_TOP_K,
    SMALL_WIDTH,
    Draw,
    Family,
    Foreign,
    OverRows,
    Route,
    Share,
    sizes,
    weighted,
)


@dataclasses.dataclass(frozen=True)
class Linears:
    """What one expert calls its linear maps and its activation. ``gate`` None: not gated."""

    gate: str | None
    up: str
    down: str
    activation: str

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name in (self.gate, self.up, self.down) if name is not None)


KNOWN = (
    Linears("gate_proj", "up_proj", "down_proj", "act_fn"),
    Linears("w1", "w3", "w2", "act_fn"),
    Linears(None, "wi", "wo", "act"),
    Linears(None, "fc1", "fc2", "act"),
)


def linears_of(name: str, expert: Foreign) -> Linears:
    """The names of an expert's parts; ``ValueError`` if it has others."""
    for known in KNOWN:
        children = {key for key, child in expert.named_children() if isinstance(child, nn.Linear)}
        if children == set(known.names) and hasattr(expert, known.activation):
            return known
    parts = ", ".join(f"{key} ({type(child).__name__})" for key, child in expert.named_children())
    raise ValueError(f"{name} holds experts made of {parts}, which is no layout known here")


class _Stacked(torch.autograd.Function):
    """Parameters that are views of one tensor → that tensor; the gradient's parts back."""

    @staticmethod
    def forward(ctx: Any, stack: Stack, *params: Tensor) -> Tensor:
        ctx.places = stack.places
        return stack.storage.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[1:]
        return None, *(grad[place] if need else None for place, need in zip(ctx.places, needed, strict=True))


class Stack:
    """Parameters of the experts of this rank, moved into one tensor [E_l, …] of which they become views.

    ``groups``: by expert, the parameters that lie one after the other along its first dimension.
    """

    def __init__(self, groups: Sequence[Sequence[nn.Parameter]]) -> None:
        self.params = [p for group in groups for p in group]
        first = groups[0]
        height = sum(p.shape[0] for p in first)
        self.storage = first[0].new_empty(len(groups), height, *first[0].shape[1:]).detach()
        self.places: list[tuple[int, slice]] = []
        for expert, group in enumerate(groups):
            start = 0
            for p in group:
                place = (expert, slice(start, start + p.shape[0]))
                self.storage[place] = p.detach()
                p.data = self.storage[place]
                self.places.append(place)
                start = place[1].stop

    def tensor(self) -> Tensor:
        """[E_l, …] with a graph to the parameters. ``RuntimeError`` if they were moved out of it."""
        for p, place in zip(self.params, self.places, strict=True):
            if p.data_ptr() != self.storage[place].data_ptr():
                raise RuntimeError("experts were moved or converted after patch_model: move the model, then patch it")
        out: Tensor = _Stacked.apply(self, *self.params)
        return out


@dataclasses.dataclass(frozen=True)
class StackedLayout(ExpertsLayout):
    """Reads the stacks of a module, or the single experts where they are not stacked."""

    linears: Linears = KNOWN[0]
    family: Separate | None = None

    def tensors(self, module: Foreign) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        stacks = getattr(module, "stacked_experts", None)
        read: list[Any]
        if stacks is not None:
            read = [None if stack is None else stack.tensor() for stack in stacks]
        else:
            assert self.family is not None
            groups = self.family.groups(module, self.linears)
            read = [
                None if group is None else torch.stack([torch.cat(tuple(params)) for params in group])
                for group in groups
            ]
        up, down, up_bias, down_bias = read
        return up, down, up_bias, down_bias


class Separate(Family):
    """Experts in a ``ModuleDict`` or ``ModuleList``."""

    stored = "one module per expert"

    def holder(self, module: Foreign) -> tuple[str, nn.Module]:
        """The container of experts, and its name in ``module`` with a dot, or nothing."""
        return "", module

    def key(self, expert: int) -> str:
        """The name of an expert in the container."""
        return f"expert_{expert}"

    def local(self, module: Foreign) -> dict[str, nn.Module]:
        """The experts that are here, by their name in the container, in order."""
        children = self.holder(module)[1]._modules
        return {key: child for key, child in children.items() if child is not None and key[-1].isdigit()}

    def experts(self, module: Foreign) -> int:
        return self.here(module)

    def here(self, module: Foreign) -> int:
        return len(self.local(module))

    def _linears(self, module: Foreign) -> Linears:
        return linears_of(type(module).__name__, next(iter(self.local(module).values())))

    def width(self, module: Foreign) -> int:
        first: Foreign = next(iter(self.local(module).values()))
        return int(first.get_submodule(self._linears(module).down).out_features)

    def parameters(self, name: str, module: Foreign) -> dict[str, nn.Parameter]:
        prefix = self.holder(module)[0]
        return {
            f"{prefix}{key}.{inner}": p
            for key, expert in self.local(module).items()
            for inner, p in expert.named_parameters()
        }

    def share(self, module: Foreign, key: str) -> Share:
        prefix = self.holder(module)[0]
        number = list(self.local(module)).index(key.removeprefix(prefix).split(".")[0])
        return Share(self.experts(module), expert=number)

    def groups(self, module: Foreign, linears: Linears) -> list[list[list[nn.Parameter]] | None]:
        """Up, down and their biases, each by expert: the parameters that lie one after the other."""

        def collect(names: tuple[str | None, ...], kind: str) -> list[list[nn.Parameter]] | None:
            found = [
                [getattr(expert.get_submodule(name), kind) for name in names if name is not None]
                for expert in self.local(module).values()
            ]
            return None if found[0][0] is None else found

        up = (linears.gate, linears.up)
        return [collect(up, "weight"), collect((linears.down,), "weight")] + [
            collect(up, "bias"),
            collect((linears.down,), "bias"),
        ]

    def cut(self, module: Foreign, parameters: dict[str, nn.Parameter], ep: int, rank: int) -> None:
        prefix, container = self.holder(module)
        kept = list(self.local(module).items())
        count = len(kept) // ep
        kept = kept[rank * count : (rank + 1) * count]
        if ep > 1:
            others = {key: child for key, child in container._modules.items() if key not in self.local(module)}
            if isinstance(container, nn.ModuleList):
                setattr(module, prefix.rstrip("."), nn.ModuleDict(dict(kept)))
            else:
                container._modules = {**others, **dict(kept)}
        groups = self.groups(module, self._linears(module))
        stacks = tuple(None if group is None else Stack(group) for group in groups)
        module.stacked_experts = stacks

    def layout(self, name: str, module: Foreign) -> ExpertsLayout:
        expert = next(iter(self.local(module).values()))
        linears = linears_of(name, expert)
        dropout = [key for key, child in expert.named_modules() if isinstance(child, nn.Dropout) and child.p > 0]
        if dropout:
            raise NotOurs(name, module, f"its experts have dropout ({dropout[0]}, p > 0)")
        activation = activation_of(name, module, getattr(expert, linears.activation), linears.gate is not None)
        return StackedLayout("up", "down", None, None, False, activation, linears, self)

    def over_rows(self, name: str, module: Foreign) -> OverRows:
        experts = list(self.local(module).values())

        def forward(rows: Tensor, experts_of_row: Tensor, weights: Tensor | None) -> Tensor:
            parts = rows.split(sizes(experts_of_row, len(experts)))
            # Also those without rows: their gradient is then zero, not none.
            done = [expert(part) for expert, part in zip(experts, parts, strict=True)]
            return self.after(module, weighted(torch.cat(done), weights))

        return forward

    def after(self, module: Foreign, rows: Tensor) -> Tensor:
        """What the module does to weighted rows of its experts."""
        return rows

    def small_experts(self, name: str, module: Foreign, draw: Draw) -> dict[str, nn.Module]:
        """Three small copies of an expert, by name."""
        expert = next(iter(self.local(module).values()))
        return {self.key(number): small_expert(name, expert, draw) for number in range(SMALL_EXPERTS)}


def small_expert(name: str, expert: Foreign, draw: Draw) -> nn.Module:
    """A copy of an expert with small random linear maps."""
    linears, small = linears_of(name, expert), copy.copy(expert)
    biased = getattr(expert, linears.up).bias is not None
    sides = {linears.down: (SMALL_WIDTH, SMALL_HIDDEN)}
    small._modules = {
        key: draw.linear(*sides.get(key, (SMALL_HIDDEN, SMALL_WIDTH)), bias=biased) if key in linears.names else child
        for key, child in expert._modules.items()
    }
    return small


class Switch(Separate):
    """switch_transformers: one-hot choices [T, 1, E], all zero where the router's capacity dropped the token."""

    def fits(self, module: Foreign) -> bool:
        return type(module).__name__ == "SwitchTransformersExperts"

    def top_k(self, module: Foreign, parent: nn.Module | None) -> int | None:
        return 1

    def replacement(self, module: Foreign, route: Route) -> Callable[..., Any]:
        def forward(hidden_states: Tensor, selected_experts: Tensor, routing_weights: Tensor) -> Tensor:
            chosen = selected_experts.reshape(len(hidden_states), -1)
            ids = chosen.argmax(1).masked_fill(chosen.sum(1) == 0, -1)
            return route(hidden_states, ids[:, None], routing_weights)

        return forward

    def small(self, name: str, module: Foreign) -> tuple[nn.Module, tuple[Any, ...]]:
        draw, small = Draw(), copy.copy(module)
        small._modules = self.small_experts(name, module, draw)
        small.num_experts = SMALL_EXPERTS
        chosen = F.one_hot(draw.ids(top_k=1), SMALL_EXPERTS)
        chosen[1] = 0
        return small, (draw.tokens(), chosen, draw.weights(1))


class Nllb(Separate):
    """nllb_moe: its experts are called with the first choice's mask [T, E] as if it held ids, and weights [T, E].

    So transformers runs every first choice on expert 1 and every second on expert 0. That is what this computes, too;
    places of weight 0 are no routes.
    """

    def fits(self, module: Foreign) -> bool:
        return type(module).__name__ == "NllbMoeExperts"

    def top_k(self, module: Foreign, parent: nn.Module | None) -> int | None:
        return self.experts(module)

    def layout(self, name: str, module: Foreign) -> ExpertsLayout:
        if module.moe_token_dropout:
            raise NotOurs(name, module, f"moe_token_dropout={module.moe_token_dropout} drops rows of its experts")
        return super().layout(name, module)

    def after(self, module: Foreign, rows: Tensor) -> Tensor:
        if not module.moe_token_dropout:
            return rows
        out: Tensor = module.token_dropout(rows) if module.training else rows * (1 - module.moe_token_dropout)
        return out

    def replacement(self, module: Foreign, route: Route) -> Callable[..., Any]:
        def forward(hidden_states: Tensor, router_mask: Tensor, router_probs: Tensor) -> Tensor:
            return route(hidden_states, router_mask.masked_fill(router_probs == 0, -1), router_probs)

        return forward

    def small(self, name: str, module: Foreign) -> tuple[nn.Module, tuple[Any, ...]]:
        draw, small = Draw(), copy.copy(module)
        small._modules = self.small_experts(name, module, draw)
        small.num_experts = SMALL_EXPERTS
        ids = draw.ids(top_k=SMALL_EXPERTS)
        return small, (draw.tokens(), ids, draw.weights(SMALL_EXPERTS).masked_fill(ids == 2, 0))


class Blocks(Separate):
    """A block with a ``ModuleList`` of experts, before transformers 5."""

    def holder(self, module: Foreign) -> tuple[str, nn.Module]:
        return "experts.", module.get_submodule("experts")

    def key(self, expert: int) -> str:
        return str(expert)

    def _listed(self, module: Foreign) -> bool:
        return isinstance(getattr(module, "experts", None), nn.ModuleList) and len(module.experts) > 0

    def _small_block(self, name: str, module: Foreign, draw: Draw) -> Foreign:
        small = copy.copy(module)
        small._modules = {"experts": nn.ModuleList(self.small_experts(name, module, draw).values())}
        return small


class MoeMethod(Blocks):
    """deepseek_v3, glm4_moe, dots1 and their kin: ``moe(hidden_states, topk_indices, topk_weights)``."""

    entry = "moe"

    def fits(self, module: Foreign) -> bool:
        method = getattr(type(module), "moe", None)
        return method is not None and self._listed(module) and len(signature(module, "moe")) == 3

    def small(self, name: str, module: Foreign) -> tuple[nn.Module, tuple[Any, ...]]:
        draw = Draw()
        small = self._small_block(name, module, draw)
        return small, (draw.tokens(), draw.ids(), draw.weights())


class SoftmaxTopK(Blocks):
    """mixtral, qwen2_moe, qwen3_moe, olmoe: the block routes and loops over experts in one ``forward``."""

    NORMALISES = {
        "MixtralSparseMoeBlock": True,
        "Qwen2MoeSparseMoeBlock": None,  # as norm_topk_prob says
        "Qwen3MoeSparseMoeBlock": None,
        "OlmoeSparseMoeBlock": None,
    }

    def fits(self, module: Foreign) -> bool:
        return type(module).__name__ in self.NORMALISES and self._listed(module)

    def top_k(self, module: Foreign, parent: nn.Module | None) -> int | None:
        return module.top_k

    def replacement(self, module: Foreign, route: Route) -> Callable[..., Any]:
        always = self.NORMALISES[type(module).__name__]
        normalise = module.norm_topk_prob if always is None else always
        jitter = getattr(module, "jitter_noise", 0)

        def forward(hidden_states: Tensor) -> tuple[Tensor, Tensor]:
            if module.training and jitter > 0:
                hidden_states *= torch.empty_like(hidden_states).uniform_(1.0 - jitter, 1.0 + jitter)
            x = hidden_states.view(-1, hidden_states.shape[-1])
            logits = module.gate(x)
            weights, ids = F.softmax(logits, dim=1, dtype=torch.float).topk(module.top_k, dim=-1)
            if normalise:
                weights = weights / weights.sum(dim=-1, keepdim=True)
            out = route(x, ids, weights.to(x.dtype))
            if hasattr(module, "shared_expert"):
                out = out + F.sigmoid(module.shared_expert_gate(x)) * module.shared_expert(x)
            return out.view(hidden_states.shape), logits

        return forward

    def small(self, name: str, module: Foreign) -> tuple[nn.Module, tuple[Any, ...]]:
        draw = Draw()
        small = self._small_block(name, module, draw)
        small.num_experts, small.top_k, small.hidden_dim, small.jitter_noise = (
            SMALL_EXPERTS,
            SMALL_TOP_K,
            SMALL_HIDDEN,
            0.0,
        )
        small.gate = draw.linear(SMALL_HIDDEN, SMALL_EXPERTS)
        if hasattr(module, "shared_expert"):
            small.shared_expert = small_expert(name, module.shared_expert, draw)
            small.shared_expert_gate = draw.linear(SMALL_HIDDEN, 1)
        return small, (draw(1, SMALL_TOKENS, SMALL_HIDDEN),)


SEPARATE: tuple[Family, ...] = (Switch(), Nllb(), MoeMethod(), SoftmaxTopK())
