"""The Triton kernels under Triton's interpreter, bit for bit against the torch references.

The cases are in kernel_cases.py and kernel_control_cases.py, which GPU tests share. Here they run in processes of their
own, because Triton decides at its import whether it interprets.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import time
from typing import Any

import pytest
import torch

from ep_plugin.heap import Phase, open_heap
from ep_plugin.kernels.peers import MAX_PEERS, Peers
from tests import dist

pytest.importorskip("triton")

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def call(rank: int, world: int, module: str, name: str, *args: Any) -> None:
    """A check of one of the case modules."""
    getattr(importlib.import_module(f"tests.{module}"), name)(*args)


def shape_of(seed: int, world: int) -> Any:
    """Shapes with rows of one block and of several, and widths that are no multiple of a block or of 16 bytes."""
    from tests.kernel_cases import Shape

    experts = world * (1, 2, 4)[seed % 3]
    top_k = min(experts, (1, 2, 3, 4)[seed // 2 % 4])
    return Shape(world, experts, top_k, (8, 33, 40, 24)[seed // 3 % 4], DTYPES[seed % 4], (6, 9)[seed % 2])


def movements(rank: int, world: int, check: str, seeds: range, ranks: int) -> None:
    """Checks of kernel_cases on random sets of ``ranks`` ranks, which one process plays: this one its share of them."""
    from tests import kernel_cases

    for seed in seeds[rank::world]:
        getattr(kernel_cases, check)(kernel_cases.Case(shape_of(seed, ranks), seed, "cpu"))


@pytest.mark.parametrize("ranks", [1, 3])
def test_movements_equal_the_references(interpreters: dist.Pool, ranks: int) -> None:
    """Catches a row, weight or sum that differs in a bit, and a write that was not asked for."""
    interpreters.run(movements, 2, "check_movements", range(ranks, ranks + 2), ranks, timeout=300)


def test_rows_are_pulled_as_they_are_put(interpreters: dist.Pool) -> None:
    """Catches a row that is pulled from another token or rank than PUT takes it from, and a read out of bounds."""
    interpreters.run(movements, 2, "check_pull", range(5), 3, timeout=300)


@pytest.mark.parametrize("ranks", [1, 2])
def test_kernels_signal_their_chunks(interpreters: dist.Pool, ranks: int) -> None:
    """Catches a chunk that is signalled twice, never, or by a counter that the next launch does not go on from; and
    rows sent to the rank itself against its wish."""
    interpreters.run(movements, 2, "check_chunk_signals", range(4), ranks, timeout=300)


def test_a_rank_without_a_slot_is_left_alone(interpreters: dist.Pool) -> None:
    """Catches stores through a handle of −1 or garbage, which a GPU answers with a fault or with silent corruption."""
    interpreters.run(movements, 2, "check_lost_handles", range(5), 2, timeout=300)


def test_garbage_row_numbers_stay_inside(interpreters: dist.Pool) -> None:
    """Catches row numbers or token counts from a peer that are used unchecked."""
    interpreters.run(movements, 2, "check_garbage_rows", range(3), 3, timeout=300)


def test_order_of_sums(interpreters: dist.Pool) -> None:
    """Catches sums in any order but ascending k within a rank, then ascending rank."""
    interpreters.run(call, 1, "kernel_cases", "check_order", "cpu")


def test_rounding_of_products(interpreters: dist.Pool) -> None:
    """Catches truncation instead of rounding, ties away from even, and flushed subnormals."""
    interpreters.run(call, 1, "kernel_cases", "check_rounding", "cpu")


def real_movements(rank: int, world: int, seeds: range) -> None:
    """Random sets moved by ``world`` processes through a shared-memory heap, ordered by the signal kernels."""
    from tests import kernel_cases as cases
    from tests.kernel_control_cases import Control, control_words

    with_heap = open_heap("shm", None, "cpu", 60.0)
    words = with_heap.alloc(8 * control_words(world), "control")
    control = Control(
        words.view(rank, 0, (control_words(world),), torch.int64), words.ptrs, rank, torch.zeros(3, dtype=torch.int64)
    )

    def meet() -> None:
        control.post()
        control.wait(60.0)
        assert control.failure()[0] == 0

    for seed in seeds:
        case = cases.Case(shape_of(seed, world), seed, "cpu")
        buffer = with_heap.alloc(cases.SLOTS * case.region.nbytes, "slots")
        memory, want = cases.Memory.of_heap(case, buffer), case.after_put()
        memory.poison(rank)
        case.rng.seed(seed * world + rank)  # every rank its own launches and chunks from here on
        meet()
        cases.put(case, rank, memory)
        meet()
        cases.check_put(case, rank, memory, want)
        cases.check_fan_out(case, rank, memory, want)
        weighted = bool(seed % 2)
        case.after_return(want, weighted)
        meet()
        cases.give_back(case, rank, memory, weighted)
        meet()
        cases.check_put(case, rank, memory, want)
        cases.check_sums(case, rank, memory, want, weighted)
        meet()
        with_heap.free(buffer)
    with_heap.close()


@pytest.mark.slow
@pytest.mark.parametrize("world,seeds", [(2, range(14)), (4, range(14, 20))])
def test_movements_between_processes(interpreters: dist.Pool, world: int, seeds: range) -> None:
    """Catches what one process that plays all ranks cannot: addresses of the wrong process, rows read before they
    arrived, signals that do not order the rows."""
    interpreters.run(real_movements, world, seeds, timeout=900)


def unordered(rank: int, world: int, wait: bool) -> bool:
    """Whether rank 0 finds its rows after rank 1 was late, with and without the wait."""
    from tests import kernel_cases as cases
    from tests.kernel_control_cases import Control, control_words

    heap = open_heap("shm", None, "cpu", 60.0)
    words = heap.alloc(8 * control_words(world), "control")
    control = Control(
        words.view(rank, 0, (control_words(world),), torch.int64), words.ptrs, rank, torch.zeros(3, dtype=torch.int64)
    )
    case = cases.Case(cases.Shape(2, 2, 2, 8, torch.float32, 9), 2, "cpu")  # every token to rank 0
    assert case.tokens[1], "rank 1 must have a token to send"
    buffer = heap.alloc(cases.SLOTS * case.region.nbytes, "slots")
    memory, want = cases.Memory.of_heap(case, buffer), case.after_put()
    memory.poison(rank)
    heap.barrier(Phase("test"))
    if rank == 1:
        time.sleep(1.0)
    cases.put(case, rank, memory)
    control.post()
    if wait:
        control.wait(60.0)
    try:
        if rank == 0:
            cases.check_put(case, rank, memory, want)
        return True
    except AssertionError:
        return False
    finally:
        heap.barrier(Phase("test"))
        heap.close()


def test_without_the_wait_a_late_rank_is_noticed(interpreters: dist.Pool) -> None:
    """Negative control: with the wait left out the comparison must fail, and with it hold."""
    assert interpreters.run(unordered, 2, True)[0]
    assert not interpreters.run(unordered, 2, False)[0]


def exchange(rank: int, world: int) -> None:
    """Route maps from counts that really travel, on ranks of different speed."""
    from ep_plugin.config import CapacityConfig
    from ep_plugin.kernels import route_map_triton as route_map
    from ep_plugin.routing import build_route_map, count_routes
    from tests.kernel_control_cases import Control, control_words

    heap = open_heap("shm", None, "cpu", 60.0)
    words = heap.alloc(8 * control_words(world), "control")
    control = Control(
        words.view(rank, 0, (control_words(world),), torch.int64), words.ptrs, rank, torch.zeros(3, dtype=torch.int64)
    )
    experts, top_k = 2 * world, 2
    for turn in range(6):
        g = torch.Generator().manual_seed(turn)
        ids = [torch.randint(-1, experts, ((turn + 3 * r) % 5, top_k), generator=g) for r in range(world)]
        if turn % world == rank:
            time.sleep(0.05)
        out = route_map.DeviceMap.empty(*ids[rank].shape, experts, world, "cpu")
        record = torch.zeros(route_map.HEADER + experts, dtype=torch.int64)
        route_map.count(ids[rank], out.block_counts, out.flags)
        route_map.offsets_and_record(out.block_counts, record, (0, turn, 256 * rank, len(ids[rank])))
        control.send(record)
        records = control.receive(record.numel(), 60.0)
        assert control.failure()[0] == 0
        assert records[:, route_map.HANDLE].tolist() == [256 * r for r in range(world)]
        capacity = CapacityConfig("rank", 1.0)
        route_map.accept(records, out, rank=rank, capacity=capacity, top_k=top_k, bound=1000)
        route_map.build(ids[rank], out, rank=rank, bound=1000)
        counts = torch.stack([count_routes(i, experts) for i in ids])
        tokens = torch.tensor([len(i) for i in ids])
        want = build_route_map(ids[rank], counts, tokens, rank=rank, capacity=capacity)
        for name in ("dest_rank", "dest_row", "accepted", "offsets", "tokens"):
            assert torch.equal(getattr(out, name), getattr(want, name)), (turn, name)
    heap.barrier(Phase("test"))
    heap.close()


def test_records_between_processes(interpreters: dist.Pool) -> None:
    """Catches a mailbox that is overwritten before a slow rank has read it, and counts that mix two exchanges."""
    interpreters.run(exchange, 3, timeout=300)


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("name", ["check_posts", "check_exchanges", "check_abort"])
def test_signals(interpreters: dist.Pool, name: str, world: int) -> None:
    """Catches counters or records that do not reach every rank, and an abort that a wait does not hear."""
    interpreters.run(call, 1, "kernel_control_cases", name, world, "cpu", timeout=300)


def test_a_late_peer_ends_the_wait(interpreters: dist.Pool) -> None:
    """Catches a wait that hangs, blames the wrong rank, leaves the others waiting or lets stale records through."""
    interpreters.run(call, 1, "kernel_control_cases", "check_late_peer", 4, "cpu", timeout=300)


@pytest.mark.parametrize(
    "world,experts,top_k,tokens,seed,dtype",
    [
        (1, 1, 1, [20], 0, torch.int64),
        (2, 6, 3, [0, 300], 1, torch.int32),
        (4, 8, 4, [1, 5, 0, 40], 2, torch.int16),
        (3, 36, 8, [32, 7, 32], 3, torch.int64),
        (2, 64, 2, [100, 128], 4, torch.int8),
    ],
)
def test_route_map(
    interpreters: dist.Pool, world: int, experts: int, top_k: int, tokens: list[int], seed: int, dtype: torch.dtype
) -> None:
    """Catches a row or a drop that differs from routing.build_route_map, for example over a block's edge."""
    args = (world, experts, top_k, tokens, seed, "cpu", dtype)
    interpreters.run(call, 1, "kernel_control_cases", "check_route_map", *args, timeout=300)


