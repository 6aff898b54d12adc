"""``trainer=hf``: transformers' own ``Trainer`` trains the model, with its experts sharded by the plugin.

The batches, the learning rate and the metrics are those of the other trainers, so that curves can be compared.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..adapters.huggingface import PatchedModel, patch_model
from ..adapters.huggingface_loading import from_pretrained
from ..adapters.huggingface_trainer import ExpertParallelMixin
from ..metrics import StepMetrics, moved
from ..topology import Layout, ProcessGroups
from .checkpoint import HEADER, Header
from .loop import Curve, Place, learning_rate, report
from .model import build_model, experts_modules
from .routes import RouteRecorder, expert_load
from .settings import HFConfig, RunConfig
from .text import Corpus, batch


class Sequences(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Every sequence of the training in its order: those of the first step's global batch, those of the second's, …"""

    def __init__(self, config: RunConfig, corpus: Corpus) -> None:
        settings = config.trainer
        self.count, self.batch_size = settings.steps * settings.batch_size, settings.batch_size
        size = {"batch_size": settings.batch_size, "seq_len": settings.seq_len}
        self._batch = lru_cache(maxsize=2)(lambda step: batch(corpus, seed=config.seed, step=step, **size))

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        step, place = divmod(index, self.batch_size)
        ids = torch.from_numpy(self._batch(step)[place])
        return {"input_ids": ids, "labels": ids}


def train_huggingface(
    config: RunConfig, name: str, layout: Layout, corpus: Corpus, place: Place, *, keep_routes: bool
) -> Curve:
    """As ``loop.train``, by transformers' ``Trainer``."""
    settings, own = config.trainer, config.trainer.hf
    assert own is not None
    torch.set_num_threads(settings.threads)
    _forget_accelerator()
    if own.text == "tokenizer":
        assert own.weights is not None
        corpus = tokenised(corpus, own.weights)
    groups = ProcessGroups.create(layout) if config.patch_experts else None
    model, handle = _model(config, own, groups, place.device)
    experts = experts_modules(model)
    curve = Curve(
        name,
        layout,
        config.ep.dispatcher if config.patch_experts else "none",
        sum(p.numel() for p in model.parameters()),
        sum(p.numel() for module in experts.values() for p in module.parameters()),
    )
    recorder = RouteRecorder(list(experts.values()))
    folder = place.folder / "checkpoints" / name
    trainer = _trainer(config, own, layout, place, folder, model, handle, Sequences(config, corpus))
    trainer.add_callback(_watch(config, curve, place, recorder, handle, folder, keep_routes))
    trainer.train(resume_from_checkpoint=settings.resume)
    recorder.close()
    if handle is not None and groups is not None:
        handle.close()
        groups.destroy()
    return curve


def tokenised(corpus: Corpus, weights: str) -> Corpus:
    """``corpus`` in the tokens of the tokenizer of ``weights``, a folder or an id of the hub."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(weights)
    ids = tokenizer(corpus.tokens.tobytes().decode("utf-8", errors="replace"))["input_ids"]
    return replace(corpus, tokens=np.asarray(ids, dtype=np.int32))


def _forget_accelerator() -> None:
    """accelerate keeps the settings of a process's first trainer; each variant has its own."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)


def _model(
    config: RunConfig, own: HFConfig, groups: ProcessGroups | None, device: torch.device
) -> tuple[nn.Module, PatchedModel | None]:
    """The model, and its handle where its experts are sharded."""
    dtype = getattr(torch, config.trainer.dtype)
    if own.weights is not None and groups is not None:
        loaded = from_pretrained(own.weights, config.ep, groups, device=device, dtype=dtype)
        return loaded.model.train(), loaded
    if own.weights is not None:
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(own.weights, dtype=dtype).to(device).train(), None
    model = build_model(config.model, seed=config.seed, dtype=dtype, device=device).train()
    return model, None if groups is None else patch_model(model, config.ep, groups)


