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
    """Watches the ``dispatchers`` of a model, the same ones on all ranks of WORLD in the same order."""

    def __init__(self, dispatchers: Iterable[Dispatcher[Any]]) -> None:
        self.dispatchers = [d for d in dispatchers if d.can_overflow]

    def found(self) -> list[int]:
        """Rows that each dispatcher would have needed, 0 where it had room; empty if all had. Collective over WORLD:
        a step that one EP group must discard is discarded by all. Raises what else ``Dispatcher.check`` raises."""
        if not self.dispatchers:
            return []
        rows = []
        for dispatcher in self.dispatchers:
            try:
                dispatcher.check()
                rows.append(0)
            except RouteOverflow as overflow:
                rows.append(overflow.rows)
        most = torch.tensor(rows, dtype=torch.int64, device=self.dispatchers[0].device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        rows = most.tolist()
        return rows if any(rows) else []

    def regrow(self, rows: list[int]) -> None:
        """Collective: room for what ``found`` found. No tensor of the discarded step may be alive."""
        for dispatcher, needed in zip(self.dispatchers, rows, strict=True):
            if needed:
                logger.warning("%d rows arrived at one expert rank: its buffers grow, and the step runs again", needed)
                dispatcher.regrow(needed)
