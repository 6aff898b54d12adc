"""Megatron's MoE layer with its own alltoall and with our dispatchers: the layer's time without its matrix products.

    torchrun --nproc-per-node 2 -m ep_plugin.bench.megatron_layer [--json result.json]

Every rank holds E/EP experts and T tokens of its own. Times are medians over repeats of the largest over ranks, in
milliseconds; the default shape is the one that Megatron publishes. ``--spec te`` builds the layer of
TransformerEngine's modules, as most Megatron users do: its grouped experts, fused permutation and fused router.

- ``layer``: forward and backward, the host ahead of the device as it is in the middle of a model, up to where the layer
  itself waits for the device. ``layer_alone``: the device idle when it begins, so the host's launches count too.
  ``host``: until the call returns.
- ``gemm``: when a kernel of a matrix product ran, by the profiler. ``rest`` = layer - gemm, ``rest_alone`` likewise.
- ``activation``: kernels of the experts' activation, which are part of the rest.
- ``calls``: the six dispatcher calls around experts that only apply the probabilities, forward and backward.
- ``..._speedup``: alltoall's time over this one's; of ``layer`` it is the speedup end to end.

After each way's line come our phases and the kernels that took most time besides the products.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ..config import CapacityConfig, EPConfig
from ..dispatch.spans import span
from ..job import join
from .spans import ON_DEVICE, Trace, mean_over_ranks, read_spans, record, union_of
from .timing import SPIN_CYCLES, measure, measure_host

GEMM = re.compile(r"gemm|gemv|nvjet|cutlass|xmma|cublas|splitk|grouped_mm", re.IGNORECASE)  # TransformerEngine's too
# Ours; Megatron's, which torch.compile makes and names after what it fuses, or runs one operation at a time.
ACTIVATION = re.compile(r"swish|swiglu|silu|triton_(poi|red|per)_fused.*sigmoid", re.IGNORECASE)
SHOWN = 14  # kernels of a way
PROFILED = 5  # calls
SHAPE = ("tokens", "hidden", "width", "experts", "top_k", "factor", "heap", "spec")
WAYS: dict[str, tuple[EPConfig | None, str]] = {
    "alltoall": (None, "megatron"),
    "block": (EPConfig(dispatcher="block"), "megatron"),
    "block:te": (EPConfig(dispatcher="block", permute="te"), "megatron"),
    "rowwise": (EPConfig(), "megatron"),
    "rowwise:route": (EPConfig(form="route"), "megatron"),
    "rowwise+experts": (EPConfig(), "plugin"),
    "rowwise:route+experts": (EPConfig(form="route"), "plugin"),
}


def main(argv: list[str] | None = None) -> int:
    """Run under torchrun; rank 0 prints one line a way, and the whole result as JSON."""
    args = _parser().parse_args(sys.argv[1:] if argv is None else argv)
    result = run(args, join("cuda"))
    if dist.get_rank() == 0:
        print(json.dumps(result), flush=True)
        if args.json is not None:
            Path(args.json).write_text(json.dumps(result, indent=1) + "\n")
    dist.barrier()
    dist.destroy_process_group()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ep_plugin.bench.megatron_layer", description=__doc__)
    parser.add_argument("-T", "--tokens", type=int, default=4096, help="tokens of each rank")
    parser.add_argument("-H", "--hidden", type=int, default=7168)
    parser.add_argument("-I", "--width", type=int, default=2048, help="expert width")
    parser.add_argument("-E", "--experts", type=int, default=32)
    parser.add_argument("-K", "--top-k", type=int, default=8)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=None, metavar="WAY", help=", ".join(WAYS))
    parser.add_argument("--spec", choices=("local", "te"), default="local", help="what the layer's modules are")
    parser.add_argument("--heap", default="auto")
    parser.add_argument("--factor", type=float, default=1.5, help="rows that the buffers hold over T·K")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--no-fusion", action="store_true", help="Megatron's activation without torch.compile")
    parser.add_argument("--json", default=None, help="write the result to this file")
    return parser


def run(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """The result of every way; collective over WORLD."""
    from megatron.core import __version__, parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel(1, 1, expert_model_parallel_size=dist.get_world_size())
    model_parallel_cuda_manual_seed(123)
    result: dict[str, Any] = {
        "megatron_core": __version__,
        "device": torch.cuda.get_device_name(device),
        "ep": dist.get_world_size(),
        **{name: getattr(args, name) for name in SHAPE},
        "ways": {},
    }
    if args.spec == "te":
        from transformer_engine import __version__ as te_version

        result["transformer_engine"] = te_version
    for name in args.ways or [way for way in WAYS if args.spec == "te" or way != "block:te"]:
        found = one_way(name, args, device)
        result["ways"][name] = found
        base = result["ways"].get("alltoall")
        for part in ("layer", "layer_alone", "rest", "rest_alone", "calls"):
            if base is not None and found[part] is not None:
                found[f"{part}_speedup"] = round(base[part] / found[part], 2)
        if dist.get_rank() == 0:
            _show(name, found)
    return result


def _show(name: str, found: dict[str, Any]) -> None:
    shown = ", ".join(f"{key} {value}" for key, value in found.items() if not isinstance(value, dict))
    print(f"{name}: {shown}", flush=True)
    for part in ("phases", "kernels"):
        for what, ms in found[part].items():
            print(f"    {ms:7.3f}  {what}", flush=True)


def one_way(name: str, args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Times of one way, and the phases that our dispatchers name."""
    from ..adapters.megatron import use_dispatcher

    ep, experts = WAYS[name]
    layer = build_layer(args, device)
    handle = None
    if ep is not None:
        capacity = CapacityConfig(factor=args.factor)
        ep = dataclasses.replace(ep, capacity=capacity, max_tokens=args.tokens, heap=args.heap)
        handle = use_dispatcher(layer, ep, experts=experts)
    generator = torch.Generator(device=device).manual_seed(1 + dist.get_rank())
    x = torch.randn(args.tokens, 1, args.hidden, device=device, dtype=torch.bfloat16, generator=generator)
    x.requires_grad_()
    grad = torch.randn(x.shape, device=device, dtype=torch.bfloat16, generator=generator)

    def whole() -> None:
        layer.zero_grad(set_to_none=True)
        x.grad = None
        layer(x)[0].backward(grad)

    def spun() -> None:
        with span("spin"):  # the device comes to the products from the same pause as in the timed calls
            torch.cuda._sleep(SPIN_CYCLES)
        whole()

    with torch.no_grad():
        probs, routing = layer.router(x)
    # Our experts take rows past the valid ones, which the calls alone would multiply.
    calls = six_calls(layer, x, routing, probs.detach(), grad) if experts == "megatron" else None
    timed = measure(whole, device, repeats=args.repeats)
    alone = measure(whole, device, repeats=args.repeats, warmup=1, queue=False)
    trace = record(spun, device, calls=PROFILED)
    gemm, activation = (_slowest_rank(kernel_ms(trace, kind)) for kind in (GEMM, ACTIVATION))
    found: dict[str, Any] = {
        "layer": timed.median,
        "layer_alone": alone.median,
        "host": measure_host(whole, device, repeats=5),
        "gemm": gemm,
        "rest": timed.median - gemm,
        "rest_alone": alone.median - gemm,
        "activation": activation,
        "calls": measure(calls, device, repeats=args.repeats).median if calls else None,
        "peak_gib": torch.cuda.max_memory_allocated(device) / 2**30,
    }
    found = {key: None if value is None else round(value, 3) for key, value in found.items()}
    spans = mean_over_ranks(read_spans(trace)) if handle is not None else []
    found["phases"] = {s.path or "(no phase)": round(s.device_ms, 3) for s in spans if s.path != "spin"}
    found["kernels"] = longest_kernels(trace)
    if handle is not None:
        handle.check()
        handle.close()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    return found


