"""What one MoE step must give, written the slow and plain way: the oracle that every dispatcher is tested against.

One process sees the inputs of all ranks. Routes are accepted one by one in Python, rows are picked by plain indexing,
and gradients are autograd's. Nothing here is shared with ``routing`` or with a dispatcher.

Legend: T_r tokens of source r, K routes per token, E experts, M ranks, E_l = E / M, D hidden size, F expert width, R
rows of one rank. Lists have one entry per rank. "acc" is float64 for float64 rows, else float32.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from fractions import Fraction
from typing import NamedTuple

import torch
from torch import Tensor

from .config import POLICIES, WEIGHT_AT, CapacityConfig, check_shape, one_of

ExpertFn = Callable[[int, Tensor, Tensor | None], Tensor]
"""(expert e, rows [n, D], weights [n] acc or None) -> [n, D]. It applies the weights it is given, itself."""


class Route(NamedTuple):
    """Route k of a token of a source, to an expert."""

    source: int
    token: int
    k: int
    expert: int


def accepted_routes(
    idxs: Sequence[Tensor], capacity: CapacityConfig, *, world: int, num_experts: int
) -> list[list[Route]]:
    """Accepted routes of every expert rank, in the canonical row order (local expert, source, t·K+k).

    idxs  integer [T_r, K] per source, −1 = no route

    Each route in that order is accepted while its quota has room; the policies differ only in who shares a quota:
    an expert rank (``rank``), a (source, expert rank) pair (``source``) or a (source, expert) pair (``expert``).
    """
    _check_ranks(world, idxs=idxs)
    one_of("capacity.policy", capacity.policy, POLICIES)
    top_k = idxs[0].shape[1]
    check_shape(num_experts=num_experts, top_k=top_k, hidden_size=1, ep=world)
    load = Fraction(str(capacity.factor)) * top_k
    tokens = [len(idx) for idx in idxs]
    taken: Counter[Hashable] = Counter()

    def has_room(rank: int, route: Route) -> bool:
        quota: Hashable
        if capacity.policy == "rank":
            quota, limit = rank, math.ceil(load * sum(tokens) / world)
        elif capacity.policy == "source":
            quota, limit = (route.source, rank), math.ceil(load * tokens[route.source] / world)
        elif capacity.policy == "expert":
            quota, limit = (route.source, route.expert), math.ceil(load * tokens[route.source] / num_experts)
        else:
            return True
        taken[quota] += 1
        return taken[quota] <= limit

    asked = [
        Route(source, token, k, expert)
        for source, idx in enumerate(idxs)
        for token, experts in enumerate(idx.tolist())
        for k, expert in enumerate(experts)
        if expert != -1
    ]
    for route in asked:
        if not 0 <= route.expert < num_experts:
            raise ValueError(f"{route}: expert id is outside [-1, {num_experts})")
    asked.sort(key=lambda route: route.expert)  # stable: (expert, source, t·K+k)
    local_experts = num_experts // world
    accepted: list[list[Route]] = [[] for _ in range(world)]
    for route in asked:
        rank = route.expert // local_experts
        if has_room(rank, route):
            accepted[rank].append(route)
    return accepted


def oracle_rows(
    xs: Sequence[Tensor], idxs: Sequence[Tensor], capacity: CapacityConfig, *, world: int, num_experts: int
) -> list[Tensor]:
    """Expert rows [R, D] of every rank: bit-equal copies of x [T_r, D] in the canonical order. Differentiable."""
    _check_ranks(world, xs=xs, idxs=idxs)
    routes = accepted_routes(idxs, capacity, world=world, num_experts=num_experts)
    return [_rows_of(xs, mine) for mine in routes]


def oracle_combine(
    ys: Sequence[Tensor],
    idxs: Sequence[Tensor],
    capacity: CapacityConfig,
    *,
    world: int,
    num_experts: int,
    weights: Sequence[Tensor] | None = None,
) -> list[Tensor]:
    """Rows of every expert rank ``ys`` [R, D] (canonical order) summed back into tokens, [T_r, D] of every source.

    weights  [T_r, K] per source, or None for a plain sum. With None this is also dispatch's backward: rows' gradients
             in, gradients of x out.

    Terms of one (token, rank) are added in acc in ascending k and rounded once to the dtype of ys; those partial sums
    are added in acc in ascending rank and rounded once. Differentiable.
    """
    _check_ranks(world, ys=ys, idxs=idxs)
    routes = accepted_routes(idxs, capacity, world=world, num_experts=num_experts)
    wire, acc = ys[0].dtype, _acc(ys[0].dtype)
    outputs = []
    for source, idx in enumerate(idxs):
        totals = [ys[0].new_zeros(ys[0].shape[1], dtype=acc) for _ in range(len(idx))]
        for rank, mine in enumerate(routes):
            partials: dict[int, Tensor] = {}
            for row in sorted(range(len(mine)), key=lambda row: mine[row].k):
                route = mine[row]
                if route.source != source:
                    continue
                term = ys[rank][row].to(acc)
                if weights is not None:
                    term = term * weights[source][route.token, route.k].to(acc)
                partials[route.token] = partials[route.token] + term if route.token in partials else term
            for token, partial in partials.items():
                totals[token] = totals[token] + partial.to(wire).to(acc)
        outputs.append(torch.stack(totals).to(wire) if totals else ys[0].new_zeros(0, ys[0].shape[1]))
    return outputs


def moe_oracle(
    xs: Sequence[Tensor],
    idxs: Sequence[Tensor],
    weights: Sequence[Tensor],
    expert_fn: ExpertFn,
    capacity: CapacityConfig,
    *,
    world: int,
    num_experts: int,
    weight_at: str = "hidden",
) -> list[Tensor]:
    """One MoE step of all ranks: x [T_r, D], expert ids and router weights [T_r, K] in, outputs [T_r, D] out.

    Under weight_at ``input`` and ``hidden`` expert_fn is given the weights of its rows and applies them; under
    ``output`` and ``source`` it is given None and the weighted sum is taken here. Every expert is called, also with no
    rows, and every input stays in the graph: what no route reached has zero gradients, never None.
    """
    _check_ranks(world, xs=xs, idxs=idxs, weights=weights)
    one_of("weight_at", weight_at, WEIGHT_AT)
    routes = accepted_routes(idxs, capacity, world=world, num_experts=num_experts)
    acc = _acc(xs[0].dtype)
    inside = weight_at in ("input", "hidden")
    local_experts = num_experts // world
    ys = []
    for rank, mine in enumerate(routes):
        of_experts = []
        for expert in range(rank * local_experts, (rank + 1) * local_experts):
            own = [route for route in mine if route.expert == expert]
            w = _weights_of(weights, own).to(acc) if inside else None
            of_experts.append(expert_fn(expert, _rows_of(xs, own), w))
        ys.append(torch.cat(of_experts).to(xs[0].dtype))
    outputs = oracle_combine(
        ys, idxs, capacity, world=world, num_experts=num_experts, weights=None if inside else weights
    )
    in_graph = torch.stack([tensor[:0].sum().to(acc) for tensor in (*xs, *weights, *ys)]).sum()  # 0
    return [out + in_graph.to(out.dtype) for out in outputs]


def reference_mlp(
    w_up: Tensor,
    w_down: Tensor,
    b_up: Tensor | None = None,
    b_down: Tensor | None = None,
    *,
    activation: Callable[[Tensor], Tensor],
    weight_at: str,
) -> ExpertFn:
    """An expert MLP as ``moe_oracle`` calls it: activation(rows·w_upᵀ + b_up)·w_downᵀ + b_down.

    w_up [E, F_up, D], w_down [E, D, F], b_up [E, F_up], b_down [E, D]; activation maps [n, F_up] to [n, F].
    The router weight multiplies the rows (``input``), or the hidden activations and b_down (``hidden``); ``output`` and
    ``source`` leave it to the combine. The product is taken in acc and rounded to the dtype of the rows.
    """
    one_of("weight_at", weight_at, WEIGHT_AT)

    def weighted(rows: Tensor, weights: Tensor | None) -> Tensor:
        return rows if weights is None else (rows.to(weights.dtype) * weights[:, None]).to(rows.dtype)

    def expert(e: int, rows: Tensor, weights: Tensor | None) -> Tensor:
        if (weights is not None) != (weight_at in ("input", "hidden")):
            raise ValueError(f"reference_mlp(weight_at={weight_at!r}) called with weights={weights}")
        hidden = weighted(rows, weights if weight_at == "input" else None) @ w_up[e].T
        if b_up is not None:
            hidden = hidden + b_up[e]
        at_hidden = weights if weight_at == "hidden" else None
        out = weighted(activation(hidden), at_hidden) @ w_down[e].T
        if b_down is not None:
            out = out + weighted(b_down[e].expand(len(rows), -1), at_hidden)
        return out

    return expert


def swiglu(hidden: Tensor) -> Tensor:
    """silu(gate)·up of [n, 2F] = [gate | up], giving [n, F]."""
    gate, up = hidden.chunk(2, dim=-1)
    return gate * torch.sigmoid(gate) * up


def _acc(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _rows_of(xs: Sequence[Tensor], routes: Sequence[Route]) -> Tensor:
    """Token rows of routes, [len(routes), D]."""
    return torch.cat([xs[r.source][r.token : r.token + 1] for r in routes] or [xs[0][:0]])


def _weights_of(weights: Sequence[Tensor], routes: Sequence[Route]) -> Tensor:
    """Router weights of routes, [len(routes)]."""
    return torch.cat([weights[r.source][r.token, r.k : r.k + 1] for r in routes] or [weights[0][:0, 0]])


def _check_ranks(world: int, **lists: Sequence[Tensor]) -> None:
    for name, tensors in lists.items():
        if len(tensors) != world:
            raise ValueError(f"{name} has {len(tensors)} entries; a group of {world} ranks needs {world}")
