"""``ep-bench``: time the dispatchers on this machine."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

from ..config import check_shape
from . import waves_arguments as waves
from .inputs import backend
from .peers import PEERS
from .routes import KINDS


def main(argv: list[str] | None = None) -> int:
    """Run a benchmark; without torchrun it starts ``--world`` processes itself. Returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["fuzz"]:
        from .fuzz import main as fuzz

        return fuzz(argv[1:])
    args = parse(argv)
    if "RANK" not in os.environ:
        command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(args.world)]
        environment = {"OMP_NUM_THREADS": "1", "KINETO_LOG_LEVEL": "6", **os.environ}
        return subprocess.call([sys.executable, *command, "-m", "ep_plugin.bench", *argv], env=environment)
    from . import runner

    result = runner.run(args)
    if args.json is not None and result is not None:
        Path(args.json).write_text(json.dumps(result, indent=1) + "\n")
    return 0


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line, checked as far as it can be before processes are started."""
    parser = _parser()
    args = parser.parse_args(argv)
    for option in ("json", "trace", "plot", "store"):
        file = vars(args).get(option)
        if file is not None and not Path(file).resolve().parent.is_dir():
            parser.error(f"--{option} {file}: its folder does not exist")
    try:
        for name in vars(args).get("backends", "block").split(","):
            if args.command == "dispatch" and name in PEERS:
                if name == "megatron" and args.device == "cpu":
                    raise ValueError("--backends megatron: its dispatcher needs CUDA streams; give --device cuda")
                if name == "megatron" and importlib.util.find_spec("megatron") is None:
                    raise ValueError(
                        "--backends megatron: megatron-core is not installed; pip install ep_plugin[bench]"
                    )
                continue
            if backend(name, heap=args.heap).dispatcher == "deepep" and args.device == "cpu":
                raise ValueError(f"--backends {name} moves rows of GPUs: give --device cuda")
        world = int(os.environ.get("WORLD_SIZE", args.world))
        check_shape(num_experts=args.experts, top_k=args.top_k, hidden_size=args.hidden, ep=world)
        _check_machine(args)
        if args.command == "fan-out" and world == 1:
            raise ValueError("--world 1: a fan-out to other ranks needs at least two")
        if args.command == "waves":
            waves.check(args, world)
        if args.command == "mxfp8":
            _check_blocks(args)
    except ValueError as error:
        parser.error(str(error))
    return args


def _check_blocks(args: argparse.Namespace) -> None:
    """``ValueError`` for what MXFP8 rows cannot carry."""
    for option, value in (("--hidden", args.hidden), ("--width", args.width)):
        if value % 32:
            raise ValueError(f"{option} {value}: MXFP8 rows are blocks of 32 values; give a multiple of 32")
    if args.device == "cuda" and args.dtype == "float32":
        raise ValueError("--dtype float32: MXFP8 on GPUs carries bfloat16 rows")
    if "deepep" in args.backends:
        raise ValueError(f"--backends {args.backends}: deepep does not carry MXFP8 rows; give rowwise or block")


def _check_machine(args: argparse.Namespace) -> None:
    """``ValueError`` where this machine, or its device, cannot run what is asked for."""
    if args.tokens < 0 or args.repeats < 1:
        raise ValueError(f"--tokens {args.tokens} must be at least 0 and --repeats {args.repeats} at least 1")
    if args.device == "cpu":
        if args.command == "tune":
            raise ValueError("tune measures on GPUs: give --device cuda")
        if args.heap in ("torch", "nvshmem"):
            raise ValueError(f"--heap {args.heap} needs --device cuda; CPU processes use shm")
        return
    if args.heap == "shm":
        raise ValueError("--heap shm is memory of CPU processes; with --device cuda use torch, nvshmem or auto")
    import torch  # takes seconds, and the CPU path does not need it yet

    if not torch.cuda.is_available():
        raise ValueError("--device cuda: torch sees no CUDA device here; use --device cpu")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ep-bench", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("fuzz", help="random sets against the oracle until one differs (ep-bench fuzz -h)")
    d = commands.add_parser("dispatch", help="route map, dispatch and combine of every backend on the same routes")
    _backends(d)
    _shape(d, several_routes=True)
    figure = commands.add_parser("fan-out", help="a token's rows to its experts by PUT, and by GET (report, Figure 19)")
    fractions = "fractions of the routes that leave their rank, comma-separated"
    figure.add_argument("--remote", type=_fractions, default=[0, 0.25, 0.5, 0.75, 1], help=fractions)
    figure.add_argument("--plot", default=None, help="write a picture of both (PNG) to this file")
    _shape(figure, routes=False)
    figure.set_defaults(tokens=1024, repeats=5)
    whole = commands.add_parser("layer", help="a whole MoE step of every backend, with experts, forward and backward")
    _backends(whole)
    _shape(whole)
    whole.add_argument("-F", "--width", type=int, default=128, help="expert width")
    whole.add_argument("--trace", default=None, help="write a trace of all ranks for Perfetto to this file")
    whole.set_defaults(tokens=512)
    records = commands.add_parser("mxfp8", help="MXFP8 rows against plain ones: bytes, time, quality, kept bytes")
    _shape(records)
    records.add_argument("--backends", default="rowwise,rowwise:route", help="comma-separated, as for dispatch")
    records.add_argument("-F", "--width", type=int, default=128, help="expert width")
    schedules = commands.add_parser("waves", help="wave schedules against none: a sweep, its verdict and its reasons")
    waves.add_arguments(schedules)
    _shape(schedules)
    steps = commands.add_parser("step", help="steps of 1 to 16 microbatches with and without EP, and where they cross")
    steps.add_argument("--backends", default="block,rowwise", help="comma-separated, as for layer")
    steps.add_argument("--microbatches", type=_numbers, default=[1, 2, 4, 8, 16], help="of a step, comma-separated")
    steps.add_argument("--layers", type=int, default=2)
    steps.add_argument("-F", "--width", type=int, default=128, help="expert width")
    steps.add_argument("--plot", default=None, help="write a picture of the steps (PNG) to this file")
    _shape(steps)
    steps.set_defaults(tokens=256, hidden=256, top_k=4, experts=16, repeats=3)
    sweep = commands.add_parser("tune", help="launch settings on GPUs for a shape: chunks and widths, or DeepEP's SMs")
    sweep.add_argument("--backend", choices=("rowwise", "deepep"), default="rowwise")
    sweep.add_argument("--store", default=None, help="keep what is best for the shape in this table (launch.table)")
    _shape(sweep)
    return parser


def _numbers(text: str) -> list[int]:
    numbers = [int(number) for number in text.split(",")]
    if not numbers or min(numbers) < 1:
        raise ValueError(text)
    return numbers


def _fractions(text: str) -> list[float]:
    fractions = [float(part) for part in text.split(",")]
    if not all(0 <= fraction <= 1 for fraction in fractions):
        raise argparse.ArgumentTypeError(f"{text}: fractions of routes are 0 to 1")
    return fractions


def _kinds(text: str) -> str:
    """Sets of routes, comma-separated, each once."""
    kinds = list(dict.fromkeys(KINDS if text == "all" else text.split(",")))
    for kind in kinds:
        if kind not in KINDS:
            raise argparse.ArgumentTypeError(f"{kind!r} is not one of {', '.join(KINDS)}, all")
    return ",".join(kinds)


def _backends(d: argparse.ArgumentParser) -> None:
    d.add_argument(
        "--backends",
        default="block,rowwise,rowwise:route",
        help="comma-separated: local, block, rowwise, rowwise:route (one row per route), deepep; dispatch also takes"
        " nccl (bare all-to-alls of packed rows) and megatron (megatron-core's alltoall)",
    )
    d.add_argument("--table", default=None, help="launch settings of rowwise from this table of ep-bench tune --store")
    d.add_argument("--plot", default=None, help="write a picture of the phases side by side (PNG) to this file")


def _shape(d: argparse.ArgumentParser, *, routes: bool = True, several_routes: bool = False) -> None:
    d.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    d.add_argument("--world", type=int, default=4, help="processes to start when not under torchrun")
    d.add_argument("--heap", default="auto")
    if several_routes:
        d.add_argument("--routes", type=_kinds, default="uniform", help=f"comma-separated: {', '.join(KINDS)}; or all")
    elif routes:
        d.add_argument("--routes", choices=KINDS, default="uniform")
    d.add_argument("-T", "--tokens", type=int, default=4096, help="tokens per rank")
    d.add_argument("-D", "--hidden", type=int, default=512)
    d.add_argument("-K", "--top-k", type=int, default=8)
    d.add_argument("-E", "--experts", type=int, default=32)
    d.add_argument(
        "--dtype", choices=("bfloat16", "float32"), default=None, help="default: float32 on CPU, bfloat16 on GPU"
    )
    d.add_argument("--repeats", type=int, default=10)
    d.add_argument("--json", default=None, help="write the result to this file")


if __name__ == "__main__":
    sys.exit(main())
