"""All ranks' inputs of one step and what each rank must get, made by every rank alike from one seed."""

from __future__ import annotations

import torch
from torch import Tensor

from ep_plugin.config import CapacityConfig
from ep_plugin.kernels.put import put_rows_torch, put_values_torch
from ep_plugin.kernels.reduce import get_reduce_torch
from ep_plugin.routing import RouteMap, build_route_map, count_routes

E, K = 16, 4


class Step:
    """All ranks' inputs of one step and what each rank must get."""

    def __init__(
        self,
        seed: int,
        world: int,
        device: torch.device,
        *,
        max_tokens: int,
        hidden: int,
        dtype: torch.dtype,
        capacity: CapacityConfig,
        experts: int = E,
        top_k: int = K,
        kind: str = "uniform",
    ) -> None:
        g = torch.Generator(device=device).manual_seed(seed)
        cpu = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(0, max_tokens + 1, (world,), generator=cpu).tolist()
        self.xs, self.idxs, self.ws, self.grads = [], [], [], []
        for t in self.tokens:
            self.xs.append(torch.randn(t, hidden, generator=g, device=device).to(dtype))
            self.grads.append(torch.randn(t, hidden, generator=g, device=device).to(dtype))
            self.ws.append(torch.rand(t, top_k, generator=g, device=device))
            if kind == "one rank":
                idx = torch.randint(0, experts // world, (t, top_k), generator=g, device=device)
            elif kind == "repeats":
                idx = torch.randint(-1, experts, (t, top_k), generator=g, device=device)
            else:
                idx = torch.rand(t, experts, generator=g, device=device).topk(top_k, 1).indices
            self.idxs.append(idx)
        counts = torch.stack([count_routes(i, experts) for i in self.idxs])
        tokens = torch.tensor(self.tokens, device=device)
        self.maps: list[RouteMap] = [
            build_route_map(i, counts, tokens, rank=r, capacity=capacity) for r, i in enumerate(self.idxs)
        ]
        self.num_rows = [int(m.offsets[-1]) for m in self.maps]
        self.rows = [torch.zeros(n, hidden, device=device, dtype=dtype) for n in self.num_rows]
        self.row_weights = [torch.zeros(n, device=device) for n in self.num_rows]
        for m, x, w in zip(self.maps, self.xs, self.ws, strict=True):
            put_rows_torch(x, self.rows, m.dest_rank, m.dest_row)
            put_values_torch(w, self.row_weights, m.dest_rank, m.dest_row)

    def combined(self, rank: int, ys: list[Tensor], weighted: bool) -> Tensor:
        m = self.maps[rank]
        return get_reduce_torch(ys, m.dest_rank, m.dest_row, self.ws[rank] if weighted else None)
