"""What of a step runs beside what: three streams of one device, ordered by events. The host waits for nothing.

Rows on their way to experts, experts, and rows on their way back each have a lane. Within a lane work runs in the order
in which it was given; across lanes it waits for the marks that are named. The caller's stream is the experts' lane, so
that products need no other memory than without waves.

Tensors that one lane made and another reads are held until the lanes have met again: the caching allocator hands memory
that was freed on a lane out to that lane, whose next work is behind the caller's stream, and so behind all readers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch

T = TypeVar("T")
GIVE_WAY = 20_000  # cycles, about 12 µs: longer than a GEMM takes to be there when what it waited for is
THERE, EXPERTS, BACK = "there", "experts", "back"
Spared = Callable[[bool], AbstractContextManager[None]]  # around a GEMM that is, or is not, the first of its wave
Mark = torch.cuda.Event | None


class Lanes:
    """The streams of one dispatcher; ``overlapped`` False puts everything on the caller's stream, in the same order.

    ``every``: all GEMMs of a wave leave multiprocessors free, else the first. ``two_ways``: rows may travel in both
    directions at once."""

    def __init__(self, device: torch.device, *, overlapped: bool, every: bool = True, two_ways: bool = True) -> None:
        self.device, self.every = device, every
        self.streams: dict[str, torch.cuda.Stream] = {}
        if overlapped and device.type == "cuda":
            there = torch.cuda.Stream(device, priority=-1)
            self.streams = {THERE: there, BACK: torch.cuda.Stream(device, priority=-1) if two_ways else there}

    @contextmanager
    def open(self, waves: int, spare: int = 0, *, overlapped: bool = True) -> Iterator[Pipeline]:
        """Lanes for ``waves`` waves behind the caller's stream; afterwards the caller's stream is behind the lanes.

        ``spare``: multiprocessors that expert GEMMs leave free. Their kernels are persistent, one program on each
        multiprocessor they are given: a program that has to wait for communication to leave its place would finish a
        whole GEMM time later. ``overlapped`` False, where nothing can run beside anything else: one stream."""
        streams = self.streams if overlapped else {}
        pipeline = Pipeline(self, waves, streams, spare if streams else 0)
        if not streams:
            yield pipeline
            return
        caller = torch.cuda.current_stream(self.device)
        for stream in streams.values():
            stream.wait_stream(caller)
        try:
            yield pipeline
        finally:
            for stream in streams.values():
                caller.wait_stream(stream)
            pipeline.held.clear()


class Pipeline:
    """The lanes during one step."""

    def __init__(self, lanes: Lanes, waves: int, streams: dict[str, torch.cuda.Stream], spare: int) -> None:
        self.lanes, self.waves, self.streams, self.spare = lanes, waves, streams, spare
        self.held: list[Any] = []

    def run(self, lane: str, work: Callable[[], T], after: Mark = None) -> tuple[T, Mark]:
        """Enqueue ``work`` on ``lane`` behind ``after``; gives what it returns, held, and the mark behind it."""
        if not self.streams:
            result = work()
            return result, None
        stream = self.streams.get(lane) or torch.cuda.current_stream(self.lanes.device)
        if after is not None:
            stream.wait_event(after)
        with torch.cuda.stream(stream):
            result = work()
            mark = torch.cuda.Event()
            mark.record(stream)
        self.held.append(result)
        return result, mark

    def hold(self, *tensors: Any) -> None:
        """Keep ``tensors`` until the lanes have met again."""
        if self.streams:
            self.held.extend(tensors)

    def give_way(self) -> None:
        """What is enqueued next on this lane starts after a GEMM that waits for the same mark, so that the GEMM's
        programs find their places free."""
        if self.streams:
            torch.cuda._sleep(GIVE_WAY)

    @contextmanager
    def spared(self, first: bool = True) -> Iterator[None]:
        """GEMMs that are enqueued inside leave multiprocessors to communication. ``first``: of their wave."""
        if not self.spare or not (first or self.lanes.every):
            yield
            return
        before = torch._C._get_sm_carveout_experimental()
        torch._C._set_sm_carveout_experimental(self.spare)
        try:
            yield
        finally:
            torch._C._set_sm_carveout_experimental(before)

    def beside_others(self, first: bool) -> AbstractContextManager[None]:
        """``spared`` for GEMMs beside which other waves' rows travel, if there are others."""
        return self.spared(first) if self.waves > 1 else nullcontext()


def drive(
    pipeline: Pipeline,
    there: Callable[[int], Any],
    experts: Callable[[int], Any],
    back: Callable[[int], Any],
    after_experts: Callable[[int, Mark], None] | None = None,
    meanwhile: Callable[[], Any] | None = None,
) -> None:
    """Run every wave through its three stages, each stage's waves in ascending order.

    The host gives a wave's experts before the next wave's rows, and what follows on their lane before its own rows
    travel back, so that GEMMs take their multiprocessors first. ``after_experts``: more work behind a wave's experts.
    ``meanwhile``: work of the experts' lane beside the first wave's rows on their way there."""
    waves = pipeline.waves
    arrived = [pipeline.run(THERE, lambda: there(0))[1]]
    if meanwhile is not None:
        pipeline.run(EXPERTS, meanwhile)
    for wave in range(waves):
        made = pipeline.run(EXPERTS, lambda wave=wave: experts(wave), arrived[wave])[1]  # type: ignore[misc]
        if wave + 1 < waves:
            arrived.append(pipeline.run(THERE, lambda wave=wave: there(wave + 1))[1])  # type: ignore[misc]
        if after_experts is not None:
            after_experts(wave, made)
        if wave + 1 < waves or after_experts is not None:
            pipeline.run(BACK, pipeline.give_way, made)
        pipeline.run(BACK, lambda wave=wave: back(wave), made)  # type: ignore[misc]
