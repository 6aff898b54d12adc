"""MXFP8 over the GPU path of rowwise, under Triton's interpreter: its rows, sums and gradients against the CPU path's.

Legend: T tokens of a rank, K routes per token, E experts, D hidden size, F expert width, RB bound of rows received.
"""

from __future__ import annotations

from dataclasses import astuple, fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ep_plugin.config import LaunchConfig, LegsConfig, MXFP8Config
from ep_plugin.mxfp8 import build_mxfp8_dispatcher, node
from tests import dist
from tests.moe import Problem, Result, make_experts, make_inputs, oracles, same_bits
from tests.test_mxfp8_node import GATES, Swapped, faults, run_step

pytest.importorskip("triton")

BASE = Problem(
    (5, 3), "any", num_experts=4, top_k=2, hidden=64, width=32, dtype=torch.bfloat16, weight_dtype=torch.float32
)
ALL, NONE = LegsConfig(), LegsConfig(*("bf16",) * 4)
ONE = [replace(NONE, **{leg: "mxfp8"}) for leg in vars(NONE)]


def gemm_reading(form: str) -> Any:
    """An expert GEMM that takes rows in ``form`` and multiplies what they stand for with plain weights."""
    from ep_plugin.mxfp8.codec import Operand, dequantize
    from ep_plugin.mxfp8.gemm import ExpertGemm, RowGroups

    class Reading(ExpertGemm):
        name = f"reads {form}"

        @staticmethod
        def refusal(device: torch.device) -> str | None:
            return None

        def product(self, rows: Operand, weight: Tensor, layout: RowGroups, contract: int) -> Tensor:
            assert rows.form == form
            if form == "records":
                plain = dequantize(rows.data, torch.float32, offsets=layout.offsets)
            else:
                plain = rows.data.float() * (1 if rows.scales is None else rows.scales[:, None])
            matrix = self._weight_rows(weight.float(), contract).transpose(1, 2)
            return layout.plain(plain, matrix).matmul(plain, matrix).to(layout.dtype)

    Reading.form = form  # type: ignore[assignment]
    return Reading()


def device_dispatcher(
    heap: Any, problem: Problem, path: str, weight_at: str, mxfp8: MXFP8Config, gemm: Any, **settings: Any
) -> Any:
    from ep_plugin.mxfp8.movements import Wires
    from ep_plugin.mxfp8.rowwise_device import DeviceRowwiseMXFP8

    return DeviceRowwiseMXFP8(
        problem.config(path, weight_at, slots=2, **settings),
        num_experts=problem.num_experts,
        top_k=problem.top_k,
        hidden_size=problem.hidden,
        dtype=problem.dtype,
        device=heap.device,
        rank=heap.rank,
        world=heap.world,
        heap=heap,
        owns_heap=False,
        mxfp8=mxfp8,
        wires=Wires.of(mxfp8, problem.hidden, problem.dtype),
        gemm=gemm,
    )


Case = tuple[str, str, str, Problem, LegsConfig, LaunchConfig]


def check_cases(rank: int, world: int, cases: list[Case], gates: dict[str, float]) -> None:
    """Prints what differs from the CPU path, with the same GEMM, or from the oracle."""
    from tests.interpreted_heap import InterpretedHeap, without_streams

    heap = InterpretedHeap()
    want = oracles(rank, world, [(problem, weight_at) for _, weight_at, _, problem, _, _ in cases])
    wrong = []
    for path, weight_at, form, problem, legs, launch in cases:
        mxfp8 = MXFP8Config(legs=legs)
        cpu = build_mxfp8_dispatcher(
            problem.config(path, weight_at),
            mxfp8,
            num_experts=problem.num_experts,
            top_k=problem.top_k,
            hidden_size=problem.hidden,
            dtype=problem.dtype,
            heap=heap.shm,
        )
        cpu.gemm = gemm_reading(form)
        experts, mine = make_experts(problem, rank, world), make_inputs(problem)[rank]
        expected = run_step(cpu, experts, mine)
        cpu.close()
        with without_streams():
            dispatcher = device_dispatcher(
                heap, problem, path, weight_at, mxfp8, gemm_reading(form), launch=launch, max_tokens=max(problem.tokens)
            )
            first, second = (run_step(dispatcher, experts, mine) for _ in range(2))
            heap.check()
            dispatcher.close()
        found = faults(second, want[problem, weight_at], gates)
        if not all(map(same_bits, astuple(first), astuple(second))):
            found.append("the second step differs")
        found += [
            f"{field.name} differs from the CPU path's"
            for field in fields(Result)
            if not same_bits(getattr(second, field.name), getattr(expected, field.name))
        ]
        wrong += [f"rank {rank}, {path}, {weight_at}, {form}, {legs}, {launch}, {problem}: {f}" for f in found]
    assert not wrong, f"{len(wrong)} faults\n" + "\n".join(wrong[:20])


