"""Files in which benchmarks keep what they found, by shape: ``{"what": ..., "format": 1, "points": [...]}``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FORMAT = 1
NEAR = 1.5  # a batch counts as measured if its tokens are within this factor of a point's
WRITERS = {"launch": "ep-bench tune --store", "waves": "ep-bench waves"}


def read_points(path: str | Path, what: str, setting: str) -> list[dict[str, Any]]:
    """The points of the table at ``path``, which is to be one of ``what`` (a key of ``WRITERS``). Raises ``ValueError``
    naming ``setting``, the file and what is wrong with it."""
    try:
        table = json.loads(Path(path).read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(f"{setting}={str(path)!r} cannot be read: {error}") from error
    if not isinstance(table, dict) or table.get("what") != what or table.get("format") != FORMAT:
        said = table.get("what") if isinstance(table, dict) else None
        raise ValueError(
            f"{setting}={str(path)!r} is not a table of {WRITERS[what]} of format {FORMAT}: it says what={said!r}"
        )
    points: list[dict[str, Any]] = table["points"]
    return points
