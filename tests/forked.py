"""Processes that may be killed, cheaply: forks of a server that has imported torch, joined by a gloo group.

``run_forked`` takes a third of a second where ``dist.run_fresh`` takes the import of torch. Its processes end as
multiprocessing ends them, without the destructors of a whole interpreter; ``run_fresh`` is for tests of those."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.dist import ENVIRONMENT, Exit, join_group, leave_group, server, stopped


def _main(folder: str, rank: int, world: int, timeout: float, task: bytes) -> None:
    for name, stream in (("stdout", sys.stdout), ("stderr", sys.stderr)):
        os.dup2(os.open(f"{folder}/{name}-{rank}", os.O_WRONLY | os.O_CREAT), stream.fileno())
    os.environ.update(ENVIRONMENT)
    fn, args = pickle.loads(task)
    join_group(rank, world, f"{folder}/store", timeout)
    try:
        fn(rank, world, *args)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    leave_group(in_step=True)


def run_forked(fn: Callable[..., Any], world: int, *args: Any, timeout: float = 60.0) -> list[Exit]:
    """Call ``fn(rank, world, *args)`` in ``world`` processes; as ``dist.run_fresh``."""
    task = pickle.dumps((fn, args))
    with tempfile.TemporaryDirectory(prefix="ep-plugin-tests-") as folder:
        processes = [
            server.Process(target=_main, args=(folder, rank, world, timeout, task), daemon=True)
            for rank in range(world)
        ]
        for process in processes:
            process.start()
        deadline = time.monotonic() + timeout
        hung = [False] * world
        while time.monotonic() < deadline and any(p.is_alive() and not stopped(p.pid) for p in processes):
            time.sleep(0.01)
        for rank, process in enumerate(processes):
            if process.is_alive():
                hung[rank] = not stopped(process.pid)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
            process.join()

        def text(name: str, rank: int) -> str:
            file = Path(folder) / f"{name}-{rank}"
            return file.read_text(errors="replace") if file.exists() else ""

        return [Exit(p.exitcode, text("stdout", r), text("stderr", r), hung[r]) for r, p in enumerate(processes)]
