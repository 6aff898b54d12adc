"""``ep-bench step``: the crossover of the report's Figure 12, and figures that add up to the steps."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from ep_plugin.bench.__main__ import main, parse
from ep_plugin.bench.step import NO_EP, Phases, crossover, measured_crossover, told_crossover


def phases(forward_backward: float, sync: float, update: float) -> Phases:
    made = Phases(forward_backward, sync, update)
    made.steps = {n: made.step(n) for n in (1, 2, 4, 6, 7, 8, 16)}
    return made


def test_crossover_of_figure_12():
    """Catches a crossover that counts the step's end once for each microbatch, or leaves one of its parts out."""
    without, ep = phases(120, 200, 200), phases(160, 60, 60)  # the widths of the figure's boxes
    assert crossover(without, ep) == 7
    assert without.step(7) == ep.step(7)
    assert measured_crossover(without, ep) == (6, 7)  # a tie is no gain
    assert "up to 6 microbatches, and no longer from 7; by the parts up to 7.0" in told_crossover(without, ep)


def test_ep_that_always_or_never_ends_earlier():
    """Catches a crossover at a negative number of microbatches, and one where the lines never meet."""
    without = phases(120, 200, 200)
    always, never = phases(110, 60, 60), phases(160, 300, 200)
    assert crossover(without, always) == math.inf and measured_crossover(without, always) == (16, math.inf)
    assert crossover(without, never) == 0 and measured_crossover(without, never) == (0, 1)
    assert told_crossover(without, never).startswith("EP ends no measured step earlier")
    assert crossover(without, phases(110, 400, 400)) == 0


def test_numbers_of_microbatches_are_checked(capsys):
    """Catches a step of no microbatch, which would time nothing."""
    with pytest.raises(SystemExit):
        parse(["step", "--microbatches", "0,2"])
    assert "argument --microbatches" in capsys.readouterr().err


def test_a_run_adds_up(tmp_path: Path):
    """Catches parts that leave out what a step does: gradients that are not sent, experts that are not updated."""
    out, plot = tmp_path / "step.json", tmp_path / "step.png"
    shape = ["-T", "16", "-D", "16", "-F", "16", "-K", "2", "-E", "4", "--layers", "1", "--repeats", "2"]
    command = ["step", "--world", "2", *shape, "--microbatches", "1,2", "--json", str(out), "--plot", str(plot)]
    assert main(command) == 0
    backends = json.loads(out.read_text())["backends"]
    assert list(backends) == [NO_EP, "block", "rowwise"]
    for name, figures in backends.items():
        assert list(figures["steps"]) == ["1", "2"]
        assert min(figures["forward_backward"], figures["sync"], figures["update"]) > 0
        assert ("crossover" in figures) == (name != NO_EP)
    assert plot.stat().st_size > 10_000
