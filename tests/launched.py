"""What torchrun gives a program, in workers of a pool: no interpreters to start, nothing to import again."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from tests.dist import Pool


def free_port() -> int:
    """A TCP port of this machine that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def as_torchrun(rank: int, world: int, port: int) -> None:
    """torchrun's environment in this worker, and no process group: the program makes its own."""
    dist.destroy_process_group()
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))


def _launch(rank: int, world: int, port: int, overrides: Sequence[str]) -> None:
    from ep_plugin.launch import main

    as_torchrun(rank, world, port)
    reset_accelerate()
    main(overrides)


def reset_accelerate() -> None:
    """Forget the process group and the devices that accelerate saw in an earlier task of this process."""
    from accelerate.state import AcceleratorState, GradientState

    os.environ["ACCELERATE_USE_CPU"] = "true"
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def launch(pool: Pool, world: int, *overrides: str, timeout: float = 120.0) -> None:
    """``torchrun --nproc-per-node world -m ep_plugin.launch overrides...``; AssertionError if a rank fails."""
    pool.run(_launch, world, free_port(), overrides, timeout=timeout)


def run_as_torchrun(rank: int, world: int, port: int, fn: Callable[..., Any], *args: Any) -> Any:
    """A task: ``fn(*args)`` under torchrun's environment."""
    as_torchrun(rank, world, port)
    return fn(*args)
