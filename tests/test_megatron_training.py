"""Megatron models trained with our dispatchers against the same models with Megatron's alltoall: pipelines, interleaved
pipelines, sequence and context parallelism, accumulation, recomputation, checkpoints.

Every test runs on the installed megatron-core and on the newest supported one.
"""

from __future__ import annotations

import multiprocessing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ep_plugin.adapters.megatron_names import by_global_name
from ep_plugin.config import EPConfig
from tests import megatron_models as mm

pytestmark = mm.marks
run = mm.run

BLOCK = (EPConfig(dispatcher="block"), "megatron")
DEDUP = (EPConfig(), "megatron")
ROUTE = (EPConfig(form="route"), "megatron")
PLUGIN = (EPConfig(), "plugin")
PLUGIN_ROUTE = (EPConfig(form="route"), "plugin")


@dataclass(frozen=True)
class Case:
    """Parallel ``sizes``, TransformerConfig ``settings``, the ways to compare, steps and microbatches of a step."""

    sizes: dict[str, int]
    ways: tuple[tuple[EPConfig, str], ...] = (DEDUP,)
    settings: dict[str, Any] = field(default_factory=dict)
    steps: int = 2
    microbatches: int = 2


AUX = dict(moe_router_load_balancing_type="aux_loss", moe_aux_loss_coeff=0.05)
SHARED = dict(moe_shared_expert_intermediate_size=16)
CASES_2 = {
    "accumulation": Case(dict(ep=2), (BLOCK, DEDUP, ROUTE, PLUGIN), {**AUX, **SHARED}, steps=4, microbatches=3),
    "full recompute": Case(
        dict(ep=2),
        (DEDUP, ROUTE, PLUGIN),
        dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=2),
    ),
    "moe recompute": Case(
        dict(ep=2), (DEDUP, PLUGIN_ROUTE), dict(recompute_granularity="selective", recompute_modules=["moe"])
    ),
    "sequence parallel": Case(dict(tp=2, ep=2, etp=1), (BLOCK, DEDUP, PLUGIN), AUX),
    "expert tensor parallel": Case(dict(tp=2, ep=1, etp=2), (BLOCK, ROUTE)),
    "context parallel": Case(dict(cp=2, ep=2), (DEDUP, PLUGIN_ROUTE)),
}
PIPELINE = dict(num_layers=4)
CASES_4 = {
    "pipeline": Case(dict(pp=2, ep=2), (BLOCK, DEDUP, PLUGIN_ROUTE), PIPELINE, microbatches=4),
    "interleaved": Case(dict(pp=2, ep=2, vpp=2), (ROUTE, PLUGIN), PIPELINE, microbatches=4),
    "expert tensor and expert parallel": Case(dict(tp=2, ep=2, etp=2), (DEDUP,)),
    "the same, padded to capacity": Case(
        dict(tp=2, ep=2, etp=2), (ROUTE,), dict(moe_expert_capacity_factor=0.7, moe_pad_expert_input_to_capacity=True)
    ),
    "folded over tensor and context": Case(dict(tp=2, cp=2, ep=4, etp=1), (DEDUP, PLUGIN_ROUTE), AUX),
}


def train(case: Case, cfg: Any, models: list[Any]) -> dict[str, Tensor]:
    """Losses, and every gradient and parameter, step by step."""
    from megatron.core import parallel_state as ps

    replica = ps.get_data_parallel_rank()
    seen: dict[str, Tensor] = {}
    parameters = [p for model in models for p in model.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=3e-3)
    for step in range(case.steps):
        optimizer.zero_grad()
        batches = [mm.tokens(100 * step + 10 * replica + i) for i in range(case.microbatches)]
        seen[f"loss {step}"] = torch.tensor(mm.run_step(cfg, models, batches))
        for chunk, model in enumerate(models):
            mm.reduce_gradients(model)
            seen |= {f"{name} of chunk {chunk}, step {step}": grad for name, grad in mm.gradients(model).items()}
        optimizer.step()
    seen |= {f"parameter {i}": p.detach().clone() for i, p in enumerate(parameters)}
    return seen


