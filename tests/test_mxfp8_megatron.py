"""MXFP8 in Megatron's MoE layers: near Megatron's own float32 layer, and refused by name where it cannot run."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from ep_plugin.config import EPConfig
from tests import megatron_models as mm
from tests.test_mxfp8_node import decibels

pytestmark = mm.marks
run = mm.run

HIDDEN = 64
LAYERS: dict[str, dict[str, Any]] = {
    "top-2": {},
    "biases, aux loss": dict(
        add_bias_linear=True, moe_router_load_balancing_type="aux_loss", moe_aux_loss_coeff=0.1, moe_router_topk=3
    ),
    "shared expert, overlapped": dict(moe_shared_expert_intermediate_size=32, moe_shared_expert_overlap=True),
    "not gated": dict(gated_linear_unit=False, activation_func=torch.nn.functional.gelu),
}
WAYS = [EPConfig(precision="mxfp8"), EPConfig(form="route", precision="mxfp8")]
REFUSED = [
    (dict(), "megatron", "needs|use experts='plugin'"),
    (dict(fp8="hybrid"), "plugin", "fp8='hybrid' quantises Megatron's own modules"),
    (dict(moe_ffn_hidden_size=24), "plugin", "moe_ffn_hidden_size=24"),
]


def config(world: int, **settings: Any) -> Any:
    sizes = dict(hidden_size=HIDDEN, ffn_hidden_size=HIDDEN, moe_ffn_hidden_size=HIDDEN)
    return mm.config(dict(ep=world), **(sizes | settings))


def one_layer(rank: int, world: int) -> list[str]:
    """What is further than 17 dB from Megatron's own layer, or not refused."""
    from ep_plugin.adapters.megatron import use_dispatcher
    from ep_plugin.adapters.megatron_options import check_options

    wrong = []
    with mm.parallel(ep=world):
        for name, settings in LAYERS.items():
            for ep in WAYS:
                cfg = config(world, **settings)
                theirs, ours = mm.moe_layer(cfg), mm.moe_layer(cfg)
                ours.load_state_dict(theirs.state_dict())
                handle = use_dispatcher(ours, dataclasses.replace(ep, diagnostic_fill="nan"), experts="plugin")
                results = []
                for layer in (theirs, ours):
                    x = torch.randn(40 + 8 * rank, 2, HIDDEN, generator=torch.Generator().manual_seed(rank))
                    x.requires_grad_()
                    y, _ = layer(x)
                    (y.float() ** 2).mean().backward()
                    results.append(mm.gradients(layer) | {"y": y.detach(), "x": x.grad})
                for key, want in results[0].items():
                    if want.any() and not decibels(results[1][key], want.double()) > 17:
                        wrong.append(f"{name}, {ep.form}, {key}: {decibels(results[1][key], want.double()):.1f} dB")
                handle.close()
        for settings, experts, message in REFUSED:
            cfg = config(world, **{k: v for k, v in settings.items() if k != "fp8"})
            cfg.fp8 = settings.get("fp8")
            with pytest.raises(ValueError, match=message):
                check_options(cfg, WAYS[0], experts, ep_size=world, etp_size=1)
    return wrong


def test_a_layer_is_near_megatrons_own(run: mm.Run) -> None:
    """Fault: tokens or probabilities of another forward in the node; experts in another order; a gradient that does not
    reach the router, the input or a shared expert."""
    for wrong in run(one_layer, 2):
        assert not wrong, wrong
