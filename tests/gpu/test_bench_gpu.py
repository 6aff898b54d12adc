"""``ep-bench`` on GPUs: the profiler's kernels find their spans; NVTX ranges can be made."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from ep_plugin.bench import dispatch, fan_out, layer
from ep_plugin.bench.__main__ import parse
from ep_plugin.bench.inputs import Inputs, backend
from ep_plugin.bench.plots import plot_phases
from ep_plugin.bench.spans import ON_DEVICE, read_spans, record
from ep_plugin.dispatch import build_dispatcher, spans

Ranks = tuple[int, int, torch.device]


SHAPE = ["-T", "4096", "-D", "2048", "-K", "4", "-E", "16", "-F", "512", "--repeats", "3", "--device", "cuda"]
EXPECTED = {
    "block": ("dispatch > all-to-all", "dispatch > local permute"),
    "rowwise": ("plan > route map", "dispatch > fan-out", "combine > sum"),
    "rowwise:route": ("plan > route map", "dispatch > put", "combine > get and reduce"),
}


def said(spans: Iterable[Any]) -> str:
    """Every span with its times, for the message of an assertion."""
    rows = [s if isinstance(s, dict) else vars(s) for s in spans]
    lines = (
        f"{r['path'] or '(none)':40} host {r['host_ms']:9.4f} device {r['device_ms']:9.4f} side {r['side_ms']:9.4f} ms"
        for r in rows
    )
    return "\n" + "\n".join(lines)


def test_every_span_of_a_step_has_its_device_time(ranks: Ranks, tmp_path: Path) -> None:
    """Kernels that are given to no span or to a wrong one."""
    result = layer.run(parse(["layer", *SHAPE, "--trace", str(tmp_path / "trace.json")]), ranks[2])
    for name, figures in result["backends"].items():
        found = {s["path"]: s for s in figures["spans"]}
        for path in ("experts", "", *EXPECTED[name]):
            assert path in found, (name, path, said(figures["spans"]))
            assert found[path]["device_ms"] > 0, (name, path, said(figures["spans"]))
        assert figures["step_ms"] > figures["forward_ms"] > 0, figures
    if ranks[0] == 0:
        trace = json.loads((tmp_path / "trace.json").read_text())
        assert any(event.get("cat") == "kernel" for event in trace["traceEvents"])
        plot_phases(result, tmp_path / "plot.png")


def test_spans_add_up_to_the_work_of_the_step(ranks: Ranks) -> None:
    """Streams that are mixed up, kernels that are counted twice, and work on the side stream that is not seen.

    What is compared comes from one trace: how long a step takes under the profiler, whose hosts are slow and whose
    kernels wait for each other, says nothing."""
    args = parse(["layer", *SHAPE])
    inputs = Inputs.make(args, ranks[2])
    config = backend("rowwise", heap="torch", max_tokens=args.tokens)
    config.capacity.factor = 2.0
    dispatcher = build_dispatcher(config, **inputs.shape, dtype=inputs.x.dtype, device=ranks[2])
    step = layer.Step("rowwise", dispatcher, inputs, args.width)
    for _ in range(3):
        step.step()
    calls = 3

    def queued() -> None:
        torch.cuda._sleep(40_000_000)  # until everything is launched, or no kernel waits beside another
        step.step()

    trace = record(queued, ranks[2], calls=calls)
    dispatcher.check()
    found = read_spans(trace)
    work = [e for e in trace["traceEvents"] if e.get("cat") in ON_DEVICE]
    ours = [e for e in work if "nccl" not in e["name"].lower()]  # the ranks meet before each step, by NCCL
    names = sorted({e["name"][:60] for e in ours})
    slept = sum(float(e["dur"]) for e in ours if "spin" in e["name"]) / calls / 1e3
    assert slept > 5, names
    given = sum(s.device_ms + s.side_ms for s in found) - slept
    whole = sum(float(e["dur"]) for e in ours) / calls / 1e3 - slept
    assert 0.95 * whole <= given <= 1.05 * whole, (given, whole, said(found), names)
    streams = {e["args"]["stream"] for e in ours}
    assert len(streams) >= 2, (streams, names)
    crossing = {s.path: s for s in found}
    assert "dispatch > cross" in crossing, said(found)
    cross = crossing["dispatch > cross"]
    assert cross.device_ms + cross.side_ms > 0, said(found)
    hidden = sum(s.side_ms for s in found)
    assert hidden > 0, said(found)
    dispatcher.close()


def test_limits_bind_and_both_fan_outs_move_the_same(ranks: Ranks, tmp_path: Path) -> None:
    """Copies that are not between the GPUs, and kernels that beat them because they move something else. (That PUT and
    GET leave the same rows, ``fan_out`` itself requires.)"""
    shape = ["-T", "4096", "-D", "2048", "-K", "8", "-E", "16", "--repeats", "3", "--device", "cuda", "--heap", "torch"]
    found = dispatch.run(parse(["dispatch", *shape, "--backends", "rowwise,rowwise:route"]), ranks[2])
    limits = found["limits"]
    assert 0 < limits["link_gb_s"] < limits["memory_gb_s"], limits
    for figures in found["backends"].values():
        for movement in ("dispatch", "combine"):
            assert 0 < figures["reached"][movement]["share"] < 1.05, (limits, figures["reached"])
    result = fan_out.run(parse(["fan-out", *shape, "--remote", "0,1", "--plot", str(tmp_path / "p.png")]), ranks[2])
    for point in result["points"]:
        for way in ("put", "get"):
            assert len(point[way]["sweep_ms"]) == 6 and point[way]["ms"] == min(point[way]["sweep_ms"].values())
            assert point[way]["share_of_link"] < 1.05, (limits, point)


def test_nvtx_ranges_can_be_made(ranks: Ranks) -> None:
    """A torch whose NVTX functions have other names."""
    spans.emit_nvtx()
    try:
        with spans.span("dispatch/layers.0"), spans.span("put"):
            torch.zeros(1, device=ranks[2])
        with torch.autograd.profiler.emit_nvtx(), spans.span("dispatch/layers.0"):
            torch.zeros(1, device=ranks[2])
    finally:
        spans.emit_nvtx(False)


@pytest.mark.parametrize("on", [False, True])
def test_a_span_costs_microseconds(ranks: Ranks, on: bool) -> None:
    """Spans that synchronise with the device."""
    busy = torch.randn(8192, 8192, device=ranks[2])
    spans.emit_nvtx(on)
    try:
        torch.cuda.synchronize()
        for _ in range(20):
            busy @ busy
        done = torch.cuda.Event()
        done.record()
        with spans.span("dispatch"):
            pass
        assert not done.query()
    finally:
        spans.emit_nvtx(False)
