"""compute-sanitizer's memcheck over rowwise on two GPUs: ``python tests/gpu/memcheck.py``, about a minute.

Two plain processes that know each other by a file and gloo run a tiny layer forward and backward in both forms; NCCL
and pytest, whose start takes minutes under the sanitizer, are not there. A run without the sanitizer comes first and
fills Triton's cache. Only our own kernels are checked.

Logs go to $OUT (or the working directory) as ``memcheck.<rank>.log``. The exit status is 1 if an error was found or a
process failed. ``--plant`` adds a store far outside every allocation, and then it is 1 unless that is found.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

WORLD = 2
TIMEOUT_S = 240.0
OURS = "^_[a-z]"  # names of Triton kernels here; mangled names of C++ begin with _Z
ENVIRONMENT = {
    "CUDA_MODULE_LOADING": "LAZY",
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}


def rank_main(rank: int, store: str, heap_name: str, transport: str, plant: bool) -> None:
    """One rank: both forms, once."""
    import torch
    import torch.distributed as dist

    from ep_plugin.config import CapacityConfig, EPConfig, LaunchConfig
    from ep_plugin.dispatch import build_dispatcher
    from ep_plugin.heap import open_heap

    start = time.monotonic()

    def say(what: str) -> None:
        print(f"rank {rank}: {time.monotonic() - start:6.1f} s {what}", flush=True)

    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group("gloo", store=dist.FileStore(store, WORLD), rank=rank, world_size=WORLD)
    heap = open_heap(heap_name, None, device, 120.0, transport)
    say("heap open")
    tokens, hidden, experts, top_k = 24, 72, 4, 2
    g = torch.Generator().manual_seed(rank)
    num_tokens = tokens - 5 * rank
    x = torch.randn(num_tokens, hidden, generator=g).bfloat16().to(device).requires_grad_()
    w = torch.rand(num_tokens, top_k, generator=g).to(device).requires_grad_()
    idx = torch.randint(-1, experts, (num_tokens, top_k), generator=g).to(device)
    grad = torch.ones(num_tokens, hidden, dtype=torch.bfloat16, device=device)
    for form in ("dedup", "route"):
        config = EPConfig(
            form=form, heap=heap_name, transport=transport, max_tokens=tokens, timeout_s=120.0, weight_at="output",
            capacity=CapacityConfig("dropless", 2.0), launch=LaunchConfig(chunks=2),
        )  # fmt: skip
        dispatcher = build_dispatcher(
            config, num_experts=experts, top_k=top_k, hidden_size=hidden, dtype=torch.bfloat16, device=device, heap=heap
        )
        state = dispatcher.plan(idx, layer=form)
        d = dispatcher.dispatch(state, x, w)
        dispatcher.combine(state, d.rows * 0.5, d.weights).backward(grad)
        dispatcher.check()
        say(f"{form}: forward and backward")
        del state, d
        dispatcher.close()
    if plant:
        from ep_plugin.kernels.peers import Peers
        from ep_plugin.kernels.put_triton import put_values

        rows = torch.full((num_tokens, top_k), 1 << 30, dtype=torch.int32, device=device)
        target = torch.zeros(8, device=device)
        put_values(w.detach(), Peers.of([target]), torch.zeros_like(rows), rows, num_rows=(1 << 31) - 1)
        torch.cuda.synchronize()
    heap.close()
    dist.destroy_process_group()
    say("done")
    sys.exit(0)


def tool() -> str | None:
    """The program: on PATH, in the CUDA toolkit's folder, or of the wheel nvidia-cuda-sanitizer-api."""
    places = [*Path("/usr/local").glob("cuda*/bin"), *(p for q in sys.path for p in Path(q).glob("nvidia/*/bin"))]
    return shutil.which("compute-sanitizer", path=os.pathsep.join([os.environ.get("PATH", ""), *map(str, places)]))


def sanitizer(rank: int, log: Path) -> list[str]:
    """The command before a rank's own. Older versions call the filter ``--kernel-regex`` and its key ``kne``."""
    program = tool()
    assert program is not None
    known = subprocess.run([program, "--help"], capture_output=True, text=True).stdout
    only = ["--kernel-name", f"regex={OURS}"] if "--kernel-name arg" in known else ["--kernel-regex", f"kne={OURS}"]
    return [
        program, "--tool", "memcheck", "--target-processes", "application-only", *only,
        "--launch-timeout", "200", "--check-device-heap", "no", "--report-api-errors", "no",
        "--port", str(49152 + 100 * rank), "--log-file", str(log),
    ]  # fmt: skip


def run(prefix: list[list[str]], args: argparse.Namespace, *, plant: bool) -> list[int]:
    """Both ranks, each behind its ``prefix``; their exit statuses."""
    store = os.path.join(tempfile.mkdtemp(), "store")
    own = ["--heap", args.heap, "--transport", args.transport, *(["--plant"] if plant else [])]
    processes = [
        subprocess.Popen(
            [*prefix[rank], sys.executable, __file__, "--rank", str(rank), "--store", store, *own],
            env={**os.environ, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join([os.getcwd(), *sys.path])},
        )
        for rank in range(WORLD)
    ]
    deadline = time.monotonic() + args.timeout
    codes = []
    for process in processes:
        try:
            codes.append(process.wait(max(1.0, deadline - time.monotonic())))
        except subprocess.TimeoutExpired:
            codes.append(-1)
    for process in processes:
        if process.poll() is None:
            process.kill()
            process.wait()
    return codes


def found_in(log: Path) -> tuple[int | None, str]:
    """Errors that memcheck counted, None where it did not get that far, and its first report."""
    text = log.read_text(errors="replace") if log.exists() else ""
    count = re.search(r"ERROR SUMMARY: (\d+) error", text)
    first = re.search(r"=+ (Invalid .*(?:\n=+ .*){0,8})", text)
    return None if count is None else int(count[1]), "" if first is None else first[1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--heap", default="torch")
    parser.add_argument("--transport", default="peer")
    parser.add_argument("--plant", action="store_true")
    parser.add_argument("--timeout", type=float, default=TIMEOUT_S, help="seconds for each of the two runs")
    parser.add_argument("--rank", type=int, help="(of the processes it starts)")
    parser.add_argument("--store")
    args = parser.parse_args()
    if args.rank is not None:
        rank_main(args.rank, args.store, args.heap, args.transport, args.plant)
    if tool() is None:
        print(
            "compute-sanitizer was not found: it comes with the CUDA toolkit, or pip install nvidia-cuda-sanitizer-api"
        )
        return 1
    start = time.monotonic()
    codes = run([[]] * WORLD, args, plant=False)
    print(f"without the sanitizer: exit codes {codes} after {time.monotonic() - start:.0f} s", flush=True)
    if any(codes):
        return 1
    folder = Path(os.environ.get("OUT", "."))
    logs = [folder / f"memcheck.{rank}.log" for rank in range(WORLD)]
    for log in logs:
        log.unlink(missing_ok=True)
    codes = run([sanitizer(rank, log) for rank, log in enumerate(logs)], args, plant=args.plant)
    results = [found_in(log) for log in logs]
    print(f"memcheck: exit codes {codes} after {time.monotonic() - start:.0f} s")
    for log, (count, first) in zip(logs, results, strict=True):
        print(f"{log}: {'not finished' if count is None else f'{count} errors'}\n{first}".rstrip())
    if args.plant:
        return 0 if all("Invalid" in first for _, first in results) else 1
    return 0 if all(count == 0 for count, _ in results) and not any(codes) else 1


if __name__ == "__main__":
    sys.exit(main())
