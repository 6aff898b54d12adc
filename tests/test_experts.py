"""The expert computation against plain autograd, finite differences and transformers' own experts.

Legend: T tokens, K routes per token, E experts, R rows, D hidden size, F expert width.
"""

from __future__ import annotations

import copy
import gc
import itertools
import pickle
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from ep_plugin.dispatch.base import Dispatched, Rebuild
from ep_plugin.experts import Activation, GroupedMLP, grouped_linear, grouped_mlp, weighted_activation

E, D, WIDTH = 4, 6, 5
COUNTS = {"ragged": (3, 1, 2, 4), "starved": (8, 0, 3, 0), "none": (0, 0, 0, 0), "one": (0, 0, 5, 0)}
ACTIVATIONS = {
    "silu": Activation(),
    "gelu_tanh_interleaved": Activation("gelu_pytorch_tanh", interleaved=True),
    "relu2_not_gated": Activation("relu2", gated=False),
    "clamped": Activation.clamped_swiglu(limit=0.8),
}
WEIGHT_AT = ("input", "hidden", "output", "source")


@pytest.fixture
def poison() -> Iterator[None]:
    """Memory that nobody wrote reads as NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(8).isnan().all(), "the poison itself must work"
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def offsets_of(counts: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(counts)])


def batch(
    counts: tuple[int, ...], *, padding: int = 0, dtype: torch.dtype = torch.float64, seed: int = 0
) -> Dispatched:
    """Rows and weights that require gradients; padding rows and their weights are NaN."""
    generator = torch.Generator().manual_seed(seed)
    offsets = offsets_of(counts)
    valid = int(offsets[-1])
    rows = torch.full((valid + padding, D), float("nan"), dtype=dtype)
    weights = torch.full((valid + padding,), float("nan"), dtype=torch.promote_types(dtype, torch.float32))
    rows[:valid] = torch.randn(valid, D, generator=generator, dtype=torch.float64).to(dtype)
    weights[:valid] = torch.rand(valid, generator=generator, dtype=torch.float64).to(weights.dtype)
    return Dispatched(rows.requires_grad_(), weights.requires_grad_(), offsets, None)


def experts(activation: Activation, *, bias: bool, transposed: bool, dtype: torch.dtype = torch.float64) -> GroupedMLP:
    mlp = GroupedMLP(E, D, WIDTH, activation=activation, bias=bias, dtype=dtype, seed=3)
    if bias:
        generator = torch.Generator().manual_seed(4)
        for p in (mlp.up_bias, mlp.down_bias):
            p.data = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(dtype)
    if not transposed:
        return mlp
    up, down = (torch.nn.Parameter(p.detach().transpose(1, 2).contiguous()) for p in (mlp.up, mlp.down))
    return GroupedMLP.from_parameters(up, down, mlp.up_bias, mlp.down_bias, activation=activation, transposed=True)


def plain(mlp: GroupedMLP, d: Dispatched, weight_at: str) -> Tensor:
    """The same experts in ordinary autograd operations, one expert at a time: [offsets[-1], D]."""
    parts = []
    for e, (start, end) in enumerate(itertools.pairwise(d.offsets.tolist())):
        x, w = d.rows[start:end], d.weights[start:end, None]
        up, down = (m[e].t() if mlp.transposed else m[e] for m in (mlp.up, mlp.down))
        h = F.linear(x * w if weight_at == "input" else x, up, None if mlp.up_bias is None else mlp.up_bias[e])
        h = mlp.activation(h)
        if weight_at != "hidden":
            parts.append(F.linear(h, down, None if mlp.down_bias is None else mlp.down_bias[e]))
        else:
            y = F.linear(h * w, down)
            parts.append(y if mlp.down_bias is None else y + w * mlp.down_bias[e])
    return torch.cat(parts)


def gradients(y: Tensor, dy: Tensor, d: Dispatched, mlp: GroupedMLP) -> list[Tensor]:
    inputs = [d.rows, d.weights, *mlp.parameters()]
    grads = torch.autograd.grad(y, inputs, dy, allow_unused=True)
    return [torch.zeros_like(i) if g is None else g for i, g in zip(inputs, grads, strict=True)]


def dedup(d: Dispatched) -> Dispatched:
    """The same rows, kept for backward as the rows of fewer tokens."""
    unique = torch.arange(len(d.rows)) % 3
    tokens = torch.randn(3, D, dtype=d.rows.dtype, generator=torch.Generator().manual_seed(9))
    return replace(
        d, rows=tokens[unique].requires_grad_(), rebuild=Rebuild((tokens, unique), lambda saved, n: saved[0][saved[1]])
    )


@pytest.mark.parametrize("weight_at", WEIGHT_AT)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients_are_the_finite_differences(activation: str, transposed: bool, bias: bool, weight_at: str) -> None:
    """Fault: a wrong term in any backward, for any layout and place of the weight (w·b2 and ⟨g, b2⟩ among them)."""
    d, mlp = batch(COUNTS["starved"]), experts(ACTIVATIONS[activation], bias=bias, transposed=transposed)

    def run(rows: Tensor, weights: Tensor, *parameters: Tensor) -> Tensor:
        return mlp(replace(d, rows=rows, weights=weights), weight_at)

    assert torch.autograd.gradcheck(run, (d.rows, d.weights, *mlp.parameters()), fast_mode=True)


@pytest.mark.parametrize("weight_at", WEIGHT_AT)
@pytest.mark.parametrize("form", ["route", "dedup", "recompute"])
@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_equals_plain_autograd(poison: None, activation: str, counts: str, form: str, weight_at: str) -> None:
    """Fault: unwritten memory is read (starved experts, padding), or rebuilt rows are wrong or weighted twice."""
    for bias, transposed in itertools.product((False, True), repeat=2):
        d, mlp = batch(COUNTS[counts]), experts(ACTIVATIONS[activation], bias=bias, transposed=transposed)
        d = dedup(d) if form == "dedup" else d
        mlp.recompute_hidden = form == "recompute"
        expected = plain(mlp, d, weight_at)
        y = mlp(d, weight_at)
        dy = torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(1))
        torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
        pairs = zip(gradients(y, dy, d, mlp), gradients(expected, dy, d, mlp), strict=True)
        for ours, theirs in pairs:
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("backend", ["loop", "grouped_mm"])
@pytest.mark.parametrize("weight_at", WEIGHT_AT)
def test_padding_rows_do_not_leak(poison: None, weight_at: str, backend: str) -> None:
    """Fault: NaN in rows, weights or gradients past offsets[-1] reaches a valid row, a parameter or padding."""
    mlp = GroupedMLP(E, 8, 8, bias=True, dtype=torch.float32, backend=backend)
    rows, weights = torch.randn(16, 8), torch.rand(16)
    rows[11:], weights[11:] = float("nan"), float("nan")
    d = Dispatched(rows.requires_grad_(), weights.requires_grad_(), offsets_of(COUNTS["starved"]), None)
    y = mlp(d, weight_at)
    dy = torch.ones_like(y)
    dy[11:] = float("nan")
    grads = gradients(y, dy, d, mlp)
    assert y[:11].isfinite().all()
    assert all(g.isfinite().all() for g in grads)
    for padding in (y[11:], grads[0][11:], grads[1][11:]):
        assert (padding == 0).all()


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("weight_at", WEIGHT_AT)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 4e-2)])
def test_grouped_mm_equals_the_loop(
    poison: None, dtype: torch.dtype, tolerance: float, weight_at: str, counts: str
) -> None:
    """Fault: the grouped GEMM given the wrong operand order, offsets or layout, or an empty expert's garbage."""
    for transposed, bias in itertools.product((False, True), repeat=2):
        offsets = offsets_of(COUNTS[counts])
        generator = torch.Generator().manual_seed(0)

        def draw(*shape: int, generator: torch.Generator = generator) -> Tensor:
            return torch.randn(shape, generator=generator).to(dtype).requires_grad_()

        rows, weights = draw(int(offsets[-1]), 16), torch.rand(int(offsets[-1]), generator=generator).requires_grad_()
        up, down = draw(E, 16, 48).detach() / 4, draw(E, 24, 16).detach() / 4
        up, down = (m if transposed else m.transpose(1, 2).contiguous() for m in (up, down))
        biases = (draw(E, 48), draw(E, 16)) if bias else (None, None)
        results = []
        for backend in ("loop", "grouped_mm"):
            y = grouped_mlp(
                Dispatched(rows, weights, offsets, None),
                up.requires_grad_(),
                down.requires_grad_(),
                up_bias=biases[0],
                down_bias=biases[1],
                activation=Activation(),
                weight_at=weight_at,
                transposed=transposed,
                backend=backend,
            )
            leaves = [t for t in (rows, weights, up, down, *biases) if t is not None]
            grads = torch.autograd.grad(y, leaves, torch.ones_like(y), allow_unused=True)
            results.append([y, *(g for g in grads if g is not None)])
        for loop, grouped in zip(*results, strict=True):
            scale = max(1.0, float(loop.detach().abs().max())) if loop.numel() else 1.0
            torch.testing.assert_close(grouped, loop, rtol=0, atol=tolerance * scale)


