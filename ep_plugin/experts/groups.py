"""The products a grouped linear map needs, over rows grouped by expert, in two forms.

Legend: R rows, E_l local experts, C contracted width, O output width. Expert e owns rows offsets[e] … offsets[e+1]−1;
rows past offsets[-1] are padding and take no part in any product.

`HostLoop` reads the offsets on the host and calls one GEMM per expert that has rows: the fast form on CPU, where the
offsets lie in host memory, and the general form on a GPU, where reading them is a host synchronisation.
`GroupedMM` hands the offsets to torch's grouped GEMM and never reads them on the host of a GPU.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ..kernels.reduce import accumulation_dtype
from ..watch import before_host_looks

# The public name came after the private one; both have the same arguments.
_grouped_mm: Any = getattr(torch.nn.functional, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)

_GROUPED_MM_ALIGNMENT = 16  # bytes; the grouped GEMM refuses rows whose stride is not a multiple of it


def valid_rows(offsets: Tensor, num_rows: int | None, total: int) -> int:
    """Rows the host may take as valid: offsets[-1] where no device sync is needed, else `num_rows`, else `total`."""
    if offsets.device.type != "cpu":
        return total if num_rows is None else num_rows
    last = int(offsets[-1])
    if num_rows is not None and num_rows != last:
        raise ValueError(f"num_rows={num_rows} but the offsets end at {last}; they must be the same number")
    if not 0 <= last <= total:
        raise ValueError(f"the offsets end at row {last} but there are {total} rows")
    return last


def column(weights: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Per-row weights [R] as a column [R, 1] in `dtype`."""
    return None if weights is None else weights.to(dtype).unsqueeze(-1)


class Groups(ABC):
    """Rows grouped by expert. `valid` is the number of rows known to be valid without a device sync."""

    def __init__(self, offsets: Tensor, valid: int):
        self.offsets = offsets
        self.valid = valid

    @abstractmethod
    def matmul(self, rows: Tensor, matrices: Tensor, out: Tensor | None = None) -> Tensor:
        """rows [R, C] × matrices [E_l, C, O] → [R, O]: row r times the matrix of its expert.

        A new result has zero padding rows as far as `valid` tells; a given `out` keeps what its padding rows held.
        """

    @abstractmethod
    def outer(self, left: Tensor, right: Tensor) -> Tensor:
        """left [R, A], right [R, B] → [E_l, A, B]: leftᵀ right over each expert's rows; zero where it has none."""

    @abstractmethod
    def sum(self, rows: Tensor, scale: Tensor | None) -> Tensor:
        """[R, N] (times scale [R, 1]) → [E_l, N], summed over each expert's rows in acc dtype."""

    @abstractmethod
    def add_bias(self, rows: Tensor, bias: Tensor, scale: Tensor | None) -> None:
        """rows[r] += bias[expert of r] (times scale[r]), in place."""

    @abstractmethod
    def dot_bias(self, rows: Tensor, bias: Tensor) -> Tensor:
        """[R]: the dot product of rows[r] and bias[expert of r] in acc dtype; zero on padding."""


class HostLoop(Groups):
    """One GEMM per expert with rows; offsets are read on the host."""

    def __init__(self, offsets: Tensor, valid: int):
        super().__init__(offsets, valid)
        before_host_looks(offsets.device)
        self.bounds: list[int] = offsets.tolist()
        if self.bounds[0] != 0 or any(end < start for start, end in pairwise(self.bounds)):
            raise ValueError(f"offsets must start at 0 and never decrease, got {self.bounds}")
        self.valid = self.bounds[-1]

    def _spans(self) -> Iterator[tuple[int, slice]]:
        for expert, (start, end) in enumerate(pairwise(self.bounds)):
            if end > start:
                yield expert, slice(start, end)

    def matmul(self, rows: Tensor, matrices: Tensor, out: Tensor | None = None) -> Tensor:
        if out is None:
            out = rows.new_empty(rows.shape[0], matrices.shape[2])
            out[self.valid :].zero_()
        for expert, span in self._spans():
            torch.mm(rows[span], matrices[expert], out=out[span])
        return out

    def outer(self, left: Tensor, right: Tensor) -> Tensor:
        out = left.new_empty(len(self.bounds) - 1, left.shape[1], right.shape[1])
        for expert, (start, end) in enumerate(pairwise(self.bounds)):
            if end > start:
                torch.mm(left[start:end].t(), right[start:end], out=out[expert])
            else:
                out[expert].zero_()
        return out

    def sum(self, rows: Tensor, scale: Tensor | None) -> Tensor:
        acc = accumulation_dtype(rows.dtype)
        out = torch.zeros(len(self.bounds) - 1, rows.shape[1], dtype=acc, device=rows.device)
        for expert, span in self._spans():
            part = rows[span].to(acc)
            out[expert] = (part if scale is None else part * scale[span]).sum(0)
        return out

    def add_bias(self, rows: Tensor, bias: Tensor, scale: Tensor | None) -> None:
        for expert, span in self._spans():
            if scale is None:
                rows[span] += bias[expert]
            else:
                rows[span] += scale[span] * bias[expert]

    def dot_bias(self, rows: Tensor, bias: Tensor) -> Tensor:
        acc = accumulation_dtype(rows.dtype)
        out = torch.zeros(rows.shape[0], dtype=acc, device=rows.device)
        for expert, span in self._spans():
            out[span] = rows[span].to(acc) @ bias[expert].to(acc)
        return out


