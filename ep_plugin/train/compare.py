"""Curves side by side: how far they lie apart, how many routes flipped, and whether the launch shows what it must."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean

import torch
import torch.distributed as dist

from .loop import Curve
from .routes import flipped_routes
from .settings import CheckConfig

LAST = 100  # steps at the end of a run whose mean loss is compared


class CheckFailed(RuntimeError):
    """The launch ran to its end but did not show what ``check`` asks for."""


@dataclass(frozen=True)
class Difference:
    """A variant against the first: the largest |difference| of losses at any step, that of the mean losses of the last
    ``LAST`` steps as a share of the first's, and routes that went elsewhere of all routes.
    """

    name: str
    loss: float
    last: float
    flipped: int
    routes: int


def compare(curves: list[Curve], device: torch.device) -> list[Difference]:
    """Compare every curve with the first; collective over WORLD (each rank kept its own tokens' routes)."""
    first, *others = curves
    differences = []
    for other in others:
        count = torch.zeros(2, dtype=torch.int64)
        for a, b in zip(first.routes, other.routes, strict=True):
            count += torch.tensor([flipped_routes(a, b), a.numel()])
        count = count.to(device)
        dist.all_reduce(count)
        loss = max(abs(a - b) for a, b in zip(first.losses, other.losses, strict=True))
        want, got = (fmean(curve.losses[-LAST:]) for curve in (first, other))
        differences.append(Difference(other.name, loss, got / want - 1, *count.tolist()))
    return differences


def enforce(check: CheckConfig, curves: list[Curve], differences: list[Difference], entropy: float) -> None:
    """Raise ``CheckFailed`` naming the variant and both numbers. ``entropy``: the text's unigram entropy, nats."""
    for difference in differences:
        if check.loss_difference is not None and not difference.loss <= check.loss_difference:
            raise CheckFailed(
                f"the loss of {difference.name} differs by {difference.loss:.2e} from that of {curves[0].name},"
                f" more than check.loss_difference={check.loss_difference:g}"
            )
        if check.last_losses is not None and not abs(difference.last) <= check.last_losses:
            raise CheckFailed(
                f"the mean of the last {LAST} losses of {difference.name} differs by {difference.last:+.2%} from that"
                f" of {curves[0].name}, more than check.last_losses={check.last_losses:g}"
            )
    for curve in curves:
        final = curve.losses[-1]
        if check.below_unigram and not final < entropy:
            raise CheckFailed(
                f"the final loss of {curve.name} is {final:.4f}, not below the text's unigram entropy {entropy:.4f}:"
                " train for more trainer.steps, or set check.below_unigram=false"
            )
