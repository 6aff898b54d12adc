"""DeepEP's preflight: what is missing, or another build, is named with what to install before anything is imported."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ep_plugin.config import EPConfig
from ep_plugin.dispatch import build_dispatcher, deepep_checks, deepep_preflight
from ep_plugin.dispatch.deepep_checks import Check, install_line
from ep_plugin.train.checks import check_settings
from ep_plugin.train.compose import compose_launch


def found(name: str, **given) -> Check:
    (check,) = [check for check in deepep_preflight(**given) if check.name == name]
    return check


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Puts a package deep_ep with given sources, and NCCL headers of a version, where Python looks first."""

    def install(sources: str, name: str = "tokenspeed_deepep", version: str = "2.1.0.post20260801", nccl="2.30.7"):
        package = tmp_path / "deep_ep"
        (package / "buffers").mkdir(parents=True)
        (package / "__init__.py").write_text("raise RuntimeError('imported')\n")
        (package / "buffers" / "all.py").write_text(sources)
        info = tmp_path / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n")
        (info / "top_level.txt").write_text("deep_ep\n")
        (info / "RECORD").write_text("deep_ep/__init__.py,,\n")
        include = tmp_path / "nccl" / "include"
        include.mkdir(parents=True)
        parts = zip(("MAJOR", "MINOR", "PATCH"), nccl.split("."), strict=True)
        (include / "nccl.h").write_text("".join(f"#define NCCL_{part} {number}\n" for part, number in parts))
        monkeypatch.setenv("EP_NCCL_ROOT_DIR", str(tmp_path / "nccl"))
        monkeypatch.syspath_prepend(str(tmp_path))

    yield install
    sys.modules.pop("deep_ep", None)


def test_a_missing_package_is_answered_with_the_line_for_this_torch(monkeypatch):
    """Fault: an ImportError from deep inside, or advice for another torch."""
    monkeypatch.setattr(torch, "__version__", "2.11.0+cu130")
    check = found("DeepEP package")
    assert check.ok is False and "not installed" in check.line()
    assert "tokenspeed-deepep==2.1.0.post20260801 nvidia-nccl-cu13==2.30.7" in check.line()
    assert "sgl-deep-ep==0.1.2 " in install_line("2.13.0") and "post1" in install_line("2.14.1+cu130")
    assert all("no wheel for torch" in install_line(version) for version in ("2.10.0", "2.12.1", "2.14.0", "2.110.0"))


@pytest.mark.parametrize(
    ("sources", "ok", "said"),
    [
        ("class Buffer:\n    pass\nclass ElasticBuffer:\n    pass\n", True, "tokenspeed-deepep 2.1.0.post20260801"),
        ("class Buffer:\n    pass\n", False, "DeepEP v1 (Buffer alone); v2 is what is used; uninstall it"),
        ("class EPBuffer:\n    pass\n", False, "DeepEP v2.5 (EPBuffer); v2 is what is used; uninstall it"),
        ("class EPBuffer: ...\nclass ElasticBuffer: ...\n", False, "beside v2's ElasticBuffer, from two packages"),
    ],
)
def test_other_builds_of_the_same_module_are_told_apart_without_importing_them(installed, sources, ok, said):
    """Fault: v1 or v2.5 passes and fails later on a missing class; the check itself imports what may crash."""
    installed(sources)
    check = found("DeepEP package")
    assert check.ok is ok and said in check.line()


@pytest.mark.parametrize(
    ("torch_version", "cuda", "ok"), [("2.11.0", "13.0", True), ("2.13.0", "13.0", False), ("2.11.0", "12.8", False)]
)
def test_a_wheel_of_another_torch_is_refused(installed, monkeypatch, torch_version, cuda, ok):
    """Fault: an undefined symbol at import, or a crash after it."""
    installed("class ElasticBuffer: ...\n")
    monkeypatch.setattr(torch, "__version__", torch_version)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    assert found("DeepEP and torch").ok is ok


@pytest.mark.parametrize(
    ("headers", "running", "ok", "said"),
    [
        ("2.30.7", (2, 30, 7), True, "headers of 2.30.7"),
        ("2.28.9", (2, 28, 9), False, "at least 2.30.4 is needed"),
        ("2.30.7", (2, 28, 9), False, "they must be the same"),
        ("2.30.5", (2, 30, 5), False, "below 2.31 it must be the one that the wheel was built with"),
        ("2.31.1", (2, 31, 1), True, "2.31.1"),
    ],
)
def test_the_nccl_that_runs_and_the_one_that_kernels_are_compiled_with(
    installed, monkeypatch, headers, running, ok, said
):
    """Fault: an NCCL older than device communicators, or two that differ, which ends in memory faults."""
    installed("class ElasticBuffer: ...\n", nccl=headers)
    monkeypatch.setattr(deepep_checks, "running_nccl", lambda: running)
    check = found("NCCL")
    assert check.ok is ok and said in check.line()


