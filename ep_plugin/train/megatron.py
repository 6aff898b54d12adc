"""``trainer=megatron``: one variant of a launch as a Megatron-Core GPT with its own schedules, buffers and optimizers.

On a machine without a GPU the same code runs on the CPU (``adapters/megatron_cpu.py``).
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ..metrics import StepMetrics, moved, total
from ..topology import Layout
from . import checkpoint, megatron_checkpoint
from .loop import Curve, Place, learning_rate, report
from .overflow import RERUNS, Overflows, still_too_small
from .settings import MegatronConfig, RunConfig
from .text import Corpus, batch


def transformer_config(config: RunConfig, layout: Layout) -> Any:
    """Megatron's TransformerConfig for ``config``; ``ValueError`` for settings that it does not have or take."""
    try:
        from megatron.core.transformer.transformer_config import TransformerConfig
    except ImportError as error:
        raise ValueError("trainer=megatron needs megatron-core: pip install 'ep_plugin[megatron]'") from error

    model, trainer, own = config.model, config.trainer, _own(config)
    dtype = getattr(torch, trainer.dtype)
    cpu = not torch.cuda.is_available()
    settings: dict[str, Any] = {
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "num_attention_heads": model.num_heads,
        "num_query_groups": model.num_kv_heads,
        "ffn_hidden_size": model.expert_width,
        "moe_ffn_hidden_size": model.expert_width,
        "num_moe_experts": model.num_experts,
        "moe_router_topk": model.top_k,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "aux_loss" if model.aux_loss_coef else "none",
        "moe_aux_loss_coeff": model.aux_loss_coef,
        # Megatron's own alltoall needs CUDA; this choice counts only where the plugin is left out (ep=none).
        "moe_token_dispatcher_type": "allgather" if cpu else "alltoall",
        "tensor_model_parallel_size": layout.tp,
        "sequence_parallel": layout.tp > 1,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": own.virtual_stages if own.virtual_stages > 1 else None,
        "context_parallel_size": layout.cp,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
        "pipeline_dtype": dtype,
        "params_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "normalization": "RMSNorm",
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "use_cpu_initialization": cpu,
        "gradient_accumulation_fusion": False,
        "bias_activation_fusion": not cpu,
        "bias_dropout_fusion": not cpu,
        "batch_p2p_comm": False,
        "moe_grouped_gemm": own.transformer_engine,
        **_recompute(own),
    }
    for name in model.extra:
        if name in settings:
            raise ValueError(f"model.extra.{name} is set by the other settings of the launch already")
        if name not in TransformerConfig.__dataclass_fields__:
            raise ValueError(f"model.extra.{name} is not a setting of Megatron's TransformerConfig")
    try:
        return TransformerConfig(**settings, **model.extra)
    except AssertionError as error:
        raise ValueError(f"Megatron refuses these settings: {error}") from error


def _own(config: RunConfig) -> MegatronConfig:
    assert config.trainer.megatron is not None
    return config.trainer.megatron


