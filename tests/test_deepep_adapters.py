"""The adapters over ``dispatcher='deepep'`` and its stand-in: layers of Megatron, models called as transformers'."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from ep_plugin.adapters.huggingface import patch_model
from ep_plugin.config import EPConfig
from ep_plugin.dispatch import deepep
from ep_plugin.dispatch.deepep_checks import Found
from ep_plugin.topology import ProcessGroups, layout
from tests import deepep_standin, test_huggingface, test_megatron
from tests import megatron_models as mm
from tests.hf_models import build, tokens

run = mm.run
CONFIG = EPConfig(dispatcher="deepep", max_tokens=32, timeout_s=30.0)
BF16 = dict(params_dtype=torch.bfloat16, bf16=True)
LAYERS: dict[str, dict[str, Any]] = {
    "bf16": BF16,
    "bf16, shared expert": dict(moe_shared_expert_intermediate_size=16, **BF16),
    "bf16, capacity, padded": dict(moe_expert_capacity_factor=0.7, moe_pad_expert_input_to_capacity=True, **BF16),
}


def standing_in() -> Any:
    """Where the preflight would find DeepEP, the stand-in is found."""
    return mock.patch.object(deepep, "require_deepep", lambda *_: Found(deepep_standin, 1))  # type: ignore[arg-type]


def megatron_layers(rank: int, world: int, experts: str) -> dict[str, float]:
    layers = {name: LAYERS[name] for name in LAYERS if experts == "megatron" or "padded" not in name}
    with standing_in(), mock.patch.object(test_megatron, "LAYERS", layers):
        return test_megatron.one_layer(rank, world, CONFIG, experts)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed")
@pytest.mark.parametrize("experts", ["megatron", "plugin"])
def test_a_layer_of_megatron(run: mm.Run, experts: str) -> None:
    """Fault: the six calls need what DeepEP does not say, a row count on the host or rows in the canonical order."""
    for found in run(megatron_layers, 2, experts):
        worse = {name: gap for name, gap in found.items() if gap > 3e-2}
        assert found and not worse, worse


def models(rank: int, world: int) -> None:
    case = test_huggingface.Case(
        model="plain", dtype=torch.bfloat16, ep=2, steps=1, sequences=(2, 2), config=CONFIG, reentrant=False
    )
    # The check of metrics wants bytes sent, which only the device could count.
    with standing_in(), mock.patch.object(test_huggingface, "check_load", lambda *_: None):
        test_huggingface.train_and_compare(rank, world, [case])


def test_a_model_of_hugging_face(pool) -> None:
    """Fault: a patched model, checkpointed, that differs from the unpatched one."""
    pool.run(models, 2, timeout=200)


def batches_that_grow(rank: int, world: int, checkpointed: bool) -> list[int]:
    made = deepep_standin.ElasticBuffer.made
    made.clear()
    whole, model = build("plain", torch.bfloat16, layers=1), build("plain", torch.bfloat16, layers=1)
    model.checkpointing = False if checkpointed else None
    groups = ProcessGroups.create(layout(world, ep=world))
    with standing_in():
        handle = patch_model(model, replace(CONFIG, max_tokens=None), groups)
        (dispatcher,) = handle.dispatchers
        seen, in_flight = [], []
        with mock.patch.object(dispatcher, "agree", wraps=dispatcher.agree) as agree:
            for step, sequences in enumerate((2, 2 + 38 * rank, 1)):
                ids = tokens(step, rank, sequences)
                out, expected = model(ids, ids), whole(ids, ids)
                torch.testing.assert_close(out.logits, expected.logits, rtol=5e-2, atol=5e-2)
                expected.loss.backward()
                in_flight.append(out.loss)
                if checkpointed:
                    in_flight.pop().backward()
                seen.append(dispatcher.bucket)
            while in_flight:
                in_flight.pop().backward()
            seen.append(agree.call_count)
    dense = model.embed.weight.grad, whole.embed.weight.grad
    torch.testing.assert_close(*dense, rtol=5e-2, atol=5e-2 * float(dense[1].abs().max()))
    seen += [len(made), sum(buffer.runtime is not None for buffer in made)]
    handle.close()
    groups.destroy()
    return seen


def test_batches_that_grow_under_hugging_face(pool) -> None:
    """Fault: a batch that is larger than the first ends a rank; the ranks agree in every layer, or in a recomputation,
    which then has no room for its tokens; a buffer for every size; what is in flight is lost with the old buffer."""
    for checkpointed in (False, True):
        assert pool.run(batches_that_grow, 2, checkpointed) == [[128, 256, 256, 3, 2, 1]] * 2
