"""Checkpoints of a patched model: loaded by parts, written whole, resumed on other degrees."""

from __future__ import annotations

import gc
import json
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from ep_plugin.adapters import huggingface_replicas
from ep_plugin.adapters.huggingface import patch_model
from ep_plugin.adapters.huggingface_loading import from_pretrained
from ep_plugin.adapters.huggingface_optimizer import shard_optimizer
from ep_plugin.config import EPConfig
from ep_plugin.topology import ProcessGroups, layout
from tests.hf_models import build, reference_step, tokens
from tests.test_huggingface import difference, own
from tests.test_huggingface_training import CLIP, LR, Rows, add_lora, as_torchrun, same_parameters

DEDUP = EPConfig(timeout_s=60)
BLOCK = replace(DEDUP, dispatcher="block")


def test_no_rank_holds_all_experts_while_loading(pool, tmp_path):
    """Catches a loader that reads the whole model before it keeps a part: EP then saves no memory where it counts."""
    big = build("qwen3_moe", torch.float32, num_experts=128, moe_intermediate_size=128, hidden_size=256)
    experts = sum(p.nbytes for name, p in big.named_parameters() if ".experts." in name)
    big.save_pretrained(tmp_path / "big")
    build("qwen3_moe", torch.float32).save_pretrained(tmp_path / "small")
    dense = sum(p.nbytes for p in big.parameters()) - experts
    parts = pool.run(peak_of_loading, 4, str(tmp_path), True)
    whole = pool.run(peak_of_loading, 4, str(tmp_path), False)
    assert max(parts) < dense + 0.5 * experts, (parts, dense, experts)
    assert min(whole) > dense + 0.9 * experts, (whole, dense, experts)


def peak_of_loading(rank, world, folder, by_parts):
    """Most bytes of memory, files that are mapped not counted, that loading took beyond what there was."""
    from transformers import AutoModelForCausalLM

    groups = ProcessGroups.create(layout(world, ep=4))
    huggingface_replicas.CHUNK = 1 << 14  # its comparison of ranks takes more than these small experts

    def load(name):
        if by_parts:
            return from_pretrained(f"{folder}/{name}", DEDUP, groups, dtype=torch.float32)
        return AutoModelForCausalLM.from_pretrained(f"{folder}/{name}", dtype=torch.float32)

    first = load("small")  # imports and buffers
    gc.collect()
    before, most, done = anonymous_memory(), [0], threading.Event()

    def watch():
        while not done.is_set():
            most[0] = max(most[0], anonymous_memory())
            time.sleep(0.002)

    watching = threading.Thread(target=watch)
    watching.start()
    loaded = load("big")
    done.set()
    watching.join()
    for handle in (first, loaded) if by_parts else ():
        handle.close()
    groups.destroy()
    return max(most[0], anonymous_memory()) - before


def anonymous_memory() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


def test_written_and_read_by_any_degree(pool, tmp_path):
    """Catches a checkpoint with some experts missing, doubled or in another order, files that their index does not
    list, and tied or dense weights lost on the way."""
    pool.run(write_and_read, 4, str(tmp_path), timeout=200)


def write_and_read(rank, world, folder):
    from torch.distributed.fsdp import fully_shard
    from transformers import AutoModelForCausalLM, logging

    logging.set_verbosity_error()
    cases = (
        ("qwen3_moe", 4, 2, {"tie_word_embeddings": True}, 1),
        ("gpt_oss", 2, 4, {}, 5 << 30),
        ("mixtral", 2, 4, {"fsdp": True}, 100_000),
    )
    for name, ep, other, settings, limit in cases:
        _clear_sharding_prop_cache()  # it remembers a process group of an earlier task
        fsdp = settings.pop("fsdp", False)
        whole = build(name, torch.float32, **settings).state_dict()
        model = build(name, torch.float32, **settings)
        groups = ProcessGroups.create(layout(world, ep=ep))
        handle = patch_model(model, DEDUP, groups)
        if fsdp:
            mesh = DeviceMesh.from_group(groups.dp, "cpu")
            fully_shard(model, mesh=mesh, ignored_params=set(handle.expert_parameters.values()))
        target = f"{folder}/{name}"
        handle.save_pretrained(target, max_shard_bytes=limit)
        if rank == 0:
            files = [file.name for file in Path(target).glob("*.safetensors")]
            assert (len(files) == 1) == (limit == 5 << 30), files
            if len(files) > 1:
                index = json.loads(Path(target, "model.safetensors.index.json").read_text())
                assert set(index["weight_map"].values()) == set(files)
            loaded = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).state_dict()
            assert loaded.keys() == whole.keys()
            assert all(torch.equal(loaded[key], whole[key]) for key in whole)
        handle.close()
        groups.destroy()
        dist.barrier()

        groups = ProcessGroups.create(layout(world, ep=other))
        again = from_pretrained(target, BLOCK, groups, dtype=torch.float32)
        for key, p in again.model.named_parameters():
            assert torch.equal(p, own(key, whole[key], again)), key
        assert len(again.expert_parameters) > 0
        ids = tokens(0, rank)
        again.model.train()
        loss = again.model(input_ids=ids, labels=ids).loss
        assert abs(loss - build(name, torch.float32, **settings)(input_ids=ids, labels=ids).loss) < 1e-5
        if rank == 0:
            add_lora(again.model)
            with pytest.raises(ValueError, match="holds LoRA layers"):
                again.save_pretrained(f"{folder}/lora")
        again.close()
        groups.destroy()


