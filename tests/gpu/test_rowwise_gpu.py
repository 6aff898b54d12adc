"""Rowwise on GPUs against the torch references, bit for bit, and against the oracle in gradients.

Every rank makes all ranks' inputs from one seed, so it can compute what it must hold without communication.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from ep_plugin.config import CapacityConfig, EPConfig, LaunchConfig
from ep_plugin.dispatch import build_dispatcher
from ep_plugin.heap import open_heap
from ep_plugin.heap.base import Heap
from ep_plugin.kernels.put import put_rows_torch, put_values_torch
from ep_plugin.kernels.reduce import get_reduce_torch
from ep_plugin.routing import RouteMap, build_route_map, count_routes

E, K = 16, 4
SETS = int(os.environ.get("EP_PLUGIN_TEST_SETS", "12"))


@pytest.fixture(scope="module", params=["torch", "nvshmem"])
def heap(request: pytest.FixtureRequest, ranks: tuple[int, int, torch.device]) -> Iterator[Heap]:
    if request.param == "nvshmem":
        pytest.importorskip("nvshmem.core")
    heap = open_heap(request.param, None, ranks[2], 30.0)
    yield heap
    heap.close()


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


def check_maps(step: Step, state: object, rank: int) -> None:
    mine, want = state.map, step.maps[rank]  # type: ignore[attr-defined]
    for name in ("dest_rank", "dest_row", "accepted", "counts", "tokens", "offsets"):
        assert torch.equal(getattr(mine, name), getattr(want, name)), name


CAPACITIES = [
    CapacityConfig("dropless", 4.0),
    CapacityConfig("rank", 0.7),
    CapacityConfig("source", 0.8),
    CapacityConfig("expert", 0.9),
]


@pytest.mark.parametrize("form", ["dedup", "route"])
@pytest.mark.parametrize("weight_at", ["hidden", "output", "source"])
def test_movements_equal_the_references_bit_for_bit(
    heap: Heap, ranks: tuple[int, int, torch.device], form: str, weight_at: str
) -> None:
    """A row that is lost, doubled, misplaced or read before it has arrived, in any of Table 8's four movements."""
    if form == "dedup" and weight_at == "source":
        pytest.skip("excluded by config")
    rank, world, device = ranks
    for hidden, dtype in ((8, torch.bfloat16), (264, torch.bfloat16), (1000, torch.float32), (4096, torch.bfloat16)):
        for capacity in CAPACITIES:
            config = EPConfig(
                form=form,
                weight_at=weight_at,
                heap=heap.name,
                capacity=capacity,
                max_tokens=96,
                diagnostic_fill="nan",
                timeout_s=30,
                launch=LaunchConfig(chunks=3, early=True),
            )
            dispatcher = build_dispatcher(
                config, num_experts=E, top_k=K, hidden_size=hidden, dtype=dtype, device=device, heap=heap
            )
            for seed, kind in itertools.product(range(SETS), ("uniform", "repeats", "one rank")):
                step = Step(
                    seed, world, device, max_tokens=96, hidden=hidden, dtype=dtype, capacity=capacity, kind=kind
                )
                x = step.xs[rank].clone().requires_grad_()
                w = step.ws[rank].clone().requires_grad_()
                state = dispatcher.plan(step.idxs[rank], layer=f"{kind}{seed}", x=x if seed % 2 else None)
                check_maps(step, state, rank)
                d = dispatcher.dispatch(state, x, w)
                n = step.num_rows[rank]
                assert torch.equal(d.rows[:n], step.rows[rank]), (hidden, capacity, seed, kind)
                assert torch.equal(d.weights[:n], step.row_weights[rank])
                y = d.rows * 0.5
                ys = [r * 0.5 for r in step.rows]
                weights = {"output": d.weights, "source": w}.get(weight_at)
                out = dispatcher.combine(state, y, weights)
                assert torch.equal(out, step.combined(rank, ys, weight_at != "hidden")), (hidden, capacity, seed, kind)
                (out.float() * step.grads[rank].float()).sum().backward()
                grad_rows = [torch.zeros_like(r) for r in step.rows]
                for m, g, ww in zip(step.maps, step.grads, step.ws, strict=True):
                    put_rows_torch(g, grad_rows, m.dest_rank, m.dest_row, ww if weight_at == "source" else None)
                if weight_at == "output":
                    grad_rows = [
                        (g.float() * ww.unsqueeze(1)).to(dtype)
                        for g, ww in zip(grad_rows, step.row_weights, strict=True)
                    ]
                m = step.maps[rank]
                want = get_reduce_torch([g * 0.5 for g in grad_rows], m.dest_rank, m.dest_row)
                assert torch.equal(x.grad, want), (hidden, capacity, seed, kind)
            dispatcher.check()
            dispatcher.close()
