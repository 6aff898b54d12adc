"""One random set of the fuzzer: how it is drawn, what every rank gets of it, what the oracle says, how it is made
smaller.

Legend: T tokens of a rank, K routes per token, E experts, D hidden size, F expert width, M ranks of an EP group.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..config import CapacityConfig, EPConfig, ScheduleConfig
from ..dispatch import Dispatcher
from ..experts import Activation, GroupedMLP
from ..layer import moe_step
from ..oracle import moe_oracle, reference_mlp, swiglu

MOST_TOKENS = 12
ROUTES = ("any", "distinct", "one-rank", "own-rank", "one-expert", "even-experts", "few", "none")
DTYPES = {"float64": 1e-10, "float32": 1e-5, "float16": 1e-2, "bfloat16": 6e-2}
"""The largest error of a tensor against the oracle in float64, relative to its largest entry (at least 1)."""
NAMES = ("out", "dx", "dweight", "dup", "ddown", "dup_bias", "ddown_bias")


@dataclass(frozen=True)
class Setting:
    """What a dispatcher is built for. ``ep`` ranks form an EP group, ``etp`` apart from each other in rank."""

    ep: int
    etp: int
    path: str  # local, block, dedup, route
    weight_at: str
    policy: str
    factor: float
    schedule: str
    waves: int
    by: str
    dtype: str
    local_experts: int
    top_k: int
    hidden: int
    width: int

    @property
    def num_experts(self) -> int:
        return self.ep * self.local_experts

    @property
    def capacity(self) -> CapacityConfig:
        return CapacityConfig(self.policy, self.factor)

    def config(self, heap: str, timeout_s: float) -> EPConfig:
        """Buffers are poisoned before every use."""
        rowwise = self.path in ("dedup", "route")
        return EPConfig(
            dispatcher="rowwise" if rowwise else self.path,
            form=self.path if rowwise else "dedup",
            heap=heap,
            weight_at=self.weight_at,
            capacity=self.capacity,
            schedule=ScheduleConfig(kind=self.schedule, waves=self.waves, by=self.by),
            max_tokens=MOST_TOKENS if heap != "shm" else None,
            timeout_s=timeout_s,
            diagnostic_fill="nan",
        )

    def parameters(self) -> list[Tensor]:
        """up [E, 2F, D], down [E, D, F], up_bias [E, 2F], down_bias [E, D] of all experts, in the rows' dtype."""
        g = torch.Generator().manual_seed(self.num_experts * 1000 + self.width)
        e, d, f = self.num_experts, self.hidden, self.width

        def randn(scale: float, *shape: int) -> Tensor:
            return (torch.randn(*shape, generator=g, dtype=torch.float64) * scale).to(getattr(torch, self.dtype))

        return [randn(d**-0.5, e, 2 * f, d), randn(f**-0.5, e, d, f), randn(1.0, e, 2 * f), randn(1.0, e, d)]

    def experts(self, rank: int, device: torch.device) -> GroupedMLP:
        """The experts of EP rank ``rank``."""
        mine = slice(rank * self.local_experts, (rank + 1) * self.local_experts)
        parameters = [torch.nn.Parameter(p[mine].clone().to(device)) for p in self.parameters()]
        return GroupedMLP.from_parameters(*parameters, activation=Activation())


