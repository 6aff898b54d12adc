"""The MXFP8 node over every CPU dispatcher: quality against the oracle, equal bits between dispatchers, reuse of slots.

Legend: T tokens of a rank, K routes per token, E experts, D hidden size, F expert width, M ranks.
"""

from __future__ import annotations

import gc
import itertools
import time
from dataclasses import astuple, fields, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ep_plugin.config import EPConfig, LegsConfig, MXFP8Config
from ep_plugin.experts import Activation, GroupedMLP
from ep_plugin.mxfp8 import codec, node, rowwise
from ep_plugin.mxfp8.dispatchers import build_mxfp8_dispatcher
from ep_plugin.mxfp8.node import mxfp8_moe_step
from tests.moe import (
    PATHS,
    Inputs,
    Problem,
    Result,
    make_experts,
    make_inputs,
    oracle,
    oracles,
    poisoned_memory,
    same_bits,
)

# Least signal to noise in dB against float64 of the originals.
GATES = {"out": 22.0, "dx": 20.0, "ddown": 22.0, "dup": 20.0, "dweight": 20.0, "dup_bias": 20.0, "ddown_bias": 22.0}
LEGS = [LegsConfig(*legs) for legs in itertools.product(("mxfp8", "bf16"), repeat=4)]
ALL, NONE = LEGS[0], LEGS[-1]
BASE = Problem((40,), num_experts=6, top_k=3, hidden=64, width=96, dtype=torch.bfloat16, weight_dtype=torch.float32)


def build(problem: Problem, path: str, weight_at: str = "hidden", mxfp8: MXFP8Config | None = None, **settings: Any):
    return build_mxfp8_dispatcher(
        problem.config(path, weight_at, **settings),
        mxfp8 or MXFP8Config(),
        num_experts=problem.num_experts,
        top_k=problem.top_k,
        hidden_size=problem.hidden,
        dtype=problem.dtype,
    )


def run_step(dispatcher: Any, experts: GroupedMLP, inputs: Inputs, layer: str = "layer") -> Result:
    """One forward and backward of one rank."""
    x, weight = inputs.x.detach().requires_grad_(), inputs.weight.detach().requires_grad_()
    experts.zero_grad()
    out = mxfp8_moe_step(dispatcher, x, inputs.idx, weight, experts, layer=layer)
    out.backward(inputs.upstream)
    return Result(out.detach(), x.grad, weight.grad, *(p.grad for p in experts.parameters()))


def decibels(got: Tensor, want: Tensor) -> float:
    noise = (got.double() - want).square().sum().clamp(min=1e-300)
    return float(10 * torch.log10(want.square().sum() / noise))


def faults(got: Result, want: Result, gates: dict[str, float] = GATES) -> list[str]:
    """What of ``got`` is too noisy, not finite, missing, or not 0 where nothing was routed."""
    wrong = []
    for field in fields(Result):
        a, b = getattr(got, field.name), getattr(want, field.name)
        if a is None or a.shape != b.shape:
            wrong.append(f"{field.name}: {None if a is None else tuple(a.shape)}, expected {tuple(b.shape)}")
        elif b.any():
            quality = decibels(a, b)
            if not quality >= gates[field.name]:
                wrong.append(f"{field.name}: {quality:.1f} dB < {gates[field.name]}")
        if a is not None and a[b == 0].any():
            wrong.append(f"{field.name}: not 0 where the oracle's is")
    return wrong


