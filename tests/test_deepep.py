"""``dispatcher='deepep'`` on CPU processes, over the stand-in for DeepEP in ``deepep_standin``.

What the real library does with the same inputs is in ``test_deepep_recorded``; GPU tests are in ``tests/gpu``.

Legend: T tokens of a rank, K routes per token, E experts, E_l experts of a rank, D hidden size, R rows of a rank.
"""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from ep_plugin.config import CapacityConfig, DeepEPConfig, EPConfig
from ep_plugin.dispatch import deepep_buffer
from ep_plugin.dispatch.deepep import DeepEPDispatcher
from ep_plugin.dispatch.deepep_buffer import SMALLEST_BUCKET, bucket_of, check_library, worst_case_rows
from ep_plugin.layer import ForeignExperts, moe_step
from tests import deepep_standin
from tests.moe import Problem, differences, make_experts, make_inputs, oracles, poisoned_memory, run_step

BF16 = torch.bfloat16


def build(problem: Problem, weight_at: str = "hidden", library=deepep_standin, **settings) -> DeepEPDispatcher:
    """The dispatcher over the stand-in; DeepEP's preflight would refuse a CPU."""
    config = problem.config("deepep", weight_at, **settings)
    config.validate()
    return DeepEPDispatcher(
        config,
        group=dist.group.WORLD,
        library=library,
        num_experts=problem.num_experts,
        top_k=problem.top_k,
        hidden_size=problem.hidden,
        dtype=problem.dtype,
        device=torch.device("cpu"),
        rank=dist.get_rank(),
        world=dist.get_world_size(),
    )


def check_cases(rank: int, world: int, cases: list[tuple[str, Problem, dict]]) -> list[str]:
    """Run every case twice on one dispatcher; say what differs from the oracle."""
    want = oracles(rank, world, [(problem, weight_at) for weight_at, problem, _ in cases])
    wrong = []
    for weight_at, problem, settings in cases:
        with poisoned_memory():
            dispatcher, experts = build(problem, weight_at, **settings), make_experts(problem, rank, world)
            mine = make_inputs(problem)[rank]
            for _ in range(2):
                faults = differences(run_step(dispatcher, experts, mine), want[problem, weight_at], problem)
                wrong += [f"rank {rank}, weight_at={weight_at}, {settings}, {problem}: {fault}" for fault in faults]
            dispatcher.check()
            dispatcher.close()
    return wrong


def assert_right(pool, cases: list[tuple[str, Problem, dict]]) -> None:
    world = cases[0][1].world
    wrong = [line for lines in pool.run(check_cases, world, cases, timeout=200) for line in lines]
    assert not wrong, f"{len(wrong)} faults\n" + "\n".join(wrong[:20])


@pytest.mark.parametrize("tokens", [(6,), (5, 0), (4, 7, 0, 2)], ids=lambda tokens: f"{len(tokens)} ranks")
def test_outputs_and_gradients_equal_the_oracle(pool, tokens):
    """Fault: any wrong term in forward or backward for ragged T and T = 0, −1 and repeated experts; uninitialised tails
    that reach a result; a gradient through a handle that is not the forward's."""
    problem = Problem(tokens, dtype=BF16, weight_dtype=torch.float32)
    assert_right(pool, [(weight_at, problem, {}) for weight_at in ("hidden", "output")])


def test_route_sets(pool):
    """Fault: a rank, expert or token without rows; everything to one rank; bf16 weights, int32 ids, strides;
    buffers of the size that the user gave; exact buffers."""
    base = Problem((6, 2, 0, 5), dtype=BF16)
    problems = [
        replace(base, tokens=(0, 0, 0, 0)),
        replace(base, routes="to_last_rank", tokens=(6, 2, 5, 0)),
        replace(base, routes="one_expert"),
        replace(base, routes="none"),
        replace(base, num_experts=4, top_k=2),
        replace(base, routes="distinct", weight_dtype=torch.float32, index_dtype=torch.int32, strided=True),
    ]
    cases = [("hidden", problem, {}) for problem in problems]
    cases += [("input", replace(base, routes="distinct"), {"max_tokens": 7})]
    cases += [("output", base, {"deepep": DeepEPConfig(sms=24, qps=2, allocated_qps=17, host_sync=True)})]
    assert_right(pool, cases)


