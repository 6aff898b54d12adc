"""Numbers of a training step: what they are, how a line of progress shows them, and the JSONL file they go to."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class StepMetrics:
    """One optimizer step over all ranks.

    ``loss`` mean next-token cross-entropy in nats, without auxiliary terms; ``grad_norm`` of the whole gradient
    before clipping; ``tokens_per_s`` over all ranks; ``drop_rate`` dropped routes / routes asked; ``expert_load``
    routes of the fullest expert / mean routes of an expert, in the layer where that is worst; ``bytes_moved`` row
    bytes that dispatchers sent to other ranks, forward and backward, NaN where one does not count them.
    """

    run: str
    step: int
    loss: float
    lr: float
    grad_norm: float
    seconds: float
    tokens_per_s: float
    drop_rate: float
    expert_load: float
    bytes_moved: float

    def line(self, steps: int) -> str:
        """A line of progress."""
        done = f"{self.run:<16} step {self.step:>5}/{steps}  loss {self.loss:7.4f}  {self.tokens_per_s:>9,.0f} tokens/s"
        load = f"dropped {self.drop_rate:6.2%}  fullest expert {self.expert_load:5.2f} x mean"
        return f"{done}  {load}  moved {human_bytes(self.bytes_moved)}"


class MetricsLog:
    """Appends steps to a JSONL file, one object a line, each written through at once."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._file = open(path, "a", encoding="utf-8")

    def write(self, metrics: StepMetrics) -> None:
        """Append one step; NaN, which JSON lacks, as null."""
        values = {name: None if value != value else value for name, value in asdict(metrics).items()}
        self._file.write(json.dumps(values) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def total(counts: Iterable[int | None]) -> int | None:
    """The sum of ``counts``; None where one of them is not known."""
    result = 0
    for count in counts:
        if count is None:
            return None
        result += count
    return result


def moved(before: int | None, after: int | None) -> float:
    """What a counter rose by; NaN where it was not known."""
    return math.nan if before is None or after is None else float(after - before)


def human_bytes(count: float) -> str:
    """``count`` bytes with a decimal unit: 1.5 MB; "-" for NaN."""
    if math.isnan(count):
        return "-"
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
