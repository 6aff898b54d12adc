"""The commands of docs/megatron.md, as they stand there."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ep_plugin.launch import main
from tests import megatron_models as mm

pytestmark = mm.marks
TEXT = (mm.ROOT / "docs" / "megatron.md").read_text()
COMMANDS = [line for block in re.findall(r"```bash\n(.*?)```", TEXT, re.DOTALL) for line in block.splitlines() if line]


def output(command: str, folder: Path) -> str:
    """What ``command`` prints when it runs in ``folder``, where train.py is a training script. Here, if it only shows
    settings; else in processes of its own."""
    if command.startswith("ep-plugin") and "dry_run=true" in command:
        with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as printed:
            patch.chdir(folder)
            main(command.split()[1:])
        return printed.getvalue()
    shutil.copy(mm.ROOT / "tests" / "megatron_training_script.py", folder / "train.py")
    programs = {"torchrun": "torch.distributed.run", "ep-plugin": "ep_plugin.launch"}
    program, *arguments = command.split()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(mm.ROOT)}
    run = subprocess.run(
        [sys.executable, "-m", programs[program], *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-4000:]
    return run.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_documentation_runs(command: str, tmp_path: Path) -> None:
    """Documentation of flags and recipes that are not there."""
    printed = output(command, tmp_path)
    if command.startswith("torchrun"):
        assert "PluginTokenDispatcher" in printed
        return
    assert "EP_MP" in printed  # the rank layout
    if "dry_run" in command:
        # The experts of the last of eight ranks, and the groups of two pipeline ranks.
        assert "112-127" in printed if "qwen3" in command else "[0,2] [1,3]" in printed
        return
    final = re.search(r"^megatron_\w+ .*(?:rowwise) \(megatron experts\) .*", printed, re.MULTILINE)
    assert final, printed[-2000:]
    assert list(tmp_path.glob("runs/*/*/checkpoints/*/step_*/*.distcp"))


def test_the_documentation_has_commands() -> None:
    """A test of no commands, which cannot fail."""
    assert {command.split()[0] for command in COMMANDS} == {"torchrun", "ep-plugin"} and len(COMMANDS) == 4
