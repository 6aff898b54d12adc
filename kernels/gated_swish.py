"""The gated activation between the two projections of an expert: g·σ(αg)·(u + offset)·w, g and u clamped if asked.

SwiGLU is α = 1 without clamps; α = 1.702 with a clamp at 7 and offset 1 is gpt_oss's. The references take the kernels'
arithmetic (the sigmoid of mxfp8_swiglu), so that both agree bit for bit, row sums aside.

Legend: R rows, F expert width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .mxfp8_swiglu import sigmoid_torch


@dataclass(frozen=True)
class GatedSwish:
    """``alpha``: of the sigmoid. ``limit``: the gate is clamped from above, the linear half on both sides (None: not).
    ``offset``: added to the linear half after the clamp. ``interleaved``: gate and linear alternate column by column;
    otherwise the gate half comes first."""

    alpha: float = 1.0
    limit: float | None = None
    offset: float = 0.0
    interleaved: bool = False

    def split(self, up: Tensor) -> tuple[Tensor, Tensor]:
        """Gate and linear [R, F] of ``up`` [R, 2F], as views."""
        return (up[:, ::2], up[:, 1::2]) if self.interleaved else (up[:, : up.shape[1] // 2], up[:, up.shape[1] // 2 :])


def _parts(up: Tensor, shape: GatedSwish) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gate and linear half as they came, then clamped and moved, then the sigmoid; all float32."""
    raw_gate, raw_linear = (half.to(torch.float32) for half in shape.split(up))
    gate, linear = raw_gate, raw_linear
    if shape.limit is not None:
        gate, linear = gate.clamp(max=shape.limit), linear.clamp(min=-shape.limit, max=shape.limit)
    if shape.offset:
        linear = linear + shape.offset
    return raw_gate, raw_linear, gate, linear, sigmoid_torch(gate if shape.alpha == 1 else gate * shape.alpha)


def gated_swish_torch(up: Tensor, weights: Tensor | None = None, shape: GatedSwish | None = None) -> Tensor:
    """``up`` [R, 2F] of a float dtype, ``weights`` float32 [R] → h [R, F] in float32, to be rounded once."""
    _, _, gate, linear, sigmoid = _parts(up, shape or GatedSwish())
    hidden = gate * sigmoid * linear
    return hidden if weights is None else hidden * weights.unsqueeze(-1)


def gated_swish_backward_torch(
    up: Tensor, dhidden: Tensor, weights: Tensor | None = None, shape: GatedSwish | None = None
) -> tuple[Tensor, Tensor | None]:
    """The gradients of ``up`` [R, 2F] and of ``weights`` [R], float32, from that of h, ``dhidden`` [R, F].

    Clamped values get none, as in torch.clamp.
    """
    shape = shape or GatedSwish()
    raw_gate, raw_linear, gate, linear, sigmoid = _parts(up, shape)
    grad = dhidden.to(torch.float32)
    swish = gate * sigmoid
    dweights = None
    if weights is not None:
        dweights = (grad * (swish * linear)).sum(-1)
        grad = grad * weights.unsqueeze(-1)
    bent = swish if shape.alpha == 1 else swish * shape.alpha
    dgate = grad * linear * (bent * (1.0 - sigmoid) + sigmoid)
    dlinear = grad * swish
    if shape.limit is not None:
        dgate = torch.where(raw_gate <= shape.limit, dgate, 0.0)
        dlinear = torch.where((raw_linear >= -shape.limit) & (raw_linear <= shape.limit), dlinear, 0.0)
    dup = torch.empty(up.shape, dtype=torch.float32, device=up.device)
    for half, values in zip(shape.split(dup), (dgate, dlinear), strict=True):
        half.copy_(values)
    return dup, dweights
