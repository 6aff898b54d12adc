"""Many steps, many layers, several groups: slots and memory reach a plateau, and nothing hangs.

Legend: T tokens of a rank, K routes per token, E experts, D hidden size, R rows of a rank.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ep_plugin.layer import moe_step
from tests.moe import Problem, make_experts, make_inputs
from tests.stack import Faults, Stack, compare, one_step

FORMS = ("dedup", "route")


def memory() -> tuple[int, int, int]:
    """Bytes: resident and not shared; of symmetric buffers mapped here; in /dev/shm."""
    resident, shared = (int(field) * 4096 for field in Path("/proc/self/statm").read_text().split()[1:3])
    mapped = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "memfd:ep-" in line:
            start, end = (int(address, 16) for address in line.split()[0].split("-"))
            mapped += end - start
    named = sum(p.stat().st_size for p in Path("/dev/shm").iterdir() if p.is_file() and p.name.startswith("ep"))
    return resident - shared, mapped, named


def many_forwards(rank: int, world: int, form: str, steps: int) -> Faults:
    """Forwards without backward, with and without gradients, as in evaluation and generation."""
    stack = Stack(Problem((4, 3), num_experts=4, hidden=6, width=4, top_k=2), 2, rank, form)
    x = stack.input()

    def some(count: int) -> tuple[int, ...]:
        for i in range(count):
            with torch.set_grad_enabled(i % 2 == 0):
                stack.forward(x)
        return (stack.dispatcher.stats()["slots"], *memory())

    slots, resident, mapped, named = some(50)
    after = some(steps - 50)
    faults = []
    if after[0] != slots or slots != 2 or stack.in_use:
        faults.append(f"slots: {slots}, then {after[0]}, {stack.in_use} in use")
    if after[2:] != (mapped, named) or named:
        faults.append(f"symmetric memory: {mapped} bytes mapped and {named} in /dev/shm, then {after[2:]}")
    if after[1] > resident + (8 << 20):
        faults.append(f"resident memory grew from {resident} to {after[1]} bytes")
    stack.close()
    return faults


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_a_thousand_forwards_without_backward(pool, form):
    """Fault: forwards that nobody runs backward keep their slots, grow the heap, or leak memory."""
    faults = [line for lines in pool.run(many_forwards, 2, form, 1000) for line in lines]
    assert not faults, "\n".join(faults)


def imbalanced(rank: int, world: int, path: str) -> tuple[list[int], list[int], int]:
    """Resident and mapped bytes over 50 steps that send everything to one rank."""
    problem = Problem((64,) * world, "to_last_rank", num_experts=2 * world, hidden=64, width=8, dtype=torch.float32)
    mine, experts = make_inputs(problem)[rank], make_experts(problem, rank, world)
    dispatcher = problem.dispatcher(path)
    resident, mapped = [], []
    for _ in range(50):
        x = mine.x.clone().requires_grad_()
        moe_step(dispatcher, x, mine.idx, mine.weight, experts).backward(mine.upstream)
        now = memory()
        resident.append(now[0])
        mapped.append(now[1])
    slots = dispatcher.stats().get("slots", 0)
    dispatcher.close()
    return resident, mapped, slots


@pytest.mark.parametrize("path", ["block", *FORMS])
def test_memory_reaches_a_plateau_when_everything_goes_to_one_rank(pool, path):
    """Fault (seen elsewhere): memory grows with every imbalanced step."""
    for resident, mapped, slots in pool.run(imbalanced, 3, path):
        assert len(set(mapped[2:])) == 1, mapped
        assert max(resident[25:]) <= max(resident[5:25]) + (2 << 20), resident
        assert slots <= 2


def many_layers(rank: int, world: int, form: str) -> Faults:
    """64 layers of one model on one dispatcher, two steps."""
    stack = Stack(Problem((4, 3), num_experts=4, hidden=6, width=4, top_k=2), 64, rank, form)
    scale = 1e-3  # keeps 64 residual layers in range
    for experts in stack.experts:
        experts.down.data *= scale
    reference = Stack(stack.problem, 64, rank, "block")
    for experts in reference.experts:
        experts.down.data *= scale
    faults = []
    want = one_step(reference, reference.forward)
    for step in range(2):
        faults += compare(f"step {step}", one_step(stack, stack.forward), want)
        stats = stack.dispatcher.stats()
        if stats["slots_peak"] != 64 or stats["slots_in_use"] or not 64 <= stats["slots"] < 96:
            faults.append(f"step {step}: {stats}")
    stack.close()
    return faults


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_sixty_four_layers_share_one_dispatcher(pool, form):
    """Fault (seen elsewhere): a buffer per layer runs out at some layer; growing loses what is in flight."""
    faults = [line for lines in pool.run(many_layers, 2, form) for line in lines]
    assert not faults, "\n".join(faults[:20])


def a_subgroup(rank: int, world: int, form: str) -> list[float]:
    """A dispatcher of ranks 0 and 1 alone, then collectives and a dispatcher of all three; leaves with both open."""
    pair = dist.new_group([0, 1])
    problem = Problem((3, 2), num_experts=6)
    if rank < 2:
        dispatcher = problem.dispatcher(form, group=pair)
        mine = make_inputs(problem)[rank]
        moe_step(dispatcher, mine.x, mine.idx, mine.weight, make_experts(problem, rank, 2))
    total = torch.tensor([float(rank)])
    dist.all_reduce(total)
    everyone = Problem((3, 2, 4), num_experts=6)
    whole, mine = everyone.dispatcher(form), make_inputs(everyone)[rank]
    out = moe_step(whole, mine.x, mine.idx, mine.weight, make_experts(everyone, rank, 3))
    if rank < 2:
        again = make_inputs(problem)[rank]
        moe_step(dispatcher, again.x, again.idx, again.weight, make_experts(problem, rank, 2))
    return [float(total), float(out.abs().sum())]


@pytest.mark.parametrize("form", FORMS)
def test_a_subgroup_then_the_world_then_leaving_with_both_open(pool, form):
    """Fault (seen elsewhere): a subgroup's rendezvous hangs later calls on WORLD; leaving hangs while buffers live."""
    results = pool.run(a_subgroup, 3, form, timeout=40)
    assert [r[0] for r in results] == [3.0] * 3 and all(r[1] > 0 for r in results)
