"""Launches that skip Triton's own binding are of the kernel that Triton would have chosen."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")

from ep_plugin.kernels.fast_launch import Kernel, fast  # noqa: E402

INTEGERS = (0, 1, 2, 15, 16, 17, -1, -16, 2**31 - 1, 2**31, 2**31 + 16, -(2**31), -(2**40), 48 << 40)
WORDS = torch.zeros(64, dtype=torch.int64)
TENSORS = (None, WORDS, WORDS[1:], WORDS[2:], WORDS.int(), WORDS.bfloat16()[8:], WORDS.bfloat16()[3:])


def _kernel() -> Any:
    @triton.jit(do_not_specialize=["plain"])
    def copy(source, target, counted, plain, WIDTH: triton.language.constexpr, FORM: triton.language.constexpr = 3):
        pass

    return copy


def _of_triton(kernel: Any) -> Any:
    """What Triton tells kernels of one function apart by, from its own binder for sm_90."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    bind = create_function_from_signature(kernel.signature, kernel.params, make_backend(GPUTarget("cuda", 90, 32)))
    return lambda *arguments, **named: str(bind(*arguments, **named)[1:])


def test_launches_of_one_kind_are_one_kernel_to_triton() -> None:
    """Catches a launch that reuses a kernel compiled for an aligned address, a 1, a multiple of 16, a narrow integer,
    another dtype, None or another constant."""
    jit = _kernel()
    kernel, told = Kernel(jit), _of_triton(jit)
    kinds: dict[Any, str] = {}
    calls = itertools.product(TENSORS, (WORDS, WORDS[1:]), INTEGERS, INTEGERS, (8, 16), ({}, {"num_warps": 8}))
    for source, target, counted, plain, width, options in calls:
        arguments, named = (source, target, counted, plain), {"WIDTH": width, **options}
        kind, values = kernel.kind(arguments, named)
        assert kinds.setdefault(kind, told(*arguments, **named)) == told(*arguments, **named), (arguments, named)
        assert values == [t.data_ptr() if isinstance(t, torch.Tensor) else t for t in arguments]
    assert len(kinds) < 3 * len(set(kinds.values()))  # and not every call is a kind of its own


class _Compiled:
    """Takes a launch as Triton's compiled kernel does."""

    function, packed_metadata = "function", "metadata"

    def __init__(self) -> None:
        self.launches: list[tuple[Any, ...]] = []

    def launch_metadata(self, *arguments: Any) -> str:
        return "told"

    def run(self, *arguments: Any) -> None:
        self.launches.append(arguments)


class _OnGPU(torch.Tensor):
    is_cuda = True  # type: ignore[assignment]


@pytest.mark.parametrize("hooked", [False, True])
def test_the_second_launch_goes_straight_to_the_compiled_kernel(hooked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches arguments out of order, lost constants or grids, and profilers' hooks that are passed by."""
    kernel, compiled, firsts = Kernel(_kernel()), _Compiled(), []

    class Jit:
        params = kernel.jit.params

        def __getitem__(self, grid: Any) -> Any:
            return lambda *arguments, **named: firsts.append((grid, arguments, named)) or compiled

    class Driver:
        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int) -> int:
            return 77

    kernel.jit = Jit()
    monkeypatch.setattr(triton.runtime.driver, "_active", Driver())
    seen: list[Any] = []
    if hooked:
        triton.knobs.runtime.launch_enter_hook.add(seen.append)
    try:
        x, y = WORDS.as_subclass(_OnGPU), WORDS[1:].as_subclass(_OnGPU)
        for grid, number in (((4,), 5), ((7, 2), 6), ((4,), 16)):
            kernel[grid](x, y, number, 9, WIDTH=8, num_warps=2)
    finally:
        if hooked:
            triton.knobs.runtime.launch_enter_hook.remove(seen.append)
    assert [(grid, arguments[2]) for grid, arguments, _ in firsts] == [((4,), 5), ((4,), 16)]
    (launch,) = compiled.launches
    assert launch[:6] == (7, 2, 1, 77, "function", "metadata")
    told, enter, leave, *rest = launch[6:]
    assert (told, enter is None, leave is None) == ("told" if hooked else None, not hooked, not hooked)
    assert rest == [x.data_ptr(), y.data_ptr(), 6, 9, 8, 3]


def test_a_tensor_that_the_gpu_cannot_reach_never_gets_past_triton() -> None:
    """Catches an address of the host's memory that goes to the GPU because a like launch came before."""
    kernel = Kernel(_kernel())
    named = {"WIDTH": 8}
    on_gpu, _ = kernel.kind((WORDS.as_subclass(_OnGPU), WORDS.as_subclass(_OnGPU), 2, 2), named)
    mixed, _ = kernel.kind((WORDS.as_subclass(_OnGPU), WORDS, 2, 2), named)
    assert on_gpu != mixed and "host" in mixed and "host" not in on_gpu

    class Jit:
        params = kernel.jit.params

        def __getitem__(self, grid: Any) -> Any:
            return lambda *arguments, **named: _Compiled()

    kernel.jit = Jit()
    for kind in (on_gpu, mixed):
        kernel._first((1,), (), named, (0, kind))
    assert list(kernel._kinds) == [(0, on_gpu)]


def test_tensors_by_name_are_refused() -> None:
    """Catches a tensor that decides the kind by its identity and would be kept alive by it."""
    with pytest.raises(TypeError, match="WIDTH: tensors are passed by position"):
        Kernel(_kernel())._first((1,), (), {"WIDTH": WORDS}, ())


def test_under_the_interpreter_a_kernel_stays_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a wrapper between the interpreter and its kernels."""
    from ep_plugin.kernels import fast_launch

    monkeypatch.setattr(fast_launch, "INTERPRETED", True)
    jit = _kernel()
    assert fast(jit) is jit
