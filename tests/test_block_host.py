"""What ``block`` does behind an exchange never looks at the device, where the host would wait for a dead peer without a
time-out: its movements run on tensors that have no values to look at.

Legend: T tokens, K routes per token, N rows sent, R rows received, M ranks, E experts, D hidden size."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ep_plugin import watch
from ep_plugin.config import EPConfig, LegsConfig, MXFP8Config
from ep_plugin.dispatch import Dispatched, block
from ep_plugin.dispatch.base import Arrived
from ep_plugin.dispatch.block import BlockDispatcher, BlockState
from ep_plugin.experts.groups import HostLoop
from ep_plugin.heap import HeapTimeout
from ep_plugin.kernels import mxfp8_reduce, reduce
from ep_plugin.layer import ForeignExperts
from ep_plugin.mxfp8.dispatchers import BlockMXFP8, Precision
from ep_plugin.mxfp8.gemm import Sm100TE
from ep_plugin.routing import RouteMap

T, K, N, R, M, E, D = 5, 3, 11, 9, 2, 4, 64
DEVICE = torch.device("meta")


class Watch:
    """``GroupWatch`` of a group that nobody else is in."""

    def __init__(self, *_: Any) -> None:
        self.exchanged = 0

    def exchange(self, out: Tensor, tensor: Tensor, received: list[int], sent: list[int], phase: Any) -> None:
        assert len(out) == sum(received) and len(tensor) == sum(sent) and out.shape[1:] == tensor.shape[1:]
        self.exchanged += 1


class _Operations(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.device == DEVICE and "copy" in str(func):
            if any(isinstance(a, Tensor) and a.device != DEVICE for a in args):
                raise RuntimeError(f"{func} copies from the host")
        return out


class _Functions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in (torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor) and out.device == DEVICE:
            raise RuntimeError(f"{func.__name__} copies from the host")
        return out


@contextmanager
def no_copies() -> Iterator[None]:
    """Fails where values of the host's go to the device: the host waits for their copy."""
    with _Operations(), _Functions():
        yield


@pytest.fixture(autouse=True)
def _kernels() -> Iterator[None]:
    """The kernels that a GPU would run give tensors of their results' shapes."""
    from ep_plugin.kernels import fan_out_triton, mxfp8_reduce_triton, reduce_triton

    def rows_of(rows: Tensor, index: Tensor, *_: Any) -> Tensor:
        return rows.new_empty((len(index), rows.shape[1]))

    def records_of(records: Tensor, index: Tensor, *rest: Any) -> Tensor:
        return torch.empty((len(index), D), dtype=rest[-1], device=DEVICE)

    with (
        mock.patch.object(reduce, "KERNEL_DEVICES", ("meta",)),
        mock.patch.object(fan_out_triton, "fan_out", lambda *_, **__: None),
        mock.patch.object(reduce_triton, "sum_routes_triton", rows_of),
        mock.patch.object(mxfp8_reduce_triton, "sum_route_records_triton", records_of),
        mock.patch.object(block, "GroupWatch", Watch),
    ):
        yield


def _make(kind: str, weight_at: str, legs: str) -> BlockDispatcher:
    config = EPConfig(dispatcher="block", weight_at=weight_at)
    shape: dict[str, Any] = dict(num_experts=E, top_k=K, hidden_size=D, dtype=torch.bfloat16, rank=1, world=M)
    if kind == "plain":
        return BlockDispatcher(config, group=None, device=DEVICE, **shape)
    leg = dict.fromkeys(("dispatch", "combine", "combine_backward", "dispatch_backward"), legs)
    made = Precision(
        EPConfig(dispatcher="block", weight_at=weight_at, precision="mxfp8", mxfp8=MXFP8Config(legs=LegsConfig(**leg))),
        D, torch.bfloat16, torch.device("cpu"),
    ).block(None, device=DEVICE, **shape)  # fmt: skip
    assert isinstance(made, BlockMXFP8)
    return made


def _empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=DEVICE)


