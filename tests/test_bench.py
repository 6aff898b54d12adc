"""``ep-bench``: its figures add up, its traces and pictures show every backend and rank, bad input ends it early."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from ep_plugin.bench import dispatch, layer
from ep_plugin.bench.__main__ import main, parse
from ep_plugin.bench.plots import COLOURS, plot_phases
from ep_plugin.bench.spans import Span, Trace, merge, read_spans
from ep_plugin.dispatch import spans

TINY = ["-T", "24", "-D", "16", "-K", "2", "-E", "4", "--repeats", "1"]
BACKENDS = ["block", "rowwise", "rowwise:route"]


# Reading a trace


def host(name: str, start: float, end: float, thread: int = 1) -> dict[str, Any]:
    event = {"ph": "X", "cat": "user_annotation", "name": name, "pid": 7, "tid": thread}
    return event | {"ts": start, "dur": end - start, "args": {}}


def kernel(number: int, launched: float, start: float, end: float, stream: int = 20) -> list[dict[str, Any]]:
    launch = {"ph": "X", "cat": "cuda_driver", "name": "cuLaunchKernelEx", "pid": 7, "tid": 1, "ts": launched, "dur": 1}
    work = {"ph": "X", "cat": "kernel", "name": "k", "pid": 0, "tid": stream, "ts": start, "dur": end - start}
    return [
        launch | {"args": {"correlation": number}},
        work | {"args": {"correlation": number, "stream": stream}},
        {"ph": "s", "cat": "ac2g", "name": "ac2g", "id": number, "pid": 7, "tid": 1, "ts": launched},
    ]


def gpu_trace() -> Trace:
    """Two steps alike, 10 ms apart: a dispatch whose rows cross on stream 30 behind the fan-out and beyond it, experts,
    a collective on stream 40 while nothing else runs, and a backward on another thread."""
    events: list[dict[str, Any]] = [host("elsewhere", 0, 10), host("ep/put", 0, 10)]
    for step in range(2):
        t, n = 1000 + 10_000 * step, 100 * step
        events += [
            host("ep/step", t, t + 5000),
            host("ep/dispatch/layers.0/mlp", t + 100, t + 1000),
            host("ep/cross", t + 200, t + 300),
            host("ep/fan-out", t + 300, t + 600),
            host("ep/experts/layers.0/mlp", t + 1000, t + 1500),
            host("ep/all-to-all", t + 2000, t + 2500),
            host("ep/combine backward/layers.0/mlp", t + 3000, t + 3400, thread=2),
            *kernel(n + 1, t + 150, t + 160, t + 180),  # of the dispatch, in no inner range
            *kernel(n + 2, t + 250, t + 1000, t + 3000, stream=30),
            *kernel(n + 3, t + 350, t + 1200, t + 2200),
            *kernel(n + 4, t + 400, t + 2200, t + 2600),
            *kernel(n + 5, t + 1100, t + 3100, t + 4100),
            *kernel(n + 6, t + 2100, t + 4100, t + 4900, stream=40),
            *kernel(n + 7, t + 3100, t + 4900, t + 5000),
            *kernel(n + 8, t + 3500, t + 5000, t + 5300),  # of no range but the step
        ]
    return {"traceEvents": events[::-1], "baseTimeNanoseconds": 5_000_000}


def test_times_go_to_the_range_that_launched_them():
    """Catches time counted twice (in a range and around it), of the wrong stream or thread, or of no step."""
    found = {s.path: s for s in read_spans(gpu_trace())}
    expected = [
        Span("dispatch", host_ms=0.5, device_ms=0.02),
        Span("dispatch > cross", host_ms=0.1, device_ms=0.6, side_ms=1.4),
        Span("dispatch > fan-out", host_ms=0.3, device_ms=1.4),
        Span("experts", host_ms=0.5, device_ms=1.0),
        Span("all-to-all", host_ms=0.5, device_ms=0.8),
        Span("combine backward", host_ms=0.4, device_ms=0.1),
        Span("", host_ms=2.7, device_ms=0.3),
    ]
    assert list(found) == [s.path for s in expected]
    for s in expected:
        assert vars(found[s.path]) == pytest.approx(vars(s))
    assert sum(s.host_ms for s in found.values()) == pytest.approx(5.0)


def test_traces_of_ranks_are_on_one_clock_and_told_apart():
    """Catches ranks whose events fall on one another, arrows between ranks, and clocks that are not aligned."""
    other = gpu_trace() | {"baseTimeNanoseconds": 7_000_000}
    other["traceEvents"].append({"ph": "M", "name": "process_name", "pid": 7, "ts": 0, "args": {"name": "python"}})
    events = merge([[gpu_trace(), gpu_trace()], [other]])["traceEvents"]
    steps = [(e["pid"], e["ts"]) for e in events if e.get("name") == "ep/step"]
    first, second = {pid for pid, _ in steps}
    assert sorted(steps) == [(first, 1000)] * 2 + [(first, 11000)] * 2 + [(second, 3000), (second, 13000)]
    assert len({e["pid"] for e in events}) == 4  # a host and a device each
    arrows = [e["id"] for e in events if e.get("cat") == "ac2g"]
    assert len(arrows) == len(set(arrows)) == 3 * 16
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == ["rank 1: python"]


# Which profilers have the ranges made


class _Spanned(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        with spans.span("forward"):
            return x.clone()

    @staticmethod
    def backward(ctx, grad):
        with spans.span("backward"):
            return grad.clone()


def _step() -> None:
    _Spanned.apply(torch.ones(2, requires_grad=True)).sum().backward()


def _all_threads(**options: Any) -> torch.profiler.profile:
    from torch._C._profiler import _ExperimentalConfig

    return torch.profiler.profile(experimental_config=_ExperimentalConfig(profile_all_threads=True), **options)


@pytest.mark.parametrize("make", [torch.profiler.profile, _all_threads, torch.autograd.profiler.profile])
@pytest.mark.parametrize("thread", [False, True])
def test_every_profiler_of_torch_sees_the_ranges(make, thread):
    """Catches ranges that a profiler does not get, whichever threads it looks at, and ranges made while none is on."""
    assert spans.span("forward") is spans.span("backward")
    options = {} if make is torch.autograd.profiler.profile else {"activities": [torch.profiler.ProfilerActivity.CPU]}
    with make(**options) as profiler:
        if thread:
            other = threading.Thread(target=_step)
            other.start()
            other.join()
        else:
            _step()
    events = profiler.function_events if make is torch.autograd.profiler.profile else profiler.events()
    found = sorted(e.name for e in events if e.name.startswith("ep/"))
    assert found == (["ep/backward", "ep/forward"] if make is _all_threads or not thread else [])
    assert spans.span("forward") is spans.span("backward")


# NVTX


@pytest.fixture
def nvtx(monkeypatch):
    """What was pushed (its name) and popped (None), on a machine that has a GPU as far as anybody asks."""
    calls: list[str | None] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", calls.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: calls.append(None))
    yield calls
    spans.emit_nvtx(False)


def nested() -> None:
    with spans.span("dispatch/layers.0"):
        with pytest.raises(KeyError), spans.span("put"):
            raise KeyError


def test_nvtx_ranges_are_made_only_when_asked_for(nvtx):
    """Catches ranges that stay open, have other names than in torch's profiler, or are made by default."""
    nested()
    assert nvtx == []
    spans.emit_nvtx()
    nested()
    assert nvtx == ["ep/dispatch/layers.0", "ep/put", None, None]
    spans.emit_nvtx(False)
    nested()
    assert len(nvtx) == 4


