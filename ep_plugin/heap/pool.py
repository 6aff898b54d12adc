"""Slots of symmetric memory, leased to tensors.

The receiving rank chooses its slot alone and advertises its handle; peers write and read only there. A slot is free
again when the storage that leased it has died and every peer has signalled that it no longer reads from it.
"""

from __future__ import annotations

import gc
import itertools
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ep_plugin.heap.base import ALIGNMENT, INTERNAL, Heap, HeapClosed, Phase, SymmBuffer, Ticket, round_up

SEGMENT_BIT = 48  # a handle is segment << 48 | byte offset in the segment


@dataclass(frozen=True)
class PoolStats:
    """``slots`` that can be handed out, ``in_use`` (leased, or still read by a peer), and the most ever in use."""

    slots: int
    in_use: int
    peak: int


@dataclass
class _Segment:
    """One symmetric buffer cut into slots. A retired one hands out no more, and is freed (closed) in time."""

    buffer: SymmBuffer
    slot_bytes: int
    slots: int
    retired: bool = False


@dataclass
class _Place:
    """One slot's memory and who still needs it."""

    index: int
    segment: int
    offset: int
    generation: int = 0
    leased: bool = False
    readers: list[tuple[int, Ticket]] = field(default_factory=list)


class Slot:
    """One lease of one slot; it ends when the storage of ``tensor()`` dies, or with the Slot if nobody asked for it."""

    def __init__(self, pool: SlotPool, place: _Place, buffer: SymmBuffer, slot_bytes: int) -> None:
        self.index = place.index
        self.offset = place.offset
        self.generation = place.generation
        self.buffer = buffer
        self.nbytes = slot_bytes
        self.handle = place.segment << SEGMENT_BIT | place.offset
        self._pool = pool
        self._place = place
        self._tensor: Tensor | None = None

    def tensor(self) -> Tensor:
        """uint8 [nbytes] over the slot; its storage holds the lease. Handed out once: make views of it."""
        if self._tensor is None:
            raise RuntimeError(f"slot {self.index}: tensor() was called twice; its storage is the lease")
        tensor, self._tensor = self._tensor, None
        return tensor

    def read_until(self, ticket: Ticket, channel: int) -> None:
        """Keep the slot until every peer has reached ``ticket`` on ``channel``: they read from it until then.

        Call it while the tensor is alive.
        """
        self._pool._add_reader(self._place, self.generation, channel, ticket)

    @property
    def readers(self) -> list[tuple[int, Ticket]]:
        """(channel, ticket) pairs to be reached before the slot is used again."""
        return list(self._place.readers)