def test_two_loaded_nccls_or_another_file_are_seen(installed, monkeypatch, tmp_path):
    """Fault: LD_PRELOAD brings a second NCCL, whose communicator the first does not know."""
    installed("class ElasticBuffer: ...\n")
    one, other = tmp_path / "libnccl.so.2", tmp_path / "other.so"
    one.write_bytes(b"a"), other.write_bytes(b"b")
    (tmp_path / "nccl" / "lib").mkdir()
    (tmp_path / "nccl" / "lib" / "libnccl.so.2").write_bytes(b"a")
    for loaded, ok in (([one], True), ([other], False), ([one, other], False), ([], None)):
        monkeypatch.setattr(deepep_checks, "loaded_nccl", lambda loaded=loaded: loaded)
        monkeypatch.setattr(deepep_checks, "running_nccl", lambda: (2, 30, 7))
        assert found("one NCCL in the process").ok is ok


def test_the_machine(monkeypatch, tmp_path):
    """Fault: a missing compiler or an old GPU that is noticed in the first step."""
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").touch()
    assert found("nvcc, for kernels compiled at run time").ok
    missing = found("cuobjdump, for kernels compiled at run time")
    assert missing.ok is False and f"there is no {tmp_path}/bin/cuobjdump" in missing.line()
    assert found("GPUs").ok is False
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda i: "GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i: (9 - i, 0))
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda i, j: i > j)
    assert "[1] are older than sm_90" in found("GPUs").line() and found("GPUs").ok is False
    assert "[(0, 1)]" in found("peer access between the node's GPUs").line()
    assert found("peer access between the node's GPUs", devices=[0, 5]).ok is None
    monkeypatch.setenv("EP_DISABLE_GIN", "1")
    assert found("network").ok and found("network", nodes=2).ok is False


def test_uninitialised_memory_that_torch_fills(monkeypatch):
    """Fault: torch's fill kernels overwrite what DeepEP's stream has written."""
    assert found("uninitialised memory").ok
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert found("uninitialised memory").ok is False


def test_limits_of_the_shape():
    """Fault: a shape that a static assertion of a kernel stops, after it was compiled for seconds."""
    good = dict(num_experts=128, top_k=8, hidden_size=7168, dtype=torch.bfloat16, world=8, max_tokens=4096)
    names = {"dtype", "hidden_size", "top_k", "num_experts", "experts of a rank", "rows of a rank in the worst case"}
    for change, name in (
        ({}, None),
        ({"hidden_size": 2880}, "hidden_size"),
        ({"top_k": 33}, "top_k"),
        ({"num_experts": 4096, "world": 16}, "num_experts"),
        ({"num_experts": 132}, "experts of a rank"),
        ({"num_experts": 1024, "world": 2}, "experts of a rank"),
        ({"dtype": torch.float32}, "dtype"),
        ({"max_tokens": 2**26}, "rows of a rank in the worst case"),
    ):
        failed = {c.name for c in deepep_preflight(**{**good, **change}) if c.ok is False} & names
        assert failed == ({name} if name else set()), (change, failed)


def refused(rank: int, world: int) -> str:
    shape = dict(num_experts=8, top_k=2, hidden_size=256 if rank else 100, dtype=torch.bfloat16)
    shape["hidden_size"] = 100
    try:
        build_dispatcher(EPConfig(dispatcher="deepep"), **shape)
    except ValueError as error:
        return str(error)
    return f"nothing, initialised {dist.is_initialized()}"


def test_every_rank_is_told_every_check_that_failed_on_any(pool):
    """Fault: one rank raises and the others wait for it; one line at a time."""
    for said in pool.run(refused, 2):
        assert said.startswith("dispatcher='deepep' cannot run here:\n  all ranks: device:")
        for text in ("deep_ep is not installed", "hidden_size: 100; DeepEP needs a multiple of 256"):
            assert said.count(text) == 1
        assert "its backend for CUDA" in said or "it has no backend for CUDA" in said


def test_recipes_are_refused_before_processes_start():
    """Fault: a launch of many processes fails in each of them on what its settings say."""
    config = compose_launch(["ep=deepep", "topology.ep=2", "trainer.dtype=bfloat16", "model.hidden_size=256"]).config
    check_settings(config, 2)
    for owner, name, value, said in (
        (config.trainer, "dtype", "float32", "trainer.dtype='float32'"),
        (config.model, "hidden_size", 96, "model.hidden_size=96"),
        (config.trainer, "device", "cpu", "trainer.device='cpu'"),
    ):
        before = getattr(owner, name)
        setattr(owner, name, value)
        with pytest.raises(ValueError, match=said):
            check_settings(config, 2)
        setattr(owner, name, before)
