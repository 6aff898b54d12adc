"""What one forward keeps for backward: where it lies and how many bytes it has.

Legend: T tokens of a rank, K routes per token, E experts, D hidden size, F expert width, R rows of a rank, S tokens of
all ranks that have a row here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ep_plugin.dispatch import Dispatched
from ep_plugin.layer import moe_step
from tests.moe import Problem, make_experts, make_inputs

PROBLEM = Problem((16, 16), "distinct", num_experts=8, top_k=8, hidden=64, width=4, dtype=torch.float32)


class Saved(torch.autograd.graph.saved_tensors_hooks):
    """Every tensor that is saved for backward; one per storage."""

    def __init__(self) -> None:
        self.tensors: dict[int, Tensor] = {}
        super().__init__(self.pack, lambda tensor: tensor)

    def pack(self, tensor: Tensor) -> Tensor:
        if tensor.numel():
            self.tensors[tensor.untyped_storage().data_ptr()] = tensor
        return tensor


def saved_by_one_forward(rank: int, world: int, form: str) -> dict[str, object]:
    problem = PROBLEM
    dispatcher = problem.dispatcher(form, max_tokens=max(problem.tokens), diagnostic_fill="none")
    mine, experts = make_inputs(problem)[rank], make_experts(problem, rank, world)
    seen: dict[str, Tensor] = {}

    def watched(d: Dispatched, weight_at: str) -> Tensor:
        y = experts(d, weight_at)
        seen.update(rows=d.rows.detach(), y=y.detach())
        return y

    x, weight = mine.x.clone().requires_grad_(), mine.weight.clone().requires_grad_()
    saved = Saved()
    with saved:
        out = moe_step(dispatcher, x, mine.idx, weight, watched)

    def inside(tensor: Tensor, buffers: list) -> bool:
        """Whether all of ``tensor`` lies in this rank's region of one of the symmetric buffers."""
        start, end = tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size()
        return any(int(b.ptrs[rank]) <= start and end <= int(b.ptrs[rank]) + b.nbytes for b in buffers)

    pools = dispatcher.pools
    scratch_slots = pools.scratch.stats().peak
    payload, scratch = ([s.buffer for s in pool._segments] for pool in (pools.payload, pools.scratch))
    parameters = {p.untyped_storage().data_ptr() for p in experts.parameters()}
    kept = [t for place, t in saved.tensors.items() if place not in parameters]
    rows, y = seen["rows"], seen["y"]
    result = {
        "R": len(rows),
        "scratch slots": scratch_slots,
        "rows in payload": inside(rows, payload),
        "y in scratch": inside(y, scratch),
        "rows in scratch": inside(rows, scratch),  # must be False: the check can fail
        "saved": [(tuple(t.shape), t.numel() * t.element_size(), inside(t, payload), inside(t, scratch)) for t in kept],
        "saved rows": any(t.data_ptr() == rows.data_ptr() for t in kept),
    }
    out.backward(mine.upstream)
    saved.tensors.clear()  # the hooks are in a cycle with it
    seen.clear()
    del kept, rows, y, out
    if dispatcher.stats()["slots_in_use"]:
        raise AssertionError(dispatcher.stats())
    dispatcher.close()
    return result


def test_one_row_form_reads_and_writes_symmetric_memory_in_place(pool):
    """Fault: the up projection keeps a copy of the dispatched rows, or the down projection's output is copied to where
    peers GET it (report, section 5.6: rows are used where they arrive)."""
    for result in pool.run(saved_by_one_forward, 2, "route"):
        assert (
            result["R"] > 0 and result["rows in payload"] and result["y in scratch"] and not result["rows in scratch"]
        )
        assert result["scratch slots"] == 1, "the output was copied to a second slot for the peers"
        assert result["saved rows"], "the up projection saved something else than the rows it was given"
        big = [entry for entry in result["saved"] if entry[0] == (result["R"], PROBLEM.hidden)]
        assert [entry[2:] for entry in big] == [(True, False)], big  # saved once, and y not at all


def test_dedup_keeps_unique_rows_and_not_the_expanded_ones(pool):
    """Fault: the expanded rows, K times the unique ones, are kept for the weight gradient, or kept twice."""
    p = PROBLEM
    for result in pool.run(saved_by_one_forward, 2, "dedup"):
        rows = result["R"]
        assert rows == 4 * sum(p.tokens), "every token has 4 of its 8 routes on each rank"
        unique = sum(p.tokens) * p.hidden * 4
        maps = sum(p.tokens) * p.top_k * 4 + 2 * p.tokens[0] * p.top_k * 4 + 8 * rows + 8 * (3 * 2 * p.num_experts)
        activations = rows * 4 * (2 * p.width + p.width + 2)  # up output, hidden rows, weights
        total = sum(entry[1] for entry in result["saved"])
        assert total <= 1.3 * unique + maps + activations, result["saved"]
        assert not any(entry[0] == (rows, p.hidden) for entry in result["saved"]), result["saved"]
        assert total < rows * p.hidden * 4, "the bound would not notice the expanded rows"
