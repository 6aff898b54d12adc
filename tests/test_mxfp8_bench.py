"""``ep-bench mxfp8``: its figures say what they claim, and what it cannot run is refused before a process starts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ep_plugin.bench import mxfp8
from ep_plugin.bench.__main__ import parse

TINY = ["mxfp8", "-T", "64", "-D", "64", "-F", "64", "-K", "2", "-E", "8", "--repeats", "1", "--world", "2"]


def figures(rank: int, world: int) -> dict[str, Any]:
    return mxfp8.run(parse(TINY), torch.device("cpu"))


def test_figures(pool: Any) -> None:
    """Fault: a ratio upside down, a leg or a gradient left out, parameters counted among what is kept."""
    result = pool.run(figures, 2)[0]
    assert set(result["backends"]) == {"rowwise", "rowwise:route"}
    for found in result["backends"].values():
        assert found["bytes"]["ratio"] == 33 / 64
        ratios = found["ratios"]["cpu_ref"]
        for leg in mxfp8.LEGS:
            assert ratios[leg] == found["movements"]["cpu_ref"][leg] / found["movements"]["bf16"][leg]
        assert ratios["layer_speedup"] == found["layer"]["bf16"]["step_ms"] / found["layer"]["cpu_ref"]["step_ms"]
        assert 0.3 < ratios["kept"] < 0.56
        for name, least, most in (("bf16", 40, 60), ("cpu_ref", 18, 32)):
            quality = found["quality"][name]
            assert set(quality) == {"out", "dx", "drouter_weight", "dup", "ddown"}
            assert all(least < value < most for value in quality.values()), quality
            kept = found["kept"][name]
            assert kept["bytes"] == sum(entry["bytes"] for entry in kept["tensors"])


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["-D", "48"], "--hidden 48: MXFP8 rows are blocks of 32"),
        (["-F", "16"], "--width 16: MXFP8 rows are blocks of 32"),
    ],
)
def test_widths_are_checked_on_the_command_line(
    extra: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fault: processes start, and all of them fail."""
    with pytest.raises(SystemExit):
        parse([*TINY, *extra])
    assert message in capsys.readouterr().err
