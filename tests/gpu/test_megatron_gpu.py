"""Megatron's MoE layer on GPUs with our dispatchers against its own alltoall over NCCL, on the newest megatron-core at
hand: outputs and every gradient.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ep_plugin.config import CapacityConfig, EPConfig
from tests import megatron_models as mm

HIDDEN, WIDTH, EXPERTS, TOP_K, TOKENS = 256, 128, 8, 4, 192
EXACT = CapacityConfig(factor=2.0)  # buffers for everything to one of two ranks
DEDUP = EPConfig(capacity=EXACT, slots=6)
ROUTE = EPConfig(form="route", capacity=EXACT, slots=6)
BLOCK = EPConfig(dispatcher="block")
NVSHMEM = EPConfig(heap="nvshmem", capacity=EXACT, slots=6)
WAYS = [
    pytest.param(BLOCK, "megatron", id="block"),
    pytest.param(DEDUP, "megatron", id="dedup"),
    pytest.param(ROUTE, "megatron", id="route"),
    pytest.param(DEDUP, "plugin", id="dedup, our experts"),
    pytest.param(ROUTE, "plugin", id="route, our experts"),
    pytest.param(NVSHMEM, "megatron", id="nvshmem"),
]
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "aux loss": dict(moe_router_load_balancing_type="aux_loss", moe_aux_loss_coeff=0.1),
    "shared expert, overlapped": dict(moe_shared_expert_intermediate_size=128, moe_shared_expert_overlap=True),
    "clamped": dict(activation_func_clamp_value=0.5, glu_linear_offset=1.0),
    "recomputed": dict(recompute_granularity="selective", recompute_modules=["moe"]),
    "capacity": dict(moe_expert_capacity_factor=0.8),
    "capacity, padded": dict(moe_expert_capacity_factor=0.8, moe_pad_expert_input_to_capacity=True),
}


@pytest.fixture(scope="module")
def megatron(ranks: tuple[int, int, torch.device]) -> Iterator[tuple[int, torch.device]]:
    """(rank, device) with Megatron's parallel state at EP over all ranks."""
    folder = mm.latest_wheel()
    if folder is None and importlib.util.find_spec("megatron") is None:
        pytest.skip("megatron-core is neither installed nor at MEGATRON_LATEST")
    mm.use_version(None if folder is None else str(folder))
    rank, world, device = ranks
    with mm.parallel(ep=world):
        yield rank, device


def layers(device: torch.device, **settings: Any) -> tuple[Any, Any]:
    """Two equal MoE layers in bfloat16."""
    cfg = mm.config(
        dict(ep=dist.get_world_size()),
        hidden_size=HIDDEN,
        num_attention_heads=4,
        moe_ffn_hidden_size=WIDTH,
        num_moe_experts=EXPERTS,
        moe_router_topk=TOP_K,
        params_dtype=torch.bfloat16,
        bf16=True,
        **settings,
    )
    theirs, ours = mm.moe_layer(cfg).to(device), mm.moe_layer(cfg).to(device)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


@pytest.mark.parametrize("ep, experts", WAYS)
@pytest.mark.parametrize("case", CASES)
def test_a_layer_gives_what_it_gives_with_alltoall(
    megatron: tuple[int, torch.device], case: str, ep: EPConfig, experts: str
) -> None:
    """Rows or probabilities of the wrong token; a lease that ends while another microbatch still needs its rows: three
    forwards run before their backwards, with different numbers of tokens."""
    from ep_plugin.adapters.megatron import use_dispatcher

    if ep.heap == "nvshmem":
        pytest.importorskip("nvshmem.core")
    rank, device = megatron
    theirs, ours = layers(device, **CASES[case])
    handle = use_dispatcher(ours, dataclasses.replace(ep, max_tokens=2 * TOKENS), experts=experts)
    results = []
    ragged = "padded" not in case
    for layer in (theirs, ours):
        seen: dict[str, torch.Tensor] = {}
        outs = []
        for microbatch in range(3):
            generator = torch.Generator().manual_seed(10 * microbatch + rank)
            tokens = TOKENS + (17 * rank + 5 * microbatch if ragged else 0)
            x = torch.randn(tokens, 1, HIDDEN, generator=generator).to(device, torch.bfloat16).requires_grad_()
            outs.append((x, layer(x)[0]))
        for microbatch, (x, y) in enumerate(outs):
            (y.float() ** 2).mean().backward()
            seen |= {f"y {microbatch}": y.detach(), f"x {microbatch}": x.grad}
        results.append(seen | mm.gradients(layer))
    handle.check()
    gap = mm.difference(results[1], results[0])
    handle.close()
    assert results[0]["y 0"].abs().max() > 0.1
    assert gap < 3e-2, gap


def test_the_optimizer_hook_raises_an_overflow(megatron: tuple[int, torch.device]) -> None:
    """Dropless rows past the buffers that are trained on as if nothing had happened."""
    from ep_plugin.adapters.megatron import use_dispatcher

    _, device = megatron
    _, ours = layers(device)
    small = EPConfig(capacity=CapacityConfig(factor=0.5), slots=2, max_tokens=TOKENS)
    handle = use_dispatcher(ours, small, experts="plugin")
    optimizer = torch.optim.SGD(ours.parameters(), lr=1.0)
    before = [p.detach().clone() for p in ours.parameters()]
    x = torch.randn(TOKENS, 1, HIDDEN, device=device, dtype=torch.bfloat16, requires_grad=True)
    ours(x)[0].sum().backward()
    with pytest.raises(RuntimeError, match="capacity.factor"):
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, ours.parameters(), strict=True))
    handle.close()
