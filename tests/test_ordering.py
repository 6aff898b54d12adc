"""Buffers that are used again and again: who may write when, and what backward still finds.

Every check here has a negative control: with the barrier, the lease or the read-done signal taken away it must fail.

Legend: T tokens of a rank, K routes per token, E experts, E_l experts of a rank, D hidden size, R rows of a rank.
"""

from __future__ import annotations

import contextlib
import random
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ep_plugin.dispatch import Dispatched, Dispatcher
from ep_plugin.dispatch import rowwise as rowwise_module
from ep_plugin.dispatch.rowwise import Pools
from ep_plugin.heap import Heap, Slot, SlotPool
from ep_plugin.layer import moe_step
from tests.moe import Problem
from tests.stack import Faults, Stack, one_step

FORMS = ("dedup", "route")


def stamp(epoch: int, source: int | Tensor, token: Tensor) -> Tensor:
    """A number that names one token of one round."""
    return epoch * 1_000_000 + source * 10_000 + token


class StampedExperts(torch.autograd.Function):
    """y = 3·w·rows, which looks at the stamp of every row it is given: in forward, in what is kept for the weight
    gradient, and in the gradients that come back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, d: Dispatched, expected: Tensor, faults: Faults) -> Tensor:
        ctx.rebuild, ctx.faults = d.rebuild, faults
        kept = (rows,) if d.rebuild is None else d.rebuild.tensors
        ctx.save_for_backward(expected, weights, *kept)
        StampedExperts.check("dispatched row", rows, expected, faults)
        return 3 * weights[:, None] * rows

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        expected, weights, *kept = ctx.saved_tensors
        rows = kept[0] if ctx.rebuild is None else ctx.rebuild.rows(tuple(kept), expected.numel())
        StampedExperts.check("row kept for the weight gradient", rows, expected, ctx.faults)
        StampedExperts.check("gradient row", grad, expected + 0.5, ctx.faults)
        return 3 * weights[:, None] * grad, 3 * (rows * grad).sum(1), None, None, None

    @staticmethod
    def check(what: str, rows: Tensor, expected: Tensor, faults: Faults) -> None:
        bad = (rows != expected[:, None]).any(1).nonzero().squeeze(1)  # NaN counts
        if bad.numel():
            row = int(bad[0])
            faults.append(f"{bad.numel()} {what}s of {len(rows)}: row {row} is {rows[row, 0]}, not {expected[row]}")


class Delays:
    """Holds back one rank, drawn anew each time, before it signals, looks at a signal, or pulls rows."""

    def __init__(self, heap: Heap, rank: int, seed: int) -> None:
        self.random, self.rank, self.world = random.Random(seed), rank, heap.world
        for name in ("post", "wait"):
            setattr(heap, name, self.before(getattr(heap, name)))

    def before(self, call: Callable) -> Callable:
        def delayed(*args, **kwargs):
            late, seconds = self.random.randrange(self.world), self.random.choice((0, 0, 1e-3, 3e-3))
            if late == self.rank:
                time.sleep(seconds)
            return call(*args, **kwargs)

        return delayed


@contextlib.contextmanager
def sabotage(what: str, dispatcher: Dispatcher, delays: Delays) -> Iterator[None]:
    """Take away one thing that keeps buffers in order."""
    heap = dispatcher.heap
    with pytest.MonkeyPatch.context() as patch:
        if what == "no waits":
            patch.setattr(heap, "wait", lambda *args, **kwargs: None)
        elif what == "no wait after dispatch":
            whole = dispatcher._sync
            patch.setattr(
                dispatcher,
                "_sync",
                lambda phase, layer: heap.post(channel=0, phase=None) if phase == "dispatch" else whole(phase, layer),
            )
        elif what == "no wait after sending gradients":
            whole = dispatcher._sync
            patch.setattr(
                dispatcher,
                "_sync",
                lambda phase, layer: heap.post(channel=0, phase=None) if "backward" in phase else whole(phase, layer),
            )
        elif what == "no read-done signal":
            patch.setattr(Slot, "read_until", lambda *args: None)
        elif what == "no leases":
            size = dispatcher.pools.payload.slot_bytes
            one = SlotPool(heap, size, 1, "one for all", leases=False)
            patch.setattr(dispatcher, "pools", Pools(one, dispatcher.pools.scratch))
        elif what != "nothing":
            raise ValueError(what)
        patch.setattr(rowwise_module, "get_reduce_torch", delays.before(rowwise_module.get_reduce_torch))
        yield


def stamped_rounds(rank: int, world: int, form: str, fill: str, rounds: int, without: str) -> Faults:
    """Rounds with new routes and token counts, up to three of them waiting for their backward, in any order."""
    most, k, width, experts = 9, 3, 5, 2 * world
    problem = Problem((most,) * world, num_experts=experts, top_k=k, hidden=width)
    dispatcher = problem.dispatcher(form, max_tokens=most, diagnostic_fill=fill, timeout_s=20.0)
    faults: Faults = []
    drawn = random.Random(7)  # the same on every rank
    waiting: list[tuple[int, Tensor, Tensor, Tensor, Tensor]] = []

    def forward(epoch: int) -> None:
        tokens = [drawn.randrange(most + 1) for _ in range(world)][rank]
        idx = torch.randint(-1, experts, (tokens, k))
        x = stamp(epoch, rank, torch.arange(tokens)).double()[:, None].repeat(1, width).requires_grad_()
        weight = torch.rand(tokens, k, dtype=torch.float64).requires_grad_()

        def check(d: Dispatched, weight_at: str) -> Tensor:
            source = d.route_of_row // (k * dispatcher.max_tokens)
            token = d.route_of_row // k % dispatcher.max_tokens
            return StampedExperts.apply(d.rows, d.weights, d, stamp(epoch, source, token).double(), faults)

        waiting.append((epoch, idx, x, weight, moe_step(dispatcher, x, idx, weight, check, layer=f"round {epoch}")))

    def backward() -> None:
        epoch, idx, x, weight, out = waiting.pop(drawn.randrange(len(waiting)))
        upstream = x.detach() + 0.5
        out.backward(upstream)
        used = 3 * (weight.detach() * (idx >= 0)).sum(1, keepdim=True)
        for name, got, want in [
            ("output", out.detach(), used * x.detach()),
            ("dx", x.grad, used * upstream),
            ("dweight", weight.grad, 3 * (x.detach() * upstream).sum(1, keepdim=True) * (idx >= 0)),
        ]:
            if not torch.allclose(got, want, rtol=1e-12, atol=0):
                faults.append(f"{name} of round {epoch}")

    torch.manual_seed(rank)
    dist.barrier()  # nobody still makes buffers when the first one fails
    delays = Delays(dispatcher.heap, rank, seed=11)
    with sabotage(without, dispatcher, delays):
        try:
            for epoch in range(1, rounds + 1):
                forward(epoch)
                while len(waiting) > 3 or (waiting and drawn.random() < 0.4):
                    backward()
            while waiting:
                backward()
        except Exception as error:  # what sabotage leads to; without it, a fault like any other
            faults.append(f"{type(error).__name__}: {error}")
    dispatcher.close()
    return faults


@pytest.mark.parametrize("fill", ["none", "nan"])
@pytest.mark.parametrize("form", FORMS)
def test_fifty_rounds_of_reuse_with_a_late_rank_in_every_phase(pool, form, fill):
    """Fault: a row of an earlier round or a poisoned one is read, forward, in the kept payload, or backward."""
    assert pool.run(stamped_rounds, 3, form, fill, 50, "nothing") == [[], [], []]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("without", "fill", "symptom"),
    [
        ("no waits", "none", "Error|row"),
        ("no wait after dispatch", "nan", "dispatched row|IndexError"),
        ("no wait after sending gradients", "nan", "gradient row"),
        ("no leases", "none", "row kept for the weight gradient"),
    ],
)
def test_the_rounds_fail_without(pool, form, without, fill, symptom):
    """Fault of the rounds themselves: they would pass without the barrier or lease that they are there to test."""
    faults = [line for lines in pool.run(stamped_rounds, 3, form, fill, 30, without) for line in lines]
    assert any(re.search(symptom, fault) for fault in faults), faults


def test_the_rounds_fail_without_read_done_signals(pool):
    """Fault of the rounds themselves: a slot that peers still GET from could be used again unnoticed."""
    faults = [
        line for lines in pool.run(stamped_rounds, 3, "route", "nan", 50, "no read-done signal") for line in lines
    ]
    assert any(fault.startswith(("output", "dx")) for fault in faults), faults


def figure_21(rank: int, world: int, form: str, leases: bool) -> list[bool]:
    """Which of three layers get the right weight gradients when all payloads share one slot."""
    problem = Problem((6,) * world, "distinct", num_experts=2 * world, hidden=6, width=4)
    stack = Stack(problem, 3, rank, form, slots=3, max_tokens=6, diagnostic_fill="none")
    right = one_step(stack, stack.forward)
    with sabotage("nothing" if leases else "no leases", stack.dispatcher, Delays(stack.dispatcher.heap, rank, 0)):
        got = one_step(stack, stack.forward)
    stack.close()
    assert torch.equal(got[0], right[0]), "forward reads every payload before the next layer overwrites it"
    return [
        torch.allclose(got[2 + 3 + 4 * layer], right[2 + 3 + 4 * layer], rtol=1e-11, atol=1e-11)  # up projections
        for layer in range(3)
    ]


@pytest.mark.parametrize("form", FORMS)
def test_one_buffer_without_leases_spoils_the_earlier_layers(pool, form):
    """Report, Figure 21: with one shared payload buffer the weight gradients of layers 1 and 2 are wrong, of 3 right.
    Fault of the other tests: they would not notice payloads that are overwritten."""
    assert pool.run(figure_21, 2, form, False) == [[False, False, True]] * 2
    assert pool.run(figure_21, 2, form, True) == [[True, True, True]] * 2
