"""What ``node8`` says of the target: rowwise beside two bare all-to-alls, DeepEP and block, on the same routes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

OF_BARE = 0.75  # × two bare all-to-alls of one row per route, at most
BELOW_BLOCK = 0.20  # of block's time, at least: what the report saved


@dataclass(frozen=True)
class Verdict:
    """One comparison; ``reached`` None: a side of it was not measured."""

    what: str
    figures: str
    reached: bool | None

    def line(self) -> str:
        """For people."""
        word = {True: "reached", False: "missed", None: "not measured"}[self.reached]
        return f"{self.what}: {word}{f' ({self.figures})' if self.figures else ''}"


def verdicts(result: dict[str, Any]) -> list[Verdict]:
    """Of a result of ``ep-bench dispatch``. Dispatch and combine together, the route map in them; the bare
    all-to-alls need none."""
    totals = {name: figures["total_ms"] for name, figures in (result["backends"] | result["peers"]).items()}
    rowwise = totals.get("rowwise")

    def compare(what: str, other: str, most: float) -> Verdict:
        if rowwise is None or other not in totals:
            return Verdict(what, "", None)
        ratio = rowwise / totals[other]
        return Verdict(what, f"{rowwise:.3f} ms = {ratio:.3f} × {totals[other]:.3f} ms", ratio <= most)

    return [
        compare(f"rowwise at most {OF_BARE} × two bare all-to-alls", "nccl", OF_BARE),
        compare("rowwise ahead of DeepEP v2", "deepep", 1.0),
        compare(f"rowwise at least {BELOW_BLOCK:.0%} below block", "block", 1 - BELOW_BLOCK),
    ]
