"""How kernels find the same part of a symmetric region on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

HANDLE_ALIGNMENT = 256  # bytes; slots start on multiples of it
MAX_PEERS = 64  # ranks of one group, so that a set of ranks fits in one 64-bit word


@dataclass(frozen=True)
class Peers:
    """Rank p's part starts at byte address ``base[p] + handles[p] + offset``.

    ``base``: int64 [M], the regions' addresses in this process. ``handles``: int64 [M] (any stride), the byte offset of
    the slot each rank advertised, or None for no slots; it is read by the kernel, so the host never sees it. A handle
    below 0, above ``max_handle`` or off the 256-byte alignment of slots names no slot: kernels then skip that rank, so
    that a record left unfinished by an aborted step cannot lead them out of the region. ``offset``: bytes to the part.
    """

    base: Tensor
    handles: Tensor | None = None
    max_handle: int = 0
    offset: int = 0

    def __post_init__(self) -> None:
        if self.base.dtype != torch.int64 or self.base.dim() != 1 or not self.base.is_contiguous():
            raise ValueError(f"base must be contiguous int64 [M], not {self.base.dtype} {list(self.base.shape)}")
        if self.base.numel() > MAX_PEERS:
            raise ValueError(f"{self.base.numel()} ranks in one group; peer stores serve at most {MAX_PEERS}")
        if self.handles is not None and (
            self.handles.dtype != torch.int64 or tuple(self.handles.shape) != tuple(self.base.shape)
        ):
            raise ValueError(
                f"handles must be int64 {list(self.base.shape)}, not {self.handles.dtype} {list(self.handles.shape)}"
            )

    @staticmethod
    def of(parts: Sequence[Tensor], device: torch.device | str | None = None) -> Peers:
        """Peers whose parts are these tensors, one per rank, which must outlive it."""
        addresses = [part.data_ptr() for part in parts]
        return Peers(torch.tensor(addresses, dtype=torch.int64, device=device or parts[0].device))

    @property
    def world(self) -> int:
        return self.base.numel()

    def at(self, nbytes: int) -> Peers:
        """The part that starts ``nbytes`` bytes further on."""
        return Peers(self.base, self.handles, self.max_handle, self.offset + nbytes)

    @property
    def arguments(self) -> tuple[Tensor, Tensor | None, int, int, int]:
        """What kernels take: base, handles, the handles' stride, max_handle, offset."""
        stride = 0 if self.handles is None else self.handles.stride(0)
        return self.base, self.handles, stride, self.max_handle, self.offset
