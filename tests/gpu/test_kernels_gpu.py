"""The Triton kernels on one GPU, bit for bit against the torch references: one process plays all ranks, whose regions
are buffers of this GPU. EP_PLUGIN_TEST_SETS sets the random sets of each shape.
"""

from __future__ import annotations

import os
import time

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)
pytest.importorskip("triton")

from ep_plugin.config import CapacityConfig
from ep_plugin.kernels import fan_out_triton, put_triton, reduce_triton
from ep_plugin.kernels import route_map_triton as route_map
from ep_plugin.kernels.peers import Peers
from ep_plugin.kernels.reduce import get_reduce_torch, get_rows_torch, partial_sums_torch, sum_partials_torch
from ep_plugin.routing import build_route_map, count_routes
from tests import kernel_cases as cases
from tests import kernel_control_cases as control
from tests.kernel_cases import Case, Shape, same_bits

SETS = int(os.environ.get("EP_PLUGIN_TEST_SETS", "120"))
SHAPES = [
    Shape(1, 4, 2, 8, torch.bfloat16, 64),
    Shape(2, 8, 2, 24, torch.float64, 40),
    Shape(2, 16, 4, 33, torch.float16, 100),
    Shape(3, 12, 3, 100, torch.float32, 50),
    Shape(4, 8, 8, 1000, torch.bfloat16, 64),
    Shape(2, 8, 2, 1536, torch.float16, 100),
    Shape(2, 128, 8, 4096, torch.bfloat16, 128),
    Shape(8, 64, 8, 7168, torch.bfloat16, 16),
    Shape(2, 16, 6, 8192, torch.bfloat16, 40),
]


@pytest.fixture(scope="module")
def device() -> str:
    index = int(os.environ.get("LOCAL_RANK", "0"))
    torch.cuda.set_device(index)
    return f"cuda:{index}"


@pytest.mark.parametrize(
    "shape", SHAPES, ids=lambda s: f"M{s.world}-K{s.top_k}-D{s.width}-{s.dtype}".replace("torch.", "")
)
def test_movements_equal_the_references(shape: Shape, device: str) -> None:
    """Catches a row, weight or sum that differs in a bit, and a write that was not asked for."""
    for seed in range(SETS):
        cases.check_movements(Case(shape, seed, device))