def _trainer(
    config: RunConfig,
    own: HFConfig,
    layout: Layout,
    place: Place,
    folder: Path,
    model: nn.Module,
    handle: PatchedModel | None,
    sequences: Sequences,
) -> Any:
    from transformers import PrinterCallback, Trainer, TrainingArguments

    settings = config.trainer
    every = settings.checkpoint_every or settings.steps
    arguments = TrainingArguments(
        str(folder),
        per_device_train_batch_size=settings.batch_size // (layout.dp * own.microbatches),
        gradient_accumulation_steps=own.microbatches,
        max_steps=settings.steps,
        learning_rate=settings.lr,
        weight_decay=settings.weight_decay,
        max_grad_norm=settings.clip_norm or 0.0,
        optim="adamw_torch",
        bf16=own.autocast,
        torch_compile=own.compile,
        logging_steps=1,
        save_strategy="steps" if settings.checkpoint else "no",
        save_steps=every,
        seed=config.seed,
        report_to=[],
        disable_tqdm=True,
        use_cpu=place.device.type == "cpu",
        dataloader_pin_memory=False,
        ddp_find_unused_parameters=False,
        **({"gradient_checkpointing": True} if own.checkpointing else {}),
    )

    class Ordered:
        """The sequences in their order, and this launcher's learning rate."""

        def _get_train_sampler(self, *_: Any, **__: Any) -> Any:
            return torch.utils.data.SequentialSampler(sequences)

        def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
                self.optimizer if optimizer is None else optimizer,  # type: ignore[attr-defined]
                lambda step: learning_rate(settings, step) / settings.lr if settings.lr else 0.0,
            )
            self._created_lr_scheduler = True
            return self.lr_scheduler

    bases: tuple[type, ...] = (Ordered, Trainer) if handle is None else (Ordered, ExpertParallelMixin, Trainer)
    given = {} if handle is None else {"handle": handle, "shard_optimizer_state": own.shard_optimizer}
    trainer = type("RecipeTrainer", bases, {})(model=model, args=arguments, train_dataset=sequences, **given)
    trainer.remove_callback(PrinterCallback)
    return trainer


def _watch(
    config: RunConfig,
    curve: Curve,
    place: Place,
    recorder: RouteRecorder,
    handle: PatchedModel | None,
    folder: Path,
    keep_routes: bool,
) -> Any:
    """The callback that makes this launcher's metrics out of the trainer's, and marks its checkpoints."""
    from transformers import TrainerCallback

    settings, experts = config.trainer, config.model.num_experts

    class Watch(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.began, self.sent = time.perf_counter(), _sent(handle)

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
            if logs is None or "grad_norm" not in logs:
                return
            routes = recorder.take()
            if keep_routes:
                curve.routes.append(routes.cpu())
            layers = len(routes) // (config.trainer.hf.microbatches if config.trainer.hf else 1)
            load = expert_load(routes, experts).reshape(-1, layers, experts).sum(0)
            dropped = 0.0 if handle is None else float(handle.metrics().drop_rate)
            own = torch.tensor([dropped, moved(self.sent, _sent(handle))], dtype=load.dtype).to(load)
            totals = torch.cat([own, load.flatten()])
            dist.all_reduce(totals)
            curve.load = totals[2:].reshape(load.shape).cpu()
            seconds = time.perf_counter() - self.began
            curve.steps.append(
                StepMetrics(
                    run=curve.name,
                    step=state.global_step,
                    loss=logs["loss"],
                    lr=learning_rate(settings, state.global_step - 1),
                    grad_norm=logs["grad_norm"],
                    seconds=seconds,
                    tokens_per_s=settings.batch_size * settings.seq_len / seconds,
                    drop_rate=totals[0].item() / dist.get_world_size(),
                    expert_load=float((curve.load.amax(1) / curve.load.mean(1)).max()),
                    bytes_moved=totals[1].item(),
                )
            )
            report(curve, settings, place)

        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if place.leads:
                header = Header(state.global_step, curve.layout.world_size, curve.layout.ep, config.patch_experts, "hf")
                (folder / f"checkpoint-{state.global_step}" / HEADER).write_text(json.dumps(asdict(header)) + "\n")

    return Watch()


def _sent(handle: PatchedModel | None) -> int | None:
    return 0 if handle is None else handle.dispatchers.bytes_sent()
