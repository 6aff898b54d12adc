"""GPU tests of several ranks. Run them as ``torchrun --nproc-per-node 2 -m pytest tests/gpu``.

Every rank runs the same tests in the same order, so a test is one program of all ranks. Without torchrun or without
enough GPUs they skip."""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from ep_plugin.heap import open_heap
from ep_plugin.heap.base import Heap
from ep_plugin.job import join, shares_gpus

# NVLink multicast stays off: none of the transports here uses it.
os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
os.environ.setdefault("NVSHMEM_DISABLE_NVLS", "1")


@pytest.fixture(scope="session")
def ranks() -> Iterator[tuple[int, int, torch.device]]:
    """(rank, world, device) of a job with one GPU per rank (or EP_PLUGIN_SHARE_GPUS), torch.distributed initialised."""
    if "RANK" not in os.environ:
        pytest.skip("needs torchrun --nproc-per-node N -m pytest tests/gpu")
    try:
        device = join("cuda", timeout=datetime.timedelta(seconds=120))
    except ValueError as error:  # fewer GPUs than ranks
        pytest.skip(str(error))
    dist.barrier()
    yield dist.get_rank(), dist.get_world_size(), device
    dist.destroy_process_group()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A module's ``HEAPS`` are the heaps its tests run on; "nvshmem device" is heap=nvshmem, transport=device."""
    if "heap" in metafunc.fixturenames:
        heaps = getattr(metafunc.module, "HEAPS", ("torch", "nvshmem"))
        metafunc.parametrize("heap", heaps, indirect=True, scope="module")


@pytest.fixture(scope="module")
def heap(request: pytest.FixtureRequest, ranks: tuple[int, int, torch.device]) -> Iterator[Heap]:
    name, _, transport = request.param.partition(" ")
    if name == "nvshmem":
        pytest.importorskip("nvshmem.core")
        if shares_gpus():
            pytest.skip("ranks that share a GPU have heap='torch' alone")
    heap = open_heap(name, None, ranks[2], 30.0, transport or "peer")
    yield heap
    heap.close()
