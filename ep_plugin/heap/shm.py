"""The CPU backend: shared memory of the processes of one host, signals by plain 8-byte stores.

Every rank owns one region per buffer and maps those of its peers. A control region per rank, made when the heap opens,
holds what peers write there: the abort word, one counter per (channel, peer) and the mailboxes.
"""

from __future__ import annotations

import ctypes
import functools
import json
import math
import mmap
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ep_plugin.heap import region
from ep_plugin.heap.base import (
    CHANNELS,
    INTERNAL,
    RECORD_MAX,
    Heap,
    HeapAborted,
    HeapClosed,
    HeapTimeout,
    PeerDied,
    Phase,
    SymmBuffer,
    Ticket,
    round_up,
)
from ep_plugin.heap.region import Offer, Process
from ep_plugin.watch import GroupWatch, rank_names

YIELDS = 50  # looks at the counters that only yield the core, before a wait sleeps between two looks
SLEEP_S = 50e-6
PEER_CHECK_S = 0.05  # how often a wait asks whether its late peers still run
WORD = 8  # bytes
LINE = 8  # words of a cache line: what different ranks write stays on different lines where it is cheap
TEXT_WORDS = 128  # one abort text, its length word included

_fence_lock = threading.Lock()


def _fence() -> None:
    """Order all earlier loads and stores of this thread before all later ones.

    Python has no fence. x86 keeps stores (and loads) in order by itself; elsewhere a lock's release orders what came
    before it, and the next acquire, which reads that release, orders what comes after.
    """
    with _fence_lock:
        pass
    with _fence_lock:
        pass


@functools.lru_cache(maxsize=64)
def _lease_type(nbytes: int) -> type[ctypes.Array]:
    """A ctypes array type whose instances can be weakly referenced: torch keeps the instance as the storage's owner."""
    return type("Lease", (ctypes.c_uint8 * nbytes,), {})


