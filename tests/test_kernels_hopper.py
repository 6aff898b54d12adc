"""The Triton kernels compiled for Hopper (sm_90) by the compiler alone, without a GPU: what they become in PTX."""

from __future__ import annotations

import itertools
import re

import pytest
import torch

from tests import dist

pytest.importorskip("triton")

K, M, T = 8, 2, 64
WIDTHS = (2048, 4096, 7168, 33)
MOVERS = (
    "put_rows",
    "put_unique",
    "pull_rows",
    "fan_out",
    "pre_reduce_put",
    "sum_partials",
    "get_reduce",
    "copy_prefix",
    "scale_rows",
)
SCALARS = ("put_meta", "put_values", "put_scalars", "take_scalars", "get_values", "fill_tail")
DENSE = ("dense_routes", "dense_routes_backward")
SIGNALS = ("post", "wait", "send", "receive", "set_abort")
ROUTE_MAP = ("count", "offsets_and_record", "accept", "build")
BLOCK = ("send_order", "arrival_order")


def compile_all(rank: int, world: int) -> dict[str, list[str]]:
    """PTX of every kernel as its launcher asks for it, by its name, for bf16 rows of ``WIDTHS[rank]``
    columns."""
    import triton.runtime
    from triton.backends.compiler import GPUTarget
    from triton.runtime.jit import JITFunction

    from ep_plugin.config import CapacityConfig
    from ep_plugin.kernels import (
        block_triton,
        copy_triton,
        dense_routes_triton,
        fan_out_triton,
        pull_triton,
        put_triton,
        reduce_triton,
        scalars_triton,
        scale_rows_triton,
    )
    from ep_plugin.kernels import route_map_triton as route_map
    from ep_plugin.kernels import sync_triton as sync
    from ep_plugin.kernels.peers import Peers
    from ep_plugin.kernels.triton_common import Launch

    width = WIDTHS[rank]

    class Hopper:
        """A driver that knows its target and launches nothing."""

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int) -> int:
            return 0

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", 90, 32)

        def get_active_torch_device(self) -> torch.device:
            return torch.device("cpu")

    triton.runtime.driver.set_active(Hopper())
    found: dict[str, list[str]] = {}
    launch = JITFunction.run

    def compile_only(self, *args, grid, warmup, **kwargs):
        compiled = launch(self, *args, grid=grid, warmup=True, **kwargs)
        found.setdefault(self.__name__.lstrip("_"), []).append(compiled.asm["ptx"])
        return compiled

    JITFunction.run = compile_only

    def ints(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)

    stage, rows = torch.zeros((M * T, width), dtype=torch.bfloat16), torch.zeros((100, width), dtype=torch.bfloat16)
    x = stage[:T]
    local, dest, tokens = ints(M, T, K, dtype=torch.int32), ints(T, K, dtype=torch.int32), ints(M)
    by_route, by_row, by_slot = torch.zeros(T, K), torch.zeros(100), torch.zeros(M, T, K)
    peers = Peers(ints(M), ints(M, 10)[:, 2], 1 << 30, 512)
    words = Peers(ints(M), offset=4096)
    signal = sync.ChunkSignal(2, T, ints(2), words, ints(3, dtype=torch.int32))

    for scale in (None, by_route):
        put_triton.put_rows(x, peers, dest, dest, scale, num_rows=100)
    many = Launch(2, block=1024)
    put_triton.put_rows(x, peers, dest, dest, num_rows=100, launch=many)
    routes = ints(100, dtype=torch.int32)
    for shape in (pull_triton.PULL, Launch(2, warps=32)):
        pull_triton.pull_rows(peers, routes, routes, rows, num_tokens=T, launch=shape)
    put_triton.put_unique(x, peers, dest.long(), 64, experts_per_rank=8, skip_rank=1, signal=signal)
    wide = Launch(2, warps=32, tile=1 << 16)
    put_triton.put_unique(x, peers, dest, 64, skip_rank=1, signal=signal, launch=wide)
    reduce_triton.pre_reduce_put(rows, local, tokens, peers, 1, by_row, signal=signal, launch=wide)
    put_triton.put_meta(dest, dest, by_route, peers, peers, 64)
    for values in (None, by_route):
        put_triton.put_values(values, peers, dest, dest, num_rows=100)
    fan_out_triton.fan_out(
        stage, local, tokens, rows, weights=by_slot, weights_out=by_row, route_of_row=ints(100), x_own=x, own_rank=0
    )
    fan_out_triton.fan_out(stage, local, tokens, rows, scale=by_row)
    fan_out_triton.fill_tail(rows, ints(1))
    scale_rows_triton.scale_rows(rows, by_row, rows, rows.clone(), by_row, ints(1))
    copy_triton.copy_prefix(rows, rows.clone(), ints(1))
    reduce_triton.pre_reduce_put(rows, local, tokens, peers, 1, by_row, signal=signal)
    reduce_triton.sum_partials(stage.view(M, T, width), dest, x)
    reduce_triton.sum_partials(stage.view(M, T, width), dest, x, y=rows, dest_row=dest, weights=by_row, own_rank=1)
    gathered = torch.zeros((T, K, width), dtype=torch.bfloat16)
    reduce_triton.get_reduce(peers, dest, dest, by_route, x, num_rows=100, gathered=gathered)
    scalars_triton.put_scalars(by_row, local, tokens, peers, 1)
    scalars_triton.take_scalars(by_slot, dest, by_route)
    scalars_triton.get_values(peers, dest, dest, by_route, num_rows=100)
    watch = sync.Watch(ints(M, 8)[:, 0], ints(1), words, 1 << 40, ints(3), 10**10, 5)
    sync.post(ints(2), words, ints(1))
    sync.wait(ints(1), watch)
    sync.send(ints(132), ints(2), words, 4096, words, ints(1))
    sync.receive(ints(1), ints(2), ints(2, M, 600), ints(M, 132), watch)
    sync.set_abort(words, 1)
    out = route_map.DeviceMap.empty(T, K, 128, M, "cpu")
    route_map.count(dest.long(), out.block_counts, out.flags)
    route_map.offsets_and_record(out.block_counts, ints(132), (1, 2**31 + 1, 2**40, T))
    for policy in ("dropless", "rank", "source", "expert"):
        route_map.accept(ints(M, 132), out, rank=1, capacity=CapacityConfig(policy), top_k=K, bound=100)
    route_map.build(dest.long(), out, rank=1, bound=100)
    block_triton.send_order(dest.long(), out, dest, ints(T * K), rank=1)
    block_triton.arrival_order(out.accepted, routes, routes, rank=1)
    routing, probs = torch.zeros(T, 128, dtype=torch.bool), torch.zeros(T, 128)
    dense_routes_triton.dense_routes(routing, probs, dest.long(), by_route, dest.view(-1)[:1])
    dense_routes_triton.dense_routes_backward(routing, by_route, probs)
    return found


