"""Pipeline schedules on GPUs: all stages on one rank × EP 2 with two of them, 2 stages × EP 2 with four."""

from __future__ import annotations

import pytest
import torch

from tests.pipelining_models import run_case
from tests.test_pipelining import ONE_RANK, ONE_RANK_SLOTS, RUNS, SLOTS

Ranks = tuple[int, int, torch.device]


@pytest.mark.parametrize("name", ONE_RANK)
def test_stages_of_one_rank(ranks: Ranks, name: str) -> None:
    """A payload that a later microbatch or stage overwrites on the device, or slots that die before or after their
    backward."""
    rank, world, device = ranks
    if world != 2:
        pytest.skip(f"needs 2 ranks, not {world}")
    result = run_case(rank, world, ONE_RANK[name], device)
    assert result.get("raised") is None
    assert result["error"] < 1e-10  # float64; products sum in another order on a GPU
    assert result["peak"] == result["needed"] == ONE_RANK_SLOTS[name]
    assert result["in_use"] == 0


@pytest.mark.parametrize("name", RUNS)
def test_a_schedule_gives_the_gradients_of_the_whole_model_with_exactly_its_slots(ranks: Ranks, name: str) -> None:
    """The same between ranks."""
    rank, world, device = ranks
    if world != 4:
        pytest.skip(f"needs 4 ranks, not {world}")
    result = run_case(rank, world, RUNS[name], device)
    assert result.get("raised") is None
    assert result["error"] < 1e-10  # float64; products sum in another order on a GPU
    assert result["peak"] == result["needed"] == SLOTS[name][rank // 2]
    assert result["in_use"] == 0