def virtual_batches(step: int) -> list[torch.Tensor]:
    """The batches of four ranks, however many there are."""
    return [tokens(step, virtual) for virtual in range(4)]


def test_training_resumes_on_other_degrees(pool, tmp_path):
    """Catches optimizer state that belongs to other experts, is lost, or is only found where it was written."""
    unpatched = build("plain")
    optimizer = torch.optim.AdamW(unpatched.parameters(), lr=LR)
    torch.manual_seed(0)
    for step in range(4):
        expected = reference_step(unpatched, optimizer, [[ids] for ids in virtual_batches(step)], CLIP)
    torch.save(expected.parameters, tmp_path / "expected.pt")
    written = str(tmp_path / "ep4")
    pool.run(train_from, 4, 4, False, None, written, 2, str(tmp_path))
    for world, ep, shard in ((4, 2, True), (2, 2, False), (2, 1, True)):
        pool.run(train_from, world, ep, shard, written, None, 4, str(tmp_path))
    shared = str(tmp_path / "shared")  # written where every rank has a share
    pool.run(train_from, 4, 2, True, written, shared, 3, str(tmp_path))
    pool.run(train_from, 4, 4, False, shared, None, 4, str(tmp_path))


def train_from(rank, world, ep, shard, read, write, until, folder):
    """Train from step ``read`` (None: from the start) to ``until``; compare at the end of the fourth step."""
    groups = ProcessGroups.create(layout(world, ep=ep))
    model = build("plain", seed=0 if read is None else 1)
    handle = patch_model(model, DEDUP, groups)
    if shard:
        optimizer = shard_optimizer(handle, torch.optim.AdamW, lr=0.5 if read else LR)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.5 if read else LR)
    handle.attach(optimizer)
    first = 0
    if read is not None:
        with pytest.raises(ValueError, match="holds no training state"):
            handle.load_training_state(folder, optimizer)
        handle.load_training_state(read, optimizer)
        first = int(next(iter(optimizer_steps(optimizer))))
        assert first == (3 if read.endswith("shared") else 2)
    for step in range(first, until):
        batches = virtual_batches(step)
        share = len(batches) // world
        ids = torch.cat(batches[rank * share : (rank + 1) * share])
        optimizer.zero_grad()
        model(ids, ids).loss.backward()
        handle.clip_grad_norm_(CLIP)
        optimizer.step()
    if write is not None:
        handle.save_training_state(write, optimizer)
    if until == 4:
        same_parameters(model, handle, torch.load(f"{folder}/expected.pt"))
    handle.close()
    groups.destroy()


def optimizer_steps(optimizer):
    from ep_plugin.adapters.huggingface_optimizer import parts_of

    return [state["step"] for part in parts_of(optimizer) for state in part.state.values()]


def test_trainer_resumes_on_another_degree(pool, tmp_path):
    """Catches a Trainer's checkpoint with rank 0's optimizer state alone, and weights that transformers cannot read."""
    runs = [(4, False, None), (2, True, "first/checkpoint-2"), (1, False, "first/checkpoint-2")]
    pool.run(trainer_runs, 4, str(tmp_path), runs, timeout=200)


def trainer_runs(rank, world, folder, runs):
    from transformers import AutoModelForCausalLM, TrainingArguments, logging

    from ep_plugin.adapters.huggingface_trainer import ExpertParallelTrainer

    logging.set_verbosity_error()
    results = []
    for number, (ep, shard, resume) in enumerate(runs):
        as_torchrun(rank, world)
        arguments = TrainingArguments(
            f"{folder}/{'first' if resume is None else number}",
            per_device_train_batch_size=2,
            max_steps=3,
            learning_rate=LR,
            max_grad_norm=CLIP,
            save_strategy="steps",
            save_steps=2 if resume is None else 10,
            eval_strategy="steps",
            eval_steps=2,
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
        )
        model = build("olmoe", seed=0 if resume is None else 1)
        groups = ProcessGroups.create(layout(world, ep=ep))
        handle = patch_model(model, DEDUP, groups)
        trainer = ExpertParallelTrainer(
            handle=handle,
            model=model,
            args=arguments,
            train_dataset=Rows(),
            eval_dataset=Rows(7),  # ranks get different numbers of them
            shard_optimizer_state=shard,
        )
        trainer.train(resume_from_checkpoint=resume and f"{folder}/{resume}")
        assert trainer.state.global_step == 3
        losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
        results.append((handle.full_state_dict(all_ranks=True), losses))
        if resume is None and rank == 0:
            loaded = AutoModelForCausalLM.from_pretrained(f"{folder}/first/checkpoint-3", dtype=torch.float64)
            assert all(torch.equal(t, results[0][0][name]) for name, t in loaded.state_dict().items())
        handle.close()
        groups.destroy()
    for state, losses in results[1:]:
        assert max(difference(state[name], results[0][0][name]) for name in state) < 1e-9
        assert losses == pytest.approx(results[0][1], abs=1e-6)
