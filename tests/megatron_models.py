"""Small Megatron models on CPU and gloo, for comparing its own dispatchers with ours.

Megatron's alltoall dispatcher, routers, pipeline transport and checkpointed regions ask for CUDA; ``on_cpu`` gives them
what they ask for, once per process. Legend: E experts, H hidden size, S sequence length.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[1]
VOCAB, SEQ, HIDDEN, WIDTH, HEADS, EXPERTS = 32, 8, 16, 24, 2, 8


def latest_wheel() -> Path | None:
    """The folder with the newest supported megatron-core, unpacked beside the installed one by ``make``."""
    folder = Path(os.environ.get("MEGATRON_LATEST", ROOT / ".venv" / "megatron-latest"))
    return folder if (folder / "megatron" / "core").is_dir() else None


def use_version(folder: str | None) -> None:
    """Import megatron from ``folder`` (None: the installed one) in this process, and let it run on CPU."""
    if folder is not None and folder not in sys.path:
        if "megatron.core" in sys.modules:
            raise RuntimeError("another megatron-core is imported in this process already")
        sys.path.insert(0, folder)
    on_cpu()


class _NoStream:
    """What a CUDA stream or event does where there is none: nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: self


@functools.lru_cache(maxsize=1)
def on_cpu() -> None:
    """Once per process: no-op streams, CPU as the current device, gloo where Megatron counts on NCCL."""
    from megatron.core.tensor_parallel import random as mcore_random
    from megatron.core.transformer.moe import moe_utils, shared_experts, token_dispatcher

    stream = _NoStream()
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    torch.cuda.current_stream = lambda *args: stream  # type: ignore[assignment,return-value]
    torch.cuda.stream = lambda *args: contextlib.nullcontext()  # type: ignore[assignment]
    torch.cuda.synchronize = lambda *args: None  # type: ignore[assignment]
    torch.cuda.Stream = _NoStream  # type: ignore[assignment,misc]
    token_dispatcher.MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = stream
    shared_experts.SharedExpertMLP.stream = stream
    to_cpu = token_dispatcher.maybe_move_tensor_to_cpu

    def splits_to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        if as_numpy and torch.is_tensor(tensor):
            return tensor.numpy()
        return to_cpu(tensor, as_numpy, record_stream)

    token_dispatcher.maybe_move_tensor_to_cpu = splits_to_cpu
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # 0.16 without Transformer Engine
    mcore_random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    mcore_random._set_cuda_rng_state = lambda *args, **kwargs: None
    all_gather = dist.all_gather

    def uneven_all_gather(tensors: list[Tensor], tensor: Tensor, group: Any = None, async_op: bool = False) -> Any:
        """gloo gathers equal sizes only."""
        if len({t.shape for t in tensors}) == 1:
            return all_gather(tensors, tensor, group=group, async_op=async_op)
        most = max(t.shape[0] for t in tensors)
        padded = tensor.new_zeros((most, *tensor.shape[1:]))
        padded[: tensor.shape[0]] = tensor
        every = [torch.empty_like(padded) for _ in tensors]
        all_gather(every, padded, group=group)
        for out, got in zip(tensors, every, strict=True):
            out.copy_(got[: out.shape[0]])

    dist.all_gather = uneven_all_gather


class Attention(nn.Module):
    """Causal attention core on any device, in place of Megatron's; gathers keys and values under context parallelism.

    Under CP rank r of C holds positions r·S/C … (r+1)·S/C − 1: Megatron's balanced order is the loader's choice, and
    the tests load contiguous parts.
    """

    def __init__(self, config: Any, *args: Any, pg_collection: Any = None, **kwargs: Any) -> None:
        super().__init__()
        from megatron.core import parallel_state

        self.cp = parallel_state.get_context_parallel_group()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """[S, B, heads, head size] each → [S, B, H]."""
        if self.cp.size() > 1:
            key, value = (torch.cat(torch.distributed.nn.functional.all_gather(t, self.cp)) for t in (key, value))
        q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
        first = self.cp.rank() * q.shape[2]
        rows = torch.arange(first, first + q.shape[2])
        mask = torch.arange(k.shape[2]) <= rows[:, None]
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return out.permute(2, 0, 1, 3).reshape(*query.shape[:2], -1)


