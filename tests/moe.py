"""MoE steps to test dispatchers with: the inputs of all ranks, one rank's step, and what the oracle says of it.

Legend: T tokens of a rank, K routes per token, E experts, E_l experts of a rank, D hidden size, F expert width.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import torch
import torch.distributed as dist
from torch import Tensor

from ep_plugin.config import CapacityConfig, EPConfig
from ep_plugin.dispatch import Dispatcher, build_dispatcher
from ep_plugin.experts import Activation, GroupedMLP
from ep_plugin.layer import moe_step
from ep_plugin.oracle import moe_oracle, reference_mlp, swiglu

PATHS = ("block", "dedup", "route")  # the dispatchers of several ranks; dedup and route are the forms of rowwise
WEIGHT_AT = ("hidden", "input", "output", "source")

# Largest error of a tensor, relative to its largest entry (at least 1), against the oracle in float64.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 3e-6, torch.float16: 4e-3, torch.bfloat16: 2.5e-2}


@dataclass(frozen=True)
class Problem:
    """The inputs of one MoE step on all ranks. ``tokens``: T of every rank; ``routes``: a name that ``ids`` knows."""

    tokens: tuple[int, ...]
    routes: str = "any"
    num_experts: int = 12
    top_k: int = 3
    hidden: int = 16
    width: int = 10
    dtype: torch.dtype = torch.float64
    weight_dtype: torch.dtype | None = None
    index_dtype: torch.dtype = torch.int64
    strided: bool = False
    policy: str = "dropless"
    factor: float = 1.25
    seed: int = 0

    @property
    def world(self) -> int:
        return len(self.tokens)

    @property
    def capacity(self) -> CapacityConfig:
        return CapacityConfig(self.policy, self.factor)

    def config(self, path: str, weight_at: str = "hidden", **settings) -> EPConfig:
        """Settings of ``path``, with buffers poisoned before every use and time-outs that end a hanging test."""
        rowwise = path in ("dedup", "route")
        settings = {"diagnostic_fill": "nan", "timeout_s": 30.0, "capacity": self.capacity, **settings}
        return EPConfig(
            dispatcher="rowwise" if rowwise else path,
            form=path if rowwise else "dedup",
            weight_at=weight_at,
            **settings,
        )

    def dispatcher(self, path: str, weight_at: str = "hidden", group=None, heap=None, **settings) -> Dispatcher:
        return build_dispatcher(
            self.config(path, weight_at, **settings),
            num_experts=self.num_experts,
            top_k=self.top_k,
            hidden_size=self.hidden,
            dtype=self.dtype,
            group=group,
            heap=heap,
        )

    def ids(self, rank: int, generator: torch.Generator) -> Tensor:
        """int64 [T, K] expert ids of ``rank``."""
        tokens, k, experts = self.tokens[rank], self.top_k, self.num_experts
        local = experts // self.world

        def draw(low: int, high: int) -> Tensor:
            return torch.randint(low, high, (tokens, k), generator=generator)

        if self.routes == "any":  # −1 and repeated experts too
            return draw(-1, experts)
        if self.routes == "distinct":
            return torch.rand(tokens, experts, generator=generator).argsort(1)[:, :k]
        if self.routes == "to_last_rank":
            return draw(experts - local, experts)
        if self.routes == "to_own_rank":
            return draw(rank * local, (rank + 1) * local)
        if self.routes == "one_expert":  # K times the same one
            return torch.full((tokens, k), experts // 2)
        if self.routes == "even_experts":
            return draw(0, (experts + 1) // 2) * 2
        if self.routes == "none":
            return torch.full((tokens, k), -1)
        raise ValueError(f"routes={self.routes!r}")


@dataclass
class Inputs:
    """What one rank passes to a step, and the gradient that comes back to its output."""

    x: Tensor  # [T, D]
    idx: Tensor  # [T, K]
    weight: Tensor  # [T, K]
    upstream: Tensor  # [T, D]


def make_inputs(problem: Problem) -> list[Inputs]:
    """The inputs of every rank, the same in every process."""
    generator = torch.Generator().manual_seed(problem.seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(problem.dtype)

    inputs = []
    for rank, tokens in enumerate(problem.tokens):
        idx = problem.ids(rank, generator).to(problem.index_dtype)
        weight = torch.rand(tokens, problem.top_k, generator=generator, dtype=torch.float64)
        weight = weight.to(problem.weight_dtype or problem.dtype)
        x, upstream = randn(tokens, problem.hidden), randn(tokens, problem.hidden)
        if problem.strided:
            x, idx, weight, upstream = (tensor.t().contiguous().t() for tensor in (x, idx, weight, upstream))
        inputs.append(Inputs(x, idx, weight, upstream))
    return inputs


def make_parameters(problem: Problem) -> list[Tensor]:
    """up [E, 2F, D], down [E, D, F], up_bias [E, 2F], down_bias [E, D] of all experts, the same in every process."""
    generator = torch.Generator().manual_seed(problem.seed + 1000)
    e, d, f = problem.num_experts, problem.hidden, problem.width

    def randn(scale: float, *shape: int) -> Tensor:
        return (torch.randn(*shape, generator=generator, dtype=torch.float64) * scale).to(problem.dtype)

    return [randn(d**-0.5, e, 2 * f, d), randn(f**-0.5, e, d, f), randn(1.0, e, 2 * f), randn(1.0, e, d)]


def make_experts(problem: Problem, rank: int, world: int) -> GroupedMLP:
    """The experts of ``rank``, with biases."""
    local = problem.num_experts // world
    mine = slice(rank * local, (rank + 1) * local)
    parameters = [torch.nn.Parameter(p[mine].clone()) for p in make_parameters(problem)]
    return GroupedMLP.from_parameters(*parameters, activation=Activation())


@dataclass
class Result:
    """What one rank gets of a step, forward and backward."""

    out: Tensor
    dx: Tensor
    dweight: Tensor
    dup: Tensor
    ddown: Tensor
    dup_bias: Tensor
    ddown_bias: Tensor


def run_step(dispatcher: Dispatcher, experts: GroupedMLP, inputs: Inputs, layer: str = "layer") -> Result:
    """One forward and backward of one rank."""
    x, weight = inputs.x.detach().requires_grad_(), inputs.weight.detach().requires_grad_()
    experts.zero_grad()
    out = moe_step(dispatcher, x, inputs.idx, weight, experts, layer=layer)
    out.backward(inputs.upstream)
    gradients = [x.grad, weight.grad, *(p.grad for p in experts.parameters())]
    missing = [i for i, gradient in enumerate(gradients) if gradient is None]
    if missing:
        raise AssertionError(f"gradients {missing} of (x, weight, up, down, up_bias, down_bias) are None")
    return Result(out.detach(), *gradients)


def oracle(problem: Problem, weight_at: str) -> list[Result]:
    """What the oracle says of every rank, computed in float64 from the same inputs."""
    inputs, world = make_inputs(problem), problem.world
    xs = [i.x.double().requires_grad_() for i in inputs]
    weights = [i.weight.double().requires_grad_() for i in inputs]
    parameters = [p.double().requires_grad_() for p in make_parameters(problem)]
    outs = moe_oracle(
        xs,
        [i.idx for i in inputs],
        weights,
        reference_mlp(*parameters, activation=swiglu, weight_at=weight_at),
        problem.capacity,
        world=world,
        num_experts=problem.num_experts,
        weight_at=weight_at,
    )
    torch.autograd.backward(outs, [i.upstream.double() for i in inputs])
    local = problem.num_experts // world
    results = []
    for rank in range(world):
        mine = slice(rank * local, (rank + 1) * local)
        gradients = [xs[rank].grad, weights[rank].grad, *(p.grad[mine] for p in parameters)]
        results.append(Result(outs[rank].detach(), *gradients))
    return results


def oracles(rank: int, world: int, asked: Sequence[tuple[Problem, str]]) -> dict[tuple[Problem, str], Result]:
    """This rank's ``oracle`` of each (problem, weight_at); every rank works on a share of them. Collective."""
    distinct = list(dict.fromkeys(asked))
    mine = {key: oracle(*key) for key in distinct[rank::world]}
    gathered: list[dict] = [{}] * world
    dist.all_gather_object(gathered, mine)
    return {key: results[rank] for part in gathered for key, results in part.items()}


