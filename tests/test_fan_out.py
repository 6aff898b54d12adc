"""``ep-bench fan-out``: both ways move what the report's Figure 19 draws, and the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ep_plugin.bench import fan_out
from ep_plugin.bench.__main__ import parse
from ep_plugin.bench.fan_out import Point, Routes, expert_ids, points

T, K, E, WORLD = 24, 3, 6, 3
ARGUMENTS = [
    "fan-out",
    "-T",
    str(T),
    "-D",
    "16",
    "-K",
    str(K),
    "-E",
    str(E),
    "--world",
    "3",
    "--repeats",
    "1",
    "--remote",
    "0,0.5,1",
]


def test_points_are_every_fraction_and_every_number_of_ranks():
    """Catches a sweep that misses an end, or measures a point twice."""
    found = points([0, 1], 4)
    assert len(set(found)) == len(found) == 8
    assert [(p.remote, p.ranks) for p in found if p.sources == "one"] == [(0, 3), (1, 3), (1, 2), (1, 1)]


def test_routes_leave_as_the_point_says():
    """Catches routes that stay, go to more ranks than asked for, or come from ranks without tokens."""
    for rank in range(4):
        dest = expert_ids(Point("all", 1, 2), 400, 4, 8, rank=rank, world=4) // 2
        assert set(dest.unique().tolist()) == {(rank + 1) % 4, (rank + 2) % 4}
        assert torch.bincount(dest.flatten()).max() == 800
        half = expert_ids(Point("all", 0.5, 3), 400, 4, 8, rank=rank, world=4) // 2
        assert 0.4 < (half != rank).float().mean() < 0.6
        alone = expert_ids(Point("one", 0, 3), 400, 4, 8, rank=rank, world=4)
        assert (alone // 2 == 0).all() if rank == 0 else (alone == -1).all()


def measured(rank: int, world: int, folder: str) -> dict[str, Any]:
    return fan_out.run(parse([*ARGUMENTS, "--plot", f"{folder}/plot.png"]), torch.device("cpu"))


def test_both_ways_are_measured_at_every_point(pool, tmp_path: Path):
    """Catches a way that is not measured, link bytes of own rows, and a picture that is not drawn."""
    row = 16 * 4
    for result in pool.run(measured, WORLD, str(tmp_path)):
        assert [(p["sources"], p["remote"], p["ranks"]) for p in result["points"]] == [
            (sources, *spread) for sources in ("all", "one") for spread in ((0, 2), (0.5, 2), (1, 2), (1, 1))
        ]
        for p in result["points"]:
            for way in ("put", "get"):
                assert p[way]["ms"] == p[way]["sweep_ms"][p[way]["launch"]] > 0
                assert p[way]["link_gb_s"] == pytest.approx(p["link_bytes"] / p[way]["ms"] / 1e6)
            if p["remote"] != 0.5:
                assert p["link_bytes"] == p["remote"] * T * K * row
        assert result["points"][-1]["row_bytes"] == T * K * row  # one source, all to one rank
        assert result["limits"]["link_gb_s"] > 0
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def differing(rank: int, world: int) -> str:
    idx = expert_ids(Point("all", 0.5, 1), T, K, E, rank=rank, world=world)
    routes = Routes.of(idx, E, torch.device("cpu"))
    moved = fan_out.FanOut(torch.randn(T, 16), max(routes.rows), "shm")
    try:
        for lost in ("none", "row", "put", "get"):
            moved.clear()
            for way in ("put", "get"):
                if way != lost:
                    moved.call(way, routes, "torch")()
            fan_out.meet(torch.device("cpu"))
            if lost == "row":
                moved.got[1, 3] += 1
            try:
                moved.require_same(routes.rows[rank])
                said = "same"
            except RuntimeError as error:
                said = str(error)
            first = {"none": "same", "row": "1 of", "put": f"{routes.rows[rank]} of", "get": f"{routes.rows[rank]} of"}
            if not said.startswith(first[lost]):
                return f"{lost}: {said}"
    finally:
        moved.close()
    return ""


def test_ways_that_differ_are_told(pool):
    """Catches figures of a way that moves something else, or nothing."""
    assert pool.run(differing, 2) == ["", ""]
