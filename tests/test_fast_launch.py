"""Launches that skip Triton's own binding are of the kernel that Triton would have chosen."""

from __future__ import annotations

import enum
import itertools
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")

from ep_plugin.kernels.fast_launch import Kernel, fast  # noqa: E402

INTEGERS = (0, 1, 2, 15, 16, 17, -1, -16, 2**31 - 1, 2**31, 2**31 + 16, -(2**31), -(2**40), 48 << 40, 2**63, 2**64 - 1)
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


def test_constants_and_numbers_that_are_equal_but_not_alike_are_other_kinds() -> None:
    """Catches a kernel compiled for 1 that serves 1.0 or True, one for 0.0 that serves -0.0, an integer's for a bool
    or a float, and constants that are told apart at every launch though they are alike."""
    jit = _kernel()
    kernel, told = Kernel(jit), _of_triton(jit)
    constants = (1, True, 1.0, 0, False, 0.0, -0.0, float("nan"), None, "1", "nan", triton.language.float32)
    numbers = (1, True, 1.0, 0, False, 0.0, 16, 16.0)
    kinds: dict[Any, str] = {}
    for width, form, counted, plain in itertools.product(constants, constants, numbers, numbers):
        arguments, named = (WORDS, None, counted, plain), {"WIDTH": width, "FORM": form}
        said = told(*arguments, **named)
        assert kinds.setdefault(kernel.kind(arguments, named)[0], said) == said, (arguments, named)
    assert len(set(kinds.values())) <= len(kinds) <= 2 * len(set(kinds.values()))
    nan, other = ({"WIDTH": float("nan")} for _ in range(2))
    assert kernel.kind((), nan) == kernel.kind((), other)


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
        params, arg_names = kernel.jit.params, kernel.jit.arg_names

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
    calls = [(WORDS.as_subclass(_OnGPU), WORDS.as_subclass(_OnGPU), 2, 2), (WORDS.as_subclass(_OnGPU), WORDS, 2, 2)]
    on_gpu, mixed = (kernel.kind(arguments, named)[0] for arguments in calls)
    assert on_gpu != mixed and "host" in mixed and "host" not in on_gpu

    kernel.jit = _jit_of(kernel, _Compiled())
    for arguments, kind in zip(calls, (on_gpu, mixed), strict=True):
        kernel._first((1,), arguments, named, (0, kind))
    assert list(kernel._kinds) == [(0, on_gpu)]


def _jit_of(kernel: Kernel, compiled: Any) -> Any:
    """Triton's side of ``kernel``, whose compiler gives ``compiled``."""

    class Jit:
        params, arg_names = kernel.jit.params, kernel.jit.arg_names

        def __getitem__(self, grid: Any) -> Any:
            return lambda *arguments, **named: compiled

    return Jit()


def test_a_kernel_that_was_not_compiled_is_not_launched_next_time() -> None:
    """Catches the None that Triton gives when its hook took the compilation over, kept as a kernel."""
    kernel = Kernel(_kernel())
    kernel.jit = _jit_of(kernel, None)
    kernel._first((1,), (None, None, 2, 2), {"WIDTH": 8}, (0, ()))
    assert not kernel._kinds


class _Phase(enum.IntEnum):
    FIRST = 1


@pytest.mark.parametrize(
    ("arguments", "named", "message"),
    [
        ((WORDS, None, 2), {}, "3 arguments by position; 4 are: source, target, counted, plain"),
        ((WORDS, None, 2), {"plain": 2}, "3 arguments by position"),
        ((WORDS, None, 2, 2, 8), {}, "5 arguments by position"),
        ((WORDS, None, 2, 2, 8, 3, 5), {}, "7 arguments by position"),
        ((WORDS, None, _Phase.FIRST, 2), {}, "counted=.* is a _Phase, not a tensor"),
        ((WORDS, None, (1, 2), 2), {}, "counted=.* is a tuple"),
        ((WORDS, triton.language.float32, 2, 2), {}, "target=.* is a dtype"),
    ],
)
def test_what_the_kind_does_not_tell_is_refused(arguments: Any, named: dict[str, Any], message: str) -> None:
    """Catches arguments too few or too many, constants by position, and values that Triton specializes on by more than
    their type, which the kind does not hold: a second launch would take the first one's kernel."""
    kernel = Kernel(_kernel())
    named = {"WIDTH": 8, **named}
    with pytest.raises(TypeError, match=message):
        kernel._first((1,), arguments, named, (0, kernel.kind(arguments, named)[0]))


def test_constants_stand_last() -> None:
    """Catches a kernel whose constants would be passed where its arguments are."""

    @triton.jit
    def mixed(source, WIDTH: triton.language.constexpr, bound):
        pass

    with pytest.raises(TypeError, match="mixed: constants are its last parameters"):
        Kernel(mixed)


def test_tensors_by_name_are_refused() -> None:
    """Catches a tensor that decides the kind by its identity and would be kept alive by it."""
    with pytest.raises(TypeError, match="WIDTH: tensors are passed by position"):
        Kernel(_kernel())._first((1,), (WORDS, None, 2, 2), {"WIDTH": WORDS}, ())


def test_under_the_interpreter_a_kernel_stays_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a wrapper between the interpreter and its kernels."""
    from ep_plugin.kernels import fast_launch

    monkeypatch.setattr(fast_launch, "INTERPRETED", True)
    jit = _kernel()
    assert fast(jit) is jit
