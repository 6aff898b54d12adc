"""MXFP8 kernels: bit-equal to their references under Triton's interpreter; they compile for Hopper without a GPU."""

from __future__ import annotations

import re

import pytest
import torch

from tests import dist, mxfp8_cases

pytest.importorskip("triton")


def _interpreted(rank: int, world: int) -> None:
    import warnings

    warnings.simplefilter("ignore")  # numpy's, on NaN and Inf
    mxfp8_cases.check_all("cpu", thorough=False)


@pytest.mark.slow
def test_kernels_equal_their_references_bit_for_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong rounding, scale, column, row bound, address or sum order in any kernel."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    (exit,) = dist.run_fresh(_interpreted, 1, timeout=900)
    assert exit.code == 0, exit.stderr[-3000:]


def _compiled(rank: int, world: int) -> None:
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
    compiled: dict[str, str] = {}

    def compile_only(self: JITFunction, *args: object, grid: object, warmup: bool, **kwargs: object) -> object:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        assert kernel.asm["cubin"]
        compiled[self.__name__] = kernel.asm["ptx"]
        return kernel

    JITFunction.run = compile_only

    from ep_plugin.kernels import mxfp8_fan_out_triton, mxfp8_reduce_triton, mxfp8_swiglu_triton, mxfp8_triton
    from ep_plugin.kernels.mxfp8 import record_bytes, swizzled_rows
    from ep_plugin.kernels.peers import Peers

    rows, width, top_k, world, byte = 64, 4096, 8, 2, torch.uint8
    x, weight = torch.empty(rows, width, dtype=torch.bfloat16), torch.empty(rows)
    records, data = torch.empty(rows, record_bytes(width), dtype=byte), torch.empty(rows, width, dtype=byte)
    count, offsets = torch.empty(1, dtype=torch.int64), torch.empty(5, dtype=torch.int64)
    mxfp8_triton.quantize(x, records, row_weight=weight, num_rows=count)
    mxfp8_triton.dequantize(records, x, num_rows=count)
    mxfp8_triton.quantize_rowwise(x, data, weight, num_rows=count)
    mxfp8_triton.rescale(records, data, weight, num_rows=count)
    tiles = torch.empty(swizzled_rows(rows, 4), width // 32, dtype=byte)
    mxfp8_triton.swizzle_scales(records[:, width:], offsets, tiles)
    up, wide = torch.empty(rows, 2 * width, dtype=torch.bfloat16), torch.empty(rows, 2 * width, dtype=byte)
    saved = torch.empty(rows, record_bytes(2 * width), dtype=byte)
    mxfp8_swiglu_triton.swiglu(up, weight, saved=saved, hidden=x, records=records, data=data, scales=weight)
    mxfp8_swiglu_triton.swiglu_backward(
        saved, x, weight, hidden=x, dup=up, records=saved, data=wide, scales=weight, dweights=weight
    )
    peers = Peers(torch.empty(world, dtype=torch.int64), torch.empty(world, dtype=torch.int64), 1 << 30, 512)
    local = torch.empty(world, rows, top_k, dtype=torch.int32)
    mxfp8_reduce_triton.pre_reduce_put_records(x, local, count, peers, 1, weight)
    partials = torch.empty(world, rows, record_bytes(width), dtype=byte)
    mxfp8_reduce_triton.sum_partial_records(partials, local[0], x, y=x, dest_row=local[1], weights=weight, own_rank=1)
    mxfp8_reduce_triton.get_reduce_records(peers, local[0], local[1], torch.empty(rows, top_k), x, num_rows=rows)
    mxfp8_fan_out_triton.fan_out_records(
        partials.view(-1, record_bytes(width)), local, count, rows=x, data=data, scales=weight, own=records
    )

    assert len(compiled) == 11, sorted(compiled)
    for name, ptx in compiled.items():
        # Triton 3.5's exact division flushes; SwiGLU divides one by numbers from one to 2^125.
        flushed = [op for op in re.findall(r"\S*\.ftz\S*", ptx) if op != "div.rn.ftz.f32"]
        assert not flushed, f"{name} flushes subnormal numbers: {flushed[:3]}"
        fused = re.findall(r"\bfma\.rn\.f32", ptx)
        # Division is made of fused steps, and is exact; nothing else may fuse.
        assert not fused or "swiglu" in name, f"{name} fuses a product with a sum"
        casts = re.findall(r"\bcvt\S*\.e4m3x2\.f32", ptx)
        assert all("rn.satfinite" in cast for cast in casts), f"{name}: {set(casts)}"
    narrow = {
        name: re.findall(r"\bld\.global\.\S*b16\S*|\bst\.global\.\S*b16\S*", ptx) for name, ptx in compiled.items()
    }
    assert not any(narrow.values()), f"accesses of 2 bytes: { ({n: v[:2] for n, v in narrow.items() if v}) }"


@pytest.mark.slow
def test_kernels_compile_for_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Code that only the interpreter takes; flushed subnormals, fused sums or narrow accesses that no CPU shows."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    (exit,) = dist.run_fresh(_compiled, 1, timeout=900)
    assert exit.code == 0, exit.stderr[-3000:]
