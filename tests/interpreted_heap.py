"""The GPU path of rowwise on CPU processes, for tests: Triton's interpreter, signals by its kernels, shared memory.

Set ``TRITON_INTERPRET=1`` before the first import. Streams do not exist here, so what a test shows is which rows go
where, not that anything overlaps."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from ep_plugin.heap import open_heap
from ep_plugin.heap.base import CHANNELS, SymmBuffer
from ep_plugin.heap.device import DeviceHeap, _Layout
from ep_plugin.kernels import sync_triton as sync


class InterpretedHeap(DeviceHeap):
    """Signals and mailboxes as on a GPU heap, in regions of the shm heap."""

    name = "shm"

    def __init__(self, timeout_s: float = 60.0) -> None:
        self.shm = open_heap("shm", None, torch.device("cpu"), timeout_s)
        self.group, self.device, self.timeout_s = None, torch.device("cpu"), timeout_s
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.status = torch.zeros(sync.STATUS_WORDS, dtype=torch.int64)
        self._phases, self._watches, self._places = {}, {}, {}
        self._closed = False
        self._lengths = [None] * (CHANNELS + 1)
        self._layout = _Layout(self.world)
        words = self._layout.words
        self._control = control = self.shm.alloc(words * 8, "control")
        self._ptrs = control.ptrs
        self._words = control.view(self.rank, 0, (words,), torch.int64)
        self._counters = torch.zeros((CHANNELS + 1, 2), dtype=torch.int64)
        self._expected = torch.zeros((CHANNELS + 1, 1), dtype=torch.int64)
        self._side: Any = Stream()
        self._signalling: Any = sync

    def alloc(self, nbytes: int, label: str) -> SymmBuffer:
        return self.shm.alloc(nbytes, label)

    def free(self, buffer: SymmBuffer) -> None:
        self.shm.free(buffer)

    def close(self) -> None:
        self._closed = True
        self.shm.close()

    def _nothing(self, *args: Any) -> Any:
        raise NotImplementedError("the shm heap has the memory")

    _open = _allocate = _peer = _release = _shut = _nothing


class Stream:
    """The one stream that there is."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def wait_stream(self, other: Any) -> None: ...
    def synchronize(self) -> None: ...


@contextlib.contextmanager
def without_streams() -> Iterator[None]:
    """torch.cuda's streams as ``Stream``, for code that runs on CPU tensors."""
    names = dict(Stream=Stream, current_stream=Stream, stream=contextlib.nullcontext, synchronize=lambda *_: None)
    names |= dict(set_stream=lambda _: None, is_current_stream_capturing=lambda: False)
    before = {name: getattr(torch.cuda, name) for name in names}
    try:
        for name, value in names.items():
            setattr(torch.cuda, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(torch.cuda, name, value)
