"""Every fault in docs/known-faults.md has tests that exist, and those that stand nowhere else are here.

Legend: T tokens of a rank, K routes per token, E experts, D hidden size, F expert width.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ep_plugin.config import EPConfig
from ep_plugin.dispatch import build_dispatcher
from ep_plugin.experts import Activation, GroupedMLP
from ep_plugin.layer import moe_step
from ep_plugin.mxfp8 import codec
from ep_plugin.mxfp8.codec import as_form
from ep_plugin.mxfp8.gemm import CpuReference, RowGroups
from tests.moe import PATHS, Problem, make_experts, make_inputs
from tests.stack import Faults, Stack, compare, loss, one_step

TESTS = Path(__file__).parent
TABLE = (TESTS.parent / "docs" / "known-faults.md").read_text()
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in TABLE.splitlines()
    if line.startswith("| ") and not line.startswith("| seen in")
]
SEEN = 27  # rows of public reports that were collected


def names_in(file: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_every_row_names_tests_that_exist(row):
    """Fault: a fault whose test was renamed away, or never written."""
    assert len(row) == 3 and row[1]
    named = re.findall(r"`([^`]+)`", row[2])
    assert named, row
    for identifier in named:
        file, _, name = identifier.partition("::")
        assert (TESTS / file).is_file() and name in names_in(TESTS / file), identifier


def test_no_row_is_lost():
    """Fault: a row that is deleted with its test."""
    assert len(ROWS) == SEEN


def biased(rank: int, world: int, path: str) -> Tensor:
    """Zero weights and an output bias of 1, with router weights at the output."""
    problem = Problem((3, 2), num_experts=4, top_k=2, hidden=8, width=4)
    local = problem.num_experts // world
    shapes = ((local, 8, 8), (local, 8, 4), (local, 8), (local, 8))
    parameters = [torch.nn.Parameter(torch.zeros(shape, dtype=torch.float64)) for shape in shapes]
    torch.nn.init.ones_(parameters[3])
    experts = GroupedMLP.from_parameters(*parameters, activation=Activation())
    mine = make_inputs(problem)[rank]
    dispatcher = problem.dispatcher(path, "output")
    out = moe_step(dispatcher, mine.x, mine.idx, mine.weight, experts)
    dispatcher.close()
    return (out.detach() - (mine.weight * (mine.idx >= 0)).sum(1, keepdim=True)).abs().max()


@pytest.mark.parametrize("path", PATHS)
def test_an_output_bias_counts_once_per_route(pool, path):
    """A bias that every rank of a group adds again."""
    assert max(float(error) for error in pool.run(biased, 2, path)) < 1e-12


def first_call_in_a_checkpoint(rank: int, world: int, path: str) -> Faults:
    """Two layers in one checkpointed region, on a dispatcher that has no buffers yet; then once more."""
    problem = Problem((4, 3), num_experts=4, hidden=6, width=4, top_k=2)
    plain = Stack(problem, 2, rank, path)
    want = one_step(plain, plain.forward)
    plain.close()
    stack = Stack(problem, 2, rank, path)
    faults = []
    for turn in ("first", "second"):
        x = stack.input()
        out = checkpoint(stack.forward, x, use_reentrant=False)
        loss(out).backward()
        faults += compare(f"{turn} call", [out.detach(), x.grad, *stack.gradients()], want)
    stack.close()
    return faults


@pytest.mark.parametrize("path", PATHS)
def test_the_first_call_may_be_inside_a_checkpoint(pool, path):
    """Buffers that are made at the first call, inside a region that is run again in backward."""
    assert pool.run(first_call_in_a_checkpoint, 2, path) == [[], []]


def test_bfloat16_rows_are_not_padded():
    """Experts of 3 and 5 rows that get 16 each: other sums after a resume that does not pad."""
    dispatcher = build_dispatcher(
        EPConfig(dispatcher="local"), num_experts=2, top_k=1, hidden_size=4, dtype=torch.bfloat16
    )
    idx = torch.tensor([0] * 3 + [1] * 5)[:, None]
    x = torch.randn(8, 4).bfloat16()
    d = dispatcher.dispatch(dispatcher.plan(idx), x, torch.ones(8, 1))
    assert d.offsets.tolist() == [0, 3, 8] and torch.equal(d.rows, x)


def test_mxfp8_groups_need_no_multiple_of_32():
    """Groups of 44, 0, 1 and 33 rows: a kernel that takes whole blocks of rows drops or mixes the rest."""
    counts = torch.tensor([44, 0, 1, 33])
    offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    g = torch.Generator().manual_seed(0)
    rows = torch.randn(int(offsets[-1]), 64, generator=g).bfloat16()
    weight = torch.randn(4, 32, 64, generator=g).bfloat16() / 8
    operand = as_form(codec.quantize(rows), "records", "rceil", dtype=torch.bfloat16, offsets=offsets)
    got = CpuReference().product(operand, weight, RowGroups(offsets, len(rows), torch.bfloat16), 2)
    expert = torch.arange(4).repeat_interleave(counts)
    want = (rows.double().unsqueeze(1) @ weight[expert].double().transpose(1, 2)).squeeze(1)
    noise = (got.double() - want).square().sum(1) / want.square().sum(1)
    assert float(noise.max()) < 10**-2.0  # 20 dB in every row


def compilations(rank: int, world: int, counts: tuple[int, ...]) -> int:
    """How often a compiled model around one layer is compiled as its number of tokens varies."""
    problem = Problem((4, 4), num_experts=4, top_k=2, hidden=8)
    dispatcher, experts = problem.dispatcher("dedup"), make_experts(problem, rank, world)
    made = 0

    def backend(graph, example):
        nonlocal made
        made += 1
        return graph.forward

    def model(x: Tensor, idx: Tensor, weight: Tensor) -> Tensor:
        return moe_step(dispatcher, x * 2, idx, weight, experts) + x

    compiled = torch.compile(model, backend=backend)
    for tokens in counts:
        x = torch.randn(tokens, 8, dtype=torch.float64)
        idx = torch.randint(0, 4, (tokens, 2))
        compiled(x, idx, torch.rand(tokens, 2, dtype=torch.float64))
    dispatcher.close()
    torch.compiler.reset()
    return made


def test_a_compiled_model_is_not_compiled_for_every_number_of_tokens(pool):
    """A compilation for each of the numbers of tokens from 1 to 300."""
    counts = tuple(range(1, 301, 23))
    assert max(pool.run(compilations, 2, counts)) <= 8 < len(counts)
