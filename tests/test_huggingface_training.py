"""Trainers around a patched model train it like the unpatched one on the same global batch."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ep_plugin.adapters.huggingface import PatchedModel, patch_model
from ep_plugin.adapters.huggingface_optimizer import shard_optimizer
from ep_plugin.adapters.huggingface_trainer import use_accelerator
from ep_plugin.adapters.huggingface_uneven import even_batches
from ep_plugin.config import EPConfig
from ep_plugin.topology import ProcessGroups, layout
from tests.hf_models import TOP_K, Step, build, reference_step, tokens
from tests.test_huggingface import difference, own

DEDUP = EPConfig(timeout_s=60)
BLOCK = replace(DEDUP, dispatcher="block")
LOCAL = replace(DEDUP, dispatcher="local")
LR, CLIP = 1e-2, 0.5


class Rows(torch.utils.data.Dataset):
    """Sequences of one length."""

    def __init__(self, count: int = 64) -> None:
        self.ids = torch.stack([tokens(i, 0, 1)[0] for i in range(count)])

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[i], "labels": self.ids[i]}


@dataclass(frozen=True)
class Case:
    """One run of transformers' Trainer: its arguments, and what is around the model."""

    ep: int = 4
    model: str = "olmoe"
    config: EPConfig = field(default_factory=lambda: DEDUP)
    arguments: dict = field(default_factory=dict)
    shard: bool = False
    lora: bool = False
    steps: int = 2


def as_torchrun(rank: int, world: int) -> None:
    """What accelerate reads, and no state of an earlier test in this process."""
    from accelerate.state import AcceleratorState, GradientState

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29999", ACCELERATE_USE_CPU="true")
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def seen_batches(model: nn.Module) -> list[torch.Tensor]:
    """The ids of every training forward of ``model`` from now on."""
    seen: list[torch.Tensor] = []

    def see(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if module.training:
            seen.append(kwargs["input_ids"].clone())

    model.register_forward_pre_hook(see, with_kwargs=True)
    return seen


def from_all(batches: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, batches)
    return everyone


def token_mean(batches: list[list[torch.Tensor]]):
    """The loss as Trainer computes it: by the global count of tokens, so that ranks and microbatches may differ."""
    count = sum(ids[:, 1:].numel() for mine in batches for ids in mine)

    def loss_of(model: nn.Module, ids: torch.Tensor) -> SimpleNamespace:
        out = model(input_ids=ids, labels=ids, num_items_in_batch=count)
        return SimpleNamespace(loss=out.loss * len(batches), logits=out.logits)

    return loss_of


def expected_steps(model: nn.Module, batches: list[list[torch.Tensor]], micro: int) -> list[Step]:
    """Steps of the unpatched model over every rank's ``batches``, ``micro`` of them a step."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LR, weight_decay=0.0)
    steps = []
    for start in range(0, len(batches[0]), micro):
        step = [mine[start : start + micro] for mine in batches]
        steps.append(reference_step(model, optimizer, step, CLIP, token_mean(step)))
    return steps


def same_parameters(model: nn.Module, handle: PatchedModel, expected: dict[str, torch.Tensor]) -> None:
    wrong = {}
    for name, p in model.named_parameters():
        whole = p.full_tensor() if isinstance(p, DTensor) else p
        if not (far := difference(whole, own(name, expected[name], handle))) < 1e-9:
            wrong[name] = far
    assert not wrong, wrong


def add_lora(model: nn.Module) -> nn.Module:
    """Adapters on the attention, the same on every rank, that change the outputs."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(7)
    peft = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    return peft.to(next(model.parameters()).dtype)


def run_trainer(rank, world, folder, cases):
    for case in cases:
        try:
            train_one(rank, world, folder, case)
        except Exception as error:
            raise AssertionError(f"{case}") from error


def train_one(rank, world, folder, case):
    from transformers import TrainingArguments

    from ep_plugin.adapters.huggingface_trainer import ExpertParallelTrainer

    as_torchrun(rank, world)
    given = {"gradient_accumulation_steps": 1, **case.arguments}
    arguments = TrainingArguments(
        f"{folder}/{case.ep}",
        per_device_train_batch_size=2,
        max_steps=case.steps,
        learning_rate=LR,
        max_grad_norm=CLIP,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        **given,
    )
    model, unpatched = build(case.model), build(case.model)
    groups = ProcessGroups.create(layout(world, ep=case.ep))
    handle = patch_model(model, case.config, groups)
    trained = add_lora(model) if case.lora else model
    trainer = ExpertParallelTrainer(
        handle=handle, model=trained, args=arguments, train_dataset=Rows(), shard_optimizer_state=case.shard
    )
    seen = seen_batches(model)
    trainer.train()
    if case.lora:
        add_lora(unpatched)
    micro = given["gradient_accumulation_steps"]
    steps = expected_steps(unpatched, from_all(seen), micro)
    log = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    assert len(steps) == len(log) == case.steps
    for step, entry in zip(steps, log, strict=True):
        assert abs(entry["loss"] - sum(step.losses) / world) < 1e-5, (entry, step.losses)  # logged in float32
        assert abs(entry["grad_norm"] - step.norm) < 1e-9, (entry, step.norm)
    same_parameters(model, handle, steps[-1].parameters)
    if case.lora:
        trainer.save_model(f"{folder}/lora")
        dist.barrier()
        reload_adapters(case, f"{folder}/lora", trained)
    handle.close()
    groups.destroy()


def reload_adapters(case, folder, trained):
    """What PEFT wrote fits an unpatched model."""
    from peft import PeftModel

    loaded = PeftModel.from_pretrained(build(case.model), folder).to(torch.float64)
    loaded.load_state_dict({}, strict=False)
    state = loaded.state_dict()
    mine = {name: p for name, p in trained.named_parameters() if "lora_" in name}
    assert mine and all(difference(state[name], p) < 1e-6 for name, p in mine.items())


def test_transformers_trainer(pool, tmp_path):
    """Catches a norm of one rank's experts alone, gradients synced twice or never, losses scaled by the wrong count,
    an optimizer of which some rank steps nothing, adapters that no one averages or that the norm leaves out."""
    pool.run(
        run_trainer,
        4,
        str(tmp_path),
        [
            Case(ep=4),
            Case(ep=2, arguments={"gradient_accumulation_steps": 2, "gradient_checkpointing": True}),
            Case(ep=2, shard=True, steps=3),
            Case(ep=2, lora=True),
            Case(ep=1, model="qwen3_moe", config=BLOCK, shard=True),
        ],
        timeout=200,
    )
