"""A stack of MoE layers on one dispatcher, x ← x + MoE(x), whose gradients are compared between ways to run it.

Legend: T tokens of a rank, K routes per token, E experts, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ep_plugin.experts import GroupedMLP
from ep_plugin.layer import moe_step
from tests.moe import Problem, make_experts, make_inputs

Faults = list[str]


class Stack:
    """``layers`` MoE layers over one dispatcher, with a residual, and what each gradient should be.

    Router weights depend on x, as in a model, so that a checkpointed region computes them again.
    """

    def __init__(self, problem: Problem, layers: int, rank: int, path: str, **settings: Any) -> None:
        self.problem, self.layers, self.rank = problem, layers, rank
        self.dispatcher = problem.dispatcher(path, **settings)
        seeds = [Problem(**{**vars(problem), "seed": problem.seed + layer}) for layer in range(layers)]
        self.experts: list[GroupedMLP] = [make_experts(p, rank, problem.world) for p in seeds]
        self.ids = [make_inputs(p)[rank].idx for p in seeds]
        generator = torch.Generator().manual_seed(99)
        shape = (problem.top_k, problem.hidden)
        self.routers = [
            torch.nn.Parameter(torch.randn(shape, generator=generator, dtype=problem.dtype) * 0.3)
            for _ in range(layers)
        ]

    def layer(self, number: int, x: Tensor, ids: Tensor | None = None) -> Tensor:
        weight = torch.sigmoid(x @ self.routers[number].t())
        ids = self.ids[number] if ids is None else ids
        return x + moe_step(self.dispatcher, x, ids, weight, self.experts[number], layer=f"layers.{number}")

    def forward(self, x: Tensor, start: int = 0, end: int | None = None) -> Tensor:
        for number in range(start, self.layers if end is None else end):
            x = self.layer(number, x)
        return x

    def input(self, microbatch: int = 0) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * microbatch + self.rank)
        shape = (self.problem.tokens[self.rank], self.problem.hidden)
        return torch.randn(shape, generator=generator, dtype=self.problem.dtype).requires_grad_()

    def gradients(self) -> list[Tensor]:
        """Of all parameters, cleared here."""
        parameters = [*self.routers, *(p for experts in self.experts for p in experts.parameters())]
        grads = [p.grad for p in parameters]
        for p in parameters:
            p.grad = None
        return grads

    @property
    def in_use(self) -> int:
        return self.dispatcher.stats()["slots_in_use"]

    def close(self) -> None:
        self.dispatcher.close()


def loss(out: Tensor) -> Tensor:
    return (out * out).sum()


def compare(what: str, got: list[Tensor], want: list[Tensor]) -> Faults:
    return [
        f"{what}: tensor {i} is {'missing' if a is None else f'off by {float((a - b).abs().max()):.3g}'}"
        for i, (a, b) in enumerate(zip(got, want, strict=True))
        if a is None or not torch.allclose(a, b, rtol=1e-11, atol=1e-11)
    ]


def one_step(stack: Stack, run: Callable[[Tensor], Tensor], microbatch: int = 0) -> list[Tensor]:
    """Output, gradient of the input and of all parameters."""
    x = stack.input(microbatch)
    out = run(x)
    loss(out).backward()
    return [out.detach(), x.grad, *stack.gradients()]
