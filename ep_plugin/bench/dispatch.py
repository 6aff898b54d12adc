"""``ep-bench dispatch``: route map, dispatch and combine of every backend on the same routes, with each phase's
time and what the machine could do at most."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..config import LaunchConfig
from ..dispatch import Dispatched, Dispatcher, build_dispatcher
from ..dispatch.block import BlockDispatcher
from ..kernels.reduce import accumulation_dtype
from .inputs import Inputs, backend
from .limits import Limits, Traffic, against, least_bytes, measure_limits, said
from .peers import PEERS, measure_peer, print_peer
from .timing import Timing, measure

HOST_WAIT = "plan > host split lists"


def run(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Collective. Prints a table for each set of routes on rank 0 and returns the figures.

    Of one set: shape, ``limits``, ``backends`` and ``peers``. Of several: shape and ``limits``, and each set's result
    in ``route_sets``."""
    limits = measure_limits(device, args.heap, repeats=args.repeats)
    sets = {}
    for kind in args.routes.split(","):
        sets[kind] = _run(argparse.Namespace(**{**vars(args), "routes": kind}), device, limits)
    if len(sets) == 1:
        return sets[args.routes]
    shared = ("what", "num_experts", "top_k", "hidden_size", "tokens", "world", "dtype", "torch", "device", "limits")
    first = next(iter(sets.values()))
    return {name: first[name] for name in shared} | {"routes": args.routes, "route_sets": sets}


def side_by_side(result: dict[str, Any]) -> dict[str, Any]:
    """A result of several sets of routes as one whose backends are called ``backend, routes``, to be drawn."""
    if "route_sets" not in result:
        return result
    sets = result["route_sets"].items()
    return result | {
        "backends": {f"{name}, {kind}": figures for kind, one in sets for name, figures in one["backends"].items()}
    }


def _run(args: argparse.Namespace, device: torch.device, limits: Limits) -> dict[str, Any]:
    rank, world = dist.get_rank(), dist.get_world_size()
    inputs = Inputs.make(args, device)
    x, idx, weight = inputs.x, inputs.idx, inputs.weight
    result = inputs.describe(args) | {"limits": asdict(limits)}
    if rank == 0:
        print(limits)
    remote = result["remote_bytes"]
    result["peers"] = {}
    traffic, row_bytes, local = Traffic.of(idx, args.experts), x.shape[1] * x.element_size(), args.experts // world

    def reached(form: str, dispatch_ms: float, combine_ms: float) -> dict[str, Any]:
        times = {"dispatch": dispatch_ms, "combine": combine_ms}
        return {
            movement: against(limits, least_bytes(form, movement, traffic, row_bytes, local), ms)
            for movement, ms in times.items()
        }

    for name in args.backends.split(","):
        if name in PEERS:
            result["peers"][name] = peer = measure_peer(name, inputs, args)
            form = "packed" if name == "nccl" else "block"
            peer["reached"] = reached(form, peer["dispatch_ms"], peer["combine_ms"])
            if rank == 0:
                print_peer(name, peer, remote["route"])
                _print_reached(peer)
            continue
        config = backend(name, heap=args.heap, max_tokens=args.tokens, launch=LaunchConfig(table=args.table))
        unique = config.dispatcher == "deepep" or (config.dispatcher == "rowwise" and config.form == "dedup")
        # The weighted sum where each backend makes it: dedup and DeepEP on the expert rank, the others at the token.
        config.weight_at = "output" if unique else "source"
        config.capacity.factor = room(idx, world, args.experts)
        dispatcher = build_dispatcher(config, **inputs.shape, dtype=x.dtype, device=device)
        figures = measure_backend(dispatcher, idx, weight, x, repeats=args.repeats)
        if isinstance(dispatcher, BlockDispatcher):
            figures |= _block_floor(dispatcher, idx, x, args)
            figures["host_wait_ms"] = sum(s["host_ms"] for s in figures["spans"] if s["path"] == HOST_WAIT)
        form = "dedup" if unique else "route" if config.dispatcher == "rowwise" else config.dispatcher
        figures["reached"] = reached(form, figures["plan_dispatch_ms"], figures["combine_ms"])
        result["backends"][name] = figures
        if rank == 0:
            _print(name, figures, remote["token" if unique else "route"])
        dispatcher.close()
    figures = result["backends"]
    if "block" in figures and "rowwise" in figures and rank == 0:
        result["rowwise_speedup"] = figures["block"]["total_ms"] / figures["rowwise"]["total_ms"]
        print(f"rowwise_speedup {result['rowwise_speedup']:.2f} (block / rowwise, plan + dispatch + combine)")
    return result


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
    return out | {"spans": [asdict(s) for s in whole.spans]}


@torch.no_grad()
def _block_floor(dispatcher: BlockDispatcher, idx: Tensor, x: Tensor, args: argparse.Namespace) -> dict[str, Any]:
    """The exchanges alone and the permutations alone that block needs: what its dispatch and combine cannot be faster
    than."""
    state = dispatcher.plan(idx, layer="bench")
    rows = dispatcher.fan_out(state, x, None)
    received = dispatcher._exchange(rows, state.sizes[0], state.sizes[1])

    def exchanges() -> None:
        dispatcher._exchange(rows, state.sizes[0], state.sizes[1])
        dispatcher._exchange(received, state.sizes[1], state.sizes[0])

    def permutations() -> None:
        dispatcher.fan_out(state, x, None)
        if state.recv_order is not None:
            dispatcher.unsort(state, dispatcher.sort(state, received))
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
    _print_reached(figures)
    if "exchanges_alone_ms" in figures:
        floor = figures["exchanges_alone_ms"] + figures["permutations_alone_ms"]
        print(
            f"{'':14s} exchanges alone {figures['exchanges_alone_ms']:.3f} ms, permutations alone"
            f" {figures['permutations_alone_ms']:.3f} ms: total is {figures['total_ms'] / floor:.2f} × their sum"
        )
        print(f"{'':14s} the host waits {figures['host_wait_ms']:.3f} ms for its split lists, in plan")
    print_spans(figures["spans"])


def _print_reached(figures: dict[str, Any]) -> None:
    for movement, reached in figures["reached"].items():
        print(f"{'':14s} {movement:8s} {said(reached)}")


def print_spans(spans: list[dict[str, Any]], rest: str = "between the phases") -> None:
    """One line a span; on GPUs the device's time, what runs beside it on other streams, and the host's."""
    on_device = any(s["device_ms"] for s in spans)
    for s in spans:
        device = f"{s['device_ms']:8.3f} ms + {s['side_ms']:.3f} beside it   host " if on_device else ""
        inside = any(other["path"].startswith(f"{s['path']} > ") for other in spans)
        name = f"{s['path']} > rest" if inside else s["path"] or rest
        print(f"{'':14s}   {name:44s} {device}{s['host_ms']:8.3f} ms")
