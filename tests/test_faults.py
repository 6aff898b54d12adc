"""A rank that is killed, stopped or late in any phase of a step: every other rank ends with an error that names the
rank, the layer and the phase, within one time-out for the whole model, and leaves nothing behind.

Legend: T tokens of a rank, K routes per token, E experts, D hidden size.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ep_plugin.dispatch import Dispatcher
from ep_plugin.heap import HeapAborted, HeapTimeout, Phase, region
from ep_plugin.layer import moe_step
from ep_plugin.watch import GroupWatch, _done
from tests.dist import Exit, run_fresh
from tests.forked import run_forked
from tests.moe import PATHS, Problem, make_inputs

WORLD, BAD = 3, 2
PROBLEM = Problem((4, 3, 5), num_experts=6, top_k=2, hidden=8, dtype=torch.float32)
LAYERS = 3
PHASES = ("plan", "dispatch", "combine", "combine backward", "dispatch backward")
LONG = 60.0  # a time-out that a test which waits it out would notice
PROMPT_S = 15.0


def strike(dispatcher: Dispatcher, phase: str, how: signal.Signals) -> None:
    """Send this process ``how`` in the middle of ``phase`` of layer 1: when it tells its peers something there."""
    watch = getattr(dispatcher, "watch", None)
    teller, names = (watch, ("exchange",)) if watch is not None else (dispatcher.heap, ("send", "post"))

    def struck(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            at = kwargs["phase"] if "phase" in kwargs else args[-1]
            if (at.name, at.layer) == (phase, "layers.1"):
                os.kill(os.getpid(), how)
            return call(*args, **kwargs)

        return wrapped

    for name in names:
        setattr(teller, name, struck(getattr(teller, name)))


def train(dispatcher: Dispatcher, rank: int, world: int) -> None:
    """One step of ``LAYERS`` layers, forward and backward."""
    mine = make_inputs(PROBLEM)[rank]
    x = mine.x.clone().requires_grad_()
    for layer in range(LAYERS):
        x = x + moe_step(dispatcher, x, mine.idx, mine.weight, lambda d, _: d.rows * 2, layer=f"layers.{layer}")
    x.sum().backward()


def struck_rank(rank: int, world: int, path: str, phase: str, how: signal.Signals, timeout_s: float) -> None:
    """Trains until rank BAD is struck; prints the error, how long it took, and how long the next step took to fail."""
    dispatcher = PROBLEM.dispatcher(path, timeout_s=timeout_s)
    train(dispatcher, rank, world)
    if rank == BAD:
        strike(dispatcher, phase, how)
    start = time.monotonic()
    try:
        train(dispatcher, rank, world)
    except (HeapAborted, HeapTimeout) as error:
        seconds = time.monotonic() - start
        again = time.monotonic()
        try:
            train(dispatcher, rank, world)
        except (HeapAborted, HeapTimeout):
            again = time.monotonic() - again
        print(f"{seconds:.3f} {again:.3f} {type(error).__name__}: {error}", flush=True)
        os._exit(3)


def named_by_all(exits: list[Exit], phase: str, words: str, within: float) -> None:
    """Every other rank's error names the bad rank, the layer and the phase, and came ``within`` seconds."""
    shm = [name for name in os.listdir("/dev/shm") if name.startswith("ep")]
    assert not shm, shm
    for rank in range(WORLD):
        if rank == BAD:
            continue
        assert exits[rank].code == 3 and not exits[rank].hung, (rank, exits[rank])
        seconds, again, text = exits[rank].stdout.split(" ", 2)
        assert re.search(rf"{phase} of layers\.1.*rank {BAD} \(pid \d+, {words}\)", text), text
        assert float(seconds) < within and float(again) < 1.0, (rank, seconds, again)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("path", PATHS)
def test_a_rank_killed_in_any_phase_is_named_by_all_others(path, phase):
    """Fault: ranks that wait out the time-out, hang, or stop with an error about a connection, for a rank that was
    killed in the middle of a step."""
    exits = run_forked(struck_rank, WORLD, path, phase, signal.SIGKILL, LONG)
    assert exits[BAD].code == -signal.SIGKILL
    named_by_all(exits, phase, "no longer running", PROMPT_S)


