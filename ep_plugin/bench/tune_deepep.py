"""``ep-bench tune --backend deepep``: the number of multiprocessors that makes DeepEP's movements fastest for a shape.

Every count is compiled for, which takes seconds the first time."""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist

from ..config import DeepEPConfig, EPConfig
from ..dispatch import build_dispatcher
from ..dispatch.deepep import DeepEPDispatcher
from .inputs import Inputs
from .timing import measure

SMS = (16, 24, 32, 48, 64, 80, 96, 128)


@torch.no_grad()
def run(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Collective. Times plan and dispatch, and the weighted combine, for each of ``SMS``; one count serves both ways,
    since a handle belongs to the count that it was made with."""
    inputs = Inputs.make(args, device)
    config = EPConfig(dispatcher="deepep", weight_at="output", max_tokens=args.tokens)
    dispatcher = build_dispatcher(config, **inputs.shape, dtype=inputs.x.dtype, device=device)
    assert isinstance(dispatcher, DeepEPDispatcher)
    x, idx, weight = inputs.x, inputs.idx, inputs.weight
    sweep = []
    for sms in SMS:
        if sms > torch.cuda.get_device_properties(device).multi_processor_count:
            break
        dispatcher.set_deepep(DeepEPConfig(sms=sms))

        def step() -> tuple[Any, Any]:
            state = dispatcher.plan(idx, layer="tune")
            return state, dispatcher.dispatch(state, x, weight)

        there = measure(step, device, repeats=args.repeats, warmup=3).median
        state, d = step()
        back = measure(
            lambda state=state, d=d: dispatcher.combine(state, d.rows, d.weights),  # type: ignore[misc]
            device, repeats=args.repeats, warmup=3,
        ).median  # fmt: skip
        sweep.append({"sms": sms, "dispatch_ms": there, "combine_ms": back})
    dispatcher.check()
    dispatcher.close()
    best = min(sweep, key=lambda found: found["dispatch_ms"] + found["combine_ms"])
    if dist.get_rank() == 0:
        shape = f"T={args.tokens} D={args.hidden} K={args.top_k} E={args.experts} EP={dist.get_world_size()}"
        print(f"best for {shape}: deepep.sms={best['sms']}")
        for found in sweep:
            print(
                f"  sms {found['sms']:4d}   plan + dispatch {found['dispatch_ms']:7.3f} ms   combine"
                f" {found['combine_ms']:7.3f} ms"
            )
    return {
        "what": "tune",
        "backend": "deepep",
        "shape": {name: getattr(args, name) for name in ("tokens", "hidden", "top_k", "experts", "routes")},
        "world": dist.get_world_size(),
        "device": torch.cuda.get_device_name(),
        "deepep": best,
        "sweep": sweep,
    }
