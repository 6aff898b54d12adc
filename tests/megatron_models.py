"""Small Megatron models on CPU and gloo, for comparing its own dispatchers with ours.

Legend: E experts, H hidden size, S sequence length.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib.util
import os
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ep_plugin.adapters.megatron_names import by_global_name
from tests.dist import Pool

Run = Callable[..., list[Any]]
ROOT = Path(__file__).resolve().parents[1]
VOCAB, SEQ, HIDDEN, WIDTH, HEADS, EXPERTS = 32, 8, 16, 24, 2, 8


def latest_wheel() -> Path | None:
    """The folder with the newest supported megatron-core, unpacked beside the installed one by ``make``."""
    folder = Path(os.environ.get("MEGATRON_LATEST", ROOT / ".venv" / "megatron-latest"))
    return folder if (folder / "megatron" / "core").is_dir() else None


marks = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed"),
]


@functools.lru_cache(maxsize=2)
def _pool(folder: str | None) -> Pool:
    """Processes for one version, shared by all test modules: the import is most of their time."""
    pool = Pool()
    atexit.register(pool.close)
    return pool


@pytest.fixture(params=["installed", "latest"])
def run(request: pytest.FixtureRequest) -> Run:
    """``run(fn, world, *args)``: ``fn(rank, world, *args)`` in processes that hold one version of megatron-core."""
    folder = None
    if request.param == "latest":
        path = latest_wheel()
        if path is None:
            pytest.skip("no newer megatron-core beside the installed one: `make` unpacks it, or set MEGATRON_LATEST")
        folder = str(path)

    def call(fn: Any, world: int, *args: Any, timeout: float = 240.0) -> list[Any]:
        return _pool(folder).run(_with_version, world, folder, fn, args, timeout=timeout)

    return call


def _with_version(rank: int, world: int, folder: str | None, fn: Any, args: tuple[Any, ...]) -> Any:
    use_version(folder)
    return fn(rank, world, *args)


def difference(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """The largest difference over all tensors, relative to each tensor's largest entry."""
    assert ours.keys() == theirs.keys()
    worst = 0.0
    for name, reference in theirs.items():
        assert ours[name].shape == reference.shape and ours[name].dtype == reference.dtype, name
        scale = max(float(reference.abs().max()) if reference.numel() else 0.0, 1e-3)
        gap = (ours[name].double() - reference.double()).abs().max() if reference.numel() else 0.0
        worst = max(worst, float(gap) / scale)
    return worst


def use_version(folder: str | None) -> None:
    """Import megatron from ``folder`` (None: the installed one) in this process; without a GPU, let it run on CPU."""
    if folder is not None and folder not in sys.path:
        if "megatron.core" in sys.modules:
            raise RuntimeError("another megatron-core is imported in this process already")
        sys.path.insert(0, folder)
    if not torch.cuda.is_available():
        on_cpu()


@functools.lru_cache(maxsize=1)
def on_cpu() -> None:
    """Once per process, what Megatron's own dispatchers need besides ``cuda_is_cpu``."""
    from megatron.core.transformer.moe import token_dispatcher

    from ep_plugin.adapters.megatron_cpu import NoStream

    token_dispatcher.MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = NoStream()
    to_cpu = token_dispatcher.maybe_move_tensor_to_cpu

    def splits_to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        if as_numpy and torch.is_tensor(tensor):
            return tensor.numpy()
        return to_cpu(tensor, as_numpy, record_stream)

    token_dispatcher.maybe_move_tensor_to_cpu = splits_to_cpu
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
        from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

        if self.cp.size() > 1:
            key, value = (gather_from_sequence_parallel_region(t, group=self.cp) for t in (key, value))
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
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    from ep_plugin.adapters.megatron_cpu import cuda_is_cpu

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
        with cuda_is_cpu():
            yield
    finally:
        MoEAuxLossAutoScaler.main_loss_backward_scale = None  # the last schedule's, which a lone layer must not see
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
    weights_by_name(layer)
    return layer.train()


def gpt(cfg: Any, spec: Any = None, **arguments: Any) -> Any:
    """A tiny GPTModel in training mode."""
    from megatron.core.models.gpt.gpt_model import GPTModel

    model = GPTModel(
        cfg,
        layer_spec(cfg) if spec is None else spec,
        vocab_size=VOCAB,
        max_sequence_length=SEQ,
        position_embedding_type="learned_absolute",
        **arguments,
    )
    weights_by_name(model)
    return model.train()


@torch.no_grad()
def weights_by_name(model: nn.Module) -> None:
    """Give every parameter values that depend on its layer and its expert's global id alone, not on the ranks.

    Megatron's CPU initialisation draws the same experts on all ranks, and the same layers on all pipeline ranks. (Under
    tensor parallelism all slices get the same values.)
    """
    for name, parameter in by_global_name(model, dict(model.named_parameters())).items():
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        values = torch.randn(parameter.shape, generator=generator)
        parameter.copy_(values * 0.3 if parameter.dim() > 1 or "bias" in name else 1 + 0.1 * values)


def tokens(seed: int, batch: int = 2, seq: int = SEQ) -> Tensor:
    """Token ids int64 [batch, seq + 1]."""
    return torch.randint(0, VOCAB, (batch, seq + 1), generator=torch.Generator().manual_seed(seed))


def chunks(cfg: Any, spec: Any = None) -> list[Any]:
    """This pipeline rank's model chunks."""
    from megatron.core import parallel_state as ps

    vpp = cfg.virtual_pipeline_model_parallel_size
    made = []
    for stage in [None] if vpp is None else range(vpp):
        at = {} if stage is None else {"vp_stage": stage}
        made.append(
            gpt(
                cfg,
                spec,
                pre_process=ps.is_pipeline_first_stage(ignore_virtual=stage is None, **at),
                post_process=ps.is_pipeline_last_stage(ignore_virtual=stage is None, **at),
                share_embeddings_and_output_weights=False,
                **at,
            )
        )
    return made


def run_step(cfg: Any, models: list[Any], batches: list[Tensor]) -> list[float]:
    """Forward and backward of one step by Megatron's schedule, a batch [B, S + 1] a microbatch; its losses, which the
    last pipeline rank has.

    Under context parallelism a rank takes its contiguous part of the sequence.
    """
    from megatron.core import parallel_state as ps
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

    cp, at = ps.get_context_parallel_world_size(), ps.get_context_parallel_rank()
    seq = batches[0].shape[1] - 1
    mine = slice(at * seq // cp, (at + 1) * seq // cp)

    def forward(batches: Iterator[Tensor], model: Any) -> tuple[Tensor, Any]:
        batch = next(batches)
        places = torch.arange(seq)[mine].expand(batch.shape[0], -1)
        out = model(batch[:, :-1][:, mine], places, None, labels=batch[:, 1:][:, mine])
        # The schedule multiplies the loss by the context parallel degree: it expects each rank's part of a mean.
        return out, lambda losses: (losses.mean() / cp, {"loss": losses.detach().mean()})

    feeds = [iter(batches) for _ in models]
    several = len(models) > 1
    losses = get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=feeds if several else feeds[0],
        model=models if several else models[0],
        num_microbatches=len(batches),
        seq_length=seq,
        micro_batch_size=batches[0].shape[0],
        forward_only=False,
    )
    return [float(reported["loss"]) for reported in losses]


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
