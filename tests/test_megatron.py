"""Our dispatchers in Megatron's MoE layers and models against Megatron's own alltoall: outputs and every gradient.

Every test runs on the installed megatron-core and on the newest supported one.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

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
    "recomputed": dict(recompute_granularity="selective", recompute_modules=["moe"]),
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


# The six calls


def maps(rank: int, world: int) -> dict[str, tuple[Tensor, int]]:
    """Routing maps bool [T, E] that a router seldom gives, and the most routes of a token in them."""
    e, half = mm.EXPERTS, mm.EXPERTS // world
    everything = torch.ones(6, e, dtype=torch.bool)
    one_rank = everything.clone()
    one_rank[:, half:] = False
    nothing = torch.zeros(0 if rank else 7, e, dtype=torch.bool)
    nothing[:, 1:3] = True
    ragged = torch.rand(9 + rank, e, generator=torch.Generator().manual_seed(rank)) < 0.4
    ragged[3] = False
    return {
        "all tokens to rank 0": (one_rank, half),
        "a rank without tokens": (nothing, 2),
        "no routes at all": (torch.zeros(4, e, dtype=torch.bool), 2),
        "every token to every expert": (everything, e),
        "tokens with more and fewer routes than top-k": (ragged, e),
    }


def through(dispatcher: Any, x: Tensor, routing: Tensor, probs: Tensor, free: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The six calls around experts that multiply rows by their probability and by their expert's number.

    ``free``: as Megatron's 1F1B schedule calls them: each stage on detached tensors, whose storage it frees after the
    stage; backward stage by stage. Gives the output, the tokens of every expert and the gradients of x and probs.
    """
    stages: list[tuple[list[Tensor], list[Tensor]]] = []

    def stage(inputs: list[Tensor], call: Any, frees: int = 2) -> list[Tensor]:
        if not free:
            return call(*inputs)
        leaves = [t.detach().requires_grad_(t.requires_grad) for t in inputs]
        outputs = call(*leaves)
        stages.append((leaves, outputs))
        for leaf in leaves[:frees]:
            leaf.untyped_storage().resize_(0)
        return outputs

    counts: list[Tensor] = []

    def experts(rows: Tensor, probs: Tensor) -> list[Tensor]:
        rows, tokens, probs = dispatcher.dispatch_postprocess(rows, probs)
        counts.append(tokens.cpu())
        number = torch.arange(1, len(tokens) + 1).repeat_interleave(tokens.cpu())
        return [dispatcher.combine_preprocess(rows * probs[:, None] * number[:, None])]

    x, probs = x.clone().requires_grad_(), probs.clone().requires_grad_()
    # The residual connection and the router keep the layer's input: its storage is not the schedule's to free.
    sent = stage([x, probs], lambda x, p: list(dispatcher.dispatch_preprocess(x, routing, p)), frees=0)
    arrived = stage(sent, lambda x, p: list(dispatcher.token_dispatch(x, p)))
    (y,) = stage(arrived, experts, frees=1)  # the schedule keeps the probabilities for the activation's backward
    (out,) = stage([y], lambda y: [dispatcher.combine_postprocess(dispatcher.token_combine(y))])
    if not free:
        (out**2).sum().backward()
        return out.detach(), counts[0], torch.cat([x.grad.flatten(), probs.grad.flatten()])
    grads = [2 * out.detach()]
    for leaves, outputs in reversed(stages):
        torch.autograd.backward(outputs, grads)
        grads = [leaf.grad for leaf in leaves]
    return out.detach(), counts[0], torch.cat([g.flatten() for g in grads])