@pytest.mark.parametrize("phase", ["dispatch", "combine backward"])
@pytest.mark.parametrize("path", PATHS)
def test_a_rank_that_stops_ends_the_model_within_one_timeout(path, phase):
    """Fault: a wait without a bound, or one bound for every layer that is left."""
    exits = run_forked(struck_rank, WORLD, path, phase, signal.SIGSTOP, 1.0)
    assert not any(exit.hung for exit in exits)
    named_by_all(exits, phase, "stopped by a signal", 1.0 + 4.0)


def gathers(rank: int, world: int) -> list[int]:
    watch, store = GroupWatch(None, LONG), dist.distributed_c10d._get_default_store()
    keys = []
    for number in range(8):
        time.sleep(0.02 * ((rank + number) % 2))
        assert watch.gather((rank, number), Phase("gather")) == [(r, number) for r in range(world)]
        if number in (3, 7):
            dist.barrier()
            keys.append(store.num_keys())
            dist.barrier()
    return keys


def test_what_is_told_is_forgotten(pool):
    """Fault: a long run fills the store; a rank forgets what a slower one has not read."""
    assert all(early == late for early, late in pool.run(gathers, 3))


def killed_in_build(rank: int, world: int, path: str, where: str) -> None:
    if rank == BAD:
        call = {"agreement": (GroupWatch, "gather"), "heap": (region, "create")}[where]
        setattr(*call, lambda *args: os.kill(os.getpid(), signal.SIGKILL))
    start = time.monotonic()
    try:
        PROBLEM.dispatcher(path, timeout_s=LONG)
    except (HeapAborted, HeapTimeout) as error:
        print(f"{time.monotonic() - start:.3f} {error}", flush=True)
        os._exit(3)


@pytest.mark.parametrize(
    ("path", "where", "phase"),
    [
        ("block", "agreement", "build of dispatcher 'block'"),
        ("dedup", "agreement", "build of dispatcher 'rowwise'"),
        ("route", "heap", "alloc of buffer 'control'"),
    ],
)
def test_a_rank_killed_while_a_dispatcher_is_built_is_named(path, where, phase):
    """Fault: the others wait for the process group's time-out, minutes later, and do not say for whom."""
    exits = run_forked(killed_in_build, WORLD, path, where)
    for rank in (0, 1):
        assert exits[rank].code == 3, exits[rank]
        seconds, text = exits[rank].stdout.split(" ", 1)
        assert re.search(rf"{phase}.*rank {BAD} \(pid \d+, no longer running\)", text), text
        assert float(seconds) < PROMPT_S


def never_comes(rank: int, world: int) -> None:
    if rank == BAD:
        time.sleep(4.0)
        os._exit(0)
    try:
        PROBLEM.dispatcher("block", timeout_s=1.0)
    except (HeapAborted, HeapTimeout) as error:
        print(error, flush=True)
        os._exit(3)


def test_a_rank_that_never_builds_is_named():
    """Fault: a dispatcher that only some ranks build waits for the others without a bound."""
    exits = run_forked(never_comes, WORLD)
    for rank in (0, 1):
        assert exits[rank].code == 3
        assert re.search(rf"build of .*waited 1\.\d s for rank {BAD} \(which has not come at all\)", exits[rank].stdout)


def interrupted(rank: int, world: int, path: str) -> None:
    """Ctrl-C on rank BAD while it waits for the others, who then come."""
    dispatcher = PROBLEM.dispatcher(path, timeout_s=LONG)
    train(dispatcher, rank, world)
    if rank != BAD:
        time.sleep(1.0)
    else:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        train(dispatcher, rank, world)
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        os._exit(3)


@pytest.mark.parametrize("path", PATHS)
def test_an_interrupted_rank_tells_the_others(path):
    """Fault: Ctrl-C in a wait is swallowed, or leaves the peers to wait."""
    exits = run_forked(interrupted, WORLD, path)
    assert exits[BAD].stdout.startswith("KeyboardInterrupt"), exits[BAD]
    for rank in (0, 1):
        assert re.search(rf"rank {BAD} stopped the group in plan of layers\.0: KeyboardInterrupt", exits[rank].stdout)


def leave_late(rank: int, world: int) -> None:
    dispatcher = PROBLEM.dispatcher("block", timeout_s=1.0)
    if rank == BAD:
        print(os.getpid(), flush=True)
        os.kill(os.getpid(), signal.SIGSTOP)
    train(dispatcher, rank, world)