class ShmBuffer(SymmBuffer):
    """Maps of every rank's region. A map lives until the last tensor over it dies, also after ``close``."""

    def __init__(self, maps: list[mmap.mmap], rank: int, label: str) -> None:
        self.nbytes = len(maps[0])
        self.rank, self.world, self.label = rank, len(maps), label
        self.device = torch.device("cpu")
        self._maps = maps
        self.ptrs = torch.tensor([torch.frombuffer(m, dtype=torch.uint8).data_ptr() for m in maps])

    def _view(self, rank: int, offset: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        flat = torch.frombuffer(self._maps[rank], dtype=dtype, count=math.prod(shape), offset=offset)
        return flat.view(tuple(shape))

    def _owned(self, offset: int, nbytes: int, on_release: Callable[[], None]) -> Tensor:
        lease = _lease_type(nbytes).from_buffer(self._maps[self.rank], offset)
        weakref.finalize(lease, on_release).atexit = False
        return torch.frombuffer(lease, dtype=torch.uint8)

    def release(self) -> None:
        """Let go of the maps; tensors over them keep them."""
        self.closed = True
        self._maps = []
        self.ptrs = torch.zeros_like(self.ptrs)


class _Layout:
    """Word offsets inside a control region of ``world`` ranks."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.stride = round_up(world, LINE)
        self.words = self.mailbox(CHANNELS + 1, 0, 0)

    # The abort word is word 0: 1 + the rank whose text says why, 0 while all is well.
    def closed(self, source: int) -> int:
        return LINE + source

    def text(self, source: int) -> int:
        return LINE + self.stride + source * TEXT_WORDS

    def counter(self, channel: int, source: int) -> int:
        return self.text(self.world) + channel * self.stride + source

    def mailbox(self, channel: int, parity: int, source: int) -> int:
        """A line whose first word is the record's length, then the record."""
        start = self.counter(CHANNELS + 1, 0)
        return start + ((channel * 2 + parity) * self.world + source) * (LINE + RECORD_MAX)


@dataclass
class _Channel:
    """Our side of one channel: ``sent`` exchanges, and the words of the one not yet received."""

    posted: int = 0
    sent: int = 0
    pending: int | None = None


class ShmHeap(Heap):
    """Symmetric heap of the CPU processes of ``group`` on one host.

    Opening is collective over the group's own collectives; afterwards the heap needs the process group no more.
    """

    name = "shm"
    host_visible = True

    def __init__(self, group: dist.ProcessGroup | None, timeout_s: float) -> None:
        if timeout_s <= 0:
            raise ValueError(f"timeout_s={timeout_s} must be more than 0 seconds")
        if sys.platform != "linux":
            raise RuntimeError(f"heap 'shm' needs Linux (memfd and /proc), not {sys.platform}")
        joined = dist.is_initialized()
        self.group = group
        self.rank = dist.get_rank(group) if joined else 0
        self.world = dist.get_world_size(group) if joined else 1
        if self.rank < 0:
            raise ValueError("this process is not a member of the group whose heap it opens")
        self.device = torch.device("cpu")
        self.timeout_s = float(timeout_s)
        self._names = rank_names(group)
        # Of the group's collectives, until the heap has signals of its own.
        self._watch = GroupWatch(group, self.timeout_s) if self.world > 1 else None
        self._process = Process.own()
        self._channels = [_Channel() for _ in range(CHANNELS + 1)]
        self._buffers: weakref.WeakSet[ShmBuffer] = weakref.WeakSet()
        self._closed = False
        self._layout = _Layout(self.world)
        maps, self._peers = self._share(region.pages(self._layout.words * WORD), "control", self._gather_through_group)
        self._words = [memoryview(m).cast("B").cast("q") for m in maps]
        self._counters = [
            self._words[self.rank][self._layout.counter(c, 0) :][: self.world] for c in range(CHANNELS + 1)
        ]
        self._base = [int(torch.frombuffer(m, dtype=torch.uint8).data_ptr()) for m in maps]
        own = torch.frombuffer(maps[self.rank], dtype=torch.int64)
        first, size = self._layout.mailbox(0, 0, 0), self.world * (LINE + RECORD_MAX)
        self._mail = [
            [own[first + (c * 2 + p) * size :][:size].view(self.world, -1)[:, LINE:] for p in range(2)]
            for c in range(CHANNELS + 1)
        ]

    # Buffers

    def alloc(self, nbytes: int, label: str) -> SymmBuffer:
        self._check_open()
        maps, _ = self._share(region.pages(nbytes), label, self._gather_through_mail)
        buffer = ShmBuffer(maps, self.rank, label)
        self._buffers.add(buffer)
        return buffer

    def free(self, buffer: SymmBuffer) -> None:
        self._check_open()
        if not isinstance(buffer, ShmBuffer) or buffer not in self._buffers:
            raise ValueError(f"buffer '{buffer.label}' does not belong to this heap, or was freed before")
        self._buffers.discard(buffer)
        buffer.release()

    def _share(
        self, nbytes: int, label: str, gather: Callable[[dict[str, Any], Phase], list[dict[str, Any]]]
    ) -> tuple[list[mmap.mmap], list[Process]]:
        """Make our region, map everyone's, and agree that all ranks have: the maps and the processes by rank."""
        phase = Phase("alloc", f"buffer '{label}'")
        fd, offer = -1, Offer(self._process)
        maps: list[mmap.mmap] = []
        try:
            try:
                fd = region.create(nbytes, label)
                offer = Offer(self._process, fd, os.fstat(fd).st_ino, nbytes)
            except (OSError, ValueError) as error:
                offer = Offer(self._process, nbytes=nbytes, error=_sentence(error))
            offers = [Offer.from_dict(fields) for fields in gather(offer.to_dict(), phase)]
            self._raise_if_failed(label, [o.error for o in offers])
            if len({o.nbytes for o in offers}) > 1:
                asked = ", ".join(f"{name}: {o.nbytes}" for name, o in zip(self._names, offers, strict=True))
                raise RuntimeError(f"buffer '{label}': all ranks must ask for the same bytes, not {asked}")
            error_text = ""
            for peer, o in enumerate(offers):
                try:
                    maps.append(mmap.mmap(fd, nbytes) if peer == self.rank else region.attach(o, self._process))
                except OSError as error:
                    error_text = f"cannot map the region of {self._names[peer]}: {_sentence(error)}"
                    break
            # No peer needs our descriptor after this.
            self._raise_if_failed(label, [fields["error"] for fields in gather({"error": error_text}, phase)])
            return maps, [o.process for o in offers]
        except BaseException:
            for m in maps:
                m.close()
            raise
        finally:
            if fd >= 0:
                os.close(fd)

    def _raise_if_failed(self, label: str, errors: list[str]) -> None:
        bad = [f"{name}: {error}" for name, error in zip(self._names, errors, strict=True) if error]
        if bad:
            raise RuntimeError(f"the symmetric buffer '{label}' cannot be allocated. " + ". ".join(bad))

    def _gather_through_group(self, fields: dict[str, Any], phase: Phase) -> list[dict[str, Any]]:
        return [fields] if self._watch is None else self._watch.gather(fields, phase)

    def _gather_through_mail(self, fields: dict[str, Any], phase: Phase) -> list[dict[str, Any]]:
        fields = {**fields, "error": fields["error"][:2000]}
        text = json.dumps(fields).encode().ljust(RECORD_MAX * WORD)
        record = torch.frombuffer(bytearray(text), dtype=torch.int64)
        records = self.exchange(record, channel=INTERNAL, phase=phase)
        return [json.loads(bytes(row.view(torch.uint8).tolist())) for row in records]

    # Signals

    def post(self, *, channel: int, phase: Phase) -> Ticket:
        self._check_open(channel)
        state = self._channels[channel]
        state.posted += 1
        _fence()
        index = self._layout.counter(channel, self.rank)
        for words in self._words:
            words[index] = state.posted
        return state.posted

    def wait(self, ticket: Ticket, *, channel: int, phase: Phase) -> None:
        self._check_open(channel)
        ticket = int(ticket)
        counters = self._counters[channel]
        start = checked = time.monotonic()
        looks = 0
        while True:
            self._raise_if_aborted(phase)
            if min(counters) >= ticket:
                _fence()
                return
            looks += 1
            if looks <= YIELDS:
                os.sched_yield()
                continue
            now = time.monotonic()
            if now - checked >= PEER_CHECK_S:
                checked = now
                self._raise_if_gone(ticket, channel, phase)
            if now - start >= self.timeout_s and (late := self._late(ticket, channel)):
                self._give_up(HeapTimeout, phase, f"waited {now - start:.1f} s for {self._describe(late)}")
            time.sleep(SLEEP_S)

    def poll(self, ticket: Ticket, *, channel: int) -> bool:
        self._check_open(channel)
        if min(self._counters[channel]) < int(ticket):
            return False
        _fence()
        return True

    def barrier(self, phase: Phase) -> None:
        self.wait(self.post(channel=INTERNAL, phase=phase), channel=INTERNAL, phase=phase)

    def _late(self, ticket: int, channel: int) -> list[int]:
        return [peer for peer, count in enumerate(self._counters[channel]) if count < ticket]

    def _raise_if_gone(self, ticket: int, channel: int, phase: Phase) -> None:
        gone = [p for p in self._late(ticket, channel) if self._has_closed(p) or self._peers[p].state() is None]
        # A peer may have signalled between our look at its counter and its end.
        gone = [p for p in self._late(ticket, channel) if p in gone]
        if gone:
            self._give_up(PeerDied, phase, f"waited in vain for {self._describe(gone)}")

    def _has_closed(self, peer: int) -> bool:
        return self._words[self.rank][self._layout.closed(peer)] != 0

    def _describe(self, peers: list[int]) -> str:
        """Names, process ids and states: "rank 1 (pid 4711, stopped by a signal), rank 3 (…)"."""

        def state(peer: int) -> str:
            letter = self._peers[peer].state()
            if letter is None:
                return "no longer running"
            if self._has_closed(peer):
                return "which has closed its heap"
            return "stopped by a signal" if letter in "Tt" else "running"

        return ", ".join(f"{self._names[p]} (pid {self._peers[p].pid}, {state(p)})" for p in peers)

    # Mailboxes

    def send(self, record: Tensor, *, channel: int, phase: Phase) -> Ticket:
        self._check_open(channel)
        kind = (record.dtype, record.dim(), record.device.type)
        if kind != (torch.int64, 1, "cpu") or record.numel() > RECORD_MAX:
            got = f"{record.dtype} {list(record.shape)} on {record.device}"
            raise ValueError(f"a record is int64 [n ≤ {RECORD_MAX}] on cpu, not {got}")
        state = self._channels[channel]
        self._raise_if_aborted(phase)  # after which an exchange of before may still be open
        # A peer may still read the mailbox of two exchanges ago until we have received the one in between.
        if state.pending is not None:
            raise RuntimeError(f"channel {channel}: send before the exchange sent earlier was received")
        record = record.contiguous()
        length = record.numel()
        index = self._layout.mailbox(channel, state.sent % 2, self.rank)
        for words, base in zip(self._words, self._base, strict=True):
            words[index] = length
            ctypes.memmove(base + (index + LINE) * WORD, record.data_ptr(), length * WORD)
        state.pending = length
        return self.post(channel=channel, phase=phase)

    def receive(self, ticket: Ticket, *, channel: int, phase: Phase) -> Tensor:
        self._check_open(channel)
        state = self._channels[channel]
        if state.pending is None:
            raise RuntimeError(f"channel {channel}: receive without a send")
        self.wait(ticket, channel=channel, phase=phase)
        length, parity = state.pending, state.sent % 2
        index = [self._layout.mailbox(channel, parity, peer) for peer in range(self.world)]
        lengths = [self._words[self.rank][i] for i in index]
        if any(n != length for n in lengths):
            reason = f"channel {channel}: ranks sent records of {lengths} words, which must be equal"
            self.abort(phase, reason)
            raise RuntimeError(f"{phase}: {reason}")
        records = self._mail[channel][parity][:, :length].clone()
        state.sent += 1
        state.pending = None
        return records

    # Failure

    def abort(self, phase: Phase, reason: str) -> None:
        if self._closed or self._words[self.rank][0]:  # whoever was first tells the others
            return
        text = f"{self._names[self.rank]} stopped the group in {phase}: {reason}".encode()
        text = text[: (TEXT_WORDS - 1) * WORD]
        start = self._layout.text(self.rank)
        own_first = sorted(range(self.world), key=lambda rank: rank != self.rank)
        for words, base in ((self._words[rank], self._base[rank]) for rank in own_first):
            if words[0]:
                continue
            # Two ranks may get here at once: each has a text of its own, so the word always names a whole one.
            words[start] = len(text)
            ctypes.memmove(base + (start + 1) * WORD, text, len(text))
            _fence()
            words[0] = self.rank + 1

    def _raise_if_aborted(self, phase: Phase) -> None:
        own = self._words[self.rank]
        if own[0]:
            _fence()
            start = self._layout.text(own[0] - 1)
            text = ctypes.string_at(self._base[self.rank] + (start + 1) * WORD, own[start])
            raise HeapAborted(f"{text.decode(errors='ignore')} (seen by {self._names[self.rank]} in {phase})")

    def _give_up(self, kind: type[HeapTimeout], phase: Phase, what: str) -> None:
        self.abort(phase, what)
        raise kind(f"{self._names[self.rank]} in {phase}: {what}")

    def close(self) -> None:
        if self._closed:
            return
        for words in self._words:
            words[self._layout.closed(self.rank)] = 1
        self._closed = True
        for buffer in list(self._buffers):
            buffer.release()
        self._words, self._counters, self._mail, self._base = [], [], [], []

    def _check_open(self, channel: int = 0) -> None:
        if self._closed:
            raise HeapClosed("the symmetric heap was used after close()")
        if not 0 <= channel <= INTERNAL:
            raise ValueError(f"channel {channel} is not one of 0 to {CHANNELS - 1}")


def _sentence(error: OSError | ValueError) -> str:
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)
