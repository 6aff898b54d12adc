"""What every symmetric heap must do, as functions of an open heap; each test file calls them with its own backend.

All are collective over the heap's group, raise AssertionError, and leave the heap usable unless named ``*_last``.
"""

from __future__ import annotations

import copy
import gc
import random
import threading
import time

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from ep_plugin.heap import CHANNELS, RECORD_MAX, Heap, HeapAborted, HeapClosed, Phase, SlotPool

PHASE = Phase("dispatch", "layers.3")


def words(heap: Heap, *values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64, device=heap.device)


def buffers_are_zeroed_aligned_and_checked(heap: Heap) -> None:
    """Catches stale memory, a misaligned base, a pointer table of other regions, and views outside the region."""
    buffer = heap.alloc(1000, "small")
    assert buffer.nbytes >= 1000 and buffer.ptrs.dtype == torch.int64 and buffer.ptrs.shape == (heap.world,)
    for rank in range(heap.world):
        view = buffer.view(rank, 0, (buffer.nbytes,), torch.uint8)
        assert view.device == buffer.device and not view.any()
        assert view.data_ptr() == int(buffer.ptrs[rank]) and view.data_ptr() % 256 == 0
    assert buffer.view(heap.rank, 256, (2, 3), torch.bfloat16).data_ptr() == int(buffer.ptrs[heap.rank]) + 256
    assert buffer.view(heap.rank, buffer.nbytes, (0, 7), torch.float64).shape == (0, 7)
    for offset, shape, dtype in [
        (buffer.nbytes - 4, (2,), torch.float32),
        (-8, (1,), torch.int64),
        (2, (1,), torch.float32),
    ]:
        with pytest.raises(ValueError, match="buffer 'small'"):
            buffer.view(heap.rank, offset, shape, dtype)
    with pytest.raises(ValueError, match=f"rank {heap.world} is not one of"):
        buffer.view(heap.world, 0, (1,), torch.uint8)
    heap.barrier(PHASE)
    heap.free(buffer)
    with pytest.raises(HeapClosed, match="small"):
        buffer.view(heap.rank, 0, (1,), torch.uint8)


def rows_arrive_where_they_were_put(heap: Heap) -> None:
    """Catches a rank's map that names another rank's region, and a barrier that does not make rows visible."""
    buffer = heap.alloc(heap.world * 64 * 4, "rows")
    for dest in range(heap.world):
        buffer.view(dest, heap.rank * 256, (64,), torch.float32).fill_(100.0 * heap.rank + dest)
    heap.barrier(PHASE)
    for source in range(heap.world):
        row = buffer.view(heap.rank, source * 256, (64,), torch.float32)
        assert (row == 100.0 * source + heap.rank).all(), (source, row)
        for owner in range(heap.world):  # the same by GET
            assert (buffer.view(owner, source * 256, (64,), torch.float32) == 100.0 * source + owner).all()
    heap.barrier(PHASE)
    heap.free(buffer)


def writes_do_not_touch_other_version_counters(heap: Heap) -> None:
    """Catches views of one storage: a PUT beside a tensor that autograd saved would then fail its backward."""
    buffer = heap.alloc(2048, "versions")
    saved = buffer.view(heap.rank, 0, (4,), torch.float32).fill_(3.0)
    weight = torch.ones(4, requires_grad=True, device=heap.device)
    loss = (saved * weight).sum()
    buffer.view(heap.rank, 1024, (4,), torch.float32).fill_(9.0)
    loss.backward()
    assert weight.grad is not None and (weight.grad == 3.0).all()
    heap.barrier(PHASE)
    heap.free(buffer)


def exchanges_return_every_record(heap: Heap, rounds: int = 40) -> None:
    """Catches a mailbox overwritten while a slower rank reads it, records of other rounds, and lost words."""
    delay = random.Random(heap.rank)
    kept = []
    for epoch in range(rounds):
        n = (0, 1, 7, RECORD_MAX)[epoch % 4]
        record = torch.arange(n, device=heap.device) + 1000 * epoch + 7 * heap.rank
        if delay.random() < 0.2:
            time.sleep(0.002)
        ticket = heap.send(record, channel=epoch % 3, phase=PHASE)
        record.fill_(-1)  # the record is the caller's again once send has returned
        if delay.random() < 0.2:
            time.sleep(0.002)
        kept.append(heap.receive(ticket, channel=epoch % 3, phase=PHASE))
    for epoch, records in enumerate(kept):
        n = (0, 1, 7, RECORD_MAX)[epoch % 4]
        want = torch.arange(n)[None] + 1000 * epoch + 7 * torch.arange(heap.world)[:, None]
        assert torch.equal(records.cpu(), want), (epoch, records)