def test_capacity(pool):
    """Fault: routes that capacity dropped are dispatched, or others are dropped than by the other dispatchers."""
    base = Problem((6, 2, 0, 9), "distinct", dtype=BF16, factor=0.8)
    assert_right(pool, [("hidden", replace(base, policy=policy), {}) for policy in ("rank", "source", "expert")])


def rows_of_experts(rank: int, world: int, problem: Problem) -> list[str]:
    dispatcher, mine = build(problem), make_inputs(problem)[rank]
    state = dispatcher.plan(mine.idx, layer="l")
    planned = state.map.offsets.clone()
    d = dispatcher.dispatch(state, mine.x, mine.weight)
    wrong = [] if d.num_rows is None else ["the row count is said to be known"]
    wrong += [] if torch.equal(planned, d.offsets) else ["the ranges changed after the plan"]
    inputs, most = make_inputs(problem), dispatcher.bucket
    local, k = problem.num_experts // world, problem.top_k
    for expert in range(local):
        got = []
        for row in range(int(d.offsets[expert]), int(d.offsets[expert + 1])):
            token, route = divmod(int(d.route_of_row[row]), k)
            source, t = divmod(token, most)
            same = torch.equal(d.rows[row], inputs[source].x[t])
            same &= float(d.weights[row]) == float(inputs[source].weight[t, route])
            same &= int(inputs[source].idx[t, route]) == rank * local + expert
            wrong += [] if same else [f"row {row} is not route {route} of token {t} of rank {source}"]
            got.append((source, t, route))
        want = [
            (source, t, route)
            for source, given in enumerate(inputs)
            for t in range(given.idx.shape[0])
            for route in range(k)
            if int(given.idx[t, route]) == rank * local + expert
        ]
        wrong += [] if sorted(got) == want else [f"expert {expert} got {sorted(got)}, not {want}"]
    tail = int(d.offsets[-1])
    wrong += [] if (d.route_of_row[tail:] == -1).all() and (d.weights[tail:] == 0).all() else ["padding is not empty"]
    wrong += [] if d.rows.shape[0] == dispatcher.max_rows else [f"{d.rows.shape[0]} rows are held"]
    dispatcher.close()
    return wrong


def test_every_expert_gets_its_rows_their_weights_and_their_routes(pool):
    """Fault: route_of_row, weights or ranges that are not those of the rows, in DeepEP's own order."""
    problem = Problem((5, 0, 3), "distinct", dtype=BF16, weight_dtype=torch.float32, num_experts=6)
    wrong = [line for lines in pool.run(rows_of_experts, 3, problem) for line in lines]
    assert not wrong, wrong


def many_layers(rank: int, world: int, problem: Problem) -> list[str]:
    """Three layers and two microbatches in flight, one of them recomputed, their backwards in another order."""
    key, layers = (problem, "hidden"), 3
    want = oracles(rank, world, [key])[key]
    dispatcher, mine = build(problem), make_inputs(problem)[rank]
    experts = [make_experts(problem, rank, world) for _ in range(layers)]
    flights = []
    for micro in range(2):
        for layer in range(layers):
            x, weight = mine.x.clone().requires_grad_(), mine.weight.clone().requires_grad_()

            def step(x, weight, layer=layer):
                return moe_step(dispatcher, x, mine.idx, weight, experts[layer], layer=f"layers.{layer}")

            recompute = micro == 1
            out = checkpoint(step, x, weight, use_reentrant=False) if recompute else step(x, weight)
            flights.append((layer, x, weight, out))
    wrong = []
    for layer, x, weight, out in reversed(flights):
        experts[layer].zero_grad()
        out.backward(mine.upstream)
        gradients = (p.grad for p in experts[layer].parameters())
        result = type(want)(out.detach(), x.grad, weight.grad, *gradients)
        wrong += [f"rank {rank}, layer {layer}: {fault}" for fault in differences(result, want, problem)]
    wrong += [] if len(deepep_standin.ElasticBuffer.made) == 1 else ["more than one buffer was made"]
    dispatcher.check()
    dispatcher.close()
    return wrong


