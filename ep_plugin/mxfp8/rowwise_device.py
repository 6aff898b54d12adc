"""``rowwise`` with MXFP8 rows on GPUs: the movements of ``dispatch.rowwise_device`` with records in them.

Records cross in chunks on the side stream. As a chunk arrives, the caller's stream writes the rows that the GEMM reads
(decoded, or with one power of two per row) in the pass that puts them in order; no other copy of them is made. In the
one-row form the kernel that PUTs them quantises them on the way; meanwhile the caller's stream makes the rows that
stay, from x.

In the one-row form the gradients of the dispatched rows take the place of those rows in the payload slot, from which
the sources GET them (report, section 5.7). Nobody writes the slot again before every rank has said that its GETs are
done.

Legend: T local tokens, K routes per token, M ranks, D hidden size, RB bound of rows received, W width of a row on the
wire."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..config import LaunchConfig, MXFP8Config
from ..dispatch.base import Arrived, Rebuild, span
from ..dispatch.device_buffers import PART_THERE, Chunks, Scratch, parts_of
from ..dispatch.layout import Part, Region
from ..dispatch.rowwise_device import CHANNEL, THERE, DeviceRowwiseDispatcher, DeviceState
from ..dispatch.tuned import resolve
from ..heap import Phase
from ..heap.pool import SlotPool
from ..kernels import mxfp8_fan_out_triton as fan_out_kernels
from ..kernels import mxfp8_own_triton as own_kernels
from ..kernels import mxfp8_put_triton as put_kernels
from ..kernels import mxfp8_reduce_triton as reduce_kernels
from ..kernels.fan_out_triton import fan_out, fill_tail
from ..kernels.peers import Peers
from ..kernels.put_triton import put_meta, put_unique, put_values
from ..kernels.scalars_triton import get_values, put_scalars, take_scalars
from ..kernels.triton_common import Launch
from ..routing import rows_bound
from ..slots import DEFAULT_SLOTS
from .codec import Form, Operand, Received, empty_operand
from .gemm import ExpertGemm
from .movements import MXFP8Movements, Wire, Wires

WORDS = Launch(32, warps=32, tile=1 << 17)  # wide, as of plain rows (put_triton.UNIQUE)


@dataclass
class DeviceMXFP8State(DeviceState):
    """Adds, in the one-row form, ``routes`` int64 [RB] and the parts of the payload slot that the dispatch backward
    writes again: ``slot_rows`` [RB, W] and ``slot_weights`` float32 [RB]. Between plan and dispatch also the
    ``records`` [T, W] of the tokens that cross already."""

    routes: Tensor | None = None
    slot_rows: Tensor | None = None
    slot_weights: Tensor | None = None
    records: Tensor | None = None

    def tensors(self) -> tuple[Any, ...]:
        return (*super().tensors(), self.routes, self.slot_rows, self.slot_weights)

    @classmethod
    def restore(cls, layer: str, tensors: tuple[Any, ...]) -> DeviceMXFP8State:
        plain, (routes, rows, weights) = DeviceState.restore(layer, tensors[:-3]), tensors[-3:]
        return cls(layer, plain.map, plain.local_rows, routes=routes, slot_rows=rows, slot_weights=weights)


@dataclass(frozen=True)
class RecordLaunches:
    """The launch of each kernel that moves records, with the programs that ``launch`` of the configuration asks for."""

    words: Launch
    put: Launch
    put_weighted: Launch
    own: Launch
    fan_out: Launch
    arrived: Launch
    reduce: Launch
    sum: Launch
    get: Launch

    @staticmethod
    def of(config: LaunchConfig) -> RecordLaunches:
        def launch(default: Launch, programs: int) -> Launch:
            return replace(default, programs=programs) if programs else default

        return RecordLaunches(
            words=launch(WORDS, config.put),
            put=launch(put_kernels.PUT, config.put),
            put_weighted=launch(put_kernels.WEIGHTED, config.put),
            own=launch(own_kernels.OWN, config.fan_out),
            fan_out=launch(fan_out_kernels.FAN_OUT, config.fan_out),
            arrived=launch(fan_out_kernels.ROWS, config.fan_out),
            reduce=launch(reduce_kernels.REDUCE, config.reduce),
            sum=launch(reduce_kernels.SUM, config.sum),
            get=reduce_kernels.GET,
        )


class DeviceRowwiseMXFP8(MXFP8Movements, DeviceRowwiseDispatcher):
    """``rowwise`` on GPUs, both forms."""

    def __init__(self, *args: Any, mxfp8: MXFP8Config, wires: Wires, gemm: ExpertGemm, **kwargs: Any) -> None:
        self.set_mxfp8(mxfp8, wires, gemm)
        self._scratches: dict[Wire, Scratch] = {}  # sums on their way back, or rows to be pulled
        self._payload_handles: dict[int, int] = {}  # of the slot at each address
        self._moving = wires.dispatch
        self._started: Tensor | None = None
        super().__init__(*args, **kwargs)

    # Buffers

    def _make(self, max_tokens: int, max_rows: int) -> None:
        self.max_tokens = max_tokens
        bound = rows_bound(self.config.capacity, self.top_k, max_tokens, self.world, self.num_experts)
        self.max_rows = max(bound, max_rows)
        k, rows, world, wires = self.top_k, self.max_rows, self.world, self.wires
        there, back = wires.dispatch, wires.combine_backward
        if self.config.form == "dedup":
            self.payload_region = Region(
                Part("stage", (world * max_tokens, there.width), there.dtype),
                Part("local_rows", (world, max_tokens, k), torch.int32),
                Part("weights", (world, max_tokens, k), self.acc),
            )
            for wire in dict.fromkeys((wires.combine, wires.dispatch_backward)):
                sums = Region(
                    Part("rows", (world, max_tokens, wire.width), wire.dtype),
                    Part("scalars", (world, max_tokens, k), self.acc),
                )
                self._scratches[wire] = Scratch(self.heap, sums, CHANNEL, "partial sums")
            stage = Region(Part("stage", (world * max_tokens, back.width), back.dtype))
            self.grads = Scratch(self.heap, stage, CHANNEL, "gradient rows")
        else:
            self.payload_region = Region(
                Part("rows", (rows, there.width), there.dtype),
                Part("weights", (rows,), self.acc),
                Part("routes", (rows,), torch.int64),
            )
            pulled = (wires.combine,) if wires.dispatch_backward.records else (wires.combine, wires.dispatch_backward)
            for wire in dict.fromkeys(pulled):
                out = Region(Part("rows", (rows, wire.width), wire.dtype), Part("scalars", (rows,), self.acc))
                self._scratches[wire] = Scratch(self.heap, out, CHANNEL, "expert outputs")
            grad = Region(Part("rows", (rows, back.width), back.dtype))
            self.grad_pool = SlotPool(self.heap, grad.nbytes, self.grad_slots, "gradient rows")
        # Every rank has pulled the gradients that lie in payload slots.
        self.pulled = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.set_launch(resolve(self.config.launch, self.shape(max_tokens)))
        self.slots = self.config.slots or DEFAULT_SLOTS
        self.payload = SlotPool(self.heap, self.payload_region.nbytes, self.slots + 1, "payload")
        handle, self.ahead = self._lease(self.payload, "")
        own = torch.full((1,), handle, dtype=torch.int64, device=self.device)
        self.handles = self.heap.exchange(own, channel=CHANNEL, phase=Phase("making buffers"))[:, 0]

    def set_launch(self, launch: LaunchConfig) -> None:
        super().set_launch(launch)
        self.record_launches = RecordLaunches.of(launch)
        if self.config.form == "route":
            nbytes = self.max_tokens * self.top_k * self.row_bytes[0]
            chunks = launch.chunks or parts_of(nbytes, PART_THERE, most=4)
            self.there = Chunks(self.heap, THERE, min(chunks, self.max_tokens), self.max_tokens)

    @property
    def row_bytes(self) -> tuple[int, int]:
        return self.wires.dispatch.nbytes, self.wires.combine.nbytes

    def _lease(self, pool: SlotPool, layer: str) -> tuple[int, Tensor]:
        handle, tensor = super()._lease(pool, layer)
        if pool is self.payload:
            self._payload_handles[tensor.data_ptr()] = handle
        return handle, tensor

    def _use(self, wire: Wire) -> None:
        """The movements from here on are of ``wire``."""
        self._moving, scratch = wire, self._scratches.get(wire)
        if scratch is not None:
            self.partial = self.outputs = scratch

    def _free(self) -> None:
        del self.ahead, self.handles
        self.payload.close()
        for scratch in self._scratches.values():
            self.heap.free(scratch.buffer)
        self._scratches.clear()
        self._payload_handles.clear()
        if self.config.form == "dedup":
            self.heap.free(self.grads.buffer)
        else:
            self.grad_pool.close()

    # Plan

    def plan(self, topk_idx: Tensor, *, layer: str = "", x: Tensor | None = None) -> DeviceMXFP8State:
        if self.max_tokens and self.config.form == "route":
            with self.guard("plan", layer):  # a slot that is leased now may have held gradients
                self.heap.wait(self.pulled, channel=CHANNEL, phase=Phase("plan", layer))
        state = DeviceMXFP8State(**vars(super().plan(topk_idx, layer=layer, x=x)))
        state.records, self._started = self._started, None
        return state

    def _start(self, early: tuple[Tensor, Tensor], handles: Tensor, layer: str) -> None:
        if not self.wires.dispatch.records:
            return super()._start(early, handles, layer)
        x, topk_idx = early
        self._started = self.wires.dispatch.encode(x)
        self._put_tokens(self._started, self._payload(handles, "stage"), topk_idx, self.num_local_experts)
        return None

    def _put_tokens(self, records: Tensor, stage: Peers, routes: Tensor, per_rank: int = 1) -> None:
        """Every token's record once to each other rank that a route names, chunk by chunk."""
        self.there.begin()
        with self._across():
            put_unique(
                put_kernels.as_words(records),
                stage,
                routes,
                self.rank * self.max_tokens,
                experts_per_rank=per_rank,
                skip_rank=self.rank,
                signal=self.there.signal,
                launch=self.record_launches.words,
            )

    # Table 8, dispatch forward: PUT

    def receive(self, state: Any, x: Tensor, topk_weight: Tensor, arrived: Arrived) -> tuple[Received, Tensor]:
        payload, handles = state.payload, state.handles
        if payload is None or handles is None:
            raise RuntimeError(f"dispatch of layer {state.layer!r} was called twice for one plan")
        if not self.wires.dispatch.records:
            rows, by_row = super().send(state, x, topk_weight, arrived)
            received = Received(rows)
        else:
            state.payload = state.handles = None
            weights = topk_weight.to(self.acc).contiguous()
            state.topk_weight = weights if self.config.weight_at == "output" else None
            receive = self._receive_tokens if self.config.form == "dedup" else self._receive_routes
            received, by_row = receive(state, x.contiguous(), weights, payload, handles, arrived)
        if self.config.form == "route":
            state.routes = arrived.route_of_row
            state.slot_rows = self.payload_region.view(payload, "rows")
            state.slot_weights = self.payload_region.view(payload, "weights")
        return received, by_row

    def send(self, state: DeviceState, x: Tensor, topk_weight: Tensor, arrived: Arrived) -> tuple[Tensor, Tensor]:
        raise NotImplementedError("rows come in the form of the GEMM here: call receive")

    def _receive_tokens(
        self,
        state: DeviceMXFP8State,
        x: Tensor,
        weights: Tensor,
        payload: Tensor,
        handles: Tensor,
        arrived: Arrived,
    ) -> tuple[Received, Tensor]:
        """One record per token and rank, put in expert order here."""
        phase, dest, region, me = Phase("dispatch", state.layer), state.map, self.payload_region, self.rank
        early, records = state.early, state.records
        state.early = state.records = None
        if records is None:
            records = self.wires.dispatch.encode(x)
            self._put_tokens(records, self._payload(handles, "stage"), dest.dest_rank)
        elif early is None or early[0].data_ptr() != x.data_ptr() or early[0].shape != x.shape:
            raise ValueError(f"dispatch of layer {state.layer!r} was given another x than its plan")
        with span("put"):
            local_rows, by_token = self._payload(handles, "local_rows"), self._payload(handles, "weights")
            put_meta(dest.dest_rank, dest.dest_row, weights, local_rows, by_token, me * self.max_tokens)
        told = self.heap.post(channel=CHANNEL, phase=phase)
        by_row = weights.new_empty(self.max_rows)
        made = self._empty((self.gemm.form,))
        spread = partial(
            self._spread,
            region.view(payload, "stage"),
            made,
            tokens=dest.tokens,
            weights=region.view(payload, "weights"),
            weights_out=by_row,
        )
        with span("fan-out"):
            here = region.view(payload, "local_rows")
            spread(local_rows=here, own=records, first_source=me, sources=1)
            fill_tail(by_row, dest.offsets[-1:])
            self.heap.wait(told, channel=CHANNEL, phase=phase)
            state.local_rows = here.clone()  # small; out of the slot, so as not to pin it
            for begin, end in self.there.arrived(phase):
                spread(local_rows=state.local_rows, first_source=me + 1, sources=self.world - 1, begin=begin, end=end)
        self._join()

        def again(saved: tuple[Tensor, ...], num_rows: int | None) -> Tensor:
            (plain,) = self._empty(("plain",))
            self._spread(saved[0], (plain,), local_rows=saved[1], tokens=saved[2], own=saved[3])
            return plain.data

        arrived.rebuild = Rebuild((region.view(payload, "stage"), state.local_rows, dest.tokens, records), again)
        return Received(None, made), by_row

    def _empty(self, forms: Iterable[Form]) -> tuple[Operand, ...]:
        """Unwritten rows [RB, D] in each of ``forms``."""
        return tuple(
            empty_operand(form, self.max_rows, self.hidden_size, self.dtype, self.device)
            for form in dict.fromkeys(forms)
        )

    def _spread(
        self,
        stage: Tensor,
        made: tuple[Operand, ...],
        *,
        own: Tensor | None = None,
        weights: Tensor | None = None,
        weights_out: Tensor | None = None,
        **which: Any,
    ) -> None:
        """Staged records [M·T_max, W] to their rows in every form of ``made``; ``which`` as of ``fan_out``."""
        outputs = _outputs(made)
        if outputs:
            fan_out_kernels.fan_out_records(
                stage,
                own=own,
                own_rank=self.rank,
                weights=weights,
                weights_out=weights_out,
                launch=self.record_launches.fan_out,
                **outputs,
                **which,
            )
            weights = weights_out = None
        for operand in made:
            if operand.form == "records":
                fan_out(
                    put_kernels.as_words(stage),
                    rows=put_kernels.as_words(operand.data),
                    x_own=None if own is None else put_kernels.as_words(own),
                    own_rank=self.rank,
                    weights=weights,
                    weights_out=weights_out,
                    launch=self.launches.fan_out,
                    **which,
                )

    def _receive_routes(
        self,
        state: DeviceMXFP8State,
        x: Tensor,
        weights: Tensor,
        payload: Tensor,
        handles: Tensor,
        arrived: Arrived,
    ) -> tuple[Received, Tensor]:
        """One record per route, into the expert row itself."""
        dest, bound, phase, region = state.map, self.max_rows, Phase("dispatch", state.layer), self.payload_region
        self._put_routes(x, self._payload(handles, "rows"), state, None)
        with span("put"):
            put_values(weights, self._payload(handles, "weights"), dest.dest_rank, dest.dest_row, num_rows=bound)
            first = self.rank * self.max_tokens * self.top_k
            routes_there = self._payload(handles, "routes")
            put_values(None, routes_there, dest.dest_rank, dest.dest_row, num_rows=bound, first=first)
        told = self.heap.post(channel=CHANNEL, phase=phase)
        rows = region.view(payload, "rows")
        made = self._own_routes(x, rows, state, None, (self.gemm.form,))
        with span("wait"):
            self.heap.wait(told, channel=CHANNEL, phase=phase)
        routes, by_row = region.view(payload, "routes").clone(), region.view(payload, "weights").clone()
        fill_tail(routes, dest.offsets[-1:], -1)
        fill_tail(by_row, dest.offsets[-1:])
        arrived.route_of_row = routes
        return self._convert(phase, state, rows, routes, made), by_row

    def _put_routes(self, x: Tensor, rows: Peers, state: DeviceMXFP8State, scale: Tensor | None) -> None:
        """Quantise ``x`` [T, D] (times ``scale`` [T, K]) into every row of other ranks that a route names, chunk by
        chunk."""
        dest, launches = state.map, self.record_launches
        with self._across():
            put_kernels.quantize_put_rows(
                x,
                rows,
                dest.dest_rank,
                dest.dest_row,
                scale,
                self.mxfp8.rounding,
                num_rows=self.max_rows,
                skip_rank=self.rank,
                signal=self.there.signal,
                launch=launches.put if scale is None else launches.put_weighted,
            )
        self.there.begin()

    def _own_routes(
        self, x: Tensor, rows: Tensor, state: DeviceMXFP8State, scale: Tensor | None, forms: Iterable[Form]
    ) -> tuple[Operand, ...]:
        """The rows that stay here, as records in ``rows`` [RB, W] and in ``forms``, whose other rows are still to be
        written."""
        made = self._empty(form for form in forms if form != "records")
        with span("own"):
            own_kernels.quantize_own_rows(
                x,
                rows,
                state.map.dest_rank,
                state.map.dest_row,
                scale,
                self.mxfp8.rounding,
                own_rank=self.rank,
                launch=self.record_launches.own,
                **_outputs(made),
            )
        return made

    def _convert(
        self, phase: Phase, state: DeviceMXFP8State, rows: Tensor, routes: Tensor, made: tuple[Operand, ...]
    ) -> Received:
        """Other ranks' records in ``rows`` [RB, W], also as ``made``, each chunk as it comes; after it all of them are
        here."""
        with span("convert"):
            for begin, end in self.there.arrived(phase):
                if made:
                    fan_out_kernels.convert_arrived(
                        rows,
                        routes,
                        state.map.offsets[-1:],
                        top_k=self.top_k,
                        max_tokens=self.max_tokens,
                        begin=begin,
                        end=end,
                        skip_source=self.rank,
                        launch=self.record_launches.arrived,
                        **_outputs(made),
                    )
        self._join()
        return Received(rows, made)

    # Table 8, combine forward: GET, or PUT of partials

    def give_back(
        self, state: DeviceState, y: Tensor, weights: Tensor | None, keep: bool
    ) -> tuple[Tensor, Tensor | None]:
        wire, dest, phase = self.wires.combine, state.map, Phase("combine", state.layer)
        self._use(wire)
        if self.config.form == "dedup" or not wire.records:
            return super().give_back(state, y, weights, keep)
        by_route = state.topk_weight if self.config.weight_at == "output" else weights
        state.topk_weight = None
        self.outputs.claim(phase)
        with span("stage"):
            wire.encode(y, out=self.outputs.local("rows"), offsets=dest.offsets)
        self._sync(phase)
        out = y.new_empty((state.num_tokens, self.hidden_size))
        kept = None
        if keep:
            kept = torch.zeros((state.num_tokens, self.top_k, wire.width), dtype=torch.uint8, device=y.device)
        with span("get and reduce"):
            reduce_kernels.get_reduce_records(
                self.outputs.peers("rows"),
                dest.dest_rank,
                dest.dest_row,
                None if by_route is None else by_route.to(self.acc).contiguous(),
                out,
                num_rows=self.max_rows,
                gathered=kept,
                launch=self.record_launches.get,
            )
        self.outputs.done(phase)
        return out, kept

    # Table 8, combine backward: PUT

    def receive_grad(self, state: Any, grad: Tensor, scale: Tensor | None, forms: Iterable[Form] = ()) -> Received:
        wire, dest, phase = self.wires.combine_backward, state.map, Phase("combine backward", state.layer)
        if not wire.records:
            return Received(super().send_grad(state, grad, scale))
        if self.config.form == "route":
            assert state.routes is not None
            handle, slot = self._lease(self.grad_pool, state.layer)
            with span("exchange"):
                own = torch.full((1,), handle, dtype=torch.int64, device=grad.device)
                handles = self.heap.exchange(own, channel=CHANNEL, phase=phase)
            scale = None if scale is None else scale.contiguous()
            self._put_routes(grad, self._slots(self.grad_pool, handles[:, 0], 0), state, scale)
            rows = slot[: self.max_rows * wire.nbytes].view(self.max_rows, wire.width)
            made = self._own_routes(grad, rows, state, scale, forms)
            return self._convert(phase, state, rows, state.routes, made)
        assert state.local_rows is not None and scale is None
        records = wire.encode(grad)
        self.grads.claim(phase)  # not on the side stream, where local work would start before the PUT
        self._put_tokens(records, self.grads.peers("stage"), dest.dest_rank)
        made = self._empty(forms)
        spread = partial(self._spread, self.grads.local("stage"), made, local_rows=state.local_rows, tokens=dest.tokens)
        with span("fan-out"):
            spread(own=records, first_source=self.rank, sources=1)
            for begin, end in self.there.arrived(phase):
                spread(first_source=self.rank + 1, sources=self.world - 1, begin=begin, end=end)
        self._join()
        self.grads.done(phase)
        return Received(None, made)

    def send_grad(self, state: DeviceState, grad: Tensor, scale: Tensor | None) -> Tensor:
        raise NotImplementedError("rows come in the form of the GEMM here: call receive_grad")

    # Table 8, dispatch backward: GET, or PUT of partials

    def return_grad(
        self, state: DeviceState, grad_rows: Tensor | None, grad_weights: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        wire = self.wires.dispatch_backward
        self._use(wire)
        if self.config.form == "dedup" or not wire.records:
            return super().return_grad(state, grad_rows, grad_weights)
        assert isinstance(state, DeviceMXFP8State)
        phase, dest = Phase("dispatch backward", state.layer), state.map
        handles, lease = self._in_payload_slots(phase, state, grad_rows, grad_weights)
        grad_x = grad_w = None
        with span("get and reduce"):
            if grad_rows is not None:
                grad_x = grad_rows.new_empty((state.num_tokens, self.hidden_size))
                reduce_kernels.get_reduce_records(
                    self._payload(handles, "rows"),
                    dest.dest_rank,
                    dest.dest_row,
                    None,
                    grad_x,
                    num_rows=self.max_rows,
                    launch=self.record_launches.get,
                )
            if grad_weights is not None:
                grad_w = grad_weights.new_empty((state.num_tokens, self.top_k))
                where = self._payload(handles, "weights")
                get_values(where, dest.dest_rank, dest.dest_row, grad_w, num_rows=self.max_rows)
        # Until every rank has said so no payload slot is leased again.
        self.heap.post(channel=CHANNEL, phase=phase, ticket=self.pulled)
        del lease
        return grad_x, grad_w

    def _in_payload_slots(
        self, phase: Phase, state: DeviceMXFP8State, rows: Tensor | None, scalars: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Put the gradients where the dispatched rows were, whose last reader has been; every rank's slot, int64 [M],
        and what leases ours.

        Another slot instead where whoever kept the saved tensors gave back copies of them."""
        there, scalars_there, wire = state.slot_rows, state.slot_weights, self.wires.dispatch_backward
        assert there is not None and scalars_there is not None
        lease, handle = there, self._payload_handles.get(there.data_ptr())
        if handle is None:
            self.heap.wait(self.pulled, channel=CHANNEL, phase=phase)
            handle, lease = self._lease(self.payload, state.layer)
            there = self.payload_region.view(lease, "rows")
            scalars_there = self.payload_region.view(lease, "weights")
        with span("stage"):
            if rows is not None:
                inside = there.view(torch.uint8).flatten()[: self.max_rows * wire.nbytes]
                wire.encode(rows, out=inside.view(self.max_rows, wire.width), offsets=state.map.offsets)
                there[:0].zero_()  # autograd sees no kernel of ours: a second backward must find the rows changed
            if scalars is not None:
                scalars_there[: scalars.shape[0]].copy_(scalars)
        with span("exchange"):  # and with it the gradients are there
            own = torch.full((1,), handle, dtype=torch.int64, device=self.device)
            return self.heap.exchange(own, channel=CHANNEL, phase=phase)[:, 0], lease

    def _reduce_put(
        self, phase: Phase, state: DeviceState, rows: Tensor | None, scalars: Tensor | None, weights: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        if not self._moving.records or rows is None:
            return super()._reduce_put(phase, state, rows, scalars, weights)
        dest, local_rows, me, rounding = state.map, state.local_rows, self.rank, self.mxfp8.rounding
        assert local_rows is not None
        rows, weights = rows.contiguous(), None if weights is None else weights.contiguous()
        self.back.begin()
        with self._across():
            self.partial.claim(phase)
            if scalars is not None:
                put_scalars(scalars, local_rows, dest.tokens, self.partial.peers("scalars"), me)
            reduce_kernels.pre_reduce_put_records(
                rows, local_rows, dest.tokens, self.partial.peers("rows"), me, weights, rounding,
                first_source=me + 1, sources=self.world - 1, signal=self.back.signal,
                launch=self.record_launches.reduce,
            )  # fmt: skip
        out, back = rows.new_empty((state.num_tokens, self.hidden_size)), None
        with span("sum"):
            for begin, end in self.back.arrived(phase):
                reduce_kernels.sum_partial_records(
                    self.partial.local("rows"), dest.dest_rank, out,
                    y=rows, dest_row=dest.dest_row, weights=weights, own_rank=me, rounding=rounding,
                    begin=min(begin, out.shape[0]), end=min(end, out.shape[0]), launch=self.record_launches.sum,
                )  # fmt: skip
            if scalars is not None:
                back = scalars.new_empty((state.num_tokens, self.top_k))
                take_scalars(self.partial.local("scalars"), dest.dest_rank, back)
        self._join()
        self.partial.done(phase)
        return out, back


def _outputs(made: Iterable[Operand]) -> dict[str, Any]:
    """Operands by the names that the kernels have for them; records are not among those."""
    found: dict[str, Any] = {}
    for operand in made:
        if operand.form == "plain":
            found["rows"] = operand.data
        elif operand.form == "rowwise":
            assert operand.scales is not None
            found |= {"data": operand.data.view(torch.uint8), "scales": operand.scales}
    return found
