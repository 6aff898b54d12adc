"""Train one variant of a launch and give its curve."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..metrics import MetricsLog, StepMetrics, moved
from ..topology import Layout
from . import checkpoint
from .model import build_model
from .overflow import RERUNS, still_too_small
from .parallel import Replicated, parallelize
from .routes import RouteRecorder, expert_load
from .settings import RunConfig, TrainerConfig
from .text import Corpus, batch


@dataclass
class Curve:
    """What one variant did. ``steps`` holds the metrics of every step (the same on all ranks), ``routes`` this rank's
    routes int16 [layers, T, K] of every step where they were kept, ``load`` the last step's routes per expert
    [layers, E].
    """

    name: str
    layout: Layout
    dispatcher: str
    parameters_per_rank: int
    expert_parameters_per_rank: int
    steps: list[StepMetrics] = field(default_factory=list)
    routes: list[Tensor] = field(default_factory=list)
    load: Tensor | None = None

    @property
    def losses(self) -> list[float]:
        """Loss of every step, nats."""
        return [step.loss for step in self.steps]

    @property
    def tokens_per_s(self) -> float:
        """Mean rate over all ranks; the first step, which allocates, is left out where there are more."""
        steps = self.steps[1:] or self.steps
        return sum(s.seconds * s.tokens_per_s for s in steps) / sum(s.seconds for s in steps)

    def mean(self, name: str) -> float:
        """Mean of one of ``StepMetrics``' numbers over the steps."""
        return sum(getattr(step, name) for step in self.steps) / len(self.steps)


@dataclass
class Place:
    """Where this process stands and what it may write."""

    rank: int
    device: torch.device
    folder: Path
    log: MetricsLog | None

    @property
    def leads(self) -> bool:
        """Whether this process prints and writes."""
        return self.rank == 0


def learning_rate(config: TrainerConfig, step: int) -> float:
    """Linear warm-up, then constant; a function of the step alone, so that a resumed run continues it."""
    return config.lr * min(1.0, (step + 1) / max(config.warmup, 1))


