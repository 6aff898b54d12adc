"""Run test functions on several real processes joined by a gloo group.

``run`` keeps its worker processes for the whole pytest session, because imports cost seconds; every task gets a process
group of its own, so nothing is left over from the task before. Workers are forks of a server that has imported torch.
``run_fresh`` starts new interpreters, for tests in which a process dies.

Functions are module-level, ``fn(rank, world, *args)``, and reach the workers by name.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import gc
import multiprocessing
import multiprocessing.connection
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

GRACE_SECONDS = 5.0  # what the other ranks get to notice that one has failed
START_SECONDS = 120.0  # importing torch in several processes at once on a busy machine
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
server = multiprocessing.get_context("forkserver")
server.set_forkserver_preload(["tests.preload", "tests.dist"])


def join_group(rank: int, world: int, store: str, timeout: float) -> None:
    """Make the WORLD group of one task: gloo on loopback, its collectives bounded by ``timeout`` seconds.

    Returns when all ranks are connected, so that one that fails at once does not break the others' connecting.
    """
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)
    limit = datetime.timedelta(seconds=timeout)
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world, timeout=limit)
    dist.barrier()


def leave_group(in_step: bool) -> None:
    """Destroy all groups; ``in_step`` ranks meet first, so that no socket closes under a peer that still reads."""
    import torch.distributed as dist

    if not dist.is_initialized():
        return
    if in_step:
        with contextlib.suppress(RuntimeError):  # a peer has failed and reports it itself
            dist.barrier()
    dist.destroy_process_group()


def _work(conn: Connection, stacks: str, environment: dict[str, str]) -> None:
    """A worker's life; without the destructors of a whole interpreter, which take seconds once torch is used."""
    os.environ.clear()
    os.environ.update(environment)
    if environment.get("TRITON_INTERPRET") == "1":
        import_module("tests.interpreter")
    _do_tasks(conn, stacks)
    for child in multiprocessing.active_children():  # Megatron's writer leaves some, which would stay for ever
        child.kill()
    os._exit(0)


