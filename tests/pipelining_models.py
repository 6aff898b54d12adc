"""A stack of MoE layers cut into pipeline stages, each stage's experts on an EP group of its own, and the same stack
whole in one process.

Legend: T tokens of one rank's microbatch, K routes per token, E experts, D hidden size, n microbatches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.utils.checkpoint import checkpoint

from ep_plugin.config import CapacityConfig, EPConfig
from ep_plugin.dispatch import Dispatcher, build_dispatcher, slots_for
from ep_plugin.experts import GroupedMLP
from ep_plugin.layer import moe_step
from ep_plugin.topology import ProcessGroups, layout

E, K, D, WIDTH, T = 6, 2, 8, 5, 7
PP = EP = 2


@dataclass(frozen=True)
class Case:
    """One training step. ``layers``: MoE layers of every stage (2 stages for gpipe and 1f1b, 4 for interleaved).
    ``region``: how many layers of a stage, its last ones, one activation checkpoint covers. ``short_rank``: the
    pipeline rank whose pool is made one slot too small. ``pp``: pipeline ranks; 1 has all stages on one rank, which a
    machine of two ranks can run."""

    schedule: str
    layers: tuple[int, ...]
    microbatches: int = 4
    form: str = "dedup"
    region: int = 0
    short_rank: int | None = None
    pp: int = PP


class MoELayer(nn.Module):
    """x + MoE(x), its router and experts the same whatever the sharding."""

    def __init__(self, number: int, dispatcher: Dispatcher[Any]) -> None:
        super().__init__()
        self.number, self.dispatcher = number, dispatcher
        generator = torch.Generator().manual_seed(number)
        self.router = nn.Parameter(torch.randn(E, D, generator=generator, dtype=torch.float64))
        local = dispatcher.num_local_experts
        self.experts = GroupedMLP(
            E, D, WIDTH, first_expert=dispatcher.rank * local, num_local=local, seed=number, dtype=torch.float64
        )
        self.to(dispatcher.device)

    def forward(self, x: Tensor) -> Tensor:
        weight, idx = torch.softmax(x @ self.router.t(), 1).topk(K, 1)
        return x + moe_step(self.dispatcher, x, idx, weight, self.experts, layer=f"layers.{self.number}")


class Stage(nn.Module):
    """Consecutive layers, the last ``region`` of which run under one activation checkpoint."""

    def __init__(self, numbers: Sequence[int], dispatcher: Dispatcher[Any], region: int = 0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(MoELayer(number, dispatcher) for number in numbers)
        self.kept = len(numbers) - region

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[: self.kept]:
            x = layer(x)
        rest = self.layers[self.kept :]
        return checkpoint(nn.Sequential(*rest), x, use_reentrant=False) if rest else x


def loss(out: Tensor, target: Tensor) -> Tensor:
    return ((out - target) ** 2).sum()


def batch(case: Case, source: int) -> tuple[Tensor, Tensor]:
    """x and target [n·T, D] of EP rank ``source``."""
    generator = torch.Generator().manual_seed(100 + source)
    x, target = torch.randn(2, case.microbatches * T, D, generator=generator, dtype=torch.float64)
    return x, target


def whole_gradients(case: Case) -> dict[str, Tensor]:
    """Gradients of the whole stack in one process, on all ranks' batches at once; by layer and parameter name."""
    config = EPConfig(dispatcher="local")
    dispatcher = build_dispatcher(config, num_experts=E, top_k=K, hidden_size=D, dtype=torch.float64)
    stack = Stage(range(sum(case.layers)), dispatcher)
    x, target = (torch.cat(parts) for parts in zip(*(batch(case, source) for source in range(EP)), strict=True))
    loss(stack(x), target).backward()
    return {f"{layer.number}.{name}": p.grad for layer in stack.layers for name, p in layer.named_parameters()}


