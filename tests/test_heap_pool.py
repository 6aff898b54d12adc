"""Slot pools inside one process: who gets which slot when. Several processes: the contract in test_heap.py."""

import gc
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from ep_plugin.heap import HeapClosed, Phase, SlotPool
from ep_plugin.heap.shm import ShmHeap


@pytest.fixture
def heap():
    heap = ShmHeap(None, 2)
    yield heap
    heap.close()


def held(pool):
    """A leased tensor and its slot."""
    slot = pool.acquire()
    assert slot is not None, pool.describe()
    return slot, slot.tensor()


def test_slots_do_not_overlap_and_come_back(heap):
    """Catches two leases of one slot, an offset off the alignment, and a slot lost after its tensor died."""
    pool = SlotPool(heap, 1000, 3, "rows")
    assert pool.slot_bytes == 1024
    leases = [held(pool) for _ in range(3)]
    assert sorted(slot.offset for slot, _ in leases) == [0, 1024, 2048]
    assert [t.data_ptr() - int(slot.buffer.ptrs[0]) for slot, t in leases] == [slot.offset for slot, _ in leases]
    assert all(t.numel() == 1024 and t.dtype == torch.uint8 for _, t in leases)
    assert pool.acquire() is None
    assert pool.describe() == "pool 'rows': 3 of 3 slots of 1024 bytes in use (at most 3 at once so far)"
    gone, kept = leases.pop(1), leases
    index, generation = gone[0].index, gone[0].generation
    del gone
    again = pool.acquire()
    assert again is not None and again.index == index and again.generation > generation
    assert pool.stats().in_use == 3 and len(kept) == 2


def test_a_slot_never_turned_into_a_tensor_comes_back(heap):
    """Catches a slot leaked by an exception between acquire and tensor()."""
    pool = SlotPool(heap, 256, 1, "rows")
    slot = pool.acquire()
    assert pool.stats().in_use == 1
    del slot
    assert pool.stats().in_use == 0
    slot = pool.acquire()
    tensor = slot.tensor()
    with pytest.raises(RuntimeError, match="called twice"):
        slot.tensor()
    assert tensor.numel() == 256


def test_an_old_slot_object_does_not_free_the_next_lease(heap):
    """Catches a release or a reader of an earlier generation that ends or extends a later lease."""
    pool = SlotPool(heap, 256, 1, "rows")
    old, tensor = held(pool)
    del tensor
    new, tensor = held(pool)
    with pytest.raises(RuntimeError, match="read_until after its tensor died"):
        old.read_until(99, 0)
    del old
    gc.collect()
    assert pool.stats().in_use == 1 and pool.acquire() is None and new.readers == []


def test_garbage_is_collected_before_giving_up(heap):
    """Catches exhaustion reported while dead cycles (an exception's traceback, a graph) still hold slots, and a
    deadlock when the collector drops a leased tensor inside acquire."""
    pool = SlotPool(heap, 256, 2, "rows")
    for _ in range(4):
        cycle = [held(pool)[1]]
        cycle.append(cycle)
        del cycle
    assert pool.stats().peak == 2


def test_ready_slots_go_before_those_that_peers_read(heap):
    """Catches a wait for a slow reader while another slot is free, and readers that are never seen to be done."""
    pool = SlotPool(heap, 256, 2, "rows")
    read, tensor = held(pool)
    read.read_until(1, 0)  # reached by the first post on channel 0
    assert read.readers == [(0, 1)]
    del tensor
    assert pool.stats().in_use == 1
    other, tensor = held(pool)
    assert other.index != read.index
    timer = threading.Timer(0.2, heap.post, kwargs=dict(channel=0, phase=Phase("read")))
    timer.start()
    waited = pool.acquire(Phase("dispatch", "layers.1"))  # there is no other
    timer.join()
    assert waited is not None and waited.index == read.index and waited.readers == []
    del waited
    assert pool.stats().in_use == 1


def test_readers_that_never_come_are_a_time_out(heap):
    """Catches an unbounded wait inside acquire, and an error that does not say where it happened."""
    heap.timeout_s = 0.1
    pool = SlotPool(heap, 256, 1, "rows")
    slot, tensor = held(pool)
    slot.read_until(5, 3)
    del tensor
    with pytest.raises(RuntimeError, match=r"in dispatch of layers\.1: waited 0\.1 s for rank 0"):
        pool.acquire(Phase("dispatch", "layers.1"))


