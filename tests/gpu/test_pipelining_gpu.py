"""Pipeline schedules on GPUs: needs ``torchrun --nproc-per-node 4`` (2 stages × EP 2)."""

from __future__ import annotations

import pytest
import torch

from tests.pipelining_models import run_case
from tests.test_pipelining import RUNS, SLOTS


@pytest.mark.parametrize("name", RUNS)
def test_a_schedule_gives_the_gradients_of_the_whole_model_with_exactly_its_slots(
    ranks: tuple[int, int, torch.device], name: str
) -> None:
    """A payload that a later microbatch overwrites on the device, or slots that die before or after their backward."""
    rank, world, device = ranks
    if world != 4:
        pytest.skip(f"needs 4 ranks, not {world}")
    result = run_case(rank, world, RUNS[name], device)
    assert result.get("raised") is None
    assert result["error"] < 1e-12
    assert result["peak"] == result["needed"] == SLOTS[name][rank // 2]
    assert result["in_use"] == 0
