"""The whole MoE layer on GPUs: gradients, order and lifetime of buffers, no host sync, CUDA graphs, failures that are
named."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ep_plugin.config import CapacityConfig, EPConfig
from ep_plugin.dispatch import build_dispatcher
from ep_plugin.dispatch.rowwise_device import DeviceRowwiseDispatcher, RouteOverflow
from ep_plugin.experts import GroupedMLP
from ep_plugin.heap import HeapAborted, HeapTimeout, open_heap
from ep_plugin.heap.base import Heap
from ep_plugin.heap.device import DeviceHeap
from ep_plugin.layer import ForeignExperts, moe_step
from ep_plugin.mxfp8.node import mxfp8_mlp
from tests.gpu.step import E, K, Step

D, F, T = 256, 128, 96
HEAPS = ("torch", "nvshmem", "nvshmem device")
Ranks = tuple[int, int, torch.device]


def build(heap: Heap, device: torch.device, **settings: Any) -> DeviceRowwiseDispatcher:
    settings = {"capacity": CapacityConfig("dropless", 4.0), "max_tokens": T, "timeout_s": 20, **settings}
    dispatcher = build_dispatcher(
        EPConfig(heap=heap.name, transport=heap.transport, **settings),  # type: ignore[attr-defined]
        num_experts=E,
        top_k=K,
        hidden_size=D,
        dtype=torch.bfloat16,
        device=device,
        heap=heap,
    )
    assert isinstance(dispatcher, DeviceRowwiseDispatcher)
    return dispatcher


def experts(rank: int, world: int, device: torch.device, seed: int = 0) -> GroupedMLP:
    local = E // world
    return GroupedMLP(
        E, D, F, first_expert=rank * local, num_local=local, seed=seed, dtype=torch.bfloat16, device=device
    )


def steps(rank: int, world: int, device: torch.device, count: int, kind: str = "uniform") -> list[Step]:
    capacity = CapacityConfig("dropless", 4.0)
    return [
        Step(100 + i, world, device, max_tokens=T, hidden=D, dtype=torch.bfloat16, capacity=capacity, kind=kind)
        for i in range(count)
    ]


def run(dispatcher: Any, mlp: GroupedMLP, step: Step, rank: int, layer: str = "layer") -> tuple[Tensor, ...]:
    """Output, gradients of x, of the weights, and of the experts."""
    x = step.xs[rank].clone().requires_grad_()
    w = step.ws[rank].clone().requires_grad_()
    mlp.zero_grad()
    out = moe_step(dispatcher, x, step.idxs[rank], w, mlp, layer=layer)
    out.backward(step.grads[rank])
    assert mlp.up.grad is not None and mlp.down.grad is not None and x.grad is not None and w.grad is not None
    return out.detach(), x.grad, w.grad, mlp.up.grad.clone(), mlp.down.grad.clone()


@pytest.mark.parametrize("form", ["dedup", "route"])
@pytest.mark.parametrize("weight_at", ["hidden", "input", "output"])
def test_gradients_equal_block_all_to_all(heap: Heap, ranks: Ranks, form: str, weight_at: str) -> None:
    """A gradient that is lost or doubled on the way, against the exchange that NCCL makes."""
    rank, world, device = ranks
    dispatcher = build(heap, device, form=form, weight_at=weight_at)
    block = build_dispatcher(
        EPConfig(dispatcher="block", weight_at=weight_at, capacity=CapacityConfig("dropless", 4.0)),
        num_experts=E, top_k=K, hidden_size=D, dtype=torch.bfloat16, device=device,
    )  # fmt: skip
    mlp = experts(rank, world, device)
    for kind in ("uniform", "repeats", "one rank"):
        for step in steps(rank, world, device, 4, kind):
            for name, got, want in zip(
                ("out", "x", "weights", "up", "down"),
                run(dispatcher, mlp, step, rank),
                run(block, mlp, step, rank),
                strict=True,
            ):
                torch.testing.assert_close(
                    got, want, rtol=2e-2, atol=2e-2, msg=lambda m, n=f"{name}, {kind}": f"{n}: {m}"
                )
    dispatcher.check()
    dispatcher.close()


@pytest.mark.parametrize("form", ["dedup", "route"])
@pytest.mark.parametrize("weight_at", ["hidden", "output", "source"])
def test_experts_of_someone_else_get_exactly_their_rows(heap: Heap, ranks: Ranks, form: str, weight_at: str) -> None:
    """Experts that return R rows where the buffers hold more: a gradient of the wrong shape, or of padding."""
    if form == "dedup" and weight_at == "source":
        pytest.skip("excluded by config")
    rank, world, device = ranks
    dispatcher = build(heap, device, form=form, weight_at=weight_at)
    scale = torch.arange(1, E // world + 1, device=device, dtype=torch.bfloat16).requires_grad_()

    def fn(rows: Tensor, expert: Tensor, weights: Tensor | None) -> Tensor:
        y = rows * scale[expert].unsqueeze(1)
        return y if weights is None else (y * weights.unsqueeze(1)).to(rows.dtype)

    for step in steps(rank, world, device, 4):
        x = step.xs[rank].clone().requires_grad_()
        w = step.ws[rank].clone().requires_grad_()
        out = moe_step(dispatcher, x, step.idxs[rank], w, ForeignExperts(fn), layer="foreign")
        out.backward(step.grads[rank])
        local = step.idxs[rank] % (E // world) + 1
        want = step.xs[rank].float() * (step.ws[rank] * local).sum(1, keepdim=True)
        torch.testing.assert_close(out.float(), want, rtol=3e-2, atol=3e-2)
        want = step.grads[rank].float() * (step.ws[rank] * local).sum(1, keepdim=True)
        torch.testing.assert_close(x.grad.float(), want, rtol=3e-2, atol=3e-2)  # type: ignore[union-attr]
    dispatcher.check()
    dispatcher.close()


@contextmanager
def delays(heap: DeviceHeap, rank: int, seed: int) -> Iterator[None]:
    """Hold this rank's stream for a random time before some of its signals."""
    generator = torch.Generator().manual_seed(1000 * rank + seed)
    post, send = heap.post, heap.send

    def late(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if torch.rand((), generator=generator) < 0.3:
                torch.cuda._sleep(int(torch.randint(100_000, 2_000_000, (), generator=generator)))
            return call(*args, **kwargs)

        return wrapped

    heap.post, heap.send = late(post), late(send)  # type: ignore[method-assign]
    try:
        yield
    finally:
        heap.post, heap.send = post, send  # type: ignore[method-assign]


def rounds(dispatcher: DeviceRowwiseDispatcher, ranks: Ranks, count: int, delay: bool = True) -> int:
    """Rounds of dispatch, combine and backward with new rows each; how many gave a wrong row or gradient on any
    rank."""
    rank, world, device = ranks
    wrong = torch.zeros(1, dtype=torch.int64, device=device)
    assert isinstance(dispatcher.heap, DeviceHeap)
    expected = steps(rank, world, device, count)
    for i, step in enumerate(expected):
        x = step.xs[rank].clone().requires_grad_()
        with delays(dispatcher.heap, rank, i):
            state = dispatcher.plan(step.idxs[rank], layer=f"round {i}", x=x)
            d = dispatcher.dispatch(state, x, step.ws[rank])
            rows = d.rows[: step.num_rows[rank]].detach().clone()
            out = dispatcher.combine(state, d.rows)
            out.backward(step.grads[rank])
        good = torch.equal(rows, step.rows[rank]) and torch.equal(out, step.combined(rank, step.rows, False))
        wrong += int(not good)
    dist.all_reduce(wrong)
    return int(wrong)


@pytest.mark.parametrize("form", ["dedup", "route"])
def test_reuse_under_random_delays(heap: Heap, ranks: Ranks, form: str) -> None:
    """A row read before it has arrived, or overwritten before it was read, when a rank is late anywhere."""
    dispatcher = build(heap, ranks[2], form=form, slots=2)
    assert rounds(dispatcher, ranks, 50) == 0
    dispatcher.check()
    dispatcher.close()


def test_two_dispatchers_take_turns_on_one_heap(heap: Heap, ranks: Ranks) -> None:
    """One dispatcher taking another's signals for its own, and so reading rows before they have arrived."""
    first, second = build(heap, ranks[2]), build(heap, ranks[2])
    for _ in range(5):
        assert rounds(first, ranks, 4) == 0
        assert rounds(second, ranks, 4) == 0
    first.check()
    second.close()
    first.close()


def test_without_waits_the_same_rounds_fail(ranks: Ranks) -> None:
    """Negative control of the test above."""
    heap = open_heap("torch", None, ranks[2], 20.0)
    assert isinstance(heap, DeviceHeap)
    dispatcher = build(heap, ranks[2], slots=2)
    heap.wait = lambda ticket, *, channel, phase: None  # type: ignore[method-assign,assignment]
    wrong = rounds(dispatcher, ranks, 20)
    torch.cuda.synchronize()
    dist.barrier()
    assert wrong > 0


def three_layers(dispatcher: DeviceRowwiseDispatcher, ranks: Ranks) -> list[bool]:
    """Three layers forward, then backward: whether each layer's weight gradient is that of the layer run alone."""
    rank, world, device = ranks
    inputs = steps(rank, world, device, 3)
    mlps = [experts(rank, world, device, seed=i) for i in range(3)]
    alone = []
    for mlp, step in zip(mlps, inputs, strict=True):
        fresh = build(dispatcher.heap, device, form=dispatcher.config.form)
        alone.append(run(fresh, mlp, step, rank)[3])
        fresh.close()
    outs = []
    for i, (mlp, step) in enumerate(zip(mlps, inputs, strict=True)):
        mlp.zero_grad()
        x = step.xs[rank].clone().requires_grad_()
        outs.append(moe_step(dispatcher, x, step.idxs[rank], step.ws[rank], mlp, layer=f"layer {i}"))
    for out, step in reversed(list(zip(outs, inputs, strict=True))):
        out.backward(step.grads[rank])
    good = []
    for mlp, want in zip(mlps, alone, strict=True):
        same = torch.tensor([int(torch.equal(mlp.up.grad, want))], device=device)  # type: ignore[arg-type]
        dist.all_reduce(same, op=dist.ReduceOp.MIN)
        good.append(bool(same))
    return good


@pytest.mark.parametrize("form", ["dedup", "route"])
def test_leases_keep_payloads_until_their_weight_gradient(heap: Heap, ranks: Ranks, form: str) -> None:
    """Figure 21: a later layer's dispatch must not overwrite what an earlier layer's backward reads."""
    dispatcher = build(heap, ranks[2], form=form, slots=3)
    assert three_layers(dispatcher, ranks) == [True, True, True]
    assert dispatcher.stats()["slots_peak"] == 3
    dispatcher.check()
    dispatcher.close()


def test_without_leases_only_the_last_layer_is_right(ranks: Ranks) -> None:
    """Negative control: one shared buffer, as in Figure 21."""
    heap = open_heap("torch", None, ranks[2], 20.0)
    dispatcher = build(heap, ranks[2], form="route", slots=1)
    dispatcher.payload._leases = False
    assert three_layers(dispatcher, ranks) == [False, False, True]
    torch.cuda.synchronize()
    dist.barrier()


@pytest.mark.parametrize("told", [True, False])
def test_a_slot_read_on_another_stream_waits_for_it(ranks: Ranks, told: bool) -> None:
    """A late weight gradient on a stream of its own reads the next layer's rows; untold, the control must fail."""
    rank, world, device = ranks
    heap = open_heap("torch", None, device, 20.0)
    dispatcher = build(heap, device, form="route", slots=1)
    late = torch.cuda.Stream()
    if told:
        dispatcher.reads_on(late)
    inputs = [s for s in steps(rank, world, device, 12) if min(s.num_rows) > 16][:3]
    state = dispatcher.plan(inputs[0].idxs[rank], layer="first")
    d = dispatcher.dispatch(state, inputs[0].xs[rank], inputs[0].ws[rank])
    late.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(late):
        torch.cuda._sleep(200_000_000)  # 0.1 s
        read = d.rows[: inputs[0].num_rows[rank]].clone()
    del d, state
    for step in inputs[1:]:
        state = dispatcher.plan(step.idxs[rank], layer="next")
        dispatcher.dispatch(state, step.xs[rank], step.ws[rank])
        del state
    torch.cuda.synchronize()
    dispatcher.check()
    right = torch.tensor([int(torch.equal(read, inputs[0].rows[rank]))], device=device)
    dist.all_reduce(right, op=dist.ReduceOp.MIN)
    assert bool(right) == told
    heap.close()


def test_too_few_slots_is_an_error_on_every_rank(ranks: Ranks) -> None:
    """Exhaustion that would otherwise overwrite a payload, or hang the peers."""
    rank, world, device = ranks
    heap = open_heap("torch", None, device, 20.0)
    dispatcher = build(heap, device, slots=1)
    held = []
    mlp = experts(rank, world, device)
    with pytest.raises((RuntimeError, HeapAborted), match="slots=1 must be at least|stopped the group"):
        for i, step in enumerate(steps(rank, world, device, 4)):
            x = step.xs[rank].clone().requires_grad_()
            held.append(moe_step(dispatcher, x, step.idxs[rank], step.ws[rank], mlp, layer=f"layer {i}"))
        dispatcher.check()
    torch.cuda.synchronize()
    dist.barrier()


@pytest.mark.parametrize("form", ["dedup", "route"])
def test_no_host_sync_between_router_and_combine(heap: Heap, ranks: Ranks, form: str) -> None:
    """A hidden ``.item()``, ``.tolist()`` or blocking copy; and a planted one is found."""
    rank, world, device = ranks
    dispatcher, mlp = build(heap, device, form=form), experts(rank, world, device)
    step = steps(rank, world, device, 1)[0]
    run(dispatcher, mlp, step, rank)  # compiles

    def count(fn: Callable[[], object]) -> tuple[int, int]:
        torch.cuda.synchronize()
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            fn()
        names = [event.name for event in profile.events()]
        copies = sum("DtoH" in name for name in names)
        waits = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
        syncs = sum(name in waits for name in names)
        torch.cuda.synchronize()
        return copies, syncs - 1  # the profiler synchronises once when it stops

    torch.cuda.set_sync_debug_mode("error")
    try:
        copies, syncs = count(lambda: run(dispatcher, mlp, step, rank))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert copies == 0 and syncs <= 0, (copies, syncs)
    planted, _ = count(lambda: (run(dispatcher, mlp, step, rank), dispatcher.flags.item()))
    assert planted == 1
    dispatcher.check()
    dispatcher.close()


@pytest.mark.parametrize("precision", ["bf16", "mxfp8"])
@pytest.mark.parametrize("weight_at", ["hidden", "output", "source"])
def test_block_waits_for_the_device_in_plan_alone(ranks: Ranks, weight_at: str, precision: str) -> None:
    """A look at the device behind an exchange: the host would wait there for a dead peer, without a time-out. In plan
    it waits with one."""
    rank, world, device = ranks
    dispatcher = build_dispatcher(
        EPConfig(dispatcher="block", weight_at=weight_at, precision=precision), num_experts=E, top_k=K, hidden_size=D,
        dtype=torch.bfloat16, device=device,
    )  # fmt: skip
    mlp, step = experts(rank, world, device), steps(rank, world, device, 1)[0]
    want = run(dispatcher, mlp, step, rank)
    x, w = step.xs[rank].clone().requires_grad_(), step.ws[rank].clone().requires_grad_()
    mlp.zero_grad()
    torch.cuda.set_sync_debug_mode("error")
    try:
        state = dispatcher.plan(step.idxs[rank], layer="layer")
        if precision == "mxfp8":
            own = mlp.mlp()
            out = mxfp8_mlp(
                dispatcher, state, x, w, own.up, own.down, activation=own.activation, transposed=own.transposed
            )
        else:
            dispatched = dispatcher.dispatch(state, x, w)
            y = mlp(dispatched, weight_at)
            out = dispatcher.combine(state, y, {"output": dispatched.weights, "source": w}.get(weight_at))
        out.backward(step.grads[rank])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(out, want[0]) and x.grad is not None and torch.equal(x.grad, want[1])
    dispatcher.check()
    dispatcher.close()


@pytest.mark.parametrize("form", ["dedup", "route"])
def test_cuda_graph_of_the_whole_layer(heap: Heap, ranks: Ranks, form: str) -> None:
    """Captured once, replayed 200 times with other tokens and routes: every replay equals the eager step."""
    rank, world, device = ranks
    dispatcher, mlp = build(heap, device, form=form, slots=4), experts(rank, world, device)
    static = torch.zeros(T, D, dtype=torch.bfloat16, device=device).requires_grad_()
    idx = torch.zeros(T, K, dtype=torch.int64, device=device)
    weight = torch.zeros(T, K, device=device).requires_grad_()
    grad = torch.zeros(T, D, dtype=torch.bfloat16, device=device)

    def load(seed: int) -> None:
        g = torch.Generator(device=device).manual_seed(seed * world + rank)
        with torch.no_grad():
            static.copy_(torch.randn(T, D, generator=g, device=device))
            weight.copy_(torch.rand(T, K, generator=g, device=device))
            idx.copy_(torch.randint(-1, E, (T, K), generator=g, device=device))
            grad.copy_(torch.randn(T, D, generator=g, device=device))

    def eager() -> tuple[Tensor, ...]:
        static.grad = weight.grad = None
        mlp.zero_grad(set_to_none=True)
        out = moe_step(dispatcher, static, idx, weight, mlp, layer="graph")
        out.backward(grad)
        return out.detach(), static.grad, weight.grad, mlp.up.grad, mlp.down.grad  # type: ignore[return-value]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for seed in range(3):
            load(seed)
            eager()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        captured = eager()
    torch.cuda.synchronize()
    dist.barrier()
    replays = 200
    for seed in range(replays):
        load(10 + seed)
        graph.replay()
        if seed % 20 == 0 or seed == replays - 1:
            got = [t.clone() for t in captured]
            want = eager()
            for name, a, b in zip(("out", "x", "weights", "up", "down"), got, want, strict=True):
                assert torch.equal(a, b), (name, seed, (a - b).abs().max())
    dispatcher.check()
    torch.cuda.synchronize()
    dist.barrier()
    del graph
    dispatcher.close()


def test_overflow_is_flagged_and_regrow_mends_it(ranks: Ranks) -> None:
    """Dropless routes past the bound must never pass silently."""
    rank, world, device = ranks
    heap = open_heap("torch", None, device, 20.0)
    dispatcher = build(heap, device, capacity=CapacityConfig("dropless", 0.5))
    step = next(s for s in steps(rank, world, device, 20, "one rank") if sum(s.tokens) > T)
    state = dispatcher.plan(step.idxs[rank], layer="hot")
    dispatcher.dispatch(state, step.xs[rank], step.ws[rank])
    with pytest.raises(RouteOverflow, match=r"capacity.factor=0.5.*regrow"):
        dispatcher.check()
    del state
    dispatcher.regrow(max(step.num_rows))
    state = dispatcher.plan(step.idxs[rank], layer="hot")
    d = dispatcher.dispatch(state, step.xs[rank], step.ws[rank])
    assert torch.equal(d.rows[: step.num_rows[rank]], step.rows[rank])
    dispatcher.check()
    del d, state
    heap.close()


def test_dedup_keeps_unique_rows_for_backward_not_expanded_ones(heap: Heap, ranks: Ranks) -> None:
    """Saved bytes of the layer: at most 1.3 × unique rows received · D, plus maps and the MLP's own activations."""
    rank, world, device = ranks
    dispatcher, mlp = build(heap, device), experts(rank, world, device)
    step = max(steps(rank, world, device, 8), key=lambda s: min(s.tokens))
    seen: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        if not isinstance(t, torch.nn.Parameter):
            seen[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    x = step.xs[rank].clone().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = moe_step(dispatcher, x, step.idxs[rank], step.ws[rank].clone().requires_grad_(), mlp, layer="bytes")
    slot = dispatcher.payload_region.nbytes
    unique = world * T * D * 2
    activations = dispatcher.max_rows * (2 * F + 2 * F) * 2
    maps = dispatcher.max_rows * 16 + world * T * K * 16 + 65536
    assert slot <= 1.3 * unique + world * T * K * 8 + 1024
    assert sum(seen.values()) <= slot + x.numel() * 2 + activations + maps, seen
    out.sum().backward()
    dispatcher.check()
    dispatcher.close()


def test_a_stalled_peer_is_named(ranks: Ranks) -> None:
    """A peer that stays away: every other rank gets rank, layer and phase within the time-out, and the GPU is not left
    spinning."""
    rank, world, device = ranks
    heap = open_heap("torch", None, device, 1.5)
    dispatcher, mlp = build(heap, device, timeout_s=1.5), experts(rank, world, device)
    step = steps(rank, world, device, 1)[0]
    run(dispatcher, mlp, step, rank, "layer 6")
    torch.cuda.synchronize()
    dist.barrier()
    if rank == world - 1:
        time.sleep(4.0)
        with pytest.raises((HeapAborted, HeapTimeout)):
            dispatcher.plan(step.idxs[rank], layer="layer 7")
            dispatcher.check()
    else:
        start = time.monotonic()
        state = dispatcher.plan(step.idxs[rank], layer="layer 7")
        dispatcher.dispatch(state, step.xs[rank], step.ws[rank])
        named = rf"rank {rank} waited 1.5 s in plan of layer 7 for EP ranks \[{world - 1}\]"
        with pytest.raises(HeapTimeout, match=named):
            dispatcher.check()
        assert time.monotonic() - start < 4.0
    dist.barrier()
