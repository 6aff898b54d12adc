"""An NVSHMEM heap whose peers have no address, in a file of its own: a process has one NVSHMEM world at a time."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from ep_plugin.heap import open_heap
from ep_plugin.heap.base import Phase

Ranks = tuple[int, int, torch.device]


def test_a_peer_without_an_address_is_named_with_what_to_do(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that would go nowhere: one rank's planted table has a 0, and every rank must say so and
    let go of NVSHMEM."""
    pytest.importorskip("nvshmem.core")
    from ep_plugin.heap import nvshmem

    rank, world, device = ranks
    with monkeypatch.context() as patch:
        if rank == 0:
            patch.setattr(nvshmem.NvshmemHeap, "_pointer", lambda self, own, peer: 0)
        with pytest.raises(RuntimeError, match=r"rank 0 cannot address ranks \[1.*'deepep'.*'block'.*'device'"):
            open_heap("nvshmem", None, device, 20.0)
    assert not nvshmem.in_use()
    dist.barrier()
    for transport in ("peer", "device"):  # and the next one opens
        again = open_heap("nvshmem", None, device, 20.0, transport)
        again.barrier(Phase("test"))
        torch.cuda.synchronize()
        again.check()  # type: ignore[attr-defined]
        again.close()
