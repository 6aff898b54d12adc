"""``ep-bench``: time the dispatchers on this machine."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from .routes import KINDS


def main(argv: list[str] | None = None) -> int:
    """Run a benchmark; without torchrun it starts ``--world`` processes itself. Returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    args = _parser().parse_args(argv)
    if "RANK" not in os.environ:
        command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(args.world)]
        environment = {"OMP_NUM_THREADS": "1", "KINETO_LOG_LEVEL": "6", **os.environ}
        return subprocess.call([sys.executable, *command, "-m", "ep_plugin.bench", *argv], env=environment)
    from . import runner

    result = runner.run(args)
    if args.json is not None and result is not None:
        Path(args.json).write_text(json.dumps(result, indent=1) + "\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ep-bench", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    d = commands.add_parser("dispatch", help="route map, dispatch and combine of every backend on the same routes")
    d.add_argument(
        "--backends", default="block,rowwise,rowwise:route", help="comma-separated; rowwise:route is one row per route"
    )
    _shape(d)
    _shape(commands.add_parser("tune", help="chunk count and launch widths of rowwise on GPUs for a shape"))
    return parser


def _shape(d: argparse.ArgumentParser) -> None:
    d.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    d.add_argument("--world", type=int, default=4, help="processes to start when not under torchrun")
    d.add_argument("--heap", default="auto")
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