@pytest.mark.parametrize(("value", "made"), [("1", True), ("0", False), ("", False)])
def test_the_environment_asks_for_nvtx_ranges(nvtx, monkeypatch, value, made):
    """Catches a variable that is not read, or is taken for set when it says no."""
    monkeypatch.setenv("EP_PLUGIN_NVTX", value)
    try:
        importlib.reload(spans)
        nested()
        assert bool(nvtx) == made
    finally:
        monkeypatch.delenv("EP_PLUGIN_NVTX")
        importlib.reload(spans)


def test_nvtx_without_a_gpu_says_so(monkeypatch):
    """Catches a switch that is ignored, or that breaks processes which have no GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="NVTX ranges need a GPU"):
        spans.emit_nvtx()
    monkeypatch.setenv("EP_PLUGIN_NVTX", "1")
    with pytest.warns(UserWarning, match="EP_PLUGIN_NVTX is set, but"):
        importlib.reload(spans)
    monkeypatch.delenv("EP_PLUGIN_NVTX")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        importlib.reload(spans)


# Runs


def run_layer(rank: int, world: int, trace: str) -> dict[str, Any]:
    args = parse(["layer", *TINY, "-F", "8", "--backends", ",".join(["local", *BACKENDS]), "--trace", trace])
    return layer.run(args, torch.device("cpu"))


def run_dispatch(rank: int, world: int) -> dict[str, Any]:
    return dispatch.run(parse(["dispatch", *TINY, "--routes", "uniform,one-rank"]), torch.device("cpu"))


def check_trace(trace: Trace, backends: list[str], ranks: int) -> None:
    """Every rank has every backend's phases, forward and backward."""
    by_process: dict[int, set[str]] = {}
    for event in trace["traceEvents"]:
        if event.get("cat") == "user_annotation":
            by_process.setdefault(event["pid"], set()).add(event["name"])
    assert len(by_process) == ranks
    phases = ("plan", "dispatch", "experts", "combine", "combine backward", "dispatch backward")
    for names in by_process.values():
        assert {f"ep/{phase}/{backend}" for phase in phases for backend in backends} <= names
    named = {e["args"]["name"].split(":")[0] for e in trace["traceEvents"] if e.get("name") == "process_name"}
    assert named == {f"rank {rank}" for rank in range(ranks)}


