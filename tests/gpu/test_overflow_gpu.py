"""The training loop on GPUs whose buffers are too small at first: found, discarded, grown, run again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from ep_plugin.train.checks import check_settings
from ep_plugin.train.compose import compose_launch
from ep_plugin.train.loop import Place, train
from ep_plugin.train.text import read_corpus


@pytest.mark.parametrize("choice", ["rowwise", "rowwise_route"])
def test_steps_that_overflow_are_run_again(
    ranks: tuple[int, int, torch.device], tmp_path: Path, choice: str, caplog: pytest.LogCaptureFixture
) -> None:
    """An overflow that trains on, leaves slots leased, or loses a batch: the curve must be that of buffers with
    room."""
    rank, world, device = ranks
    curves = []
    for factor in (float(world), 0.4):
        caplog.clear()
        settings = [
            "experiment=train_tiny", f"ep={choice}", "ep.heap=torch", f"ep.capacity.factor={factor}",
            f"topology.ep={world}", "trainer.steps=4", "trainer.checkpoint=false",
        ]  # fmt: skip
        config = compose_launch(settings).config
        layout = check_settings(config, world)
        place = Place(rank, device, tmp_path, None)
        curves.append(train(config, "overflow", layout, read_corpus(config.data), place, keep_routes=False))
        assert ("its buffers grow" in caplog.text) == (factor < 1), caplog.text
    roomy, tight = (curve.losses for curve in curves)
    torch.testing.assert_close(torch.tensor(tight), torch.tensor(roomy), rtol=1e-3, atol=1e-3)
