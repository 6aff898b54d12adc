"""Both transports of rowwise beside each other on GPUs."""

from __future__ import annotations

import pytest
import torch

from ep_plugin.config import CapacityConfig, EPConfig, LaunchConfig
from ep_plugin.dispatch import build_dispatcher
from ep_plugin.heap import open_heap
from ep_plugin.heap.base import Heap, Phase
from ep_plugin.kernels.peers import Peers
from ep_plugin.layer import moe_step
from tests.gpu.step import Step

HEAPS = ("nvshmem device",)
Ranks = tuple[int, int, torch.device]
E, K, D, T = 16, 4, 2048, 1536


@pytest.mark.parametrize("form", ["dedup", "route"])
@pytest.mark.parametrize("weight_at", ["hidden", "output", "source"])
def test_a_layer_gives_the_same_bits_by_either_transport(heap: Heap, ranks: Ranks, form: str, weight_at: str) -> None:
    """A row, sum or scalar that NVSHMEM's put or get moves elsewhere, late or not at all, at a size at which transfers
    overlap."""
    if form == "dedup" and weight_at == "source":
        pytest.skip("excluded by config")
    rank, world, device = ranks
    other = open_heap("torch", None, device, 30.0)
    capacity = CapacityConfig("dropless", 2.0)
    layers = [
        build_dispatcher(
            EPConfig(
                heap=h.name, transport=transport, form=form, weight_at=weight_at, capacity=capacity, max_tokens=T,
                timeout_s=30, launch=LaunchConfig(chunks=2),
            ),
            num_experts=E, top_k=K, hidden_size=D, dtype=torch.bfloat16, device=device, heap=h,
        )
        for h, transport in ((heap, "device"), (other, "peer"))
    ]  # fmt: skip
    mlp = experts_of(rank, world, device)
    for seed in range(3):
        step = Step(seed, world, device, max_tokens=T, hidden=D, dtype=torch.bfloat16, capacity=capacity)
        found = []
        for layer in layers:
            x, w = step.xs[rank].clone().requires_grad_(), step.ws[rank].clone().requires_grad_()
            mlp.zero_grad()
            out = moe_step(layer, x, step.idxs[rank], w, mlp, layer="layer")
            out.backward(step.grads[rank])
            layer.check()
            grads = [p.grad.clone() for p in mlp.parameters() if p.grad is not None]
            found.append([out.detach(), x.grad, w.grad, *grads])
        for i, (a, b) in enumerate(zip(*found, strict=True)):
            assert torch.equal(a, b), (form, weight_at, seed, i)
    for layer in layers:
        layer.close()
    other.close()


def experts_of(rank: int, world: int, device: torch.device) -> torch.nn.Module:
    from ep_plugin.experts import GroupedMLP

    local = E // world
    return GroupedMLP(
        E, D, 256, first_expert=rank * local, num_local=local, seed=0, dtype=torch.bfloat16, device=device
    )


def test_no_table_holds_a_pointer_to_a_peer(heap: Heap, ranks: Ranks) -> None:
    """A kernel that reaches a peer by a pointer after all: there is none it could use."""
    rank, world, _ = ranks
    buffer = heap.alloc(4096, "rows")
    assert [bool(address) for address in buffer.ptrs.tolist()] == [r == rank for r in range(world)]
    assert set(heap.signals(0).base.tolist()) == {heap._control.ptrs[rank]}  # type: ignore[attr-defined]
    heap.free(buffer)


def test_rows_and_stripes_of_odd_sizes(heap: Heap, ranks: Ranks) -> None:
    """Widths that are no multiple of 16 bytes and stripes that end inside a piece."""
    from ep_plugin.kernels import nvshmem_move as library

    rank, world, device = ranks
    right, left = (rank + 1) % world, (rank - 1) % world
    for width, count in ((3, 50), (8, 7), (4099, 33)):
        local, there = heap.alloc(width * count * world, "local"), heap.alloc(width * count * world, "there")
        rows = local.view(rank, 0, (count, width), torch.uint8)
        rows.copy_(torch.arange(count * width, device=device).view(count, width) + 7 * rank)
        landed = there.view(rank, 0, (count, width), torch.uint8)
        heap.barrier(Phase("test"))
        ranks_of = torch.full((count,), right, dtype=torch.int32, device=device)
        order = torch.arange(count, dtype=torch.int32, device=device).flip(0)
        library.move_rows(rows, Peers(there.ptrs), rank, ranks_of, rows=order, num_rows=count)
        heap.barrier(Phase("test"))
        want = (torch.arange(count * width, device=device).view(count, width) + 7 * left).to(torch.uint8).flip(0)
        assert torch.equal(landed, want), (width, "put")
        library.move_rows(rows, Peers(there.ptrs), rank, ranks_of, rows=order, num_rows=count, get=True)
        library.quiet()
        assert torch.equal(rows, (torch.arange(count * width, device=device).view(count, width) + 7 * rank).byte())
        heap.barrier(Phase("test"))
        whole = local.view(rank, 0, (world, count * width), torch.uint8)
        whole.copy_(torch.arange(world, device=device).unsqueeze(1) + 10 * rank)
        library.move_stripes(whole, Peers(there.ptrs).at(0), rank, count * width - 1)
        heap.barrier(Phase("test"))
        assert (landed.flatten()[:-1] % 10 == rank).all(), (width, "stripes")
        heap.barrier(Phase("test"))
        heap.free(there)
        heap.free(local)


def test_the_config_must_fit_the_heap(ranks: Ranks) -> None:
    """Kernels of one transport over a heap opened for the other."""
    heap = open_heap("torch", None, ranks[2], 20.0)
    with pytest.raises(ValueError, match="transport='device' does not fit the heap that was given"):
        build_dispatcher(
            EPConfig(transport="device", max_tokens=8), num_experts=E, top_k=K, hidden_size=D, dtype=torch.bfloat16,
            device=ranks[2], heap=heap,
        )  # fmt: skip
    heap.close()