def test_empty_experts_get_zero_gradients_not_none(poison: None) -> None:
    """Fault: an expert without rows has no gradient, so optimizers and gradient reductions differ between ranks."""
    mlp = experts(Activation(), bias=True, transposed=False)
    mlp(batch(COUNTS["none"]), "hidden").sum().backward()
    assert all(p.grad is not None and (p.grad == 0).all() for p in mlp.parameters())


@pytest.mark.parametrize("weight_at", WEIGHT_AT)
def test_zero_rows_keep_the_graph_connected(weight_at: str) -> None:
    """Fault: a rank without rows gets an output without a graph, skips its backward exchange, and its peers hang."""
    d, mlp = batch(COUNTS["none"]), experts(Activation(), bias=False, transposed=False)
    for p in mlp.parameters():
        p.requires_grad_(False)
    y = mlp(d, weight_at)
    assert y.requires_grad and y.shape == (0, D)
    y.sum().backward()
    assert d.rows.grad is not None


def saved_by(run: Callable[[], Tensor]) -> list[Tensor]:
    kept: list[Tensor] = []

    def pack(t: Tensor) -> Tensor:
        kept.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        run()
    return kept


def storages(tensors: list[Tensor]) -> dict[int, int]:
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.numel()}


@pytest.mark.parametrize("weight_at", WEIGHT_AT)
def test_what_is_saved(weight_at: str) -> None:
    """Fault: rows are copied before they are kept, or kept beside what rebuilds them, or more is kept than stated."""
    d, mlp = batch(COUNTS["ragged"]), experts(Activation(), bias=False, transposed=False)
    known = storages([d.offsets, d.weights, *mlp.parameters()])
    rows, size = d.rows.data_ptr(), d.rows.element_size() * len(d.rows)

    kept = storages(saved_by(lambda: mlp(d, weight_at)))
    assert rows in kept
    extra = sorted(n for ptr, n in kept.items() if ptr not in known and ptr != rows)
    assert extra == sorted([2 * WIDTH * size, WIDTH * size])

    mlp.recompute_hidden = True
    kept = storages(saved_by(lambda: mlp(d, weight_at)))
    assert [n for ptr, n in kept.items() if ptr not in known and ptr != rows] == [2 * WIDTH * size]

    small = dedup(d)
    kept = storages(saved_by(lambda: mlp(small, weight_at)))
    assert small.rows.data_ptr() not in kept
    assert all(t.data_ptr() in kept for t in small.rebuild.tensors)


