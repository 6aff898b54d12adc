"""The kernels between our routes and DeepEP's, under Triton's interpreter and compiled for Hopper."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests import dist

pytest.importorskip("triton")


@pytest.fixture
def pool_of(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Pools of processes of their own: Triton decides at its import whether it interprets."""
    pools = []

    def make(interpret: bool) -> dist.Pool:
        if interpret:
            monkeypatch.setenv("TRITON_INTERPRET", "1")
        else:
            monkeypatch.delenv("TRITON_INTERPRET", raising=False)
        pools.append(dist.Pool())
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def all_cases(rank: int, world: int) -> None:
    cases = importlib.import_module("tests.deepep_kernel_cases")
    cases.check_routes("cpu", False, torch.int64)
    cases.check_routes("cpu", True, torch.int32)
    cases.check_rows("cpu")


def test_kernels_equal_their_references(pool_of: Any) -> None:
    """Fault: repeats or bad ids that one of them sees, garbage that is read as routes, other rounding."""
    pool_of(True).run(all_cases, 1, timeout=200)


def compile_for_hopper(rank: int, world: int) -> list[str]:
    import triton.runtime
    from triton.backends.compiler import GPUTarget
    from triton.runtime.jit import JITFunction

    from ep_plugin.kernels import deepep_routes_triton as kernels

    class Hopper:
        """A driver that knows its target and launches nothing."""

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int) -> int:
            return 0

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", 90, 32)

        def get_active_torch_device(self) -> torch.device:
            return torch.device("cpu")

    triton.runtime.driver.set_active(Hopper())
    launch, found = JITFunction.run, []

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        found.append(self.__name__)
        return launch(self, *args, grid=grid, warmup=True, **kwargs)

    JITFunction.run = compile_only
    flags, rows = torch.zeros(1, dtype=torch.int32), torch.zeros((100, 4096), dtype=torch.bfloat16)
    for top_k in (1, 3, 8):
        idx = torch.zeros((64, top_k), dtype=torch.int64)
        first = torch.zeros((64, top_k), dtype=torch.int32)
        for ids in (idx, idx.to(torch.int32)):
            kernels.distinct_experts(ids, 128, flags)
        for dtype in (torch.float32, torch.bfloat16):
            kernels.merge_weights(torch.zeros((64, top_k), dtype=dtype), first)
        kernels.spread_gradients(torch.zeros((64, top_k)), first)
        metadata, longs = torch.zeros((50, 2 + top_k), dtype=torch.int32), torch.zeros(100, dtype=torch.int64)
        ends = torch.zeros(64, dtype=torch.int32)
        kernels.arrived(metadata, flags, ends, longs[:65], longs, torch.zeros(100), flags)
    for width in (256, 2048, 7168):
        kernels.scale_rows(
            rows[:, :width].contiguous() if width < 4096 else rows.repeat(1, 2)[:, :width].contiguous(),
            torch.zeros(100),
            torch.zeros(1, dtype=torch.int64),
        )
    return sorted(set(found))


@pytest.mark.slow
def test_kernels_compile_for_hopper(pool_of: Any) -> None:
    """Fault: code that only the interpreter takes."""
    names = ["_arrived", "_distinct", "_merge", "_scale_rows", "_spread"]
    assert pool_of(False).run(compile_for_hopper, 1, timeout=300) == [names]