def check_spans(figures: dict[str, Any], wanted: set[str]) -> None:
    found = {s["path"]: s for s in figures["spans"]}
    assert wanted | {""} <= set(found)
    assert list(found)[0] == "plan" and list(found)[-1] == ""
    assert all(s["host_ms"] >= 0 and s["device_ms"] == s["side_ms"] == 0 for s in found.values())


def test_layer_reports_forward_backward_and_their_spans(pool, tmp_path):
    """Catches a backend that is not measured, a phase without a span, and a trace that lacks a rank or a backend."""
    trace = tmp_path / "trace.json"
    for result in pool.run(run_layer, 2, str(trace)):
        assert list(result["backends"]) == ["local", *BACKENDS]
        assert result["flops"] == 18 * 24 * 2 * 16 * 8
        for figures in result["backends"].values():
            assert 0 < figures["forward_ms"] and 0 < figures["step_ms"] == figures["host_ms"]
            assert figures["backward_ms"] == figures["step_ms"] - figures["forward_ms"]
            assert figures["tflops"] == pytest.approx(result["flops"] / figures["step_ms"] / 1e9)
            check_spans(figures, {"plan", "dispatch", "experts", "combine", "combine backward", "dispatch backward"})
        check_spans(result["backends"]["block"], {"plan > host split lists", "dispatch > all-to-all"})
        check_spans(result["backends"]["rowwise"], {"plan > exchange", "dispatch > put", "combine > sum"})
    check_trace(json.loads(trace.read_text()), ["local", *BACKENDS], 2)


def test_dispatch_reports_every_movement_and_its_spans(pool):
    """Catches a backend, a movement or a set of routes that is not measured, and routes that count as local when they
    are not."""
    for both in pool.run(run_dispatch, 2):
        assert list(both["route_sets"]) == ["uniform", "one-rank"] and both["routes"] == "uniform,one-rank"
        for kind, result in both["route_sets"].items():
            assert list(result["backends"]) == BACKENDS and result["routes"] == kind
            assert result["limits"] == both["limits"] and result["limits"]["link_gb_s"] > 0
            for figures in result["backends"].values():
                for movement in ("plan", "plan_dispatch", "combine", "total", "combine_backward", "dispatch_backward"):
                    assert figures[f"{movement}_ms"] == figures[movement]["median"] > 0
                check_spans(figures, {"plan", "dispatch", "combine"})
            waits = {s["path"]: s["host_ms"] for s in result["backends"]["block"]["spans"]}
            assert result["backends"]["block"]["host_wait_ms"] == waits["plan > host split lists"] > 0
            assert 0 <= result["remote_bytes"]["token"] <= result["remote_bytes"]["route"] <= 24 * 2 * 16 * 4
        assert dispatch.side_by_side(both)["backends"].keys() == {
            f"{name}, {kind}" for name in BACKENDS for kind in ("uniform", "one-rank")
        }
        all_to_one = both["route_sets"]["one-rank"][
            "backends"
        ]  # rank 0 receives all 48 routes of the other's 24 tokens
        for name, rows in {"block": 48, "rowwise": 24, "rowwise:route": 48}.items():
            for movement in ("dispatch", "combine"):
                assert all_to_one[name]["reached"][movement]["link_bytes"] == rows * 16 * 4


