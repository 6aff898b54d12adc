"""``ep-bench fuzz``: random route sets, shapes, dtypes, capacity policies, forms, foldings and schedules against the
oracle, forward and backward, until one differs; then the smallest case that still does.

All ranks draw the same cases from the same seed, so nothing but results travels between them. A dispatcher serves
many cases; heaps and groups live until something fails.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..dispatch import Dispatched, Dispatcher, build_dispatcher
from ..heap import Heap, open_heap
from ..job import join
from ..topology import layout
from .fuzz_case import Case, Setting, differences, draw_case, draw_setting, step

SETS = {"cpu": 25, "cuda": 150}  # cases of one dispatcher, which takes longer to make on GPUs
SHRINK_TRIES = 150
PLANTS = ("none", "dropped-wait", "swapped-rows", "lost-row", "wrong-weight")
Oracle = list[list[Tensor]]


@dataclass
class Failure:
    """A case that went wrong, and what every rank says of it."""

    case: Case
    lines: list[str]


@dataclass
class Outcome:
    """``sets`` compared, ``refused`` settings, seconds, and what failed."""

    sets: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    failure: Failure | None = None
    smallest: Failure | None = None
    repeats: bool = True  # the smallest case failed again when it was run once more


class Fuzzer:
    """The ranks of WORLD, which all call the same methods with the same arguments."""

    def __init__(
        self,
        device: torch.device,
        *,
        heap: str = "auto",
        delays: bool = False,
        plant: str = "none",
        workers: int = 0,
        timeout_s: float = 60.0,
    ) -> None:
        self.device, self.heap_name, self.delays, self.plant = device, heap, delays, plant
        self.timeout_s = timeout_s
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.noise = random.Random(self.rank)  # each rank its own
        self._groups: dict[tuple[int, int], dist.ProcessGroup] = {}
        self._heaps: dict[tuple[int, int], Heap] = {}
        self._pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn")) if workers else None

    def search(self, seed: int, *, sets: int | None, minutes: float | None) -> Outcome:
        """Run until ``sets`` sets or ``minutes`` have passed, or a set fails, which is then made smaller."""
        rng, outcome, start = random.Random(seed), Outcome(), time.monotonic()
        upcoming = self._draw(rng)
        told = start
        while sets is None or outcome.sets < sets:
            cases, oracles = upcoming
            upcoming = self._draw(rng)  # whose oracles other processes work on meanwhile
            failure, refused = self.batch(cases, oracles)
            if refused:
                outcome.refused[refused] = outcome.refused.get(refused, 0) + 1
            else:
                outcome.sets += len(cases)
            outcome.seconds = time.monotonic() - start
            if failure is not None:
                outcome.failure, outcome.smallest = failure, self.shrink(failure)
                outcome.repeats = self.replay(outcome.smallest.case) is not None
                break
            if self.rank == 0 and time.monotonic() - told > 10:
                told = time.monotonic()
                print(f"{outcome.sets} sets in {outcome.seconds:.0f} s", flush=True)
            if minutes is not None and self._any(outcome.seconds > 60 * minutes):
                break
        return outcome

    def shrink(self, failure: Failure) -> Failure:
        """The smallest case found that still fails, one simplification at a time."""
        tries = 0
        progress = True
        while progress and tries < SHRINK_TRIES:
            progress = False
            for case in failure.case.smaller():
                tries += 1
                found, _ = self.batch([case], [self._oracle(case)])
                if found is not None:
                    failure, progress = found, True
                    break
                if tries >= SHRINK_TRIES:
                    break
        return failure

    def replay(self, case: Case) -> Failure | None:
        """Run one case."""
        return self.batch([case], [self._oracle(case)])[0]

    # One batch

    def _draw(self, rng: random.Random) -> tuple[list[Case], list[Callable[[], list[Oracle]]]]:
        setting = draw_setting(rng, self.world, self.device.type)
        cases = [draw_case(rng, setting, self.device.type) for _ in range(SETS[self.device.type])]
        return cases, [self._oracle(case, number) for number, case in enumerate(cases)]

    def _oracle(self, case: Case, number: int = 0) -> Callable[[], list[Oracle]]:
        """What every EP group must get of a case; every rank has worked out its share when ``batch`` asks."""
        groups = self.world // case.setting.ep
        if number % self.world != self.rank:
            return lambda: []
        if self._pool is None:
            return lambda: [case.oracle(group) for group in range(groups)]
        futures: list[Future[Oracle]] = [self._pool.submit(case.oracle, group) for group in range(groups)]
        return lambda: [future.result() for future in futures]

    def batch(self, cases: list[Case], oracles: list[Callable[[], list[Oracle]]]) -> tuple[Failure | None, str]:
        """Run cases of one setting: the first that fails on any rank, and why the setting was refused ("": it was not).

        Collective, and so is whatever follows: all ranks get the same."""
        setting = cases[0].setting
        gathered: list[Any] = [None] * self.world
        dist.all_gather_object(gathered, [oracle() for oracle in oracles])
        wanted = [next(share[i] for share in gathered if share[i]) for i in range(len(cases))]
        key = (setting.ep, setting.etp)
        groups = layout(self.world, ep=setting.ep, etp=setting.etp).groups("ep_mp")
        number = next(n for n, ranks in enumerate(groups) if self.rank in ranks)
        rank = groups[number].index(self.rank)
        failed: tuple[int, list[str]] | None = None
        refused, broken = "", False
        dispatcher: Dispatcher[Any] | None = None
        try:
            dispatcher = self._dispatcher(setting, key)
        except ValueError as error:
            refused = str(error)
        except RuntimeError as error:
            failed, broken = (0, [f"{type(error).__name__}: {error}"]), True
        if dispatcher is not None:
            experts: Any = self._planted(setting.experts(rank, self.device))
            with self._disturbed(dispatcher):
                for i, case in enumerate(cases):
                    try:
                        self._delay()
                        got = step(case, number, rank, dispatcher, experts, self.device)
                        dispatcher.check()
                        wrong = differences(case, got, wanted[i][number][rank], number, rank)
                    except Exception as error:
                        broken, wrong = True, [f"{type(error).__name__}: {error}"]
                    if wrong and failed is None:
                        failed = (i, wrong)
                    if broken:
                        break
            with contextlib.suppress(Exception):
                dispatcher.close()
        everyone: list[Any] = [None] * self.world
        dist.all_gather_object(everyone, (failed, refused, broken))
        if any(state[2] for state in everyone):
            self._renew()
        found = [state[0] for state in everyone if state[0] is not None]
        if found:
            first = min(index for index, _ in found)
            lines = [
                f"rank {r}: {line}"
                for r, (state, _, _) in enumerate(everyone)
                if state is not None and state[0] == first
                for line in state[1]
            ]
            return Failure(cases[first], lines), ""
        return None, next((why for _, why, _ in everyone if why), "")

    def _dispatcher(self, setting: Setting, key: tuple[int, int]) -> Dispatcher[Any]:
        config = setting.config("shm" if self.device.type == "cpu" else self.heap_name, self.timeout_s)
        config.validate()
        rowwise = setting.path in ("dedup", "route")
        if key not in self._groups:
            self._groups[key] = _new_groups(layout(self.world, ep=key[0], etp=key[1]).groups("ep_mp"), self.rank)
        if rowwise and key not in self._heaps:
            self._heaps[key] = open_heap(config.heap, self._groups[key], self.device, self.timeout_s)
        return build_dispatcher(
            config,
            num_experts=setting.num_experts,
            top_k=setting.top_k,
            hidden_size=setting.hidden,
            dtype=getattr(torch, setting.dtype),
            group=self._groups[key],
            device=self.device,
            heap=self._heaps[key] if rowwise else None,
        )

    def _renew(self) -> None:
        """After an error nothing that ranks wait through is in step any more."""
        for heap in self._heaps.values():
            with contextlib.suppress(Exception):
                heap.close()
        self._heaps.clear()
        self._groups.clear()

    def _any(self, mine: bool) -> bool:
        flag = torch.tensor([int(mine)])
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag)

    def close(self) -> None:
        """Collective."""
        self._renew()
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    # Disturbance

    def _delay(self) -> None:
        if not self.delays or self.noise.random() < 0.7:
            return
        if self.device.type == "cuda":
            torch.cuda._sleep(self.noise.randrange(200_000))
        else:
            time.sleep(self.noise.random() * 2e-3)

    @contextlib.contextmanager
    def _disturbed(self, dispatcher: Dispatcher[Any]) -> Iterator[None]:
        """Delays before signals and waits of a heap, and the planted fault ``dropped-wait``."""
        inner = getattr(dispatcher, "inner", dispatcher)
        heap: Any = getattr(inner, "heap", None)
        if heap is None:
            yield
            return
        whole = {name: getattr(heap, name) for name in ("post", "wait")}

        def late(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            self._delay()
            return call(*args, **kwargs)

        if self.plant == "dropped-wait":
            heap.wait = lambda *args, **kwargs: None
        elif self.delays:
            for name, call in whole.items():
                setattr(heap, name, partial(late, call))
        try:
            yield
        finally:
            for name in whole:
                heap.__dict__.pop(name, None)

    def _planted(self, experts: Any) -> Any:
        """The experts, or, on the last rank of WORLD, experts with a fault."""
        if self.rank != self.world - 1 or self.plant in ("none", "dropped-wait"):
            return experts
        return _Faulty(experts, self.plant)


class _Faulty(torch.nn.Module):
    """Experts that are given other rows, or another weight, than arrived."""

    def __init__(self, experts: Any, plant: str) -> None:
        super().__init__()
        self.experts, self.plant = experts, plant

    def mlp(self) -> Any:
        return self.experts.mlp()

    def forward(self, d: Dispatched, weight_at: Any) -> Tensor:
        n = int(d.offsets[-1])
        order = torch.arange(d.rows.shape[0], device=d.rows.device)
        rows, weights = d.rows, d.weights
        if self.plant == "swapped-rows" and n > 1:
            order[:2] = order[:2].flip(0)
            rows = rows[order]
        elif self.plant == "lost-row" and n:
            rows = rows * (order != n - 1).unsqueeze(1)
        elif self.plant == "wrong-weight" and n:
            weights = torch.where(order == 0, weights * 1.5, weights)
        changed = Dispatched(rows, weights, d.offsets, d.num_rows, d.route_of_row)
        y: Tensor = self.experts(changed, weight_at)
        return y


def _new_groups(groups: tuple[tuple[int, ...], ...], rank: int) -> dist.ProcessGroup:
    made = [dist.new_group(list(ranks)) for ranks in groups]
    return next(group for group, ranks in zip(made, groups, strict=True) if rank in ranks)


def main(argv: list[str]) -> int:
    """``ep-bench fuzz``; without torchrun it starts ``--world`` processes. Exit status 1: a set failed."""
    args = parse(argv)
    if "RANK" not in os.environ:
        return _start(args.world, argv)
    device = join(args.device)
    if device.type == "cpu":
        torch.set_num_threads(1)
    fuzzer = Fuzzer(device, heap=args.heap, delays=args.delays, plant=args.plant, workers=args.workers)
    if args.replay is not None:
        failure = fuzzer.replay(Case.from_json(args.replay))
        outcome = Outcome(sets=1, failure=failure, smallest=failure)
    else:
        outcome = fuzzer.search(args.seed, sets=args.sets, minutes=args.minutes)
    status = int(outcome.failure is not None)
    if dist.get_rank() == 0:
        print(report(outcome, args), flush=True)
        if args.status is not None:
            Path(args.status).write_text(str(status))
    dist.barrier()
    fuzzer.close()
    sys.stdout.flush()
    os._exit(0 if args.status is not None else status)  # a peer that failed may have left threads that wait


def _start(world: int, argv: list[str]) -> int:
    """Run in ``world`` processes. The verdict comes back in a file, because torchrun would bury it under its own."""
    with tempfile.TemporaryDirectory() as folder:
        status = Path(folder) / "status"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
        command += ["-m", "ep_plugin.bench", "fuzz", *argv, "--status", str(status)]
        environment = {"OMP_NUM_THREADS": "1", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", **os.environ}
        code = subprocess.call(command, env=environment)
        return code or (int(status.read_text()) if status.exists() else 1)


def report(outcome: Outcome, args: argparse.Namespace) -> str:
    """What the run found, for people."""
    rate = outcome.sets / max(outcome.seconds, 1e-9) * 60
    lines = [f"{outcome.sets} sets in {outcome.seconds:.1f} s ({rate:.0f} per minute), seed {args.seed}"]
    lines += [f"refused {count} x: {why}" for why, count in sorted(outcome.refused.items())]
    if outcome.smallest is None:
        return "\n".join([*lines, "no mismatch"])
    smallest = outcome.smallest
    lines += ["MISMATCH. The smallest case that fails:", *(f"  {line}" for line in smallest.lines)]
    if not outcome.repeats:
        lines.append("It did not fail when run once more: a matter of time or of the sets before it (same --seed).")
    same = "" if args.plant == "none" else f" --plant {args.plant}"
    lines += [f"ep-bench fuzz --device {args.device} --world {args.world}{same} --replay '{smallest.case.to_json()}'"]
    return "\n".join(lines)


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="ep-bench fuzz", description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--world", type=int, default=4, help="processes to start when not under torchrun")
    parser.add_argument("--minutes", type=float, default=None, help="run this long (default: 1, without --sets)")
    parser.add_argument("--sets", type=int, default=None, help="run this many sets")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--heap", default="auto", help="the symmetric heap on GPUs: torch or nvshmem")
    parser.add_argument("--delays", action="store_true", help="hold ranks back at random")
    parser.add_argument("--workers", type=int, default=0, help="processes of every rank that work on the oracle")
    parser.add_argument("--plant", choices=PLANTS, default="none", help="put in a fault, which must be found")
    parser.add_argument("--replay", default=None, metavar="CASE", help="run one case that an earlier run reported")
    parser.add_argument("--status", default=None, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    args.world = int(os.environ.get("WORLD_SIZE", args.world))
    if args.minutes is None and args.sets is None:
        args.minutes = 1.0
    if args.world < 1 or args.workers < 0:
        parser.error(f"--world {args.world} must be at least 1 and --workers {args.workers} at least 0")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no CUDA device here; use --device cpu")
    if args.replay is not None:
        try:
            Case.from_json(args.replay)
        except ValueError as error:
            parser.error(str(error))
    return args
