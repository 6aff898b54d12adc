"""The symmetric heap: memory that every rank of one group can read and write without the owner's help.

A backend supplies buffers (``alloc``), a signal that orders memory (``post`` and ``wait``), small records exchanged
through mailboxes (``send`` and ``receive``) and an abort word. Everything above it is the same for all backends.

All ranks of the group make the same sequence of ``alloc``, ``free``, ``barrier`` and, for each channel, ``post`` and
``send`` calls. Counters only grow and are waited for with ≥, so a rank that runs ahead never undoes a signal.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

CHANNELS = 8  # independent sequences of signals, 0 to 7
INTERNAL = CHANNELS  # one more, for the heap's own traffic: alloc, barrier, pools
RECORD_MAX = 2048  # int64 words of one exchanged record
ALIGNMENT = 256  # bytes; every buffer and every slot starts on a multiple

Ticket: TypeAlias = "int | Tensor"  # the counter value to wait for: an int on CPU, a device int64 tensor on GPUs


@dataclass(frozen=True)
class Phase:
    """Where in the model a heap call stands; errors quote it. ``name``: "dispatch"; ``layer``: "layers.3" or empty."""

    name: str
    layer: str = ""

    def __str__(self) -> str:
        return f"{self.name} of {self.layer}" if self.layer else self.name


class HeapAborted(RuntimeError):
    """A rank has stopped the group; the message quotes its rank, layer, phase and reason."""


class HeapTimeout(RuntimeError):
    """Peers were late in a bounded wait; the message names them, the layer, the phase and the seconds waited."""


class PeerDied(HeapTimeout):
    """A peer that has not signalled is no longer running, so waiting longer is useless."""


class HeapClosed(RuntimeError):
    """The heap or the buffer was used after ``close`` or ``free``."""


def round_up(nbytes: int, multiple: int) -> int:
    """The least multiple of ``multiple`` that is ≥ ``nbytes``."""
    return -(-nbytes // multiple) * multiple


class SymmBuffer(ABC):
    """One symmetric region: ``nbytes`` on every rank of the group, the base 256-byte aligned.

    ``ptrs``: int64 [world] on the heap's device, the regions' base addresses in this process (0 = none).
    """

    nbytes: int
    rank: int
    world: int
    device: torch.device
    label: str
    ptrs: Tensor
    closed: bool = False

    def view(self, rank: int, offset: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor [*shape] over ``rank``'s region from byte ``offset`` on; a write is a PUT, a read is a GET.

        Every call has a storage and a version counter of its own: writes through one view do not invalidate what
        autograd saved through another. Raises ValueError outside the region or off the dtype's alignment.
        """
        nbytes = math.prod(shape) * dtype.itemsize
        self._check(offset, nbytes)
        if not 0 <= rank < self.world:
            raise ValueError(f"buffer '{self.label}': rank {rank} is not one of the {self.world} ranks of its group")
        if offset % dtype.itemsize:
            raise ValueError(
                f"buffer '{self.label}': offset {offset} is not a multiple of {dtype.itemsize} bytes, one {dtype}"
            )
        if nbytes == 0:
            return torch.empty(tuple(shape), dtype=dtype, device=self.device)
        return self._view(rank, offset, shape, dtype)

    def owned(self, offset: int, nbytes: int, on_release: Callable[[], None]) -> Tensor:
        """uint8 [nbytes] over the own region whose *storage* holds a lease.

        ``on_release`` runs once, when the last tensor that shares the storage dies (views, detached and saved tensors
        included), on whichever thread drops it, so it must not block. At interpreter exit it may be skipped. A tensor
        that outlives ``close`` stays readable.
        """
        if nbytes <= 0:
            raise ValueError(f"buffer '{self.label}': an owned tensor needs at least one byte, not {nbytes}")
        self._check(offset, nbytes)
        return self._owned(offset, nbytes, on_release)

    def _check(self, offset: int, nbytes: int) -> None:
        if self.closed:
            raise HeapClosed(f"buffer '{self.label}' was used after it was freed or its heap was closed")
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise ValueError(
                f"buffer '{self.label}': bytes {offset} to {offset + nbytes} are outside its {self.nbytes} bytes"
            )

    @abstractmethod
    def _view(self, rank: int, offset: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor: ...

    @abstractmethod
    def _owned(self, offset: int, nbytes: int, on_release: Callable[[], None]) -> Tensor: ...


class Heap(ABC):
    """Symmetric memory and signals of one process group.

    ``host_visible``: exchanged records can be read on the host without a device sync. ``timeout_s`` bounds every wait.
    ``group``: the process group, None for WORLD (or for one process without torch.distributed).
    """

    name: str
    rank: int
    world: int
    device: torch.device
    group: dist.ProcessGroup | None
    timeout_s: float
    host_visible: bool

    @abstractmethod
    def alloc(self, nbytes: int, label: str) -> SymmBuffer:
        """Collective: a new region of at least ``nbytes`` on every rank, zeroed; all ranks pass the same ``nbytes``.

        If one rank cannot, all ranks raise RuntimeError with that rank's reason, and keep nothing of it.
        """

    @abstractmethod
    def free(self, buffer: SymmBuffer) -> None:
        """Collective: give the region back. Views made before stay readable; new ones raise HeapClosed."""

    @abstractmethod
    def send(self, record: Tensor, *, channel: int, phase: Phase) -> Ticket:
        """Put ``record`` (int64 [n ≤ RECORD_MAX] on the heap's device) into every rank's mailbox and ``post``.

        A channel holds one exchange at a time: ``receive`` before the next ``send``.
        """

    @abstractmethod
    def receive(self, ticket: Ticket, *, channel: int, phase: Phase) -> Tensor:
        """Wait for every rank's ``send`` and return the records, int64 [world, n]; n must be the same on all ranks."""

    def exchange(self, record: Tensor, *, channel: int, phase: Phase) -> Tensor:
        """``send`` and ``receive``: int64 [n] → int64 [world, n], every rank's record, the own one included."""
        return self.receive(self.send(record, channel=channel, phase=phase), channel=channel, phase=phase)

    @abstractmethod
    def post(self, *, channel: int, phase: Phase) -> Ticket:
        """Release: make every earlier write visible to the peers, then raise our counter of ``channel`` at each."""

    @abstractmethod
    def wait(self, ticket: Ticket, *, channel: int, phase: Phase) -> None:
        """Acquire: until every peer's counter of ``channel`` is ≥ ``ticket``; then their earlier writes are visible.

        Raises HeapAborted, HeapTimeout or PeerDied; the last two abort the group first.
        """

    @abstractmethod
    def poll(self, ticket: Ticket, *, channel: int) -> bool:
        """Whether every peer's counter of ``channel`` is ≥ ``ticket``, without blocking."""

    @abstractmethod
    def barrier(self, phase: Phase) -> None:
        """Post and wait on the internal channel."""

    @abstractmethod
    def abort(self, phase: Phase, reason: str) -> None:
        """Set the abort word (rank, phase, layer, reason) of every rank; the first one stays. Never raises."""

    @abstractmethod
    def close(self) -> None:
        """Let go of all buffers: idempotent, after failures too, never called from ``__del__``. Views then raise."""
