"""``experts="plugin"``: our grouped experts over the weights of Megatron's expert modules, in place.

Megatron keeps one parameter per expert. The grouped linear map takes one tensor of all experts, so the parameters of a
projection are laid one behind the other in memory, once; a forward then reads them there, and they stay the same
parameters for the optimizer, the gradient buffers and the checkpoints.

Legend: E_l experts of this rank, H hidden size, F expert width, G = 2F if gated else F, N rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.activations import quick_gelu, squared_relu
from torch import Tensor, nn

from ..experts.activation import Activation
from ..experts.mlp import WeightAt, grouped_mlp
from .megatron_dispatcher import PluginTokenDispatcher


class PluginExperts:
    """Takes the place of the ``forward`` of Megatron's ``module`` (SequentialMLP or TEGroupedMLP)."""

    def __init__(self, module: nn.Module, dispatcher: PluginTokenDispatcher) -> None:
        self.dispatcher = dispatcher
        config: Any = dispatcher.config
        self.activation = activation_of(config)
        self.weight_at: WeightAt = dispatcher.shared.config.weight_at  # type: ignore[assignment]  # validated
        self.recompute_hidden = config.recompute_granularity == "selective" and "moe_act" in (
            config.recompute_modules or ()
        )
        self.projections = projections_of(module, dispatcher.num_local_experts)
        for parameters in self._groups():
            lay_out(parameters)

    def _groups(self) -> list[list[nn.Parameter]]:
        return [group for projection in self.projections for group in projection.parameters() if group]

    def __call__(self, rows: Tensor, tokens_per_expert: Tensor, probs: Tensor, **_: Any) -> tuple[Tensor, None]:
        """Rows [N, H] and their probabilities [N] → ([N, H], None), as Megatron's experts."""
        dispatched = self.dispatcher.dispatched(rows, probs)
        (up, up_bias), (down, down_bias) = (projection.stacked() for projection in self.projections)
        y = grouped_mlp(
            dispatched,
            up,
            down,
            up_bias=up_bias,
            down_bias=down_bias,
            activation=self.activation,
            weight_at=self.weight_at,
            recompute_hidden=self.recompute_hidden,
        )
        return y, None


class Projection:
    """One of the two projections of all local experts: the modules that hold its parameters, and their names there."""

    def __init__(self, modules: Sequence[nn.Module], weights: Sequence[str], biases: Sequence[str]) -> None:
        self.modules, self.weights, self.biases = modules, weights, biases

    def parameters(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """The weights and the biases (maybe none) as they are now, by expert."""
        owners = list(self.modules) * (len(self.weights) // len(self.modules))

        def of(names: Sequence[str]) -> list[nn.Parameter]:
            found = [getattr(owner, name, None) for owner, name in zip(owners, names, strict=True)]
            return [p for p in found if isinstance(p, nn.Parameter)]

        return of(self.weights), of(self.biases)

    def stacked(self) -> tuple[Tensor, Tensor | None]:
        """Weights [E_l, out, in] and biases [E_l, out] or None."""
        for module in self.modules:  # the trainer may wait there for parameters that are still being gathered
            for key, hook in list(module._forward_pre_hooks.items()):
                hook(module, (), {}) if key in module._forward_pre_hooks_with_kwargs else hook(module, ())
        weights, biases = self.parameters()
        return stack(weights), stack(biases) if biases else None


def projections_of(experts: nn.Module, num_local: int) -> tuple[Projection, Projection]:
    """The up and the down projection of Megatron's ``experts``; ``ValueError`` for a kind whose layout is not known."""
    local: Any = getattr(experts, "local_experts", None)
    names = ("linear_fc1", "linear_fc2")
    if local is not None:
        parts = [
            Projection([getattr(e, n) for e in local], ["weight"] * num_local, ["bias"] * num_local) for n in names
        ]
    elif all(hasattr(getattr(experts, name, None), "weight0") for name in names):
        weights, biases = ([f"{kind}{i}" for i in range(num_local)] for kind in ("weight", "bias"))
        parts = [Projection([getattr(experts, name)], weights, biases) for name in names]
    else:
        raise ValueError(
            f"experts='plugin' reads the weights of SequentialMLP and TEGroupedMLP; these are {type(experts).__name__}:"
            " use experts='megatron'"
        )
    for part, name in zip(parts, names, strict=True):
        found = len(part.parameters()[0])
        if found != num_local:
            raise ValueError(
                f"experts='plugin' needs a weight of {name} for each of {num_local} experts, found {found}:"
                " use experts='megatron'"
            )
    return parts[0], parts[1]


def activation_of(config: Any) -> Activation:
    """Megatron's activation settings as ours; ``ValueError`` for a function that is not an elementwise one we know."""
    names = {F.silu: "silu", F.gelu: "gelu", F.relu: "relu", quick_gelu: "quick_gelu", squared_relu: "relu2"}
    function = config.activation_func
    if function not in names:
        known = ", ".join(names.values())
        raise ValueError(f"experts='plugin' knows the activations {known}; activation_func is {function}")
    limit, offset = getattr(config, "activation_func_clamp_value", None), getattr(config, "glu_linear_offset", 0.0)
    if not config.gated_linear_unit:
        return Activation(names[function], gated=False)
    return Activation(names[function], gated=True, limit=limit, up_offset=offset)


def spacing(parameters: Sequence[nn.Parameter]) -> int | None:
    """Elements from one parameter to the next where they lie evenly, one behind the other, in one storage."""
    first = parameters[0]
    if len(parameters) == 1:
        return first.numel()
    at = [int(p.storage_offset()) for p in parameters]
    step = at[1] - at[0]
    even = all(b - a == step for a, b in zip(at, at[1:], strict=False)) and step >= first.numel()
    one_storage = len({p.untyped_storage().data_ptr() for p in parameters}) == 1
    return step if even and one_storage and all(p.is_contiguous() for p in parameters) else None


@torch.no_grad()
def lay_out(parameters: Sequence[nn.Parameter]) -> None:
    """Put ``parameters`` (alike in shape) one behind the other in one storage, unless they already lie evenly.

    ``ValueError`` where they are parts of somebody's buffer: moving them would take them out of it.
    """
    first = parameters[0]
    if spacing(parameters) is not None or first.is_meta:
        return
    for p in parameters:
        if p.untyped_storage().nbytes() != p.numel() * p.element_size():
            raise ValueError(
                "experts='plugin' reads the experts' weights where they lie, evenly spaced in ascending order; these"
                " are parts of another buffer in another order (the distributed optimizer's, perhaps): use"
                " experts='megatron', or use_distributed_optimizer=False"
            )
    together = torch.stack([p.data for p in parameters])
    for p, row in zip(parameters, together, strict=True):
        p.data = row


def stack(parameters: Sequence[nn.Parameter]) -> Tensor:
    """``parameters`` as one tensor [E_l, ...] over their own memory, differentiable.

    Lays them out again where something has moved them (a change of device or dtype)."""
    if spacing(parameters) is None:
        lay_out(parameters)
    stacked: Tensor = _Stack.apply(spacing(parameters), *parameters)
    return stacked


class _Stack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, step: int, *parameters: Tensor) -> Tensor:
        first = parameters[0].detach()
        return first.as_strided((len(parameters), *first.shape), (step, *first.stride()), first.storage_offset())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, *grad.unbind(0)
