"""NVSHMEM's device functions as Triton kernels call them: put, get, signal, quiet, compare and swap.

They name a remote place by the address of the same place in our own memory (symmetric) and the number of the rank (PE)
it is at, so they need no peer pointers: NVSHMEM copies through the link where it can and hands the transfer to a
network card where it cannot. Both ends must be symmetric memory.

Under Triton's interpreter there is no NVSHMEM. A stand-in then copies through ``base``, the table of every rank's
address of the region, which is otherwise not read except for our own entry.

Kernels that call these functions are decorated with ``library_kernel``.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from pathlib import Path
from typing import Any

from .triton_common import INTERPRETED, PEER_ALIGNMENT, next_power_of_2, tl, triton

_SIGNAL_SET = tl.constexpr(9)  # NVSHMEM_SIGNAL_SET
_CMP_GE = tl.constexpr(5)  # NVSHMEM_CMP_GE
_WARP = 32


def _declare(symbol: str, *types: str):
    """A device function of NVSHMEM. What its C declaration returns is not used."""
    dtypes = {tuple(tl.dtype(t) for t in types): (symbol, tl.dtype("int32"))}

    def call(arguments, semantic):
        return tl.core.extern_elementwise("", "", arguments, dtypes, is_pure=False, _semantic=semantic)

    return call


_putmem = _declare("nvshmemx_putmem_nbi_block", "int64", "int64", "int64", "int32")
_getmem = _declare("nvshmemx_getmem_nbi_block", "int64", "int64", "int64", "int32")
_signal_op = _declare("nvshmemx_signal_op", "int64", "int64", "int32", "int32")
_cas = _declare("nvshmem_int64_atomic_compare_swap", "int64", "int64", "int64", "int32")
_test = _declare("nvshmem_uint64_test", "int64", "int32", "int64")
_quiet = _declare("nvshmem_quiet")


@tl.core.extern
def _put_extern(dest, source, nbytes, pe, _semantic=None):
    return _putmem([dest, source, nbytes, pe], _semantic)


@tl.core.extern
def _get_extern(dest, source, nbytes, pe, _semantic=None):
    return _getmem([dest, source, nbytes, pe], _semantic)


@tl.core.extern
def _signal_extern(word, value, op, pe, _semantic=None):
    return _signal_op([word, value, op, pe], _semantic)


@tl.core.extern
def _cas_extern(word, wanted, value, pe, _semantic=None):
    return _cas([word, wanted, value, pe], _semantic)


@tl.core.extern
def _test_extern(word, compare, value, _semantic=None):
    return _test([word, compare, value], _semantic)


@tl.core.extern
def _quiet_extern(_semantic=None):
    return _quiet([], _semantic)


@triton.jit
def _translated(address, base, me, pe):
    """The stand-in's peer address of a symmetric one."""
    return address - tl.load(base + me) + tl.load(base + pe)


@triton.jit
def _copy(dest, source, nbytes):
    """The stand-in's transfer, byte by byte."""
    to, start = dest.to(tl.pointer_type(tl.int8), bitcast=True), source.to(tl.pointer_type(tl.int8), bitcast=True)
    for tile in range(0, nbytes, 1024):
        i = tile + tl.arange(0, 1024)
        tl.store(to + i, tl.load(start + i, mask=i < nbytes), mask=i < nbytes)


@triton.jit
def put_bytes(dest, source, nbytes, pe, base, me):
    """Start to copy ``nbytes`` (int64) from our ``source`` to ``dest`` at rank ``pe`` (int32), by all threads of the
    program. Addresses are int64. Done, at both ends, after a later ``quiet``."""
    if INTERPRETED:
        _copy(_translated(dest, base, me, pe), source, nbytes)
    else:
        _put_extern(dest, source, nbytes, pe)


@triton.jit
def get_bytes(dest, source, nbytes, pe, base, me):
    """As ``put_bytes``, from ``source`` at rank ``pe`` into our ``dest``."""
    if INTERPRETED:
        _copy(dest, _translated(source, base, me, pe), nbytes)
    else:
        _get_extern(dest, source, nbytes, pe)


@triton.jit
def quiet():
    """Wait until every transfer that this rank started is done and visible where it went."""
    if not INTERPRETED:
        _quiet_extern()


@triton.jit
def signal_ranks(word, value, base, me, M: tl.constexpr, LANES: tl.constexpr):
    """Store ``value`` in the symmetric int64 ``word`` at every rank. A program of one warp, one rank a lane; lanes
    without a rank store it in our own word once more, because a device function cannot be masked."""
    lane = tl.arange(0, LANES)
    pe = tl.where(lane < M, lane, me).to(tl.int32)
    words = word + tl.zeros((LANES,), tl.int64)
    values = value + tl.zeros((LANES,), tl.int64)
    if INTERPRETED:
        there = _translated(words, base, me, pe).to(tl.pointer_type(tl.int64), bitcast=True)
        tl.atomic_xchg(there, values, sem="release", scope="sys")
    else:
        _signal_extern(words, values, tl.full((LANES,), _SIGNAL_SET, tl.int32), pe)


