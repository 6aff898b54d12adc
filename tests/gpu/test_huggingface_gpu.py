"""transformers models on GPUs under the trainers people use, against the unpatched model on the same global batch."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from ep_plugin.adapters import huggingface_replicas
from ep_plugin.adapters.huggingface import patch_model
from ep_plugin.adapters.huggingface_loading import from_pretrained
from ep_plugin.adapters.huggingface_trainer import use_accelerator
from ep_plugin.config import CapacityConfig, EPConfig
from ep_plugin.topology import ProcessGroups, layout
from tests.hf_models import build, reference_step, tokens
from tests.test_huggingface import difference, own
from tests.test_huggingface_training import CLIP, LR, Rows, expected_steps, from_all, seen_batches

Ranks = tuple[int, int, torch.device]
ROOMY = EPConfig(heap="torch", capacity=CapacityConfig(factor=2.0), max_tokens=64, slots=6, timeout_s=30)
CONFIGS = [
    pytest.param(ROOMY, id="dedup"),
    pytest.param(replace(ROOMY, form="route"), id="route"),
    pytest.param(replace(ROOMY, dispatcher="block"), id="block"),
]


def fresh_accelerate() -> None:
    from accelerate.state import AcceleratorState, GradientState

    os.environ.pop("ACCELERATE_USE_CPU", None)
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def train(ranks: Ranks, config: EPConfig, folder: str, ep: int, *, resume: str | None = None, shard=False, **arguments):
    """A run of transformers' Trainer: its log, the whole model's state, the unpatched model's steps if not resumed."""
    from transformers import TrainingArguments

    from ep_plugin.adapters.huggingface_trainer import ExpertParallelTrainer

    rank, world, device = ranks
    fresh_accelerate()
    given = {"gradient_accumulation_steps": 2, "max_steps": 2, "save_strategy": "no", **arguments}
    args = TrainingArguments(
        folder,
        per_device_train_batch_size=2,
        learning_rate=LR,
        max_grad_norm=CLIP,
        lr_scheduler_type="constant",
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        **given,
    )
    model = build("olmoe", torch.float32, seed=0 if resume is None else 1).to(device)
    groups = ProcessGroups.create(layout(world, ep=ep))
    handle = patch_model(model, config, groups)
    trainer = ExpertParallelTrainer(
        handle=handle, model=model, args=args, train_dataset=Rows(), shard_optimizer_state=shard
    )
    seen = seen_batches(model)
    trainer.train(resume_from_checkpoint=resume)
    log = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    state = handle.full_state_dict(all_ranks=True)
    steps = []
    if resume is None:
        batches = [[ids.to(device) for ids in mine] for mine in from_all([ids.cpu() for ids in seen])]
        steps = expected_steps(build("olmoe", torch.float32).to(device), batches, given["gradient_accumulation_steps"])
    handle.close()
    groups.destroy()
    return log, state, steps


@pytest.mark.parametrize("config", CONFIGS)
def test_trainer(ranks: Ranks, tmp_path: Path, config: EPConfig) -> None:
    """Catches what only GPUs show: streams of DDP's reduction beside ours, NCCL groups, fused AdamW, checkpointing over
    device buffers."""
    log, state, steps = train(ranks, config, str(tmp_path), ranks[1], gradient_checkpointing=True)
    for step, entry in zip(steps, log, strict=True):
        assert entry["loss"] == pytest.approx(sum(step.losses) / ranks[1], rel=1e-3)
        assert entry["grad_norm"] == pytest.approx(step.norm, rel=1e-2)
    # AdamW's first steps take the signs of gradients, so a few entries may move the other way.
    far = torch.cat([(state[n] - p.cpu()).abs().flatten() for n, p in steps[-1].parameters.items()])
    assert (far > 0.1 * LR).double().mean() < 0.01


def test_trainer_resumes_on_another_degree(ranks: Ranks, tmp_path: Path) -> None:
    """Catches device tensors of optimizer state (fused AdamW's steps) that a checkpoint puts elsewhere."""
    folder = [str(tmp_path)]
    dist.broadcast_object_list(folder)
    saving = {"save_strategy": "steps", "save_steps": 2, "max_steps": 3}
    _, state, _ = train(ranks, ROOMY, folder[0], ranks[1], **saving)
    again = {"max_steps": 3, "resume": f"{folder[0]}/checkpoint-2"}
    for ep, shard in ((1, False), (1, True)):
        _, resumed, _ = train(ranks, ROOMY, f"{folder[0]}/again", ep, shard=shard, **again)
        assert max(difference(resumed[name], state[name]) for name in state) < 1e-2


