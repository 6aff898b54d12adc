"""Rowwise expert parallelism on GPUs: the movements of ``rowwise`` as kernels on the current stream, with no host sync.

The counts never reach the host, so buffers have a bound (``routing.rows_bound``) and ``Dispatched.num_rows`` is None.
What the kernels cannot raise (a late peer, a dropless overflow) they record, and ``check`` raises it before the
optimizer step.

Payload slots are leased as on CPU, and advertised one plan ahead, so that rows can start to cross while the map is
built. Scratch lies at one place on all ranks; before a region is written again, the writers wait for its owner's
signal that it has been read (``_Scratch.free``).

In the dedup form rows cross in chunks on a stream of their own, each followed by a signal. The caller's stream moves
own rows meanwhile, and works on a chunk as soon as it has arrived. All tickets are device memory that each signal
overwrites, so that a CUDA graph can replay a step.

Legend: T local tokens, K routes per token, E experts, M ranks, D hidden size, RB bound of rows received, T_max most
tokens of a source."""

from __future__ import annotations

import gc
import zlib
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..config import LaunchConfig
from ..heap import HeapAborted, HeapClosed, HeapTimeout, Phase
from ..heap.device import DeviceHeap
from ..heap.pool import SlotPool
from ..kernels import route_map_triton as route_map
from ..kernels.copy_triton import copy_prefix
from ..kernels.fan_out_triton import fan_out, fill_tail
from ..kernels.peers import Peers
from ..kernels.reduce import accumulation_dtype
from ..kernels.reduce_triton import sum_partials
from ..kernels.scalars_triton import take_scalars
from ..routing import RouteMap, drop_metrics, rows_bound
from ..slots import DEFAULT_SLOTS
from .base import Arrived, Dispatcher, Rebuild, RouteOverflow, RouteState, span
from .device_buffers import PART_BACK, PART_THERE, Chunks, Launches, Scratch, parts_of
from .layout import Part, Region
from .moves import Moves, PeerMoves, make_moves
from .tuned import Shape, resolve

CHANNEL = 0  # everything on the caller's stream
THERE, BACK = 1, 2  # chunks of rows on their way to experts, and of partial sums on their way to tokens
PLAN = 0  # the operation that a plan's record names
PLANNED = 1024  # plans whose counts are kept at most, where nobody checks


@dataclass
class DeviceState(RouteState):
    """Adds ``local_rows`` int32 [M, T_max, K] (dedup): this rank's rows of every source's tokens, −1 elsewhere.

    Between plan and dispatch it holds the leased ``payload``, every rank's ``handles`` int64 [M], and in ``early`` the
    x and the ids whose rows already cross."""

    local_rows: Tensor | None = None
    handles: Tensor | None = None
    payload: Tensor | None = None
    early: tuple[Tensor, Tensor] | None = None
    topk_weight: Tensor | None = None

    @property
    def num_rows(self) -> None:
        return None

    def tensors(self) -> tuple[Any, ...]:
        return (*super().tensors(), self.local_rows)

    @classmethod
    def restore(cls, layer: str, tensors: tuple[Any, ...]) -> DeviceState:
        return cls(layer, RouteMap(*tensors[:6]), tensors[6])