def test_frozen_experts_keep_no_rows() -> None:
    """Fault: adapters on frozen experts pay for the rows and the weight gradients that nobody asked for."""
    d, mlp = batch(COUNTS["ragged"]), experts(Activation(), bias=False, transposed=False)
    for p in mlp.parameters():
        p.requires_grad_(False)
    kept = storages(saved_by(lambda: mlp(d, "hidden")))
    assert d.rows.data_ptr() not in kept


class CountProducts(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.products = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.products += func.overloadpacket is torch.ops.aten.mm
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("rows_need", "weight_needs", "products"), [(True, True, 2), (True, False, 1), (False, True, 1)]
)
def test_backward_computes_what_is_asked(rows_need: bool, weight_needs: bool, products: int) -> None:
    """Fault: a gradient that nobody needs is computed, at a third of the step's arithmetic."""
    rows = torch.randn(5, D, requires_grad=rows_need)
    weight = torch.randn(1, 3, D, requires_grad=weight_needs)
    y = grouped_linear(rows, weight, torch.tensor([0, 5]))
    with CountProducts() as count:
        y.sum().backward()
    assert count.products == products


def test_rebuilt_rows_die_with_the_checkpointed_forward() -> None:
    """Fault: the autograd node holds the tensors that rebuild the rows, so checkpointing frees nothing."""
    mlp = experts(Activation(), bias=False, transposed=False)
    alive: list[weakref.ref] = []

    def region(x: Tensor) -> Tensor:
        d = batch(COUNTS["ragged"])
        tokens = x * 1
        alive.append(weakref.ref(tokens.untyped_storage()))
        index = torch.arange(len(d.rows)) % len(x)
        rebuild = Rebuild((tokens.detach(), index), lambda saved, n: saved[0][saved[1]])
        return mlp(replace(d, rows=tokens[index], rebuild=rebuild), "hidden")

    x = torch.randn(3, D, dtype=torch.float64, requires_grad=True)
    y = checkpoint(region, x, use_reentrant=False)
    gc.collect()
    assert alive[0]() is None
    y.sum().backward()
    grads = [x.grad.clone(), mlp.up.grad.clone()]
    x.grad = mlp.up.grad = None
    region(x).sum().backward()
    assert torch.equal(grads[0], x.grad) and torch.equal(grads[1], mlp.up.grad)


