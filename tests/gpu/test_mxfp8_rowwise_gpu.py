"""MXFP8 over rowwise between GPUs: movements bit for bit against the torch references, the node against the oracle's
gates and against block, order and lifetime of slots, no host sync, CUDA graphs.

Legend: T tokens of a rank, K routes per token, R rows of an expert rank, D hidden size, F expert width, M ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import astuple, fields, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ep_plugin.config import CapacityConfig, EPConfig, LaunchConfig, LegsConfig, MXFP8Config
from ep_plugin.dispatch.base import Arrived
from ep_plugin.heap import open_heap
from ep_plugin.heap.base import Heap
from ep_plugin.kernels import mxfp8 as ref
from ep_plugin.kernels import mxfp8_reduce as ref_reduce
from ep_plugin.kernels.reduce import get_values_torch
from ep_plugin.mxfp8 import build_mxfp8_dispatcher, mxfp8_moe_step, node
from ep_plugin.mxfp8.rowwise_device import DeviceRowwiseMXFP8
from tests.gpu.step import E, K, Step
from tests.gpu.test_layer_gpu import delays
from tests.gpu.test_mxfp8_gpu import BASE, HOPPER, on_device, to_cpu
from tests.moe import Result, oracle, same_bits
from tests.test_mxfp8_node import Swapped, decibels, faults, run_step

T, D = 96, 512
FORMS = ("dedup", "route")
Ranks = tuple[int, int, torch.device]
ROOMY = CapacityConfig("dropless", 4.0)


@pytest.fixture(scope="module")
def heap(ranks: Ranks) -> Iterator[Heap]:
    heap = open_heap("torch", None, ranks[2], 30.0)
    yield heap
    heap.close()


def build(heap: Heap, ranks: Ranks, form: str, mxfp8: MXFP8Config | None = None, **settings: Any) -> Any:
    shape = {"num_experts": E, "top_k": K, "hidden_size": D, **settings.pop("shape", {})}
    settings = {"capacity": ROOMY, "max_tokens": T, "timeout_s": 20.0, "diagnostic_fill": "nan", **settings}
    dispatcher = build_mxfp8_dispatcher(
        EPConfig(form=form, heap="torch", **settings),
        mxfp8,
        dtype=torch.bfloat16,
        device=ranks[2],
        heap=heap,
        **shape,
    )
    assert isinstance(dispatcher, DeviceRowwiseMXFP8)
    return dispatcher


# Movements, bit for bit


def check_received(received: Any, want: Tensor, what: object) -> None:
    """``received`` in every form that was made, against the records ``want`` [R, W]."""
    n = want.shape[0]
    rowwise = ref.rescale_torch(want)
    for operand in received.made:
        if operand.form == "plain":
            assert torch.equal(operand.data[:n], ref.dequantize_torch(want, torch.bfloat16)), what
        elif operand.form == "rowwise":
            assert torch.equal(operand.data[:n].view(torch.uint8), rowwise[0].view(torch.uint8)), what
            assert torch.equal(operand.scales[:n], rowwise[1]), what
        else:
            assert torch.equal(operand.data[:n], want), what
    if received.rows is not None:
        assert torch.equal(received.rows[:n], want), what


def local_rows(step: Step, rank: int, t_max: int) -> Tensor:
    """int32 [M, T_max, K]: rows of ``rank`` that every source's tokens have."""
    out = torch.full((len(step.maps), t_max, step.idxs[0].shape[1]), -1, dtype=torch.int32, device=step.xs[0].device)
    for source, m in enumerate(step.maps):
        out[source, : step.tokens[source]] = torch.where(m.dest_rank == rank, m.dest_row, -1)
    return out


def summed(step: Step, rank: int, ys: list[Tensor], form: str, t_max: int, weights: list[Tensor] | None) -> Tensor:
    """What ``rank`` must get back of plain rows ``ys[p]`` [R_p, D] (times ``weights[p]`` [R_p], dedup)."""
    m, world, dtype = step.maps[rank], len(ys), ys[0].dtype
    if form == "route":
        records = [ref.quantize_torch(y) for y in ys]
        by_route = None if weights is None else step.ws[rank]
        return ref_reduce.get_reduce_records_torch(records, m.dest_rank, m.dest_row, by_route, dtype)
    nbytes = ref.record_bytes(ys[0].shape[1])
    stages = [torch.zeros((world, t_max, nbytes), dtype=torch.uint8, device=ys[0].device) for _ in range(world)]
    for p in range(world):
        local = local_rows(step, p, t_max)
        by_token = None if weights is None else torch.cat([weights[p], weights[p].new_zeros(1)])[local.long()]  # −1: 0
        ref_reduce.pre_reduce_put_records_torch(ys[p], local, step.tokens, stages, p, by_token)
    return ref_reduce.sum_partial_records_torch(stages[rank], m.dest_rank, dtype)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("weight_at", ["hidden", "output", "source"])
