"""ep-doctor: what it says of machines that lack something."""

from __future__ import annotations

import builtins
import json
import re
from pathlib import Path

import pytest
import torch

from ep_plugin import doctor
from ep_plugin.doctor import ABSENT, BAD, OK, Check, Diagnosis, Use, diagnose, main
from ep_plugin.heap import region


def use(name: str) -> Use:
    return next(use for use in diagnose().uses if use.name == name)


def test_this_machine_runs_the_cpu_paths(capsys):
    """Fault: a doctor that finds fault with the machine the tests run on, or fills more than a screen."""
    assert main([]) == 0
    printed = capsys.readouterr().out
    for name in ("local, CPU", "block, CPU", "rowwise, CPU (heap=shm)", "precision=mxfp8, CPU"):
        assert f"✓ {name}" in printed
    assert len(printed.splitlines()) < 50 and torch.__version__ in printed


def test_json_says_the_same(capsys):
    """Fault: programs and people are told different things."""
    assert main(["--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["failed"] == []
    assert {row["name"]: row["runs"] for row in told["uses"]} == {u.name: u.blocker is None for u in diagnose().uses}
    for row in told["uses"]:
        assert row["runs"] or row["blocked_by"]["found"]


def test_no_shared_memory(monkeypatch, capsys):
    """Fault: the CPU heap is said to run where none can be made, or the exit status does not say so."""

    def refused(label):
        raise OSError(1, "memfd_create: Operation not permitted")

    monkeypatch.setattr(region, "_memfd", refused)
    blocker = use("rowwise, CPU (heap=shm)").blocker
    assert blocker is not None and blocker.name == "shared memory" and "memfd_create" in blocker.found
    assert "dispatcher='block'" in blocker.fix
    assert main([]) == 1
    printed = capsys.readouterr().out
    assert "✗ rowwise, CPU (heap=shm)" in printed and "Does not work: shared memory" in printed
    assert "✓ block, CPU" in printed


@pytest.fixture
def two_gpus(monkeypatch):
    """A machine that says it has two GPUs of a Hopper; nothing is started on them."""
    properties = type("Properties", (), {"total_memory": 141 << 30})()
    for name, value in {
        "is_available": lambda: True,
        "device_count": lambda: 2,
        "get_device_name": lambda i=0: "NVIDIA H200",
        "get_device_capability": lambda i=0: (9, 0),
        "get_device_properties": lambda i=0: properties,
        "can_device_access_peer": lambda i, j: True,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None if "nvshmem" in name else object())
    monkeypatch.setattr(
        doctor, "check_deepep", lambda: [Check("DeepEP package", BAD, "deep_ep is not installed", "pip")]
    )


def test_two_gpus(two_gpus, monkeypatch):
    """Fault: what GPUs can do is not seen, or is expected where a package is not installed."""
    found = diagnose()
    assert "2 × NVIDIA H200 (sm_90, 141 GiB)" in next(c.found for c in found.machine if c.name == "GPUs")
    by_name = {u.name: u for u in found.uses}
    assert by_name["rowwise, GPUs (heap=torch)"].blocker is None and by_name["rowwise, GPUs (heap=torch)"].expected
    nvshmem = by_name["rowwise, GPUs (heap=nvshmem)"]
    assert nvshmem.blocker is not None and "ep_plugin[nvshmem]" in nvshmem.blocker.fix and not nvshmem.expected
    assert by_name["precision=mxfp8, GPUs (sm90_fp8row)"].blocker is None
    native = by_name["precision=mxfp8, GPUs (sm100_mx)"].blocker
    assert native is not None and "10.x" in native.found and "9.0" in native.found
    assert found.failed() == []
    assert found.failed(["rowwise, GPUs (heap=nvshmem)"]) == ["rowwise, GPUs (heap=nvshmem)"]


def test_gpus_that_do_not_reach_each_other(two_gpus, monkeypatch):
    """Fault: rowwise on GPUs is offered where it will fail in its first allocation."""
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda i, j: False)
    blocker = use("rowwise, GPUs (heap=torch)").blocker
    assert blocker is not None and "(0, 1)" in blocker.found and "dispatcher='block'" in blocker.fix
    assert use("block, GPUs").blocker is None


def test_a_driver_without_a_cuda_build_of_torch(monkeypatch):
    """Fault: a GPU machine whose torch cannot use it passes for a CPU machine."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(Path, "is_file", lambda self: str(self) == "/proc/driver/nvidia/version")
    assert doctor.check_gpus().state == BAD and "CUDA build" in doctor.check_gpus().fix


def test_without_torch(monkeypatch, capsys):
    """Fault: the doctor needs what it should find missing."""
    whole = builtins.__import__

    def no_torch(name, *args, **kwargs):
        if name == "torch":
            raise ImportError("libtorch.so: cannot open shared object file")
        return whole(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", no_torch)
    assert main([]) == 1
    printed = capsys.readouterr().out
    assert "libtorch.so" in printed and "pip install" in printed


def test_an_old_torch(monkeypatch):
    """Fault: a version that the package does not support passes, as text or as 2.9 > 2.10."""
    monkeypatch.setattr(torch, "__version__", "2.9.1+cu128")
    assert doctor.check_torch().state == BAD
    monkeypatch.setattr(torch, "__version__", "2.10.0")
    assert doctor.check_torch().state == OK


def test_needs_are_checked(capsys):
    """Fault: a job script that asks for something gets 0 where it cannot run, or where it misspelled the name."""
    if not torch.cuda.is_available():
        assert main(["--need", "block, GPUs"]) == 1
        assert "Does not work: block, GPUs" in capsys.readouterr().out
    with pytest.raises(SystemExit) as caught:
        main(["--need", "blok"])
    assert caught.value.code == 2 and "'blok' is not one of: local, CPU" in capsys.readouterr().err


def test_every_blocked_use_says_why_and_how():
    """Fault: a cross without a reason."""
    check = Check("thing", ABSENT, "not there", "get it")
    told = Diagnosis((check,), (check,), (Use("it", False, (Check("first", OK, "fine"), check)),)).text()
    assert "– it  thing: not there  → get it" in told
    for row in diagnose().uses:
        assert row.blocker is None or row.blocker.found


def test_small_dev_shm_is_said(monkeypatch):
    """Fault: a container's 64 MiB, which data loaders and NCCL stumble over, are not mentioned."""
    monkeypatch.setattr(
        doctor.shutil, "disk_usage", lambda path: type("U", (), {"total": 64 << 20, "free": 64 << 20})()
    )
    assert "--shm-size" in doctor.check_dev_shm().found


def test_models_lists_architectures(capsys):
    """Fault: the list of architectures cannot be printed, or its JSON not read."""
    pytest.importorskip("transformers")
    assert main(["models"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"^olmoe +tested", printed, re.MULTILINE) and re.search(r"\d+ tested, \d+ untested", printed)
    assert main(["models", "--json"]) == 0
    assert "mixtral" in {row["name"] for row in json.loads(capsys.readouterr().out)}
