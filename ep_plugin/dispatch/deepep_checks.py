"""What DeepEP needs of packages, machine, group and shape, checked before it is imported: most of what is missing would
otherwise be a crash without a word of why.

Builds of DeepEP name the same module, ``deep_ep``: v1 (``Buffer`` alone), v2 (``ElasticBuffer``), v2.5 (``EPBuffer``).
Only v2 is used here. A build fits one version of torch, and one of NCCL below 2.31."""

from __future__ import annotations

import ctypes
import filecmp
import functools
import importlib.metadata
import importlib.util
import os
import re
import shutil
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from ..config import EPConfig
from .deepep_buffer import worst_case_rows

NCCL = "nvidia-nccl-cu13==2.30.7"  # what the wheels below were built with
NCCL_LEAST = (2, 30, 4)
NCCL_FREE = (2, 31)  # from here on, a build works with NCCL versions other than its own
WHEELS = {  # torch version: what fits it
    "2.11": "tokenspeed-deepep==2.1.0.post20260801",
    "2.13": "sgl-deep-ep==0.1.2",
    "2.14.1": "sgl-deep-ep==0.1.2.post1",
}
MAX_EXPERTS, MAX_LOCAL_EXPERTS, MAX_TOP_K, HIDDEN_MULTIPLE = 2048, 256, 32, 256
MAX_ROWS = 2**31 - 1


@dataclass(frozen=True)
class Check:
    """One requirement. ``ok`` None: it could not be looked at here, ``found`` says why."""

    name: str
    ok: bool | None
    found: str
    fix: str = ""

    def line(self) -> str:
        """``name: found; fix``."""
        return f"{self.name}: {self.found}" + (f"; {self.fix}" if self.fix and self.ok is False else "")


def install_line(torch_version: str) -> str:
    """What to install for ``torch_version``."""
    version = torch_version.split("+")[0]
    for known, wheel in WHEELS.items():
        if _is(version, known):
            return f"for torch {known}: pip install --no-deps --force-reinstall {wheel} {NCCL}"
    return f"there is no wheel for torch {version} (there is for {', '.join(WHEELS)}): build DeepEP v2 from source"


def _is(version: str, known: str) -> bool:
    """Whether ``version`` is ``known``, or one of its patch versions."""
    return (version + ".").startswith(known + ".")


def deepep_preflight(
    *,
    num_experts: int | None = None,
    top_k: int | None = None,
    hidden_size: int | None = None,
    dtype: torch.dtype | None = None,
    world: int | None = None,
    max_tokens: int | None = None,
    nodes: int = 1,
    devices: list[int] | None = None,
    group: dist.ProcessGroup | None = None,
) -> list[Check]:
    """Every requirement of DeepEP v2 that can be looked at with what is given, in the order in which to mend them.

    Imports nothing of DeepEP and starts nothing on a GPU. ``world`` ranks of the EP group on ``nodes`` nodes,
    ``devices``: CUDA indices of this node's ranks (None: all that are visible)."""
    checks = [_package(), _torch_build(), _nccl_version(), _nccl_twice(), *_compiler(), *_devices(devices)]
    checks += [_network(nodes), _determinism()]
    if group is not None:
        checks.append(_group(group))
    checks += _shape(num_experts, top_k, hidden_size, dtype, world, max_tokens)
    return checks


# Packages


def _sources(folder: Path) -> str:
    return "\n".join(file.read_text(errors="replace") for file in sorted(folder.rglob("*.py")))


def _package() -> Check:
    name, line = "DeepEP package", install_line(torch.__version__)
    try:
        spec = importlib.util.find_spec("deep_ep")
    except (ImportError, ValueError) as error:
        return Check(name, False, f"deep_ep cannot be looked up: {error}", line)
    if spec is None or not spec.submodule_search_locations:
        return Check(name, False, "deep_ep is not installed", line)
    folder = Path(next(iter(spec.submodule_search_locations)))
    source = _sources(folder)
    has = {kind: re.search(rf"^class {kind}\b", source, re.M) is not None for kind in ("ElasticBuffer", "EPBuffer")}
    if has["EPBuffer"]:
        both = " beside v2's ElasticBuffer, from two packages in one folder" if has["ElasticBuffer"] else ""
        return Check(
            name, False, f"{folder} is DeepEP v2.5 (EPBuffer){both}; v2 is what is used", f"uninstall it; {line}"
        )
    if not has["ElasticBuffer"]:
        return Check(name, False, f"{folder} is DeepEP v1 (Buffer alone); v2 is what is used", f"uninstall it; {line}")
    return Check(name, True, f"{_installed('deep_ep') or 'a source build'} in {folder}")


