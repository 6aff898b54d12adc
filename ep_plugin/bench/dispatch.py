"""``ep-bench dispatch``: route map, dispatch and combine of every backend on the same routes, with each phase's
time."""

from __future__ import annotations

import argparse
import platform
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..config import EPConfig
from ..dispatch import Dispatched, Dispatcher, build_dispatcher
from ..dispatch.block import BlockDispatcher
from ..kernels.fan_out import fan_out_torch
from ..kernels.reduce import accumulation_dtype
from .routes import make_routes
from .timing import Timing, measure


def run(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Collective. Prints a table on rank 0 and returns the figures."""
    cuda = device.type == "cuda"
    rank, world = dist.get_rank(), dist.get_world_size()
    dtype = getattr(torch, args.dtype or ("bfloat16" if cuda else "float32"))
    shape = dict(num_experts=args.experts, top_k=args.top_k, hidden_size=args.hidden)
    idx, weight = make_routes(args.routes, args.tokens, args.experts, args.top_k, rank=rank, world=world, device=device)
    x = torch.randn(args.tokens, args.hidden, device=device).to(dtype)
    remote = _remote_bytes(idx, args.experts // world, rank, world, args.hidden * dtype.itemsize)
    result: dict[str, Any] = {
        "what": "dispatch", **shape, "tokens": args.tokens, "world": world, "dtype": str(dtype), "routes": args.routes,
        "device": torch.cuda.get_device_name() if cuda else platform.processor() or platform.machine(),
        "torch": torch.__version__, "remote_bytes": remote, "backends": {},
    }  # fmt: skip
    if rank == 0:
        print(
            f"T={args.tokens} D={args.hidden} K={args.top_k} E={args.experts} EP={world} {dtype} {args.routes}"
            f" routes, {result['device']}"
        )
    for name in args.backends.split(","):
        kind, _, form = name.partition(":")
        config = EPConfig(
            dispatcher=kind,
            form=form or "dedup",
            heap=args.heap,
            # The weighted sum where each backend makes it: dedup on the expert rank, the others at the token.
            weight_at="output" if kind == "rowwise" and not form else "source",
            max_tokens=args.tokens,
        )
        config.capacity.factor = room(idx, world, args.experts)
        dispatcher = build_dispatcher(config, **shape, dtype=dtype, device=device)
        figures = measure_backend(dispatcher, idx, weight, x, repeats=args.repeats)
        if isinstance(dispatcher, BlockDispatcher):
            figures |= _block_floor(dispatcher, idx, x, args)
        result["backends"][name] = figures
        if rank == 0:
            _print(name, figures, remote["route" if kind == "block" or form == "route" else "token"])
        dispatcher.close()
    figures = result["backends"]
    if "block" in figures and "rowwise" in figures and rank == 0:
        result["rowwise_speedup"] = figures["block"]["total_ms"] / figures["rowwise"]["total_ms"]
        print(f"rowwise_speedup {result['rowwise_speedup']:.2f} (block / rowwise, plan + dispatch + combine)")
    return result


def _remote_bytes(idx: Tensor, local_experts: int, rank: int, world: int, row: int) -> dict[str, int]:
    """Bytes of rows that must leave this rank: one row per route, and one per (token, rank)."""
    dest = torch.where(idx >= 0, idx // local_experts, rank)
    others = [r for r in range(world) if r != rank]
    return {
        "route": int((dest != rank).sum()) * row,
        "token": sum(int((dest == r).any(1).sum()) for r in others) * row,
    }


@torch.no_grad()
def measure_backend(
    dispatcher: Dispatcher[Any], idx: Tensor, weight: Tensor, x: Tensor, *, repeats: int, phases: bool = True
) -> dict[str, Any]:
    """Milliseconds of the route map alone, map and dispatch, combine, the whole way, and each backward movement."""
    device, queue = x.device, dispatcher.name != "block"
    acc = accumulation_dtype(x.dtype)

    def timed(fn: Callable[[], object], phases: bool = False) -> Timing:
        return measure(fn, device, repeats=repeats, phases=phases, queue=queue)

    def step() -> tuple[Any, Dispatched]:
        state = dispatcher.plan(idx, layer="bench", x=x)
        return state, dispatcher.dispatch(state, x, weight)

    def combine(state: Any, d: Dispatched) -> Tensor:
        return dispatcher.combine(state, d.rows, d.weights if dispatcher.config.weight_at == "output" else weight)

    plan = timed(lambda: dispatcher.plan(idx, layer="bench"))
    there, whole = timed(step), timed(lambda: combine(*step()), phases)
    state, d = step()
    back = timed(lambda: combine(state, d))
    grad, grad_rows = torch.randn_like(x), torch.randn_like(d.rows)
    grad_weights = torch.randn(d.rows.shape[0], device=device, dtype=acc)
    combine_backward = timed(lambda: dispatcher.send_grad(state, grad, None))
    dispatch_backward = timed(lambda: dispatcher.return_grad(state, grad_rows, grad_weights))
    timings = {
        "plan": plan,
        "plan_dispatch": there,
        "combine": back,
        "total": whole,
        "combine_backward": combine_backward,
        "dispatch_backward": dispatch_backward,
    }
    out: dict[str, Any] = {name: timing.as_dict() for name, timing in timings.items()}
    out |= {f"{name}_ms": timing.median for name, timing in timings.items()}
    return out


@torch.no_grad()
def _block_floor(dispatcher: BlockDispatcher, idx: Tensor, x: Tensor, args: argparse.Namespace) -> dict[str, Any]:
    """The exchanges alone and the permutations alone that block needs: what its dispatch and combine cannot be faster
    than."""
    state = dispatcher.plan(idx, layer="bench")
    rows = fan_out_torch(x, state.send_routes, dispatcher.top_k)
    received = dispatcher._exchange(rows, state.sizes[0], state.sizes[1])

    def exchanges() -> None:
        dispatcher._exchange(rows, state.sizes[0], state.sizes[1])
        dispatcher._exchange(received, state.sizes[1], state.sizes[0])

    def permutations() -> None:
        fan_out_torch(x, state.send_routes, dispatcher.top_k)
        if state.recv_order is not None:
            y = received.index_select(0, state.recv_order)
            torch.empty_like(y).index_copy_(0, state.recv_order, y)
        dispatcher.merge(state, rows, None)

    exchange = measure(exchanges, x.device, repeats=args.repeats, queue=False)
    permute = measure(permutations, x.device, repeats=args.repeats, queue=False)
    return {"exchanges_alone_ms": exchange.median, "permutations_alone_ms": permute.median}


def room(idx: Tensor, world: int, num_experts: int) -> float:
    """The capacity factor that just holds these routes on every rank; collective."""
    dest = torch.bincount((idx[idx >= 0] // (num_experts // world)).flatten(), minlength=world)
    if dist.is_initialized():
        dest = dest.cpu()
        dist.all_reduce(dest)
    return max(1.0, round(float(dest.max()) / idx.numel() + 0.005, 2))


def _print(name: str, figures: dict[str, Any], remote: int) -> None:
    rate = remote / max(figures["plan_dispatch_ms"], 1e-9) / 1e6
    print(
        f"{name:14s} plan {figures['plan_ms']:8.3f} ms   plan + dispatch {figures['plan_dispatch_ms']:8.3f} ms"
        f" ({rate:6.1f} GB/s remote)   combine {figures['combine_ms']:8.3f} ms   total {figures['total_ms']:8.3f} ms"
    )
    print(
        f"{'':14s} combine backward {figures['combine_backward_ms']:8.3f} ms   dispatch backward"
        f" {figures['dispatch_backward_ms']:8.3f} ms"
    )
    if "exchanges_alone_ms" in figures:
        floor = figures["exchanges_alone_ms"] + figures["permutations_alone_ms"]
        print(
            f"{'':14s} exchanges alone {figures['exchanges_alone_ms']:.3f} ms, permutations alone"
            f" {figures['permutations_alone_ms']:.3f} ms: total is {figures['total_ms'] / floor:.2f} × their sum"
        )
    for phase, ms in sorted(figures["total"]["phases"].items(), key=lambda item: -item[1]):
        print(f"{'':14s}   {phase:28s} {ms:8.3f} ms")
