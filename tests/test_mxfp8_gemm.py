"""Expert GEMMs over MXFP8 rows: exactness, what each hands to torch's grouped GEMMs, where each may run, the cache."""

from __future__ import annotations

import gc
import math
import sys
import weakref
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from ep_plugin.config import LegsConfig, MXFP8Config
from ep_plugin.mxfp8 import codec
from ep_plugin.mxfp8 import gemm as gemm_module
from ep_plugin.mxfp8.codec import Operand, as_form
from ep_plugin.mxfp8.gemm import (
    CpuReference,
    ExpertGemm,
    RowGroups,
    Sm90Bf16,
    Sm90Fp8Row,
    Sm100Mx,
    Sm100TE,
    choose_gemm,
)
from ep_plugin.mxfp8.weights import WeightCache

EXPERTS, INNER, OUTER = 3, 160, 96
OFFSETS = torch.tensor([0, 150, 150, 220])  # the second expert has no rows; the first fills more than one tile
ROWS = int(OFFSETS[-1])


def decibels(got: Tensor, want: Tensor) -> float:
    """Signal to noise of ``got``."""
    want = want.double()
    noise = (got.double() - want).square().sum().clamp(min=1e-300)
    return float(10 * torch.log10(want.square().sum() / noise))


def by_expert(rows: Tensor, matrices: Tensor) -> Tensor:
    """[R, K] × [E_l, K, N] in float64."""
    parts = [rows[a:b].double() @ m.double() for (a, b), m in zip(pairwise(OFFSETS.tolist()), matrices, strict=True)]
    return torch.cat(parts)


def fake_rowwise_gemm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    *,
    offs: Tensor,
    out_dtype: torch.dtype,
    use_fast_accum: bool,
) -> Tensor:
    """What torch._scaled_grouped_mm promises and asks for, on CPU."""
    assert a.dtype == b.dtype == torch.float8_e4m3fn and a.is_contiguous() and b.transpose(1, 2).is_contiguous()
    assert scale_a.shape == (a.shape[0],) and scale_b.shape == (b.shape[0], b.shape[2])
    assert scale_a.dtype == scale_b.dtype == torch.float32 and scale_b.stride(1) == 1
    assert offs.dtype == torch.int32 and offs.tolist() == OFFSETS[1:].tolist()
    rows = a.double() * scale_a[:, None].double()
    return by_expert(rows, b.double() * scale_b[:, None, :].double()).to(out_dtype)


