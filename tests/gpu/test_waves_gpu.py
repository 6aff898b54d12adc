"""Waves on GPUs: the same step as without them, lanes that overlap and never race, no host sync, CUDA graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ep_plugin.bench.waves_trace import account
from ep_plugin.config import CapacityConfig, EPConfig, ScheduleConfig
from ep_plugin.dispatch import build_dispatcher
from ep_plugin.experts import GroupedMLP
from ep_plugin.heap import open_heap
from ep_plugin.heap.base import Heap
from ep_plugin.heap.device import DeviceHeap
from ep_plugin.layer import moe_step
from tests.gpu.step import E, K
from tests.gpu.test_layer_gpu import D, Ranks, T, delays, experts, run, steps

NAMES = ("out", "x", "weights", "up", "down")
SCHEDULES = [
    ScheduleConfig("wave_sequential", 3),
    ScheduleConfig("wave_overlapped", 3, spare=16),
    ScheduleConfig("wave_overlapped", 2, "expert", spare=0),
    ScheduleConfig("wave_overlapped", 1),
]


def build(heap: Heap | None, device: torch.device, schedule: ScheduleConfig, **settings: Any) -> Any:
    settings = {"capacity": CapacityConfig("dropless", 4.0), "max_tokens": T, "timeout_s": 20, **settings}
    name = "auto" if heap is None else heap.name
    return build_dispatcher(
        EPConfig(heap=name, schedule=schedule, **settings),
        num_experts=E,
        top_k=K,
        hidden_size=D,
        dtype=torch.bfloat16,
        device=device,
        heap=heap,
    )


def close(got: tuple[Tensor, ...], want: tuple[Tensor, ...], what: str) -> None:
    """Equal up to the rounding of sums that are cut: bfloat16 products may differ in their last bits with their M."""
    for name, a, b in zip(NAMES, got, want, strict=True):
        scale = b.float().abs().max().clamp(min=1e-3)
        error = ((a.float() - b.float()).abs().max() / scale).item()
        assert error < 2e-2, f"{what}, {name}: {error}"


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("form", ["dedup", "route"])
@pytest.mark.parametrize("weight_at", ["hidden", "input", "output"])
def test_the_same_step_as_without_waves(
    heap: Heap, ranks: Ranks, form: str, weight_at: str, schedule: ScheduleConfig
) -> None:
    """A wave's rows, weights or gradients lost, doubled or read before they are there."""
    rank, world, device = ranks
    plain = build(heap, device, ScheduleConfig(), form=form, weight_at=weight_at)
    waves = build(heap, device, schedule, form=form, weight_at=weight_at)
    mlp = experts(rank, world, device)
    for kind in ("uniform", "repeats", "one rank"):
        for i, step in enumerate(steps(rank, world, device, 3, kind)):
            want = run(plain, mlp, step, rank)
            close(run(waves, mlp, step, rank), want, f"{kind} {i}")
    waves.check()
    assert waves.stats()["slots_peak"] == 1
    waves.close()
    plain.close()


def test_block_and_capacity(ranks: Ranks) -> None:
    """Waves over NCCL; and quotas applied to each wave, which would drop other routes."""
    rank, world, device = ranks
    mlp = experts(rank, world, device)
    for dispatcher, policy in (("block", "dropless"), ("rowwise", "rank"), ("rowwise", "expert"), ("block", "source")):
        settings = dict(dispatcher=dispatcher, capacity=CapacityConfig(policy, 0.8 if policy != "dropless" else 4.0))
        plain = build(None, device, ScheduleConfig(), **settings)
        waves = build(None, device, ScheduleConfig("wave_overlapped", 2), **settings)
        for i, step in enumerate(steps(rank, world, device, 3)):
            want = run(plain, mlp, step, rank)
            close(run(waves, mlp, step, rank), want, f"{dispatcher} {policy} {i}")
        waves.check()
        plain.check()
        waves.close()
        plain.close()


@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize("form", ["dedup", "route"])
def test_random_delays_on_every_lane(heap: Heap, ranks: Ranks, form: str, number: int) -> None:
    """A buffer read before it was written, or written again before it was read, when a rank is late anywhere."""
    rank, world, device = ranks
    assert isinstance(heap, DeviceHeap)
    plain = build(heap, device, ScheduleConfig(), form=form)
    waves = build(heap, device, ScheduleConfig("wave_overlapped", number, spare=8), form=form, slots=2)
    mlp = experts(rank, world, device)
    for i, step in enumerate(steps(rank, world, device, 12)):
        want = run(plain, mlp, step, rank)
        with delays(heap, rank, i):
            got = run(waves, mlp, step, rank)
        close(got, want, f"round {i}")
    waves.check()
    waves.close()
    plain.close()


