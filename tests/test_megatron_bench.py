"""How the benchmark of Megatron's layer reads a profile."""

from __future__ import annotations

import pytest

from ep_plugin.bench import megatron_layer as bench


def kernel(name: str, start: float, length: float) -> dict[str, object]:
    return {"cat": "kernel", "name": name, "ts": start, "dur": length, "args": {}}


def test_a_profile_gives_the_time_of_products_and_what_else_took_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products that run beside each other counted twice, which would make the rest too short; a product's kernel taken
    for something else, or the reverse."""
    monkeypatch.setattr(bench, "PROFILED", 2)
    products = [
        "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NNT",
        "void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm9x<cutlass::gemm::GemmUniversal>>",
        "sm80_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize32x32x8",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float>",
    ]
    others = [
        "_gated_swish_backward",
        "void at::native::vectorized_elementwise_kernel<8, at::native::silu_kernel>",
        "triton_poi_fused_mul_silu_split_0",
        "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)",
        "_fan_out",
    ]
    events = [kernel(name, 100 * i, 50) for i, name in enumerate(products)]
    events.append(kernel(products[0], 20, 50))  # until 70
    events += [kernel(name, 1000 * (i + 1), 1000) for i, name in enumerate(others)]
    events.append({"cat": "cpu_op", "name": "aten::_grouped_mm", "ts": 0, "dur": 9000, "args": {}})
    trace = {"traceEvents": events}
    assert bench.kernel_ms(trace, bench.GEMM) == pytest.approx((70 + 3 * 50) / 2 / 1e3)
    assert bench.kernel_ms(trace, bench.ACTIVATION) == pytest.approx(3000 / 2 / 1e3)
    longest = bench.longest_kernels(trace)
    assert len(longest) == len(others) and set(longest.values()) == {0.5}
    assert "_fan_out" in longest and "vectorized_elementwise_kernel<8, silu_kernel>" in longest