def _do_tasks(conn: Connection, stacks: str) -> None:
    """A worker's loop: receive a task, report its value or its traceback, clean up, report idle."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    orphaned = threading.Thread(
        target=lambda: (multiprocessing.connection.wait([parent.sentinel]), os._exit(1)), daemon=True
    )
    orphaned.start()
    log = open(stacks, "w")  # stays open: faulthandler writes to it
    faulthandler.register(signal.SIGUSR1, file=log, all_threads=True)
    conn.send_bytes(pickle.dumps(("idle", None)))
    while True:
        try:
            task = conn.recv_bytes()
        except EOFError:
            return
        environment = dict(os.environ)
        step = "load"
        try:
            fn, rank, world, args, store, timeout = pickle.loads(task)
            step = "join"
            join_group(rank, world, store, timeout)
            step = "call"
            message = pickle.dumps(("value", fn(rank, world, *args)))
            step = "done"
        except BaseException:  # pytest's outcomes and SystemExit are failures to report too
            message = pickle.dumps(("error", traceback.format_exc()))
        conn.send_bytes(message)
        if step == "join":
            return  # torch has counted the group that failed; it would look for the next one under a name of its own
        leave_group(in_step=step == "done")
        gc.collect()
        gc.freeze()  # what is imported by now need not be looked at in every collection of the tasks to come
        os.environ.clear()
        os.environ.update(environment)
        conn.send_bytes(pickle.dumps(("idle", None)))


class _Worker:
    """One worker process and our end of its pipe."""

    def __init__(self, folder: Path, name: str, environment: dict[str, str]) -> None:
        self.stacks = folder / f"{name}.stacks"
        self.conn, theirs = server.Pipe()
        environment = {**os.environ, **ENVIRONMENT, **environment}
        self.process = server.Process(
            target=_work, args=(theirs, str(self.stacks), environment), name=name, daemon=True
        )
        with _environment():  # the server's own, if it starts only now
            self.process.start()
        theirs.close()

    def receive(self) -> tuple[str, Any]:
        return pickle.loads(self.conn.recv_bytes())

    def idle(self, timeout: float) -> bool:
        """Whether the worker says, within ``timeout`` seconds, that it is ready for a task."""
        try:
            return self.conn.poll(timeout) and self.receive()[0] == "idle"
        except (EOFError, ConnectionError):
            return False

    def stack(self) -> str:
        """What all threads of the process are doing (nothing if it is stopped)."""
        with contextlib.suppress(ProcessLookupError, TypeError):
            os.kill(self.process.pid, signal.SIGUSR1)  # type: ignore[arg-type]
        time.sleep(0.3)
        return self.stacks.read_text() if self.stacks.exists() else ""

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.conn.close()


@contextlib.contextmanager
def _environment():
    before = dict(os.environ)
    os.environ.update(ENVIRONMENT)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


class Pool:
    """Worker processes that live through many tasks; a task of ``world`` ranks takes the first ``world`` of them.

    ``environment``: what the workers have beside this process's environment."""

    def __init__(self, **environment: str) -> None:
        self._environment = environment
        self._folder = Path(tempfile.mkdtemp(prefix="ep-plugin-tests-"))
        self._workers: list[_Worker] = []
        self._started = 0

    def run(self, fn: Callable[..., Any], world: int, *args: Any, timeout: float = 120.0) -> list[Any]:
        """Call ``fn(rank, world, *args)`` on every rank; the values by rank.

        Raises AssertionError with every rank's traceback if a rank raises, dies, or is not done after ``timeout``
        seconds (with the stacks of those still running). Workers that died or hang are replaced for the next task.
        """
        self._ready(world)
        workers = self._workers[:world]
        self._started += 1
        store = str(self._folder / f"store-{self._started}")
        tasks = [pickle.dumps((fn, rank, world, args, store, timeout)) for rank in range(world)]
        for worker, task in zip(workers, tasks, strict=True):
            worker.conn.send_bytes(task)
        outcomes = self._collect(workers, timeout)
        failed = [rank for rank, (kind, _) in enumerate(outcomes) if kind != "value"]
        if failed:
            reports = [
                f"--- rank {rank}: " + ("returned" if kind == "value" else f"{kind}\n{what}")
                for rank, (kind, what) in enumerate(outcomes)
            ]
            where = ", ".join(map(str, failed))
            raise AssertionError(f"{fn.__qualname__} failed on rank {where} of {world}\n" + "\n".join(reports))
        return [value for _, value in outcomes]

    def close(self) -> None:
        """End the workers: idle ones leave when their pipe closes."""
        for worker in self._workers:
            worker.conn.close()
        for worker in self._workers:
            worker.process.join(5)
            worker.process.kill()
            worker.process.join()
        self._workers.clear()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _ready(self, world: int) -> None:
        """Have ``world`` idle workers."""
        fresh: list[_Worker] = []
        for index in range(world):
            if index < len(self._workers) and self._workers[index].process.is_alive():
                continue
            self._started += 1
            worker = _Worker(self._folder, f"worker-{self._started}", self._environment)
            fresh.append(worker)
            self._workers[index : index + 1] = [worker]
        for worker in fresh:
            if not worker.idle(START_SECONDS):
                worker.kill()
                raise AssertionError(f"a test worker did not start within {START_SECONDS:.0f} s")

    def _collect(self, workers: list[_Worker], timeout: float) -> list[tuple[str, Any]]:
        """Each worker's (kind, value or text); every worker is idle or dead afterwards."""
        start = time.monotonic()
        deadline = start + timeout
        outcomes: dict[int, tuple[str, Any]] = {}
        busy = dict(enumerate(workers))

        def fail(rank: int, kind: str, text: str) -> None:
            nonlocal deadline
            outcomes[rank] = (kind, text)
            deadline = min(deadline, time.monotonic() + GRACE_SECONDS)

        while busy and (left := deadline - time.monotonic()) > 0:
            ends = {worker.conn: rank for rank, worker in busy.items()}
            for conn in multiprocessing.connection.wait(list(ends), timeout=left):
                rank = ends[conn]  # type: ignore[index]
                try:
                    kind, what = busy[rank].receive()
                except (EOFError, ConnectionError):
                    worker = busy.pop(rank)
                    worker.process.join()
                    if rank not in outcomes or outcomes[rank][0] == "value":
                        fail(rank, "died", f"exit code {worker.process.exitcode}")
                    continue
                if kind == "idle":
                    busy.pop(rank)
                elif kind == "error":
                    fail(rank, "raised", what)
                else:
                    outcomes[rank] = (kind, what)
        for rank in [rank for rank in busy if rank not in outcomes]:
            worker = busy.pop(rank)
            stack = worker.stack()
            worker.kill()
            outcomes[rank] = ("hung", f"killed, still running after {time.monotonic() - start:.1f} s\n{stack}")
        for rank, worker in busy.items():  # done with the function; their last barrier ends with the peers killed above
            if not worker.idle(GRACE_SECONDS):
                stack = worker.stack()
                worker.kill()
                if outcomes[rank][0] == "value":
                    outcomes[rank] = ("hung", f"killed, returned but did not leave the group\n{stack}")
        return [outcomes[rank] for rank in range(len(workers))]


