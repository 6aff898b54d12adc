"""A rank of two killed or stopped in every phase of a step on GPUs: ``python tests/gpu/faults.py killed|stopped
[PATH]``, PATH one of dedup, route, block.

Starts two ranks for each path and phase, strikes the last in layer 1, and checks that the other ends by itself with an
error that names the rank and a layer and phase, within one time-out for the whole model. Not a pytest test under
torchrun, whose agent would end the surviving rank too. Prints one line a case and writes faults.json under $OUT.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

WORLD, BAD, TIMEOUT_S, AT_ONCE = 2, 1, 3.0, 5
PATHS = ("dedup", "route", "block")
PHASES = ("plan", "dispatch", "combine", "combine backward", "dispatch backward")


def rank_main(rank: int, store: str, path: str, phase: str, how: str) -> None:
    import torch
    import torch.distributed as dist

    from ep_plugin.config import EPConfig
    from ep_plugin.dispatch import build_dispatcher
    from ep_plugin.heap import HeapAborted, HeapTimeout
    from ep_plugin.job import gpu_backend, gpu_of, shares_gpus
    from ep_plugin.layer import moe_step

    device = gpu_of(rank)
    torch.cuda.set_device(device)
    dist.init_process_group(
        f"cpu:gloo,cuda:{gpu_backend()}", store=dist.FileStore(store, WORLD), rank=rank, world_size=WORLD,
        device_id=None if shares_gpus() else device, timeout=datetime.timedelta(seconds=60),
    )  # fmt: skip
    config = EPConfig(
        dispatcher="block" if path == "block" else "rowwise",
        form="dedup" if path == "block" else path,
        heap="torch",
        max_tokens=64,
        slots=4,
        timeout_s=TIMEOUT_S,
    )
    dispatcher = build_dispatcher(config, num_experts=8, top_k=2, hidden_size=256, dtype=torch.bfloat16, device=device)
    idx = torch.randint(0, 8, (64, 2), device=device)
    weight = torch.rand(64, 2, device=device)
    armed = False
    guard = dispatcher.guard

    def struck(name: str, layer: str):  # type: ignore[no-untyped-def]
        if armed and rank == BAD and (name, layer) == (phase, "layers.1"):
            torch.cuda.synchronize()
            os.kill(os.getpid(), signal.SIGKILL if how == "killed" else signal.SIGSTOP)
        return guard(name, layer)

    dispatcher.guard = struck  # type: ignore[method-assign]

    def train() -> None:
        x = torch.randn(64, 256, device=device, dtype=torch.bfloat16).requires_grad_()
        y = x
        for layer in range(3):
            y = y + moe_step(dispatcher, y, idx, weight, lambda d, _: d.rows * 1, layer=f"layers.{layer}")
        y.sum().backward()
        dispatcher.check()
        torch.cuda.synchronize()
        dispatcher.check()

    for _ in range(2):
        train()
    armed = True
    start = time.monotonic()
    try:
        train()
    except (HeapTimeout, HeapAborted) as error:
        print(f"{time.monotonic() - start:.2f} {type(error).__name__}: {error}", flush=True)
        os._exit(3)
    os._exit(4)


def run(path: str, phase: str, how: str) -> tuple[list[subprocess.Popen[str]], str]:
    store = os.path.join(tempfile.mkdtemp(), "store")
    environment = {
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
        "NCCL_NVLS_ENABLE": "0",
        "PYTHONPATH": str(Path(__file__).parents[2]),
        **os.environ,
    }
    return [
        subprocess.Popen(
            [sys.executable, __file__, str(rank), store, path, phase, how], stdout=subprocess.PIPE, text=True,
            env=environment,
        )
        for rank in range(WORLD)
    ], store  # fmt: skip


def main() -> int:
    if len(sys.argv) > 3:
        rank_main(int(sys.argv[1]), *sys.argv[2:])
    how = sys.argv[1] if len(sys.argv) > 1 else "killed"
    cases = [(path, phase) for path in sys.argv[2:] or PATHS for phase in PHASES]
    found, started = [], time.monotonic()
    for first in range(0, len(cases), AT_ONCE):
        batch = [(case, *run(*case, how)) for case in cases[first : first + AT_ONCE]]
        for (path, phase), processes, _ in batch:
            try:
                text = processes[0].communicate(timeout=60)[0]
            except subprocess.TimeoutExpired:
                processes[0].kill()
                text = "HUNG"
            processes[BAD].kill()
            processes[BAD].wait()
            seconds = float(text.split()[0]) if text[:1].isdigit() else -1.0
            named = bool(re.search(rf"of layers\.\d.*(ranks \[{BAD}\]|rank {BAD} \(pid)", text))
            right = f"{phase} of layers.1" in text
            ok = processes[0].returncode == 3 and named and seconds < TIMEOUT_S + 5
            found.append({"path": path, "phase": phase, "ok": ok, "phase_named": right, "said": text.strip()})
            print(f"{'ok ' if ok else 'BAD'} {path:5s} {phase:17s} {'' if right else '(another phase) '}{text.strip()}")
    print(f"{how}: {sum(f['ok'] for f in found)} of {len(found)} in {time.monotonic() - started:.0f} s", flush=True)
    out = os.environ.get("OUT")
    if out:
        Path(out, f"faults-{how}.json").write_text(json.dumps(found, indent=1))
    return 0 if all(f["ok"] for f in found) else 1


if __name__ == "__main__":
    sys.exit(main())
