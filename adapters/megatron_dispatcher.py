"""Megatron's token dispatcher contract (megatron-core 0.16 to 0.19) over our dispatchers.

Legend: T local tokens, E experts, E_l experts of this rank, K routes per token, R rows received, N rows that the
experts get (R, or more where Megatron asks for padding), H hidden size, ETP expert tensor parallel degree.

The six calls of one forward pass share a ``Step``; backward needs nothing of it, so any number of microbatches may be
in flight. Gradients travel through arguments and returns alone.
"""

from __future__ import annotations

import atexit
import dataclasses
import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.transformer.moe.moe_utils import get_align_size_for_quantization, get_capacity
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..config import EPConfig, check_shape
from ..dispatch import Dispatched, Dispatcher, RouteState, build_dispatcher
from ..dispatch.base import Arrived
from ..layer import connected
from .megatron_etp import gather_rows, scatter_rows
from .megatron_options import check_options, schedule_leases
from .megatron_rows import (
    ExactCombine,
    ExactDispatch,
    Hide,
    HostOffsets,
    Padding,
    Reveal,
    routes_from_map,
)

logger = logging.getLogger(__name__)


class SharedDispatchers:
    """Our dispatchers for one ``EPConfig``: one for all MoE layers of a shape, so that they share buffers.

    They are built at the first forward, when the device and the dtype of the rows are known and all layers have been
    counted. Closed at exit at the latest.
    """

    def __init__(self, config: EPConfig) -> None:
        self.config = config
        self.users: list[PluginTokenDispatcher] = []
        self._built: dict[Any, Dispatcher[Any]] = {}
        self._checked_before_steps = False
        atexit.register(_weakly(self.close))

    def add(self, user: PluginTokenDispatcher) -> None:
        """Count a layer that will use these dispatchers."""
        self.users.append(user)

    def get(self, user: PluginTokenDispatcher, hidden_size: int, dtype: torch.dtype, device: torch.device) -> Any:
        """The dispatcher for ``user``'s rows; collective over its EP group when it is the first of its shape."""
        shape = (user.ep_group, user.num_experts, user.max_routes, hidden_size, dtype, device)
        if shape not in self._built:
            self._built[shape] = build_dispatcher(
                self._sized(user),
                num_experts=user.num_experts,
                top_k=user.max_routes,
                hidden_size=hidden_size,
                dtype=dtype,
                group=user.ep_group,
                device=device,
            )
            if not self._checked_before_steps:
                self._checked_before_steps = True
                register_optimizer_step_pre_hook(_weakly(self.check))
        return self._built[shape]

    def _sized(self, user: PluginTokenDispatcher) -> EPConfig:
        if self.config.dispatcher != "rowwise" or self.config.slots is not None:
            return self.config
        alike = [u for u in self.users if (u.ep_group, u.num_experts) == (user.ep_group, user.num_experts)]
        by_chunk: dict[int, int] = {}
        for other in alike:
            by_chunk[other.chunk] = by_chunk.get(other.chunk, 0) + 1
        slots = schedule_leases(user.config, self.config, user.experts, list(by_chunk.values()))
        logger.info("%d MoE layers on this rank, %d payload slots for the pipeline schedule", len(alike), slots)
        return dataclasses.replace(self.config, slots=slots)

    def check(self) -> None:
        """Raise what kernels could only record: a late peer, a dropless overflow. Every optimizer step of the process
        calls it first."""
        for built in self._built.values():
            built.check()

    def drop_rate(self) -> Tensor:
        """float64 scalar on the rows' device: routes dropped by ``capacity`` / routes asked, in the last forward of
        each layer, over its EP group. Megatron's router drops before that, and its drops are not seen here."""
        counts = [user.counts for user in self.users if user.counts is not None]
        if not counts:
            return torch.zeros((), dtype=torch.float64)
        asked, accepted = (torch.stack([pair[i].sum() for pair in counts]).sum().double() for i in (0, 1))
        return (1 - accepted / asked.clamp(min=1)).clamp(min=0)

    def __iter__(self) -> Iterator[Dispatcher[Any]]:
        """The dispatchers that were built."""
        return iter(self._built.values())

    def stats(self) -> list[dict[str, Any]]:
        """Counters of every dispatcher that was built: bytes sent, slots in use and at peak."""
        return [built.stats() for built in self._built.values()]

    def close(self) -> None:
        """Release what was made collectively; on all ranks, before their process groups are destroyed. Idempotent."""
        built, self._built = self._built, {}
        for dispatcher in built.values():
            dispatcher.close()


