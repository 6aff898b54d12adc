"""Training with MXFP8 rows follows training with bfloat16 rows: a byte model with two MoE layers, on real text."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ep_plugin.config import EPConfig
from ep_plugin.dispatch import build_dispatcher
from ep_plugin.experts import GroupedMLP
from ep_plugin.layer import moe_step
from ep_plugin.mxfp8 import MXFP8Config, build_mxfp8_dispatcher, mxfp8_moe_step
from tests import dist

HIDDEN, WIDTH, EXPERTS, TOP_K, CONTEXT, BATCH, STEPS = 64, 64, 8, 2, 8, 256, 300


class Bytes(nn.Module):
    """The next byte from the ``CONTEXT`` before it."""

    def __init__(self, seed: int, step: Callable[..., Tensor], dispatcher: Any) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed, self.mix = nn.Embedding(256, 16), nn.Linear(16 * CONTEXT, HIDDEN)
        self.norms = nn.ModuleList(nn.RMSNorm(HIDDEN) for _ in range(3))
        self.routers = nn.ModuleList(nn.Linear(HIDDEN, EXPERTS, bias=False) for _ in range(2))
        self.experts = nn.ModuleList(GroupedMLP(EXPERTS, HIDDEN, WIDTH, seed=seed + i) for i in range(2))
        self.head = nn.Linear(HIDDEN, 256)
        self.step, self.dispatcher = step, dispatcher

    def forward(self, context: Tensor) -> Tensor:
        h = self.mix(self.embed(context).flatten(1))
        for norm, router, experts in zip(self.norms, self.routers, self.experts, strict=False):
            x = norm(h)
            weight, index = router(x).softmax(-1).topk(TOP_K)
            with torch.autocast("cpu", torch.bfloat16):
                h = h + self.step(self.dispatcher, x.bfloat16(), index, weight, experts).float()
        return self.head(self.norms[2](h))


def text() -> Tensor:
    """Source files of the standard library."""
    files = sorted(Path(argparse.__file__).parent.glob("*.py"))[:60]
    return torch.frombuffer(bytearray(b"".join(f.read_bytes() for f in files)), dtype=torch.uint8).long()


def train(data: Tensor, seed: int, mxfp8: bool) -> float:
    """Mean loss of the last 100 steps."""
    shape: dict[str, Any] = dict(num_experts=EXPERTS, top_k=TOP_K, hidden_size=HIDDEN, dtype=torch.bfloat16)
    config = EPConfig(dispatcher="local")
    if mxfp8:
        model = Bytes(seed, mxfp8_moe_step, build_mxfp8_dispatcher(config, MXFP8Config(), **shape))
    else:
        model = Bytes(seed, moe_step, build_dispatcher(config, **shape))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator, losses = torch.Generator().manual_seed(seed), []
    for _ in range(STEPS):
        start = torch.randint(0, len(data) - CONTEXT - 1, (BATCH, 1), generator=generator)
        window = data[start + torch.arange(CONTEXT + 1)]
        loss = nn.functional.cross_entropy(model(window[:, :-1]), window[:, -1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return statistics.mean(losses[-100:])


def train_one(rank: int, world: int) -> float:
    """Ranks 0 and 1 with bfloat16 rows, 2 and 3 with MXFP8 rows, each pair with seeds 0 and 1."""
    return train(text(), seed=rank % 2, mxfp8=rank >= 2)


@pytest.mark.slow
def test_loss_follows_bfloat16(pool: dist.Pool) -> None:
    """Fault: a bias that single gradients hide in their noise: a systematic rounding, stale weights in the cache.

    Within 0.5 % of bfloat16 over the same seeds, and nearer than the seeds are to each other."""
    # Four runs, one process each: they are independent.
    losses = pool.run(train_one, 4, timeout=600)
    plain, mxfp8 = losses[:2], losses[2:]
    assert max(plain) < 3.0, f"nothing was learned: {plain}"
    difference = abs(sum(mxfp8) - sum(plain)) / sum(plain)
    assert difference < 0.005, (plain, mxfp8)
    assert max(abs(a - b) for a, b in zip(plain, mxfp8, strict=True)) < max(plain) - min(plain), (plain, mxfp8)
