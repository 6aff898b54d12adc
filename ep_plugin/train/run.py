"""A checked launch from the process group to the last line: every variant trained, compared, plotted."""

from __future__ import annotations

import datetime
from pathlib import Path

import torch
import torch.distributed as dist
from omegaconf import OmegaConf

from ..job import gpu_backend
from ..metrics import MetricsLog
from ..topology import Layout
from .compare import compare, enforce
from .compose import Launch
from .loop import Place, train
from .model import quiet_transformers
from .plots import plot
from .report import difference_lines, loss_table, summary
from .settings import ClusterConfig
from .text import read_corpus, unigram_entropy


def run_launch(
    launch: Launch, layouts: dict[str, Layout], device: torch.device, rank: int, world: int, *, env: bool
) -> None:
    """Train every variant of ``launch`` on ``device``, this process being ``rank`` of ``world``.

    ``env``: the rendezvous is in the environment (torchrun); otherwise this process is alone. Raises ``CheckFailed``
    on all ranks when the curves do not show what ``check`` asks for.
    """
    if any(config.trainer.megatron is None for config in launch.variants.values()):
        quiet_transformers()
    _join(launch.config.cluster, device, rank, world, env=env)
    folder = _output_folder(launch, rank)
    corpus = read_corpus(launch.config.data)
    entropy = unigram_entropy(corpus.tokens)
    log = MetricsLog(folder / "metrics.jsonl") if rank == 0 else None
    place = Place(rank, device, folder, log)
    if place.leads:
        print(f"Text: {len(corpus.tokens):,} bytes in {corpus.files:,} files of {corpus.source}", end="")
        print(f"; unigram entropy {entropy:.4f} nats\nOutput: {folder}\n", flush=True)
    several = len(launch.variants) > 1
    curves = [
        train(config, name, layouts[name], corpus, place, keep_routes=several)
        for name, config in launch.variants.items()
    ]
    differences = compare(curves, device) if several else []
    if place.leads:
        print(f"\n{loss_table(curves)}\n")
        if differences:
            print(f"{difference_lines(curves[0], differences)}\n")
        print(summary(curves))
        plot(curves, entropy, folder / "curves.png")
        print(f"\nUnigram entropy {entropy:.4f} nats. Plot: {folder / 'curves.png'}", flush=True)
    if log is not None:
        log.close()
    dist.barrier()
    dist.destroy_process_group()
    enforce(launch.config.check, curves, differences, entropy)


def _join(cluster: ClusterConfig, device: torch.device, rank: int, world: int, *, env: bool) -> None:
    backend = cluster.backend
    if backend == "auto":
        backend = gpu_backend() if device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend,
        store=None if env else dist.TCPStore("127.0.0.1", 0, 1, is_master=True),
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=cluster.timeout_s),
        device_id=device if backend == "nccl" else None,
    )


def _output_folder(launch: Launch, rank: int) -> Path:
    """Rank 0's output folder, which all ranks share: their clocks may differ. It holds the settings as Hydra stores
    them.
    """
    chosen = [str(Path(launch.output_dir).absolute())]
    dist.broadcast_object_list(chosen, src=0)
    folder = Path(chosen[0])
    if rank == 0:
        stored = folder / ".hydra"
        stored.mkdir(parents=True, exist_ok=True)
        OmegaConf.save(launch.resolved, stored / "config.yaml")
        OmegaConf.save(OmegaConf.create(launch.overrides), stored / "overrides.yaml")
    dist.barrier()
    return folder
