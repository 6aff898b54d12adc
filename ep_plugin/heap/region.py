"""Shared memory without a name: an anonymous file that peers open through the creator's /proc entry.

A named file in /dev/shm would outlive a rank killed between its creation and its removal, and containers usually cap
/dev/shm at 64 MiB. A memfd has no name, so nothing can be left behind, and only memory itself limits it. The price is
that all ranks must see each other's processes: one host and one pid namespace.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ep_plugin.heap.base import round_up

STEP = 64 << 20  # bytes reserved between two looks at the free memory

# From linux/memfd.h and linux/fcntl.h: Pythons built against an old C library (conda's, uv's) have neither these
# constants nor os.memfd_create, though the machine they run on does.
MFD_CLOEXEC, MFD_ALLOW_SEALING = 1, 2
F_ADD_SEALS, F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW = 1033, 1, 2, 4


@dataclass(frozen=True)
class Process:
    """One process of this boot of this host, told apart from a later one with the same pid by its start time."""

    boot: str
    pid: int
    started: int

    @staticmethod
    def own() -> Process:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        pid = os.getpid()
        stat = _stat(pid)
        assert stat is not None
        return Process(boot, pid, stat[1])

    def state(self) -> str | None:
        """The kernel's letter for what the process does (R, S, D, T, …), None if it has ended or is a zombie."""
        stat = _stat(self.pid)
        if stat is None or stat[1] != self.started or stat[0] in "ZX":
            return None
        return stat[0]


def _stat(pid: int) -> tuple[str, int] | None:
    """(state, start time in clock ticks since boot) of a process, None if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text.rpartition(")")[2].split()  # the command name before it may hold blanks and parentheses
    return fields[0], int(fields[19])


@dataclass(frozen=True)
class Offer:
    """What a rank tells its peers about the region it has made: where to open it, or why there is none."""

    process: Process
    fd: int = -1
    inode: int = -1
    nbytes: int = 0
    error: str = ""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_dict(fields: dict[str, Any]) -> Offer:
        return Offer(**{**fields, "process": Process(**fields["process"])})


def create(nbytes: int, label: str) -> int:
    """A file descriptor of ``nbytes`` zeroed bytes of reserved shared memory.

    Raises OSError or ValueError with a sentence that quotes the bytes asked for and free.
    """
    if nbytes <= 0 or nbytes % mmap.PAGESIZE:
        raise ValueError(f"asked for {nbytes} bytes, which is not a positive multiple of {mmap.PAGESIZE}")
    fd = _memfd(f"ep-{label}")
    try:
        os.fchmod(fd, 0o600)
        for start in range(0, nbytes, STEP):
            step = min(STEP, nbytes - start)
            # Reserving what is not there would have the kernel kill a process, now or at the first write.
            if free_bytes() < step:
                raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
            os.posix_fallocate(fd, start, step)
        # A peer that shortened the file would end this process with SIGBUS.
        fcntl.fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)
    except OSError as error:
        os.close(fd)
        raise OSError(
            error.errno,
            f"asked for {nbytes} bytes of shared memory, {free_bytes()} bytes are free ({error.strerror}): "
            "use smaller or fewer buffers, or give the machine or container more memory",
        ) from error
    return fd


def _memfd(label: str) -> int:
    """A new anonymous file; ``label`` is what /proc shows of it."""
    libc = ctypes.CDLL(None, use_errno=True)
    fd = libc.memfd_create(label.encode()[:200], MFD_CLOEXEC | MFD_ALLOW_SEALING)
    if fd < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"memfd_create: {os.strerror(code)}")
    return fd


def attach(offer: Offer, me: Process) -> mmap.mmap:
    """Map a peer's region, read and write. Raises OSError with a sentence that says what separates the processes."""
    if offer.process.boot != me.boot:
        raise OSError(errno.EXDEV, "it runs on another host; shared memory joins the processes of one host")
    path = f"/proc/{offer.process.pid}/fd/{offer.fd}"
    apart = (
        f"{path} is not its shared memory: all ranks must run as one user in one pid namespace "
        "(one container), with /proc mounted"
    )
    try:
        fd = os.open(path, os.O_RDWR)
    except OSError as error:
        raise OSError(error.errno, f"{apart} ({error.strerror})") from error
    try:
        found = os.fstat(fd)
        if (found.st_ino, found.st_size) != (offer.inode, offer.nbytes):
            raise OSError(errno.ESTALE, apart)
        return mmap.mmap(fd, offer.nbytes)
    finally:
        os.close(fd)


def free_bytes() -> int:
    """Bytes this process can still reserve: the host's available memory, or less where a memory cgroup says so."""
    free = next(
        int(line.split()[1]) << 10
        for line in Path("/proc/meminfo").read_text().splitlines()
        if line.startswith("MemAvailable:")
    )
    for group in _memory_cgroups():
        try:
            limit = (group / "memory.max").read_text().strip()
            if limit == "max":
                continue
            used = int((group / "memory.current").read_text())
            statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        except OSError:
            continue
        reclaimable = int(statistics.get("inactive_file", 0))
        free = min(free, max(0, int(limit) - used + reclaimable))
    return free


def _memory_cgroups() -> list[Path]:
    """The (version 2) cgroup of this process and those around it."""
    root = Path("/sys/fs/cgroup")
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    own = next((line[3:] for line in lines if line.startswith("0::")), None)
    if own is None:
        return []
    path = root / own.lstrip("/")
    return [path, *(p for p in path.parents if p == root or root in p.parents)]


def pages(nbytes: int) -> int:
    """``nbytes`` rounded up to whole pages."""
    return round_up(nbytes, mmap.PAGESIZE)
