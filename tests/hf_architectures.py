"""One tiny model for every MoE architecture of transformers 5, built alike on every rank."""

from __future__ import annotations

import dataclasses
import importlib
import re
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, EXPERTS = 64, 8

# Values of a config's fields, where it has them.
COMMON: dict[str, Any] = dict(
    vocab_size=VOCABULARY,
    hidden_size=32,
    d_model=32,
    intermediate_size=24,
    moe_intermediate_size=24,
    shared_expert_intermediate_size=24,
    num_hidden_layers=2,
    n_layers=2,
    num_layers=2,
    first_k_dense_replace=1,
    num_attention_heads=4,
    num_key_value_heads=4,
    head_dim=8,
    q_lora_rank=16,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=8,
    v_head_dim=8,
    n_routed_experts=EXPERTS,
    num_experts=EXPERTS,
    num_local_experts=EXPERTS,
    moe_num_experts=EXPERTS,
    num_experts_per_tok=2,
    moe_topk=2,
    moe_k=2,
    moe_top_k=2,
    top_k_experts=2,
    n_group=2,
    topk_group=1,
    n_shared_experts=1,
    num_shared_experts=1,
    output_router_logits=True,
    router_aux_loss_coef=0.02,
    attention_dropout=0.0,
    sliding_window=4,
    index_topk=4,
    index_n_heads=2,
    index_head_dim=8,
    max_position_embeddings=64,
    pad_token_id=None,
    bos_token_id=None,
    eos_token_id=None,
    use_cache=False,
)


def rope(*sections: int) -> dict[str, Any]:
    """Rotary positions in three dimensions."""
    return dict(rope_type="default", rope_theta=1e4, mrope_section=list(sections))


LINEAR_ATTENTION = dict(
    linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=8
)
SLIDING = dict(swa_num_attention_heads=4, swa_num_key_value_heads=4, swa_head_dim=8)
SECOND_SPARSE = dict(mlp_layer_types=["dense", "sparse"])


@dataclass(frozen=True)
class Tiny:
    """A model class (None: the only one ending in ForCausalLM), what its config needs beside COMMON, and how exactly a
    patched model can equal it: architectures that compute parts in float32 round there."""

    model: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    tolerance: float = 1e-9
    dtype: torch.dtype = torch.float64


def causal(**settings: Any) -> Tiny:
    return Tiny(settings=settings)


ROUNDS = 2e-5


def text(model: str, tolerance: float = 1e-9, **settings: Any) -> Tiny:
    """A model whose text part has no loss of its own, or another class than its family's."""
    return Tiny(model, settings, tolerance)