@triton.jit
def set_where_zero(word, value, base, me, M: tl.constexpr, LANES: tl.constexpr):
    """Store ``value`` in the symmetric int64 ``word`` at every rank where it is 0; lanes as in ``signal_ranks``."""
    lane = tl.arange(0, LANES)
    pe = tl.where(lane < M, lane, me).to(tl.int32)
    words = word + tl.zeros((LANES,), tl.int64)
    values = value + tl.zeros((LANES,), tl.int64)
    nothing = tl.zeros((LANES,), tl.int64)
    if INTERPRETED:
        there = _translated(words, base, me, pe).to(tl.pointer_type(tl.int64), bitcast=True)
        tl.atomic_cas(there, nothing, values, scope="sys")
    else:
        _cas_extern(words, nothing, values, pe)


@triton.jit
def see_arrivals(word, value):
    """After our symmetric int64 ``word`` was seen to be ≥ ``value``: what came before the signal is visible, also
    where a network card wrote it."""
    if not INTERPRETED:
        _test_extern(word, tl.full((), _CMP_GE, tl.int32), value)


@triton.jit
def symmetric_address(base, handles, handle_stride, max_handle, offset, me, rank):
    """Our own address of the place that is ``rank``'s part (see Peers), 0 if it advertised no slot."""
    address = tl.load(base + me) + offset
    if handles is not None:
        handle = tl.load(handles + rank * handle_stride)
        good = (handle >= 0) & (handle <= max_handle) & (handle % PEER_ALIGNMENT == 0)
        address = tl.where(good, address + handle, 0)
    return address


class LibraryKernel:
    """A Triton kernel linked with NVSHMEM's device library. The module of each compiled form is told the addresses of
    our NVSHMEM world before its first launch. Launch it as a kernel: ``kernel[grid](…)``."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._known: set[int] = set()  # modules that know the world
        self._libraries: dict[str, str] | None = None
        _kernels.append(self)

    def __getitem__(self, grid: tuple[int, ...]):
        if INTERPRETED.value:
            return self._kernel[grid]
        return lambda *args, **options: self._launch(grid, args, options)

    def _launch(self, grid: tuple[int, ...], args: tuple[Any, ...], options: dict[str, Any]) -> None:
        if self._libraries is None:
            self._libraries = {"libnvshmem_device": device_library()}
        options["extern_libs"] = self._libraries
        compiled = self._kernel.run(*args, grid=grid, warmup=True, **options)
        if compiled is None:
            raise RuntimeError(f"Triton did not compile {self._kernel.__name__}")
        if id(compiled) not in self._known:
            _introduce(compiled)
            self._known.add(id(compiled))
        self._kernel.run(*args, grid=grid, warmup=False, **options)

    def forget(self) -> None:
        """The NVSHMEM world has ended: modules must be told of the next one."""
        self._known.clear()


_kernels: list[LibraryKernel] = []


def library_kernel(kernel: Any) -> LibraryKernel:
    """Decorator of a ``triton.jit`` function that calls NVSHMEM's device functions."""
    return LibraryKernel(kernel)


def forget_world() -> None:
    """Call it when the NVSHMEM world is finalised."""
    for kernel in _kernels:
        kernel.forget()


def device_library() -> str:
    """The path of NVSHMEM's bitcode for GPUs, beside the host library of this process, whose version it must have;
    RuntimeError where it is not installed."""
    with open("/proc/self/maps") as maps:
        loaded = {Path(line.split()[-1]).parent for line in maps if "libnvshmem_host.so" in line}
    for folder in sorted(loaded):
        if (folder / "libnvshmem_device.bc").exists():
            return str(folder / "libnvshmem_device.bc")
    try:
        from nvshmem.core import find_device_bitcode_library
    except ImportError as error:
        raise RuntimeError(
            f"transport='device' needs nvshmem4py with find_device_bitcode_library (0.4 or later): {error}; use"
            " transport='peer'"
        ) from error
    return str(find_device_bitcode_library())


def _introduce(compiled: Any) -> None:
    from nvshmem import bindings

    compiled._init_handles()
    status = bindings.cumodule_init(int(compiled.module))
    if status:
        raise RuntimeError(f"NVSHMEM refused the module of {compiled.name}: status {status}")


def lanes(world: int) -> int:
    """Lanes of a signal to ``world`` ranks: at least a warp, so that no two threads hold the same one."""
    return max(_WARP, next_power_of_2(world))
