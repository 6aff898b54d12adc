"""``ep_plugin.bench.node8``: its checks find faults, its verdict is the target's, a run keeps what it has."""

from __future__ import annotations

import contextlib
import io
import json
import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from ep_plugin.bench import node8, node8_checks
from ep_plugin.bench.fuzz_case import NAMES
from ep_plugin.bench.node8_memory import Memory, expected, peak_of
from ep_plugin.bench.node8_verdict import verdicts
from ep_plugin.topology import ProcessGroups, layout

PATHS = ("block", "dedup", "route")
SMALL = ["-T", "16", "-D", "16", "-K", "2", "-E", "8", "-F", "8", "--repeats", "1", "--layers", "8"]
SMALL += ["--memory-tokens", "8", "--memory-hidden", "16", "--memory-width", "64"]


# The parts


def found_fault(rank: int, world: int, tensor: str | None) -> str:
    """What the check of EP1 × EP_DP2 says where rank 1 has a wrong ``tensor``."""
    honest = node8_checks.step

    def faulty(*args: Any) -> list[torch.Tensor]:
        got = honest(*args)
        if rank == 1 and tensor is not None:
            got[NAMES.index(tensor)] *= 1.5
        return got

    node8_checks.step = faulty
    try:
        cases = node8_checks.check_folding(ProcessGroups.create(layout(world, ep=1)), PATHS, torch.device("cpu"), "shm")
        return f"{cases} cases"
    except node8_checks.Mismatch as error:
        return str(error)
    finally:
        node8_checks.step = honest


def test_a_check_finds_what_is_wrong_on_one_rank(pool):
    """Catches a check that compares nothing, or only rank 0. dup of rank 1 is in rank 0's sum over EP_DP too."""
    assert pool.run(found_fault, 2, None) == ["12 cases"] * 2
    for tensor, ranks in (("out", (1,)), ("dup", (0, 1))):
        for text in pool.run(found_fault, 2, tensor):
            for path in PATHS:
                assert f"{path}, weight_at hidden, distinct routes, rank 1: {tensor}: error" in text
            assert ("rank 0:" in text) == (0 in ranks)


def foldings_of_eight(rank: int, world: int) -> list[int]:
    cpu = torch.device("cpu")
    return [
        node8_checks.check_folding(ProcessGroups.create(layout(world, ep=ep)), PATHS, cpu, "shm") for ep in (2, 4, 8)
    ]


def test_every_folding_of_a_node(pool):
    """Catches a sum over EP_DP that only comes out right with two replicas."""
    assert pool.run(foldings_of_eight, 8) == [[12, 12, 12]] * 8


def result(**totals: float) -> dict[str, Any]:
    figures = {name: {"total_ms": total} for name, total in totals.items()}
    return {"peers": {n: f for n, f in figures.items() if n == "nccl"}, "backends": figures}


def test_the_verdict_is_the_targets():
    """Catches a ratio upside down, and a target that counts as reached without a measurement."""
    reached = [v.reached for v in verdicts(result(nccl=2.0, rowwise=1.5, deepep=1.6, block=1.875))]
    assert reached == [True, True, True]
    assert [v.reached for v in verdicts(result(nccl=1.9, rowwise=1.5, deepep=1.4, block=1.8))] == [False] * 3
    assert [v.reached for v in verdicts(result(rowwise=1.5))] == [None] * 3
    assert "0.750 × 2.000 ms" in verdicts(result(nccl=2.0, rowwise=1.5))[0].line()


def test_expected_memory_is_equation_9s():
    """Catches B counted without the gradient or the moments, and dense parameters that EP would divide."""
    without = Memory(1, "local", 8000, 8, state=8 * 9000, peak=100_000, heap=0, step_ms=1, tokens_per_s=1)
    four = expected(without, 4)
    assert (four.expert_parameters, four.state, four.total) == (2000, 8 * 3000, 100_000 - 8 * 6000)


def test_the_peak_counts_what_lives_at_a_time():
    """Catches a sum over all that was ever made, and what an earlier measurement left behind."""
    kept = []

    def work() -> None:
        for _ in range(3):
            torch.empty(1_000_000, dtype=torch.uint8)
        kept.append(torch.empty(500_000, dtype=torch.uint8))

    for _ in range(2):
        assert 1_000_000 <= peak_of(work, torch.device("cpu")) < 1_400_000
        kept.clear()


def test_bad_options_end_it_before_processes_start(tmp_path: Path, capsys):
    """Catches a shape that eight processes would all stumble over."""
    for options, text in (
        (["-E", "9"], "num_experts=9"),
        (["--backends", "nccl,megatron"], "'megatron' is not one of"),
        (["--world", "1"], "must be at least 2"),
        (["-D", "0"], "argument -D/--hidden"),
    ):
        with pytest.raises(SystemExit):
            node8.parse(["--device", "cpu", "--world", "2", "--out", str(tmp_path), *options])
        assert text in capsys.readouterr().err