def test_no_host_sync_and_checkpointing(heap: Heap, ranks: Ranks) -> None:
    """A hidden blocking copy between router and the end of backward; gradients that a recompute changes."""
    rank, world, device = ranks
    waves = build(heap, device, ScheduleConfig("wave_overlapped", 2, spare=16))
    mlp = experts(rank, world, device)
    step = steps(rank, world, device, 1)[0]
    want = run(waves, mlp, step, rank)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = run(waves, mlp, step, rank)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for name, a, b in zip(NAMES, got, want, strict=True):
        assert torch.equal(a, b), name

    x, w = step.xs[rank].clone().requires_grad_(), step.ws[rank].clone().requires_grad_()
    mlp.zero_grad()
    out = checkpoint(moe_step, waves, x, step.idxs[rank], w, mlp, use_reentrant=False)
    assert waves.stats()["slots_in_use"] == 0  # a checkpointed step holds no slot
    out.backward(step.grads[rank])
    got = (out.detach(), x.grad, w.grad, mlp.up.grad, mlp.down.grad)
    for name, a, b in zip(NAMES, got, want, strict=True):
        assert torch.equal(a, b), f"checkpointed {name}"
    waves.check()
    waves.close()


@pytest.mark.parametrize("form", ["dedup", "route"])
def test_cuda_graph(heap: Heap, ranks: Ranks, form: str) -> None:
    """Captured once, replayed with other tokens and routes: every replay equals the eager step."""
    rank, world, device = ranks
    waves = build(heap, device, ScheduleConfig("wave_overlapped", 2, spare=16), form=form, slots=4)
    mlp = experts(rank, world, device)
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

    def eager() -> tuple[Any, ...]:
        static.grad = weight.grad = None
        mlp.zero_grad(set_to_none=True)
        out = moe_step(waves, static, idx, weight, mlp, layer="graph")
        out.backward(grad)
        return out.detach(), static.grad, weight.grad, mlp.up.grad, mlp.down.grad

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
    for seed in range(40):
        load(10 + seed)
        graph.replay()
        if seed % 8 == 0:
            got = [t.clone() for t in captured]
            for name, a, b in zip(NAMES, got, eager(), strict=True):
                assert torch.equal(a, b), (name, seed, (a - b).abs().max())
    waves.check()
    torch.cuda.synchronize()
    dist.barrier()
    del graph
    waves.close()


def test_lanes_overlap_forward_and_backward(ranks: Ranks) -> None:
    """Everything in one line after all: kernels of experts and of movements must run at the same time under
    wave_overlapped, in forward and in backward (one wave: in backward), and never under wave_sequential."""
    rank, world, device = ranks
    tokens, hidden, width, num, k = 8192, 2048, 1024, 16, 4
    g = torch.Generator(device=device).manual_seed(rank)
    x = torch.randn(tokens, hidden, generator=g, device=device).bfloat16().requires_grad_()
    idx = torch.rand(tokens, num, generator=g, device=device).topk(k, 1).indices
    w = torch.rand(tokens, k, generator=g, device=device).requires_grad_()
    grad = torch.randn(tokens, hidden, generator=g, device=device).bfloat16()
    local = num // world
    mlp = GroupedMLP(num, hidden, width, first_expert=rank * local, num_local=local, seed=0,
                     dtype=torch.bfloat16, device=device)  # fmt: skip
    heap = open_heap("torch", None, device, 20.0)
    both: dict[tuple[str, int], list[float]] = {}
    for kind, waves in (("wave_sequential", 4), ("wave_overlapped", 4), ("wave_overlapped", 1)):
        dispatcher = build_dispatcher(
            EPConfig(heap="torch", max_tokens=tokens, schedule=ScheduleConfig(kind, waves, spare=16)),
            num_experts=num, top_k=k, hidden_size=hidden, dtype=torch.bfloat16, device=device, heap=heap,
        )  # fmt: skip
        out: list[Tensor] = []

        def forward(dispatcher: Any = dispatcher, out: list[Tensor] = out) -> None:
            out[:] = [moe_step(dispatcher, x, idx, w, mlp, layer="overlap")]

        def backward(out: list[Tensor] = out) -> None:
            out[0].backward(grad, retain_graph=True)

        for _ in range(2):
            forward()
            backward()
        found = []
        for part in (forward, backward):
            found.append(account(part, device, {}).both)
        both[kind, waves] = found
        dispatcher.check()
        out.clear()
        dispatcher.close()
    heap.close()
    print(f"rank {rank}: ms in which communication and experts run together, forward and backward: {both}")
    assert max(both["wave_sequential", 4]) < 0.02
    assert min(both["wave_overlapped", 4]) > 0.05
    forward_of_one, backward_of_one = both["wave_overlapped", 1]
    assert forward_of_one < 0.02 and backward_of_one > 0.05
