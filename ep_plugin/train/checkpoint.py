"""Checkpoints: the whole model as transformers saves it, and each rank's optimizer state beside it.

<folder>/config.json, model.safetensors    read by ``from_pretrained``, whatever the parallel degrees were
<folder>/trainer.json                      the step and the degrees that the optimizer states belong to
<folder>/optimizer_rank<r>.pt              the optimizer state of global rank r
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

HEADER = "trainer.json"


@dataclass(frozen=True)
class Header:
    """What a checkpoint says about itself: steps done, and what must be the same to go on. Only ``trainer`` must be
    for Megatron's checkpoints, which are cut in parts anew for other degrees."""

    step: int
    world_size: int
    ep: int
    patch_experts: bool
    trainer: str = "transformers"


def read_header(folder: str) -> Header:
    """The header of a checkpoint; ``ValueError`` where ``folder`` is not one. Needs no torch."""
    path = Path(folder, HEADER)
    if not path.is_file():
        found = sorted(str(p.parent) for p in Path(folder).glob(f"**/{HEADER}"))
        hint = f"; the last one in there is {found[-1]}" if found else ""
        raise ValueError(f"trainer.resume={folder!r} is not a checkpoint: it holds no {HEADER}{hint}")
    return Header(**json.loads(path.read_text()))


def check_resume(folder: str, now: Header) -> None:
    """``ValueError`` where ``folder`` has reached ``now.step``, or was written by another trainer, or its optimizer
    states for other degrees than ``now``'s.
    """
    saved = read_header(folder)
    if saved.step >= now.step:
        raise ValueError(
            f"trainer.resume={folder!r} has done {saved.step} steps already; trainer.steps={now.step} must be more"
        )
    for name in ("trainer",) if now.trainer == "megatron" else ("trainer", "world_size", "ep", "patch_experts"):
        was, is_now = getattr(saved, name), getattr(now, name)
        if was != is_now:
            raise ValueError(f"trainer.resume={folder!r} was written with {name}={was}; this run has {name}={is_now}")


def save(folder: Path, parallel: Replicated, optimizer: torch.optim.Optimizer, header: Header, rank: int) -> None:
    """Write a checkpoint; collective over WORLD. It appears under ``folder`` whole or not at all."""
    import torch
    import torch.distributed as dist

    state = parallel.full_state_dict()
    unfinished = folder.with_name(folder.name + ".unfinished")
    unfinished.mkdir(parents=True, exist_ok=True)
    if rank == 0:
        model: Any = parallel.model
        model.save_pretrained(unfinished, state_dict=state)
        (unfinished / HEADER).write_text(json.dumps(asdict(header)) + "\n")
    torch.save(optimizer.state_dict(), unfinished / f"optimizer_rank{rank}.pt")
    dist.barrier()
    if rank == 0:
        os.rename(unfinished, folder)
    dist.barrier()


def load_model(folder: str, *, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """The whole model of a checkpoint on ``device``."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device)


def load_optimizer(folder: str, optimizer: torch.optim.Optimizer, rank: int) -> None:
    """Put rank ``rank``'s optimizer state back."""
    import torch

    optimizer.load_state_dict(torch.load(Path(folder, f"optimizer_rank{rank}.pt"), weights_only=True))
