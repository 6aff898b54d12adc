"""Join the job, run one benchmark, leave."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..job import join
from . import dispatch, fan_out, layer, mxfp8, step, tune, waves
from .plots import plot_phases

COMMANDS = {
    "dispatch": dispatch.run,
    "fan-out": fan_out.run,
    "layer": layer.run,
    "mxfp8": mxfp8.run,
    "step": step.run,
    "tune": tune.run,
    "waves": waves.run,
}


def run(args: argparse.Namespace) -> dict[str, Any] | None:
    """Under torchrun: the figures on rank 0, None elsewhere."""
    device = join(args.device)
    if device.type == "cpu":
        torch.set_num_threads(1)
    result = COMMANDS[args.command](args, device)
    rank = dist.get_rank()
    if args.command in ("dispatch", "layer") and args.plot is not None and rank == 0:
        plot_phases(dispatch.side_by_side(result), Path(args.plot))
    dist.barrier()
    dist.destroy_process_group()
    return result if rank == 0 else None
