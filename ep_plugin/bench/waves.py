"""``ep-bench waves``: what wave schedules gain or cost on this machine, with the control (report, section 5.9).

Every point is a whole MoE step (``moe_step`` with this project's experts) of one schedule, width of communication and
number of waves: milliseconds of the forward, and of forward and backward. ``--json`` is a table for
``schedule.kind='auto'``; points that it, or a file of ``--resume``, holds already are not measured again, and
``--budget`` ends a run between two points.

``--pairs`` measures what overlap has to win against (report, equation 10 and Table 9): one movement and the experts
alone, one after the other, and beside each other on independent data. ``--timeline`` records the kernels of the best
point of each schedule: times alone and stretched, the share of communication that is hidden, and a picture.

Legend: T tokens of a rank, K routes per token, D hidden size, F expert width.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..config import EPConfig, LaunchConfig, ScheduleConfig
from ..dispatch import Dispatcher, build_dispatcher
from ..heap import Heap, open_heap
from ..tables import FORMAT
from ..waves.split import token_edges
from ..waves.tuned import Choice, Shape, choose
from .dispatch import room
from .inputs import Inputs, backend
from .layer import Step
from .timing import meet
from .waves_arguments import KINDS, schedules
from .waves_pairs import measure_pairs
from .waves_trace import Account, account

SPIN = 20_000_000  # cycles that a GPU idles before a timed step, for the host to enqueue it; and for each wave more:
SPIN_PER_WAVE = 15_000_000

Point = dict[str, Any]


class Bench:
    """One shape on this machine: its inputs, experts and heap, shared by all points."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        self.args, self.device = args, device
        self.inputs = Inputs.make(args, device)
        self.heap: Heap | None = None
        config = self._config(ScheduleConfig())
        if config.dispatcher == "rowwise":
            self.heap = open_heap(config.heap, None, device, config.timeout_s)
        most = max(1, *args.waves)
        edges = [token_edges(args.tokens, w) for w in range(1, most + 1)]
        parts = [self.inputs.idx[a:b] for e in edges for a, b in itertools.pairwise(e) if b > a]
        self.factor = max(room(part, dist.get_world_size(), args.experts) for part in parts) + 0.01
        self.experts_of: Step | None = None

    def shape(self) -> Shape:
        a, cuda = self.args, self.device.type == "cuda"
        config = self._config(ScheduleConfig())
        return Shape(
            tokens=a.tokens,
            hidden_size=a.hidden,
            width=a.width,
            top_k=a.top_k,
            num_experts=a.experts,
            ep=dist.get_world_size(),
            dtype=str(self.inputs.x.dtype).removeprefix("torch."),
            dispatcher=config.dispatcher,
            form=config.form if config.dispatcher == "rowwise" else "",
            precision=a.precision,
            device=torch.cuda.get_device_name() if cuda else "cpu",
        )

    def _config(self, schedule: ScheduleConfig) -> EPConfig:
        a = self.args
        config = backend(a.backends, heap=a.heap, max_tokens=a.tokens)
        if a.launch is not None:
            config.launch = LaunchConfig(**json.loads(Path(a.launch).read_text())["launch"])
        return replace(config, schedule=schedule, precision=a.precision)

    def dispatcher(self, schedule: ScheduleConfig) -> Dispatcher[Any]:
        config = self._config(schedule)
        config.capacity.factor = self.factor
        return build_dispatcher(
            config, **self.inputs.shape, dtype=self.inputs.x.dtype, device=self.device, heap=self.heap,
            expert_width=self.args.width,
        )  # fmt: skip

    def step(self, dispatcher: Dispatcher[Any], name: str) -> Step:
        """The training step over ``dispatcher``; the experts are the same for all."""
        if self.experts_of is None:
            self.experts_of = Step(name, dispatcher, self.inputs, self.args.width)
        step = self.experts_of
        step.name, step.dispatcher = name, dispatcher
        return step

    def measure(self, schedule: ScheduleConfig) -> Point:
        """Milliseconds of one point."""
        dispatcher = self.dispatcher(schedule)
        step = self.step(dispatcher, "bench")
        waves = 1 if schedule.kind == "none" else schedule.waves
        queue = dispatcher.name != "block"
        spin = SPIN + SPIN_PER_WAVE * waves if queue else 0
        point = {
            "shape": asdict(self.shape()),
            "schedule": asdict(schedule),
            "forward": times(step.forward, self.device, self.args.repeats, spin),
            "step": times(step.step, self.device, self.args.repeats, spin),
        }
        dispatcher.check()
        dispatcher.close()
        return point

    def close(self) -> None:
        if self.heap is not None:
            self.heap.close()


