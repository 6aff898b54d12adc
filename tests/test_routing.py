"""The route map and the capacity policies, against the report's figures, brute force and exact arithmetic."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from ep_plugin.config import POLICIES, CapacityConfig
from ep_plugin.oracle import accepted_routes
from ep_plugin.routing import RouteMap, accept, build_route_map, count_routes, drop_metrics, rows_bound

# The report's two-rank, top-2 example (Figures 15 and 16): experts 0 and 1 on rank 0, experts 2 and 3 on rank 1.
FIGURE_TOKENS = ["ABCDE", "FGHIJ"]
FIGURE_IDS = [
    torch.tensor([[1, 2], [0, 1], [3, 1], [0, 1], [1, 2]]),
    torch.tensor([[2, 0], [0, 1], [3, 0], [1, 3], [1, 2]]),
]


def maps_of_group(ids: list[Tensor], num_experts: int, capacity: CapacityConfig) -> list[RouteMap]:
    """What every rank of a group builds from the same exchange: slices of one record per source, so strided."""
    records = torch.stack([torch.cat([torch.tensor([len(idx)]), count_routes(idx, num_experts)]) for idx in ids])
    return [
        build_route_map(idx, records[:, 1:], records[:, 0], rank=rank, capacity=capacity)
        for rank, idx in enumerate(ids)
    ]


def destinations(route_map: RouteMap, names: str) -> dict[str, list[tuple[int, int]]]:
    """(rank, row) of every route of every token."""
    pairs = torch.stack([route_map.dest_rank, route_map.dest_row], dim=-1).tolist()
    return {name: [tuple(route) for route in routes] for name, routes in zip(names, pairs, strict=True)}


def test_figure_16_every_destination_row() -> None:
    """Fault: any deviation from the report's map: Figure 16's rows, with E→1 over rank 0's quota for source 0."""
    maps = maps_of_group(FIGURE_IDS, 4, CapacityConfig("source", 1.2))
    assert destinations(maps[0], FIGURE_TOKENS[0]) == {
        "A": [(0, 5), (1, 0)],
        "B": [(0, 0), (0, 6)],
        "C": [(1, 4), (0, 7)],
        "D": [(0, 1), (0, 8)],
        "E": [(-1, -1), (1, 1)],
    }
    assert destinations(maps[1], FIGURE_TOKENS[1]) == {
        "F": [(1, 2), (0, 2)],
        "G": [(0, 3), (0, 9)],
        "H": [(1, 5), (0, 4)],
        "I": [(0, 10), (1, 6)],
        "J": [(0, 11), (1, 3)],
    }
    assert maps[0].offsets.tolist() == [0, 5, 12]
    assert maps[1].offsets.tolist() == [0, 4, 7]


def test_figure_15_storage_order() -> None:
    """Fault: rows of an expert rank not in (local expert, source, token) order, as after the global permutation."""
    maps = maps_of_group(FIGURE_IDS, 4, CapacityConfig("source", 1.2))
    stored: dict[tuple[int, int], str] = {}
    for route_map, names in zip(maps, FIGURE_TOKENS, strict=True):
        for name, routes in destinations(route_map, names).items():
            stored.update(dict.fromkeys((route for route in routes if route != (-1, -1)), name))
    assert "".join(stored[0, row] for row in range(12)) == "BDFGH" + "ABCDGIJ"
    assert "".join(stored[1, row] for row in range(7)) == "AEFJ" + "CHI"
    assert len(stored) == 19


def test_figure_routes_under_rank_drop_the_last_route_instead() -> None:
    """Fault: a rank's 12 rows shared per source under ``rank``: the last route in row order, J→1, is the one over."""
    maps = maps_of_group(FIGURE_IDS, 4, CapacityConfig("rank", 1.2))
    assert destinations(maps[0], FIGURE_TOKENS[0])["E"] == [(0, 9), (1, 1)]
    assert destinations(maps[1], FIGURE_TOKENS[1]) == {
        "F": [(1, 2), (0, 2)],
        "G": [(0, 3), (0, 10)],
        "H": [(1, 5), (0, 4)],
        "I": [(0, 11), (1, 6)],
        "J": [(-1, -1), (1, 3)],
    }
    assert maps[0].offsets.tolist() == [0, 5, 12]
    assert [float(drop_metrics(m)["drop_rate"]) for m in maps] == [1 / 20, 1 / 20]