def bad_records_are_refused(heap: Heap) -> None:
    """Catches a record cut off silently and an exchange that would overwrite one not yet received."""
    for record in (words(heap, *range(RECORD_MAX + 1)), words(heap, 1)[None], words(heap, 1).int()):
        with pytest.raises(ValueError, match="a record is int64"):
            heap.send(record, channel=0, phase=PHASE)
    with pytest.raises(ValueError, match=f"channel {CHANNELS + 1}"):
        heap.post(channel=CHANNELS + 1, phase=PHASE)
    ticket = heap.send(words(heap, heap.rank), channel=0, phase=PHASE)
    with pytest.raises(RuntimeError, match="before the exchange sent earlier was received"):
        heap.send(words(heap, heap.rank), channel=0, phase=PHASE)
    assert heap.receive(ticket, channel=0, phase=PHASE).flatten().tolist() == list(range(heap.world))
    with pytest.raises(RuntimeError, match="receive without a send"):
        heap.receive(ticket, channel=0, phase=PHASE)


def a_ticket_is_reached_when_the_last_peer_posts(heap: Heap) -> None:
    """Catches a poll that is true too early, one that never turns true, and channels that share a counter."""
    if heap.rank > 0:
        ticket = heap.post(channel=5, phase=PHASE)
        assert not heap.poll(ticket, channel=5)
    heap.wait(heap.post(channel=6, phase=PHASE), channel=6, phase=PHASE)
    if heap.rank > 0:
        assert not heap.poll(ticket, channel=5)
    heap.barrier(PHASE)
    if heap.rank == 0:
        ticket = heap.post(channel=5, phase=PHASE)
    heap.wait(ticket, channel=5, phase=PHASE)
    assert heap.poll(ticket, channel=5)


def reuse_in_rounds(heap: Heap, rounds: int = 50) -> tuple[int, int]:
    """Every rank PUTs a row stamped with the epoch to every rank, reads its own, and the next round reuses the memory.

    A random rank is late, alternately before its PUT and before its read. The number of epochs in which this rank read
    a row that was too old, and too new: (0, 0) when waits order the accesses.
    """
    old = new = 0
    late = random.Random(17)  # the same on all ranks
    buffer = heap.alloc(heap.world * 1024, "reuse")
    rows = buffer.view(heap.rank, 0, (heap.world, 256), torch.int32)
    for epoch in range(1, rounds + 1):
        slow = late.randrange(heap.world) == heap.rank
        if slow and epoch % 2:
            time.sleep(0.004)
        for dest in range(heap.world):
            buffer.view(dest, heap.rank * 1024, (256,), torch.int32).fill_(epoch)
        heap.wait(heap.post(channel=2, phase=PHASE), channel=2, phase=PHASE)
        if slow and not epoch % 2:
            time.sleep(0.004)
        seen = rows.clone()
        heap.wait(heap.post(channel=3, phase=PHASE), channel=3, phase=PHASE)
        old += bool((seen < epoch).any())
        new += bool((seen > epoch).any())
    return old, new


