"""Tables of wave schedules: which schedule ``auto`` takes, and what ``ep-bench waves`` says of a sweep."""

from __future__ import annotations

import contextlib
import io
import json
import logging
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ep_plugin.adapters.huggingface import patch_model
from ep_plugin.bench.__main__ import main as bench
from ep_plugin.bench.__main__ import parse
from ep_plugin.bench.waves import hidden
from ep_plugin.bench.waves_arguments import schedules
from ep_plugin.bench.waves_trace import Account, Kernel, account_of, intersection, kernels_of, union
from ep_plugin.config import EPConfig, ScheduleConfig
from ep_plugin.tables import FORMAT
from ep_plugin.topology import ProcessGroups, layout
from ep_plugin.waves.tuned import Shape, choose, read_table, resolve
from tests.hf_models import EXPERTS, HIDDEN, TOP_K, WIDTH, build, tokens
from tests.launched import free_port, run_as_torchrun

SHAPE = Shape(
    tokens=16384, hidden_size=2048, width=768, top_k=8, num_experts=128, ep=2, dtype="bfloat16",
    dispatcher="rowwise", form="dedup", precision="bf16", device="NVIDIA H200",
)  # fmt: skip
WAVE = ScheduleConfig("wave_overlapped", 2, width=32, spare=16)


def point(schedule: ScheduleConfig, median: float, spread: float = 0.01, shape: Shape = SHAPE) -> dict[str, Any]:
    time = {"median": median, "low": median - spread, "high": median + spread}
    return {"shape": asdict(shape), "schedule": asdict(schedule), "forward": time, "step": time}


def table(path: Path, *points: dict[str, Any]) -> ScheduleConfig:
    path.write_text(json.dumps({"what": "waves", "format": FORMAT, "points": points}))
    return ScheduleConfig("auto", table=str(path))


def test_auto_takes_whichever_won(tmp_path):
    """Fault: waves are taken because they were asked for, or compared with a point without waves that is not the best;
    what noise could turn round is called a gain."""
    slow, best = point(ScheduleConfig(width=4), 9.0), point(ScheduleConfig(width=64), 5.0)
    wins = table(tmp_path / "wave.json", slow, best, point(WAVE, 4.5))
    assert resolve(wins, SHAPE) == WAVE
    loses = table(tmp_path / "none.json", slow, best, point(WAVE, 5.2))
    assert resolve(loses, SHAPE) == ScheduleConfig(width=64)
    beats_only_the_slow = table(tmp_path / "slow.json", slow, best, point(WAVE, 8.0))
    assert resolve(beats_only_the_slow, SHAPE).kind == "none"
    noise = table(tmp_path / "noise.json", point(ScheduleConfig(width=64), 5.0, 0.2), point(WAVE, 4.9, 0.2))
    assert resolve(noise, SHAPE) == ScheduleConfig(width=64)


def test_a_shape_that_was_not_measured_runs_without_waves(tmp_path, caplog):
    """Fault: what was fastest for another shape, precision or device is taken for this one."""
    setting = table(tmp_path / "t.json", point(ScheduleConfig(), 5.0), point(WAVE, 3.0))
    assert resolve(setting, SHAPE) == WAVE
    assert resolve(setting, replace(SHAPE, tokens=12000)) == WAVE  # near enough
    others = dict(
        tokens=4096, hidden_size=4096, width=None, ep=8, precision="mxfp8", device="NVIDIA B300", form="route"
    )
    for name, value in others.items():
        with caplog.at_level(logging.WARNING):
            assert resolve(setting, replace(SHAPE, **{name: value})) == ScheduleConfig(), name
        assert "has no run without waves" in caplog.text
        assert ("expert_width of build_dispatcher too: give it" in caplog.text) == (name == "width")
        caplog.clear()
    with caplog.at_level(logging.WARNING):
        assert resolve(setting, replace(SHAPE, tokens=None)) == ScheduleConfig()
    assert "by max_tokens too: give it" in caplog.text
    only_waves = table(tmp_path / "waves.json", point(WAVE, 3.0))
    assert resolve(only_waves, SHAPE) == ScheduleConfig()


