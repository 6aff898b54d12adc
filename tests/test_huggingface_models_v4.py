"""Models of transformers 4.57, whose experts are a ModuleList, in processes of their own that import that version."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from ep_plugin.topology import ProcessGroups, layout
from tests import dist
from tests.hf_architectures import ROUNDS
from tests.test_huggingface_models import CONFIG, check_one

FOLDER = Path(os.environ.get("TRANSFORMERS_4", Path(__file__).parents[1] / ".venv" / "transformers-4"))
EXPERTS = 8
COMMON = dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=24,
    moe_intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    head_dim=8,
    num_experts_per_tok=2,
    max_position_embeddings=32,
    router_aux_loss_coef=0.02,
    output_router_logits=True,
    pad_token_id=None,
    bos_token_id=None,
    eos_token_id=None,
    use_cache=False,
)
MODELS: dict[str, dict] = {
    "mixtral": dict(num_local_experts=EXPERTS),
    "qwen2_moe": dict(num_experts=EXPERTS, shared_expert_intermediate_size=24),
    "qwen3_moe": dict(num_experts=EXPERTS, norm_topk_prob=True),
    "olmoe": dict(num_experts=EXPERTS),
    "deepseek_v3": dict(
        n_routed_experts=EXPERTS,
        n_group=2,
        topk_group=1,
        n_shared_experts=1,
        first_k_dense_replace=1,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=8,
    ),
    "gpt_oss": dict(num_local_experts=EXPERTS, layer_types=["full_attention"] * 2),
}


def build(name: str, **settings) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM, logging

    logging.set_verbosity_error()
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **{**COMMON, **MODELS[name], **settings})
    config._attn_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.3)
            elif not bool(parameter.any()):
                parameter.normal_(0, 0.1)
    return model.to(dtype_of(name)).train()


def dtype_of(name: str) -> torch.dtype:
    """float64 where transformers runs in it."""
    return torch.float32 if name == "deepseek_v3" else torch.float64


def train(rank: int, world: int, ep: int, save: bool) -> None:
    import transformers

    assert transformers.__version__.startswith("4.57"), transformers.__file__
    groups = ProcessGroups.create(layout(world, ep=ep))
    for name in MODELS:
        tolerance = 1e-9 if dtype_of(name) == torch.float64 else ROUNDS
        wrong = check_one(rank, world, functools.partial(build, name), groups, CONFIG, tolerance, save)
        assert not wrong, f"{name}: {wrong}"
    groups.destroy()


@pytest.fixture(scope="module")
def run() -> Iterator[Callable[..., object]]:
    """``run(fn, world, *args)``: ``fn(rank, world, *args)`` in processes that import transformers 4.57."""
    if not FOLDER.exists():
        pytest.skip(f"no transformers 4.57 at {FOLDER}: `make test` unpacks it, or set TRANSFORMERS_4")
    pool = dist.Pool()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(FOLDER), *sys.path])  # as workers find it when they start
        yield functools.partial(pool.run, timeout=240)
    pool.close()


@pytest.mark.slow
@pytest.mark.parametrize(("world", "ep"), [(2, 2), (4, 2)])
def test_models_of_transformers_4_train_and_save_like_the_unpatched(run, world, ep):
    """Catches another routing than the block's own, experts of the wrong rank, a checkpoint that lacks some."""
    run(train, world, ep, world == 2)


def refuse(rank: int, world: int) -> None:
    from ep_plugin.adapters.huggingface import patch_model
    from ep_plugin.adapters.huggingface_families import find_sites
    from ep_plugin.config import EPConfig

    local = EPConfig(dispatcher="local")
    model = build("mixtral")
    assert list(find_sites(model)) == ["model.layers.0.block_sparse_moe", "model.layers.1.block_sparse_moe"]
    block = model.model.layers[0].block_sparse_moe
    block.experts[0].w3 = nn.Identity()
    with pytest.raises(ValueError, match=r"made of w1 \(Linear\), w2 \(Linear\), w3 \(Identity\)"):
        patch_model(model, local)

    class Sharpened(type(block)):
        def forward(self, hidden_states):
            return super().forward(2 * hidden_states)

    Sharpened.__name__ = type(block).__name__
    model = build("mixtral")
    model.model.layers[1].block_sparse_moe.__class__ = Sharpened
    with pytest.raises(ValueError, match=r"layers\.1\.block_sparse_moe .* its forward and ours differ by"):
        patch_model(model, local)

    model = build("qwen3_moe")
    patch_model(model, local)
    model.model.layers[0].mlp.experts[3].up_proj = nn.Linear(32, 24, bias=False, dtype=torch.float64)
    with pytest.raises(RuntimeError, match=r"mlp\.experts\.3\.up_proj was replaced"):
        model(torch.zeros(1, 2, dtype=torch.long))
    model = build("qwen3_moe")
    patch_model(model, local)
    model.to(torch.float32).to(torch.float64)
    with pytest.raises(RuntimeError, match="experts were moved or converted after patch_model"):
        model(torch.zeros(1, 2, dtype=torch.long))


@pytest.mark.slow
def test_blocks_that_compute_something_else_are_refused(run):
    """Catches a block whose routing was changed, taken for what its name says; experts that no longer are views."""
    run(refuse, 1)