TINY: dict[str, Tiny] = {
    name: Tiny()
    for name in (
        "afmoe axk1 axk2 bailing_hybrid cohere2_moe deepseek_v2 deepseek_v3 deepseek_v32 dots1 dots3_note ernie4_5_moe"
        " exaone_moe flex_olmo glm4_moe glm4_moe_lite glm_moe_dsa gpt_oss granitemoe granitemoe_swa granitemoeshared"
        " hunyuan_v1_moe hy_v3 hy_v4 jamba kolibri1 laguna lara_mini llama4 mellum minimax minimax_m2 minimax_m3_vl"
        " mistral4 mixtral olmoe phimoe qwen2_moe qwen3_moe solar_open"
    ).split()
} | {
    "aria": text("AriaTextForCausalLM"),
    "beam": Tiny(settings=dict(layer_types=["full_attention"] * 2, **SECOND_SPARSE), tolerance=ROUNDS),
    "dbrx": causal(
        attn_config=dict(kv_n_heads=2, rope_theta=1e4, clip_qkv=8.0),
        ffn_config=dict(hidden_size=32, ffn_hidden_size=24, moe_num_experts=EXPERTS, moe_top_k=2),
    ),
    "deepseek_ocr2": text("DeepseekOcr2TextModel", **SECOND_SPARSE),
    "deepseek_v4": causal(
        layer_types=["heavily_compressed_attention", "compressed_sparse_attention"],
        o_groups=2,
        o_lora_rank=8,
        mlp_layer_types=["hash_moe", "moe"],
    ),
    "diffusion_gemma": text("DiffusionGemmaEncoderTextModel"),
    "ernie4_5_vl_moe": text(
        "Ernie4_5_VLMoeTextModel", moe_intermediate_size=[24, 24], rope_parameters=rope(1, 1, 2), **SECOND_SPARSE
    ),
    "flint": causal(layer_types=["full_attention"] * 2, mlp_only_layers=[0]),
    "gemma4": text(
        "Gemma4ForCausalLM", enable_moe_block=True, vocab_size_per_layer_input=64, hidden_size_per_layer_input=4
    ),
    "glm4v_moe": text("Glm4vMoeTextModel", rope_parameters=dict(rope(1, 1, 2), partial_rotary_factor=1.0)),
    "glm5_next": text(
        "Glm5NextTextModel", index_kpool=2, qk_rope_head_dim=0, linear_head_dim=8, linear_num_heads=4, **SECOND_SPARSE
    ),
    "granitemoehybrid": causal(
        mamba_n_heads=8,
        mamba_d_head=8,
        mamba_d_state=8,
        mamba_chunk_size=8,
        layer_types=["mamba", "attention"],
        shared_intermediate_size=24,
    ),
    "hy_v4_vl": text("HYV4VLTextModel", rope_parameters=rope(2, 1, 1)),
    "inkling": text("InklingForCausalLM", **SLIDING),
    "inkling2": Tiny(None, dict(SLIDING, unpadded_vocab_size=64), ROUNDS, torch.float32),
    "inkling2_loop": Tiny(None, dict(SLIDING, unpadded_vocab_size=64), ROUNDS, torch.float32),
    "jetmoe": causal(kv_channels=4),  # rows of its attention experts are then wider on one side
    "kimi_linear": causal(linear_num_heads=4, linear_head_dim=8),
    "lfm2_moe": causal(layer_types=["conv", "full_attention"], num_dense_layers=1),
    "longcat_flash": causal(expert_ffn_hidden_size=24, ffn_hidden_size=24, zero_expert_num=4),
    "mimo_v2_flash": causal(num_key_value_heads=2),
    "mistral_large4": text("MistralLarge4TextModel"),
    "muse_spark": Tiny("MuseSparkTextModel", dict(moe_hidden_size=32), ROUNDS),
    "nemotron_h": Tiny(
        settings=dict(mamba_num_heads=4, mamba_head_dim=8, ssm_state_size=8, n_groups=1), tolerance=ROUNDS
    ),
    "nllb_moe": text(
        "NllbMoeForConditionalGeneration",
        ROUNDS,
        pad_token_id=0,
        decoder_start_token_id=1,
        encoder_layers=2,
        decoder_layers=2,
        encoder_ffn_dim=24,
        decoder_ffn_dim=24,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_sparse_step=2,
        decoder_sparse_step=2,
        dropout=0.0,
        activation_dropout=0.0,
        moe_token_dropout=0.0,
        encoder_layerdrop=0.0,
        decoder_layerdrop=0.0,
    ),
    "openai_privacy_filter": Tiny("OpenAIPrivacyFilterForTokenClassification", tolerance=ROUNDS),
    "qwen3_5_moe": causal(**LINEAR_ATTENTION),
    "qwen3_next": causal(**LINEAR_ATTENTION),
    "qwen3_omni_moe": text("Qwen3OmniMoeThinkerTextModel"),
    "qwen3_omni_moe talker": text(
        "Qwen3OmniMoeTalkerModel", rope_parameters=rope(1, 1, 2), shared_expert_intermediate_size=24
    ),
    "qwen3_vl_moe": text("Qwen3VLMoeTextModel"),
    "qwen4_exp": causal(**LINEAR_ATTENTION),
    "step3p7": text("Step3p7TextModel", pad_token_id=0, **SECOND_SPARSE),
    "switch_transformers": text(
        "SwitchTransformersForConditionalGeneration",
        ROUNDS,
        pad_token_id=0,
        decoder_start_token_id=1,
        d_kv=8,
        d_ff=24,
        num_heads=4,
        num_decoder_layers=2,
        num_sparse_encoder_layers=1,
        num_sparse_decoder_layers=1,
        dropout_rate=0.0,
    ),
    "unlimited_ocr": text("UnlimitedOcrTextModel"),
    "zaya": causal(num_experts_per_tok=1),
}


def model_class(name: str) -> type:
    """The class of ``TINY[name]``; a name may say more than its package after a space."""
    package = name.split()[0]
    module = importlib.import_module(f"transformers.models.{package}.modeling_{package}")
    wanted = TINY[name].model
    if wanted is None:
        (wanted,) = (key for key in vars(module) if re.fullmatch(r"\w+ForCausalLM", key))
    return getattr(module, wanted)


def build(name: str, **settings: Any) -> nn.Module:
    """The model ``name`` in training mode, with random weights; ``settings`` change its config."""
    from transformers import logging

    logging.set_verbosity_error()
    tiny, cls = TINY[name], model_class(name)
    known = {field.name for field in dataclasses.fields(cls.config_class)}
    common = {key: value for key, value in COMMON.items() if key in known}
    config = cls.config_class(**common | tiny.settings | settings)
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"  # the only one in float64
    torch.manual_seed(0)
    model = cls._from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:  # transformers' 0.02 leaves experts and routers almost without effect
                parameter.normal_(0, 0.3)
            elif not bool(parameter.any()):
                parameter.normal_(0, 0.1)
        for key, buffer in model.named_buffers():
            if key.endswith("tid2eid"):  # deepseek_v4's table of experts by token
                buffer.copy_(torch.rand(len(buffer), EXPERTS).argsort(1)[:, : buffer.shape[1]])
    return model.to(tiny.dtype).train()


def forward(model: nn.Module, ids: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Logits and loss; the last hidden state and a loss on it where the model has no head. Routers that draw random
    numbers draw those of ``seed``."""
    torch.manual_seed(seed)
    ids, kind = ids.to(model.device), type(model).__name__
    if kind.endswith(("ForCausalLM", "ForConditionalGeneration")):
        out = model(input_ids=ids, labels=ids)
        return out.logits, out.loss
    if kind.endswith("ForTokenClassification"):
        out = model(input_ids=ids, labels=ids % model.config.num_labels)
        return out.logits, out.loss
    embed = getattr(model, "codec_embedding", None)
    hidden = model(**{"input_ids": ids} if embed is None else {"inputs_embeds": embed(ids)}).last_hidden_state
    return hidden, F.mse_loss(hidden, torch.ones_like(hidden))


def tokens(step: int, rank: int) -> Tensor:
    """Rank ``rank``'s ids [2, 6] of one step; none is a padding or start token."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(2, VOCABULARY, (2, 6), generator=generator)
