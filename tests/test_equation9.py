"""What expert parallelism divides and what it moves: parameters and gradients (report, equation 9), rows, bytes.

Legend: T tokens of a rank, K routes per token, E experts, D hidden size, F expert width, M the EP_MP degree, P_E routed
expert parameters of the whole model.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from ep_plugin.layer import moe_step
from ep_plugin.topology import experts_of
from tests.moe import PATHS, Problem, make_experts, make_inputs

EXPERTS, TOP_K, TOKENS, HIDDEN, WIDTH = 8, 4, 16, 12, 6
P_E = EXPERTS * (2 * WIDTH * HIDDEN + HIDDEN * WIDTH + 2 * WIDTH + HIDDEN)


def balanced_step(rank: int, world: int) -> list[dict[str, int]]:
    """Token t of every rank takes experts t, t + 1, … modulo E: T·K/E routes for every expert from every rank."""
    problem = Problem(
        (TOKENS,) * world, num_experts=EXPERTS, top_k=TOP_K, hidden=HIDDEN, width=WIDTH, dtype=torch.float32
    )
    mine = make_inputs(problem)[rank]
    idx = (torch.arange(TOKENS)[:, None] + torch.arange(TOP_K)) % EXPERTS
    measured = []
    for path in PATHS:
        dispatcher, experts = problem.dispatcher(path), make_experts(problem, rank, world)
        states = []
        x, weight = mine.x.clone().requires_grad_(), mine.weight.clone().requires_grad_()
        out = moe_step(dispatcher, x, idx, weight, experts, observe=states.append)
        out.backward(mine.upstream)
        measured.append(
            {
                "parameters": sum(p.numel() for p in experts.parameters()),
                "gradient elements": sum(p.grad.numel() for p in experts.parameters()),
                "experts": experts.up.shape[0],
                "rows": states[0].num_rows,
                "rows of each expert": set(states[0].map.offsets.diff().tolist()),
            }
        )
        dispatcher.close()
    return measured


@pytest.mark.parametrize("world", [1, 2, 4, pytest.param(8, marks=pytest.mark.slow)])
def test_each_rank_stores_its_share_and_gets_as_many_rows_as_it_sends(pool, world):
    """Report, equation 9: P_E / M parameters and gradient elements a rank; T·K rows under balanced routes, whatever M.
    Fault: experts stored or reduced twice; a padded or uneven row count."""
    assert P_E % world == 0
    for rank, measured in enumerate(pool.run(balanced_step, world)):
        assert len(experts_of(EXPERTS, world, rank)) == EXPERTS // world
        for path, found in zip(PATHS, measured, strict=True):
            assert found == {
                "parameters": P_E // world,
                "gradient elements": P_E // world,
                "experts": EXPERTS // world,
                "rows": TOKENS * TOP_K,
                "rows of each expert": {world * TOKENS * TOP_K // EXPERTS},
            }, path


def bytes_of_a_step(rank: int, world: int, problem: Problem) -> dict[tuple[str, str], tuple[int, int, int]]:
    """Bytes sent in forward, in backward, and in one that needs no gradient of x, as counted by the dispatcher."""
    mine, experts = make_inputs(problem)[rank], make_experts(problem, rank, world)
    sent = {}
    for path, weight_at in (("dedup", "hidden"), ("dedup", "output"), ("route", "hidden"), ("route", "source")):
        dispatcher = problem.dispatcher(path, weight_at)
        counted = [0]
        for need_x in (True, False):
            x, weight = mine.x.clone().requires_grad_(need_x), mine.weight.clone().requires_grad_()
            out = moe_step(dispatcher, x, mine.idx, weight, experts)
            counted.append(dispatcher.stats()["bytes_sent"])
            out.backward(mine.upstream)
            counted.append(dispatcher.stats()["bytes_sent"])
        dispatcher.close()
        forward, backward, again, without_x = (b - a for a, b in itertools.pairwise(counted))
        if again != forward:
            raise AssertionError(f"{forward} bytes in the first forward and {again} in the second")
        sent[path, weight_at] = (forward, backward, without_x)
    return sent


@pytest.mark.parametrize(
    ("tokens", "routes", "policy"),
    [((64, 64), "distinct", "dropless"), ((64, 0, 40, 64), "distinct", "dropless"), ((30, 0, 40, 8), "any", "expert")],
)
def test_bytes_sent_are_those_of_distinct_ranks_or_of_routes(pool, tokens, routes, policy):
    """Fault: dedup sends a token to a rank more than once, or back; one-row counts or sends dropped routes; the own
    rank's rows count as sent. Dedup sends a row for every (token, other rank) there and back, the one-row form one for
    every route to another rank."""
    world = len(tokens)
    problem = Problem(
        tokens, routes, num_experts=8, top_k=8 if routes == "distinct" else 5, hidden=6, policy=policy, factor=0.9
    )
    row = problem.hidden * problem.dtype.itemsize
    ranks = kept_ranks(problem)
    for rank, sent in enumerate(pool.run(bytes_of_a_step, world, problem)):
        own = ranks[rank]
        to_others = sum(len({r for r in token if r is not None} - {rank}) for token in own)
        for_others = sum(rank in token for source in range(world) if source != rank for token in ranks[source])
        by_route = sum(r is not None and r != rank for token in own for r in token)
        for (path, weight_at), (forward, backward, without_x) in sent.items():
            there, back = (to_others, for_others) if path == "dedup" else (by_route, by_route)
            assert forward == backward == (there + back) * row, (rank, path, weight_at)
            assert without_x == there * row, (rank, path, weight_at)
        if routes == "distinct" and world == 2 and own:
            assert by_route == 4 * to_others, "top-8 on two ranks: dedup sends a quarter"


def kept_ranks(problem: Problem) -> list[list[list[int | None]]]:
    """Of every source and token: the expert rank of each route, None where it is dropped or not asked for."""
    from ep_plugin.oracle import accepted_routes

    ids = [i.idx for i in make_inputs(problem)]
    routes = accepted_routes(ids, problem.capacity, world=problem.world, num_experts=problem.num_experts)
    ranks: list[list[list[int | None]]] = [[[None] * problem.top_k for _ in range(t)] for t in problem.tokens]
    for rank, mine in enumerate(routes):
        for route in mine:
            ranks[route.source][route.token][route.k] = rank
    return ranks


def test_uniform_routes_touch_the_expected_number_of_distinct_ranks(pool):
    """Fault: dedup's saving differs from what its arithmetic promises: top-K of E experts without replacement reaches
    M·(1 − C(E − E/M, K)/C(E, K)) ranks on average."""
    from math import comb

    world, experts, top_k, tokens = 4, 16, 4, 512
    problem = Problem((tokens,) * world, "distinct", num_experts=experts, top_k=top_k, hidden=2, width=2)
    expected = world * (1 - comb(experts - experts // world, top_k) / comb(experts, top_k))
    row = problem.hidden * problem.dtype.itemsize
    sent = pool.run(bytes_of_a_step, world, problem)
    dedup = sum(s["dedup", "hidden"][0] for s in sent) / (2 * row * tokens * world)
    route = sum(s["route", "hidden"][0] for s in sent) / (2 * row * tokens * world)
    others = (world - 1) / world  # of the ranks (and routes) of a token, those that are not its own
    assert dedup == pytest.approx(expected * others, rel=0.03)
    assert route == pytest.approx(top_k * others, rel=0.03)
