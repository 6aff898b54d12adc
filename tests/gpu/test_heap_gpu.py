"""The heap contract on GPU heaps. What tests/heap_contract.py names for each check is what is caught here."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from ep_plugin.heap import HeapAborted, HeapClosed, Phase, SlotPool, open_heap
from ep_plugin.heap.base import Heap
from tests import heap_contract as contract

HEAPS = ("torch", "nvshmem", "nvshmem device")
POINTERS = (contract.buffers_are_zeroed_aligned_and_checked,)  # also look at the table of the peers' addresses
Ranks = tuple[int, int, torch.device]


def has_pointers(heap: Heap) -> bool:
    return heap.transport == "peer"  # type: ignore[attr-defined]


@pytest.mark.parametrize("check", contract.CHECKS, ids=lambda check: check.__name__)
def test_contract(heap: Heap, check: Callable[[Heap], None]) -> None:
    """One heap for all checks, so that state which one of them leaves behind is caught by the next."""
    if check in POINTERS and not has_pointers(heap):
        pytest.skip("transport=device has no pointers to peers")
    check(heap)


def test_reuse_is_ordered_with_a_late_rank(heap: Heap) -> None:
    """Catches a wait that lets go before a late peer's rows are there, or overwrites what a peer still reads."""
    assert contract.reuse_in_rounds(heap) == (0, 0)


def test_reuse_without_waits_is_caught(ranks: Ranks) -> None:
    """Negative control of the test above."""
    heap = open_heap("torch", None, ranks[2], 20.0)
    heap.wait = lambda ticket, *, channel, phase: None  # type: ignore[method-assign]
    wrong = torch.tensor(contract.reuse_in_rounds(heap)).sum()
    dist.all_reduce(wrong)
    assert wrong > 0
    heap.close()


def test_a_slot_waits_for_its_readers(heap: Heap) -> None:
    """Catches a slot handed out while a peer still GETs from it."""
    if not has_pointers(heap):
        pytest.skip("transport=device has no pointers to peers")
    assert contract.slots_wait_for_their_readers(heap) == 0


def test_leases_keep_what_backward_reads(heap: Heap) -> None:
    """Catches a slot that is reused before its layer's wgrad; without leases the first two layers must be wrong."""
    want = [420.0, 280.0, 168.0]
    assert contract.layer_gradients(heap, leases=True) == want
    got = contract.layer_gradients(heap, leases=False)
    assert got[0] != want[0] and got[1] != want[1] and got[2] == want[2]


def test_an_abort_stops_every_rank(ranks: Ranks) -> None:
    """Catches peers that wait on the device for a rank that has given up. The reason stays in that rank's log: a word
    carries the rank and the phase."""
    rank, world, device = ranks
    heap = open_heap("torch", None, device, 20.0)
    there = Phase("plan", "layers.7")
    heap.wait(heap.post(channel=0, phase=there), channel=0, phase=there)  # from now on all ranks know the phase
    torch.cuda.synchronize()
    dist.barrier()
    if rank == world - 1:
        heap.abort(there, "topk_idx holds expert 99 of 8")
        heap.abort(Phase("combine", "layers.8"), "another reason")
    dist.barrier()
    heap.wait(heap.post(channel=0, phase=contract.PHASE), channel=0, phase=contract.PHASE)
    torch.cuda.synchronize()
    said = rf"EP rank {world - 1} stopped the group in plan of layers.7; rank {rank} was in dispatch of layers.3"
    with pytest.raises(HeapAborted, match=said):
        heap.check()  # type: ignore[attr-defined]
    dist.barrier()


@pytest.mark.parametrize("name", ["torch", "nvshmem"])
def test_nothing_works_after_close(ranks: Ranks, name: str) -> None:
    """Catches calls that touch memory which was given back. Tensors that outlive a GPU heap must not be read."""
    if name == "nvshmem":
        from ep_plugin.heap import nvshmem

        if nvshmem.in_use():
            pytest.skip("this module's heap is the process's NVSHMEM world")
    heap = open_heap(name, None, ranks[2], 20.0)
    buffer, pool = heap.alloc(4096, "closing"), SlotPool(heap, 1024, 2, "closing pool")
    heap.barrier(contract.PHASE)
    heap.close()
    heap.close()
    heap.abort(contract.PHASE, "too late to matter")
    handles = torch.zeros(heap.world, dtype=torch.int64, device=heap.device)
    calls: list[Callable[[], object]] = [
        lambda: buffer.view(heap.rank, 0, (1,), torch.uint8),
        lambda: buffer.owned(0, 16, contract.Released()),
        lambda: heap.alloc(4096, "more"),
        lambda: heap.post(channel=0, phase=contract.PHASE),
        lambda: heap.wait(handles[:1], channel=0, phase=contract.PHASE),
        lambda: heap.poll(handles[:1], channel=0),
        lambda: heap.barrier(contract.PHASE),
        lambda: heap.send(contract.words(heap, 1), channel=0, phase=contract.PHASE),
        lambda: pool.peer_ptrs(handles),
        pool.acquire,
    ]
    for call in calls:
        with pytest.raises(HeapClosed):
            call()
