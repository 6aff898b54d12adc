"""Checkpoints: the whole model as transformers saves it, and the optimizer's state beside it.

<folder>/config.json, model.safetensors    read by ``from_pretrained``, whatever the parallel degrees were
<folder>/trainer.json                      the step, and the degrees, of which others may read it
<folder>/optimizer/                        torch's distributed checkpoint of the optimizer's state
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn

    from .parallel import Replicated

HEADER, OPTIMIZER = "trainer.json", "optimizer"


@dataclass(frozen=True)
class Header:
    """What a checkpoint says about itself: steps done, the degrees, which another run may change, and the trainer and
    the model's settings, which it may not (None: the trainer compares the model itself, or the checkpoint is old)."""

    step: int
    world_size: int
    ep: int
    patch_experts: bool
    trainer: str = "transformers"
    model: dict[str, Any] | None = None


def read_header(folder: str) -> Header:
    """The header of a checkpoint; ``ValueError`` where ``folder`` is not one. Needs no torch."""
    path = Path(folder, HEADER)
    if not path.is_file():
        found = sorted(str(p.parent) for p in Path(folder).glob(f"**/{HEADER}"))
        hint = f"; the last one in there is {found[-1]}" if found else ""
        raise ValueError(f"trainer.resume={folder!r} is not a checkpoint: it holds no {HEADER}{hint}")
    return Header(**json.loads(path.read_text()))


def check_resume(folder: str, now: Header) -> None:
    """``ValueError`` where ``folder`` has reached ``now.step``, or was written by another trainer or of another model.

    The model itself is then made from the checkpoint, so that other settings would have no effect.
    """
    saved = read_header(folder)
    if saved.step >= now.step:
        raise ValueError(
            f"trainer.resume={folder!r} has done {saved.step} steps already; trainer.steps={now.step} must be more"
        )
    if saved.trainer != now.trainer:
        raise ValueError(
            f"trainer.resume={folder!r} was written with trainer={saved.trainer}; this run has trainer={now.trainer}"
        )
    if saved.model is None or now.model is None:
        return
    names = [name for name, value in now.model.items() if saved.model.get(name, value) != value]
    if names:
        then, this = (" ".join(f"model.{n}={model[n]}" for n in names) for model in (saved.model, now.model))
        raise ValueError(
            f"trainer.resume={folder!r} was written with {then}, and this run has {this}: give the same model"
        )


def save(folder: Path, parallel: Replicated, optimizer: torch.optim.Optimizer, header: Header, rank: int) -> None:
    """Write a checkpoint; collective over WORLD. It appears under ``folder`` whole or not at all."""
    import torch.distributed as dist

    state = parallel.full_state_dict()
    unfinished = folder.with_name(folder.name + ".unfinished")
    unfinished.mkdir(parents=True, exist_ok=True)
    if rank == 0:
        model: Any = parallel.model
        model.save_pretrained(unfinished, state_dict=state)
        (unfinished / HEADER).write_text(json.dumps(asdict(header)) + "\n")
    dist.barrier()  # the folder is there
    parallel.training_state(optimizer).save(unfinished / OPTIMIZER)
    if rank == 0:
        os.rename(unfinished, folder)
    dist.barrier()


def load_model(folder: str, *, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """The whole model of a checkpoint on ``device``."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device)


def load_optimizer(folder: str, parallel: Replicated, optimizer: torch.optim.Optimizer) -> None:
    """Put the state of the parameters that this rank has back; collective over WORLD."""
    parallel.training_state(optimizer).load(Path(folder, OPTIMIZER))
