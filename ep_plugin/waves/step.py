"""One MoE step in waves, and the dispatcher that a wave schedule builds.

Legend: T local tokens, K routes per token, E experts, E_l experts of this rank, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..config import EPConfig, ScheduleConfig
from ..dispatch.agree import agree
from ..dispatch.base import Arrived, Dispatcher, RouteState
from ..experts.grouped_linear import choose_backend, product_dtype
from ..experts.mlp import ExpertMLP
from ..routing import RouteMap
from .dispatchers import in_waves, wave_config, widened
from .experts import WaveMLP
from .lanes import Lanes
from .node import Step, WaveExperts
from .split import Wave, expert_edges, split_routes
from .tuned import Shape, resolve

SPARE = 32  # multiprocessors that GEMMs leave at most where the settings do not say: a quarter of an H200
LONG = 1536  # expert width above which GEMMs last so much longer than rows travel that fewer will do


def usual_spare(width: int, expert_width: int) -> int:
    """Multiprocessors that GEMMs leave where the settings do not say, with ``width`` of ``ScheduleConfig``: a product's
    time grows with the expert width, that of its rows' way does not."""
    most = min(width or SPARE // 2, SPARE)
    return min(most, max(2, most * LONG // expert_width))


class WaveDispatcher(Dispatcher[RouteState]):
    """What ``build_dispatcher`` gives under a wave schedule: a whole step, no phases one by one.

    ``inner`` moves one wave at a time. ``config`` is that of the whole batch, its ``schedule`` the one in use."""

    def __init__(self, config: EPConfig, inner: Dispatcher[Any]) -> None:
        super().__init__(
            config,
            num_experts=inner.num_experts,
            top_k=inner.top_k,
            hidden_size=inner.hidden_size,
            dtype=inner.dtype,
            device=inner.device,
            rank=inner.rank,
            world=inner.world,
        )
        self.inner: Any = inner
        self.name, self.can_overflow = inner.name, inner.can_overflow
        schedule = config.schedule
        self.lanes = Lanes(
            inner.device,
            overlapped=schedule.kind == "wave_overlapped",
            every=schedule.spared == "all",
            two_ways=inner.name != "deepep",  # whose two movements share one workspace
        )

    @property
    def schedule(self) -> ScheduleConfig:
        """The schedule in use; under ``auto`` what was chosen."""
        return self.config.schedule

    def spare(self, expert_width: int) -> int:
        """Multiprocessors that GEMMs of experts of this width leave to communication."""
        given = self.schedule.spare
        return usual_spare(self.schedule.width, expert_width) if given is None else given

    @property
    def heap(self) -> Any:
        """The symmetric heap, where there is one."""
        return getattr(self.inner, "heap", None)

    def expect(self, num_tokens: int) -> None:
        """See ``Dispatcher.expect``; ``num_tokens`` are those of the whole batch."""
        schedule = self.config.schedule
        self.inner.expect(-(-num_tokens // schedule.waves) if schedule.by == "token" else num_tokens)

    def split(self, topk_idx: Tensor, layer: str) -> tuple[list[Wave], RouteMap | None]:
        """The waves of ``topk_idx`` [T, K] without the routes that capacity drops, which is decided for the whole
        batch; and the whole batch's map where that had to be made."""
        topk_idx = self.inner.check_routes(topk_idx)
        found = None
        if self.config.capacity.policy != "dropless":
            found = self.inner.accepted(topk_idx, layer, self.config.capacity)
            topk_idx = torch.where(found.dest_rank >= 0, topk_idx, -1)
        schedule = self.config.schedule
        return split_routes(topk_idx, schedule.waves, schedule.by, self.num_local_experts), found

    def check_batch(self, topk_idx: Tensor, x: Tensor, topk_weight: Tensor) -> None:
        """``ValueError`` quoting what does not fit in the inputs of a step."""
        self.inner.check_routes(topk_idx)
        most, num_tokens = self.config.max_tokens, topk_idx.shape[0]
        if most is not None and num_tokens > most:
            raise ValueError(f"{num_tokens} tokens exceed max_tokens={most}; raise it or leave it out")
        self.inner.check_x(num_tokens, x)
        if topk_weight.shape != (num_tokens, self.top_k):
            raise ValueError(f"topk_weight has shape {tuple(topk_weight.shape)}; expected ({num_tokens}, {self.top_k})")
        if not topk_weight.dtype.is_floating_point:
            raise ValueError(f"topk_weight has dtype {topk_weight.dtype}; expected a floating-point dtype")

    def merged(self, layer: str, waves: list[Wave], states: list[RouteState], found: RouteMap | None) -> RouteState:
        """The route state of the whole batch, for metrics; rows are counted within each wave."""
        maps = [state.map for state in states]

        def total(name: str) -> Tensor:
            summed: Tensor = torch.stack([getattr(m, name) for m in maps]).sum(0)
            return summed

        by_token = self.config.schedule.by == "token"

        def joined(name: str) -> Tensor:
            parts = [getattr(m, name) for m in maps]
            return torch.cat(parts) if by_token else torch.stack(parts).amax(0)

        tokens = total("tokens") if by_token else maps[0].tokens
        counts = total("counts") if found is None else found.counts
        whole = RouteMap(joined("dest_rank"), joined("dest_row"), counts, total("accepted"), tokens, total("offsets"))
        return RouteState(layer, whole)

    def plan(self, topk_idx: Tensor, *, layer: str = "", x: Tensor | None = None) -> RouteState:
        """Raises: see ``_whole_step``."""
        raise self._whole_step("plan")

    def send(self, state: RouteState, x: Tensor, topk_weight: Tensor, arrived: Arrived) -> tuple[Tensor, Tensor]:
        """Raises: see ``_whole_step``."""
        raise self._whole_step("dispatch")

    def give_back(
        self, state: RouteState, y: Tensor, weights: Tensor | None, keep: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Raises: see ``_whole_step``."""
        raise self._whole_step("combine")

    def send_grad(self, state: RouteState, grad: Tensor, scale: Tensor | None) -> Tensor:
        """Raises: see ``_whole_step``."""
        raise self._whole_step("combine backward")

    def return_grad(
        self, state: RouteState, grad_rows: Tensor | None, grad_weights: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Raises: see ``_whole_step``."""
        raise self._whole_step("dispatch backward")

    def _whole_step(self, phase: str) -> RuntimeError:
        return RuntimeError(
            f"{phase} was called by itself, but schedule.kind={self.config.schedule.kind!r} runs the phases of a step"
            " in waves: call moe_step, or set schedule.kind='none'"
        )

    def fail(self, phase: str, layer: str, error: BaseException) -> None:
        self.inner.fail(phase, layer, error)

    def metrics(self, state: RouteState) -> dict[str, Tensor]:
        metrics: dict[str, Tensor] = self.inner.metrics(state)
        if "buffer_use" in metrics and self.config.schedule.by == "token":
            metrics["buffer_use"] = metrics["buffer_use"] / self.config.schedule.waves  # of all waves' buffers
        return metrics

    def check(self) -> None:
        self.inner.check()

    def stats(self) -> dict[str, Any]:
        stats: dict[str, Any] = self.inner.stats()
        return stats

    def regrow(self, rows: int) -> None:
        """As the inner dispatcher's; ``rows`` of one wave."""
        self.inner.regrow(rows)

    def close(self) -> None:
        self.inner.close()


def wave_moe_step(
    dispatcher: WaveDispatcher,
    x: Tensor,
    topk_idx: Tensor,
    topk_weight: Tensor,
    experts: Any,
    layer: str,
    observe: Callable[[RouteState], None] | None,
) -> Tensor:
    """``layer.moe_step`` in waves. ``experts`` must be computed by this project: ``experts.GroupedMLP`` or anything
    with its ``mlp()``. Raises ``ValueError`` for others."""
    inner = dispatcher.inner
    with dispatcher.guard("check", layer):
        mlp = _parameters(dispatcher, experts)
        dispatcher.check_batch(topk_idx, x, topk_weight)
    waves, found = dispatcher.split(topk_idx, layer)

    def plan(wave: int, own: Tensor) -> RouteState:
        state: RouteState = inner.plan_wave(wave, waves[wave].topk_idx, layer, own)
        return state

    by = dispatcher.schedule.by if len(waves) > 1 else "expert"
    spare = dispatcher.spare(mlp.down.shape[1 if mlp.transposed else 2])
    step = Step(inner, dispatcher.lanes, layer, waves, by, plan, ordered=inner.name != "deepep", spare=spare)
    if not inner.lazy:
        for i, wave in enumerate(waves):
            step.state(i, x.detach()[wave.tokens])
    parameters = (mlp.up, mlp.down, mlp.up_bias, mlp.down_bias)
    out: Tensor
    if dispatcher.config.precision == "mxfp8":
        from .mxfp8 import WaveMXFP8, check_width

        with dispatcher.guard("check", layer):
            check_width(mlp)
        out = WaveMXFP8.apply(x, topk_weight, *parameters, step, mlp.activation, mlp.transposed)
    else:
        out = WaveExperts.apply(x, topk_weight, *parameters, step, _detached(mlp, x, dispatcher.config.weight_at))
    if observe is not None:
        with dispatcher.guard("observe", layer):
            observe(dispatcher.merged(layer, waves, step.states, found))
    return out


def _detached(mlp: ExpertMLP, x: Tensor, weight_at: str) -> WaveMLP:
    """The experts without their parameters' own gradients, for rows like ``x``."""
    dtype = product_dtype(x, mlp.up, mlp.up_bias)
    return WaveMLP(
        mlp.up.detach(),
        mlp.down.detach(),
        None if mlp.up_bias is None else mlp.up_bias.detach(),
        None if mlp.down_bias is None else mlp.down_bias.detach(),
        mlp.activation,
        mlp.transposed,
        weight_at,
        choose_backend(mlp.backend, x, mlp.up, dtype),
        dtype,
    )


def _parameters(dispatcher: WaveDispatcher, experts: Any) -> ExpertMLP:
    mlp = getattr(experts, "mlp", None)
    if mlp is None:
        raise ValueError(
            f"schedule.kind={dispatcher.schedule.kind!r} runs the experts wave by wave, forward and backward, and so"
            f" needs experts that this project computes (experts.GroupedMLP), not {type(experts).__name__}: use those,"
            " or schedule.kind='none'"
        )
    found: ExpertMLP = mlp()
    return found


def build_waves(
    config: EPConfig,
    build: Callable[..., Dispatcher[Any]],
    *,
    expert_width: int | None,
    **shape: Any,
) -> Dispatcher[Any]:
    """The dispatcher for ``config.schedule``: a ``WaveDispatcher``, or an ordinary one for ``none``.

    ``build``: ``build(config, wrap=…, **shape)`` makes an ordinary one, ``wrap`` given its class. Collective."""
    group, world = shape["group"], dist.get_world_size(shape["group"])
    sizes = {name: shape[name] for name in ("num_experts", "top_k", "hidden_size")}
    device = torch.device(shape["device"])
    schedule = resolve(
        config.schedule,
        Shape(
            tokens=config.max_tokens,
            width=expert_width,
            ep=world,
            dtype=str(shape["dtype"]).removeprefix("torch."),
            dispatcher=config.dispatcher,
            form=config.form if config.dispatcher == "rowwise" else "",
            precision=config.precision,
            device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
            **sizes,
        ),
    )
    config = replace(config, schedule=schedule)
    agree(config, group)
    if schedule.kind == "none":
        return build(replace(widened(config), schedule=ScheduleConfig()), **shape)
    in_place = config.precision == "mxfp8" and config.dispatcher == "rowwise" and config.form == "route"
    if in_place and device.type != "cpu":
        raise ValueError(
            f"schedule.kind={schedule.kind!r} with precision='mxfp8' and form='route' on GPUs: gradients take the place"
            " of the dispatched rows there, in a slot that all waves share; use form='dedup'"
        )
    if schedule.by == "expert":
        expert_edges(shape["num_experts"] // world, schedule.waves)
    inner_config = wave_config(config, top_k=shape["top_k"], num_experts=shape["num_experts"])
    inner = build(inner_config, wrap=partial(in_waves, waves=schedule.waves), **shape)
    return WaveDispatcher(config, inner)
