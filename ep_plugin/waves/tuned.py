"""Tables of tuning runs, and the schedule they say is fastest for a shape.

A table is a JSON file that ``ep-bench waves`` writes: ``{"what": "waves", "format": 1, "points": [...]}``. A point has
``shape`` (the fields of ``Shape``), ``schedule`` (those of ``ScheduleConfig`` but ``kind='auto'`` and ``table``) and,
in milliseconds, ``forward`` and ``step`` (forward and backward) as ``{"median", "low", "high"}``, low and high being
the quartiles of the slowest rank.
"""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from ..config import ScheduleConfig
from ..tables import NEAR, read_points

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Shape:
    """What a schedule is chosen for. ``tokens``: of a rank, None where it is not known; ``width``: F of an expert, None
    likewise; ``ep``: ranks; ``form``: of rowwise, else empty; ``precision``: ``bf16`` or
    ``mxfp8``."""

    tokens: int | None
    hidden_size: int
    width: int | None
    top_k: int
    num_experts: int
    ep: int
    dtype: str
    dispatcher: str
    form: str
    precision: str
    device: str

    def fits(self, point: dict[str, Any]) -> bool:
        """Whether ``point`` of a table was measured for this shape."""
        for field in fields(self):
            own, its = getattr(self, field.name), point["shape"].get(field.name)
            if field.name == "tokens":
                if own is None or its is None or not its / NEAR <= own <= its * NEAR:
                    return False
            elif own != its:
                return False
        return True


@dataclass(frozen=True)
class Choice:
    """The best points of a shape: without waves, with waves (None: not measured), and which of them won.

    ``won``: the schedule to use. ``gain``: how much less time it takes than the best point without waves, as a share of
    that; 0 where that won. ``time``: what they were compared by."""

    none: dict[str, Any] | None
    wave: dict[str, Any] | None
    won: ScheduleConfig
    gain: float
    time: str


def read_table(path: str | Path) -> list[dict[str, Any]]:
    """The points of a table. Raises ``ValueError`` naming the file and what is wrong with it."""
    return read_points(path, "waves", "schedule.table")


def choose(points: list[dict[str, Any]], shape: Shape, time: str = "step") -> Choice:
    """What the ``points`` of a table say of ``shape``, by ``time`` (``step`` or ``forward``).

    A wave schedule wins if three quarters of its runs are faster than three quarters of those of the best point without
    waves: what noise could turn round is decided for no waves. Without a point of either kind there are no waves."""
    own = [p for p in points if shape.fits(p)]
    tokens = [p["shape"]["tokens"] for p in own]
    if shape.tokens is not None and tokens:
        nearest = min(tokens, key=lambda t: (abs(t - shape.tokens), t))
        own = [p for p in own if p["shape"]["tokens"] == nearest]
    best: dict[bool, dict[str, Any]] = {}
    for point in own:
        waves = point["schedule"]["kind"] != "none"
        if waves not in best or point[time]["median"] < best[waves][time]["median"]:
            best[waves] = point
    none, wave = best.get(False), best.get(True)
    if none is None:
        return Choice(None, wave, ScheduleConfig(), 0.0, time)
    if wave is not None and wave[time]["high"] < none[time]["low"]:
        gain = 1 - wave[time]["median"] / none[time]["median"]
        return Choice(none, wave, ScheduleConfig(**wave["schedule"]), gain, time)
    return Choice(none, wave, ScheduleConfig(**none["schedule"]), 0.0, time)


def resolve(schedule: ScheduleConfig, shape: Shape) -> ScheduleConfig:
    """``schedule`` itself, or for ``auto`` what its table says; logs which and why."""
    if schedule.kind != "auto":
        return schedule
    assert schedule.table is not None  # validated
    choice = choose(read_table(schedule.table), shape)
    if choice.none is None:
        unknown = {"max_tokens": shape.tokens, "expert_width of build_dispatcher": shape.width}
        missing = " and ".join(name for name, value in unknown.items() if value is None)
        logger.warning(
            "schedule.kind='auto': %s has no run without waves of %s, so there are no waves; %s",
            schedule.table,
            asdict(shape),
            f"a shape is looked up by {missing} too: give it" if missing else "ep-bench waves makes one",
        )
    else:
        logger.info("schedule.kind='auto': %s (%.1f %% less than without waves)", choice.won, 100 * choice.gain)
    return choice.won