def compare(rank: int, world: int, cases: dict[str, Case]) -> dict[str, tuple[float, Any]]:
    """The difference of every case and way, and our dispatchers' counters."""
    from ep_plugin.adapters.megatron import use_dispatcher
    from ep_plugin.adapters.megatron_topology import megatron_layout

    found = {}
    for name, case in cases.items():
        with mm.parallel(**case.sizes):
            assert megatron_layout().world_size == world  # which compares every group with ours
            cfg = mm.config(case.sizes, **case.settings)
            theirs = train(case, cfg, mm.chunks(cfg))
            for ep, experts in case.ways:
                models = mm.chunks(cfg)
                handle = use_dispatcher(models, ep, experts=experts)
                gap = mm.difference(train(case, cfg, models), theirs)
                found[f"{name}, {ep.dispatcher} {ep.form}, {experts} experts"] = gap, handle.stats()
                handle.close()
    return found


@pytest.mark.parametrize("world, cases", [(2, CASES_2), (4, CASES_4)], ids=["two ranks", "four ranks"])
def test_models_train_as_with_megatrons_dispatcher(run: mm.Run, world: int, cases: dict[str, Case]) -> None:
    """A state that one microbatch takes from another, leases that end early, gradients of a recomputed or accumulated
    forward, a group that is not Megatron's."""
    for found in run(compare, world, cases):
        worse = {name: gap for name, (gap, _) in found.items() if gap > 1e-4}
        assert not worse, worse
        for name, (_, counters) in found.items():
            for pool in counters:
                assert pool.get("slots_in_use", 0) == 0, name
                if "pipeline, rowwise route" in name or "interleaved, rowwise" in name:
                    assert pool["slots"] == pool["slots_peak"], (name, pool)  # the schedule's number, not one more


def one_step(sizes: dict[str, int], ep: EPConfig | None, batches: list[Tensor], **settings: Any) -> dict[str, Tensor]:
    """Losses of the global batch and gradients by global names, with Megatron's dispatcher (``ep`` None) or ours."""
    from megatron.core import parallel_state as ps

    from ep_plugin.adapters.megatron import use_dispatcher

    with mm.parallel(**sizes):
        cfg = mm.config(sizes, **settings)
        models = mm.chunks(cfg)
        handle = None if ep is None else use_dispatcher(models, ep)
        losses = torch.tensor(mm.run_step(cfg, models, batches))
        if losses.numel():
            replicas = ps.get_data_parallel_group(with_context_parallel=True)
            dist.all_reduce(losses, group=replicas)
            losses /= replicas.size()
        seen = {f"loss of microbatch {i}": loss for i, loss in enumerate(losses)}
        for model in models:
            mm.reduce_gradients(model)
            seen |= by_global_name(model, mm.gradients(model))
        if handle is not None:
            handle.close()
        return seen


def whole_against_parts(rank: int, world: int) -> dict[str, float]:
    """CP2·EP2 and PP2·EP2 with our dispatchers against one rank with everything."""
    batches = [mm.tokens(i, batch=4) for i in range(3)]
    halves = [batch[2 * (rank % 2) : 2 * (rank % 2) + 2] for batch in batches]  # EP folds over DP under PP2·EP2
    found = {}
    for name, sizes, mine, settings in (
        ("cp2 ep2", dict(cp=2, ep=2), batches, AUX),
        ("pp2 ep2", dict(pp=2, ep=2), halves, {}),
    ):
        whole = one_step({}, None, batches, **settings)
        parts = one_step(sizes, EPConfig(), mine, **settings)
        found[name] = mm.difference(parts, {key: whole[key] for key in parts})
    return found


def test_a_model_in_parts_has_the_gradients_of_the_whole(run: mm.Run) -> None:
    """Gradients scaled by a wrong group size, or rows exchanged in a wrong group: both sides of a comparison of two
    dispatchers would have it."""
    for found in run(whole_against_parts, 4):
        assert found.keys() == {"cp2 ep2", "pp2 ep2"}
        assert max(found.values()) < 1e-4, found


