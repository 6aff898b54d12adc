"""``block``'s plan by kernels on GPUs: bit for bit the plan by torch operations, and what it raises."""

from __future__ import annotations

import os
from unittest import mock

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)
pytest.importorskip("triton")

from ep_plugin.config import CapacityConfig, EPConfig
from ep_plugin.dispatch import block, build_dispatcher
from tests.block_cases import NAMES, check_disagreements, check_plans
from tests.moe import same_bits

SHAPES = [(1, 5, 2), (2, 6, 3), (3, 3, 2), (4, 8, 1), (5, 40, 4), (8, 512, 8), (64, 256, 8)]


@pytest.fixture(scope="module")
def device() -> str:
    index = int(os.environ.get("LOCAL_RANK", "0"))
    torch.cuda.set_device(index)
    return f"cuda:{index}"


@pytest.mark.parametrize("world,experts,top_k", SHAPES)
def test_plans_equal_those_of_torch(world: int, experts: int, top_k: int, device: str) -> None:
    """Catches a row that is sent from, or sorted to, another place."""
    for seed in range(2 if world < 64 else 1):
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(0, 300, (world,), generator=generator).tolist()
        check_plans(world, experts, top_k, [0, *tokens[1:]], seed, device)


def test_plan_of_a_large_batch(device: str) -> None:
    """Catches what goes wrong past many programs, at the shape of a benchmark."""
    check_plans(2, 128, 8, [16384, 16000], 0, device, ("dropless", "rank"))
    check_disagreements(device)


def test_plans_between_gpus(ranks: tuple[int, int, torch.device]) -> None:
    """Catches a host that reads its copy before it is there, or one of another plan; an id out of range that is routed,
    or ends the process's CUDA context."""
    rank, world, device = ranks
    experts = 8 * world
    config = EPConfig(dispatcher="block", capacity=CapacityConfig("source", 0.9), timeout_s=20.0)
    dispatcher = build_dispatcher(
        config, num_experts=experts, top_k=4, hidden_size=64, dtype=torch.bfloat16, device=device
    )
    generator = torch.Generator(device=device).manual_seed(rank)
    for step in range(6):
        torch.cuda._sleep(10_000_000)  # what the host waits for is far behind
        ids = torch.randint(-1, experts, (500 * (rank + step), 4), generator=generator, device=device)
        got = dispatcher.plan(ids, layer="layers.0")
        with mock.patch.object(block, "has_kernel", lambda *_: False):
            want = dispatcher.plan(ids, layer="layers.0")
        for name, a, b in zip(NAMES, got.tensors(), want.tensors(), strict=True):
            assert a is b is None or same_bits(a, b), (step, name)
    ids = torch.zeros((3, 4), dtype=torch.int64, device=device)
    ids[2, 1] = experts
    with pytest.raises(ValueError, match=rf"expert id {experts} of token 2 is outside \[-1, {experts}\)"):
        dispatcher.plan(ids, layer="layers.1")
    dispatcher.close()
    torch.cuda.synchronize()
