"""``deepep_routes`` as Triton kernels; nothing waits for the device.

Legend: T local tokens, K routes per token, E experts, N lines of metadata, R rows received of which buffers hold
RB >= R, D hidden size.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import torch
from torch import Tensor

from .deepep_routes import BAD_ID, MISPLACED, REPEATED
from .fast_launch import fast
from .triton_common import Launch, cdiv, narrow, next_power_of_2, require_contiguous, tl, triton, widen

__all__ = [
    "arrived",
    "distinct_experts",
    "merge_weights",
    "scale_rows",
    "spread_gradients",
]

ROUTES = Launch(1056)
ROWS = Launch(2112)
TILE = 256

_BAD_ID, _REPEATED, _MISPLACED = tl.constexpr(BAD_ID), tl.constexpr(REPEATED), tl.constexpr(MISPLACED)


@fast
@triton.jit(do_not_specialize=["tokens"])
def _distinct(
    topk_idx,
    token_stride,
    route_stride,
    tokens,
    ids,
    first,
    flags,
    E: tl.constexpr,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    k = tl.arange(0, WIDTH)
    inside = (t < tokens)[:, None] & (k < K)[None, :]
    given = tl.load(topk_idx + t[:, None] * token_stride + k[None, :] * route_stride, mask=inside, other=-1)
    if tl.sum(((given < -1) | (given >= E)).to(tl.int32)) > 0:
        tl.atomic_or(flags, _BAD_ID)
    there = (given >= 0) & (given < E)
    expert = tl.where(there, given, -1).to(tl.int32)
    same = expert[:, :, None] == expert[:, None, :]
    earliest = tl.min(tl.where(same, k[None, None, :], WIDTH), 2)
    earliest = tl.where(there, earliest, -1)
    if tl.sum((there & (earliest != k[None, :])).to(tl.int32)) > 0:
        tl.atomic_or(flags, _REPEATED)
    at = t[:, None] * K + k[None, :]
    tl.store(ids + at, tl.where(earliest == k[None, :], expert, -1).to(tl.int64), mask=inside)
    tl.store(first + at, earliest.to(tl.int32), mask=inside)


def _tokens_of_a_program(top_k: int) -> tuple[int, int]:
    """The power of two that holds K routes, and tokens of which a program compares all pairs of routes."""
    width = next_power_of_2(top_k)
    return width, max(1, 4096 // (width * width))


def distinct_experts(topk_idx: Tensor, num_experts: int, flags: Tensor) -> tuple[Tensor, Tensor]:
    """``distinct_experts_torch``."""
    tokens, top_k = topk_idx.shape
    ids = torch.empty((tokens, top_k), dtype=torch.int64, device=topk_idx.device)
    first = torch.empty((tokens, top_k), dtype=torch.int32, device=topk_idx.device)
    if tokens:
        width, size = _tokens_of_a_program(top_k)
        strides = topk_idx.stride()
        _distinct[(cdiv(tokens, size),)](
            topk_idx, *strides, tokens, ids, first, flags, E=num_experts, K=top_k, WIDTH=width, SIZE=size
        )
    return ids, first


@fast
@triton.jit(do_not_specialize=["tokens"])
def _merge(
    weights, token_stride, route_stride, tokens, first, out, K: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr
):
    t = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    k = tl.arange(0, WIDTH)
    inside = (t < tokens)[:, None] & (k < K)[None, :]
    at = t[:, None] * K + k[None, :]
    target = tl.load(first + at, mask=inside, other=-1)
    value = tl.load(weights + t[:, None] * token_stride + k[None, :] * route_stride, mask=inside, other=0)
    value = widen(value, tl.float32)
    into = target[:, None, :] == k[None, :, None]
    tl.store(out + at, tl.sum(tl.where(into, value[:, None, :], 0.0), 2), mask=inside)


def merge_weights(weights: Tensor, first: Tensor) -> Tensor:
    """``merge_weights_torch``."""
    require_contiguous(first=first)
    tokens, top_k = first.shape
    out = torch.empty((tokens, top_k), dtype=torch.float32, device=first.device)
    if tokens:
        width, size = _tokens_of_a_program(top_k)
        grid = (cdiv(tokens, size),)
        _merge[grid](weights, *weights.stride(), tokens, first, out, K=top_k, WIDTH=width, SIZE=size)
    return out


@fast
@triton.jit(do_not_specialize=["routes"])
def _spread(grads, first, out, routes, K: tl.constexpr, SIZE: tl.constexpr):
    r = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    source = tl.load(first + r, mask=r < routes, other=-1)
    value = tl.load(grads + r // K * K + source, mask=source >= 0, other=0)
    tl.store(out + r, value, mask=r < routes)


def spread_gradients(grads: Tensor, first: Tensor) -> Tensor:
    """``spread_gradients_torch``."""
    require_contiguous(grads=grads, first=first)
    out = torch.empty_like(grads)
    if out.numel():
        grid = (cdiv(out.numel(), TILE),)
        _spread[grid](grads, first, out, out.numel(), K=first.shape[1], SIZE=TILE)
    return out


@fast
@triton.jit(do_not_specialize=["bound", "most"])
def _arrived(
    metadata,
    lines,
    ends,
    offsets,
    routes,
    weights,
    flags,
    bound,
    most,
    K: tl.constexpr,
    LOCAL: tl.constexpr,
    EXPERTS: tl.constexpr,
    SIZE: tl.constexpr,
):
    first, step = tl.program_id(0).to(tl.int64) * SIZE, tl.num_programs(0) * SIZE
    if first == 0:
        e = tl.arange(0, EXPERTS)
        there = tl.load(ends + e, mask=e < LOCAL, other=0).to(tl.int64)
        planned = tl.load(offsets + 1 + e, mask=e < LOCAL, other=0)
        if tl.sum((there != planned).to(tl.int32)) > 0:
            tl.atomic_or(flags, _MISPLACED)
    end = tl.minimum(tl.load(lines), most).to(tl.int64) * K
    for tile in range(first, end, step):
        r = tile + tl.arange(0, SIZE)
        line = metadata + r // K * (K + 2)
        row = tl.load(line + 2 + r % K, mask=r < end, other=-1)
        token = tl.load(line, mask=r < end, other=0).to(tl.int64)
        tl.store(routes + row, token * K + r % K, mask=(row >= 0) & (row < bound))
    rows = tl.load(offsets + LOCAL)
    for tile in range(rows // SIZE * SIZE + first, bound, step):
        i = tile + tl.arange(0, SIZE)
        tail = (i >= rows) & (i < bound)
        tl.store(routes + i, tl.full((SIZE,), -1, tl.int64), mask=tail)
        tl.store(weights + i, tl.zeros((SIZE,), tl.float32), mask=tail)


def arrived(
    metadata: Tensor,
    lines: Tensor,
    ends: Tensor,
    offsets: Tensor,
    routes: Tensor,
    weights: Tensor,
    flags: Tensor,
    *,
    launch: Launch = ROUTES,
) -> None:
    """``arrived_torch``."""
    require_contiguous(metadata=metadata, ends=ends, offsets=offsets, routes=routes, weights=weights)
    count, top_k, bound = metadata.shape[0], metadata.shape[1] - 2, routes.shape[0]
    grid = launch.grid(cdiv(max(count * top_k, bound), TILE))
    local = ends.shape[0]
    _arrived[grid](
        metadata, lines, ends, offsets, routes, weights, flags, bound, count,
        K=top_k, LOCAL=local, EXPERTS=next_power_of_2(local), SIZE=TILE,
    )  # fmt: skip


@fast
@triton.jit(do_not_specialize=["bound"])
def _scale_rows(rows, weights, num_rows, out, bound, D: tl.constexpr, BLOCK: tl.constexpr):
    n = tl.minimum(tl.load(num_rows), bound)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    for row in range(tl.program_id(0).to(tl.int64), n, tl.num_programs(0)):
        value = widen(tl.load(rows + row * D + column, mask=column < D), tl.float32)
        value = value * tl.load(weights + row)
        tl.store(out + row * D + column, narrow(value, out.dtype.element_ty), mask=column < D)


def scale_rows(rows: Tensor, weights: Tensor, num_rows: Tensor, *, launch: Launch = ROWS) -> Tensor:
    """``scale_rows_torch``; ``weights`` float32."""
    require_contiguous(rows=rows, weights=weights)
    out = torch.empty_like(rows)
    bound, width = rows.shape
    if bound:
        block = launch.columns(width)
        grid = (*launch.grid(bound), cdiv(width, block))
        _scale_rows[grid](rows, weights, num_rows, out, bound, D=width, BLOCK=block, **launch.options)
    return out