def test_route_map_flags_what_it_cannot_raise(interpreters: dist.Pool) -> None:
    """Catches an overflow, a bad id or a foreign record that goes unnoticed or leaves the buffers."""
    interpreters.run(call, 1, "kernel_control_cases", "check_map_failures", "cpu", timeout=300)


def refusals(rank: int, world: int) -> None:
    from ep_plugin.kernels import put_triton, reduce_triton, route_map_triton, sync_triton
    from tests.kernel_control_cases import Control

    x, dest = torch.zeros(4, 8), torch.zeros((4, 2), dtype=torch.int32)
    peers = Peers.of([torch.zeros(4, 8)])
    with pytest.raises(ValueError, match=r"x \[4, 8\] has strides \(1, 4\)"):
        put_triton.put_rows(torch.zeros(8, 4).t(), peers, dest, dest, num_rows=4)
    with pytest.raises(ValueError, match="weights and peer_weights go together"):
        put_triton.put_meta(dest, dest, x, peers, None, 0)
    with pytest.raises(ValueError, match="y and dest_row"):
        reduce_triton.sum_partials(x[None], dest, x, y=x)
    with pytest.raises(ValueError, match=r"block_counts \[3, 2\]"):
        route_map_triton.count(dest, torch.zeros((3, 2), dtype=torch.int32), dest[0])
    with pytest.raises(ValueError, match=r"capacity\.factor=1\.25e-25"):
        route_map_triton._limbs(1.25e-25, 8)
    control = Control.of_all(1, "cpu")[0]
    with pytest.raises(ValueError, match="abort_value 0"):
        sync_triton.Watch(control.words, control.words, control.at(0), 0, control.status, 1).arguments  # noqa: B018
    with pytest.raises(ValueError, match="must have no handles"):
        sync_triton.post(control.counter, Peers(control.base, torch.zeros(1, dtype=torch.int64)))


