"""Join the job that torchrun started: this rank's device, and the process group.

``EP_PLUGIN_SHARE_GPUS=1``: ranks share the GPUs of their host in turn, for trying out groups larger than the machine.
Their kernels take turns, so nothing is fast, and of the heaps only ``torch`` allows it.
"""

from __future__ import annotations

import datetime
import os

import torch
import torch.distributed as dist

SHARE_GPUS = "EP_PLUGIN_SHARE_GPUS"


def shares_gpus() -> bool:
    """Whether several ranks may have the same GPU."""
    return os.environ.get(SHARE_GPUS, "0") not in ("", "0")


def gpu_of(local_rank: int) -> torch.device:
    """The GPU of a rank of this host; ``ValueError`` on all of its ranks where there are not enough."""
    count = torch.cuda.device_count()
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", local_rank + 1))
    if not count:
        raise ValueError("torch sees no CUDA device on this host")
    if shares_gpus():
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"  # torch's heap refuses it without
        return torch.device("cuda", local_rank % count)
    if ranks > count:
        raise ValueError(
            f"{ranks} processes on this host, where torch sees {count} GPU{'s' * (count > 1)}: start at most {count},"
            f" or set {SHARE_GPUS}=1 to try things out with several ranks on one GPU"
        )
    return torch.device("cuda", local_rank)


def gpu_backend() -> str:
    """The backend for GPU tensors. NCCL takes one rank per GPU."""
    return "gloo" if shares_gpus() else "nccl"


def join(device_type: str, *, timeout: datetime.timedelta | None = None) -> torch.device:
    """Initialise ``torch.distributed`` from torchrun's environment and give this rank's device, ``cpu`` or ``cuda``."""
    if device_type == "cpu":
        dist.init_process_group("gloo", timeout=timeout)
        return torch.device("cpu")
    device = gpu_of(int(os.environ.get("LOCAL_RANK", 0)))
    torch.cuda.set_device(device)
    backend = gpu_backend()
    bound = device if backend == "nccl" else None
    dist.init_process_group(f"cpu:gloo,cuda:{backend}", device_id=bound, timeout=timeout)
    return device
