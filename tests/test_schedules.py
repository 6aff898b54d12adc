"""Orders in which layers run forward, backward and again: each gives the gradients of the plain order.

Legend: T tokens of a rank, K routes per token, E experts, D hidden size, R rows of a rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from ep_plugin.dispatch import Dispatched, Dispatcher
from ep_plugin.experts import GroupedMLP
from ep_plugin.heap import open_heap
from ep_plugin.layer import moe_step
from tests.moe import Problem, make_experts, make_inputs
from tests.stack import Faults, Stack, compare, loss, one_step

FORMS = ("dedup", "route")
LAYERS = Problem((4, 0, 3), "any", num_experts=6, hidden=6, width=4)


def recompute(rank: int, world: int, form: str) -> Faults:
    """Everything that runs a layer again in backward, against running it once; with exactly the slots it may need."""
    stack = Stack(LAYERS, 4, rank, form, slots=4)
    want = one_step(stack, stack.forward)
    faults = compare("block", one_step(other := Stack(LAYERS, 4, rank, "block"), other.forward), want)
    if stack.in_use:
        faults.append(f"{stack.in_use} slots in use after backward")
    stack.close()

    def experts_only(x: Tensor) -> Tensor:
        for number in range(4):
            experts = stack.experts[number]

            def again(d: Dispatched, weight_at: str, experts: GroupedMLP = experts) -> Tensor:
                def run(rows: Tensor, weights: Tensor) -> Tensor:
                    return experts(Dispatched(rows, weights, d.offsets, d.num_rows), weight_at)

                return checkpoint(run, d.rows, d.weights, use_reentrant=False)

            weight = torch.sigmoid(x @ stack.routers[number].t())
            x = x + moe_step(stack.dispatcher, x, stack.ids[number], weight, again, layer=f"layers.{number}")
        return x

    def regions(size: int, **how: Any) -> Callable[[Tensor], Tensor]:
        def run(x: Tensor) -> Tensor:
            for start in range(0, 4, size):
                x = checkpoint(stack.forward, x, start, start + size, **how)
            return x

        return run

    def elsewhere(x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.clone(), lambda tensor: tensor):
            return stack.forward(x)

    def selective() -> Any:
        return create_selective_checkpoint_contexts([torch.ops.aten.mm.default, torch.ops.aten.sigmoid.default])

    for what, run, slots in [
        ("two layers in one non-reentrant region", regions(2, use_reentrant=False), 2),
        (
            "two layers in one non-reentrant region, run to its end",
            regions(2, use_reentrant=False, early_stop=False),
            2,
        ),
        ("two layers in one reentrant region", regions(2, use_reentrant=True), 2),
        ("each layer in a region", regions(1, use_reentrant=False), 1),
        ("all layers in one region", regions(4, use_reentrant=False), 4),
        ("regions that keep the router's products", regions(2, use_reentrant=False, context_fn=selective), 2),
        ("experts alone in a region", experts_only, 4),
        ("saved tensors copied elsewhere, as in offloading", elsewhere, 1),
    ]:
        stack = Stack(LAYERS, 4, rank, form, slots=slots)
        for attempt in ("first", "second"):  # the first makes the buffers inside the region
            faults += compare(f"{what}, {attempt} time", one_step(stack, run), want)
        if stack.in_use:
            faults.append(f"{what}: {stack.in_use} slots in use after backward")
        stack.close()
    return faults


@pytest.mark.parametrize("form", FORMS)
def test_recomputing_layers_changes_nothing(pool, form):
    """Fault: a payload is given back when a checkpoint drops its first graph, a recomputed layer reads the old one's,
    a recompute that stops early is taken for a failure, or a region needs more slots than its layers."""
    faults = [line for lines in pool.run(recompute, 3, form) for line in lines]
    assert not faults, "\n".join(faults[:20])


def schedules(rank: int, world: int, form: str) -> Faults:
    """Several microbatches in flight; each one's gradients against those of it alone."""
    stack = Stack(LAYERS, 2, rank, form, slots=6)
    alone = [one_step(stack, stack.forward, m) for m in range(3)]
    total = [sum(parts) for parts in zip(*(a[2:] for a in alone), strict=True)]
    faults = []
    for what, order in [("first in, first out", (0, 1, 2)), ("last in, first out", (2, 1, 0)), ("mixed", (1, 2, 0))]:
        xs = [stack.input(m) for m in range(3)]
        outs = [stack.forward(x) for x in xs]
        if stack.in_use != 6:
            faults.append(f"{stack.in_use} slots in use by three forwards of two layers")
        for m in order:
            loss(outs[m]).backward()
        faults += compare(
            what, [*(o.detach() for o in outs), *(x.grad for x in xs)], [a[i] for i in (0, 1) for a in alone]
        )
        faults += compare(what, stack.gradients(), total)
        del xs, outs
    if stack.in_use:
        faults.append(f"{stack.in_use} slots in use at the end")
    stack.close()
    return faults