@pytest.mark.parametrize("weight_at", ["hidden", "output", "source"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_gates_without_expert_parallelism(weight_at: str, dtype: torch.dtype) -> None:
    """Fault: any wrong term, layout or rounding in the node itself, for any place of the router weight."""
    problem = replace(BASE, tokens=(300,), dtype=dtype, hidden=256, width=128)
    want = oracle(problem, weight_at)[0]
    for legs in (ALL, NONE):
        with poisoned_memory():
            dispatcher = build(problem, "local", weight_at, MXFP8Config(legs=legs))
            got = run_step(dispatcher, make_experts(problem, 0, 1), make_inputs(problem)[0])
        assert not faults(got, want), legs


def test_gates_catch_the_other_rounding() -> None:
    """Fault: scales by ``floor`` where ``rceil`` was asked for. Rows and gradients with values just below a power of
    two times 512 saturate under ``floor``."""
    problem = replace(BASE, tokens=(200,), hidden=256, width=128, weight_dtype=torch.float32)
    inputs = make_inputs(problem)[0]
    for tensor in (inputs.x, inputs.upstream):
        tensor[:, ::32] = torch.where(tensor[:, ::32] < 0, -7.9, 7.9).to(tensor.dtype)
    experts = make_experts(problem, 0, 1)
    exact = GroupedMLP.from_parameters(
        *(torch.nn.Parameter(p.detach().double()) for p in experts.parameters()), activation=Activation()
    )
    wide = Inputs(inputs.x.double(), inputs.idx, inputs.weight.double(), inputs.upstream.double())
    from tests.moe import run_step as plain_step

    want = plain_step(replace(problem, dtype=torch.float64).dispatcher("local"), exact, wide)
    found = {
        rounding: faults(run_step(build(problem, "local", mxfp8=MXFP8Config(rounding)), experts, inputs), want)
        for rounding in ("rceil", "floor")
    }
    assert not found["rceil"] and found["floor"], found


ACTIVATIONS = [
    Activation("gelu"),
    Activation("silu", gated=True, interleaved=True),
    Activation("relu2", gated=False),
    Activation.clamped_swiglu(),
]


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda a: a.name)
def test_other_activations_biases_and_layouts(activation: Activation) -> None:
    """Fault: an activation without kernels of its own is computed as SwiGLU; a transposed weight quantised across its
    blocks."""
    problem = replace(BASE, tokens=(200,), hidden=128, width=64, dtype=torch.float32)
    inputs, inner = make_inputs(problem)[0], activation.inputs_per_output * problem.width
    g = torch.Generator().manual_seed(3)
    e, d, f = problem.num_experts, problem.hidden, problem.width
    shapes = [(e, inner, d), (e, d, f), (e, inner), (e, d)]
    scales = [d**-0.5, f**-0.5, 1.0, 1.0]
    values = [torch.randn(s, generator=g) * scale for s, scale in zip(shapes, scales, strict=True)]
    from tests.moe import run_step as plain_step

    exact = GroupedMLP.from_parameters(*(torch.nn.Parameter(v.double()) for v in values), activation=activation)
    wide = Inputs(inputs.x.double(), inputs.idx, inputs.weight.double(), inputs.upstream.double())
    want = plain_step(replace(problem, dtype=torch.float64).dispatcher("local"), exact, wide)
    for transposed in (False, True):
        given = [v.transpose(1, 2).contiguous() if transposed and v.dim() == 3 else v for v in values]
        experts = GroupedMLP.from_parameters(
            *(torch.nn.Parameter(v.clone()) for v in given), activation=activation, transposed=transposed
        )
        got = run_step(build(problem, "local"), experts, inputs)
        if transposed:
            got = replace(got, dup=got.dup.transpose(1, 2), ddown=got.ddown.transpose(1, 2))
        assert not faults(got, want), transposed


def check_paths(rank: int, world: int, cases: list[tuple[str, Problem, LegsConfig]]) -> list[str]:
    """Every path on every case, twice on one dispatcher, against the oracle and against each other."""
    want = oracles(rank, world, [(problem, weight_at) for weight_at, problem, _ in cases])
    wrong = []
    with poisoned_memory():
        for weight_at, problem, legs in cases:
            results: dict[str, Result] = {}
            for path in PATHS:
                if (path, weight_at) == ("dedup", "source"):
                    continue
                dispatcher = build(problem, path, weight_at, MXFP8Config(legs=legs))
                experts, mine = make_experts(problem, rank, world), make_inputs(problem)[rank]
                first, second = (run_step(dispatcher, experts, mine) for _ in range(2))
                found = faults(second, want[problem, weight_at])
                if not all(map(same_bits, astuple(first), astuple(second))):
                    found.append("the second step differs")
                dispatcher.close()
                results[path] = second
                wrong += [f"rank {rank}, {path}, {weight_at}, {legs}, {problem}: {fault}" for fault in found]
            # Sums that travel are quantised sums only in the dedup form, so its bits may differ from the others'.
            for path, field in itertools.product(results, fields(Result)):
                summed = {"out": legs.combine, "dx": legs.dispatch_backward}.get(field.name)
                if path == "dedup" and summed == "mxfp8":
                    continue
                if not same_bits(getattr(results[path], field.name), getattr(results["block"], field.name)):
                    wrong.append(
                        f"rank {rank}, {weight_at}, {legs}, {problem}: {field.name} of {path} and block differ"
                    )
    return wrong


def assert_right(pool: Any, cases: list[tuple[str, Problem, LegsConfig]]) -> None:
    wrong = [line for lines in pool.run(check_paths, cases[0][1].world, cases, timeout=300) for line in lines]
    assert not wrong, f"{len(wrong)} faults\n" + "\n".join(wrong[:20])


def test_every_leg_on_every_path(pool: Any) -> None:
    """Fault: a leg that ignores its format, takes another's, or decodes what is plain; ragged T, T = 0, −1 routes,
    repeated experts and dropped routes among them; unwritten memory that reaches a result."""
    problem = replace(BASE, tokens=(50, 0, 30), policy="rank", factor=0.9)
    assert_right(pool, [("hidden", problem, legs) for legs in LEGS])


def test_every_place_of_the_router_weight(pool: Any) -> None:
    """Fault: a router weight that is applied twice, or not at all; its gradient in the wrong dtype or place."""
    problem = replace(BASE, tokens=(50, 31))
    cases = [(w, problem, legs) for w in ("hidden", "output", "source") for legs in (ALL, LEGS[5], NONE)]
    assert_right(pool, cases)


ROUTE_SETS = [
    replace(BASE, tokens=(0, 0, 0)),
    replace(BASE, tokens=(60, 20, 0), routes="to_last_rank"),
    replace(BASE, tokens=(40, 30, 0), routes="to_own_rank"),
    replace(BASE, tokens=(40, 30, 0), routes="one_expert"),
    replace(BASE, tokens=(40, 30, 0), routes="even_experts"),
    replace(BASE, tokens=(40, 30, 0), routes="none"),
    replace(BASE, tokens=(60, 50, 45), policy="source", factor=0.2),
    replace(BASE, tokens=(40, 200, 0), top_k=1, num_experts=3),
    replace(BASE, tokens=(40, 30, 5), dtype=torch.float32, weight_dtype=torch.bfloat16, hidden=32, width=32),
]


def test_route_sets(pool: Any) -> None:
    """Fault: a rank, an expert or a token without rows; everything to one rank; buffers that grow."""
    assert_right(pool, [("hidden", problem, ALL) for problem in ROUTE_SETS])


def test_experts_without_rows_have_zero_gradients() -> None:
    """Fault: None, or what an earlier use left, as the gradient of an expert that saw no row."""
    problem = replace(BASE, tokens=(40,), routes="even_experts")
    got = run_step(build(problem, "local"), make_experts(problem, 0, 1), make_inputs(problem)[0])
    for gradient in (got.dup, got.ddown, got.dup_bias, got.ddown_bias):
        assert not gradient[1::2].any() and gradient[::2].flatten(1).any(1).all()


def test_poison_comes_through() -> None:
    """Fault: an Inf in one token's row, or in its gradient, becomes a finite number; or it spoils other tokens."""
    problem = replace(BASE, tokens=(40,), routes="distinct")
    inputs, experts = make_inputs(problem)[0], make_experts(problem, 0, 1)
    inputs.x[7, 5] = torch.inf
    inputs.upstream[9, 3] = torch.inf
    got = run_step(build(problem, "local"), experts, inputs)
    assert not got.out[7].isfinite().any()
    assert got.out[torch.arange(40) != 7].isfinite().all()
    assert got.dx[9].isnan().any() and got.dx[torch.tensor([i for i in range(40) if i not in (7, 9)])].isfinite().all()


# Reuse of slots


class Swapped(node.Backward):
    """The negative control: the dispatched rows are read after the gradients took their place."""

    def run(self) -> tuple[Tensor | None, ...]:
        self.combine()
        self.down_projection()
        self.activation()
        self.up_projection_input()
        self.dispatch()
        self.up_projection_weight()
        return self.dx, self.dweight, self.dup, self.ddown, self.dup_bias, self.ddown_bias, None


def swapped(rank: int, world: int) -> dict[str, list[str]]:
    """What is wrong after a backward in the wrong order, by path."""
    problem = replace(BASE, tokens=(50, 31))
    want = oracles(rank, world, [(problem, "hidden")])[problem, "hidden"]
    found, right = {}, node.Backward
    for path in PATHS:
        dispatcher = build(problem, path)
        node.Backward = Swapped
        try:
            got = run_step(dispatcher, make_experts(problem, rank, world), make_inputs(problem)[rank])
        finally:
            node.Backward = right
        found[path] = faults(got, want)
        dispatcher.close()
    return found


def test_reading_the_rows_after_their_slot_was_written_fails(pool: Any) -> None:
    """The control of all tests above: with the last two steps swapped the gates must fail where the slot is shared."""
    for found in pool.run(swapped, 2):
        assert [fault.split(":")[0] for fault in found["route"]] == ["dup"], found
        assert not found["block"] and not found["dedup"]


def _layers(problem: Problem, rank: int, world: int, count: int) -> list[GroupedMLP]:
    return [make_experts(replace(problem, seed=i), rank, world) for i in range(count)]


def _stack(dispatcher: Any, layers: list[GroupedMLP], x: Tensor, inputs: Inputs, weight: Tensor, start: int) -> Tensor:
    for i, experts in enumerate(layers, start):
        x = x + mxfp8_moe_step(dispatcher, x, inputs.idx, weight, experts, layer=f"layers.{i}")
    return x


def checkpointed(rank: int, world: int, path: str) -> list[str]:
    """Two layers in one checkpointed region and one outside, two microbatches whose forwards come first: against the
    same without checkpointing, on few slots."""
    problem = replace(BASE, tokens=(50, 31))
    layers = _layers(problem, rank, world, 3)
    batches = [make_inputs(replace(problem, seed=seed))[rank] for seed in (5, 6)]
    results: list[list[Tensor]] = []
    for region in (False, True):
        # Without the region: 2 forwards × 3 layers. With it: 2 × the layer outside, and the region's two once.
        sizes = {} if path == "block" else {"slots": 4 if region else 6, "max_tokens": 50}
        dispatcher = build(problem, path, **sizes)
        for experts in layers:
            experts.zero_grad()
        kept = []
        for inputs in batches:
            x, w = inputs.x.clone().requires_grad_(), inputs.weight.clone().requires_grad_()
            if region:
                y = checkpoint(_stack, dispatcher, layers[:2], x, inputs, w, 0, use_reentrant=False)
            else:
                y = _stack(dispatcher, layers[:2], x, inputs, w, 0)
            kept.append((x, w, _stack(dispatcher, layers[2:], y, inputs, w, 2)))
        for (_, _, y), inputs in zip(kept, batches, strict=True):
            y.backward(inputs.upstream)
        found = [t for x, w, y in kept for t in (y.detach(), x.grad, w.grad)]
        results.append(found + [p.grad.clone() for e in layers for p in e.parameters()])
        kept.clear()
        gc.collect()
        dist.barrier()
        stats = dispatcher.stats()
        if stats.get("slots_in_use"):
            return [f"slots are still leased: {stats}"]
        dispatcher.close()
    return [f"tensor {i} differs" for i, pair in enumerate(zip(*results, strict=True)) if not same_bits(*pair)]


@pytest.mark.parametrize("path", PATHS)
def test_checkpointing_and_accumulation(pool: Any, path: str) -> None:
    """Fault: a lease that lives in the node and not in what autograd saved; a slot of the first forward used in the
    backward of a recomputed one; gradients of two microbatches that mix."""
    assert pool.run(checkpointed, 2, path) == [[], []]


def reuse(rank: int, world: int, path: str) -> list[str]:
    """Many rounds on one slot that is poisoned before every use, with ranks late in turns before they read what peers
    have: every round must give the first's bits."""
    problem = replace(BASE, tokens=(20, 13), hidden=32, width=32)
    dispatcher = build(problem, path, slots=1, max_tokens=20)
    experts, inputs = make_experts(problem, rank, world), make_inputs(problem)[rank]
    want, wrong, read = None, [], rowwise.get_reduce_records_torch
    for number in range(20):

        def late(*args: Any, number: int = number) -> Tensor:
            time.sleep(0.02 if number % world == rank else 0.0)
            return read(*args)

        rowwise.get_reduce_records_torch = late
        try:
            got = run_step(dispatcher, experts, inputs, layer=f"round {number}")
        finally:
            rowwise.get_reduce_records_torch = read
        want = want or got
        if not all(map(same_bits, astuple(got), astuple(want))):
            wrong.append(f"rank {rank}, round {number}")
    dispatcher.close()
    return wrong


@pytest.mark.parametrize("path", ["dedup", "route"])
def test_slots_are_reused_in_order(pool: Any, path: str) -> None:
    """Fault: a slot is written for the next round while a peer still GETs gradients from it."""
    assert pool.run(reuse, 2, path) == [[], []]


def run_twice(rank: int, world: int, path: str) -> str:
    problem = replace(BASE, tokens=(20, 13))
    dispatcher, experts, inputs = build(problem, path), make_experts(problem, rank, world), make_inputs(problem)[rank]
    x = inputs.x.clone().requires_grad_()
    out = mxfp8_moe_step(dispatcher, x, inputs.idx, inputs.weight, experts)
    out.backward(inputs.upstream, retain_graph=True)
    try:
        out.backward(inputs.upstream)
    except RuntimeError as error:
        return str(error)
    finally:
        dist.barrier()
        dispatcher.close()
    return ""


def test_a_second_backward_is_an_error_where_the_rows_are_gone(pool: Any) -> None:
    """Fault: ``retain_graph=True`` silently takes gradients for rows the second time."""
    assert all("modified by an inplace operation" in message for message in pool.run(run_twice, 2, "route"))
    assert pool.run(run_twice, 2, "dedup") == ["", ""]


def offloaded(rank: int, world: int, path: str) -> list[str]:
    """Saved tensors that come back as copies: the gradients must not go to where the rows no longer are."""
    problem = replace(BASE, tokens=(20, 13))
    dispatcher, experts, inputs = build(problem, path), make_experts(problem, rank, world), make_inputs(problem)[rank]
    want = run_step(dispatcher, experts, inputs)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone() if rank else t, lambda t: t):
        got = run_step(dispatcher, experts, inputs)
    dist.barrier()
    dispatcher.close()
    return [f.name for f in fields(Result) if not same_bits(getattr(got, f.name), getattr(want, f.name))]