@pytest.mark.parametrize("policy", ["rank", "source"])
def test_figure_capacity_is_twelve_rows(policy: str) -> None:
    """Fault: f·K·ΣT/M taken in floating point or over local tokens only."""
    assert rows_bound(CapacityConfig(policy, 1.2), top_k=2, max_tokens=5, world=2, num_experts=4) == 12


FACTORS = [0.01, 0.3, 0.5, 0.75, 1.0, 1.1, 1.2, 1.25, 4 / 3, 2.0, 7.5, 1000.0]


def every_other(idx: Tensor) -> Tensor:
    """The same ids as int8 with gaps of 99 between them."""
    spread = torch.full((2 * len(idx), 3 * idx.shape[1]), 99, dtype=torch.int8)
    return spread[::2, ::3].copy_(idx)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "int64": lambda idx: idx,
    "int32": lambda idx: idx.int(),
    "int16 by column": lambda idx: idx.short().T.contiguous().T,
    "int8 with gaps": every_other,
}


@st.composite
def groups(draw: st.DrawFn) -> tuple[list[Tensor], int, CapacityConfig]:
    """Routes of all ranks, E, and a capacity: ragged and empty T, −1, repeats, one hot expert, any layout."""
    world = draw(st.integers(1, 4))
    num_experts = world * draw(st.integers(1, 3))
    top_k = draw(st.integers(1, min(4, num_experts)))
    low = draw(st.sampled_from([-1, 0]))
    hot = draw(st.integers(low, num_experts - 1))
    expert = draw(st.sampled_from([st.integers(low, num_experts - 1), st.just(hot), st.sampled_from([hot, -1])]))
    layout = LAYOUTS[draw(st.sampled_from(sorted(LAYOUTS)))]
    ids = []
    for _ in range(world):
        num_tokens = draw(st.integers(0, 6))
        flat = draw(st.lists(expert, min_size=num_tokens * top_k, max_size=num_tokens * top_k))
        ids.append(layout(torch.tensor(flat, dtype=torch.int64).view(num_tokens, top_k)))
    capacity = CapacityConfig(draw(st.sampled_from(POLICIES)), draw(st.sampled_from(FACTORS)))
    return ids, num_experts, capacity


@settings(max_examples=400, deadline=None, derandomize=True)
@given(groups())
@example(([torch.zeros(0, 2, dtype=torch.int64)] * 2, 4, CapacityConfig("rank", 1.0)))
@example(([torch.full((3, 2), -1)] * 2, 4, CapacityConfig("source", 1.0)))
@example(([torch.tensor([[1, 1], [1, 1]])] * 2, 2, CapacityConfig("expert", 1.0)))
def test_map_is_brute_force(group: tuple[list[Tensor], int, CapacityConfig]) -> None:
    """Fault: any rank that disagrees with accepting routes one by one, in rows, drops, counts, offsets or bound."""
    ids, num_experts, capacity = group
    world, top_k = len(ids), ids[0].shape[1]
    maps = maps_of_group(ids, num_experts, capacity)
    expected_rank = [torch.full(idx.shape, -1, dtype=torch.int32) for idx in ids]
    expected_row = [torch.full(idx.shape, -1, dtype=torch.int32) for idx in ids]
    expected_accepted = torch.zeros(world, num_experts, dtype=torch.int64)
    bound = rows_bound(capacity, top_k, max(len(idx) for idx in ids), world, num_experts)
    local = num_experts // world
    for rank, routes in enumerate(accepted_routes(ids, capacity, world=world, num_experts=num_experts)):
        for row, route in enumerate(routes):
            expected_rank[route.source][route.token, route.k] = rank
            expected_row[route.source][route.token, route.k] = row
            expected_accepted[route.source, route.expert] += 1
        experts = [route.expert for route in routes]
        own = range(rank * local, (rank + 1) * local)
        assert maps[rank].offsets.tolist() == [0, *(sum(x <= e for x in experts) for e in own)]
        if capacity.policy != "dropless":
            assert len(routes) <= bound
    asked = torch.tensor([[int((idx == e).sum()) for e in range(num_experts)] for idx in ids])
    for route_map, rank_of, row_of in zip(maps, expected_rank, expected_row, strict=True):
        assert route_map.dest_rank.dtype == route_map.dest_row.dtype == torch.int32
        assert torch.equal(route_map.dest_rank, rank_of)
        assert torch.equal(route_map.dest_row, row_of)
        assert torch.equal(route_map.counts, asked)
        assert torch.equal(route_map.accepted, expected_accepted)


