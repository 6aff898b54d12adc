"""From unique token rows on the expert rank to rows in expert order, as Triton kernels (see fan_out.py).

Legend: M ranks, T_max tokens of a stripe, K routes per token, R expert rows of which the buffer holds RB >= R, D row
width. A local row outside [0, RB) is no route: it may have been written by a peer that stopped half way.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from torch import Tensor

from .fast_launch import fast
from .triton_common import RANGE_INTEGERS, Launch, cdiv, narrow, require_contiguous, tl, triton, triton_dtype, widen

FAN_OUT = Launch(1 << 15, block=2048)  # one item a program: those beside a slow store must not hold up the rest
FILL = Launch(264)


@fast
@triton.jit(do_not_specialize=[*RANGE_INTEGERS, "bound", "own_rank", "own_tokens"])
def _fan_out(
    stage,
    x_own,
    local_rows,
    tokens,
    rows,
    scale,
    weights,
    weights_out,
    routes_out,
    bound,
    first_source,
    sources,
    world,
    begin,
    length,
    t_max,
    own_rank,
    own_tokens,
    K: tl.constexpr,
    D: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK: tl.constexpr,
):
    blocks: tl.constexpr = (D + BLOCK - 1) // BLOCK
    first = tl.program_id(0).to(tl.int64)
    for i in range(sources):
        source = (first_source + i + tl.zeros((), tl.int64)) % world
        count = tl.minimum(tl.load(tokens + source) - begin, length)
        for item in range(first, count * blocks, tl.num_programs(0)):
            t = begin + item // blocks
            block = item % blocks
            token = source * t_max + t
            wanted = tl.load(local_rows + token * K) >= 0
            for k in tl.static_range(1, K):
                wanted = wanted | (tl.load(local_rows + token * K + k) >= 0)
            if wanted:
                cols = block * BLOCK + tl.arange(0, BLOCK)
                if x_own is None:
                    values = tl.load(stage + token * D + cols, mask=cols < D)
                elif source == own_rank:
                    values = tl.load(x_own + t * D + cols, mask=cols < tl.where(t < own_tokens, D, 0))
                else:
                    values = tl.load(stage + token * D + cols, mask=cols < D)
                for k in tl.static_range(K):
                    row = tl.load(local_rows + token * K + k).to(tl.int64)
                    if (row >= 0) & (row < bound):
                        moved = values
                        if scale is not None:
                            moved = narrow(widen(values, ACC) * tl.load(scale + row), values.dtype)
                        tl.store(rows + row * D + cols, moved, mask=cols < D)
                        if block == 0:
                            if weights is not None:
                                tl.store(weights_out + row, tl.load(weights + token * K + k))
                            if routes_out is not None:
                                tl.store(routes_out + row, token * K + k)


def fan_out(
    stage: Tensor,
    local_rows: Tensor,
    tokens: Tensor,
    rows: Tensor,
    *,
    weights: Tensor | None = None,
    weights_out: Tensor | None = None,
    route_of_row: Tensor | None = None,
    scale: Tensor | None = None,
    x_own: Tensor | None = None,
    own_rank: int = -1,
    first_source: int = 0,
    sources: int | None = None,
    begin: int = 0,
    end: int | None = None,
    launch: Launch = FAN_OUT,
) -> None:
    """Write every staged token to its rows: each row is read once and stored as often as it has routes here.

    ``stage`` [M·T_max, D]; ``local_rows`` int32 [M, T_max, K], −1 = no row here; ``tokens`` int64 [M], T of every
    source; ``rows`` [RB, D] is written where a route says so. Per row also, where given: ``weights_out`` [RB] from
    ``weights`` [M·T_max, K], and ``route_of_row`` int64 [RB] = (source·T_max + t)·K + k. ``scale`` [RB] in the
    accumulation dtype multiplies each row, rounded once. ``x_own`` [T, D]: read the tokens of ``own_rank`` from here
    instead of the stage. Only ``sources`` sources from ``first_source`` on (counted round the end) and tokens
    [``begin``, ``end``) are moved.
    """
    require_contiguous(
        stage=stage, local_rows=local_rows, tokens=tokens, rows=rows, weights=weights, scale=scale, x_own=x_own
    )
    if (weights is None) != (weights_out is None):
        raise ValueError("weights and weights_out go together")
    world, t_max, top_k = local_rows.shape
    sources = world if sources is None else sources
    end = t_max if end is None else min(end, t_max)
    if end <= begin or not sources:
        return
    width = rows.shape[1]
    block = launch.columns(width)
    launch = launch.of_whole_lanes(block, rows.element_size())
    _fan_out[launch.grid((end - begin) * cdiv(width, block))](
        stage,
        x_own,
        local_rows,
        tokens,
        rows,
        scale,
        weights,
        weights_out,
        route_of_row,
        rows.shape[0],
        first_source,
        sources,
        world,
        begin,
        end - begin,
        t_max,
        own_rank,
        0 if x_own is None else x_own.shape[0],
        K=top_k,
        D=width,
        ACC=None if scale is None else triton_dtype(scale.dtype),
        BLOCK=block,
        **launch.options,
    )


@fast
@triton.jit(do_not_specialize=["length", "value"])
def _fill_tail(out, num_rows, length, value, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    end = (length + tl.zeros((), tl.int64)) * WIDTH
    valid = tl.minimum(tl.maximum(tl.load(num_rows), 0) * WIDTH, end)
    start = valid // BLOCK * BLOCK + tl.program_id(0).to(tl.int64) * BLOCK
    for tile in range(start, end, tl.num_programs(0) * BLOCK):
        i = tile + tl.arange(0, BLOCK)
        fill = tl.full((BLOCK,), 0, out.dtype.element_ty) + value
        tl.store(out + i, fill.to(out.dtype.element_ty), mask=(i >= valid) & (i < end))


def fill_tail(out: Tensor, num_rows: Tensor, value: int = 0, *, launch: Launch = FILL) -> None:
    """``out[num_rows:] = value`` where only the device knows ``num_rows`` (int64 [1]): padding of per-row tensors.

    ``out`` [RB] or [RB, D].
    """
    require_contiguous(out=out)
    if not out.numel():
        return
    block = launch.block or 1024
    _fill_tail[launch.grid(cdiv(out.numel(), block))](
        out, num_rows, out.shape[0], value, WIDTH=out.numel() // out.shape[0], BLOCK=block, **launch.options
    )
