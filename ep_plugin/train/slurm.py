"""Run a launch as a Slurm job, through Hydra's submitit launcher (the extra ``slurm``).

The job's tasks are the processes: submitit starts one per rank, and each goes on as a process that torchrun would
have started.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig


def submit(overrides: Sequence[str]) -> None:
    """Submit the job and wait for it; its output folder is under ``hydra.sweep.dir``."""
    sys.argv = [sys.argv[0], "--multirun", *overrides]
    hydra.main(config_path="pkg://ep_plugin.recipes", config_name="config", version_base="1.3")(in_job)()


def in_job(config: DictConfig) -> None:
    """What every task of the job runs."""
    import submitit

    from ..launch import main

    submitit.helpers.TorchDistributedEnvironment().export(set_cuda_visible_devices=False)
    job = HydraConfig.get()
    GlobalHydra.instance().clear()  # the launch composes its own settings, as it does under torchrun
    main([*job.overrides.task, f"hydra.run.dir='{job.runtime.output_dir}'"])