# A run's steps


def session(folder: str, world: int, *options: str) -> node8.Session:
    args = node8.parse(["--device", "cpu", "--world", str(world), "--out", folder, *SMALL, *options])
    return node8.Session(args, torch.device("cpu"), time.monotonic())


def spent(rank: int, world: int, folder: str) -> tuple[int, str]:
    """A run that has no time."""
    with contextlib.redirect_stdout(io.StringIO()) as told:
        status = session(folder, world, "--budget", "0", "--backends", "nccl").run()
    return status, told.getvalue()


def test_a_spent_budget_is_told(pool, tmp_path: Path):
    """Catches a run that goes on after its time, or that keeps quiet about what it left out."""
    (status, told), (_, quiet) = pool.run(spent, 2, str(tmp_path))
    assert status == 0 and quiet == ""
    assert "skipped, --budget 0 s: check EP2, check without EP, dispatch D=16 nccl, memory no EP" in told
    steps = json.loads((tmp_path / "node8.json").read_text())["steps"]
    assert len(steps) == 6 and {step["status"] for step in steps} == {"skipped"}


def stumbling(rank: int, world: int, folder: str) -> tuple[int, str, list[str]]:
    """Rank 1 fails alone in the first of two steps; the third would take longer than the time that is left."""
    with contextlib.redirect_stdout(io.StringIO()) as told:
        s = session(folder, world, "--budget", "100")

        def step() -> str:
            if rank == 1:
                raise MemoryError("no room")
            return "fine"

        s.do("one", "first", step)
        s.do("two", "second", lambda: "fine")
        s.longest["two"] = 101.0
        s.do("two", "third", lambda: "fine")
        status = s._conclude()
    return status, told.getvalue(), [outcome.status for outcome in s.outcomes]


def test_a_step_that_fails_on_one_rank_ends_no_run(pool, tmp_path: Path):
    """Catches ranks that part after a failure, a failure that is no exit status, and an estimate that is not used."""
    found = pool.run(stumbling, 2, str(tmp_path))
    assert [(status, steps) for status, _, steps in found] == [(1, ["failed", "done", "skipped"])] * 2
    assert "FAILED: first: rank 1: MemoryError: no room" in found[0][1]
    assert "s left, needs 101 s" in found[0][1]


# Whole runs


def run(folder: Path, world: int, *options: str) -> dict[str, Any]:
    command = ["--device", "cpu", "--world", str(world), "--out", str(folder), *SMALL, *options]
    assert node8.main(command) == 0
    found: dict[str, Any] = json.loads((folder / "node8.json").read_text())
    return found


def look(found: dict[str, Any], folder: Path, world: int, foldings: list[str]) -> None:
    """Everything was done, and the memory is what equation 9 says."""
    assert {step["status"] for step in found["steps"]} == {"done"}
    assert list(found["checks"]) == [*(f"{name} block dedup route" for name in foldings), f"EP1 × EP_DP{world} local"]
    assert set(found["dispatch"]["16"]["backends"]) == {"block", "rowwise", "rowwise:route"}
    assert found["dispatch"]["16"]["peers"]["nccl"]["total_ms"] > 0
    assert set(found["layer"]["16"]["backends"]) == {"block", "rowwise", "rowwise:route"}
    assert "GPUs" in found["left_out"]["deepep"]
    ways = [Memory(**way) for way in found["memory"]]
    degrees = [d for d in (2, 4, 8) if world % d == 0]
    assert sorted({way.ep for way in ways}) == [1, *degrees]
    for way in ways:
        e = expected(ways[0], way.ep)
        assert (way.expert_parameters, way.state) == (e.expert_parameters, e.state)
        assert math.isclose(way.peak, e.total, rel_tol=0.3), (way, e)
    assert [v["reached"] for v in found["verdicts"]["16"]][1] is None  # no DeepEP on CPU
    for picture in ("dispatch-D16.png", "layer-D16.png", "totals.png", "memory.png"):
        assert (folder / picture).stat().st_size > 10_000
    assert "combine backward" in (folder / "phases.txt").read_text()


def test_two_processes(tmp_path: Path):
    """Catches a step that fails, is left out, or is missing in what the run leaves."""
    look(run(tmp_path, 2), tmp_path, 2, ["EP2"])


def whole(rank: int, world: int, folder: str) -> int:
    with contextlib.redirect_stdout(io.StringIO()):
        return session(folder, world).run()


@pytest.mark.slow
def test_four_processes(pool, tmp_path: Path):
    """Catches steps of a folding that two processes do not have: some ranks share experts, others have replicas."""
    assert pool.run(whole, 4, str(tmp_path)) == [0] * 4
    found = json.loads((tmp_path / "node8.json").read_text())
    look(found, tmp_path, 4, ["EP4", "EP2 × EP_DP2"])
