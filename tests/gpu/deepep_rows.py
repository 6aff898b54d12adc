"""Route sets whose rows, weights and gradients every rank can say exactly without being told: small whole numbers.

Legend: T tokens of a rank, K routes per token, E experts, D hidden size, R rows received, B tokens per rank that
DeepEP is compiled for.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ep_plugin.dispatch.deepep import DeepEPDispatcher, DeepEPState


def value(source: Tensor, token: Tensor, column: Tensor, seed: int) -> Tensor:
    """A whole number of -2 to 2 of (source, token, column); sums of a hundred of them are exact in bfloat16."""
    return ((source * 131 + token * 7 + column * 3 + (column * token) % 11 + seed) % 5 - 2).to(torch.bfloat16)


@dataclass
class Exact:
    """One rank's inputs of one step. ``x``, ``grad`` [T, D]; ``idx`` int64 [T, K], distinct in a token or −1;
    ``weight`` float32 [T, K]."""

    x: Tensor
    grad: Tensor
    idx: Tensor
    weight: Tensor
    seed: int

    @staticmethod
    def make(seed: int, rank: int, world: int, most: int, dispatcher: DeepEPDispatcher) -> Exact:
        device, k, experts = dispatcher.device, dispatcher.top_k, dispatcher.num_experts
        cpu = torch.Generator().manual_seed(seed * world + rank)
        tokens = int(torch.randint(0, most + 1, (), generator=cpu))
        kind = ("few", "one rank", "empty", "uniform", "uniform")[seed % 5]
        tokens = {"few": tokens % 5, "empty": tokens if rank != seed % world else 0}.get(kind, tokens)
        g = torch.Generator(device=device).manual_seed(seed * world + rank)
        scores = torch.rand(tokens, experts, generator=g, device=device)
        if kind == "one rank":
            local = experts // world
            scores[:, : (seed % world) * local] = scores[:, (seed % world + 1) * local :] = -1
        idx = scores.topk(k, 1).indices
        idx = idx.masked_fill(torch.rand(idx.shape, generator=g, device=device) < 0.15, -1)
        t = torch.arange(tokens, device=device).unsqueeze(1)
        column, own = torch.arange(dispatcher.hidden_size, device=device), torch.full_like(t, rank)
        x, grad = value(own, t, column, seed), value(own, t, column, seed + 1)
        route = torch.arange(k, device=device)
        return Exact(x, grad, idx, weight_of(own, t, route), seed)


def weight_of(source: Tensor, token: Tensor, route: Tensor) -> Tensor:
    """A number that float32 holds, of a route."""
    return (source * 4096.0 + token * 16 + route + 1) / 64


def wrong(step: Exact, dispatcher: DeepEPDispatcher, layer: str = "exact") -> list[Tensor]:
    """Bool scalars on the device, true where a movement of one step is not exact; forward and backward."""
    state = dispatcher.plan(step.idx, layer=layer)
    found, d = forward(step, dispatcher, state)
    return [*found, *backward(step, dispatcher, state, d)]


def forward(step: Exact, dispatcher: DeepEPDispatcher, state: DeepEPState) -> tuple[list[Tensor], Tensor]:
    """What is wrong in dispatch and combine, and ``route_of_row`` int64 [RB]."""
    d = dispatcher.dispatch(state, step.x, step.weight)
    routes = d.route_of_row
    assert routes is not None
    valid = torch.arange(routes.shape[0], device=routes.device) < d.offsets[-1]
    source, token, route = split(routes, dispatcher)
    column = torch.arange(dispatcher.hidden_size, device=routes.device)
    rows = value(source.unsqueeze(1), token.unsqueeze(1), column, step.seed)
    errors = [
        ((d.rows != rows).any(1) & valid).any(),
        ((d.weights != weight_of(source, token, route)) & valid).any(),
        ((d.weights != 0) & ~valid).any(),
        ((routes < 0) != ~valid).any(),
    ]
    out = dispatcher.combine(state, d.rows)
    chosen = (step.idx >= 0).sum(1, keepdim=True)
    errors.append((out != step.x * chosen).any())
    return errors, routes


def split(routes: Tensor, dispatcher: DeepEPDispatcher) -> tuple[Tensor, Tensor, Tensor]:
    """(source, token, route) of each row's route."""
    k, most = dispatcher.top_k, dispatcher.bucket
    return routes // (k * most), routes // k % most, routes % k


def backward(step: Exact, dispatcher: DeepEPDispatcher, state: DeepEPState, routes: Tensor) -> list[Tensor]:
    """What is wrong in the backwards of combine and of dispatch."""
    source, token, route = split(routes, dispatcher)
    valid = routes >= 0
    column = torch.arange(dispatcher.hidden_size, device=routes.device)
    grads = dispatcher.send_grad(state, step.grad, None)
    want = value(source.unsqueeze(1), token.unsqueeze(1), column, step.seed + 1)
    errors = [((grads != want).any(1) & valid).any()]
    back = weight_of(source, token, route) * 2
    grad_x, grad_weight = dispatcher.return_grad(state, grads, torch.where(valid, back, torch.nan))
    assert grad_x is not None and grad_weight is not None
    chosen = step.idx >= 0
    errors.append((grad_x != step.grad * chosen.sum(1, keepdim=True)).any())
    errors.append((grad_weight != step.weight * 2 * chosen).any())
    return errors
