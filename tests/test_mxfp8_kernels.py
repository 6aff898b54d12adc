"""MXFP8 kernels: bit-equal to their references under Triton's interpreter; they compile for Hopper without a GPU."""

from __future__ import annotations

import itertools
import re

import pytest
import torch

from tests import dist, mxfp8_cases

pytest.importorskip("triton")


def _interpreted(rank: int, world: int) -> None:
    import warnings

    warnings.simplefilter("ignore")  # numpy's, on NaN and Inf
    mxfp8_cases.check_all("cpu", thorough=False, share=(rank, world))


@pytest.mark.slow
def test_kernels_equal_their_references_bit_for_bit() -> None:
    """A wrong rounding, scale, column, row bound, address or sum order in any kernel."""
    dist.run_apart(_interpreted, 2, timeout=900, TRITON_INTERPRET="1")


def _compiled(rank: int, world: int) -> set[str]:
    """Compile this process's share of all variants, look at them, and name their kernels."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    class Hopper:
        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int) -> int:
            return 0

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", 90, 32)

    driver.set_active(Hopper())
    run = JITFunction.run
    compiled: list[tuple[str, str]] = []

    def compile_only(self: JITFunction, *args: object, grid: object, warmup: bool, **kwargs: object) -> object:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        assert kernel.asm["cubin"]
        compiled.append((self.__name__, kernel.asm["ptx"]))
        return kernel

    JITFunction.run = compile_only

    from tests import mxfp8_compile

    for width, routes, dtype in ((4096, 8, torch.bfloat16), (96, 3, torch.float32)):
        variants = mxfp8_compile.variants((width,), routes=routes, dtype=dtype, wide=width > 96)
        for name, launch in itertools.islice(variants, rank, None, world):
            try:
                launch()
            except RuntimeError as error:
                raise AssertionError(f"{name}, {routes} routes, {dtype} does not compile") from error

    for name, ptx in compiled:
        # Triton 3.5's exact division flushes; SwiGLU divides one by numbers from one to 2^125.
        flushed = [op for op in re.findall(r"\S*\.ftz\S*", ptx) if op != "div.rn.ftz.f32"]
        assert not flushed, f"{name} flushes subnormal numbers: {flushed[:3]}"
        fused = re.findall(r"\bfma\.rn\.f32", ptx)
        # Division is made of fused steps, and is exact; nothing else may fuse.
        assert not fused or "swiglu" in name, f"{name} fuses a product with a sum"
        casts = re.findall(r"\bcvt\S*\.e4m3x2\.f32", ptx)
        assert all("rn.satfinite" in cast for cast in casts), f"{name}: {set(casts)}"
        # ptxas decodes what is stored as elements before it is there (round_to_elements).
        assert "own" not in name or "cvt.rn.f16x2.e4m3x2" not in ptx, f"{name} decodes elements that it stores"
        if "swiglu" in name:  # two scales of one thread are 2 bytes
            continue
        narrow = re.findall(r"\bld\.global\.\S*b16\S*|\bst\.global\.\S*b16\S*", ptx)
        assert not narrow, f"{name}: accesses of 2 bytes: {narrow[:2]}"
    return {name for name, _ in compiled}


@pytest.mark.slow
def test_kernels_compile_for_hopper() -> None:
    """Code that only the interpreter takes; flushed subnormals, fused sums or narrow accesses that no CPU shows."""
    names = set().union(*dist.run_apart(_compiled, 2, timeout=900, TRITON_INTERPRET="0"))
    assert len(names) == 15, sorted(names)