def test_threads_share_a_pool(heap):
    """Catches a slot given to two threads, and releases lost when several threads drop tensors at once."""
    pool = SlotPool(heap, 256, 4, "rows")

    def stamp(mark):
        _, tensor = held(pool)
        return bool((tensor.fill_(mark) == mark).all())

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(stamp, [n % 251 for n in range(1000)]))
    stats = pool.stats()
    assert stats.in_use == 0 and stats.peak <= stats.slots == 4


def test_without_leases_every_slot_is_slot_0(heap):
    """Catches a negative control that still protects its slots."""
    pool = SlotPool(heap, 256, 3, "rows", leases=False)
    leases = [held(pool) for _ in range(5)]
    assert {t.data_ptr() for _, t in leases} == {int(leases[0][0].buffer.ptrs[0])}


def test_peer_views_stay_inside_a_slot(heap):
    """Catches a PUT over the neighbouring slot and a handle that names no slot."""
    pool = SlotPool(heap, 1024, 2, "rows")
    _, first = held(pool)
    slot, second = held(pool)
    pool.peer_view(0, slot.handle, 512, (64,), torch.float64).fill_(1.0)
    assert second[512:].any() and not second[:512].any() and not first.any()
    with pytest.raises(ValueError, match="bytes 512 to 1032 are outside a slot of 1024 bytes"):
        pool.peer_view(0, slot.handle, 512, (65,), torch.float64)
    for handle in (slot.handle + 8, slot.handle + (1 << 48), -1):
        with pytest.raises(ValueError, match="names no slot|outside"):
            pool.peer_view(0, handle, 0, (1,), torch.uint8)


@pytest.mark.parametrize("slot_bytes, slots", [(0, 1), (256, 0), (-5, 2)])
def test_empty_pools_are_refused(heap, slot_bytes, slots):
    """Catches a pool that can never hand out a slot."""
    with pytest.raises(ValueError, match=rf"not {slots} of {slot_bytes} bytes"):
        SlotPool(heap, slot_bytes, slots, "rows")


def test_a_fixed_pool_does_not_grow(heap):
    """Catches growth in a run whose memory was planned before training."""
    pool = SlotPool(heap, 256, 1, "rows")
    with pytest.raises(RuntimeError, match="pool 'rows' has a fixed size: pool 'rows': 0 of 1 slots"):
        pool.grow(slots=2)


def test_growth_is_no_smaller_than_before(heap):
    """Catches a grow that shrinks the pool or its slots, and one that allocates when nothing is missing."""
    pool = SlotPool(heap, 512, 3, "rows", growable=True)
    lease = held(pool)
    pool.grow(slots=2, slot_bytes=100)
    assert (pool.stats().slots, pool.slot_bytes, lease[0].buffer.closed) == (3, 512, False)
    assert lease[0].handle >> 48 == 0
    pool.grow(slots=5)
    assert (pool.stats().slots, pool.slot_bytes) == (5, 512)
    pool.grow(slot_bytes=513)
    assert (pool.stats().slots, pool.slot_bytes) == (5, 768)
    assert lease[1].fill_(3).sum() == 3 * 512


def test_a_closed_pool_is_no_exhausted_pool(heap):
    """Catches a pool that frees a segment twice, or reports a lack of slots when it was closed."""
    pool = SlotPool(heap, 256, 1, "rows", growable=True)
    pool.grow(slot_bytes=512)
    pool.grow(slot_bytes=1024)  # frees the first segment
    lease = held(pool)
    lease[1].fill_(6)
    pool.close()
    pool.close()
    for call in (pool.acquire, lambda: pool.peer_ptrs(torch.zeros(1, dtype=torch.int64))):
        with pytest.raises(HeapClosed, match="pool 'rows'"):
            call()
    assert (lease[1] == 6).all()
    assert SlotPool(heap, 256, 1, "others").acquire() is not None


def test_releases_after_close_are_harmless():
    """Catches a finaliser that touches unmapped memory after the heap is gone."""
    heap = ShmHeap(None, 2)
    pool = SlotPool(heap, 256, 2, "rows")
    slot, tensor = held(pool)
    tensor.fill_(4)
    heap.close()
    del heap, pool, slot
    gc.collect()
    assert (tensor == 4).all()
    del tensor
    gc.collect()
