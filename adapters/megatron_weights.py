"""The weights of Megatron's expert modules as one tensor of all experts, in place.

Megatron keeps one parameter per expert. The grouped linear map takes one tensor of all experts, so the parameters of a
projection are laid one behind the other in memory, once; a forward then reads them there, and they stay the same
parameters for the optimizer, the gradient buffers and the checkpoints.

Legend: E_l experts of this rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


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


def spacing(parameters: Sequence[nn.Parameter]) -> int | None:
    """Elements from one parameter to the next where they lie evenly in one storage, negative in descending order.

    None where they do not, or overlap. The distributed optimizer's buffers hold the experts in descending order.
    """
    first = parameters[0]
    if len(parameters) == 1:
        return first.numel()
    at = [int(p.storage_offset()) for p in parameters]
    step = at[1] - at[0]
    even = all(b - a == step for a, b in zip(at, at[1:], strict=False)) and abs(step) >= first.numel()
    one_storage = len({p.untyped_storage().data_ptr() for p in parameters}) == 1
    return step if even and one_storage and all(p.is_contiguous() for p in parameters) else None


@torch.no_grad()
def lay_out(parameters: Sequence[nn.Parameter]) -> int:
    """Put ``parameters`` (alike in shape) one behind the other in one storage, unless they already lie evenly; gives
    their ``spacing``.

    ``ValueError`` where they are parts of somebody's buffer: moving them would take them out of it.
    """
    first, step = parameters[0], spacing(parameters)
    if step is not None or first.is_meta:
        return first.numel() if step is None else step
    for p in parameters:
        if p.untyped_storage().nbytes() != p.numel() * p.element_size():
            raise ValueError(
                "experts='plugin' reads the experts' weights where they lie, evenly spaced; these are parts of another"
                f" buffer, at {[int(p.storage_offset()) for p in parameters]}: use experts='megatron', or, if it is"
                " the distributed optimizer's, a larger bucket_size"
            )
    together = torch.stack([p.data for p in parameters])
    for p, row in zip(parameters, together, strict=True):
        p.data = row
    return first.numel()


def stack(parameters: Sequence[nn.Parameter]) -> Tensor:
    """``parameters`` as one tensor [E_l, ...] over their own memory, differentiable; the last expert comes first where
    they lie in descending order.

    Lays them out again where something has moved them (a change of device or dtype)."""
    step = lay_out(parameters)
    stacked: Tensor = _Stack.apply(abs(step), *(parameters if step > 0 else parameters[::-1]))
    return stacked


class _Stack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, step: int, *parameters: Tensor) -> Tensor:
        first = parameters[0].detach()
        return first.as_strided((len(parameters), *first.shape), (step, *first.stride()), first.storage_offset())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, *grad.unbind(0)