@pytest.mark.parametrize("path", ["dedup", "route"])
def test_saved_tensors_may_be_moved(pool: Any, path: str) -> None:
    """Fault: offloading, here on one rank alone, breaks the place where gradients are read."""
    assert pool.run(offloaded, 2, path) == [[], []]


def abandoned(rank: int, world: int, path: str) -> dict[str, int]:
    """Forwards whose graphs are dropped, and forwards without gradients."""
    problem = replace(BASE, tokens=(20, 13), hidden=32, width=32)
    dispatcher = build(problem, path, slots=2, max_tokens=20)
    experts, inputs = make_experts(problem, rank, world), make_inputs(problem)[rank]
    for number in range(12):
        with torch.set_grad_enabled(number % 2 == 0):
            mxfp8_moe_step(dispatcher, inputs.x.clone().requires_grad_(), inputs.idx, inputs.weight, experts)
    gc.collect()
    dist.barrier()
    stats = dispatcher.stats()
    dispatcher.close()
    return stats


def test_forwards_without_backward_leak_nothing(pool: Any) -> None:
    """Fault: a lease that only a backward releases."""
    for stats in pool.run(abandoned, 2, "route") + pool.run(abandoned, 2, "dedup"):
        assert stats["slots"] == 2 and stats["slots_in_use"] == 0, stats