@pytest.mark.parametrize("backend", ["loop", "grouped_mm"])
def test_output_lands_in_the_given_memory(backend: str) -> None:
    """Fault: the down projection's output is a copy elsewhere, or the buffer joins the graph and keeps it alive."""
    arena = torch.full((20, 8), 7.0)
    mlp = GroupedMLP(E, 8, 8, backend=backend)
    rows = torch.randn(11, 8, requires_grad=True)
    d = Dispatched(rows, torch.rand(11, requires_grad=True), offsets_of(COUNTS["starved"]), 11, output=arena)
    y = mlp(d, "hidden")
    assert y.data_ptr() == arena.data_ptr() and y.shape == (11, 8)
    assert y.grad_fn is not None and not arena.requires_grad and arena.grad_fn is None
    assert (arena[11:] == 7).all(), "rows past the valid ones belong to somebody else"
    elsewhere = mlp(replace(d, output=None), "hidden")
    assert torch.equal(y, elsewhere)
    dy = torch.randn(11, 8)
    for ours, theirs in zip(gradients(y, dy, d, mlp), gradients(elsewhere, dy, d, mlp), strict=True):
        assert torch.equal(ours, theirs)
    # Who weights the output reads it again in backward; scratch would have been overwritten by then.
    assert mlp(d, "output").data_ptr() != arena.data_ptr()


def test_a_kept_output_that_is_overwritten_is_noticed() -> None:
    """Fault: scratch that a later layer writes serves as somebody's saved tensor, and gradients are silently wrong."""
    arena = torch.zeros(5, D)
    weight, offsets = torch.randn(1, D, D, requires_grad=True), torch.tensor([0, 5])
    y = grouped_linear(torch.randn(5, D), weight, offsets, out=arena)
    loss = (y * y).sum()
    grouped_linear(torch.randn(5, D), weight, offsets, out=arena)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_gradients_accumulate() -> None:
    """Fault: a second microbatch, or a second use in one graph, overwrites the weight gradient."""
    mlp = experts(Activation(), bias=True, transposed=False)
    first, second = batch(COUNTS["ragged"], seed=1), batch(COUNTS["starved"], seed=2)
    separate = [
        [a + b for a, b in zip(x, y, strict=True)]
        for x, y in [
            tuple(torch.autograd.grad(mlp(d, "hidden").sum(), list(mlp.parameters())) for d in (first, second)),
        ]
    ][0]
    for d in (first, second):
        mlp(d, "hidden").sum().backward()
    for p, g in zip(mlp.parameters(), separate, strict=True):
        torch.testing.assert_close(p.grad, g, rtol=1e-12, atol=1e-12)
    mlp.zero_grad()
    loss = mlp(first, "hidden").sum() + mlp(second, "hidden").sum()
    loss.backward(retain_graph=True)
    loss.backward()
    for p, g in zip(mlp.parameters(), separate, strict=True):
        torch.testing.assert_close(p.grad, 2 * g, rtol=1e-12, atol=1e-12)


