"""How a process ends that uses DeepEP: ``torchrun --nproc-per-node 2 -m tests.gpu.deepep_exit close|leave|raise``.

``close``: closes its dispatcher; ends with 0. ``leave``: does not; ends with 0. ``raise``: rank 1 raises between
forward and backward; torchrun ends with 1, soon and without a core dump."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist

from ep_plugin.config import EPConfig
from ep_plugin.dispatch import build_dispatcher
from ep_plugin.layer import ForeignExperts, moe_step


def main(how: str) -> None:
    rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    config = EPConfig(dispatcher="deepep", max_tokens=128, timeout_s=20.0)
    shape = dict(num_experts=16, top_k=4, hidden_size=256, dtype=torch.bfloat16, device=device)
    dispatcher = build_dispatcher(config, **shape)  # type: ignore[arg-type]
    x = torch.randn(64, 256, device=device, dtype=torch.bfloat16, requires_grad=True)
    idx = torch.rand(64, 16, device=device).topk(4, 1).indices
    weight = torch.rand(64, 4, device=device, requires_grad=True)
    experts = ForeignExperts(lambda rows, e, w: rows)
    out = moe_step(dispatcher, x, idx, weight, experts, layer="layers.0")
    if how == "raise" and rank == 1:
        raise ValueError("a fault of the user's, between forward and backward")
    out.sum().backward()
    dispatcher.check()
    if how == "close":
        dispatcher.close()
    dist.destroy_process_group()
    print(f"rank {rank}: {how} is done", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