def _installed(module: str) -> str:
    """The distributions that bring ``module``, with their versions."""
    return _installed_on(module, tuple(sys.path))


@functools.lru_cache
def _installed_on(module: str, path: tuple[str, ...]) -> str:
    names = importlib.metadata.packages_distributions().get(module, [])  # reads every package's list of files
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in sorted(set(names)))


def _torch_build() -> Check:
    name, version = "DeepEP and torch", torch.__version__
    found = _installed("deep_ep").lower().replace("_", "-")
    known = {wheel.split("==")[0]: None for wheel in WHEELS.values()}
    wheel = next((w for w in known if w in found), None)
    if wheel is None:
        return Check(name, None, f"{found or 'no package'} says nothing of the torch that it was built for")
    fits = [short for short, w in WHEELS.items() if w.replace("==", " ") in found.split(", ")]
    if not fits:
        return Check(name, None, f"{found} is not one of the wheels that are known here")
    if not any(_is(version.split("+")[0], known) for known in fits):
        return Check(name, False, f"{found} is built for torch {fits[0]}, not for {version}", install_line(version))
    if torch.version.cuda is None or not torch.version.cuda.startswith("13"):
        return Check(name, False, f"{found} is built for CUDA 13, torch {version} for {torch.version.cuda}")
    return Check(name, True, f"{found}, torch {version}")


# NCCL


def _nccl_folder() -> tuple[Path, str] | None:
    """Where the NCCL package lies that DeepEP compiles its kernels with, and its version."""
    named = os.environ.get("EP_NCCL_ROOT_DIR") or os.environ.get("NCCL_DIR")
    if named:
        return Path(named), _header_version(Path(named))
    for package in importlib.metadata.distributions():
        package_name = (package.metadata["Name"] or "").lower()
        if package_name.startswith(("nvidia-nccl", "nvidia_nccl")):
            folder = Path(str(package.locate_file("nvidia/nccl")))
            return folder, package.version
    return None


def _header_version(folder: Path) -> str:
    header = folder / "include" / "nccl.h"
    if not header.is_file():
        return "unknown"
    found = dict(re.findall(r"^#define NCCL_(MAJOR|MINOR|PATCH)\s+(\d+)", header.read_text(), re.M))
    return ".".join(found.get(part, "?") for part in ("MAJOR", "MINOR", "PATCH"))


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def _nccl_version() -> Check:
    name = "NCCL"
    fix = f"pip install --no-deps --force-reinstall {NCCL}"
    package = _nccl_folder()
    if package is None:
        return Check(name, False, "no NCCL package is installed, whose headers DeepEP compiles with", fix)
    folder, version = package
    loaded = running_nccl()
    said = f"torch runs {'none' if loaded is None else '.'.join(map(str, loaded))}, headers of {version} in {folder}"
    if _numbers(version) < NCCL_LEAST:
        return Check(name, False, f"{said}; at least {'.'.join(map(str, NCCL_LEAST))} is needed", fix)
    header = _header_version(folder)
    if header not in ("unknown", version) and _numbers(header) != _numbers(version):
        return Check(name, False, f"{said}, whose nccl.h says {header}", fix)
    if loaded is not None and loaded != _numbers(version):
        return Check(name, False, f"{said}; they must be the same", fix)
    built = _numbers(NCCL.split("==")[1])
    if _numbers(version) < NCCL_FREE and _numbers(version) != built and _known_wheel():
        return Check(name, False, f"{said}; below 2.31 it must be the one that the wheel was built with", fix)
    return Check(name, True, said)


