"""Launch settings stored by shape and read back."""

from __future__ import annotations

import contextlib
import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ep_plugin.config import EPConfig, LaunchConfig
from ep_plugin.dispatch import build_dispatcher
from ep_plugin.dispatch.tuned import Shape, read_table, resolve, store
from tests import dist

SHAPE = Shape(16384, 4096, 8, 128, 2, "dedup", "torch.bfloat16", "NVIDIA H200")
FOUND = LaunchConfig(chunks=3, put=24, reduce=198, back=6)


def test_what_was_found_for_a_shape_comes_back(tmp_path: Path) -> None:
    """Settings of another shape, of a batch far away, or of an older run; and a setting that does not win over the
    table."""
    table = tmp_path / "launch.json"
    store(table, SHAPE, LaunchConfig(chunks=8), dispatch_ms=2.0)
    store(table, replace(SHAPE, hidden_size=2048), LaunchConfig(chunks=2))
    store(table, replace(SHAPE, tokens=4096), LaunchConfig(chunks=1))
    store(table, SHAPE, FOUND, dispatch_ms=1.0, combine_ms=0.5)
    assert len(read_table(table)) == 3
    asked = LaunchConfig(table=str(table))
    assert resolve(asked, SHAPE) == replace(FOUND, table=str(table))
    assert resolve(asked, replace(SHAPE, tokens=14000)).chunks == 3
    assert resolve(asked, replace(SHAPE, tokens=5000)).chunks == 1
    assert resolve(replace(asked, chunks=5), SHAPE) == replace(FOUND, chunks=5, table=str(table))


@pytest.mark.parametrize("other", [{"ep": 4}, {"form": "route"}, {"device": "NVIDIA B200"}, {"tokens": 8192}])
def test_a_shape_that_was_not_measured_keeps_the_defaults_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, other: dict[str, object]
) -> None:
    """Settings of one machine or degree that are taken for another's."""
    table = tmp_path / "launch.json"
    store(table, SHAPE, FOUND)
    asked = LaunchConfig(table=str(table))
    with caplog.at_level(logging.WARNING):
        assert resolve(asked, replace(SHAPE, **other)) == asked  # type: ignore[arg-type]
    assert "has no point near" in caplog.text and "ep-bench tune --store" in caplog.text


@pytest.mark.parametrize("text", [None, "{", "[]", '{"what": "waves", "format": 1}', '{"what": "launch", "format": 9}'])
def test_a_file_that_is_no_table_is_an_error_that_names_it(tmp_path: Path, text: str | None) -> None:
    """A typing error in a path that passes as "nothing was measured"."""
    table = tmp_path / "launch.json"
    if text is not None:
        table.write_text(text)
    with pytest.raises(ValueError, match="launch.table=.*launch.json"):
        read_table(table)


def _build(rank: int, world: int, folder: str) -> str:
    own = Path(folder) / str(rank)
    own.mkdir()
    with contextlib.chdir(own):  # so that the setting itself is the same on all ranks
        store("table.json", SHAPE, LaunchConfig(chunks=1 + rank))
        config = EPConfig(launch=LaunchConfig(table="table.json"))
        with pytest.raises(ValueError) as error:
            build_dispatcher(config, num_experts=4, top_k=2, hidden_size=8, dtype=torch.float32)
    return str(error.value)


def test_ranks_with_different_tables_are_told(tmp_path: Path) -> None:
    """Tables of one name on several hosts that say different things: chunk counts then differ between ranks, which wait
    for signals that never come."""
    for said in dist.run(_build, 2, str(tmp_path)):
        assert "different settings of launch.table" in said
