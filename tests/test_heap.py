"""The heap contract on every backend that runs without a GPU, and the order of reuse with its negative controls."""

import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ep_plugin.heap import Phase, open_heap
from ep_plugin.heap.shm import ShmHeap
from tests import heap_contract as contract

BACKENDS = ("shm",)


def check(rank, world, backend, names):
    for name in names:
        heap = open_heap(backend, None, "cpu", 30)
        getattr(contract, name)(heap)
        heap.close()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("world", [1, 2, 4])
def test_contract(pool, backend, world):
    """Each function of the contract names its faults; every one gets a heap of its own."""
    names = [fn.__name__ for fn in contract.CHECKS + contract.LAST]
    if world == 1:
        names.remove("a_ticket_is_reached_when_the_last_peer_posts")
    pool.run(check, world, backend, names)


def check_on_one_heap(rank, world, backend):
    heap = open_heap(backend, None, "cpu", 30)
    for fn in contract.CHECKS * 2:
        fn(heap)


@pytest.mark.parametrize("backend", BACKENDS)
def test_contract_in_sequence(pool, backend):
    """Catches state that one use of a heap leaves for the next (counters, parities, mailboxes, leases)."""
    pool.run(check_on_one_heap, 3, backend)


def leave_out_waits(heap, channels):
    """Negative control: waits on these channels return at once."""
    wait = heap.wait
    heap.wait = lambda ticket, *, channel, phase: (
        None if channel in channels else wait(ticket, channel=channel, phase=phase)
    )


def reuse(rank, world, backend, unwaited):
    heap = open_heap(backend, None, "cpu", 30)
    leave_out_waits(heap, unwaited)
    return contract.reuse_in_rounds(heap)


@pytest.mark.parametrize("backend", BACKENDS)
def test_reuse_is_ordered_with_a_late_rank(pool, backend):
    """Catches a wait that returns before a late peer's rows are there, or overwrites what a peer still reads."""
    assert pool.run(reuse, 4, backend, ()) == [(0, 0)] * 4


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("unwaited, kind", [((2, 3), 0), ((3,), 1)])
def test_reuse_without_waits_is_caught(pool, backend, unwaited, kind):
    """Negative control: with waits that return at once the rounds must go wrong, or the test above proves nothing."""
    assert sum(result[kind] for result in pool.run(reuse, 4, backend, unwaited)) > 0


def read_slots(rank, world, backend, control):
    heap = open_heap(backend, None, "cpu", 30)
    if control:
        heap.poll = lambda ticket, *, channel: True
    return contract.slots_wait_for_their_readers(heap)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("control", [False, True])
def test_a_slot_waits_for_its_readers(pool, backend, control):
    """Catches a slot handed out while a peer still GETs from it; the control skips the look at the readers' signals."""
    wrong = sum(pool.run(read_slots, 3, backend, control))
    assert (wrong > 0) == control, wrong


def train_without_leases(rank, world, backend, leases):
    return contract.layer_gradients(open_heap(backend, None, "cpu", 30), leases=leases)


@pytest.mark.parametrize("backend", BACKENDS)
def test_leases_keep_what_backward_reads(pool, backend):
    """Catches a slot that is reused before its layer's wgrad; without leases the first two layers must be wrong."""
    want = [420.0, 280.0, 168.0]
    assert pool.run(train_without_leases, 2, backend, True) == [want] * 2
    for got in pool.run(train_without_leases, 2, backend, False):
        assert got[0] != want[0] and got[1] != want[1] and got[2] == want[2]


def put_into_a_stopped_peer(rank, world):
    heap = open_heap("shm", None, "cpu", 30)
    buffer = heap.alloc(4096, "rows")
    pid = int(heap.exchange(torch.tensor([os.getpid()]), channel=0, phase=Phase("map"))[1, 0])
    mine = buffer.view(rank, 0, (512,), torch.int64)
    if rank == 0:
        os.kill(pid, signal.SIGSTOP)
        try:
            while "T (stopped)" not in Path(f"/proc/{pid}/status").read_text():
                time.sleep(0.001)
            theirs = buffer.view(1, 0, (512,), torch.int64)
            before = int(theirs.abs().sum())
            theirs.fill_(11)
            ticket = heap.post(channel=1, phase=Phase("put"))
            stopped = "T (stopped)" in Path(f"/proc/{pid}/status").read_text()
        finally:
            os.kill(pid, signal.SIGCONT)
        heap.wait(ticket, channel=1, phase=Phase("put"))
        return before, stopped
    while int(mine[0]) == 0:
        time.sleep(0.001)
    row = mine.clone()
    heap.wait(heap.post(channel=1, phase=Phase("put")), channel=1, phase=Phase("put"))
    return row.unique().tolist()