def check_swapped(rank: int, world: int) -> None:
    """The negative control: the dispatched rows are read after the gradients took their place."""
    from tests.interpreted_heap import InterpretedHeap, without_streams

    heap, wide = InterpretedHeap(), replace(BASE, tokens=(8, 5))
    want = oracles(rank, world, [(wide, "hidden")])[wide, "hidden"]
    node.Backward = Swapped  # type: ignore[misc]
    for path, wrong in (("route", ["dup"]), ("dedup", [])):
        with without_streams():
            dispatcher = device_dispatcher(
                heap, wide, path, "hidden", MXFP8Config(), gemm_reading("plain"), max_tokens=max(wide.tokens)
            )
            got = run_step(dispatcher, make_experts(wide, rank, world), make_inputs(wide)[rank])
            dispatcher.close()
        found = [fault.split(":")[0] for fault in faults(got, want)]
        assert found == wrong, (path, found)


def assert_right(cases: list[Case], gates: dict[str, float] = GATES) -> None:
    dist.run_apart(check_cases, cases[0][3].world, cases, gates, TRITON_INTERPRET="1")


PLAIN = LaunchConfig()
CHUNKS = LaunchConfig(chunks=2, early=True)


def test_both_forms() -> None:
    """Fault: a record that goes to the wrong row, is decoded with another's scales, or is read before it has come."""
    assert_right(
        [("dedup", "hidden", "plain", BASE, ALL, CHUNKS), ("route", "hidden", "rowwise", BASE, ALL, CHUNKS)],
    )


@pytest.mark.slow
def test_every_form_of_rows() -> None:
    """Fault: rows in a form that the GEMM does not take; weights at another place."""
    forms = ("dedup", "rowwise"), ("dedup", "records"), ("route", "plain"), ("route", "records")
    cases: list[Case] = [(path, "hidden", form, BASE, ALL, PLAIN) for path, form in forms]
    cases += [("dedup", "output", "plain", BASE, ALL, PLAIN), ("route", "source", "rowwise", BASE, ALL, PLAIN)]
    assert_right(cases)


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 4])
def test_rows_that_stay_and_rows_that_leave(world: int) -> None:
    """Fault: one row per route where a rank has no tokens, keeps all its rows or none, or drops some: a row that
    neither kernel writes, or a wait for a signal of rows that nobody sends."""
    tokens = {1: [(5,)], 2: [(5, 0), (3, 4)], 4: [(2, 0, 3, 1)]}[world]
    some = [replace(BASE, tokens=t, policy="rank", factor=0.8) for t in tokens]
    if world == 2:
        some += [replace(BASE, tokens=(3, 2), routes=name, factor=2.0) for name in ("to_own_rank", "to_last_rank")]
    few = dict.fromkeys(GATES, 0.0)  # a handful of numbers has no noise to speak of; the CPU path's bits are asked for
    assert_right([("route", "hidden", "rowwise", problem, ALL, CHUNKS) for problem in some], few)


@pytest.mark.slow
@pytest.mark.parametrize("path", ["dedup", "route"])
def test_every_leg(path: str) -> None:
    """Fault: a leg that ignores its format, or shares a buffer with one of another width."""
    assert_right([(path, "hidden", "plain", BASE, legs, PLAIN) for legs in (*ONE, NONE)])


@pytest.mark.slow
def test_reading_the_rows_after_their_slot_was_written_fails() -> None:
    """The control: with the last two steps of backward swapped, the gates fail where the slot is shared."""
    dist.run_apart(check_swapped, 2, TRITON_INTERPRET="1")