def six_calls(rank: int, world: int) -> list[str]:
    """What differs from Megatron's alltoall dispatcher over all of ``maps``."""
    from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    from ep_plugin.adapters.megatron import PluginTokenDispatcher, SharedDispatchers

    wrong = []
    local = mm.EXPERTS // world
    ids = list(range(rank * local, (rank + 1) * local))
    with mm.parallel(ep=world):
        groups = get_default_pg_collection()
        for name, (routing, most) in maps(rank, world).items():
            # Their alltoall counts on exactly top-k routes unless it pads or drops.
            theirs = MoEAlltoAllTokenDispatcher(
                local, ids, config=mm.config(dict(ep=world), moe_expert_capacity_factor=100.0), pg_collection=groups
            )
            x = torch.randn(len(routing), mm.HIDDEN, generator=torch.Generator().manual_seed(rank))
            probs = torch.rand(routing.shape, generator=torch.Generator().manual_seed(rank + 5)) * routing
            reference = through(theirs, x, routing, probs, free=False)
            for ep, free in ((BLOCK, False), (DEDUP, False), (ROUTE, False), (DEDUP, True), (ROUTE, True)):
                cfg = mm.config(dict(ep=world))
                cfg.overlap_moe_expert_parallel_comm = free
                shared = SharedDispatchers(ep)
                ours = PluginTokenDispatcher(local, ids, cfg, groups, shared=shared, max_routes=most, layer=name)
                out, tokens, grads = through(ours, x, routing, probs, free)
                if not torch.equal(tokens, reference[1].cpu()):
                    wrong.append(f"{name}, {ep}, freed {free}: tokens {tokens} instead of {reference[1]}")
                for what, a, b in (("output", out, reference[0]), ("gradients", grads, reference[2])):
                    if a.shape != b.shape or not torch.allclose(a, b, rtol=1e-4, atol=1e-5):
                        wrong.append(f"{name}, {ep}, freed {free}: {what}")
                shared.close()
    return wrong


def test_any_routing_map_goes_through_the_six_calls(run: mm.Run) -> None:
    """A graph cut on a rank without rows, routes past top-k, storage that a 1F1B schedule frees between the calls."""
    for wrong in run(six_calls, 2):
        assert not wrong


def padded_and_refused(rank: int, world: int) -> dict[str, Any]:
    """Rows of every expert where Megatron asks for multiples; what it says to a routing map past its bound and to calls
    out of order."""
    from megatron.core.transformer.moe.moe_utils import get_align_size_for_quantization, get_default_pg_collection

    from ep_plugin.adapters.megatron import PluginTokenDispatcher, SharedDispatchers

    local = mm.EXPERTS // world
    ids = list(range(rank * local, (rank + 1) * local))
    routing, most = maps(rank, world)["tokens with more and fewer routes than top-k"]
    x, probs = torch.randn(len(routing), mm.HIDDEN), torch.rand(routing.shape) * routing
    found: dict[str, Any] = {}
    with mm.parallel(ep=world):
        groups = get_default_pg_collection()
        dense, multiples = mm.config(dict(ep=world)), mm.config(dict(ep=world))
        multiples.moe_router_padding_for_quantization, multiples.fp8 = True, "hybrid"
        results = []
        for cfg in (dense, multiples):
            shared = SharedDispatchers(DEDUP)
            dispatcher = PluginTokenDispatcher(local, ids, cfg, groups, shared=shared, max_routes=most)
            results.append(through(dispatcher, x, routing, probs, free=False))
            shared.close()
        found["align"] = get_align_size_for_quantization(multiples)
        found["tokens"] = [result[1].tolist() for result in results]
        found["same"] = all(torch.allclose(results[0][i], results[1][i]) for i in (0, 2))
        shared = SharedDispatchers(BLOCK)
        dispatcher = PluginTokenDispatcher(local, ids, dense, groups, shared=shared)
        for what, call in (
            ("too many routes", lambda: dispatcher.dispatch_preprocess(x, routing, probs)),
            ("shapes", lambda: dispatcher.dispatch_preprocess(x, routing[:, 1:], probs)),
            ("order", lambda: dispatcher.token_combine(x)),
        ):
            try:
                call()
            except (ValueError, RuntimeError) as error:
                found[what] = str(error)
        shared.close()
    return found


