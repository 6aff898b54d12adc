"""Waves on CPU, in several processes: the same numbers as without them, one lease for a step, refusals.

Legend: T tokens of a rank, K routes per token, E experts, D hidden size, W waves.
"""

from __future__ import annotations

import itertools
from dataclasses import fields

import pytest

from ep_plugin.config import POLICIES, ScheduleConfig
from tests.moe import (
    PATHS,
    Problem,
    differences,
    make_experts,
    make_inputs,
    oracles,
    poisoned_memory,
    run_step,
    same_bits,
)

Case = tuple[str, str, Problem, ScheduleConfig]  # path, weight_at, problem, schedule
TOKENS = (5, 0, 9, 3)


def schedules(*waves: int, by: tuple[str, ...] = ("token", "expert")) -> list[ScheduleConfig]:
    return [ScheduleConfig("wave_overlapped", n, b) for n in waves for b in by]


def check_cases(rank: int, world: int, cases: list[Case]) -> list[str]:
    """Run every case twice on one dispatcher; say what is wrong."""
    want = oracles(rank, world, [(problem, weight_at) for _, weight_at, problem, _ in cases])
    wrong = []
    with poisoned_memory():
        for path, weight_at, problem, schedule in cases:
            dispatcher = problem.dispatcher(path, weight_at, schedule=schedule)
            experts, mine = make_experts(problem, rank, world), make_inputs(problem)[rank]
            first, second = (run_step(dispatcher, experts, mine) for _ in range(2))
            faults = differences(first, want[problem, weight_at], problem)
            faults += [
                f"{f.name} of the second step differs"
                for f in fields(first)
                if not same_bits(getattr(first, f.name), getattr(second, f.name))
            ]
            if dispatcher.stats().get("slots_in_use"):
                faults.append(f"slots are still leased: {dispatcher.stats()}")
            if dispatcher.stats().get("slots_peak", 1) > 1:
                faults.append(f"more than one lease for a step: {dispatcher.stats()}")
            dispatcher.close()
            wrong += [f"rank {rank}, {path}, weight_at={weight_at}, {problem}, {schedule}: {fault}" for fault in faults]
    return wrong


def assert_right(pool, cases: list[Case]) -> None:
    world = cases[0][2].world
    wrong = [line for lines in pool.run(check_cases, world, cases, timeout=300) for line in lines]
    assert not wrong, f"{len(wrong)} faults\n" + "\n".join(wrong[:20])


def ways() -> list[tuple[str, str]]:
    places = ("hidden", "input", "output", "source")
    return [(p, w) for p, w in itertools.product(PATHS, places) if (p, w) != ("dedup", "source")]


@pytest.mark.parametrize("tokens", [(5, 0), TOKENS], ids=lambda tokens: f"{len(tokens)} ranks")
def test_every_path_and_weight_place_in_float64(pool, tokens):
    """Fault: any wrong term of a wave, forward or backward; a gradient that is lost between waves or counted in two; a
    wave of no tokens that is left out on one rank alone."""
    cases = [(*way, Problem(tokens), s) for way in ways() for s in schedules(3)]
    assert_right(pool, cases)


def test_capacity_is_that_of_the_whole_batch(pool):
    """Fault: quotas are applied to each wave, so that another set of routes is dropped than without waves."""
    problems = [Problem(TOKENS, policy=policy, factor=f) for policy in POLICIES for f in (0.5, 1.1)]
    cases = [(path, "hidden", problem, s) for path in PATHS for problem in problems for s in schedules(2)]
    assert_right(pool, cases)
