"""The script seam: a Megatron training script that stays as it is, with our dispatchers named by Megatron's flags."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import subprocess
import sys

import pytest

from tests import megatron_models as mm
from tests.launched import free_port, run_as_torchrun

pytestmark = mm.marks
run = mm.run
SCRIPT = str(mm.ROOT / "tests" / "megatron_training_script.py")


def start(arguments: list[str], folder: str | None) -> subprocess.CompletedProcess:
    """torchrun with two processes; ``folder`` holds another megatron-core than the installed one."""
    paths = [path for path in (folder, str(mm.ROOT)) if path]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)


def lines(printed: str) -> dict[str, str]:
    return dict(line.split(maxsplit=1) for line in printed.splitlines() if " " in line)


def by_itself() -> str:
    """What the script prints with Megatron's alltoall."""
    sys.argv = [SCRIPT]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(SCRIPT, run_name="__main__")
    return printed.getvalue()


@pytest.mark.parametrize("run", ["installed"], indirect=True)
def test_an_unmodified_script_takes_our_backends(run: mm.Run) -> None:
    """A flag that Megatron refuses, a backend that it silently replaces by another, losses that differ.

    On the newest version at hand; ``test_megatron_docs.py`` starts the installed one. Both print the same by
    themselves.
    """
    plain = lines(run(run_as_torchrun, 2, free_port(), by_itself)[0])
    latest = mm.latest_wheel()
    arguments = ["-m", "ep_plugin.adapters.megatron", "--ep", "experts=plugin", "--ep", "max_tokens=64", SCRIPT]
    flags = ["--moe-token-dispatcher-type", "flex", "--moe-flex-dispatcher-backend", "rowwise_route"]
    done = start(arguments + flags, None if latest is None else str(latest))
    assert done.returncode == 0, done.stderr[-3000:]
    ours = lines(done.stdout)
    assert plain["dispatcher"] == "MoEAlltoAllTokenDispatcher"
    assert ours["dispatcher"] == "PluginTokenDispatcher" and ours["experts"] == "PluginExperts"
    assert ours["losses"] == plain["losses"]


def test_wrong_settings_end_before_the_script_starts() -> None:
    """A misspelt setting that trains with the default."""
    command = [sys.executable, "-m", "ep_plugin.adapters.megatron", "--ep", "max_tokenz=64", SCRIPT]
    run = subprocess.run(command, capture_output=True, text=True, cwd=mm.ROOT, timeout=120)
    assert run.returncode == 2
    assert "max_tokenz" in run.stderr and "Traceback" not in run.stderr
