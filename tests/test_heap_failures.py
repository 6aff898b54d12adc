"""What happens when a rank is late, dies, cannot allocate, or leaves with the heap open."""

import errno
import gc
import os
import re
import signal
import threading
import time
from dataclasses import replace

import pytest
import torch.distributed as dist

from ep_plugin.heap import HeapAborted, HeapTimeout, PeerDied, Phase, open_heap, region
from tests import heap_contract as contract
from tests.dist import run_fresh
from tests.forked import run_forked

PHASE = Phase("dispatch", "layers.3")
LONG = 60.0  # a bound that a test which waits it out would notice


def late_peer(rank, world):
    heap = open_heap("shm", None, "cpu", 1.0)
    heap.barrier(PHASE)
    if rank == 1:
        dist.barrier()
    start = time.monotonic()
    with pytest.raises((HeapTimeout, HeapAborted)) as caught:
        heap.barrier(PHASE)
    seconds = time.monotonic() - start
    if rank != 1:
        dist.barrier()
    return caught.type.__name__, str(caught.value), seconds


def test_a_late_peer_is_named_and_everyone_stops(pool):
    """Catches an unbounded wait, an error that does not say who is late, and a late rank that goes on alone."""
    results = pool.run(late_peer, 3)
    waited = [r for r in results if r[0] == "HeapTimeout"]
    assert waited and results[1][0] == "HeapAborted"
    for _, text, seconds in waited:
        assert 1.0 <= seconds < 20
        assert re.search(
            r"rank [02] in dispatch of layers\.3: waited \d+\.\d s for rank 1 \(pid \d+, running\)$", text
        ), text
    for kind, text, _ in results:
        if kind == "HeapAborted":
            assert re.search(
                r"rank [02] stopped the group in dispatch of layers\.3: waited \d+\.\d s for rank 1", text
            ), text


def die(rank, world, where):
    heap = open_heap("shm", None, "cpu", LONG)
    heap.barrier(PHASE)
    if rank == 2 and where == "alloc":
        create = region.create
        region.create = lambda *args: (create(*args), os.kill(os.getpid(), signal.SIGKILL))
    if rank == 2 and where == "barrier":
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    try:
        if where == "alloc":
            heap.alloc(1 << 20, "rows")
        else:
            heap.barrier(PHASE)
    except (PeerDied, HeapAborted) as error:
        print(f"{type(error).__name__} after {time.monotonic() - start:.3f} s: {error}", flush=True)
        os._exit(3)


@pytest.mark.parametrize("where", ["barrier", "alloc"])
def test_a_killed_peer_is_named_at_once(where):
    """Catches peers that wait out the whole time-out, or hang, for a rank that was killed."""
    exits = run_forked(die, 3, where)
    assert [exit.code for exit in exits] == [3, 3, -signal.SIGKILL], exits
    phase = {"barrier": "dispatch of layers.3", "alloc": "alloc of buffer 'rows'"}[where]
    texts = [exit.stdout for exit in exits[:2]]
    assert any(f"in {phase}: waited in vain for rank 2 (pid" in t and "no longer running" in t for t in texts), texts
    for text in texts:
        assert "rank 2 (pid" in text and float(text.split()[2]) < LONG / 3, text


def die_while_opening(rank, world):
    if rank == 2:
        region.create = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
    open_heap("shm", None, "cpu", LONG)


def test_a_peer_killed_while_the_heap_opens():
    """Catches ranks left in the rendezvous of a heap that one of them will never join."""
    exits = run_forked(die_while_opening, 3)
    assert [exit.code for exit in exits] == [1, 1, -signal.SIGKILL], exits
    for exit in exits[:2]:  # the one that looks later may find the other gone too
        assert re.search(r"in alloc of buffer 'control': waited in vain for .*rank 2 \(pid", exit.stderr), exit


