"""The fused gated activation of experts on one GPU: time and HBM GB/s, forward and backward, by launch shape.

    python -m ep_plugin.bench.activation [-R 32768] [-F 2048] [--json result.json]

``torch`` is what experts do where the kernels do not take their activation: the same in torch's operations. Bytes are
those that must move once: 2F read and F written forward, 3F read and 2F written backward, per row in bfloat16.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..experts import Activation, weighted_activation
from ..experts import activation as experts_activation
from ..kernels.gated_swish import GatedSwish
from .timing import measure

PROGRAMS, BLOCKS, WARPS = (1056, 2112, 4224), (512, 1024, 2048), (4, 8)


def main(argv: list[str] | None = None) -> int:
    """Prints a line for each way and shape, the fastest last."""
    parser = argparse.ArgumentParser(prog="ep_plugin.bench.activation", description=__doc__)
    parser.add_argument("-R", "--rows", type=int, default=32768, help="valid rows; the buffers hold half as many again")
    parser.add_argument("-F", "--width", type=int, default=2048)
    parser.add_argument("--interleaved", action="store_true")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--json", default=None, help="write the result to this file")
    args = parser.parse_args(sys.argv[1:] if argv is None else argv)
    result = run(args, torch.device("cuda"))
    if args.json is not None:
        Path(args.json).write_text(json.dumps(result, indent=1) + "\n")
    return 0


def run(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Milliseconds by direction and way."""
    from ..kernels.gated_swish_triton import BACKWARD, FORWARD, gated_swish, gated_swish_backward
    from ..kernels.triton_common import Launch

    held, shape = args.rows * 3 // 2, GatedSwish(interleaved=args.interleaved)
    up = torch.randn(held, 2 * args.width, device=device, dtype=torch.bfloat16)
    weights, dhidden = torch.rand(held, device=device), torch.randn_like(up[:, : args.width]).contiguous()
    offsets = torch.tensor([0, args.rows], device=device)
    hidden, dup, dweights = torch.empty_like(dhidden), torch.empty_like(up), torch.empty_like(weights)
    found: dict[str, dict[str, float]] = {"forward": {}, "backward": {}}
    moved = {"forward": 3 * 2 * args.rows * args.width, "backward": 5 * 2 * args.rows * args.width}

    def note(direction: str, way: str, fn: Callable[[], object]) -> None:
        ms = measure(fn, device, repeats=args.repeats, warmup=3).median
        found[direction][way] = round(ms, 4)
        print(f"{direction:8s} {way:34s} {ms:7.4f} ms {moved[direction] / ms / 1e6:7.0f} GB/s", flush=True)

    kept, experts_activation.KERNEL_DEVICES = experts_activation.KERNEL_DEVICES, ()
    plain = partial(weighted_activation, offsets=offsets, activation=Activation(interleaved=args.interleaved))
    note("forward", "torch", lambda: plain(up, weights))
    inputs = (up.detach().requires_grad_(), weights.detach().requires_grad_())
    y = plain(*inputs)
    note("backward", "torch", lambda: torch.autograd.grad(y, inputs, dhidden, retain_graph=True))
    experts_activation.KERNEL_DEVICES = kept
    launches = {"default": None} | {
        f"programs={p} block={b} warps={w}": Launch(p, w, b) for p in PROGRAMS for b in BLOCKS for w in WARPS
    }
    for way, launch in launches.items():
        count = offsets[-1:]
        forward = partial(gated_swish, up, weights, hidden, shape, num_rows=count, launch=launch or FORWARD)
        backward = partial(gated_swish_backward, up, weights, dhidden, shape, num_rows=count, launch=launch or BACKWARD)
        note("forward", way, forward)
        note("backward", way, partial(backward, dup=dup, dweights=dweights))
    for direction, ways in found.items():
        best = min(ways, key=lambda way: ways[way])
        print(f"{direction}: best {best}, {ways[best]} ms; default {ways['default']} ms; torch {ways['torch']} ms")
    return {"rows": args.rows, "width": args.width, "interleaved": args.interleaved, **found}


if __name__ == "__main__":
    sys.exit(main())
