"""``block``'s plan by kernels against the one by torch operations, tensor for tensor, for one process that plays all
ranks of a group. ``device``: ``cpu`` (Triton's interpreter) or a GPU's.

Legend: T tokens of a rank, K routes per token, M ranks, E experts.
"""

from __future__ import annotations

import random
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from ep_plugin.config import CapacityConfig, EPConfig
from ep_plugin.dispatch import block
from ep_plugin.dispatch.block import BlockDispatcher, BlockState
from ep_plugin.kernels.fan_out import fan_out_torch
from tests.moe import same_bits

NAMES = "dest_rank dest_row counts accepted tokens offsets send_routes sent_row recv_order recv_row sizes".split()
POLICIES = ("dropless", "rank", "source", "expert")


class Watch:
    """``GroupWatch`` of ranks that are all here."""

    def __init__(self, *_: Any) -> None: ...

    def enqueued(self, *_: Any, **__: Any) -> None: ...

    def settle(self) -> None:
        if torch.cuda.is_initialized():
            torch.cuda.current_stream().synchronize()


class NotYet(Exception):
    """Not all ranks have given their records."""


class Played(BlockDispatcher):
    """A rank of a group whose records are ``given`` here, by rank."""

    given: dict[int, Tensor]

    def _gather(self, table: Tensor, record: Tensor) -> None:
        self.given[self.rank] = record.clone()
        if len(self.given) < self.world:
            raise NotYet
        table.copy_(torch.stack([self.given[rank] for rank in range(self.world)]))


def play(ids: list[Tensor], num_experts: int, capacity: CapacityConfig) -> list[Played]:
    """All ranks of a group, with ``ids`` [T, K] by rank."""
    given: dict[int, Tensor] = {}
    ranks = []
    with mock.patch.object(block, "GroupWatch", Watch):
        for rank, own in enumerate(ids):
            made = Played(
                EPConfig(dispatcher="block", capacity=capacity), group=None, num_experts=num_experts,
                top_k=own.shape[1], hidden_size=8, dtype=torch.float32, device=own.device, rank=rank, world=len(ids),
            )  # fmt: skip
            made.given = given
            ranks.append(made)
    return ranks


def plans(ids: list[Tensor], num_experts: int, capacity: CapacityConfig, by_kernels: bool) -> list[BlockState]:
    """The plan of every rank, of ``ids`` [T, K] by rank."""
    ranks = play(ids, num_experts, capacity)

    def plan(rank: int) -> BlockState:
        make = ranks[rank]._plan_by_kernels if by_kernels else ranks[rank]._plan
        return make("layer", ranks[rank].check_routes(ids[rank]))

    for rank in range(len(ids) - 1):
        with pytest.raises(NotYet):
            plan(rank)
    plan(len(ids) - 1)
    return [plan(rank) for rank in range(len(ids))]


def check_disagreements(device: str) -> None:
    """Ranks that plan different layers, or did different things before, are told so."""
    ids = [torch.zeros((3, 1), dtype=torch.int64, device=device)] * 2
    for layer, history, message in (
        ("layers.1", 0, "rank 1 is in plan of layer 'layers.1' .*rank 0 is in plan of layer 'layers.0'"),
        ("layers.0", 5, "rank 0 ran other operations than rank 1"),
    ):
        first, second = play(ids, 2, CapacityConfig())
        second.history = history
        with pytest.raises(NotYet):
            first._plan_by_kernels("layers.0", ids[0])
        with pytest.raises(RuntimeError, match=message):
            second._plan_by_kernels(layer, ids[1])


def check_plans(
    world: int, num_experts: int, top_k: int, tokens: list[int], seed: int, device: str, policies: Any = POLICIES
) -> None:
    """Every tensor of every rank's state is the same, and its orders are inverse to each other, under the capacity
    ``policies``; routes that are absent, repeated and skewed, ids of any integer dtype and strides. Under the last
    policy, rows are moved too."""
    rng = random.Random(seed)
    g = torch.Generator(device=device).manual_seed(seed)
    ids = []
    for t in tokens:
        skew = torch.rand(1, num_experts, generator=g, device=device) ** rng.choice((0, 3))
        found = (torch.rand(t, num_experts, generator=g, device=device) * skew).topk(top_k, 1).indices
        drawn = torch.rand(2, t, top_k, generator=g, device=device) < rng.choice((0.0, 0.1, 1.0))
        repeated = torch.randint(0, num_experts, (t, top_k), generator=g, device=device)
        found = torch.where(drawn[0], -1, torch.where(drawn[1], repeated, found))
        found = found.to(rng.choice((torch.int64, torch.int32, torch.int8 if num_experts < 128 else torch.int16)))
        ids.append(found.t().contiguous().t() if seed % 2 else found)
    for policy in policies:
        capacity = CapacityConfig(policy, rng.choice((0.3, 1.0, 1.2, 1e9)))
        want, got = (plans(ids, num_experts, capacity, by_kernels) for by_kernels in (False, True))
        for rank, (a, b) in enumerate(zip(got, want, strict=True)):
            what = f"{capacity}, seed {seed}, rank {rank} of {world}"
            for name, mine, other in zip(NAMES, a.tensors(), b.tensors(), strict=True):
                assert mine is other is None or same_bits(mine, other), f"{name}: {what}"
            assert (a.recv_order is None) == (1 in (world, num_experts // world)), what
            check_orders(a, what)
            if policy == policies[-1]:
                check_rows(play(ids, num_experts, capacity)[rank], a, g, what)


def check_orders(state: BlockState, what: str) -> None:
    """What the state's tensors are said to be."""
    sent, n = state.sent_row.flatten(), len(state.send_routes)
    assert torch.equal(sent >= 0, state.map.dest_rank.flatten() >= 0) and int((sent >= 0).sum()) == n, what
    assert torch.equal(sent[state.send_routes], torch.arange(n, dtype=torch.int32, device=sent.device)), what
    if state.recv_order is not None:
        assert state.recv_row is not None
        r = torch.arange(state.num_rows, dtype=torch.int32, device=sent.device)
        assert torch.equal(state.recv_row[state.recv_order.long()], r), what


def check_rows(rank: Played, state: BlockState, g: torch.Generator, what: str) -> None:
    """Rows in send order, on GPUs by a kernel, and by route; rows of bfloat16, scaled or not, and of bytes."""
    t, k = state.sent_row.shape
    device, n = state.sent_row.device, len(state.send_routes)
    scale = torch.rand(n, generator=g, device=device)
    with mock.patch.object(block, "has_kernel", lambda *_: True):
        for dtype, width, by in ((torch.bfloat16, 24, None), (torch.bfloat16, 7, scale), (torch.uint8, 66, None)):
            x = (torch.rand(width, t, generator=g, device=device) * 255).to(dtype).t()
            rows = rank.fan_out(state, x, by)
            assert same_bits(rows, fan_out_torch(x, state.send_routes, k, by)), f"{dtype}, {what}"
    by_route = rank._by_route(state, rows)
    want = torch.where(state.sent_row.unsqueeze(2) >= 0, x.unsqueeze(1), 0)
    assert same_bits(by_route, want), what
    if state.recv_order is not None:
        rows = torch.rand(state.num_rows, 3, generator=g, device=device)
        assert same_bits(rank.unsort(state, rank.sort(state, rows)), rows), what
