"""``transport=device`` without NVSHMEM: its kernels under Triton's interpreter, where a stand-in copies through the
peer table, moved between processes and compared with the torch references bit for bit.

What NVSHMEM itself does with a transfer, and that no peer pointer is used, only GPUs show (tests/gpu).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ep_plugin.config import EPConfig, ScheduleConfig
from ep_plugin.heap import open_heap
from tests import dist
from tests.test_kernels import shape_of

pytest.importorskip("triton")


def use_library(moves: Any) -> None:
    """Let the cases of kernel_cases move rows with ``moves``. Parts of a batch move with the first of them."""
    from ep_plugin.kernels import put_triton, reduce_triton, scalars_triton

    def put_unique(x, peers, routes, first_row, begin, end, **kwargs):
        if begin == 0:
            moves.put_unique(x, peers, routes, first_row, **kwargs)

    def pre_reduce_put(*args, begin, end, **kwargs):
        if begin == 0:
            moves.pre_reduce_put(*args, **kwargs)

    from_here = reduce_triton.get_reduce

    def get_reduce(*args, launch=None, **kwargs):
        if launch is None:  # a sum of rows that are all here
            from_here(*args, **kwargs)
        else:
            moves.get_reduce(*args, **kwargs)

    put_triton.put_unique, put_triton.put_meta = put_unique, moves.put_meta
    put_triton.put_rows, put_triton.put_values = moves.put_rows, moves.put_values
    reduce_triton.pre_reduce_put, reduce_triton.get_reduce = pre_reduce_put, get_reduce
    scalars_triton.put_scalars, scalars_triton.get_values = moves.put_scalars, moves.get_values


def library_movements(rank: int, world: int, seeds: range) -> None:
    """Both forms' movements of random sets between ``world`` processes, each with staging of its own."""
    from ep_plugin.dispatch.moves import LibraryMoves
    from tests import kernel_cases as cases
    from tests.library_control import LibraryControl, control_words

    heap = open_heap("shm", None, "cpu", 60.0)
    words = heap.alloc(8 * control_words(world), "control")
    own = words.view(rank, 0, (control_words(world),), torch.int64)
    control = LibraryControl(own, words.ptrs, rank, torch.zeros(3, dtype=torch.int64))

    def meet() -> None:
        control.post()
        control.wait(60.0)
        assert control.failure()[0] == 0

    for seed in seeds:
        shape = shape_of(seed, world)
        case = cases.Case(shape, seed, "cpu")
        sizes = dict(
            max_tokens=shape.max_tokens, top_k=shape.top_k, hidden_size=shape.width, dtype=shape.dtype,
        )  # fmt: skip
        moves = {form: LibraryMoves(heap, form=form, **sizes) for form in ("dedup", "route")}
        both = Both(moves["dedup"], moves["route"])
        use_library(both)
        buffer = heap.alloc(cases.SLOTS * case.region.nbytes, "slots")
        memory, want = cases.Memory.of_heap(case, buffer), case.after_put()
        memory.poison(rank)
        meet()
        cases.put(case, rank, memory)
        meet()
        cases.check_put(case, rank, memory, want)
        weighted = bool(seed % 2)
        case.after_return(want, weighted)
        meet()
        cases.give_back(case, rank, memory, weighted)
        meet()
        # Scalars return as whole stripes; what no route asked for may hold anything.
        unasked, scalars = want["scalars"][rank].isnan(), memory["scalars", rank]
        scalars.masked_fill_(unasked, float("nan"))
        cases.check_put(case, rank, memory, want)
        cases.check_sums(case, rank, memory, want, weighted)
        meet()
        for made in (*moves.values(), heap):
            made.free() if made is not heap else heap.free(buffer)
    heap.close()


class Both:
    """Each movement by the staging of the form that uses it."""

    def __init__(self, dedup: Any, route: Any) -> None:
        self.put_unique, self.put_meta = dedup.put_unique, dedup.put_meta
        self.pre_reduce_put, self.put_scalars = dedup.pre_reduce_put, dedup.put_scalars
        self.put_rows, self.put_values = route.put_rows, route.put_values
        self.get_reduce, self.get_values = route.get_reduce, route.get_values


@pytest.mark.slow
@pytest.mark.parametrize("world,seeds", [(1, range(2)), (2, range(2, 5)), (3, range(8, 10))])
def test_movements_equal_the_references(interpreters: dist.Pool, world: int, seeds: range) -> None:
    """Catches a row, weight or sum that differs in a bit, a write that was not asked for, and an address of the wrong
    rank, in any of the movements that go through staging."""
    interpreters.run(library_movements, world, seeds, timeout=300)