class SlotPool:
    """``slots`` slots of ``slot_bytes`` each (rounded up to 256 bytes) on every rank of the heap's group.

    Making the pool and ``grow`` are collective, everything else is local and may be called from any thread.
    ``leases=False`` is the negative control of tests: it hands out slot 0 whoever uses it.
    """

    def __init__(
        self, heap: Heap, slot_bytes: int, slots: int, label: str, *, growable: bool = False, leases: bool = True
    ) -> None:
        self.heap = heap
        self.label = label
        self.growable = growable
        self._leases = leases
        self._lock = threading.RLock()  # the garbage collector may drop a leased tensor inside any call
        self._released: deque[tuple[int, int]] = deque()  # (index, generation); appended without the lock
        self._segments: list[_Segment] = []
        self._places: list[_Place] = []
        self._peak = 0
        self._bases: Tensor | None = None  # int64 [segments, world]
        self._add_segment(slot_bytes, slots)

    @property
    def slot_bytes(self) -> int:
        """Bytes of the slots handed out now."""
        return self._segments[-1].slot_bytes

    @property
    def base_ptrs(self) -> Tensor:
        """int64 [world]: where the pool starts at every rank; a slot's address is this plus its handle (fixed size
        only)."""
        if len(self._segments) != 1:
            raise RuntimeError(f"pool '{self.label}' has grown: a handle alone does not place its slots")
        return self._segments[0].buffer.ptrs

    @property
    def last_handle(self) -> int:
        """The largest handle of a pool of fixed size."""
        return (self._segments[0].slots - 1) * self._segments[0].slot_bytes

    def acquire(self, phase: Phase | None = None) -> Slot | None:
        """A free slot, chosen locally; None if all are leased, also after one garbage collection.

        Prefers slots no peer reads; if there are only others, waits for the peers of the one freed first (and raises
        what ``Heap.wait`` raises, quoting ``phase``).
        """
        with self._lock:
            self._check_open()
            if not self._leases:
                return self._lease(self._places[0])
            place = self._choose(phase)
            if place is None:
                gc.collect()
                place = self._choose(phase)
            return None if place is None else self._lease(place)

    def grow(self, *, slots: int | None = None, slot_bytes: int | None = None) -> None:
        """Collective: from now on at least ``slots`` slots of at least ``slot_bytes`` bytes; unset means as now.

        More slots of the same size join the old ones. Larger slots replace them: old slots live until their tensors
        die, and a later ``grow`` frees an old segment when no rank uses it any more. Do not call it while a peer may
        still use a handle of a slot whose tensor is dead.
        """
        if not self.growable:
            raise RuntimeError(f"pool '{self.label}' has a fixed size: {self.describe()}")
        with self._lock:
            self._free_retired()
            size = self.slot_bytes if slot_bytes is None else max(self.slot_bytes, round_up(slot_bytes, ALIGNMENT))
            usable = self._usable()
            wanted = max(slots or 0, usable)
            if size > self.slot_bytes:
                for segment in self._segments:
                    segment.retired = True
                self._add_segment(size, wanted)
            elif wanted > usable:
                self._add_segment(size, wanted - usable)

    def close(self) -> None:
        """Collective: give the memory back to the heap. Tensors that still lease it stay readable on CPU heaps only."""
        with self._lock:
            for segment in self._segments:
                if not segment.buffer.closed:
                    self.heap.free(segment.buffer)
                segment.retired = True

    def stats(self) -> PoolStats:
        """The pool's use now."""
        with self._lock:
            self._drain()
            busy = [p for p in self._places if not self._segments[p.segment].retired and self._busy(p)]
            return PoolStats(self._usable(), len(busy), self._peak)

    def describe(self) -> str:
        """One sentence on the pool's use, for errors."""
        stats = self.stats()
        return (
            f"pool '{self.label}': {stats.in_use} of {stats.slots} slots of {self.slot_bytes} bytes in use "
            f"(at most {stats.peak} at once so far)"
        )

    def peer_view(self, rank: int, handle: int, byte_offset: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor [*shape] inside the slot that ``rank`` advertised as ``handle``, ``byte_offset`` bytes into it.

        Raises ValueError when it would leave the slot or the handle names no slot.
        """
        number, offset = handle >> SEGMENT_BIT, handle & ((1 << SEGMENT_BIT) - 1)
        segment = self._segments[number] if 0 <= number < len(self._segments) else None
        if segment is None or offset % segment.slot_bytes:
            raise ValueError(f"pool '{self.label}': handle {handle:#x} names no slot")
        nbytes = dtype.itemsize
        for extent in shape:
            nbytes *= extent
        if byte_offset < 0 or byte_offset + nbytes > segment.slot_bytes:
            raise ValueError(
                f"pool '{self.label}': bytes {byte_offset} to {byte_offset + nbytes} are outside "
                f"a slot of {segment.slot_bytes} bytes"
            )
        return segment.buffer.view(rank, offset + byte_offset, shape, dtype)

    def peer_ptrs(self, handles: Tensor) -> Tensor:
        """int64 [world] handles, rank r's at r → int64 [world] addresses in this process; on the handles' device."""
        self._check_open()
        if self._bases is None:
            self._bases = torch.stack([s.buffer.ptrs.to(handles.device) for s in self._segments])
        base = self._bases.gather(0, (handles >> SEGMENT_BIT).unsqueeze(0)).squeeze(0)
        return base + (handles & ((1 << SEGMENT_BIT) - 1))

    def _add_segment(self, slot_bytes: int, slots: int) -> None:
        if slot_bytes <= 0 or slots <= 0:
            raise ValueError(f"pool '{self.label}' needs slots of at least a byte, not {slots} of {slot_bytes} bytes")
        slot_bytes = round_up(slot_bytes, ALIGNMENT)
        buffer = self.heap.alloc(slot_bytes * slots, f"{self.label} ({slots} slots of {slot_bytes} bytes)")
        number = len(self._segments)
        self._segments.append(_Segment(buffer, slot_bytes, slots))
        first = len(self._places)
        self._places += [_Place(first + i, number, i * slot_bytes) for i in range(slots)]
        self._bases = None

    def _check_open(self) -> None:
        if self._segments[-1].buffer.closed:
            raise HeapClosed(f"pool '{self.label}' was used after it or its heap was closed")

    def _usable(self) -> int:
        return sum(s.slots for s in self._segments if not s.retired)

    def _drain(self) -> None:
        """Take in the releases that arrived since."""
        while self._released:
            index, generation = self._released.popleft()
            place = self._places[index]
            if place.generation == generation:
                place.leased = False

    def _busy(self, place: _Place) -> bool:
        """Whether the slot is leased or a peer still reads it; forgets readers that are done."""
        place.readers = [(c, t) for c, t in place.readers if not self.heap.poll(t, channel=c)]
        return place.leased or bool(place.readers)

    def _choose(self, phase: Phase | None) -> _Place | None:
        self._drain()
        unleased = [p for p in self._places if not p.leased and not self._segments[p.segment].retired]
        for place in unleased:
            if not self._busy(place):
                return place
        if not unleased:
            return None
        place = min(unleased, key=lambda p: p.generation)
        for channel, ticket in place.readers:
            self.heap.wait(ticket, channel=channel, phase=phase or Phase("reuse of a slot", f"pool '{self.label}'"))
        place.readers.clear()
        return place

    def _lease(self, place: _Place) -> Slot:
        segment = self._segments[place.segment]
        place.generation = next(_generations)
        place.leased = True
        slot = Slot(self, place, segment.buffer, segment.slot_bytes)
        slot._tensor = segment.buffer.owned(
            place.offset, segment.slot_bytes, _releaser(self._released, place.index, place.generation)
        )
        self._peak = max(self._peak, sum(p.leased or bool(p.readers) for p in self._places))
        return slot

    def _add_reader(self, place: _Place, generation: int, channel: int, ticket: Ticket) -> None:
        with self._lock:
            self._drain()
            if place.generation != generation or (not place.leased and self._leases):
                raise RuntimeError(f"slot {place.index}: read_until after its tensor died, when it may be in use again")
            place.readers.append((channel, ticket))

    def _free_retired(self) -> None:
        """Collective: free the retired segments that no rank uses, which only all ranks together know."""
        retired = [n for n, s in enumerate(self._segments) if s.retired and not s.buffer.closed]
        if not retired:
            return
        self._drain()
        used = [sum(self._busy(p) for p in self._places if p.segment == n) for n in retired]
        phase = Phase("grow", f"pool '{self.label}'")
        counts = self.heap.exchange(torch.tensor(used, device=self.heap.device), channel=INTERNAL, phase=phase)
        for number, count in zip(retired, counts.sum(0).tolist(), strict=True):
            if count == 0:
                self.heap.free(self._segments[number].buffer)
                self._bases = None


_generations = itertools.count(1)


def _releaser(released: deque[tuple[int, int]], index: int, generation: int) -> Callable[[], None]:
    """What a dying storage runs: it must not hold the pool, take a lock, or allocate much."""
    return lambda: released.append((index, generation))
