"""``block``'s plan by kernels, as GPUs make it, under Triton's interpreter: bit for bit the plan by torch
operations."""

from __future__ import annotations

import importlib
from typing import Any
from unittest import mock

import pytest
import torch

from tests import dist
from tests.test_dispatch_errors import BLOCK_FAULTS, check_bad_rank, check_disagreements

pytest.importorskip("triton")

SHAPES = [  # M, E, K, T of every rank
    (1, 5, 2, [7]),
    (2, 6, 3, [90, 0]),  # more routes than one program takes, and a rank without tokens
    (3, 3, 2, [4, 9, 1]),  # one expert per rank
    (4, 8, 1, [0, 0, 0, 0]),
    (5, 40, 4, [3, 0, 6, 2, 1]),  # experts in two blocks
    (8, 16, 3, [2, 5, 0, 1, 4, 3, 2, 6]),
]


def plans(rank: int, world: int, shapes: list[Any]) -> None:
    from tests.block_cases import POLICIES, check_disagreements, check_plans

    check_disagreements("cpu")
    for seed, (ranks, experts, top_k, tokens) in list(enumerate(shapes))[rank::world]:
        policies = POLICIES if ranks < 5 else (POLICIES[seed % 4], "dropless")
        check_plans(ranks, experts, top_k, tokens, seed, "cpu", policies)


def by_kernels(rank: int, world: int, module: str, name: str, *args: Any) -> Any:
    """``name`` of another module of tests, with plans by kernels."""
    from ep_plugin.dispatch import block

    with (
        mock.patch.object(block, "has_kernel", lambda *_: True),
        mock.patch.object(block.BlockDispatcher, "_plan", None),
    ):
        return getattr(importlib.import_module(f"tests.{module}"), name)(rank, world, *args)


def test_plans_equal_those_of_torch(interpreters: dist.Pool) -> None:
    """Catches a row that is sent from, or sorted to, another place; absent and dropped routes, ranks without rows;
    ranks in different steps that use each other's counts."""
    interpreters.run(plans, 2, SHAPES, timeout=300)


def test_steps_are_right_between_processes(interpreters: dist.Pool) -> None:
    """Catches counts or sizes of another rank or step, and memory that no kernel wrote."""
    from tests.moe import Problem

    problems = [Problem((5, 0, 9), policy="source", factor=0.8), Problem((0, 4, 3), index_dtype=torch.int16)]
    cases = [("block", weight_at, problem) for problem in problems for weight_at in ("hidden", "source")]
    cases.append(("block", "output", Problem((4, 2, 0), num_experts=3, top_k=2, strided=True)))
    for wrong in interpreters.run(by_kernels, 3, "test_dispatch", "check_cases", cases, timeout=300):
        assert not wrong, "\n".join(wrong[:20])


def test_faults_are_those_of_torch(interpreters: dist.Pool) -> None:
    """Catches an id that is out of range and is routed, or flagged without its value; peers that wait for that rank,
    and records of plans and other movements that do not fit together."""
    told = interpreters.run(by_kernels, 3, "test_dispatch_errors", "one_bad_rank", "block", timeout=300)
    check_bad_rank(told, BLOCK_FAULTS)
    check_disagreements(interpreters.run(by_kernels, 3, "test_dispatch_errors", "disagree", "block", timeout=300))


def test_capacity_factors_that_kernels_hold() -> None:
    """Catches a factor of more decimals than the kernels multiply, which must be planned by torch operations."""
    from ep_plugin.kernels.route_map_triton import _limbs, holds

    assert [holds(factor) for factor in (1.25, 1 / 3, 1e15, 1e-24, 1e-25, 1.5e-24)] == [True] * 4 + [False] * 2
    with pytest.raises(ValueError, match="more than 24 decimals"):
        _limbs(1e-25, 8)