def test_earlier_routes_win_inside_source_and_expert() -> None:
    """Fault: a repeated expert counted once, or a later token kept before an earlier one."""
    ids = [torch.tensor([[0, 0, 1], [0, 2, 0]])]
    route_map = maps_of_group(ids, 3, CapacityConfig("expert", 1.5))[0]  # ceil(1.5 · 3 · 2 / 3) = 3 rows an expert
    assert route_map.dest_row.tolist() == [[0, 1, 3], [2, 4, -1]]


def test_hot_expert_starves_later_experts_under_rank_but_not_under_expert() -> None:
    """Fault: policies mixed up. One hot expert: ``rank`` drops the last experts whole, ``expert`` the hot one only."""
    counts = torch.tensor([[65, 5, 5, 5, 5, 5, 5, 5]] * 2)
    counts = torch.cat([counts, torch.zeros(2, 8, dtype=torch.int64)], dim=1)  # 2 ranks of 8 experts, rank 1 idle
    tokens = torch.tensor([50, 50])
    by_rank = accept(counts, tokens, CapacityConfig("rank", 1.5), 2).sum(0)
    assert by_rank[:8].tolist() == [130, 10, 10, 0, 0, 0, 0, 0]
    by_source = accept(counts, tokens, CapacityConfig("source", 1.5), 2)
    assert by_source[:, :8].tolist() == [[65, 5, 5, 0, 0, 0, 0, 0]] * 2
    by_expert = accept(counts, tokens, CapacityConfig("expert", 1.5), 2)
    assert by_expert[:, :8].tolist() == [[10, 5, 5, 5, 5, 5, 5, 5]] * 2


def test_source_quota_is_equal_for_a_source_that_comes_late() -> None:
    """Fault: earlier sources take a later source's rows under ``source``; ``rank`` lets them."""
    counts = torch.tensor([[9, 0], [3, 0], [3, 0]])
    counts = torch.cat([counts, torch.zeros(3, 1, dtype=torch.int64)], dim=1)
    tokens = torch.tensor([9, 3, 3])
    assert accept(counts, tokens, CapacityConfig("rank", 1.8), 1)[:, 0].tolist() == [9, 0, 0]
    assert accept(counts, tokens, CapacityConfig("source", 1.8), 1)[:, 0].tolist() == [6, 2, 2]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    factor=st.floats(1e-6, 8.0),  # up to E
    tokens=st.lists(st.integers(0, 2**38), min_size=2, max_size=2),
    top_k=st.integers(1, 8),
)
@example(factor=1.1, tokens=[10, 0], top_k=1)  # 1.1 · 10 is 11.000000000000002 in floating point
@example(factor=0.5000000000001, tokens=[2, 2], top_k=4)  # just past 4: only the last decimal says so
@example(factor=4 / 3, tokens=[2**38, 2**38], top_k=8)
@example(factor=1.0, tokens=[2**31 - 1, 2**31 + 1], top_k=1)
def test_quotas_are_exact_int64(factor: float, tokens: list[int], top_k: int) -> None:
    """Fault: quotas in floating point or int32, or a product that overflows int64 for many tokens or many decimals."""
    f, world, num_experts = Fraction(str(factor)), 2, 8
    asked = torch.full((world, num_experts), 2**48)  # more than any quota
    for policy in ("rank", "source", "expert"):
        accepted = accept(asked, torch.tensor(tokens), CapacityConfig(policy, factor), top_k)
        if policy == "rank":
            rows = math.ceil(f * top_k * sum(tokens) / world)
            assert accepted.view(2, 2, 4).sum((0, 2)).tolist() == [rows, rows]
        elif policy == "source":
            quotas = [math.ceil(f * top_k * t / world) for t in tokens]
            assert accepted.view(2, 2, 4).sum(2).tolist() == [[q, q] for q in quotas]
        else:
            quotas = [math.ceil(f * top_k * t / num_experts) for t in tokens]
            assert accepted.tolist() == [[q] * num_experts for q in quotas]


@pytest.mark.parametrize("policy", POLICIES)
def test_counts_near_2_to_31_add_up_in_int64(policy: str) -> None:
    """Fault: cumulative sums in int32, which wrap and accept nothing or everything."""
    near = 2**31 - 1
    counts = torch.full((2, 4), near, dtype=torch.int32)
    accepted = accept(counts, torch.tensor([near, near], dtype=torch.int32), CapacityConfig(policy, 1.0), 4)
    # balanced: every expert is asked for exactly its share, so nothing is dropped
    assert accepted.dtype == torch.int64
    assert torch.equal(accepted, counts.long())


