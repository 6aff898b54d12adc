"""transformers' ``Trainer`` on one MoE without EP, over block and over rowwise: tokens/s and memory (report, Table 6).

    torchrun --nproc-per-node 2 -m ep_plugin.bench.hf_trainer [--json result.json]

The model has Qwen3-30B-A3B's layers, as many of them as fit on one GPU without EP, with its optimizer; all ways train
that same model. Parameters, gradients and AdamW's moments are bfloat16, ranks are data parallel, and EP spans them all.
``none`` is transformers' own model under DDP, ``local`` the same with this project's experts, replicated.

- ``tokens_per_s``: of one GPU, median over the timed steps of the slowest rank's.
- ``peak_gib``: the most that torch had allocated in a step, on the rank with the most; ``heap_gib``: symmetric memory
  beside it; ``device_gib``: what the driver says is in use at the end.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..adapters.huggingface import PatchedModel, patch_model
from ..config import CapacityConfig, EPConfig
from ..job import join
from ..topology import ProcessGroups, layout

WAYS = ("none", "local", "block", "rowwise", "rowwise:route")
BYTES_PER_PARAMETER = 8  # weight, gradient and two moments
GIB = 1 << 30


@dataclass(frozen=True)
class Shape:
    """Sizes of the model; the defaults are Qwen3-30B-A3B's, whose 48 layers ``layers`` replaces."""

    hidden: int = 2048
    width: int = 768
    experts: int = 128
    top_k: int = 8
    heads: int = 32
    kv_heads: int = 4
    head_dim: int = 128
    vocabulary: int = 151936

    @property
    def layer(self) -> int:
        """Parameters of one layer."""
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        return attention + self.hidden * self.experts * (1 + 3 * self.width)

    def layers_that_fit(self, tokens: int, free: int) -> int:
        """Layers that train without EP in ``free`` bytes, with ``tokens`` a microbatch.

        Counts the state, the activations that backward needs (rows of all routes through both projections, as
        transformers' own experts keep them; the residual stream and attention) and the logits, in float32 with their
        gradient and once more."""
        rows = tokens * self.top_k * (7 * self.hidden + 10 * self.width) * 2
        dense = tokens * (10 * self.hidden + 4 * self.head_dim * (self.heads + self.kv_heads)) * 2
        outside = 2 * self.vocabulary * self.hidden * BYTES_PER_PARAMETER + 14 * tokens * self.vocabulary
        return int((free - outside) // (self.layer * BYTES_PER_PARAMETER + rows + dense))

    def model(self, layers: int, tokens: int, device: torch.device) -> nn.Module:
        """Random bfloat16 weights on ``device``, alike on all ranks."""
        from transformers import AutoModelForCausalLM, Qwen3MoeConfig

        config = Qwen3MoeConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            num_hidden_layers=layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            num_experts=self.experts,
            num_experts_per_tok=self.top_k,
            moe_intermediate_size=self.width,
            norm_topk_prob=True,
            max_position_embeddings=tokens,
            use_cache=False,
        )
        config._attn_implementation = "sdpa"
        config._experts_implementation = "grouped_mm"
        torch.manual_seed(0)
        with device:
            return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()


