"""The training loop discards a step whose dropless routes did not fit, and runs it again.

CPU buffers are made to measure, so a stand-in of ``check`` says what only a GPU's can: that one EP group of two has
overflowed. The GPU's own check is in tests/gpu.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ep_plugin.dispatch import RouteOverflow
from ep_plugin.dispatch.rowwise import RowwiseDispatcher
from ep_plugin.train.checks import check_settings
from ep_plugin.train.compose import compose_launch
from ep_plugin.train.loop import Place, train
from ep_plugin.train.overflow import RERUNS
from ep_plugin.train.text import read_corpus

SETTINGS = ["experiment=train_tiny", "ep=rowwise", "topology.ep=2", "trainer.steps=3", "trainer.checkpoint=false"]
ROWS = 77


def losses(rank: int, world: int, folder: str, overflows: tuple[int, ...]) -> dict[str, Any]:
    """Losses of three steps of which the checks numbered ``overflows`` find an overflow in the first EP group."""
    config = compose_launch(SETTINGS).config
    layout = check_settings(config, world)
    seen: dict[str, Any] = {"checks": 0, "grown": [], "held": []}

    def check(self: Any) -> None:
        seen["checks"] += 1
        if seen["checks"] - 1 in overflows and rank < layout.ep:
            raise RouteOverflow("planted", ROWS)

    def regrow(self: Any, rows: int) -> None:
        seen["grown"].append(rows)
        seen["held"].append(self.stats()["slots_in_use"])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RowwiseDispatcher, "can_overflow", True)
        patch.setattr(RowwiseDispatcher, "check", check)
        patch.setattr(RowwiseDispatcher, "regrow", regrow)
        # The optimizer's own look comes once per step, between the loop's.
        patch.setattr("ep_plugin.adapters.huggingface_dispatchers.Dispatchers.check", lambda self: None)
        place = Place(rank, torch.device("cpu"), Path(folder), None)
        curve = train(config, "overflow", layout, read_corpus(config.data), place, keep_routes=False)
    return {"losses": curve.losses, **seen}


@pytest.mark.slow
def test_a_step_that_overflowed_is_run_again_on_all_ranks(pool: Any, tmp_path: Path) -> None:
    """Catches an update from a step whose rows were skipped, ranks of the other EP group that go on by themselves (they
    would hang), buffers that are replaced under tensors that still live in them, and tokens that are left out."""
    plain = pool.run(losses, 4, str(tmp_path), (), timeout=120)
    mended = pool.run(losses, 4, str(tmp_path), (1, 2), timeout=120)
    for rank, (before, after) in enumerate(zip(plain, mended, strict=True)):
        assert before["grown"] == [] and before["checks"] == 3
        assert after["losses"] == before["losses"]
        assert after["checks"] == 5  # the second step ran three times
        assert after["grown"] == ([ROWS, ROWS] if rank < 2 else [])  # the other EP group had room
        assert not any(after["held"])


@pytest.mark.slow
def test_a_step_that_never_fits_is_an_error(pool: Any, tmp_path: Path) -> None:
    """Catches a loop without end."""
    with pytest.raises(AssertionError, match=rf"step 1 overflowed .* {1 + RERUNS} times"):
        pool.run(losses, 4, str(tmp_path), tuple(range(100)), timeout=120)