def test_padding_for_quantization_and_clear_refusals(run: mm.Run) -> None:
    """Row counts that an FP8 GEMM cannot take; routes dropped without a word."""
    for found in run(padded_and_refused, 2):
        dense, padded = map(torch.tensor, found["tokens"])
        align = found["align"]
        assert align > 1
        assert torch.equal(padded, -(-dense // align) * align)
        assert not torch.equal(padded, dense)
        assert found["same"]
        assert "more than 2 routes" in found["too many routes"] and "max_routes" in found["too many routes"]
        assert "[10, 7]" in found["shapes"] or "[9, 7]" in found["shapes"]
        assert "without dispatch_preprocess" in found["order"]


# The seams


def seams(rank: int, world: int) -> dict[str, Any]:
    """Outputs of one model with Megatron's dispatcher, by spec, by pattern and with replayed routes; and errors."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

    from ep_plugin.adapters.megatron import PluginTokenDispatcher, plug_spec, use_dispatcher

    ids = mm.tokens(rank)[:, :-1]
    places = torch.arange(mm.SEQ).expand(2, -1)

    def plugged(model: Any) -> list[int]:
        dispatchers = [getattr(layer.mlp, "token_dispatcher", None) for layer in model.decoder.layers]
        return [i for i, dispatcher in enumerate(dispatchers) if isinstance(dispatcher, PluginTokenDispatcher)]

    found: dict[str, Any] = {}
    with mm.parallel(ep=world):
        cfg = mm.config(dict(ep=world), moe_enable_routing_replay=True)
        theirs = mm.gpt(cfg)
        RouterReplay.set_global_router_replay_action(RouterReplayAction.RECORD)
        reference = theirs(ids, places, None)
        recorded = RouterReplay.get_recorded_data()
        RouterReplay.clear_global_router_replay_instances()

        by_spec = mm.gpt(cfg, plug_spec(mm.layer_spec(cfg), DEDUP))
        found["by spec"] = plugged(by_spec), torch.allclose(by_spec(ids, places, None), reference, atol=1e-5)
        RouterReplay.set_replay_data([data.flip(0) for data in recorded])
        RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        replayed = by_spec(ids, places, None)
        found["other routes"] = not torch.allclose(replayed, reference, atol=1e-3)
        RouterReplay.set_replay_data(recorded)
        found["replayed"] = torch.allclose(by_spec(ids, places, None), reference, atol=1e-5)
        RouterReplay.clear_global_router_replay_instances()

        model = mm.gpt(cfg)
        handle = use_dispatcher(model, DEDUP, "decoder.layers.1.*")
        found["by pattern"] = plugged(model), torch.allclose(model(ids, places, None), reference, atol=1e-5)
        handle.close()

        mixed = mm.config(dict(ep=world), moe_layer_freq=[0, 1])
        block = get_gpt_decoder_block_spec(mixed, use_transformer_engine=False)
        for layer in block.layer_specs:
            layer.submodules.self_attention.submodules.core_attention = mm.Attention
        model = mm.gpt(mixed, plug_spec(block, DEDUP))
        found["block spec"] = plugged(model), bool(torch.isfinite(model(ids, places, None)).all())

        dense = mm.layer_spec(mm.config(num_moe_experts=None, moe_ffn_hidden_size=None))
        local = dataclasses.replace(DEDUP, dispatcher="local")
        source = dataclasses.replace(ROUTE, weight_at="source")
        for name, call in (
            ("no match", lambda: use_dispatcher(model, DEDUP, "decoder.layerz.*")),
            ("no experts", lambda: use_dispatcher(torch.nn.Linear(2, 2), DEDUP)),
            ("no moe in spec", lambda: plug_spec(dense)),
            ("local", lambda: use_dispatcher(mm.moe_layer(mm.config(dict(ep=world))), local)),
            ("weights", lambda: use_dispatcher(mm.moe_layer(mm.config(dict(ep=world))), source)),
            ("experts", lambda: use_dispatcher(mm.moe_layer(mm.config(dict(ep=world))), DEDUP, experts="ours")),
        ):
            try:
                call()
            except ValueError as error:
                found[name] = str(error)
    return found


def test_the_seams_and_their_errors(run: mm.Run) -> None:
    """A layer that keeps Megatron's dispatcher without a word; a replayed route that our dispatcher does not follow."""
    for found in run(seams, 2):
        assert found["by spec"] == ([0, 1], True)
        assert found["other routes"] and found["replayed"]
        assert found["by pattern"] == ([1], True)
        assert found["block spec"] == ([1], True)
        assert "decoder.layerz.*" in found["no match"] and "decoder.layers.1.mlp" in found["no match"]
        assert "MoE layers: none" in found["no experts"]
        assert "num_experts" in found["no moe in spec"]
        assert "expert_model_parallel_size=2" in found["local"]
        assert "weight_at='source'" in found["weights"] and "'hidden'" in found["weights"]
        assert "experts='ours'" in found["experts"]