def times(fn: Callable[[], object], device: torch.device, repeats: int, spin: int) -> dict[str, float]:
    """median, low and high (quartiles) in milliseconds of the slowest rank; collective."""
    for _ in range(3):
        fn()
    own = [_once(fn, device, spin) for _ in range(repeats)]
    low, _, high = statistics.quantiles(own, n=4) if len(own) > 1 else [own[0]] * 3
    everyone: list[list[float]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, [statistics.median(own), low, high])
    return dict(zip(("median", "low", "high"), max(everyone), strict=True))


def _once(fn: Callable[[], object], device: torch.device, spin: int) -> float:
    meet(device)
    if device.type == "cpu":
        start = time.perf_counter()
        fn()
        return (time.perf_counter() - start) * 1e3
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    if spin:
        torch.cuda._sleep(spin)
    dist.all_reduce(torch.zeros(1, device=device))  # the ranks' GPUs start together
    first.record()
    fn()
    last.record()
    torch.cuda.synchronize(device)
    return first.elapsed_time(last)


def run(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Collective. Measures what is missing, prints what it says, writes pictures if asked for."""
    start = time.monotonic()
    rank = dist.get_rank()
    bench = Bench(args, device)
    result = bench.inputs.describe(args) | {"format": FORMAT, "width": args.width}
    result.update(points=[], pairs=[], timelines={})
    del result["backends"]
    shape = bench.shape()
    for path in [p for p in (args.resume or "").split(",") if p] + ([args.json] if args.json else []):
        if Path(path).exists():
            _merge(result, json.loads(Path(path).read_text()))
    done = {_key(p) for p in result["points"] if shape.fits(p)}
    missing = [s for s in schedules(args) if _key({"schedule": asdict(s)}) not in done]
    known = _agreed(len(missing))

    def in_time() -> bool:
        return _agreed(time.monotonic() - start < args.budget)

    left = 0
    for schedule in missing[:known]:
        if not in_time():
            left += 1
            continue
        point = bench.measure(schedule)
        result["points"].append(point)
        if rank == 0:
            _print(point)
            _save(args, result)
    choice = {time: choose(result["points"], shape, time) for time in ("forward", "step")}
    if args.pairs and in_time():
        result["pairs"] = measure_pairs(bench, args, result["pairs"], in_time)
    if args.timeline and in_time():
        result["timelines"] = {name: asdict(a) for name, a in _timelines(bench, result["points"], shape).items()}
    bench.close()
    result["verdict"] = {name: verdict(c) for name, c in choice.items()}
    result["hidden"] = {name: hidden(c, result["timelines"].get(f"none {name}")) for name, c in choice.items()}
    if rank == 0:
        for name, text in result["verdict"].items():
            print(f"{name}: {text}")
            if (share := result["hidden"][name]) is not None:
                print(f"{name}: the best with waves saves {100 * share:.0f} % of what communication takes without")
        if left:
            again = "--json to keep what is measured" if args.json is None else f"--json {args.json}"
            print(f"{left} points are left: run again with {again}")
        if args.plot is not None:
            from .waves_plots import plot_sweep, plot_timelines

            stem = Path(args.plot).with_suffix("")
            plot_sweep(result, shape, stem.with_name(f"{stem.name}-sweep.png"))
            if result["timelines"]:
                plot_timelines(result, stem.with_name(f"{stem.name}-timeline.png"))
    return result


def _timelines(bench: Bench, points: list[Point], shape: Shape) -> dict[str, Account]:
    """Kernels of a step at the best point of each schedule, on this rank; and the times that equation 10 is about."""
    found: dict[str, Account] = {}
    for kind in KINDS:
        own = [p for p in points if shape.fits(p) and p["schedule"]["kind"] == kind]
        if not own:
            continue
        schedule = ScheduleConfig(**min(own, key=lambda p: p["step"]["median"])["schedule"])
        dispatcher = bench.dispatcher(schedule)
        step = bench.step(dispatcher, "bench")
        for name, fn in (("forward", step.forward), ("step", step.step)):
            for _ in range(2):
                fn()
            found[f"{kind} {name}"] = account(fn, bench.device, asdict(schedule))
        dispatcher.check()
        dispatcher.close()
    for name in ("forward", "step"):
        none, wave = found.get(f"none {name}"), found.get(f"wave_overlapped {name}")
        if none is not None and wave is not None and dist.get_rank() == 0:
            print(f"{name}: {none.against(wave)}")
    return found


def hidden(choice: Choice, without: dict[str, Any] | None) -> float | None:
    """The time that the best point with waves saves against the best without, as a share of the communication that is
    exposed ``without`` (an ``Account``); negative where waves take longer, None where one of the three is missing."""
    if choice.none is None or choice.wave is None or without is None:
        return None
    saved = choice.none[choice.time]["median"] - choice.wave[choice.time]["median"]
    exposed = Account(**without).exposed
    return float(saved / exposed) if exposed else None


def verdict(choice: Choice) -> str:
    """Which schedule won, against the best point without waves, with the spread of both."""
    if choice.none is None:
        return "no point without waves was measured"

    def told(point: Point) -> str:
        s, t = point["schedule"], point["time"]
        waves = "" if s["kind"] == "none" else f", {s['waves']} waves by {s['by']}, spare {s['spare']}"
        return f"{s['kind']} (width {s['width']}{waves}) {t['median']:.3f} ms [{t['low']:.3f} … {t['high']:.3f}]"

    none = told(choice.none | {"time": choice.none[choice.time]})
    if choice.wave is None:
        return f"best without waves: {none}; no waves were measured"
    wave = told(choice.wave | {"time": choice.wave[choice.time]})
    difference = choice.wave[choice.time]["median"] / choice.none[choice.time]["median"] - 1
    if choice.gain:
        return f"won: {wave}, {-100 * difference:.1f} % less than {none}"
    within = " (within the spread)" if difference < 0 else ""
    return f"won: {none}; the best with waves, {wave}, takes {100 * difference:+.1f} %{within}"


def _agreed(own: Any) -> Any:
    """Rank 0's value, on all ranks."""
    values = [own]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def _key(point: Point) -> tuple[Any, ...]:
    s = point["schedule"]
    waves = () if s["kind"] == "none" else (s["waves"], s["by"])
    spare = (s["spare"], s.get("spared", "all")) if s["kind"] == "wave_overlapped" else ()
    return (s["kind"], s["width"], *waves, *spare)


def _merge(result: dict[str, Any], earlier: dict[str, Any]) -> None:
    """Take over the points of an earlier run that ``result`` has not."""
    known = {(json.dumps(p["shape"], sort_keys=True), _key(p)) for p in result["points"]}
    result["points"] += [p for p in earlier["points"] if (json.dumps(p["shape"], sort_keys=True), _key(p)) not in known]
    result["pairs"] = result["pairs"] or earlier.get("pairs", [])
    result["timelines"] = result["timelines"] or earlier.get("timelines", {})


def _save(args: argparse.Namespace, result: dict[str, Any]) -> None:
    """After every point, so that a run that is cut off has lost none."""
    if args.json is not None:
        part = Path(f"{args.json}.part")
        part.write_text(json.dumps(result, indent=1) + "\n")
        part.replace(args.json)


def _print(point: Point) -> None:
    s, forward, step = point["schedule"], point["forward"], point["step"]
    waves = "" if s["kind"] == "none" else f"{s['waves']} waves by {s['by']}"
    spare = ""
    if s["kind"] == "wave_overlapped":
        spare = f"spare {'auto' if s['spare'] is None else s['spare']} {s['spared']}"
    print(
        f"{s['kind']:15s} width {s['width']:3d} {waves:18s} {spare:14s} forward {forward['median']:8.3f} ms"
        f" [{forward['low']:.3f} … {forward['high']:.3f}]   step {step['median']:8.3f} ms [{step['low']:.3f} …"
        f" {step['high']:.3f}]",
        flush=True,
    )
