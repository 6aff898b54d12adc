"""What bounds a movement of rows on this machine: two copies measured in the same run, and the bytes that a movement
cannot do without.

Legend: M ranks, T tokens of a rank, K routes per token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..heap import open_heap
from .timing import measure

COPY_BYTES = {"cuda": 1 << 28, "cpu": 1 << 25}  # well beyond caches
FORMS = ("local", "route", "dedup", "block", "packed")


@dataclass(frozen=True)
class Limits:
    """GB/s (10⁹ bytes) of one rank while all ranks copy. ``link_gb_s``: into the next rank's memory, bytes sent one
    way; ``memory_gb_s``: within its own, bytes read and written. ``no_link``: why the link was not measured, then None.
    """

    link_gb_s: float | None
    memory_gb_s: float
    no_link: str | None = None

    def __str__(self) -> str:
        link = f"{self.link_gb_s:.1f} GB/s" if self.link_gb_s is not None else f"not measured ({self.no_link})"
        return f"limits: a copy to the next rank {link}, within memory {self.memory_gb_s:.1f} GB/s (read and written)"


def peer_heap(heap: str, device: torch.device) -> str:
    """The heap whose memory a copy between ranks goes through: ``heap``, and torch's own on GPUs where it is auto."""
    return "torch" if heap == "auto" and device.type == "cuda" else heap


def measure_limits(device: torch.device, heap: str, *, repeats: int) -> Limits:
    """Collective: every rank copies at once, first within its memory, then to the next rank through ``heap``."""
    nbytes, world = COPY_BYTES[device.type], dist.get_world_size()
    source = torch.ones(nbytes, dtype=torch.uint8, device=device)
    own = torch.empty_like(source)
    memory = 2 * nbytes / measure(lambda: own.copy_(source), device, repeats=repeats, warmup=2).median / 1e6
    if world == 1:
        return Limits(None, memory, "one rank has no other to copy to")
    try:
        symmetric = open_heap(peer_heap(heap, device), None, device)
    except RuntimeError as error:  # ranks that do not reach each other's memory; block and DeepEP serve them
        return Limits(None, memory, str(error))
    buffer = symmetric.alloc(nbytes, "limits")
    theirs = buffer.view((dist.get_rank() + 1) % world, 0, (nbytes,), torch.uint8)
    link = nbytes / measure(lambda: theirs.copy_(source), device, repeats=repeats, warmup=2).median / 1e6
    symmetric.close()
    return Limits(link, memory)


@dataclass(frozen=True)
class Traffic:
    """How many rows the routes of all ranks ask for; the same on every rank.

    int64: ``routes`` [M, M] of source r's tokens to experts of rank p; ``unique`` [M, M] tokens of r with at least one
    such route; ``tokens`` [M]; ``routed`` [M] tokens with any route."""

    routes: Tensor
    unique: Tensor
    tokens: Tensor
    routed: Tensor

    @staticmethod
    def of(idx: Tensor, num_experts: int) -> Traffic:
        """Collective. ``idx`` [T, K]: this rank's expert ids, −1 for no route."""
        world = dist.get_world_size()
        dest = torch.where(idx >= 0, idx // (num_experts // world), -1).cpu()
        routes = [(dest == rank).sum() for rank in range(world)]
        unique = [(dest == rank).any(1).sum() for rank in range(world)]
        own = torch.stack([*routes, *unique, torch.tensor(idx.shape[0]), (dest >= 0).any(1).sum()])
        everyone = [torch.empty_like(own) for _ in range(world)]
        dist.all_gather(everyone, own)
        table = torch.stack(everyone)
        return Traffic(table[:, :world], table[:, world : 2 * world], table[:, -2], table[:, -1])


@dataclass(frozen=True)
class Bytes:
    """Of the busiest rank: ``link``, sent or received, whichever is more; ``memory``, read and written in its own."""

    link: int
    memory: int


def least_bytes(form: str, movement: str, traffic: Traffic, row_bytes: int, experts_per_rank: int) -> Bytes:
    """What ``movement`` (``dispatch`` into expert order, ``combine`` from it) has to move at least in ``form``.

    Rows, for a rank that sends S and receives R rows in dispatch, U unique ones of them from other ranks, whose T
    tokens have routes (t of them any); combine is the same backwards, with u unique ones to other ranks:

    | form | dispatch | combine | |
    |---|---|---|---|
    | ``local`` | t + S | S + T | read, and written in expert order |
    | ``route`` | t + R | R + T | a token read once, a row written for each route |
    | ``dedup`` | t + 2·U + R | R + 2·u + T | what crosses is written and read once more |
    | ``block`` | t + 2·S + 3·R | 3·R + 2·S + T | packed, exchanged, permuted (not with one expert a rank: R for 3·R) |
    | ``packed`` | S + R | R + S | the exchange alone |

    The link carries one row per route, or per token and other rank in ``dedup``. Indices and weights are left out."""
    if form not in FORMS:
        raise ValueError(f"form={form!r} is not one of {', '.join(FORMS)}")
    if movement not in ("dispatch", "combine"):
        raise ValueError(f"movement={movement!r} is neither dispatch nor combine")
    there = movement == "dispatch"
    sent, received = traffic.routes.sum(1), traffic.routes.sum(0)
    unique = traffic.unique - traffic.unique.diag().diag()
    by_token = traffic.routed if there else traffic.tokens
    rows = {
        "local": sent + by_token,
        "route": received + by_token,
        "dedup": received + 2 * unique.sum(0 if there else 1) + by_token,
        "block": received * (3 if experts_per_rank > 1 else 1) + 2 * sent + by_token,
        "packed": sent + received,
    }[form]
    crossing = unique if form == "dedup" else traffic.routes - traffic.routes.diag().diag()
    link = 0 if form == "local" else int(torch.maximum(crossing.sum(0), crossing.sum(1)).max())
    return Bytes(link * row_bytes, int(rows.max()) * row_bytes)


def against(limits: Limits, least: Bytes, ms: float) -> dict[str, Any]:
    """GB/s that a movement of ``ms`` reached on the link and in memory, which limit binds, and its ``share``: the time
    that this limit alone asks for, over ``ms``. None where it binds a link that was not measured."""
    memory_ms = least.memory / limits.memory_gb_s / 1e6
    link_ms: float | None = 0.0
    if least.link:
        link_ms = least.link / limits.link_gb_s / 1e6 if limits.link_gb_s is not None else None
    bound = None if link_ms is None else max(link_ms, memory_ms)
    return {
        "link_bytes": least.link,
        "memory_bytes": least.memory,
        "link_gb_s": least.link / ms / 1e6,
        "memory_gb_s": least.memory / ms / 1e6,
        "limit_ms": bound,
        "binds": None if link_ms is None else "link" if link_ms > memory_ms else "memory",
        "share": None if bound is None else bound / ms,
    }


def said(reached: dict[str, Any]) -> str:
    """``against`` in words."""
    share = "" if reached["share"] is None else f", {reached['share']:.0%} of the {reached['binds']}'s limit"
    return f"link {reached['link_gb_s']:.1f} GB/s, memory {reached['memory_gb_s']:.1f} GB/s{share}"
