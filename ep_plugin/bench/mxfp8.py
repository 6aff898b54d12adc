"""``ep-bench mxfp8``: MXFP8 rows against rows as they are: bytes, the four movements up to rows that a GEMM reads, a
whole layer, signal to noise of the output and of every gradient, and what is kept for backward.

Legend: T tokens of a rank, K routes per token, D hidden size, F expert width, R rows received.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..config import EPConfig, MXFP8Config
from ..dispatch import Dispatcher, build_dispatcher
from ..dispatch.base import Arrived
from ..experts import GroupedMLP
from ..layer import moe_step
from .dispatch import room
from .inputs import Inputs, backend
from .layer import Step
from .timing import measure

LEGS = ("dispatch", "combine", "combine_backward", "dispatch_backward")
QUALITY = {"tokens": 256, "width": 256}  # at most, for the comparison with float64


@dataclass(frozen=True)
class Precision:
    """One way to run a layer: rows as they are (``gemm`` None), or MXFP8 rows with an expert GEMM."""

    name: str
    gemm: str | None = None
    fast_accum: bool = False

    def config(self, path: str, args: argparse.Namespace, **settings: Any) -> EPConfig:
        config = backend(path, heap=args.heap, **settings)
        if self.gemm is not None:
            config.precision = "mxfp8"
            config.mxfp8 = MXFP8Config(gemm=self.gemm, fast_accum=self.fast_accum)
            config.validate()
        return config


BF16 = Precision("bf16")


def precisions(device: torch.device) -> list[Precision]:
    """Those that ``device`` can run, plain rows first."""
    if device.type == "cpu":
        return [BF16, Precision("cpu_ref", "cpu_ref")]
    major = torch.cuda.get_device_capability(device)[0]
    found = [BF16, Precision("sm90_bf16", "sm90_bf16")]
    if major == 9:
        found += [Precision("sm90_fp8row", "sm90_fp8row"), Precision("sm90_fp8row fast", "sm90_fp8row", True)]
    if major == 10:
        found += [Precision("sm100_mx", "sm100_mx")]
    return found


def run(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Collective. Prints tables on rank 0 and returns the figures."""
    args.dtype = args.dtype or "bfloat16"
    inputs = Inputs.make(args, device)
    result = inputs.describe(args) | {"width": args.width}
    factor = room(inputs.idx, dist.get_world_size(), args.experts)
    for path in args.backends.split(","):
        figures: dict[str, Any] = {"movements": {}, "layer": {}, "kept": {}, "quality": {}}
        for precision in precisions(device):
            config = precision.config(path, args, max_tokens=args.tokens)
            config.capacity.factor = factor
            dispatcher = build_dispatcher(config, **inputs.shape, dtype=inputs.x.dtype, device=device)
            if not precision.fast_accum:  # a setting of the GEMM alone
                figures["movements"][precision.name] = movements(dispatcher, inputs, repeats=args.repeats)
            step = Step(f"{path} {precision.name}", dispatcher, inputs, args.width)
            figures["layer"][precision.name] = layer(step, repeats=args.repeats)
            if not precision.fast_accum:
                figures["kept"][precision.name] = kept(step)
            del step
            dispatcher.check()
            dispatcher.close()
            if device.type == "cuda":
                torch.cuda.empty_cache()
        figures["bytes"] = wire_bytes(path, inputs, args)
        figures["quality"] = quality(path, args, device)
        _ratios(figures)
        result["backends"][path] = figures
        if dist.get_rank() == 0:
            _print(path, figures)
    return result


# Bytes


def wire_bytes(path: str, inputs: Inputs, args: argparse.Namespace) -> dict[str, Any]:
    """Bytes of rows that this rank sends (or GETs) in each movement, as they are and as records, and their ratio."""
    from ..mxfp8.movements import Wires

    unique = path == "rowwise"
    plain = inputs.remote_bytes()["token" if unique else "route"]
    wires = Wires.of(MXFP8Config(), args.hidden, inputs.x.dtype)
    records = plain // (args.hidden * inputs.x.element_size()) * wires.dispatch.nbytes
    legs = {leg: {"bf16": plain, "mxfp8": records} for leg in LEGS}
    return {"legs": legs, "ratio": records / plain if plain else wires.dispatch.nbytes / (2 * args.hidden)}


# Movements


