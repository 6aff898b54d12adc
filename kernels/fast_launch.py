"""Launches of Triton kernels that cost the host less than Triton's own.

A training step launches dozens of small kernels, and the host must not be what the GPU waits for. Triton binds,
specializes and looks up every launch anew, in Python; here a launch is looked up by what Triton specializes on, and
goes straight to the compiled kernel's launcher (``CompiledKernel.run``). The first launch of each kind is Triton's.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from typing import Any

from torch import Tensor

from .triton_common import INTERPRETED, triton


class Kernel:
    """A Triton kernel, launched like it: ``kernel[grid](*arguments, CONSTANT=...)``.

    Constants stand last, and are passed by name like compiler options; all else by position: tensors, numbers, None.
    Triton's checks of the globals that a kernel reads, and its hooks before a run, are those of the first launch of a
    kind."""

    def __init__(self, jit: Any) -> None:
        self.jit = jit
        constant = [p.is_constexpr for p in jit.params]
        if constant != sorted(constant):
            raise TypeError(f"{jit.__name__}: constants are its last parameters")
        self._by_position = constant.count(False)
        fixed = jit.do_not_specialize
        self._plain = [i in fixed or name in fixed for i, name in enumerate(jit.arg_names)]
        self._kinds: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments, **named: self._launch(grid, arguments, named)

    def kind(self, arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], list[Any]]:
        """What decides which compiled kernel serves these arguments, and the arguments as its launcher takes them,
        tensors as addresses.

        Launches of one kind are alike to Triton: it tells tensors apart by dtype and by whether they start at a
        multiple of 16 bytes, integers by width and, where it may specialize on them, by being 1 or a multiple of 16,
        and constants by how they are written: 1, True and 1.0 are three, and so are 0.0 and -0.0 two. It also refuses
        tensors that the GPU cannot reach.
        """
        kind: list[Any] = []
        values: list[Any] = []
        tell, put = kind.append, values.append
        for argument, plain in zip(arguments, self._plain, strict=False):
            if type(argument) is int:
                put(argument)
                wide = 0 if -0x80000000 <= argument <= 0x7FFFFFFF else 1 + (argument >> 63 > 0)
                tell(wide if plain else (wide, argument == 1, argument & 15 == 0))
            elif argument is None:
                put(None)
                tell(None)
            elif isinstance(argument, Tensor):
                address = argument.data_ptr()
                put(address)
                tell(argument.dtype)
                if address & 15:
                    tell("unaligned")
                if not argument.is_cuda:  # the launcher asks nobody whether it can reach an address
                    tell("pinned" if argument.is_pinned() else "host")
            else:
                put(argument)
                tell(type(argument))
        constants = tuple(named.values())
        types = tuple(map(type, constants))
        if float in types:
            constants = tuple(map(str, constants))
        return (*kind, tuple(named), constants, types), values

    def _launch(self, grid: tuple[int, ...], arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        driver = triton.runtime.driver.active
        kind, values = self.kind(arguments, named)
        device = driver.get_current_device()
        found = self._kinds.get((device, kind))
        if found is None:
            self._first(grid, arguments, named, (device, kind))
            return
        compiled, constants = found
        width, height, depth = (*grid, 1, 1)[:3]
        stream = driver.get_current_stream(device)
        enter, leave = triton.knobs.runtime.launch_enter_hook, triton.knobs.runtime.launch_exit_hook
        told = None
        if enter.calls or leave.calls:  # a profiler of Triton's
            told = compiled.launch_metadata(grid, stream, *values, *constants)
        else:
            enter = leave = None
        compiled.run(
            width, height, depth, stream, compiled.function, compiled.packed_metadata, told, enter, leave,
            *values, *constants,
        )  # fmt: skip

    def _first(self, grid: Any, arguments: tuple[Any, ...], named: dict[str, Any], kind: tuple[Any, ...]) -> None:
        for name, value in named.items():
            if isinstance(value, Tensor):
                raise TypeError(f"{name}: tensors are passed by position")
        names = self.jit.arg_names[: self._by_position]
        if len(arguments) != len(names):
            raise TypeError(f"{len(arguments)} arguments by position; {len(names)} are: {', '.join(names)}")
        for name, value in zip(names, arguments, strict=True):
            # Of anything else the kind holds the type alone, and Triton may specialize on its value.
            if value is not None and type(value) not in (int, float, bool) and not isinstance(value, Tensor):
                raise TypeError(
                    f"{name}={value!r} is a {type(value).__name__}, not a tensor, an int, a float or a bool"
                )
        compiled = self.jit[grid](*arguments, **named)
        if compiled is not None and "host" not in kind[1]:  # a hook of Triton's may have kept it from compiling
            rest = self.jit.params[len(arguments) :]
            self._kinds[kind] = (compiled, tuple(named.get(p.name, p.default) for p in rest))


def fast(jit: Any) -> Any:
    """Decorator of a ``triton.jit`` function that the host launches (not of those that kernels call). Under Triton's
    interpreter it stays what it is."""
    return jit if INTERPRETED else Kernel(jit)