def leave_with_the_heap_open(rank, world, bad):
    heap = open_heap("shm", None, "cpu", LONG)
    buffer = heap.alloc(4096, "rows")
    leave_with_the_heap_open.kept = (heap, buffer, buffer.owned(0, 512, contract.Released()))
    heap.barrier(PHASE)
    print(f"leaving {time.time()}", flush=True)
    if bad and rank == 1:
        raise ValueError("bad input on rank 1")
    if bad:
        heap.barrier(PHASE)


def test_processes_leave_with_the_heap_open():
    """Catches an exit that hangs in a destructor, after success or an exception, and peers left waiting for it."""
    exits = run_fresh(leave_with_the_heap_open, 2, False)
    assert [exit.code for exit in exits] == [0, 0] and not any(exit.stderr for exit in exits), exits
    assert time.time() - min(float(exit.stdout.split()[1]) for exit in exits) < LONG / 2
    exits = run_fresh(leave_with_the_heap_open, 2, True)
    assert [exit.code for exit in exits] == [1, 1] and not any(exit.hung for exit in exits), exits
    assert "PeerDied: rank 0 in dispatch of layers.3: waited in vain for rank 1" in exits[0].stderr, exits[0]
    assert exits[1].stderr.rstrip().endswith("ValueError: bad input on rank 1"), exits[1]
    assert time.time() - min(float(exit.stdout.split()[1]) for exit in exits) < LONG / 2


def closed_peer(rank, world):
    heap = open_heap("shm", None, "cpu", LONG)
    heap.barrier(PHASE)
    if rank == 1:
        return heap.close()
    start = time.monotonic()
    with pytest.raises(PeerDied, match=r"waited in vain for rank 1 \(pid \d+, which has closed its heap\)"):
        heap.barrier(PHASE)
    assert time.monotonic() - start < LONG / 3


def test_a_peer_that_closed_its_heap_is_not_waited_for(pool):
    """Catches a rank that waits out its time-out for one that has left the training loop."""
    pool.run(closed_peer, 2)


def interrupted(rank, world):
    heap = open_heap("shm", None, "cpu", LONG)
    heap.barrier(PHASE)
    if rank == 0:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        start = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            heap.wait(99, channel=0, phase=PHASE)
        assert time.monotonic() - start < LONG / 3
    heap.barrier(PHASE)


def test_a_wait_can_be_interrupted(pool):
    """Catches a wait that swallows Ctrl-C."""
    pool.run(interrupted, 2)


def fail_to_reserve(rank, world, bad, how):
    heap = open_heap("shm", None, "cpu", LONG)
    nbytes = {"other size": 8192, "no bytes": 0}.get(how, 4096) if rank == bad else 4096
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    with pytest.MonkeyPatch.context() as patch, pytest.raises(RuntimeError) as caught:
        if rank == bad and how == "no space":
            patch.setattr(os, "posix_fallocate", refuse(errno.ENOSPC))
        if rank == bad and how == "little memory":
            patch.setattr(region, "free_bytes", lambda: 1234)
        if rank == bad and how == "no descriptor":
            patch.setattr(region, "_memfd", refuse(errno.EMFILE))
        if rank == bad and how == "no map":
            patch.setattr(region, "attach", refuse(errno.EACCES))
        heap.alloc(nbytes, "rows")
    leaked = len(os.listdir("/proc/self/fd")) - before
    contract.rows_arrive_where_they_were_put(heap)
    return str(caught.value), leaked


def refuse(code):
    def call(*args):
        raise OSError(code, os.strerror(code))

    return call


