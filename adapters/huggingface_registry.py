"""The dispatchers as an implementation of expert parallelism inside transformers (5.23 and newer).

    with register("ep_plugin", EPConfig(dispatcher="rowwise")) as registered:
        distributed = DistributedConfig(fsdp_size=8, ep_size=8, ep_implementation="ep_plugin")
        model = AutoModelForCausalLM.from_pretrained(path, distributed_config=distributed)
        ...

transformers then reads each rank's experts from the files, wraps the model in FSDP2, scales and clips gradients, and
saves. Only the way from the router to the experts and back is ours. Models need an expert-parallel plan in
transformers.

Legend: T tokens, K routes per token, E experts, D hidden size, R rows received.
"""

from __future__ import annotations

import functools
import weakref
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..config import EPConfig, one_of
from ..layer import Experts, ForeignExperts, moe_step
from ..metrics import total
from .huggingface import EXPERTS, choose_layout
from .huggingface_dispatchers import Dispatchers, Shape
from .huggingface_experts import is_experts
from .huggingface_families import GENERIC, one_route_per_row


class Registered:
    """A registered implementation: its dispatchers, made when a layer first runs, one set for each EP group."""

    def __init__(self, name: str, config: EPConfig, experts: str) -> None:
        self.name, self.config, self.experts = name, config, experts
        self.layers = 0
        self._sets: dict[dist.ProcessGroup, Dispatchers] = {}
        check = weakref.WeakMethod(self._before_step)
        self._hook = register_optimizer_step_pre_hook(lambda *step: _call(check))

    def dispatchers(self, group: dist.ProcessGroup) -> Dispatchers:
        """Those of one EP group."""
        return self._sets.setdefault(group, Dispatchers(self.config, group))

    def bytes_sent(self) -> int | None:
        """Row bytes that this rank wrote to or read from other ranks. None: rowwise on GPUs, whose counts stay on the
        device, and DeepEP do not count."""
        return total(dispatchers.bytes_sent() for dispatchers in self._sets.values())

    def _before_step(self) -> None:
        """Raise, before an optimizer step, what a dispatcher could not raise when it happened."""
        for dispatchers in self._sets.values():
            dispatchers.check()

    def close(self) -> None:
        """Release the dispatchers and forget the name; collective, before the process groups go. Idempotent."""
        from transformers.distributed.expert_parallel import EPImplementationInterface

        self._hook.remove()
        EPImplementationInterface._global_mapping.pop(self.name, None)
        for dispatchers in self._sets.values():
            dispatchers.close()
        self._sets.clear()

    def __enter__(self) -> Registered:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _call(method: weakref.WeakMethod[Any]) -> None:
    alive = method()
    if alive is not None:
        alive()


def register(name: str, config: EPConfig, *, experts: str = "auto") -> Registered:
    """Make ``config``'s dispatcher what ``DistributedConfig(ep_implementation=name)`` means.

    Args:
        experts: as for ``patch_model``.

    Raises ``ValueError`` for settings that do not fit and a name that is taken, ``ImportError`` for a transformers
    without this registry. Once a model is made, experts of unknown layout, tensor parallelism and ``weight_at='input'``
    are errors.
    """
    config.validate()
    one_of("experts", experts, EXPERTS)
    if config.dispatcher == "local":
        raise ValueError("dispatcher='local' keeps all experts on every rank; use 'rowwise' or 'block'")
    if config.weight_at == "input":
        raise ValueError("weight_at='input' scales what experts read, but these models scale what they return")
    try:
        from transformers.distributed.expert_parallel import EPImplementation, EPImplementationInterface
    except ImportError as error:
        import transformers

        raise ImportError(
            f"transformers {transformers.__version__} has no registry of expert-parallel implementations; it came with"
            " 5.23. patch_model works with any version from 4.57 on"
        ) from error
    if name in EPImplementationInterface():
        raise ValueError(f"{name!r} is registered already; taken: {', '.join(EPImplementationInterface())}")
    registered = Registered(name, config, experts)

    class Implementation(EPImplementation):
        """One experts module of transformers, reached through our dispatchers."""

        def __init__(self, experts: nn.Module, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh) -> None:
            super().__init__(experts, ep_mesh, tp_mesh)
            self.layer = Layer(registered, experts, self.num_local_experts, ep_mesh, tp_mesh)

        def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
            return self.layer(hidden_states, top_k_index, top_k_weights)

    EPImplementationInterface.register(name, Implementation)
    return registered


class Layer:
    """One experts module that transformers has sharded: global ids in, weighted sums [T, D] out."""

    def __init__(
        self, registered: Registered, experts: nn.Module, local: int, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh
    ) -> None:
        if tp_mesh.size() > 1:
            raise ValueError(
                f"tp_size={tp_mesh.size()} ranks would send the same tokens: use tp_size=1, or"
                " ep_implementation='all_to_all'"
            )
        self.name = f"{type(experts).__name__}.{registered.layers}"
        registered.layers += 1
        if not is_experts(experts):
            raise ValueError(f"{self.name} is not called like an experts module of transformers; use patch_model")
        self.module, self.group = experts, ep_mesh.get_group()
        self.dispatchers, self.num_experts = registered.dispatchers(self.group), local * ep_mesh.size()
        layout = choose_layout(self.name, experts, GENERIC, registered.experts)
        self.run: Experts
        if layout is None:
            self.run = ForeignExperts(functools.partial(one_route_per_row, experts.forward))
        else:
            self.run = functools.partial(layout.run, experts)

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """``hidden_states`` [T, D], ids (E: no route) and weights [T, K] → [T, D]."""
        if torch.compiler.is_dynamo_compiling():
            untraced: Tensor = torch.compiler.disable(self._forward)(hidden_states, top_k_index, top_k_weights)
            return untraced
        return self._forward(hidden_states, top_k_index, top_k_weights)

    def _forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        shape = Shape(self.num_experts, top_k_index.shape[1], rows.shape[1], self._dtype(rows), rows.device)
        dispatcher = self.dispatchers.of(shape)
        out = moe_step(
            dispatcher,
            rows.to(shape.dtype),
            top_k_index.masked_fill(top_k_index == self.num_experts, -1),
            top_k_weights,
            self.run,
            layer=self.name,
        )
        return out.view(hidden_states.shape).to(hidden_states.dtype)

    def _dtype(self, rows: Tensor) -> torch.dtype:
        """The dtype of the rows that travel: autocast's, which leaves float64 alone, else their own."""
        if torch.is_autocast_enabled(rows.device.type) and rows.dtype != torch.float64:
            return torch.get_autocast_dtype(rows.device.type)
        return rows.dtype
