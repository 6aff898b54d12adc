"""Rowwise expert parallelism: every row is written straight to its place on the expert rank (report, sections 5.4 to
5.7).

Two forms. ``route`` moves one row per route: PUT into the expert row itself, GET back (Table 8). ``dedup`` moves one
row per (token, expert rank): PUT into the source's stripe of a stage, a local fan-out into expert order, and for the
way back a sum of the token's rows on the expert rank and one PUT of the partial.

Every symmetric buffer is a slot leased from a pool. The rank that will be written to (or read from) chooses the slot
and advertises its handle to the others, so free lists may differ between ranks. A payload slot lives as long as any
tensor on it does, which is until the weight gradient has read it.

This file is the path whose exchanged counts the host can read (CPU heaps).

Legend: T local tokens, K routes per token, E experts, M ranks, D hidden size, R rows received, T_max most tokens of a
source."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..heap import RECORD_MAX, Heap, HeapAborted, HeapClosed, HeapTimeout, Phase
from ..heap.pool import Slot, SlotPool
from ..kernels.fan_out import fan_out_torch, row_routes_torch
from ..kernels.put import put_meta_torch, put_rows_torch, put_unique_torch, put_values_torch
from ..kernels.reduce import (
    accumulation_dtype,
    get_reduce_torch,
    get_rows_torch,
    get_values_torch,
    pre_reduce_put_torch,
    put_scalars_torch,
    sum_partials_torch,
    take_scalars_torch,
)
from ..routing import RouteMap, build_route_map, count_routes, drop_metrics, rows_bound
from .base import Arrived, Dispatcher, Rebuild, RouteState, span
from .layout import Part, Region
from .stamps import STAMP_WORDS, check_stamps, stamp

CHANNEL = 0
MOVED = ("no gradient", "the gradient of x", "the gradient of topk_weight", "both gradients")
EXHAUSTED = -1  # advertised instead of a handle by a rank whose pool has no free slot


@dataclass
class RowwiseState(RouteState):
    """Adds, in the dedup form, ``local_rows`` int32 [M, T_max, K]: this rank's rows of every source's tokens (−1
    elsewhere).

    Between plan and combine it also holds what the forward still needs: the leased ``payload``, every rank's handle of
    it and its ``layout`` for ``max_tokens`` tokens of a source (another plan may grow the buffers in between), the slot
    that the experts may write to, and the router weights of this rank's tokens."""

    local_rows: Tensor | None = None
    handles: list[int] | None = None
    payload: Tensor | None = None
    layout: Region | None = None
    max_tokens: int = 0
    output_slot: Slot | None = None
    topk_weight: Tensor | None = None

    def tensors(self) -> tuple[Any, ...]:
        return (*super().tensors(), self.local_rows)

    @classmethod
    def restore(cls, layer: str, tensors: tuple[Any, ...]) -> RowwiseState:
        return cls(layer, RouteMap(*tensors[:6]), tensors[6])


@dataclass(frozen=True)
class Pools:
    """``payload``: what dispatch writes, kept for the weight gradient. ``scratch``: everything that is read at once."""

    payload: SlotPool
    scratch: SlotPool


