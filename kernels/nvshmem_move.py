"""Rows and stripes moved by NVSHMEM's own put and get, as Triton kernels.

Our end is symmetric memory too, which the caller has filled (put) or will read (get). Nothing here is done when a
kernel ends: the next ``post`` or ``quiet`` completes it.

Legend: M ranks; a row is some bytes that travel as one transfer.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from torch import Tensor

from .nvshmem_library import get_bytes, library_kernel, put_bytes, symmetric_address
from .nvshmem_library import quiet as _quiet_ranks
from .peers import Peers
from .triton_common import PEER_INTEGERS, Launch, cdiv, require_contiguous, tl, triton

MOVE = Launch(132, warps=8)
PIECE = 1 << 14  # bytes of a stripe that one program moves at once

_ROWS = [
    "local",
    "me",
    "first_row",
    "num_rows",
    "inner",
    "begin",
    "length",
    "outer",
    "row_bytes",
    "repeat",
    "row_cycle",
]


@library_kernel
@triton.jit(do_not_specialize=[*PEER_INTEGERS, *_ROWS])
def _move_rows(
    local,
    base,
    handles,
    handle_stride,
    max_handle,
    offset,
    me,
    ranks,
    rows,
    first_row,
    num_rows,
    outer,
    inner,
    begin,
    length,
    row_bytes,
    repeat,
    row_cycle,
    M: tl.constexpr,
    GET: tl.constexpr,
):
    nbytes = row_bytes + tl.zeros((), tl.int64)
    for j in range(tl.program_id(0).to(tl.int64), outer * length, tl.num_programs(0)):
        i = j // length * inner + begin + j % length
        rank = tl.load(ranks + i)
        if rows is None:
            row = first_row + i // repeat % row_cycle
        else:
            row = tl.load(rows + i).to(tl.int64)
        if (rank >= 0) & (rank < M) & (row >= 0) & (row < num_rows):
            address = symmetric_address(base, handles, handle_stride, max_handle, offset, me, rank)
            if address != 0:
                here = local + i // repeat * nbytes
                if GET:
                    get_bytes(here, address + row * nbytes, nbytes, rank, base, me)
                else:
                    put_bytes(address + row * nbytes, here, nbytes, rank, base, me)


def move_rows(
    local: Tensor,
    peers: Peers,
    me: int,
    ranks: Tensor,
    *,
    rows: Tensor | None = None,
    first_row: int = 0,
    num_rows: int,
    repeat: int = 1,
    row_cycle: int = 1 << 40,
    begin: int = 0,
    end: int | None = None,
    get: bool = False,
    launch: Launch = MOVE,
) -> None:
    """Item i moves our row i // ``repeat`` to rank ``ranks[i]``, or with ``get`` that rank's row to ours.

    ``local``: symmetric, [rows, …], contiguous. ``peers``: [``num_rows``, …] on each rank, of which only our own entry
    of ``base`` is used. ``ranks`` int32, [outer, inner] or [inner]: −1 for nothing to move; of every outer part only
    items [``begin``, ``end``) are moved. ``rows`` int32 as ``ranks``: the row at the rank; without it that is
    ``first_row`` + (i // ``repeat``) % ``row_cycle``. Rows outside [0, ``num_rows``) are skipped.
    """
    require_contiguous(local=local, ranks=ranks, rows=rows)
    outer, inner = (1, ranks.shape[0]) if ranks.dim() == 1 else ranks.shape
    length = (inner if end is None else min(end, inner)) - begin
    if length <= 0 or not outer:
        return
    _move_rows[launch.grid(outer * length)](
        local.data_ptr(),
        *peers.arguments,
        me,
        ranks,
        rows,
        first_row,
        num_rows,
        outer,
        inner,
        begin,
        length,
        local[0].numel() * local.element_size(),
        repeat,
        row_cycle,
        M=peers.world,
        GET=get,
        num_warps=launch.warps,
    )


@library_kernel
@triton.jit(do_not_specialize=[*PEER_INTEGERS, "local", "me", "local_stride", "nbytes"])
def _move_stripes(
    local,
    local_stride,
    base,
    handles,
    handle_stride,
    max_handle,
    offset,
    me,
    nbytes,
    M: tl.constexpr,
    PIECE: tl.constexpr,
    GET: tl.constexpr,
):
    pieces = (nbytes + PIECE - 1) // PIECE
    for item in range(tl.program_id(0).to(tl.int64), M * pieces, tl.num_programs(0)):
        rank = ((me + 1 + item // pieces) % M).to(tl.int32)
        start = item % pieces * PIECE
        size = tl.minimum(nbytes - start, PIECE)
        address = symmetric_address(base, handles, handle_stride, max_handle, offset, me, rank)
        if address != 0:
            here = local + rank.to(tl.int64) * local_stride + start
            if GET:
                get_bytes(here, address + start, size, rank, base, me)
            else:
                put_bytes(address + start, here, size, rank, base, me)


def move_stripes(
    local: Tensor, peers: Peers, me: int, nbytes: int, *, get: bool = False, launch: Launch = MOVE
) -> None:
    """``nbytes`` from the start of our ``local[p]`` to the start of rank p's part, for every rank p; with ``get`` the
    other way.

    ``local``: symmetric, [M, …], contiguous. ``peers``: as in ``move_rows``.
    """
    require_contiguous(local=local)
    if nbytes <= 0:
        return
    _move_stripes[launch.grid(peers.world * cdiv(nbytes, PIECE))](
        local.data_ptr(),
        local[0].numel() * local.element_size(),
        *peers.arguments,
        me,
        nbytes,
        M=peers.world,
        PIECE=PIECE,
        GET=get,
        num_warps=launch.warps,
    )


@library_kernel
@triton.jit
def _quiet():
    _quiet_ranks()


def quiet() -> None:
    """Every transfer enqueued before is done before what is enqueued next."""
    _quiet[(1,)](num_warps=1)
