"""``ep-bench fan-out``: a token's row to the ranks of its experts by PUT from the token's rank, and by GET from the
experts' ranks (report, Figure 19).

Both write the same rows into expert order, one row per route; what differs is which rank issues the operation, and so
where reads of one row come from. They are measured with tokens on all ranks and with tokens on the first alone, which
is what the figure draws: there every rank's GET reads the same source.

Legend: M ranks, T tokens of a rank, K routes per token, R rows received, D row width.
"""

from __future__ import annotations

import argparse
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..config import CapacityConfig
from ..heap import SymmBuffer, open_heap
from ..kernels.peers import Peers
from ..kernels.pull import pull_rows_torch
from ..kernels.put import put_rows_torch
from ..routing import build_route_map, count_routes
from .limits import Traffic, least_bytes, measure_limits, peer_heap
from .spans import meet
from .timing import measure

WAYS = ("put", "get")
SOURCES = {"all": "tokens on all ranks", "one": "tokens on the first rank alone"}


@dataclass(frozen=True)
class Point:
    """``sources``: one of ``SOURCES``; ``remote``: the fraction of routes that leave their rank; ``ranks``: how many
    other ranks the routes of a token go to in turn."""

    sources: str
    remote: float
    ranks: int

    def __str__(self) -> str:
        others = "another rank" if self.ranks == 1 else f"{self.ranks} other ranks"
        return f"{SOURCES[self.sources]}, {self.remote:.0%} of the routes to {others}"


def points(fractions: Sequence[float], world: int) -> list[Point]:
    """Every fraction to all other ranks, then all routes to fewer and fewer of them, for both kinds of sources."""
    spread = [(fraction, world - 1) for fraction in fractions] + [(1.0, ranks) for ranks in range(world - 2, 0, -1)]
    return [Point(sources, remote, ranks) for sources in SOURCES for remote, ranks in spread]


def expert_ids(point: Point, tokens: int, top_k: int, num_experts: int, *, rank: int, world: int) -> Tensor:
    """int64 [T, K] of ``rank``, from a seed of its own; −1 where the point gives this rank no tokens."""
    if point.sources == "one" and rank != 0:
        return torch.full((tokens, top_k), -1)
    g = torch.Generator().manual_seed(rank)
    leaves = torch.rand(tokens, top_k, generator=g) < point.remote
    turn = torch.arange(tokens)[:, None] + torch.arange(top_k)
    dest = torch.where(leaves, rank + 1 + turn % point.ranks, rank) % world
    local = num_experts // world
    return dest * local + torch.randint(local, (tokens, top_k), generator=g)


@dataclass
class Routes:
    """One rank's routes from either end, int32: ``dest_rank``, ``dest_row`` [T, K] for PUT; ``source_rank``,
    ``source_row`` [R] for GET. ``rows``: R of every rank."""

    dest_rank: Tensor
    dest_row: Tensor
    source_rank: Tensor
    source_row: Tensor
    rows: list[int]
    traffic: Traffic

    @staticmethod
    def of(idx: Tensor, num_experts: int, device: torch.device) -> Routes:
        """Collective; ``idx`` [T, K] on the host, as many tokens on every rank."""
        rank, world = dist.get_rank(), dist.get_world_size()
        counts = _gather(count_routes(idx, num_experts))
        tokens = torch.full((world,), idx.shape[0])
        found = build_route_map(idx, counts, tokens, rank=rank, capacity=CapacityConfig("dropless"))
        ranks, rows = _gather(found.dest_rank), _gather(found.dest_row)
        source, token, k = (ranks == rank).nonzero(as_tuple=True)
        row = rows[source, token, k].long()
        source_rank, source_row = (torch.empty(row.numel(), dtype=torch.int32) for _ in range(2))
        source_rank[row], source_row[row] = source.int(), token.int()
        return Routes(
            found.dest_rank.to(device),
            found.dest_row.to(device),
            source_rank.to(device),
            source_row.to(device),
            [int((ranks == r).sum()) for r in range(world)],
            Traffic.of(idx, num_experts),
        )


def _gather(own: Tensor) -> Tensor:
    everyone = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, own.contiguous())
    return torch.stack(everyone)


