"""The kernels between our routes and DeepEP's, under Triton's interpreter and compiled for Hopper."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

from tests import dist

pytest.importorskip("triton")


def all_cases(rank: int, world: int) -> None:
    cases = importlib.import_module("tests.deepep_kernel_cases")
    cases.check_routes("cpu", False, torch.int64)
    cases.check_routes("cpu", True, torch.int32)
    cases.check_rows("cpu")


def test_kernels_equal_their_references() -> None:
    """Fault: repeats or bad ids that one of them sees, garbage that is read as routes, other rounding."""
    dist.run_apart(all_cases, 1, TRITON_INTERPRET="1")


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
def test_kernels_compile_for_hopper() -> None:
    """Fault: code that only the interpreter takes."""
    names = ["_arrived", "_distinct", "_merge", "_scale_rows", "_spread"]
    assert dist.run_apart(compile_for_hopper, 1, TRITON_INTERPRET="0") == [names]
