"""The grouped GEMM of the experts on a GPU: against the loop, without host syncs, under graph capture.

Legend: E experts, R rows, D hidden size, F expert width.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from ep_plugin.dispatch.base import Dispatched
from ep_plugin.experts import Activation, grouped_linear, grouped_mlp

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0),
    reason="needs a GPU of compute capability 9.0",
)

E, D, WIDTH, PADDING = 4, 256, 128, 37
COUNTS = {"ragged": (300, 1, 77, 130), "starved": (0, 300, 0, 5), "none": (0, 0, 0, 0)}


@dataclass
class Case:
    d: Dispatched
    up: Tensor
    down: Tensor
    up_bias: Tensor | None
    down_bias: Tensor | None
    transposed: bool
    valid: int

    def run(self, weight_at: str, backend: str) -> Tensor:
        return grouped_mlp(
            self.d,
            self.up,
            self.down,
            up_bias=self.up_bias,
            down_bias=self.down_bias,
            activation=Activation(),
            weight_at=weight_at,
            transposed=self.transposed,
            backend=backend,
        )

    def leaves(self) -> list[Tensor]:
        named = (self.d.rows, self.d.weights, self.up, self.down, self.up_bias, self.down_bias)
        return [t for t in named if t is not None]


def case(counts: tuple[int, ...], *, bias: bool = True, transposed: bool = False, padding: int = PADDING) -> Case:
    """bfloat16 experts; NaN in the padding rows and their weights; the number of rows known to the device alone."""
    torch.manual_seed(0)
    offsets = torch.tensor([0, *itertools.accumulate(counts)], device="cuda")
    valid = sum(counts)

    def leaf(*shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, device="cuda") * scale).to(dtype)

    rows, weights = leaf(valid + padding, D), torch.rand(valid + padding, device="cuda")
    rows[valid:], weights[valid:] = float("nan"), float("nan")
    shapes = ((D, 2 * WIDTH), (WIDTH, D)) if transposed else ((2 * WIDTH, D), (D, WIDTH))
    up, down = (leaf(E, *shape, scale=0.1) for shape in shapes)
    made = Case(
        Dispatched(rows, weights, offsets, None),
        up,
        down,
        leaf(E, 2 * WIDTH) if bias else None,
        leaf(E, D) if bias else None,
        transposed,
        valid,
    )
    for t in made.leaves():
        t.requires_grad_()
    return made


@pytest.fixture
def poison() -> Iterator[None]:
    """Memory that nobody wrote reads as NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert torch.empty(1000, device="cuda").isnan().all(), "the poison itself must work"
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def results(c: Case, weight_at: str, backend: str) -> list[Tensor]:
    y = c.run(weight_at, backend)
    dy = torch.randn(y.shape, device="cuda", generator=torch.Generator("cuda").manual_seed(1)).to(y.dtype)
    dy[c.valid :] = float("nan")
    grads = torch.autograd.grad(y, c.leaves(), dy, allow_unused=True)
    rows, *rest = (g if g is not None else torch.zeros((), device="cuda") for g in grads)
    return [y[: c.valid], rows[: c.valid], *rest]


@pytest.mark.parametrize("weight_at", ["input", "hidden", "output"])
@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize(("transposed", "bias"), [(False, False), (False, True), (True, True)])
def test_grouped_mm_equals_the_loop(poison: None, transposed: bool, bias: bool, counts: str, weight_at: str) -> None:
    """Fault: operand order, offsets, garbage of empty experts or of padding rows in the grouped GEMM on a GPU."""
    c = case(COUNTS[counts], bias=bias, transposed=transposed)
    loop, grouped = results(c, weight_at, "loop"), results(c, weight_at, "grouped_mm")
    for a, b in zip(grouped, loop, strict=True):
        assert a.isfinite().all()
        scale = float(b.detach().abs().max().clamp(min=1e-3)) if b.numel() else 1.0
        torch.testing.assert_close(a, b, rtol=0, atol=2e-2 * scale)
    assert (grouped[2].numel() == 1) or (grouped[2][c.valid :] == 0).all()
    for expert, count in enumerate(COUNTS[counts]):
        assert count or not any(g[expert].any() for g in grouped[3:])


def test_no_rows_at_all(poison: None) -> None:
    """Fault: the grouped GEMM refuses an empty operand, so a starved rank fails."""
    c = case(COUNTS["none"], padding=0)
    assert all(not g.any() for g in results(c, "hidden", "auto"))


@pytest.mark.parametrize("weight_at", ["input", "hidden", "output"])
def test_no_host_sync(weight_at: str) -> None:
    """Fault: offsets are read on the host between dispatch and combine."""
    c = case(COUNTS["starved"])
    dy = torch.ones(c.d.rows.shape, device="cuda", dtype=torch.bfloat16)
    for _ in range(2):  # the first round may initialise libraries
        y = c.run(weight_at, "auto")
        torch.autograd.grad(y, c.leaves(), dy, allow_unused=True)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
    try:
        torch.autograd.grad(c.run(weight_at, "auto"), c.leaves(), dy, allow_unused=True)
        with pytest.raises(RuntimeError, match="synchroniz"):
            c.run(weight_at, "loop")
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_graph_capture_follows_the_offsets() -> None:
    """Fault: a captured step keeps the row counts of its capture."""
    c = case(COUNTS["ragged"], bias=False)
    dy = torch.ones(c.d.rows.shape, device="cuda", dtype=torch.bfloat16)

    def step() -> list[Tensor]:
        y = c.run("hidden", "grouped_mm")
        return [y, *torch.autograd.grad(y, (c.up, c.down), dy)]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for counts in ((10, 20, 0, 400), (0, 0, 508, 0)):
        c.d.offsets.copy_(torch.tensor([0, *itertools.accumulate(counts)]))
        graph.replay()
        valid = sum(counts)
        for a, b in zip(captured, step(), strict=True):
            a, b = (t[:valid] if t.shape[0] == dy.shape[0] else t for t in (a, b))
            assert torch.equal(a, b)


def test_float32_falls_back_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """Fault: the fallback to the loop, with its host sync, is silent."""
    from ep_plugin.experts import grouped_linear as function

    module = __import__(function.__module__, fromlist=["_said"])
    module._said.clear()
    rows, weight = torch.randn(5, 8, device="cuda"), torch.randn(1, 8, 8, device="cuda")
    y = grouped_linear(rows, weight, torch.tensor([0, 5], device="cuda"))
    torch.testing.assert_close(y, rows @ weight[0].t())
    assert "host sync" in caplog.text and "float32" in caplog.text
    with pytest.raises(ValueError, match="float32"):
        grouped_linear(rows, weight, torch.tensor([0, 5], device="cuda"), backend="grouped_mm")
