"""``rowwise`` with MXFP8 rows, on CPU heaps.

In the one-row form the gradients of the dispatched rows take the place of those rows, in the slot they were PUT into:
whoever wants the rows must have read them before (report, section 5.7). The lease of the slot is the saved rows' own.

Legend: T local tokens, K routes per token, M ranks, D hidden size, R rows received, W width of a row on the wire.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..config import MXFP8Config
from ..dispatch.base import Arrived, span
from ..dispatch.layout import Part, Region
from ..dispatch.rowwise import CHANNEL, EXHAUSTED, Pools, RowwiseDispatcher, RowwiseState, moved_gradients
from ..heap import Phase
from ..heap.pool import Slot, SlotPool
from ..kernels.fan_out import fan_out_torch, row_routes_torch
from ..kernels.mxfp8_reduce import get_reduce_records_torch, pre_reduce_put_records_torch, sum_partial_records_torch
from ..kernels.put import put_rows_torch, put_unique_torch
from ..kernels.reduce import get_reduce_torch, get_rows_torch, get_values_torch, put_scalars_torch, take_scalars_torch
from ..routing import rows_bound
from .gemm import ExpertGemm
from .movements import MXFP8Movements, Wire, Wires


@dataclass
class RowwiseMXFP8State(RowwiseState):
    """Adds, in the one-row form, the parts of the payload slot that the dispatch backward writes again: ``slot_rows``
    [rows of the slot, W] and ``slot_weights`` float32. Between dispatch and combine also the ``output`` rows of the
    combine, where they can be read by the peers."""

    slot_rows: Tensor | None = None
    slot_weights: Tensor | None = None
    output: Tensor | None = None

    def tensors(self) -> tuple[Any, ...]:
        return (*super().tensors(), self.slot_rows, self.slot_weights)

    @classmethod
    def restore(cls, layer: str, tensors: tuple[Any, ...]) -> RowwiseMXFP8State:
        plain = RowwiseState.restore(layer, tensors[:-2])
        return cls(layer, plain.map, plain.local_rows, slot_rows=tensors[-2], slot_weights=tensors[-1])


_IN_SCRATCH = 1 << 62  # of an advertised handle: the slot is one of the scratch pool


class RowwiseMXFP8(MXFP8Movements, RowwiseDispatcher):
    """``rowwise``, both forms."""

    def __init__(self, *args: Any, mxfp8: MXFP8Config, wires: Wires, gemm: ExpertGemm, **kwargs: Any) -> None:
        self.set_mxfp8(mxfp8, wires, gemm)
        self._scratch_regions: dict[Wire, Region] = {}
        self._payload_slots: dict[int, Slot] = {}  # the last lease at each address
        self._moving = wires.dispatch
        super().__init__(*args, **kwargs)

    # Buffers

    def _grow(self, max_tokens: int, max_rows: int, payload_slots: int, scratch_slots: int) -> None:
        self.max_tokens = max(self.max_tokens, max_tokens)
        bound = rows_bound(self.config.capacity, self.top_k, self.max_tokens, self.world, self.num_experts)
        self.max_rows = max(self.max_rows, bound, max_rows)
        k, there, sums = self.top_k, self.wires.dispatch, (self.world, self.max_tokens)
        if self.config.form == "dedup":
            stage = self.world * self.max_tokens
            self.payload_region = Region(
                Part("stage", (stage, there.width), there.dtype),
                Part("local_rows", (stage, k), torch.int32),
                Part("weights", (stage, k), self.acc),
            )
        else:
            self.payload_region = self._payload_layout(self.max_rows, there)
        for wire in (self.wires.combine, self.wires.combine_backward, self.wires.dispatch_backward):
            rows, scalars = (sums, (*sums, k)) if self.config.form == "dedup" else ((self.max_rows,), (self.max_rows,))
            self._scratch_regions[wire] = Region(
                Part("rows", (*rows, wire.width), wire.dtype), Part("scalars", scalars, self.acc)
            )
        self._use(self._moving)
        scratch_bytes = max(region.nbytes for region in self._scratch_regions.values())
        if self.pools is None:
            self.pools = Pools(
                SlotPool(self.heap, self.payload_region.nbytes, payload_slots, "payload", growable=True),
                SlotPool(self.heap, scratch_bytes, scratch_slots, "scratch", growable=True),
            )
        else:
            self.pools.payload.grow(slots=payload_slots, slot_bytes=self.payload_region.nbytes)
            self.pools.scratch.grow(slots=scratch_slots, slot_bytes=scratch_bytes)

    def _payload_layout(self, rows: int, wire: Wire) -> Region:
        """Of the one-row form, with rows that travel as ``wire`` says."""
        return Region(
            Part("rows", (rows, wire.width), wire.dtype),
            Part("weights", (rows,), self.acc),
            Part("routes", (rows,), torch.int64),
        )

    def _use(self, wire: Wire) -> None:
        """The movements from here on are of ``wire``: their scratch layout, and the bytes that are counted."""
        self._moving = wire
        if wire in self._scratch_regions:
            self.scratch_region = self._scratch_regions[wire]

    @property
    def _row_bytes(self) -> int:
        return self._moving.nbytes

    def _take(self, pool: SlotPool) -> tuple[Slot | None, Tensor | None]:
        slot, tensor = super()._take(pool)
        if slot is not None and tensor is not None and pool is self.payload:
            self._payload_slots[tensor.data_ptr()] = slot
        return slot, tensor

    def plan(self, topk_idx: Tensor, *, layer: str = "", x: Tensor | None = None) -> RowwiseMXFP8State:
        return RowwiseMXFP8State(**vars(super().plan(topk_idx, layer=layer)))

    # Table 8, dispatch forward: PUT

    def send(self, state: RowwiseState, x: Tensor, topk_weight: Tensor, arrived: Arrived) -> tuple[Tensor, Tensor]:
        assert isinstance(state, RowwiseMXFP8State)
        payload, layout = state.payload, state.layout
        self._use(self.wires.combine)  # whose rows the experts may write where the peers read them
        self._moving = self.wires.dispatch
        rows, weights = super().send(state, self.wires.dispatch.encode(x), topk_weight, arrived)
        if self.config.form == "route" and payload is not None and layout is not None:
            state.slot_rows, state.slot_weights = layout.view(payload, "rows"), layout.view(payload, "weights")
            state.output, arrived.output = arrived.output, None
        return rows, weights

    # Table 8, combine forward: GET, or PUT of partials

    def give_back(
        self, state: RowwiseState, y: Tensor, weights: Tensor | None, keep: bool
    ) -> tuple[Tensor, Tensor | None]:
        assert isinstance(state, RowwiseMXFP8State)
        wire, dest = self.wires.combine, state.map
        self._use(wire)
        if self.config.form == "dedup":
            return super().give_back(state, y, weights, keep)
        slot, output = state.output_slot, state.output
        state.output_slot = state.output = None
        if slot is None or output is None or slot.nbytes < self.scratch_region.nbytes:
            slot = output = None  # or the buffers grew since dispatch
        rows = wire.encode(y, out=None if output is None else output[: y.shape[0]])
        with self._readable("combine", state.layer, rows, None, slot) as (peers, _):
            by_route = state.topk_weight if self.config.weight_at == "output" else weights
            state.topk_weight = None
            with span("get and reduce"):
                w = None if by_route is None else by_route.to(self.acc)
                if wire.records:
                    out = get_reduce_records_torch(peers, dest.dest_rank, dest.dest_row, w, self.dtype)
                else:
                    out = get_reduce_torch(peers, dest.dest_rank, dest.dest_row, w)
                kept = get_rows_torch(peers, dest.dest_rank, dest.dest_row) if keep else None
            self._count_got(dest.dest_rank)
        return out, kept

    # Table 8, combine backward: PUT

    def send_grad(self, state: RowwiseState, grad: Tensor, scale: Tensor | None) -> Tensor:
        dest, rows, wire = state.map, state.num_rows, self.wires.combine_backward
        assert rows is not None
        self._use(wire)
        if scale is None:
            sent = wire.encode(grad)
        else:
            sent = torch.stack([wire.encode(grad, weights=by_token) for by_token in scale.unbind(1)], 1)
        _, slot, handles = self._advertise("combine backward", state.layer, self.scratch)
        region = self.scratch_region
        peers = self._peers(self.scratch, region, handles, "rows")
        if self.config.form == "route":
            with span("put"):
                put_rows_torch(sent, peers, dest.dest_rank, dest.dest_row)
            self._count_put(dest.dest_rank)
            self._sync("combine backward", state.layer)
            return region.view(slot, "rows")[:rows]
        with span("put"):
            stages = [peer.flatten(0, 1) for peer in peers]
            put_unique_torch(sent, stages, dest.dest_rank, self.rank * self.max_tokens)
        self._count_put(dest.dest_rank, unique=True)
        self._sync("combine backward", state.layer)
        assert state.local_rows is not None
        with span("fan-out"):
            stage = region.view(slot, "rows")[:, : state.local_rows.shape[1]].flatten(0, 1)
            return fan_out_torch(stage, row_routes_torch(state.local_rows, dest.tokens, rows), self.top_k)

    # Table 8, dispatch backward: GET, or PUT of partials

    def return_grad(
        self, state: RowwiseState, grad_rows: Tensor | None, grad_weights: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        assert isinstance(state, RowwiseMXFP8State)
        wire, dest = self.wires.dispatch_backward, state.map
        self._use(wire)
        if self.config.form == "dedup":
            return super().return_grad(state, grad_rows, grad_weights)
        with self._readable_gradients(state, grad_rows, grad_weights) as (rows, scalars):
            grad_x = grad_w = None
            with span("get and reduce"):
                if grad_rows is not None and wire.records:
                    grad_x = get_reduce_records_torch(rows, dest.dest_rank, dest.dest_row, None, self.dtype)
                elif grad_rows is not None:
                    grad_x = get_reduce_torch(rows, dest.dest_rank, dest.dest_row)
                if grad_weights is not None:
                    grad_w = get_values_torch(scalars, dest.dest_rank, dest.dest_row)
            if grad_rows is not None:
                self._count_got(dest.dest_rank)
        return grad_x, grad_w

    @contextmanager
    def _readable_gradients(
        self, state: RowwiseMXFP8State, rows: Tensor | None, scalars: Tensor | None
    ) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
        """As ``_readable``, in the payload slot, over the dispatched rows: their last reader has been.

        A scratch slot instead where the gradients' rows are wider than the slot's, or where whoever kept the saved
        tensors gave back copies of them.
        """
        wire, operation, lease = self.wires.dispatch_backward, "dispatch backward", None
        assert state.slot_rows is not None and state.slot_weights is not None
        slot = self._payload_slots.get(state.slot_rows.data_ptr())
        if wire.nbytes > self.wires.dispatch.nbytes:
            slot = None
        flag, most = (_IN_SCRATCH, self.max_rows) if slot is None else (0, state.slot_rows.shape[0])
        if slot is not None:
            inside = state.slot_rows.view(torch.uint8).flatten()[: most * wire.nbytes]
            self._write(inside.view(wire.dtype).view(most, wire.width), state.slot_weights, rows, scalars)
        while True:
            if slot is None:
                slot, lease = self._take(self.scratch)
                if lease is not None:
                    region = self.scratch_region
                    self._write(region.view(lease, "rows"), region.view(lease, "scalars"), rows, scalars)
            handle = EXHAUSTED if slot is None else slot.handle | flag
            handles = self._exchange_handles(operation, state.layer, handle, moved_gradients(rows, scalars))
            if slot is not None and EXHAUSTED not in handles:
                break
            self._more_slots(self.scratch, handles)
        peers: tuple[list[Tensor], list[Tensor]] = ([], [])
        payload = self._payload_layout(state.slot_rows.shape[0], self.wires.dispatch)
        for rank, handle in enumerate(handles):
            pool, region = (self.scratch, self.scratch_region) if handle & _IN_SCRATCH else (self.payload, payload)
            shape = (region["rows"].shape[0], wire.width)
            scalar = region["scalars" if handle & _IN_SCRATCH else "weights"]
            place = handle & ~_IN_SCRATCH
            peers[0].append(pool.peer_view(rank, place, region["rows"].offset, shape, wire.dtype))
            peers[1].append(pool.peer_view(rank, place, scalar.offset, scalar.shape, scalar.dtype))
        yield peers
        # Reading is done: the slot may be used again once every peer has said so too.
        slot.read_until(self.heap.post(channel=CHANNEL, phase=Phase(operation, state.layer)), CHANNEL)
        del lease

    def _write(self, there: Tensor, scalars_there: Tensor, rows: Tensor | None, scalars: Tensor | None) -> None:
        with span("stage"):
            if rows is not None:
                self.wires.dispatch_backward.encode(rows, out=there[: rows.shape[0]])
            if scalars is not None:
                scalars_there[: scalars.shape[0]] = scalars

    def _reduce_put(
        self, operation: str, state: RowwiseState, rows: Tensor | None, scalars: Tensor | None, weights: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        wire = self._moving
        if not wire.records:
            return super()._reduce_put(operation, state, rows, scalars, weights)
        dest, layer, local_rows = state.map, state.layer, state.local_rows
        assert local_rows is not None
        _, slot, handles = self._advertise(operation, layer, self.scratch, moved_gradients(rows, scalars))
        region, tokens = self.scratch_region, dest.tokens.tolist()
        with span("reduce and put"):
            if rows is not None:
                peers = self._peers(self.scratch, region, handles, "rows")
                pre_reduce_put_records_torch(rows, local_rows, tokens, peers, self.rank, weights, wire.rounding)
                for r in range(self.world):
                    if r != self.rank:
                        self.bytes_put += int((local_rows[r, : tokens[r]] >= 0).any(1).sum()) * wire.nbytes
            if scalars is not None:
                put_scalars_torch(
                    scalars, local_rows, tokens, self._peers(self.scratch, region, handles, "scalars"), self.rank
                )
        self._sync(operation, layer)
        out = back = None
        with span("sum"):
            if rows is not None:
                out = sum_partial_records_torch(region.view(slot, "rows"), dest.dest_rank, self.dtype)
            if scalars is not None:
                back = take_scalars_torch(region.view(slot, "scalars"), dest.dest_rank)
        return out, back