def test_movements_equal_the_references_bit_for_bit(heap: Heap, ranks: Ranks, form: str, weight_at: str) -> None:
    """Fault: a record that is lost, misplaced, decoded with another's scales, or read before it has arrived, in any of
    the four movements; T = 0, repeated experts, dropped routes and three chunks among them."""
    if form == "dedup" and weight_at == "source":
        pytest.skip("excluded by config")
    rank, world, device = ranks
    gemms = HOPPER if torch.cuda.get_device_capability(device)[0] == 9 else ("sm90_bf16",)
    kinds = (("uniform", ROOMY), ("repeats", ROOMY), ("one rank", ROOMY), ("uniform", CapacityConfig("rank", 0.7)))
    for gemm, hidden in ((gemms[0], 32), *((gemm, 4096) for gemm in gemms)):  # every width is compiled anew
        for kind, capacity in kinds:
            dispatcher = build(
                heap, ranks, form, MXFP8Config(gemm=gemm), weight_at=weight_at, capacity=capacity,
                launch=LaunchConfig(chunks=3, early=True), shape={"hidden_size": hidden},
            )  # fmt: skip
            for seed in range(2):
                what = (form, weight_at, gemm, hidden, kind, seed)
                step = Step(
                    seed, world, device, max_tokens=T, hidden=hidden, dtype=torch.bfloat16, capacity=capacity, kind=kind
                )
                n, x, w, m = step.num_rows[rank], step.xs[rank], step.ws[rank], step.maps[rank]
                state = dispatcher.plan(step.idxs[rank], layer=str(what), x=x if seed % 2 else None)
                received, weights = dispatcher.receive(state, x, w, Arrived())
                check_received(received, ref.quantize_torch(step.rows[rank]), what)
                assert torch.equal(weights[:n], step.row_weights[rank]), what
                ys = [r * 0.5 for r in step.rows]
                y = torch.full((dispatcher.max_rows, hidden), torch.nan, dtype=torch.bfloat16, device=device)
                y[:n] = ys[rank]
                given = {"output": weights, "source": w}.get(weight_at)
                out, kept = dispatcher.give_back(state, y, given, weight_at == "source")
                by_row = None if weight_at == "hidden" else step.row_weights
                assert torch.equal(out, summed(step, rank, ys, form, T, by_row)), what
                if kept is not None:
                    there = torch.cat([ref.quantize_torch(v) for v in ys])
                    starts = torch.tensor([0, *step.num_rows], device=device).cumsum(0)
                    index = (starts[m.dest_rank.clamp(min=0)] + m.dest_row).clamp(min=0)
                    want = torch.where((m.dest_rank >= 0).unsqueeze(2), there[index], 0)
                    assert torch.equal(kept, want), what
                # Backward
                scale = w if weight_at == "source" else None
                back = dispatcher.receive_grad(state, step.grads[rank], scale, (dispatcher.gemm.form, "plain"))
                grads = [torch.zeros_like(r, dtype=torch.float32) for r in step.rows]
                for p, q in enumerate(step.maps):
                    t, k = (q.dest_row >= 0).nonzero(as_tuple=True)
                    values = step.grads[p].float()[t] * (1 if scale is None else step.ws[p][t, k].unsqueeze(1))
                    for r in range(world):
                        here = q.dest_rank[t, k] == r
                        grads[r][q.dest_row[t, k][here].long()] = values[here]
                check_received(back, ref.quantize_torch(grads[rank]), what)
                y[:n] = step.rows[rank]
                dots = torch.zeros(dispatcher.max_rows, device=device)
                dots[:n] = step.row_weights[rank] * 3
                dx, dw = dispatcher.return_grad(state, y, dots)
                assert torch.equal(dx, summed(step, rank, step.rows, form, T, None)), what
                assert torch.equal(dw, get_values_torch([v * 3 for v in step.row_weights], m.dest_rank, m.dest_row))
                del state, received, back
            dispatcher.check()
            dispatcher.close()


# The node


def legs_of(names: str) -> LegsConfig:
    return LegsConfig(*("mxfp8" if letter == "m" else "bf16" for letter in names))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("gemm", HOPPER)