@pytest.mark.parametrize("policy", ["rank", "source", "expert"])
def test_enormous_factor_accepts_everything(policy: str) -> None:
    """Fault: a factor meant as "never drop" overflows the quota and drops everything."""
    tokens = torch.tensor([2**33, 1])
    counts = torch.tensor([[2**34, 0, 0, 0], [0, 2, 0, 0]])
    assert torch.equal(accept(counts, tokens, CapacityConfig(policy, 1e9), 2), counts)


def test_rows_past_int32_are_refused() -> None:
    """Fault: dest_row wraps to a negative row, which reads as a dropped route."""
    counts = torch.tensor([[1, 0], [2**31, 0]])
    with pytest.raises(ValueError, match=str(2**31 + 1)):
        build_route_map(
            torch.tensor([[0]]), counts, torch.tensor([1, 2**31]), rank=0, capacity=CapacityConfig("dropless")
        )
    with pytest.raises(ValueError, match=r"6442450944 rows per rank .*policy 'rank', factor 1.5"):
        rows_bound(CapacityConfig("rank", 1.5), top_k=4, max_tokens=2**30, world=8, num_experts=8)


def test_bound_counts_every_quota_that_rounds_up() -> None:
    """Fault: min(ceil(f·K·T_max), M·T_max·K) for all policies, which is too small when quotas round up per source."""
    shape = {"top_k": 1, "max_tokens": 3, "world": 2, "num_experts": 4}
    plain = min(math.ceil(1.0 * 1 * 3), 2 * 3 * 1)
    two_experts_on_rank_0 = torch.tensor([[1, 2, 0, 0], [2, 1, 0, 0]])
    used = {
        policy: int(accept(two_experts_on_rank_0, torch.tensor([3, 3]), CapacityConfig(policy, 1.0), 1).sum())
        for policy in ("rank", "source", "expert")
    }
    assert used == {"rank": 3, "source": 4, "expert": 4}
    assert used["source"] > plain
    assert rows_bound(CapacityConfig("rank", 1.0), **shape) == 3
    assert rows_bound(CapacityConfig("source", 1.0), **shape) == 4
    assert rows_bound(CapacityConfig("expert", 1.0), **shape) == 4
    assert rows_bound(CapacityConfig("dropless", 1.25), **shape) == 4
    for policy in POLICIES:  # never more than every route of the group
        assert rows_bound(CapacityConfig(policy, 50.0), **shape) == 6
        assert rows_bound(CapacityConfig(policy, 1.0), **{**shape, "max_tokens": 0}) == 0


def test_drop_metrics_are_of_the_group() -> None:
    """Fault: a drop rate per token or of this rank only, a load without dropped routes, or −1 counted as dropped."""
    ids = [torch.tensor([[0, -1], [0, 1], [0, -1]]), torch.tensor([[0, 3]])]
    maps = maps_of_group(ids, 4, CapacityConfig("expert", 0.5))  # 1 row per source and expert
    for rank, route_map in enumerate(maps):
        metrics = drop_metrics(route_map, bound=4)
        assert float(metrics["drop_rate"]) == pytest.approx(2 / 6)
        assert metrics["expert_load"].tolist() == [4, 1, 0, 1]
        assert float(metrics["buffer_use"]) == [3 / 4, 1 / 4][rank]
    assert "buffer_use" not in drop_metrics(maps[0])


def test_drop_rate_without_routes_is_zero() -> None:
    """Fault: 0/0 = NaN in the metrics of a step without routes."""
    route_map = maps_of_group(
        [torch.full((2, 2), -1), torch.zeros(0, 2, dtype=torch.int64)], 2, CapacityConfig("rank")
    )[0]
    assert float(drop_metrics(route_map)["drop_rate"]) == 0.0
    assert float(drop_metrics(route_map, bound=0)["buffer_use"]) == 0.0


@pytest.mark.parametrize(
    ("ids", "num_experts", "message"),
    [
        (torch.tensor([[0, 1], [2, 4]]), 4, r"expert id 4 of token 1 is outside \[-1, 4\)"),
        (torch.tensor([[0, 1], [-2, 1]]), 4, r"expert id -2 of token 1 is outside \[-1, 4\)"),
        (torch.tensor([[0, 1, 1]]), 2, "top_k=3 is larger than num_experts=2"),
        (torch.tensor([0, 1]), 2, r"topk_idx has shape \(2,\); expected \[T, K\]"),
        (torch.tensor([[0.0, 1.0]]), 2, "torch.float32; expected an integer dtype"),
        (torch.tensor([[True, False]]), 2, "torch.bool; expected an integer dtype"),
    ],
)
def test_bad_routes_are_quoted(ids: Tensor, num_experts: int, message: str) -> None:
    """Fault: an id that indexes another expert's count, or an error that does not say which value is wrong."""
    with pytest.raises(ValueError, match=message):
        count_routes(ids, num_experts)
    counts = torch.zeros(1, num_experts, dtype=torch.int64)
    with pytest.raises(ValueError, match=message):
        build_route_map(ids, counts, torch.tensor([len(ids)]), rank=0, capacity=CapacityConfig())


