"""Which GPU and which backend a rank gets, on a host with as many GPUs as the test says."""

from __future__ import annotations

import os

import pytest
import torch

from ep_plugin.heap import _choose
from ep_plugin.job import SHARE_GPUS, gpu_backend, gpu_of


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.delenv(SHARE_GPUS, raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    return monkeypatch


def test_one_rank_to_a_gpu(gpus: pytest.MonkeyPatch) -> None:
    """Catches two ranks on one GPU that nobody asked for: NCCL would hang or fail far from the cause."""
    gpus.setenv("LOCAL_WORLD_SIZE", "2")
    assert [gpu_of(rank).index for rank in range(2)] == [0, 1] and gpu_backend() == "nccl"
    gpus.setenv("LOCAL_WORLD_SIZE", "3")
    for rank in range(3):  # all say so, not only the one that is too many
        with pytest.raises(
            ValueError, match="3 processes on this host, where torch sees 2 GPUs: start at most 2, or set"
        ):
            gpu_of(rank)


def test_ranks_share_gpus_where_asked_to(gpus: pytest.MonkeyPatch) -> None:
    """Catches a share without the heap and the backend that allow it."""
    gpus.setenv(SHARE_GPUS, "1")
    gpus.setenv("LOCAL_WORLD_SIZE", "5")
    gpus.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "0")
    assert [gpu_of(rank).index for rank in range(5)] == [0, 1, 0, 1, 0] and gpu_backend() == "gloo"
    assert os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] == "1"
    assert _choose(torch.device("cuda", 0)) == ("torch", "ranks share GPUs")


def test_no_gpu(gpus: pytest.MonkeyPatch) -> None:
    """Catches a division by no GPUs."""
    gpus.setattr(torch.cuda, "device_count", lambda: 0)
    gpus.setenv(SHARE_GPUS, "1")
    with pytest.raises(ValueError, match="torch sees no CUDA device"):
        gpu_of(0)