def test_layers_and_microbatches_share_one_buffer(pool):
    """Fault: a handle that belongs to the dispatcher and not to the step; recomputed rows in another order than the
    gradients that meet them; a buffer per layer."""
    problem = Problem((4, 3), dtype=BF16, hidden=32)
    deepep = pool.run(clear_standin, 2)
    assert deepep == [0, 0]
    wrong = [line for lines in pool.run(many_layers, 2, problem) for line in lines]
    assert not wrong, wrong


def clear_standin(rank: int, world: int) -> int:
    deepep_standin.ElasticBuffer.made.clear()
    return len(deepep_standin.ElasticBuffer.made)


def buckets(rank: int, world: int) -> list[int]:
    problem = Problem((5, 0), dtype=BF16, top_k=2)
    deepep_standin.ElasticBuffer.made.clear()
    dispatcher, seen = build(problem), []
    for own in (3 + rank, 100 * (rank + 1), 2, 0):
        dispatcher.agree(own)
        seen += [dispatcher.bucket, len(deepep_standin.ElasticBuffer.made)]
        idx = torch.zeros((own, 2), dtype=torch.int64)
        idx[:, 1] = 7
        x = torch.randn(own, problem.hidden).to(BF16).requires_grad_()
        weight = torch.full((own, 2), 0.5)
        out = moe_step(dispatcher, x, idx, weight, ForeignExperts(lambda rows, e, w: (rows * w[:, None]).to(BF16)))
        out.sum().backward()
        torch.testing.assert_close(out, x)
        torch.testing.assert_close(x.grad, torch.ones_like(x))
    live = [sum(buffer.runtime is not None for buffer in deepep_standin.ElasticBuffer.made)]
    dispatcher.close()
    live += [sum(buffer.runtime is not None for buffer in deepep_standin.ElasticBuffer.made)]
    other = build(problem, max_tokens=4)
    try:
        other.plan(torch.zeros((5, 2), dtype=torch.int64))
    except ValueError as error:
        seen.append("agree(num_tokens)" in str(error))
    other.close()
    return [*seen, *live]


def test_buckets_grow_on_all_ranks_and_buffers_are_destroyed(pool):
    """Fault: ranks with other numbers of tokens compile, or allocate, for other sizes; a buffer per bucket; buffers
    that outlive their use."""
    small = SMALLEST_BUCKET
    expected = [small, 1, 256, 2, small, 2, small, 2, True, 1, 0]
    assert pool.run(buckets, 2) == [expected, expected]
    assert [bucket_of(n) for n in (0, 1, 128, 129, 4096, 4097)] == [128, 128, 128, 256, 4096, 8192]
    assert worst_case_rows(128, world=4, top_k=8, num_local_experts=2) == 4 * 128 * 2


class Misplacing(deepep_standin.ElasticBuffer):
    """Receives other numbers of rows than it was asked for."""

    def dispatch(self, *args, **kwargs):
        *rest, handle, event = super().dispatch(*args, **kwargs)
        if not self.calls[-1][1]["cached"]:
            handle.psum_num_recv_tokens_per_expert += 1
        return *rest, handle, event


class Library:
    """A module with another buffer class."""

    __name__, __version__ = "deep_ep", "0"
    topk_idx_t, EPHandle = torch.int64, deepep_standin.EPHandle

    def __init__(self, buffer):
        self.ElasticBuffer = buffer


def late_errors(rank: int, world: int) -> list[str]:
    """What ``check`` says of steps in which nothing could be raised."""
    problem, said = Problem((2, 2), dtype=BF16, num_experts=4, top_k=2), []
    mine = make_inputs(problem)[rank]

    def step(weight_at, ids, library=deepep_standin):
        dispatcher = build(problem, weight_at, library)
        dispatcher.check()
        idx = torch.tensor(ids)
        moe_step(dispatcher, mine.x, idx, mine.weight, ForeignExperts(lambda rows, e, w: rows))
        try:
            dispatcher.check()
            said.append("nothing")
        except (ValueError, RuntimeError) as error:
            said.append(str(error))
        dispatcher.broken = True  # not to meet again over a buffer whose counts are wrong
        dispatcher.close()

    step("hidden", [[0, 4], [1, -1]] if rank == 0 else [[0, 1], [2, 3]])
    step("input", [[0, 0], [1, 2]])
    step("hidden", [[0, 0], [1, 2]])
    step("hidden", [[0, 1], [1, 2]], Library(Misplacing))
    return said


