"""A linear map per expert over expert-contiguous rows, with its own backward.

Legend: R rows (padding included), E_l local experts, K inputs, N outputs.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..config import one_of
from ..dispatch.base import Rebuild
from ..kernels.reduce import accumulation_dtype
from ..kernels.scale_rows import scale_rows
from .groups import GroupedMM, Groups, HostLoop, column, grouped_mm_refusal, valid_rows

logger = logging.getLogger(__name__)

Backend = Literal["auto", "loop", "grouped_mm"]
_BACKENDS = ("auto", "loop", "grouped_mm")
_said: set[str] = set()


@dataclasses.dataclass(frozen=True)
class _Call:
    """The arguments of one call that autograd does not see."""

    transposed: bool
    num_rows: int | None
    saved_rows: Rebuild | None
    out: Tensor | None
    backend: str
    dtype: torch.dtype  # of the products: autocast's dtype under autocast, else that of the rows


def grouped_linear(
    rows: Tensor,
    weight: Tensor,
    offsets: Tensor,
    *,
    bias: Tensor | None = None,
    row_weight: Tensor | None = None,
    bias_weight: Tensor | None = None,
    transposed: bool = False,
    num_rows: int | None = None,
    saved_rows: Rebuild | None = None,
    out: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """y[r] = (row_weight[r] · rows[r]) @ weight[e]ᵀ + bias_weight[r] · bias[e] for the expert e that owns row r.

    Args:
        rows: [R, K] expert-contiguous; rows past offsets[-1] are padding and are not read.
        weight: [E_l, N, K], or [E_l, K, N] if `transposed`.
        offsets: int64 [E_l+1] on the device of the rows; expert e owns rows offsets[e] … offsets[e+1]−1.
        bias: [E_l, N] or None.
        row_weight: [R] in acc dtype: rows are multiplied in acc dtype and rounded once before the product (None: 1).
        bias_weight: [R] in acc dtype: factor of the bias per row (None: 1).
        num_rows: offsets[-1] if the host knows it.
        saved_rows: its tensors are kept for backward and give the rows again there, bit-equal; None keeps `rows`
            itself, uncopied. The tensors go through autograd's saved tensors, so that checkpointing and offloading see
            them; its function must hold none.
        out: written in place and returned (its first R rows), for example in symmetric memory; it must not require a
            gradient. Its padding rows keep what they held. The grouped GEMM takes no output argument, so `grouped_mm`
            copies into it once.
        backend: "loop" = one GEMM per expert, on a GPU with a host sync for the offsets; "grouped_mm" = torch's grouped
            GEMM (no host sync; on CUDA bfloat16 from compute capability 9.0); "auto" = the loop on CPU, grouped_mm on
            CUDA where it can, else the loop, said once in the log.

    Returns [R, N] in the dtype of `out`, or of the product. Padding rows are zero in a new result and in the gradient
    of `rows` where the host knows the number of rows (always on CPU); with `num_rows=None` on a GPU they are
    unspecified. They are zero in the gradients of the row weights everywhere.

    Under autocast the product runs in autocast's dtype, like torch.nn.functional.linear. Kept for backward: `rows` (or
    `saved_rows.tensors`), the parameters, offsets and weights, each only if a gradient needs it. An expert without rows
    gets a zero gradient, never none. Twice differentiable it is not.

    Raises ValueError for shapes, dtypes, offsets or a backend that do not fit, quoting them.
    """
    _check(rows, weight, offsets, bias, row_weight, bias_weight, transposed, out)
    dtype = product_dtype(rows, weight, bias)
    call = _Call(transposed, num_rows, saved_rows, out, choose_backend(backend, rows, weight, dtype), dtype)
    return _GroupedLinear.apply(rows, weight, bias, row_weight, bias_weight, offsets, call)


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        row_weight: Tensor | None,
        bias_weight: Tensor | None,
        offsets: Tensor,
        call: _Call,
    ) -> Tensor:
        needs = ctx.needs_input_grad
        ctx.transposed, ctx.num_rows, ctx.backend, ctx.dtype = call.transposed, call.num_rows, call.backend, call.dtype
        ctx.rows_like = (rows.shape, rows.dtype)
        ctx.rebuild = None
        keep_rows = needs[1] or needs[3]
        rows_kept: tuple[Tensor, ...] = (rows,) if keep_rows else ()
        if keep_rows and call.saved_rows is not None:
            rows_kept = tuple(call.saved_rows.tensors)
            ctx.rebuild = (
                call.saved_rows.rows
            )  # the function alone: a node that held the tensors would outlive a checkpoint
        ctx.save_for_backward(
            offsets,
            weight if needs[0] or needs[3] else None,
            bias if needs[4] else None,
            row_weight if needs[0] or needs[1] else None,
            bias_weight if needs[2] else None,
            *rows_kept,
        )
        ctx.dtypes = tuple(None if t is None else t.dtype for t in (weight, bias, row_weight, bias_weight))

        with torch.autocast(rows.device.type, enabled=False):
            groups = groups_of(call.backend, offsets, call.num_rows, rows.shape[0])
            out = None if call.out is None else call.out[: rows.shape[0]].detach()
            target = out if out is not None and out.dtype == call.dtype else None
            matrices = weight.to(call.dtype) if call.transposed else weight.to(call.dtype).transpose(1, 2)
            y = groups.matmul(weighted_rows(rows, row_weight, groups.valid, call.dtype, offsets), matrices, target)
            if bias is not None:
                groups.add_bias(y, bias.to(call.dtype), column(bias_weight, accumulation_dtype(call.dtype)))
            if out is None:
                return y
            if target is None:
                out[: groups.valid].copy_(y[: groups.valid])
            return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        offsets, weight, bias, row_weight, bias_weight, *rows_kept = ctx.saved_tensors
        needs = ctx.needs_input_grad
        weight_dtype, bias_dtype, row_weight_dtype, bias_weight_dtype = ctx.dtypes
        (total, _), rows_dtype = ctx.rows_like
        drows = dweight = dbias = drow_weight = dbias_weight = None
        acc = accumulation_dtype(ctx.dtype)

        with torch.autocast(dy.device.type, enabled=False):
            groups = groups_of(ctx.backend, offsets, ctx.num_rows, total)
            dy = dy.to(ctx.dtype)
            if needs[1] or needs[3]:
                rows: Tensor = rows_kept[0] if ctx.rebuild is None else ctx.rebuild(tuple(rows_kept), groups.valid)
            if needs[1]:
                weighted = weighted_rows(rows, row_weight, groups.valid, ctx.dtype, offsets)
                pair = (weighted, dy[: weighted.shape[0]])
                dweight = groups.outer(*(pair if ctx.transposed else pair[::-1])).to(weight_dtype)
                del weighted, pair
            if needs[0] or needs[3]:
                matrices = weight.to(ctx.dtype).transpose(1, 2) if ctx.transposed else weight.to(ctx.dtype)
                dproduct = groups.matmul(dy, matrices)
                if needs[3]:
                    drows, dots = scale_rows(dproduct, row_weight, rows, groups.valid, offsets[-1:])
                    drow_weight = None if dots is None else dots.to(row_weight_dtype)
                if drows is None or drows.dtype != rows_dtype:  # rounded once, to the rows' own dtype
                    drows = weighted_rows(dproduct, row_weight, groups.valid, rows_dtype, offsets)
            if needs[2]:
                dbias = groups.sum(dy, column(bias_weight, acc)).to(bias_dtype)
            if needs[4]:
                dbias_weight = groups.dot_bias(dy, bias.to(ctx.dtype)).to(bias_weight_dtype)
        return drows, dweight, dbias, drow_weight, dbias_weight, None, None


def weighted_rows(
    rows: Tensor, row_weight: Tensor | None, valid: int, dtype: torch.dtype, offsets: Tensor | None = None
) -> Tensor:
    """rows [R, ·] in `dtype`, times row_weight [R] in acc dtype, rounded once; `rows` itself if nothing changes.

    `offsets` int64 [E_l+1], where known, say which rows a kernel need not touch.
    """
    if row_weight is None and rows.dtype == dtype:
        return rows
    if row_weight is not None and rows.dtype == dtype and offsets is not None:
        return scale_rows(rows, row_weight, None, valid, offsets[-1:])[0]
    out = rows.new_empty(rows.shape, dtype=dtype)
    out[valid:].zero_()
    part = rows[:valid]
    if row_weight is not None:
        acc = torch.promote_types(accumulation_dtype(rows.dtype), accumulation_dtype(dtype))
        part = part.to(acc) * row_weight[:valid, None].to(acc)
    out[:valid] = part
    return out


def groups_of(backend: str, offsets: Tensor, num_rows: int | None, total: int) -> Groups:
    valid = valid_rows(offsets, num_rows, total)
    return HostLoop(offsets, valid) if backend == "loop" else GroupedMM(offsets, valid)


def product_dtype(rows: Tensor, weight: Tensor, bias: Tensor | None) -> torch.dtype:
    device = rows.device.type
    dtypes = {t.dtype for t in (rows, weight, bias) if t is not None}
    if torch.is_autocast_enabled(device) and torch.float64 not in dtypes:  # autocast leaves float64 alone
        return torch.get_autocast_dtype(device)
    if len(dtypes) > 1:
        found = f"rows {rows.dtype}, weight {weight.dtype}" + ("" if bias is None else f", bias {bias.dtype}")
        raise ValueError(f"rows and parameters must have one dtype outside autocast, got {found}")
    return rows.dtype


def choose_backend(backend: str, rows: Tensor, weight: Tensor, dtype: torch.dtype) -> str:
    one_of("backend", backend, _BACKENDS)
    if backend == "loop" or (backend == "auto" and rows.device.type == "cpu"):
        return "loop"
    refusal = grouped_mm_refusal(rows, weight, dtype)
    if refusal is None:
        return "grouped_mm"
    if backend == "grouped_mm":
        raise ValueError(f"{refusal}; backend='loop' takes these rows")
    if refusal not in _said:
        _said.add(refusal)
        logger.warning("experts run one GEMM per expert, with a host sync for the offsets: %s", refusal)
    return "loop"


def _check(
    rows: Tensor,
    weight: Tensor,
    offsets: Tensor,
    bias: Tensor | None,
    row_weight: Tensor | None,
    bias_weight: Tensor | None,
    transposed: bool,
    out: Tensor | None,
) -> None:
    if rows.dim() != 2 or weight.dim() != 3:
        raise ValueError(f"rows must be [R, K] and weight 3D, got {tuple(rows.shape)} and {tuple(weight.shape)}")
    experts, outputs, inputs = weight.shape
    if transposed:
        inputs, outputs = outputs, inputs
    if rows.shape[1] != inputs:
        layout = "[E_l, K, N]" if transposed else "[E_l, N, K]"
        raise ValueError(f"rows have {rows.shape[1]} columns, weight {layout} = {tuple(weight.shape)} takes {inputs}")
    if offsets.dtype != torch.int64 or offsets.shape != (experts + 1,) or offsets.device != rows.device:
        raise ValueError(
            f"offsets must be int64 [{experts + 1}] on {rows.device}, "
            f"got {offsets.dtype} {list(offsets.shape)} on {offsets.device}"
        )
    if bias_weight is not None and bias is None:
        raise ValueError("bias_weight is given without a bias")
    shapes: list[tuple[str, Tensor | None, tuple[int, ...]]] = [
        ("bias", bias, (experts, outputs)),
        ("row_weight", row_weight, (rows.shape[0],)),
        ("bias_weight", bias_weight, (rows.shape[0],)),
    ]
    for name, tensor, shape in shapes:
        if tensor is not None and tensor.shape != shape:
            raise ValueError(f"{name} must be {list(shape)}, got {list(tensor.shape)}")
    if out is not None:
        if out.dim() != 2 or out.shape[1] != outputs or out.shape[0] < rows.shape[0]:
            raise ValueError(f"out must be at least [{rows.shape[0]}, {outputs}], got {list(out.shape)}")
        if out.requires_grad:
            raise ValueError("out must not require a gradient: it is where the result is written, not an input")