class FanOut:
    """The rows of all ranks in symmetric memory, and both ways to fan them out.

    ``x`` [T, D] of this rank; ``put`` [bound, D] where other ranks put its rows, ``got`` [bound, D] where it pulls
    them to. ``launches``: names of what a way is tried with on GPUs; on CPU the torch references run."""

    def __init__(self, x: Tensor, bound: int, heap: str) -> None:
        self.heap = open_heap(peer_heap(heap, x.device), None, x.device)
        rank, shape, row = self.heap.rank, tuple(x.shape), x.shape[1] * x.element_size()
        self.sources = self.heap.alloc(shape[0] * row, "tokens")
        self.targets = self.heap.alloc(bound * row, "rows")
        self.x = self.sources.view(rank, 0, shape, x.dtype)
        self.x.copy_(x)
        self.put = self.targets.view(rank, 0, (bound, shape[1]), x.dtype)
        self.got = torch.empty_like(self.put)
        meet(x.device)
        self._launch: dict[str, Any] = {"torch": None}
        if x.is_cuda:
            from ..kernels.triton_common import Launch

            wide = {f"{n} programs of 1,024 threads": Launch(n, warps=32) for n in (32, 64, 132)}
            many = {f"{n} programs of 128 threads": Launch(n, block=1024) for n in (528, 1056, 2112)}
            self._launch = wide | many
        self.launches = tuple(self._launch)

    def call(self, way: str, routes: Routes, launch: str) -> Callable[[], None]:
        """One fan-out by ``way`` ("put" or "get")."""
        bound, dtype = self.put.shape[0], self.x.dtype
        tokens, width = self.x.shape
        if not self.x.is_cuda:
            rows, xs = _views(self.targets, (bound, width), dtype), _views(self.sources, (tokens, width), dtype)
            if way == "put":
                return lambda: put_rows_torch(self.x, rows, routes.dest_rank, routes.dest_row)
            return lambda: pull_rows_torch(xs, routes.source_rank, routes.source_row, self.got)
        from ..kernels.pull_triton import pull_rows
        from ..kernels.put_triton import put_rows

        shape = self._launch[launch]
        there, here = Peers(self.targets.ptrs), Peers(self.sources.ptrs)
        if way == "put":
            to = (routes.dest_rank, routes.dest_row)
            return lambda: put_rows(self.x, there, *to, num_rows=bound, launch=shape)
        source = (routes.source_rank, routes.source_row)
        return lambda: pull_rows(here, *source, self.got, num_tokens=tokens, launch=shape)

    def require_same(self, rows: int) -> None:
        """``RuntimeError`` unless both ways left the same first ``rows`` rows; after the ranks have met."""
        bits = {2: torch.int16, 4: torch.int32}[self.put.element_size()]
        differ = (self.put[:rows].view(bits) != self.got[:rows].view(bits)).any(1)
        if differ.any():
            first = int(differ.nonzero()[0])
            raise RuntimeError(
                f"{int(differ.sum())} of {rows} rows differ between PUT and GET, the first is row {first}"
            )

    def clear(self) -> None:
        """Bytes of ones, NaN, in every row, on all ranks."""
        for rows, value in ((self.put, -1), (self.got, -2)):
            rows.view(torch.int16).fill_(value)
        meet(self.x.device)

    def close(self) -> None:
        del self.x, self.put
        self.heap.close()


def _views(buffer: SymmBuffer, shape: tuple[int, int], dtype: torch.dtype) -> list[Tensor]:
    return [buffer.view(rank, 0, shape, dtype) for rank in range(buffer.world)]


