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
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.nn.parallel import DistributedDataParallel

from ep_plugin.adapters.huggingface import PatchedModel, patch_model
from ep_plugin.adapters.huggingface_optimizer import parts_of, shard_optimizer
from ep_plugin.adapters.huggingface_trainer import ExpertParallelMixin, use_accelerator
from ep_plugin.adapters.huggingface_uneven import even_batches
from ep_plugin.config import EPConfig
from ep_plugin.dispatch import RouteOverflow
from ep_plugin.topology import ProcessGroups, layout
from tests.hf_models import TOP_K, Step, build, reference_step, tokens
from tests.launched import reset_accelerate
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
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29999")
    reset_accelerate()


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


def train_loop(rank, world, step_of, batches, model, handle, optimizer, reference):
    """A loop over ``batches[step][rank]`` by ``step_of``, checked against the unpatched model step by step."""
    known = torch.optim.AdamW(reference.parameters(), lr=LR, weight_decay=0.0)
    for step in batches:
        expected = reference_step(reference, known, [[ids] for ids in step], CLIP)
        loss, norm = step_of(step[rank])
        assert abs(loss - expected.losses[rank]) < 1e-9
        assert abs(norm - expected.norm) < 1e-9 * expected.norm
        same_parameters(model, handle, expected.parameters)


def global_batches(world: int, steps: int = 2) -> list[list[torch.Tensor]]:
    return [[tokens(step, rank) for rank in range(world)] for step in range(steps)]


def test_fsdp2_shards_the_dense_part(pool):
    """Catches a norm over a rank's shard alone, dense gradients averaged twice, experts that FSDP2 takes, and an
    optimizer that mixes what torch cannot take together."""
    pool.run(fsdp_loop, 4)


def fsdp_loop(rank, world):
    from torch.distributed.fsdp import fully_shard

    for ep, shard in ((4, False), (2, True)):
        _clear_sharding_prop_cache()  # it remembers a process group of an earlier task
        model, unpatched = build("plain"), build("plain")
        groups = ProcessGroups.create(layout(world, ep=ep))
        handle = patch_model(model, DEDUP, groups)
        mesh, experts = DeviceMesh.from_group(groups.dp, "cpu"), set(handle.expert_parameters.values())
        for block in model.blocks:
            fully_shard(block, mesh=mesh, ignored_params=experts)
        fully_shard(model, mesh=mesh, ignored_params=experts)
        dense = [p for p in model.parameters() if p not in experts]
        assert all(isinstance(p, DTensor) for p in dense) and not any(isinstance(p, DTensor) for p in experts)
        settings = {"lr": LR, "weight_decay": 0.0}
        if shard:
            optimizer: torch.optim.Optimizer = shard_optimizer(handle, torch.optim.AdamW, **settings)
        else:  # torch's foreach takes no mixture of plain and sharded tensors
            optimizer = torch.optim.AdamW([{"params": dense}, {"params": list(experts)}], foreach=False, **settings)
        handle.attach(optimizer)

        def step_of(ids, model=model, optimizer=optimizer, handle=handle):
            optimizer.zero_grad()
            loss = model(ids, ids).loss
            loss.backward()
            norm = handle.clip_grad_norm_(CLIP)
            optimizer.step()
            return loss.item(), norm.item()

        train_loop(rank, world, step_of, global_batches(world), model, handle, optimizer, unpatched)
        ordered = list(handle.expert_parameters.values())
        held = torch.tensor([sum(p in part.state for part in parts_of(optimizer)) for p in ordered])
        for part in parts_of(optimizer):
            assert all(isinstance(part.state[p]["exp_avg"], DTensor) for p in part.state if p not in experts)
        dist.all_reduce(held, group=groups.ep_dp)
        assert held.tolist() == [1 if shard else groups.layout.ep_dp] * len(experts), "not one share for each"
        handle.close()
        groups.destroy()


def test_accelerate(pool):
    """Catches accelerate's own clipping and saving, which see one rank's experts, with DDP and with FSDP2."""
    pool.run(accelerate_loop, 4)


