"""``ep-bench`` on GPUs: the profiler's kernels find their spans; NVTX ranges can be made."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from ep_plugin.bench import layer
from ep_plugin.bench.__main__ import parse
from ep_plugin.bench.plots import plot_phases
from ep_plugin.dispatch import spans

Ranks = tuple[int, int, torch.device]


def test_every_span_of_a_step_has_its_device_time(ranks: Ranks, tmp_path: Path) -> None:
    """Kernels that are given to no span or to a wrong one, and streams that are mixed up."""
    rank, _, device = ranks
    shape = ["-T", "4096", "-D", "2048", "-K", "4", "-E", "16", "-F", "512", "--repeats", "3", "--device", "cuda"]
    result = layer.run(parse(["layer", *shape, "--trace", str(tmp_path / "trace.json")]), device)
    for name, figures in result["backends"].items():
        found = {s["path"]: s for s in figures["spans"]}
        by_backend = {
            "block": ("dispatch > all-to-all", "dispatch > local permute"),
            "rowwise": ("plan > route map", "dispatch > fan-out", "combine > sum"),
            "rowwise:route": ("plan > route map", "dispatch > put", "combine > get and reduce"),
        }
        for path in ("experts", "", *by_backend[name]):
            assert found[path]["device_ms"] > 0, (name, path)
        total = sum(s["device_ms"] for s in found.values())
        # Profiling slows the hosts, and kernels that wait for a peer then wait longer.
        assert 0.5 * figures["step_ms"] < total < 3 * max(figures["step_ms"], figures["host_ms"]), (name, total)
    crossing = {s["path"]: s for s in result["backends"]["rowwise"]["spans"]}["dispatch > cross"]
    assert crossing["side_ms"] > 0
    if rank == 0:
        trace = json.loads((tmp_path / "trace.json").read_text())
        assert any(event.get("cat") == "kernel" for event in trace["traceEvents"])
        plot_phases(result, tmp_path / "plot.png")


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
