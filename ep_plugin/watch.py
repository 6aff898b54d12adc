"""Bounded waits for the collectives of a process group, which by themselves name no rank, layer or phase.

The ranks of a group tell each other three things through the process group's store: which process each is, where each
has been waiting for a while, and why one of them stopped the group. A wait for a collective looks there, so it ends

* at once when a rank has stopped the group, or its process on this host has ended;
* when ranks that wait are found in different phases;
* after ``timeout_s`` otherwise, naming the ranks that have not come.

The store is asked by a thread of its own, because the process that serves it may be the one that is stuck.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import pickle
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import AllToAllOptions

from .heap.base import HeapAborted, HeapClosed, HeapTimeout, PeerDied, Phase
from .heap.region import Process

SLICE_S = 0.05  # between two looks at the peers; a collective that ends sooner costs none
SAY_AFTER_S = 0.5  # a wait this long is told to the peers (a quarter of the time-out, if that is less)
GRACE_S = 2.0  # what the others get to say where they are before those that have not are named
STORE_S = 2.0  # how long an answer of the store is waited for
GONE, CLOSED = "no longer running", "which has closed its dispatcher"
LATER_S = 2.0  # by how much the process group's own time-out comes after ours
_started: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
_watching: weakref.WeakSet[GroupWatch] = weakref.WeakSet()


def rank_names(group: dist.ProcessGroup | None) -> list[str]:
    """How errors call each rank: by its rank in the group, and by its global rank where that differs."""
    everyone = dist.get_process_group_ranks(group) if dist.is_initialized() else [0]
    return [f"rank {r}" if r == g else f"rank {r} (global rank {g})" for r, g in enumerate(everyone)]


@dataclass(frozen=True)
class _Who:
    """A process, and in which pid namespace its number means something."""

    process: Process
    namespace: str

    @staticmethod
    def own() -> _Who:
        try:
            return _Who(Process.own(), os.readlink("/proc/self/ns/pid"))
        except OSError:  # no Linux: nobody can look whether this process still runs
            return _Who(Process("", os.getpid(), 0), "")

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: bytes) -> _Who:
        fields = json.loads(text)
        return _Who(Process(**fields["process"]), fields["namespace"])


@dataclass(frozen=True)
class _Place:
    """Where a rank waits: the number of the collective, and its phase."""

    number: int
    phase: str


class GroupWatch:
    """Bounded waits for collectives over ``group`` (None: WORLD); every rank makes its own, collectively, and calls
    the same collectives through it in the same order.

    Raises ``HeapAborted`` when a rank has stopped the group, ``PeerDied`` when one has ended, ``HeapTimeout`` after
    ``timeout_s`` seconds; the last two stop the group first. After any of them every further call raises at once."""

    def __init__(self, group: dist.ProcessGroup | None, timeout_s: float) -> None:
        self._group = group if group is not None else dist.group.WORLD
        assert self._group is not None
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        self.timeout_s = timeout_s
        self._names = rank_names(group)
        self._number = 0  # collectives so far
        self._told: deque[str] = deque()  # keys of the last two gathers
        self._on_device: deque[tuple[int, Phase, torch.cuda.Event]] = deque()
        self._stopped = ""
        self._left = False
        self._closed: set[int] = set()
        self._lock = threading.Lock()
        self._places: dict[int, _Place] = {}
        self._who: dict[int, _Who] = {}
        self._look: threading.Thread | None = None
        self._me = _Who.own()
        _watching.add(self)
        store = dist.PrefixStore(f"ep_plugin/{self._group.group_name}", dist.distributed_c10d._get_default_store())
        # The ranks of a group make their watches in the same order, so those of one number belong together.
        self._store = dist.PrefixStore(str(store.add(f"watches/{self.rank}", 1) - 1), store)
        self._store.set(f"who/{self.rank}", self._me.to_json())

    # Collectives

    def gather(self, own: Any, phase: Phase) -> list[Any]:
        """Every rank's picklable ``own``, by rank; for the few things that the host tells, not for rows."""
        self.check_stopped(phase)
        name = f"gather/{self._number}"
        if len(self._told) > 1:  # who told something in the last gather has read all of the one before
            self._store.delete_key(self._told.popleft())
        self._told.append(f"{name}/{self.rank}")
        self._store.set(self._told[-1], pickle.dumps(own))  # type: ignore[arg-type]  # takes bytes as well
        keys = [f"{name}/{rank}" for rank in range(self.world)]
        if self._has_cpu:  # notices at once a peer that ends before it comes
            word = torch.zeros(self.world, dtype=torch.int64)
            self.exchange(word.clone(), word, [], [], phase)
        else:
            self._number += 1
        self._wait(lambda seconds: self._all_there(keys, seconds), self._number, phase)
        return [pickle.loads(self._store.get(key)) for key in keys]

    def exchange(self, out: Tensor, tensor: Tensor, received: list[int], sent: list[int], phase: Phase) -> None:
        """An all-to-all of ``tensor`` into ``out``, ``sent[r]`` rows to and ``received[r]`` from rank r (empty lists:
        equal parts).

        On CPU it is done on return. On GPUs it is enqueued, and ``settle`` waits for it."""
        self.check_stopped(phase)
        self._number += 1
        if tensor.is_cuda:
            dist.all_to_all_single(out, tensor, received or None, sent or None, group=self._group)
            self.enqueued(phase, counted=True)
            return
        options = AllToAllOptions()
        options.timeout = timedelta(seconds=self.timeout_s + LATER_S)  # or the process could not end before it
        assert self._group is not None
        try:
            work = self._group.alltoall_base(out, tensor, received, sent, options)
            self._wait(lambda seconds: _done(work, seconds), self._number, phase)
        except (HeapAborted, HeapTimeout):
            raise
        except RuntimeError as error:
            self._lost(error, self._number, phase)

    def enqueued(self, phase: Phase, *, counted: bool = False) -> None:
        """A collective was enqueued on the current stream; ``settle`` waits for it."""
        if not counted:
            self._number += 1
        event = torch.cuda.Event()
        event.record()
        while self._on_device and self._on_device[0][2].query():
            self._on_device.popleft()
        self._on_device.append((self._number, phase, event))

    def settle(self) -> None:
        """Wait until what was enqueued on the device is done, or say in which collective it is stuck."""
        while self._on_device:
            number, phase, event = self._on_device[0]
            self._wait(lambda seconds, event=event: _reached(event, seconds), number, phase)  # type: ignore[misc]
            self._on_device.popleft()

    def stop(self, phase: Phase, reason: str) -> None:
        """Tell the peers why this rank goes no further; the first reason stays. Never raises."""
        text = f"{self._names[self.rank]} stopped the group in {phase}: {reason}"
        self._stopped = self._stopped or text

        def tell() -> None:
            with contextlib.suppress(RuntimeError):
                self._store.compare_set("stopped", "", text[:2000])

        _within(STORE_S, tell)

    def leave(self) -> None:
        """This rank makes no more collectives: peers that still wait for it stop. Idempotent, never raises."""
        if self._left:
            return
        self._left = True
        self._on_device.clear()

        def tell() -> None:
            with contextlib.suppress(RuntimeError):
                self._store.set(f"left/{self.rank}", "1")

        _within(STORE_S, tell)

    # Waiting

    def _wait(self, done: Callable[[float], bool], number: int, phase: Phase) -> None:
        """Until ``done(seconds)``, which waits that long at most."""
        start = time.monotonic()
        said, gone_since = False, 0.0
        while not done(SLICE_S):
            self._look_around()
            self.check_stopped(phase)
            waited = time.monotonic() - start
            if not said and waited > min(SAY_AFTER_S, self.timeout_s / 4):
                said = True
                self._say(number, phase)
            gone = self._gone()
            gone_since = (gone_since or time.monotonic()) if gone else 0.0
            # What a peer sent before it ended may still arrive.
            if gone and time.monotonic() - gone_since > min(2.0, self.timeout_s / 4):
                self._give_up(PeerDied, phase, f"waited in vain for {self._describe(gone)}")
            self._raise_if_elsewhere(number, phase)
            if waited >= self.timeout_s:
                late = self._missing(number)
                what = self._describe(late) if late else "a collective that all ranks have come to"
                self._give_up(HeapTimeout, phase, f"waited {waited:.1f} s for {what}")

    def _lost(self, error: RuntimeError, number: int, phase: Phase) -> None:
        """The process group itself failed: find out why, and raise it."""
        self._say(number, phase)
        start = time.monotonic()
        while True:
            self._look_around()
            time.sleep(SLICE_S)
            self.check_stopped(phase)
            if gone := self._gone():
                self._give_up(PeerDied, phase, f"waited in vain for {self._describe(gone)}")
            self._raise_if_elsewhere(number, phase)
            if time.monotonic() - start > GRACE_S:
                break
        missing = self._missing(number)
        named = f"; not in it: {self._describe(missing)}" if missing else ""
        self._give_up(PeerDied, phase, f"the process group failed ({_what(error)}){named}")

    def _give_up(self, kind: type[HeapTimeout], phase: Phase, what: str) -> None:
        self.stop(phase, what)
        raise kind(f"{self._names[self.rank]} in {phase}: {what}")

    def check_stopped(self, phase: Phase) -> None:
        """Raise ``HeapAborted`` once the group is known to be stopped, ``HeapClosed`` after ``leave``."""
        if self._left:
            raise HeapClosed(f"the dispatcher was used after close(), in {phase}")
        if self._stopped:
            raise HeapAborted(f"{self._stopped} (seen by {self._names[self.rank]} in {phase})")

    def _raise_if_elsewhere(self, number: int, phase: Phase) -> None:
        with self._lock:
            places = dict(self._places)
        for rank, place in sorted(places.items()):
            if place.number == number and place.phase != str(phase):
                what = (
                    f"EP ranks disagree: {self._names[self.rank]} is in {phase}, {self._names[rank]} in {place.phase}"
                )
                self.stop(phase, what)
                raise RuntimeError(f"{what}. All ranks of an EP group must run the same layers in the same order")

    # The peers

    def _look_around(self) -> None:
        """Have a thread ask the store, unless the one before still does."""
        if self._look is None or not self._look.is_alive():
            self._look = _start(self._ask)

    def _ask(self) -> None:
        with contextlib.suppress(RuntimeError):
            if self._store.check(["stopped"]):
                self._stopped = self._stopped or self._store.get("stopped").decode(errors="replace")
            for rank in range(self.world):
                if rank == self.rank:
                    continue
                if rank not in self._who and self._store.check([f"who/{rank}"]):
                    who = _Who.from_json(self._store.get(f"who/{rank}"))
                    with self._lock:
                        self._who[rank] = who
                if self._store.check([f"left/{rank}"]):
                    self._closed.add(rank)
                if self._store.check([f"place/{rank}"]):
                    number, phase = json.loads(self._store.get(f"place/{rank}"))
                    with self._lock:
                        self._places[rank] = _Place(number, phase)

    def _say(self, number: int, phase: Phase) -> None:
        def tell() -> None:
            with contextlib.suppress(RuntimeError):
                self._store.set(f"place/{self.rank}", json.dumps([number, str(phase)]))

        _within(STORE_S, tell)

    def _all_there(self, keys: list[str], seconds: float) -> bool:
        there = [False]

        def ask() -> None:
            with contextlib.suppress(RuntimeError):
                there[0] = self._store.check(keys)

        _within(seconds, ask)
        if not there[0]:
            time.sleep(seconds / 5)
        return there[0]

    def _state(self, rank: int) -> str:
        """What the process of ``rank`` does, as far as this host can see."""
        with self._lock:
            who = self._who.get(rank)
        if who is None:
            return "unknown"
        if rank in self._closed:
            return CLOSED
        if not who.namespace or (who.process.boot, who.namespace) != (self._me.process.boot, self._me.namespace):
            return "on another host"
        letter = who.process.state()
        if letter is None:
            return GONE
        return "stopped by a signal" if letter in "Tt" else "running"

    def _gone(self) -> list[int]:
        return [rank for rank in range(self.world) if rank != self.rank and self._state(rank) in (GONE, CLOSED)]

    def _missing(self, number: int) -> list[int]:
        """Ranks that have not said that they are in collective ``number`` or past it."""
        with self._lock:
            places = dict(self._places)
        return [
            rank
            for rank in range(self.world)
            if rank != self.rank and (rank not in places or places[rank].number < number)
        ]

    def _describe(self, ranks: list[int]) -> str:
        """Names, process ids and states: "rank 1 (pid 4711, stopped by a signal), rank 3 (…)"."""

        def one(rank: int) -> str:
            state = self._state(rank)
            if state == "unknown":
                return f"{self._names[rank]} (which has not come at all)"
            return f"{self._names[rank]} (pid {self._who[rank].process.pid}, {state})"

        return ", ".join(map(one, ranks))

    @property
    def _has_cpu(self) -> bool:
        """Whether the group has a backend for CPU tensors."""
        assert self._group is not None
        try:
            return self._group._get_backend(torch.device("cpu")) is not None
        except RuntimeError:
            return False


