"""Train from the recipes: ``torchrun -m ep_plugin.launch experiment=...``, or ``ep-plugin experiment=... nproc=4``.

Settings are composed and checked before torch is imported or a process group made, so a mistake costs one line and a
second.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from omegaconf import OmegaConf

from .train.checks import check_comparable, check_machine, check_settings
from .train.compose import Launch, compose_launch, one_line, recipe_options

if TYPE_CHECKING:
    from .topology import Layout

BAD_SETTINGS = 2
FAILED = 1
PATIENCE_S = 20.0
USAGE = """\
ep-plugin [name=value ...]           train in this process
ep-plugin [name=value ...] nproc=4   train in 4 processes on this machine
torchrun --nproc-per-node 4 -m ep_plugin.launch [name=value ...]

A group's choice (experiment=demo, ep=block) or a setting (trainer.steps=100, ep.form=route) goes in name=value;
dry_run=true prints the settings and the topology and stops; debug=true shows tracebacks.

Groups and their choices:"""


@dataclass(frozen=True)
class Started:
    """How this process was started: torchrun's environment, or alone."""

    rank: int
    local_rank: int
    world: int
    by_torchrun: bool

    @classmethod
    def from_env(cls) -> Started:
        """Read the variables that torchrun sets."""
        env = os.environ
        by_torchrun = "WORLD_SIZE" in env and "RANK" in env
        if not by_torchrun:
            return cls(0, 0, 1, False)
        return cls(int(env["RANK"]), int(env.get("LOCAL_RANK", 0)), int(env["WORLD_SIZE"]), True)


def main(arguments: Sequence[str] | None = None) -> None:
    """The console script ``ep-plugin`` and ``python -m ep_plugin.launch``; exits 2 for bad settings and 1 for a
    failed run.
    """
    overrides = list(sys.argv[1:] if arguments is None else arguments)
    if {"-h", "--help"} & set(overrides):
        print(USAGE, *(f"  {group}: {', '.join(names)}" for group, names in recipe_options().items()), sep="\n")
        return
    started = Started.from_env()
    debug = "debug=true" in [override.lower() for override in overrides]  # known before the settings are
    try:
        launch = compose_launch(overrides)
        world = _world(launch, started)
        layouts = {name: _checked(launch, name, world) for name in launch.variants}
        check_comparable(launch.variants)
        if launch.config.dry_run:
            return _print_once(describe(launch, layouts), started)
        if launch.config.cluster.launcher == "slurm" and not started.by_torchrun:
            from .train.slurm import submit

            return submit(overrides)
        if launch.config.nproc is not None and not started.by_torchrun:
            _become_torchrun(launch.config.nproc, overrides)
        device_types = [check_machine(config) for config in launch.variants.values()]
    except (ValueError, OSError) as error:
        if debug:
            traceback.print_exc()
        _stop(f"ep-plugin: {one_line(error)}", BAD_SETTINGS, started)
    _run(launch, layouts, device_types[0], started, debug)


def _world(launch: Launch, started: Started) -> int:
    nproc, nodes = launch.config.nproc, launch.config.cluster.nodes
    if not started.by_torchrun:
        return (nproc or 1) * nodes
    if nproc is not None and nproc * nodes != started.world:
        raise ValueError(
            f"nproc={nproc} × cluster.nodes={nodes}, but {started.world} processes are running; leave nproc out"
        )
    return started.world


def _checked(launch: Launch, name: str, world: int) -> Layout:
    try:
        return check_settings(launch.variants[name], world)
    except ValueError as error:
        if not launch.config.variants:
            raise
        raise ValueError(f"variants.{name}: {error}") from error


def describe(launch: Launch, layouts: dict[str, Layout]) -> str:
    """The resolved settings and the topology of each variant."""
    parts = ["Settings", OmegaConf.to_yaml(launch.resolved)]
    for name, chosen in layouts.items():
        parts += [f"Topology of {name}", chosen.table(launch.variants[name].model.num_experts), ""]
    return "\n".join(parts)


def _print_once(text: str, started: Started) -> None:
    if started.rank == 0:
        print(text, flush=True)


def _become_torchrun(nproc: int, overrides: list[str]) -> NoReturn:
    """Replace this process by torchrun with ``nproc`` workers, so that signals and exit codes are torchrun's."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(nproc)]
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.stdout.flush()
    os.execv(sys.executable, [*command, "-m", "ep_plugin.launch", *overrides])


def _stop(message: str, code: int, started: Started) -> NoReturn:
    """End all processes of this machine with one line: the first prints and exits, upon which torchrun ends the others.

    The others must not exit before: torchrun would end the first before it has printed. One that is still here after
    ``PATIENCE_S`` found something that the first did not, and says so itself.
    """
    if started.local_rank != 0:
        time.sleep(PATIENCE_S)
    print(message, file=sys.stderr, flush=True)
    _tell_torchrun(message)
    sys.exit(code)


def _tell_torchrun(message: str) -> None:
    """Put ``message`` into torchrun's summary, which stands at the very end of the output."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file:
        Path(file).write_text(json.dumps({"message": message, "timestamp": int(time.time())}))


def _run(launch: Launch, layouts: dict[str, Layout], device_type: str, started: Started, debug: bool) -> None:
    import torch

    from .heap import HeapAborted, HeapTimeout
    from .job import gpu_of
    from .train.compare import CheckFailed
    from .train.run import run_launch

    device = torch.device("cpu")
    if device_type == "cuda":
        device = gpu_of(started.local_rank)
        torch.cuda.set_device(device)
    _print_once(describe(launch, layouts), started)
    try:
        run_launch(launch, layouts, device, started.rank, started.world, env=started.by_torchrun)
    except CheckFailed as error:
        _stop(f"ep-plugin: FAILED: {error}", FAILED, started)
    except Exception as error:
        if debug or not isinstance(error, HeapAborted | HeapTimeout):
            traceback.print_exc()
        message = f"ep-plugin: rank {started.rank}: {type(error).__name__}: {one_line(error)}"
        print(message, file=sys.stderr, flush=True)
        _tell_torchrun(message)
        # Threads that wait for a peer would hold up the exit of this process: leave at once.
        sys.stdout.flush()
        os._exit(FAILED)


if __name__ == "__main__":
    main()
