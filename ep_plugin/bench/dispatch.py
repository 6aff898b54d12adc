"""``ep-bench dispatch``: route map, dispatch and combine of every backend on the same routes, with each phase's
time."""

from __future__ import annotations

import argparse
import platform
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..config import EPConfig
from ..dispatch import Dispatcher, build_dispatcher
from ..dispatch.block import BlockDispatcher
from ..kernels.fan_out import fan_out_torch
from .routes import make_routes
from .timing import Timing, measure


def run(args: argparse.Namespace) -> dict[str, Any] | None:
    """Collective under torchrun. Prints a table and returns the figures on rank 0."""
    cuda = args.device == "cuda"
    device = torch.device("cuda", int(torch.distributed.get_node_local_rank())) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    else:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
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
        config = EPConfig(dispatcher=kind, form=form or "dedup", heap=args.heap, max_tokens=args.tokens)
        config.capacity.factor = float(world)
        dispatcher = build_dispatcher(config, **shape, dtype=dtype, device=device)
        figures = _backend(dispatcher, idx, weight, x, args)
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
    dist.barrier()
    dist.destroy_process_group()
    return result if rank == 0 else None


def _remote_bytes(idx: Tensor, local_experts: int, rank: int, world: int, row: int) -> dict[str, int]:
    """Bytes of rows that must leave this rank: one row per route, and one per (token, rank)."""
    dest = torch.where(idx >= 0, idx // local_experts, rank)
    others = [r for r in range(world) if r != rank]
    return {
        "route": int((dest != rank).sum()) * row,
        "token": sum(int((dest == r).any(1).sum()) for r in others) * row,
    }


@torch.no_grad()
def _backend(
    dispatcher: Dispatcher[Any], idx: Tensor, weight: Tensor, x: Tensor, args: argparse.Namespace
) -> dict[str, Any]:
    device = x.device
    queue = dispatcher.name != "block"

    def timed(fn: Any) -> Timing:
        return measure(fn, device, repeats=args.repeats, phases=True, queue=queue)

    def forward() -> Tensor:
        state = dispatcher.plan(idx, layer="bench")
        return dispatcher.combine(state, dispatcher.dispatch(state, x, weight).rows)

    def dispatch() -> None:
        dispatcher.dispatch(dispatcher.plan(idx, layer="bench"), x, weight)

    plan = timed(lambda: dispatcher.plan(idx, layer="bench"))
    there, both = timed(dispatch), timed(forward)
    out = {
        "plan": plan.as_dict(),
        "plan_dispatch": there.as_dict(),
        "total": both.as_dict(),
        "plan_ms": plan.median,
        "dispatch_ms": there.median - plan.median,
        "combine_ms": both.median - there.median,
        "total_ms": both.median,
    }
    if args.backward:
        with torch.enable_grad():
            full = timed(lambda: _forward_backward(dispatcher, idx, weight, x))
        out |= {"forward_backward": full.as_dict(), "forward_backward_ms": full.median}
    return out


def _forward_backward(dispatcher: Dispatcher[Any], idx: Tensor, weight: Tensor, x: Tensor) -> None:
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    state = dispatcher.plan(idx, layer="bench")
    d = dispatcher.dispatch(state, x, weight)
    out = dispatcher.combine(state, d.rows)
    torch.autograd.backward([out, d.weights], [torch.ones_like(out), torch.ones_like(d.weights)])


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


def _print(name: str, figures: dict[str, Any], remote: int) -> None:
    print(
        f"{name:14s} plan {figures['plan_ms']:8.3f} ms   dispatch {figures['dispatch_ms']:8.3f} ms"
        f" ({remote / max(figures['dispatch_ms'], 1e-9) / 1e6:6.1f} GB/s remote)   combine"
        f" {figures['combine_ms']:8.3f} ms"
        f"   total {figures['total_ms']:8.3f} ms"
    )
    if "exchanges_alone_ms" in figures:
        floor = figures["exchanges_alone_ms"] + figures["permutations_alone_ms"]
        print(
            f"{'':14s} exchanges alone {figures['exchanges_alone_ms']:.3f} ms, permutations alone"
            f" {figures['permutations_alone_ms']:.3f} ms: total is {figures['total_ms'] / floor:.2f} × their sum"
        )
    if "forward_backward_ms" in figures:
        print(f"{'':14s} forward and backward {figures['forward_backward_ms']:.3f} ms")
    for phase, ms in sorted(figures["total"]["phases"].items(), key=lambda item: -item[1]):
        print(f"{'':14s}   {phase:28s} {ms:8.3f} ms")
