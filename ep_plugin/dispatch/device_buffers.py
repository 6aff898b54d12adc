"""Parts of the GPU path of rowwise: scratch regions, chunks that cross behind signals, launch shapes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..config import LaunchConfig
from ..heap import Phase
from ..heap.device import DeviceHeap
from ..kernels.fan_out_triton import FAN_OUT
from ..kernels.peers import Peers
from ..kernels.put_triton import PUT, UNIQUE
from ..kernels.reduce_triton import REDUCE, SUM
from ..kernels.sync_triton import ChunkSignal
from ..kernels.triton_common import Launch
from .layout import Region


@dataclass(frozen=True)
class Launches:
    """The launch of each kernel that moves rows; ``put``: a row per route, ``unique``: one per rank that it names."""

    put: Launch
    unique: Launch
    fan_out: Launch
    reduce: Launch
    sum: Launch

    @staticmethod
    def of(config: LaunchConfig) -> Launches:
        def launch(default: Launch, programs: int) -> Launch:
            return replace(default, programs=programs) if programs else default

        return Launches(
            put=launch(PUT, config.put),
            unique=launch(UNIQUE, config.put),
            fan_out=launch(FAN_OUT, config.fan_out),
            reduce=launch(REDUCE, config.reduce),
            sum=launch(SUM, config.sum),
        )


class Scratch:
    """One symmetric region at the same place on all ranks, written by peers (or read by them) and used at once.

    ``free`` is the ticket of the signal by which every owner says that its region may be written again.
    """

    def __init__(self, heap: DeviceHeap, layout: Region, channel: int, label: str) -> None:
        self.heap, self.layout, self.channel = heap, layout, channel
        self.buffer = heap.alloc(layout.nbytes, label)
        self.free = torch.zeros(1, dtype=torch.int64, device=heap.device)
        self._parts: dict[str, Tensor] = {}
        self._peers = {part.name: Peers(self.buffer.ptrs, offset=part.offset) for part in layout}

    def local(self, name: str) -> Tensor:
        """The own region's part ``name``."""
        if name not in self._parts:
            part = self.layout[name]
            self._parts[name] = self.buffer.view(self.heap.rank, part.offset, part.shape, part.dtype)
        return self._parts[name]

    def peers(self, name: str) -> Peers:
        """Every rank's part ``name``."""
        return self._peers[name]

    def claim(self, phase: Phase) -> None:
        """Wait until every owner has read what was there."""
        self.heap.wait(self.free, channel=self.channel, phase=phase)

    def done(self, phase: Phase) -> None:
        """Say that this rank's region has been read (and that this rank has read its peers')."""
        self.heap.post(channel=self.channel, phase=phase, ticket=self.free)


# Bytes on the link that are worth a signal and a kernel of their own, on the way to experts and on the way back.
PART_THERE, PART_BACK = 32 << 20, 16 << 20


def parts_of(nbytes: int, part: int, most: int) -> int:
    """Chunks of a batch of ``nbytes``: of ``part`` bytes or more each, ``most`` at most."""
    return max(1, min(most, nbytes // part))


class Chunks:
    """A batch cut by token index into ``count`` parts, the same on all ranks, each with a signal of its own on
    ``channel``.

    ``signal`` makes the kernel that sends them signal every part, also empty ones, so the one to wait for is known
    without the sender's stream."""

    def __init__(self, heap: DeviceHeap, channel: int, count: int, max_tokens: int) -> None:
        self.heap, self.channel = heap, channel
        arrivals = torch.zeros(2 * count, dtype=torch.int32, device=heap.device)
        self.signal = ChunkSignal(count, max_tokens, heap.counter(channel), heap.signals(channel), arrivals)
        self.ranges = self.signal.parts
        self.steps = torch.arange(1, count + 1, dtype=torch.int64, device=heap.device)
        self.tickets = torch.zeros_like(self.steps)

    def begin(self) -> None:
        """A new operation: the next ``count`` signals of the channel, which the heap's users share, are its own."""
        expected = self.heap.expected(self.channel)
        torch.add(expected, self.steps, out=self.tickets)
        expected += len(self.ranges)

    def arrived(self, phase: Phase) -> Iterator[tuple[int, int]]:
        """Token ranges, each after every rank has signalled it."""
        for i, token_range in enumerate(self.ranges):
            self.heap.wait(self.tickets[i : i + 1], channel=self.channel, phase=phase)
            yield token_range