def unswizzled(tiles: Tensor, rows: int, columns: int) -> Tensor:
    """Scale bytes [rows, columns] of one group from its tiles, by the formula."""
    r, c = torch.arange(rows)[:, None], torch.arange(columns)
    across = -(-columns // 4)
    return tiles.flatten()[((r // 128) * across + c // 4) * 512 + (r % 32) * 16 + ((r % 128) // 32) * 4 + c % 4].int()


def fake_block_gemm(a: Tensor, b: Tensor, *, scale_a: Tensor, scale_b: Tensor, offs: Tensor, **kwargs) -> Tensor:
    """What torch's block-scaled grouped GEMM promises and asks for, on CPU."""
    import torch.nn.functional as F

    assert kwargs["scale_recipe_a"] == kwargs["scale_recipe_b"] == F.ScalingType.BlockWise1x32
    assert kwargs["swizzle_a"] == kwargs["swizzle_b"] == F.SwizzleType.SWIZZLE_32_4_4
    assert scale_a.dtype == scale_b.dtype == torch.float8_e8m0fnu
    assert a.is_contiguous() and b.transpose(1, 2).is_contiguous()
    (rows, inner), (experts, _, outer) = a.shape, b.shape
    blocks, padded = inner // 32, -(-inner // 32 // 4) * 4
    assert scale_a.dim() == 2 and scale_a.shape[0] >= rows and scale_a.shape[1] == padded
    assert scale_b.shape == (experts, -(-outer // 128) * 128 * padded)
    tiles_a, tiles_b, first = scale_a.view(torch.uint8), scale_b.view(torch.uint8), 0
    out = torch.empty(rows, outer, dtype=torch.float64)
    starts = [0, *offs.tolist()]
    for e, (start, end) in enumerate(pairwise(starts)):
        scales = unswizzled(tiles_a[first:], end - start, blocks)
        left = a[start:end].double() * torch.exp2(scales.double() - 127).repeat_interleave(32, 1)
        scales = unswizzled(tiles_b[e], outer, blocks)
        right = b[e].t().double() * torch.exp2(scales.double() - 127).repeat_interleave(32, 1)
        out[start:end] = left @ right.t()
        first += -(-(end - start) // 128) * 128
    return out.to(kwargs["output_dtype"])


class AnywhereMx(Sm100Mx):
    """The native GEMM without its gate, for a fake product."""

    @staticmethod
    def refusal(device: torch.device) -> str | None:
        return None


class AnywhereTE(Sm100TE):
    """TransformerEngine's GEMM without its gate, for a fake product."""

    @staticmethod
    def refusal(device: torch.device) -> str | None:
        return None


class FakeTE:
    """What TransformerEngine asks for of each expert's operands, on CPU."""

    @staticmethod
    def mxfp8(data: Tensor, tiles: Tensor) -> Tensor:
        assert data.dtype == torch.float8_e4m3fn and data.is_contiguous() and tiles.is_contiguous()
        rows, inner = data.shape
        assert tiles.shape == (-(-rows // 128) * 128, -(-inner // 32 // 4) * 4)
        scales = unswizzled(tiles.view(torch.uint8), rows, inner // 32)
        return data.double() * torch.exp2(scales.double() - 127).repeat_interleave(32, 1)

    @staticmethod
    def grouped_gemm(weights: list[Tensor], rows: list[Tensor], out: Tensor, sizes: list[int]) -> None:
        assert [len(r) for r in rows] == sizes and all(size % 32 == 0 for size in sizes)
        torch.cat(
            [r @ w.t() for r, w in zip(rows, weights, strict=True)], out=(whole := torch.empty_like(out).double())
        )
        out.copy_(whole)


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "_scaled_grouped_mm", fake_rowwise_gemm)
    monkeypatch.setattr(torch.nn.functional, "scaled_grouped_mm", fake_block_gemm)
    monkeypatch.setattr(gemm_module, "transformer_engine", FakeTE)


BACKENDS = [CpuReference, Sm90Bf16, Sm90Fp8Row, AnywhereMx, AnywhereTE]


def problem(contract: int) -> tuple[Tensor, Tensor]:
    """Rows [R, K] in bfloat16 and a weight [E_l, A, B] whose axis ``contract`` is K."""
    g = torch.Generator().manual_seed(contract)
    rows = torch.randn(ROWS, INNER, generator=g)
    shape = (EXPERTS, INNER, OUTER) if contract == 1 else (EXPERTS, OUTER, INNER)
    return rows.to(torch.bfloat16), (torch.randn(shape, generator=g) * INNER**-0.5).to(torch.bfloat16)


@pytest.mark.usefixtures("fakes")
@pytest.mark.parametrize("contract", [1, 2])
@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.name)
def test_product(backend: type[ExpertGemm], contract: int) -> None:
    """Fault: blocks along the wrong axis, scales in the wrong place, rows of one expert times another's weight."""
    rows, weight = problem(contract)
    gemm, layout = backend(), RowGroups(OFFSETS, ROWS, torch.bfloat16)
    matrices = weight if contract == 1 else weight.transpose(1, 2)
    records = codec.quantize(rows)
    for source in (rows, records):
        operand = as_form(source, gemm.form, "rceil", dtype=torch.bfloat16, offsets=OFFSETS)
        got = gemm.product(operand, weight, layout, contract)
        assert got.dtype == torch.bfloat16
        assert decibels(got, by_expert(rows, matrices)) >= 27

        decoded = operand.data.float()
        if operand.scales is not None:
            decoded = decoded * operand.scales[:, None]
        elif operand.form == "records":
            decoded = codec.dequantize(operand.data, torch.float32)
        by_row = matrices.transpose(1, 2).flatten(0, 1)
        if backend is Sm90Fp8Row:
            both = codec.quantize_rowwise(by_row)
            assert both.scales is not None
            used = both.data.float() * both.scales[:, None]
        else:
            used = codec.dequantize(codec.quantize(by_row), torch.float32) if backend is not Sm90Bf16 else by_row
        used = used.float().unflatten(0, (EXPERTS, OUTER)).transpose(1, 2)
        assert decibels(got, by_expert(decoded, used)) >= 45


@pytest.mark.parametrize("rounding", ["rceil", "floor"])
def test_the_gate_catches_saturating_scales(rounding: str) -> None:
    """Fault: the other rounding than asked for. Rows whose largest values lie just below 512 times a power of two are
    what ``floor`` saturates."""
    rows, weight = problem(2)
    rows = rows.float()
    rows[:, ::32] = 508.0 * torch.where(rows[:, ::32] < 0, -1, 1)
    gemm = CpuReference(rounding)
    operand = as_form(rows.to(torch.bfloat16), "records", rounding, dtype=torch.bfloat16)
    got = gemm.product(operand, weight, RowGroups(OFFSETS, ROWS, torch.float32), 2)
    quality = decibels(got, by_expert(rows.to(torch.bfloat16), weight.transpose(1, 2)))
    assert (quality >= 27) == (rounding == "rceil"), quality


@pytest.mark.parametrize("transposed", [False, True])
def test_weight_gradient(transposed: bool) -> None:
    """Fault: experts without rows keep no gradient, or noise; both operands quantised where one would do."""
    g = torch.Generator().manual_seed(1)
    rows = torch.randn(ROWS, INNER, generator=g).to(torch.bfloat16)
    grad = torch.randn(ROWS, OUTER, generator=g).to(torch.bfloat16)
    weight = torch.zeros(EXPERTS, OUTER, INNER, dtype=torch.bfloat16)
    layout, gemm = RowGroups(OFFSETS, ROWS, torch.bfloat16), CpuReference()
    bounds = list(pairwise(OFFSETS.tolist()))
    want = torch.stack([grad[a:b].double().t() @ rows[a:b].double() for a, b in bounds])
    once = codec.dequantize(codec.quantize(rows), torch.bfloat16)
    twice = codec.dequantize(codec.quantize(grad), torch.bfloat16)
    for left, least in ((grad, 30), (twice, 27)):
        pair = (once, left) if transposed else (left, once)
        got = gemm.weight_gradient(*pair, weight.transpose(1, 2) if transposed else weight, layout)
        got = got.transpose(1, 2) if transposed else got
        assert decibels(got, want) >= least
        assert not got[1].any()


def test_rows_past_the_valid_ones_are_not_read() -> None:
    """Fault: padding that an earlier use left as NaN reaches a result."""
    rows, weight = problem(2)
    padded = torch.full((ROWS + 7, INNER), math.nan, dtype=torch.bfloat16)
    padded[:ROWS] = rows
    layout = RowGroups(OFFSETS, None, torch.bfloat16)
    for gemm in (CpuReference(), Sm90Bf16()):
        operand = as_form(padded, gemm.form, "rceil", dtype=torch.bfloat16, offsets=OFFSETS)
        got = gemm.product(operand, weight, layout, 2)[:ROWS]
        exact = as_form(rows, gemm.form, "rceil", dtype=torch.bfloat16)
        assert torch.equal(got, gemm.product(exact, weight, RowGroups(OFFSETS, ROWS, torch.bfloat16), 2))


@pytest.mark.usefixtures("fakes")
@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.name)
def test_no_rows_at_all(backend: type[ExpertGemm]) -> None:
    """Fault: a rank that receives nothing calls a GEMM that refuses empty rows."""
    weight = problem(2)[1]
    gemm, offsets = backend(), torch.zeros(EXPERTS + 1, dtype=torch.int64)
    operand = as_form(torch.empty(0, INNER, dtype=torch.bfloat16), gemm.form, "rceil", dtype=torch.bfloat16)
    got = gemm.product(operand, weight, RowGroups(offsets, 0, torch.bfloat16), 2)
    assert got.shape == (0, OUTER) and got.dtype == torch.bfloat16


CAPABILITIES = {
    (8, 0): (),
    (9, 0): ("sm90_bf16", "sm90_fp8row"),
    (10, 0): ("sm90_bf16", "sm100_mx"),
    (10, 3): ("sm90_bf16", "sm100_mx"),
    (12, 0): ("sm90_bf16",),
}


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_gates_by_compute_capability(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: the native GEMM is called on Hopper, where it destroys the CUDA context."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    device, allowed = torch.device("cuda", 0), CAPABILITIES[capability]
    if (10, 0) <= capability < (11, 0):
        gemm_module.transformer_engine.cache_clear()
        monkeypatch.setitem(sys.modules, "transformer_engine", None)
        with pytest.raises(ValueError, match="sm100_te: it needs TransformerEngine, whose import failed"):
            choose_gemm(MXFP8Config(gemm="sm100_te"), device)
        monkeypatch.setattr(gemm_module, "transformer_engine", FakeTE)
        allowed += ("sm100_te",)
    for name in ("cpu_ref", "sm90_bf16", "sm90_fp8row", "sm100_mx", "sm100_te"):
        if name in allowed:
            assert choose_gemm(MXFP8Config(gemm=name), device).name == name
        else:
            with pytest.raises(ValueError, match=f"{name}.*cannot run on cuda"):
                choose_gemm(MXFP8Config(gemm=name), device)
    if allowed:
        best = "sm100_mx" if "sm100_mx" in allowed else "sm90_bf16"
        assert choose_gemm(MXFP8Config(), device).name == best


def test_gates_on_cpu() -> None:
    """Fault: a setting for GPUs is taken on CPU and fails in the first product."""
    cpu = torch.device("cpu")
    assert choose_gemm(MXFP8Config(), cpu).name == "cpu_ref"
    for name in ("sm90_bf16", "sm90_fp8row", "sm100_mx", "sm100_te"):
        with pytest.raises(ValueError, match=f"{name}.*CUDA"):
            choose_gemm(MXFP8Config(gemm=name), cpu)
    rows = Operand("records", codec.quantize(problem(2)[0]))
    for native in (Sm100Mx, Sm100TE):
        with pytest.raises(RuntimeError, match=native.name):
            native().product(rows, problem(2)[1], RowGroups(OFFSETS, ROWS, torch.bfloat16), 2)


def test_fast_accumulation_is_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: a setting that changes nothing."""
    seen = []

    def product(a: Tensor, b: Tensor, *args: Tensor, use_fast_accum: bool, **kwargs: object) -> Tensor:
        seen.append(use_fast_accum)
        return torch.zeros(a.shape[0], b.shape[2])

    monkeypatch.setattr(torch, "_scaled_grouped_mm", product)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    rows, weight = problem(2)
    for fast in (False, True):
        gemm = choose_gemm(MXFP8Config(gemm="sm90_fp8row", fast_accum=fast), torch.device("cuda", 0))
        operand = as_form(rows, "rowwise", "rceil", dtype=torch.bfloat16)
        gemm.product(operand, weight, RowGroups(OFFSETS, ROWS, torch.bfloat16), 2)
    assert seen == [False, True]


def test_weights_are_quantised_once_per_step() -> None:
    """Fault: quantised weights that are older than the weights, or made anew for every microbatch."""
    rows, weight = problem(2)
    parameter = torch.nn.Parameter(weight)
    gemm, layout = CpuReference(), RowGroups(OFFSETS, ROWS, torch.float32)
    operand = as_form(rows, "records", "rceil", dtype=torch.bfloat16)
    wide = as_form(torch.randn(ROWS, OUTER), "records", "rceil", dtype=torch.bfloat16)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    for step in range(3):
        fresh = CpuReference().product(operand, parameter.detach().clone(), layout, 2)
        for _ in range(2):  # microbatches
            assert torch.equal(gemm.product(operand, parameter, layout, 2), fresh)
            gemm.product(wide, parameter, layout, 1)
        assert gemm.weights.made == 2 * (step + 1), "once for each contracted axis"
        parameter.grad = torch.randn_like(parameter)
        optimizer.step()


def test_a_write_that_version_counters_miss_is_seen_after_an_optimizer_step() -> None:
    """Fault: a trainer that copies masters into ``weight.data`` after its optimizer's step trains on old weights."""
    cache, weight = WeightCache(), torch.nn.Parameter(torch.ones(4))
    assert cache.get(weight, "sum", lambda w: float(w.sum())) == 4
    master = torch.nn.Parameter(torch.zeros(4))
    master.grad = torch.ones(4)
    torch.optim.SGD([master], lr=1.0).step()
    weight.data.copy_(master.data)
    assert cache.get(weight, "sum", lambda w: float(w.sum())) == -4


def test_the_cache_keeps_no_weight_alive() -> None:
    """Fault: every resharded or temporary weight stays in memory with its quantised copies."""
    cache = WeightCache()
    weight = torch.ones(4)
    made = torch.ones(3)
    alive, kept = weakref.ref(weight), weakref.ref(made)
    cache.get(weight, "copy", lambda w, made=made: made)
    del made
    gc.collect()
    assert kept() is not None
    del weight
    gc.collect()
    assert alive() is None
    cache.get(torch.ones(5), "copy", torch.clone)
    assert kept() is None


def test_views_of_a_weight_find_what_was_made_of_the_last() -> None:
    """Fault: weights that are stacked anew for every forward are quantised for every microbatch."""
    cache, weight = WeightCache(), torch.ones(4, 3)
    for _ in range(3):
        cache.get(weight.detach().view(2, 2, 3), "copy", torch.clone)
    assert cache.made == 1
    weight.add_(1)
    assert bool((cache.get(weight.detach().view(2, 2, 3), "copy", torch.clone) == 2).all()) and cache.made == 2
    cache.get(weight[:2], "copy", torch.clone)
    assert cache.made == 3


def test_inference_weights_are_not_kept() -> None:
    """Fault: weights without version counters raise, or are cached for ever."""
    cache = WeightCache()
    with torch.inference_mode():
        weight = torch.ones(2)
        assert cache.get(weight, "sum", lambda w: float(w.sum())) == 2
        weight.mul_(3)
        assert cache.get(weight, "sum", lambda w: float(w.sum())) == 6


@pytest.mark.parametrize(
    ("config", "dispatcher", "message"),
    [
        (MXFP8Config(rounding="ceil"), None, "rounding='ceil'.*rceil"),
        (MXFP8Config(gemm="sm90fp8row"), None, "did you mean 'sm90_fp8row'"),
        (MXFP8Config(legs=LegsConfig(combine="fp8")), None, "legs.combine='fp8'"),
        (MXFP8Config(), "deepep", "legs.combine='mxfp8': DeepEP carries MXFP8 in the dispatch"),
        (MXFP8Config(fast_accum=True), None, "fast_accum=True.*gemm='auto'"),
    ],
)
def test_settings_that_do_not_fit(config: MXFP8Config, dispatcher: str | None, message: str) -> None:
    """Fault: a bad setting is found by a kernel, or not at all."""
    with pytest.raises(ValueError, match=message):
        config.validate(dispatcher)
    MXFP8Config(legs=LegsConfig("mxfp8", "bf16", "bf16", "bf16")).validate("deepep")