def test_the_nearest_number_of_tokens_decides(tmp_path):
    """Fault: points of several batch sizes are compared with each other."""
    small = replace(SHAPE, tokens=12288)
    points = [point(ScheduleConfig(), 5.0), point(WAVE, 6.0), point(ScheduleConfig(), 4.0, shape=small)]
    choice = choose([*points, point(WAVE, 3.0, shape=small)], replace(SHAPE, tokens=16000))
    assert choice.won.kind == "none" and choice.gain == 0
    assert choose([*points, point(WAVE, 3.0, shape=small)], replace(SHAPE, tokens=12000)).gain == pytest.approx(0.25)


def test_tables_that_are_none_are_refused(tmp_path):
    """Fault: a missing or foreign file is read as an empty table, and silently means no waves."""
    with pytest.raises(ValueError, match="cannot be read"):
        read_table(tmp_path / "missing.json")
    (tmp_path / "tune.json").write_text(json.dumps({"what": "tune"}))
    with pytest.raises(ValueError, match="is not a table of ep-bench waves of format 1: it says what='tune'"):
        read_table(tmp_path / "tune.json")


def test_megatron_is_told_that_it_calls_the_phases_itself():
    """Fault: a wave schedule under Megatron fails in the middle of a step, or is quietly not used."""
    options = pytest.importorskip("ep_plugin.adapters.megatron_options")
    config = SimpleNamespace(overlap_moe_expert_parallel_comm=True, moe_shared_expert_overlap=False)
    ep = EPConfig(schedule=ScheduleConfig("wave_overlapped"))
    with pytest.raises(ValueError, match=r"use schedule.kind='none'.*\(overlap_moe_expert_parallel_comm is on\)"):
        options.check_options(config, ep, "plugin", ep_size=2, etp_size=1)


def kernel(what: str, stream: int, begin: float, end: float) -> Kernel:
    return Kernel(what, stream, begin, end)


def test_accounts_of_a_step():
    """Fault: time is counted twice where kernels of one kind overlap, or hidden communication counts as exposed."""
    none = account_of([kernel("dispatch", 7, 0, 2), kernel("experts", 7, 2, 8), kernel("combine", 7, 8, 10)], {})
    assert (none.comm, none.gemm, none.both, none.whole, none.exposed) == (4, 6, 0, 10, 4)
    wave = account_of(
        [
            kernel("dispatch", 8, 0, 1), kernel("plan", 9, 0.5, 1), kernel("experts", 7, 1, 8),
            kernel("dispatch", 8, 1, 3), kernel("combine", 9, 2, 4), kernel("combine", 9, 8, 8.5),
        ],
        {},
    )  # fmt: skip
    assert (wave.comm, wave.gemm, wave.both, wave.whole) == (4.5, 7, 3, 8.5)
    assert "67 % of the schedule's communication" in none.against(wave)
    measured = choose([point(ScheduleConfig(), 10.0), point(WAVE, 8.5)], SHAPE)
    assert hidden(measured, asdict(none)) == pytest.approx(1.5 / 4) and hidden(measured, None) is None
    assert union([(3, 4), (0, 2), (1, 3)]) == [(0, 4)] and intersection([(0, 4)], [(1, 2), (3, 9)]) == [(1, 2), (3, 4)]
    assert isinstance(wave, Account)