def test_expanded_gradients() -> None:
    """Fault: a gradient with stride 0, as sum() gives it, read as if it were contiguous."""
    rows, weight = torch.randn(4, 8), torch.randn(1, 8, 8, requires_grad=True)
    for backend in ("loop", "grouped_mm"):
        weight.grad = None
        grouped_linear(rows, weight, torch.tensor([0, 4]), backend=backend).sum().backward()
        torch.testing.assert_close(weight.grad[0], rows.sum(0).expand(8, 8))


def test_weights_round_once_in_bfloat16() -> None:
    """Fault: the router weight is rounded to bf16 first, or the product rounds between activation, gate and weight."""
    d = batch((64,), dtype=torch.bfloat16)
    identity = torch.eye(D, dtype=torch.bfloat16)[None]
    weighted = grouped_linear(d.rows, identity, d.offsets, row_weight=d.weights)
    once = (d.rows.float() * d.weights[:, None]).bfloat16()
    assert torch.equal(weighted, once)
    assert not torch.equal(once, d.rows * d.weights[:, None].bfloat16()), "the data must tell the two apart"

    hidden = weighted_activation(d.rows, d.weights, d.offsets, Activation())
    gate, up = d.rows.float().chunk(2, -1)
    once = (F.silu(gate) * up * d.weights[:, None]).bfloat16()
    assert torch.equal(hidden, once)
    gate, up = d.rows.chunk(2, -1)
    assert not torch.equal(once, (F.silu(gate) * up).mul(d.weights[:, None]).bfloat16())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_low_precision_is_close_to_float64(dtype: torch.dtype) -> None:
    """Fault: a dtype is refused, or a gradient comes back in another dtype than its tensor."""
    mlp = experts(Activation(), bias=True, transposed=False, dtype=dtype)
    d = batch(COUNTS["ragged"], dtype=dtype)
    exact, d64 = copy.deepcopy(mlp).double(), batch(COUNTS["ragged"])
    y, expected = mlp(d, "hidden"), plain(exact, d64, "hidden")
    ours = gradients(y, torch.ones_like(y), d, mlp)
    theirs = gradients(expected, torch.ones_like(expected), d64, exact)
    assert y.dtype == dtype and ours[1].dtype == torch.float32
    assert all(g.dtype == dtype for i, g in enumerate(ours) if i != 1)
    bound = 20 * torch.finfo(dtype).eps
    for a, b in zip([y, *ours], [expected, *theirs], strict=True):
        assert (a.double() - b).norm() <= bound * b.norm()


def test_autocast_like_linear() -> None:
    """Fault: under autocast float32 experts run in float32, or a gradient comes back in the wrong dtype."""
    rows = torch.randn(6, 8, requires_grad=True)
    weight = torch.randn(2, 4, 8, requires_grad=True)
    bias = torch.randn(2, 4, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = grouped_linear(rows, weight, torch.tensor([0, 2, 6]), bias=bias)
        expected = torch.cat([F.linear(rows[:2], weight[0], bias[0]), F.linear(rows[2:], weight[1], bias[1])])
    assert y.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(y, expected, rtol=2e-2, atol=2e-2)
    dy = torch.randn(6, 4).bfloat16()
    for ours, theirs in zip(
        torch.autograd.grad(y, (rows, weight, bias), dy),
        torch.autograd.grad(expected, (rows, weight, bias), dy),
        strict=True,
    ):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=5e-2)

    d = Dispatched(rows, torch.rand(6), torch.tensor([0, 2, 6]), 6, output=torch.zeros(6, 8))
    mlp = GroupedMLP(2, 8, 4)
    exact = mlp(replace(d, output=None), "hidden")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = mlp(d, "hidden")
    assert y.dtype == torch.float32 and y.data_ptr() == d.output.data_ptr()
    assert 0 < (y - exact).abs().max() < 0.05 * exact.abs().max()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert mlp(replace(d, output=None), "hidden").dtype == torch.float32, "combine moves rows of the wire dtype"


