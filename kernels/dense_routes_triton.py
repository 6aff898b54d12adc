"""A dense routing (a bool map and probabilities [T, E]) as top-k routes [T, K] in one Triton kernel, and its gradient.

Legend: T tokens, E experts, K routes per token at most.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import torch
from torch import Tensor

from .fast_launch import fast
from .triton_common import Launch, next_power_of_2, require_contiguous, tl, triton

ROUTES = Launch(8448, warps=1)


@triton.jit
def _columns(routing_map, E: tl.constexpr, BLOCK: tl.constexpr):
    """Experts, whether the token is routed there, and each route's column in the top-k form."""
    expert = tl.arange(0, BLOCK)
    routed = tl.load(routing_map + expert, mask=expert < E, other=0) != 0
    return expert, routed, tl.cumsum(routed.to(tl.int32), axis=0) - 1


@fast
@triton.jit(do_not_specialize=["tokens"])
def _dense_routes(
    routing_map,
    probs,
    topk_idx,
    weights,
    most,
    tokens,
    E: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    for token in range(tl.program_id(0).to(tl.int64), tokens, tl.num_programs(0)):
        expert, routed, column = _columns(routing_map + token * E, E, BLOCK)
        count = tl.sum(routed.to(tl.int32), axis=0)
        k = tl.arange(0, BLOCK_K)
        empty = (k >= count) & (k < K)
        tl.store(topk_idx + token * K + k, -1, mask=empty)
        tl.store(weights + token * K + k, 0.0, mask=empty)
        kept = routed & (column < K)
        tl.store(topk_idx + token * K + column, expert, mask=kept)
        tl.store(weights + token * K + column, tl.load(probs + token * E + expert, mask=kept), mask=kept)
        if count > K:
            tl.atomic_max(most, count)


def dense_routes(routing_map: Tensor, probs: Tensor, topk_idx: Tensor, weights: Tensor, most: Tensor) -> None:
    """``topk_idx`` int64 [T, K]: the experts of ``routing_map`` bool [T, E], ascending in a token, −1 past its routes;
    ``weights`` [T, K] their ``probs`` [T, E], 0 past them. ``most`` int32 [1] is raised to the most routes of a token
    that has more than K of them, whose last ones are left out.
    """
    require_contiguous(routing_map=routing_map, probs=probs, topk_idx=topk_idx, weights=weights)
    (tokens, experts), top_k = routing_map.shape, topk_idx.shape[1]
    if not tokens:
        return
    _dense_routes[ROUTES.grid(tokens)](
        routing_map.view(torch.uint8), probs, topk_idx, weights, most, tokens, E=experts, K=top_k,
        BLOCK=next_power_of_2(experts), BLOCK_K=next_power_of_2(top_k), **ROUTES.options,
    )  # fmt: skip


@fast
@triton.jit(do_not_specialize=["tokens"])
def _dense_routes_backward(
    routing_map, dweights, dprobs, tokens, E: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr
):
    for token in range(tl.program_id(0).to(tl.int64), tokens, tl.num_programs(0)):
        expert, routed, column = _columns(routing_map + token * E, E, BLOCK)
        grad = tl.load(dweights + token * K + column, mask=routed & (column < K), other=0.0)
        tl.store(dprobs + token * E + expert, grad, mask=expert < E)


def dense_routes_backward(routing_map: Tensor, dweights: Tensor, dprobs: Tensor) -> None:
    """``dprobs`` [T, E]: the gradient ``dweights`` [T, K] of each route's weight at its place, 0 elsewhere."""
    require_contiguous(routing_map=routing_map, dweights=dweights, dprobs=dprobs)
    (tokens, experts), top_k = routing_map.shape, dweights.shape[1]
    if not tokens:
        return
    _dense_routes_backward[ROUTES.grid(tokens)](
        routing_map.view(torch.uint8), dweights, dprobs, tokens, E=experts, K=top_k,
        BLOCK=next_power_of_2(experts), **ROUTES.options,
    )  # fmt: skip