@pytest.mark.parametrize("form", FORMS)
def test_three_forwards_before_three_backwards(pool, form):
    """Fault: a later microbatch takes the slot whose weight gradient is still to come (pipeline schedules)."""
    faults = [line for lines in pool.run(schedules, 3, form) for line in lines]
    assert not faults, "\n".join(faults[:20])


def branches(rank: int, world: int, form: str) -> Faults:
    """Two layers that take the same input, whose backwards autograd may start in any order that all ranks share."""

    def run(stack: Stack) -> Callable[[Tensor], Tensor]:
        return lambda x: stack.layer(0, x) + stack.layer(1, x)

    stack, plain = Stack(LAYERS, 2, rank, form), Stack(LAYERS, 2, rank, "block")
    faults = compare("two branches", one_step(stack, run(stack)), one_step(plain, run(plain)))
    stack.close()
    return faults


@pytest.mark.parametrize("form", FORMS)
def test_two_layers_side_by_side(pool, form):
    """Fault: ranks, one of them without tokens, run the backwards of independent layers in different orders."""
    faults = [line for lines in pool.run(branches, 3, form) for line in lines]
    assert not faults, "\n".join(faults[:20])


def one_heap(rank: int, world: int, form: str) -> Faults:
    """Two dispatchers of different shapes on one heap, in turns; then one of them closed."""
    heap = open_heap("auto", None, "cpu", 30.0)
    problems = [LAYERS, Problem((2, 5, 0), num_experts=9, hidden=10, width=4, top_k=2)]
    stacks = [Stack(p, 2, rank, form, heap=heap) for p in problems]
    want = [one_step(other := Stack(p, 2, rank, "block"), other.forward) for p in problems]
    faults = []
    for _ in range(2):
        xs = [stack.input() for stack in stacks]
        outs = list(xs)
        for number in range(2):
            outs = [stack.layer(number, out) for stack, out in zip(stacks, outs, strict=True)]
        for m in (1, 0):
            loss(outs[m]).backward()
            got = [outs[m].detach(), xs[m].grad, *stacks[m].gradients()]
            faults += compare(f"shape {m}", got, want[m])
    del xs, outs
    stacks[0].close()
    faults += compare("the other one closed", one_step(stacks[1], stacks[1].forward), want[1])
    stacks[1].close()
    heap.close()
    return faults


@pytest.mark.parametrize("form", FORMS)
def test_dispatchers_of_two_shapes_share_a_heap(pool, form):
    """Fault: one dispatcher takes the signals or slots of the other, or closes them."""
    faults = [line for lines in pool.run(one_heap, 3, form) for line in lines]
    assert not faults, "\n".join(faults[:20])


def odd_lives(rank: int, world: int, form: str) -> Faults:
    """Graphs that are dropped, kept by one rank alone, or run backward twice."""
    stack = Stack(LAYERS, 2, rank, form)
    want = one_step(stack, stack.forward)
    faults: Faults = []

    abandoned = stack.forward(stack.input())
    if stack.in_use != 2:
        faults.append(f"{stack.in_use} slots in use by a forward of two layers")
    del abandoned
    if stack.in_use:
        faults.append(f"{stack.in_use} slots in use after a graph was dropped")
    faults += compare("after an abandoned graph", one_step(stack, stack.forward), want)

    kept = [stack.forward(stack.input()) for _ in range(5)]
    if rank != 1:
        kept.clear()
    faults += compare("while one rank keeps five graphs", one_step(stack, stack.forward), want)
    if stack.in_use != (10 if rank == 1 else 0):
        faults.append(f"{stack.in_use} slots in use while rank 1 keeps five graphs of two layers")
    kept.clear()
    faults += compare("after it dropped them", one_step(stack, stack.forward), want)

    x = stack.input()
    out = stack.forward(x)
    loss(out).backward(retain_graph=True)
    faults += compare("first of two backwards", [out.detach(), x.grad, *stack.gradients()], want)
    x.grad = None
    between = stack.forward(stack.input(1))  # takes what the first backward has given back
    loss(out).backward()
    faults += compare("second of two backwards", [out.detach(), x.grad, *stack.gradients()], want)
    del out, between

    x = stack.input()
    (dx,) = torch.autograd.grad(loss(stack.forward(x)), x)
    faults += compare("torch.autograd.grad of the input alone", [dx], want[1:2])
    if stack.in_use:
        faults.append(f"{stack.in_use} slots in use at the end")
    stack.close()
    return faults