def _known_wheel() -> bool:
    found = _installed("deep_ep").lower().replace("_", "-")
    return any(wheel.split("==")[0] in found for wheel in WHEELS.values())


def loaded_nccl() -> list[Path]:
    """The NCCL libraries of this process; torch has loaded one when it is built for CUDA."""
    maps = Path("/proc/self/maps")
    lines = maps.read_text().splitlines() if maps.is_file() else []
    return sorted({Path(line.split()[-1]) for line in lines if "libnccl.so" in line})


def running_nccl() -> tuple[int, ...] | None:
    """The version of the loaded NCCL itself: ``torch.cuda.nccl.version()`` says what torch was compiled with."""
    loaded = loaded_nccl()
    if not loaded:
        return None
    version = ctypes.c_int()
    ctypes.CDLL(str(loaded[0])).ncclGetVersion(ctypes.byref(version))
    return version.value // 10000, version.value // 100 % 100, version.value % 100


def _nccl_twice() -> Check:
    name, loaded, package = "one NCCL in the process", loaded_nccl(), _nccl_folder()
    if len(loaded) > 1:
        said = ", ".join(map(str, loaded))
        return Check(name, False, f"two are loaded: {said}", "leave out LD_PRELOAD and LD_LIBRARY_PATH")
    if not loaded:
        return Check(name, None, "none is loaded yet")
    files = [] if package is None else sorted((package[0] / "lib").glob("libnccl.so*"))
    if files and not filecmp.cmp(loaded[0], files[0], shallow=False):
        return Check(name, False, f"{loaded[0]} is loaded but DeepEP takes {files[0]}", "they must be the same file")
    return Check(name, True, str(loaded[0]))


# The machine


def _cuda_home() -> Path | None:
    named = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if named:
        return Path(named)
    nvcc = shutil.which("nvcc")
    if nvcc:
        return Path(nvcc).parent.parent
    return Path("/usr/local/cuda") if Path("/usr/local/cuda").is_dir() else None


def _compiler() -> list[Check]:
    home, checks = _cuda_home(), []
    for tool in ("nvcc", "cuobjdump"):
        name, fix = f"{tool}, for kernels compiled at run time", "install the CUDA toolkit and set CUDA_HOME to it"
        if home is None:
            checks.append(Check(name, False, "CUDA_HOME is not set and there is no /usr/local/cuda", fix))
        else:
            file = home / "bin" / tool
            there = file.is_file()
            checks.append(Check(name, there, str(file) if there else f"there is no {file}", fix))
    return checks


def _devices(devices: list[int] | None) -> list[Check]:
    if not torch.cuda.is_available():
        return [Check("GPUs", False, "torch sees no CUDA device", "use dispatcher='block' or 'rowwise' on CPU")]
    used = list(range(torch.cuda.device_count())) if devices is None else sorted(set(devices))
    old = [i for i in used if i < torch.cuda.device_count() and torch.cuda.get_device_capability(i)[0] < 9]
    names = ", ".join(sorted({torch.cuda.get_device_name(i) for i in used if i < torch.cuda.device_count()}))
    checks = [
        Check("GPUs", not old, f"{names}" + (f", of which {old} are older than sm_90" if old else ""), "use sm_90+")
    ]
    name = "peer access between the node's GPUs"
    if max(used, default=0) >= torch.cuda.device_count():
        return [*checks, Check(name, None, "this process does not see the other ranks' devices")]
    apart = [(i, j) for i in used for j in used if i != j and not torch.cuda.can_device_access_peer(i, j)]
    fix = "DeepEP moves rows between the GPUs of a node over NVLink alone; use dispatcher='block'"
    return [*checks, Check(name, not apart, f"none between {apart}" if apart else f"devices {used}", fix)]


def _network(nodes: int) -> Check:
    off = os.environ.get("EP_DISABLE_GIN", "0") not in ("", "0")
    if nodes == 1:
        return Check("network", True, "one node, no network needed")
    return Check("network", not off, f"{nodes} nodes, EP_DISABLE_GIN={'1' if off else '0'}", "unset EP_DISABLE_GIN")