# What is kept, what moves


def saved_bytes(step: Any) -> int:
    """Bytes of distinct storages that autograd saves in ``step``, parameters left out."""
    seen: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, torch.nn.Parameter):
            seen[tensor.data_ptr()] = max(seen.get(tensor.data_ptr(), 0), tensor.numel() * tensor.element_size())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = step()
    assert out.requires_grad
    return sum(seen.values())


def memory(rank: int, world: int, path: str) -> tuple[int, int]:
    from ep_plugin.layer import moe_step

    problem = Problem((256, 256), num_experts=4, top_k=2, hidden=256, width=256, dtype=torch.bfloat16)
    experts, inputs = make_experts(problem, rank, world), make_inputs(problem)[rank]
    x = inputs.x.clone().requires_grad_()
    plain = problem.dispatcher(path, diagnostic_fill="none", max_tokens=256)
    bf16 = saved_bytes(lambda: moe_step(plain, x, inputs.idx, inputs.weight, experts))
    plain.close()
    records = build(problem, path, diagnostic_fill="none", max_tokens=256)
    mxfp8 = saved_bytes(lambda: mxfp8_moe_step(records, x, inputs.idx, inputs.weight, experts))
    records.close()
    return mxfp8, bf16


@pytest.mark.parametrize("path", PATHS)
def test_saved_bytes(pool: Any, path: str) -> None:
    """Fault: something is kept in bfloat16 that need not be, or kept twice. At most 0.55 of the plain layer's."""
    for mxfp8, bf16 in pool.run(memory, 2, path):
        assert mxfp8 <= 0.55 * bf16, (mxfp8, bf16)