def saved_and_loaded(rank: int, world: int, folder: str) -> dict[str, bool]:
    """Whether Megatron's distributed checkpoint of a model with our dispatcher and experts at EP2 gives the same values
    at EP1 and EP4 without the plugin, and whether its training goes on from what Megatron's own saved."""
    from megatron.core import dist_checkpointing

    multiprocessing.current_process()._config["daemon"] = False  # Megatron's writer starts processes of its own
    from ep_plugin.adapters.megatron import use_dispatcher

    def named(model: Any) -> dict[str, Tensor]:
        return by_global_name(model, {name: p.detach().clone() for name, p in model.named_parameters()})

    with mm.parallel(ep=2):
        cfg = mm.config(dict(ep=2))
        models = mm.chunks(cfg)
        handle = use_dispatcher(models, EPConfig(), experts="plugin")
        train(Case(dict(ep=2), steps=1), cfg, models)
        dist_checkpointing.save(models[0].sharded_state_dict(), folder)
        every: list[Any] = [None] * world
        dist.all_gather_object(every, named(models[0]))
        whole = {name: value for part in every for name, value in part.items()}
        handle.close()
    found = {"ep2 has all experts": len([n for n in whole if "linear_fc1.weight" in n]) == 2 * mm.EXPERTS}
    for ep in (1, 4):
        with mm.parallel(ep=ep):
            (model,) = mm.chunks(mm.config(dict(ep=ep)))
            with torch.no_grad():
                for p in model.parameters():
                    p.zero_()
            loaded = dist_checkpointing.load(model.sharded_state_dict(), folder)
            model.load_state_dict(loaded)
            mine = named(model)
            found[f"ep{ep}"] = all(torch.equal(value, whole[name]) for name, value in mine.items())
    return found


def test_distributed_checkpoints_do_not_depend_on_the_plugin(run: mm.Run, tmp_path: Any) -> None:
    """Experts stored under other keys, or whose laid-out weights are not what is saved."""
    for found in run(saved_and_loaded, 4, str(tmp_path)):
        assert all(found.values()), found


def megatrons_trainer(rank: int, world: int) -> dict[str, list[Any]]:
    """Losses and gradient norms with Megatron's own gradient buffers, finalising and optimizers, by dispatcher and
    optimizer."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    from ep_plugin.adapters.megatron import use_dispatcher

    found: dict[str, list[Any]] = {}
    sizes = dict(ep=2, tp=2, etp=1)
    with mm.parallel(**sizes):
        for name, ep, experts, distributed in (
            ("alltoall", None, "megatron", False),
            ("alltoall, distributed", None, "megatron", True),
            ("rowwise", EPConfig(), "megatron", True),
            ("our experts", EPConfig(form="route"), "plugin", False),
            ("our experts, distributed", EPConfig(), "plugin", True),
        ):
            cfg = mm.config(sizes, finalize_model_grads_func=finalize_model_grads, **AUX)
            (model,) = mm.chunks(cfg)
            handle = None if ep is None else use_dispatcher(model, ep, experts=experts)
            settings = DistributedDataParallelConfig(use_distributed_optimizer=distributed, grad_reduce_in_fp32=True)
            wrapped = [DistributedDataParallel(config=cfg, ddp_config=settings, module=model)]
            adam = OptimizerConfig(optimizer="adam", lr=3e-3, clip_grad=1.0, use_distributed_optimizer=distributed)
            optimizer = get_megatron_optimizer(adam, wrapped)
            seen = []
            for step in range(3):
                wrapped[0].zero_grad_buffer()
                optimizer.zero_grad()
                losses = mm.run_step(cfg, wrapped, [mm.tokens(10 * step + rank // 2 + i) for i in range(2)])
                _, norm, _ = optimizer.step()
                seen += [*losses, norm]
            found[name] = seen
            if experts == "plugin":
                found[f"{name} descending"] = [model.decoder.layers[0].mlp.token_dispatcher.descending()]
            if handle is not None:
                handle.close()
    return found


def test_megatrons_buffers_and_optimizers_work_with_ours(run: mm.Run) -> None:
    """Weights that the distributed optimizer updates elsewhere than where our experts read them; gradients that
    miss Megatron's buffers; a norm that counts experts twice."""
    for found in run(megatrons_trainer, 4):
        reference = found["alltoall"]
        for name in ("alltoall, distributed", "rowwise", "our experts", "our experts, distributed"):
            assert found[name] == pytest.approx(reference, rel=1e-4), name
        assert reference[0] != reference[3]
        assert found["our experts descending"] == [False] and found["our experts, distributed descending"] == [True]


RESUMED = {  # overrides of the run that goes on
    "as it was": ["topology.ep=2"],
    "other experts per rank": ["topology.ep=1"],
    "a pipeline, our experts": ["topology.ep=1", "topology.pp=2", "trainer.megatron.experts=plugin"],
    "Megatron alone, whole optimizer": ["topology.ep=1", "ep=none", "trainer.megatron.distributed_optimizer=false"],
}


