"""``ep-bench dispatch``'s peers: what they move is what they are measured for."""

from __future__ import annotations

import argparse

import pytest
import torch
import torch.distributed as dist

from ep_plugin.adapters.megatron_cpu import cuda_is_cpu
from ep_plugin.bench.__main__ import parse
from ep_plugin.bench.inputs import Inputs
from ep_plugin.bench.peers import _all_to_alls, _megatron, measure_peer
from tests import megatron_models


def moved(rank: int, world: int) -> list[str]:
    args = argparse.Namespace(
        dtype="bfloat16", experts=8, top_k=3, hidden=16, tokens=12, routes="dropped", repeats=2, command="dispatch"
    )
    inputs = Inputs.make(args, torch.device("cpu"))
    kept, wrong = inputs.idx >= 0, []
    there, back = _all_to_alls(inputs, args)
    there()
    returned = back()
    tokens = torch.arange(12).repeat_interleave(3).view(12, 3)[kept]
    want = inputs.x[tokens][torch.argsort((inputs.idx[kept] // 4), stable=True)]
    wrong += [] if torch.equal(returned, want) else ["the rows did not come back"]
    figures = measure_peer("nccl", inputs, args)
    wrong += [] if figures["total_ms"] > 0 and figures["dispatch_ms"] > 0 else [f"{figures}"]
    megatron_models.on_cpu()
    with cuda_is_cpu(), torch.no_grad():
        args.routes = "uniform"
        inputs = Inputs.make(args, torch.device("cpu"))
        there, back = _megatron(inputs, args)
        arrived, out = there(), back()
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()  # the process serves other tests
    mine = [torch.empty_like(inputs.idx) for _ in range(world)]
    dist.all_gather(mine, inputs.idx)
    expected = sum(int((idx // 4 == rank).sum()) for idx in mine)
    wrong += [] if arrived.shape == (expected, 16) else [f"{arrived.shape} arrived of {expected}"]
    wrong += [] if torch.allclose(out.view(12, 16), inputs.x * 3, atol=0.1) else ["the sums are wrong"]
    return wrong


@pytest.mark.slow  # imports Megatron
def test_peers_move_every_row_there_and_back(pool):
    """Fault: a peer that moves fewer rows, or none of other ranks, and looks fast."""
    pytest.importorskip("megatron.core")
    wrong = [line for lines in pool.run(moved, 2, timeout=200) for line in lines]
    assert not wrong, wrong


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["dispatch", "--backends", "block,megatron"], "needs CUDA streams"),
        (["dispatch", "--backends", "deepep"], "moves rows of GPUs"),
        (["layer", "--backends", "nccl"], "nccl"),
        (["tune", "--backend", "block"], "invalid choice"),
    ],
)
def test_peers_are_refused_where_they_cannot_run(capsys, command, said):
    """Fault: processes are started to find out."""
    with pytest.raises(SystemExit):
        parse([*command, "--world", "2"])
    assert said in capsys.readouterr().err
