"""Small MoE models called like those of transformers, the same on every rank, and steps of the unpatched model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

VOCABULARY, EXPERTS, TOP_K, HIDDEN, WIDTH = 64, 8, 2, 32, 24


class PlainExperts(nn.Module):
    """Called and laid out like an experts module of transformers, which it does not need."""

    def __init__(self, experts: int = EXPERTS, norm: bool = False) -> None:
        super().__init__()
        self.num_experts = experts
        self.has_post_expert_norm = norm
        if norm:
            self.post_expert_norm = nn.LayerNorm(HIDDEN)
        self.config = SimpleNamespace(num_experts_per_tok=TOP_K)
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * WIDTH, HIDDEN))
        self.down_proj = nn.Parameter(torch.empty(experts, HIDDEN, WIDTH))
        self.act_fn = nn.SiLU()

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        out = torch.zeros_like(hidden_states)
        for expert in range(self.num_experts):
            token, k = torch.where(top_k_index == expert)
            if not len(token):
                continue  # as transformers does: without any row the output has no graph
            gate, up = F.linear(hidden_states[token], self.gate_up_proj[expert]).chunk(2, dim=-1)
            rows = F.linear(self.act_fn(gate) * up, self.down_proj[expert])
            if self.has_post_expert_norm:
                rows = self.post_expert_norm(rows)
            out = out.index_add(0, token, (rows * top_k_weights[token, k, None]).to(out.dtype))
        return out


class PlainBlock(nn.Module):
    def __init__(self, experts: int, norm: bool) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, experts, bias=False)
        self.experts = PlainExperts(experts, norm)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, HIDDEN)
        weights, ids = self.gate(flat).softmax(-1).topk(TOP_K)
        return x + self.experts(flat, ids, weights).view(x.shape)


class PlainModel(nn.Module):
    """Embedding, MoE blocks and a head; gives ``loss`` and ``logits`` as transformers does."""

    def __init__(self, layers: int = 2, experts: int = EXPERTS, norm: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.blocks = nn.ModuleList(PlainBlock(experts, norm) for _ in range(layers))
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        self.checkpointing: bool | None = None  # use_reentrant

    def forward(self, input_ids: Tensor, labels: Tensor, num_items_in_batch: int | None = None) -> SimpleNamespace:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x) if self.checkpointing is None else checkpoint(block, x, use_reentrant=self.checkpointing)
        logits = self.head(x)
        target = labels[:, 1:].reshape(-1)
        loss = F.cross_entropy(logits[:, :-1].reshape(-1, VOCABULARY), target, reduction="sum")
        return SimpleNamespace(loss=loss / (num_items_in_batch or target.numel()), logits=logits)


COMMON = dict(
    vocab_size=VOCABULARY,
    hidden_size=HIDDEN,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    num_experts_per_tok=TOP_K,
    max_position_embeddings=32,
    router_aux_loss_coef=0.02,
    output_router_logits=True,
    pad_token_id=None,
    bos_token_id=None,
    eos_token_id=None,
    use_cache=False,
)
SETTINGS: dict[str, dict] = {
    "olmoe": dict(num_experts=EXPERTS, intermediate_size=WIDTH),
    "mixtral": dict(num_local_experts=EXPERTS, intermediate_size=WIDTH),
    "qwen3_moe": dict(num_experts=EXPERTS, moe_intermediate_size=WIDTH, norm_topk_prob=True),
    "gpt_oss": dict(num_local_experts=EXPERTS, intermediate_size=WIDTH, layer_types=["full_attention"] * 2),
}


def build(name: str, dtype: torch.dtype = torch.float64, seed: int = 0, **settings) -> nn.Module:
    """The model ``name`` in training mode, with random weights that depend on ``seed`` alone.

    "plain" is ``PlainModel``; other names are architectures of transformers.
    """
    torch.manual_seed(seed)
    if name == "plain":
        model: nn.Module = PlainModel(**settings)
    else:
        from transformers import AutoConfig, AutoModelForCausalLM, logging

        logging.set_verbosity_error()
        config = AutoConfig.for_model(name, **{**COMMON, **SETTINGS[name], **settings})
        config._attn_implementation = "eager"
        config._experts_implementation = "eager"  # the only one in float64
        model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:  # transformers' 0.02 leaves experts and routers almost without effect
                parameter.normal_(0, 0.3)
            elif not bool(parameter.any()):  # biases
                parameter.normal_(0, 0.1)
    return model.to(dtype).train()


def tokens(step: int, rank: int, sequences: int = 2, length: int = 6) -> Tensor:
    """Rank ``rank``'s ids [sequences, length] of one step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(VOCABULARY, (sequences, length), generator=generator)


@dataclass
class Step:
    """What one optimizer step of the global batch gave."""

    losses: list[float]  # by rank
    logits: list[Tensor]  # by rank, of the last microbatch
    gradients: dict[str, Tensor]  # by name, before clipping
    norm: float
    parameters: dict[str, Tensor]  # by name, after the step


LossOf = Callable[[nn.Module, Tensor], SimpleNamespace]


def mean_loss(model: nn.Module, ids: Tensor) -> SimpleNamespace:
    """Forward with the mean loss of the rank's own tokens."""
    return model(input_ids=ids, labels=ids)


def reference_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: list[list[Tensor]],
    max_norm: float,
    forward: LossOf = mean_loss,
) -> Step:
    """One step of the unpatched model on the batches of all ranks: the mean over ranks of the sum over microbatches."""
    optimizer.zero_grad()
    losses, logits = [], []
    for microbatches in batches:
        total = 0.0
        for ids in microbatches:
            out = forward(model, ids)
            (out.loss / len(batches)).backward()
            total += out.loss.item()
        losses.append(total)
        logits.append(out.logits.detach())
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm).item()
    optimizer.step()
    return Step(losses, logits, gradients, norm, {name: p.detach().clone() for name, p in model.named_parameters()})
