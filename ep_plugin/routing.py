"""Where every route goes: counts, capacity, destination rows, drop metrics.

Legend: T local tokens, K routes per token, E experts, M the EP_MP degree, E_l = E / M experts of one rank, R rows of
one rank. A *source* is a rank as owner of tokens. ``counts[s, e]`` is how many routes source s asks of expert e.

Everything follows from the exchanged ``counts [M, E]`` and ``tokens [M]`` alone, in int64, so all ranks decide alike.
Nothing here waits for a CUDA device: what can only be checked by looking at values raises ValueError on CPU tensors and
is a device-side assertion on CUDA tensors.

Rows of an expert rank lie in one canonical order (local expert, source, t·K+k), densely. The row of an accepted route
is then: rows of the rank's earlier experts, plus rows of earlier sources in this expert, plus this source's earlier
routes to this expert (report, section 5.4).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from .config import POLICIES, CapacityConfig, check_shape, one_of

MAX_ROWS = 2**31 - 1  # destination rows are int32

# The capacity factor is multiplied in limbs of this many units, so that K·T up to 2^43 times a limb fits in int64.
_LIMB = 10**6


@dataclass(frozen=True)
class RouteMap:
    """Destinations of this rank's routes, and the shape of the rows that arrive at this rank.

    dest_rank  int32 [T, K]: expert rank of each route; −1 = no route (not asked for, or dropped)
    dest_row   int32 [T, K]: row on that rank; −1 in the same places
    counts     int64 [M, E]: routes asked per (source, expert)
    accepted   int64 [M, E]: routes accepted per (source, expert)
    tokens     int64 [M]: T of every source
    offsets    int64 [E_l + 1]: own expert i has rows offsets[i] : offsets[i + 1]; offsets[-1] = R
    """

    dest_rank: Tensor
    dest_row: Tensor
    counts: Tensor
    accepted: Tensor
    tokens: Tensor
    offsets: Tensor


def count_routes(topk_idx: Tensor, num_experts: int) -> Tensor:
    """Routes per expert, int64 [E], of topk_idx [T, K] (any integer dtype and strides; −1 = no route).

    Raises ValueError for another shape or dtype, for K > E, and (CPU tensors) for an id outside [−1, E).
    """
    _check_topk(topk_idx, num_experts)
    ids = _flat_ids(topk_idx, num_experts)
    return _histogram(ids, num_experts)[1:]


def accept(counts: Tensor, tokens: Tensor, capacity: CapacityConfig, top_k: int) -> Tensor:
    """Routes accepted per (source, expert), int64 [M, E], from the exchanged counts [M, E] and tokens [M].

    With f the capacity factor (exact decimal), quotas and the order in which routes take them are:

    ============  ======================================================  ==============================
    policy        rows                                                    order of acceptance
    ============  ======================================================  ==============================
    ``dropless``  every route                                             -
    ``rank``      ceil(f·K·ΣT_r / M) per expert rank                      (local expert, source, t·K+k)
    ``source``    ceil(f·K·T_r / M) per (source r, expert rank)           (local expert, t·K+k)
    ``expert``    ceil(f·K·T_r / E) per (source r, expert)                (t·K+k)
    ============  ======================================================  ==============================

    ``rank`` keeps the most rows but starves the highest local experts when one is hot; ``source`` gives every source an
    equal share of a rank; ``expert`` is fair between experts.
    """
    world, num_experts = counts.shape
    _check(capacity, top_k=top_k, world=world, num_experts=num_experts)
    counts = counts.to(torch.int64)
    tokens = tokens.to(torch.int64)
    if capacity.policy == "dropless":
        return counts.clone()
    # A factor of E accepts every route under every policy: larger ones only risk overflow.
    factor = min(_exact(capacity.factor), Fraction(num_experts))
    asked = counts.view(world, world, num_experts // world)  # [source, expert rank, local expert]
    if capacity.policy == "rank":
        rows = _ceil_div(_ceil_times(tokens.sum() * top_k, factor), world)
        in_order = asked.permute(1, 2, 0).reshape(world, -1)  # [expert rank, (local expert, source)]
        kept = _first_of_each(in_order, rows).view(world, -1, world)
        return kept.permute(2, 0, 1).reshape(world, num_experts)
    if capacity.policy == "source":
        rows = _ceil_div(_ceil_times(tokens * top_k, factor), world)
        return _first_of_each(asked, rows.view(world, 1, 1)).reshape(world, num_experts)
    rows = _ceil_div(_ceil_times(tokens * top_k, factor), num_experts)
    return torch.minimum(counts, rows.view(world, 1))


def build_route_map(
    topk_idx: Tensor, counts: Tensor, tokens: Tensor, *, rank: int, capacity: CapacityConfig
) -> RouteMap:
    """The route map of one rank.

    topk_idx  [T, K] integer ids of this rank's routes, −1 = no route; a repeated expert counts each time, in k order
    counts    int64 [M, E], tokens int64 [M]: what all ranks exchanged; row ``rank`` is count_routes(topk_idx) and T
    rank      own rank inside the EP_MP group

    All tensors on one device. Raises ValueError for impossible shapes and, on CPU tensors, for ids outside [−1, E), for
    counts or tokens that are not those of topk_idx, and for more rows on a rank than int32 can number.
    """
    world, num_experts = counts.shape
    if not 0 <= rank < world:
        raise ValueError(f"rank {rank} is not in the group of {world}: expected 0 to {world - 1}")
    if tuple(tokens.shape) != (world,):
        raise ValueError(f"tokens has shape {tuple(tokens.shape)}; counts of {world} sources need [{world}]")
    _check_topk(topk_idx, num_experts)
    num_tokens, top_k = topk_idx.shape
    accepted = accept(counts, tokens, capacity, top_k)
    local_experts = num_experts // world

    ids = _flat_ids(topk_idx, num_experts)
    bins = _histogram(ids, num_experts)
    _require(
        (bins[1:] == counts[rank]).all() & (tokens[rank] == num_tokens),
        lambda: (
            f"row {rank} of the exchanged counts is {counts[rank].tolist()} for {int(tokens[rank])} tokens, but "
            f"topk_idx asks for {bins[1:].tolist()} with {num_tokens} tokens"
        ),
    )

    # How many routes to the same expert come earlier in t·K+k: a stable sort puts each expert's routes in one run.
    order = torch.argsort(ids, stable=True)
    run_start = bins.cumsum(0) - bins
    in_run = torch.arange(ids.numel(), device=ids.device) - run_start[ids[order] + 1]
    earlier = torch.empty_like(ids).scatter_(0, order, in_run)

    # First row of (expert, source) on its expert rank.
    in_order = accepted.view(world, world, local_experts).permute(1, 2, 0).reshape(world, -1)
    ends = in_order.cumsum(1)
    first_row = (ends - in_order).view(num_experts, world)[:, rank]
    _require(
        ends[:, -1].amax() <= MAX_ROWS,
        lambda: f"{int(ends[:, -1].amax())} rows on one rank: more than int32 rows can number ({MAX_ROWS})",
    )

    expert = ids.clamp(min=0)
    kept = (ids >= 0) & (earlier < accepted[rank][expert])
    dest_rank = torch.where(kept, expert // local_experts, -1)
    dest_row = torch.where(kept, first_row[expert] + earlier, -1)

    own_rows = ends[rank].view(local_experts, world)[:, -1]
    return RouteMap(
        dest_rank=dest_rank.to(torch.int32).view(num_tokens, top_k),
        dest_row=dest_row.to(torch.int32).view(num_tokens, top_k),
        counts=counts,
        accepted=accepted,
        tokens=tokens,
        offsets=torch.cat([own_rows.new_zeros(1), own_rows]),
    )


def rows_bound(capacity: CapacityConfig, top_k: int, max_tokens: int, world: int, num_experts: int) -> int:
    """Rows that one expert rank must have room for when no source has more than max_tokens tokens.

    ``rank``, ``source`` and ``expert`` never accept more; their quotas round up once per rank, per source, and per
    (source, expert), so the three bounds differ. ``dropless`` can exceed its bound, which is an estimate of f times the
    balanced load: the dispatcher must notice.

    Raises ValueError for degrees that do not fit together or a bound that int32 rows cannot number.
    """
    _check(capacity, top_k=top_k, world=world, num_experts=num_experts)
    if max_tokens < 0:
        raise ValueError(f"max_tokens {max_tokens} is negative")
    per_source = max_tokens * top_k
    load = _exact(capacity.factor) * per_source
    if capacity.policy == "source":
        bound = world * math.ceil(load / world)
    elif capacity.policy == "expert":
        bound = num_experts * math.ceil(load / num_experts)  # E_l experts, M sources each
    else:
        bound = math.ceil(load)
    bound = min(bound, world * per_source)
    if bound > MAX_ROWS:
        raise ValueError(
            f"{bound} rows per rank (policy {capacity.policy!r}, factor {capacity.factor}, {max_tokens} tokens, top-"
            f"{top_k}) are more than int32 rows can number ({MAX_ROWS}): use fewer tokens per rank"
        )
    return bound


def drop_metrics(route_map: RouteMap, *, bound: int | None = None) -> dict[str, Tensor]:
    """What capacity did to one step, as tensors on the map's device (nothing waits for it).

    drop_rate    float64 scalar: routes dropped / routes asked over all sources of the group; 0 without routes
    expert_load  int64 [E]: routes asked of each expert over all sources, dropped ones included
    buffer_use   float64 scalar: rows of this rank / bound (rows_bound); above 1 = dropless overflow. Only with a bound
    """
    asked = route_map.counts.sum()
    metrics = {
        "drop_rate": (asked - route_map.accepted.sum()).double() / asked.clamp(min=1),
        "expert_load": route_map.counts.sum(0),
    }
    if bound is not None:
        metrics["buffer_use"] = route_map.offsets[-1].double() / max(bound, 1)
    return metrics


def _check(capacity: CapacityConfig, *, top_k: int, world: int, num_experts: int) -> None:
    one_of("capacity.policy", capacity.policy, POLICIES)
    check_shape(num_experts=num_experts, top_k=top_k, hidden_size=1, ep=world)  # routing does not know D


def _check_topk(topk_idx: Tensor, num_experts: int) -> None:
    if topk_idx.dim() != 2:
        raise ValueError(f"topk_idx has shape {tuple(topk_idx.shape)}; expected [T, K]")
    if topk_idx.dtype.is_floating_point or topk_idx.dtype.is_complex or topk_idx.dtype == torch.bool:
        raise ValueError(f"topk_idx has dtype {topk_idx.dtype}; expected an integer dtype")
    check_shape(num_experts=num_experts, top_k=topk_idx.shape[1], hidden_size=1, ep=1)


def _flat_ids(topk_idx: Tensor, num_experts: int) -> Tensor:
    """Checked ids, int64 [T·K] in t·K+k order."""
    ids = topk_idx.detach().to(torch.int64).reshape(-1)
    inside = (ids >= -1) & (ids < num_experts)
    _require(
        inside.all(),
        lambda: (
            f"expert id {int(ids[~inside][0])} of token {int((~inside).nonzero()[0, 0]) // topk_idx.shape[1]} is "
            f"outside [-1, {num_experts})"
        ),
    )
    return ids


def _histogram(ids: Tensor, num_experts: int) -> Tensor:
    """int64 [E + 1]: how many routes are −1, then how many each expert has. (torch.bincount waits for the device.)"""
    return ids.new_zeros(num_experts + 1).scatter_add_(0, ids + 1, torch.ones_like(ids))


def _first_of_each(counts: Tensor, limit: Tensor) -> Tensor:
    """Of counts taken in order along the last dim, those that fit below limit (broadcast)."""
    ends = torch.minimum(counts.cumsum(-1), limit)
    return torch.diff(ends, dim=-1, prepend=torch.zeros_like(ends[..., :1]))


def _exact(factor: float) -> Fraction:
    """The factor as the decimal the user wrote: 1.2 is 6/5, so ceil(1.2 · 10) is 12 and not 13."""
    return Fraction(str(factor))


def _ceil_times(number: Tensor, factor: Fraction) -> Tensor:
    """ceil(number · factor) exactly, for int64 numbers ≥ 0 below 2^43 and any decimal factor.

    Schoolbook multiplication from the last decimals up: 17 decimals times a large count would not fit in int64.
    """
    whole, rest = divmod(factor, 1)
    limbs = []
    while rest:
        limb, rest = divmod(rest * _LIMB, 1)
        limbs.append(int(limb))
    carry = torch.zeros_like(number)
    below = torch.zeros_like(number, dtype=torch.bool)
    for limb in reversed(limbs):
        carry = number * limb + carry
        below = below | (carry % _LIMB != 0)
        carry = carry // _LIMB
    return number * int(whole) + carry + below


def _ceil_div(number: Tensor, divisor: int) -> Tensor:
    return (number + (divisor - 1)) // divisor


def _require(holds: Tensor, message: Callable[[], str]) -> None:
    """ValueError on CPU; on a device an assertion that does not make the host wait."""
    if holds.device.type == "cpu":
        if not holds:
            raise ValueError(message())
    else:
        torch._assert_async(holds, "routing: expert ids, exchanged counts or row numbers are inconsistent")
