"""Scalars that go with rows, as Triton kernels: router weights and their gradients (see reduce.py and put.py).

Legend: T local tokens, K routes per token, M ranks, R expert rows of which buffers hold RB >= R, T_max tokens of a
stripe.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from torch import Tensor

from .fast_launch import fast
from .peers import Peers
from .triton_common import PEER_INTEGERS, Launch, cdiv, peer_address, require_contiguous, rows_at, tl, triton

SCALARS = Launch(1056)
BLOCK = 256


@fast
@triton.jit(do_not_specialize=[*PEER_INTEGERS, "bound", "rank", "world", "t_max"])
def _put_scalars(
    values,
    local_rows,
    tokens,
    base,
    handles,
    handle_stride,
    max_handle,
    offset,
    bound,
    rank,
    world,
    t_max,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * BLOCK
    for i in range(world):
        source = i + tl.zeros((), tl.int64)
        address = peer_address(base, handles, handle_stride, max_handle, offset, source)
        reachable = tl.where(address != 0, t_max, 0)
        routes = tl.minimum(tl.load(tokens + source), reachable) * K
        for tile in range(first, routes, tl.num_programs(0) * BLOCK):
            j = tile + tl.arange(0, BLOCK)
            row = tl.load(local_rows + source * t_max * K + j, mask=j < routes, other=-1).to(tl.int64)
            valid = (row >= 0) & (row < bound)
            value = tl.load(values + row, mask=valid)
            tl.store(rows_at(address, values) + (rank * t_max * K + j), value, mask=valid)


def put_scalars(
    values: Tensor, local_rows: Tensor, tokens: Tensor, peers: Peers, rank: int, *, launch: Launch = SCALARS
) -> None:
    """Return one scalar per route to the token's source, as ``put_scalars_torch``.

    ``values`` [RB]; ``local_rows`` int32 [M, T_max, K]; ``tokens`` int64 [M]; ``peers`` [M, T_max, K] of the dtype of
    ``values``.
    """
    require_contiguous(values=values, local_rows=local_rows, tokens=tokens)
    world, t_max, top_k = local_rows.shape
    if not t_max:
        return
    _put_scalars[launch.grid(cdiv(t_max * top_k, BLOCK))](
        values,
        local_rows,
        tokens,
        *peers.arguments,
        values.shape[0],
        rank,
        world,
        t_max,
        K=top_k,
        BLOCK=BLOCK,
        **launch.options,
    )


@fast
@triton.jit(do_not_specialize=["t_max", "routes"])
def _take_scalars(returned, dest_rank, out, t_max, routes, M: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    for tile in range(start, routes, tl.num_programs(0) * BLOCK):
        i = tile + tl.arange(0, BLOCK)
        rank = tl.load(dest_rank + i, mask=i < routes, other=-1).to(tl.int64)
        value = tl.load(returned + rank * t_max * K + i, mask=(rank >= 0) & (rank < M), other=0)
        tl.store(out + i, value, mask=i < routes)


def take_scalars(returned: Tensor, dest_rank: Tensor, out: Tensor, *, launch: Launch = SCALARS) -> None:
    """``out[t, k]`` [T, K] = the scalar that the route's expert rank returned, as ``take_scalars_torch``.

    ``returned`` [M, T_max, K]; ``dest_rank`` int32 [T, K].
    """
    require_contiguous(returned=returned, dest_rank=dest_rank, out=out)
    if not out.numel():
        return
    world, t_max, top_k = returned.shape
    _take_scalars[launch.grid(cdiv(out.numel(), BLOCK))](
        returned, dest_rank, out, t_max, out.numel(), M=world, K=top_k, BLOCK=BLOCK, **launch.options
    )


@fast
@triton.jit(do_not_specialize=[*PEER_INTEGERS, "num_rows", "routes"])
def _get_values(
    base,
    handles,
    handle_stride,
    max_handle,
    offset,
    num_rows,
    dest_rank,
    dest_row,
    out,
    routes,
    M: tl.constexpr,
    BLOCK: tl.constexpr,
):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    for tile in range(start, routes, tl.num_programs(0) * BLOCK):
        i = tile + tl.arange(0, BLOCK)
        rank = tl.load(dest_rank + i, mask=i < routes, other=-1)
        row = tl.load(dest_row + i, mask=i < routes, other=-1).to(tl.int64)
        value = tl.zeros((BLOCK,), out.dtype.element_ty)
        for p in range(M):
            address = peer_address(base, handles, handle_stride, max_handle, offset, p)
            here = (rank == p) & (row >= 0) & (row < tl.where(address != 0, num_rows, 0))
            got = tl.load(rows_at(address, out) + row, mask=here, other=0)
            value = tl.where(here, got, value)
        tl.store(out + i, value, mask=i < routes)


def get_values(
    peers: Peers, dest_rank: Tensor, dest_row: Tensor, out: Tensor, *, num_rows: int, launch: Launch = SCALARS
) -> None:
    """``out[t, k]`` [T, K] = one scalar pulled per route, as ``get_values_torch``; ``peers`` [num_rows]."""
    require_contiguous(dest_rank=dest_rank, dest_row=dest_row, out=out)
    if not out.numel():
        return
    _get_values[launch.grid(cdiv(out.numel(), BLOCK))](
        *peers.arguments,
        num_rows,
        dest_rank,
        dest_row,
        out,
        out.numel(),
        M=peers.world,
        BLOCK=BLOCK,
        **launch.options,
    )
