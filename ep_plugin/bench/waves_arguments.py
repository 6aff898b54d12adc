"""What ``ep-bench waves`` takes, and the points that it asks for. Nothing here imports torch."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator

from ..config import ScheduleConfig

KINDS = ("none", "wave_sequential", "wave_overlapped")
WIDTHS = (4, 6, 8, 16, 32, 64, 128)
WAVES = (1, 2, 4, 8)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What ``ep-bench waves`` takes besides the shape."""

    def numbers(text: str) -> tuple[int, ...]:
        return tuple(int(n) for n in text.split(","))

    parser.add_argument("-F", "--width", type=int, default=128, help="expert width")
    parser.add_argument("--backends", default="rowwise", help="one of rowwise, rowwise:route, block, deepep")
    parser.add_argument("--precision", choices=("bf16", "mxfp8"), default="bf16")
    parser.add_argument("--kinds", default=",".join(KINDS), help="comma-separated schedules")
    parser.add_argument("--by", choices=("token", "expert"), default="token", help="how a batch is cut")
    parser.add_argument("--widths", type=numbers, default=(0, *WIDTHS), help="comma-separated; 0: the launch settings")
    parser.add_argument("--waves", type=numbers, default=WAVES, help="comma-separated numbers of waves")
    parser.add_argument(
        "--spares", default="auto", help="comma-separated multiprocessors that GEMMs leave when overlapped; auto"
    )
    parser.add_argument(
        "--spared", default="first", help="comma-separated: which GEMMs of a wave leave them, first, all"
    )
    parser.add_argument("--launch", default=None, help="a file that ep-bench tune wrote: launch settings for width 0")
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds after which no point is begun")
    parser.add_argument("--resume", default=None, help="comma-separated files of earlier runs")
    parser.add_argument("--pairs", action="store_true", help="one movement beside the experts, on independent data")
    parser.add_argument("--timeline", action="store_true", help="kernels of the best point of each schedule")
    parser.add_argument("--plot", default=None, help="write pictures (PNG) with this name: -sweep, -timeline")


def check(args: argparse.Namespace, world: int) -> None:
    """``ValueError`` for arguments that do not fit."""
    for kind in args.kinds.split(","):
        if kind not in KINDS:
            raise ValueError(f"--kinds {kind!r} is not one of {', '.join(KINDS)}")
    if args.pairs and args.device != "cuda":
        raise ValueError("--pairs needs streams: give --device cuda")
    if args.by == "expert" and max(args.waves) > args.experts // world:
        raise ValueError(f"--waves {max(args.waves)} --by expert: a rank has {args.experts // world} experts")
    for schedule in schedules(args):
        schedule.validate()


def schedules(args: argparse.Namespace) -> Iterator[ScheduleConfig]:
    """The points of the sweep, those without waves first."""
    kinds = args.kinds.split(",")
    widths = (0,) if args.backends == "block" else args.widths
    if "none" in kinds:
        yield from (ScheduleConfig(width=width) for width in widths)
    spares: tuple[int | None, ...] = tuple(None if s == "auto" else int(s) for s in args.spares.split(","))
    for width, waves in itertools.product(widths, args.waves):
        if "wave_sequential" in kinds:
            yield ScheduleConfig("wave_sequential", waves, args.by, width)
        if "wave_overlapped" in kinds:
            pairs = itertools.product(spares, args.spared.split(","))
            yield from (ScheduleConfig("wave_overlapped", waves, args.by, width, *pair) for pair in pairs)
