"""``ep-doctor``: what this machine has, and what each dispatcher and precision can do on it.

Where something cannot run, the first check that fails is shown with what mends it. Nothing is started on a GPU and no
process group is made; ``ep-bench fuzz --sets 100 --world 2`` tries the CPU paths themselves.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

OK, BAD, UNKNOWN, ABSENT = "ok", "bad", "unknown", "absent"
MARKS = {OK: "✓", BAD: "✗", UNKNOWN: "?", ABSENT: "–"}
PACKAGES = {  # distribution: what of ours uses it, and how to get it
    "triton": ("kernels on GPUs", "pip install triton (CUDA builds of torch bring it)"),
    "transformers": ("the Hugging Face adapter and the recipes", "pip install 'ep_plugin[hf]'"),
    "megatron-core": ("the Megatron adapter", "pip install 'ep_plugin[megatron]'"),
    "transformer-engine": ("Megatron's grouped experts", "pip install --no-build-isolation 'ep_plugin[te]'"),
    "nvshmem4py-cu13": ("heap='nvshmem'", "pip install 'ep_plugin[nvshmem]'"),
    "hydra-core": ("recipes", "pip install hydra-core"),
    "hydra-submitit-launcher": ("cluster=slurm", "pip install 'ep_plugin[slurm]'"),
}


@dataclass(frozen=True)
class Check:
    """One thing that was looked at: ``state`` is ``ok``, ``bad``, ``unknown`` (could not be looked at here) or
    ``absent`` (not there, and nothing needs it); ``fix`` mends it."""

    name: str
    state: str
    found: str
    fix: str = ""

    def line(self, width: int) -> str:
        fix = f"  → {self.fix}" if self.fix and self.state in (BAD, ABSENT) else ""
        return f"  {MARKS[self.state]} {self.name.ljust(width)}  {self.found}{fix}"


@dataclass(frozen=True)
class Use:
    """Something a user may choose, and the checks it needs, in order. ``expected``: hardware and packages are here that
    call for it, so that it must work."""

    name: str
    expected: bool
    checks: tuple[Check, ...]

    @property
    def blocker(self) -> Check | None:
        """The first check that fails."""
        return next((check for check in self.checks if check.state in (BAD, ABSENT)), None)

    def line(self, width: int) -> str:
        blocker = self.blocker
        if blocker is None:
            open_questions = [c for c in self.checks if c.state == UNKNOWN]
            said = "; ".join(f"{c.name}: {c.found}" for c in open_questions)
            return f"  {MARKS[OK]} {self.name.ljust(width)}  {f'not looked at: {said}' if said else 'runs'}"
        mark = MARKS[BAD if self.expected else ABSENT]
        fix = f"  → {blocker.fix}" if blocker.fix else ""
        return f"  {mark} {self.name.ljust(width)}  {blocker.name}: {blocker.found}{fix}"


@dataclass(frozen=True)
class Diagnosis:
    """All that ``ep-doctor`` says."""

    machine: tuple[Check, ...]
    packages: tuple[Check, ...]
    uses: tuple[Use, ...]

    def failed(self, needed: Sequence[str] = ()) -> list[str]:
        """What should work and does not: expected uses, those in ``needed``, and what is there but broken."""
        broken = [check.name for check in (*self.machine, *self.packages) if check.state == BAD]
        uses = [use.name for use in self.uses if use.blocker is not None and (use.expected or use.name in needed)]
        return broken + uses

    def text(self) -> str:
        """One screen."""
        lines = []
        for title, rows in (
            ("This machine", self.machine),
            ("Packages", self.packages),
            ("What can run here", self.uses),
        ):
            if not rows:
                continue
            width = max(len(row.name) for row in rows)
            lines += [title, *(row.line(width) for row in rows), ""]
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        return {
            "machine": [asdict(check) for check in self.machine],
            "packages": [asdict(check) for check in self.packages],
            "uses": [
                {
                    "name": use.name,
                    "runs": use.blocker is None,
                    "expected": use.expected,
                    "blocked_by": None if use.blocker is None else asdict(use.blocker),
                    "checks": [asdict(check) for check in use.checks],
                }
                for use in self.uses
            ],
            "failed": self.failed(),
        }


# The machine


def check_python() -> Check:
    version = platform.python_version()
    return Check("Python", OK if sys.version_info >= (3, 10) else BAD, version, "3.10 or newer is needed")


def check_torch() -> Check:
    """torch, and what it is built for."""
    try:
        import torch
    except Exception as error:
        return Check("torch", BAD, f"cannot be imported: {error}", "pip install 'torch>=2.10'")
    cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU only"
    number = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    return Check(
        "torch", OK if number >= (2, 10) else BAD, f"{torch.__version__}, built for {cuda}", "pip install 'torch>=2.10'"
    )


def check_driver() -> Check:
    file = Path("/proc/driver/nvidia/version")
    if not file.is_file():
        return Check("NVIDIA driver", ABSENT, "none is loaded")
    words = file.read_text().splitlines()[0].split()
    version = next((word for word in words if word[:1].isdigit() and "." in word), "unknown version")
    return Check("NVIDIA driver", OK, version)


def check_gpus() -> Check:
    """The GPUs that torch sees."""
    import torch

    if not torch.cuda.is_available():
        if Path("/proc/driver/nvidia/version").is_file():
            why = "torch is built without CUDA" if torch.version.cuda is None else "torch.cuda.is_available() is False"
            return Check(
                "GPUs", BAD, f"a driver is loaded, but {why}", "install a CUDA build of torch (docs/install.md)"
            )
        return Check("GPUs", ABSENT, "none: CPU paths only")
    kinds: dict[str, int] = {}
    for i in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(i)
        memory = torch.cuda.get_device_properties(i).total_memory >> 30
        name = f"{torch.cuda.get_device_name(i)} (sm_{major}{minor}, {memory} GiB)"
        kinds[name] = kinds.get(name, 0) + 1
    return Check("GPUs", OK, ", ".join(f"{count} × {name}" for name, count in kinds.items()))


def check_links() -> Check:
    """What joins the GPUs, from ``nvidia-smi topo -m``."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return Check("links", ABSENT, "nvidia-smi is not on the path")
    try:
        ran = subprocess.run([tool, "topo", "-m"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Check("links", UNKNOWN, f"nvidia-smi topo -m: {error}")
    found: dict[str, int] = {}
    for line in ran.stdout.splitlines():
        words = line.split()
        if words and words[0].startswith("GPU") and words[0][3:].isdigit():
            for word in words[1:]:
                if word.startswith("NV") or word in ("PIX", "PXB", "PHB", "NODE", "SYS"):
                    found[word] = found.get(word, 0) + 1
    said = ", ".join(f"{kind} between {count // 2 or 1} pairs" for kind, count in found.items())
    return Check("links", OK if found else UNKNOWN, said or "one GPU, or nothing that could be read")


def check_peers() -> Check:
    """Whether every GPU can store into every other's memory."""
    import torch

    if not torch.cuda.is_available():
        return Check("peer access", ABSENT, "no GPUs")
    count = torch.cuda.device_count()
    apart = [
        (i, j) for i in range(count) for j in range(count) if i != j and not torch.cuda.can_device_access_peer(i, j)
    ]
    if apart:
        return Check(
            "peer access",
            ABSENT,
            f"none between {apart[:4]}{' …' if len(apart) > 4 else ''}",
            "keep an EP group on GPUs that reach each other (CUDA_VISIBLE_DEVICES), or use dispatcher='block'",
        )
    return Check("peer access", OK, f"all {count} GPUs reach each other" if count > 1 else "one GPU, nothing to reach")


def check_triton() -> Check:
    if importlib.util.find_spec("triton") is None:
        return Check("triton", ABSENT, "not installed", PACKAGES["triton"][1])
    return Check("triton", OK, importlib.metadata.version("triton"))


def check_nccl() -> Check:
    import torch
    import torch.distributed as dist

    if not dist.is_nccl_available():
        return Check("NCCL", ABSENT, "torch is built without it")
    return Check("NCCL", OK, ".".join(map(str, torch.cuda.nccl.version())))


def check_gloo() -> Check:
    import torch.distributed as dist

    there = dist.is_available() and dist.is_gloo_available()
    return Check("gloo", OK if there else BAD, "in torch" if there else "torch is built without it")


def check_shared_memory() -> Check:
    """Whether a region of the CPU heap can be made, and how much memory it may take."""
    from .heap import region

    if sys.platform != "linux":
        return Check("shared memory", ABSENT, f"heap='shm' needs Linux, not {sys.platform}", "use dispatcher='block'")
    try:
        os.close(region.create(region.pages(1), "doctor"))
        free = region.free_bytes()
    except (OSError, ValueError) as error:
        return Check("shared memory", BAD, str(error), "run where memfd_create is allowed, or use dispatcher='block'")
    return Check("shared memory", OK, f"{free / 2**30:.1f} GiB can be reserved (anonymous, not in /dev/shm)")


def check_dev_shm() -> Check:
    """/dev/shm, which NCCL and data loaders use; we do not."""
    folder = Path("/dev/shm")
    if not folder.is_dir():
        return Check("/dev/shm", ABSENT, "there is none; NCCL and data loaders may need it")
    usage = shutil.disk_usage(folder)
    small = usage.total < 1 << 30
    return Check(
        "/dev/shm",
        UNKNOWN if small else OK,
        f"{usage.free / 2**20:.0f} MiB free of {usage.total / 2**20:.0f}"
        + ("; NCCL and data loaders may need more (docker: --shm-size=8g)" if small else ""),
    )


# Packages


def check_package(name: str) -> Check:
    """Whether a distribution is installed; its import is not tried, which may take seconds."""
    use, fix = PACKAGES[name]
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return Check(name, ABSENT, f"not installed; for {use}", fix)
    return Check(name, OK, f"{version}, for {use}")


def check_deepep(**about: Any) -> list[Check]:
    """DeepEP's own requirements."""
    from .dispatch.deepep_checks import deepep_preflight

    states = {True: OK, False: BAD, None: UNKNOWN}
    return [Check(c.name, states[c.ok], c.found, c.fix) for c in deepep_preflight(**about)]


def _imports(module: str, name: str, fix: str) -> Check:
    """Whether ``module`` can be found, parents included."""
    try:
        there = importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        there = False
    return Check(name, OK if there else ABSENT, "installed" if there else f"no module {module}", fix)


def _gemm(name: str, device: str) -> Check:
    import torch

    from .config import MXFP8Config
    from .mxfp8.gemm import choose_gemm

    try:
        choose_gemm(MXFP8Config(gemm=name), torch.device(device))
    except ValueError as error:
        return Check(f"gemm={name!r}", ABSENT, str(error), "leave mxfp8.gemm at 'auto'")
    return Check(f"gemm={name!r}", OK, "runs")


def _needs(*makers: Callable[[], Check]) -> list[Check]:
    """The checks in order, up to the first that fails: what comes after may need it."""
    found: list[Check] = []
    for make in makers:
        found.append(make())
        if found[-1].state in (BAD, ABSENT):
            break
    return found


def diagnose() -> Diagnosis:
    """Look at everything."""
    torch_check = check_torch()
    if torch_check.state == BAD:
        return Diagnosis((check_python(), torch_check), (), (Use("anything", True, (torch_check,)),))
    import torch

    gpus, peers = check_gpus(), check_peers()
    machine = (
        check_python(), torch_check, check_driver(), gpus, check_links(), peers, check_nccl(), check_gloo(),
        check_shared_memory(), check_dev_shm(),
    )  # fmt: skip
    deepep = check_deepep()
    package, *_ = deepep
    packages = [check_package(name) for name in PACKAGES]
    if package.state == BAD and "not installed" in package.found:
        package = Check(package.name, ABSENT, package.found, package.fix)
    packages.append(Check("DeepEP", package.state, package.found, package.fix))
    return Diagnosis(machine, tuple(packages), tuple(_uses(gpus, peers, deepep, torch.cuda.is_available())))


def _uses(gpus: Check, peers: Check, deepep: list[Check], cuda: bool) -> list[Use]:
    nvshmem = [
        lambda: _imports("nvshmem.core", "nvshmem4py", PACKAGES["nvshmem4py-cu13"][1]),
        lambda: _imports("cuda.core", "cuda.core", PACKAGES["nvshmem4py-cu13"][1]),
    ]
    installed = {name: check_package(name).state == OK for name in PACKAGES}

    def use(name: str, expected: bool, *makers: Callable[[], Check]) -> Use:
        return Use(name, expected, tuple(_needs(*makers)))

    device = "cuda" if cuda else "cpu"
    return [
        use("local, CPU", True),
        use("block, CPU", True, check_gloo),
        use("rowwise, CPU (heap=shm)", True, check_gloo, check_shared_memory),
        use("block, GPUs", cuda, lambda: gpus, check_nccl),
        use("rowwise, GPUs (heap=torch)", cuda and peers.state == OK, lambda: gpus, check_triton, lambda: peers),
        use(
            "rowwise, GPUs (heap=nvshmem)",
            cuda and peers.state == OK and installed["nvshmem4py-cu13"],
            lambda: gpus,
            check_triton,
            *nvshmem,
            lambda: peers,
        ),
        use("rowwise, GPUs (transport=device)", False, lambda: gpus, check_triton, *nvshmem),
        Use("deepep, GPUs", cuda and deepep[0].state == OK, tuple([gpus, *deepep] if gpus.state == OK else [gpus])),
        use("precision=mxfp8, CPU", True, lambda: _gemm("cpu_ref", "cpu")),
        use("precision=mxfp8, GPUs (sm90_bf16)", False, lambda: gpus, lambda: _gemm("sm90_bf16", device)),
        use("precision=mxfp8, GPUs (sm90_fp8row)", False, lambda: gpus, lambda: _gemm("sm90_fp8row", device)),
        use("precision=mxfp8, GPUs (sm100_mx)", False, lambda: gpus, lambda: _gemm("sm100_mx", device)),
        use("Hugging Face adapter", False, lambda: check_package("transformers")),
        use("Megatron adapter", False, lambda: check_package("megatron-core")),
    ]


def models(as_json: bool) -> str:
    """The Hugging Face architectures and what the adapter does with each. ``ImportError`` without transformers."""
    from .adapters.huggingface_architectures import architectures

    rows = architectures()
    if as_json:
        return json.dumps([asdict(row) for row in rows], indent=1)
    width = max((len(row.name) for row in rows), default=0)
    counts = ", ".join(
        f"{sum(row.status == kind for row in rows)} {kind}" for kind in ("tested", "untested", "refused")
    )
    lines = [f"{row.name.ljust(width)}  {row.status.ljust(8)}  {row.note}".rstrip() for row in rows]
    return "\n".join([*lines, "", f"transformers {importlib.metadata.version('transformers')}: {counts}"])


def main(argv: Sequence[str] | None = None) -> int:
    """``ep-doctor``. Exit status 1: something that this machine calls for, or ``--need`` names, cannot run."""
    parser = argparse.ArgumentParser(prog="ep-doctor", description=__doc__)
    parser.add_argument("what", nargs="?", choices=("machine", "models"), default="machine")
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.add_argument(
        "--need", action="append", default=[], metavar="USE", help="fail unless this can run, named as in the last list"
    )
    args = parser.parse_args(argv)
    if args.what == "models":
        try:
            print(models(args.json))
        except ImportError as error:
            print(
                f"ep-doctor: transformers cannot be imported: {error}  → {PACKAGES['transformers'][1]}", file=sys.stderr
            )
            return 1
        return 0
    diagnosis = diagnose()
    known = [use.name for use in diagnosis.uses]
    for name in args.need:
        if name not in known:
            parser.error(f"--need {name!r} is not one of: {'; '.join(known)}")
    failed = diagnosis.failed(args.need)
    if args.json:
        print(json.dumps({**diagnosis.as_dict(), "failed": failed}, indent=1))
    else:
        print(diagnosis.text())
        print("All that this machine calls for can run." if not failed else f"Does not work: {'; '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
