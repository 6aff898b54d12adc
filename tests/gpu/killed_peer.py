"""A rank killed in the middle of a step: ``python tests/gpu/killed_peer.py`` starts two ranks, kills the last, and
checks the other's error. ``python tests/gpu/killed_peer.py device`` does so for transport=device.

Not a pytest test under torchrun, whose agent would end the surviving rank too.
"""

from __future__ import annotations

import datetime
import os
import signal
import subprocess
import sys
import tempfile
import time

WORLD = 2


def rank_main(rank: int, store: str, transport: str) -> None:
    import torch
    import torch.distributed as dist

    from ep_plugin.config import EPConfig
    from ep_plugin.dispatch import build_dispatcher
    from ep_plugin.heap import HeapTimeout

    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl", store=dist.FileStore(store, WORLD), rank=rank, world_size=WORLD, device_id=device,
        timeout=datetime.timedelta(seconds=60),
    )  # fmt: skip
    dispatcher = build_dispatcher(
        EPConfig(
            heap="torch" if transport == "peer" else "nvshmem", transport=transport, max_tokens=64,
            timeout_s=3.0 if transport == "peer" else 20.0,  # kernels linked with NVSHMEM take seconds to compile
        ),
        num_experts=8, top_k=2, hidden_size=256,
        dtype=torch.bfloat16, device=device,
    )  # fmt: skip
    x, w = torch.randn(64, 256, device=device).bfloat16(), torch.rand(64, 2, device=device)
    idx = torch.randint(0, 8, (64, 2), device=device)
    for step in range(5):
        state = dispatcher.plan(idx, layer=f"layer {step}")
        d = dispatcher.dispatch(state, x, w)
        torch.cuda.synchronize()
        if step == 3 and rank == WORLD - 1:
            os.kill(os.getpid(), signal.SIGKILL)  # its peers are on their way into combine
        try:
            dispatcher.combine(state, d.rows)
            dispatcher.check()  # type: ignore[attr-defined]
        except HeapTimeout as error:
            print(error, flush=True)
            os._exit(0 if "combine of layer 3" in str(error) and "[1]" in str(error) else 1)
    os._exit(2)


def main() -> int:
    if len(sys.argv) > 2:
        rank_main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
    transport = sys.argv[1] if len(sys.argv) > 1 else "peer"
    store = os.path.join(tempfile.mkdtemp(), "store")
    start = time.monotonic()
    processes = [subprocess.Popen([sys.executable, __file__, str(rank), store, transport]) for rank in range(WORLD)]
    codes = [process.wait(timeout=120) for process in processes]
    print(f"exit codes {codes} after {time.monotonic() - start:.1f} s")
    return 0 if codes == [0, -signal.SIGKILL] else 1


if __name__ == "__main__":
    sys.exit(main())