def accelerate_loop(rank, world):
    from accelerate import Accelerator
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    for fsdp in (False, True):
        _clear_sharding_prop_cache()
        as_torchrun(rank, world)
        accelerator = Accelerator(cpu=True)
        if fsdp:  # accelerate offers it on GPUs alone
            plugin = FullyShardedDataParallelPlugin(
                fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["PlainBlock"]
            )
            accelerator.state.distributed_type, accelerator.state.fsdp_plugin = DistributedType.FSDP, plugin
        model, unpatched = build("plain"), build("plain")
        groups = ProcessGroups.create(layout(world, ep=2))
        handle = patch_model(model, DEDUP, groups)
        use_accelerator(handle, accelerator)
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0, foreach=False)
        wrapped, prepared = accelerator.prepare(model, optimizer)
        assert fsdp == any(isinstance(p, DTensor) for p in model.parameters())

        def step_of(ids, wrapped=wrapped, prepared=prepared, accelerator=accelerator):
            prepared.zero_grad()
            loss = wrapped(ids, ids).loss
            accelerator.backward(loss)
            norm = accelerator.clip_grad_norm_(wrapped.parameters(), CLIP)
            prepared.step()
            return loss.item(), norm.item()

        train_loop(rank, world, step_of, global_batches(world), model, handle, optimizer, unpatched)
        state = accelerator.get_state_dict(wrapped)
        assert (rank == 0) == bool(state)
        for name, tensor in state.items():
            assert tensor.shape == unpatched.state_dict()[name].shape, name
        with pytest.raises(RuntimeError, match="rank 0's experts and their optimizer state alone"):
            accelerator.save_state("nowhere")
        with pytest.raises(RuntimeError, match="a rank that has run out of batches is still needed"):
            accelerator.join_uneven_inputs([wrapped])
        with pytest.raises(ValueError, match="the patched model is clipped as a whole"):
            accelerator.clip_grad_norm_(list(handle.expert_parameters.values()), CLIP)
        handle.close()
        groups.destroy()
    accelerator.state.fsdp_plugin, accelerator.state.distributed_type = None, DistributedType.MULTI_CPU
    refusals(handle, accelerator)


def refusals(handle, accelerator):
    accelerator.state._mixed_precision = "fp16"
    with pytest.raises(ValueError, match="use 'bf16'"):
        use_accelerator(handle, accelerator)
    accelerator.state._mixed_precision = "no"


def test_ranks_with_different_numbers_of_batches(pool):
    """Catches a rank that leaves the loop while its experts are needed: the others wait for it for ever, or take its
    absence for zeros."""
    pool.run(uneven, 4)


def uneven(rank, world):
    counts = (1, 3, 2, 3)
    for config, ddp in ((DEDUP, True), (BLOCK, False)):
        model, unpatched = build("plain"), build("plain")
        groups = ProcessGroups.create(layout(world, ep=2))
        handle = patch_model(model, config, groups)
        wrapped = DistributedDataParallel(model) if ddp else model
        optimizers = [torch.optim.AdamW(m.parameters(), lr=LR) for m in (unpatched, model)]
        handle.attach(optimizers[1])
        mine = [tokens(step, rank) for step in range(counts[rank])]
        steps = 0
        for step, (ids, weight) in enumerate(even_batches(mine, groups)):
            batches = [[tokens(min(step, counts[r] - 1), r)] for r in range(world)]
            weights = {id(b[0]): float(step < counts[r]) for r, b in enumerate(batches)}

            def loss_of(m, x, weights=weights):
                out = m(x, x)
                return SimpleNamespace(loss=out.loss * weights[id(x)], logits=out.logits)

            expected = reference_step(unpatched, optimizers[0], batches, CLIP, loss_of)
            optimizers[1].zero_grad()
            (wrapped(ids, ids).loss * weight).backward()
            assert abs(handle.clip_grad_norm_(CLIP).item() - expected.norm) < 1e-9
            optimizers[1].step()
            same_parameters(model, handle, expected.parameters)
            steps += 1
        assert steps == max(counts)
        with pytest.raises(ValueError, match="some rank has no batch at all"):
            next(even_batches(mine if rank else [], groups))
        if ddp:
            with pytest.raises(RuntimeError, match="take the batches from even_batches instead"), wrapped.join():
                wrapped(mine[0], mine[0])
        handle.close()
        groups.destroy()


@pytest.mark.parametrize("dispatcher", ["rowwise", "block"])
def test_a_rank_that_leaves_the_loop_early_ends_the_others_with_an_error(pool, dispatcher):
    """Catches a hang where a loop does without ``even_batches``."""
    pool.run(leave_early, 2, dispatcher)


def leave_early(rank, world, dispatcher):
    groups = ProcessGroups.create(layout(world, ep=2))
    handle = patch_model(build("plain"), replace(DEDUP, dispatcher=dispatcher, timeout_s=3.0), groups)
    ids = tokens(0, rank)
    store = dist.distributed_c10d._get_default_store()
    for step in range(1 + rank):
        with contextlib.nullcontext() if step == 0 else pytest.raises(RuntimeError, match=r"blocks\.0\.experts"):
            handle.model(ids, ids).loss.backward()
    if rank == 1:
        store.set("seen", "1")
    store.wait(["seen"])


def test_autocast_and_compiled_dense_layers(pool):
    """Catches rows that travel in the weights' dtype, products in it, and gradients of another dtype than the
    parameters'."""
    pool.run(autocast, 2)


