"""Join the job, run one benchmark, leave."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

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
    if args.device == "cuda":
        device = torch.device("cuda", dist.get_node_local_rank())
        torch.cuda.set_device(device)
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    else:
        device = torch.device("cpu")
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
    result = COMMANDS[args.command](args, device)
    rank = dist.get_rank()
    if args.command in ("dispatch", "layer") and args.plot is not None and rank == 0:
        plot_phases(dispatch.side_by_side(result), Path(args.plot))
    dist.barrier()
    dist.destroy_process_group()
    return result if rank == 0 else None