class GroupedMM(Groups):
    """torch's grouped GEMM; offsets stay on the device. Padding rows of results that `valid` counts are unspecified."""

    def __init__(self, offsets: Tensor, valid: int):
        super().__init__(offsets, valid)
        self.ends = offsets[1:].to(torch.int32)

    def matmul(self, rows: Tensor, matrices: Tensor, out: Tensor | None = None) -> Tensor:
        if rows.shape[0] == 0:
            product = rows.new_empty(0, matrices.shape[2])
        else:
            product = _grouped_mm(_aligned(rows), matrices, offs=self.ends)
        if out is None:
            if self.valid < product.shape[0]:
                product[self.valid :].zero_()
            return product
        # torch's grouped GEMM takes no output argument: one pass over the valid rows puts them where they are wanted.
        out[: self.valid].copy_(product[: self.valid])
        return out

    def outer(self, left: Tensor, right: Tensor) -> Tensor:
        if left.shape[0] == 0:
            return left.new_zeros(self.ends.numel(), left.shape[1], right.shape[1])
        # The grouped GEMM writes zeros for a group without rows (the product over an empty width); clearing them again
        # would be one more pass over all weight gradients.
        return _grouped_mm(_aligned(left).t(), _aligned(right), offs=self.ends)

    def sum(self, rows: Tensor, scale: Tensor | None) -> Tensor:
        data = rows.to(accumulation_dtype(rows.dtype))
        if scale is not None:
            data = data * scale
        # unsafe=True skips the checks that would read the offsets on the host; rows past offsets[-1] are not read.
        return torch.segment_reduce(data, "sum", offsets=self.offsets, axis=0, unsafe=True)

    def _expert_of_row(self, total: int) -> Tensor:
        index = torch.arange(total, device=self.ends.device, dtype=torch.int32)
        return torch.bucketize(index, self.ends, right=True).clamp_(max=self.ends.numel() - 1)

    def add_bias(self, rows: Tensor, bias: Tensor, scale: Tensor | None) -> None:
        part = rows[: self.valid]
        row_bias = bias[self._expert_of_row(self.valid)]
        part += row_bias if scale is None else scale[: self.valid] * row_bias

    def dot_bias(self, rows: Tensor, bias: Tensor) -> Tensor:
        acc = accumulation_dtype(rows.dtype)
        dots = (rows.to(acc) * bias.to(acc)[self._expert_of_row(rows.shape[0])]).sum(-1)
        return zero_padding(dots, self.offsets)


def zero_padding(per_row: Tensor, offsets: Tensor) -> Tensor:
    """per_row [R] with zeros past offsets[-1], whatever stood there, without reading the offsets on the host."""
    index = torch.arange(per_row.shape[0], device=per_row.device)
    return torch.where(index < offsets[-1], per_row, torch.zeros((), dtype=per_row.dtype, device=per_row.device))


def _aligned(rows: Tensor) -> Tensor:
    """`rows` itself if the grouped GEMM takes its strides and address, else a contiguous copy."""
    size = rows.element_size()
    fits = (
        rows.stride(1) == 1
        and rows.stride(0) >= rows.shape[1]
        and rows.stride(0) * size % _GROUPED_MM_ALIGNMENT == 0
        and rows.data_ptr() % _GROUPED_MM_ALIGNMENT == 0
    )
    return rows if fits else rows.clone(memory_format=torch.contiguous_format)


def grouped_mm_refusal(rows: Tensor, weight: Tensor, dtype: torch.dtype) -> str | None:
    """Why torch's grouped GEMM cannot compute these rows in `dtype`, in words; None if it can."""
    if _grouped_mm is None:
        return f"torch {torch.__version__} has no grouped_mm"
    if rows.device.type == "cuda":
        capability = torch.cuda.get_device_capability(rows.device)
        if dtype != torch.bfloat16:
            return f"grouped_mm on CUDA takes bfloat16, got {dtype}"
        if capability < (9, 0):
            found = ".".join(map(str, capability))
            return f"grouped_mm without a host sync needs compute capability 9.0, this GPU has {found}"
    elif dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"grouped_mm takes bfloat16, float16 and float32, got {dtype}"
    step = _GROUPED_MM_ALIGNMENT // dtype.itemsize
    widths = tuple(weight.shape[1:])
    if any(width % step for width in widths):
        return f"grouped_mm needs widths that are multiples of {step} in {dtype}, got {widths}"
    if not weight.is_contiguous():
        return f"grouped_mm needs a contiguous weight, got strides {weight.stride()}"
    if weight.dtype == dtype and weight.data_ptr() % _GROUPED_MM_ALIGNMENT:
        return f"grouped_mm needs a weight at a multiple of {_GROUPED_MM_ALIGNMENT} bytes"
    return None
