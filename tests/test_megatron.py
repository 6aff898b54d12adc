"""Our dispatchers in Megatron's MoE layers and models against Megatron's own alltoall: outputs and every gradient.

Every test runs on the installed megatron-core and on the newest supported one.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from ep_plugin.config import EPConfig
from tests import megatron_models as mm

pytestmark = mm.marks
run = mm.run

BLOCK = EPConfig(dispatcher="block")
DEDUP = EPConfig()
ROUTE = EPConfig(form="route")
WAYS = [(BLOCK, "megatron"), (DEDUP, "megatron"), (ROUTE, "megatron"), (DEDUP, "plugin"), (ROUTE, "plugin")]


# One MoE layer

LAYERS: dict[str, dict[str, Any]] = {
    "top-2": {},
    "top-1": dict(moe_router_topk=1, moe_router_pre_softmax=True),
    "all experts": dict(moe_router_topk=mm.EXPERTS),
    "probabilities on the input": dict(moe_router_topk=1, moe_router_pre_softmax=True, moe_apply_probs_on_input=True),
    "aux loss": dict(moe_router_load_balancing_type="aux_loss", moe_aux_loss_coeff=0.1),
    "sequence aux loss": dict(moe_router_load_balancing_type="seq_aux_loss", moe_aux_loss_coeff=0.1),
    "shared expert": dict(moe_shared_expert_intermediate_size=16),
    "gated shared expert, overlapped": dict(
        moe_shared_expert_intermediate_size=16, moe_shared_expert_overlap=True, moe_shared_expert_gate=True
    ),
    "capacity": dict(moe_expert_capacity_factor=0.7),
    "capacity by position": dict(moe_expert_capacity_factor=0.7, moe_token_drop_policy="position"),
    "capacity, padded": dict(moe_expert_capacity_factor=0.7, moe_pad_expert_input_to_capacity=True),
    "biases": dict(add_bias_linear=True),
    "not gated": dict(gated_linear_unit=False, activation_func=torch.nn.functional.gelu),
    "clamped": dict(activation_func_clamp_value=0.5, glu_linear_offset=1.0),
    "bf16": dict(params_dtype=torch.bfloat16, bf16=True),
    "bf16 router too": dict(params_dtype=torch.bfloat16, bf16=True, moe_router_dtype=None),
}


def one_layer(rank: int, world: int, ep: EPConfig, experts: str) -> dict[str, float]:
    """The difference by case of ``LAYERS``; rank 1 has more tokens than rank 0, except where Megatron pads."""
    from ep_plugin.adapters.megatron import use_dispatcher

    found = {}
    with mm.parallel(ep=world):
        for name, settings in LAYERS.items():
            cfg = mm.config(dict(ep=world), **settings)
            on_input = experts == "plugin" and cfg.moe_apply_probs_on_input
            theirs, ours = mm.moe_layer(cfg), mm.moe_layer(cfg)
            ours.load_state_dict(theirs.state_dict())
            own = dataclasses.replace(ep, weight_at="input" if on_input else "hidden")
            handle = use_dispatcher(ours, own, experts=experts)
            length = 5 + (0 if cfg.moe_pad_expert_input_to_capacity else 3 * rank)
            results = []
            for layer in (theirs, ours):
                seen = {}
                for step in range(2):
                    layer.zero_grad()
                    x = torch.randn(length, 2, mm.HIDDEN, generator=torch.Generator().manual_seed(10 * step + rank))
                    x = x.to(cfg.params_dtype).requires_grad_()
                    y, bias = layer(x)
                    assert bias is None
                    (y.float() ** 2).mean().backward()
                    seen |= {f"{key} {step}": g for key, g in mm.gradients(layer).items()}
                    seen |= {f"y {step}": y.detach(), f"x {step}": x.grad}
                results.append(seen)
            assert results[0]["y 0"].abs().max() > 0.1
            found[name] = mm.difference(results[1], results[0])
            handle.close()
    return found


@pytest.mark.parametrize("ep, experts", WAYS, ids=lambda v: v if isinstance(v, str) else f"{v.dispatcher}-{v.form}")
def test_a_layer_gives_what_it_gives_with_megatrons_dispatcher(run: mm.Run, ep: EPConfig, experts: str) -> None:
    """Any fault in the six calls: rows or probabilities of the wrong token, a route lost, a gradient cut or scaled."""
    for found in run(one_layer, 2, ep, experts):
        worse = {name: gap for name, gap in found.items() if gap > (2e-2 if "bf16" in name else 2e-5)}
        assert not worse, worse