class Released:
    """Counts calls of on_release, from any thread."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> None:
        self.count += 1


def a_lease_lives_as_long_as_its_storage(heap: Heap) -> None:
    """Catches a lease tied to one tensor object: views, detached and saved tensors must keep it, copies must not."""
    buffer = heap.alloc(4096, "leases")
    released = Released()
    tensor = buffer.owned(256, 1024, released)
    assert tensor.dtype == torch.uint8 and tensor.shape == (1024,)
    assert tensor.data_ptr() == int(buffer.ptrs[heap.rank]) + 256
    rows = tensor.view(torch.float32).view(16, 16)
    rows.copy_(torch.arange(256.0).view(16, 16))
    copies = [rows.clone(), copy.deepcopy(rows)]
    part = rows.detach()[3:, 2:]
    weight = torch.ones(16, 16, requires_grad=True, device=heap.device)
    loss = (rows * weight).sum()  # saves rows for backward
    del tensor, rows
    assert released.count == 0
    loss.backward()
    del loss
    assert weight.grad is not None and torch.equal(weight.grad, copies[0])
    assert released.count == 0, "part is still alive"
    del part
    assert released.count == 1, "copies do not hold the lease"

    with pytest.raises(ValueError, match="at least one byte"):
        buffer.owned(0, 0, released)
    with pytest.raises(ValueError, match="outside"):
        buffer.owned(buffer.nbytes - 8, 16, released)

    dropped = buffer.owned(0, 512, released)
    graph = (dropped.view(torch.float32) * torch.ones(128, requires_grad=True, device=heap.device)).sum()
    del dropped
    assert released.count == 1
    holder = [graph]
    del graph
    thread = threading.Thread(target=holder.clear)  # an abandoned graph, dropped on another thread
    thread.start()
    thread.join()
    gc.collect()
    assert released.count == 2
    heap.barrier(PHASE)
    heap.free(buffer)


class _Scale(torch.autograd.Function):
    """x ↦ w·x whose saved rows lie in a slot, as an expert's saved input does."""

    @staticmethod
    def forward(ctx, x, weight, pool):
        slot = pool.acquire()
        assert slot is not None, pool.describe()
        rows = slot.tensor()[: x.numel() * x.element_size()].view(x.dtype).view_as(x)
        rows.copy_(x)
        ctx.save_for_backward(rows, weight)
        return rows * weight

    @staticmethod
    def backward(ctx, grad):
        rows, weight = ctx.saved_tensors
        return grad * weight, (grad * rows).sum(), None


