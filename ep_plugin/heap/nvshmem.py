"""The ``nvshmem`` backend: nvshmem4py, with the EP_MP group as the NVSHMEM world of this process."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..kernels.nvshmem_library import forget_world
from .device import DeviceHeap, Region

_world: NvshmemHeap | None = None  # NVSHMEM has one world per process


def in_use() -> bool:
    """Whether this process is in an NVSHMEM world of ours."""
    return _world is not None


class NvshmemHeap(DeviceHeap):
    """Symmetric heap of NVSHMEM. Initialised by a unique id that the group's first rank makes and broadcasts.

    ``transport='device'``: no pointer to another rank's memory is asked for, and all tables hold only our own."""

    name = "nvshmem"

    def __init__(
        self, group: dist.ProcessGroup | None, device: torch.device, timeout_s: float, transport: str = "peer"
    ) -> None:
        self.transport = transport
        super().__init__(group, device, timeout_s)

    def _open(self) -> None:
        global _world
        if _world is not None:
            raise RuntimeError(
                f"this process is already rank {_world.rank} of an NVSHMEM world of {_world.world}: NVSHMEM allows"
                f" one EP group"
                " per process at a time; use heap='torch' for the second, or close the first"
            )
        # One host: no NIC, no NCCL communicator per team, the bootstrap over loopback. A user's own setting wins.
        os.environ.setdefault("NVSHMEM_DISABLE_NCCL", "1")
        if self.one_host:
            os.environ.setdefault("NVSHMEM_REMOTE_TRANSPORT", "none")
            os.environ.setdefault("NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME", "lo")
        try:
            import nvshmem.core as nv
            from cuda.core import Device
            from nvshmem.bindings import ptr
        except ImportError as error:
            raise RuntimeError(
                f"heap='nvshmem' needs nvshmem4py: pip install 'ep_plugin[nvshmem]' ({error}); heap='torch' needs"
                f" nothing"
            ) from error
        self._nv, self._ptr = nv, ptr
        device = Device(self.device.index)
        device.set_current()
        uid = [nv.get_unique_id(empty=self.rank != 0)]
        dist.broadcast_object_list(uid, src=dist.get_global_rank(self._pg, 0), group=self._pg)
        nv.init(device=device, uid=uid[0], rank=self.rank, nranks=self.world, initializer_method="uid")
        status = int(nv.init_status())
        if status < int(nv.InitStatus.STATUS_IS_INITIALIZED):  # init returns normally after a failure
            raise RuntimeError(f"NVSHMEM did not initialise (status {status}); NVSHMEM_DEBUG=WARN says why")
        _world = self

    @property
    def _pg(self) -> dist.ProcessGroup:
        group = self.group if self.group is not None else dist.group.WORLD
        assert group is not None
        return group

    def _allocate(self, nbytes: int) -> Region:
        tensor = self._nv.tensor((nbytes,), dtype=torch.uint8)
        own = tensor.data_ptr()
        ptrs = [own if rank == self.rank else self._pointer(own, rank) for rank in range(self.world)]
        return Region(tensor, ptrs, {})

    def _pointer(self, own: int, rank: int) -> int:
        """Where our address ``own`` lies at ``rank``, as an address in this process; 0 for none."""
        return int(self._ptr(own, rank) or 0) if self.transport == "peer" else 0

    def _peer(self, region: Region, rank: int) -> Tensor:
        views: dict[int, Tensor] = region.keep
        if rank not in views:
            views[rank] = self._nv.get_peer_tensor(region.local, rank)
        return views[rank]

    def _release(self, region: Region) -> None:
        for view in region.keep.values():
            self._nv.free_tensor(view)
        region.keep = {}
        self._nv.free_tensor(region.local)
        region.local = torch.empty(0, dtype=torch.uint8)

    def _shut(self) -> None:
        global _world
        nv: Any = self._nv
        nv.finalize()
        forget_world()
        _world = None
