"""``permute='te'`` of the block dispatcher over a stand-in for TransformerEngine's permutation functions, which are
GPU kernels; the kernels themselves run in tests/gpu/te.

Legend: T tokens, E experts, N rows, D hidden size.
"""

from __future__ import annotations

import sys
from unittest import mock

import pytest
import torch
from torch import Tensor

from ep_plugin.config import EPConfig
from ep_plugin.dispatch import block_te, build_dispatcher
from tests.moe import Problem, differences, make_experts, make_inputs, oracles, poisoned_memory, run_step


class StandIn:
    """What TransformerEngine documents of its functions, in torch operations; checks what its kernels ask for."""

    @staticmethod
    def moe_permute(inp: Tensor, routing_map: Tensor, num_out_tokens: int, *, map_type: str) -> tuple[Tensor, Tensor]:
        """Rows [N, D] by expert, inside an expert by token, and a map for the way back (here: the tokens, by row)."""
        assert map_type == "mask" and routing_map.dtype == torch.int32 and len(inp) == len(routing_map)
        assert inp.is_contiguous() and routing_map.is_contiguous() and num_out_tokens > 0
        expert, token = routing_map.t().nonzero(as_tuple=True)
        assert len(token) == num_out_tokens
        return inp[token], torch.stack([expert, token])

    @staticmethod
    def moe_unpermute(
        inp: Tensor, row_id_map: Tensor, *, merging_probs: Tensor | None, restore_shape: torch.Size, map_type: str
    ) -> Tensor:
        """Rows [N, D] summed by token [T, D], times ``merging_probs`` [T, E] where given."""
        assert map_type == "mask" and inp.is_contiguous()
        expert, token = row_id_map
        rows = inp.double()
        if merging_probs is not None:
            assert merging_probs.is_contiguous()
            rows = rows * merging_probs[token, expert].double()[:, None]
        return torch.zeros(restore_shape, dtype=torch.float64).index_add_(0, token, rows).to(inp.dtype)

    @staticmethod
    def moe_sort_chunks_by_index(inp: Tensor, split_sizes: Tensor, sorted_index: Tensor) -> Tensor:
        """The chunks of ``inp`` in the order ``sorted_index``."""
        assert inp.is_contiguous() and int(split_sizes.sum()) == len(inp)
        chunks = inp.split(split_sizes.tolist())
        return torch.cat([chunks[i] for i in sorted_index.tolist()])


def check_problems(rank: int, world: int, cases: list[tuple[str, Problem]]) -> list[str]:
    """What of every step differs from the oracle, with the stand-in in TransformerEngine's place."""
    want = oracles(rank, world, [(problem, weight_at) for weight_at, problem in cases])
    wrong = []
    with mock.patch.object(block_te, "transformer_engine", lambda device: StandIn), poisoned_memory():
        for weight_at, problem in cases:
            dispatcher = problem.dispatcher("block", weight_at, permute="te")
            assert type(dispatcher) is block_te.TEBlockDispatcher
            got = run_step(dispatcher, make_experts(problem, rank, world), make_inputs(problem)[rank])
            faults = differences(got, want[problem, weight_at], problem)
            dispatcher.close()
            wrong += [f"rank {rank}, weight_at={weight_at}, {problem}: {fault}" for fault in faults]
    return wrong


@pytest.mark.parametrize("tokens", [(5, 0), (4, 7, 1)], ids=lambda tokens: f"{len(tokens)} ranks")
def test_rows_take_the_same_ways_through_fused_kernels(pool, tokens):
    """Fault: chunks sorted with the sizes of the other direction, a weight of another route, ranks without rows."""
    problems = [Problem(tokens, "distinct", policy=policy, factor=0.8) for policy in ("dropless", "source")]
    problems.append(Problem(tokens, "none"))
    cases = [(weight_at, problem) for problem in problems for weight_at in ("hidden", "output", "source")]
    wrong = [line for lines in pool.run(check_problems, len(tokens), cases) for line in lines]
    assert not wrong, "\n".join(wrong[:20])


def repeated_expert(rank: int, world: int) -> str:
    with mock.patch.object(block_te, "transformer_engine", lambda device: StandIn):
        problem = Problem((3,), "one_expert")
        dispatcher = problem.dispatcher("block", permute="te")
        with pytest.raises(ValueError) as raised:
            dispatcher.plan(make_inputs(problem)[0].idx)
        return str(raised.value)


def test_a_token_that_names_an_expert_twice_is_an_error(pool):
    """Fault: one of its two rows is lost, because the mask holds one entry for both."""
    (message,) = pool.run(repeated_expert, 1)
    assert "twice" in message and "permute='torch'" in message


def test_what_is_missing_is_said_when_the_dispatcher_is_built():
    """Fault: torch's operations in place of what was asked for; an import error in the first step."""
    shape = dict(num_experts=4, top_k=2, hidden_size=8, dtype=torch.float32)
    with pytest.raises(ValueError, match="permute='te' moves plain rows of dispatcher='block', not of .*'rowwise'"):
        build_dispatcher(EPConfig(permute="te"), **shape)
    with pytest.raises(ValueError, match="precision='mxfp8'"):
        EPConfig(dispatcher="block", permute="te", precision="mxfp8").validate()
    with pytest.raises(ValueError, match="permute='fused' is not one of torch, te"):
        EPConfig(dispatcher="block", permute="fused").validate()
    with pytest.raises(ValueError, match="runs on GPUs.*cpu.*permute='torch'"):
        block_te.transformer_engine(torch.device("cpu"))
    with mock.patch.dict(sys.modules, {"transformer_engine.pytorch": None, "transformer_engine": None}):
        with pytest.raises(ValueError, match="needs TransformerEngine .pip install.*permute='torch'"):
            block_te.transformer_engine(torch.device("cuda"))
