"""The oracle against formulas written another way, and against cases small enough to work out by hand."""

import pytest
import torch
from torch import Tensor

from ep_plugin.config import CapacityConfig
from ep_plugin.oracle import Route, accepted_routes, moe_oracle, oracle_combine, oracle_rows, reference_mlp, swiglu

DROPLESS = CapacityConfig("dropless")
WORLD, EXPERTS, TOP_K, HIDDEN, WIDTH = 2, 4, 3, 6, 5


def make_inputs(tokens: tuple[int, ...] = (4, 3), dtype: torch.dtype = torch.float64) -> tuple[list[Tensor], ...]:
    gen = torch.Generator().manual_seed(3)
    xs = [torch.randn(t, HIDDEN, generator=gen, dtype=dtype).requires_grad_() for t in tokens]
    idxs = [torch.randint(-1, EXPERTS, (t, TOP_K), generator=gen) for t in tokens]  # −1 and repeats included
    weights = [torch.rand(t, TOP_K, generator=gen, dtype=dtype).requires_grad_() for t in tokens]
    return xs, idxs, weights


def make_parameters() -> list[Tensor]:
    gen = torch.Generator().manual_seed(4)
    shapes = [(EXPERTS, 2 * WIDTH, HIDDEN), (EXPERTS, HIDDEN, WIDTH), (EXPERTS, 2 * WIDTH), (EXPERTS, HIDDEN)]
    return [torch.randn(s, generator=gen, dtype=torch.float64).requires_grad_() for s in shapes]


def dense_moe(x: Tensor, idx: Tensor, weight: Tensor, parameters: list[Tensor], weight_at: str) -> Tensor:
    """Every expert on every token, masked: no rows, no ranks, no capacity."""
    w_up, w_down, b_up, b_down = parameters
    out = torch.zeros_like(x)
    for k in range(idx.shape[1]):
        for e in range(EXPERTS):
            w = torch.where(idx[:, k] == e, weight[:, k], 0.0)[:, None]
            asked = (idx[:, k] == e)[:, None]
            rows = x * w if weight_at == "input" else x
            gate, up = (torch.einsum("td,fd->tf", rows, w_up[e]) + b_up[e]).split(WIDTH, dim=1)
            y = torch.einsum("tf,df->td", torch.nn.functional.silu(gate) * up, w_down[e]) + b_down[e]
            out = out + torch.where(asked, y, 0.0) * (1.0 if weight_at == "input" else w)
    return out


@pytest.mark.parametrize("weight_at", ["input", "hidden", "output", "source"])
def test_oracle_is_the_dense_formula(weight_at: str) -> None:
    """Fault: a weight applied twice, at the wrong place or not to the bias; a route to the wrong expert or token."""
    xs, idxs, weights = make_inputs()
    parameters = make_parameters()
    inputs = [*xs, *weights, *parameters]
    expert = reference_mlp(*parameters, activation=swiglu, weight_at=weight_at)
    ours = moe_oracle(xs, idxs, weights, expert, DROPLESS, world=WORLD, num_experts=EXPERTS, weight_at=weight_at)
    dense = [dense_moe(*step, parameters, weight_at) for step in zip(xs, idxs, weights, strict=True)]
    gen = torch.Generator().manual_seed(5)
    upstream = [torch.randn(out.shape, generator=gen, dtype=out.dtype) for out in dense]
    torch.testing.assert_close(ours, dense, rtol=1e-12, atol=1e-12)
    ours_grads = torch.autograd.grad(ours, inputs, upstream)
    dense_grads = torch.autograd.grad(dense, inputs, upstream)
    torch.testing.assert_close(ours_grads, dense_grads, rtol=1e-11, atol=1e-11)
    assert all(grad.abs().max() > 0 for grad in dense_grads)


