"""What the GPU backends share: signals, mailboxes and the abort word as kernels on the current stream.

Nothing here waits for the device: ``wait`` enqueues a one-program kernel that spins on the GPU until the peers have
signalled, looks at the abort word first and gives up on a clock. What went wrong is written to pinned host memory,
which ``check`` reads.

A backend supplies memory: ``_open``, ``_allocate``, ``_peer``, ``_release``, ``_shut``.
"""

from __future__ import annotations

import logging
import math
import socket
import zlib
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..kernels import sync_triton as sync
from ..kernels.nvshmem_sync import LibrarySignals
from ..kernels.peers import Peers
from ..watch import GroupWatch
from .base import (
    CHANNELS,
    INTERNAL,
    RECORD_MAX,
    Heap,
    HeapAborted,
    HeapClosed,
    HeapTimeout,
    Phase,
    SymmBuffer,
    Ticket,
    round_up,
)

logger = logging.getLogger(__name__)

SPARE = 8  # a word between the abort word and the counters

OTHER_WAYS = (
    "Keep the EP group where they do, or use dispatcher='deepep', dispatcher='block', or transport='device' with"
    " heap='nvshmem'"
)


@dataclass
class Region:
    """One symmetric allocation: our memory as uint8 [nbytes], every rank's base address in this process, and what
    keeps it."""

    local: Tensor
    ptrs: list[int]
    keep: Any


class _Lease:
    """Device memory as an array interface: torch keeps this object as the owner of the storage it makes of it."""

    def __init__(self, address: int, nbytes: int, on_release: Callable[[], None] | None) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
            "strides": None,
        }
        self._on_release = on_release

    def __del__(self) -> None:
        if self._on_release is not None:
            self._on_release()


