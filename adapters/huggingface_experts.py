"""Experts modules of transformers: finding them, and reading their weights where they lie.

An experts module of transformers 5 holds all experts of one MoE layer as three-dimensional parameters, one row per
expert, and is called as ``forward(hidden_states [T, D], top_k_index [T, K], top_k_weights [T, K]) -> [T, D]``. It is
known by that signature and those parameters, not by its class.

Legend: T tokens, K routes per token, E experts, D hidden size, F expert width, G = 2F for a gated activation, else F.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..dispatch import Dispatched
from ..experts import Activation, WeightAt, grouped_mlp

# What transformers calls the three arguments; gpt_oss and its kin use the second names.
ARGUMENTS = (("hidden_states",), ("top_k_index", "router_indices"), ("top_k_weights", "routing_weights"))
# Parameters whose first dimension counts experts.
PER_EXPERT = ("gate_up_proj", "up_proj", "down_proj", "gate_up_proj_bias", "up_proj_bias", "down_proj_bias")
SILU = ("SiLUActivation", "SiLU", "silu")


@dataclass(frozen=True)
class ExpertsLayout:
    """How one experts module stores its weights.

    ``up`` and ``down`` (and biases) are names of parameters of the module: [E, G, D] and [E, D, F], or [E, D, G] and
    [E, F, D] if ``transposed``. ``activation`` is what happens between them.
    """

    up: str
    down: str
    up_bias: str | None
    down_bias: str | None
    transposed: bool
    activation: Activation

    def run(self, module: nn.Module, d: Dispatched, weight_at: WeightAt) -> Tensor:
        """The experts of ``module`` over the rows of ``d``, reading its parameters in place; [R, D].

        Parameters of another dtype than the rows' (under autocast) are cast first."""

        def cast(name: str) -> Tensor:
            weight: Tensor = getattr(module, name)
            return weight.to(d.rows.dtype)

        return grouped_mlp(
            d,
            cast(self.up),
            cast(self.down),
            up_bias=None if self.up_bias is None else cast(self.up_bias),
            down_bias=None if self.down_bias is None else cast(self.down_bias),
            activation=self.activation,
            weight_at=weight_at,
            transposed=self.transposed,
        )


def find_experts(model: nn.Module) -> dict[str, nn.Module]:
    """The experts modules of ``model`` by name, in the order in which they are registered."""
    return {name: module for name, module in model.named_modules() if is_experts(module)}


def is_experts(module: nn.Module) -> bool:
    """Whether ``module`` is called like an experts module and holds its parameters."""
    names = [name for name, p in module._parameters.items() if p is not None and p.dim() == 3]
    return "down_proj" in names and ("gate_up_proj" in names or "up_proj" in names) and _called_like_experts(module)


def _called_like_experts(module: nn.Module) -> bool:
    parameters = list(inspect.signature(module.forward).parameters)
    return len(parameters) == len(ARGUMENTS) and all(
        name in known for name, known in zip(parameters, ARGUMENTS, strict=True)
    )


def similar_modules(model: nn.Module) -> Iterator[str]:
    """Modules that seem to hold experts but are not experts modules, with how they are called, for an error message."""
    for name, module in model.named_modules():
        if not is_experts(module) and type(module).__name__.endswith("Experts"):
            arguments = ", ".join(inspect.signature(module.forward).parameters)
            yield f"{name} ({type(module).__name__}, forward({arguments}))"


