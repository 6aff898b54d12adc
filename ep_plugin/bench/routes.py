"""Route sets to measure with: uniform, Zipf, all on one rank, one tenth without a route, top-1."""

from __future__ import annotations

import torch
from torch import Tensor

KINDS = ("uniform", "zipf", "one-rank", "dropped", "top1")


def make_routes(
    kind: str, num_tokens: int, num_experts: int, top_k: int, *, rank: int, world: int, device: torch.device | str
) -> tuple[Tensor, Tensor]:
    """``(topk_idx int64 [T, K], topk_weight float32 [T, K])`` of one rank, from a seed of its own.

    ``uniform``: K distinct experts at random; ``zipf``: expert e with probability ∝ 1/(e+1); ``one-rank``: only the
    first rank's experts; ``dropped``: uniform, a tenth of the routes −1; ``top1``: the first route of each token
    alone, the others −1."""
    if kind not in KINDS:
        raise ValueError(f"routes={kind!r} is not one of {', '.join(KINDS)}")
    g = torch.Generator(device=device).manual_seed(1000 + rank)
    scores = torch.rand(num_tokens, num_experts, generator=g, device=device)
    if kind == "zipf":  # Gumbel-top-k draws K distinct experts with these probabilities
        log_p = -torch.log(torch.arange(1, num_experts + 1, device=device, dtype=torch.float32))
        scores = log_p - torch.log(-torch.log(scores.clamp(1e-9, 1 - 1e-9)))
    if kind == "one-rank":
        scores[:, num_experts // world :] = -1
    idx = scores.topk(top_k, 1).indices
    if kind == "dropped":
        idx = idx.masked_fill(torch.rand(idx.shape, generator=g, device=device) < 0.1, -1)
    if kind == "top1":
        idx[:, 1:] = -1
    weight = torch.softmax(torch.randn(num_tokens, top_k, generator=g, device=device), 1)
    return idx, weight