def test_bad_groups_are_quoted() -> None:
    """Fault: degrees or an exchange that do not fit, found late as a wrong row."""
    ids, tokens = torch.tensor([[0], [1]]), torch.tensor([2, 2])
    counts = torch.tensor([[1, 1], [1, 1]])

    def build(**changed: object) -> RouteMap:
        arguments = {"counts": counts, "tokens": tokens, "rank": 0, "capacity": CapacityConfig(), **changed}
        return build_route_map(ids, **arguments)  # type: ignore[arg-type]

    assert build().offsets.tolist() == [0, 2]
    with pytest.raises(ValueError, match="num_experts=3 is not divisible by the EP degree 2"):
        build(counts=torch.tensor([[1, 1, 0], [1, 1, 0]]))
    with pytest.raises(ValueError, match="capacity.policy='rnak' is not one of .*did you mean 'rank'"):
        build(capacity=CapacityConfig("rnak"))
    with pytest.raises(ValueError, match="rank 2 is not in the group of 2: expected 0 to 1"):
        build(rank=2)
    with pytest.raises(ValueError, match=r"tokens has shape \(3,\)"):
        build(tokens=torch.tensor([2, 2, 2]))
    with pytest.raises(ValueError, match=r"row 0 of the exchanged counts is \[2, 0\] .* asks for \[1, 1\]"):
        build(counts=torch.tensor([[2, 0], [1, 1]]))
    with pytest.raises(ValueError, match="for 3 tokens, but .* with 2 tokens"):
        build(tokens=torch.tensor([3, 2]))
    with pytest.raises(ValueError, match="num_experts=4 is not divisible by the EP degree 3"):
        rows_bound(CapacityConfig(), 1, 1, 3, 4)
    with pytest.raises(ValueError, match="top_k=5 is larger than num_experts=4"):
        rows_bound(CapacityConfig(), 5, 1, 2, 4)
    with pytest.raises(ValueError, match="max_tokens -1"):
        rows_bound(CapacityConfig(), 1, -1, 2, 4)


@pytest.mark.parametrize("policy", POLICIES)
def test_nothing_waits_for_the_device(policy: str) -> None:
    """Fault: a value or a data-dependent shape read on the host. Meta tensors have no values, so reading one fails."""
    with torch.device("meta"):
        ids = torch.empty(5, 2, dtype=torch.int32)
        counts = torch.stack([count_routes(ids, 4), torch.empty(4, dtype=torch.int64)])
        tokens = torch.empty(2, dtype=torch.int64)
    route_map = build_route_map(ids, counts, tokens, rank=0, capacity=CapacityConfig(policy, 1.2))
    metrics = drop_metrics(route_map, bound=12)
    assert {tensor.device.type for tensor in (*vars(route_map).values(), *metrics.values())} == {"meta"}
    assert route_map.dest_row.shape == (5, 2)
    with pytest.raises((RuntimeError, NotImplementedError)):  # the check can fail
        bool(metrics["drop_rate"] > 0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("policy", POLICIES)
def test_cuda_graph_gives_the_map_of_the_cpu(policy: str) -> None:
    """Fault: an operation that cannot be captured, or numbers that differ between devices."""
    capacity = CapacityConfig(policy, 0.8)
    gen = torch.Generator().manual_seed(0)
    steps = [[torch.randint(-1, 8, (37, 3), generator=gen) for _ in range(4)] for _ in range(3)]
    static = [idx.cuda() for idx in steps[0]]
    tokens = torch.full((4,), 37, device="cuda")

    def build() -> RouteMap:
        counts = torch.stack([count_routes(idx, 8) for idx in static])
        return build_route_map(static[1], counts, tokens, rank=1, capacity=capacity)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        build()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = build()
    for step in steps:
        for held, idx in zip(static, step, strict=True):
            held.copy_(idx)
        graph.replay()
        expected = maps_of_group(step, 8, capacity)[1]
        for name, value in vars(expected).items():
            assert torch.equal(getattr(captured, name).cpu(), value), name