def autocast(rank, world):
    ids = tokens(0, rank)
    for compiled in (False, True):
        model, unpatched = build("plain", torch.float32, layers=1), build("plain", torch.float32, layers=1)
        groups = ProcessGroups.create(layout(world, ep=2))
        handle = patch_model(model, DEDUP, groups)
        run = torch.compile(model, backend="aot_eager") if compiled else model
        with torch.autocast("cpu", torch.bfloat16):
            loss, expected = run(ids, ids).loss, unpatched(ids, ids).loss
        loss.backward()
        expected.backward()
        handle.sync_gradients()
        sent = handle.metrics().bytes_sent
        routes = int(handle.layers[0].asked[rank].sum())
        assert 0 < sent <= 2 * routes * 32 * 2 * 3, sent  # there and back, twice, and bfloat16: half of float32's
        assert abs(loss.item() - expected.item()) < 2e-2
        assert all(p.grad.dtype == p.dtype == torch.float32 for p in model.parameters())
        means = {name: p.grad.clone() for name, p in unpatched.named_parameters()}
        for grad in means.values():
            dist.all_reduce(grad, dist.ReduceOp.AVG if grad.is_cuda else dist.ReduceOp.SUM)
            grad /= world
        far = {n: difference(p.grad, own(n, means[n], handle)) for n, p in model.named_parameters()}
        assert max(far.values()) < 5e-2, far
        with pytest.raises(ValueError, match="outside autocast"):
            handle.layers[0].module(torch.zeros(1, 32, dtype=torch.bfloat16), torch.zeros(1, TOP_K).long(), None)
        handle.close()
        groups.destroy()
        torch.compiler.reset()


def test_generation_with_uneven_lengths(pool):
    """Catches a rank that stops generating while its experts are needed."""
    pool.run(generate, 2)


def generate(rank, world):
    model, unpatched = (build("olmoe", torch.float32, use_cache=True, output_router_logits=False) for _ in range(2))
    groups = ProcessGroups.create(layout(world, ep=2))
    handle = patch_model(model, DEDUP, groups)
    ids = tokens(0, rank, sequences=1 + rank, length=3 + 2 * rank)
    for one in (model, unpatched):
        one.eval()
    settings = {"max_new_tokens": 2 + 5 * rank, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(ids, **settings), unpatched.generate(ids, **settings))
    handle.close()
    groups.destroy()


def test_checkpointing_keeps_the_routes():
    """Catches a recomputation that rounds otherwise and sends tokens to other experts than the forward did."""
    for keeps in (True, False):
        model = build("olmoe")
        handle = patch_model(model, LOCAL)
        settings: dict[str, Any] = {"use_reentrant": False}
        if not keeps:  # somebody else's contexts are left alone, and then the routes differ
            settings["context_fn"] = lambda: (contextlib.nullcontext(), contextlib.nullcontext())
        model.activation_checkpointing_enable(settings)
        routes: list[torch.Tensor] = []
        for block in model.model.layers:
            block.mlp.gate.register_forward_pre_hook(noise_in_backward)
            block.mlp.experts.register_forward_pre_hook(lambda _, args, seen=routes: seen.append(args[1].clone()))
        ids = tokens(0, 0, 8)
        model(input_ids=ids, labels=ids).loss.backward()
        forward, again = routes[:2], routes[:1:-1]
        assert len(routes) == 4
        assert all(torch.equal(a, b) for a, b in zip(forward, again, strict=True)) == keeps
        handle.close()


def noise_in_backward(module: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...] | None:
    if torch._C._current_graph_task_id() == -1:
        return None
    return (args[0] + 0.3 * torch.randn_like(args[0]), *args[1:])


def test_a_forward_that_overflows_runs_again(pool):
    """Catches a microbatch trained without the routes that did not fit, and one that only the ranks repeat that had no
    room."""
    assert pool.run(overflowing, 2) == [(2, [0]), (2, [0, 24])]


def overflowing(rank, world):
    grown = [0]

    def check():
        if rank == 1 and len(grown) == 1:
            raise RouteOverflow("too small", 24)

    small = SimpleNamespace(can_overflow=True, device=torch.device("cpu"), check=check, regrow=grown.append)
    calls = []

    class Plain:
        def compute_loss(self, model, inputs, return_outputs=False):
            calls.append(inputs.pop("labels"))
            return torch.zeros(())

    class Trainer(ExpertParallelMixin, Plain):
        def __init__(self):
            self.handle = SimpleNamespace(dispatchers=[small])

    Trainer().compute_loss(nn.Identity(), {"labels": 1}, return_outputs=False)
    return len(calls), grown
