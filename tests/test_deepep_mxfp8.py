"""MXFP8 rows in DeepEP's forward dispatch, over the stand-in, against the same rows in a block exchange."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from ep_plugin.config import EPConfig, LegsConfig, MXFP8Config
from ep_plugin.mxfp8.deepep import as_payload, as_records
from ep_plugin.mxfp8.dispatchers import Precision
from ep_plugin.mxfp8.node import mxfp8_moe_step
from tests import deepep_standin
from tests.moe import Problem, make_experts, make_inputs

FORWARD = LegsConfig(combine="bf16", combine_backward="bf16", dispatch_backward="bf16")


def build(problem: Problem, path: str):
    config = problem.config(path, precision="mxfp8", mxfp8=MXFP8Config(legs=FORWARD), max_tokens=16)
    config.validate()
    cpu = torch.device("cpu")
    precision = Precision(config, problem.hidden, problem.dtype, cpu)
    shape = dict(
        num_experts=problem.num_experts, top_k=problem.top_k, hidden_size=problem.hidden, dtype=problem.dtype,
        device=cpu, rank=dist.get_rank(), world=dist.get_world_size(), group=dist.group.WORLD,
    )  # fmt: skip
    return precision.block(**shape) if path == "block" else precision.deepep(library=deepep_standin, **shape)


def steps(rank: int, world: int, hidden: int) -> list[str]:
    """What differs between the two; nothing should but the order of sums."""
    problem = Problem(
        (9, 0, 14)[:world], "distinct", num_experts=8, top_k=3, hidden=hidden, width=64, dtype=torch.bfloat16,
        weight_dtype=torch.float32,
    )  # fmt: skip
    results = []
    for path in ("block", "deepep"):
        dispatcher, experts, mine = build(problem, path), make_experts(problem, rank, world), make_inputs(problem)[rank]
        x, weight = mine.x.clone().requires_grad_(), mine.weight.clone().requires_grad_()
        out = mxfp8_moe_step(dispatcher, x, mine.idx, weight, experts)
        out.backward(mine.upstream)
        results.append([out.detach(), x.grad, weight.grad, *(p.grad for p in experts.parameters())])
        dispatcher.check()
        dispatcher.close()
    wrong = []
    for i, (a, b) in enumerate(zip(*results, strict=True)):
        error = float((a.float() - b.float()).abs().max()) / max(1.0, float(b.abs().max())) if b.numel() else 0.0
        wrong += [] if error < 1e-2 else [f"rank {rank}, D={hidden}: tensor {i} is {error:.3g} off"]
    kinds = [call for call, _ in deepep_standin.ElasticBuffer.made[-1].calls]
    wrong += [] if kinds.count("dispatch") >= 5 else [f"the sample was not tried out: {kinds}"]
    return wrong


@pytest.mark.parametrize("hidden", [1024, 128])
def test_records_arrive_as_in_a_block_exchange(pool, hidden):
    """Fault: elements and scales that are cut at another place, rows that are not the wire's, legs that travel in
    another format than the settings say."""
    wrong = [line for lines in pool.run(steps, 2, hidden) for line in lines]
    assert not wrong, wrong


def test_payloads_are_what_deepep_takes_and_come_back_as_records():
    """Fault: a payload whose rows DeepEP's copies of 32 bytes would cut, or scales in other than 4-byte elements."""
    for hidden in (1024, 128, 1536, 7168):
        records = torch.randint(0, 127, (5, hidden + hidden // 32), dtype=torch.uint8)
        payload = as_payload(records)
        rows = payload if isinstance(payload, torch.Tensor) else payload[0]
        assert rows.shape[1] * rows.element_size() % 32 == 0 and rows.is_contiguous()
        assert isinstance(payload, torch.Tensor) == (hidden % 1024 == 0)
        assert torch.equal(as_records(payload), records)


def test_other_legs_are_refused_by_name():
    """Fault: MXFP8 where DeepEP sums bfloat16."""
    config = EPConfig(dispatcher="deepep", precision="mxfp8")
    with pytest.raises(ValueError, match=r"legs\.combine='mxfp8'.*set the other three legs to 'bf16'"):
        config.validate()
    EPConfig(dispatcher="deepep", precision="mxfp8", mxfp8=MXFP8Config(legs=FORWARD)).validate()
    with pytest.raises(ValueError, match="schedule.kind='sequential'"):
        config = EPConfig(dispatcher="deepep")
        config.schedule.kind = "sequential"
        config.validate()
