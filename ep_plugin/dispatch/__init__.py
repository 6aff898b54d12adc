"""Dispatchers: move token rows to the ranks that store their experts, and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ..config import EPConfig, check_config, check_shape
from ..heap import Heap, open_heap
from ..slots import slots_for
from .agree import agree
from .base import Dispatched, Dispatcher, Rebuild, RouteOverflow, RouteState
from .block import BlockDispatcher
from .deepep_checks import deepep_preflight
from .local import LocalDispatcher
from .rowwise import RowwiseDispatcher

__all__ = [
    "Dispatched",
    "Dispatcher",
    "Rebuild",
    "RouteOverflow",
    "RouteState",
    "build_dispatcher",
    "deepep_preflight",
    "slots_for",
]


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
    expert_width: int | None = None,
) -> Dispatcher[Any]:
    """The dispatcher that ``config`` names, for one layer shape; collective over ``group`` (the EP_MP group; None:
    WORLD).

    ``num_experts`` E of the whole group, ``top_k`` K, ``hidden_size`` D, ``dtype`` of the rows. ``heap``: a heap to
    share between dispatchers of several shapes; otherwise rowwise opens and closes one of its own. ``expert_width`` F:
    what ``schedule.kind='auto'`` looks its shape up by, besides. Raises ``ValueError`` for settings or shapes that do
    not fit, before anything is made."""
    check_config(config)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(
            f"dtype={dtype!r} must be the floating-point torch.dtype of the rows, torch.bfloat16 for example"
        )
    shape: dict[str, Any] = dict(
        num_experts=num_experts, top_k=top_k, hidden_size=hidden_size, dtype=dtype, group=group, device=device
    )
    if config.schedule.kind == "none" and not config.schedule.width:
        return _build(config, heap=heap, **shape)
    from ..waves import build_waves  # which knows the dispatchers here

    _require_group(config)
    return build_waves(config, _build, expert_width=expert_width, heap=heap, **shape)


def _require_group(config: EPConfig) -> None:
    if not dist.is_initialized():
        raise ValueError(
            f"dispatcher={config.dispatcher!r} needs torch.distributed; start with torchrun, or use 'local'"
        )


def _build(
    config: EPConfig,
    *,
    num_experts: int,
    top_k: int,
    hidden_size: int,
    dtype: torch.dtype,
    group: dist.ProcessGroup | None,
    device: torch.device | str,
    heap: Heap | None,
    wrap: Callable[[type[Any]], type[Any]] = lambda cls: cls,
) -> Dispatcher[Any]:
    """The dispatcher for one batch at a time; ``wrap`` makes its class from the ordinary one."""
    device = torch.device(device)
    precision = None
    if config.precision == "mxfp8":
        from ..mxfp8.dispatchers import Precision  # which knows the dispatchers here

        precision = Precision(config, hidden_size, dtype, device, wrap)
    kwargs: dict[str, Any] = dict(
        num_experts=num_experts,
        top_k=top_k,
        hidden_size=hidden_size,
        dtype=dtype,
        device=device,
        rank=0,
        world=1,
    )
    if config.dispatcher == "local":
        return LocalDispatcher(config, **kwargs) if precision is None else precision.local(**kwargs)
    _require_group(config)
    kwargs |= {"rank": dist.get_rank(group), "world": dist.get_world_size(group)}
    check_shape(num_experts=num_experts, top_k=top_k, hidden_size=hidden_size, ep=kwargs["world"])
    shape = ("num_experts", "top_k", "hidden_size", "dtype")
    agree(config, group, **{name: kwargs[name] for name in shape}, precision=config.precision, mxfp8=config.mxfp8)
    if config.dispatcher == "block":
        if config.permute == "te":
            from .block_te import TEBlockDispatcher

            return wrap(TEBlockDispatcher)(config, group=group, **kwargs)
        block = wrap(BlockDispatcher)
        return block(config, group=group, **kwargs) if precision is None else precision.block(group, **kwargs)
    if config.dispatcher == "deepep":
        from .deepep import build_deepep

        return build_deepep(config, group, precision, wrap, **kwargs)
    kwargs["owns_heap"] = heap is None
    if heap is None:
        heap = open_heap(config.heap, group, device, config.timeout_s, config.transport)
    elif (opened := getattr(heap, "transport", "peer")) != config.transport:
        raise ValueError(
            f"transport={config.transport!r} does not fit the heap that was given, which was opened with"
            f" transport={opened!r}: pass open_heap(..., transport={config.transport!r})"
        )
    if precision is not None:
        return precision.rowwise(heap, **kwargs)
    if not heap.host_visible:
        from ..heap.device import DeviceHeap
        from .rowwise_device import DeviceRowwiseDispatcher

        assert isinstance(heap, DeviceHeap)
        return wrap(DeviceRowwiseDispatcher)(config, heap=heap, **kwargs)
    return wrap(RowwiseDispatcher)(config, heap=heap, **kwargs)
