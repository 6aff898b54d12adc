"""What all Triton kernels share: the import, casts that round alike everywhere, peer addresses, launch shapes.

The ``*_triton`` modules need Triton; everything else in this folder does not. With ``TRITON_INTERPRET=1`` set before
the first import they run on CPU tensors (Triton's interpreter), one program after another.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import os
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .peers import HANDLE_ALIGNMENT

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError(
        "the kernels of heap='torch' and heap='nvshmem' are written in Triton, which is not installed: "
        "install triton >= 3.5 (CUDA builds of torch bring it)"
    ) from error

__all__ = ["INTERPRETED", "tl", "triton"]

# Integers among Peers.arguments. Kernels are not compiled anew for their values, nor for token counts: batches vary.
PEER_INTEGERS = ("handle_stride", "max_handle", "offset")
# Which sources' tokens a kernel over [M, T_max, K] takes.
RANGE_INTEGERS = ("first_source", "sources", "world", "begin", "length", "t_max")

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET", "0") == "1")
PEER_ALIGNMENT = tl.constexpr(HANDLE_ALIGNMENT)


@triton.jit
def peer_address(base, handles, handle_stride, max_handle, offset, rank):
    """Byte address of ``rank``'s part (see Peers), 0 if it advertised no slot."""
    address = tl.load(base + rank) + offset
    if handles is not None:
        handle = tl.load(handles + rank * handle_stride)
        good = (handle >= 0) & (handle <= max_handle) & (handle % PEER_ALIGNMENT == 0)
        address = tl.where(good, address + handle, 0)
    return address


@triton.jit
def rows_at(address, like):
    """A byte address as a pointer of ``like``'s type. Without the hint the compiler must use 2-byte accesses."""
    return tl.multiple_of(address.to(like.dtype, bitcast=True), 16)


@triton.jit
def widen(values, ACC: tl.constexpr):
    """``values`` in the accumulation dtype."""
    if INTERPRETED and values.dtype == tl.bfloat16:  # the interpreter's own cast mistakes subnormal numbers
        bits = values.to(tl.int16, bitcast=True).to(tl.int32) << 16
        return bits.to(tl.float32, bitcast=True).to(ACC)
    return values.to(ACC)


@triton.jit
def narrow(values, DTYPE: tl.constexpr):
    """``values`` rounded to nearest even in ``DTYPE``."""
    if INTERPRETED and DTYPE == tl.bfloat16:  # the interpreter's own cast cuts the low bits off
        bits = values.to(tl.float32).to(tl.int32, bitcast=True)
        even = bits + 0x7FFF + ((bits >> 16) & 1)
        rounded = tl.where(values != values, bits | 0x400000, even) >> 16
        return rounded.to(tl.int16).to(tl.bfloat16, bitcast=True)
    return values.to(DTYPE)


def cdiv(number: int, divisor: int) -> int:
    """Least integer that is not below the quotient. (Triton's own serves kernels too, and takes the host longer.)"""
    return -(-number // divisor)


def next_power_of_2(number: int) -> int:
    """Least power of two that is not below ``number`` >= 1."""
    return 1 << (number - 1).bit_length()


def triton_dtype(dtype: torch.dtype):
    """Triton's name of a torch dtype."""
    return getattr(tl, str(dtype).removeprefix("torch."))


@dataclass(frozen=True)
class Launch:
    """Shape of one kernel launch: ``programs`` at most, ``warps`` of 32 threads in each, ``block`` columns of a row
    that a program moves at once (None: chosen by the row's width).

    ``tile``: bytes under way at once in kernels whose programs move several rows side by side. Few programs that are
    wide keep stores that wait for the link on few multiprocessors, and out of the way of everything else."""

    programs: int
    warps: int = 4
    block: int | None = None
    tile: int = 0

    def columns(self, width: int, most: int = 4096) -> int:
        """The block: of the powers of two up to ``most``, one that pads ``width`` least without cutting it small."""
        if self.block is not None:
            return self.block
        widest = min(next_power_of_2(width), most)
        least = max(widest // 4, min(512, widest))
        sizes = [size for size in (widest, widest // 2, widest // 4) if size >= least]
        return min(sizes, key=lambda size: -(-width // size) * size)  # the first, so the largest, of equals

    @property
    def options(self) -> dict[str, Any]:
        """Compiler options. A product and a sum must round twice, as they do in torch."""
        return {"num_warps": self.warps, "enable_fp_fusion": False}

    def of_whole_lanes(self, block: int, itemsize: int) -> "Launch":
        """As many threads in all, in programs narrow enough that each thread moves 16 bytes of a block at once."""
        warps = max(1, min(self.warps, block * itemsize // (16 * 32)))
        if warps == self.warps:
            return self
        return replace(self, programs=self.programs * self.warps // warps, warps=warps)

    def rows(self, block: int, itemsize: int, count: int) -> int:
        """Rows that a program moves side by side out of ``count``: a power of two that fills the tile, or one where
        that would leave programs without work."""
        rows = max(1, self.tile // (block * itemsize))
        return 1 << rows.bit_length() - 1 if count >= rows * self.programs else 1

    def grid(self, items: int) -> tuple[int]:
        """As many programs as there is work for."""
        return (max(1, min(self.programs, items)),)


def require_contiguous(**tensors: Tensor | None) -> None:
    """ValueError naming the tensor whose rows do not lie one behind another."""
    for name, tensor in tensors.items():
        if tensor is not None and not tensor.is_contiguous():
            raise ValueError(f"{name} {list(tensor.shape)} has strides {tensor.stride()}; kernels need it contiguous")