class DeviceBuffer(SymmBuffer):
    """One region of a ``DeviceHeap``."""

    def __init__(self, heap: DeviceHeap, region: Region, label: str) -> None:
        self.nbytes = region.local.numel()
        self.rank, self.world, self.device, self.label = heap.rank, heap.world, heap.device, label
        self.region = region
        self.ptrs = torch.tensor(region.ptrs, dtype=torch.int64, device=heap.device)
        self._heap = heap

    def _view(self, rank: int, offset: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        nbytes = math.prod(shape) * dtype.itemsize
        if rank == self.rank:
            flat = torch.as_tensor(_Lease(self.region.ptrs[rank] + offset, nbytes, None), device=self.device)
        else:
            flat = self._heap._peer(self.region, rank)[offset : offset + nbytes]
        return flat.view(dtype).view(tuple(shape))

    def _owned(self, offset: int, nbytes: int, on_release: Callable[[], None]) -> Tensor:
        return torch.as_tensor(_Lease(self.region.ptrs[self.rank] + offset, nbytes, on_release), device=self.device)


class _Layout:
    """Word offsets inside a control region of ``world`` ranks. Word 0 is the abort word: 0 while all is well."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.stride = round_up(world, 16)  # what different ranks write stays on different cache lines where it is cheap

    def counter(self, channel: int, source: int) -> int:
        return 16 + channel * self.stride + source

    def mailbox(self, channel: int, parity: int, source: int) -> int:
        start = self.counter(CHANNELS + 1, 0)
        return start + ((channel * 2 + parity) * self.world + source) * RECORD_MAX

    @property
    def words(self) -> int:
        return self.mailbox(CHANNELS + 1, 0, 0)


def require_addresses(name: str, tables: Sequence[Sequence[int]]) -> None:
    """RuntimeError if a rank has no address for another's memory; ``tables``: every rank's addresses by rank."""
    blind = [(r, [p for p, address in enumerate(table) if not address]) for r, table in enumerate(tables)]
    said = [f"rank {rank} cannot address ranks {missing}" for rank, missing in blind if missing]
    if said:
        raise RuntimeError(
            f"heap={name!r}: the GPUs of this EP group do not all reach each other through pointers: {'; '.join(said)}."
            f" {OTHER_WAYS}"
        )


def require_current(what: str, device: torch.device) -> torch.device:
    """``device`` with its number; ``ValueError`` unless it is the current one, on which kernels are launched."""
    current = torch.cuda.current_device()
    if device.index not in (None, current):
        raise ValueError(
            f"{what} is on {device}, but this process launches kernels on cuda:{current}: call"
            f" torch.cuda.set_device({device.index}) first"
        )
    return torch.device("cuda", current)


class DeviceHeap(Heap):
    """Symmetric heap of the GPUs of ``group``, one per rank. See the module for what backends add.

    ``overflow``: pinned int64 [1], the most rows an expert rank would have needed where its bound was too small (0:
    none)."""

    host_visible = False
    transport: str = "peer"

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device, timeout_s: float) -> None:
        if device.type != "cuda":
            raise ValueError(f"heap={self.name!r} serves CUDA devices, not {device}")
        self.group = group
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise ValueError("this process is not a member of the group whose heap it opens")
        self.device = require_current(f"heap={self.name!r}", device)
        self.timeout_s = float(timeout_s)
        # Kernels write it, ``check`` reads it.
        self.status = torch.zeros(sync.STATUS_WORDS, dtype=torch.int64).pin_memory()
        self._phases: dict[int, Phase] = {}
        self._watches: dict[tuple[int, Phase], sync.Watch] = {}  # made once: steps ask for the same again and again
        self._places: dict[int, Peers] = {}
        self._buffers: list[DeviceBuffer] = []
        self._closed = False
        self._lengths: list[int | None] = [None] * (CHANNELS + 1)  # of records sent and not yet received
        self._hosts_watch = GroupWatch(group, self.timeout_s)
        hosts = self._hosts_watch.gather(socket.gethostname(), Phase("open", f"heap {self.name!r}"))
        self.one_host = len(set(hosts)) == 1
        if not self.one_host and self.transport == "peer":
            raise RuntimeError(
                f"heap={self.name!r}: the EP group spans the hosts {sorted(set(hosts))}, whose GPUs cannot write each"
                f" other's memory through pointers. {OTHER_WAYS}"
            )
        self._signalling: Any = LibrarySignals(self.rank) if self.transport == "device" else sync
        self._open()
        self._layout = _Layout(self.world)
        self._control = self._new(self._layout.words * 8)
        own = self._control.ptrs[self.rank]
        if self.transport == "peer":
            try:
                everyone = self._hosts_watch.gather(self._control.ptrs, Phase("open", f"heap {self.name!r}"))
                require_addresses(self.name, everyone)
            except RuntimeError:
                self._release(self._control)
                self._shut()
                raise
        table = self._control.ptrs if self.transport == "peer" else [own] * self.world
        self._ptrs = torch.tensor(table, dtype=torch.int64, device=self.device)
        self._words = torch.as_tensor(
            _Lease(self._control.ptrs[self.rank], self._layout.words * 8, None), device=self.device
        ).view(torch.int64)
        # Per channel: signals posted, exchanges received.
        self._counters = torch.zeros((CHANNELS + 1, 2), dtype=torch.int64, device=self.device)
        self._expected = torch.zeros((CHANNELS + 1, 1), dtype=torch.int64, device=self.device)
        self._side = torch.cuda.Stream(self.device)
        self._meet()
        if self.transport == "device":
            self._first_signals()

    def _first_signals(self) -> None:
        """Signals through NVSHMEM once before they matter: their kernels are then compiled and know the world, which
        takes seconds and may have to wait for a kernel that spins, when an abort must reach the peers."""
        phase = Phase("open", f"heap {self.name!r}")
        self._signalling.set_abort(self._at(SPARE), self._abort_value(self._code(phase)))  # which nobody looks at
        record = torch.full((1,), self.rank, dtype=torch.int64, device=self.device)
        everyone = self.exchange(record, channel=INTERNAL, phase=phase)
        self.barrier(phase)
        torch.cuda.synchronize(self.device)
        self.check()
        if everyone.flatten().tolist() != list(range(self.world)):
            raise RuntimeError(
                f"NVSHMEM's device functions exchanged {everyone.tolist()} instead of every rank's number"
            )

    # What a backend adds

    @abstractmethod
    def _open(self) -> None:
        """Start the backend; collective."""

    @abstractmethod
    def _allocate(self, nbytes: int) -> Region:
        """Symmetric memory; collective."""

    @abstractmethod
    def _peer(self, region: Region, rank: int) -> Tensor:
        """uint8 [nbytes] over another rank's region (tests and diagnostics; kernels use the addresses)."""

    @abstractmethod
    def _release(self, region: Region) -> None:
        """Give memory back; collective where the backend's is."""

    @abstractmethod
    def _shut(self) -> None:
        """Stop the backend; collective."""

    # Memory

    def alloc(self, nbytes: int, label: str) -> SymmBuffer:
        self._check_open()
        buffer = DeviceBuffer(self, self._new(nbytes, label), label)
        self._buffers.append(buffer)
        return buffer

    def _new(self, nbytes: int, label: str = "control") -> Region:
        nbytes = round_up(nbytes, 512)
        free, total = torch.cuda.mem_get_info(self.device)
        free += torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        mine = f"asks for {nbytes} bytes of {free} free of {total}" if nbytes > free else ""
        errors = self._hosts_watch.gather((nbytes, mine), Phase("alloc", f"buffer '{label}'"))
        if any(text for _, text in errors) or len({n for n, _ in errors}) > 1:
            said = "; ".join(f"rank {r}: {text or f'{n} bytes'}" for r, (n, text) in enumerate(errors))
            raise RuntimeError(f"the symmetric buffer '{label}' cannot be allocated: {said}")
        if mine == "" and nbytes > torch.cuda.mem_get_info(self.device)[0]:
            torch.cuda.empty_cache()
        region = self._allocate(nbytes)
        region.local.zero_()
        self._meet()
        return region

    def _meet(self) -> None:
        torch.cuda.synchronize(self.device)
        self._hosts_watch.gather(None, Phase("meeting", f"heap {self.name!r}"))

    def free(self, buffer: SymmBuffer) -> None:
        self._check_open()
        if not isinstance(buffer, DeviceBuffer) or buffer not in self._buffers:
            raise ValueError(f"buffer '{buffer.label}' does not belong to this heap, or was freed before")
        self._meet()
        self._buffers.remove(buffer)
        buffer.closed = True
        self._release(buffer.region)

    # Signals

    def post(self, *, channel: int, phase: Phase, ticket: Tensor | None = None) -> Tensor:
        """As ``Heap.post``, on the current stream. ``ticket`` int64 [1] is overwritten where given, else a new one is
        made."""
        self._check_open(channel)
        if ticket is None:
            ticket = torch.empty(1, dtype=torch.int64, device=self.device)
        self._signalling.post(self.counter(channel), self.signals(channel), ticket)
        return ticket

    def counter(self, channel: int) -> Tensor:
        """int64 [2] on the device: how often this rank has posted, and exchanged, on ``channel``."""
        return self._counters[channel]

    def expected(self, channel: int) -> Tensor:
        """int64 [1] on the device: signals of ``channel`` that operations enqueued so far wait for. Who lets kernels
        signal by themselves adds their signals here."""
        return self._expected[channel]

    def signals(self, channel: int) -> Peers:
        """The word (channel, this rank) on every rank, for kernels that signal by themselves."""
        return self._at(self._layout.counter(channel, self.rank))

    def wait(self, ticket: Ticket, *, channel: int, phase: Phase) -> None:
        """As ``Heap.wait``, as a kernel on the current stream; what goes wrong is raised by ``check``."""
        self._check_open(channel)
        assert isinstance(ticket, Tensor)
        self._signalling.wait(ticket, self._watch(channel, phase))

    def _watch(self, channel: int, phase: Phase) -> sync.Watch:
        if (channel, phase) not in self._watches:
            first, code = self._layout.counter(channel, 0), self._code(phase)
            self._watches[channel, phase] = sync.Watch(
                arrived=self._words[first : first + self.world],
                abort=self._words[:1],
                abort_at=self._at(0),
                abort_value=self._abort_value(code),
                status=self.status,
                timeout_ns=int(self.timeout_s * 1e9),
                code=code,
            )
        return self._watches[channel, phase]

    def _abort_value(self, code: int) -> int:
        return 1 + self.rank | code << 16

    def poll(self, ticket: Ticket, *, channel: int) -> bool:
        """As ``Heap.poll``; waits for the current stream."""
        self._check_open(channel)
        first = self._layout.counter(channel, 0)
        return bool((self._words[first : first + self.world] >= ticket).all())

    def barrier(self, phase: Phase) -> None:
        self.wait(self.post(channel=INTERNAL, phase=phase), channel=INTERNAL, phase=phase)

    # Mailboxes

    def send(self, record: Tensor, *, channel: int, phase: Phase) -> Tensor:
        self._check_open(channel)
        if record.dtype != torch.int64 or record.dim() != 1 or record.numel() > RECORD_MAX:
            raise ValueError(f"a record is int64 [n ≤ {RECORD_MAX}], not {record.dtype} {list(record.shape)}")
        # A peer may still read the mailbox of two exchanges ago until we have received the one in between.
        if self._lengths[channel] is not None:
            raise RuntimeError(f"channel {channel}: send before the exchange sent earlier was received")
        ticket = torch.empty(1, dtype=torch.int64, device=self.device)
        self._signalling.send(
            record,
            self._counters[channel],
            self._at(self._layout.mailbox(channel, 0, self.rank)),
            self.world * RECORD_MAX * 8,
            self.signals(channel),
            ticket,
        )
        self._lengths[channel] = record.numel()
        return ticket

    def receive(self, ticket: Ticket, *, channel: int, phase: Phase) -> Tensor:
        """As ``Heap.receive``; where the wait fails all records are −1."""
        self._check_open(channel)
        assert isinstance(ticket, Tensor)
        length = self._lengths[channel]
        if length is None:
            raise RuntimeError(f"channel {channel}: receive without a send")
        self._lengths[channel] = None
        out = torch.empty((self.world, length), dtype=torch.int64, device=self.device)
        first = self._layout.mailbox(channel, 0, 0)
        mail = self._words[first : first + 2 * self.world * RECORD_MAX].view(2, self.world, RECORD_MAX)
        self._signalling.receive(ticket, self._counters[channel], mail, out, self._watch(channel, phase))
        return out

    def _at(self, word: int) -> Peers:
        if word not in self._places:
            self._places[word] = Peers(self._ptrs, offset=word * 8)
        return self._places[word]

    # Failures

    def _code(self, phase: Phase) -> int:
        code = zlib.crc32(f"{phase.name}\0{phase.layer}".encode()) & 0x7FFFFFFF or 1
        self._phases[code] = phase
        return code

    def _named(self, code: int) -> str:
        phase = self._phases.get(code)
        return str(phase) if phase is not None else f"a phase this rank has not reached (code {code:#x})"

    def check(self) -> None:
        """Raise what a kernel recorded, if anything: HeapTimeout or HeapAborted. Does not wait for the device."""
        kind, code, late = self.status.tolist()
        if kind == sync.OK:
            return
        if kind == sync.TIMED_OUT:
            ranks = [rank for rank in range(self.world) if late >> rank & 1]
            raise HeapTimeout(
                f"rank {self.rank} waited {self.timeout_s:g} s in {self._named(code)} for EP ranks {ranks}: late, stuck"
                " or dead"
            )
        with torch.cuda.stream(self._side):
            word = int(self._words[0])
        raise HeapAborted(
            f"EP rank {(word & 0xFFFF) - 1} stopped the group in {self._named(word >> 16)}; rank {self.rank} was in"
            f" {self._named(code)}"
        )

    def abort(self, phase: Phase, reason: str) -> None:
        if self._closed:
            return
        logger.error("rank %d stops the EP group in %s: %s", self.rank, phase, reason)
        try:
            with torch.cuda.stream(self._side):  # the current stream may be behind a wait
                self._signalling.set_abort(self._at(0), self._abort_value(self._code(phase)))
                self._side.synchronize()
        except RuntimeError as error:  # a broken CUDA context: the peers' clocks will tell
            logger.error("rank %d could not tell its peers: %s", self.rank, error)

    def _check_open(self, channel: int = 0) -> None:
        if self._closed:
            raise HeapClosed(f"heap '{self.name}' is closed")
        if not 0 <= channel <= CHANNELS:
            raise ValueError(f"channel {channel} is not one of 0 … {CHANNELS - 1}")

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        healthy = not int(self.status[0])
        for buffer in self._buffers:
            buffer.closed = True
        if healthy:  # memory is given back together; after a failure the process's end does it
            self._meet()
            for buffer in reversed(self._buffers):
                self._release(buffer.region)
            self._release(self._control)
            self._shut()
        self._buffers.clear()