def before_host_looks(device: torch.device) -> None:
    """To be called where the host is about to read values of ``device``, which may be behind a collective: waits for
    those that this process enqueued, each with its group's time-out, and raises what ``GroupWatch.settle`` does."""
    if device.type != "cpu":
        for watch in list(_watching):
            watch.settle()


def _done(work: Any, seconds: float) -> bool:
    """Whether ``work`` is done within ``seconds``; raises what it failed with."""
    try:
        work.wait(timedelta(seconds=seconds))
        return True
    except RuntimeError:
        if not work.is_completed():
            return False
    work.wait()  # it ended since, or failed: then this raises why
    return True


def _reached(event: torch.cuda.Event, seconds: float) -> bool:
    """Whether the device reaches ``event`` within ``seconds``."""
    end = time.monotonic() + seconds
    while not event.query():
        if time.monotonic() > end:
            return False
        time.sleep(2e-5)
    return True


def _within(seconds: float, call: Callable[[], None]) -> None:
    """Run ``call`` in a thread and go on after ``seconds`` at the latest."""
    _start(call).join(seconds)


def _start(call: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=call, daemon=True)
    _started.add(thread)
    thread.start()
    return thread


@atexit.register
def _finish() -> None:
    """Let the threads come back from the store: one that does so when the interpreter has begun to end is ended by
    Python inside C++ that must not be left, which aborts the process ("terminate called without an active
    exception")."""
    end = time.monotonic() + STORE_S
    for thread in list(_started):
        thread.join(max(0.0, end - time.monotonic()))


def _what(error: BaseException) -> str:
    """The message without torch's advice."""
    text = str(error).strip().partition("\n")[0].partition(". This ")[0]
    return text or type(error).__name__