def _weakly(method: Callable[[], None]) -> Callable[..., None]:
    """``method`` as a callback that does not keep its object alive."""
    reference = weakref.WeakMethod(method)

    def call(*_: Any) -> None:
        alive = reference()
        if alive is not None:
            alive()

    return call


@dataclass
class Step:
    """What the calls of one forward pass of one layer share.

    ``shape`` of the hidden states, ``state`` of the routes, ``offsets`` on the host (None: nobody needs them there),
    then what the calls add: ``arrived`` from the dispatch, how rows were padded or gathered, what goes beside a
    stand-in (``hidden``; see ``Hide``), and the rows ``given`` to the experts.
    """

    shape: torch.Size
    state: RouteState
    probs_dtype: torch.dtype
    capacity: int | None
    offsets: HostOffsets | None
    arrived: Arrived | None = None
    padding: Padding | None = None
    etp_counts: Tensor | None = None
    hidden: Tensor | None = None
    given: Tensor | None = None


class PluginTokenDispatcher(MoETokenDispatcher):
    """Megatron's token dispatcher for one MoE layer, built as theirs are, with ``shared`` and ``experts`` besides.

    ``experts``: "megatron" (its own, which get exactly N rows) or "plugin" (``megatron_experts`` reads their weights).
    ``max_routes``: the most routes of a token (None: moe_router_topk). ``layer`` names the layer in errors and traces,
    ``chunk`` is the model chunk that it is in. Raises ``ValueError`` for settings of Megatron's that cannot be
    honoured.
    """

    def __init__(
        self,
        num_local_experts: int,
        local_expert_indices: Sequence[int],
        config: Any,
        pg_collection: Any = None,
        *,
        shared: SharedDispatchers,
        experts: str = "megatron",
        max_routes: int | None = None,
        layer: str = "",
        chunk: int = 0,
    ) -> None:
        super().__init__(config=config, pg_collection=pg_collection)
        self.num_experts = config.num_moe_experts
        self.num_local_experts = num_local_experts
        self.max_routes = config.moe_router_topk if max_routes is None else max_routes
        self.layer, self.chunk, self.shared, self.experts = layer, chunk, shared, experts
        check_options(config, shared.config, experts, ep_size=self.ep_size, etp_size=self.tp_size)
        check_shape(
            num_experts=self.num_experts, top_k=self.max_routes, hidden_size=config.hidden_size, ep=self.ep_size
        )
        first = dist.get_rank(self.ep_group) * num_local_experts
        if list(local_expert_indices) != list(range(first, first + num_local_experts)):
            raise ValueError(
                f"local_expert_indices={list(local_expert_indices)}: EP rank {dist.get_rank(self.ep_group)} of"
                f" {self.ep_size} must hold experts {first} to {first + num_local_experts - 1}"
            )
        self.descending: Callable[[], bool] | None = None  # our experts say how their weights lie
        self.counts: tuple[Tensor, Tensor] | None = None  # int64 [M, E] asked and accepted in the last forward
        self._step: Step | None = None
        self._free_between_calls = bool(config.overlap_moe_expert_parallel_comm)
        shared.add(self)

    # 1. routes

    def dispatch_preprocess(self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Plan ``routing_map`` bool [T, E] with ``probs`` [T, E]; gives the tokens [T, H] and their weights [T, K].

        ``hidden_states`` [..., H] of T tokens. Exchanges counts between the EP ranks.
        """
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        dispatcher = self._dispatcher(x)
        with dispatcher.guard("routes", self.layer):
            if routing_map.shape != (x.shape[0], self.num_experts) or probs.shape != routing_map.shape:
                raise ValueError(
                    f"routing_map {list(routing_map.shape)} and probs {list(probs.shape)} must both be"
                    f" [{x.shape[0]}, {self.num_experts}] for hidden states {list(hidden_states.shape)}"
                )
            if self.config.moe_pad_expert_input_to_capacity:
                # The router has filled every expert's capacity with other tokens, of probability 0: padding needs none.
                routing_map = routing_map & (probs != 0)
            topk_idx, weights = routes_from_map(routing_map, probs, self.max_routes)
            if self.descending is not None and self.descending():
                topk_idx = self._reversed(topk_idx)
        state = dispatcher.plan(topk_idx, layer=self.layer, x=x)
        self.counts = state.map.counts, state.map.accepted
        capacity = self._capacity(x.shape[0])
        rows_on_host = self.experts == "megatron" and (capacity is None or self.tp_size > 1)
        offsets = HostOffsets(state.map.offsets) if rows_on_host else None
        self._step = step = Step(hidden_states.shape, state, probs.dtype, capacity, offsets)
        if self.shared_experts is not None:
            self.shared_experts.pre_forward_comm(x.view(hidden_states.shape))
        if self._free_between_calls:
            step.hidden, x = x.detach(), Hide.apply(x)
        return x, weights

    def _reversed(self, topk_idx: Tensor) -> Tensor:
        """The ids of the experts with those of each rank in reverse, so that their rows arrive in reverse."""
        if self.shared.config.capacity.policy in ("rank", "source"):
            raise ValueError(
                f"capacity.policy={self.shared.config.capacity.policy!r} drops by the order of the experts, and"
                " experts='plugin' must reverse it for weights that lie in descending order in memory: use 'expert' or"
                " 'dropless', or experts='megatron'"
            )
        last = self.num_local_experts - 1
        within = topk_idx % self.num_local_experts
        return torch.where(topk_idx < 0, topk_idx, topk_idx + last - 2 * within)

    def _capacity(self, tokens: int) -> int | None:
        """Rows per (source, expert) under moe_pad_expert_input_to_capacity, as the router has dropped them."""
        if not self.config.moe_pad_expert_input_to_capacity:
            return None
        return int(
            get_capacity(tokens * self.config.moe_router_topk, self.num_experts, self.config.moe_expert_capacity_factor)
        )

    # 2. rows to the expert ranks

    def token_dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """[T, H] and [T, K] → this rank's expert rows and their weights, in expert-contiguous order."""
        step = self._current("token_dispatch")
        x = hidden_states if step.hidden is None else Reveal.apply(hidden_states, step.hidden)
        step.hidden = None
        dispatcher, state, step.arrived = self._dispatcher(x), step.state, Arrived()
        self._wait_shared_experts()
        if self.fused:
            if self.shared_experts is not None:
                self.shared_experts.linear_fc1_forward_and_act(x)
            return x, probs
        rows, weights = ExactDispatch.apply(x, probs, dispatcher, state, step.arrived, self._rows_known)
        if self.shared_experts is not None:
            self.shared_experts.linear_fc1_forward_and_act(rows)
        if self._free_between_calls:
            step.hidden, rows = rows.detach(), Hide.apply(rows)
        return rows, weights

    def _rows_known(self, held: int) -> int:
        """R where the host needs it, else all rows that the buffers hold."""
        step = self._current("token_dispatch")
        if step.offsets is None:
            return held
        rows = int(step.offsets.get()[-1])
        if rows > held:
            self.shared.check()  # which says what to do about it
            raise RuntimeError(f"{rows} rows arrived at layer {self.layer!r} but its buffers hold {held}")
        return rows

    # 3. what the experts take

    def dispatch_postprocess(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Expert rows [N, H], rows per expert int64 [E_l] and the probabilities [N] that the experts apply."""
        step = self._current("dispatch_postprocess")
        rows, weights = hidden_states, probs
        if step.hidden is not None:
            rows, step.hidden = Reveal.apply(rows, step.hidden), None
        step.given = rows
        if self.experts == "plugin":
            return rows, step.state.map.offsets.diff(), weights
        weights = weights.to(step.probs_dtype)
        offsets, counts = step.state.map.offsets, None if step.offsets is None else step.offsets.get().diff()
        if self.tp_size > 1 and counts is not None:
            rows, weights, step.etp_counts = gather_rows(rows, weights, counts, self.tp_group)
            counts = step.etp_counts.sum(0)
            offsets = F.pad(counts.cumsum(0), (1, 0)).to(rows.device, non_blocking=True)
        sizes = self._sizes(step, counts)
        if sizes is None:
            assert counts is not None  # they are on the host unless Megatron's capacity gives the sizes
            return rows, counts, weights
        with self._dispatcher(rows).guard("padding", self.layer):
            step.padding = Padding(offsets, rows.shape[0], sizes)
        return step.padding.pad(rows), sizes, step.padding.pad(weights)

    def _sizes(self, step: Step, counts: Tensor | None) -> Tensor | None:
        """Padded rows per expert int64 [E_l] where Megatron asks for padding of ``counts`` [E_l]."""
        if step.capacity is not None:
            return torch.full((self.num_local_experts,), step.capacity * self.ep_size * self.tp_size)
        if self.config.moe_router_padding_for_quantization and counts is not None:
            align = get_align_size_for_quantization(self.config)
            return -(-counts // align) * align if align else None
        return None

    # 4. and back

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """The experts' output [N, H] → one row for every row that arrived."""
        step = self._current("combine_preprocess")
        if step.given is None:
            raise RuntimeError(f"combine_preprocess of layer {self.layer!r} was called before dispatch_postprocess")
        rows, step.given = connected(hidden_states, step.given), None
        if step.padding is not None:
            rows = step.padding.unpad(rows)
        if step.etp_counts is not None:
            rows = scatter_rows(rows, step.etp_counts, self.tp_group, step.probs_dtype)
        return rows

    # 5. rows to their tokens

    def token_combine(
        self, hidden_states: Tensor, async_finish: bool = True, allocate_on_comm_stream: bool = True
    ) -> Tensor:
        """Expert rows → the sum of each token's rows [T, H]. The two flags of Megatron's other backends do nothing."""
        step = self._current("token_combine")
        dispatcher, state = self._dispatcher(hidden_states), step.state
        self._wait_shared_experts()
        out: Tensor = hidden_states if self.fused else ExactCombine.apply(hidden_states, dispatcher, state)
        if self.shared_experts is not None:
            self.shared_experts.linear_fc2_forward(out)
            self.shared_experts.post_forward_comm()
        return out

    # 6. the layer's output

    def combine_postprocess(self, hidden_states: Tensor) -> Tensor:
        """[T, H] → the shape of the layer's input, the overlapped shared experts added."""
        step, self._step = self._current("combine_postprocess"), None
        out = hidden_states.view(step.shape)
        return out if self.shared_experts is None else out + self.shared_experts.get_output()

    @property
    def fused(self) -> bool:
        """Whether one node moves the rows and computes the experts: tokens stay tokens through all six calls."""
        return self.shared.config.precision == "mxfp8"

    def planned(self, x: Tensor) -> tuple[Dispatcher[Any], RouteState]:
        """The dispatcher of the tokens ``x`` [T, H] and the routes of the forward under way, for our fused experts."""
        return self._dispatcher(x), self._current("experts").state

    def dispatched(self, rows: Tensor, weights: Tensor) -> Dispatched:
        """The rows and weights of the forward under way, for our experts."""
        step = self._current("experts")
        state, arrived = step.state, step.arrived or Arrived()
        # The schedule frees what the experts return, so it must not be symmetric memory.
        output = None if self._free_between_calls else arrived.output
        return Dispatched(
            rows, weights, state.map.offsets, state.num_rows, arrived.route_of_row, arrived.rebuild, output
        )

    def _dispatcher(self, rows: Tensor) -> Dispatcher[Any]:
        built: Dispatcher[Any] = self.shared.get(self, rows.shape[1], rows.dtype, rows.device)
        return built

    def _current(self, call: str) -> Step:
        if self._step is None:
            raise RuntimeError(f"{call} of layer {self.layer!r} was called without dispatch_preprocess")
        return self._step

    def _wait_shared_experts(self) -> None:
        """From 0.17 on, shared experts are told when the communication that they overlap is about to start."""
        if self.shared_experts is not None and hasattr(self.shared_experts, "wait_current_stream"):
            self.shared_experts.wait_current_stream()