def differences(got: Result, want: Result, problem: Problem) -> list[str]:
    """What of ``got`` is not what the oracle says: too far off, of another dtype, or not 0 where nothing was routed."""
    wrong = []
    for field in fields(Result):
        a, b = getattr(got, field.name), getattr(want, field.name)
        dtype = problem.weight_dtype or problem.dtype if field.name == "dweight" else problem.dtype
        tolerance = TOLERANCE[problem.dtype] + (torch.finfo(dtype).eps if dtype != problem.dtype else 0.0)
        if a.shape != b.shape or a.dtype != dtype:
            wrong.append(f"{field.name}: {a.dtype} {tuple(a.shape)}, expected {dtype} {tuple(b.shape)}")
        elif b.numel():
            error = float((a.double() - b).abs().max()) / max(1.0, float(b.abs().max()))
            if not error <= tolerance:  # NaN is not
                wrong.append(f"{field.name}: error {error:.3g} > {tolerance:.3g}")
            if (a[b == 0] != 0).any():
                wrong.append(f"{field.name}: not 0 where the oracle's is")
    return wrong


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal in dtype, shape and every value; NaN equals nothing."""
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """Memory that nobody wrote reads as NaN (or the largest integer)."""
    torch.use_deterministic_algorithms(True)
    try:
        if not torch.empty(8).isnan().all():
            raise AssertionError("uninitialised memory is not filled with NaN")
        yield
    finally:
        torch.use_deterministic_algorithms(False)
