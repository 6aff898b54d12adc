"""What the benchmarks run on, and what every result says of it."""

from __future__ import annotations

import argparse
import platform
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..config import EPConfig
from .routes import make_routes


def backend(name: str, **settings: Any) -> EPConfig:
    """The configuration that ``name`` on the command line stands for: a dispatcher, and rowwise's form after a colon.

    Raises ``ValueError`` for a name that stands for none."""
    dispatcher, colon, form = name.partition(":")
    if colon and dispatcher != "rowwise":
        raise ValueError(f"backend {name!r}: only rowwise has forms")
    config = EPConfig(dispatcher=dispatcher, form=form if colon else "dedup", **settings)
    config.validate()
    return config


@dataclass
class Inputs:
    """One rank's tokens x [T, D], expert ids and router weights [T, K], and the layer's shape."""

    shape: dict[str, Any]
    x: Tensor
    idx: Tensor
    weight: Tensor

    @classmethod
    def make(cls, args: argparse.Namespace, device: torch.device) -> Inputs:
        """From seeds of their own, as the command line asks."""
        rank, world = dist.get_rank(), dist.get_world_size()
        dtype = getattr(torch, args.dtype or ("bfloat16" if device.type == "cuda" else "float32"))
        shape = dict(num_experts=args.experts, top_k=args.top_k, hidden_size=args.hidden)
        idx, weight = make_routes(
            args.routes, args.tokens, args.experts, args.top_k, rank=rank, world=world, device=device
        )
        g = torch.Generator(device=device).manual_seed(rank)
        return cls(shape, torch.randn(args.tokens, args.hidden, generator=g, device=device).to(dtype), idx, weight)

    def describe(self, args: argparse.Namespace) -> dict[str, Any]:
        """What every result says of the run; rank 0 prints it."""
        cuda, world = self.x.is_cuda, dist.get_world_size()
        told = {
            "what": args.command, **self.shape, "tokens": args.tokens, "world": world, "dtype": str(self.x.dtype),
            "routes": args.routes, "torch": torch.__version__,
            "device": torch.cuda.get_device_name() if cuda else platform.processor() or platform.machine(),
            "remote_bytes": self.remote_bytes(), "backends": {},
        }  # fmt: skip
        if dist.get_rank() == 0:
            print(
                f"T={args.tokens} D={args.hidden} K={args.top_k} E={args.experts} EP={world} {self.x.dtype}"
                f" {args.routes} routes, {told['device']}"
            )
        return told

    def remote_bytes(self) -> dict[str, int]:
        """Bytes of rows that must leave this rank: one row per route, and one per (token, rank)."""
        rank, world = dist.get_rank(), dist.get_world_size()
        row = self.x.shape[1] * self.x.element_size()
        dest = torch.where(self.idx >= 0, self.idx // (self.shape["num_experts"] // world), rank)
        others = [r for r in range(world) if r != rank]
        return {
            "route": int((dest != rank).sum()) * row,
            "token": sum(int((dest == r).any(1).sum()) for r in others) * row,
        }
