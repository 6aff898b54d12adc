"""Experts modules of transformers: finding them, and reading their weights where they lie.

An experts module of transformers 5 holds all experts of one MoE layer as three-dimensional parameters, one row per
expert, and is called as ``forward(hidden_states [T, D], top_k_index [T, K], top_k_weights [T, K]) -> [T, D]``. It is
known by that signature and those parameters, not by its class.

Legend: T tokens, K routes per token, E experts, D hidden size, F expert width, G = 2F for a gated activation, else F.
"""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..dispatch import Dispatched
from ..experts import Activation, ExpertMLP, WeightAt, grouped_mlp

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

    @property
    def grouped(self) -> bool:
        """Whether ``tensors`` and ``activation`` say all that ``run`` does."""
        return type(self).run is ExpertsLayout.run

    def tensors(self, module: nn.Module) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Up and down of this rank's experts, and their biases."""

        def read(name: str | None) -> Any:
            return None if name is None else functools.reduce(getattr, name.split("."), module)

        up, down, up_bias, down_bias = read(self.up), read(self.down), read(self.up_bias), read(self.down_bias)
        return up, down, up_bias, down_bias

    def run(self, module: nn.Module, d: Dispatched, weight_at: WeightAt) -> Tensor:
        """The experts of ``module`` over the rows of ``d``, reading its parameters in place; [R, D].

        Parameters of another dtype than the rows' (under autocast) are cast first."""
        up, down, up_bias, down_bias = (
            None if tensor is None else tensor.to(d.rows.dtype) for tensor in self.tensors(module)
        )
        assert up is not None and down is not None
        return grouped_mlp(
            d,
            up,
            down,
            up_bias=up_bias,
            down_bias=down_bias,
            activation=self.activation,
            weight_at=weight_at,
            transposed=self.transposed,
        )


@dataclass(frozen=True)
class OurExperts:
    """The experts of ``module``, computed by this project; ``layout`` must be ``grouped``."""

    layout: ExpertsLayout
    module: nn.Module

    def __call__(self, d: Dispatched, weight_at: WeightAt) -> Tensor:
        """As ``ExpertsLayout.run``."""
        return self.layout.run(self.module, d, weight_at)

    def mlp(self) -> ExpertMLP:
        """The parameters themselves, for whoever runs the experts as part of something larger."""
        return ExpertMLP(*self.layout.tensors(self.module), self.layout.activation, self.layout.transposed)


def find_experts(model: nn.Module) -> dict[str, nn.Module]:
    """The experts modules of ``model`` by name, in the order in which they are registered."""
    return {name: module for name, module in model.named_modules() if is_experts(module)}


def is_experts(module: nn.Module) -> bool:
    """Whether ``module`` is called like an experts module and holds its parameters."""
    names = [name for name, p in module._parameters.items() if p is not None and p.dim() == 3]
    return "down_proj" in names and ("gate_up_proj" in names or "up_proj" in names) and _called_like_experts(module)


def signature(module: nn.Module, method: str = "forward") -> list[str]:
    """The names of the arguments of one of ``module``'s methods."""
    return list(inspect.signature(getattr(module, method)).parameters)


def _called_like_experts(module: nn.Module) -> bool:
    parameters = signature(module)
    return len(parameters) == len(ARGUMENTS) and all(
        name in known for name, known in zip(parameters, ARGUMENTS, strict=True)
    )


def layout_of(name: str, module: nn.Module) -> ExpertsLayout:
    """The layout of an experts module, from the marks that transformers leaves on it.

    Raises ``NotOurs`` when it does something between its projections, or after them, that is not known here.
    """
    gated = "gate_up_proj" in module._parameters
    up = "gate_up_proj" if gated else "up_proj"
    biased = getattr(module, "has_bias", f"{up}_bias" in module._parameters)
    if getattr(module, "has_post_expert_norm", False):
        raise NotOurs(name, module, "it normalises the output of every expert")
    return ExpertsLayout(
        up=up,
        down="down_proj",
        up_bias=f"{up}_bias" if biased else None,
        down_bias="down_proj_bias" if biased else None,
        transposed=getattr(module, "is_transposed", False),
        activation=_activation(name, module, gated),
    )


def activation_of(name: str, module: nn.Module, function: Any, gated: bool) -> Activation:
    """The activation around the elementwise ``function`` of ``module``. Raises ``NotOurs`` if it cannot be one."""
    called = getattr(function, "__name__", type(function).__name__)
    try:
        return Activation(
            "silu" if called in SILU else called, gated=gated, function=None if called in SILU else function
        )
    except ValueError as error:
        raise NotOurs(name, module, str(error)) from error


def _activation(name: str, module: nn.Module, gated: bool) -> Activation:
    gate = getattr(module, "_apply_gate", None)
    own_gate = gated and gate is not None and getattr(gate, "__name__", "") != "_default_apply_gate"
    function = getattr(module, "act_fn", None)
    if own_gate:
        try:
            return _recognised(module, gate) or Activation(type(module).__name__, whole=gate)
        except ValueError as error:
            raise NotOurs(name, module, str(error)) from error
    if function is None:
        raise NotOurs(name, module, "it has neither act_fn nor _apply_gate")
    return activation_of(name, module, function, gated)


def _recognised(module: nn.Module, gate: Any) -> Activation | None:
    """The activation that our fused kernels know and that computes what ``gate`` does on random numbers; or None."""
    limit, alpha = (
        value if isinstance(value := getattr(module, key, None), float) else None for key in ("limit", "alpha")
    )
    limits = [None, float(limit)] if isinstance(limit, (int, float)) and 0 < limit < float("inf") else [None]
    known = [Activation("silu", limit=limit) for limit in limits]
    known += [
        Activation.clamped_swiglu(
            alpha=alpha if isinstance(alpha, float) else 1.702, limit=limit, interleaved=interleaved
        )
        for limit in limits
        for interleaved in (True, False)
    ]
    x = 10 * torch.randn(64, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    try:
        wanted = gate(x)
    except Exception:  # what it needs is seen when the layout is checked
        return None
    return next((activation for activation in known if torch.allclose(activation(x), wanted, rtol=1e-9)), None)


class NotOurs(ValueError):
    """The grouped MLP does not know what these experts compute; their own code can run instead."""

    def __init__(self, name: str, module: nn.Module, why: str) -> None:
        self.why = why
        super().__init__(
            f"the layout of {name} ({type(module).__name__}) is not known: {why}. experts='foreign' runs the module's"
            " own forward on the rows that arrive"
        )