def test_the_picture_shows_phases_and_what_runs_beside_them(tmp_path):
    """Catches a picture without a backend's spans, or without those on other streams."""
    from matplotlib.image import imread

    result = {"what": "layer", "tokens": 1, "hidden_size": 1, "top_k": 1, "num_experts": 1, "world": 1}
    result |= {"dtype": "torch.bfloat16", "routes": "uniform", "device": "none"}
    seen = {}
    for name, figures in {
        "with": [Span("dispatch", 1, 1), Span("dispatch > cross", 1, 0, 3), Span("experts", 1, 4), Span("", 1, 1)],
        "without": [Span("dispatch", 1, 1), Span("experts", 1, 0), Span("", 1, 1)],
    }.items():
        plot_phases(result | {"backends": {name: {"spans": [vars(s) for s in figures]}}}, tmp_path / "p.png")
        pixels = (imread(tmp_path / "p.png")[..., :3] * 255).round().astype(int).reshape(-1, 3)
        seen[name] = {kind: int((pixels == _rgb(kind)).all(1).sum()) for kind in ("cross", "experts")}
    assert seen["with"]["experts"] > 4 * seen["without"]["experts"]  # the legend alone
    assert seen["with"]["cross"] > 1000 and seen["without"]["cross"] == 0


def _rgb(kind: str) -> list[int]:
    return [int(COLOURS[kind][i : i + 2], 16) for i in (1, 3, 5)]


@pytest.mark.slow
@pytest.mark.parametrize("command", [["dispatch"], ["layer", "-F", "8", "--trace", "trace.json"]])
def test_the_command_starts_its_processes_and_writes_its_files(tmp_path, command):
    """Catches options that are not passed on, and files that are written by no rank or by all."""
    files = ["--json", "result.json", "--plot", "plot.png"]
    where = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "ep_plugin.bench", *command, *TINY, "--world", "2", *files],
        cwd=tmp_path, env=where, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for name in BACKENDS:
        assert sum(line.startswith(f"{name} ") for line in done.stdout.splitlines()) == 1, done.stdout
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["what"], result["world"], list(result["backends"])) == (command[0], 2, BACKENDS)
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    if "--trace" in command:
        check_trace(json.loads((tmp_path / "trace.json").read_text()), BACKENDS, 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["dispatch", "--backends", "blck"], "did you mean 'block'"),
        (["layer", "--backends", "block:route"], "only rowwise has forms"),
        (["layer", "--backends", "rowwise:"], "form=''"),
        (["layer", "--trace", "nowhere/trace.json"], "--trace nowhere/trace.json: its folder does not exist"),
        (["dispatch", "--heap", "shn"], "did you mean 'shm'"),
        (["dispatch", "--routes", "uniform,zip"], "'zip' is not one of uniform, zipf"),
        (["layer", "--routes", "uniform,zipf"], "invalid choice"),
        (["fan-out", "--remote", "0,1.5"], "fractions of routes are 0 to 1"),
        (["fan-out", "--world", "1"], "a fan-out to other ranks needs at least two"),
        (["dispatch", "-E", "18"], "num_experts=18 is not divisible by the EP degree 4"),
        (["layer", "-K", "40"], "top_k=40 is larger than num_experts=32"),
        (["dispatch", "--heap", "nvshmem"], "--heap nvshmem needs --device cuda"),
        (["dispatch", "--repeats", "0"], "--repeats 0 at least 1"),
        (["tune"], "tune measures on GPUs"),
        (["waves", "--pairs"], "--pairs needs streams"),
        (["waves", "-E", "16", "--by", "expert"], "--waves 8 --by expert: a rank has 4 experts"),
    ],
)
def test_bad_arguments_end_before_any_process_is_started(capsys, monkeypatch, arguments, message):
    """Catches a benchmark that runs for minutes and then cannot write its result."""
    monkeypatch.setattr(subprocess, "call", lambda *_, **__: pytest.fail("processes were started"))
    with pytest.raises(SystemExit):
        main(arguments)
    assert message in capsys.readouterr().err