def _recompute(own: MegatronConfig) -> dict[str, Any]:
    if own.recompute == "full":
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    if own.recompute == "moe":
        return {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
    return {}


def train_megatron(
    config: RunConfig, name: str, layout: Layout, corpus: Corpus, place: Place, *, keep_routes: bool
) -> Curve:
    """Train ``config`` with Megatron and return its curve; collective over WORLD. As ``loop.train`` otherwise."""
    from megatron.core import parallel_state

    from ..adapters.megatron_cpu import cuda_is_cpu

    torch.set_num_threads(config.trainer.threads)
    with cuda_is_cpu():
        parallel_state.initialize_model_parallel(
            layout.tp,
            layout.pp,
            _own(config).virtual_stages if _own(config).virtual_stages > 1 else None,
            context_parallel_size=layout.cp,
            expert_model_parallel_size=layout.ep,
            expert_tensor_parallel_size=layout.etp,
        )
        try:
            return _Trainer(config, name, layout, place).run(corpus, keep_routes)
        finally:
            parallel_state.destroy_model_parallel()


class _Trainer:
    """Megatron's model, buffers and optimizer of one variant."""

    def __init__(self, config: RunConfig, name: str, layout: Layout, place: Place) -> None:
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
        )
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.transformer.module import Float16Module

        from ..adapters.megatron import use_dispatcher

        self.config, self.layout, self.place, own = config, layout, place, _own(config)
        self.megatron = transformer_config(config, layout)
        # A function, since layers copy their settings, and a method would be copied with its object.
        self.megatron.finalize_model_grads_func = lambda *args, **kwargs: self._finalize(*args, **kwargs)
        self.overflow: list[int] | None = None  # of the last forward and backward
        _seed(config.seed, place.device)
        chunks = [chunk.to(place.device) for chunk in self._chunks()]
        self.handle = use_dispatcher(chunks, config.ep, experts=own.experts) if config.patch_experts else None
        self.routes = _Routes(chunks)
        settings = DistributedDataParallelConfig(
            use_distributed_optimizer=own.distributed_optimizer, grad_reduce_in_fp32=True
        )
        wrapped = [Float16Module(self.megatron, chunk) for chunk in chunks] if self.megatron.bf16 else chunks
        self.models = [
            DistributedDataParallel(config=self.megatron, ddp_config=settings, module=chunk) for chunk in wrapped
        ]
        clip = config.trainer.clip_norm
        adam = OptimizerConfig(
            optimizer="adam",
            lr=config.trainer.lr,
            weight_decay=config.trainer.weight_decay,
            bf16=self.megatron.bf16,
            params_dtype=self.megatron.params_dtype,
            clip_grad=0.0 if clip is None else clip,
            use_distributed_optimizer=own.distributed_optimizer,
        )
        self.optimizer = get_megatron_optimizer(adam, self.models)
        sizes = [(p.numel(), ".experts." not in key) for chunk in chunks for key, p in chunk.named_parameters()]
        self.curve = Curve(
            name,
            layout,
            f"{config.ep.dispatcher} ({own.experts} experts)" if config.patch_experts else "Megatron's",
            sum(size for size, _ in sizes),
            sum(size for size, dense in sizes if not dense),
        )

    def _chunks(self) -> list[nn.Module]:
        from megatron.core import parallel_state as ps
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
        from megatron.core.models.gpt.gpt_model import GPTModel

        made: list[nn.Module] = []
        te = _own(self.config).transformer_engine
        stages = self.megatron.virtual_pipeline_model_parallel_size
        for stage in [None] if stages is None else range(stages):
            at = {} if stage is None else {"vp_stage": stage}
            model = GPTModel(
                self.megatron,
                get_gpt_decoder_block_spec(self.megatron, use_transformer_engine=te, **at),
                vocab_size=self.config.model.vocab_size,
                max_sequence_length=self.config.model.max_length,
                pre_process=ps.is_pipeline_first_stage(ignore_virtual=stage is None, **at),
                post_process=ps.is_pipeline_last_stage(ignore_virtual=stage is None, **at),
                share_embeddings_and_output_weights=False,
                position_embedding_type="rope",
                **at,
            )
            if self.megatron.use_cpu_initialization:
                _initialise(model, self.config.seed, self.megatron)
            made.append(model.train())
        return made

    def run(self, corpus: Corpus, keep_routes: bool) -> Curve:
        """All steps, progress, the checkpoints; then everything made collectively is released."""
        settings = self.config.trainer
        share = {"rank": self.layout.coordinate(self.place.rank)["dp"], "world": self.layout.dp}
        size = {"batch_size": settings.batch_size, "seq_len": settings.seq_len + 1}
        first_step = 0
        if settings.resume is not None:
            first_step = megatron_checkpoint.load(settings.resume, self.models, self.optimizer)
        for step in range(first_step, settings.steps):
            tokens = torch.from_numpy(batch(corpus, seed=self.config.seed, step=step, **size, **share))
            routes = self._step(tokens.to(self.place.device), step)
            if keep_routes:
                self.curve.routes.append(routes)
            report(self.curve, settings, self.place)
            done = step + 1
            due = done == settings.steps or (settings.checkpoint_every > 0 and done % settings.checkpoint_every == 0)
            if settings.checkpoint and due:
                folder = self.place.folder / "checkpoints" / self.curve.name / f"step_{done:06d}"
                header = checkpoint.Header(
                    done, self.layout.world_size, self.layout.ep, self.config.patch_experts, "megatron"
                )
                megatron_checkpoint.save(folder, self.models, self.optimizer, header, leads=self.place.leads)
        self.routes.close()
        if self.handle is not None:
            self.handle.close()
        return self.curve

    def _step(self, tokens: Tensor, step: int) -> Tensor:
        """One optimizer step on this rank's ``tokens`` [B, S + 1]: adds its metrics to the curve, gives its routes."""
        from megatron.core import parallel_state as ps

        settings, microbatches = self.config.trainer, _own(self.config).microbatches
        began, sent_before = time.perf_counter(), self._bytes_sent()
        lr = learning_rate(settings, step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        losses = self._gradients(tokens, step)
        _, norm, _ = self.optimizer.step()

        routes, load = self.routes.take(self.megatron.num_layers, self.megatron.num_moe_experts)
        last = ps.is_pipeline_last_stage(ignore_virtual=True)
        loss = sum(losses) / microbatches if last else 0.0
        drop = float(self.handle.drop_rate()) if self.handle is not None else 0.0
        own = [loss, float(last), drop, moved(sent_before, self._bytes_sent())]
        totals = torch.cat([torch.tensor(own, dtype=torch.float64), load.cpu().flatten()]).to(self.place.device)
        dist.all_reduce(totals)
        loss, ranks, drop, bytes_moved = totals[:4].tolist()
        self.curve.load = totals[4:].reshape(load.shape).cpu()
        routed = self.curve.load[self.curve.load.sum(1) > 0]
        seconds = time.perf_counter() - began
        self.curve.steps.append(
            StepMetrics(
                run=self.curve.name,
                step=step + 1,
                loss=loss / ranks,
                lr=lr,
                grad_norm=float(norm),
                seconds=seconds,
                tokens_per_s=settings.batch_size * settings.seq_len / seconds,
                drop_rate=drop / self.layout.world_size,
                expert_load=float((routed.amax(1) / routed.mean(1)).max()),
                bytes_moved=bytes_moved,
            )
        )
        return routes

    def _gradients(self, tokens: Tensor, step: int) -> list[float]:
        """Forward and backward of all microbatches: their losses, on the last stage. A step whose routes overflowed an
        expert rank's buffers is discarded on all ranks, and run again with larger ones."""
        from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

        microbatches, several = _own(self.config).microbatches, len(self.models) > 1
        for _ in range(1 + RERUNS):
            for model in self.models:
                model.zero_grad_buffer()
            self.optimizer.zero_grad()
            feeds = [iter(tokens.chunk(microbatches)) for _ in self.models]
            reported = get_forward_backward_func()(
                forward_step_func=self._forward,
                data_iterator=feeds if several else feeds[0],
                model=self.models if several else self.models[0],
                num_microbatches=microbatches,
                seq_length=self.config.trainer.seq_len,
                micro_batch_size=len(tokens) // microbatches,
                forward_only=False,
            )
            losses = [float(r["loss"]) for r in reported]
            if self.overflow is None:
                return losses
            del reported
            self.routes.discard()
            self._overflows().regrow(self.overflow)
        raise still_too_small(f"step {step + 1}")

    def _finalize(self, *args: Any, **kwargs: Any) -> None:
        """Megatron's reduction of gradients and what goes with it (biases of routers that balance the load, say),
        unless the step has to run again."""
        from megatron.core.distributed import finalize_model_grads

        self.overflow = self._overflows().found()
        if self.overflow is None:
            finalize_model_grads(*args, **kwargs)

    def _overflows(self) -> Overflows:
        """Of this stage's dispatchers, which the first forward has built."""
        return Overflows(self.handle or (), self.place.device)

    def _forward(self, feed: Iterator[Tensor], model: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
        """Megatron's forward step: a microbatch [B, S + 1] in, this rank's part of the sequence through the model."""
        tokens = next(feed)
        seq, cp = tokens.shape[1] - 1, self.layout.cp
        at = self.layout.coordinate(self.place.rank)["cp"]
        # The balanced order of context parallelism: of 2·C parts of the sequence, part r and the last but r.
        parts = torch.arange(seq, device=tokens.device).chunk(2 * cp)
        places = torch.cat([parts[at], parts[2 * cp - 1 - at]]) if cp > 1 else parts[0].new_tensor(range(seq))
        ids, labels = tokens[:, :-1][:, places], tokens[:, 1:][:, places]
        mask = torch.ones(seq, seq, dtype=torch.bool, device=tokens.device).triu(1)[None, None]
        losses = model(ids, places.expand(len(ids), -1), mask, labels=labels)
        # The schedule multiplies by the context parallel degree: it expects each rank's part of a mean.
        return losses, lambda losses: (losses.mean() / cp, {"loss": losses.detach().mean()})

    def _bytes_sent(self) -> int | None:
        return 0 if self.handle is None else total(built.get("bytes_sent") for built in self.handle.stats())


class _Routes:
    """What every router chose in the training forwards since the last ``take``; a recomputation is not one."""

    def __init__(self, chunks: list[nn.Module]) -> None:
        from megatron.core.transformer.moe.moe_layer import BaseMoELayer

        layers: list[Any] = [
            module for chunk in chunks for module in chunk.modules() if isinstance(module, BaseMoELayer)
        ]
        self._seen: dict[int, list[Tensor]] = {layer.layer_number: [] for layer in layers}
        self._top_k = layers[0].config.moe_router_topk if layers else 0
        self._routers = [layer.router for layer in layers]
        self._handles = [layer.router.register_forward_hook(self._see(layer.layer_number)) for layer in layers]

    def _see(self, number: int) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, output: tuple[Tensor, Tensor]) -> None:
            if torch._C._current_graph_task_id() == -1:  # not in a backward
                self._seen[number].append(output[1].detach())

        return hook

    def take(self, num_layers: int, num_experts: int) -> tuple[Tensor, Tensor]:
        """Routes int16 [this rank's layers, T, K] of the step, and routes per expert float64 [num_layers, E]."""
        load = torch.zeros(num_layers, num_experts, dtype=torch.float64)
        routes = []
        for number, maps in self._seen.items():
            chosen = torch.cat(maps)
            load[number - 1] = chosen.sum(0)
            routes.append(chosen.to(torch.int16).topk(self._top_k, 1).indices.to(torch.int16).cpu())
            maps.clear()
        return torch.stack(routes) if routes else torch.empty(0, 0, self._top_k, dtype=torch.int16), load

    def discard(self) -> None:
        """Forget the forwards since the last ``take``, and what routers have counted in them."""
        for maps in self._seen.values():
            maps.clear()
        for router in self._routers:
            counted = getattr(router, "local_tokens_per_expert", None)  # what an expert's bias is moved by
            if counted is not None:
                counted.zero_()

    def close(self) -> None:
        """Stop watching."""
        for handle in self._handles:
            handle.remove()


def _seed(seed: int, device: torch.device) -> None:
    from megatron.core.tensor_parallel import random

    torch.manual_seed(seed)
    if device.type == "cuda":
        random.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    else:
        random.initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)  # one that asks nothing of CUDA


@torch.no_grad()
def _initialise(model: nn.Module, seed: int, config: Any) -> None:
    """Draw every matrix by its global name, so that any parallel degrees start from the same model.

    Megatron's CPU initialisation draws the same experts on every rank.
    """
    from ..adapters.megatron_names import by_global_name

    for name, parameter in by_global_name(model, dict(model.named_parameters())).items():
        if parameter.dim() < 2:
            continue
        scaled = "linear_fc2" in name or "linear_proj" in name
        std = config.init_method_std / ((2 * config.num_layers) ** 0.5 if scaled else 1.0)
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{name}".encode()))
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
