"""The kernels of MXFP8 rows that cross once per route, against their torch references, on any device (as mxfp8_cases).

Legend: T tokens of a rank, K routes per token, M ranks, RB rows that every rank has room for, W bytes of a record.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ep_plugin.config import CapacityConfig
from ep_plugin.kernels import mxfp8 as ref
from ep_plugin.kernels.fan_out import row_routes_torch
from ep_plugin.kernels.put import put_rows_torch
from ep_plugin.routing import RouteMap, build_route_map, count_routes
from tests.mxfp8_cases import GUARD, hard_rows, same

EACH = 8  # experts of a rank
ROUTES = ("any", "all stay", "none stays")


@dataclass
class Batch:
    """Tokens of M ranks whose memory is all here, and what their routes must leave in every rank's rows."""

    device: str
    rounding: str
    tokens: tuple[int, ...]
    top_k: int
    xs: list[Tensor]  # [T, D] of every rank
    weights: list[Tensor | None]  # float32 [T, K]
    maps: list[RouteMap]
    left: list[Tensor]  # uint8 [RB, W] of every rank: routes of other ranks alone
    whole: list[Tensor]  # with the routes that stay

    @staticmethod
    def make(
        device: str,
        dtype: torch.dtype,
        width: int,
        routes: str,
        rounding: str,
        *,
        tokens: tuple[int, ...],
        top_k: int,
        weighted: bool,
    ) -> Batch:
        world, g = len(tokens), torch.Generator().manual_seed(width)
        ids = []
        for rank, t in enumerate(tokens):
            expert = torch.randint(0, EACH, (t, top_k), generator=g)
            if routes == "any":  # also twice to one expert, and nowhere
                there = torch.randint(0, world, (t, top_k), generator=g)
                expert = torch.where(torch.rand(t, top_k, generator=g) < 0.1, -1, there * EACH + expert)
            else:
                expert = (expert + (rank + (routes == "none stays")) * EACH) % (world * EACH)
            ids.append(expert)
        counts = torch.stack([count_routes(i, world * EACH) for i in ids])
        capacity = CapacityConfig("rank", 0.9)  # the map drops some too
        maps = [build_route_map(i, counts, torch.tensor(tokens), rank=r, capacity=capacity) for r, i in enumerate(ids)]
        assert any(bool((m.dest_rank < 0).any()) for m in maps), "every route was kept"
        bound = max(int(m.offsets[-1]) for m in maps) + 3
        xs = []
        for rank, t in enumerate(tokens):  # blocks of a row differ, so that one scale for all loses bits
            by_block = torch.exp2(torch.randint(-8, 8, (t, width // 32), generator=g).float())
            xs.append((hard_rows(t, width, dtype, seed=rank) * by_block.repeat_interleave(32, 1)).to(dtype))
        weights = [torch.rand(t, top_k, generator=g) if weighted else None for t in tokens]
        left, whole = (
            [torch.full((bound, ref.record_bytes(width)), GUARD, dtype=torch.uint8) for _ in maps] for _ in range(2)
        )
        for rank, (x, w, m) in enumerate(zip(xs, weights, maps, strict=True)):
            by_route = None if w is None else w.flatten()
            records = ref.quantize_torch(x.repeat_interleave(top_k, 0), rounding, row_weight=by_route)
            records = records.view(-1, top_k, records.shape[1])
            put_rows_torch(records, left, m.dest_rank.masked_fill(m.dest_rank == rank, -1), m.dest_row)
            put_rows_torch(records, whole, m.dest_rank, m.dest_row)
        return Batch(device, rounding, tokens, top_k, xs, weights, maps, left, whole)

    def arguments(self, rank: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """``dest_rank``, ``dest_row`` and weights of a rank's tokens, on the device."""
        m, w = self.maps[rank], self.weights[rank]
        return m.dest_rank.to(self.device), m.dest_row.to(self.device), None if w is None else w.to(self.device)

    def routes_of_rows(self, rank: int) -> Tensor:
        """int64 [RB] as rows learn it from those who send them, −1 past the last."""
        t_max = max(self.tokens)
        local = torch.full((len(self.tokens), t_max, self.top_k), -1, dtype=torch.int32)
        for source, m in enumerate(self.maps):
            local[source, : self.tokens[source]] = torch.where(m.dest_rank == rank, m.dest_row, -1)
        found = torch.full((self.whole[rank].shape[0],), -1)
        n = int(self.maps[rank].offsets[-1])
        found[:n] = row_routes_torch(local, torch.tensor(self.tokens), n)
        return found.to(self.device)


def check_routes(
    device: str,
    dtype: torch.dtype,
    width: int,
    routes: str = "any",
    rounding: str = "rceil",
    *,
    tokens: tuple[int, ...] = (5, 0, 3),
    top_k: int = 2,
    weighted: bool = False,
    block: int | None = None,
    apart: bool = True,
) -> None:
    """Rows that leave, rows that stay, and the forms of both. ``block``: the PUT's programs move two rows of so many
    columns at once, instead of the default. ``apart``: rows that stay are made in every form alone too, not only in all
    at once."""
    batch = Batch.make(device, dtype, width, routes, rounding, tokens=tokens, top_k=top_k, weighted=weighted)
    what = (dtype, width, routes, rounding, tokens, weighted, block)
    check_put(batch, block, what)
    for rank in range(len(tokens)):
        check_own(batch, rank, apart, what)


def check_many_rows(device: str, weighted: bool) -> None:
    """Rows in numbers: programs of the PUT take tiles of several as they go, and a rank with few rows takes one at a
    time."""
    for routes in ROUTES:
        check_routes(device, torch.bfloat16, 4096, routes, tokens=(900, 0, 60, 500), top_k=4, weighted=weighted)


def check_put(batch: Batch, block: int | None, what: object) -> None:
    from ep_plugin.kernels import mxfp8_put_triton as kernels
    from ep_plugin.kernels.peers import Peers
    from ep_plugin.kernels.sync_triton import ChunkSignal
    from ep_plugin.kernels.triton_common import Launch

    chunks, t_max, room = 2, max(batch.tokens), batch.left[0].shape[0]
    asked = [m.dest_row[(m.dest_rank >= 0) & (m.dest_rank != rank)] for rank, m in enumerate(batch.maps)]
    few = int(torch.cat(asked).median()) if sum(map(len, asked)) else 0
    launch = None if block is None else Launch(2, 1, block=block, tile=2 * block)
    for num_rows in (room, few):  # few: a row that is sent, and the first that is past the buffer
        got = [torch.full_like(rows, GUARD, device=batch.device) for rows in batch.left]
        for rank, x in enumerate(batch.xs):
            words = [torch.zeros(1, dtype=torch.int64, device=batch.device) for _ in got]
            counter = torch.tensor([5], device=batch.device)
            arrivals = torch.zeros(2 * chunks, dtype=torch.int32, device=batch.device)
            dest_rank, dest_row, weights = batch.arguments(rank)
            kernels.quantize_put_rows(
                x.to(batch.device),
                Peers.of(got),
                dest_rank,
                dest_row,
                weights,
                batch.rounding,
                num_rows=num_rows,
                skip_rank=rank,
                signal=ChunkSignal(chunks, t_max, counter, Peers.of(words), arrivals),
                launch=launch,
            )
            assert int(counter) == 5 + chunks and all(int(word) == 5 + chunks for word in words), ("signals", what)
            assert not arrivals.any(), ("arrivals", what)
        for a, b in zip(got, batch.left, strict=True):
            same(a[:num_rows], b[:num_rows], ("put", num_rows, what))
            assert bool((a[num_rows:] == GUARD).all()), ("put past the buffer", what)


def check_own(batch: Batch, rank: int, apart: bool, what: object) -> None:
    from ep_plugin.kernels import mxfp8_fan_out_triton as fan_out
    from ep_plugin.kernels.mxfp8_own_triton import quantize_own_rows

    device, x, m = batch.device, batch.xs[rank], batch.maps[rank]
    left, whole = batch.left[rank], batch.whole[rank]
    here = m.dest_row[m.dest_rank == rank].long()
    made = dict(zip(("data", "scales"), ref.rescale_torch(whole), strict=True))
    made["data"] = made["data"].view(torch.uint8)
    made["rows"] = ref.dequantize_torch(whole, x.dtype)

    def guards(*names: str) -> dict[str, Tensor]:
        return {name: torch.full_like(made[name], GUARD, device=device) for name in names}

    def stay(records: Tensor, **out: Tensor) -> None:
        quantize_own_rows(x.to(device), records, *batch.arguments(rank), batch.rounding, own_rank=rank, **out)

    everything = ("rows", "data", "scales")
    forms = ((), ("rows",), ("data", "scales"), everything) if apart else (everything,)
    some, out = left.to(device, copy=True), guards(*forms[0])
    end = int(here.median()) if len(here) else 2  # a row that stays, and the first that is past the buffer
    stay(some[:end], **{name: t[:end] for name, t in out.items()})
    within = here[here < end]
    same(some, left.index_copy(0, within, whole[within]), ("rows past the buffer", what))
    for name, t in out.items():
        want = guards(name)[name].cpu().index_copy(0, within, made[name][within])
        same(t, want, ("past the buffer", name, what))
    for names in forms:
        records, out = left.to(device, copy=True), guards(*names)
        stay(records, **out)
        same(records, whole, ("own", names, what))
        for name, t in out.items():
            want = guards(name)[name].cpu().index_copy(0, here, made[name][here])
            same(t, want, ("own", name, names, what))
    # The rows of others, in parts.
    out, t_max, n = guards("rows", "data", "scales"), max(batch.tokens), int(m.offsets[-1])
    for begin, end in ((0, t_max // 2), (t_max // 2, t_max)):
        fan_out.convert_arrived(
            whole.to(device),
            batch.routes_of_rows(rank),
            m.offsets[-1:].to(device),
            top_k=batch.top_k,
            max_tokens=t_max,
            begin=begin,
            end=end,
            skip_source=rank,
            **out,
        )
    others = torch.ones(n, dtype=torch.bool).index_fill(0, here, False).nonzero().squeeze(1)
    for name, t in out.items():
        want = guards(name)[name].cpu().index_copy(0, others, made[name][others])
        same(t, want, ("arrived", name, what))