def test_kernels_of_a_trace():
    """Fault: a kernel is given to the phase in which it ran instead of that which launched it; waits for a peer count
    as communication; kernels of two steps are mixed."""

    def annotation(name: str, begin: float, end: float) -> dict[str, Any]:
        return {"cat": "user_annotation", "name": f"ep/{name}", "ts": begin, "dur": end - begin, "args": {}}

    def launched(number: int, time: float, name: str, begin: float, end: float, stream: int) -> list[dict[str, Any]]:
        args = {"correlation": number}
        return [
            {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": time, "dur": 1, "args": args},
            {"cat": "kernel", "name": name, "ts": begin, "dur": end - begin, "args": {**args, "stream": stream}},
        ]

    events = [
        annotation("step", 0, 100), annotation("dispatch/l", 1, 10), annotation("put", 2, 5),
        annotation("experts/l", 10, 20), annotation("step", 200, 300), annotation("combine/l", 210, 220),
        *launched(1, 3, "_put_unique", 30, 40, 8), *launched(2, 6, "_wait", 40, 90, 8),
        *launched(3, 12, "gemm", 35, 60, 7), *launched(4, 50, "autograd", 60, 70, 7),
        *launched(5, 215, "_reduce", 1000, 1010, 9),
    ]  # fmt: skip
    first, second = kernels_of({"traceEvents": events})
    assert [(k.what, k.stream) for k in first] == [("dispatch", 8), ("experts", 7), ("", 7)]
    assert [(k.what, k.begin) for k in second] == [("combine", 0.0)]
    assert first[1].begin == pytest.approx(0.005)


def test_the_sweep_is_what_was_asked_for():
    """Fault: a schedule is left out of the sweep, or the best point without waves is not looked for at every width."""
    args = parse(["waves", "--world", "2", "--widths", "0,8", "--waves", "1,2", "--spares", "auto,8"])
    points = list(schedules(args))
    assert [p.width for p in points if p.kind == "none"] == [0, 8]
    assert len([p for p in points if p.kind == "wave_sequential"]) == 4
    assert len([p for p in points if p.kind == "wave_overlapped"]) == 8
    with pytest.raises(SystemExit):
        parse(["waves", "--world", "2", "--kinds", "none,overlap"])


def printed(arguments: list[str]) -> str:
    """What ep-bench prints on this rank."""
    with contextlib.redirect_stdout(io.StringIO()) as text:
        assert bench(arguments) == 0
    return text.getvalue()


@pytest.mark.slow
def test_a_sweep_resumes_and_its_table_serves_auto(pool, tmp_path):
    """Fault: a run that was cut off measures everything again or loses points; the file is no table for ``auto``;
    nothing says which schedule won."""
    file = tmp_path / "waves.json"
    shape = ["--world", "2", "-T", "64", "-D", "32", "-F", "32", "-E", "4", "-K", "2", "--repeats", "2"]
    command = ["waves", *shape, "--widths", "0", "--json", str(file)]

    def run(*more: str) -> str:
        text, other = pool.run(run_as_torchrun, 2, free_port(), printed, [*command, *more])
        assert not other
        return text

    first = run("--waves", "2", "--kinds", "none,wave_overlapped")
    assert len([line for line in first.splitlines() if " width " in line and " forward " in line]) >= 2
    second = run("--waves", "2,3", "--timeline", "--plot", str(tmp_path / "picture.png"))
    assert "wave_sequential" in second and "step: won: " in second and "T_comm" in second
    points = json.loads(file.read_text())["points"]
    assert len(points) == 5  # none, and of 2 and 3 waves the control and the overlapped one
    before = {json.dumps(p, sort_keys=True) for p in points}
    assert "step: won: " in run("--waves", "2,3") and before == {
        json.dumps(p, sort_keys=True) for p in json.loads(file.read_text())["points"]
    }
    assert (tmp_path / "picture-sweep.png").stat().st_size > 10_000
    assert (tmp_path / "picture-timeline.png").stat().st_size > 10_000
    assert choose(read_table(file), Shape(**points[0]["shape"])).none is not None


def patched(rank: int, world: int, schedule: ScheduleConfig) -> list[ScheduleConfig]:
    model = build("plain", torch.float32)
    groups = ProcessGroups.create(layout(world, ep=world))
    handle = patch_model(model, EPConfig(schedule=schedule, max_tokens=16, timeout_s=30.0), groups)
    ids = tokens(0, rank)
    model(ids, ids).loss.backward()
    found = [dispatcher.config.schedule for dispatcher in handle.dispatchers]
    handle.close()
    groups.destroy()
    return found


def test_a_patched_model_finds_what_is_stored_for_its_experts(pool, tmp_path):
    """Fault: the adapter does not say how wide its experts are, so that no stored point is for them."""
    shape = Shape(
        tokens=16, hidden_size=HIDDEN, width=WIDTH, top_k=TOP_K, num_experts=EXPERTS, ep=2, dtype="float32",
        dispatcher="rowwise", form="dedup", precision="bf16", device="cpu",
    )  # fmt: skip
    won = ScheduleConfig("wave_overlapped", 2)
    for width, found in ((WIDTH, won), (2 * WIDTH, ScheduleConfig())):
        of = replace(shape, width=width)
        setting = table(tmp_path / f"{width}.json", point(ScheduleConfig(), 5.0, shape=of), point(won, 3.0, shape=of))
        assert pool.run(patched, 2, setting) == [[found]] * 2
