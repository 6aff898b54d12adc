"""Expert ids of every integer dtype: the same routes as of int64, also where −1, E or E_l are no numbers of the dtype.

Legend: E experts, E_l experts of a rank.
"""

from __future__ import annotations

import itertools
from dataclasses import astuple, replace
from unittest import mock

import pytest
import torch
from torch import Tensor

from ep_plugin.config import ScheduleConfig
from tests import dist
from tests.moe import Problem, same_bits

DTYPES = [torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64, torch.uint64]
WIDE = Problem((8,), num_experts=130, top_k=2, hidden=4, dtype=torch.float32, policy="rank", factor=0.7)


def ids(dtype: torch.dtype, num_experts: int) -> Tensor:
    """int64 [8, 2] that are numbers of ``dtype``, the least and the largest of them among them."""
    least, most = -1 if dtype.is_signed else 0, min(num_experts, torch.iinfo(dtype).max + 1)
    drawn = torch.randint(least, most, (8, 2), generator=torch.Generator().manual_seed(0))
    drawn[0, 0], drawn[-1, -1] = least, most - 1
    return drawn


def waves(rank: int, world: int) -> list[str]:
    """What becomes of a batch, of which routes are dropped, in two waves."""
    wrong = []
    for path, by in itertools.product(("block", "dedup"), ("token", "expert")):
        problem = replace(WIDE, num_experts=256 if by == "token" else 128)
        dispatcher = problem.dispatcher(path, schedule=ScheduleConfig("wave_overlapped", 2, by))
        for dtype in DTYPES:
            given = ids(dtype, problem.num_experts)
            want, got = (
                torch.cat([wave.topk_idx for wave in dispatcher.split(i, "layer")[0]]) for i in (given, given.to(dtype))
            )
            if not torch.equal(got.to(torch.int64), want) or torch.equal(want, given):
                wrong.append(f"{path}, by {by}: {dtype}")
        dispatcher.close()
    return wrong


def kernels(rank: int, world: int) -> list[str]:
    """Plans, as GPUs make them."""
    from ep_plugin.dispatch import block
    from tests.interpreted_heap import InterpretedHeap, without_streams

    wrong = []
    for path in ("block", "dedup"):
        with without_streams(), mock.patch.object(block, "has_kernel", lambda *_: True):
            heap = None if path == "block" else InterpretedHeap()
            dispatcher = WIDE.dispatcher(path, heap=heap, max_tokens=8)
            for dtype in DTYPES:
                given = ids(dtype, WIDE.num_experts)
                want, got = (astuple(dispatcher.plan(i).map) for i in (given, given.to(dtype)))
                if not all(map(same_bits, got, want)):
                    wrong.append(f"{path}: {dtype}")
            dispatcher.check()
            dispatcher.close()
            if heap is not None:
                heap.close()
    return wrong


def test_ids_in_waves(pool: dist.Pool) -> None:
    """Catches a dropped route of uint8 that is one to expert 255, and id 5 of int8 modulo 128 experts that is −123."""
    assert sum(pool.run(waves, 1, timeout=120), []) == []


def test_ids_in_kernels(interpreters: dist.Pool) -> None:
    """Catches kernels that compare ids with −1 or E in the ids' own dtype."""
    pytest.importorskip("triton")
    assert sum(interpreters.run(kernels, 1, timeout=120), []) == []