class RowwiseDispatcher(Dispatcher[RowwiseState]):
    """``dispatcher='rowwise'`` over a symmetric heap whose records the host can read.

    Buffers are sized by ``config.max_tokens`` and ``config.slots`` where given. Where not, all ranks grow them
    together as soon as the exchanged counts show the need."""

    name = "rowwise"
    moves_both_gradients = False

    def __init__(self, *args: Any, heap: Heap, owns_heap: bool, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if STAMP_WORDS + 2 + self.num_experts > RECORD_MAX:
            raise ValueError(
                f"num_experts={self.num_experts} is more than the {RECORD_MAX - STAMP_WORDS - 2} whose counts one"
                " exchange of the heap holds"
            )
        self.heap, self.owns_heap = heap, owns_heap
        self.acc = accumulation_dtype(self.dtype)
        self.max_tokens = self.max_rows = 0
        self.bytes_put = self.bytes_got = 0
        self.exchanges = 0  # made so far, alike on all ranks
        self.pools: Pools | None = None  # made when the first sizes are known
        if self.config.max_tokens is not None:
            self._grow(self.config.max_tokens, 0, self.config.slots or 2, 2)

    # Buffers

    def _grow(self, max_tokens: int, max_rows: int, payload_slots: int, scratch_slots: int) -> None:
        """Collective: make room for ``max_tokens`` tokens of a source and ``max_rows`` rows of an expert rank."""
        self.max_tokens = max(self.max_tokens, max_tokens)
        bound = rows_bound(self.config.capacity, self.top_k, self.max_tokens, self.world, self.num_experts)
        self.max_rows = max(self.max_rows, bound, max_rows)
        stage, k, rows, wide = self.world * self.max_tokens, self.top_k, self.max_rows, self.hidden_size
        if self.config.form == "dedup":
            self.payload_region = Region(
                Part("stage", (stage, wide), self.dtype),
                Part("local_rows", (stage, k), torch.int32),
                Part("weights", (stage, k), self.acc),
            )
            self.scratch_region = Region(
                Part("rows", (self.world, self.max_tokens, wide), self.dtype),
                Part("scalars", (self.world, self.max_tokens, k), self.acc),
            )
        else:
            self.payload_region = Region(
                Part("rows", (rows, wide), self.dtype),
                Part("weights", (rows,), self.acc),
                Part("routes", (rows,), torch.int64),
            )
            self.scratch_region = Region(Part("rows", (rows, wide), self.dtype), Part("scalars", (rows,), self.acc))
        if self.pools is None:
            self.pools = Pools(
                SlotPool(self.heap, self.payload_region.nbytes, payload_slots, "payload", growable=True),
                SlotPool(self.heap, self.scratch_region.nbytes, scratch_slots, "scratch", growable=True),
            )
        else:
            self.pools.payload.grow(slots=payload_slots, slot_bytes=self.payload_region.nbytes)
            self.pools.scratch.grow(slots=scratch_slots, slot_bytes=self.scratch_region.nbytes)

    @property
    def payload(self) -> SlotPool:
        return self._made.payload

    @property
    def scratch(self) -> SlotPool:
        return self._made.scratch

    @property
    def _made(self) -> Pools:
        if self.pools is None:
            raise RuntimeError("this dispatcher has no buffers: it was closed, or plan was not called first")
        return self.pools

    def _take(self, pool: SlotPool) -> tuple[Slot | None, Tensor | None]:
        """A free slot and the tensor that owns its lease, or (None, None)."""
        slot = pool.acquire()
        if slot is None:
            return None, None
        tensor = slot.tensor()
        if self.config.diagnostic_fill != "none":
            # Bytes of ones are NaN in every float dtype.
            tensor.fill_(0 if self.config.diagnostic_fill == "zero" else 0xFF)
        return slot, tensor

    def _advertise(self, operation: str, layer: str, pool: SlotPool, moved: int = 0) -> tuple[Slot, Tensor, list[int]]:
        """Choose a slot of ``pool`` and tell everyone; gives it with every rank's handle. Grows ``pool`` where a rank
        ran out."""
        while True:
            slot, tensor = self._take(pool)
            handles = self._exchange_handles(operation, layer, EXHAUSTED if slot is None else slot.handle, moved)
            if EXHAUSTED not in handles:
                assert slot is not None and tensor is not None
                return slot, tensor, handles
            del tensor
            self._more_slots(pool, handles)

    def _exchange_handles(self, operation: str, layer: str, handle: int, moved: int = 0) -> list[int]:
        """Every rank's handle. ``moved``: what this rank moves (``moved_gradients``); all ranks must move the same."""
        handles, everyone = self._exchange(operation, layer, handle, moved)[:, :2].t().tolist()
        for rank, other in enumerate(everyone):
            if other != moved:
                raise RuntimeError(
                    f"EP ranks disagree in {operation} of layer {layer!r}: rank {self.rank} needs {MOVED[moved]}, rank"
                    f" {rank} needs {MOVED[other]}. x, and likewise topk_weight, must require a gradient on all ranks"
                    " of an EP group or on none, on ranks without tokens too"
                )
        return handles

    def _exchange(
        self, operation: str, layer: str, handle: int, num_tokens: int = 0, counts: Tensor | None = None
    ) -> Tensor:
        """int64 [M, 2 + E]: the handle, T (or what is moved) and counts [E] of every rank, all in the same step.

        Records are all of one length, numbered, and name the operation and the layer, so that ranks that are not in the
        same step are told so and do not use each other's."""
        self.exchanges += 1
        record = torch.zeros(STAMP_WORDS + 2 + self.num_experts, dtype=torch.int64)
        record[:STAMP_WORDS] = torch.tensor(stamp(self.exchanges, operation, layer))
        record[STAMP_WORDS], record[STAMP_WORDS + 1] = handle, num_tokens
        if counts is not None:
            record[STAMP_WORDS + 2 :] = counts
        with span("exchange"):
            records = self.heap.exchange(record, channel=CHANNEL, phase=Phase(operation, layer))
        check_stamps(records[:, :STAMP_WORDS].tolist(), self.rank, self.exchanges, operation, layer)
        return records[:, STAMP_WORDS:]

    def _more_slots(self, pool: SlotPool, handles: list[int]) -> None:
        """Collective: another slot for a pool that ran out somewhere, unless its size was fixed."""
        slots = pool.stats().slots
        if pool is self.payload and self.config.slots is not None and slots >= self.config.slots:
            short = [r for r, handle in enumerate(handles) if handle == EXHAUSTED]
            raise RuntimeError(
                f"all {slots} payload slots are leased on EP ranks {short}: slots={self.config.slots} must be at least"
                " the number of MoE layer calls whose backward has not run, plus the MoE layers of one checkpointed"
                " region (ep_plugin.dispatch.slots_for)"
            )
        pool.grow(slots=slots + max(1, slots // 2))

    def _peers(self, pool: SlotPool, region: Region, handles: list[int], part: str) -> list[Tensor]:
        """One view per rank of ``part`` of the slot it advertised."""
        piece = region[part]
        return [
            pool.peer_view(rank, handle, piece.offset, piece.shape, piece.dtype) for rank, handle in enumerate(handles)
        ]

    def _sync(self, phase: str, layer: str) -> None:
        """Everyone's writes so far are visible to everyone after this."""
        with span("wait"):
            where = Phase(phase, layer)
            self.heap.wait(self.heap.post(channel=CHANNEL, phase=where), channel=CHANNEL, phase=where)

    # The three calls

    def plan(self, topk_idx: Tensor, *, layer: str = "", x: Tensor | None = None) -> RowwiseState:
        with self.guard("plan", layer):
            topk_idx = self.check_routes(topk_idx)
            num_tokens = topk_idx.shape[0]
            if self.config.max_tokens is not None and num_tokens > self.config.max_tokens:
                raise ValueError(
                    f"{num_tokens} tokens exceed max_tokens={self.config.max_tokens}; raise it or leave it out"
                )
            counts = count_routes(topk_idx, self.num_experts)
            while True:
                slot, payload = self._take(self.payload) if self.pools else (None, None)
                handle = EXHAUSTED if slot is None else slot.handle
                records = self._exchange("plan", layer, handle, num_tokens, counts)
                handles, tokens = records[:, 0].tolist(), records[:, 1].contiguous()
                with span("route map"):
                    route_map = build_route_map(
                        topk_idx, records[:, 2:].contiguous(), tokens, rank=self.rank, capacity=self.config.capacity
                    )
                if self._fits(tokens, route_map) and EXHAUSTED not in handles:
                    return RowwiseState(
                        layer,
                        route_map,
                        handles=handles,
                        payload=payload,
                        layout=self.payload_region,
                        max_tokens=self.max_tokens,
                    )
                del slot, payload
                self._make_room(tokens, route_map, handles)

    def _rows_needed(self, route_map: RouteMap) -> int:
        return int(route_map.accepted.sum(0).view(self.world, -1).sum(1).max())

    def _fits(self, tokens: Tensor, route_map: RouteMap) -> bool:
        rows_fit = self.config.form == "dedup" or self._rows_needed(route_map) <= self.max_rows
        return self.pools is not None and int(tokens.max()) <= self.max_tokens and rows_fit

    def _make_room(self, tokens: Tensor, route_map: RouteMap, handles: list[int]) -> None:
        """Collective, decided alike on all ranks from the exchanged records."""
        if self._fits(tokens, route_map):
            self._more_slots(self.payload, handles)
            return
        most = int(tokens.max())
        if most > self.max_tokens:
            # By half as much again, so that slowly growing batches do not grow the heap each time.
            most = max(64, -(-max(most, self.max_tokens * 3 // 2) // 64) * 64)
        self._grow(most, self._rows_needed(route_map), self.config.slots or 2, 2)

    def fail(self, phase: str, layer: str, error: BaseException) -> None:
        if not isinstance(error, HeapAborted | HeapTimeout | HeapClosed):
            self.heap.abort(Phase(phase, layer), f"{type(error).__name__}: {error}")

    # Table 8, dispatch forward: PUT

    def send(self, state: RowwiseState, x: Tensor, topk_weight: Tensor, arrived: Arrived) -> tuple[Tensor, Tensor]:
        if state.payload is None or state.handles is None or state.layout is None:
            raise RuntimeError(f"dispatch of layer {state.layer!r} was called twice for one plan")
        payload, handles, region, max_tokens = state.payload, state.handles, state.layout, state.max_tokens
        state.payload = state.handles = state.layout = None
        weights = topk_weight.to(self.acc)
        state.topk_weight = weights if self.config.weight_at == "output" else None
        dest, rows = state.map, state.num_rows
        assert rows is not None
        if self.config.form == "route":
            with span("put"):
                put_rows_torch(x, self._peers(self.payload, region, handles, "rows"), dest.dest_rank, dest.dest_row)
                put_values_torch(
                    weights, self._peers(self.payload, region, handles, "weights"), dest.dest_rank, dest.dest_row
                )
                first = self.rank * max_tokens * self.top_k
                ids = torch.arange(first, first + weights.numel()).view_as(weights)
                put_values_torch(
                    ids, self._peers(self.payload, region, handles, "routes"), dest.dest_rank, dest.dest_row
                )
            self._count_put(dest.dest_rank)
            self._sync("dispatch", state.layer)
            arrived.route_of_row = region.view(payload, "routes")[:rows].clone()
            if self.config.weight_at in ("hidden", "input"):
                slot, out = self._take(self.scratch)
                if slot is not None and out is not None:
                    state.output_slot = slot
                    arrived.output = self.scratch_region.view(out, "rows")
            return region.view(payload, "rows")[:rows], region.view(payload, "weights")[:rows].clone()

        with span("put"):
            first = self.rank * max_tokens
            put_unique_torch(x, self._peers(self.payload, region, handles, "stage"), dest.dest_rank, first)
            put_meta_torch(
                dest.dest_rank,
                dest.dest_row,
                weights,
                self._peers(self.payload, region, handles, "local_rows"),
                self._peers(self.payload, region, handles, "weights"),
                first,
            )
        self._count_put(dest.dest_rank, unique=True)
        self._sync("dispatch", state.layer)
        with span("fan-out"):
            stage = region.view(payload, "stage")
            # Small, and needed by every movement of backward: out of the slot, so that it does not pin it.
            state.local_rows = region.view(payload, "local_rows").view(self.world, max_tokens, self.top_k).clone()
            routes = row_routes_torch(state.local_rows, dest.tokens, rows)
            arrived.route_of_row = routes
            top_k = self.top_k
            arrived.rebuild = Rebuild((stage, routes), lambda saved, num_rows: fan_out_torch(saved[0], saved[1], top_k))
            return fan_out_torch(stage, routes, top_k), region.view(payload, "weights").reshape(-1)[routes]

    # Table 8, combine forward: GET, or PUT of partials

    def give_back(
        self, state: RowwiseState, y: Tensor, weights: Tensor | None, keep: bool
    ) -> tuple[Tensor, Tensor | None]:
        dest = state.map
        at_output = weights is not None and self.config.weight_at == "output"
        if self.config.form == "dedup":
            by_slot = self._by_slot(state, weights) if weights is not None else None
            out, _ = self._reduce_put("combine", state, y, None, by_slot)
            assert out is not None
            return out, None
        slot = state.output_slot
        state.output_slot = None
        if slot is not None and slot.nbytes < self.scratch_region.nbytes:
            slot = None  # the buffers grew since dispatch
        with self._readable("combine", state.layer, y, None, slot) as (rows, _):
            by_route = state.topk_weight if at_output else weights
            state.topk_weight = None
            with span("get and reduce"):
                out = get_reduce_torch(
                    rows, dest.dest_rank, dest.dest_row, None if by_route is None else by_route.to(self.acc)
                )
                kept = get_rows_torch(rows, dest.dest_rank, dest.dest_row) if keep else None
            self._count_got(dest.dest_rank)
        return out, kept

    # Table 8, combine backward: PUT

    def send_grad(self, state: RowwiseState, grad: Tensor, scale: Tensor | None) -> Tensor:
        dest, rows = state.map, state.num_rows
        region = self.scratch_region
        _, slot, handles = self._advertise("combine backward", state.layer, self.scratch)
        peers = self._peers(self.scratch, region, handles, "rows")
        if self.config.form == "route":
            with span("put"):
                put_rows_torch(grad, peers, dest.dest_rank, dest.dest_row, scale)
            self._count_put(dest.dest_rank)
            self._sync("combine backward", state.layer)
            return region.view(slot, "rows")[:rows]
        stages = [peer.view(-1, self.hidden_size) for peer in peers]
        with span("put"):
            put_unique_torch(grad, stages, dest.dest_rank, self.rank * self.max_tokens)
        self._count_put(dest.dest_rank, unique=True)
        self._sync("combine backward", state.layer)
        assert state.local_rows is not None and rows is not None
        with span("fan-out"):
            stage = region.view(slot, "rows")[:, : state.local_rows.shape[1]]
            routes = row_routes_torch(state.local_rows, dest.tokens, rows)
            return fan_out_torch(stage.reshape(-1, self.hidden_size), routes, self.top_k)

    # Table 8, dispatch backward: GET, or PUT of partials

    def return_grad(
        self, state: RowwiseState, grad_rows: Tensor | None, grad_weights: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        if self.config.form == "dedup":
            return self._reduce_put("dispatch backward", state, grad_rows, grad_weights, None)
        dest = state.map
        with self._readable("dispatch backward", state.layer, grad_rows, grad_weights, None) as (rows, scalars):
            with span("get and reduce"):
                grad_x = None if grad_rows is None else get_reduce_torch(rows, dest.dest_rank, dest.dest_row)
                grad_w = None if grad_weights is None else get_values_torch(scalars, dest.dest_rank, dest.dest_row)
            if grad_rows is not None:
                self._count_got(dest.dest_rank)
        return grad_x, grad_w

    @contextmanager
    def _readable(
        self, operation: str, layer: str, rows: Tensor | None, scalars: Tensor | None, slot: Slot | None
    ) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
        """Let every rank GET ``rows`` [R, D] and ``scalars`` [R] of this rank; gives every rank's, as views.

        ``slot`` is the scratch slot that ``rows`` may already lie in. No copy is made then.
        """
        region, lease = self.scratch_region, None
        if slot is not None and (rows is None or rows.data_ptr() != int(slot.buffer.ptrs[self.rank]) + slot.offset):
            slot = None
        while True:
            if slot is None:
                slot, lease = self._take(self.scratch)
                if lease is not None and rows is not None:
                    with span("stage"):
                        region.view(lease, "rows")[: rows.shape[0]] = rows
                if lease is not None and scalars is not None:
                    region.view(lease, "scalars")[: scalars.shape[0]] = scalars
            handle = EXHAUSTED if slot is None else slot.handle
            handles = self._exchange_handles(operation, layer, handle, moved_gradients(rows, scalars))
            if slot is not None and EXHAUSTED not in handles:
                break
            self._more_slots(self.scratch, handles)
        yield self._peers(self.scratch, region, handles, "rows"), self._peers(self.scratch, region, handles, "scalars")
        # Reading is done: the slot may be used again once every peer has said so too.
        slot.read_until(self.heap.post(channel=CHANNEL, phase=Phase(operation, layer)), CHANNEL)
        del lease

    def _reduce_put(
        self, operation: str, state: RowwiseState, rows: Tensor | None, scalars: Tensor | None, weights: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Sum the rows of each token here, write the partials (and one scalar per route) at its source, sum those
        there."""
        dest, layer, local_rows = state.map, state.layer, state.local_rows
        assert local_rows is not None
        _, slot, handles = self._advertise(operation, layer, self.scratch, moved_gradients(rows, scalars))
        region, tokens = self.scratch_region, dest.tokens.tolist()
        with span("reduce and put"):
            if rows is not None:
                peers = self._peers(self.scratch, region, handles, "rows")
                pre_reduce_put_torch(rows, local_rows, tokens, peers, self.rank, weights)
                for r in range(self.world):
                    if r != self.rank:  # a stripe past its source's tokens holds anything
                        self.bytes_put += int((local_rows[r, : tokens[r]] >= 0).any(1).sum()) * self._row_bytes
            if scalars is not None:
                put_scalars_torch(
                    scalars, local_rows, tokens, self._peers(self.scratch, region, handles, "scalars"), self.rank
                )
        self._sync(operation, layer)
        with span("sum"):
            out = None if rows is None else sum_partials_torch(region.view(slot, "rows"), dest.dest_rank)
            back = None if scalars is None else take_scalars_torch(region.view(slot, "scalars"), dest.dest_rank)
        return out, back

    def _by_slot(self, state: RowwiseState, weights: Tensor) -> Tensor:
        """[M, T_max, K] weights of this rank's rows, by the token they belong to; anything where there is no row."""
        assert state.local_rows is not None
        if not weights.numel():
            return weights.new_zeros(state.local_rows.shape)
        return weights[state.local_rows.clamp(min=0).long()]

    @property
    def _row_bytes(self) -> int:
        return self.hidden_size * self.dtype.itemsize

    def _count_put(self, dest_rank: Tensor, unique: bool = False) -> None:
        """Count the bytes of rows written to other ranks."""
        for rank in range(self.world):
            if rank != self.rank:
                here = dest_rank == rank
                self.bytes_put += int((here.any(1) if unique else here).sum()) * self._row_bytes

    def _count_got(self, dest_rank: Tensor) -> None:
        self.bytes_got += int(((dest_rank >= 0) & (dest_rank != self.rank)).sum()) * self._row_bytes

    def metrics(self, state: RowwiseState) -> dict[str, Tensor]:
        return drop_metrics(state.map, bound=self.max_rows)

    def stats(self) -> dict[str, Any]:
        """bytes_sent: rows written to or read from other ranks; payload slots: total, in use, peak."""
        out: dict[str, Any] = {"bytes_sent": self.bytes_put + self.bytes_got}
        if self.pools is not None:
            payload = self.pools.payload.stats()
            out |= {"slots": payload.slots, "slots_in_use": payload.in_use, "slots_peak": payload.peak}
        return out

    def close(self) -> None:
        if self.owns_heap:
            self.heap.close()
        elif self.pools is not None:
            self.pools.payload.close()
            self.pools.scratch.close()
        self.pools = None


def moved_gradients(rows: Tensor | None, scalars: Tensor | None) -> int:
    """What a movement carries, as an index of ``MOVED``: 1 for rows, 2 for scalars of routes."""
    return (rows is not None) + 2 * (scalars is not None)
