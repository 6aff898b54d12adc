"""Block all-to-all (report, section 5.3): pack by peer, exchange one block per peer, reorder by expert; and back.

It is the synchronized path: block lengths become host lists before the exchange. Works with gloo and NCCL.

Legend: T local tokens, K routes per token, M ranks, E experts, E_l experts of a rank, N rows sent (accepted routes), R
rows received."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..heap import HeapAborted, HeapClosed, HeapTimeout, Phase
from ..kernels.fan_out import fan_out_torch
from ..kernels.reduce import accumulation_dtype, has_kernel, sum_routes
from ..routing import MAX_ROWS, RouteMap, build_route_map, count_routes
from ..watch import GroupWatch, before_host_looks
from .base import Arrived, Dispatcher, RouteState, span
from .stamps import OPERATIONS, STAMP_WORDS, check_stamps, stamp

# Words of the record that ranks exchange: T is the last of those before the counts (of which kernels leave three to
# others); what the rank does, and a checksum of what it did, come after them.
HEAD, SAID = 4, STAMP_WORDS + 1


@dataclass
class BlockState(RouteState):
    """Adds what packing needs.

    ``send_routes`` int64 [N]: the route t·K+k of each sent row, in (expert, t·K+k) order; ``sent_row`` int32 [T, K]:
    the sent row of each route, −1 for none; ``recv_order`` int32 [R]: the received row (source, expert) of each expert
    row (expert, source), and its inverse ``recv_row`` int32 [R], None where the orders agree; ``sizes`` int64 [2, M] on
    the host: rows sent to and received from every rank."""

    send_routes: Tensor
    sent_row: Tensor
    recv_order: Tensor | None
    recv_row: Tensor | None
    sizes: Tensor

    @property
    def num_rows(self) -> int:
        return int(self.sizes[1].sum())

    def tensors(self) -> tuple[Any, ...]:
        return (*super().tensors(), self.send_routes, self.sent_row, self.recv_order, self.recv_row, self.sizes)

    @classmethod
    def restore(cls, layer: str, tensors: tuple[Any, ...]) -> BlockState:
        return cls(layer, RouteMap(*tensors[:6]), *tensors[6:])


class BlockDispatcher(Dispatcher[BlockState]):
    """``dispatcher='block'`` over ``group`` (None: WORLD); made collectively.

    On CPU every movement starts with an exchange of stamps and is waited for. On GPUs the stamps travel with the plan,
    where the host waits anyway, and ``check`` waits for what was enqueued since. Kernels make the plan there, where
    Triton is and they serve the group."""

    name = "block"

    def __init__(self, *args: Any, group: dist.ProcessGroup | None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.group = group
        self.watch = GroupWatch(group, self.config.timeout_s)
        self.bytes_sent = 0
        self.exchanges = 0  # movements so far, alike on all ranks, and a checksum of what they were
        self.history = 0
        self._phase = Phase("exchange")
        self._host: Tensor | None = None  # what a plan by kernels tells the host

    @contextmanager
    def guard(self, phase: str, layer: str) -> Iterator[None]:
        before, self._phase = self._phase, Phase(phase, layer)
        try:
            with super().guard(phase, layer):
                if phase in OPERATIONS:
                    self.exchanges += 1
                    if phase != "plan" and self.device.type == "cpu":
                        self._meet(phase, layer, torch.zeros(HEAD + self.num_experts, dtype=torch.int64))
                    self.history = zlib.crc32(f"{phase}\0{layer}\0".encode(), self.history)
                yield
        finally:
            self._phase = before

    def fail(self, phase: str, layer: str, error: BaseException) -> None:
        if not isinstance(error, HeapAborted | HeapTimeout | HeapClosed):
            self.watch.stop(Phase(phase, layer), f"{type(error).__name__}: {error}")

    def check(self) -> None:
        self.watch.settle()

    def close(self) -> None:
        self.watch.leave()

    def plan(self, topk_idx: Tensor, *, layer: str = "", x: Tensor | None = None) -> BlockState:
        with self.guard("plan", layer):
            topk_idx = self.check_routes(topk_idx)
            plan = self._plan_by_kernels if self._has_kernels(topk_idx) else self._plan
            return self._made(plan(layer, topk_idx), topk_idx)

    def _has_kernels(self, topk_idx: Tensor) -> bool:
        """Whether kernels can make the plan of ``topk_idx`` under the settings in use."""
        if not has_kernel(topk_idx, self.world):
            return False
        from ..kernels.route_map_triton import holds

        return holds(self.config.capacity.factor)

    def _made(self, state: BlockState, topk_idx: Tensor) -> BlockState:
        """The state as ``plan`` gives it."""
        return state

    def _plan(self, layer: str, topk_idx: Tensor) -> BlockState:
        """By torch operations."""
        self.watch.settle()  # what follows copies to the device, for which the host waits without a time-out
        counts = count_routes(topk_idx, self.num_experts)
        table = self._meet("plan", layer, torch.cat([counts.new_tensor([0, 0, 0, len(topk_idx)]), counts]))
        counts, tokens = table[:, HEAD:].contiguous(), table[:, HEAD - 1].contiguous()
        route_map = build_route_map(topk_idx, counts, tokens, rank=self.rank, capacity=self.config.capacity)
        with span("host split lists"):
            sizes = self._sizes(route_map.accepted.cpu())
        expert = torch.where(route_map.dest_rank >= 0, topk_idx, self.num_experts).reshape(-1)
        send_routes = torch.argsort(expert, stable=True)[: int(sizes[0].sum())]
        sent_row = _inverse(send_routes, expert.numel()).view(topk_idx.shape)
        recv_order = recv_row = None
        if self._sorts:
            blocks = route_map.accepted.view(self.world, self.world, -1)[:, self.rank]  # [source, expert], as they come
            expert_of_row = torch.arange(self.num_local_experts, device=blocks.device).repeat(self.world)
            expert_of_row = expert_of_row.repeat_interleave(blocks.reshape(-1), output_size=int(sizes[1].sum()))
            order = torch.argsort(expert_of_row, stable=True)
            recv_order, recv_row = order.to(torch.int32), _inverse(order, order.numel())
        return BlockState(layer, route_map, send_routes, sent_row, recv_order, recv_row, sizes)

    def _plan_by_kernels(self, layer: str, ids: Tensor) -> BlockState:
        """The same, bit for bit, by kernels. The host waits once, until a time-out at most."""
        from ..kernels import block_triton
        from ..kernels import route_map_triton as kernels

        num_tokens, rank, capacity = ids.shape[0], self.rank, self.config.capacity
        longs: dict[str, Any] = dict(dtype=torch.int64, device=ids.device)
        records = torch.empty((self.world, HEAD + self.num_experts + SAID), **longs)
        parts = (records.numel(), self.world * self.num_experts, 1)  # records, accepted counts and flags
        if self._host is None:
            before_host_looks(self.device)  # the host may wait for the device before it gets such memory
            self._host = torch.empty(sum(parts), dtype=torch.int64, pin_memory=ids.is_cuda)

        m = kernels.DeviceMap.empty(num_tokens, self.top_k, self.num_experts, self.world, ids.device)
        kernels.count(ids, m.block_counts, m.flags)
        record = torch.empty_like(records[0])
        kernels.offsets_and_record(m.block_counts, record, (0, 0, 0, num_tokens))
        self._host[:SAID] = torch.tensor(self._said("plan", layer))
        record[-SAID:].copy_(self._host[:SAID], non_blocking=True)
        with span("exchange"):
            self._gather(records, record)
        kernels.accept(records, m, rank=rank, capacity=capacity, top_k=self.top_k, bound=MAX_ROWS)
        told = torch.cat([records.view(-1), m.accepted.view(-1), m.flags.to(torch.int64)])
        self._host.copy_(told, non_blocking=True)
        if told.is_cuda:
            self.watch.enqueued(self._phase, counted=True)
        kernels.build(ids, m, rank=rank, bound=MAX_ROWS)
        sent_row, send_routes = torch.empty_like(m.dest_row), torch.empty(ids.numel(), **longs)
        block_triton.send_order(ids, m, sent_row, send_routes, rank=rank)

        with span("host split lists"):
            self.watch.settle()
            everyone, accepted, flags = self._host.split(parts)
            everyone = everyone.view_as(records)
            self._compare(everyone[:, -SAID:].tolist(), "plan", layer)
            if flags:  # the same on the host raises what is wrong
                counts, tokens = everyone[:, HEAD:-SAID], everyone[:, HEAD - 1]
                build_route_map(ids.cpu(), counts, tokens, rank=rank, capacity=capacity)
            sizes = self._sizes(accepted)
        sent, received = sizes.sum(1).tolist()
        recv_order = recv_row = None
        if self._sorts:
            recv_order = torch.empty(received, dtype=torch.int32, device=ids.device)
            recv_row = torch.empty_like(recv_order)
            block_triton.arrival_order(m.accepted, recv_order, recv_row, rank=rank)
        route_map = RouteMap(m.dest_rank, m.dest_row, m.counts, m.accepted, m.tokens, m.offsets)
        return BlockState(layer, route_map, send_routes[:sent], sent_row, recv_order, recv_row, sizes)

    @property
    def _sorts(self) -> bool:
        """Whether rows arrive in another order than that of the experts."""
        return self.world > 1 and self.num_local_experts > 1

    def _sizes(self, accepted: Tensor) -> Tensor:
        """``BlockState.sizes`` from ``accepted`` [M, E] on the host."""
        by_rank = accepted.view(self.world, self.world, self.num_local_experts)
        return torch.stack([by_rank[self.rank].sum(1), by_rank[:, self.rank].sum(1)])

    def _said(self, operation: str, layer: str) -> tuple[int, ...]:
        """``SAID`` words. The checksum finds what ranks did differently since they last met, where they meet only to
        plan."""
        return (*stamp(self.exchanges, operation, layer), self.history)

    def _compare(self, said: list[list[int]], operation: str, layer: str) -> None:
        """``RuntimeError`` where another rank's ``_said`` is not this one's."""
        check_stamps([words[:STAMP_WORDS] for words in said], self.rank, self.exchanges, operation, layer)
        for rank, words in enumerate(said):
            if words[STAMP_WORDS] != self.history:
                raise RuntimeError(
                    f"EP ranks disagree: before {operation} of layer {layer!r} (exchange {self.exchanges}), rank {rank}"
                    f" ran other operations than rank {self.rank}."
                    " All ranks of an EP group must run the same layers in the same order"
                )

    def _meet(self, operation: str, layer: str, own: Tensor) -> Tensor:
        """int64 [M, n]: every rank's ``own`` [n], all in the same step."""
        record = torch.cat([own, own.new_tensor(self._said(operation, layer))])
        table = record.new_empty((self.world, record.numel()))
        with span("exchange"):
            self._gather(table, record)
            self.watch.settle()
        self._compare(table[:, -SAID:].tolist(), operation, layer)
        return table[:, :-SAID]

    def _gather(self, table: Tensor, record: Tensor) -> None:
        """Every rank's ``record`` [n] into ``table`` [M, n]; see ``GroupWatch.exchange``."""
        self.watch.exchange(table, record.repeat(self.world, 1), [], [], self._phase)

    def send(self, state: BlockState, x: Tensor, topk_weight: Tensor, arrived: Arrived) -> tuple[Tensor, Tensor]:
        routes = state.send_routes
        with span("local permute"):
            rows = self.fan_out(state, x, None)
        rows = self._to_experts(state, rows)
        weights = topk_weight.to(accumulation_dtype(x.dtype)).reshape(-1, 1)[routes]
        # t·K+k of this source as (source·T_max + t)·K + k. Nothing here may wait for the device, which waits for peers:
        # `settle` alone does, with a time-out.
        ids = (routes + self.rank * self.top_k * state.map.tokens.max()).unsqueeze(1)
        meta = self._to_experts(state, torch.cat([ids.view(torch.uint8), weights.view(torch.uint8)], 1))
        # Flat: contiguous() keeps the stride of a dimension of size 0 or 1, which no wider dtype may divide.
        arrived.route_of_row = meta[:, :8].reshape(-1).view(torch.int64)
        return rows, meta[:, 8:].reshape(-1).view(weights.dtype)

    def give_back(
        self, state: BlockState, y: Tensor, weights: Tensor | None, keep: bool
    ) -> tuple[Tensor, Tensor | None]:
        rows = self._to_tokens(state, y)
        if weights is not None:
            if self.config.weight_at == "output":
                weights = self._by_route(state, self._to_tokens(state, weights.unsqueeze(1))).squeeze(2)
            weights = weights.to(accumulation_dtype(y.dtype))
        with span("local unpermute and merge"):
            out = self.merge(state, rows, weights)
        return out, self._by_route(state, rows) if keep else None

    def fan_out(self, state: BlockState, x: Tensor, scale: Tensor | None) -> Tensor:
        """The tokens ``x`` [T, D] as rows in send order [N, D], times ``scale`` [N] where given."""
        if not has_kernel(x, self.world):
            return fan_out_torch(x, state.send_routes, self.top_k, scale)
        from ..kernels.fan_out_triton import fan_out

        rows = x.new_empty((state.send_routes.numel(), x.shape[1]))
        tokens = state.map.tokens[self.rank : self.rank + 1]
        fan_out(x.contiguous(), state.sent_row.unsqueeze(0), tokens, rows, scale=scale)  # reads each token once
        return rows

    def merge(self, state: BlockState, rows: Tensor, weights: Tensor | None) -> Tensor:
        """Sum rows in send order [N, D] into tokens [T, D], weighted by ``weights`` [T, K] where given."""
        return sum_routes(rows, state.sent_row, state.map.dest_rank, self.world, weights)

    def send_grad(self, state: BlockState, grad: Tensor, scale: Tensor | None) -> Tensor:
        scale = None if scale is None else scale.reshape(-1)[state.send_routes]
        return self._to_experts(state, self.fan_out(state, grad, scale))

    def return_grad(
        self, state: BlockState, grad_rows: Tensor | None, grad_weights: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        grad_x = grad_weight = None
        if grad_rows is not None:
            grad_x = self.merge(state, self._to_tokens(state, grad_rows), None)
        if grad_weights is not None:
            grad_weight = self._by_route(state, self._to_tokens(state, grad_weights.unsqueeze(1))).squeeze(2)
        return grad_x, grad_weight

    def _to_experts(self, state: BlockState, rows: Tensor) -> Tensor:
        """[N, …] in (expert, t·K+k) order → [R, …] in (expert, source, t·K+k) order on the expert ranks."""
        received = self._exchange(rows, state.sizes[0], state.sizes[1])
        if state.recv_order is None:
            return received
        with span("global permute"):
            return self.sort(state, received)

    def _to_tokens(self, state: BlockState, rows: Tensor) -> Tensor:
        """The reverse of ``_to_experts``."""
        if state.recv_order is not None:
            with span("global unpermute"):
                rows = self.unsort(state, rows)
        return self._exchange(rows, state.sizes[1], state.sizes[0])

    def sort(self, state: BlockState, rows: Tensor) -> Tensor:
        """[R, …] in order of arrival → in (expert, source, t·K+k) order."""
        assert state.recv_order is not None
        return rows.index_select(0, state.recv_order)

    def unsort(self, state: BlockState, rows: Tensor) -> Tensor:
        """The reverse of ``sort``."""
        assert state.recv_row is not None
        return rows.index_select(0, state.recv_row)

    def _exchange(self, rows: Tensor, send_sizes: Tensor, recv_sizes: Tensor) -> Tensor:
        with span("all-to-all"):
            send, recv = send_sizes.tolist(), recv_sizes.tolist()
            out = rows.new_empty((sum(recv), *rows.shape[1:]))
            # As bytes: gloo knows no bfloat16.
            self.watch.exchange(out.view(torch.uint8), rows.contiguous().view(torch.uint8), recv, send, self._phase)
            self.bytes_sent += (rows.shape[0] - send[self.rank]) * rows[:1].numel() * rows.element_size()
            return out

    def _by_route(self, state: BlockState, rows: Tensor) -> Tensor:
        """[T, K, …] from rows in send order [N, …], zero where there is no route."""
        shape = (*state.sent_row.shape, *rows.shape[1:])
        if len(rows) == state.sent_row.numel():
            return rows.index_select(0, state.sent_row.view(-1)).view(shape)
        out = rows.new_zeros((state.sent_row.numel(), *rows.shape[1:]))
        return out.index_copy_(0, state.send_routes, rows).view(shape)

    def stats(self) -> dict[str, Any]:
        return {"bytes_sent": self.bytes_sent}


def _inverse(order: Tensor, size: int) -> Tensor:
    """int32 [size]: where each of 0 to size − 1 stands in ``order`` int64 [N], −1 for those that do not."""
    places = torch.full((size,), -1, dtype=torch.int32, device=order.device)
    places[order] = torch.arange(order.numel(), dtype=torch.int32, device=order.device)
    return places