@pytest.mark.slow
def test_a_process_that_timed_out_also_exits():
    """Fault: the error is raised, but the interpreter's exit waits for the collective that never ends."""
    exits = run_fresh(leave_late, WORLD, timeout=12.0)
    for rank in (0, 1):
        assert exits[rank].code in (1, -signal.SIGABRT) and not exits[rank].hung, exits[rank]
        assert re.search(rf"in plan of layers\.0.* for rank {BAD} \(pid \d+, stopped by a signal\)", exits[rank].stderr)


class SlowStore:
    """A store whose answers take a moment, most of it in C++."""

    def __init__(self, store: Any) -> None:
        self.store = store

    def check(self, keys: list[str]) -> bool:
        end = time.monotonic() + 0.1
        while time.monotonic() < end:
            self.store.check(["never"] * 50)
        return False


def leave_while_asking(rank: int, world: int) -> None:
    watch = GroupWatch(None, LONG)
    dist.barrier()
    watch._store = SlowStore(watch._store)
    watch._look_around()
    raise SystemExit(3)


@pytest.mark.slow
def test_a_process_that_ends_while_it_asks_the_store_is_not_aborted():
    """Fault: a thread comes back from the store when the interpreter has begun to end: "terminate called without an
    active exception"."""
    assert [exit.code for exit in run_fresh(leave_while_asking, 3)] == [3, 3, 3]


def orphans() -> set[str]:
    """Python processes whose parent is init and that hold memory of ours."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            parent = (process / "stat").read_text().rpartition(")")[2].split()[1]
            if parent == "1" and "memfd:ep-" in (process / "maps").read_text():
                found.add(process.name)
        except OSError:
            continue
    return found


def goes_well(rank: int, world: int, path: str) -> None:
    dispatcher = PROBLEM.dispatcher(path)
    train(dispatcher, rank, world)
    stats = dispatcher.stats()
    print(stats.get("slots_in_use", 0), flush=True)


def test_after_all_of_these_the_next_run_starts_clean():
    """Fault: memory, processes or leases that a failed run leaves to the next one."""
    before = orphans()
    run_forked(struck_rank, WORLD, "dedup", "combine", signal.SIGKILL, LONG)
    assert orphans() <= before
    for path in PATHS:
        exits = run_forked(goes_well, WORLD, path)
        assert [(exit.code, exit.stdout.strip()) for exit in exits] == [(0, "0")] * WORLD, exits


class NeverReached:
    """A device event that stays ahead of the device."""

    def query(self) -> bool:
        return False


def stuck_on_the_device(rank: int, world: int) -> str:
    """What block's ``check`` says on GPUs where an enqueued collective does not end; the last rank has not come."""
    dispatcher = PROBLEM.dispatcher("block", timeout_s=1.0)
    if rank == BAD:
        time.sleep(2.5)
        return ""
    dispatcher.watch._on_device.append((dispatcher.watch._number + 1, Phase("combine", "layers.1"), NeverReached()))
    with pytest.raises((HeapTimeout, HeapAborted)) as caught:
        dispatcher.check()
    return str(caught.value)


def test_a_collective_that_hangs_on_the_device_is_named(pool):
    """Fault: on GPUs, where the host does not wait, a check before the optimizer step that passes or hangs."""
    for text in pool.run(stuck_on_the_device, WORLD)[:BAD]:
        assert re.search(rf"in combine of layers\.1: waited 1\.\d s for rank {BAD} \(pid \d+, running\)", text), text


class EndsLate:
    """A collective that ends between a wait that gave up and the question whether it has ended."""

    def __init__(self, error: str = "") -> None:
        self.error, self.waits = error, 0

    def wait(self, timeout: object = None) -> None:
        self.waits += 1
        if self.waits == 1:
            raise RuntimeError("Operation timed out!")
        if self.error:
            raise RuntimeError(self.error)

    def is_completed(self) -> bool:
        return True


def test_a_collective_that_ends_just_after_a_look_has_not_failed():
    """Fault (found by the fuzzer): a collective is taken for a failed one because it ended between two questions."""
    assert _done(EndsLate(), 0.05)
    with pytest.raises(RuntimeError, match="Connection closed"):
        _done(EndsLate("Connection closed by peer"), 0.05)