@torch.no_grad()
def movements(dispatcher: Dispatcher[Any], inputs: Inputs, *, repeats: int) -> dict[str, float]:
    """Milliseconds of each movement: dispatch from plan to rows that the GEMM reads, quantising included; combine from
    the experts' plain output to plain tokens; combine backward to the rows that both GEMMs of backward read; dispatch
    backward."""
    x, device, layer = inputs.x, inputs.x.device, "bench"

    def there() -> Any:
        state = dispatcher.plan(inputs.idx, layer=layer, x=x)
        arrived = Arrived()
        if dispatcher.config.precision == "bf16":
            dispatcher.send(state, x, inputs.weight, arrived)
        else:
            received, _ = dispatcher.receive(state, x, inputs.weight, arrived)  # type: ignore[attr-defined]
            _ready(dispatcher, state, received, (dispatcher.gemm.form,))  # type: ignore[attr-defined]
        return state

    state = there()
    rows = state.num_rows if state.num_rows is not None else dispatcher.max_rows  # type: ignore[attr-defined]
    y, grad = torch.randn(rows, x.shape[1], device=device).to(x.dtype), torch.randn_like(x)
    dots = torch.randn(rows, device=device)

    def back() -> None:
        if dispatcher.config.precision == "bf16":
            dispatcher.send_grad(state, grad, None)
        else:
            forms = (dispatcher.gemm.form, "plain")  # type: ignore[attr-defined]
            received = dispatcher.receive_grad(state, grad, None, forms)  # type: ignore[attr-defined]
            _ready(dispatcher, state, received, forms)

    calls: dict[str, Callable[[], object]] = {
        "dispatch": there,
        "combine": lambda: dispatcher.give_back(state, y, None, False),
        "combine_backward": back,
        "dispatch_backward": lambda: dispatcher.return_grad(state, y, dots),
    }
    queue = dispatcher.name != "block"
    return {name: measure(call, device, repeats=repeats, queue=queue).median for name, call in calls.items()}


def _ready(dispatcher: Any, state: Any, received: Any, forms: tuple[Any, ...]) -> None:
    """What arrived in every form that the GEMMs read."""
    for form in dict.fromkeys(forms):
        received.operand(form, dispatcher.gemm.rounding, dtype=dispatcher.dtype, offsets=state.map.offsets)


# The layer