def test_wrong_arguments_are_refused(interpreters: dist.Pool) -> None:
    """Catches arguments that would make a kernel read or write in the wrong place."""
    interpreters.run(refusals, 1)


def columns(rank: int, world: int) -> dict[int, int]:
    from ep_plugin.kernels.triton_common import Launch

    assert Launch(5).grid(3) == (3,) and Launch(5).grid(9) == (5,) and Launch(5).grid(0) == (1,)
    assert Launch(5, block=16).columns(4096) == 16
    assert Launch(66, 16).of_whole_lanes(4096, 2) == Launch(66, 16)
    assert Launch(66, 16).of_whole_lanes(1024, 2) == Launch(264, 4)  # as many threads, 16 bytes each
    assert Launch(66, 16).of_whole_lanes(8, 2) == Launch(1056, 1)
    return {width: Launch(1).columns(width) for width in (1, 8, 33, 100, 512, 1536, 2048, 4096, 7168, 8192)}


def test_columns_of_a_block(interpreters: dist.Pool) -> None:
    """Catches blocks that pad a row (7168 in one of 8192) or cut it into slivers, for the row or for a thread."""
    (found,) = interpreters.run(columns, 1)
    assert found == {
        1: 1, 8: 8, 33: 64, 100: 128, 512: 512, 1536: 512, 2048: 2048, 4096: 4096, 7168: 1024, 8192: 4096,
    }  # fmt: skip


def test_peers() -> None:
    """Catches addresses of the wrong type or more ranks than a set of ranks has bits for."""
    base = torch.arange(3)
    peers = Peers(base, torch.zeros(3, 5, dtype=torch.int64)[:, 2], 1024, 16).at(32)
    assert peers.arguments[2:] == (5, 1024, 48) and peers.world == 3
    with pytest.raises(ValueError, match="int32"):
        Peers(base.int())
    with pytest.raises(ValueError, match=r"handles must be int64 \[3\]"):
        Peers(base, base[:2])
    with pytest.raises(ValueError, match=f"{MAX_PEERS + 1} ranks"):
        Peers(torch.arange(MAX_PEERS + 1))


def test_references_need_no_triton() -> None:
    """Catches a CPU path that imports Triton, and a kernel module whose error does not say what to install."""
    program = (
        "import sys; sys.modules['triton'] = None\n"
        "import ep_plugin.kernels.put, ep_plugin.kernels.fan_out, ep_plugin.kernels.reduce, ep_plugin.kernels.peers\n"
        "try:\n    import ep_plugin.kernels.put_triton\n"
        "except ImportError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=dict(os.environ))
    assert done.returncode == 0, done.stderr
    assert "install triton >= 3.5" in done.stdout