def test_node_gates_and_block(heap: Heap, ranks: Ranks, form: str, gemm: str) -> None:
    """Fault: any leg, form of rows or place of the router weight in the node on GPUs; and what block gives with the
    same legs and GEMM must come out, where the return legs are not sums."""
    rank, world, device = ranks
    if gemm == "sm90_fp8row" and torch.cuda.get_device_capability(device)[0] != 9:
        pytest.skip("needs Hopper")
    problems = [
        replace(BASE, tokens=tuple(200 + 37 * r for r in range(world)), num_experts=4 * world),
        replace(BASE, tokens=(160, *(0,) * (world - 1)), num_experts=4 * world),
        replace(BASE, tokens=(90,) * world, num_experts=4 * world, routes="to_last_rank"),
    ]
    cases = [("hidden", problem, "mmmm") for problem in problems]
    cases += [("hidden", problems[0], legs) for legs in ("mbmb", "bmbm", "bbbb")]
    cases += [("output", problems[0], "mmmm")]
    if form == "route":
        cases += [("source", problems[0], "mmmm"), ("source", problems[0], "bmbm")]
    for weight_at, problem, names in cases:
        mxfp8 = MXFP8Config(gemm=gemm, legs=legs_of(names))
        shape = {
            "num_experts": problem.num_experts,
            "top_k": problem.top_k,
            "hidden_size": problem.hidden,
        }
        ours = build(heap, ranks, form, mxfp8, weight_at=weight_at, max_tokens=max(problem.tokens), shape=shape)
        block = build_mxfp8_dispatcher(
            problem.config("block", weight_at), mxfp8, dtype=torch.bfloat16, device=device, **shape
        )
        experts, inputs = on_device(problem, rank, world, device)
        first, second = (run_step(ours, experts, inputs) for _ in range(2))
        other = run_step(block, experts, inputs)
        ours.check()
        what = (form, gemm, weight_at, names, problem.routes, problem.tokens)
        found = faults(to_cpu(second), oracle(problem, weight_at)[rank])  # type: ignore[arg-type]
        assert not found, (what, found)
        assert all(map(same_bits, astuple(first), astuple(second))), (what, "the second step differs")
        for field in fields(Result):
            summed_leg = {"out": names[1], "dx": names[3]}.get(field.name)
            if form == "dedup" and summed_leg == "m":
                continue
            # The bits of a grouped GEMM may depend on how many rows the buffer holds past the valid ones.
            got, want = getattr(second, field.name), getattr(other, field.name)
            assert not got.any() if not want.any() else decibels(got, want.double()) >= 40, (field.name, *what)
        ours.close()
        block.close()


def small(ranks: Ranks) -> Any:
    world = ranks[1]
    return replace(BASE, tokens=tuple(50 + 13 * r for r in range(world)), num_experts=4 * world)


def build_small(heap: Heap, ranks: Ranks, form: str, **settings: Any) -> Any:
    problem = small(ranks)
    shape = {"num_experts": problem.num_experts, "top_k": problem.top_k, "hidden_size": problem.hidden}
    return build(heap, ranks, form, shape=shape, **{"max_tokens": max(problem.tokens), **settings})


@pytest.mark.parametrize("form", FORMS)
def test_reading_the_rows_after_their_slot_was_written_fails(heap: Heap, ranks: Ranks, form: str) -> None:
    """The control: with the last two steps of backward swapped, the gates must fail where the slot is shared."""
    rank, world, device = ranks
    problem = small(ranks)
    experts, inputs = on_device(problem, rank, world, device)
    dispatcher, right = build_small(heap, ranks, form), node.Backward
    node.Backward = Swapped  # type: ignore[misc]
    try:
        got = run_step(dispatcher, experts, inputs)
    finally:
        node.Backward = right  # type: ignore[misc]
    found = [fault.split(":")[0] for fault in faults(to_cpu(got), oracle(problem, "hidden")[rank])]  # type: ignore
    dispatcher.check()
    dispatcher.close()
    assert found == (["dup"] if form == "route" else []), found


@pytest.mark.parametrize("form", FORMS)
def test_reuse_under_random_delays(heap: Heap, ranks: Ranks, form: str) -> None:
    """Fault: a slot that is written for the next round while a peer still GETs from it; a chunk read before it has
    come."""
    rank, world, device = ranks
    experts, inputs = on_device(small(ranks), rank, world, device)
    dispatcher = build_small(heap, ranks, form, slots=1, launch=LaunchConfig(chunks=2))
    want = run_step(dispatcher, experts, inputs)
    wrong = torch.zeros(1, dtype=torch.int64, device=device)
    for number in range(30):
        with delays(dispatcher.heap, rank, number):
            got = run_step(dispatcher, experts, inputs, layer=f"round {number}")
        wrong += int(not all(map(same_bits, astuple(got), astuple(want))))
    dist.all_reduce(wrong)
    dispatcher.check()
    dispatcher.close()
    assert not int(wrong)


