"""MXFP8 on GPUs: kernels against the CPU references bit for bit, expert GEMMs and the node against float64.

Legend: T tokens of a rank, E_l experts of this rank, R rows, D hidden size, F expert width.
"""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ep_plugin.experts import Activation, GroupedMLP
from ep_plugin.kernels import mxfp8 as ref
from ep_plugin.mxfp8 import LegsConfig, MXFP8Config, build_mxfp8_dispatcher, codec, mxfp8_moe_step
from ep_plugin.mxfp8.codec import as_form
from ep_plugin.mxfp8.gemm import RowGroups, Sm100Mx, choose_gemm
from tests import mxfp8_cases
from tests.moe import Inputs, Problem, make_experts, make_inputs, oracle, same_bits
from tests.test_mxfp8_node import decibels, faults, run_step

Ranks = tuple[int, int, torch.device]
HOPPER = ("sm90_bf16", "sm90_fp8row")


def capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def test_kernels_equal_the_cpu_references(ranks: Ranks) -> None:
    """Fault: a GPU rounds, saturates, flushes or treats NaN otherwise than the references on CPU; tiles of several rows
    that programs take as they go, moved twice or not at all; a row that stays on its rank written by the wrong kernel,
    by both, or by none."""
    with torch.cuda.device(ranks[2]):
        mxfp8_cases.check_all(f"cuda:{ranks[2].index}", thorough=True)