@pytest.mark.parametrize("weight_at", ["input", "hidden", "output", "source"])
def test_dropped_route_adds_nothing_and_gets_no_weight_gradient(weight_at: str) -> None:
    """Fault: a dropped route that still contributes, or weights renormalised over what is left."""
    idxs = [torch.tensor([[0, 1], [0, 1]]), torch.tensor([[0, 1], [0, 1]])]
    capacity = CapacityConfig("expert", 1.0)  # ceil(2 · 2 / 4) = 1 row per source and expert: token 1 loses both routes
    xs, _, _ = make_inputs((2, 2))
    weights = [torch.full((2, 2), 0.5, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    parameters = make_parameters()
    expert = reference_mlp(*parameters, activation=swiglu, weight_at=weight_at)
    outs = moe_oracle(xs, idxs, weights, expert, capacity, world=WORLD, num_experts=EXPERTS, weight_at=weight_at)
    sum(out.sum() for out in outs).backward()
    for x, weight, out, idx in zip(xs, weights, outs, idxs, strict=True):
        kept = dense_moe(x[:1], idx[:1], weight[:1], parameters, weight_at)
        torch.testing.assert_close(out[:1], kept, rtol=1e-12, atol=1e-12)
        assert torch.equal(out[1], torch.zeros(HIDDEN, dtype=torch.float64))
        assert torch.equal(weight.grad[1], torch.zeros(2, dtype=torch.float64))
        assert torch.equal(x.grad[1], torch.zeros(HIDDEN, dtype=torch.float64))
        assert (weight.grad[0] != 0).all()


@pytest.mark.parametrize("weight_at", ["input", "hidden", "output", "source"])
def test_without_routes_gradients_are_zero_and_not_none(weight_at: str) -> None:
    """Fault: a rank or an expert without rows falls out of the graph, and data-parallel ranks disagree."""
    xs, _, weights = make_inputs((3, 0))
    idxs = [torch.full((3, TOP_K), -1), torch.full((0, TOP_K), -1)]
    parameters = make_parameters()
    expert = reference_mlp(*parameters, activation=swiglu, weight_at=weight_at)
    outs = moe_oracle(xs, idxs, weights, expert, DROPLESS, world=WORLD, num_experts=EXPERTS, weight_at=weight_at)
    assert [out.shape for out in outs] == [(3, HIDDEN), (0, HIDDEN)]
    assert not outs[0].any()
    grads = torch.autograd.grad(sum(out.sum() for out in outs), [*xs, *weights, *parameters])
    assert all(not grad.any() for grad in grads)


def test_expert_without_rows_has_zero_gradient() -> None:
    """Fault: the oracle skips an empty expert, so its own parameters would have gradient None."""
    xs, _, weights = make_inputs((2, 1))
    idxs = [torch.zeros(2, TOP_K, dtype=torch.int64), torch.zeros(1, TOP_K, dtype=torch.int64)]
    scale = [torch.ones((), dtype=torch.float64, requires_grad=True) for _ in range(EXPERTS)]
    outs = moe_oracle(
        xs, idxs, weights, lambda e, rows, w: rows * scale[e], DROPLESS, world=WORLD, num_experts=EXPERTS,
        weight_at="output",
    )  # fmt: skip
    grads = torch.autograd.grad(sum(out.sum() for out in outs), scale)
    assert grads[0] != 0
    assert [float(grad) for grad in grads[1:]] == [0.0] * (EXPERTS - 1)


def test_rows_are_copies_in_canonical_order() -> None:
    """Fault: rows ordered by source first, or a repeated expert sent once."""
    xs = [torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0]])]
    idxs = [torch.tensor([[1, 1], [0, 2]]), torch.tensor([[1, 0]])]
    rows = oracle_rows(xs, idxs, DROPLESS, world=2, num_experts=4)
    assert [r.flatten().tolist() for r in rows] == [[2.0, 3.0, 1.0, 1.0, 3.0], [2.0]]
    routes = accepted_routes(idxs, DROPLESS, world=2, num_experts=4)
    assert routes[0][2:4] == [Route(0, 0, 0, 1), Route(0, 0, 1, 1)]