def test_bf16_autocast(ranks: Ranks, tmp_path: Path) -> None:
    """Catches float32 rows under autocast, and losses far from the unpatched model's."""
    log, _, steps = train(ranks, ROOMY, str(tmp_path), ranks[1], bf16=True, max_steps=1)
    assert log[0]["loss"] == pytest.approx(sum(steps[0].losses) / ranks[1], rel=2e-2)
    assert log[0]["grad_norm"] == pytest.approx(steps[0].norm, rel=0.1)


def test_accelerate_fsdp2(ranks: Ranks) -> None:
    """Catches experts that FSDP2 takes, dense gradients averaged twice, and a norm of one rank's shard."""
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin

    rank, world, device = ranks
    for precision in ("no", "bf16"):
        fresh_accelerate()
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["OlmoeDecoderLayer"],
        )
        accelerator = Accelerator(fsdp_plugin=plugin, mixed_precision=precision)
        model, unpatched = (build("olmoe", torch.float32).to(device) for _ in range(2))
        groups = ProcessGroups.create(layout(world, ep=world))
        handle = patch_model(model, ROOMY, groups)
        use_accelerator(handle, accelerator)
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0, foreach=False)
        wrapped, prepared = accelerator.prepare(model, optimizer)
        assert any(isinstance(p, DTensor) for p in model.parameters())
        known = torch.optim.AdamW(unpatched.parameters(), lr=LR, weight_decay=0.0)
        tolerance = 1e-3 if precision == "no" else 5e-2
        for step in range(2):
            batches = [[tokens(step, r).to(device)] for r in range(world)]
            expected = reference_step(unpatched, known, batches, CLIP)
            prepared.zero_grad()
            loss = wrapped(input_ids=batches[rank][0], labels=batches[rank][0]).loss
            accelerator.backward(loss)
            norm = accelerator.clip_grad_norm_(wrapped.parameters(), CLIP)
            prepared.step()
            assert float(loss) == pytest.approx(expected.losses[rank], rel=tolerance)
            if step == 0:
                assert float(norm) == pytest.approx(expected.norm, rel=2 * tolerance)
        state = accelerator.get_state_dict(wrapped)
        assert bool(state) == (rank == 0)
        handle.close()
        groups.destroy()


def test_no_gpu_holds_all_experts_while_loading(ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a loader that puts the whole model on the GPU before it keeps a part."""
    monkeypatch.setattr(huggingface_replicas, "CHUNK", 1 << 16)  # its comparison of ranks takes more than the experts
    rank, world, device = ranks
    folder = [str(tmp_path)]
    dist.broadcast_object_list(folder)
    whole = build("qwen3_moe", torch.float32, num_experts=128, moe_intermediate_size=128, hidden_size=256)
    experts = sum(p.nbytes for name, p in whole.named_parameters() if ".experts." in name)
    dense = sum(p.nbytes for p in whole.parameters()) - experts
    if rank == 0:
        whole.save_pretrained(folder[0])
    dist.barrier()
    groups = ProcessGroups.create(layout(world, ep=world))
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    handle = from_pretrained(folder[0], replace(ROOMY, dispatcher="block"), groups, device=device, dtype=torch.float32)
    peak = torch.cuda.max_memory_allocated(device) - before
    for name, p in handle.model.named_parameters():
        assert torch.equal(p.cpu(), own(name, whole.get_parameter(name), handle)), name
    assert peak < dense + 0.8 * experts, (peak, dense, experts)
    handle.close()
    groups.destroy()


def test_compiled_dense_layers(ranks: Ranks) -> None:
    """Catches a dispatcher that inductor tries to compile."""
    rank, world, device = ranks
    groups = ProcessGroups.create(layout(world, ep=world))
    model, unpatched = (build("plain", torch.float32).to(device) for _ in range(2))
    handle = patch_model(model, ROOMY, groups)
    ids = tokens(0, rank).to(device)
    loss = torch.compile(model)(ids, ids).loss
    loss.backward()
    assert float(loss) == pytest.approx(float(unpatched(ids, ids).loss), rel=1e-3)
    assert all(p.grad is not None for p in model.parameters())
    handle.close()
    groups.destroy()
    torch.compiler.reset()
