"""Launch settings that ``ep-bench tune`` found, kept in a file by shape, and read back when buffers are made.

A table is ``{"what": "launch", "format": 1, "points": [...]}``; a point has ``shape`` (the fields of ``Shape``),
``launch`` (those of ``LaunchConfig`` but ``table``) and, in milliseconds, ``dispatch_ms`` and ``combine_ms``.
"""

from __future__ import annotations

import json
import logging
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..config import LaunchConfig
from ..tables import FORMAT, NEAR, read_points

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Shape:
    """What launch settings are chosen for. ``tokens``: the most of a rank; ``ep``: ranks; ``form``: of rowwise."""

    tokens: int
    hidden_size: int
    top_k: int
    num_experts: int
    ep: int
    form: str
    dtype: str
    device: str

    def distance(self, point: dict[str, Any]) -> float | None:
        """How far the tokens of ``point`` are from these, as a factor of at least 1; None if it is of another shape."""
        other = point["shape"]
        if any(value != other.get(name) for name, value in asdict(self).items() if name != "tokens"):
            return None
        low, high = sorted((max(1, self.tokens), max(1, other["tokens"])))
        return high / low


def read_table(path: str | Path) -> list[dict[str, Any]]:
    """The points of a table. Raises ``ValueError`` naming the file and what is wrong with it."""
    return read_points(path, "launch", "launch.table")


def store(path: str | Path, shape: Shape, launch: LaunchConfig, **figures: float) -> None:
    """Add a point to the table at ``path``, which is made if it is not there; a point of the same shape is replaced."""
    points = read_table(path) if Path(path).exists() else []
    points = [p for p in points if p["shape"] != asdict(shape)]
    settings = {name: value for name, value in asdict(launch).items() if name != "table"}
    points.append({"shape": asdict(shape), "launch": settings, **figures})
    new = Path(f"{path}.new")
    new.write_text(json.dumps({"what": "launch", "format": FORMAT, "points": points}, indent=1) + "\n")
    os.replace(new, path)


def resolve(launch: LaunchConfig, shape: Shape) -> LaunchConfig:
    """``launch`` with what its table says of ``shape`` where it has zeros; itself without a table or without a point
    near the shape, which is logged."""
    if launch.table is None:
        return launch
    points = read_table(launch.table)
    near = [(d, i) for i, point in enumerate(points) if (d := shape.distance(point)) is not None]
    if not near or min(near)[0] > NEAR:
        logger.warning("launch.table: %s has no point near %s; ep-bench tune --store makes one", launch.table, shape)
        return launch
    found = points[min(near)[1]]["launch"]
    chosen = LaunchConfig(**{**found, **{k: v for k, v in asdict(launch).items() if v}})
    logger.info("launch.table: %s for %s", chosen, shape)
    return chosen
