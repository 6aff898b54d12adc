"""Waves over the GPU path of rowwise, under Triton's interpreter: the same numbers as the oracle's, one lease a step.

There are no streams here: what may overlap is tested on GPUs.
"""

from __future__ import annotations

import gc

import pytest

from ep_plugin.config import LaunchConfig, ScheduleConfig
from tests import dist
from tests.moe import Problem, differences, make_experts, make_inputs, oracles, run_step

pytest.importorskip("triton")

Case = tuple[str, str, Problem, ScheduleConfig]


def check_cases(rank: int, world: int, cases: list[Case]) -> None:
    from tests.interpreted_heap import InterpretedHeap, without_streams

    want = oracles(rank, world, [(problem, weight_at) for _, weight_at, problem, _ in cases])
    wrong = []
    for path, weight_at, problem, schedule in cases:
        with without_streams():
            heap = InterpretedHeap()
            settings = dict(schedule=schedule, max_tokens=max(problem.tokens), launch=LaunchConfig(chunks=2), slots=2)
            dispatcher = problem.dispatcher(path, weight_at, heap=heap, **settings)
            experts, mine = make_experts(problem, rank, world), make_inputs(problem)[rank]
            for _ in range(3):
                got = run_step(dispatcher, experts, mine)
            dispatcher.check()
            found = differences(got, want[problem, weight_at], problem)
            gc.collect()  # the interpreter's launches hold their arguments in cycles
            stats = dispatcher.stats()
            if stats["slots_in_use"] or stats["slots_peak"] != 1:
                found.append(f"leases: {stats}")
            dispatcher.close()
            heap.close()
        wrong += [f"rank {rank}, {path}, {weight_at}, {problem}, {schedule}: {f}" for f in found]
    assert not wrong, f"{len(wrong)} faults\n" + "\n".join(wrong[:20])


@pytest.mark.slow
def test_device_path():
    """Fault: a wave reads or writes another wave's region of the slot; signals of the two ways share a channel; a slot
    is leased for each wave; quotas are applied to each wave."""
    problem = Problem((5, 3), num_experts=4, top_k=2, hidden=16, width=8)
    capped = Problem((5, 3), num_experts=4, top_k=2, hidden=16, width=8, policy="rank", factor=0.7)
    token, expert = ScheduleConfig("wave_overlapped", 2), ScheduleConfig("wave_sequential", 2, "expert")
    cases: list[Case] = [
        ("dedup", "hidden", problem, token),
        ("dedup", "output", problem, expert),
        ("route", "hidden", problem, token),
        ("route", "source", problem, token),
        ("dedup", "input", capped, token),
        ("dedup", "hidden", problem, ScheduleConfig("wave_overlapped", 1)),
        ("route", "hidden", capped, expert),
    ]
    dist.run_apart(check_cases, problem.world, cases, TRITON_INTERPRET="1")
