"""Where the parts of a symmetric slot lie."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..heap.base import ALIGNMENT, round_up


@dataclass(frozen=True)
class Part:
    """A named tensor inside a slot; ``offset`` in bytes from the slot's start."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int = 0

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Region:
    """Parts one after another, each aligned for 16-byte accesses. ``nbytes`` is what a slot must hold."""

    def __init__(self, *parts: Part) -> None:
        self._parts: dict[str, Part] = {}
        end = 0
        for part in parts:
            placed = Part(part.name, part.shape, part.dtype, round_up(end, ALIGNMENT))
            self._parts[part.name] = placed
            end = placed.offset + placed.nbytes
        self.nbytes = max(round_up(end, ALIGNMENT), ALIGNMENT)

    def __getitem__(self, name: str) -> Part:
        return self._parts[name]

    def __iter__(self) -> Iterator[Part]:
        return iter(self._parts.values())

    def view(self, slot: Tensor, name: str) -> Tensor:
        """The part ``name`` of ``slot`` (uint8), sharing its storage and so its lease."""
        part = self._parts[name]
        return slot[part.offset : part.offset + part.nbytes].view(part.dtype).view(part.shape)