@pytest.fixture(scope="module")
def compiled() -> dict[int, dict[str, list[str]]]:
    # The driver that this installs is no good for anything else.
    found = dist.run_apart(compile_all, len(WIDTHS), timeout=600, TRITON_INTERPRET="0")
    return dict(zip(WIDTHS, found, strict=True))


def access_bytes(ptx: str, operation: str) -> set[int]:
    """Widths in bytes of the ``ld``s or ``st``s of global memory."""
    found = re.findall(rf"\b{operation}\.global(?:\.v([24]))?\.b(\d+)", ptx)
    return {int(vector or 1) * int(bits) // 8 for vector, bits in found}


@pytest.mark.slow
def test_every_kernel_compiles_for_hopper(compiled: dict[int, dict[str, list[str]]]) -> None:
    """Catches code that only the interpreter accepts."""
    for width, found in compiled.items():
        assert set(found) == {*MOVERS, *SCALARS, *SIGNALS, *ROUTE_MAP, *BLOCK, *DENSE}, f"rows of {width}"


@pytest.mark.slow
@pytest.mark.parametrize("kernel", MOVERS)
def test_rows_move_16_bytes_at_a_time(compiled: dict[int, dict[str, list[str]]], kernel: str) -> None:
    """Catches a lost alignment hint (the compiler then moves 2 bytes at a time, also through peer pointers) and a
    launch whose threads have less than 16 bytes of a block each."""
    for width, operation in itertools.product((2048, 4096, 7168), ("ld", "st")):
        for ptx in compiled[width][kernel]:
            widths = access_bytes(ptx, operation)
            assert 16 in widths and not widths & {1, 2}, f"{kernel} of {width}: {operation} of {sorted(widths)} bytes"
    assert all(2 in access_bytes(ptx, "st") for ptx in compiled[33][kernel]), "rows of 66 bytes lie anywhere"


@pytest.mark.slow
def test_products_and_sums_round_twice(compiled: dict[int, dict[str, list[str]]]) -> None:
    """Catches fused products and flushed subnormals, whose bits are not torch's."""
    weighted = [ptx for name in ("pre_reduce_put", "sum_partials", "get_reduce") for ptx in compiled[4096][name]]
    assert any(re.search(r"\bmul(\.rn)?\.f32", ptx) for ptx in weighted), "the pattern no longer finds products"
    for ptx in weighted:
        assert not re.search(r"\bfma\.rn\.(bf16|f16|f32)", ptx)
    for found in compiled.values():
        for name, sources in found.items():
            assert not any(".ftz" in ptx for ptx in sources), name


@pytest.mark.slow
def test_signals_order_memory_for_the_whole_system(compiled: dict[int, dict[str, list[str]]]) -> None:
    """Catches a signal that only this GPU's memory would be ordered by, and a poll the compiler could hoist."""
    found = compiled[4096]
    for name in ("post", "send"):
        assert "atom.global.sys.release.exch.b64" in found[name][0]
    for name in ("wait", "receive"):
        assert len(re.findall(r"(ld\.global\.sys\.acquire|atom\.global\.sys\.acquire\S*)\.b64", found[name][0])) >= 4
        assert "%globaltimer" in found[name][0] and ".sys.cas.b64" in found[name][0]
    for name in ("put_unique", "pre_reduce_put"):
        assert re.search(r"\.global\.sys\.release\.max\.[su]64", found[name][0]), name