def moved(rank: int, world: int, path: str) -> tuple[int, int]:
    from ep_plugin.layer import moe_step

    problem = Problem((64, 64), "distinct", num_experts=4, top_k=2, hidden=1024, width=32, dtype=torch.bfloat16)
    experts, inputs, sent = make_experts(problem, rank, world), make_inputs(problem)[rank], []
    for mine, step in ((build(problem, path), mxfp8_moe_step), (problem.dispatcher(path), moe_step)):
        x = inputs.x.clone().requires_grad_()
        step(mine, x, inputs.idx, inputs.weight.clone().requires_grad_(), experts).backward(inputs.upstream)
        sent.append(mine.stats()["bytes_sent"])
        mine.close()
    return sent[0], sent[1]


@pytest.mark.parametrize("path", PATHS)
def test_bytes_on_the_wire(pool: Any, path: str) -> None:
    """Fault: a leg travels wider than its record; 33/64 of bfloat16, beside scalars that ``block`` counts too."""
    for mxfp8, bf16 in pool.run(moved, 2, path):
        assert mxfp8 <= 0.53 * bf16, (mxfp8, bf16)
        assert path == "block" or mxfp8 * 64 == bf16 * 33


def test_weights_are_quantised_once_for_all_microbatches() -> None:
    """Fault: the node hands the cache another tensor each time, so that nothing is ever found in it."""
    problem = replace(BASE, tokens=(20,))
    dispatcher, experts, inputs = build(problem, "local"), make_experts(problem, 0, 1), make_inputs(problem)[0]
    for _ in range(3):
        run_step(dispatcher, experts, inputs)
    assert dispatcher.gemm.weights.made == 4, "two weights, each for two contracted axes"