def _state(sorted_: bool) -> BlockState:
    longs: dict[str, Any] = dict(dtype=torch.int64)
    by_route = [_empty(T, K, dtype=torch.int32) for _ in range(2)]
    counts = [_empty(M, E, **longs) for _ in range(2)]
    found = RouteMap(*by_route, *counts, _empty(M, **longs), _empty(E // M + 1, **longs))
    sizes = torch.tensor([[4, N - 4], [R - 3, 3]])
    ints: dict[str, Any] = dict(dtype=torch.int32)
    orders = (None, None) if sorted_ else (_empty(R, **ints), _empty(R, **ints))
    return BlockState("layers.0", found, _empty(N, **longs), _empty(T, K, **ints), *orders, sizes)


@pytest.mark.parametrize("sorted_", [False, True])
@pytest.mark.parametrize("weight_at", ["hidden", "output", "source"])
@pytest.mark.parametrize(("kind", "legs"), [("plain", ""), ("mxfp8", "mxfp8"), ("mxfp8", "bf16")])
def test_movements_of_block_never_look_at_the_device(kind: str, legs: str, weight_at: str, sorted_: bool) -> None:
    """Catches a number read back, rows picked by a mask, and values of the host copied over, behind an exchange."""
    dispatcher, state = _make(kind, weight_at, legs), _state(sorted_)
    weights = _empty(T, K, dtype=torch.float32)
    source = weights if weight_at == "source" else None
    with no_copies():
        rows, by_row = dispatcher.send(state, _empty(T, D), weights, Arrived())
        combined = {"output": by_row, "source": weights}.get(weight_at)
        out, kept = dispatcher.give_back(state, _empty(R, D), combined, keep=weight_at == "source")
        grads = dispatcher.send_grad(state, _empty(T, D), source)
        grad_x, grad_weight = dispatcher.return_grad(state, _empty(R, D), _empty(R, dtype=torch.float32))
    assert len(rows) == len(grads) == len(by_row) == R and out.shape == (T, D)
    assert (kept is None) == (weight_at != "source") and (kept is None or kept.shape[:2] == (T, K))
    assert grad_x is not None and grad_x.shape == (T, D)
    assert grad_weight is not None and grad_weight.shape == (T, K)
    assert dispatcher.watch.exchanged == 6 + (weight_at == "output")


@pytest.mark.parametrize(
    "look",
    [
        lambda x: int(x.sum()),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: x.tolist(),
        lambda x: x.new_tensor([1.0, 2.0]),
        lambda x: torch.tensor([1, 2], device=x.device),
        lambda x: torch.arange(3).to(x.device),
        lambda x: torch.repeat_interleave(x.long()),
    ],
)
def test_a_look_at_the_device_is_seen_here(look: Any) -> None:
    """Catches a check that passes whatever the movements do."""
    with pytest.raises((RuntimeError, NotImplementedError)), no_copies():
        look(_empty(4, dtype=torch.float32))


def test_sums_of_records_are_those_of_rows() -> None:
    """Catches a device for which rows have a kernel and records have none, and a kernel where there is no Triton."""
    assert mxfp8_reduce.has_kernel is reduce.has_kernel and reduce.has_kernel(_empty(1, 1), M)
    assert not reduce.has_kernel(_empty(1, 1), reduce.MAX_PEERS + 1)
    with mock.patch("importlib.util.find_spec", return_value=None):
        assert not reduce.has_kernel(_empty(1, 1), M)


class _Stuck:
    """A group whose collective does not end."""

    def settle(self) -> None:
        raise HeapTimeout("stuck")


def _foreign(offsets: Tensor) -> Any:
    return ForeignExperts(lambda rows, *_: rows)(Dispatched(_empty(R, D), _empty(R), offsets, R), "output")


@pytest.mark.parametrize(
    "look",
    [
        lambda offsets: HostLoop(offsets, R),
        lambda offsets: Sm100TE.pack_groups(None, _empty(R, D), offsets),
        _foreign,
    ],
    ids=["a GEMM per expert", "groups of whole tiles", "experts of someone else"],
)
def test_who_looks_at_the_device_settles_first(look: Any) -> None:
    """Catches experts that read their row counts behind an exchange with a dead peer, without a time-out."""
    stuck = _Stuck()
    watch._watching.add(stuck)  # type: ignore[arg-type]
    try:
        with pytest.raises(HeapTimeout, match="stuck"):
            look(_empty(E // M + 1, dtype=torch.int64))
    finally:
        watch._watching.discard(stuck)  # type: ignore[arg-type]
