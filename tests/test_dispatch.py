"""Every dispatcher and form against the oracle: outputs, all gradients, rows and sums bit for bit, and its errors.

One call of the pool covers many cases, because a task costs more than a case.

Legend: T tokens of a rank, K routes per token, E experts, E_l experts of a rank, D hidden size, R rows of a rank.
"""

from __future__ import annotations

import itertools
from dataclasses import fields, replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ep_plugin.config import POLICIES
from ep_plugin.dispatch import Dispatched, RouteState
from ep_plugin.kernels.reduce import accumulation_dtype
from ep_plugin.layer import ForeignExperts, moe_step
from ep_plugin.oracle import accepted_routes, oracle_combine, oracle_rows
from tests.moe import (
    PATHS,
    WEIGHT_AT,
    Problem,
    differences,
    make_experts,
    make_inputs,
    oracle,
    oracles,
    poisoned_memory,
    run_step,
    same_bits,
)

Case = tuple[str, str, Problem]  # path, weight_at, problem


def ways(paths: tuple[str, ...] = PATHS) -> list[tuple[str, str]]:
    """Every path with every weight_at that it takes."""
    return [(p, w) for p, w in itertools.product(paths, WEIGHT_AT) if (p, w) != ("dedup", "source")]


def check_cases(rank: int, world: int, cases: list[Case]) -> list[str]:
    """Run every case twice on one dispatcher, so that the second finds used buffers; say what is wrong."""
    want = oracles(rank, world, [(problem, weight_at) for _, weight_at, problem in cases])
    wrong = []
    with poisoned_memory():
        for path, weight_at, problem in cases:
            dispatcher, experts = problem.dispatcher(path, weight_at), make_experts(problem, rank, world)
            mine = make_inputs(problem)[rank]
            first, second = (run_step(dispatcher, experts, mine) for _ in range(2))
            faults = differences(first, want[problem, weight_at], problem)
            faults += [
                f"{f.name} of the second step differs"
                for f in fields(first)
                if not same_bits(getattr(first, f.name), getattr(second, f.name))
            ]
            if dispatcher.stats().get("slots_in_use"):
                faults.append(f"slots are still leased: {dispatcher.stats()}")
            dispatcher.close()
            wrong += [f"rank {rank}, {path}, weight_at={weight_at}, {problem}: {fault}" for fault in faults]
    return wrong


def assert_right(pool, cases: list[Case]) -> None:
    world = cases[0][2].world
    wrong = [line for lines in pool.run(check_cases, world, cases, timeout=300) for line in lines]
    assert not wrong, f"{len(wrong)} faults\n" + "\n".join(wrong[:20])


@pytest.mark.parametrize("tokens", [(6,), (5, 0), (4, 7, 1), (5, 0, 9, 3)], ids=lambda tokens: f"{len(tokens)} ranks")
def test_every_path_weight_place_and_policy_in_float64(pool, tokens):
    """Fault: any wrong term in forward or backward, for any place of the router weight and any capacity policy, with
    ragged T and T = 0, −1 and repeated experts; poisoned memory that reaches a result."""
    policies = POLICIES if len(tokens) in (2, 4) else ("dropless", "rank")
    problems = [Problem(tokens, policy=policy, factor=0.8) for policy in policies]
    assert_right(pool, [(path, weight_at, problem) for problem in problems for path, weight_at in ways()])


@pytest.mark.parametrize("weight_at", WEIGHT_AT)
def test_local_against_the_oracle(weight_at):
    """Fault: the path without expert parallelism differs from the others, so that comparing with it means nothing."""
    for routes, policy, dtype in itertools.product(
        ("any", "one_expert", "even_experts", "none"), ("dropless", "expert"), (torch.float64, torch.bfloat16)
    ):
        for tokens in (7, 0):
            problem = Problem((tokens,), routes, policy=policy, dtype=dtype)
            with poisoned_memory():
                got = run_step(
                    problem.dispatcher("local", weight_at), make_experts(problem, 0, 1), make_inputs(problem)[0]
                )
            assert not differences(got, oracle(problem, weight_at)[0], problem), problem


