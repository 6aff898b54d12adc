"""``dispatcher='deepep'``: expert rows moved by DeepEP v2, with our routes, capacity and gradients.

DeepEP counts, moves and lays out rows by itself. What is done here: repeated experts become one route, capacity is
applied to counts that the ranks exchange (which also gives the row ranges before a row has moved), and every movement
has its gradient: the backward of a dispatch is a combine through the same handle, and the other way round.

Rows of an expert come in an order that differs from step to step. The handle, which knows it, is saved as tensors, so a
recomputed dispatch replaces all that depends on its order; recompute either the whole step or only the experts.

Legend: T local tokens, K routes per token, E experts, E_l experts of this rank, M ranks, D hidden size, R rows
received, RB >= R rows that their buffers hold, B the tokens per rank that DeepEP's kernels are compiled for.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..config import DeepEPConfig, EPConfig
from ..heap import HeapAborted, HeapClosed, HeapTimeout, Phase
from ..kernels import deepep_routes as reference
from ..routing import RouteMap, build_route_map, count_routes, drop_metrics
from ..watch import GroupWatch
from .base import Arrived, Dispatcher, RouteState, span
from .deepep_buffer import BufferShape, DeepEPBuffer, Handle, Payload, bucket_of, no_network, worst_case_rows
from .deepep_checks import require_deepep

if TYPE_CHECKING:
    from ..mxfp8.dispatchers import Precision

HEADER = 4  # words of an exchanged record before the counts: operation, layer, unused, T (route_map_triton)


@dataclass
class DeepEPState(RouteState):
    """``map.dest_row`` is empty: only DeepEP knows rows. ``ids`` int64 [T, K]: the routes as DeepEP gets them;
    ``first`` int32 [T, K]: each route's first to the same expert; ``handle``: of the dispatch, None before it;
    ``exact``: the host knows how many rows arrived."""

    ids: Tensor
    first: Tensor
    exact: bool
    handle: Handle | None = None

    @property
    def num_rows(self) -> int | None:
        if not self.exact or self.handle is None:
            return None
        return int(self.handle.numbers[2])

    def tensors(self) -> tuple[Any, ...]:
        handle = self.handle
        assert handle is not None  # autograd saves what a dispatch has made
        return (*super().tensors(), self.first, torch.tensor(self.exact), handle.numbers, *handle.tensors)

    @classmethod
    def restore(cls, layer: str, tensors: tuple[Any, ...]) -> DeepEPState:
        first, exact, numbers, *rest = tensors[6:]
        handle = Handle(tuple(rest), numbers)
        return cls(layer, RouteMap(*tensors[:6]), handle.topk_idx, first, bool(exact), handle)


class DeepEPDispatcher(Dispatcher[DeepEPState]):
    """``dispatcher='deepep'`` over ``group``, with ``library``, the module ``deep_ep``.

    Its buffer is made for ``config.max_tokens`` tokens a rank. Where that is None, ``agree`` sizes it: the first plan
    calls it, and it may be called again, by all ranks, before a forward pass of another size. ``hybrid``: rows cross
    nodes once and are spread there."""

    name = "deepep"

    def __init__(
        self, *args: Any, group: dist.ProcessGroup, library: ModuleType | Any, hybrid: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.group, self.library, self.hybrid = group, library, hybrid
        self.watch = GroupWatch(group, self.config.timeout_s)
        self.bucket = 0
        self.buffer: DeepEPBuffer | None = None
        self.broken = False
        self.flags = torch.zeros(1, dtype=torch.int32, device=self.device)  # what kernels could not raise
        if self.config.max_tokens is not None:
            self._make(self.config.max_tokens)

    # Buffers

    def _make(self, bucket: int) -> None:
        """Collective: a buffer for ``bucket`` tokens a rank, its kernels compiled."""
        old, self.buffer = self.buffer, None
        if old is not None:
            old.close(self.watch, broken=self.broken)
        shape = BufferShape(self.num_experts, self.top_k, self.hidden_size, bucket)
        self.buffer = DeepEPBuffer(
            self.library, self.group, shape, self.config.deepep,
            hybrid=self.hybrid, timeout_s=self.config.timeout_s, device=self.device,
        )  # fmt: skip
        self.bucket = bucket
        self.buffer.try_out(self._sample())

    def _sample(self) -> Payload | None:
        """One token as ``_send`` gives it to DeepEP, where that is not a plain row."""
        return None

    def agree(self, num_tokens: int) -> int:
        """Collective: take batches of up to the largest ``num_tokens`` of all ranks from now on; gives B, that number
        rounded up to a power of two. The buffer grows where it must, and never shrinks.

        With ``config.max_tokens`` set there is nothing to agree on, and B is that."""
        if self.config.max_tokens is not None:
            return self.bucket
        bucket = bucket_of(max(self.watch.gather(num_tokens, Phase("agree", "tokens of a rank"))))
        if self.buffer is None or bucket > self.buffer.shape.bucket:
            self._make(bucket)
        self.bucket = bucket
        return bucket

    def expect(self, num_tokens: int) -> None:
        # Never fewer than before: a recomputation may still come with the tokens of an earlier forward pass.
        self.agree(max(num_tokens, self.bucket))

    def set_deepep(self, config: DeepEPConfig) -> None:
        """Collective, between steps: other ``sms`` and ``qps`` from now on. What else ``config`` says is not looked
        at; the handles of earlier steps are void where rows cross nodes."""
        config.validate()
        if self.buffer is not None:
            self.buffer.config = replace(self.buffer.config, sms=config.sms, qps=config.qps)

    @property
    def max_rows(self) -> int:
        """RB where the host does not wait for the counts."""
        return worst_case_rows(
            self.bucket, world=self.world, top_k=self.top_k, num_local_experts=self.num_local_experts
        )

    def _ready(self, phase: Phase) -> DeepEPBuffer:
        self.watch.check_stopped(phase)
        if self.buffer is None:
            raise HeapClosed(f"the dispatcher was used after close(), in {phase}")
        return self.buffer

    def _enqueued(self, phase: Phase) -> None:
        """What ``check`` waits for, so that a peer that does not come is named before a kernel traps."""
        if self.device.type == "cuda" and not self._capturing():
            self.watch.enqueued(phase)

    def _capturing(self) -> bool:
        return self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    # Plan

    def plan(self, topk_idx: Tensor, *, layer: str = "", x: Tensor | None = None) -> DeepEPState:
        with self.guard("plan", layer):
            topk_idx = self.check_routes(topk_idx)
            num_tokens = topk_idx.shape[0]
            if not self.bucket:
                self.agree(num_tokens)
            phase = Phase("plan", layer)
            self._ready(phase)
            if self.config.deepep.host_sync and self._capturing():
                raise RuntimeError(
                    "deepep.host_sync=true waits for row counts on the host, which a CUDA graph cannot; capture with"
                    " deepep.host_sync=false"
                )
            if num_tokens > self.bucket:
                raise ValueError(
                    f"{num_tokens} tokens exceed the {self.bucket} that the buffer is made for; set max_tokens to the"
                    " most tokens a rank passes to one layer call, or let all ranks call agree(num_tokens) before a"
                    " forward pass"
                )
            with span("count"):
                ids, first = self._kernels().distinct_experts(topk_idx, self.num_experts, self.flags)
            found = self._map(ids, layer)
            self._enqueued(phase)
            if self.config.capacity.policy != "dropless":
                ids = torch.where(found.dest_rank >= 0, ids, -1)
            return DeepEPState(layer, found, ids, first, self.config.deepep.host_sync)

    def _kernels(self) -> Any:
        """The kernels, or on CPU their references."""
        if self.device.type == "cpu":
            return _References
        from ..kernels import deepep_routes_triton

        return deepep_routes_triton

    def _exchange(self, record: Tensor) -> Tensor:
        records = record.new_empty((self.world, record.numel()))
        with span("exchange"):
            # Another name for the same from torch 2.13 on.
            gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
            gather(records.view(-1), record, group=self.group)
        return records

    def _map(self, ids: Tensor, layer: str) -> RouteMap:
        """Counts of all ranks, what capacity accepts of them, and the ranges of this rank's rows; ``ids`` int64 [T, K]
        without repeats."""
        num_tokens, named = ids.shape[0], zlib.crc32(layer.encode())
        capacity = self.config.capacity
        if self.device.type == "cpu":
            own = torch.cat([torch.tensor([0, named, 0, num_tokens]), count_routes(ids, self.num_experts)])
            records = self._exchange(own)
            counts, tokens = records[:, HEADER:].contiguous(), records[:, HEADER - 1].contiguous()
            found = build_route_map(ids, counts, tokens, rank=self.rank, capacity=capacity)
            return _without_rows(found)
        from ..kernels import route_map_triton as route_map

        m = route_map.DeviceMap.empty(num_tokens, self.top_k, self.num_experts, self.world, self.device, self.flags)
        record = torch.empty(HEADER + self.num_experts, dtype=torch.int64, device=self.device)
        with span("count"):
            route_map.count(ids, m.block_counts, m.flags)
            route_map.offsets_and_record(m.block_counts, record, (0, named, 0, num_tokens))
        records = self._exchange(record)
        with span("route map"):
            bound = self.max_rows
            route_map.accept(records, m, rank=self.rank, capacity=capacity, top_k=self.top_k, bound=bound)
            route_map.build(ids, m, rank=self.rank, bound=bound)
        return _without_rows(RouteMap(m.dest_rank, m.dest_row, m.counts, m.accepted, m.tokens, m.offsets))

    # The four movements

    def send(self, state: DeepEPState, x: Tensor, topk_weight: Tensor, arrived: Arrived) -> tuple[Tensor, Tensor]:
        rows, weights = self._send(state, x.contiguous(), topk_weight, arrived)
        assert isinstance(rows, Tensor)
        return rows, weights

    def _send(self, state: DeepEPState, x: Payload, topk_weight: Tensor, arrived: Arrived) -> tuple[Payload, Tensor]:
        if state.handle is not None:
            raise RuntimeError(f"dispatch of layer {state.layer!r} was called twice for one plan")
        kernels, offsets, phase = self._kernels(), state.map.offsets, Phase("dispatch", state.layer)
        with span("weights"):
            merged = kernels.merge_weights(topk_weight, state.first)
        with span("deepep dispatch"):
            rows, weights, state.handle = self._ready(phase).dispatch(x, state.ids, merged, self.bucket)
            self._enqueued(phase)
        with span("rows"):
            handle = state.handle
            routes = torch.empty(weights.shape[0], dtype=torch.int64, device=weights.device)
            kernels.arrived(
                handle.recv_src_metadata, handle.psum_num_recv_tokens_per_scaleup_rank[-1:],
                handle.psum_num_recv_tokens_per_expert, offsets, routes, weights, self.flags,
            )  # fmt: skip
            if self.config.diagnostic_fill != "none" and isinstance(rows, Tensor):
                tail = torch.arange(rows.shape[0], device=rows.device) >= offsets[-1]
                rows.masked_fill_(tail.unsqueeze(1), 0.0 if self.config.diagnostic_fill == "zero" else torch.nan)
        arrived.route_of_row = routes
        return rows, weights

    def give_back(
        self, state: DeepEPState, y: Tensor, weights: Tensor | None, keep: bool
    ) -> tuple[Tensor, Tensor | None]:
        y, phase = y.contiguous(), Phase("combine", state.layer)
        if weights is not None:
            with span("weights"):
                y = self._kernels().scale_rows(y, weights.contiguous(), state.map.offsets[-1:])
        with span("deepep combine"):
            out, _ = self._ready(phase).combine(y, self._handle(state))
            self._enqueued(phase)
        return out, None

    def send_grad(self, state: DeepEPState, grad: Tensor, scale: Tensor | None) -> Tensor:
        assert scale is None  # weight_at='source' is refused
        phase = Phase("combine backward", state.layer)
        with span("deepep dispatch"):
            rows = self._ready(phase).dispatch_again(grad.contiguous(), self._handle(state))
            self._enqueued(phase)
        return rows

    def return_grad(
        self, state: DeepEPState, grad_rows: Tensor | None, grad_weights: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        handle, phase = self._handle(state), Phase("dispatch backward", state.layer)
        if grad_rows is None:  # only the scalars travel, but the call that carries them takes rows
            assert grad_weights is not None
            grad_rows = grad_weights.new_zeros((grad_weights.shape[0], self.hidden_size), dtype=self.dtype)
        scalars = None if grad_weights is None else grad_weights.to(torch.float32).contiguous()
        with span("deepep combine"):
            grad_x, by_route = self._ready(phase).combine(grad_rows.contiguous(), handle, scalars)
            self._enqueued(phase)
        if by_route is None:
            return grad_x, None
        return grad_x, self._kernels().spread_gradients(by_route, state.first)

    def _handle(self, state: DeepEPState) -> Handle:
        if state.handle is None:
            raise RuntimeError(f"layer {state.layer!r} was planned but not dispatched")
        return state.handle

    # What could not be raised, and the end

    def fail(self, phase: str, layer: str, error: BaseException) -> None:
        """Peers whose kernels wait for this rank learn it in ``check``, or when those trap."""
        self.broken = True
        if not isinstance(error, HeapAborted | HeapTimeout | HeapClosed):
            self.watch.stop(Phase(phase, layer), f"{type(error).__name__}: {error}")

    def check(self) -> None:
        """Raise what kernels could only record: a bad id, ranks that planned different layers, rows that are not those
        planned; and name a peer that stopped or does not come. Waits for the work enqueued so far."""
        self.watch.settle()
        flags = int(self.flags)
        if flags:
            self.flags.zero_()
        if flags & reference.BAD_ID:
            raise ValueError(
                f"topk_idx held an expert id outside [-1, {self.num_experts}) in a step since the last check"
            )
        if flags & 4:  # route_map_triton.DISAGREE
            raise RuntimeError(
                "EP ranks disagree: they planned different layers at the same time. All ranks of an EP group must run"
                " the same layers in the same order"
            )
        if flags & reference.REPEATED and self.config.weight_at == "input":
            raise ValueError(
                "a token named an expert twice: DeepEP takes distinct experts, and under weight_at='input' the two"
                " routes cannot be merged into one; use weight_at='hidden' or 'output', or another dispatcher"
            )
        if flags & reference.MISPLACED:
            raise RuntimeError(
                "DeepEP received other numbers of rows than were planned; the results since the last check are wrong"
            )

    def metrics(self, state: DeepEPState) -> dict[str, Tensor]:
        return drop_metrics(state.map, bound=None if state.exact else self.max_rows)

    def stats(self) -> dict[str, Any]:
        """bucket: tokens per rank that kernels are compiled for; buffer_bytes: symmetric memory of the buffer."""
        return {"bucket": self.bucket, "buffer_bytes": 0 if self.buffer is None else self.buffer.num_bytes}

    def close(self) -> None:
        buffer, self.buffer = self.buffer, None
        if buffer is not None:
            buffer.close(self.watch, broken=self.broken)
            self.watch.leave()


def build_deepep(
    config: EPConfig,
    group: dist.ProcessGroup | None,
    precision: Precision | None,
    wrap: Callable[[type[DeepEPDispatcher]], type[DeepEPDispatcher]],
    **shape: Any,
) -> DeepEPDispatcher:
    """Collective over ``group`` (None: WORLD): DeepEP's preflight, import and buffer. ``precision``: of MXFP8 rows,
    which has a ``wrap`` of its own; without, ``wrap`` makes the dispatcher's class from the ordinary one.

    Raises ``ValueError`` on all ranks where a check fails on any."""
    group = dist.group.WORLD if group is None else group
    assert group is not None  # torch.distributed is initialised
    found = require_deepep(config, group, shape["device"], shape)
    no_network(found.nodes)
    hybrid = found.nodes > 1 if config.deepep.hybrid is None else config.deepep.hybrid
    own = dict(group=group, library=found.library, hybrid=hybrid, **shape)
    return wrap(DeepEPDispatcher)(config, **own) if precision is None else precision.deepep(**own)


def _without_rows(found: RouteMap) -> RouteMap:
    return RouteMap(found.dest_rank, found.dest_row[:0], found.counts, found.accepted, found.tokens, found.offsets)


class _References:
    """The kernels' names on CPU."""

    distinct_experts = staticmethod(reference.distinct_experts_torch)
    merge_weights = staticmethod(reference.merge_weights_torch)
    spread_gradients = staticmethod(reference.spread_gradients_torch)
    arrived = staticmethod(reference.arrived_torch)
    scale_rows = staticmethod(reference.scale_rows_torch)