def test_only_what_is_asked_for() -> None:
    """Fault: frozen experts, or inputs without gradients, cost or get gradients."""
    problem = replace(BASE, tokens=(20,))
    dispatcher, experts, inputs = build(problem, "local"), make_experts(problem, 0, 1), make_inputs(problem)[0]
    full = run_step(dispatcher, experts, inputs)
    x = inputs.x.clone().requires_grad_()
    for p in experts.parameters():
        p.requires_grad_(False)
        p.grad = None
    mxfp8_moe_step(dispatcher, x, inputs.idx, inputs.weight, experts).backward(inputs.upstream)
    assert same_bits(x.grad, full.dx) and all(p.grad is None for p in experts.parameters())
    experts.down.requires_grad_()
    mxfp8_moe_step(dispatcher, inputs.x, inputs.idx, inputs.weight, experts).backward(inputs.upstream)
    assert same_bits(experts.down.grad, full.ddown) and experts.up.grad is None


def test_compiled_models_leave_the_step_alone() -> None:
    """Fault: a model under ``torch.compile`` traces waits and leases."""
    problem = replace(BASE, tokens=(20,))
    dispatcher, experts, inputs = build(problem, "local"), make_experts(problem, 0, 1), make_inputs(problem)[0]

    def model(x: Tensor) -> Tensor:
        return mxfp8_moe_step(dispatcher, x * 2, inputs.idx, inputs.weight, experts) + 1

    assert same_bits(torch.compile(model, backend="eager")(inputs.x), model(inputs.x))


