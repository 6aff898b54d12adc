"""SwiGLU between the two projections of an expert, in arithmetic that rounds alike on every machine.

The exponential is a polynomial and the quotient is the IEEE one, so that kernels and these references agree bit for bit
before anything is quantised. The gate half comes first: ``up`` = [gate, linear], h = gate·σ(gate)·linear·weight.

Legend: R rows, F expert width.
"""

from __future__ import annotations

import torch
from torch import Tensor

LOG2_E = 1.4426950408889634
# 2^f = 1 + f·(c1 + f·(c2 + …)) for |f| <= 1/2 within 2e-7; a least-squares fit reweighted towards equal ripple.
EXP2 = (0.6931470036506653, 0.24022242426872253, 0.05550733581185341, 0.009671512991189957, 0.001326472614891827)
MAGIC = 12582912.0  # 1.5·2^23: adding it to a float32 below 2^22 rounds that to an integer
MAGIC_BITS = 0x4B400000


def sigmoid_torch(x: Tensor) -> Tensor:
    """1 / (1 + 2^(−x·log2 e)) of float32 ``x``, at least 2^-125: some divisions flush subnormal numbers."""
    z = (x * -LOG2_E).clamp(-125.0, 125.0)
    shifted = z + MAGIC
    f = z - (shifted - MAGIC)
    p = torch.full_like(f, EXP2[4])
    for c in (*EXP2[3::-1], 1.0):
        p = p * f + c
    power = ((shifted.view(torch.int32) - MAGIC_BITS + 127) << 23).view(torch.float32)
    return 1.0 / (p * power + 1.0)


def swiglu_torch(up: Tensor, weights: Tensor | None = None) -> Tensor:
    """``up`` [R, 2F] of any float dtype, ``weights`` float32 [R] → h [R, F] in float32."""
    gate, linear = up.to(torch.float32).chunk(2, dim=-1)
    hidden = gate * sigmoid_torch(gate) * linear
    return hidden if weights is None else hidden * weights.unsqueeze(-1)


def swiglu_backward_torch(
    up: Tensor, dhidden: Tensor, weights: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """h [R, F], the gradient of ``up`` [R, 2F] and that of ``weights`` [R], all float32.

    ``up`` [R, 2F]; ``dhidden`` [R, F] the gradient of h, which is what ``swiglu_torch`` gave: with the weights in it.
    """
    gate, linear = up.to(torch.float32).chunk(2, dim=-1)
    grad = dhidden.to(torch.float32)
    sigmoid = sigmoid_torch(gate)
    swish = gate * sigmoid
    hidden, dweights = swish * linear, None
    if weights is not None:
        dweights = (grad * hidden).sum(-1)
        hidden = hidden * weights.unsqueeze(-1)
        grad = grad * weights.unsqueeze(-1)
    dgate = grad * linear * (swish * (1.0 - sigmoid) + sigmoid)
    return hidden, torch.cat([dgate, grad * swish], dim=-1), dweights
