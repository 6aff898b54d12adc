"""MXFP8 under the Hugging Face adapter: a tiny model near the one with plain rows; what cannot run is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ep_plugin.config import EPConfig
from tests.test_mxfp8_node import decibels

pytest.importorskip("transformers")


def model(width: int = 64) -> torch.nn.Module:
    from ep_plugin.train.model import build_model
    from ep_plugin.train.settings import ModelConfig

    shape = ModelConfig(hidden_size=64, expert_width=width, num_experts=8, top_k=2, max_length=64)
    return build_model(shape, seed=0, dtype=torch.float32, device=torch.device("cpu")).train()


def step(rank: int, world: int, config: EPConfig) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of one batch, experts sharded over all ranks."""
    from ep_plugin.adapters.huggingface import patch_model
    from ep_plugin.topology import ProcessGroups, layout

    groups = ProcessGroups.create(layout(world, ep=world))
    patched = model()
    handle = patch_model(patched, config, groups)
    ids = torch.randint(0, 256, (4, 48), generator=torch.Generator().manual_seed(rank))
    loss = patched(input_ids=ids, labels=ids).loss
    loss.backward()
    found = {name: p.grad.clone() for name, p in patched.named_parameters() if p.grad is not None}
    handle.close()
    groups.destroy()
    return loss.item(), found


@pytest.mark.parametrize("path", ["dedup", "route", "block"])
def test_a_model_is_near_the_one_with_plain_rows(pool: Any, path: str) -> None:
    """Fault: a layer that ignores ``precision``, or experts whose gradients are those of other parameters."""
    where = {"dispatcher": "block"} if path == "block" else {"dispatcher": "rowwise", "form": path}
    plain = pool.run(step, 2, EPConfig(**where))
    mxfp8 = pool.run(step, 2, EPConfig(**where, precision="mxfp8"))
    for (loss, want), (near, got) in zip(plain, mxfp8, strict=True):
        assert loss != near and abs(near / loss - 1) < 2e-3
        assert got.keys() == want.keys()
        experts = [name for name in want if "experts" in name]
        assert len(experts) == 4
        quality = {name: decibels(got[name], want[name].double()) for name in experts}
        assert all(15 < value < 60 for value in quality.values()), quality


def test_experts_that_cannot_be_quantised_are_refused() -> None:
    """Fault: foreign code gets records, or a width is found wanting in the middle of the first step."""
    from ep_plugin.adapters.huggingface import patch_model

    config = EPConfig(dispatcher="local", precision="mxfp8")
    with pytest.raises(ValueError, match="run their own code"):
        patch_model(model(), config, experts="foreign")
    with pytest.raises(ValueError, match="expert width that is a multiple of 32; .* has 48"):
        patch_model(model(width=48), config)
