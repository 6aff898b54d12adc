"""Megatron on CPU and gloo, where it asks for CUDA: for small models, tests and first tries on a laptop.

``cuda_is_cpu`` answers what Megatron asks of CUDA while models are built and trained: tensors that it makes on CUDA are
made on the CPU, streams and events do nothing. On a machine with a GPU it does nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.overrides import TorchFunctionMode


class NoStream:
    """What a CUDA stream or event does where there is none: nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: self


class _OnCpu(TorchFunctionMode):
    """Tensors asked for on CUDA are made on the CPU, and call themselves CUDA's where Megatron asserts it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.")
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


@contextlib.contextmanager
def cuda_is_cpu() -> Iterator[None]:
    """Inside, Megatron's models, schedules, gradient buffers, optimizers and recomputation run on the CPU."""
    if torch.cuda.is_available():
        yield
        return
    from megatron.core.tensor_parallel import random as mcore_random
    from megatron.core.transformer import torch_norm
    from megatron.core.transformer.moe import moe_utils, shared_experts

    def norm(cls: type, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> nn.Module:
        # Megatron's plain torch norm refuses sequence parallelism: its parameters' gradients need a reduction there.
        made = nn.RMSNorm(hidden_size, eps) if config.normalization == "RMSNorm" else nn.LayerNorm(hidden_size, eps)
        for parameter in made.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return made

    stream = NoStream()
    answers: list[tuple[Any, str, Any]] = [
        (torch.cuda, "current_device", lambda: torch.device("cpu")),
        (torch.cuda, "current_stream", lambda *_: stream),
        (torch.cuda, "default_stream", lambda *_: stream),
        (torch.cuda, "stream", lambda *_: contextlib.nullcontext()),
        (torch.cuda, "synchronize", lambda *_: None),
        (torch.cuda, "get_rng_state", lambda *_: torch.get_rng_state()),
        (torch.cuda, "Stream", NoStream),
        (torch.cuda, "Event", NoStream),
        (shared_experts.SharedExpertMLP, "stream", stream),
        (mcore_random, "_get_cuda_rng_state", lambda *_, **__: torch.get_rng_state()),
        (mcore_random, "_set_cuda_rng_state", lambda *_, **__: None),
        (torch_norm.WrappedTorchNorm, "__new__", norm),
    ]
    with contextlib.ExitStack() as stack:
        for owner, name, answer in answers:
            stack.enter_context(mock.patch.object(owner, name, answer))
        # TransformerEngine's product, which needs a GPU; 0.16 without TransformerEngine lacks even the name.
        stack.enter_context(mock.patch.object(moe_utils, "te_general_gemm", None, create=True))
        stack.enter_context(_OnCpu())
        yield
