"""Everything that can be found wrong with a launch before any process group is made.

Each function raises ``ValueError`` with one line that quotes the setting, its value and what would be right.
"""

from __future__ import annotations

import os
from dataclasses import asdict

from ..config import check_shape
from ..topology import Layout, layout
from .checkpoint import Header, check_resume
from .settings import RunConfig
from .text import corpus_files

GPU_HEAPS = ("torch", "nvshmem")


def check_settings(config: RunConfig, world: int) -> Layout:
    """Check ``config`` for a world of ``world`` processes and return its layout. Needs no torch."""
    config.validate()
    topology, megatron = config.topology, config.trainer.megatron
    for name in ("tp", "pp", "cp", "etp"):
        if getattr(topology, name) != 1 and megatron is None:
            raise ValueError(
                f"topology.{name}={getattr(topology, name)}: transformers' models are sharded by data and experts only,"
                f" so {name} must be 1 here (trainer=megatron takes {name} > 1, and ep-topology shows its layout)"
            )
    ep = max(1, world // (topology.pp * topology.etp)) if topology.ep is None else topology.ep
    if ep > world:
        raise ValueError(
            f"topology.ep={ep} is larger than the world of {_processes(world)};"
            f" start {ep} (nproc={ep}, or torchrun --nproc-per-node {ep}) or set topology.ep to at most {world}"
        )
    chosen = layout(world, tp=topology.tp, pp=topology.pp, cp=topology.cp, etp=topology.etp, ep=ep)
    model = config.model
    check_shape(num_experts=model.num_experts, top_k=model.top_k, hidden_size=model.hidden_size, ep=ep)
    if config.ep.dispatcher == "local" and ep != 1:
        kept = "ep=local" if config.patch_experts else "ep=none"
        raise ValueError(f"topology.ep={ep}: {kept} keeps every expert on every rank, so topology.ep must be 1")
    if config.patch_experts and config.ep.weight_at == "input":
        raise ValueError(
            "ep.weight_at='input' scales what experts read; these models scale what they return: use 'hidden'"
        )
    if config.patch_experts and config.ep.dispatcher == "deepep":
        _check_deepep(config)
    batch_size = config.trainer.batch_size
    if batch_size % chosen.dp:
        raise ValueError(
            f"trainer.batch_size={batch_size} sequences do not divide over {chosen.dp} data-parallel ranks;"
            f" {-(-batch_size // chosen.dp) * chosen.dp} would"
        )
    if (megatron is not None) != (model.architecture == "megatron"):
        trainer = "transformers" if megatron is None else "Megatron"
        raise ValueError(
            f"model.architecture={model.architecture!r} is not a model for {trainer}'s trainer: trainer=megatron goes"
            " with model=megatron_..., and the others with the others"
        )
    if megatron is not None:
        _check_megatron(config, chosen)
    if config.trainer.hf is not None:
        _check_hf(config, chosen)
    _check_text(config)
    resume = config.trainer.resume
    if resume is not None:
        trainer = "megatron" if megatron is not None else "hf" if config.trainer.hf is not None else "transformers"
        built = asdict(model) if trainer == "transformers" else None
        check_resume(resume, Header(config.trainer.steps, world, ep, config.patch_experts, trainer, built))
    return chosen


def _check_hf(config: RunConfig, chosen: Layout) -> None:
    own, batch_size = config.trainer.hf, config.trainer.batch_size
    assert own is not None
    divisor = chosen.dp * own.microbatches
    if batch_size % divisor:
        raise ValueError(
            f"trainer.batch_size={batch_size} does not divide by data-parallel ranks · microbatches = {divisor};"
            f" {-(-batch_size // divisor) * divisor} would"
        )
    if own.shard_optimizer and not config.patch_experts:
        raise ValueError("trainer.hf.shard_optimizer=true goes with the plugin's experts: not with ep=none")
    if own.text == "tokenizer" and config.check.below_unigram:
        raise ValueError("check.below_unigram counts bytes: leave it out with trainer.hf.text=tokenizer")


def _check_deepep(config: RunConfig) -> None:
    """What DeepEP's preflight would say of the settings, before anything starts."""
    model, trainer = config.model, config.trainer
    for name, value, right in (
        ("trainer.dtype", trainer.dtype, trainer.dtype == "bfloat16"),
        ("model.hidden_size", model.hidden_size, model.hidden_size % 256 == 0),
        ("trainer.device", trainer.device, trainer.device != "cpu"),
    ):
        if not right:
            raise ValueError(
                f"{name}={value!r}: ep=deepep moves bfloat16 rows of GPUs, of a hidden size that is a multiple of 256;"
                " ep=rowwise and ep=block take others"
            )


def _check_megatron(config: RunConfig, chosen: Layout) -> None:
    own, trainer, model = config.trainer.megatron, config.trainer, config.model
    assert own is not None
    for what, value, name, divisor in (
        ("trainer.batch_size", trainer.batch_size, "data-parallel ranks · microbatches", chosen.dp * own.microbatches),
        ("model.num_layers", model.num_layers, "pipeline ranks · virtual_stages", chosen.pp * own.virtual_stages),
        ("model.num_heads", model.num_heads, "topology.tp", chosen.tp),
        ("trainer.seq_len", trainer.seq_len, "tp · 2·cp", chosen.tp * (2 * chosen.cp if chosen.cp > 1 else 1)),
    ):
        if value % divisor:
            raise ValueError(f"{what}={value} does not divide by {name} = {divisor}")
    if chosen.cp > 1 and not own.transformer_engine:
        raise ValueError(
            f"topology.cp={chosen.cp}: Megatron's context parallelism needs trainer.megatron.transformer_engine=true"
        )
    if own.virtual_stages > 1 and chosen.pp == 1:
        raise ValueError(f"trainer.megatron.virtual_stages={own.virtual_stages} needs a pipeline: topology.pp > 1")
    if config.patch_experts and config.ep.weight_at != "hidden":
        raise ValueError(
            f"ep.weight_at={config.ep.weight_at!r}: Megatron applies the router's probabilities before the down"
            " projection; use 'hidden'"
        )


def check_comparable(variants: dict[str, RunConfig]) -> None:
    """Check that the variants of a launch see the same batches at the same steps."""
    (first, reference), *others = variants.items()
    for name, config in others:
        for what, a, b in (
            ("data", reference.data, config.data),
            ("seed", reference.seed, config.seed),
            *(
                (f"trainer.{field}", getattr(reference.trainer, field), getattr(config.trainer, field))
                for field in ("steps", "batch_size", "seq_len", "device")
            ),
        ):
            if a != b:
                raise ValueError(
                    f"variants.{name} has {what}={b}, but variants.{first} has {a}; compared runs need the same"
                )
        if config.trainer.resume is not None:
            raise ValueError(f"trainer.resume={config.trainer.resume!r} resumes one run, and this launch has variants")


def check_machine(config: RunConfig) -> str:
    """Check that this machine has what ``config`` asks for, and return the device type, ``cpu`` or ``cuda``."""
    import torch

    cuda = torch.cuda.is_available()
    device = config.trainer.device
    if device == "auto":
        device = "cuda" if cuda else "cpu"
    if device == "cuda" and not cuda:
        raise ValueError("trainer.device='cuda': torch sees no CUDA device here; use trainer.device=cpu")
    if device == "cuda":
        from ..job import gpu_of

        gpu_of(int(os.environ.get("LOCAL_RANK", 0)))
    if config.patch_experts and config.ep.dispatcher == "deepep" and device != "cuda":
        raise ValueError("ep=deepep moves rows of GPUs, and torch sees no CUDA device here; use ep=rowwise or ep=block")
    uses_heap = config.patch_experts and config.ep.dispatcher == "rowwise"
    if uses_heap and config.ep.heap in GPU_HEAPS and device != "cuda":
        seen = "trainer.device is cpu" if cuda else "torch sees no CUDA device here"
        raise ValueError(f"ep.heap={config.ep.heap!r} needs a CUDA device, and {seen}; use ep.heap=shm or auto")
    if uses_heap and config.ep.heap == "shm" and device != "cpu":
        raise ValueError("ep.heap='shm' is memory of CPU processes; use trainer.device=cpu, or ep.heap=auto")
    if config.cluster.backend == "nccl" and device != "cuda":
        raise ValueError("cluster.backend='nccl' needs CUDA devices; use cluster.backend=gloo or auto")
    if config.trainer.megatron is not None:
        from .megatron import transformer_config

        t = config.topology
        ep = t.ep or 1
        transformer_config(config, layout(t.tp * t.cp * t.pp * t.etp * ep, tp=t.tp, pp=t.pp, cp=t.cp, etp=t.etp, ep=ep))
    else:
        from .model import check_weights, transformers_config

        transformers_config(config.model)
        if config.trainer.hf is not None and config.trainer.hf.weights is not None:
            check_weights(config.model, config.trainer.hf.weights)
    return device


def _check_text(config: RunConfig) -> None:
    root, files = corpus_files(config.data)
    size = sum(file.stat().st_size for file in files)
    if config.data.max_bytes is not None:
        size = min(size, config.data.max_bytes)
    if size < config.trainer.seq_len:
        raise ValueError(f"the text of {root} has {size} bytes, fewer than trainer.seq_len={config.trainer.seq_len}")


def _processes(world: int) -> str:
    return "1 process" if world == 1 else f"{world} processes"