@pytest.mark.parametrize("form", FORMS)
def test_dropped_kept_and_repeated_graphs(pool, form):
    """Fault: a dropped graph leaks its slot; ranks whose free slots differ cannot go on; a second backward reads slots
    that the first one has given back."""
    faults = [line for lines in pool.run(odd_lives, 3, form) for line in lines]
    assert not faults, "\n".join(faults[:20])


def growing(rank: int, world: int, form: str) -> Faults:
    """Batches that grow while backwards of smaller ones are still to come."""
    sizes = [(4, 0, 3), (70, 1, 0), (5, 200, 2), (0, 3, 330)]
    problems = [Problem(s, num_experts=6, hidden=6, width=4, top_k=2) for s in sizes]
    stacks = [Stack(p, 2, rank, form) for p in problems]
    alone = [one_step(s, s.forward) for s in stacks]
    for s in stacks[1:]:
        s.close()
    stack = stacks[0]

    def forward(m: int) -> tuple[Tensor, Tensor]:
        x = out = stacks[m].input()
        for number in range(2):
            out = stack.layer(number, out, stacks[m].ids[number])
        return x, out

    faults = []
    for order in ((3, 1, 2, 0), (0, 1, 2, 3)):
        runs = [forward(m) for m in range(len(sizes))]
        for m in order:
            x, out = runs[m]
            loss(out).backward()
            faults += compare(f"batch {m} of {sizes[m]}", [out.detach(), x.grad, *stack.gradients()], alone[m])
        del runs, x, out
    if stack.in_use:
        faults.append(f"{stack.in_use} slots in use at the end")
    stack.close()
    return faults


@pytest.mark.parametrize("form", FORMS)
def test_batches_that_grow_in_flight(pool, form):
    """Fault: growing moves or resizes what the backward of an earlier, smaller batch still needs."""
    faults = [line for lines in pool.run(growing, 3, form) for line in lines]
    assert not faults, "\n".join(faults[:20])


def interleaved(rank: int, world: int, path: str) -> Faults:
    """Two microbatches whose phases alternate, as trainers that call the phases themselves may do; the second one is
    larger, so that the buffers grow between the phases of the first."""
    problems = [Problem(s, num_experts=6, hidden=6, width=4, top_k=2) for s in ((4, 0, 3), (5, 130, 2))]
    inputs = [make_inputs(p)[rank] for p in problems]
    experts = make_experts(problems[0], rank, world)

    def start(dispatcher: Dispatcher, m: int) -> dict[str, Any]:
        i = inputs[m]
        x, w = i.x.clone().requires_grad_(), i.weight.clone().requires_grad_()
        return {"x": x, "w": w, "upstream": i.upstream, "state": dispatcher.plan(i.idx, layer=f"batch {m}")}

    def dispatch(dispatcher: Dispatcher, run: dict[str, Any]) -> None:
        run["d"] = dispatcher.dispatch(run["state"], run["x"], run["w"])

    def compute(run: dict[str, Any]) -> None:
        run["y"] = experts(run.pop("d"), "hidden")

    def combine(dispatcher: Dispatcher, run: dict[str, Any]) -> None:
        run["out"] = dispatcher.combine(run.pop("state"), run.pop("y"))

    def finish(run: dict[str, Any]) -> list[Tensor]:
        run["out"].backward(run["upstream"])
        gradients = [p.grad for p in experts.parameters()]
        experts.zero_grad()
        return [run["out"].detach(), run["x"].grad, run["w"].grad, *gradients]

    dispatcher = problems[0].dispatcher(path)
    want = []
    for m in range(2):
        run = start(dispatcher, m)
        dispatch(dispatcher, run)
        compute(run)
        combine(dispatcher, run)
        want.append(finish(run))
    dispatcher.close()

    faults = []
    for what, moment in [("plan", 1), ("dispatch", 2), ("experts", 3)]:
        dispatcher = problems[0].dispatcher(path)  # small again
        steps: list[Callable[[dict[str, Any]], None]] = [
            lambda run, at=dispatcher: dispatch(at, run),
            compute,
            lambda run, at=dispatcher: combine(at, run),
        ]
        first = start(dispatcher, 0)
        for step in steps[: moment - 1]:
            step(first)
        second = start(dispatcher, 1)
        for number, step in enumerate(steps):
            if number >= moment - 1:
                step(first)
            step(second)
        for m, run in ((0, first), (1, second)):
            faults += compare(f"{path}: batch {m}, a larger plan after {what} of the first", finish(run), want[m])
        dispatcher.close()
    return faults


@pytest.mark.parametrize("path", ["block", *FORMS])
def test_phases_of_two_microbatches_may_alternate(pool, path):
    """Fault: a route state that reads the dispatcher's present buffer sizes instead of those it was planned with."""
    faults = [line for lines in pool.run(interleaved, 3, path) for line in lines]
    assert not faults, "\n".join(faults[:20])
