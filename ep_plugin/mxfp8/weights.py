"""Expert weights quantised once per optimiser step."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakTensorKeyDictionary

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

    Holds no weight alive. ``made`` counts how often something had to be made. While a CUDA graph is captured nothing is
    kept or reused, because a replay must quantise what the weights are then.
    """

    def __init__(self) -> None:
        self._entries: Any = WeakTensorKeyDictionary()
        self.made = 0

    def get(self, weight: Tensor, key: Hashable, make: Callable[[Tensor], T]) -> T:
        """``make(weight)``, or what it gave for this ``key`` last time if the weight has not changed since."""
        if weight.is_inference() or (weight.is_cuda and torch.cuda.is_current_stream_capturing()):
            self.made += 1
            return make(weight.detach())
        stamp = (weight._version, weight.data_ptr(), _steps)
        entries = self._entries.setdefault(weight, {})
        found = entries.get(key)
        if found is None or found[0] != stamp:
            entries.pop(key, None)  # the old one's memory serves the new one
            found = entries[key] = (stamp, make(weight.detach()))
            self.made += 1
        return found[1]

    def clear(self) -> None:
        """Forget everything."""
        self._entries = WeakTensorKeyDictionary()
