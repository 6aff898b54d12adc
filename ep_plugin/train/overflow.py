"""Steps whose dropless routes did not fit the buffers: found on all ranks together, before the optimizer uses them."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from ..dispatch import Dispatcher, RouteOverflow

RERUNS = 8  # of one step: each gives the layers after the one that overflowed other inputs, and so other routes

logger = logging.getLogger(__name__)


class Overflows:
    """Watches the dispatchers of this rank's part of a model. Every rank of WORLD takes part if ``device`` is given,
    which ranks with different dispatchers need (pipeline stages, say); else those whose dispatchers may overflow, the
    same ones on all ranks."""

    def __init__(self, dispatchers: Iterable[Dispatcher[Any]], device: torch.device | None = None) -> None:
        self.dispatchers = [d for d in dispatchers if d.can_overflow]
        self.device = device if device is not None or not self.dispatchers else self.dispatchers[0].device

    def found(self) -> list[int] | None:
        """Rows that each dispatcher would have needed, 0 where it had room; None if all had on all ranks. Collective:
        a step that one EP group must discard is discarded by all. Raises what else ``Dispatcher.check`` raises."""
        if self.device is None:
            return None
        rows = []
        for dispatcher in self.dispatchers:
            try:
                dispatcher.check()
                rows.append(0)
            except RouteOverflow as overflow:  # alike on all ranks of its EP group
                rows.append(overflow.rows)
        some = torch.tensor(any(rows), dtype=torch.int64, device=self.device)
        dist.all_reduce(some, op=dist.ReduceOp.MAX)
        return rows if int(some) else None

    def regrow(self, rows: list[int]) -> None:
        """Room for what ``found`` found; collective over each EP group that overflowed. No tensor of the discarded step
        may be alive."""
        for dispatcher, needed in zip(self.dispatchers, rows, strict=True):
            if needed:
                logger.warning("%d rows arrived at one expert rank: its buffers grow, and the step runs again", needed)
                dispatcher.regrow(needed)


def still_too_small(what: str) -> RuntimeError:
    """The error of a step or forward (``what``) that overflowed even after ``RERUNS`` more tries."""
    return RuntimeError(
        f"{what} overflowed its expert ranks' buffers {1 + RERUNS} times, although they grew each time to what was"
        " needed: raise ep.capacity.factor"
    )
