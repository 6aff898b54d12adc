"""Symmetric heaps. ``open_heap`` picks the backend; ``base`` holds the contract, ``pool`` the leased slots."""

from __future__ import annotations

import importlib.util
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
from ep_plugin.job import shares_gpus

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
    name: str,
    group: dist.ProcessGroup | None,
    device: torch.device | str = "cpu",
    timeout_s: float = 300.0,
    transport: str = "peer",
) -> Heap:
    """Collective over ``group`` (None: WORLD): open the symmetric heap ``name``; "auto" picks the one for ``device``.

    ``transport``: ``peer``, every rank reaches the others' memory through pointers; ``device``, none does, and signals
    go through NVSHMEM's device functions (nvshmem only).

    Raises ValueError when the backend cannot serve the device, RuntimeError when the machine cannot serve the backend.
    """
    device = torch.device(device)
    if transport == "device":
        if name not in ("auto", "nvshmem") or device.type != "cuda":
            raise ValueError(
                f"transport='device' is NVSHMEM's own and needs heap='nvshmem' on CUDA, not heap={name!r} on"
                f" {str(device)!r}"
            )
        name = "nvshmem"
    if name == "auto":
        name, why = _choose(device)
        logger.info("heap=auto is %r for device %s: %s", name, device, why)
    if name == "shm":
        if device.type != "cpu":
            raise ValueError(f"heap='shm' serves device 'cpu', not {str(device)!r}: use 'torch', 'nvshmem' or 'auto'")
        from ep_plugin.heap.shm import ShmHeap

        return ShmHeap(group, timeout_s)
    if device.type != "cuda" or not torch.cuda.is_available():
        raise ValueError(f"heap={name!r} needs CUDA, and the device is {str(device)!r}: use 'shm' or 'auto'")
    if name == "nvshmem":
        from ep_plugin.heap.nvshmem import NvshmemHeap

        return NvshmemHeap(group, device, timeout_s, transport)
    if name == "torch":
        from ep_plugin.heap.torch_symm import TorchHeap

        return TorchHeap(group, device, timeout_s)
    raise ValueError(f"heap={name!r} is not one of auto, shm, torch, nvshmem")


def _choose(device: torch.device) -> tuple[str, str]:
    """The backend for ``device``, and why."""
    if device.type == "cpu":
        return "shm", "shared memory of CPU processes on this host"
    if shares_gpus():
        return "torch", "ranks share GPUs"
    if importlib.util.find_spec("nvshmem") is None:
        return "torch", "nvshmem4py is not installed"
    from ep_plugin.heap import nvshmem

    if nvshmem.in_use():
        return "torch", "this process already has an NVSHMEM world"
    return "nvshmem", "nvshmem4py is installed"
