"""``ep-bench tune``: the chunk count and launch widths that make one shape's rowwise movements fastest on this
machine."""

from __future__ import annotations

import argparse
import itertools
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

from ..config import EPConfig, LaunchConfig
from ..dispatch import build_dispatcher
from ..dispatch.rowwise_device import DeviceRowwiseDispatcher
from . import tune_deepep
from .dispatch import room
from .routes import make_routes
from .timing import measure

CHUNKS = (1, 2, 4, 8)
WIDTHS = {"put": (33, 66, 132), "fan_out": (264, 528, 1056), "reduce": (528, 1056, 2112), "sum": (1056, 2112, 4224)}


@torch.no_grad()
def run(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Collective. Sweeps dispatch over (chunks, put, fan_out) and combine over (chunks, reduce, sum); gives the best
    of each.

    One chunk count serves both ways: that of the best sum of the two. With ``--backend deepep`` sweeps its SMs.
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
    for early, chunks, put, fan_out in itertools.product((False, True), CHUNKS, WIDTHS["put"], WIDTHS["fan_out"]):
        launch = LaunchConfig(chunks=chunks, put=put, fan_out=fan_out, early=early)
        dispatcher.set_launch(launch)

        def step() -> None:
            dispatcher.dispatch(dispatcher.plan(idx, layer="tune", x=x), x, weight)

        there[launch] = measure(step, device, repeats=args.repeats, warmup=3).median
    state = dispatcher.plan(idx, layer="tune", x=x)
    d = dispatcher.dispatch(state, x, weight)
    for chunks, reduce, sum_ in itertools.product(CHUNKS, WIDTHS["reduce"], WIDTHS["sum"]):
        launch = LaunchConfig(chunks=chunks, reduce=reduce, sum=sum_)
        dispatcher.set_launch(launch)
        back[launch] = measure(
            lambda: dispatcher.combine(state, d.rows, d.weights), device, repeats=args.repeats, warmup=3
        ).median
    dispatcher.check()
    dispatcher.close()
    best = min(
        ((t, b) for t in there for b in back if t.chunks == b.chunks), key=lambda pair: there[pair[0]] + back[pair[1]]
    )
    launch = LaunchConfig(best[0].chunks, best[0].put, best[0].fan_out, best[1].reduce, best[1].sum, best[0].early)
    result = {
        "what": "tune",
        "shape": {name: getattr(args, name) for name in ("tokens", "hidden", "top_k", "experts", "routes")},
        "world": world,
        "device": torch.cuda.get_device_name(),
        "launch": asdict(launch),
        "dispatch_ms": there[best[0]],
        "combine_ms": back[best[1]],
        "dispatch_sweep": [{**asdict(k), "ms": v} for k, v in sorted(there.items(), key=lambda item: item[1])],
        "combine_sweep": [{**asdict(k), "ms": v} for k, v in sorted(back.items(), key=lambda item: item[1])],
    }
    if rank == 0:
        print(
            f"best for T={args.tokens} D={args.hidden} K={args.top_k} E={args.experts} EP={world}: {launch}\n"
            f"plan + dispatch {there[best[0]]:.3f} ms, combine {back[best[1]]:.3f} ms"
        )
        for title, sweep in (("plan + dispatch", there), ("combine", back)):
            fastest = sorted(sweep.items(), key=lambda item: item[1])
            for k, ms in [*fastest[:6], *fastest[-2:]]:
                print(f"  {title:16s} {ms:7.3f} ms  {k}")
    return result
