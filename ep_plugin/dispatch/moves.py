"""How rows reach other ranks: stores and loads through peer pointers, or NVSHMEM's own put and get.

Both classes have the same methods, those of the kernels in ``put_triton``, ``reduce_triton`` and ``scalars_triton``,
with the same arguments and the same bits as a result.

Legend: T local tokens, T_max most tokens of a source, K routes per token, M ranks, D hidden size."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..heap.base import Heap
from ..kernels import nvshmem_move as library
from ..kernels.nvshmem_sync import LibrarySignals
from ..kernels.peers import Peers
from ..kernels.put_triton import put_meta, put_rows, put_unique, put_values
from ..kernels.reduce import accumulation_dtype
from ..kernels.reduce_triton import get_reduce, pre_reduce_put
from ..kernels.scalars_triton import get_values, put_scalars
from ..kernels.sync_triton import ChunkSignal
from ..kernels.triton_common import Launch
from .layout import Part, Region

SCALARS = Launch(2112, warps=1)  # a scalar per route is a transfer of its own: many, and too small for more threads


class PeerMoves:
    """``transport='peer'``: the kernels themselves."""

    put_unique = staticmethod(put_unique)
    put_meta = staticmethod(put_meta)
    put_rows = staticmethod(put_rows)
    put_values = staticmethod(put_values)
    put_scalars = staticmethod(put_scalars)
    pre_reduce_put = staticmethod(pre_reduce_put)
    get_reduce = staticmethod(get_reduce)
    get_values = staticmethod(get_values)

    def free(self) -> None:
        """Nothing is kept."""


class LibraryMoves:
    """``transport='device'``: the local end of every transfer is staged in symmetric memory, and NVSHMEM moves it.

    Of the peers' addresses only our own are used. What a method starts is complete when a signal that is posted after
    it on the same stream arrives; the staging is used again only after that, so a post must follow every put before
    the next of its kind. ``put_unique`` and ``pre_reduce_put`` post by themselves, chunk by chunk."""

    def __init__(
        self, heap: Heap, *, form: str, max_tokens: int, top_k: int, hidden_size: int, dtype: torch.dtype
    ) -> None:
        """Collective: allocates the staging."""
        world, acc, routes = heap.world, accumulation_dtype(dtype), max_tokens * top_k
        rows = world * max_tokens if form == "dedup" else routes
        outer = world if form == "dedup" else 1
        region = Region(
            Part("rows", (rows, hidden_size), dtype),
            Part("weights", (outer, routes), acc),
            Part("numbers", (outer, routes), torch.int32 if form == "dedup" else torch.int64),
            Part("scalars", (outer, routes), acc),
        )
        self.heap, self.me, self.world, self.max_tokens = heap, heap.rank, world, max_tokens
        self.signals = LibrarySignals(self.me)
        self.buffer = heap.alloc(region.nbytes, "staging of transport='device'")

        def local(name: str) -> Tensor:
            part = region[name]
            return self.buffer.view(self.me, part.offset, part.shape, part.dtype)

        self.rows, self.weights = local("rows"), local("weights")
        self.numbers, self.scalars = local("numbers"), local("scalars")
        # Where the local kernels write what goes to rank p; tables made here, since a copy to the device may wait.
        self.to_numbers, self.to_weights = (Peers.of(list(t), heap.device) for t in (self.numbers, self.weights))
        self.to_scalars = Peers.of(list(self.scalars), heap.device)
        self.to_rows = Peers.of(list(self.rows.view(outer, -1)), heap.device)
        self.from_rows = Peers.of([self.rows] * world, heap.device)
        self.ranks = torch.arange(world, dtype=torch.int32, device=heap.device)
        self.order = torch.arange(routes, dtype=torch.int32, device=heap.device)

    def free(self) -> None:
        """Collective: give the staging back."""
        self.heap.free(self.buffer)

    def put_unique(
        self,
        x: Tensor,
        peers: Peers,
        routes: Tensor,
        first_row: int,
        *,
        experts_per_rank: int = 1,
        skip_rank: int = -1,
        signal: ChunkSignal | None = None,
        launch: Launch = library.MOVE,
    ) -> None:
        """As ``put_triton.put_unique``."""
        num_tokens = x.shape[0]
        named = (torch.div(routes, experts_per_rank, rounding_mode="floor").unsqueeze(2) == self.ranks).any(1)
        ranks = torch.where(named & (self.ranks != skip_rank), self.ranks, -1)  # int32 [T, M]
        self.rows[:num_tokens].copy_(x)
        for begin, end in self._chunks(signal):
            library.move_rows(
                self.rows,
                peers,
                self.me,
                ranks.flatten(),
                first_row=first_row,
                num_rows=self.world * self.max_tokens,
                repeat=self.world,
                begin=begin * self.world,
                end=end * self.world,
                launch=self._wide(launch),
            )
            self._post(signal)

    def put_meta(
        self,
        dest_rank: Tensor,
        dest_row: Tensor,
        weights: Tensor,
        peer_rows: Peers,
        peer_weights: Peers,
        first_row: int,
    ) -> None:
        """As ``put_triton.put_meta``."""
        count, top_k = dest_rank.numel(), dest_rank.shape[1]
        put_meta(dest_rank, dest_row, weights, self.to_numbers, self.to_weights, 0)
        for staging, peers in ((self.numbers, peer_rows), (self.weights, peer_weights)):
            size = staging.element_size()
            library.move_stripes(staging, peers.at(first_row * top_k * size), self.me, count * size)

    def put_rows(
        self,
        x: Tensor,
        peers: Peers,
        dest_rank: Tensor,
        dest_row: Tensor,
        scale: Tensor | None = None,
        *,
        num_rows: int,
        launch: Launch = library.MOVE,
    ) -> None:
        """As ``put_triton.put_rows``."""
        num_tokens, top_k = dest_rank.shape
        if not num_tokens:
            return
        if scale is None and x.dim() == 2:
            self.rows[:num_tokens].copy_(x)
        else:
            here = torch.where(dest_rank >= 0, 0, -1).to(torch.int32)
            order = self.order[: num_tokens * top_k].view(num_tokens, top_k)
            put_rows(x, self.to_rows, here, order, scale, num_rows=num_tokens * top_k)
            top_k = 1
        library.move_rows(
            self.rows,
            peers,
            self.me,
            dest_rank.flatten(),
            rows=dest_row.flatten(),
            num_rows=num_rows,
            repeat=top_k,
            launch=self._wide(launch),
        )

    def put_values(
        self,
        values: Tensor | None,
        peers: Peers,
        dest_rank: Tensor,
        dest_row: Tensor,
        *,
        num_rows: int,
        first: int = 0,
    ) -> None:
        """As ``put_triton.put_values``."""
        count = dest_rank.numel()
        if values is None:
            staged = self.numbers[0, :count]
            torch.add(self.order[:count].to(torch.int64), first, out=staged)
        else:
            staged = self.weights[0, :count].copy_(values.flatten())
        self._each(staged, peers, dest_rank, dest_row, num_rows, get=False)

    def put_scalars(self, values: Tensor, local_rows: Tensor, tokens: Tensor, peers: Peers, rank: int) -> None:
        """As ``scalars_triton.put_scalars``."""
        routes = local_rows.shape[1] * local_rows.shape[2]
        put_scalars(values, local_rows, tokens, self.to_scalars, 0)
        size = values.element_size()
        library.move_stripes(self.scalars, peers.at(rank * routes * size), self.me, routes * size)

    def pre_reduce_put(
        self,
        y: Tensor,
        local_rows: Tensor,
        tokens: Tensor,
        peers: Peers,
        rank: int,
        weights: Tensor | None = None,
        *,
        first_source: int = 0,
        sources: int | None = None,
        signal: ChunkSignal | None = None,
        launch: Launch,
    ) -> None:
        """As ``reduce_triton.pre_reduce_put``."""
        world, t_max, _ = local_rows.shape
        sources = world if sources is None else sources
        stripe = torch.arange(t_max, device=y.device)
        some = ((local_rows >= 0) & (local_rows < y.shape[0])).any(2) & (stripe < tokens.unsqueeze(1))
        wanted = (self.ranks - first_source) % world < sources
        ranks = torch.where(some & wanted.unsqueeze(1), self.ranks.unsqueeze(1), -1)  # int32 [M, T_max]
        for begin, end in self._chunks(signal):
            pre_reduce_put(
                y, local_rows, tokens, self.to_rows, 0, weights,
                first_source=first_source, sources=sources, begin=begin, end=end, launch=launch,
            )  # fmt: skip
            library.move_rows(
                self.rows,
                peers,
                self.me,
                ranks,
                first_row=rank * t_max,
                num_rows=world * t_max,
                row_cycle=t_max,
                begin=begin,
                end=end,
            )
            self._post(signal)

    def get_reduce(
        self,
        peers: Peers,
        dest_rank: Tensor,
        dest_row: Tensor,
        weights: Tensor | None,
        out: Tensor,
        *,
        num_rows: int,
        gathered: Tensor | None = None,
    ) -> None:
        """As ``reduce_triton.get_reduce``."""
        count = dest_rank.numel()
        if not count:
            return
        rows, ranks = dest_row.flatten(), dest_rank.flatten()
        library.move_rows(self.rows, peers, self.me, ranks, rows=rows, num_rows=num_rows, get=True)
        library.quiet()
        here = torch.where((dest_row >= 0) & (dest_row < num_rows), self.order[:count].view_as(dest_row), -1)
        get_reduce(self.from_rows, dest_rank, here, weights, out, num_rows=count, gathered=gathered)

    def get_values(self, peers: Peers, dest_rank: Tensor, dest_row: Tensor, out: Tensor, *, num_rows: int) -> None:
        """As ``scalars_triton.get_values``."""
        staged = self.scalars[0, : out.numel()]
        self._each(staged, peers, dest_rank, dest_row, num_rows, get=True)
        library.quiet()
        there = (dest_rank >= 0) & (dest_row >= 0) & (dest_row < num_rows)
        out.copy_(torch.where(there, staged.view_as(out), 0))

    def _each(
        self, staged: Tensor, peers: Peers, dest_rank: Tensor, dest_row: Tensor, num_rows: int, *, get: bool
    ) -> None:
        """One scalar per route."""
        if not staged.numel():
            return
        library.move_rows(
            staged.unsqueeze(1),
            peers,
            self.me,
            dest_rank.flatten(),
            rows=dest_row.flatten(),
            num_rows=num_rows,
            get=get,
            launch=SCALARS,
        )

    def _chunks(self, signal: ChunkSignal | None) -> list[tuple[int, int]]:
        """Token ranges that are moved and signalled one after another."""
        return [(0, self.max_tokens)] if signal is None else signal.parts

    def _post(self, signal: ChunkSignal | None) -> None:
        if signal is not None:
            self.signals.post(signal.counter, signal.signals)

    @staticmethod
    def _wide(launch: Launch) -> Launch:
        """As many programs as were asked for, of the threads that a transfer by a whole program takes well."""
        return Launch(launch.programs, warps=min(launch.warps, library.MOVE.warps))


Moves = PeerMoves | LibraryMoves


def make_moves(transport: str, heap: Heap, **shape: Any) -> Moves:
    """What ``EPConfig.transport`` names; collective."""
    return LibraryMoves(heap, **shape) if transport == "device" else PeerMoves()