_shared: Pool | None = None


def shared_pool() -> Pool:
    """The session's pool, made at its first use."""
    global _shared
    if _shared is None:
        _shared = Pool()
    return _shared


def close_shared_pool() -> None:
    """End the session's pool; called once by conftest."""
    global _shared
    if _shared is not None:
        _shared.close()
        _shared = None


def run(fn: Callable[..., Any], world: int, *args: Any, timeout: float = 120.0) -> list[Any]:
    """``Pool.run`` on the session's pool."""
    return shared_pool().run(fn, world, *args, timeout=timeout)


def run_apart(fn: Callable[..., Any], world: int, *args: Any, timeout: float = 300.0, **environment: str) -> list[Any]:
    """``Pool.run`` on workers of its own, with ``environment``, which end with it: for functions that change what
    modules hold."""
    pool = Pool(**environment)
    try:
        return pool.run(fn, world, *args, timeout=timeout)
    finally:
        pool.close()


@dataclass(frozen=True)
class Exit:
    """How one fresh process ended; ``code`` is −N after signal N; ``hung``: we killed it at the time-out."""

    code: int
    stdout: str
    stderr: str
    hung: bool


def run_fresh(fn: Callable[..., Any], world: int, *args: Any, timeout: float = 60.0) -> list[Exit]:
    """Call ``fn(rank, world, *args)`` in ``world`` new processes with a gloo group, and say how each ended.

    An uncaught exception ends its process as Python ends it: exit code 1 and the traceback on stderr. Whatever runs
    ``timeout`` seconds after the group was made is killed together with its children. A process that is stopped by a
    signal is killed when the others have ended, and is no hung one.
    """
    with tempfile.TemporaryDirectory(prefix="ep-plugin-tests-") as name:
        folder = Path(name)
        (folder / "task").write_bytes(pickle.dumps((fn, args)))
        environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        processes = []
        for rank in range(world):
            command = [sys.executable, "-m", "tests.dist", name, str(rank), str(world), str(timeout)]
            with open(folder / f"stdout-{rank}", "wb") as out, open(folder / f"stderr-{rank}", "wb") as err:
                processes.append(
                    subprocess.Popen(
                        command,
                        stdin=subprocess.DEVNULL,
                        stdout=out,
                        stderr=err,
                        env=environment,
                        start_new_session=True,
                    )
                )
        starting = time.monotonic() + START_SECONDS
        for rank, process in enumerate(processes):
            joined = folder / f"joined-{rank}"
            while not joined.exists() and process.poll() is None and time.monotonic() < starting:
                time.sleep(0.02)
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline and any(p.poll() is None and not stopped(p.pid) for p in processes):
            time.sleep(0.01)
        hung = [p.poll() is None and not stopped(p.pid) for p in processes]
        for process in (p for p, h in zip(processes, hung, strict=True) if h):
            process.send_signal(signal.SIGUSR1)  # its stacks, on its stderr
        if any(hung):
            time.sleep(0.3)
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return [
            Exit(
                process.returncode,
                (folder / f"stdout-{rank}").read_text(errors="replace"),
                (folder / f"stderr-{rank}").read_text(errors="replace"),
                hung[rank],
            )
            for rank, process in enumerate(processes)
        ]


def stopped(pid: int) -> bool:
    """Whether a signal has stopped the process."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    return False


def _fresh_main(folder: str, rank: int, world: int, timeout: float) -> None:
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    fn, args = pickle.loads((Path(folder) / "task").read_bytes())
    join_group(rank, world, f"{folder}/store", timeout)
    (Path(folder) / f"joined-{rank}").touch()
    fn(rank, world, *args)
    leave_group(in_step=True)


if __name__ == "__main__":
    _fresh_main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
