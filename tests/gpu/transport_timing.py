"""Times of one MoE layer's movements by both transports of rowwise, beside each other.

``torchrun --nproc-per-node 2 tests/gpu/transport_timing.py`` prints a table and writes ``transport_timing.json`` into
$OUT. Peer pointers are those of heap=torch, so that NVSHMEM's one world of a process is the other's.
"""

from __future__ import annotations

import datetime
import json
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
os.environ.setdefault("NVSHMEM_DISABLE_NVLS", "1")

import torch
import torch.distributed as dist

from ep_plugin.config import CapacityConfig, EPConfig
from ep_plugin.dispatch import build_dispatcher
from ep_plugin.heap import open_heap

E, K, D = 64, 8, 4096
TOKENS = (128, 2048, 8192)
ROUNDS = 10


def measure(dispatcher: Any, num_tokens: int, device: torch.device) -> dict[str, float]:
    """Milliseconds of each phase, the median of ``ROUNDS``, and the GB/s of the rows dispatch sends to other ranks."""
    g = torch.Generator(device=device).manual_seed(dist.get_rank())
    x = torch.randn(num_tokens, D, generator=g, device=device).bfloat16().requires_grad_()
    idx = torch.rand(num_tokens, E, generator=g, device=device).topk(K, 1).indices
    weights = torch.rand(num_tokens, K, generator=g, device=device)
    grad = torch.randn(num_tokens, D, generator=g, device=device).bfloat16()
    names = ("plan", "dispatch", "combine", "backward")
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(ROUNDS + 3):
        dist.barrier()
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(5)]
        marks[0].record()
        state = dispatcher.plan(idx, layer="layer")
        marks[1].record()
        d = dispatcher.dispatch(state, x, weights)
        marks[2].record()
        out = dispatcher.combine(state, d.rows)
        marks[3].record()
        out.backward(grad)
        marks[4].record()
        torch.cuda.synchronize()
        if turn >= 3:
            for i, name in enumerate(names):
                times[name].append(marks[i].elapsed_time(marks[i + 1]))
    dispatcher.check()
    found = {name: sorted(values)[len(values) // 2] for name, values in times.items()}
    rank, local = dist.get_rank(), E // dist.get_world_size()
    away = idx.div(local, rounding_mode="floor")
    if dispatcher.config.form == "dedup":
        rows = sum(int((away == p).any(1).sum()) for p in range(dist.get_world_size()) if p != rank)
    else:
        rows = int((away != rank).sum())
    found["dispatch GB/s"] = rows * D * 2 / found["dispatch"] / 1e6
    return found


def main() -> None:
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    device = torch.device("cuda", local)
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device, timeout=datetime.timedelta(seconds=60))
    heaps = {"peer": open_heap("torch", None, device, 30.0)}
    heaps["device"] = open_heap("nvshmem", None, device, 30.0, "device")
    results: dict[str, Any] = {}
    for form in ("dedup", "route"):
        for num_tokens in TOKENS:
            for transport, heap in heaps.items():
                config = EPConfig(
                    form=form, heap=heap.name, transport=transport, max_tokens=num_tokens, timeout_s=30,
                    capacity=CapacityConfig("dropless", 1.5),
                )  # fmt: skip
                dispatcher = build_dispatcher(
                    config, num_experts=E, top_k=K, hidden_size=D, dtype=torch.bfloat16, device=device, heap=heap
                )
                found = measure(dispatcher, num_tokens, device)
                dispatcher.close()
                results[f"{form} T={num_tokens} {transport}"] = found
                if dist.get_rank() == 0:
                    text = "  ".join(f"{name} {value:8.3f}" for name, value in found.items())
                    print(f"{form:6} T={num_tokens:5} {transport:6} (ms) {text}", flush=True)
    if dist.get_rank() == 0:
        folder = Path(os.environ.get("OUT", "."))
        (folder / "transport_timing.json").write_text(json.dumps(results, indent=1))
    for heap in heaps.values():
        heap.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
