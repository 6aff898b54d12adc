"""Gradient checkpointing that keeps the routes of the first forward instead of choosing them again.

A recomputation may round otherwise than the forward did, and near a tie the router then picks another expert: the
gradient would be that of other routes than the loss. The router's choices are integers, K a token, so they are kept;
everything else is computed again.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
CHOICES_WITH_VALUES = (aten.topk.default, aten.sort.default, aten.sort.stable, aten.max.dim)
CHOICES = (*CHOICES_WITH_VALUES, aten.argmax.default, aten.argsort.default, aten.argsort.stable)


class _Keep(TorchDispatchMode):
    """Keeps a copy of the indices of every choice, in order."""

    def __init__(self, kept: deque[Tensor]) -> None:
        super().__init__()
        self.kept = kept

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled regions run as they are: torch.compile makes no choices for the experts, whose call breaks it."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in CHOICES:
            self.kept.append((out[1] if func in CHOICES_WITH_VALUES else out).clone())  # a caller may write to it
        return out


class _Repeat(TorchDispatchMode):
    """Gives the kept indices, and the values that stand there now, instead of choosing."""

    def __init__(self, kept: deque[Tensor]) -> None:
        super().__init__()
        self.kept = kept

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """As for ``_Keep``."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in CHOICES:
            return func(*args, **kwargs)
        indices = self.kept.popleft()
        if func not in CHOICES_WITH_VALUES:
            return indices
        names = [argument.name for argument in func._schema.arguments]
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        dim, keep = given.get("dim", -1), given.get("keepdim", func is not aten.max.dim)
        values = given["self"].gather(dim, indices if keep else indices.unsqueeze(dim))
        return (values if keep else values.squeeze(dim)), indices


def route_contexts() -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """A ``context_fn`` for ``torch.utils.checkpoint.checkpoint(..., use_reentrant=False)``: the recomputation makes the
    choices (topk, sort, argmax) of the forward."""
    kept: deque[Tensor] = deque()
    return _Keep(kept), _Repeat(kept)


def keep_routes(model: nn.Module) -> None:
    """Have the gradient checkpointing of a transformers model, on now or switched on later, keep its routes.

    Left alone: reentrant checkpoints, which take no contexts, and those with a ``context_fn`` of the caller's."""
    for module in model.modules():
        if hasattr(module, "_gradient_checkpointing_func"):
            module._gradient_checkpointing_func = _keeping(module._gradient_checkpointing_func)  # type: ignore
    own = getattr(model, "_set_gradient_checkpointing", None)
    if own is None:
        return

    @functools.wraps(own)
    def switch(*args: Any, **kwargs: Any) -> Any:
        if "gradient_checkpointing_func" in kwargs:
            kwargs["gradient_checkpointing_func"] = _keeping(kwargs["gradient_checkpointing_func"])
        return own(*args, **kwargs)

    model._set_gradient_checkpointing = switch  # type: ignore[assignment]


def _keeping(checkpoint: Callable[..., Any]) -> Callable[..., Any]:
    given = getattr(checkpoint, "keywords", {})
    if given.get("use_reentrant") is not False or "context_fn" in given:
        return checkpoint
    return functools.partial(checkpoint, context_fn=route_contexts)