ROUTE_SETS = {
    "T = 0 on every rank": Problem((0, 0, 0, 0)),
    "one token in all": Problem((0, 0, 1, 0)),
    "all to one rank": Problem((6, 2, 0, 5), "to_last_rank"),
    "all to one rank that has no tokens": Problem((6, 2, 5, 0), "to_last_rank"),
    "all to the own rank": Problem((3, 6, 0, 2), "to_own_rank"),
    "all to one expert, K times": Problem((4, 3, 0, 5), "one_expert"),
    "experts without rows": Problem((4, 3, 2, 5), "even_experts"),
    "no route at all": Problem((4, 3, 0, 2), "none"),
    "every route dropped but a few": Problem((9, 2, 0, 30), policy="rank", factor=0.01),
    "dropped, all to one rank": Problem((9, 2, 0, 30), "to_last_rank", policy="source", factor=0.5),
    "one expert a rank": Problem((4, 0, 3, 6), num_experts=4, top_k=2),
    "K = 1": Problem((4, 0, 3, 6), top_k=1),
    "K = E": Problem((4, 0, 3, 2), "distinct", num_experts=4, top_k=4),
    "odd widths": Problem((4, 0, 3, 6), hidden=7, width=3),
    "D = 1": Problem((4, 0, 3, 6), hidden=1, width=1),
    "more tokens than the first buffers": Problem((4, 200, 0, 1), hidden=8, width=4, top_k=2),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_route_sets(pool, dtype):
    """Fault: a path that needs tokens, rows, several experts or aligned widths on every rank. Faults seen elsewhere: a
    rank without rows crashes in views, or skips its experts so that their gradients are None."""
    problems = [replace(problem, dtype=dtype) for problem in ROUTE_SETS.values()]
    assert_right(pool, [(path, "hidden", problem) for path in PATHS for problem in problems])


def test_route_sets_with_weights_at_the_source_and_in_the_sum(pool):
    """Fault: weights returned, gathered or looked up for routes that are not there."""
    names = (
        "T = 0 on every rank",
        "all to one rank that has no tokens",
        "no route at all",
        "all to one expert, K times",
    )
    places = [way for way in ways() if way[1] in ("output", "source")]
    assert_right(pool, [(*way, ROUTE_SETS[name]) for way in places for name in names])


def test_dtypes_of_rows_weights_and_ids(pool):
    """Fault: float32 router weights beside bfloat16 rows (or bfloat16 weights) fail or come back in another dtype; ids
    in int32 or with strides are read wrongly."""
    tokens = (5, 0, 9, 3)
    problems = [
        Problem(tokens, dtype=rows, weight_dtype=weights, index_dtype=ids, strided=strided)
        for rows, weights, ids, strided in [
            (torch.bfloat16, torch.float32, torch.int32, True),
            (torch.bfloat16, torch.bfloat16, torch.int64, True),
            (torch.float32, torch.bfloat16, torch.int32, False),
            (torch.float32, torch.float64, torch.int16, False),
            (torch.float16, torch.float32, torch.int64, True),
        ]
    ]
    assert_right(pool, [(path, weight_at, problem) for problem in problems for path, weight_at in ways()])


@pytest.mark.slow
def test_eight_ranks(pool):
    """Fault: anything that holds for up to four ranks only."""
    problem = Problem((3, 0, 5, 2, 1, 4, 0, 6), num_experts=16, top_k=4, policy="source", factor=0.9)
    assert_right(
        pool,
        [
            (path, weight_at, problem)
            for path, weight_at in (*ways(("dedup",)), ("block", "hidden"), ("route", "source"))
        ],
    )


def elementwise(d: Dispatched, weight_at: str) -> Tensor:
    """Experts whose bits do not depend on how many rows there are: a different square function for every expert."""
    experts = torch.arange(len(d.offsets) - 1).repeat_interleave(d.tokens_per_expert)
    return squares(d.rows, experts, d.weights if weight_at in ("hidden", "input") else None)


def squares(rows: Tensor, experts: Tensor, weights: Tensor | None) -> Tensor:
    wide = rows.to(accumulation_dtype(rows.dtype))
    y = wide * 0.75 + wide * wide * (experts[:, None] + 0.3)
    return (y if weights is None else y * weights[:, None]).to(rows.dtype)


def check_bits(rank: int, world: int, problem: Problem, paths: tuple[str, ...]) -> list[str]:
    """Rows, weights, routes of rows, sums forward and backward of every path, bit for bit."""
    inputs, wrong = make_inputs(problem), []
    xs, idxs, ws = ([getattr(i, name) for i in inputs] for name in ("x", "idx", "weight"))
    shape = dict(world=world, num_experts=problem.num_experts)
    acc = accumulation_dtype(problem.dtype)
    routes = accepted_routes(idxs, problem.capacity, **shape)
    rows = oracle_rows(xs, idxs, problem.capacity, **shape)
    row_weights = [torch.tensor([float(ws[r.source][r.token, r.k]) for r in mine], dtype=acc) for mine in routes]
    local = problem.num_experts // world
    experts = [torch.tensor([r.expert % local for r in mine], dtype=torch.int64) for mine in routes]
    first_gradients: dict[str, tuple[Tensor, Tensor]] = {}

    for path, weight_at in ways(paths):
        if weight_at == "input":
            continue  # is "hidden" for these experts
        inside = weight_at == "hidden"
        ys = [squares(*step, w if inside else None) for *step, w in zip(rows, experts, row_weights, strict=True)]
        sums = oracle_combine(ys, idxs, problem.capacity, weights=None if inside else ws, **shape)
        seen: list[Dispatched] = []

        def watched(d: Dispatched, weight_at: str, seen: list[Dispatched] = seen) -> Tensor:
            d.rows.retain_grad()
            seen.append(d)
            return elementwise(d, weight_at)

        dispatcher = problem.dispatcher(path, weight_at)
        x, weight = xs[rank].clone().requires_grad_(), ws[rank].clone().requires_grad_()
        states: list[RouteState] = []
        out = moe_step(dispatcher, x, idxs[rank], weight, watched, observe=states.append)
        out.backward(inputs[rank].upstream)
        (d,) = seen
        asked, kept = sum(int((i >= 0).sum()) for i in idxs), sum(map(len, routes))
        if float(dispatcher.metrics(states.pop())["drop_rate"]) != (asked - kept) / asked:
            wrong.append(f"rank {rank}, {path}: drop rate is not {asked - kept} of {asked} routes")
        grad_rows: list = [None] * world
        dist.all_gather_object(grad_rows, d.rows.grad)
        t_max = dispatcher.max_tokens if path in ("dedup", "route") else max(problem.tokens)
        k = problem.top_k
        for name, got, want in [
            ("rows", d.rows, rows[rank]),
            ("weights", d.weights, row_weights[rank]),
            (
                "route_of_row",
                d.route_of_row,
                torch.tensor([(r.source * t_max + r.token) * k + r.k for r in routes[rank]]),
            ),
            ("out", out, sums[rank]),
            ("dx", x.grad, oracle_combine(grad_rows, idxs, problem.capacity, **shape)[rank]),
            ("gradient of rows", d.rows.grad, first_gradients.setdefault(weight_at, (d.rows.grad, weight.grad))[0]),
            ("dweight", weight.grad, first_gradients[weight_at][1]),
        ]:
            if want.numel() == got.numel() == 0:
                continue
            if not same_bits(got.detach(), want):
                wrong.append(f"rank {rank}, {path}, weight_at={weight_at}, {problem.dtype}: {name}\n{got}\n{want}")
        del d, seen, out
        dispatcher.close()
    return wrong


@pytest.mark.parametrize("tokens", [(7,), (6, 5), (5, 0, 9, 3)], ids=lambda tokens: f"{len(tokens)} ranks")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_rows_and_sums_have_the_same_bits_on_every_path(pool, tokens, dtype):
    """Fault: another row order, a partial rounded more than once or not at all, sums in another order of k or ranks,
    forward or backward; weights rounded on the way. Compared with the oracle, and gradients also between the paths."""
    problem = Problem(tokens, dtype=dtype, weight_dtype=torch.float32, top_k=5, policy="rank", factor=0.9)
    paths = (*PATHS, "local") if len(tokens) == 1 else PATHS
    wrong = [line for lines in pool.run(check_bits, len(tokens), problem, paths) for line in lines]
    assert not wrong, f"{len(wrong)} faults\n" + "\n".join(wrong[:5])


def same_token_everywhere(rank: int, world: int, problem: Problem) -> list[tuple[str, str, list[Tensor]]]:
    """Every rank's results for one token that all ranks have, each at another place among its own tokens."""
    mine, common = make_inputs(problem)[rank], make_inputs(problem)[0]
    place = (2 * rank + 1) % problem.tokens[rank]
    for name in ("x", "idx", "weight", "upstream"):
        getattr(mine, name)[place] = getattr(common, name)[0].clone()
    results = []
    for path, weight_at in ways():
        dispatcher = problem.dispatcher(path, weight_at)
        x, weight = mine.x.clone().requires_grad_(), mine.weight.clone().requires_grad_()
        out = moe_step(dispatcher, x, mine.idx, weight, elementwise)
        out.backward(mine.upstream)
        dispatcher.close()
        results.append((path, weight_at, [out[place].detach(), x.grad[place], weight.grad[place]]))
    return results


def test_equal_tokens_get_equal_bits_on_every_rank(pool):
    """Fault: the own rank's partial is not rounded like the others', or sums start at the own rank."""
    problem = Problem(
        (3, 7, 4, 6), "distinct", dtype=torch.bfloat16, weight_dtype=torch.float32, num_experts=8, top_k=6
    )
    first, *others = pool.run(same_token_everywhere, problem.world, problem)
    for rank, other in enumerate(others, 1):
        for (path, weight_at, want), (_, _, got) in zip(first, other, strict=True):
            for name, a, b in zip(("out", "dx", "dweight"), got, want, strict=True):
                assert same_bits(a, b), f"{path}, weight_at={weight_at}: {name} of rank {rank} {a} and of rank 0 {b}"


def check_subsets(rank: int, world: int, problem: Problem) -> list[str]:
    """Gradients of every subset of (x, router weights, experts) against those of all three."""
    mine, wrong = make_inputs(problem)[rank], []
    for path, weight_at in ways():
        dispatcher, experts = problem.dispatcher(path, weight_at), make_experts(problem, rank, world)
        full = run_step(dispatcher, experts, mine)
        for wanted in itertools.product((False, True), repeat=3):
            need_x, need_weight, need_experts = wanted
            x = mine.x.clone().requires_grad_(need_x)
            weight = mine.weight.clone().requires_grad_(need_weight)
            experts.zero_grad()
            experts.requires_grad_(need_experts)
            out = moe_step(dispatcher, x, mine.idx, weight, experts)
            if any(wanted):
                out.backward(mine.upstream)
            got = [out.detach(), x.grad, weight.grad, *(p.grad for p in experts.parameters())]
            for f, value in zip(fields(full), got, strict=True):
                needed = {"out": True, "dx": need_x, "dweight": need_weight}.get(f.name, need_experts)
                if (value is not None) != needed or (
                    needed and not torch.allclose(value, getattr(full, f.name), 1e-12, 1e-12)
                ):
                    wrong.append(
                        f"rank {rank}, {path}, weight_at={weight_at}, (x, weights, experts)={wanted}: {f.name}"
                    )
        with torch.no_grad():
            out = moe_step(dispatcher, mine.x, mine.idx, mine.weight, experts)
        if out.requires_grad or not torch.allclose(out, full.out, 1e-12, 1e-12):
            wrong.append(f"rank {rank}, {path}, weight_at={weight_at}: out under no_grad")
        del out
        if dispatcher.stats().get("slots_in_use"):
            wrong.append(f"rank {rank}, {path}, weight_at={weight_at}: {dispatcher.stats()} at the end")
        dispatcher.close()
    return wrong


def test_gradients_of_any_subset_of_inputs(pool):
    """Fault: frozen experts, a frozen router or an input without gradient break a backward, or change the others'."""
    problem = Problem((5, 0, 3), num_experts=6)
    wrong = [line for lines in pool.run(check_subsets, problem.world, problem) for line in lines]
    assert not wrong, "\n".join(wrong[:20])


def foreign_without_rows(rank: int, world: int, problem: Problem) -> list[str]:
    """Experts as trainers write them: a loop over the experts that have rows, into fresh zeros."""
    mine, wrong = make_inputs(problem)[rank], []
    scale = torch.full((problem.num_experts // world,), 2.0, dtype=problem.dtype, requires_grad=True)

    def loop(rows: Tensor, expert_of_row: Tensor, weights: Tensor | None) -> Tensor:
        out = torch.zeros_like(rows)
        for expert in expert_of_row.unique().tolist():
            here = (expert_of_row == expert).nonzero().squeeze(1)
            y = rows[here] * scale[expert]
            out = out.index_add(0, here, y if weights is None else y * weights[here, None])
        return out

    for path, weight_at in ways():
        dispatcher = problem.dispatcher(path, weight_at, timeout_s=15.0)
        x, weight = mine.x.clone().requires_grad_(), mine.weight.clone().requires_grad_()
        out = x + moe_step(dispatcher, x, mine.idx, weight, ForeignExperts(loop))
        if path == "dedup" and dispatcher.stats()["slots_in_use"]:
            wrong.append(f"rank {rank}, {path}, weight_at={weight_at}: the stage outlives the rows made from it")
        out.backward(mine.upstream)
        want = mine.upstream * (1 + 2 * (mine.weight * (mine.idx >= 0)).sum(1, keepdim=True))
        if not torch.allclose(x.grad, want, 1e-12, 1e-12) or weight.grad is None:
            wrong.append(f"rank {rank}, {path}, weight_at={weight_at}: {x.grad}, expected {want}")
        dispatcher.close()
    return wrong


def test_experts_that_ignore_their_rows_do_not_hang_backward(pool):
    """Fault (seen elsewhere): on a rank without rows the experts' output is not connected to the rows, so autograd
    skips its backward there and the peers wait for it. A stage kept though nothing needs it."""
    problem = Problem((4, 3, 2), "to_last_rank", num_experts=6)
    wrong = [line for lines in pool.run(foreign_without_rows, problem.world, problem, timeout=40) for line in lines]
    assert not wrong, "\n".join(wrong[:10])


def foreign_with_strides(rank: int, world: int, problem: Problem) -> list[str]:
    """Experts whose output, and whose gradient of the rows, are transposed or expanded views."""
    mine, wrong = make_inputs(problem)[rank], []

    def transposed(rows: Tensor, expert_of_row: Tensor, weights: Tensor | None) -> Tensor:
        y = rows.t().contiguous() * (expert_of_row + 2)
        return (y if weights is None else y * weights).t()

    def plain(rows: Tensor, expert_of_row: Tensor, weights: Tensor | None) -> Tensor:
        y = rows * (expert_of_row[:, None] + 2)
        return y if weights is None else y * weights[:, None]

    def summed(rows: Tensor, expert_of_row: Tensor, weights: Tensor | None) -> Tensor:
        return (rows.sum(1, keepdim=True) * (1 if weights is None else weights[:, None])).expand_as(rows)

    def copied(rows: Tensor, expert_of_row: Tensor, weights: Tensor | None) -> Tensor:
        return summed(rows * 1, expert_of_row, weights).contiguous()

    for path, weight_at in ways():
        for odd, even in ((transposed, plain), (summed, copied)):
            results = []
            for fn in (odd, even):
                dispatcher = problem.dispatcher(path, weight_at)
                x, weight = mine.x.clone().requires_grad_(), mine.weight.clone().requires_grad_()
                out = moe_step(dispatcher, x, mine.idx, weight, ForeignExperts(fn))
                out.sum().backward()  # an expanded gradient
                results.append([out.detach(), x.grad, weight.grad])
                dispatcher.close()
            for name, a, b in zip(("out", "dx", "dweight"), *results, strict=True):
                if not torch.allclose(a, b, 1e-12, 1e-12):
                    wrong.append(f"rank {rank}, {path}, weight_at={weight_at}, {odd.__name__}: {name}")
    return wrong


def test_experts_that_give_views(pool):
    """Fault: a movement that takes the output's or the gradients' memory for dense rows."""
    problem = Problem((4, 0, 5), num_experts=6)
    wrong = [line for lines in pool.run(foreign_with_strides, problem.world, problem) for line in lines]
    assert not wrong, "\n".join(wrong[:10])


def compiled_steps(rank: int, world: int, path: str) -> list[str]:
    problem = Problem((4, 3), num_experts=6, top_k=2, hidden=8)
    mine, want = make_inputs(problem)[rank], oracle(problem, "hidden")[rank]
    dispatcher, experts = problem.dispatcher(path), make_experts(problem, rank, world)

    def step(x: Tensor, weight: Tensor) -> Tensor:
        return moe_step(dispatcher, x * 1, mine.idx, weight, experts) * 1

    compiled, wrong = torch.compile(step, backend="eager"), []
    for _ in range(2):
        x, weight = mine.x.clone().requires_grad_(), mine.weight.clone().requires_grad_()
        out = compiled(x, weight)
        out.backward(mine.upstream)
        pairs = ((out.detach(), want.out), (x.grad, want.dx), (weight.grad, want.dweight))
        wrong += [float((a - b).abs().max()) for a, b in pairs if not torch.allclose(a, b, atol=1e-10)]
    dispatcher.close()
    torch.compiler.reset()
    return wrong


@pytest.mark.parametrize("path", PATHS)
def test_a_compiled_step_is_the_plain_one(pool, path):
    """Fault: torch.compile traces waits and leases, and fails inside torch."""
    assert pool.run(compiled_steps, 2, path) == [[], []]