@dataclass(frozen=True)
class Case:
    """One set: inputs of every rank of an EP group. ``tokens``: T of each; the rest follows from ``seed``."""

    setting: Setting
    tokens: tuple[int, ...]
    routes: str
    weight_dtype: str
    index_dtype: str
    strided: bool
    seed: int

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Case:
        """Raises ``ValueError`` for text that is no case."""
        try:
            fields = json.loads(text)
            setting = Setting(**fields.pop("setting"))
            return Case(setting, **{**fields, "tokens": tuple(fields["tokens"])})
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"{text!r} is no case of this version of the fuzzer: {error}") from error

    def inputs(self, group: int) -> list[Inputs]:
        """Of every rank of EP group number ``group``. Fewer tokens are the first of more."""
        s, found = self.setting, []
        dtype = getattr(torch, s.dtype)
        for rank, tokens in enumerate(self.tokens):
            g = torch.Generator().manual_seed((self.seed * 64 + group) * 64 + rank)
            most = MOST_TOKENS
            idx = self._ids(rank, g, most)[:tokens].to(getattr(torch, self.index_dtype))
            weight = torch.rand(most, s.top_k, generator=g, dtype=torch.float64)[:tokens]
            x, grad = torch.randn(2, most, s.hidden, generator=g, dtype=torch.float64)[:, :tokens].to(dtype)
            made = [x, idx, weight.to(getattr(torch, self.weight_dtype)), grad]
            if self.strided:
                made = [tensor.t().contiguous().t() for tensor in made]
            found.append(Inputs(*made))
        return found

    def _ids(self, rank: int, g: torch.Generator, most: int) -> Tensor:
        """int64 [most, K] expert ids."""
        s = self.setting
        e, local = s.num_experts, s.local_experts

        def draw(low: int, high: int) -> Tensor:
            return torch.randint(low, high, (most, s.top_k), generator=g)

        if self.routes == "any":  # −1 and repeated experts too
            return draw(-1, e)
        if self.routes == "distinct":
            order = torch.rand(most, e, generator=g).argsort(1)[:, : s.top_k]
            return torch.nn.functional.pad(order, (0, s.top_k - order.shape[1]), value=-1)
        if self.routes == "one-rank":
            return draw(e - local, e)
        if self.routes == "own-rank":
            return draw(rank * local, (rank + 1) * local)
        if self.routes == "one-expert":
            return torch.full((most, s.top_k), e // 2)
        if self.routes == "even-experts":
            return draw(0, (e + 1) // 2) * 2
        if self.routes == "few":
            return draw(0, e).masked_fill(torch.rand(most, s.top_k, generator=g) < 0.8, -1)
        return torch.full((most, s.top_k), -1)

    def oracle(self, group: int) -> list[list[Tensor]]:
        """What every rank must get, tensors as in ``NAMES``, in float64 from the same inputs."""
        s, inputs = self.setting, self.inputs(group)
        xs = [i.x.double().requires_grad_() for i in inputs]
        weights = [i.weight.double().requires_grad_() for i in inputs]
        parameters = [p.double().requires_grad_() for p in s.parameters()]
        expert = reference_mlp(*parameters, activation=swiglu, weight_at=s.weight_at)
        outs = moe_oracle(
            xs,
            [i.idx for i in inputs],
            weights,
            expert,
            s.capacity,
            world=s.ep,
            num_experts=s.num_experts,
            weight_at=s.weight_at,
        )
        torch.autograd.backward(outs, [i.grad.double() for i in inputs])
        results = []
        for rank in range(s.ep):
            mine = slice(rank * s.local_experts, (rank + 1) * s.local_experts)
            of_parameters: Any = [p.grad for p in parameters]
            grads: Any = [xs[rank].grad, weights[rank].grad, *(grad[mine] for grad in of_parameters)]
            results.append([outs[rank].detach(), *grads])
        return results

    def smaller(self) -> Iterator[Case]:
        """Cases that say the same in fewer words, the boldest first."""
        s = self.setting
        for r, tokens in enumerate(self.tokens):
            for fewer in sorted({0, tokens // 2, tokens - 1}):
                if 0 <= fewer < tokens:
                    yield replace(self, tokens=(*self.tokens[:r], fewer, *self.tokens[r + 1 :]))
        plain: dict[str, Any] = dict(schedule="none", weight_at="hidden", etp=1)
        if s.width < MOST_TOKENS:  # GPUs, whose kernels take few widths, draw wider ones
            plain |= dict(width=8, hidden=min(s.hidden, 8))
        for name, value in plain.items():
            if getattr(s, name) != value:
                yield replace(self, setting=replace(s, **{name: value}))
        if s.policy != "dropless":
            yield replace(self, setting=replace(s, policy="dropless", factor=float(s.ep)))
        for name in ("top_k", "local_experts"):
            if getattr(s, name) > 1:
                less: Setting = replace(s, **{name: getattr(s, name) - 1})
                if less.top_k <= less.num_experts:
                    yield replace(self, setting=less)
        outside: dict[str, Any] = {"weight_dtype": s.dtype, "index_dtype": "int64", "strided": False}
        for name, value in outside.items():
            if getattr(self, name) != value:
                yield replace(self, **{name: value})


@dataclass
class Inputs:
    """x [T, D], expert ids [T, K], router weights [T, K], and the gradient of the output [T, D]."""

    x: Tensor
    idx: Tensor
    weight: Tensor
    grad: Tensor


def draw_setting(rng: random.Random, world: int, device: str) -> Setting:
    """A setting that is allowed on ``world`` ranks of ``device`` ("cpu", "cuda")."""
    ep = rng.choice([d for d in range(1, world + 1) if world % d == 0 and (d > 1 or rng.random() < 0.2)] or [world])
    etp = rng.choice([d for d in range(1, world // ep + 1) if (world // ep) % d == 0])
    path = rng.choice(("block", "dedup", "route") if ep > 1 else ("local", "block", "dedup", "route"))
    weight_at = rng.choice(("hidden", "input", "output", *(() if path == "dedup" else ("source",))))
    waves = path != "local" and rng.random() < 0.3
    local = rng.choice((1, 2, 3, 4)) if device == "cpu" else 4
    by = rng.choice(("token", "expert")) if local > 1 else "token"
    policy = rng.choice(("dropless", "dropless", "rank", "source", "expert"))
    factor = rng.choice((0.3, 0.75, 1.0, 1.25, 1.2, 2.0))
    if device != "cpu" and policy == "dropless":
        factor = float(ep)  # where buffers have a bound, one that holds whatever comes
    return Setting(
        ep=ep,
        etp=etp,
        path=path,
        weight_at=weight_at,
        policy=policy,
        factor=factor,
        schedule=rng.choice(("wave_sequential", "wave_overlapped")) if waves else "none",
        waves=rng.choice((1, 2, 3)) if by == "token" else rng.choice((1, 2)),
        by=by,
        dtype=rng.choice(tuple(DTYPES)) if device == "cpu" else "bfloat16",
        local_experts=local,
        top_k=rng.randint(1, min(4, ep * local)) if device == "cpu" else 4,
        hidden=rng.choice((1, 5, 8, 16)) if device == "cpu" else 64,
        width=rng.choice((3, 8)) if device == "cpu" else 32,
    )


def draw_case(rng: random.Random, setting: Setting, device: str) -> Case:
    """A set for a dispatcher of ``setting``."""
    most = MOST_TOKENS if rng.random() < 0.2 else MOST_TOKENS // 2
    return Case(
        setting,
        tokens=tuple(rng.choice((0, 1, rng.randint(0, most), rng.randint(0, most))) for _ in range(setting.ep)),
        routes=rng.choice(ROUTES),
        weight_dtype=rng.choice((setting.dtype, setting.dtype, "float32", "bfloat16")),
        index_dtype=rng.choice(("int64", "int64", "int32", "int16")) if device == "cpu" else "int64",
        strided=rng.random() < 0.2,
        seed=rng.randrange(1 << 40),
    )


def step(
    case: Case, group: int, rank: int, dispatcher: Dispatcher[Any], experts: Any, device: torch.device
) -> list[Tensor]:
    """One forward and backward of EP rank ``rank`` of EP group ``group``: tensors as in ``NAMES``."""
    mine = case.inputs(group)[rank]
    x = mine.x.to(device).requires_grad_()
    weight = mine.weight.to(device).requires_grad_()
    for parameter in experts.parameters():
        parameter.grad = None
    out = moe_step(dispatcher, x, mine.idx.to(device), weight, experts, layer="fuzz")
    out.backward(mine.grad.to(device))
    found = [out.detach(), x.grad, weight.grad, *(p.grad for p in experts.parameters())]
    missing = [name for name, tensor in zip(NAMES, found, strict=True) if tensor is None]
    if missing:
        raise RuntimeError(f"no gradient: {', '.join(missing)}")
    return [tensor.cpu() for tensor in found if tensor is not None]


def differences(case: Case, got: list[Tensor], want: list[Tensor], group: int, rank: int) -> list[str]:
    """What of ``got`` is not what the oracle says: too far off, of another dtype, or not 0 where nothing was routed.

    The gradient of a router weight is the product of two rows, whose terms cancel: it is as exact as they are long."""
    wrong = []
    for name, a, b in zip(NAMES, got, want, strict=True):
        dtype = getattr(torch, case.weight_dtype if name == "dweight" else case.setting.dtype)
        if a.shape != b.shape or a.dtype != dtype:
            wrong.append(f"{name}: {a.dtype} {list(a.shape)}, expected {dtype} {list(b.shape)}")
        elif b.numel():
            scale, tolerance = max(1.0, float(b.abs().max())), DTYPES[case.setting.dtype]
            if name == "dweight":
                scale = max(scale, float(case.inputs(group)[rank].grad.double().norm(dim=1).max()))
                tolerance += 2 * torch.finfo(dtype).eps
            error = float((a.double() - b).abs().max()) / scale
            if not error <= tolerance:  # NaN is not
                wrong.append(f"{name}: error {error:.3g} > {tolerance:.3g}")
            nothing = b == 0 if name == "dweight" else (b.flatten(1) == 0).all(1)  # sums may cancel
            if bool((a[nothing] != 0).any()):
                wrong.append(f"{name}: not 0 where the oracle's is")
    return wrong
