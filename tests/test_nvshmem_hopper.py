"""The kernels of ``transport=device`` compiled for Hopper (sm_90) without a GPU, linked with NVSHMEM's device library.

Where NVSHMEM is not installed, functions of the same names take its place: what is tested then is what kernels call,
and with which types. ``EP_PLUGIN_NVSHMEM_BITCODE`` names a libnvshmem_device.bc to link.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tests import dist

pytest.importorskip("triton")

M, T, K, D = 2, 64, 8, 2048
CALLS = {
    "move_rows": {"nvshmemx_putmem_nbi_block", "nvshmemx_getmem_nbi_block"},
    "move_stripes": {"nvshmemx_putmem_nbi_block", "nvshmemx_getmem_nbi_block"},
    "quiet": {"nvshmem_quiet"},
    "post": {"nvshmem_quiet", "nvshmemx_signal_op"},
    "send": {"nvshmem_quiet", "nvshmemx_signal_op", "nvshmemx_putmem_nbi_block"},
    "wait": {"nvshmem_uint64_test", "nvshmem_int64_atomic_compare_swap"},
    "receive": {"nvshmem_uint64_test", "nvshmem_int64_atomic_compare_swap"},
    "set_abort": {"nvshmem_int64_atomic_compare_swap"},
}
FUNCTIONS = {  # their C declarations, as LLVM types
    "nvshmemx_putmem_nbi_block": "void (ptr, ptr, i64, i32)",
    "nvshmemx_getmem_nbi_block": "void (ptr, ptr, i64, i32)",
    "nvshmemx_signal_op": "void (ptr, i64, i32, i32)",
    "nvshmem_int64_atomic_compare_swap": "i64 (ptr, i64, i64, i32)",
    "nvshmem_uint64_test": "i32 (ptr, i32, i64)",
    "nvshmem_quiet": "void ()",
}


def stand_in() -> str:
    """LLVM code of functions that do nothing but cannot be left out or inlined."""
    lines = ['target triple = "nvptx64-nvidia-cuda"', "@seen = global i32 0"]
    for name, kind in FUNCTIONS.items():
        returns, arguments = kind.split(" ", 1)
        zero = {"void": "void", "i64": "i64 0", "i32": "i32 0"}[returns]
        body = f"store volatile i32 1, ptr @seen\n  ret {zero}"
        lines.append(f"define {returns} @{name}{arguments} noinline optnone {{\n  {body}\n}}")
    return "\n".join(lines)


def compile_all(rank: int, world: int, library: str) -> dict[str, list[str]]:
    """PTX of every kernel as its launcher asks for it, by its name."""
    import triton.runtime
    from triton.backends.compiler import GPUTarget
    from triton.runtime.jit import JITFunction

    from ep_plugin.kernels import nvshmem_library, nvshmem_move, nvshmem_sync
    from ep_plugin.kernels import sync_triton as sync
    from ep_plugin.kernels.peers import Peers

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
        if warmup:
            found.setdefault(self.__name__.lstrip("_"), []).append(compiled.asm["ptx"])
        return compiled

    JITFunction.run = compile_only
    nvshmem_library.device_library = lambda: library
    told: list[object] = []
    nvshmem_library._introduce = told.append

    def ints(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)

    rows = torch.zeros((M * T, D), dtype=torch.bfloat16)
    ranks = ints(T, K, dtype=torch.int32)
    slots, scratch = Peers(ints(M), ints(M, 10)[:, 2], 1 << 30, 512), Peers(ints(M), offset=512)
    nvshmem_move.move_rows(rows, slots, 1, ranks, rows=ranks, num_rows=100, repeat=K)
    nvshmem_move.move_rows(rows, scratch, 1, ranks, first_row=64, num_rows=100, row_cycle=T, begin=3, end=5)
    nvshmem_move.move_rows(rows, scratch, 1, ranks, rows=ranks, num_rows=100, get=True)
    nvshmem_move.move_stripes(rows.view(M, T, D), slots, 0, 5000)
    nvshmem_move.move_stripes(rows.view(M, T, D), scratch, 0, 5000, get=True)
    nvshmem_move.quiet()
    words = Peers(ints(M), offset=4096)
    watch = sync.Watch(ints(M, 8)[:, 0], ints(1), words, 1 << 40, ints(3), 10**10, 5)
    signals = nvshmem_sync.LibrarySignals(1)
    signals.post(ints(2), words, ints(1))
    signals.wait(ints(1), watch)
    signals.send(ints(132), ints(2), words, 4096, words, ints(1))
    signals.receive(ints(1), ints(2), ints(2, M, 600), ints(M, 132), watch)
    signals.set_abort(words, 1)
    before = len(told)
    signals.post(ints(2), words, ints(1))
    assert before == len(told) == sum(map(len, found.values())) - 1, "every compiled form is told of the world once"
    return found


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[bool, dict[str, list[str]]]:
    """Whether the library is NVSHMEM's own, and the PTX."""
    library = os.environ.get("EP_PLUGIN_NVSHMEM_BITCODE", "")
    if not library:
        path = tmp_path_factory.mktemp("library") / "stand_in.ll"
        path.write_text(stand_in())
    # The driver that this installs is no good for anything else.
    file = str(Path(library or path).absolute())
    return bool(library), dist.run_apart(compile_all, 1, file, timeout=600, TRITON_INTERPRET="0")[0]


@pytest.mark.slow
def test_every_kernel_compiles_with_the_library(compiled: tuple[bool, dict[str, list[str]]]) -> None:
    """Catches code that only the interpreter accepts, a function that NVSHMEM does not have, and argument types that
    are not those of its declaration (the call is then dropped as undefined)."""
    own, found = compiled
    assert set(found) == set(CALLS)
    for name, sources in found.items():
        text = "\n".join(sources)
        if own:  # inlined, down to what reaches another node
            assert "nvshmemi_device_state_d" in text, name
            if name.startswith("move"):
                assert "nvshmemi_transfer_rma_nbi" in text, name
        else:
            called = {function for function in FUNCTIONS if f"call.uni {function}" in text or f"{function}, (" in text}
            assert called == CALLS[name], name
