"""Record what DeepEP does, for the tests that replay it on CPU:

    torchrun --nproc-per-node 2 -m tests.gpu.record_deepep <folder>

writes ``deepep_<version>.npz``, which belongs into ``tests/data``."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from ep_plugin.config import EPConfig
from ep_plugin.dispatch.deepep_buffer import no_network
from ep_plugin.dispatch.deepep_checks import require_deepep, running_nccl
from tests import deepep_case
from tests.deepep_recording import CASES, SHAPE, Recorded, Recording


def main(folder: str) -> None:
    rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    shape = dict(
        num_experts=SHAPE["num_experts"], top_k=SHAPE["top_k"], hidden_size=SHAPE["hidden"], dtype=torch.bfloat16
    )
    assert dist.group.WORLD is not None
    found = require_deepep(EPConfig(dispatcher="deepep"), dist.group.WORLD, device, shape)
    no_network(found.nodes)
    recording = Recording()
    library = Recorded(found.library, recording, rank)
    for case in CASES:
        dispatcher = deepep_case.build(case, library, device)
        library.begin(case)
        results = deepep_case.step(case, dispatcher)
        library.begin("")
        dispatcher.check()
        dispatcher.close()
        recording.add(f"{case}/{rank}/result", {"name": "result"}, {}, dict(results))
    everyone: list[Recording | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, recording)
    if rank == 0:
        for other in everyone:
            assert other is not None
            recording.arrays |= other.arrays
        recording.meta |= {
            "deep_ep": found.library.__version__, "torch": torch.__version__, "device": torch.cuda.get_device_name(),
            "nccl": running_nccl(),
        }  # fmt: skip
        path = Path(folder) / f"deepep_{found.library.__version__}.npz"
        recording.save(path)
        print(f"{path}: {path.stat().st_size / 1e3:.0f} kB, {len(recording.arrays)} arrays")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
