"""The route map on the device: counts, capacity and destination rows without a look from the host (see routing.py).

    count ─ one program per block of routes: how many routes each expert has in the block
    offsets_and_record ─ exclusive sums over the blocks; the record that ranks exchange
      … sync_triton.send and receive: every rank's record …
    accept ─ one program per expert rank: routes accepted, first rows, own expert offsets
    build ─ one program per block of routes: destination rank and row of every route

Legend: T local tokens, K routes per token, E experts, M ranks, E_l = E / M experts of one rank, RB rows that a rank has
room for. A record is int64 [HEADER + E]: operation, layer, slot handle, T, then the routes asked of each expert.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from dataclasses import dataclass
from fractions import Fraction
from functools import cache

import torch
from torch import Tensor

from ..config import CapacityConfig
from .fast_launch import fast
from .triton_common import cdiv, next_power_of_2, require_contiguous, tl, triton

BLOCK = 256  # routes of one program
HEADER = 4  # words of a record before the counts
HANDLE, TOKENS = 2, 3  # columns of a record

# Bits of the flags word. They stay set until the host clears them.
OVERFLOW = 1  # dropless: more rows for some rank than it has room for; the routes beyond are dropped
BAD_ID = 2  # an expert id outside [−1, E); taken as −1
DISAGREE = 4  # the ranks' records are of different operations or layers; nothing is routed

LIMB = 10**6  # the capacity factor is multiplied in decimals of this many units (see routing.py)
LIMBS = 4

_OVERFLOW, _BAD_ID, _DISAGREE = tl.constexpr(OVERFLOW), tl.constexpr(BAD_ID), tl.constexpr(DISAGREE)
_HEADER, _TOKENS, _LIMB = tl.constexpr(HEADER), tl.constexpr(TOKENS), tl.constexpr(LIMB)


@dataclass(frozen=True)
class DeviceMap:
    """``routing.RouteMap`` in memory given in advance, and what the kernels need beside it.

    dest_rank, dest_row  int32 [T, K]; counts, accepted  int64 [M, E]; tokens  int64 [M]; offsets  int64 [E_l + 1]
    first_row            int64 [E]: first row of this rank's routes to each expert
    block_counts         int32 [blocks, E], blocks = ``blocks_of(T, K)``
    flags                int32 [1]: OVERFLOW, BAD_ID, DISAGREE
    """

    dest_rank: Tensor
    dest_row: Tensor
    counts: Tensor
    accepted: Tensor
    tokens: Tensor
    offsets: Tensor
    first_row: Tensor
    block_counts: Tensor
    flags: Tensor

    @staticmethod
    def empty(
        num_tokens: int,
        top_k: int,
        num_experts: int,
        world: int,
        device: torch.device | str,
        flags: Tensor | None = None,
    ) -> "DeviceMap":
        def ints(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        return DeviceMap(
            dest_rank=ints(num_tokens, top_k, dtype=torch.int32),
            dest_row=ints(num_tokens, top_k, dtype=torch.int32),
            counts=ints(world, num_experts),
            accepted=ints(world, num_experts),
            tokens=ints(world),
            offsets=ints(num_experts // world + 1),
            first_row=ints(num_experts),
            block_counts=ints(blocks_of(num_tokens, top_k), num_experts, dtype=torch.int32),
            flags=torch.zeros(1, dtype=torch.int32, device=device) if flags is None else flags,
        )


def blocks_of(num_tokens: int, top_k: int) -> int:
    """Programs that share the routes of ``num_tokens`` tokens."""
    return -(-num_tokens * top_k // BLOCK)


@triton.jit
def _expert_ids(topk_idx, token_stride, route_stride, first, routes, K: tl.constexpr, SIZE: tl.constexpr):
    """Ids of routes [first, first + SIZE) in t·K+k order as they were given, −1 past the last route."""
    r = first + tl.arange(0, SIZE)
    at = (r // K).to(tl.int64) * token_stride + (r % K) * route_stride
    return tl.load(topk_idx + at, mask=r < routes, other=-1)


@triton.jit
def _checked(ids, E: tl.constexpr):
    """Ids as int32, −1 for those outside [0, E)."""
    return tl.where((ids >= 0) & (ids < E), ids, -1).to(tl.int32)


@fast
@triton.jit(do_not_specialize=["routes"])
def _count(
    topk_idx,
    token_stride,
    route_stride,
    routes,
    block_counts,
    flags,
    E: tl.constexpr,
    K: tl.constexpr,
    SIZE: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    block = tl.program_id(0)
    given = _expert_ids(topk_idx, token_stride, route_stride, block * SIZE, routes, K, SIZE)
    if tl.sum(((given < -1) | (given >= E)).to(tl.int32), 0) > 0:
        tl.atomic_or(flags, _BAD_ID)
    ids = _checked(given, E)
    for start in range(0, E, EXPERTS):
        expert = start + tl.arange(0, EXPERTS)
        found = tl.sum((ids[:, None] == expert[None, :]).to(tl.int32), 0)
        tl.store(block_counts + block.to(tl.int64) * E + expert, found, mask=expert < E)


def count(topk_idx: Tensor, block_counts: Tensor, flags: Tensor) -> None:
    """Routes of every (block of routes, expert) into ``block_counts`` int32 [blocks, E].

    ``topk_idx`` int32 or int64 [T, K], any strides; an id outside [−1, E) counts as −1 and sets BAD_ID.
    """
    num_tokens, top_k = topk_idx.shape
    num_experts = block_counts.shape[1]
    if block_counts.shape[0] != blocks_of(num_tokens, top_k) or not block_counts.is_contiguous():
        raise ValueError(
            f"block_counts {list(block_counts.shape)} must be contiguous [{blocks_of(num_tokens, top_k)}, E] for "
            f"{num_tokens} tokens of top-{top_k}"
        )
    if not num_tokens:
        return
    _count[(block_counts.shape[0],)](
        topk_idx,
        topk_idx.stride(0),
        topk_idx.stride(1),
        num_tokens * top_k,
        block_counts,
        flags,
        E=num_experts,
        K=top_k,
        SIZE=BLOCK,
        EXPERTS=min(32, next_power_of_2(num_experts)),
        num_warps=4,
    )


@fast
@triton.jit(do_not_specialize=["blocks", "operation", "layer", "handle", "tokens"])
def _offsets_and_record(
    block_counts,
    blocks,
    record,
    operation,
    layer,
    handle,
    tokens,
    E: tl.constexpr,
    ROWS: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    expert = tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS)
    total = tl.zeros((EXPERTS,), tl.int32)
    for start in range(0, blocks, ROWS):
        block = start + tl.arange(0, ROWS)
        cells = block_counts + block.to(tl.int64)[:, None] * E + expert[None, :]
        inside = (block[:, None] < blocks) & (expert[None, :] < E)
        found = tl.load(cells, mask=inside, other=0)
        tl.store(cells, tl.cumsum(found, 0) - found + total[None, :], mask=inside)
        total += tl.sum(found, 0)
    tl.store(record + _HEADER + expert, total.to(tl.int64), mask=expert < E)
    if tl.program_id(0) == 0:
        tl.store(record, operation + tl.zeros((), tl.int64))
        tl.store(record + 1, layer + tl.zeros((), tl.int64))
        tl.store(record + 2, handle + tl.zeros((), tl.int64))
        tl.store(record + 3, tokens + tl.zeros((), tl.int64))


def offsets_and_record(block_counts: Tensor, record: Tensor, header: tuple[int, int, int, int]) -> None:
    """Turn ``block_counts`` into exclusive sums over the blocks, in place, and fill ``record`` (int64 [HEADER + E]).

    ``header``: operation, layer (a number that stands for its name), handle of the leased slot, T.
    """
    blocks, num_experts = block_counts.shape
    if record.numel() < HEADER + num_experts:
        raise ValueError(f"a record of {num_experts} experts has {HEADER + num_experts} words, not {record.numel()}")
    experts = min(16, next_power_of_2(num_experts))
    _offsets_and_record[(cdiv(num_experts, experts),)](
        block_counts, blocks, record, *header, E=num_experts, ROWS=256, EXPERTS=experts, num_warps=4
    )


@triton.jit
def _times_limb(number, limb, carry, below):
    """One step of a schoolbook multiplication by decimals, last ones first; ``below``: something was cut off."""
    carry = number * limb + carry
    below = below | (carry % _LIMB != 0)
    return carry // _LIMB, below


@triton.jit
def _quota(
    number,
    divisor,
    WHOLE: tl.constexpr,
    LIMB0: tl.constexpr,
    LIMB1: tl.constexpr,
    LIMB2: tl.constexpr,
    LIMB3: tl.constexpr,
):
    """ceil(number · factor / divisor) exactly, for int64 numbers >= 0 below 2^43."""
    carry = number * 0
    below = number < 0
    carry, below = _times_limb(number, LIMB3, carry, below)
    carry, below = _times_limb(number, LIMB2, carry, below)
    carry, below = _times_limb(number, LIMB1, carry, below)
    carry, below = _times_limb(number, LIMB0, carry, below)
    return (number * WHOLE + carry + below.to(tl.int64) + (divisor - 1)) // divisor


@triton.jit
def _clamped(asked, ends, quota):
    """Of counts taken in order, which end at ``ends``, the part below ``quota``."""
    return tl.minimum(ends, quota) - tl.minimum(ends - asked, quota)


@fast
@triton.jit(do_not_specialize=["stride", "rank", "bound"])
def _accept(
    records,
    stride,
    rank,
    bound,
    counts,
    accepted,
    tokens_out,
    offsets,
    first_row,
    flags,
    POLICY: tl.constexpr,
    WHOLE: tl.constexpr,
    LIMB0: tl.constexpr,
    LIMB1: tl.constexpr,
    LIMB2: tl.constexpr,
    LIMB3: tl.constexpr,
    M: tl.constexpr,
    E: tl.constexpr,
    K: tl.constexpr,
    SOURCES: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    local: tl.constexpr = E // M
    expert_rank = tl.program_id(0)
    s = tl.arange(0, SOURCES)
    i = tl.arange(0, EXPERTS)
    inside = (i[:, None] < local) & (s[None, :] < M)
    own = records + rank * stride
    other_operation = tl.load(records + s * stride, mask=s < M, other=0) != tl.load(own)
    other_layer = tl.load(records + s * stride + 1, mask=s < M, other=0) != tl.load(own + 1)
    differ = tl.sum(((other_operation | other_layer) & (s < M)).to(tl.int32), 0)

    # A record that is not of this operation, or was not received (−1), asks for nothing.
    tokens = tl.maximum(tl.load(records + s * stride + _TOKENS, mask=s < M, other=0), 0)
    cells = expert_rank * local + i[:, None]
    asked = tl.load(records + s[None, :] * stride + _HEADER + cells, mask=inside, other=0)
    asked = tl.where(differ == 0, tl.maximum(asked, 0), 0)

    in_order = tl.reshape(asked, [EXPERTS * SOURCES])  # (local expert, source)
    if POLICY == "dropless":
        kept = asked
    elif POLICY == "expert":
        quota = _quota(tokens * K, E, WHOLE, LIMB0, LIMB1, LIMB2, LIMB3)
        kept = tl.minimum(asked, quota[None, :])
    elif POLICY == "source":
        quota = _quota(tokens * K, M, WHOLE, LIMB0, LIMB1, LIMB2, LIMB3)
        kept = _clamped(asked, tl.cumsum(asked, 0), quota[None, :])
    else:
        quota = _quota(tl.sum(tokens, 0) * K, M, WHOLE, LIMB0, LIMB1, LIMB2, LIMB3)
        kept = tl.reshape(_clamped(in_order, tl.cumsum(in_order, 0), quota), [EXPERTS, SOURCES])

    kept_in_order = tl.reshape(kept, [EXPERTS * SOURCES])
    first = tl.reshape(tl.cumsum(kept_in_order, 0) - kept_in_order, [EXPERTS, SOURCES])
    rows = tl.sum(kept_in_order, 0)

    tl.store(counts + s[None, :] * E + cells, asked, mask=inside)
    tl.store(accepted + s[None, :] * E + cells, kept, mask=inside)
    tl.store(first_row + cells + 0 * s[None, :], first, mask=inside & (s[None, :] == rank))
    if expert_rank == rank:
        tl.store(offsets + i[:, None] + 0 * s[None, :], tl.minimum(first, bound), mask=inside & (s[None, :] == 0))
        tl.store(offsets + local, tl.minimum(rows, bound))
    if expert_rank == 0:
        tl.store(tokens_out + s, tokens, mask=s < M)
        if differ > 0:
            tl.atomic_or(flags, _DISAGREE)
    if rows > bound:
        tl.atomic_or(flags, _OVERFLOW)


def accept(records: Tensor, out: DeviceMap, *, rank: int, capacity: CapacityConfig, top_k: int, bound: int) -> None:
    """Capacity applied to the exchanged ``records`` (int64 [M, >= HEADER + E]): fills counts, accepted, tokens, offsets
    and first_row of ``out``.

    ``bound``: RB. Offsets are cut there, and OVERFLOW is set on every rank if any rank would have more rows. Raises
    ValueError for a capacity factor of more than 24 decimals.
    """
    world, num_experts = out.counts.shape
    if records.shape[0] != world or records.shape[1] < HEADER + num_experts or records.stride(1) != 1:
        raise ValueError(f"records {list(records.shape)} must be [{world}, >= {HEADER + num_experts}]")
    whole, limbs = _limbs(capacity.factor, num_experts)
    _accept[(world,)](
        records,
        records.stride(0),
        rank,
        bound,
        out.counts,
        out.accepted,
        out.tokens,
        out.offsets,
        out.first_row,
        out.flags,
        POLICY=capacity.policy,
        WHOLE=whole,
        LIMB0=limbs[0],
        LIMB1=limbs[1],
        LIMB2=limbs[2],
        LIMB3=limbs[3],
        M=world,
        E=num_experts,
        K=top_k,
        SOURCES=next_power_of_2(world),
        EXPERTS=next_power_of_2(num_experts // world),
        num_warps=4,
    )


@cache
def holds(factor: float) -> bool:
    """Whether ``accept`` takes this capacity factor: one of at most 24 decimals."""
    return bool(Fraction(str(factor)) * LIMB**LIMBS % 1 == 0)


@cache
def _limbs(factor: float, num_experts: int) -> tuple[int, list[int]]:
    """The decimal factor, at most E, as its whole part and LIMBS groups of six decimals."""
    whole, rest = divmod(min(Fraction(str(factor)), Fraction(num_experts)), 1)
    limbs = []
    for _ in range(LIMBS):
        limb, rest = divmod(rest * LIMB, 1)
        limbs.append(int(limb))
    if rest:
        raise ValueError(f"capacity.factor={factor!r} has more than {6 * LIMBS} decimals; round it")
    return int(whole), limbs


@fast
@triton.jit(do_not_specialize=["routes", "rank", "bound"])
def _build(
    topk_idx,
    token_stride,
    route_stride,
    routes,
    rank,
    bound,
    block_prefix,
    accepted,
    first_row,
    dest_rank,
    dest_row,
    E: tl.constexpr,
    K: tl.constexpr,
    PER_RANK: tl.constexpr,
    SIZE: tl.constexpr,
    STEP: tl.constexpr,
):
    block = tl.program_id(0)
    first = block * SIZE
    r = first + tl.arange(0, SIZE)
    ids = _checked(_expert_ids(topk_idx, token_stride, route_stride, first, routes, K, SIZE), E)
    valid = ids >= 0
    earlier = tl.load(block_prefix + block.to(tl.int64) * E + ids, mask=valid, other=0)
    for start in range(0, SIZE, STEP):
        others = _checked(_expert_ids(topk_idx, token_stride, route_stride, first + start, routes, K, STEP), E)
        before = (first + start + tl.arange(0, STEP))[None, :] < r[:, None]
        earlier += tl.sum(((others[None, :] == ids[:, None]) & before).to(tl.int32), 1)
    quota = tl.load(accepted + rank * E + ids, mask=valid, other=0)
    row = tl.load(first_row + ids, mask=valid, other=0) + earlier
    kept = valid & (earlier < quota) & (row < bound)
    tl.store(dest_rank + r, tl.where(kept, ids // PER_RANK, -1).to(tl.int32), mask=r < routes)
    tl.store(dest_row + r, tl.where(kept, row, -1).to(tl.int32), mask=r < routes)


def build(topk_idx: Tensor, out: DeviceMap, *, rank: int, bound: int) -> None:
    """Destination rank and row of every route into ``out``, after ``offsets_and_record`` and ``accept``.

    ``topk_idx`` as for ``count``. A route whose row would be >= ``bound`` becomes −1.
    """
    require_contiguous(dest_rank=out.dest_rank, dest_row=out.dest_row, block_counts=out.block_counts)
    num_tokens, top_k = topk_idx.shape
    world, num_experts = out.counts.shape
    if not num_tokens:
        return
    _build[(blocks_of(num_tokens, top_k),)](
        topk_idx,
        topk_idx.stride(0),
        topk_idx.stride(1),
        num_tokens * top_k,
        rank,
        bound,
        out.block_counts,
        out.accepted,
        out.first_row,
        out.dest_rank,
        out.dest_row,
        E=num_experts,
        K=top_k,
        PER_RANK=num_experts // world,
        SIZE=BLOCK,
        STEP=32,
        num_warps=4,
    )
