"""A transformers MoE of random weights from ``ModelConfig``; nothing is downloaded."""

from __future__ import annotations

import difflib
import logging
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .settings import ModelConfig


@dataclass(frozen=True)
class Names:
    """What one architecture's transformers config calls the settings that others call otherwise."""

    num_experts: str
    expert_width: str


NAMES = {
    "olmoe": Names("num_experts", "intermediate_size"),
    "mixtral": Names("num_local_experts", "intermediate_size"),
    "qwen2_moe": Names("num_experts", "moe_intermediate_size"),
    "qwen3_moe": Names("num_experts", "moe_intermediate_size"),
    "gpt_oss": Names("num_local_experts", "intermediate_size"),
}


def transformers_config(config: ModelConfig) -> Any:
    """The architecture's transformers config; ``ValueError`` for a name in ``model.extra`` that it does not have."""
    try:
        from transformers import AutoConfig
    except ImportError as error:
        raise ValueError("the models need transformers, which is not installed: pip install 'ep_plugin[hf]'") from error

    names = NAMES[config.architecture]
    settings = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim or config.hidden_size // config.num_heads,
        names.num_experts: config.num_experts,
        names.expert_width: config.expert_width,
        "num_experts_per_tok": config.top_k,
        "max_position_embeddings": config.max_length,
        "router_aux_loss_coef": config.aux_loss_coef,
        "output_router_logits": config.aux_loss_coef > 0,
        "use_cache": False,
        # Tokens are bytes: none of them is special.
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    known = list(AutoConfig.for_model(config.architecture).to_dict())
    for name in config.extra:
        if name in settings:
            raise ValueError(f"model.extra.{name} is set by the other settings of model already")
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise ValueError(
                f"model.extra.{name} is not a setting of transformers' {config.architecture!r} config{hint}"
            )
    return AutoConfig.for_model(config.architecture, **{**settings, **config.extra})


def check_weights(config: ModelConfig, weights: str) -> None:
    """``ValueError`` where ``weights``, a folder or an id of the hub, is not of the model that ``config`` describes."""
    from transformers import AutoConfig

    try:
        found = AutoConfig.from_pretrained(weights)
    except OSError as error:
        raise ValueError(f"trainer.hf.weights={weights!r} holds no transformers config that can be read") from error
    names = NAMES[config.architecture]
    for name, ours, theirs in (
        ("architecture", config.architecture, found.model_type),
        ("vocab_size", config.vocab_size, found.vocab_size),
        ("hidden_size", config.hidden_size, found.hidden_size),
        ("num_layers", config.num_layers, found.num_hidden_layers),
        ("num_experts", config.num_experts, getattr(found, names.num_experts, None)),
        ("top_k", config.top_k, getattr(found, "num_experts_per_tok", None)),
    ):
        if ours != theirs:
            raise ValueError(f"trainer.hf.weights={weights!r} has {name}={theirs}, but model.{name}={ours}")


def quiet_transformers() -> None:
    """Keep transformers' advice about checkpoints and special tokens out of the progress."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="transformers")


def build_model(config: ModelConfig, *, seed: int, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """The model on ``device`` in ``dtype``, with the same random weights on every rank."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(transformers_config(config)).to(device=device, dtype=dtype)


def experts_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that hold routed experts, by name: those with three-dimensional parameters called ``down_proj``."""
    found = {}
    for name, module in model.named_modules():
        weight = getattr(module, "down_proj", None)
        if isinstance(weight, nn.Parameter) and weight.dim() == 3:
            found[name] = module
    return found
