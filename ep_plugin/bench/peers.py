"""What the dispatchers are measured beside: bare NCCL (or gloo) all-to-alls, and Megatron's own alltoall dispatcher.

Legend: T tokens of a rank, K routes per token, E experts, M ranks, D hidden size.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .inputs import Inputs
from .timing import Timing, measure

PEERS = ("nccl", "megatron")
Movements = tuple[Callable[[], Tensor], Callable[[], Tensor]]  # rows to the experts, and the same back


def measure_peer(name: str, inputs: Inputs, args: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds of the peer ``name`` of ``PEERS`` on ``inputs``: dispatch, combine, and one after the other.

    ``nccl``: two ``all_to_all_single`` of rows packed in advance, one row per route, whose lengths the host knows: the
    least that an exchange of one row per route takes. ``megatron``: megatron-core's ``alltoall`` dispatcher, forward,
    around experts that do nothing."""
    device = inputs.x.device
    there, back = (_all_to_alls if name == "nccl" else _megatron)(inputs, args)

    def timed(call: Callable[[], object]) -> Timing:
        return measure(call, device, repeats=args.repeats, queue=name == "nccl")

    def both() -> None:
        there()
        back()

    with torch.no_grad():
        timings = {"dispatch": timed(there), "total": timed(both), "combine": timed(back)}
    figures: dict[str, Any] = {part: timing.as_dict() for part, timing in timings.items()}
    return figures | {f"{part}_ms": timing.median for part, timing in timings.items()}


def _all_to_alls(inputs: Inputs, args: argparse.Namespace) -> Movements:
    x, idx, world = inputs.x, inputs.idx, dist.get_world_size()
    dest = torch.where(idx >= 0, idx // (args.experts // world), world).flatten()
    sent = torch.bincount(dest, minlength=world + 1)[:world]
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent)
    send, receive = sent.tolist(), received.tolist()
    rows = x[dest.argsort(stable=True)[: sum(send)] // args.top_k]
    arrived, returned = x.new_empty((sum(receive), x.shape[1])), torch.empty_like(rows)

    def move(out: Tensor, rows: Tensor, out_rows: list[int], in_rows: list[int]) -> Tensor:
        # As bytes: gloo knows no bfloat16.
        dist.all_to_all_single(out.view(torch.uint8), rows.view(torch.uint8), out_rows, in_rows)
        return out

    return lambda: move(arrived, rows, receive, send), lambda: move(returned, arrived, send, receive)


def _megatron(inputs: Inputs, args: argparse.Namespace) -> Movements:
    from megatron.core import parallel_state
    from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
    from megatron.core.transformer.transformer_config import TransformerConfig

    world, rank, x = dist.get_world_size(), dist.get_rank(), inputs.x
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(1, 1, expert_model_parallel_size=world)
    local = args.experts // world
    config = TransformerConfig(
        num_layers=1,
        hidden_size=args.hidden,
        num_attention_heads=1,
        num_moe_experts=args.experts,
        moe_router_topk=args.top_k,
        moe_token_dispatcher_type="alltoall",
        expert_model_parallel_size=world,
        bf16=x.dtype == torch.bfloat16,
    )
    own = list(range(rank * local, (rank + 1) * local))
    dispatcher = MoEAlltoAllTokenDispatcher(local, own, config, pg_collection=get_default_pg_collection())
    routing = torch.zeros((args.tokens, args.experts + 1), dtype=torch.bool, device=x.device)
    probs = torch.zeros((args.tokens, args.experts + 1), device=x.device)
    columns = torch.where(inputs.idx >= 0, inputs.idx, args.experts)
    routing = routing.scatter_(1, columns, True)[:, :-1].contiguous()
    probs = probs.scatter_(1, columns, inputs.weight)[:, :-1].contiguous()
    tokens = x.view(args.tokens, 1, args.hidden)

    def there() -> Tensor:
        rows, weights = dispatcher.dispatch_preprocess(tokens, routing, probs)
        rows, weights = dispatcher.token_dispatch(rows, weights)
        found: Tensor = dispatcher.dispatch_postprocess(rows, weights)[0]
        return found

    arrived = there()

    def back() -> Tensor:
        out: Tensor = dispatcher.combine_postprocess(dispatcher.token_combine(dispatcher.combine_preprocess(arrived)))
        return out

    return there, back


def print_peer(name: str, figures: dict[str, Any], remote: int) -> None:
    """One line; ``remote``: bytes of rows that leave the rank one way, one row per route."""
    rate = remote / max(figures["dispatch_ms"], 1e-9) / 1e6
    print(
        f"{name:14s} {'':16s} dispatch {figures['dispatch_ms']:15.3f} ms ({rate:6.1f} GB/s remote)   combine"
        f" {figures['combine_ms']:8.3f} ms   total {figures['total_ms']:8.3f} ms"
    )