@contextlib.contextmanager
def parallel(**sizes: Any) -> Iterator[None]:
    """Megatron's parallel state for the sizes (tp, pp, cp, ep, etp, vpp) and a random tracker that needs no CUDA."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import initialize_rng_tracker

    parallel_state.initialize_model_parallel(
        sizes.get("tp", 1),
        sizes.get("pp", 1),
        sizes.get("vpp"),
        context_parallel_size=sizes.get("cp", 1),
        expert_model_parallel_size=sizes.get("ep", 1),
        expert_tensor_parallel_size=sizes.get("etp", 1),
    )
    initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()


def config(sizes: dict[str, Any] | None = None, **settings: Any) -> Any:
    """A tiny TransformerConfig for the parallel ``sizes`` of ``parallel``; ``settings`` override."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    sizes = sizes or {}
    tp = sizes.get("tp", 1)
    defaults: dict[str, Any] = dict(
        num_layers=2,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        ffn_hidden_size=WIDTH,
        moe_ffn_hidden_size=WIDTH,
        num_moe_experts=EXPERTS,
        moe_router_topk=2,
        moe_router_load_balancing_type="none",
        moe_router_dtype="fp32",
        moe_token_dispatcher_type="alltoall",
        tensor_model_parallel_size=tp,
        sequence_parallel=tp > 1,
        pipeline_model_parallel_size=sizes.get("pp", 1),
        virtual_pipeline_model_parallel_size=sizes.get("vpp"),
        context_parallel_size=sizes.get("cp", 1),
        expert_model_parallel_size=sizes.get("ep", 1),
        expert_tensor_parallel_size=sizes.get("etp", 1),
        pipeline_dtype=settings.get("params_dtype", torch.float32),
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=F.silu,
        use_cpu_initialization=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        init_method_std=0.3,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        batch_p2p_comm=False,
    )
    return TransformerConfig(**{**defaults, **settings})


def layer_spec(cfg: Any) -> Any:
    """Megatron's own local layer spec, with an attention core that runs here."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    spec = get_gpt_layer_local_spec(num_experts=cfg.num_moe_experts, moe_grouped_gemm=False)
    spec.submodules.self_attention.submodules.core_attention = Attention
    return spec


def moe_layer(cfg: Any, spec: Any = None) -> Any:
    """One MoE layer of Megatron's, in training mode."""
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.moe.moe_utils import get_default_pg_collection

    mlp = (layer_spec(cfg) if spec is None else spec).submodules.mlp
    if isinstance(mlp, functools.partial):
        layer = mlp.func(cfg, mlp.keywords["submodules"], pg_collection=get_default_pg_collection())
    else:
        layer = (mlp.module or MoELayer)(cfg, mlp.submodules, pg_collection=get_default_pg_collection())
    layer.set_layer_number(1)
    weights_by_expert(layer)
    return layer.train()


def gpt(cfg: Any, spec: Any = None, **arguments: Any) -> Any:
    """A tiny GPTModel in training mode, its experts' weights keyed by global expert id."""
    from megatron.core.models.gpt.gpt_model import GPTModel

    torch.manual_seed(7)
    model = GPTModel(
        cfg,
        layer_spec(cfg) if spec is None else spec,
        vocab_size=VOCAB,
        max_sequence_length=SEQ,
        position_embedding_type="rope",
        **arguments,
    )
    weights_by_expert(model)
    return model.train()


@torch.no_grad()
def weights_by_expert(model: nn.Module) -> None:
    """Give expert e the same weights whatever rank holds it: Megatron's CPU initialisation draws alike on all ranks."""
    from megatron.core.transformer.moe.moe_layer import BaseMoELayer

    for module in model.modules():
        if not isinstance(module, BaseMoELayer):
            continue
        for local, expert in enumerate(module.experts.local_experts):
            tp = module.experts.tp_group
            for which, linear in ((1, expert.linear_fc1), (2, expert.linear_fc2)):
                seed = 1000 * (module.layer_number or 0) + 10 * module.local_expert_indices[local] + which
                for parameter in linear.parameters():
                    generator = torch.Generator().manual_seed(seed)
                    shape = list(parameter.shape)
                    axis = 0 if which == 1 else 1  # the axis that expert tensor parallelism splits
                    if len(shape) > axis:
                        shape[axis] *= tp.size()
                    whole = torch.randn(shape, generator=generator) * 0.3
                    if whole.dim() > axis and tp.size() > 1:
                        gates = 2 if which == 1 and module.config.gated_linear_unit else 1
                        parts = [half.chunk(tp.size(), axis)[tp.rank()] for half in whole.chunk(gates, axis)]
                        whole = torch.cat(parts, axis)
                    parameter.copy_(whole)


def tokens(seed: int, batch: int = 2, seq: int = SEQ) -> Tensor:
    """Token ids int64 [batch, seq + 1]."""
    return torch.randint(0, VOCAB, (batch, seq + 1), generator=torch.Generator().manual_seed(seed))


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter's gradient, by name; a missing one is an error."""
    missing = [name for name, p in model.named_parameters() if p.grad is None]
    if missing:
        raise AssertionError(f"no gradient: {missing}")
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def reduce_gradients(model: nn.Module) -> None:
    """Average dense gradients over DP×CP and scale expert gradients likewise, as Megatron's DDP does."""
    from megatron.core import parallel_state as ps

    dense, expert = ps.get_data_parallel_group(with_context_parallel=True), ps.get_expert_data_parallel_group()
    for parameter in model.parameters():
        if parameter.grad is None:
            continue
        dist.all_reduce(parameter.grad, group=dense if getattr(parameter, "allreduce", True) else expert)
        parameter.grad /= dense.size()
