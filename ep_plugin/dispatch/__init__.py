"""Dispatchers: move token rows to the ranks that store their experts, and back."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ..config import EPConfig, check_shape
from ..heap import Heap, open_heap
from ..slots import slots_for
from .base import Dispatched, Dispatcher, Rebuild, RouteState
from .block import BlockDispatcher
from .local import LocalDispatcher
from .rowwise import RowwiseDispatcher

__all__ = ["Dispatched", "Dispatcher", "Rebuild", "RouteState", "build_dispatcher", "slots_for"]


def build_dispatcher(
    config: EPConfig,
    *,
    num_experts: int,
    top_k: int,
    hidden_size: int,
    dtype: torch.dtype,
    group: dist.ProcessGroup | None = None,
    device: torch.device | str = "cpu",
    heap: Heap | None = None,
) -> Dispatcher[Any]:
    """The dispatcher that ``config`` names, for one layer shape; collective over ``group`` (the EP_MP group; None:
    WORLD).

    ``num_experts`` E of the whole group, ``top_k`` K, ``hidden_size`` D, ``dtype`` of the rows. ``heap``: a heap to
    share between dispatchers of several shapes; otherwise rowwise opens and closes one of its own. Raises
    ``ValueError`` for settings or shapes that do not fit, before anything is made."""
    config.validate()
    device = torch.device(device)
    if config.dispatcher == "local":
        return LocalDispatcher(
            config,
            num_experts=num_experts,
            top_k=top_k,
            hidden_size=hidden_size,
            dtype=dtype,
            device=device,
            rank=0,
            world=1,
        )
    if not dist.is_initialized():
        raise ValueError(
            f"dispatcher={config.dispatcher!r} needs torch.distributed; start with torchrun, or use 'local'"
        )
    kwargs: dict[str, Any] = dict(
        num_experts=num_experts,
        top_k=top_k,
        hidden_size=hidden_size,
        dtype=dtype,
        device=device,
        rank=dist.get_rank(group),
        world=dist.get_world_size(group),
    )
    check_shape(num_experts=num_experts, top_k=top_k, hidden_size=hidden_size, ep=kwargs["world"])
    _agree(config, kwargs, group)
    if config.dispatcher == "block":
        return BlockDispatcher(config, group=group, **kwargs)
    kwargs["owns_heap"] = heap is None
    if heap is None:
        heap = open_heap(config.heap, group, device, config.timeout_s)
    if not heap.host_visible:
        from ..heap.device import DeviceHeap
        from .rowwise_device import DeviceRowwiseDispatcher

        assert isinstance(heap, DeviceHeap)
        return DeviceRowwiseDispatcher(config, heap=heap, **kwargs)
    return RowwiseDispatcher(config, heap=heap, **kwargs)


def _agree(config: EPConfig, shape: dict[str, Any], group: dist.ProcessGroup | None) -> None:
    """``ValueError`` on all ranks, naming the setting, where what must be alike on them is not; collective."""
    own = {name: getattr(config, name) for name in ("dispatcher", "form", "weight_at", "max_tokens", "slots")}
    own |= {f"capacity.{name}": value for name, value in vars(config.capacity).items()}
    own |= {"launch.chunks": config.launch.chunks, "dtype": str(shape["dtype"])}
    own |= {name: shape[name] for name in ("num_experts", "top_k", "hidden_size")}
    everyone: list[Any] = [None] * shape["world"]
    dist.all_gather_object(everyone, own, group=group)
    for name in own:
        values = [settings.get(name) for settings in everyone]
        if any(value != values[0] for value in values):
            said = ", ".join(f"rank {rank}: {value!r}" for rank, value in enumerate(values))
            raise ValueError(f"the ranks of the EP group were given different settings of {name}: {said}")