def per_expert_parameters(name: str, module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of an experts module by their name in it, each with E as its first dimension.

    Raises ``ValueError`` for a parameter or buffer of the module itself of which that is not known. (Those of its
    children, such as a norm that all experts share, are replicated like any other.)
    """
    found = {key: p for key, p in module._parameters.items() if p is not None}
    experts = found["down_proj"].shape[0]
    strange = [key for key, p in found.items() if key not in PER_EXPERT or p.shape[0] != experts]
    strange += [key for key, buffer in module._buffers.items() if buffer is not None]
    if strange:
        raise ValueError(
            f"{name} ({type(module).__name__}) holds {', '.join(strange)}, not known to have one row for each of its"
            f" {experts} experts; known: {', '.join(PER_EXPERT)}"
        )
    if any(p.grad is not None for p in found.values()):
        raise ValueError(f"{name} holds gradients: patch the model before its first backward, or set them to None")
    if any(p.is_meta for p in found.values()):
        raise ValueError(f"{name} has weights on the meta device; load or initialise the model before patching it")
    return found


def layout_of(name: str, module: nn.Module) -> ExpertsLayout:
    """The layout of an experts module, from the marks that transformers leaves on it.

    Raises ``ValueError`` when it does something between its projections, or after them, that is not known here.
    """
    gated = "gate_up_proj" in module._parameters
    up = "gate_up_proj" if gated else "up_proj"
    biased = getattr(module, "has_bias", f"{up}_bias" in module._parameters)
    if getattr(module, "has_post_expert_norm", False):
        raise _unknown(name, module, "it normalises the output of every expert")
    return ExpertsLayout(
        up=up,
        down="down_proj",
        up_bias=f"{up}_bias" if biased else None,
        down_bias="down_proj_bias" if biased else None,
        transposed=getattr(module, "is_transposed", False),
        activation=_activation(name, module, gated),
    )


def _activation(name: str, module: nn.Module, gated: bool) -> Activation:
    gate = getattr(module, "_apply_gate", None)
    own_gate = gated and gate is not None and getattr(gate, "__name__", "") != "_default_apply_gate"
    function = getattr(module, "act_fn", None)
    if not own_gate and function is None:
        raise _unknown(name, module, "it has neither act_fn nor _apply_gate")
    try:
        if own_gate:
            return Activation(type(module).__name__, whole=gate)
        called = getattr(function, "__name__", type(function).__name__)
        return Activation(
            "silu" if called in SILU else called, gated=gated, function=None if called in SILU else function
        )
    except ValueError as error:
        raise _unknown(name, module, str(error)) from error


def _unknown(name: str, module: nn.Module, why: str) -> ValueError:
    return ValueError(
        f"the layout of {name} ({type(module).__name__}) is not known: {why}. experts='foreign' runs the module's own"
        " forward on the rows that arrive"
    )


def check_layout(name: str, module: nn.Module) -> None:
    """Run the module's own forward and ours on the same small random experts in float64; ``ValueError`` where they
    differ.

    The layout is read from marks, so a module that does more than its marks say must not pass. The weights of
    ``module`` are neither read nor changed.
    """
    experts, hidden, width, tokens, top_k = 3, 8, 6, 12, 2
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    small = copy.copy(module)
    small.num_experts = experts  # type: ignore[assignment]
    layout = layout_of(name, small)
    inner = layout.activation.inputs_per_output * width
    shapes = {
        layout.up: (inner, hidden),
        layout.down: (hidden, width),
        layout.up_bias: (inner,),
        layout.down_bias: (hidden,),
    }
    if layout.transposed:
        shapes |= {layout.up: (hidden, inner), layout.down: (width, hidden)}
    small._parameters = {key: nn.Parameter(random(experts, *shape)) for key, shape in shapes.items() if key is not None}

    x, weights = 4 * random(tokens, hidden), random(tokens, top_k)  # large enough to reach the clamps that models have
    idx = torch.stack([torch.randperm(experts, generator=generator)[:top_k] for _ in range(tokens)])
    with torch.no_grad():
        try:
            theirs = own_forward(small)(x, idx, weights)
        except Exception as error:
            raise _unknown(name, module, f"its forward fails on three small experts ({error})") from error
        order = idx.reshape(-1).argsort(stable=True)
        ends = torch.bincount(idx.reshape(-1), minlength=experts).cumsum(0)
        d = Dispatched(x[order // top_k], weights.reshape(-1)[order], torch.cat([ends.new_zeros(1), ends]), len(order))
        ours = torch.zeros_like(x).index_add_(0, order // top_k, layout.run(small, d, "hidden"))
    difference = float((ours - theirs).abs().max() / theirs.abs().max())
    if not difference < 1e-4:  # some models compute in float32 whatever they are given
        raise _unknown(
            name, module, f"on small experts its forward and ours differ by {difference:.1e} of the largest output"
        )


def own_forward(module: nn.Module) -> Callable[..., Tensor]:
    """The forward that the module's class spells out, without transformers' choice between implementations."""
    plain: Callable[..., Tensor] = inspect.unwrap(type(module).forward).__get__(module)
    return plain