def layer(step: Step, *, repeats: int) -> dict[str, float]:
    """Milliseconds of forward and of the whole step, and of quantising the weights, which a step of an optimizer makes
    necessary."""
    from ..mxfp8 import invalidate

    device, queue = step.x.device, step.dispatcher.name != "block"
    forward = measure(step.forward, device, repeats=repeats, warmup=2, queue=queue).median
    whole = measure(step.step, device, repeats=repeats, warmup=2, queue=queue).median
    found = {"forward_ms": forward, "step_ms": whole, "backward_ms": whole - forward}
    if step.dispatcher.config.precision == "mxfp8":

        def again() -> None:
            invalidate()
            step.step()

        fresh = measure(again, device, repeats=max(2, repeats // 3), warmup=1, queue=queue).median
        found["quantise_weights_ms"] = max(0.0, fresh - whole)
    return found


def kept(step: Step) -> dict[str, Any]:
    """Bytes that autograd keeps between forward and backward of one layer, parameters left out, tensor by tensor."""
    seen: dict[int, tuple[int, str]] = {}

    def pack(tensor: Tensor) -> Tensor:
        nbytes = tensor.numel() * tensor.element_size()
        if not isinstance(tensor, torch.nn.Parameter) and nbytes > seen.get(tensor.data_ptr(), (0, ""))[0]:
            shape = "×".join(map(str, tensor.shape))
            seen[tensor.data_ptr()] = (nbytes, f"{str(tensor.dtype).removeprefix('torch.')} [{shape}]")
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = step.forward()
    del out
    tensors = sorted(seen.values(), reverse=True)
    return {"bytes": sum(n for n, _ in tensors), "tensors": [{"bytes": n, "tensor": text} for n, text in tensors]}


# Signal to noise


def quality(path: str, args: argparse.Namespace, device: torch.device) -> dict[str, dict[str, float]]:
    """dB of the output and of every gradient against float64 of the originals, over all ranks, at a small size."""
    small = argparse.Namespace(**vars(args))
    small.tokens = min(args.tokens, QUALITY["tokens"])
    width = min(args.width, QUALITY["width"])
    inputs = Inputs.make(small, device)
    world = dist.get_world_size()
    plain = GroupedMLP(args.experts // world, args.hidden, width, dtype=inputs.x.dtype, device="meta")
    plain = plain.to_empty(device=device)
    for parameter in plain.parameters():
        torch.nn.init.normal_(parameter, std=parameter.shape[2] ** -0.5)
    grad = torch.randn_like(inputs.x)
    exact = GroupedMLP.from_parameters(
        *(torch.nn.Parameter(p.detach().double()) for p in plain.parameters()), activation=plain.activation
    )
    oracle = build_dispatcher(EPConfig(dispatcher="block"), **inputs.shape, dtype=torch.float64, device=device)
    want = list(_results(oracle, exact, inputs.x.double(), inputs.idx, inputs.weight.double(), grad.double()))
    oracle.close()
    found = {}
    for precision in precisions(device):
        config = precision.config(path, small, max_tokens=small.tokens)
        config.capacity.factor = room(inputs.idx, world, args.experts)
        dispatcher = build_dispatcher(config, **inputs.shape, dtype=inputs.x.dtype, device=device)
        got = _results(dispatcher, plain, inputs.x, inputs.idx, inputs.weight, grad)
        found[precision.name] = {name: decibels(a, b) for (name, a), (_, b) in zip(got, want, strict=True)}
        dispatcher.check()
        dispatcher.close()
    return found


def _results(
    dispatcher: Dispatcher[Any], experts: GroupedMLP, x: Tensor, idx: Tensor, weight: Tensor, grad: Tensor
) -> Iterator[tuple[str, Tensor]]:
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    experts.zero_grad()
    out = moe_step(dispatcher, x, idx, weight, experts, layer="quality")
    out.backward(grad)
    assert x.grad is not None and weight.grad is not None
    yield from (("out", out.detach()), ("dx", x.grad), ("drouter_weight", weight.grad))
    for name, parameter in experts.named_parameters():
        assert parameter.grad is not None
        yield f"d{name}", parameter.grad


def decibels(got: Tensor, want: Tensor) -> float:
    """Signal over noise of ``got``, summed over ranks; collective."""
    sums = torch.stack([want.double().square().sum(), (got.double() - want.double()).square().sum()])
    dist.all_reduce(sums)
    signal, noise = sums.clamp(min=1e-300).tolist()
    return float(10 * torch.log10(torch.tensor(signal / noise, dtype=torch.float64)))


# What it comes to


def _ratios(figures: dict[str, Any]) -> None:
    """Each precision's times and kept bytes over those of plain rows."""
    plain = figures["movements"]["bf16"]
    figures["ratios"] = {}
    for name, times in figures["movements"].items():
        if name != "bf16":
            figures["ratios"][name] = {leg: times[leg] / plain[leg] for leg in LEGS}
            figures["ratios"][name]["kept"] = figures["kept"][name]["bytes"] / figures["kept"]["bf16"]["bytes"]
    for name, times in figures["layer"].items():
        if name != "bf16":
            speedup = figures["layer"]["bf16"]["step_ms"] / times["step_ms"]
            figures["ratios"].setdefault(name, {})["layer_speedup"] = speedup


def _print(path: str, figures: dict[str, Any]) -> None:
    print(f"\n{path}: bytes on the wire {figures['bytes']['ratio']:.4f} of plain rows, every leg")
    print(f"{'':18s}" + "".join(f"{leg:>26s}" for leg in LEGS) + f"{'kept':>16s}")
    for name, times in figures["movements"].items():
        ratios = figures["ratios"].get(name, {})
        legs = "".join(f"{times[leg]:14.3f} ms" + (f" (×{ratios[leg]:5.3f})" if ratios else " " * 9) for leg in LEGS)
        kept_mb = figures["kept"][name]["bytes"] / 1e6
        print(f"{name:18s}{legs}{kept_mb:12.1f} MB" + (f" (×{ratios['kept']:.3f})" if ratios else ""))
    for name, times in figures["layer"].items():
        speedup = figures["ratios"].get(name, {}).get("layer_speedup")
        print(
            f"{name:18s} layer forward {times['forward_ms']:9.3f} ms   backward {times['backward_ms']:9.3f} ms   step"
            f" {times['step_ms']:9.3f} ms"
            + (f"   {speedup:.3f} × as fast" if speedup else "")
            + (f"   weights {times['quantise_weights_ms']:.3f} ms" if "quantise_weights_ms" in times else "")
        )
    for name, found in figures["quality"].items():
        print(f"{name:18s} dB  " + "  ".join(f"{key} {value:5.1f}" for key, value in found.items()))
    for name, found in figures["kept"].items():
        print(f"{name:18s} keeps " + ", ".join(entry["tensor"] for entry in found["tensors"] if entry["bytes"] > 4096))