def test_a_put_needs_no_help_from_the_peer(pool):
    """Catches two-sided transport: the PUT and its signal complete while the receiving process cannot run."""
    assert pool.run(put_into_a_stopped_peer, 2) == [(0, True), [11]]


def subgroup_then_world(rank, world):
    pair = dist.new_group([0, 1])
    sums = []
    for group in [pair] * (rank < 2) + [None]:
        heap = open_heap("shm", group, "cpu", 30)
        contract.rows_arrive_where_they_were_put(heap)
        sums.append(int(heap.exchange(torch.tensor([rank]), channel=0, phase=Phase("sum")).sum()))
    if rank == 2:
        with pytest.raises(ValueError, match="not a member"):
            open_heap("shm", pair, "cpu", 30)
    return sums


def test_a_heap_of_some_ranks_then_of_all(pool):
    """Catches a rendezvous on a subgroup that leaves the next, larger one hanging."""
    assert pool.run(subgroup_then_world, 3, timeout=60) == [[1, 3], [1, 3], [3]]


def interleaved(rank, world):
    evens, odds = dist.new_group([0, 2]), dist.new_group([1, 3])
    half = open_heap("shm", (evens, odds)[rank % 2], "cpu", 30)
    everyone = open_heap("shm", None, "cpu", 30)
    seen = []
    for epoch in range(5):
        for heap in (half, everyone):
            contract.rows_arrive_where_they_were_put(heap)
            seen.append(int(heap.exchange(torch.tensor([rank + epoch]), channel=1, phase=Phase("sum")).sum()))
    if rank == 3:
        half.abort(Phase("plan"), "odd ranks only")
    everyone.barrier(Phase("end"))
    if rank % 2 == 0:
        half.barrier(Phase("end"))
        return seen
    with pytest.raises(RuntimeError, match=r"rank 1 \(global rank 3\) stopped the group in plan: odd ranks only"):
        half.barrier(Phase("end"))
    return seen


def test_interleaved_subgroups(pool):
    """Catches heaps of two groups that share counters, mailboxes or the abort word, and ranks named ambiguously."""
    for rank, seen in enumerate(pool.run(interleaved, 4)):
        assert seen == [n for e in range(5) for n in ((2, 4)[rank % 2] + 2 * e, 6 + 4 * e)]


def regions_of_this_process(rank, world):
    heap = open_heap("shm", None, "cpu", 30)
    buffer = heap.alloc(4096, "rows")
    own_maps = [
        line for line in Path("/proc/self/maps").read_text().splitlines() if re.search(r"ep-(rows|control)", line)
    ]
    modes = set()
    for line in own_maps:
        fields = line.split(maxsplit=5)
        modes.add((os.stat(f"/proc/self/map_files/{fields[0]}").st_mode & 0o777, fields[5].split()[-1]))
    return len(own_maps) if not buffer.closed else 0, modes


def test_regions_have_no_name_and_no_other_reader(pool):
    """Catches shared memory that a crash would leave in /dev/shm, and memory that other users may open."""
    for count, modes in pool.run(regions_of_this_process, 3):
        assert count == 6 and modes == {(0o600, "(deleted)")}


def test_one_process_needs_no_process_group():
    """Catches a heap that insists on torch.distributed where there is nobody to talk to."""
    heap = ShmHeap(None, 5)
    for fn in contract.CHECKS:
        if fn is not contract.a_ticket_is_reached_when_the_last_peer_posts:
            fn(heap)
    heap.close()


@pytest.mark.parametrize(
    "name, device, message",
    [
        ("nvshmem", "cpu", r"heap='nvshmem' .*'cpu': use 'shm'"),
        ("shm", "cuda:0", r"heap='shm' .*'cuda:0'"),
        ("shn", "cpu", "heap='shn'"),
    ],
)
def test_a_heap_that_does_not_fit_is_refused(name, device, message):
    """Catches a silent choice of another backend."""
    with pytest.raises(ValueError, match=message):
        open_heap(name, None, device)
