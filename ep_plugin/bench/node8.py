"""One node in ten minutes: every dispatcher checked on every folding, then timed at EP over all ranks, then memory.

    torchrun --nproc-per-node 8 -m ep_plugin.bench.node8 --out FOLDER      # on GPUs; any number from 2
    python -m ep_plugin.bench.node8 --out FOLDER                           # eight CPU processes, small sizes

The folder holds ``node8.json``, pictures, and the phases of every measurement in ``phases.txt``; all are written after
every step, so that a run that is ended keeps what it has. A step for which the time that is left would not do, judged
by those of its kind before it, is skipped and named. Exit status 1: a check or a step failed.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import gc
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..dispatch import deepep_preflight
from ..job import join
from ..topology import ProcessGroups, layout
from . import dispatch, layer
from .__main__ import parse as parse_bench
from .node8_checks import check_folding
from .node8_memory import Memory, measure_memory, told
from .node8_plots import plot_memory, plot_totals
from .node8_verdict import verdicts
from .peers import PEERS
from .plots import plot_phases

BACKENDS = "nccl,rowwise,block,rowwise:route,deepep"
TARGET_HIDDEN = 4096  # the hidden size of the target, measured first
STUCK = datetime.timedelta(seconds=180)  # how long ranks wait for one that failed alone
SIZES: dict[str, dict[str, Any]] = {
    "cuda": dict(
        tokens=16384, hidden=[4096, 2048, 7168], top_k=8, experts=128, width=1536, repeats=10,
        layers=8, memory_tokens=8192, memory_hidden=2048, memory_width=768,
    ),
    "cpu": dict(
        tokens=64, hidden=[64], top_k=4, experts=16, width=32, repeats=2,
        layers=8, memory_tokens=32, memory_hidden=32, memory_width=32,
    ),
}  # fmt: skip


@dataclass
class Outcome:
    """How a step ended: ``done``, ``failed`` or ``skipped``, and why."""

    name: str
    status: str
    seconds: float = 0.0
    why: str = ""


class Session:
    """The steps of one run and what they gave; all ranks call the same methods."""

    def __init__(self, args: argparse.Namespace, device: torch.device, began: float) -> None:
        self.args, self.device, self.began = args, device, began
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.control = dist.new_group(backend="gloo")  # where ranks meet after a step, also those that failed in it
        self.folder = Path(args.out)
        self.outcomes: list[Outcome] = []
        self.longest: dict[str, float] = {}  # seconds of a step, by kind
        self.groups: dict[int, ProcessGroups] = {}
        self.checks: dict[str, int] = {}
        self.times: dict[str, dict[str, dict[str, Any]]] = {"dispatch": {}, "layer": {}}  # by hidden size
        self.memory: list[Memory] = []
        self.left_out: dict[str, str] = {}  # backends, and why
        self.degrees = [d for d in range(self.world, 1, -1) if self.world % d == 0]

    # One step

    def do(self, kind: str, name: str, run: Callable[[], str]) -> None:
        """Run a step, unless the time that is left would not do, and keep what it gave. ``run`` says a line of it."""
        spent = [time.monotonic() - self.began]
        dist.broadcast_object_list(spent, group=self.control)  # rank 0's clock counts
        needs = self.longest.get(kind, 0.0)
        if spent[0] + needs > self.args.budget:
            self._end(Outcome(name, "skipped", why=f"{self.args.budget - spent[0]:.0f} s left, needs {needs:.0f} s"))
            return
        start, line, problem = time.monotonic(), "", ""
        try:
            with open(self.folder / "phases.txt" if self.rank == 0 else os.devnull, "a") as phases:
                with contextlib.redirect_stdout(phases):
                    line = run()
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        problems: list[Any] = [None] * self.world
        dist.all_gather_object(problems, problem, group=self.control)
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        seconds = time.monotonic() - start
        self.longest[kind] = max(seconds, needs)
        wrong = {text: rank for rank, text in reversed(list(enumerate(problems))) if text}
        why = "; ".join(f"rank {rank}: {text}" for text, rank in wrong.items())
        self._end(Outcome(name, "failed" if wrong else "done", seconds, why or line))

    def _end(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        if self.rank == 0:
            passed = time.monotonic() - self.began
            print(f"[{passed:6.1f} s] {outcome.name}: {outcome.status} in {outcome.seconds:.1f} s. {outcome.why}")
            sys.stdout.flush()
            self.save()

    def save(self) -> None:
        """Write the JSON; a reader never sees half of it."""
        cuda = self.device.type == "cuda"
        found = {
            "what": "node8",
            "args": vars(self.args),
            "world": self.world,
            "device": torch.cuda.get_device_name() if cuda else platform.processor() or platform.machine(),
            "torch": torch.__version__,
            "seconds": time.monotonic() - self.began,
            "steps": [asdict(outcome) for outcome in self.outcomes],
            "left_out": self.left_out,
            "checks": self.checks,
            **self.times,
            "memory": [asdict(way) for way in self.memory],
            "verdicts": {hidden: [asdict(v) for v in verdicts(r)] for hidden, r in self.times["dispatch"].items()},
        }
        unfinished = self.folder / "node8.json.partial"
        unfinished.write_text(json.dumps(found, indent=1) + "\n")
        unfinished.replace(self.folder / "node8.json")

    # What the steps do

    def folded(self, ep: int) -> ProcessGroups:
        """The groups of a folding, made once."""
        if ep not in self.groups:
            self.groups[ep] = ProcessGroups.create(layout(self.world, ep=ep), timeout=STUCK)
        return self.groups[ep]

    def folding(self, ep: int) -> str:
        """Its name."""
        return f"EP{ep}" + (f" × EP_DP{self.world // ep}" if ep < self.world else "")

    def check(self, ep: int, *paths: str) -> str:
        """Against the oracle."""
        name = f"{self.folding(ep)} {' '.join(paths)}"
        self.checks[name] = check_folding(self.folded(ep), paths, self.device, self.args.heap)
        return f"{self.checks[name]} cases equal the oracle, forward and backward"

    def time(self, command: str, hidden: int, name: str) -> str:
        """``ep-bench dispatch`` or ``layer`` of one backend, put beside those before it."""
        run = {"dispatch": dispatch.run, "layer": layer.run}[command]
        result = run(self._bench(command, hidden, name), self.device)
        kept = self.times[command].setdefault(str(hidden), {**result, "backends": {}, "peers": {}})
        kept["backends"] |= result["backends"]
        kept["peers"] |= result.get("peers", {})
        if self.rank == 0:
            if kept["backends"]:
                plot_phases(kept, self.folder / f"{command}-D{hidden}.png")
            if command == "dispatch":
                plot_totals(self.times["dispatch"], self.folder / "totals.png")
        figures = (kept["backends"] | kept["peers"])[name]
        return f"{figures['total_ms' if command == 'dispatch' else 'step_ms']:.3f} ms"

    def measure(self, ep: int, name: str) -> str:
        """Memory of one way; ``ep`` 1: no EP."""
        args = self._bench("layer", self.args.memory_hidden, "rowwise" if ep == 1 else name)
        args.tokens, args.width, args.layers = self.args.memory_tokens, self.args.memory_width, self.args.layers
        way = measure_memory(name, self.folded(ep) if ep > 1 else None, args, self.device)
        self.memory.append(way)
        self.memory.sort(key=lambda m: (m.ep, m.backend))
        if self.rank == 0:
            plot_memory(self.memory, self.folder / "memory.png")
        return "\n" + told(way, next((m for m in self.memory if m.ep == 1), None))

    def _bench(self, command: str, hidden: int, name: str) -> argparse.Namespace:
        return parse_bench(bench_arguments(self.args, command, hidden, name))

    # The run

    def run(self) -> int:
        """All steps, what matters most first; gives the exit status."""
        for ep in self.degrees:
            self.do("check", f"check {self.folding(ep)}", partial(self.check, ep, "block", "dedup", "route"))
        self.do("check", "check without EP", partial(self.check, 1, "local"))
        backends = self._backends()
        first, *others = sorted(self.args.hidden, key=lambda d: d != TARGET_HIDDEN)
        if "deepep" in backends:
            self.do("check", f"check {self.folding(self.world)} deepep", partial(self.check, self.world, "deepep"))
        self._time("dispatch", first, backends)
        self._memory(1, "local")
        self._memory(self.world, "block")
        self._memory(self.world, "rowwise")
        self._time("layer", first, backends)
        for ep in self.degrees[1:]:
            self._memory(ep, "rowwise")
        for hidden in others:
            self._time("dispatch", hidden, backends)
        for hidden in others:
            self._time("layer", hidden, backends)
        return self._conclude()

    def _time(self, command: str, hidden: int, backends: list[str]) -> None:
        for name in backends:
            if command == "dispatch" or name not in PEERS:
                self.do(command, f"{command} D={hidden} {name}", partial(self.time, command, hidden, name))

    def _memory(self, ep: int, name: str) -> None:
        what = "no EP" if ep == 1 else f"{self.folding(ep)} {name}"
        self.do("memory", f"memory {what}", partial(self.measure, ep, name))

    def _backends(self) -> list[str]:
        """Those that are asked for and run here."""
        names: list[str] = self.args.backends.split(",")
        if "deepep" in names:
            args = self.args
            checks = deepep_preflight(
                num_experts=args.experts,
                top_k=args.top_k,
                dtype=torch.bfloat16,
                world=self.world,
                max_tokens=args.tokens,
            )
            why = "it moves rows of GPUs" if self.device.type == "cpu" else ""
            why = why or "; ".join(check.line() for check in checks if check.ok is False)
            everyone: list[Any] = [None] * self.world
            dist.all_gather_object(everyone, why, group=self.control)
            why = next(filter(None, everyone), "")
            if why:
                self.left_out["deepep"] = why
                names.remove("deepep")
                if self.rank == 0:
                    print(f"deepep is left out: {why}")
        return names

    def _conclude(self) -> int:
        failed = [outcome for outcome in self.outcomes if outcome.status == "failed"]
        skipped = [outcome.name for outcome in self.outcomes if outcome.status == "skipped"]
        if self.rank == 0:
            for hidden, result in self.times["dispatch"].items():
                print(f"EP{self.world}, D={hidden}, dispatch + combine:")
                for verdict in verdicts(result):
                    print(f"  {verdict.line()}")
            if skipped:
                print(f"skipped, --budget {self.args.budget:g} s: {', '.join(skipped)}")
            for outcome in failed:
                print(f"FAILED: {outcome.name}: {outcome.why}")
            print(f"{len(self.outcomes) - len(failed) - len(skipped)} of {len(self.outcomes)} steps in {self.folder}")
            self.save()
        return 1 if failed else 0


def bench_arguments(args: argparse.Namespace, command: str, hidden: int, name: str) -> list[str]:
    """The command line of ``ep-bench`` for one of its measurements here."""
    own = ["--device", args.device, "--world", str(args.world), "--heap", args.heap, "--repeats", str(args.repeats)]
    own += ["-T", str(args.tokens), "-D", str(hidden), "-K", str(args.top_k), "-E", str(args.experts)]
    own += ["--backends", name]
    if command == "layer":
        own += ["-F", str(args.width)]
    if args.table is not None:
        own += ["--table", args.table]
    return [command, *own]


def main(argv: list[str] | None = None) -> int:
    """Run; without torchrun it starts ``--world`` processes itself. Returns the exit status."""
    began = time.monotonic()
    argv = sys.argv[1:] if argv is None else argv
    args = parse(argv)
    if "RANK" not in os.environ:
        command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(args.world)]
        environment = {"OMP_NUM_THREADS": "1", "KINETO_LOG_LEVEL": "6", **os.environ}
        return subprocess.call([sys.executable, *command, "-m", "ep_plugin.bench.node8", *argv], env=environment)
    device = join(args.device, timeout=STUCK)
    if device.type == "cpu":
        torch.set_num_threads(1)
    status = Session(args, device, began).run()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # nothing is left to do, and a step that failed may have left threads that wait


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line with the device's sizes filled in, checked before processes are started."""
    parser = argparse.ArgumentParser(prog="python -m ep_plugin.bench.node8", description=__doc__)
    parser.add_argument("--out", required=True, help="folder for the JSON and the pictures; made where it is missing")
    parser.add_argument("--budget", type=float, default=540.0, help="seconds; what would not fit is skipped")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: GPUs where there are")
    parser.add_argument("--world", type=int, default=8, help="processes to start when not under torchrun")
    parser.add_argument("--heap", default="auto")
    parser.add_argument("--table", default=None, help="launch settings of rowwise, from ep-bench tune --store")
    parser.add_argument("--backends", default=BACKENDS, help=f"comma-separated, of {BACKENDS}")
    parser.add_argument("-T", "--tokens", type=int, help="tokens of a rank")
    parser.add_argument("-D", "--hidden", type=_numbers, help="hidden sizes, comma-separated")
    parser.add_argument("-K", "--top-k", type=int)
    parser.add_argument("-E", "--experts", type=int)
    parser.add_argument("-F", "--width", type=int, help="expert width of the layer")
    parser.add_argument("--repeats", type=int, help="timed calls")
    parser.add_argument("--layers", type=int, help="of the model whose memory is measured")
    parser.add_argument("--memory-tokens", type=int, help="its tokens of a rank")
    parser.add_argument("--memory-hidden", type=int, help="its hidden size")
    parser.add_argument("--memory-width", type=int, help="its expert width")
    args = parser.parse_args(argv)
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    for name, value in SIZES[args.device].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    args.world = int(os.environ.get("WORLD_SIZE", args.world))
    if args.world < 2:
        parser.error(f"--world {args.world} must be at least 2: EP is compared over several ranks")
    for name in args.backends.split(","):
        if name not in BACKENDS.split(","):
            parser.error(f"--backends {name!r} is not one of {BACKENDS}")
    for hidden in args.hidden:
        parse_bench(bench_arguments(args, "layer", hidden, "block"))
    for name in ("layers", "memory_tokens", "memory_hidden", "memory_width"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)} must be at least 1")
    Path(args.out).mkdir(parents=True, exist_ok=True)
    return args


def _numbers(text: str) -> list[int]:
    numbers = [int(number) for number in text.split(",")]
    if not numbers or min(numbers) < 1:
        raise ValueError(text)
    return numbers


if __name__ == "__main__":
    sys.exit(main())
