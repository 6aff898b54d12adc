"""``dispatcher='deepep'`` over the real library, two ranks or more of one node:

    torchrun --nproc-per-node 2 -m pytest tests/gpu/test_deepep_gpu.py

All tests use one shape, since DeepEP compiles its kernels for every shape."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ep_plugin.config import CapacityConfig, DeepEPConfig, EPConfig, LegsConfig, MXFP8Config
from ep_plugin.dispatch import build_dispatcher, deepep_preflight
from ep_plugin.dispatch.deepep import DeepEPDispatcher
from ep_plugin.experts import Activation, GroupedMLP
from ep_plugin.layer import ForeignExperts, moe_step
from ep_plugin.mxfp8.node import mxfp8_moe_step
from tests.gpu.deepep_rows import Exact, backward, forward, wrong
from tests.moe import Inputs, Problem, differences, make_inputs, make_parameters, oracle

pytest.importorskip("deep_ep", reason="DeepEP v2 is not installed")

E, K, D, F, MOST = 16, 4, 256, 64, 128
Ranks = tuple[int, int, torch.device]


def build(device: torch.device, **settings: Any) -> DeepEPDispatcher:
    settings = {"max_tokens": MOST, "timeout_s": 40.0, **settings}
    dispatcher = build_dispatcher(
        EPConfig(dispatcher="deepep", **settings),
        num_experts=E, top_k=K, hidden_size=D, dtype=torch.bfloat16, device=device,
    )  # fmt: skip
    assert isinstance(dispatcher, DeepEPDispatcher)
    return dispatcher


@pytest.fixture(scope="module")
def shared(ranks: Ranks) -> Iterator[DeepEPDispatcher]:
    dispatcher = build(ranks[2])
    yield dispatcher
    dispatcher.close()


def test_the_preflight_passes_where_deepep_runs(ranks: Ranks) -> None:
    """Catches a check that refuses a machine on which the rest of this file runs."""
    found = deepep_preflight(num_experts=E, top_k=K, hidden_size=D, dtype=torch.bfloat16, world=ranks[1])
    for check in found:
        print(check.ok, check.line())
    assert not [check.line() for check in found if check.ok is False]


def any_true(errors: list[Tensor]) -> list[int]:
    return torch.stack([error.long() for error in errors]).tolist()


def test_a_thousand_random_route_sets_are_exact(ranks: Ranks, shared: DeepEPDispatcher) -> None:
    """Catches a row, weight or gradient that is lost, doubled or at another place: ragged T, ranks without tokens,
    −1, everything to one rank."""
    rank, world, _ = ranks
    total: Tensor | None = None
    for seed in range(1000):
        step = Exact.make(seed, rank, world, MOST, shared)
        found = torch.stack(wrong(step, shared)).long()
        total = found if total is None else total + found
    assert total is not None
    assert total.tolist() == [0] * total.numel()
    shared.check()


def test_64_layers_in_flight_share_the_buffer(ranks: Ranks, shared: DeepEPDispatcher) -> None:
    """Catches a handle that belongs to the buffer rather than to the step."""
    rank, world, _ = ranks
    flights, errors = [], []
    for layer in range(64):
        step = Exact.make(5000 + layer, rank, world, MOST, shared)
        state = shared.plan(step.idx, layer=f"layers.{layer}")
        found, routes = forward(step, shared, state)
        errors += found
        flights.append((step, state, routes))
    for step, state, routes in reversed(flights):
        errors += backward(step, shared, state, routes)
    assert not any(any_true(errors))
    shared.check()


def problem_of(world: int, **settings: Any) -> Problem:
    tokens = (40, 23, 0, 64, 1, 7, 128, 5)[:world]
    given = dict(dtype=torch.bfloat16, weight_dtype=torch.float32, num_experts=E, top_k=K, hidden=D, width=F)
    return Problem(tokens, **{**given, **settings})


def on(inputs: Inputs, device: torch.device) -> Inputs:
    return Inputs(*(tensor.to(device) for tensor in (inputs.x, inputs.idx, inputs.weight, inputs.upstream)))


def mlp(problem: Problem, rank: int, world: int, device: torch.device) -> GroupedMLP:
    local = problem.num_experts // world
    mine = slice(rank * local, (rank + 1) * local)
    parameters = [torch.nn.Parameter(p[mine].clone().to(device)) for p in make_parameters(problem)]
    return GroupedMLP.from_parameters(*parameters, activation=Activation())


def gradients(dispatcher: Any, experts: GroupedMLP, inputs: Inputs) -> Any:
    from tests.moe import run_step

    result = run_step(dispatcher, experts, inputs)
    return type(result)(*(tensor.cpu() for tensor in vars(result).values()))


@pytest.mark.parametrize("weight_at", ["hidden", "input", "output"])
def test_outputs_and_all_gradients_equal_the_oracle(ranks: Ranks, weight_at: str) -> None:
    """Catches any wrong term, in forward or backward, with repeated experts where they can be merged."""
    rank, world, device = ranks
    dispatcher = build(device, weight_at=weight_at)
    faults = []
    for routes in ("distinct",) if weight_at == "input" else ("distinct", "any", "one_expert", "to_last_rank"):
        problem = problem_of(world, routes=routes)
        want = oracle(problem, weight_at)[rank]
        got = gradients(dispatcher, mlp(problem, rank, world, device), on(make_inputs(problem)[rank], device))
        faults += [f"{routes}: {fault}" for fault in differences(got, want, problem)]
    dispatcher.check()
    dispatcher.close()
    assert not faults


@pytest.mark.parametrize("policy", ["rank", "source", "expert"])
def test_capacity_drops_what_the_oracle_drops(ranks: Ranks, policy: str) -> None:
    """Catches a dropped route that is dispatched, or another one dropped."""
    rank, world, device = ranks
    dispatcher = build(device, capacity=CapacityConfig(policy, 0.8))
    problem = problem_of(world, routes="distinct", policy=policy, factor=0.8)
    want = oracle(problem, "hidden")[rank]
    got = gradients(dispatcher, mlp(problem, rank, world, device), on(make_inputs(problem)[rank], device))
    dispatcher.check()
    dispatcher.close()
    assert not differences(got, want, problem)


def test_exact_buffers_with_a_host_sync(ranks: Ranks) -> None:
    """Catches a row count that is not the host's, and experts of someone else that get other rows."""
    rank, world, device = ranks
    dispatcher = build(device, deepep=DeepEPConfig(host_sync=True))
    for seed in range(20):
        step = Exact.make(seed, rank, world, MOST, dispatcher)
        state = dispatcher.plan(step.idx)
        d = dispatcher.dispatch(state, step.x, step.weight)
        assert d.num_rows == d.rows.shape[0] == int(d.offsets[-1])
        assert not any(any_true(wrong(step, dispatcher)))
    dispatcher.check()
    dispatcher.close()


