"""Block all-to-all (report, section 5.3): pack by peer, exchange one block per peer, reorder by expert; and back.

It is the synchronized path: block lengths become host lists before the exchange. Works with gloo and NCCL.

Legend: T local tokens, K routes per token, M ranks, E_l experts of a rank, N rows sent (accepted routes), R rows
received."""

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
from ..kernels.reduce import accumulation_dtype, sum_routes
from ..routing import RouteMap, build_route_map, count_routes
from ..watch import GroupWatch
from .base import Arrived, Dispatcher, RouteState, span
from .stamps import OPERATIONS, STAMP_WORDS, check_stamps, stamp


@dataclass
class BlockState(RouteState):
    """Adds what packing needs.

    ``send_routes`` int64 [N]: the route t·K+k of each sent row, in (expert, t·K+k) order; ``recv_order`` int64 [R]:
    the received row (source, expert) of each expert row (expert, source), None where the orders agree; ``sizes`` int64
    [2, M] on the host: rows sent to and received from every rank."""

    send_routes: Tensor
    recv_order: Tensor | None
    sizes: Tensor

    @property
    def num_rows(self) -> int:
        return int(self.sizes[1].sum())

    def tensors(self) -> tuple[Any, ...]:
        return (*super().tensors(), self.send_routes, self.recv_order, self.sizes)

    @classmethod
    def restore(cls, layer: str, tensors: tuple[Any, ...]) -> BlockState:
        return cls(layer, RouteMap(*tensors[:6]), *tensors[6:])


class BlockDispatcher(Dispatcher[BlockState]):
    """``dispatcher='block'`` over ``group`` (None: WORLD); made collectively.

    On CPU every movement starts with an exchange of stamps and is waited for. On GPUs the stamps travel with the plan,
    where the host waits anyway, and ``check`` waits for what was enqueued since."""

    name = "block"

    def __init__(self, *args: Any, group: dist.ProcessGroup | None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.group = group
        self.watch = GroupWatch(group, self.config.timeout_s)
        self.bytes_sent = 0
        self.exchanges = 0  # movements so far, alike on all ranks, and a checksum of what they were
        self.history = 0
        self._phase = Phase("exchange")

    @contextmanager
    def guard(self, phase: str, layer: str) -> Iterator[None]:
        before, self._phase = self._phase, Phase(phase, layer)
        try:
            with super().guard(phase, layer):
                if phase in OPERATIONS:
                    self.exchanges += 1
                    if phase != "plan" and self.device.type == "cpu":
                        self._meet(phase, layer, torch.zeros(1 + self.num_experts, dtype=torch.int64))
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
            self.watch.settle()  # what follows copies to the device, for which the host waits without a time-out
            self.check_routes(topk_idx)
            counts = count_routes(topk_idx, self.num_experts)
            own = torch.cat([counts.new_tensor([topk_idx.shape[0]]), counts])
            table = self._meet("plan", layer, own)
            counts, tokens = table[:, 1:].contiguous(), table[:, 0].contiguous()
            route_map = build_route_map(topk_idx, counts, tokens, rank=self.rank, capacity=self.config.capacity)
            return self._pack(layer, topk_idx, route_map)

    def _meet(self, operation: str, layer: str, own: Tensor) -> Tensor:
        """int64 [M, n]: every rank's ``own`` [n], all in the same step.

        The checksum finds what ranks did differently since they last met, where they meet only to plan."""
        head = (*stamp(self.exchanges, operation, layer), self.history)
        record = torch.cat([own.new_tensor(head), own])
        table = record.new_empty((self.world, record.numel()))
        with span("exchange"):
            if record.is_cuda:
                self.watch.check_stopped(self._phase)
                dist.all_gather(list(table), record, group=self.group)
                self.watch.enqueued(self._phase)
                self.watch.settle()
            else:
                self.watch.exchange(table, record.repeat(self.world, 1), [], [], self._phase)
        said = table[:, : len(head)].tolist()
        check_stamps([words[:STAMP_WORDS] for words in said], self.rank, self.exchanges, operation, layer)
        for rank, words in enumerate(said):
            if words[STAMP_WORDS] != self.history:
                raise RuntimeError(
                    f"EP ranks disagree: before {operation} of layer {layer!r} (exchange {self.exchanges}), rank {rank}"
                    f" ran other operations than rank {self.rank}."
                    " All ranks of an EP group must run the same layers in the same order"
                )
        return table[:, len(head) :]

    def _pack(self, layer: str, topk_idx: Tensor, route_map: RouteMap) -> BlockState:
        by_rank = route_map.accepted.view(self.world, self.world, self.num_local_experts)
        with span("host split lists"):
            sizes = torch.stack([by_rank[self.rank].sum(1), by_rank[:, self.rank].sum(1)]).cpu()
        expert = torch.where(route_map.dest_rank >= 0, topk_idx.to(torch.int64), self.num_experts).reshape(-1)
        send_routes = torch.argsort(expert, stable=True)[: int(sizes[0].sum())]
        recv_order = None
        if self.num_local_experts > 1:
            blocks = by_rank[:, self.rank]  # [source, expert], the order of arrival
            expert_of_row = torch.arange(self.num_local_experts, device=blocks.device).repeat(self.world)
            expert_of_row = expert_of_row.repeat_interleave(blocks.reshape(-1), output_size=int(sizes[1].sum()))
            recv_order = torch.argsort(expert_of_row, stable=True)
        return BlockState(layer, route_map, send_routes, recv_order, sizes)

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
        return fan_out_torch(x, state.send_routes, self.top_k, scale)

    def merge(self, state: BlockState, rows: Tensor, weights: Tensor | None) -> Tensor:
        """Sum rows in send order [N, D] into tokens [T, D], weighted by ``weights`` [T, K] where given."""
        return sum_routes(rows, self._sent_row(state), state.map.dest_rank, self.world, weights)

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
        assert state.recv_order is not None
        return torch.empty_like(rows).index_copy_(0, state.recv_order, rows)

    def _exchange(self, rows: Tensor, send_sizes: Tensor, recv_sizes: Tensor) -> Tensor:
        with span("all-to-all"):
            send, recv = send_sizes.tolist(), recv_sizes.tolist()
            out = rows.new_empty((sum(recv), *rows.shape[1:]))
            # As bytes: gloo knows no bfloat16.
            self.watch.exchange(out.view(torch.uint8), rows.contiguous().view(torch.uint8), recv, send, self._phase)
            self.bytes_sent += (rows.shape[0] - send[self.rank]) * rows[:1].numel() * rows.element_size()
            return out

    def _sent_row(self, state: BlockState) -> Tensor:
        """int64 [T, K]: the row of the send order that carries each route, −1 for none."""
        index = torch.full_like(state.map.dest_row, -1, dtype=torch.int64)
        index.view(-1)[state.send_routes] = torch.arange(state.send_routes.numel(), device=index.device)
        return index

    def _by_route(self, state: BlockState, rows: Tensor) -> Tensor:
        """[T, K, …] from rows in send order [N, …], zero where there is no route."""
        out = rows.new_zeros((state.num_tokens * self.top_k, *rows.shape[1:]))
        return out.index_copy_(0, state.send_routes, rows).view(state.num_tokens, self.top_k, *rows.shape[1:])

    def stats(self) -> dict[str, Any]:
        return {"bytes_sent": self.bytes_sent}
