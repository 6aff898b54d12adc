"""Megatron's distributed checkpoint of a model and its optimizer, which goes on at other parallel degrees, with the
plugin or without.

<folder>/metadata.json, .metadata, common.pt, __<rank>_<n>.distcp    as ``megatron.core.dist_checkpointing`` writes them
<folder>/trainer.json                                                the step that it has reached

Of the optimizer it holds the moments and main parameters, each in the shape and under the name of its model parameter.
Megatron's own form also holds which optimizer had which parameters, and that changes with the expert parallel degree.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .checkpoint import HEADER, Header, read_header

RESHARDABLE = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}
State = dict[str, Any]


def save(folder: Path, models: Sequence[Any], optimizer: Any, header: Header, *, leads: bool) -> None:
    """Write a checkpoint of the DDP-wrapped ``models`` (a rank's pipeline chunks) and their ``optimizer``; collective
    over WORLD. It appears under ``folder`` whole or not at all."""
    from megatron.core import dist_checkpointing

    unfinished = folder.with_name(folder.name + ".unfinished")
    if leads:
        unfinished.mkdir(parents=True)
    dist.barrier()
    state = _model_state(models)
    parts = [_split(_sharded(part, state, loading=False))[0] for part in _parts(optimizer)]
    dist_checkpointing.save({**state, "optimizer": dict(enumerate(parts))}, str(unfinished))
    dist.barrier()
    if leads:
        (unfinished / HEADER).write_text(json.dumps(asdict(header)) + "\n")
        os.rename(unfinished, folder)
    dist.barrier()


def load(folder: str, models: Sequence[Any], optimizer: Any) -> int:
    """Put a checkpoint's values into ``models`` and ``optimizer``, which may be cut in other parts than those that were
    saved; gives the step that it has reached. Collective over WORLD."""
    from megatron.core import dist_checkpointing

    step, state = read_header(folder).step, _model_state(models)
    for part in _parts(optimizer):
        _allocate(part)
    halves = [_split(_sharded(part, state, loading=True)) for part in _parts(optimizer)]
    wanted = dict(enumerate(sharded for sharded, _ in halves))
    loaded = dist_checkpointing.load({**state, "optimizer": wanted}, folder)
    for name, model in zip(state, models, strict=True):
        model.module.load_state_dict(loaded[name])
    for i, (part, (_, rest)) in enumerate(zip(_parts(optimizer), halves, strict=True)):
        _put(part, loaded["optimizer"][i], rest, step)
    return step


def _model_state(models: Sequence[Any]) -> State:
    names = [f"model{i}" for i in range(len(models))] if len(models) > 1 else ["model"]
    return {name: model.module.sharded_state_dict() for name, model in zip(names, models, strict=True)}


def _parts(optimizer: Any) -> list[Any]:
    """Megatron's optimizers of dense and of expert parameters, without those that have none on this rank."""
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part for part in chained if not getattr(part, "is_stub_optimizer", False)]


def _sharded(part: Any, model_state: State, *, loading: bool) -> State:
    sharded: State = part.sharded_state_dict(dict(model_state), is_loading=loading, metadata=RESHARDABLE)
    return sharded


def _split(state: State) -> tuple[State, State]:
    """What of an optimizer's state is cut in parts, and the rest."""
    from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace
    from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject
    from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories

    sharded, rest = extract_sharded_tensors_and_factories(state)
    plain = dict_list_map_outplace(lambda x: x.unwrap() if isinstance(x, LocalNonpersistentObject) else x, rest)
    return sharded, plain


def _allocate(part: Any) -> None:
    """Give an optimizer the state that it has after a step; over torch's Adam, Megatron asks for it."""
    part.init_state_fn(part.optimizer, part.config)
    _set_step(part, 0)


def _put(part: Any, sharded: State, rest: State, step: int) -> None:
    """Put what was loaded into an optimizer: ``sharded`` from the checkpoint, ``rest`` its own."""
    from megatron.core.dist_checkpointing.dict_utils import merge

    if hasattr(part, "load_parameter_state_from_fully_reshardable"):  # the distributed one
        for state in part.optimizer.state.values():
            state.pop("step", None)  # it would look for that of torch's Adam in the checkpoint
        part.load_parameter_state_from_fully_reshardable(sharded["param_state"])
    else:
        state = merge(rest, sharded)
        if isinstance(part.optimizer, torch.optim.Adam):  # refuses moments without it
            for moments in state.get("optimizer", state)["state"].values():
                moments["step"] = torch.tensor(float(step))
        part.load_state_dict(state)
    _set_step(part, step)


def _set_step(part: Any, step: int) -> None:
    """Adam's count of steps: torch's keeps one tensor for each parameter, others a number for each group."""
    if isinstance(part.optimizer, torch.optim.Adam):
        for state in part.optimizer.state.values():
            state["step"] = torch.tensor(float(step))
    else:
        for group in part.optimizer.param_groups:
            group["step"] = step