def test_what_kernels_cannot_raise_is_raised_before_the_optimizer_step(pool):
    """Fault: an expert id that DeepEP would write out of bounds with, merged routes whose result is wrong, or rows that
    DeepEP counts otherwise, go unnoticed."""
    first, second = pool.run(late_errors, 2)
    assert "outside [-1, 4)" in first[0] and second[0] == "nothing"
    for said in (first, second):
        assert "weight_at='input'" in said[1] and said[2] == "nothing" and "other numbers of rows" in said[3]


def numbers_that_are_wrong(rank: int, world: int) -> str:
    class Wrong(deepep_standin.ElasticBuffer):
        def combine(self, *args, **kwargs):
            out, scalars, event = super().combine(*args, **kwargs)
            return out + 1, scalars, event

    try:
        build(Problem((2, 2), dtype=BF16), library=Library(Wrong), max_tokens=8)
    except RuntimeError as error:
        return str(error)
    return "nothing"


def test_a_build_that_moves_wrong_numbers_is_refused_when_the_buffer_is_made(pool):
    """Fault: a build of DeepEP that does not fit the machine trains on garbage."""
    assert all("does not work here" in said for said in pool.run(numbers_that_are_wrong, 2))


def closing(rank: int, world: int, how: str) -> tuple[bool, bool]:
    problem = Problem((2, 2), dtype=BF16)
    dispatcher = build(problem, max_tokens=4, timeout_s=30.0 if how == "well" else 1.0)
    buffer = dispatcher.buffer._buffer
    if how == "one fails" and rank == 1:
        try:
            dispatcher.plan(torch.zeros(3, 3, 3, dtype=torch.int64))
        except ValueError:
            pass
    if how == "one ends by an exception" and rank == 1:
        deepep_buffer._exit.begin()
        sys.last_type = ValueError
    if how == "after the group":
        dist.barrier()
        dist.destroy_process_group()
    try:
        dispatcher.close()
        dispatcher.close()
    finally:
        deepep_buffer._exit.begun = False
        if hasattr(sys, "last_type"):
            del sys.last_type
    return buffer.runtime is None, dispatcher.buffer is None


@pytest.mark.parametrize(
    ("how", "destroyed"),
    [("well", True), ("one fails", False), ("one ends by an exception", False), ("after the group", False)],
)
def test_a_buffer_is_destroyed_by_all_ranks_or_by_none(pool, how, destroyed):
    """Fault: a rank that goes on waits on the GPU for one that failed, whose kernel then traps; a buffer that is
    destroyed after its communicator."""
    assert pool.run(closing, 2, how, timeout=60) == [(destroyed, True)] * 2


def test_settings_that_deepep_cannot_honour_are_refused():
    """Fault: a setting that is silently taken for another."""
    with pytest.raises(ValueError, match="weight_at='source'.*'hidden' or 'output'"):
        EPConfig(dispatcher="deepep", weight_at="source").validate()
    for wrong in (dict(sms=3), dict(sms=162), dict(qps=1), dict(qps=8, allocated_qps=4)):
        with pytest.raises(ValueError, match=next(reversed(wrong))):
            EPConfig(dispatcher="deepep", deepep=DeepEPConfig(**wrong)).validate()
    EPConfig(dispatcher="deepep", capacity=CapacityConfig("rank"), deepep=DeepEPConfig(sms=24, qps=2)).validate()


def test_a_build_with_other_handles_is_refused():
    """Fault: a newer DeepEP whose handle has a field that is not saved for backward."""

    class Newer:
        __version__ = "9"

        class EPHandle:
            def __init__(self, do_expand, topk_idx, brand_new): ...

    with pytest.raises(RuntimeError, match=r"\['brand_new'\] are new, .*recv_src_metadata"):
        check_library(Newer)
