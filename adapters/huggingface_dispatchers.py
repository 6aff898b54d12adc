"""The dispatchers of one patched model: one for every shape and row dtype that its layers use, on one heap."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..config import EPConfig
from ..dispatch import Dispatcher, build_dispatcher
from ..metrics import total
from ..slots import DEFAULT_SLOTS

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Shape:
    """What layers must share to share a dispatcher: E, K, D, the dtype of the rows and the device; ``weight_at`` where
    the model's own code applies router weights elsewhere than the settings say; ``expert_width`` F where a schedule is
    looked up by it."""

    num_experts: int
    top_k: int
    hidden_size: int
    dtype: torch.dtype
    device: torch.device
    weight_at: str | None = None
    expert_width: int | None = None


def with_slots(config: EPConfig, shapes: Sequence[Shape], checkpointing: bool) -> EPConfig:
    """``config`` with as many payload slots as a training step of layers of ``shapes``, one each, holds on GPUs, where
    the settings leave that open. Under activation checkpointing the default has enough."""
    open_ = config.dispatcher == "rowwise" and config.slots is None and not checkpointing
    if not open_ or all(shape.device.type == "cpu" for shape in shapes) or len(shapes) < DEFAULT_SLOTS:
        return config
    slots = len(shapes) + 1
    logger.info(
        "%d MoE layers: %d payload slots. With gradient checkpointing 2 are enough: turn it on before patch_model, or"
        " set slots=2",
        len(shapes),
        slots,
    )
    return replace(config, slots=slots)


class Dispatchers:
    """Built when a shape is first asked for, which is collective over ``group`` (the EP_MP group; None: no group).

    ``row_dtype``: what rows and products are computed in, where weights are kept in another dtype without autocast, as
    under FSDP2's mixed precision; None takes the weights'."""

    def __init__(self, config: EPConfig, group: dist.ProcessGroup | None) -> None:
        self.config, self.group = config, group
        self.row_dtype: torch.dtype | None = None
        self._made: dict[Shape, Dispatcher[Any]] = {}
        self._to_tell: set[Shape] = set()

    def follow(self, model: nn.Module) -> Callable[[], None]:
        """Before every forward pass of ``model``, let buffers that were made for fewer tokens grow; gives what ends
        that. Only DeepEP's must be told, where ``max_tokens`` does not say it."""
        if self.config.dispatcher != "deepep" or self.config.max_tokens is not None:
            return lambda: None

        def begin(*_: Any) -> None:
            self._to_tell = set(self._made)

        return model.register_forward_pre_hook(begin).remove

    def expect(self, shape: Shape, num_tokens: int) -> None:
        """A layer of ``shape`` has ``num_tokens`` tokens of this rank. Collective in the first of a forward pass that
        is followed."""
        if shape in self._to_tell:  # neither in a later layer nor in a recomputation
            self._to_tell.remove(shape)
            self._made[shape].expect(num_tokens)

    def of(self, shape: Shape) -> Dispatcher[Any]:
        """The dispatcher of ``shape``. Raises ``ValueError`` for settings or shapes that do not fit."""
        if shape not in self._made:
            first = next(iter(self), None)
            self._made[shape] = build_dispatcher(
                self.config if shape.weight_at is None else replace(self.config, weight_at=shape.weight_at),
                num_experts=shape.num_experts,
                top_k=shape.top_k,
                hidden_size=shape.hidden_size,
                dtype=shape.dtype,
                group=self.group,
                device=shape.device,
                heap=getattr(first, "heap", None),  # the first one's, which closes it
                expert_width=shape.expert_width,
            )
        return self._made[shape]

    def __iter__(self) -> Iterator[Dispatcher[Any]]:
        return iter(self._made.values())

    def check(self) -> None:
        """Raise what a dispatcher could not raise when it happened."""
        for dispatcher in self:
            dispatcher.check()

    def bytes_sent(self) -> int | None:
        """Row bytes that this rank wrote to or read from other ranks. None: rowwise on GPUs, whose counts stay on the
        device, and DeepEP do not count."""
        return total(dispatcher.stats().get("bytes_sent") for dispatcher in self)

    def close(self) -> None:
        """Close all, the first, which owns the heap, last. Collective and idempotent."""
        for dispatcher in reversed(list(self)):
            dispatcher.close()