def chunked(rank: int, world: int) -> None:
    """Chunks of rows and of partial sums, each signalled once; the words say how far the peers may read."""
    from ep_plugin.dispatch.moves import LibraryMoves
    from ep_plugin.kernels.put import put_unique_torch
    from ep_plugin.kernels.sync_triton import ChunkSignal
    from tests import kernel_cases as cases
    from tests.library_control import SIGNALS, LibraryControl, control_words

    heap = open_heap("shm", None, "cpu", 60.0)
    words = heap.alloc(8 * control_words(world), "control")
    own = words.view(rank, 0, (control_words(world),), torch.int64)
    control = LibraryControl(own, words.ptrs, rank, torch.zeros(3, dtype=torch.int64))
    case = cases.Case(cases.Shape(world, 2 * world, 2, 24, torch.float32, 9), 1, "cpu")
    moves = LibraryMoves(heap, form="dedup", max_tokens=9, top_k=2, hidden_size=24, dtype=torch.float32)
    buffer = heap.alloc(cases.SLOTS * case.region.nbytes, "slots")
    memory = cases.Memory.of_heap(case, buffer)
    memory.poison(rank)
    signal = ChunkSignal(3, 9, control.counter, control.at(SIGNALS + rank), torch.zeros(3, dtype=torch.int32))
    heap.barrier(cases_phase())
    m = case.maps[rank]
    moves.put_unique(case.x[rank], memory.peers("stage"), m.dest_rank, case.first(rank), skip_rank=rank, signal=signal)
    assert control.counter[0].item() == 3
    control.ticket.fill_(3)
    control.wait(30.0)
    assert control.words[SIGNALS : SIGNALS + world].tolist() == [3] * world
    want = case.parts()["stage"]
    for source, (x, r) in enumerate(zip(case.x, case.maps, strict=True)):
        put_unique_torch(x, want, torch.where(r.dest_rank == source, -1, r.dest_rank), case.first(source))
    cases.same_bits(memory["stage", rank], want[rank], "stage in chunks")
    heap.barrier(cases_phase())
    heap.close()


def cases_phase() -> Any:
    from ep_plugin.heap import Phase

    return Phase("test")


def test_chunks_are_signalled_one_by_one(interpreters: dist.Pool) -> None:
    """Catches a chunk without a signal or with two, rows sent to the rank itself, and rows of a later chunk left
    behind."""
    interpreters.run(chunked, 2, timeout=120)


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("check", ["check_posts", "check_exchanges", "check_late_peer"])
def test_signals(interpreters: dist.Pool, check: str, world: int) -> None:
    """Catches what the same checks catch in the kernels for peer pointers, and an abort that does not reach all."""
    if check == "check_late_peer" and world == 1:
        pytest.skip("a single rank has no late peer")
    interpreters.run(signals, 1, check, world)


def signals(rank: int, world: int, check: str, ranks: int) -> None:
    from tests import kernel_control_cases as control
    from tests.library_control import LibraryControl

    control.Control = LibraryControl
    getattr(control, check)(ranks, "cpu")


def stopped(rank: int, world: int) -> None:
    from tests.library_control import ABORT, CODE, LibraryControl, sync

    ranks = LibraryControl.of_all(3, "cpu")
    for c in ranks:
        c.post()
    ranks[1].library.set_abort(ranks[1].at(ABORT), 41)
    ranks[2].library.set_abort(ranks[2].at(ABORT), 42)
    for c in ranks:
        assert c.words[ABORT].item() == 41
        c.wait()
        assert c.failure() == (sync.ABORTED, CODE, 0)


def test_an_abort_reaches_every_rank(interpreters: dist.Pool) -> None:
    """Catches an abort word that only some ranks get, and a second abort that hides the first."""
    interpreters.run(stopped, 1)


@pytest.mark.parametrize("heap", ["shm", "torch"])
def test_the_device_transport_names_the_heap_it_needs(heap: str) -> None:
    """Catches a heap whose memory NVSHMEM does not know being accepted."""
    with pytest.raises(ValueError, match=f"transport='device' .* heap='nvshmem', not heap='{heap}'"):
        EPConfig(heap=heap, transport="device").validate()
    with pytest.raises(ValueError, match="transport='devise' is not one of peer, device; did you mean 'device'"):
        EPConfig(transport="devise").validate()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dispatcher": "block"}, "dispatcher='rowwise', not of 'block'"),
        ({"precision": "mxfp8"}, "precision='mxfp8' moves its records through peer pointers"),
        ({"schedule": ScheduleConfig(kind="wave_overlapped")}, "schedule.kind='wave_overlapped' moves waves"),
    ],
)
def test_what_the_device_transport_does_not_carry_is_refused(settings: dict[str, Any], message: str) -> None:
    """Catches rows that would move through pointers that are not there, and staging that two waves write at once."""
    with pytest.raises(ValueError, match=message):
        EPConfig(transport="device", **settings).validate()


def test_auto_without_gpus_is_refused_too() -> None:
    """Catches heap=auto falling back to a heap that cannot serve the transport."""
    with pytest.raises(ValueError, match="transport='device' .* heap='nvshmem'"):
        open_heap("auto", None, "cpu", transport="device")


def test_a_peer_without_an_address_is_an_error_on_every_rank() -> None:
    """Catches an EP group that spans machines and whose rows would go nowhere: planted tables of addresses with a 0."""
    from ep_plugin.heap.device import require_addresses

    require_addresses("nvshmem", [[4096, 8192], [4096, 8192]])
    with pytest.raises(RuntimeError) as caught:
        require_addresses("nvshmem", [[4096, 8192, 0], [4096, 8192, 512], [0, 0, 512]])
    for part in ("rank 0 cannot address ranks [2]", "rank 2 cannot address ranks [0, 1]", "transport='device'"):
        assert part in str(caught.value)
    for other in ("dispatcher='deepep'", "dispatcher='block'"):
        assert other in str(caught.value)
