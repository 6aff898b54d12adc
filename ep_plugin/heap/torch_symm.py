"""The ``torch`` backend: torch.distributed._symmetric_memory on one host's GPUs, no dependency beyond torch."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from .device import DeviceHeap, Region


class TorchHeap(DeviceHeap):
    """Symmetric heap of torch's CUDA backend. Every rank must reach every peer's memory.

    Groups must partition the world and all ranks must open heaps equally often in the same order: torch's rendezvous
    hangs otherwise."""

    name = "torch"

    def _open(self) -> None:
        import torch.distributed._symmetric_memory as symm

        self._symm = symm
        group = self.group if self.group is not None else dist.group.WORLD
        assert group is not None
        self._process_group: dist.ProcessGroup = group

    def _allocate(self, nbytes: int) -> Region:
        tensor = self._symm.empty(nbytes, dtype=torch.uint8, device=self.device)
        handle = self._symm.rendezvous(tensor, self._process_group)
        ptrs = [int(p) for p in handle.buffer_ptrs]
        offset = tensor.data_ptr() - ptrs[self.rank]  # newer releases carve several tensors from one allocation
        return Region(tensor, [p + offset for p in ptrs], (handle, offset))

    def _peer(self, region: Region, rank: int) -> Tensor:
        handle, offset = region.keep
        view: Tensor = handle.get_buffer(rank, (region.local.numel(),), torch.uint8, storage_offset=offset)
        return view

    def _release(self, region: Region) -> None:
        region.local = torch.empty(0, dtype=torch.uint8)
        region.keep = None

    def _shut(self) -> None:
        pass