def train(config: RunConfig, name: str, layout: Layout, corpus: Corpus, place: Place, *, keep_routes: bool) -> Curve:
    """Train ``config`` and return its curve; collective over WORLD.

    ``name`` is the variant's name in metrics and folders. ``keep_routes`` keeps the routes of every step for a
    comparison.
    """
    settings = config.trainer
    if settings.megatron is not None:
        from .megatron import train_megatron

        return train_megatron(config, name, layout, corpus, place, keep_routes=keep_routes)
    if settings.hf is not None:
        from .huggingface import train_huggingface

        return train_huggingface(config, name, layout, corpus, place, keep_routes=keep_routes)
    torch.set_num_threads(settings.threads)
    first_step = checkpoint.read_header(settings.resume).step if settings.resume is not None else 0
    model = _model(config, place.device)
    parallel = parallelize(model, config, layout, place.device)
    recorder = RouteRecorder(list(parallel.experts.values()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr, weight_decay=settings.weight_decay)
    parallel.attach(optimizer)
    if settings.resume is not None:
        checkpoint.load_optimizer(settings.resume, parallel, optimizer)
    curve = Curve(
        name,
        layout,
        config.ep.dispatcher if config.patch_experts else "none",
        parallel.parameters_per_rank,
        parallel.expert_parameters_per_rank,
    )
    share = {"rank": layout.coordinate(place.rank)["dp"], "world": layout.dp}
    size = {"batch_size": settings.batch_size, "seq_len": settings.seq_len}
    for step in range(first_step, settings.steps):
        tokens = torch.from_numpy(batch(corpus, seed=config.seed, step=step, **size, **share)).to(place.device)
        routes = _step(config, curve, parallel, optimizer, recorder, tokens, step)
        if keep_routes:
            curve.routes.append(routes.cpu())
        report(curve, settings, place)
        done = step + 1
        due = done == settings.steps or (settings.checkpoint_every > 0 and done % settings.checkpoint_every == 0)
        if settings.checkpoint and due:
            header = checkpoint.Header(
                done, layout.world_size, layout.ep, config.patch_experts, model=asdict(config.model)
            )
            folder = place.folder / "checkpoints" / name / f"step_{done:06d}"
            checkpoint.save(folder, parallel, optimizer, header, place.rank)
    # Only after success: closing is collective, and after an error the peers are not here.
    recorder.close()
    parallel.close()
    return curve


def _model(config: RunConfig, device: torch.device) -> nn.Module:
    dtype = getattr(torch, config.trainer.dtype)
    if config.trainer.resume is not None:
        return checkpoint.load_model(config.trainer.resume, dtype=dtype, device=device).train()
    return build_model(config.model, seed=config.seed, dtype=dtype, device=device).train()


def _step(
    config: RunConfig,
    curve: Curve,
    parallel: Replicated,
    optimizer: torch.optim.Optimizer,
    recorder: RouteRecorder,
    tokens: Tensor,
    step: int,
) -> Tensor:
    """One optimizer step on this rank's ``tokens`` [B, S]: adds its metrics to ``curve`` and returns its routes."""
    settings = config.trainer
    began = time.perf_counter()
    sent_before = parallel.bytes_sent()
    lr = learning_rate(settings, step)
    for group in optimizer.param_groups:
        group["lr"] = lr
    output, routes = _gradients(parallel, optimizer, recorder, tokens, step)
    norm = parallel.clip_grad_norm(settings.clip_norm if settings.clip_norm is not None else float("inf"))
    optimizer.step()

    aux = output.aux_loss.detach() * config.model.aux_loss_coef if output.aux_loss is not None else 0.0
    sent = torch.tensor(moved(sent_before, parallel.bytes_sent()), dtype=torch.float64)
    own = [output.loss.detach() - aux, parallel.drop_rate(), sent]
    load = expert_load(routes, config.model.num_experts)
    totals = torch.cat([torch.stack([o.to(load) for o in own]), load.flatten()])
    dist.all_reduce(totals)
    loss, dropped, bytes_moved = totals[:3].tolist()
    curve.load = totals[3:].reshape(load.shape).cpu()
    world = curve.layout.world_size
    seconds = time.perf_counter() - began
    curve.steps.append(
        StepMetrics(
            run=curve.name,
            step=step + 1,
            loss=loss / world,
            lr=lr,
            grad_norm=float(norm),
            seconds=seconds,
            tokens_per_s=settings.batch_size * settings.seq_len / seconds,
            drop_rate=dropped / world,
            expert_load=float((curve.load.amax(1) / curve.load.mean(1)).max()),
            bytes_moved=bytes_moved,
        )
    )
    return routes


def _gradients(
    parallel: Replicated, optimizer: torch.optim.Optimizer, recorder: RouteRecorder, tokens: Tensor, step: int
) -> tuple[Any, Tensor]:
    """Forward and backward on ``tokens``: the model's output and the routes. A step whose routes overflowed the expert
    ranks' buffers is discarded on all ranks, and run again with larger ones."""
    for _ in range(1 + RERUNS):
        optimizer.zero_grad()
        output = parallel.forward_model(input_ids=tokens, labels=tokens)
        routes = recorder.take()
        output.loss.backward()
        overflow = parallel.overflows.found()
        if overflow is None:
            return output, routes
        output = None  # and with it what still leases a buffer
        optimizer.zero_grad()
        parallel.overflows.regrow(overflow)
    raise still_too_small(f"step {step + 1}")


def report(curve: Curve, settings: TrainerConfig, place: Place) -> None:
    """Log the last step and, when it is due, print its line; on the process that leads."""
    if not place.leads:
        return
    metrics = curve.steps[-1]
    if place.log is not None:
        place.log.write(metrics)
    if metrics.step == 1 or metrics.step == settings.steps or metrics.step % settings.log_every == 0:
        print(metrics.line(settings.steps), flush=True)