def test_what_a_movement_has_made_is_not_made_again() -> None:
    """Fault: rows that arrive ready for the GEMM are converted once more, or from nothing."""
    made = codec.quantize_rowwise(torch.randn(4, 32))
    received = codec.Received(None, (made,))
    assert received.operand("rowwise", "rceil", dtype=torch.bfloat16) is made
    with pytest.raises(RuntimeError, match="plain cannot be made"):
        received.operand("plain", "rceil", dtype=torch.bfloat16)
    records = codec.quantize(torch.randn(4, 32))
    assert codec.Received(records).operand("records", "rceil", dtype=torch.bfloat16).data is records


def uneven(rank: int, world: int, path: str) -> str:
    problem = replace(BASE, tokens=(20, 13))
    dispatcher, experts, inputs = build(problem, path), make_experts(problem, rank, world), make_inputs(problem)[rank]
    x = inputs.x.clone().requires_grad_(rank == 0)
    try:
        mxfp8_moe_step(dispatcher, x, inputs.idx, inputs.weight, experts).backward(inputs.upstream)
    except RuntimeError as error:
        return str(error)
    finally:
        dispatcher.close()
    return ""


@pytest.mark.parametrize("path", ["dedup", "route"])
def test_gradients_that_only_some_ranks_need_are_an_error(pool: Any, path: str) -> None:
    """Fault: a rank reads gradients that its peer has not written."""
    messages = pool.run(uneven, 2, path)
    assert any("the gradient of x" in message for message in messages) and all(messages), messages


def test_autocast_with_wider_masters() -> None:
    """Fault: float32 parameters under autocast are refused, or get bfloat16 gradients."""
    problem = replace(BASE, tokens=(200,))
    inputs, parameters = make_inputs(problem)[0], list(make_experts(problem, 0, 1).parameters())
    experts = GroupedMLP.from_parameters(
        *(torch.nn.Parameter(p.detach().float()) for p in parameters), activation=Activation()
    )
    with torch.autocast("cpu", torch.bfloat16):
        got = run_step(build(problem, "local"), experts, inputs)
    assert got.dup.dtype == got.ddown_bias.dtype == torch.float32
    assert not faults(got, oracle(problem, "hidden")[0])


@pytest.mark.parametrize(
    ("problem", "config", "message"),
    [
        (replace(BASE, hidden=48), EPConfig(dispatcher="local"), "48 is not a multiple of 32"),
        (replace(BASE, dtype=torch.float64), EPConfig(dispatcher="local"), "not of torch.float64"),
        (BASE, EPConfig(dispatcher="local", weight_at="input"), "weight_at='input'"),
    ],
)
def test_what_mxfp8_cannot_carry_is_refused(problem: Problem, config: EPConfig, message: str) -> None:
    """Fault: it is found in the middle of a step, or quantised across blocks."""
    with pytest.raises(ValueError, match=message):
        build_mxfp8_dispatcher(
            config,
            MXFP8Config(),
            num_experts=problem.num_experts,
            top_k=problem.top_k,
            hidden_size=problem.hidden,
            dtype=problem.dtype,
        )


def test_widths_and_dtypes_are_checked_before_a_step() -> None:
    """Fault: a block that holds gate and linear values together; rows of another dtype taken as they are."""
    problem = replace(BASE, tokens=(20,), width=48)
    dispatcher, experts, inputs = build(problem, "local"), make_experts(problem, 0, 1), make_inputs(problem)[0]
    with pytest.raises(ValueError, match="width 48"):
        mxfp8_moe_step(dispatcher, inputs.x, inputs.idx, inputs.weight, experts)
    experts = make_experts(replace(problem, width=64), 0, 1)
    with pytest.raises(ValueError, match="float32.*bfloat16"):
        mxfp8_moe_step(dispatcher, inputs.x.float(), inputs.idx, inputs.weight, experts)