@pytest.mark.parametrize("shape", [SHAPES[3], SHAPES[5]], ids=["fp32", "fp16"])
@pytest.mark.parametrize("check", ["check_pull", "check_chunk_signals", "check_lost_handles", "check_garbage_rows"])
def test_signals_and_garbage(check: str, shape: Shape, device: str) -> None:
    """Catches what test_kernels.py names for each of these checks, with programs that run at the same time."""
    for seed in range(max(6, SETS // 4)):
        getattr(cases, check)(Case(shape, seed, device))


def test_order_of_sums(device: str) -> None:
    """Catches sums in any order but ascending k within a rank, then ascending rank."""
    cases.check_order(device)


def test_rounding_of_products(device: str) -> None:
    """Catches rounding that differs from torch's, fused products and flushed subnormals."""
    cases.check_rounding(device)


def test_one_large_step_with_the_default_launches(device: str) -> None:
    """Catches what only shows when every program has many rows, at the shape of a benchmark."""
    shape = Shape(2, 128, 8, 1024, torch.bfloat16, 16384)
    case = Case(shape, 0, device)
    memory, want = cases.Memory.on(case), case.after_put()
    for r, (m, x, w) in enumerate(zip(case.maps, case.x, case.weights, strict=True)):
        put_triton.put_unique(x, memory.peers("stage"), case.put_routes(r), case.first(r))
        put_triton.put_meta(
            m.dest_rank, m.dest_row, w, memory.peers("local_rows"), memory.peers("weights"), case.first(r)
        )
        put_triton.put_rows(x, memory.peers("rows"), m.dest_rank, m.dest_row, num_rows=case.bound)
    case.after_return(want, True)
    for r, m in enumerate(case.maps):
        same_bits(memory["stage", r], want["stage"][r], "stage")
        same_bits(memory["rows", r], want["rows"][r], "rows")
        local = memory["local_rows", r].view(2, shape.max_tokens, 8)
        rows = cases.poison(torch.empty_like(want["rows"][r]))
        fan_out_triton.fan_out(memory["stage", r], local, case.num_tokens, rows, x_own=case.x[r], own_rank=r)
        same_bits(rows, want["rows"][r], "fan-out")
        reduce_triton.pre_reduce_put(case.y[r], local, case.num_tokens, memory.peers("partials"), r, case.scale[r])
        assert m.dest_rank.shape[0] == case.tokens[r]
    for r, m in enumerate(case.maps):
        out, sums = torch.empty_like(case.x[r]), sum_partials_torch(want["partials"][r], m.dest_rank)
        reduce_triton.sum_partials(memory["partials", r], m.dest_rank, out)
        same_bits(out, sums, "sum of partials")
        reduce_triton.sum_partials(
            memory["partials", r], m.dest_rank, out, y=case.y[r], dest_row=m.dest_row, weights=case.scale[r], own_rank=r
        )
        same_bits(out, sums, "sum with the own partial in registers")


# Offsets past 2^31 elements


WIDE = 8192
FAR = 2**31 // WIDE  # first row whose elements a 32-bit offset cannot number


@pytest.fixture
def room(device: str) -> None:
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info(device)[0]
    if free < 40 << 30:
        pytest.skip(f"needs 40 GiB of GPU memory, {free >> 30} GiB are free")


def far_rows(device: str, *, lead: int = 0) -> Tensor:
    """Rows on both sides of 2^31 elements, and the first."""
    return torch.tensor([0, FAR - 1, FAR, FAR + 1, FAR + 700], device=device) + lead


def test_rows_past_31_bits_are_put(device: str, room: None) -> None:
    """Catches 32-bit row offsets in x, in the destination rows and in the stage."""
    g = torch.Generator(device=device).manual_seed(0)
    tokens = far_rows(device)
    x = torch.zeros((FAR + 1000, WIDE), dtype=torch.bfloat16, device=device)
    x[tokens] = torch.randn((5, WIDE), generator=g, device=device).bfloat16()
    target = [torch.zeros_like(x) for _ in range(2)]
    dest_rank = torch.full((x.shape[0], 1), -1, dtype=torch.int32, device=device)
    dest_rank[tokens, 0] = torch.tensor([0, 1, 0, 1, 1], dtype=torch.int32, device=device)
    dest_row = torch.full_like(dest_rank, -1)
    dest_row[tokens, 0] = tokens.flip(0).int()
    put_triton.put_rows(x, Peers.of(target), dest_rank, dest_row, num_rows=x.shape[0])
    for t, p, row in zip(tokens.tolist(), (0, 1, 0, 1, 1), tokens.flip(0).tolist(), strict=True):
        same_bits(target[p][row], x[t], f"row {row} of rank {p}")
        target[p][row] = 0
    assert not any(t.any() for t in target), "another row was written"
    put_triton.put_unique(x, Peers.of(target), dest_rank, 0)
    for t, p in zip(tokens.tolist(), (0, 1, 0, 1, 1), strict=True):
        same_bits(target[p][t], x[t], f"stage row {t} of rank {p}")
        target[p][t] = 0
    assert not any(t.any() for t in target), "another row was written"
    put_triton.put_unique(x[:3].contiguous(), Peers.of(target), dest_rank[FAR : FAR + 3], FAR)
    same_bits(target[0][FAR], x[0], "stage row of a far stripe")


def test_rows_past_31_bits_are_fanned_out_and_reduced(device: str, room: None) -> None:
    """Catches 32-bit offsets in the stage, the expert rows, the partial sums and their stripes."""
    g = torch.Generator(device=device).manual_seed(1)
    t_max, top_k = FAR // 2 + 500, 2
    tokens = torch.tensor([0, t_max], device=device)  # the second stripe holds the far rows
    stage = torch.zeros((2 * t_max, WIDE), dtype=torch.bfloat16, device=device)
    local = torch.full((2, t_max, top_k), -1, dtype=torch.int32, device=device)
    t = torch.tensor([0, FAR - t_max - 1, FAR - t_max, t_max - 1], device=device)
    stage[t_max + t] = torch.randn((4, WIDE), generator=g, device=device).bfloat16()
    to = torch.tensor([[FAR, -1], [3, FAR + 1], [-1, FAR - 1], [FAR + 9, 0]], dtype=torch.int32, device=device)
    local[1, t] = to
    rows = torch.zeros((FAR + 1000, WIDE), dtype=torch.bfloat16, device=device)
    routes = torch.full((FAR + 1000,), -1, device=device)
    fan_out_triton.fan_out(stage, local, tokens, rows, route_of_row=routes)
    for token, places in zip(t.tolist(), to.tolist(), strict=True):
        for k, row in enumerate(places):
            if row >= 0:
                same_bits(rows[row], stage[t_max + token], f"expert row {row}")
                assert routes[row].item() == (t_max + token) * top_k + k
    assert int((routes >= 0).sum()) == 6

    weights = torch.rand(rows.shape[0], generator=g, device=device)
    partials = [torch.zeros((2, t_max, WIDE), dtype=torch.bfloat16, device=device) for _ in range(2)]
    reduce_triton.pre_reduce_put(rows, local, tokens, Peers.of(partials), 1, weights)
    sums = partial_sums_torch(rows, to, weights[to.clamp(min=0).long()])
    same_bits(partials[1][1, t], sums, "partial sums")
    partials[1][1, t] = 0
    assert not any(p.any() for p in partials), "another partial was written"

    partials[1][1, t] = sums
    dest = torch.full((t_max, 1), -1, dtype=torch.int32, device=device)
    dest[t] = 1
    out = torch.ones((t_max, WIDE), dtype=torch.bfloat16, device=device)
    reduce_triton.sum_partials(partials[1], dest, out)
    same_bits(out[t], sums, "sums of partials")
    out[t] = 0
    assert not out.any()

    fan_out_triton.fill_tail(rows, torch.tensor([FAR - 5], device=device), 1)
    assert (rows[FAR - 5 :] == 1).all() and not (rows[4 : FAR - 5] == 1).any()


def test_rows_past_31_bits_are_pulled(device: str, room: None) -> None:
    """Catches 32-bit offsets in the rows that are pulled and in the gathered copy."""
    g = torch.Generator(device=device).manual_seed(2)
    num_tokens, top_k = FAR // 8 + 100, 8
    far = torch.randn((FAR + 1000, WIDE), generator=g, device=device, dtype=torch.bfloat16)
    peers = [far, far.flip(0)[:900].contiguous()]
    dest_rank = torch.randint(-1, 2, (num_tokens, top_k), generator=g, device=device, dtype=torch.int32)
    dest_row = torch.randint(0, FAR + 1000, (num_tokens, top_k), generator=g, device=device, dtype=torch.int32)
    dest_row = torch.where(dest_rank == 1, dest_row % 900, dest_row)
    weights = torch.rand((num_tokens, top_k), generator=g, device=device)
    out = torch.empty((num_tokens, WIDE), dtype=torch.bfloat16, device=device)
    gathered = torch.empty((num_tokens, top_k, WIDE), dtype=torch.bfloat16, device=device)
    reduce_triton.get_reduce(Peers.of(peers), dest_rank, dest_row, weights, out, num_rows=FAR + 1000, gathered=gathered)
    for part in (slice(0, 200), slice(num_tokens - 200, num_tokens)):
        ranks, rows = dest_rank[part], dest_row[part]
        same_bits(gathered[part], get_rows_torch(peers, ranks, rows), "pulled rows")
        same_bits(out[part], get_reduce_torch(peers, ranks, rows, weights[part]), "pulled sums")


# Route maps


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("world,experts,top_k", [(1, 1, 1), (2, 16, 4), (3, 36, 8), (4, 8, 3), (8, 512, 8)])
def test_route_maps_equal_the_reference(world: int, experts: int, top_k: int, dtype: torch.dtype, device: str) -> None:
    """Catches a row or a drop that differs from routing.build_route_map under one of the four policies."""
    for seed in range(max(4, SETS // 4)):
        g = torch.Generator().manual_seed(seed)
        tokens = torch.randint(0, (5, 100, 700)[seed % 3], (world,), generator=g).tolist()
        control.check_route_map(world, experts, top_k, tokens, seed, device, dtype)


def test_route_map_of_a_large_batch(device: str) -> None:
    """Catches prefix sums that go wrong past a block of blocks, at the shape of a benchmark."""
    control.check_route_map(2, 128, 8, [16384, 16000], 0, device)
    control.check_map_failures(device)


def test_route_map_in_a_graph(device: str) -> None:
    """Catches anything in the route map's kernels that depends on the host from launch to launch."""
    experts, top_k, num_tokens, capacity = 16, 4, 500, CapacityConfig("rank", 1.0)
    ids = torch.zeros((num_tokens, top_k), dtype=torch.int64, device=device)
    out = route_map.DeviceMap.empty(num_tokens, top_k, experts, 1, device)
    record = torch.zeros((1, route_map.HEADER + experts), dtype=torch.int64, device=device)

    def build() -> None:
        route_map.count(ids, out.block_counts, out.flags)
        route_map.offsets_and_record(out.block_counts, record[0], (0, 0, 0, num_tokens))
        route_map.accept(record, out, rank=0, capacity=capacity, top_k=top_k, bound=num_tokens * top_k)
        route_map.build(ids, out, rank=0, bound=num_tokens * top_k)

    build()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        build()
    for seed in range(20):
        g = torch.Generator(device=device).manual_seed(seed)
        ids.copy_(torch.randint(-1, experts, ids.shape, generator=g, device=device))
        graph.replay()
        counts = count_routes(ids, experts)[None]
        want = build_route_map(ids, counts, torch.tensor([num_tokens], device=device), rank=0, capacity=capacity)
        for name in ("dest_rank", "dest_row", "offsets", "accepted"):
            same_bits(getattr(out, name), getattr(want, name), f"{name} of replay {seed}")


# Signals


@pytest.mark.parametrize("world", [1, 2, 8])
def test_signals(world: int, device: str) -> None:
    """Catches counters, records or an abort that do not reach every rank."""
    control.check_posts(world, device)
    control.check_exchanges(world, device)
    control.check_abort(world, device)


def test_a_late_peer_ends_the_wait(device: str) -> None:
    """Catches a wait that hangs or blames the wrong rank."""
    control.check_late_peer(4, device)


def test_a_failure_reaches_pinned_host_memory(device: str) -> None:
    """Catches a status that the host could only read by waiting for the device."""
    ranks = control.Control.of_all(2, device, pinned=True)
    ranks[0].post()
    ranks[0].wait(timeout_s=0.05)
    torch.cuda.synchronize()
    assert ranks[0].status.tolist() == [control.sync.TIMED_OUT, control.CODE, 2]


def test_a_wait_holds_its_stream(device: str) -> None:
    """Catches a wait that lets go before the peer has signalled, and one that does not see the signal at all."""
    torch.cuda._sleep(1)  # nothing may be loaded for the first time while a kernel spins
    for _ in range(20):
        ranks = control.Control.of_all(2, device)
        seen, payload = torch.zeros(1, device=device), torch.zeros(1, device=device)
        slow = torch.cuda.Stream()
        torch.cuda.synchronize()
        ranks[0].post()
        ranks[0].wait()
        seen.copy_(payload)
        with torch.cuda.stream(slow):
            torch.cuda._sleep(2_000_000)
            payload.fill_(7.0)
            ranks[1].post()
        torch.cuda.synchronize()
        assert seen.item() == 7.0
        assert ranks[0].failure() == (control.sync.OK, 0, 0)


def test_a_stopped_group_frees_a_waiting_stream(device: str) -> None:
    """Catches a spin that looks at the abort word only once."""
    ranks = control.Control.of_all(2, device)
    side = torch.cuda.Stream()
    others = control.Control.of_all(2, device)
    control.sync.set_abort(others[0].at(control.ABORT), 5)  # nothing may be loaded for the first time during the spin
    torch.cuda._sleep(1)
    torch.cuda.synchronize()
    start = time.monotonic()
    ranks[0].post()
    ranks[0].wait(timeout_s=60.0)
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        control.sync.set_abort(ranks[1].at(control.ABORT), 5)
    torch.cuda.synchronize()
    assert time.monotonic() - start < 20
    assert ranks[0].failure() == (control.sync.ABORTED, control.CODE, 2)


def test_exchanges_in_a_graph(device: str) -> None:
    """Catches counters or mailbox turns that a replay repeats instead of carrying on."""
    world, length = 2, 40
    ranks = control.Control.of_all(world, device)
    records = torch.zeros((world, length), dtype=torch.int64, device=device)
    got: list[Tensor] = []

    def step() -> list[Tensor]:
        for c in ranks:
            c.send(records[c.rank])
        found = [c.receive(length) for c in ranks]
        for c in ranks:
            c.post()
        for c in ranks:
            c.wait()
        return found

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step()
    for turn in range(50):
        records.copy_(torch.randint(-(2**62), 2**62, (world, length), device=device))
        graph.replay()
        for found in got:
            same_bits(found, records, f"records of replay {turn}")
    for c in ranks:
        assert c.failure() == (control.sync.OK, 0, 0)
        assert c.counter.tolist() == [2 * 51, 51]