def test_rows_are_bit_equal_also_for_nan_and_signed_zero() -> None:
    """Fault: rows that went through arithmetic."""
    x = torch.tensor([[float("nan"), -0.0, 1e-40, float("-inf")]])
    rows = oracle_rows([x], [torch.tensor([[0, 1]])], DROPLESS, world=1, num_experts=2)[0]
    assert torch.equal(rows.view(torch.int32), x.expand(2, -1).contiguous().view(torch.int32))


def combine_one(terms_of_rank: list[list[float]], experts_of_k: list[int]) -> float:
    ys = [torch.tensor(terms, dtype=torch.bfloat16).view(-1, 1) for terms in terms_of_rank]
    idxs = [torch.tensor([experts_of_k]), *(torch.zeros(0, len(experts_of_k), dtype=torch.int64) for _ in ys[1:])]
    outs = oracle_combine(ys, idxs, DROPLESS, world=len(ys), num_experts=4 * len(ys))
    assert outs[0].dtype == torch.bfloat16
    return outs[0].item()


def test_partial_sums_of_a_rank_are_taken_in_float32() -> None:
    """Fault: a sum in bfloat16, where 256 + 1 + 1 stays 256 (its step there is 2)."""
    assert combine_one([[256.0, 1.0, 1.0]], [0, 0, 1]) == 258.0


def test_partial_sum_of_a_rank_is_rounded_once_before_the_ranks_are_added() -> None:
    """Fault: one float32 sum over all routes, 257.5 → 258. The partials are 256.75 → 256 and 0.75: 256.75 → 256.

    The source is rank 0, so the first line is about its own partial and the second about a remote one.
    """
    assert combine_one([[256.0, 0.75], [0.75]], [0, 0, 4]) == 256.0
    assert combine_one([[0.75], [256.0, 0.75]], [0, 4, 4]) == 256.0


def test_terms_of_a_rank_are_added_in_ascending_k() -> None:
    """Fault: row order instead of k order. k order (experts 1, 0, 0) is (2^24 + 1) − 2^24 = 0; row order gives 1."""
    big = float(2**24)
    ys = [torch.tensor([[1.0], [-big], [big]])]  # rows: expert 0 of k=1, expert 0 of k=2, expert 1 of k=0
    out = oracle_combine(ys, [torch.tensor([[1, 0, 0]])], DROPLESS, world=1, num_experts=4)
    assert out[0].item() == 0.0
    assert (ys[0][0] + ys[0][1] + ys[0][2]).item() == 1.0


def test_plain_combine_is_the_backward_of_the_rows() -> None:
    """Fault: combine and dispatch that disagree about which row belongs to which token."""
    xs, idxs, _ = make_inputs((5, 2))
    capacity = CapacityConfig("rank", 0.8)
    rows = oracle_rows(xs, idxs, capacity, world=WORLD, num_experts=EXPERTS)
    upstream = [torch.randn_like(r) for r in rows]
    expected = torch.autograd.grad(rows, xs, upstream)
    ours = oracle_combine(upstream, idxs, capacity, world=WORLD, num_experts=EXPERTS)
    torch.testing.assert_close(ours, list(expected), rtol=1e-13, atol=1e-13)


def test_errors_quote_the_value() -> None:
    """Fault: a test that passes the wrong thing to the oracle and compares nonsense."""
    xs, idxs, weights = make_inputs()
    with pytest.raises(ValueError, match="expert id is outside .*4"):
        accepted_routes([torch.tensor([[7]]), torch.tensor([[0]])], DROPLESS, world=2, num_experts=4)
    with pytest.raises(ValueError, match="xs has 1 entries; a group of 2"):
        oracle_rows(xs[:1], idxs, DROPLESS, world=2, num_experts=EXPERTS)
    expert = reference_mlp(*make_parameters(), activation=swiglu, weight_at="hidden")
    with pytest.raises(ValueError, match="weight_at='hidden'"):
        moe_oracle(xs, idxs, weights, expert, DROPLESS, world=2, num_experts=EXPERTS, weight_at="output")