class Sequences(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Random token ids [length]."""

    def __init__(self, count: int, length: int, vocabulary: int) -> None:
        self.ids = torch.randint(vocabulary, (count, length), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


@dataclass
class Figures:
    """What one way gave; see the top of this file."""

    way: str
    steps_ms: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    tokens_per_s: float = 0.0
    peak_gib: float = 0.0
    heap_gib: float = 0.0
    device_gib: float = 0.0
    parameters: int = 0
    setup_s: float = 0.0


def main(argv: list[str] | None = None) -> int:
    """Run under torchrun; rank 0 prints one line a way and writes the JSON."""
    args = _parser().parse_args(sys.argv[1:] if argv is None else argv)
    began = time.perf_counter()
    device = join(args.device)
    if device.type == "cpu":
        torch.set_num_threads(1)
    shape = Shape() if args.device == "cuda" else Shape(64, 32, 8, 2, 4, 2, 16, 512)
    layers = args.layers or _layers(shape, args.tokens, device)
    groups = ProcessGroups.create(layout(dist.get_world_size(), ep=dist.get_world_size()))
    alone = ProcessGroups.create(layout(dist.get_world_size(), ep=1))
    result: dict[str, Any] = {"what": "hf_trainer", "layers": layers, "shape": vars(shape), "args": vars(args)}
    result |= {"world": dist.get_world_size(), "torch": torch.__version__, "transformers": _version(), "ways": {}}
    if args.device == "cuda":
        result["device"] = torch.cuda.get_device_name(device)
    _say(f"{layers} layers, {(shape.layer * layers + 2 * shape.vocabulary * shape.hidden) / 1e9:.2f} B parameters")
    for way in args.ways.split(","):
        if time.perf_counter() - began > args.budget:
            _say(f"{way}: left out, --budget {args.budget} s is spent")
            continue
        figures = run_way(way, shape, layers, args, device, alone if way == "local" else groups)
        result["ways"][way] = vars(figures)
        _say(
            f"{way:14s} {figures.tokens_per_s:9.0f} tokens/s/GPU   peak {figures.peak_gib:6.1f} GiB + heap"
            f" {figures.heap_gib:.2f}   in use {figures.device_gib:6.1f}   parameters {figures.parameters / 1e9:6.2f} B"
            f"   loss {figures.losses[0]:.4f} → {figures.losses[-1]:.4f}   setup {figures.setup_s:.0f} s"
        )
    result["seconds"] = time.perf_counter() - began
    if dist.get_rank() == 0 and args.json is not None:
        Path(args.json).write_text(json.dumps(result, indent=1, default=str) + "\n")
    _say(f"{result['seconds']:.0f} s")
    dist.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m ep_plugin.bench.hf_trainer", description=__doc__)
    parser.add_argument("--ways", default="none,block,rowwise", help=f"comma-separated, of {', '.join(WAYS)}")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a tiny model, to try the code")
    parser.add_argument("--layers", type=int, default=0, help="0: as many as fit without EP")
    parser.add_argument("-T", "--tokens", type=int, default=4096, help="tokens of a microbatch and rank")
    parser.add_argument("--microbatches", type=int, default=8, help="of a step and rank")
    parser.add_argument("--steps", type=int, default=5, help="timed steps, after two more")
    parser.add_argument("--checkpointing", action="store_true", help="recompute activations")
    parser.add_argument("--heap", default="auto")
    parser.add_argument("--capacity", type=float, default=1.5, help="room for rows where their count is on the device")
    parser.add_argument("--budget", type=float, default=130.0, help="no way is begun after this many seconds")
    parser.add_argument("--json", default=None)
    return parser


def _layers(shape: Shape, tokens: int, device: torch.device) -> int:
    """As many as fit into 90 % of the free memory of the GPU with the least; two on a CPU."""
    if device.type == "cpu":
        return 2
    free = torch.tensor(torch.cuda.mem_get_info(device)[0])
    dist.all_reduce(free, dist.ReduceOp.MIN)
    return shape.layers_that_fit(tokens, int(0.9 * free))


def run_way(
    way: str, shape: Shape, layers: int, args: argparse.Namespace, device: torch.device, groups: ProcessGroups
) -> Figures:
    """Train one way; collective. Its memory is free again afterwards."""
    began = time.perf_counter()
    model = shape.model(layers, args.tokens, device)
    handle = None if way == "none" else patch_model(model, _config(way, layers, args), groups)
    figures = Figures(way, parameters=sum(p.numel() for p in model.parameters()))
    with tempfile.TemporaryDirectory() as folder:
        trainer = _trainer(model, handle, shape, args, folder, figures)
        figures.setup_s = time.perf_counter() - began
        trainer.train()
    steps = torch.tensor(figures.steps_ms[2:], dtype=torch.float64)
    dist.all_reduce(steps, dist.ReduceOp.MAX)
    figures.tokens_per_s = args.tokens * args.microbatches / statistics.median(steps.tolist()) * 1e3
    memory = torch.zeros(3, dtype=torch.float64)
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        memory[0], memory[2] = torch.cuda.max_memory_allocated(device) / GIB, (total - free) / GIB
    if handle is not None:
        memory[1] = heap_bytes(handle) / GIB
    dist.all_reduce(memory, dist.ReduceOp.MAX)
    figures.peak_gib, figures.heap_gib, figures.device_gib = memory.tolist()
    if handle is not None:
        handle.close()
    del trainer, model, handle
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    return figures


def _config(way: str, layers: int, args: argparse.Namespace) -> EPConfig:
    dispatcher, _, form = way.partition(":")
    slots = 2 if args.checkpointing else layers + 1
    return EPConfig(
        dispatcher=dispatcher,
        form=form or "dedup",
        heap=args.heap,
        capacity=CapacityConfig(factor=args.capacity),
        max_tokens=args.tokens,
        slots=slots if dispatcher == "rowwise" else None,
    )


def heap_bytes(handle: PatchedModel) -> int:
    """Symmetric memory of this rank."""
    heaps = {id(heap): heap for heap in (getattr(d, "heap", None) for d in handle.dispatchers) if heap is not None}
    return sum(buffer.nbytes for heap in heaps.values() for buffer in heap._buffers)


def _trainer(
    model: nn.Module, handle: PatchedModel | None, shape: Shape, args: argparse.Namespace, folder: str, figures: Figures
) -> Any:
    from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

    from ..adapters.huggingface_trainer import ExpertParallelMixin

    steps = args.steps + 2

    class Watch(TrainerCallback):
        """The time of every step, the device idle before and after."""

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.began = _now(args.device)

        def on_step_end(self, *_: Any, **__: Any) -> None:
            figures.steps_ms.append((_now(args.device) - self.began) * 1e3)

        def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
            if "loss" in logs:
                figures.losses.append(logs["loss"])

    class Bucketed:
        """DDP whose gradients are its buckets, so that it keeps them once."""

        def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
            built: dict[str, Any] = super()._build_accelerator_args(**kwargs)  # type: ignore[misc]
            for handler in built["kwargs_handlers"]:
                handler.gradient_as_bucket_view = True
            return built

    bases: tuple[type, ...] = (Bucketed, Trainer) if handle is None else (Bucketed, ExpertParallelMixin, Trainer)
    arguments = TrainingArguments(
        folder,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=args.microbatches,
        max_steps=steps,
        learning_rate=1e-5,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        optim="adamw_torch_fused",
        logging_steps=steps - 1,
        logging_first_step=True,
        logging_nan_inf_filter=False,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=args.device == "cpu",
        ddp_find_unused_parameters=False,
        **({"gradient_checkpointing": True} if args.checkpointing else {}),
        dataloader_pin_memory=False,
    )
    data = Sequences(args.microbatches * steps * dist.get_world_size(), args.tokens, shape.vocabulary)
    own = {} if handle is None else {"handle": handle}
    made = type("BenchTrainer", bases, {})
    trainer = made(model=model, args=arguments, train_dataset=data, callbacks=[Watch()], **own)
    trainer.remove_callback(PrinterCallback)
    return trainer


def _now(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def _version() -> str:
    import transformers

    transformers.logging.set_verbosity_error()
    return str(transformers.__version__)


def _say(line: str) -> None:
    if dist.get_rank() == 0:
        print(line, flush=True)


if __name__ == "__main__":
    main()