def _scale_layers(pool: SlotPool, x: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
    for weight in weights:
        x = _Scale.apply(x, weight, pool)
    return x


def leases_under_checkpointing(heap: Heap) -> None:
    """Catches a lease that ends with the forward, or with the autograd ctx: both layers of a recomputed region must
    hold theirs until their wgrads have read, and give them back afterwards."""
    pool = SlotPool(heap, 4096, 4, "checkpoint")
    weights = _scale_weights(heap, 2.0, 3.0)
    for _ in range(3):
        x = torch.arange(8.0, device=heap.device, requires_grad=True)
        loss = checkpoint(_scale_layers, pool, x, weights, use_reentrant=False).sum()
        loss.backward()
        assert [w.grad.item() for w in weights] == [3 * 28.0, 2 * 28.0]
        for weight in weights:
            weight.grad = None
        del loss
        assert pool.stats().in_use == 0, pool.describe()
    assert pool.stats().peak == 2  # the layers of the region: its first forward saves nothing


def _scale_weights(heap: Heap, *values: float) -> list[torch.Tensor]:
    return [torch.tensor(value, device=heap.device, requires_grad=True) for value in values]


def layer_gradients(heap: Heap, *, leases: bool) -> list[float]:
    """Three layers forward, then backward; with one slot for all (``leases=False``) only the last can be right."""
    pool = SlotPool(heap, 4096, 3 if leases else 1, "figure 21", leases=leases)
    weights = _scale_weights(heap, 2.0, 3.0, 5.0)
    _scale_layers(pool, torch.arange(8.0, device=heap.device), weights).sum().backward()
    return [w.grad.item() for w in weights]


def slots_wait_for_their_readers(heap: Heap, rounds: int = 8) -> int:
    """One slot per rank, rewritten every round, and a random rank that GETs late: how many rows this rank read too new
    (0 when a slot waits for its readers)."""
    pool = SlotPool(heap, 1024, 1, "read slots")
    neighbour = (heap.rank + 1) % heap.world
    late = random.Random(5)  # the same on all ranks
    wrong = 0
    for epoch in range(rounds):
        slot = pool.acquire(PHASE)
        assert slot is not None
        rows = slot.tensor().view(torch.int32).fill_(epoch)
        handles = heap.exchange(words(heap, slot.handle), channel=0, phase=PHASE)[:, 0]
        addresses = pool.peer_ptrs(handles).tolist()
        if late.randrange(heap.world) == heap.rank:
            time.sleep(0.01)
        there = pool.peer_view(neighbour, int(handles[neighbour]), 512, (128,), torch.int32)
        assert there.data_ptr() == addresses[neighbour] + 512
        wrong += bool((there != epoch).any())
        slot.read_until(heap.post(channel=4, phase=PHASE), 4)
        del rows
    return wrong


def pools_grow_together(heap: Heap) -> None:
    """Catches a grown pool whose old handles lose their meaning while a tensor lives, and memory never given back."""
    pool = SlotPool(heap, 1000, 1, "growing", growable=True)
    first = pool.acquire()
    assert first is not None and first.nbytes == 1024
    held = [first.tensor().fill_(heap.rank + 1)]
    assert pool.acquire() is None
    pool.grow(slots=3)
    assert pool.stats().slots == 3
    held.append(pool.acquire())
    assert held[1] is not None and held[1].nbytes == 1024
    pool.grow(slot_bytes=5000)
    larger = pool.acquire()
    assert larger is not None and larger.nbytes == 5120 and pool.stats().slots == 3
    phase = Phase("grow", "test")
    for slot, value in ((first, heap.rank + 1), (larger, heap.rank + 50)):
        if slot is larger:
            larger.tensor().fill_(value)
        handles = heap.exchange(words(heap, slot.handle), channel=0, phase=phase)[:, 0]
        for rank in range(heap.world):
            row = pool.peer_view(rank, int(handles[rank]), 0, (slot.nbytes,), torch.uint8)
            assert (row == value - heap.rank + rank).all()
    heap.barrier(phase)
    if heap.rank == 0 and heap.world > 1:
        held.clear()
    pool.grow(slot_bytes=6000)  # rank 0 uses no old slot now, the others do: nothing of the first two segments goes
    assert not first.buffer.closed
    held.clear()
    pool.grow(slot_bytes=7000)
    assert first.buffer.closed
    with pytest.raises(HeapClosed):
        pool.peer_view(0, first.handle, 0, (1,), torch.uint8)


def an_abort_stops_every_rank_last(heap: Heap) -> None:
    """Catches peers that wait for a rank that has given up, a second abort that hides the first, and a cut reason."""
    reason = f"topk_idx holds expert 99 of 8 [{'é' * 2000}]"
    if heap.rank == heap.world - 1:
        heap.abort(Phase("plan", "layers.7"), reason)
        heap.abort(Phase("combine", "layers.8"), "another reason")
    start = time.monotonic()
    with pytest.raises(HeapAborted) as caught:
        heap.wait(heap.post(channel=0, phase=PHASE), channel=0, phase=PHASE)
        while time.monotonic() < start + 5:  # whoever saw the signal first sees the abort in the next wait
            heap.wait(heap.post(channel=0, phase=PHASE), channel=0, phase=PHASE)
    assert time.monotonic() - start < 5
    text = str(caught.value)
    assert f"rank {heap.world - 1} stopped the group in plan of layers.7: topk_idx holds expert 99 of 8 [éé" in text
    assert f"seen by rank {heap.rank} in dispatch of layers.3" in text
    with pytest.raises(HeapAborted):
        heap.alloc(4096, "after an abort")
    heap.abort(PHASE, "once more")


def nothing_works_after_close_last(heap: Heap) -> None:
    """Catches a close that takes memory from tensors that still live, and calls on freed memory."""
    buffer = heap.alloc(4096, "closing")
    pool = SlotPool(heap, 1024, 2, "closing pool")
    slot = pool.acquire()
    assert slot is not None
    leased = slot.tensor().fill_(7)
    view = buffer.view(heap.rank, 0, (16,), torch.int64).fill_(5)
    heap.barrier(PHASE)
    heap.close()
    heap.close()
    heap.abort(PHASE, "too late to matter")
    assert (leased == 7).all() and (view == 5).all()
    for call in (
        lambda: buffer.view(heap.rank, 0, (1,), torch.uint8),
        lambda: buffer.owned(0, 16, Released()),
        lambda: heap.alloc(4096, "more"),
        lambda: heap.post(channel=0, phase=PHASE),
        lambda: heap.wait(1, channel=0, phase=PHASE),
        lambda: heap.poll(1, channel=0),
        lambda: heap.barrier(PHASE),
        lambda: heap.send(words(heap, 1), channel=0, phase=PHASE),
        lambda: pool.peer_ptrs(torch.zeros(heap.world, dtype=torch.int64, device=heap.device)),
        pool.acquire,
    ):
        with pytest.raises(HeapClosed):
            call()
    del leased, slot
    gc.collect()


CHECKS = (
    buffers_are_zeroed_aligned_and_checked,
    rows_arrive_where_they_were_put,
    writes_do_not_touch_other_version_counters,
    exchanges_return_every_record,
    bad_records_are_refused,
    a_ticket_is_reached_when_the_last_peer_posts,
    a_lease_lives_as_long_as_its_storage,
    leases_under_checkpointing,
    pools_grow_together,
)
LAST = (an_abort_stops_every_rank_last, nothing_works_after_close_last)