def test_experts_of_someone_else(ranks: Ranks, shared: DeepEPDispatcher) -> None:
    """Catches gradients of the buffers' size where experts return exactly their rows."""
    rank, world, device = ranks
    scale = torch.arange(1, E // world + 1, device=device, dtype=torch.bfloat16).requires_grad_()

    def fn(rows: Tensor, expert: Tensor, weights: Tensor | None) -> Tensor:
        assert weights is not None
        return (rows * scale[expert].unsqueeze(1) * weights.unsqueeze(1)).to(rows.dtype)

    problem = problem_of(world, routes="distinct")
    mine = on(make_inputs(problem)[rank], device)
    x, w = mine.x.clone().requires_grad_(), mine.weight.clone().requires_grad_()
    out = moe_step(shared, x, mine.idx, w, ForeignExperts(fn), layer="foreign")
    out.backward(mine.upstream)
    factor = (mine.weight * (mine.idx % (E // world) + 1)).sum(1, keepdim=True)
    torch.testing.assert_close(out.float(), mine.x.float() * factor, rtol=3e-2, atol=5e-2)
    assert x.grad is not None and w.grad is not None
    torch.testing.assert_close(x.grad.float(), mine.upstream.float() * factor, rtol=3e-2, atol=5e-2)
    dot = (mine.x.float() * mine.upstream.float()).sum(1, keepdim=True) * (mine.idx % (E // world) + 1)
    torch.testing.assert_close(w.grad, dot, rtol=3e-2, atol=1.0)


def test_nothing_waits_for_the_device(ranks: Ranks, shared: DeepEPDispatcher) -> None:
    """Catches a host sync between router and combine, forward or backward."""
    rank, world, device = ranks
    problem = problem_of(world, routes="distinct")
    experts, mine = mlp(problem, rank, world, device), on(make_inputs(problem)[rank], device)
    x, w = mine.x.clone().requires_grad_(), mine.weight.clone().requires_grad_()

    def step() -> None:
        moe_step(shared, x, mine.idx, w, experts, layer="free").backward(mine.upstream)

    for _ in range(2):
        step()
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda._sleep(2_000_000_000)  # a second
    busy = torch.cuda.Event()
    busy.record()
    start = time.monotonic()
    step()
    taken = time.monotonic() - start
    still = not busy.query()
    torch.cuda.synchronize()
    assert still, f"the host came back after {taken:.2f} s, when the device had caught up"


def test_a_captured_step_replays_with_other_routes(ranks: Ranks, shared: DeepEPDispatcher) -> None:
    """Catches a call that cannot be captured, and a replay that moves the rows of the captured routes."""
    rank, world, device = ranks
    problem = problem_of(world, routes="distinct")
    experts, mine = mlp(problem, rank, world, device), on(make_inputs(problem)[rank], device)
    x, w = mine.x.clone().requires_grad_(), mine.weight.clone().requires_grad_()
    idx = mine.idx.clone()

    def step() -> Tensor:
        x.grad = w.grad = None
        experts.zero_grad()
        out = moe_step(shared, x, idx, w, experts, layer="captured")
        out.backward(mine.upstream)
        return out.detach()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    static_grads = (x.grad, w.grad, experts.up.grad)
    faults = []
    for seed in range(1, 4):
        other = replace(problem, seed=seed)
        given = on(make_inputs(other)[rank], device)
        with torch.no_grad():
            for static, new in ((x, given.x), (w, given.weight), (idx, given.idx)):
                static.copy_(new)
        graph.replay()
        torch.cuda.synchronize()
        got = [tensor.float().clone() for tensor in (out, *static_grads) if tensor is not None]
        assert len(got) == 4
        shared.check()
        again = Inputs(given.x, given.idx, given.weight, mine.upstream)
        want = gradients(shared, experts, again)
        for name, a, b in zip(("out", "dx", "dweight", "dup"), got, vars(want).values(), strict=False):
            error = (a.cpu() - b.float()).abs().max() / b.float().abs().max().clamp(min=1) if b.numel() else 0
            faults += [f"seed {seed}: {name} {float(error):.3g}"] if float(error) > 2.5e-2 else []
    assert not faults


def test_buckets_agreed_between_forwards(ranks: Ranks) -> None:
    """Catches ranks that compile for other sizes, and handles of the smaller buffer that the larger one cannot use."""
    rank, world, device = ranks
    dispatcher = build(device, max_tokens=None)
    small = Exact.make(3, rank, world, 100, dispatcher)
    state = dispatcher.plan(small.idx)
    errors, routes = forward(small, dispatcher, state)
    errors += backward(small, dispatcher, state, routes)
    assert dispatcher.bucket == MOST
    dispatcher.agree(200 if rank == 0 else 3)
    assert dispatcher.bucket == 256
    errors += wrong(Exact.make(4, rank, world, 200 if rank == 0 else 3, dispatcher), dispatcher)
    assert not any(any_true(errors))
    dispatcher.check()
    dispatcher.close()


@pytest.mark.parametrize("hidden", [1024, 256], ids=["records", "elements and scales"])
def test_mxfp8_rows_in_the_forward_dispatch(ranks: Ranks, hidden: int) -> None:
    """Catches records that arrive cut, against the same rows in NCCL's exchange."""
    rank, world, device = ranks
    legs = LegsConfig(combine="bf16", combine_backward="bf16", dispatch_backward="bf16")
    problem = problem_of(world, routes="distinct", hidden=hidden)
    inputs, results = on(make_inputs(problem)[rank], device), []
    for name in ("block", "deepep"):
        dispatcher = build_dispatcher(
            EPConfig(dispatcher=name, precision="mxfp8", mxfp8=MXFP8Config(legs=legs), max_tokens=MOST, timeout_s=40.0),
            num_experts=E, top_k=K, hidden_size=hidden, dtype=torch.bfloat16, device=device,
        )  # fmt: skip
        experts = mlp(problem, rank, world, device)
        x, w = inputs.x.clone().requires_grad_(), inputs.weight.clone().requires_grad_()
        out = mxfp8_moe_step(dispatcher, x, inputs.idx, w, experts, layer="mxfp8")
        out.backward(inputs.upstream)
        results.append([out.detach(), x.grad, w.grad, *(p.grad for p in experts.parameters())])
        dispatcher.check()
        dispatcher.close()
    faults = []
    for i, (a, b) in enumerate(zip(*results, strict=True)):
        error = float((a.float() - b.float()).norm() / b.float().norm().clamp(min=1e-9)) if b.numel() else 0.0
        faults += [f"tensor {i}: {error:.3g}"] if not error < 2e-2 else []
    assert not faults