def _stack(dispatcher: Any, layers: list[Any], inputs: Any, weight: Tensor, x: Tensor) -> Tensor:
    for i, experts in enumerate(layers):
        x = x + mxfp8_moe_step(dispatcher, x, inputs.idx, weight, experts, layer=f"layers.{i}")
    return x


@pytest.mark.parametrize("form", FORMS)
def test_checkpointing_offloading_and_a_second_backward(heap: Heap, ranks: Ranks, form: str) -> None:
    """Fault: a lease that the node owns and not what autograd saved; gradients sent to where the rows no longer are;
    rows that a second backward takes gradients for."""
    rank, world, device = ranks
    problem = small(ranks)
    inputs = on_device(problem, rank, world, device)[1]
    layers = [on_device(replace(problem, seed=i), rank, world, device)[0] for i in range(3)]
    results = []
    for how in ("plain", "checkpointed", "offloaded"):
        dispatcher = build_small(heap, ranks, form, slots=4)
        for experts in layers:
            experts.zero_grad()
        x, w = inputs.x.clone().requires_grad_(), inputs.weight.clone().requires_grad_()
        run = functools.partial(_stack, dispatcher, layers, inputs, w)
        if how == "offloaded":
            with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone() if rank else t, lambda t: t):
                y = run(x)
        else:
            y = checkpoint(run, x, use_reentrant=False) if how == "checkpointed" else run(x)
        y.backward(inputs.upstream)
        results.append([y.detach(), x.grad, w.grad, *(p.grad.clone() for e in layers for p in e.parameters())])
        del y, run
        dispatcher.check()
        assert dispatcher.stats()["slots_in_use"] == 0, (how, dispatcher.stats())
        dispatcher.close()
    for name, got in zip(("checkpointed", "offloaded"), results[1:], strict=True):
        wrong = [i for i, pair in enumerate(zip(results[0], got, strict=True)) if not same_bits(*pair)]
        assert not wrong, (name, wrong)

    dispatcher = build_small(heap, ranks, form)
    x = inputs.x.clone().requires_grad_()
    out = mxfp8_moe_step(dispatcher, x, inputs.idx, inputs.weight, layers[0])
    out.backward(inputs.upstream, retain_graph=True)
    if form == "route":
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.backward(inputs.upstream)
    else:
        out.backward(inputs.upstream)
    del out
    dispatcher.check()
    dispatcher.close()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("gemm", HOPPER)
def test_no_host_sync_and_cuda_graph(heap: Heap, ranks: Ranks, form: str, gemm: str) -> None:
    """Fault: a hidden ``.item()`` or blocking copy; a captured step that replays what it was captured with."""
    rank, world, device = ranks
    if gemm == "sm90_fp8row" and torch.cuda.get_device_capability(device)[0] != 9:
        pytest.skip("needs Hopper")
    problem = replace(small(ranks), tokens=(64,) * world)
    dispatcher = build_small(
        heap, ranks, form, mxfp8=MXFP8Config(gemm=gemm), slots=4, max_tokens=64, diagnostic_fill="none"
    )
    experts, inputs = on_device(problem, rank, world, device)
    x, w = inputs.x.clone().requires_grad_(), inputs.weight.clone().requires_grad_()
    idx, upstream = inputs.idx.clone(), inputs.upstream.clone()
    leaves = [x, w, *experts.parameters()]

    def step() -> tuple[Tensor, ...]:
        for leaf in leaves:
            leaf.grad = None
        out = mxfp8_moe_step(dispatcher, x, idx, w, experts)
        out.backward(upstream)
        return (out.detach(), *(leaf.grad for leaf in leaves))  # type: ignore[misc]

    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        step()  # compiles
        torch.cuda.set_sync_debug_mode("error")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    torch.cuda.current_stream(device).wait_stream(stream)
    torch.cuda.synchronize(device)
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        captured = step()
    torch.cuda.synchronize(device)
    dist.barrier()
    wrong = torch.zeros(1, dtype=torch.int64, device=device)
    for seed in range(8):
        other = on_device(replace(problem, seed=10 + seed), rank, world, device)[1]
        with torch.no_grad():
            x.copy_(other.x)
            w.copy_(other.weight)
            idx.copy_(other.idx)
            upstream.copy_(other.upstream)
        graph.replay()
        got = [t.clone() for t in captured]
        wrong += int(not all(map(same_bits, got, step())))
    dist.all_reduce(wrong)
    dispatcher.check()
    assert not int(wrong)
    del graph, captured
    dispatcher.close()