def needed_slots(case: Case, pp_rank: int) -> int:
    kept = [layers - case.region for layers in case.layers[pp_rank :: case.pp]]
    return slots_for(
        case.schedule,
        layers=kept,
        microbatches=case.microbatches,
        stages=case.pp,
        rank=pp_rank,
        checkpointed=case.region,
    )


def build_schedule(case: Case, stages: list[PipelineStage]) -> Any:
    how: dict[str, Any] = dict(n_microbatches=case.microbatches, loss_fn=loss, scale_grads=False)
    if case.schedule == "interleaved":
        return ScheduleInterleaved1F1B(stages, **how)
    return {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[case.schedule](stages[0], **how)


def run_case(rank: int, world: int, case: Case, device: torch.device | str = "cpu") -> dict[str, Any]:
    """One step on PP ``case.pp`` × EP 2 processes. ``error``: the largest difference of a gradient from the whole
    stack's; ``needed`` and ``peak`` slots; ``in_use`` slots afterwards; or what was ``raised``."""
    groups = ProcessGroups.create(layout(world, pp=case.pp, ep=EP))
    pp_rank, ep_rank = dist.get_rank(groups.pp), dist.get_rank(groups.ep_mp)
    needed = needed_slots(case, pp_rank)
    config = EPConfig(
        form=case.form,
        capacity=CapacityConfig("dropless", float(EP)),  # room for all routes to go to one rank, where no count is seen
        max_tokens=T,
        slots=needed - (case.short_rank == pp_rank),
        timeout_s=30,
        diagnostic_fill="nan",
    )
    dispatcher = build_dispatcher(
        config, num_experts=E, top_k=K, hidden_size=D, dtype=torch.float64, group=groups.ep_mp, device=device
    )
    first = [sum(case.layers[:index]) for index in range(len(case.layers))]
    stages = [
        PipelineStage(
            Stage(range(first[index], first[index] + case.layers[index]), dispatcher, case.region),
            index,
            len(case.layers),
            torch.device(device),
            group=groups.pp,
        )
        for index in range(pp_rank, len(case.layers), case.pp)
    ]
    schedule = build_schedule(case, stages)
    x, target = (part.to(device) for part in batch(case, ep_rank))
    inputs = (x,) if pp_rank == 0 else ()
    try:
        schedule.step(*inputs, target=target) if pp_rank == case.pp - 1 else schedule.step(*inputs)
        dispatcher.check()
    except Exception as error:
        # The other stages wait for this one on the pipeline's group, which torch leaves open.
        dist.destroy_process_group(groups.pp)
        dispatcher.close()
        return {"raised": _chain(error)}
    layers = [layer for stage in stages for layer in stage.submod.layers]
    error, stats = largest_error(layers, whole_gradients(case), groups.ep_mp), dispatcher.stats()
    dispatcher.close()
    groups.destroy()
    return {"error": error, "needed": needed, "peak": stats["slots_peak"], "in_use": stats["slots_in_use"]}


def largest_error(layers: list[MoELayer], want: dict[str, Tensor], group: dist.ProcessGroup) -> float:
    """How far any gradient is from the one wanted, relative to the largest entry of its parameter."""
    worst = 0.0
    for layer in layers:
        own = layer.dispatcher.rank * layer.dispatcher.num_local_experts
        for name, parameter in layer.named_parameters():
            grad, expected = parameter.grad, want[f"{layer.number}.{name}"]
            if grad is None:
                return float("inf")
            if name == "router":
                dist.all_reduce(grad, group=group)  # replicated: a sum over the ranks' tokens
            else:
                expected = expected[own : own + layer.dispatcher.num_local_experts]
            worst = max(worst, float((grad.cpu() - expected).abs().max() / expected.abs().max()))
    return worst


def _chain(error: BaseException | None) -> list[str]:
    """The messages of an error and of what caused it, outermost first."""
    found = []
    while error is not None:
        found.append(f"{type(error).__name__}: {error}")
        error = error.__cause__ or error.__context__
    return found
