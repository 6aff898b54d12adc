"""What ``ep-bench`` says a movement must move at least, and how near to the machine's limits it came."""

from __future__ import annotations

import pytest
import torch

from ep_plugin.bench.limits import Bytes, Limits, Traffic, against, least_bytes, said
from ep_plugin.config import EPConfig
from ep_plugin.dispatch import build_dispatcher

# Two ranks of two experts each; rank 0's five tokens and rank 1's two.
IDX = (
    torch.tensor([[0, 1], [0, 2], [2, 3], [-1, -1], [3, -1]]),
    torch.tensor([[0, 2], [2, 3]]),
)


def traffic() -> Traffic:
    return Traffic(
        routes=torch.tensor([[3, 4], [1, 3]]),
        unique=torch.tensor([[2, 3], [1, 2]]),
        tokens=torch.tensor([5, 2]),
        routed=torch.tensor([4, 2]),
    )


def counted(rank: int, world: int) -> tuple[Traffic, list[int]]:
    config = EPConfig(dispatcher="rowwise", form="route", weight_at="source")
    dispatcher = build_dispatcher(config, num_experts=4, top_k=2, hidden_size=8, dtype=torch.float32)
    dest = dispatcher.plan(IDX[rank]).map.dest_rank
    dispatcher.close()
    return Traffic.of(IDX[rank], 4), [int((dest == p).sum()) for p in range(world)]


def test_traffic_counts_routes_and_tokens_of_every_rank(pool):
    """Catches a dropped route that counts, a token that counts twice, and ranks that disagree."""
    for rank, (found, moved) in enumerate(pool.run(counted, 2)):
        for name, value in vars(traffic()).items():
            assert torch.equal(getattr(found, name), value), name
        assert moved == traffic().routes[rank].tolist()


# Rank 1 receives 7 rows, 5 tokens and 3 of them of rank 0; rank 0 has most tokens. By hand, the busier rank of each:
LEAST = {
    ("local", "dispatch"): (0, 4 + 7),
    ("local", "combine"): (0, 7 + 5),
    ("route", "dispatch"): (4, max(4 + 4, 2 + 7)),
    ("route", "combine"): (4, max(4 + 5, 7 + 2)),
    ("dedup", "dispatch"): (3, max(4 + 2 * 1 + 4, 2 + 2 * 3 + 7)),
    ("dedup", "combine"): (3, max(4 + 2 * 3 + 5, 7 + 2 * 1 + 2)),
    ("block", "dispatch"): (4, max(4 + 2 * 7 + 3 * 4, 2 + 2 * 4 + 3 * 7)),
    ("block", "combine"): (4, max(3 * 4 + 2 * 7 + 5, 3 * 7 + 2 * 4 + 2)),
    ("packed", "dispatch"): (4, 11),
    ("packed", "combine"): (4, 11),
}


@pytest.mark.parametrize(("form", "movement"), LEAST)
def test_least_bytes_are_those_of_the_busiest_rank(form, movement):
    """Catches own rows that cross the link, rows of the wrong end, and a copy that is left out or counted twice."""
    link, memory = LEAST[form, movement]
    assert least_bytes(form, movement, traffic(), 10, 2) == Bytes(link * 10, memory * 10)


def test_one_expert_of_a_rank_needs_no_permutation():
    """Catches two copies of block's that are counted where it does not make them."""
    assert least_bytes("block", "dispatch", traffic(), 1, 1).memory == max(4 + 2 * 7 + 4, 2 + 2 * 4 + 7)


def test_the_limit_that_binds_is_the_slower_one():
    """Catches a share of the wrong limit, units that are off, and a link that is taken for free when not measured."""
    moved = Bytes(link=3 * 10**9, memory=10 * 10**9)
    by_link = against(Limits(100.0, 1000.0), moved, 60.0)
    assert (by_link["binds"], by_link["limit_ms"]) == ("link", pytest.approx(30.0))
    assert by_link["share"] == pytest.approx(0.5)
    assert (by_link["link_gb_s"], by_link["memory_gb_s"]) == (pytest.approx(50.0), pytest.approx(1e4 / 60))
    assert said(by_link) == "link 50.0 GB/s, memory 166.7 GB/s, 50% of the link's limit"
    assert against(Limits(100.0, 200.0), moved, 100.0)["binds"] == "memory"
    assert against(Limits(None, 200.0, "why"), moved, 100.0)["share"] is None
    assert against(Limits(None, 200.0, "why"), Bytes(0, 10**9), 10.0)["share"] == pytest.approx(0.5)
    assert "not measured (why)" in str(Limits(None, 200.0, "why"))


@pytest.mark.parametrize("wrong", [("unique", "dispatch"), ("dedup", "plan")])
def test_unknown_forms_and_movements_are_named(wrong):
    """Catches a form without a formula."""
    with pytest.raises(ValueError, match=f"{wrong[0]}|{wrong[1]}"):
        least_bytes(*wrong, traffic(), 1, 1)