def losses_of(rank: int, world: int, folder: str, name: str, *overrides: str) -> list[float]:
    """Losses of a run of ``trainer=megatron`` on this rank, of four steps unless told otherwise."""
    from ep_plugin.train.checks import check_settings
    from ep_plugin.train.compose import compose_launch
    from ep_plugin.train.loop import Place
    from ep_plugin.train.megatron import train_megatron
    from ep_plugin.train.text import read_corpus

    multiprocessing.current_process()._config["daemon"] = False
    small = ["steps=4", "checkpoint_every=2", "batch_size=4", "seq_len=16", "warmup=0", "log_every=100"]
    settings = ["experiment=megatron_tiny", "data.max_bytes=20000", *[f"trainer.{s}" for s in small], *overrides]
    config = compose_launch(settings).config
    layout = check_settings(config, world)
    place = Place(rank, torch.device("cpu"), Path(folder), None)
    return train_megatron(config, name, layout, read_corpus(config.data), place, keep_routes=False).losses


def resumed(rank: int, world: int, folder: str) -> dict[str, list[float]]:
    """Losses of the last two of four steps: of a run in one go at EP2, and of runs that go on after two of them."""
    found = {"in one go": losses_of(rank, world, folder, "whole", "topology.ep=2")[2:]}
    at = f"{folder}/checkpoints/whole/step_000002"
    for name, overrides in RESUMED.items():
        again = ("trainer.checkpoint=false", f"trainer.resume={at}", *overrides)
        found[name] = losses_of(rank, world, folder, "more", *again)
    return found


def test_training_goes_on_from_a_checkpoint_at_other_degrees(run: mm.Run, tmp_path: Any) -> None:
    """A checkpoint without the optimizer's moments or step, or whose experts come back in another order."""
    for found in run(resumed, 2, str(tmp_path)):
        whole = found.pop("in one go")
        assert len(whole) == 2 and whole[0] != whole[1]
        for name, losses in found.items():
            assert losses == pytest.approx(whole, rel=1e-4), (name, losses, whole)


ROWS = 77


def overflowing(rank: int, world: int, folder: str, overflows: tuple[int, ...]) -> dict[str, Any]:
    """Losses of two stages of which the checks numbered ``overflows`` find an overflow in the first."""
    from ep_plugin.dispatch import RouteOverflow
    from ep_plugin.dispatch.rowwise import RowwiseDispatcher

    seen: dict[str, Any] = {"checks": 0, "grown": [], "held": []}

    def check(self: Any) -> None:
        seen["checks"] += 1
        if seen["checks"] - 1 in overflows and rank < 2:
            raise RouteOverflow("planted", ROWS)

    def regrow(self: Any, rows: int) -> None:
        seen["grown"].append(rows)
        seen["held"].append(self.stats()["slots_in_use"])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RowwiseDispatcher, "can_overflow", True)
        patch.setattr(RowwiseDispatcher, "check", check)
        patch.setattr(RowwiseDispatcher, "regrow", regrow)
        # The optimizer's own look comes once per step, between the trainer's.
        patch.setattr("ep_plugin.adapters.megatron_dispatcher.SharedDispatchers.check", lambda self: None)
        settings = ("topology.ep=2", "topology.pp=2", "trainer.steps=2", "trainer.checkpoint=false")
        losses = losses_of(rank, world, folder, "overflow", *settings, *BALANCED)
    return {"losses": losses, **seen}


# A router whose biases follow what it has counted: a step that is discarded must leave nothing behind there.
BALANCED = [
    f"+model.extra.{setting}" for setting in ("moe_router_enable_expert_bias=true", "moe_router_score_function=sigmoid")
]


def test_a_step_that_overflowed_is_run_again_on_all_stages(run: mm.Run, tmp_path: Any) -> None:
    """An update from a step whose rows were skipped, a stage that goes on by itself (it would hang), buffers replaced
    under tensors that still live in them, biases of routers moved twice."""
    plain = run(overflowing, 4, str(tmp_path), ())
    mended = run(overflowing, 4, str(tmp_path), (0, 2))
    for rank, (before, after) in enumerate(zip(plain, mended, strict=True)):
        assert before["checks"] == 2 and after["checks"] == 4
        assert after["losses"] == before["losses"]
        assert after["grown"] == ([ROWS, ROWS] if rank < 2 else []) and not any(after["held"])