@pytest.mark.parametrize(
    "how, message",
    [
        (
            "no space",
            r"rank 1: asked for 4096 bytes of shared memory, \d+ bytes are free \(No space left on device\): use",
        ),
        ("little memory", r"rank 1: asked for 4096 bytes of shared memory, 1234 bytes are free .* give the machine"),
        ("no descriptor", r"rank 1: Too many open files"),
        ("no map", r"rank 1: cannot map the region of rank 0: Permission denied"),
        ("other size", r"all ranks must ask for the same bytes, not rank 0: 4096, rank 1: 8192, rank 2: 4096"),
        ("no bytes", r"rank 1: asked for 0 bytes, which is not a positive multiple of 4096"),
    ],
)
def test_an_allocation_fails_on_all_ranks_or_none(pool, how, message):
    """Catches a rank that raises alone and leaves its peers waiting, descriptors left open, and a useless heap."""
    for text, leaked in pool.run(fail_to_reserve, 3, 1, how):
        assert "'rows'" in text and re.search(message, text), text
        assert leaked == 0


def open_without_memory(rank, world):
    with pytest.MonkeyPatch.context() as patch, pytest.raises(RuntimeError) as caught:
        if rank == 0:
            patch.setattr(os, "posix_fallocate", refuse(errno.ENOSPC))
        open_heap("shm", None, "cpu", LONG)
    contract.rows_arrive_where_they_were_put(open_heap("shm", None, "cpu", LONG))
    return str(caught.value)


def test_opening_fails_on_all_ranks_or_none(pool):
    """Catches ranks that wait for the control region of one that has none."""
    for text in pool.run(open_without_memory, 3):
        assert re.search(r"'control' cannot be allocated\. rank 0: asked for \d+ bytes of shared memory", text), text


def test_free_memory_is_the_least_of_host_and_cgroups(monkeypatch, tmp_path):
    """Catches a container whose limit is not seen: reserving past it has the kernel kill the rank."""
    host = region.free_bytes()
    assert 0 < host < 1 << 50
    inner, outer = tmp_path / "inner", tmp_path / "outer"
    for folder, limit, used, cache in ((inner, "max", 1, 0), (outer, str(1 << 20), 700_000, 100_000)):
        folder.mkdir()
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text(f"{used}\n")
        (folder / "memory.stat").write_text(f"anon 5\ninactive_file {cache}\nactive_file 7\n")
    monkeypatch.setattr(region, "_memory_cgroups", lambda: [inner])
    assert abs(region.free_bytes() - host) < host / 2
    monkeypatch.setattr(region, "_memory_cgroups", lambda: [inner, tmp_path / "absent", outer])
    assert region.free_bytes() == (1 << 20) - 600_000
    (outer / "memory.current").write_text(f"{2 << 20}\n")
    assert region.free_bytes() == 0


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(inode=1), "not its shared memory: all ranks must run as one user in one pid namespace"),
        (dict(fd=987654), r"/proc/\d+/fd/987654 is not its shared memory.*\(No such file or directory\)"),
        (dict(nbytes=8192), "not its shared memory"),
        (dict(process=region.Process("another boot", 1, 1)), "another host"),
    ],
)
def test_memory_of_another_process_is_not_mapped(change, message):
    """Catches a rank in another pid namespace or host whose process id means another process here."""
    me = region.Process.own()
    fd = region.create(4096, "rows")
    try:
        offer = region.Offer(me, fd, os.fstat(fd).st_ino, 4096)
        region.attach(offer, me)[0] = 5
        assert os.pread(fd, 1, 0) == b"\5"
        with pytest.raises(OSError) as caught:
            region.attach(replace(offer, **change), me)
        assert re.search(message, str(caught.value))
    finally:
        os.close(fd)


def test_a_region_cannot_be_shortened():
    """Catches a peer that could end this process with SIGBUS by truncating the shared file."""
    fd = region.create(8192, "rows")
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 4096)
    os.close(fd)


def test_a_zombie_counts_as_gone():
    """Catches a death test by signal 0 alone, which a dead child of the launcher passes until it is waited for."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(write)
        os.read(read, 1)
        os._exit(0)
    os.close(read)
    process = region.Process("", child, region._stat(child)[1])
    assert process.state() in "RSD"
    assert region.Process("", child, process.started + 1).state() is None
    os.close(write)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    os.kill(child, 0)
    assert process.state() is None
    os.waitpid(child, 0)
    assert process.state() is None