def build_layer(args: argparse.Namespace, device: torch.device) -> Any:
    """Megatron's MoE layer in bfloat16 on ``device``: of its own modules, whose experts run one after another, or of
    TransformerEngine's."""
    import functools

    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
    from megatron.core.transformer.transformer_config import TransformerConfig

    te = args.spec == "te"
    config = TransformerConfig(
        num_layers=1,
        hidden_size=args.hidden,
        num_attention_heads=args.hidden // 128 or 1,
        ffn_hidden_size=args.width,
        moe_ffn_hidden_size=args.width,
        num_moe_experts=args.experts,
        moe_router_topk=args.top_k,
        moe_router_load_balancing_type="none",
        moe_router_dtype="fp32",
        moe_token_dispatcher_type="alltoall",
        expert_model_parallel_size=dist.get_world_size(),
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=F.silu,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=not args.no_fusion,
        moe_grouped_gemm=te,
        moe_permute_fusion=te,
        moe_router_fusion=te,
        bf16=True,
        params_dtype=torch.bfloat16,
    )
    spec_of = (
        gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec if te else gpt_layer_specs.get_gpt_layer_local_spec
    )
    mlp = spec_of(num_experts=args.experts, moe_grouped_gemm=te).submodules.mlp
    submodules = mlp.keywords["submodules"] if isinstance(mlp, functools.partial) else mlp.submodules
    layer = MoELayer(config, submodules, pg_collection=get_default_pg_collection())
    layer.set_layer_number(1)
    return layer.to(device).train()


def six_calls(layer: Any, x: Tensor, routing: Tensor, probs: Tensor, grad: Tensor) -> Callable[[], None]:
    """One forward and backward of the dispatcher's six calls around experts that apply the probabilities alone."""
    dispatcher = layer.token_dispatcher
    probs = probs.clone().requires_grad_()

    def both() -> None:
        x.grad = probs.grad = None
        rows, weights = dispatcher.dispatch_preprocess(x, routing, probs)
        rows, weights = dispatcher.token_dispatch(rows, weights)
        rows, _, weights = dispatcher.dispatch_postprocess(rows, weights)
        y = dispatcher.combine_preprocess(rows * weights[:, None].to(rows.dtype))
        dispatcher.combine_postprocess(dispatcher.token_combine(y)).backward(grad)

    return both


def kernel_ms(trace: Trace, kind: re.Pattern[str]) -> float:
    """Milliseconds of a call in which a kernel whose name matches ``kind`` ran; two at once count once."""
    return sum(end - start for start, end in union_of(trace, kind)) / PROFILED / 1e3


def longest_kernels(trace: Trace) -> dict[str, float]:
    """Milliseconds of a call by kernel, the longest first, without matrix products."""
    total: dict[str, float] = {}
    for event in trace["traceEvents"]:
        if event.get("cat") in ON_DEVICE and not GEMM.search(event["name"]) and "spin_kernel" not in event["name"]:
            name = _short(event["name"])
            total[name] = total.get(name, 0.0) + float(event["dur"]) / PROFILED / 1e3
    return {name: round(total[name], 3) for name in sorted(total, key=lambda name: -total[name])[:SHOWN]}


def _short(kernel: str) -> str:
    """A kernel's name without C++'s prefixes."""
    return re.sub(r"void |at::native::|\(anonymous namespace\)::|c10::|std::", "", kernel)[:100]


def _slowest_rank(own: float) -> float:
    every: list[float | None] = [None] * dist.get_world_size()
    dist.all_gather_object(every, own)
    return max(value for value in every if value is not None)


if __name__ == "__main__":
    sys.exit(main())
