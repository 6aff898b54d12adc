"""``ep-bench tune``: the chunk count and launch widths that make one shape's rowwise movements fastest on this
machine."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import torch
import torch.distributed as dist

from ..config import EPConfig, LaunchConfig
from ..dispatch import build_dispatcher
from ..dispatch.rowwise_device import DeviceRowwiseDispatcher
from ..dispatch.tuned import store
from . import tune_deepep
from .dispatch import room
from .routes import make_routes
from .timing import measure

CHUNKS = (1, 2, 3, 4, 6, 8)
WIDTHS = {"put": (16, 24, 44, 66), "fan_out": (1056, 4224), "reduce": (132, 198, 330, 528), "sum": (2112, 1 << 15)}


def with_width(launch: LaunchConfig, name: str, programs: int) -> LaunchConfig:
    """``launch`` with another number of programs for the kernel ``name``."""
    settings: dict[str, Any] = {name: programs}
    return replace(launch, **settings)


@torch.no_grad()
def run(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Collective. Finds the chunk count of each way at the kernels' default widths, then, one after another, the
    widths at that count. ``--store`` keeps the best in a table. With ``--backend deepep`` sweeps its SMs.
    """
    if args.backend == "deepep":
        return tune_deepep.run(args, device)
    rank, world = dist.get_rank(), dist.get_world_size()
    dtype = getattr(torch, args.dtype or "bfloat16")
    idx, weight = make_routes(args.routes, args.tokens, args.experts, args.top_k, rank=rank, world=world, device=device)
    x = torch.randn(args.tokens, args.hidden, device=device).to(dtype)
    config = EPConfig(heap=args.heap, weight_at="output", max_tokens=args.tokens)
    config.capacity.factor = room(idx, world, args.experts)
    dispatcher = build_dispatcher(
        config, num_experts=args.experts, top_k=args.top_k, hidden_size=args.hidden, dtype=dtype, device=device
    )
    if not isinstance(dispatcher, DeviceRowwiseDispatcher):
        raise ValueError("ep-bench tune measures rowwise on GPUs: run it with --device cuda")
    there: dict[LaunchConfig, float] = {}
    back: dict[LaunchConfig, float] = {}

    def step() -> None:
        dispatcher.dispatch(dispatcher.plan(idx, layer="tune", x=x), x, weight)

    def timed(sweep: dict[LaunchConfig, float], launch: LaunchConfig, call: Callable[[], object]) -> None:
        dispatcher.set_launch(launch)
        sweep[launch] = measure(call, device, repeats=args.repeats, warmup=3).median

    def best(sweep: dict[LaunchConfig, float]) -> LaunchConfig:
        return min(sweep, key=lambda launch: sweep[launch])  # the same on all ranks: medians are those of the slowest

    for early, chunks in itertools.product((False, True), CHUNKS):
        timed(there, LaunchConfig(chunks=chunks, early=early), step)
    for name in ("put", "fan_out"):
        for programs in WIDTHS[name]:
            timed(there, with_width(best(there), name, programs), step)
    state = dispatcher.plan(idx, layer="tune", x=x)
    d = dispatcher.dispatch(state, x, weight)

    def combine() -> None:
        dispatcher.combine(state, d.rows, d.weights)

    for chunks in CHUNKS:
        timed(back, LaunchConfig(back=chunks), combine)
    for name in ("reduce", "sum"):
        for programs in WIDTHS[name]:
            timed(back, with_width(best(back), name, programs), combine)
    dispatcher.check()
    dispatcher.close()
    to, fro = best(there), best(back)
    launch = replace(to, back=fro.back, reduce=fro.reduce, sum=fro.sum)
    if args.store is not None and rank == 0:
        store(args.store, dispatcher.shape(args.tokens), launch, dispatch_ms=there[to], combine_ms=back[fro])
    result = {
        "what": "tune",
        "shape": {name: getattr(args, name) for name in ("tokens", "hidden", "top_k", "experts", "routes")},
        "world": world,
        "device": torch.cuda.get_device_name(),
        "launch": asdict(launch),
        "dispatch_ms": there[to],
        "combine_ms": back[fro],
        "dispatch_sweep": [{**asdict(k), "ms": v} for k, v in sorted(there.items(), key=lambda item: item[1])],
        "combine_sweep": [{**asdict(k), "ms": v} for k, v in sorted(back.items(), key=lambda item: item[1])],
    }
    if rank == 0:
        print(
            f"best for T={args.tokens} D={args.hidden} K={args.top_k} E={args.experts} EP={world}: {launch}\n"
            f"plan + dispatch {there[to]:.3f} ms, combine {back[fro]:.3f} ms"
        )
        for title, sweep in (("plan + dispatch", there), ("combine", back)):
            fastest = sorted(sweep.items(), key=lambda item: item[1])
            for k, ms in [*fastest[:6], *fastest[-2:]]:
                print(f"  {title:16s} {ms:7.3f} ms  {k}")
    return result