def test_the_weight_of_a_bias_is_differentiated_as_it_was_added() -> None:
    """Fault: under autocast the gradient of a bias's weight is of the bias in float32, which no row had added."""
    rows, weight, bias = torch.zeros(3, 8), torch.zeros(2, 4, 8), torch.full((2, 4), 1 + 2**-10)
    by_row = torch.rand(3, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = grouped_linear(rows, weight, torch.tensor([0, 1, 3]), bias=bias, bias_weight=by_row)
    (grad,) = torch.autograd.grad(y, by_row, torch.ones_like(y))
    assert torch.equal(grad, torch.full((3,), 4.0)), "the bias is 1 in bfloat16"


@pytest.mark.parametrize("shards", [1, 2, 4])
def test_every_sharding_has_the_same_experts(shards: int) -> None:
    """Fault: experts drawn from the rank's own generator, so that runs of different EP degrees start differently."""
    whole = GroupedMLP(8, D, WIDTH, seed=5)
    parts = [
        GroupedMLP(8, D, WIDTH, seed=5, first_expert=r * 8 // shards, num_local=8 // shards) for r in range(shards)
    ]
    assert torch.equal(torch.cat([p.up for p in parts]), whole.up)
    assert torch.equal(torch.cat([p.down for p in parts]), whole.down)
    assert sum(p.numel() for p in parts[0].parameters()) * shards == sum(p.numel() for p in whole.parameters())
    assert len(set(whole.up[:, 0, 0].tolist())) == 8
    assert not torch.equal(GroupedMLP(8, D, WIDTH, seed=6).up, whole.up)
    half = GroupedMLP(8, D, WIDTH, seed=5, dtype=torch.bfloat16)
    assert torch.equal(half.up, whole.up.bfloat16())


def test_foreign_parameters_are_read_in_place() -> None:
    """Fault: a copy of the trainer's parameters is trained instead of the trainer's."""
    up, down = torch.nn.Parameter(torch.randn(2, 8, 4)), torch.nn.Parameter(torch.randn(2, 4, 4))
    mlp = GroupedMLP.from_parameters(up, down, activation=Activation())
    assert mlp.up is up and mlp.down is down
    with pytest.raises(ValueError, match="trainer"):
        mlp.reset_parameters()


def test_modules_copy_and_pickle() -> None:
    """Fault: an activation that cannot be copied breaks EMA copies and checkpoints of whole modules."""
    mlp = experts(Activation.clamped_swiglu(), bias=True, transposed=True)
    d = batch(COUNTS["ragged"])
    for other in (copy.deepcopy(mlp), pickle.loads(pickle.dumps(mlp))):
        assert torch.equal(other(d, "hidden"), mlp(d, "hidden"))


@pytest.mark.slow
def test_compiled_callers_get_the_same_numbers() -> None:
    """Fault: torch.compile traces into the node and fails or changes the result."""
    mlp, d = experts(Activation(), bias=True, transposed=False), batch(COUNTS["starved"])
    expected = gradients(mlp(d, "hidden"), torch.ones(11, D, dtype=torch.float64), d, mlp)
    y = torch.compile(lambda rows: mlp(replace(d, rows=rows), "hidden") * 1, backend="eager")(d.rows)
    for ours, theirs in zip(gradients(y, torch.ones_like(y), d, mlp), expected, strict=True):
        assert torch.equal(ours, theirs)


def _tiny(**sizes: object) -> dict[str, object]:
    return dict(vocab_size=8, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=4, **sizes)


def _gpt_oss() -> tuple[torch.nn.Module, tuple]:
    from transformers.models.gpt_oss import modeling_gpt_oss as m

    config = m.GptOssConfig(**_tiny(hidden_size=8, intermediate_size=12, num_local_experts=E))
    module = m.GptOssExperts(config)
    activation = Activation.clamped_swiglu(alpha=module.alpha, limit=module.limit)
    biases = (module.gate_up_proj_bias, module.down_proj_bias)
    return module, (module.gate_up_proj, module.down_proj, biases, activation, True)


def _gated(module: torch.nn.Module) -> tuple[torch.nn.Module, tuple]:
    activation = Activation(function=module.act_fn)
    return module, (module.gate_up_proj, module.down_proj, (None, None), activation, False)


def _mixtral() -> tuple[torch.nn.Module, tuple]:
    from transformers.models.mixtral import modeling_mixtral as m

    return _gated(m.MixtralExperts(m.MixtralConfig(**_tiny(hidden_size=8, intermediate_size=12, num_local_experts=E))))


def _qwen3() -> tuple[torch.nn.Module, tuple]:
    from transformers.models.qwen3_moe import modeling_qwen3_moe as m

    return _gated(m.Qwen3MoeExperts(m.Qwen3MoeConfig(**_tiny(hidden_size=8, moe_intermediate_size=12, num_experts=E))))


def _nemotron_h() -> tuple[torch.nn.Module, tuple]:
    from transformers.models.nemotron_h import modeling_nemotron_h as m

    config = m.NemotronHConfig(hidden_size=8, moe_intermediate_size=12, n_routed_experts=E)
    module = m.NemotronHExperts(config)
    activation = Activation(gated=False, function=module.act_fn)
    return module, (module.up_proj, module.down_proj, (None, None), activation, False)


@pytest.mark.parametrize("weight_at", ["hidden", "output"])
@pytest.mark.parametrize("family", [_gpt_oss, _mixtral, _qwen3, _nemotron_h])
def test_equals_the_experts_of_transformers(family: Callable, weight_at: str) -> None:
    """Fault: a layout read wrongly (gate and up swapped, interleave, transpose, clamp, bias) or a repeat lost."""
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    module, (up, down, biases, activation, transposed) = family()
    module.double()  # exchanges the data of the parameters, not the parameters
    module.config._experts_implementation = "eager"
    for p in module.parameters():
        torch.nn.init.normal_(p, std=2.0)  # wide enough for gpt_oss's clamps to bite
    x = torch.randn(9, 8, dtype=torch.float64, requires_grad=True)
    idx = torch.randint(0, E - 1, (9, 2))  # expert E−1 gets nothing
    idx[0] = 1
    w = torch.rand(9, 2, dtype=torch.float64, requires_grad=True)
    expected = module(x, idx, w)

    order = idx.flatten().argsort(stable=True)
    counts = tuple(idx.flatten().bincount(minlength=E).tolist())
    mlp = GroupedMLP.from_parameters(up, down, *biases, activation=activation, transposed=transposed)
    row_weights = w.flatten()[order]
    y = mlp(Dispatched(x[order // 2], row_weights, offsets_of(counts), None), weight_at)
    y = y * row_weights[:, None] if weight_at == "output" else y
    out = torch.zeros_like(x).index_add(0, order // 2, y)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    leaves = [x, w, *mlp.parameters()]
    assert len(leaves) == 2 + len(list(module.parameters()))
    dy = torch.randn_like(out)
    for ours, theirs in zip(
        torch.autograd.grad(out, leaves, dy), torch.autograd.grad(expected, leaves, dy), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)


BAD = {
    "columns": (dict(rows=torch.zeros(3, 5)), r"5 columns.*takes 6"),
    "dims": (dict(weight=torch.zeros(2, 6)), r"weight 3D"),
    "offset count": (dict(offsets=torch.tensor([0, 3])), r"int64 \[3\].*\[2\]"),
    "offset dtype": (dict(offsets=torch.tensor([0, 1, 3], dtype=torch.int32)), "torch.int32"),
    "offsets fall": (dict(offsets=torch.tensor([0, 3, 2])), r"\[0, 3, 2\]"),
    "offsets start": (dict(offsets=torch.tensor([1, 2, 3])), r"\[1, 2, 3\]"),
    "too many rows": (dict(offsets=torch.tensor([0, 2, 4])), "row 4 but there are 3"),
    "num_rows": (dict(num_rows=2), r"num_rows=2 .* 3"),
    "bias": (dict(bias=torch.zeros(2, 5)), r"bias must be \[2, 4\], got \[2, 5\]"),
    "row weights": (dict(row_weight=torch.zeros(2)), r"row_weight must be \[3\]"),
    "bias weight alone": (dict(bias_weight=torch.zeros(3)), "without a bias"),
    "dtype": (dict(rows=torch.zeros(3, 6, dtype=torch.bfloat16)), "bfloat16.*float32"),
    "bias dtype": (
        dict(bias=torch.zeros(2, 4, dtype=torch.float64)),
        "weight torch.float32, bias torch.float64",
    ),
    "small out": (dict(out=torch.zeros(2, 4)), r"at least \[3, 4\], got \[2, 4\]"),
    "tracked out": (dict(out=torch.zeros(3, 4, requires_grad=True)), "must not require a gradient"),
    "backend": (dict(backend="grouped"), "'grouped' is not one of auto, loop, grouped_mm"),
    "unaligned": (dict(backend="grouped_mm"), r"multiples of 4 in torch.float32, got \(4, 6\)"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments_are_quoted(case: str) -> None:
    """Fault: a wrong shape, dtype or offset is computed with, or reported from deep inside torch."""
    change, message = BAD[case]
    good = dict(rows=torch.zeros(3, 6), weight=torch.zeros(2, 4, 6), offsets=torch.tensor([0, 1, 3]))
    with pytest.raises(ValueError, match=message):
        grouped_linear(**(good | change))


def test_float64_is_refused_by_grouped_mm() -> None:
    """Fault: the backend that was asked for is silently another one."""
    with pytest.raises(ValueError, match="float64"):
        grouped_linear(
            torch.zeros(3, 8).double(), torch.zeros(1, 8, 8).double(), torch.tensor([0, 3]), backend="grouped_mm"
        )


def test_bad_modules_are_refused() -> None:
    """Fault: an activation whose parameters would get no gradient, or sizes that do not fit, are taken."""
    with pytest.raises(ValueError, match="silly.*silu"):
        Activation("silly")
    with pytest.raises(ValueError, match="trainable"):
        Activation(function=torch.nn.PReLU())
    with pytest.raises(ValueError, match="need gated"):
        Activation("relu", gated=False, limit=1.0)
    with pytest.raises(ValueError, match="limit=-1"):
        Activation(limit=-1.0)
    with pytest.raises(ValueError, match="6 … 9 are not a part of 0 … 7"):
        GroupedMLP(8, D, WIDTH, first_expert=6, num_local=4)
    with pytest.raises(ValueError, match=r"down must be \[2, 4, 4\]"):
        GroupedMLP.from_parameters(
            torch.nn.Parameter(torch.zeros(2, 8, 4)), torch.nn.Parameter(torch.zeros(2, 8, 4)), activation=Activation()
        )
    with pytest.raises(ValueError, match="'outptu'.*'output'"):
        experts(Activation(), bias=False, transposed=False)(batch(COUNTS["one"]), "outptu")


@dataclass(frozen=True)
class _HalvesSwapped:
    """A gate of a model's own: up half first."""

    def __call__(self, up: Tensor) -> Tensor:
        linear, gate = up.chunk(2, -1)
        return F.gelu(gate) * linear


def test_a_models_own_gate() -> None:
    """Fault: `whole` is differentiated or split as if it were a named activation."""
    mlp, d = experts(Activation(whole=_HalvesSwapped()), bias=False, transposed=False), batch(COUNTS["ragged"])
    y, expected = mlp(d, "hidden"), plain(mlp, d, "hidden")
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    dy = torch.ones_like(y)
    for ours, theirs in zip(gradients(y, dy, d, mlp), gradients(expected, dy, d, mlp), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