class DeviceRowwiseDispatcher(Dispatcher[DeviceState]):
    """``dispatcher='rowwise'`` over a GPU heap.

    Buffers are made for ``config.max_tokens`` tokens a rank; where it is None, for the most that any rank passes to
    the first plan (which then waits for the device once). ``config.slots`` payload slots (default 4) serve the
    forwards in flight."""

    name = "rowwise"
    moves: Moves = PeerMoves()
    grad_slots = 3
    """Slots of gradient rows, form='route': one in use, one that a captured graph keeps, one to choose."""

    def __init__(self, *args: Any, heap: DeviceHeap, owns_heap: bool, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.heap, self.owns_heap = heap, owns_heap
        self.acc = accumulation_dtype(self.dtype)
        self.max_tokens = self.max_rows = 0
        self.flags = torch.zeros(1, dtype=torch.int32, device=self.device)  # what route maps could not raise
        self.captured: list[Tensor] = []  # what belongs to a captured graph
        self.can_overflow = self.config.capacity.policy == "dropless"
        self.planned: deque[Tensor] = deque(maxlen=PLANNED)  # routes int64 [M, E] asked for since the last check
        self.side = torch.cuda.Stream(self.device)
        self.readers: list[torch.cuda.Stream] = []
        self.launches, self.early = Launches.of(self.config.launch), self.config.launch.early
        if self.config.max_tokens is not None:
            self._make(self.config.max_tokens, 0)

    # Buffers

    def _make(self, max_tokens: int, max_rows: int) -> None:
        """Collective: the buffers for ``max_tokens`` tokens of a source and at least ``max_rows`` rows of an expert
        rank."""
        self.max_tokens = max_tokens
        bound = rows_bound(self.config.capacity, self.top_k, max_tokens, self.world, self.num_experts)
        self.max_rows = max(bound, max_rows)
        k, rows, wide = self.top_k, self.max_rows, self.hidden_size
        if self.config.form == "dedup":
            stage = (self.world * max_tokens, wide)
            self.payload_region = Region(
                Part("stage", stage, self.dtype),
                Part("local_rows", (self.world, max_tokens, k), torch.int32),
                Part("weights", (self.world, max_tokens, k), self.acc),
            )
            sums = Region(
                Part("rows", (self.world, max_tokens, wide), self.dtype),
                Part("scalars", (self.world, max_tokens, k), self.acc),
            )
            self.partial = Scratch(self.heap, sums, CHANNEL, "partial sums")
            self.grads = Scratch(self.heap, Region(Part("stage", stage, self.dtype)), CHANNEL, "gradient rows")
        else:
            self.payload_region = Region(
                Part("rows", (rows, wide), self.dtype),
                Part("weights", (rows,), self.acc),
                Part("routes", (rows,), torch.int64),
            )
            out = Region(Part("rows", (rows, wide), self.dtype), Part("scalars", (rows,), self.acc))
            self.outputs = Scratch(self.heap, out, CHANNEL, "expert outputs")
            grad = Region(Part("rows", (rows, wide), self.dtype))
            self.grad_pool = SlotPool(self.heap, grad.nbytes, self.grad_slots, "gradient rows")
        self.set_launch(resolve(self.config.launch, self.shape(max_tokens)))
        shape = {"top_k": self.top_k, "hidden_size": self.hidden_size, "dtype": self.dtype}
        self.moves = make_moves(self.config.transport, self.heap, form=self.config.form, max_tokens=max_tokens, **shape)
        self.slots = self.config.slots or DEFAULT_SLOTS
        self.payload = SlotPool(self.heap, self.payload_region.nbytes, self.slots + 1, "payload")
        handle, self.ahead = self._lease(self.payload, "")
        own = torch.full((1,), handle, dtype=torch.int64, device=self.device)
        self.handles = self.heap.exchange(own, channel=CHANNEL, phase=Phase("making buffers"))[:, 0]

    def shape(self, tokens: int) -> Shape:
        """What a table of launch settings is asked for."""
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else self.device.type
        return Shape(
            tokens, self.hidden_size, self.top_k, self.num_experts, self.world, self.config.form, str(self.dtype), name
        )

    def set_launch(self, launch: LaunchConfig) -> None:
        """Collective, between steps: use other chunk counts and launch widths from now on."""
        launch.validate()
        self.launches, self.early = Launches.of(launch), launch.early
        if self.config.form == "dedup":
            there, back = (self.max_tokens * nbytes for nbytes in self.row_bytes)
            there = launch.chunks or parts_of(there, PART_THERE, most=2)
            back = launch.back or launch.chunks or parts_of(back, PART_BACK, most=4)
            self.there = Chunks(self.heap, THERE, min(there, self.max_tokens), self.max_tokens)
            self.back = Chunks(self.heap, BACK, min(back, self.max_tokens), self.max_tokens)

    @property
    def row_bytes(self) -> tuple[int, int]:
        """Bytes of a row on its way to experts, and of one on its way back."""
        nbytes = self.hidden_size * self.dtype.itemsize
        return nbytes, nbytes

    def _agree(self, num_tokens: int) -> None:
        """Collective, once: size the buffers by the largest first batch."""
        most = torch.tensor([num_tokens], dtype=torch.int64, device=self.device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self.heap.group)
        self._make(max(1, int(most)), 0)

    def reads_on(self, stream: torch.cuda.Stream) -> None:
        """Tell that ``stream`` reads dispatched rows too (a weight gradient that is computed later, say): a slot is
        then advertised again only after what was enqueued on it. The caller's own stream need not be told."""
        self.readers.append(stream)

    def _lease(self, pool: SlotPool, layer: str) -> tuple[int, Tensor]:
        """A free slot: its handle and the tensor that owns it."""
        slot = pool.acquire()
        if slot is None:
            raise RuntimeError(
                f"all {self.slots} {pool.label} slots of EP rank {self.rank} are leased at layer {layer!r}:"
                f" slots={self.slots} must be at least the number of MoE layer calls whose backward has not run, plus"
                " the MoE layers of one checkpointed region (ep_plugin.dispatch.slots_for)"
            )
        for stream in self.readers:
            self._stream().wait_stream(stream)
        tensor = slot.tensor()
        self._keep(tensor)  # a graph's replay writes it again, whoever is alive then
        if self.config.diagnostic_fill != "none":
            tensor.fill_(0 if self.config.diagnostic_fill == "zero" else 0xFF)
        return slot.handle, tensor

    def _keep(self, *tensors: Tensor) -> None:
        if torch.cuda.is_current_stream_capturing():
            self.captured.extend(tensors)

    def _slots(self, pool: SlotPool, handles: Tensor, offset: int) -> Peers:
        """A part, ``offset`` bytes into the slot that every rank advertised."""
        return Peers(pool.base_ptrs, handles, max_handle=pool.last_handle, offset=offset)

    def _payload(self, handles: Tensor, name: str) -> Peers:
        return self._slots(self.payload, handles, self.payload_region[name].offset)

    def _sync(self, phase: Phase) -> None:
        """Everyone's writes before this are visible to everyone's kernels after it."""
        with span("wait"):
            self.heap.wait(self.heap.post(channel=CHANNEL, phase=phase), channel=CHANNEL, phase=phase)

    # Plan

    def plan(self, topk_idx: Tensor, *, layer: str = "", x: Tensor | None = None) -> DeviceState:
        with self.guard("plan", layer):
            self.heap.check()
            topk_idx = self.check_routes(topk_idx)
            num_tokens = topk_idx.shape[0]
            if not self.max_tokens:
                self._agree(num_tokens)
            if num_tokens > self.max_tokens:
                raise ValueError(
                    f"{num_tokens} tokens exceed max_tokens={self.max_tokens}, for which the buffers were made; set"
                    " max_tokens to the most tokens a rank passes to one layer call"
                )
            phase = Phase("plan", layer)
            payload, handles = self.ahead, self.handles
            self._keep(payload, handles)
            early = None
            if x is not None and self.early and self.config.form == "dedup":
                self.check_x(num_tokens, x)
                early = (x.detach().contiguous(), topk_idx)
                self._start(early, handles, layer)
            handle, self.ahead = self._lease(self.payload, layer)
            m = route_map.DeviceMap.empty(num_tokens, self.top_k, self.num_experts, self.world, self.device, self.flags)
            record = torch.empty(route_map.HEADER + self.num_experts, dtype=torch.int64, device=self.device)
            with span("count"):
                route_map.count(topk_idx, m.block_counts, m.flags)
                header = (PLAN, zlib.crc32(layer.encode()), handle, num_tokens)
                route_map.offsets_and_record(m.block_counts, record, header)
            with span("exchange"):
                records = self.heap.exchange(record, channel=CHANNEL, phase=phase)
            self.handles = records[:, route_map.HANDLE]
            with span("route map"):
                capacity, bound = self.config.capacity, self.max_rows
                route_map.accept(records, m, rank=self.rank, capacity=capacity, top_k=self.top_k, bound=bound)
                route_map.build(topk_idx, m, rank=self.rank, bound=bound)
            self.planned.append(m.counts)
            found = RouteMap(m.dest_rank, m.dest_row, m.counts, m.accepted, m.tokens, m.offsets)
            return DeviceState(layer, found, handles=handles, payload=payload, early=early)

    def _start(self, early: tuple[Tensor, Tensor], handles: Tensor, layer: str) -> None:
        """Let the rows of x cross to the expert ranks that ``topk_idx`` names, dropped routes included."""
        x, topk_idx = early
        stage = self._payload(handles, "stage")
        self.there.begin()
        with self._across():
            self._put_unique(x, stage, topk_idx, self.num_local_experts)

    def _put_unique(self, x: Tensor, stage: Peers, routes: Tensor, experts_per_rank: int = 1) -> None:
        """Every token once to each other rank that a route names, as a rank or as an expert's id."""
        self.moves.put_unique(
            x,
            stage,
            routes,
            self.rank * self.max_tokens,
            experts_per_rank=experts_per_rank,
            skip_rank=self.rank,
            signal=self.there.signal,
            launch=self.launches.unique,
        )

    @contextmanager
    def _across(self) -> Iterator[None]:
        """The side stream, behind what the caller's stream has done so far. Rows must start to cross before local work
        that is enqueued next: once that is spread over all multiprocessors, programs that need one whole wait for its
        end. Where there is such work, nothing is waited for in here, and little things come first on the caller's
        stream after it: without them local work starts before the rows do (dispatch 0.57 ms instead of 0.54)."""
        stream = self._stream()
        self.side.wait_stream(stream)
        torch.cuda.set_stream(self.side)  # the context manager takes the host 18 µs
        try:
            with span("cross"):
                yield
        finally:
            torch.cuda.set_stream(stream)

    def _join(self) -> None:
        """The caller's stream goes on when what crossed has been read."""
        self._stream().wait_stream(self.side)

    def _stream(self) -> torch.cuda.Stream:
        """The caller's."""
        return torch.cuda.current_stream(self.heap.device.index)  # a device's number is looked up faster than a device

    # Table 8, dispatch forward: PUT

    def send(self, state: DeviceState, x: Tensor, topk_weight: Tensor, arrived: Arrived) -> tuple[Tensor, Tensor]:
        if state.payload is None or state.handles is None:
            raise RuntimeError(f"dispatch of layer {state.layer!r} was called twice for one plan")
        payload, handles, early = state.payload, state.handles, state.early
        state.payload = state.handles = state.early = None
        weights = topk_weight.to(self.acc).contiguous()
        state.topk_weight = weights if self.config.weight_at == "output" else None
        if self.config.form == "route":
            return self._send_routes(state, x.contiguous(), weights, payload, handles, arrived)

        phase, dest, region = Phase("dispatch", state.layer), state.map, self.payload_region
        if early is not None and (early[0].data_ptr() != x.data_ptr() or early[0].shape != x.shape):
            raise ValueError(f"dispatch of layer {state.layer!r} was given another x than its plan")
        first, me, others = self.rank * self.max_tokens, self.rank, self.world - 1
        with span("put"):
            places, by_token = self._payload(handles, "local_rows"), self._payload(handles, "weights")
            self.moves.put_meta(dest.dest_rank, dest.dest_row, weights, places, by_token, first)
        rows = x.new_empty((self.max_rows, self.hidden_size))
        row_weights = weights.new_empty(self.max_rows)
        routes = torch.empty(self.max_rows, dtype=torch.int64, device=x.device)
        x = x.contiguous() if early is None else early[0]
        told = None  # the rows' own signals tell of the maps too, unless they left before them
        here = region.view(payload, "local_rows")
        local_rows = torch.empty_like(here)  # small; out of the slot, so as not to pin it
        if early is None:
            with self._across():
                self._put_unique(x, self._payload(handles, "stage"), dest.dest_rank)
            self.there.begin()
        else:
            told = self.heap.post(channel=CHANNEL, phase=phase)
        stage, there_weights = region.view(payload, "stage"), region.view(payload, "weights")
        spread = partial(
            fan_out,
            stage,
            tokens=dest.tokens,
            rows=rows,
            weights=there_weights,
            weights_out=row_weights,
            route_of_row=routes,
            launch=self.launches.fan_out,
        )
        with span("fan-out"):
            fill_tail(routes, dest.offsets[-1:], -1)
            fill_tail(row_weights, dest.offsets[-1:])
            spread(local_rows=here, x_own=x, own_rank=me, first_source=me, sources=1)
            if told is not None:
                self.heap.wait(told, channel=CHANNEL, phase=phase)
            for begin, end in self.there.arrived(phase):
                if begin == 0:
                    local_rows.copy_(here)
                spread(local_rows=local_rows, first_source=me + 1, sources=others, begin=begin, end=end)
        self._join()
        state.local_rows = local_rows
        arrived.route_of_row = routes
        bound = self.max_rows

        def again(saved: tuple[Tensor, ...], num_rows: int | None) -> Tensor:
            out = saved[0].new_empty((bound, saved[0].shape[1]))
            fan_out(saved[0], saved[1], saved[2], out, x_own=saved[3], own_rank=me)
            return out

        arrived.rebuild = Rebuild((stage, state.local_rows, dest.tokens, x), again)
        return rows, row_weights

    def _send_routes(
        self, state: DeviceState, x: Tensor, weights: Tensor, payload: Tensor, handles: Tensor, arrived: Arrived
    ) -> tuple[Tensor, Tensor]:
        """One row per route, into the expert row itself."""
        dest, bound = state.map, self.max_rows
        with span("put"):
            self.moves.put_rows(
                x,
                self._payload(handles, "rows"),
                dest.dest_rank,
                dest.dest_row,
                num_rows=bound,
                launch=self.launches.put,
            )
            to, first = (dest.dest_rank, dest.dest_row), self.rank * self.max_tokens * self.top_k
            self.moves.put_values(weights, self._payload(handles, "weights"), *to, num_rows=bound)
            self.moves.put_values(None, self._payload(handles, "routes"), *to, num_rows=bound, first=first)
        self._sync(Phase("dispatch", state.layer))
        region = self.payload_region
        routes, row_weights = region.view(payload, "routes").clone(), region.view(payload, "weights").clone()
        fill_tail(routes, dest.offsets[-1:], -1)
        fill_tail(row_weights, dest.offsets[-1:])
        arrived.route_of_row = routes
        return region.view(payload, "rows"), row_weights

    # Table 8, combine forward: GET, or PUT of partials

    def give_back(
        self, state: DeviceState, y: Tensor, weights: Tensor | None, keep: bool
    ) -> tuple[Tensor, Tensor | None]:
        y = y.contiguous()
        at_output = weights is not None and self.config.weight_at == "output"
        phase = Phase("combine", state.layer)
        if self.config.form == "dedup":
            out, _ = self._reduce_put(phase, state, y, None, weights)
            assert out is not None
            return out, None
        by_route = state.topk_weight if at_output else weights
        state.topk_weight = None
        dest = state.map
        self._publish(phase, state, y, None)
        out = y.new_empty((state.num_tokens, self.hidden_size))
        kept = y.new_empty((state.num_tokens, self.top_k, self.hidden_size)) if keep else None
        with span("get and reduce"):
            w = None if by_route is None else by_route.to(self.acc).contiguous()
            where = self.outputs.peers("rows")
            self.moves.get_reduce(where, dest.dest_rank, dest.dest_row, w, out, num_rows=self.max_rows, gathered=kept)
        self.outputs.done(phase)
        return out, kept

    # Table 8, combine backward: PUT

    def send_grad(self, state: DeviceState, grad: Tensor, scale: Tensor | None) -> Tensor:
        dest, phase = state.map, Phase("combine backward", state.layer)
        if self.config.form == "route":
            handle, slot = self._lease(self.grad_pool, state.layer)
            with span("exchange"):
                own = torch.full((1,), handle, dtype=torch.int64, device=grad.device)
                handles = self.heap.exchange(own, channel=CHANNEL, phase=phase)
            with span("put"):
                where = self._slots(self.grad_pool, handles[:, 0], 0)
                scale = None if scale is None else scale.contiguous()
                self.moves.put_rows(
                    grad, where, dest.dest_rank, dest.dest_row, scale, num_rows=self.max_rows, launch=self.launches.put
                )
            self._sync(phase)
            nbytes = self.max_rows * self.hidden_size * self.dtype.itemsize
            return slot[:nbytes].view(self.dtype).view(self.max_rows, self.hidden_size)
        assert state.local_rows is not None and scale is None
        rows = grad.new_empty((self.max_rows, self.hidden_size))
        self.grads.claim(phase)
        with self._across():
            self._put_unique(grad, self.grads.peers("stage"), dest.dest_rank)
        self.there.begin()
        stage, me, launch = self.grads.local("stage"), self.rank, self.launches.fan_out
        with span("fan-out"):
            fan_out(
                stage, state.local_rows, dest.tokens, rows,
                x_own=grad, own_rank=me, first_source=me, sources=1, launch=launch,
            )  # fmt: skip
            for begin, end in self.there.arrived(phase):
                fan_out(
                    stage, state.local_rows, dest.tokens, rows,
                    first_source=me + 1, sources=self.world - 1, begin=begin, end=end, launch=launch,
                )  # fmt: skip
        self._join()
        self.grads.done(phase)
        return rows

    # Table 8, dispatch backward: GET, or PUT of partials

    def return_grad(
        self, state: DeviceState, grad_rows: Tensor | None, grad_weights: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        phase, dest = Phase("dispatch backward", state.layer), state.map
        grad_rows = None if grad_rows is None else grad_rows.contiguous()
        grad_weights = None if grad_weights is None else grad_weights.contiguous()
        if self.config.form == "dedup":
            return self._reduce_put(phase, state, grad_rows, grad_weights, None)
        self._publish(phase, state, grad_rows, grad_weights)
        grad_x = grad_w = None
        with span("get and reduce"):
            if grad_rows is not None:
                grad_x = grad_rows.new_empty((state.num_tokens, self.hidden_size))
                where = self.outputs.peers("rows")
                self.moves.get_reduce(where, dest.dest_rank, dest.dest_row, None, grad_x, num_rows=self.max_rows)
            if grad_weights is not None:
                grad_w = grad_weights.new_empty((state.num_tokens, self.top_k))
                where = self.outputs.peers("scalars")
                self.moves.get_values(where, dest.dest_rank, dest.dest_row, grad_w, num_rows=self.max_rows)
        self.outputs.done(phase)
        return grad_x, grad_w

    def _publish(self, phase: Phase, state: DeviceState, rows: Tensor | None, scalars: Tensor | None) -> None:
        """Put the valid rows where the peers can GET them, and say so."""
        self.outputs.claim(phase)
        with span("stage"):
            if rows is not None:
                copy_prefix(rows, self.outputs.local("rows"), state.map.offsets[-1:])
            if scalars is not None:
                self.outputs.local("scalars")[: scalars.shape[0]].copy_(scalars)
        self._sync(phase)

    def _reduce_put(
        self, phase: Phase, state: DeviceState, rows: Tensor | None, scalars: Tensor | None, weights: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Sum the rows of each token here, write the partials (and one scalar per route) at its source, sum those
        there.

        The partial of the own rank never leaves registers: the final sum makes it from the expert rows.
        """
        dest, local_rows, me = state.map, state.local_rows, self.rank
        assert local_rows is not None
        weights = None if weights is None else weights.contiguous()
        out = None if rows is None else rows.new_empty((state.num_tokens, self.hidden_size))
        back = None if scalars is None else scalars.new_empty((state.num_tokens, self.top_k))
        if rows is not None:
            self.back.begin()
        with self._across():
            self.partial.claim(phase)
            if scalars is not None:
                self.moves.put_scalars(scalars, local_rows, dest.tokens, self.partial.peers("scalars"), me)
            if rows is not None:
                self.moves.pre_reduce_put(
                    rows, local_rows, dest.tokens, self.partial.peers("rows"), me, weights,
                    first_source=me + 1, sources=self.world - 1, signal=self.back.signal, launch=self.launches.reduce,
                )  # fmt: skip
        if out is None:  # scalars alone cross with one signal
            self._join()
            self._sync(phase)
        else:
            with span("sum"):
                for begin, end in self.back.arrived(phase):
                    sum_partials(
                        self.partial.local("rows"), dest.dest_rank, out,
                        y=rows, dest_row=dest.dest_row, weights=weights, own_rank=me,
                        begin=min(begin, out.shape[0]), end=min(end, out.shape[0]), launch=self.launches.sum,
                    )  # fmt: skip
        if back is not None:
            take_scalars(self.partial.local("scalars"), dest.dest_rank, back)
        self._join()
        self.partial.done(phase)
        return out, back

    def fail(self, phase: str, layer: str, error: BaseException) -> None:
        if not isinstance(error, HeapAborted | HeapTimeout | HeapClosed):
            self.heap.abort(Phase(phase, layer), f"{type(error).__name__}: {error}")

    def check(self) -> None:
        """Raise what the kernels could not: a late or stopped peer (rank, layer, phase), a bad id, an
        overflow.

        Call it before the optimizer step. It waits for the work enqueued so far.
        """
        self._stream().synchronize()
        self.heap.check()
        flags = int(self.flags)
        if flags & route_map.BAD_ID:
            raise ValueError(
                f"topk_idx held an expert id outside [-1, {self.num_experts}) in a step since the last check"
            )
        if flags & route_map.DISAGREE:
            raise RuntimeError(
                "EP ranks disagree: they planned different layers at the same time. All ranks of an EP group must run"
                " the same layers in the same order"
            )
        if flags & route_map.OVERFLOW:
            rows = self._most_rows()
            raise RouteOverflow(
                f"{rows} rows arrive at one expert rank, more than its buffers hold ({self.max_rows}, capacity.factor="
                f"{self.config.capacity.factor}): the routes past them were skipped on every rank. Discard this step,"
                f" call regrow({rows}) on every rank and run it again, or raise capacity.factor",
                rows,
            )
        self.planned.clear()

    def _most_rows(self) -> int:
        """The most rows that the plans since the last check sent to an expert rank; twice what fits where the plan that
        overflowed is not among them (a graph's replay)."""
        by_rank = [counts.view(self.world, self.world, -1).sum((0, 2)) for counts in self.planned]
        most = max((int(rows.max()) for rows in by_rank), default=0)
        return most if most > self.max_rows else 2 * self.max_rows

    def regrow(self, rows: int) -> None:
        """Collective: make the buffers again for at least ``rows`` rows of an expert rank. ``RuntimeError`` where a
        tensor of a step still lives in them."""
        torch.cuda.synchronize(self.device)
        if in_use := self._in_use():
            gc.collect()
            in_use = self._in_use()
        if in_use:
            raise RuntimeError(
                f"regrow: {in_use} payload slots of EP rank {self.rank} are still held by tensors of a discarded step:"
                " drop its outputs and losses first (and any CUDA graph of it)"
            )
        self.flags.zero_()
        self.planned.clear()
        self._free()
        self._make(self.max_tokens, rows)

    def _in_use(self) -> int:
        """Payload slots that tensors of steps hold; one more is always leased ahead."""
        return self.payload.stats().in_use - 1

    def metrics(self, state: DeviceState) -> dict[str, Tensor]:
        return drop_metrics(state.map, bound=self.max_rows)

    def stats(self) -> dict[str, Any]:
        """payload slots: total, in use, peak."""
        if not self.max_tokens:
            return {}
        payload = self.payload.stats()
        return {"slots": self.slots, "slots_in_use": self._in_use(), "slots_peak": payload.peak - 1}

    def close(self) -> None:
        self.captured.clear()
        if self.owns_heap:
            self.heap.close()
        elif self.max_tokens:
            self._free()
        self.max_tokens = 0

    def _free(self) -> None:
        """Collective: give the buffers back to the heap."""
        del self.ahead, self.handles
        self.moves.free()
        self.payload.close()
        if self.config.form == "dedup":
            self.heap.free(self.partial.buffer)
            self.heap.free(self.grads.buffer)
        else:
            self.heap.free(self.outputs.buffer)
            self.grad_pool.close()