def test_more_elements_than_32_bits_count(ranks: Ranks) -> None:
    """Fault: a row offset in 32 bits; 2^31 elements are passed at row 524,288 of width 4096."""
    device, width, rows = ranks[2], 4096, 524_288 + 300
    tail = torch.randn(300, width, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    x = torch.zeros(rows, width, dtype=torch.bfloat16, device=device)
    x[-300:] = tail.to(device)
    records = codec.quantize(x)
    want = ref.quantize_torch(tail)
    mxfp8_cases.same(records[-300:], want, "quantize")
    assert not records[:-300, :width].any()
    mxfp8_cases.same(codec.dequantize(records, torch.bfloat16)[-300:], ref.dequantize_torch(want).bfloat16(), "decode")
    rowwise = codec.rescale(records)
    data, scales = ref.rescale_torch(want)
    assert rowwise.scales is not None
    mxfp8_cases.same(rowwise.data.view(torch.uint8)[-300:], data.view(torch.uint8), "rescale")
    mxfp8_cases.same(rowwise.scales[-300:], scales, "rescale")


def test_rows_past_the_valid_ones_are_not_touched(ranks: Ranks) -> None:
    """Fault: work beyond offsets[-1], which only the device knows; poison there that reaches a product."""
    device, rows, valid, inner, outer = ranks[2], 1000, 700, 256, 512
    offsets = torch.tensor([0, 300, 300, valid], device=device)
    x = torch.full((rows, inner), float("nan"), dtype=torch.bfloat16, device=device)
    x[:valid] = torch.randn(valid, inner, device=device)
    weight = torch.randn(3, outer, inner, device=device, dtype=torch.bfloat16)
    layout, exact = RowGroups(offsets, None, torch.bfloat16), RowGroups(offsets, valid, torch.bfloat16)
    for name in HOPPER:
        if choose_refusal(name, device):
            continue
        gemm = choose_gemm(MXFP8Config(gemm=name), device)
        padded = gemm.product(as_form(x, gemm.form, "rceil", dtype=x.dtype, offsets=offsets), weight, layout, 2)
        alone = gemm.product(as_form(x[:valid], gemm.form, "rceil", dtype=x.dtype), weight, exact, 2)
        assert torch.equal(padded[:valid], alone), name


def choose_refusal(name: str, device: torch.device) -> str | None:
    """Why ``name`` cannot run here."""
    try:
        choose_gemm(MXFP8Config(gemm=name), device)
    except ValueError as error:
        return str(error)
    return None


def test_native_gemm_is_refused_before_the_call(ranks: Ranks) -> None:
    """Fault: the block-scaled GEMM is called on Hopper, which ends the process's CUDA context."""
    device = ranks[2]
    if capability(device)[0] == 10:
        pytest.skip("this GPU takes it")
    assert "10.x" in (choose_refusal("sm100_mx", device) or "")
    rows = as_form(torch.randn(64, 64, device=device, dtype=torch.bfloat16), "records", "rceil", dtype=torch.bfloat16)
    weight = torch.randn(1, 64, 64, device=device, dtype=torch.bfloat16)
    layout = RowGroups(torch.tensor([0, 64], device=device), 64, torch.bfloat16)
    with pytest.raises(RuntimeError, match="10.x"):
        Sm100Mx().product(rows, weight, layout, 2)
    torch.cuda.synchronize(device)


@pytest.mark.parametrize("name", [*HOPPER, "sm100_mx"])
@pytest.mark.parametrize("contract", [1, 2])
def test_gemm_gates(ranks: Ranks, name: str, contract: int) -> None:
    """Fault: wrong scales, orientation or groups in what torch's grouped GEMM is given."""
    device = ranks[2]
    refusal = choose_refusal(name, device)
    if refusal:
        pytest.skip(refusal)
    inner, outer, bounds = 1024, 768, [0, 300, 300, 1500, 1511]
    offsets = torch.tensor(bounds, device=device)
    rows = torch.randn(bounds[-1], inner, device=device).to(torch.bfloat16)
    shape = (4, inner, outer) if contract == 1 else (4, outer, inner)
    weight = (torch.randn(shape, device=device) * inner**-0.5).to(torch.bfloat16)
    matrices = weight if contract == 1 else weight.transpose(1, 2)
    want = torch.cat([rows[a:b].double() @ m.double() for (a, b), m in zip(pairwise(bounds), matrices, strict=True)])
    for fast in (False, True) if name == "sm90_fp8row" else (False,):
        gemm = choose_gemm(MXFP8Config(gemm=name, fast_accum=fast), device)
        for source in (rows, codec.quantize(rows)):
            operand = as_form(source, gemm.form, "rceil", dtype=torch.bfloat16, offsets=offsets)
            got = gemm.product(operand, weight, RowGroups(offsets, None, torch.bfloat16), contract)
            assert decibels(got, want) >= 27, (name, fast)
            if operand.scales is not None:
                decoded = operand.data.double() * operand.scales[:, None].double()
                used = codec.quantize_rowwise(matrices.transpose(1, 2).flatten(0, 1))
                assert used.scales is not None
                both = (used.data.double() * used.scales[:, None].double()).unflatten(0, (4, outer)).transpose(1, 2)
                pairs = zip(pairwise(bounds), both, strict=True)
                exact = torch.cat([decoded[a:b] @ m for (a, b), m in pairs])
                assert decibels(got, exact) >= (45 if not fast else 35), fast


BASE = Problem((0,), num_experts=8, top_k=3, hidden=512, width=256, dtype=torch.bfloat16, weight_dtype=torch.float32)


def on_device(problem: Problem, rank: int, world: int, device: torch.device) -> tuple[GroupedMLP, Inputs]:
    mine = make_inputs(problem)[rank]
    parameters = [torch.nn.Parameter(p.detach().to(device)) for p in make_experts(problem, rank, world).parameters()]
    experts = GroupedMLP.from_parameters(*parameters, activation=Activation())
    return experts, Inputs(*(t.to(device) for t in (mine.x, mine.idx, mine.weight, mine.upstream)))


def to_cpu(result: object) -> object:
    return replace(result, **{f.name: getattr(result, f.name).cpu() for f in fields(result)})  # type: ignore


@pytest.mark.parametrize("name", HOPPER)
@pytest.mark.parametrize("weight_at", ["hidden", "output", "source"])
def test_node_gates_without_expert_parallelism(ranks: Ranks, name: str, weight_at: str) -> None:
    """Fault: the fused kernels or the FP8 products in their place in the node."""
    device = ranks[2]
    refusal = choose_refusal(name, device)
    if refusal:
        pytest.skip(refusal)
    for problem in (replace(BASE, tokens=(700,)), replace(BASE, tokens=(300,), routes="even_experts"), BASE):
        want = oracle(problem, weight_at)[0]
        experts, inputs = on_device(problem, 0, 1, device)
        dispatcher = build_mxfp8_dispatcher(
            problem.config("local", weight_at),
            MXFP8Config(gemm=name),
            num_experts=problem.num_experts,
            top_k=problem.top_k,
            hidden_size=problem.hidden,
            dtype=problem.dtype,
            device=device,
        )
        found = faults(to_cpu(run_step(dispatcher, experts, inputs)), want)  # type: ignore[arg-type]
        assert not found, (name, problem.routes, found)


def test_block_over_nccl(ranks: Ranks) -> None:
    """Fault: records that NCCL moves at another width, or legs that mix up their formats between GPUs."""
    rank, world, device = ranks
    problem = replace(BASE, tokens=tuple(200 + 37 * r for r in range(world)), num_experts=4 * world)
    want = oracle(problem, "hidden")[rank]
    for legs in (LegsConfig(), LegsConfig("mxfp8", "bf16", "bf16", "bf16")):
        experts, inputs = on_device(problem, rank, world, device)
        dispatcher = build_mxfp8_dispatcher(
            problem.config("block", "hidden"),
            MXFP8Config(legs=legs),
            num_experts=problem.num_experts,
            top_k=problem.top_k,
            hidden_size=problem.hidden,
            dtype=problem.dtype,
            device=device,
        )
        first, second = (run_step(dispatcher, experts, inputs) for _ in range(2))
        found = faults(to_cpu(second), want)  # type: ignore[arg-type]
        assert not found, found
        assert same_bits(first.out, second.out)
        dispatcher.close()
    dist.barrier()


def test_weights_are_quantised_again_in_every_replay(ranks: Ranks) -> None:
    """Fault: a captured graph multiplies with the weights of the step in which it was captured."""
    device = ranks[2]
    refusal = choose_refusal("sm90_fp8row", device)
    if refusal:
        pytest.skip(refusal)
    gemm = choose_gemm(MXFP8Config(gemm="sm90_fp8row"), device)
    offsets = torch.tensor([0, 64], device=device)
    layout = RowGroups(offsets, None, torch.bfloat16)
    rows = torch.randn(64, 128, device=device, dtype=torch.bfloat16)
    weight = torch.nn.Parameter(torch.randn(1, 64, 128, device=device, dtype=torch.bfloat16))

    def product() -> Tensor:
        operand = as_form(rows, gemm.form, "rceil", dtype=torch.bfloat16, offsets=offsets)
        return gemm.product(operand, weight, layout, 2)

    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        product()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = product()
    with torch.no_grad():
        weight.neg_()
    graph.replay()
    torch.cuda.synchronize(device)
    assert torch.equal(captured, product())


def test_step_without_experts_gradients(ranks: Ranks) -> None:
    """Fault: evaluation keeps or waits for what only training needs."""
    device = ranks[2]
    problem = replace(BASE, tokens=(64,))
    experts, inputs = on_device(problem, 0, 1, device)
    dispatcher = build_mxfp8_dispatcher(
        problem.config("local"),
        MXFP8Config(),
        num_experts=problem.num_experts,
        top_k=problem.top_k,
        hidden_size=problem.hidden,
        dtype=problem.dtype,
        device=device,
    )
    with torch.no_grad():
        out = mxfp8_moe_step(dispatcher, inputs.x, inputs.idx, inputs.weight, experts)
    assert not out.requires_grad and out.isfinite().all()
