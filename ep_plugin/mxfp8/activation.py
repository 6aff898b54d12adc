"""An expert's activation from and to MXFP8: what happens between the up and the down projection.

SwiGLU has kernels that read and write each value once; every other activation is made of torch operations around the
codec. Both compute in float32 and round once.

Legend: R rows (padding included), F expert width, G = 2F for a gated activation, else F.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..experts import Activation
from ..kernels import mxfp8 as reference
from ..kernels import mxfp8_swiglu as swiglu_reference
from ..kernels.mxfp8 import record_bytes
from .codec import Form, Operand, as_form, count, dequantize, empty_operand, quantize, valid


@dataclass(frozen=True)
class Gradients:
    """``hidden`` [R, F] again and the gradient ``dup`` [R, G] of the up projection's output, both plain; ``operand``:
    dup in the form of the GEMM; ``dweights`` float32 [R] or None."""

    hidden: Tensor
    dup: Tensor
    operand: Operand
    dweights: Tensor | None


def forward(
    up: Tensor,
    weights: Tensor | None,
    activation: Activation,
    form: Form,
    rounding: str,
    *,
    offsets: Tensor | None = None,
) -> tuple[Operand, Tensor]:
    """activation(up)·weight in ``form``, and the records of ``up`` [R, G] for backward, uint8 [R, G + G/32].

    ``weights`` float32 [R] or None. F must be a multiple of 32.
    """
    record_bytes(up.shape[1] // activation.inputs_per_output)
    if _is_swiglu(activation):
        return _swiglu(up, weights, form, rounding, offsets)
    hidden = activation(up.to(torch.float32))
    if weights is not None:
        hidden = hidden * weights.unsqueeze(-1)
    return _rounded(hidden, form, rounding, up.dtype, offsets), quantize(up, rounding, offsets=offsets)


def backward(
    saved: Tensor,
    dhidden: Tensor,
    weights: Tensor | None,
    activation: Activation,
    form: Form,
    rounding: str,
    *,
    offsets: Tensor | None = None,
) -> Gradients:
    """Backward of ``forward`` from the records it gave and the gradient ``dhidden`` [R, F] of its result."""
    if _is_swiglu(activation):
        return _swiglu_backward(saved, dhidden, weights, form, rounding, offsets)
    up, grad = dequantize(saved, torch.float32, offsets=offsets).requires_grad_(), dhidden.to(torch.float32)
    with torch.enable_grad():
        hidden = activation(up)
    h, dweights = hidden.detach(), None
    if weights is not None:
        dweights = (grad * h).sum(-1)
        h, grad = h * weights.unsqueeze(-1), grad * weights.unsqueeze(-1)
    (dup,) = torch.autograd.grad(hidden, up, grad)
    plain = dup.to(dhidden.dtype)
    operand = Operand(form, plain) if form == "plain" else _rounded(dup, form, rounding, dhidden.dtype, offsets)
    return Gradients(h.to(dhidden.dtype), plain, operand, dweights)


def _is_swiglu(activation: Activation) -> bool:
    return replace(activation, name="silu") == Activation() and activation.name in ("silu", "swish")


def _rounded(values: Tensor, form: Form, rounding: str, dtype: torch.dtype, offsets: Tensor | None) -> Operand:
    """float32 ``values`` in ``form``, rounded once."""
    return as_form(values, form, rounding, dtype=dtype, offsets=offsets)


def _swiglu(
    up: Tensor, weights: Tensor | None, form: Form, rounding: str, offsets: Tensor | None
) -> tuple[Operand, Tensor]:
    rows, width = up.shape[0], up.shape[1] // 2
    if not up.is_cuda:
        n = valid(offsets, rows)
        h = swiglu_reference.swiglu_torch(up[:n], None if weights is None else weights[:n])
        return _padded(h, rows, form, rounding, up.dtype), quantize(up, rounding, offsets=offsets)
    from ..kernels.mxfp8_swiglu_triton import swiglu as kernel

    saved = torch.empty((rows, record_bytes(2 * width)), dtype=torch.uint8, device=up.device)
    hidden, outputs = _outputs(rows, width, form, up.dtype, up.device, "hidden")
    kernel(up.contiguous(), weights, saved=saved, rounding=rounding, num_rows=count(offsets), **outputs)
    return hidden, saved


def _swiglu_backward(
    saved: Tensor, dhidden: Tensor, weights: Tensor | None, form: Form, rounding: str, offsets: Tensor | None
) -> Gradients:
    rows, width = dhidden.shape
    dtype, device = dhidden.dtype, dhidden.device
    if not saved.is_cuda:
        n = valid(offsets, rows)
        up, w = reference.dequantize_torch(saved[:n]), None if weights is None else weights[:n]
        h, dup, dw = swiglu_reference.swiglu_backward_torch(up, dhidden[:n], w)
        plain = _padded(dup, rows, "plain", rounding, dtype)
        operand = plain if form == "plain" else _padded(dup, rows, form, rounding, dtype)
        hidden = _padded(h, rows, "plain", rounding, dtype).data
        return Gradients(hidden, plain.data, operand, None if dw is None else _tail(dw, rows))
    from ..kernels.mxfp8_swiglu_triton import swiglu_backward as kernel

    hidden = torch.empty((rows, width), dtype=dtype, device=device)
    dup = torch.empty((rows, 2 * width), dtype=dtype, device=device)
    dweights = None if weights is None else torch.empty(rows, dtype=torch.float32, device=device)
    operand = Operand("plain", dup)
    outputs: dict[str, Any] = {}
    if form != "plain":
        operand, outputs = _outputs(rows, 2 * width, form, dtype, device, "dup")
    kernel(
        saved,
        dhidden.contiguous(),
        weights,
        hidden=hidden,
        dup=dup,
        dweights=dweights,
        rounding=rounding,
        num_rows=count(offsets),
        **outputs,
    )
    return Gradients(hidden, dup, operand, dweights)


def _outputs(
    rows: int, width: int, form: Form, dtype: torch.dtype, device: torch.device, plain_name: str
) -> tuple[Operand, dict[str, Any]]:
    """An unwritten operand, and its tensors by the kernels' argument names."""
    out = empty_operand(form, rows, width, dtype, device)
    if form == "rowwise":
        assert out.scales is not None
        return out, {"data": out.data.view(torch.uint8), "scales": out.scales}
    return out, {plain_name if form == "plain" else "records": out.data}


def _tail(values: Tensor, rows: int) -> Tensor:
    """``values`` [n, …] as the first of ``rows`` rows; the others unwritten."""
    if values.shape[0] == rows:
        return values
    out = values.new_empty((rows, *values.shape[1:]))
    out[: values.shape[0]] = values
    return out


def _padded(values: Tensor, rows: int, form: Form, rounding: str, dtype: torch.dtype) -> Operand:
    """float32 ``values`` [n, D] rounded once into ``form``, as the first of ``rows`` rows."""
    if form == "plain":
        return Operand(form, _tail(values.to(dtype), rows))
    if form == "records":
        return Operand(form, _tail(reference.quantize_torch(values, rounding), rows))
    data, scales = reference.quantize_rowwise_torch(values, rounding)
    return Operand(form, _tail(data.view(torch.uint8), rows).view(torch.float8_e4m3fn), _tail(scales, rows))
