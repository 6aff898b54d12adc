"""Waves over DeepEP, on the stand-in of ``deepep_standin``, whose rows come in another order in every call."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from ep_plugin.config import ScheduleConfig
from ep_plugin.dispatch import build_dispatcher, deepep
from ep_plugin.dispatch.base import Dispatcher
from tests import deepep_standin
from tests.moe import Problem, differences, make_experts, make_inputs, oracles, run_step


def build(problem: Problem, weight_at: str, schedule: ScheduleConfig) -> Dispatcher[Any]:
    """``build_dispatcher`` without its checks of DeepEP, which would refuse a CPU."""
    found = SimpleNamespace(nodes=1, library=deepep_standin)
    with mock.patch.multiple(deepep, require_deepep=lambda *_: found, no_network=lambda _: None):
        return build_dispatcher(
            problem.config("deepep", weight_at, schedule=schedule),
            num_experts=problem.num_experts,
            top_k=problem.top_k,
            hidden_size=problem.hidden,
            dtype=problem.dtype,
            device=torch.device("cpu"),
        )


def check_cases(rank: int, world: int, cases: list[tuple[str, Problem, ScheduleConfig]]) -> list[str]:
    want = oracles(rank, world, [(problem, weight_at) for weight_at, problem, _ in cases])
    wrong = []
    for weight_at, problem, schedule in cases:
        dispatcher, experts = build(problem, weight_at, schedule), make_experts(problem, rank, world)
        for _ in range(2):
            got = run_step(dispatcher, experts, make_inputs(problem)[rank])
            faults = differences(got, want[problem, weight_at], problem)
            wrong += [f"rank {rank}, {weight_at}, {schedule}, {problem}: {fault}" for fault in faults]
        dispatcher.check()
        dispatcher.close()
    return wrong


def test_numbers_equal_the_oracle(pool):
    """Fault: rows of two waves are told apart by an order that DeepEP does not keep; a handle is used for another
    wave; quotas are applied to each wave."""
    problem = Problem((5, 0, 9, 3), "distinct", dtype=torch.bfloat16, weight_dtype=torch.float32)
    capped = replace(problem, policy="rank", factor=0.6)
    token, expert = ScheduleConfig("wave_overlapped", 2), ScheduleConfig("wave_overlapped", 2, "expert")
    cases = [("hidden", problem, token), ("output", problem, expert), ("hidden", capped, token)]
    cases += [("input", problem, ScheduleConfig("wave_overlapped", 1))]
    wrong = [line for lines in pool.run(check_cases, 4, cases, timeout=200) for line in lines]
    assert not wrong, "\n".join(wrong[:20])
