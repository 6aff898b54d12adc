"""The dispatchers inside a wave schedule: they move one wave at a time, and a batch's waves share one payload slot.

``in_waves`` makes the class of such a dispatcher from that of an ordinary one. Its buffers are those of one wave; a
payload slot holds one region for each wave, so that a (layer, microbatch) has one lease, which ends when the storage
that its waves' saved tensors share has died.

Legend: T local tokens, K routes per token, E experts, M ranks, W waves.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..config import CapacityConfig, EPConfig, ScheduleConfig
from ..dispatch.base import Dispatcher, RouteState, span
from ..dispatch.layout import Part, Region
from ..dispatch.rowwise import RowwiseDispatcher
from ..routing import MAX_ROWS, RouteMap, build_route_map, count_routes

RETURN = (
    3  # the heap's channel for rows on their way back, which may cross at the same time as those on their way there
)


class WaveRegion(Region):
    """Part ``wave`` of a slot that holds ``waves`` times ``region``. ``nbytes`` is that of the whole slot."""

    def __init__(self, region: Region, waves: int, wave: int) -> None:
        self._parts = {
            name: replace(part, offset=part.offset + wave * region.nbytes) for name, part in region._parts.items()
        }
        self.nbytes = waves * region.nbytes

    def __getitem__(self, name: str) -> Part:
        return self._parts[name]


class InWaves:
    """A dispatcher that plans and sends wave after wave. ``waves``: W; ``wave``: the one at hand."""

    waves = 1
    wave = 0
    lazy = False
    """Each wave is planned on the lane that sends it; else all are before the first is sent."""

    def plan_wave(self: Any, wave: int, topk_idx: Tensor, layer: str, x: Tensor | None) -> RouteState:
        """``plan`` for one wave; every batch has all W of them, in ascending order."""
        self.wave = wave
        state: RouteState = self.plan(topk_idx, layer=layer, x=x)
        return state

    def place_rows(self, kept: tuple[Tensor, ...], targets: Tensor, out: Tensor) -> bool:
        """Make the dispatched rows again from what was ``kept`` of them, row r at ``out[targets[r]]``; False where that
        takes a pass of its own, and nothing was done."""
        return False

    def accepted(self: Any, topk_idx: Tensor, layer: str, capacity: CapacityConfig) -> RouteMap:
        """The route map of the whole batch under ``capacity``: what is dropped does not depend on the waves."""
        before, self.config = self.config, replace(self.config, capacity=capacity)
        try:
            state: RouteState = self.plan(topk_idx, layer=layer)
        finally:
            self.config = before
        return state.map


class _OneRegionPerWave(InWaves):
    """``payload_region``, as the dispatcher makes it for one batch, becomes the region of the wave at hand."""

    @property
    def payload_region(self) -> Region:
        return WaveRegion(self._one_wave, self.waves, self.wave)

    @payload_region.setter
    def payload_region(self, region: Region) -> None:
        self._one_wave = region


class _HostWaves(_OneRegionPerWave):
    """For ``RowwiseDispatcher`` and what is made of it."""

    _taken: tuple[Any, Any] = (None, None)

    def plan_wave(self, wave: int, topk_idx: Tensor, layer: str, x: Tensor | None) -> RouteState:
        try:
            return super().plan_wave(wave, topk_idx, layer, x)
        finally:
            if wave == self.waves - 1:
                self._taken = (None, None)  # the states own the slot now

    def _take(self: Any, pool: Any) -> tuple[Any, Any]:
        if pool is not self.payload:
            return super()._take(pool)  # type: ignore[misc]
        slot, tensor = self._taken
        if self.wave and slot is not None and slot.nbytes == pool.slot_bytes:
            return slot, tensor
        self._taken = (None, None)
        self._taken = super()._take(pool)  # type: ignore[misc]
        return self._taken

    def _make_room(self: Any, *found: Any) -> None:
        self._taken = (None, None)
        super()._make_room(*found)  # type: ignore[misc]

    def accepted(self: Any, topk_idx: Tensor, layer: str, capacity: CapacityConfig) -> RouteMap:
        with self.guard("plan", layer):
            topk_idx = self.check_routes(topk_idx)
            counts = count_routes(topk_idx, self.num_experts)
            records = self._exchange("plan", layer, 0, topk_idx.shape[0], counts)
            tokens, asked = records[:, 1].contiguous(), records[:, 2:].contiguous()
            return build_route_map(topk_idx, asked, tokens, rank=self.rank, capacity=capacity)


class _DeviceWaves(_OneRegionPerWave):
    """For ``DeviceRowwiseDispatcher`` and what is made of it.

    What travels back has a channel of signals and a side stream of its own, so that it may cross beside what travels
    there."""

    lazy = True
    _leased: tuple[int, Tensor] | None = None
    _returning = False

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        self.wave = self.waves - 1  # the slot that is leased ahead is for a first wave
        self.grad_slots = type(self).grad_slots * self.waves  # all waves' live together
        super().__init__(*args, **kwargs)
        self.side = torch.cuda.Stream(self.device, priority=-1)  # before what the lanes do meanwhile
        self._side_back = torch.cuda.Stream(self.device, priority=-1)

    def _make(self: Any, max_tokens: int, max_rows: int) -> None:
        wave, self.wave = self.wave, self.waves - 1
        super()._make(max_tokens, max_rows)  # type: ignore[misc]
        self.wave = wave
        for scratch in self._returned():
            scratch.channel = RETURN

    def _returned(self: Any) -> list[Any]:
        """Scratch regions of what travels back."""
        scratches = list(getattr(self, "_scratches", {}).values())
        return scratches or [self.partial if self.config.form == "dedup" else self.outputs]

    def _lease(self: Any, pool: Any, layer: str) -> tuple[int, Tensor]:
        if pool is not self.payload:
            return super()._lease(pool, layer)  # type: ignore[misc]
        if self._leased is None or self.wave == self.waves - 1:
            self._leased = None
            self._leased = super()._lease(pool, layer)  # type: ignore[misc]
        return self._leased

    def _free(self: Any) -> None:
        self._leased = None
        super()._free()  # type: ignore[misc]

    def _sync(self: Any, phase: Any) -> None:
        channel = RETURN if self._returning else 0
        with span("wait"):
            self.heap.wait(self.heap.post(channel=channel, phase=phase), channel=channel, phase=phase)

    @contextmanager
    def _way_back(self: Any) -> Iterator[None]:
        side, self.side, self._returning = self.side, self._side_back, True
        try:
            yield
        finally:
            self.side, self._returning = side, False

    def give_back(self: Any, *args: Any) -> Any:
        with self._way_back():
            return super().give_back(*args)  # type: ignore[misc]

    def return_grad(self: Any, *args: Any) -> Any:
        with self._way_back():
            return super().return_grad(*args)  # type: ignore[misc]

    def place_rows(self: Any, kept: tuple[Tensor, ...], targets: Tensor, out: Tensor) -> bool:
        if self.config.form != "dedup" or self.config.precision != "bf16" or out.dtype != self.dtype:
            return False
        from ..kernels.fan_out_triton import fan_out

        stage, local_rows, tokens, x = kept
        there = torch.where(local_rows >= 0, targets[local_rows.clamp(min=0).long()], -1).to(torch.int32)
        fan_out(stage, there, tokens, out, x_own=x, own_rank=self.rank, launch=self.launches.fan_out)
        return True

    def accepted(self: Any, topk_idx: Tensor, layer: str, capacity: CapacityConfig) -> RouteMap:
        from ..heap import Phase
        from ..kernels import route_map_triton as route_map

        with self.guard("plan", layer):
            topk_idx = self.check_routes(topk_idx)
            m = route_map.DeviceMap.empty(
                topk_idx.shape[0], self.top_k, self.num_experts, self.world, self.device, self.flags
            )
            record = torch.empty(route_map.HEADER + self.num_experts, dtype=torch.int64, device=self.device)
            route_map.count(topk_idx, m.block_counts, m.flags)
            route_map.offsets_and_record(m.block_counts, record, (1, 0, 0, topk_idx.shape[0]))
            records = self.heap.exchange(record, channel=0, phase=Phase("plan", layer))
            route_map.accept(records, m, rank=self.rank, capacity=capacity, top_k=self.top_k, bound=MAX_ROWS)
            route_map.build(topk_idx, m, rank=self.rank, bound=MAX_ROWS)
            return RouteMap(m.dest_rank, m.dest_row, m.counts, m.accepted, m.tokens, m.offsets)


def in_waves(cls: type[Dispatcher[Any]], waves: int) -> type[Dispatcher[Any]]:
    """A subclass of the dispatcher ``cls`` that moves a batch in ``waves`` waves."""
    base: type = InWaves
    if issubclass(cls, RowwiseDispatcher):
        base = _HostWaves
    elif cls.name == "rowwise":
        base = _DeviceWaves
    return type(f"{cls.__name__}InWaves", (base, cls), {"waves": waves})


def wave_config(config: EPConfig, *, top_k: int, num_experts: int) -> EPConfig:
    """The settings of the dispatcher that moves one wave of ``config.schedule``.

    Its batches are a wave's, and it drops nothing: what the capacity policy drops is decided for the whole batch. Its
    buffers hold what one wave may bring: under ``dropless`` by token the same multiple of the balanced load as without
    waves, else all that the whole batch may bring."""
    schedule, capacity, most = config.schedule, config.capacity, config.max_tokens
    by_token = schedule.by == "token"
    if by_token and most is not None:
        most = -(-most // schedule.waves)
    factor = capacity.factor
    if capacity.policy != "dropless":  # quotas round up, in all by less than a row for each expert
        share = schedule.waves if by_token else 1
        factor = round(factor * share + num_experts / (top_k * (most or 1)) + 1e-6, 6)
    wide = widened(config)
    return replace(wide, capacity=CapacityConfig("dropless", factor), max_tokens=most, schedule=ScheduleConfig())


def widened(config: EPConfig) -> EPConfig:
    """``config`` with what ``schedule.width`` says of the kernels that cross the link: so many times 1,024 threads
    PUT rows, so many times 512 PUT partial sums (DeepEP: multiprocessors, even and at least 4)."""
    width = config.schedule.width
    if not width:
        return config
    if config.dispatcher == "block":
        raise ValueError(
            f"schedule.width={width}: the width of dispatcher='block' is its process group's (NCCL_MAX_CTAS in the"
            " environment); use 0"
        )
    return replace(
        config,
        launch=replace(config.launch, put=width, reduce=4 * width),
        deepep=replace(config.deepep, sms=max(4, width // 2 * 2)),
    )