@torch.no_grad()
def run(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Collective. Prints a line for each point on rank 0, draws them if asked to, and returns the figures."""
    rank, world = dist.get_rank(), dist.get_world_size()
    dtype = getattr(torch, args.dtype or ("bfloat16" if device.type == "cuda" else "float32"))
    limits = measure_limits(device, args.heap, repeats=args.repeats)
    result: dict[str, Any] = {
        "what": "fan-out", "tokens": args.tokens, "hidden_size": args.hidden, "top_k": args.top_k,
        "num_experts": args.experts, "world": world, "dtype": str(dtype), "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else platform.processor() or platform.machine(),
        "limits": asdict(limits), "points": [],
    }  # fmt: skip
    if rank == 0:
        print(f"T={args.tokens} D={args.hidden} K={args.top_k} EP={world} {dtype}, {result['device']}\n{limits}")
    sets = {}
    for point in points(args.remote, world):
        idx = expert_ids(point, args.tokens, args.top_k, args.experts, rank=rank, world=world)
        sets[point] = Routes.of(idx, args.experts, device)
    g = torch.Generator(device=device).manual_seed(rank)
    x = torch.randn(args.tokens, args.hidden, generator=g, device=device).to(dtype)
    fan_out = FanOut(x, max(1, *(max(routes.rows) for routes in sets.values())), args.heap)
    for point, routes in sets.items():
        fan_out.clear()
        figures: dict[str, Any] = asdict(point)
        crossing = least_bytes("route", "dispatch", routes.traffic, x.shape[1] * x.element_size(), 1).link
        figures["link_bytes"] = crossing
        figures["row_bytes"] = max(routes.rows) * x.shape[1] * x.element_size()
        for way in WAYS:
            sweep = {
                launch: measure(fan_out.call(way, routes, launch), device, repeats=args.repeats, warmup=2)
                for launch in fan_out.launches
            }
            best = min(sweep, key=lambda launch: sweep[launch].median)
            ms = sweep[best].median
            figures[way] = sweep[best].as_dict() | {
                "ms": ms,
                "launch": best,
                "link_gb_s": crossing / ms / 1e6,
                "rows_gb_s": figures["row_bytes"] / ms / 1e6,
                "share_of_link": crossing / ms / 1e6 / limits.link_gb_s if limits.link_gb_s else None,
                "sweep_ms": {launch: timing.median for launch, timing in sweep.items()},
            }
        meet(device)
        fan_out.require_same(routes.rows[rank])
        result["points"].append(figures)
        if rank == 0:
            _print(point, figures)
    fan_out.close()
    if rank == 0 and args.plot is not None:
        plot(result, Path(args.plot))
    return result


def _print(point: Point, figures: dict[str, Any]) -> None:
    put, get = (figures[way] for way in WAYS)
    print(
        f"{point!s:66s} PUT {put['ms']:8.3f} ms ({put['link_gb_s']:6.1f} GB/s on the link)   GET {get['ms']:8.3f} ms"
        f" ({get['link_gb_s']:6.1f} GB/s)   GET / PUT {get['ms'] / put['ms']:.2f}"
    )


def plot(result: dict[str, Any], path: Path) -> None:
    """Write a PNG to ``path``: the time of both ways over the fraction of routes that leave their rank and, from three
    ranks on, over the number of ranks they go to."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    world = result["world"]
    sweeps = {"remote": "fraction of the routes that leave their rank"}
    if world > 2:
        sweeps["ranks"] = "other ranks that all routes of a token go to"
    figure = Figure(figsize=(5.5 * len(sweeps), 8), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(SOURCES), len(sweeps), squeeze=False)
    for row, (sources, title) in zip(grid, SOURCES.items(), strict=True):
        for axes, (swept, label) in zip(row, sweeps.items(), strict=True):
            shown = [
                p
                for p in result["points"]
                if p["sources"] == sources and (p["ranks"] == world - 1 if swept == "remote" else p["remote"] == 1)
            ]
            shown.sort(key=lambda p: p[swept])
            for way, colour in zip(WAYS, ("#238b45", "#d94801"), strict=True):
                x, ms = [p[swept] for p in shown], [p[way]["ms"] for p in shown]
                spread = [
                    [p[way]["median"] - p[way]["low"] for p in shown],
                    [p[way]["high"] - p[way]["median"] for p in shown],
                ]
                axes.errorbar(x, ms, spread, marker="o", capsize=3, label=way.upper(), color=colour)
            axes.set_title(title, fontsize=10)
            axes.set_xlabel(label)
            axes.set_ylabel("ms, the slowest rank")
            axes.set_ylim(bottom=0)
            axes.set_xticks(sorted({p[swept] for p in shown}))
            axes.legend()
    figure.suptitle(
        f"fan-out: T={result['tokens']} D={result['hidden_size']} K={result['top_k']} EP={world}"
        f" {result['dtype'].removeprefix('torch.')}, {result['device']}",
        fontsize=10,
    )
    figure.savefig(path, dpi=120)