def _determinism() -> Check:
    name, fills = "uninitialised memory", torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    on = torch.are_deterministic_algorithms_enabled() and fills
    fix = "set torch.utils.deterministic.fill_uninitialized_memory = False"
    found = "torch fills it, which overlaps with DeepEP's writes" if on else "torch leaves it as it is"
    return Check(name, not on, found, fix)


def _group(group: dist.ProcessGroup) -> Check:
    name, fix = "process group", "init_process_group('cpu:gloo,cuda:nccl', ...)"
    try:
        backend = group._get_backend(torch.device("cuda"))
    except RuntimeError:
        return Check(name, False, "it has no backend for CUDA", fix)
    kind = type(backend).__name__
    return Check(name, "NCCL" in kind, f"its backend for CUDA is {kind}", fix)


# The layer's shape


def _shape(
    num_experts: int | None,
    top_k: int | None,
    hidden_size: int | None,
    dtype: torch.dtype | None,
    world: int | None,
    max_tokens: int | None,
) -> list[Check]:
    checks: list[Check] = []

    def check(name: str, value: Any, right: Callable[[], bool], need: str) -> None:
        if value is not None:
            ok = right()
            checks.append(Check(name, ok, f"{value}", f"DeepEP needs {need}"))

    check("dtype", dtype, lambda: dtype is torch.bfloat16, "bfloat16 rows")
    check("hidden_size", hidden_size, lambda: (hidden_size or 1) % HIDDEN_MULTIPLE == 0, "a multiple of 256")
    check("top_k", top_k, lambda: 1 <= (top_k or 0) <= MAX_TOP_K, "1 to 32")
    check("num_experts", num_experts, lambda: (num_experts or 0) <= MAX_EXPERTS, f"at most {MAX_EXPERTS}")
    if num_experts is not None and world is not None:
        local = num_experts / world
        check("experts of a rank", f"{num_experts} / {world}", lambda: local.is_integer(), "a whole number")
        check("experts of a rank", int(local), lambda: local <= MAX_LOCAL_EXPERTS, f"at most {MAX_LOCAL_EXPERTS}")
        if top_k is not None and max_tokens is not None:
            rows = worst_case_rows(max_tokens, world=world, top_k=top_k, num_local_experts=max(1, int(local)))
            check("rows of a rank in the worst case", rows, lambda: rows <= MAX_ROWS, f"at most {MAX_ROWS}")
    return checks


# What build_dispatcher does with them


@dataclass(frozen=True)
class Found:
    """DeepEP, ready to be used by the EP group."""

    library: ModuleType
    nodes: int


def require_deepep(config: EPConfig, group: dist.ProcessGroup, device: torch.device, shape: dict[str, Any]) -> Found:
    """Import DeepEP after its preflight; collective over ``group``.

    Raises ``ValueError`` on all ranks with a line for every check that failed on any of them."""
    world = dist.get_world_size(group)
    where: list[Any] = [None] * world
    dist.all_gather_object(where, (socket.gethostname(), device.type, device.index), group=group)
    nodes = len({host for host, _, _ in where})
    own = [index for host, _, index in where if host == socket.gethostname() and index is not None]
    checks = deepep_preflight(
        **{name: shape[name] for name in ("num_experts", "top_k", "hidden_size", "dtype")},
        world=world,
        max_tokens=config.max_tokens,
        nodes=nodes,
        devices=own if len(set(own)) == len(own) else None,
        group=group,
    )
    failed = [check.line() for check in checks if check.ok is False]
    if device.type != "cuda":
        failed.insert(0, f"device: dispatcher='deepep' moves rows of GPUs, not of {device.type}")
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, failed, group=group)
    ranks: dict[str, list[int]] = {}
    for rank, wrong in enumerate(everyone):
        for line in dict.fromkeys(wrong):
            ranks.setdefault(line, []).append(rank)
    if ranks:
        said = [
            f"  {'all ranks' if len(who) == world else 'rank ' + ', '.join(map(str, who))}: {line}"
            for line, who in ranks.items()
        ]
        raise ValueError("dispatcher='deepep' cannot run here:\n" + "\n".join(said))
    import deep_ep

    return Found(deep_ep, nodes)
