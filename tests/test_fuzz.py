"""The fuzzer: it passes on the code, finds faults that are put in, and reports a small case that runs again."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ep_plugin.bench.fuzz import PLANTS, Fuzzer, main
from ep_plugin.bench.fuzz_case import DTYPES, ROUTES, Case, Setting, differences, draw_case, draw_setting
from tests import dist

WORLD = 4


@st.composite
def cases(draw: st.DrawFn, world: int = WORLD) -> Case:
    """Any case of ``world`` ranks; simpler ones first, so that hypothesis shrinks towards them."""
    ep = draw(st.sampled_from([d for d in (2, 4, 1) if world % d == 0]))
    path = draw(st.sampled_from(["block", "dedup", "route"] if ep > 1 else ["local", "block", "dedup", "route"]))
    local = draw(st.integers(1, 4))
    by = draw(st.sampled_from(["token", "expert"] if local > 1 else ["token"]))
    waves = path != "local" and draw(st.booleans())
    dtype = draw(st.sampled_from(list(DTYPES)))
    setting = Setting(
        ep=ep,
        etp=draw(st.sampled_from([d for d in (1, 2, 4) if (world // ep) % d == 0])),
        path=path,
        weight_at=draw(st.sampled_from(["hidden", "input", "output", *([] if path == "dedup" else ["source"])])),
        policy=draw(st.sampled_from(["dropless", "rank", "source", "expert"])),
        factor=draw(st.sampled_from([1.25, 1.0, 0.3, 1.2, 2.0])),
        schedule=draw(st.sampled_from(["wave_sequential", "wave_overlapped"])) if waves else "none",
        waves=draw(st.sampled_from([2, 1])),
        by=by,
        dtype=dtype,
        local_experts=local,
        top_k=draw(st.integers(1, min(4, ep * local))),
        hidden=draw(st.sampled_from([1, 5, 8])),
        width=draw(st.sampled_from([3, 8])),
    )
    tokens = tuple(draw(st.integers(0, 9)) for _ in range(ep))
    return Case(
        setting,
        tokens=tokens,
        routes=draw(st.sampled_from(ROUTES)),
        weight_dtype=draw(st.sampled_from([dtype, "float32"])),
        index_dtype=draw(st.sampled_from(["int64", "int32"])),
        strided=draw(st.booleans()),
        seed=draw(st.integers(0, 1000)),
    )


def replayed(rank: int, world: int, text: str) -> list[str]:
    fuzzer = Fuzzer(torch.device("cpu"), timeout_s=20.0)
    failure = fuzzer.replay(Case.from_json(text))
    fuzzer.close()
    return [] if failure is None else failure.lines


@settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(case=cases())
def test_any_case_is_what_the_oracle_says(case):
    """Fault: some combination of routes, shape, dtype, policy, form, folding and schedule gives other numbers."""
    assert dist.run(replayed, WORLD, case.to_json())[0] == []


def searched(rank: int, world: int, seed: int, sets: int, plant: str, delays: bool) -> tuple:
    fuzzer = Fuzzer(torch.device("cpu"), plant=plant, delays=delays, timeout_s=20.0)
    outcome = fuzzer.search(seed, sets=sets, minutes=None)
    fuzzer.close()
    failure, smallest = outcome.failure, outcome.smallest
    if failure is None or smallest is None:
        return outcome.sets, None, None, []
    return outcome.sets, failure.case.to_json(), smallest.case.to_json(), smallest.lines


@pytest.mark.parametrize("delays", [False, True])
def test_fifty_sets_without_a_fault(pool, delays):
    """Fault: the search itself reports one where there is none."""
    for sets, failure, _, lines in pool.run(searched, 2, 3, 50, "none", delays):
        assert sets == 50 and failure is None, lines


@pytest.mark.parametrize("plant", [name for name in PLANTS if name != "none"])
def test_a_planted_fault_is_found_and_made_small(pool, plant):
    """Fault of the fuzzer: it passes whatever the code does, or its smallest case is no smaller or does not fail."""
    results = pool.run(searched, 2, 0, 300, plant, False)
    assert results[0] == results[1]  # ranks that do not agree would hang the next search
    _, failure, smallest, lines = results[0]
    assert failure is not None, f"{plant} was not found"
    case, first = Case.from_json(smallest), Case.from_json(failure)
    assert sum(case.tokens) <= min(4, sum(first.tokens)) and case.setting.schedule == "none", smallest
    assert lines and all(line.startswith("rank ") for line in lines)
    if plant != "dropped-wait":  # which is a matter of time
        assert dist.run(replayed, 2, smallest)[0] == [], "without the plant the case must pass"


def test_the_comparison_sees_what_it_must():
    """Fault: NaN, another dtype, a missing row or a value where nothing was routed counts as equal."""
    rng = random.Random(5)
    case = replace(draw_case(rng, draw_setting(rng, 2, "cpu"), "cpu"), tokens=(3, 2), routes="any", strided=False)
    setting = replace(case.setting, ep=2, dtype="float64", policy="dropless", weight_at="hidden")
    case = replace(case, setting=setting, weight_dtype="float64")
    want = case.oracle(0)[0]
    assert differences(case, want, want, 0, 0) == []

    def changed(position: int, tensor: torch.Tensor) -> list[str]:
        got = list(want)
        got[position] = tensor
        return differences(case, got, want, 0, 0)

    assert "out: error" in changed(0, want[0] + 1e-6)[0]
    assert "nan" in changed(1, want[1] * float("nan"))[0]
    assert "expected" in changed(2, want[2].float())[0]
    assert "expected" in changed(3, want[3][:1, :1])[0]
    empty = want[1].clone()
    want[1] = torch.zeros_like(want[1])
    assert "not 0" in " ".join(changed(1, empty * 1e-12))


def test_a_router_gradient_may_be_as_far_off_as_its_arithmetic():
    """Fault: terms that cancel are taken for a fault of the transport, or anything passes once they may."""
    setting = Setting(
        ep=1, etp=1, path="dedup", weight_at="output", policy="dropless", factor=1.0, schedule="none", waves=2,
        by="expert", dtype="bfloat16", local_experts=4, top_k=4, hidden=64, width=32,
    )  # fmt: skip
    case = Case(setting, (1,), "one-expert", "bfloat16", "int64", False, seed=480984530420)
    want, mine = case.oracle(0)[0], case.inputs(0)[0]
    up, down, up_bias, down_bias = (p[int(mine.idx[0, 0])].double() for p in setting.parameters())

    def rounded(exact: torch.Tensor) -> torch.Tensor:
        return exact.bfloat16().double()

    a, b = (rounded(rounded(mine.x.double() @ up.T) + up_bias)).chunk(2, dim=-1)
    y = rounded(rounded(rounded(torch.nn.functional.silu(a) * b) @ down.T) + down_bias)
    got = [tensor.to(torch.bfloat16) for tensor in want]
    got[2] = (y * mine.grad.double()).sum(-1, keepdim=True).expand(1, 4).to(torch.bfloat16)
    assert float((got[2] - want[2]).abs().max()) > 0.1, "a case in which nothing cancels shows nothing"
    assert differences(case, got, want, 0, 0) == []
    got[2] = got[2] + 1
    assert differences(case, got, want, 0, 0)[0].startswith("dweight: error")


def test_smaller_cases_are_smaller_and_end():
    """Fault: shrinking runs in circles."""
    rng = random.Random(1)
    for _ in range(50):
        case = draw_case(rng, draw_setting(rng, 4, "cpu"), "cpu")
        steps = 0
        while (smaller := next(case.smaller(), None)) is not None:
            case, steps = smaller, steps + 1
            assert steps < 200
        assert sum(case.tokens) == 0 and case.setting.top_k == 1


def test_a_case_survives_its_text():
    """Fault: the case that is reported is not the one that failed."""
    rng = random.Random(2)
    case = draw_case(rng, draw_setting(rng, 4, "cpu"), "cpu")
    assert Case.from_json(case.to_json()) == case
    for text in ("{}", "5", json.dumps({"setting": {}, "tokens": []})):
        with pytest.raises(ValueError, match="no case"):
            Case.from_json(text)


@pytest.mark.slow
def test_the_command_reports_a_planted_fault(capfd):
    """Fault: an exit status of 0, or no line to run the case again, where a set failed."""
    assert main(["--sets", "50", "--world", "2", "--plant", "swapped-rows", "--seed", "3"]) == 1
    printed = capfd.readouterr().out
    assert "MISMATCH" in printed and "--replay '{" in printed
