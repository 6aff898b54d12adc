"""What happens between the up and the down projection of an expert: activation, gate, router weight.

Legend: R rows, F expert width, G = 2F for a gated activation, else F.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..kernels.gated_swish import GatedSwish
from ..kernels.reduce import accumulation_dtype
from ..kernels.scatter_rows import scatter_rows
from .groups import valid_rows, zero_padding


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def _relu_squared(x: Tensor) -> Tensor:
    return torch.square(F.relu(x))


def _identity(x: Tensor) -> Tensor:
    return x


_gelu_tanh = partial(F.gelu, approximate="tanh")

# Names as trainers' configs spell them; several names of one function are common.
_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "swish": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "gelu_new": _gelu_tanh,
    "quick_gelu": _quick_gelu,
    "relu": F.relu,
    "relu2": _relu_squared,
    "relu_squared": _relu_squared,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "identity": _identity,
    "linear": _identity,
}


@dataclasses.dataclass(frozen=True)
class Activation:
    """An expert's activation: up-projection output [R, G] → hidden [R, F].

    gated: act(min(gate, limit)) · (clamp(up, ±limit) + up_offset); not gated: act(x).

    Args:
        name: the function's name, for example "silu", "gelu", "gelu_pytorch_tanh", "relu2".
        gated: the up projection gives a gate and an up half.
        interleaved: gate and up alternate column by column; otherwise the gate half comes first.
        limit: clamp of gate (from above) and up (both sides); None = no clamp.
        up_offset: added to the up half after the clamp.
        function: an elementwise differentiable callable that takes the place of the named one (any entry of
            transformers' ACT2FN). Trainable parameters inside are refused: they would get no gradient.
        whole: a callable [R, G] → [R, F] that takes the place of everything above, for a model with a gate of its own.
    """

    name: str = "silu"
    gated: bool = True
    interleaved: bool = False
    limit: float | None = None
    up_offset: float = 0.0
    function: Callable[[Tensor], Tensor] | None = None
    whole: Callable[[Tensor], Tensor] | None = None

    def __post_init__(self) -> None:
        if self.function is None and self.whole is None and self.name not in _FUNCTIONS:
            raise ValueError(f"activation {self.name!r} is unknown; known: {', '.join(_FUNCTIONS)}; or pass function=")
        if not self.gated and (self.interleaved or self.limit is not None or self.up_offset):
            raise ValueError(
                f"interleaved={self.interleaved}, limit={self.limit} and up_offset={self.up_offset} need gated=True"
            )
        if self.limit is not None and not self.limit > 0:
            raise ValueError(f"limit={self.limit} must be positive, or None for no clamp")
        for called in (self.function, self.whole):
            if isinstance(called, torch.nn.Module) and any(p.requires_grad for p in called.parameters()):
                raise ValueError(f"activation {called} has trainable parameters, which would get no gradient here")

    @classmethod
    def clamped_swiglu(cls, *, alpha: float = 1.702, limit: float | None = 7.0, interleaved: bool = True) -> Activation:
        """gpt_oss: g·sigmoid(alpha·g)·(u+1), g = min(gate, limit), u = clamp(up, ±limit), columns interleaved."""
        function = partial(_scaled_swish, alpha=alpha)
        return cls("clamped_swiglu", True, interleaved, limit, up_offset=1.0, function=function)

    @property
    def gated_swish(self) -> GatedSwish | None:
        """What the fused kernels take this activation for; None: they do not know it."""
        if not self.gated or self.whole is not None:
            return None
        alpha = _SWISH_ALPHA.get(self.name) if self.function is None else _alpha_of(self.function)
        return None if alpha is None else GatedSwish(alpha, self.limit, self.up_offset, self.interleaved)

    @property
    def inputs_per_output(self) -> int:
        """G / F: 2 if gated, else 1."""
        return 2 if self.gated else 1

    def __call__(self, up: Tensor) -> Tensor:
        """[R, G] → [R, F] in the dtype of `up`; plain differentiable torch operations."""
        if self.whole is not None:
            return self.whole(up)
        function = self.function if self.function is not None else _FUNCTIONS[self.name]
        if not self.gated:
            return function(up)
        gate, linear = (up[..., ::2], up[..., 1::2]) if self.interleaved else up.chunk(2, dim=-1)
        if self.limit is not None:
            gate = gate.clamp(max=self.limit)
            linear = linear.clamp(min=-self.limit, max=self.limit)
        if self.up_offset:
            linear = linear + self.up_offset
        return function(gate) * linear


def _scaled_swish(x: Tensor, alpha: float) -> Tensor:
    return x * torch.sigmoid(alpha * x)


_SWISH_ALPHA = {"silu": 1.0, "swish": 1.0, "quick_gelu": 1.702}


def _alpha_of(function: Callable[[Tensor], Tensor]) -> float | None:
    """alpha where ``function`` is x·sigmoid(alpha·x) as we write it."""
    if function is F.silu or type(function) is torch.nn.SiLU:
        return 1.0
    if isinstance(function, partial) and function.func is _scaled_swish and not function.args:
        return float(function.keywords["alpha"])
    return None


KERNEL_DEVICES: tuple[str, ...] = ("cuda",)


@cache
def _kernels() -> Any:
    """The module of the fused kernels; None without Triton."""
    if importlib.util.find_spec("triton") is None:
        return None
    from ..kernels import gated_swish_triton

    return gated_swish_triton


def _fused(up: Tensor, activation: Activation) -> GatedSwish | None:
    """The kernels' form of ``activation`` if they take ``up`` [R, G]: on a GPU, in a dtype that accumulates in
    float32."""
    if up.device.type not in KERNEL_DEVICES or accumulation_dtype(up.dtype) != torch.float32:
        return None
    if torch.compiler.is_dynamo_compiling() or _kernels() is None:  # a compiler fuses torch's operations itself
        return None
    return activation.gated_swish


def hidden_rows_of(
    up: Tensor, weights: Tensor | None, offsets: Tensor, activation: Activation, num_rows: int | None
) -> Tensor:
    """activation(up) · weights in acc dtype, rounded once. up [R, G], weights [R] or None, offsets int64 [E_l+1] →
    [R, F] in the dtype of `up`; see ``weighted_activation`` for the padding."""
    total, valid = up.shape[0], valid_rows(offsets, num_rows, up.shape[0])
    shape = _fused(up, activation)
    if shape is not None:
        hidden = up.new_empty(total, up.shape[1] // 2)
        rows = up.detach().contiguous()
        _kernels().gated_swish(rows, _plain(weights), hidden, shape, num_rows=offsets[-1:])
        hidden[valid:].zero_()
        return hidden
    with torch.autocast(up.device.type, enabled=False):
        hidden = activation(up[:valid].to(accumulation_dtype(up.dtype)))
        if weights is not None:
            hidden = hidden * weights[:valid, None].to(hidden.dtype)
        return _padded(hidden.to(up.dtype), total)


@dataclasses.dataclass
class HiddenGradients:
    """``up`` [R, G] in its dtype, ``weights`` [R] in acc dtype (zero on padding) or None."""

    up: Tensor
    weights: Tensor | None


@dataclasses.dataclass(frozen=True)
class Placed:
    """Row r goes to row ``targets[r]`` (int64 [R], -1: nowhere) of ``up`` [any, G] and ``hidden`` [any, F], or None."""

    targets: Tensor
    up: Tensor | None
    hidden: Tensor | None


def hidden_gradients(
    up: Tensor,
    dhidden: Tensor,
    weights: Tensor | None,
    offsets: Tensor,
    activation: Activation,
    num_rows: int | None,
    *,
    placed: Placed | None = None,
    needs_up: bool = True,
    needs_weights: bool = True,
    consume: bool = False,
) -> HiddenGradients:
    """The backward of ``hidden_rows_of`` from `dhidden` [R, F].

    `placed`: where rows go besides. `consume`: nobody reads `up` again, whose memory may hold its gradient.
    """
    total, valid = up.shape[0], valid_rows(offsets, num_rows, up.shape[0])
    needs_weights = needs_weights and weights is not None
    dup = dweights = None
    shape = _fused(up, activation)
    if shape is not None:
        rows = up.detach().contiguous()
        if needs_up:
            dup = rows if consume else torch.empty_like(rows)
        if needs_weights:
            dweights = torch.empty(total, dtype=torch.float32, device=up.device)
        _kernels().gated_swish_backward(
            rows,
            _plain(weights),
            dhidden.detach().contiguous(),
            shape,
            dup=dup,
            dweights=dweights,
            placed=None if placed is None else (placed.targets, placed.up, placed.hidden),
            num_rows=offsets[-1:],
        )
        if dup is not None:
            dup[valid:].zero_()
        return HiddenGradients(dup, dweights)  # type: ignore[arg-type]  # up is made unless nobody needs it
    with torch.autocast(up.device.type, enabled=False):
        up_acc = up[:valid].detach().to(accumulation_dtype(up.dtype))
        grad = dhidden[:valid].to(up_acc.dtype)
        with torch.enable_grad():
            up_acc.requires_grad_(needs_up)
            out = activation(up_acc)
        if needs_weights:
            dweights = zero_padding(_padded((grad * out.detach()).sum(-1), total), offsets)
        scale = None if weights is None else weights[:valid, None].to(grad.dtype)
        if needs_up:
            (dup,) = torch.autograd.grad(out, up_acc, grad if scale is None else grad * scale)
            dup = _padded(dup.to(up.dtype), total)
    if placed is not None:
        if dup is not None and placed.up is not None:
            scatter_rows(dup, placed.targets, placed.up, offsets[-1:])
        if placed.hidden is not None:
            again = _padded((out.detach() if scale is None else out.detach() * scale).to(up.dtype), total)
            scatter_rows(again, placed.targets, placed.hidden, offsets[-1:])
    return HiddenGradients(dup, dweights)  # type: ignore[arg-type]


def weighted_activation(
    up: Tensor,
    weights: Tensor | None,
    offsets: Tensor,
    activation: Activation,
    *,
    num_rows: int | None = None,
    consume: bool = False,
) -> Tensor:
    """h[r] = activation(up[r]) · weights[r], computed in acc dtype and rounded once.

    up [R, G], weights [R] or None, offsets int64 [E_l+1] → [R, F] in the dtype of `up`. Keeps `up` and `weights` alone
    for backward and computes the activation again there. dweights[r] = ⟨dh[r], activation(up[r])⟩ in acc dtype, zero on
    padding. Padding rows of h and of the gradient of `up` are zero where the host knows the number of rows; on a GPU
    with `num_rows=None` they are unspecified.

    On a GPU a gated swish (SwiGLU, quick_gelu, gpt_oss's) is one kernel forward and one backward over the valid rows;
    its sigmoid differs from torch's in the last bit of float32. `consume`: nobody reads `up` after this node's last
    backward, which may then write the gradient there.
    """
    return _WeightedActivation.apply(up, weights, offsets, activation, num_rows, consume)


class _WeightedActivation(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        up: Tensor,
        weights: Tensor | None,
        offsets: Tensor,
        activation: Activation,
        num_rows: int | None,
        consume: bool,
    ) -> Tensor:
        ctx.activation, ctx.num_rows, ctx.consume = activation, num_rows, consume
        ctx.save_for_backward(up, weights, offsets)
        return hidden_rows_of(up, weights, offsets, activation, num_rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dhidden: Tensor) -> tuple[Tensor | None, ...]:
        up, weights, offsets = ctx.saved_tensors
        needs_up, needs_weights = ctx.needs_input_grad[:2]
        found = hidden_gradients(
            up,
            dhidden,
            weights,
            offsets,
            ctx.activation,
            ctx.num_rows,
            needs_up=needs_up,
            needs_weights=needs_weights,
            # A graph that is kept may come here again, and needs `up` then.
            consume=ctx.consume and not torch._C._autograd._get_current_graph_task_keep_graph(),
        )
        dweights = None if found.weights is None else found.weights.to(weights.dtype)
        return found.up, dweights, None, None, None, None


def _plain(weights: Tensor | None) -> Tensor | None:
    return None if weights is None else weights.detach().to(torch.float32).contiguous()


def _padded(part: Tensor, total: int) -> Tensor:
    """`part` with zero rows up to `total`; `part` itself if it is full."""
    if part.shape[0] == total:
        return part
    out = part.new_empty(total, *part.shape[1:])
    out[: part.shape[0]] = part
    out[part.shape[0] :].zero_()
    return out
