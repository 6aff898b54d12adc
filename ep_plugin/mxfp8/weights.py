"""Expert weights quantised once per optimiser step."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_post_hook

T = TypeVar("T")

_steps = 0  # optimizer steps of this process, of any torch optimizer


def invalidate(*_: Any) -> None:
    """Make every cache quantise again: the weights have changed in a way that their version counters do not show.

    Optimizers built on ``torch.optim`` call this after each step. Whoever writes into ``weight.data``, or into a buffer
    under it, in another way calls it then.
    """
    global _steps
    _steps += 1


register_optimizer_step_post_hook(invalidate)


class WeightCache:
    """What is made of a weight, kept until the weight changes: its version counter, its memory, or a step says so.

    A weight is known by its place in memory, so that views made anew for every forward find what was made of the last.
    Holds no weight alive; what was made of a dead one goes when something is made next. ``made`` counts how often
    something had to be made. While a CUDA graph is captured nothing is kept or reused, because a replay must quantise
    what the weights are then.
    """

    def __init__(self) -> None:
        self._entries: dict[Hashable, tuple[StorageWeakRef, dict[Hashable, tuple[Any, Any]]]] = {}
        self.made = 0

    def get(self, weight: Tensor, key: Hashable, make: Callable[[Tensor], T]) -> T:
        """``make(weight)``, or what it gave for this ``key`` last time if the weight has not changed since."""
        if weight.is_inference() or (weight.is_cuda and torch.cuda.is_current_stream_capturing()):
            self.made += 1
            return make(weight.detach())
        stamp, entries = (weight._version, _steps), self._of(weight)
        found = entries.get(key)
        if found is None or found[0] != stamp:
            entries.pop(key, None)  # the old one's memory serves the new one
            self._forget_the_dead()
            found = entries[key] = (stamp, make(weight.detach()))
            self.made += 1
        made: T = found[1]
        return made

    def _of(self, weight: Tensor) -> dict[Hashable, tuple[Any, Any]]:
        memory = StorageWeakRef(weight.untyped_storage())  # no other storage gets its number while this lives
        place = (memory.cdata, weight.storage_offset(), weight.shape, weight.stride(), weight.dtype)
        return self._entries.setdefault(place, (memory, {}))[1]

    def _forget_the_dead(self) -> None:
        for place in [place for place, entry in self._entries.items() if entry[0].expired()]:
            del self._entries[place]

    def clear(self) -> None:
        """Forget everything."""
        self._entries.clear()
