"""Symmetric heaps. ``open_heap`` picks the backend; ``base`` holds the contract, ``pool`` the leased slots."""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist

from ep_plugin.heap.base import (
    CHANNELS,
    RECORD_MAX,
    Heap,
    HeapAborted,
    HeapClosed,
    HeapTimeout,
    PeerDied,
    Phase,
    SymmBuffer,
    Ticket,
)
from ep_plugin.heap.pool import Slot, SlotPool

__all__ = [
    "CHANNELS",
    "RECORD_MAX",
    "Heap",
    "HeapAborted",
    "HeapClosed",
    "HeapTimeout",
    "PeerDied",
    "Phase",
    "Slot",
    "SlotPool",
    "SymmBuffer",
    "Ticket",
    "open_heap",
]

logger = logging.getLogger(__name__)


def open_heap(
    name: str, group: dist.ProcessGroup | None, device: torch.device | str = "cpu", timeout_s: float = 300.0
) -> Heap:
    """Collective over ``group`` (None: WORLD): open the symmetric heap ``name``; "auto" picks the one for ``device``.

    Raises ValueError when the backend cannot serve the device, RuntimeError when the machine cannot serve the backend.
    """
    device = torch.device(device)
    if device.type != "cpu":
        raise ValueError(f"heap={name!r} on device {str(device)!r}: the only heap is 'shm', which serves device 'cpu'")
    if name not in ("auto", "shm"):
        raise ValueError(f"heap={name!r} cannot serve device 'cpu': use 'shm' or 'auto'")
    from ep_plugin.heap.shm import ShmHeap

    heap = ShmHeap(group, timeout_s)
    logger.info("heap shm (%s): shared memory of %d CPU processes on this host", name, heap.world)
    return heap
