"""The orders of ``block``'s rows on both sides of its exchange, from a route map on the device (see dispatch/block.py).

    send_order ─ one program per block of routes: rows on the way out lie in (expert, t·K+k) order
    arrival_order ─ a few programs per (source, expert): rows arrive in (source, expert), and experts want (expert,
    source) order

Both follow from the accepted counts and the destination rows by sums over experts alone; nothing is sorted.

Legend: T local tokens, K routes per token, M ranks, E experts, E_l experts of a rank, N rows sent (accepted routes), R
rows received.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from torch import Tensor

from .fast_launch import fast
from .route_map_triton import BLOCK, DeviceMap, _checked, _expert_ids, blocks_of
from .triton_common import next_power_of_2, require_contiguous, tl, triton

PROGRAMS = 4  # for each (source, expert)


@fast
@triton.jit(do_not_specialize=["routes", "rank"])
def _send_order(
    topk_idx,
    token_stride,
    route_stride,
    routes,
    rank,
    accepted,
    first_row,
    dest_row,
    sent_row,
    send_routes,
    E: tl.constexpr,
    K: tl.constexpr,
    SIZE: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    first = tl.program_id(0) * SIZE
    r = first + tl.arange(0, SIZE)
    ids = _checked(_expert_ids(topk_idx, token_stride, route_stride, first, routes, K, SIZE), E)
    dest = tl.load(dest_row + r, mask=r < routes, other=-1)
    sent = dest >= 0
    row = dest - tl.load(first_row + ids, mask=sent, other=0).to(tl.int32)  # among this rank's rows of its expert
    for start in range(0, E, EXPERTS):
        expert = start + tl.arange(0, EXPERTS)
        rows = tl.load(accepted + rank * E + expert, mask=expert < E, other=0).to(tl.int32)
        row += tl.sum(tl.where(expert[None, :] < ids[:, None], rows[None, :], 0), 1)
    tl.store(sent_row + r, tl.where(sent, row, -1), mask=r < routes)
    tl.store(send_routes + row, r.to(tl.int64), mask=sent)


def send_order(topk_idx: Tensor, found: DeviceMap, sent_row: Tensor, send_routes: Tensor, *, rank: int) -> None:
    """``sent_row`` int32 [T, K]: the row that carries each route, −1 for none; ``send_routes`` int64 [>= N]: the route
    t·K+k of each of the N rows.

    ``found``: the map of ``rank`` after ``route_map_triton.build`` of the same ``topk_idx`` [T, K], for which no rank
    has more rows than its bound."""
    require_contiguous(dest_row=found.dest_row, sent_row=sent_row, send_routes=send_routes, accepted=found.accepted)
    num_tokens, top_k = topk_idx.shape
    num_experts = found.accepted.shape[1]
    if not num_tokens:
        return
    _send_order[(blocks_of(num_tokens, top_k),)](
        topk_idx,
        topk_idx.stride(0),
        topk_idx.stride(1),
        num_tokens * top_k,
        rank,
        found.accepted,
        found.first_row,
        found.dest_row,
        sent_row,
        send_routes,
        E=num_experts,
        K=top_k,
        SIZE=BLOCK,
        EXPERTS=min(32, next_power_of_2(num_experts)),
        num_warps=4,
    )


@fast
@triton.jit(do_not_specialize=["rank"])
def _arrival_order(
    accepted,
    rank,
    recv_order,
    recv_row,
    M: tl.constexpr,
    E: tl.constexpr,
    SOURCES: tl.constexpr,
    EXPERTS: tl.constexpr,
    SIZE: tl.constexpr,
):
    local: tl.constexpr = E // M
    source, expert = tl.program_id(0) // local, tl.program_id(0) % local
    s, e = tl.arange(0, SOURCES)[:, None], tl.arange(0, EXPERTS)[None, :]
    rows = tl.load(accepted + s * E + rank * local + e, mask=(s < M) & (e < local), other=0).to(tl.int32)
    arrived_before = (s < source) | ((s == source) & (e < expert))
    row_before = (e < expert) | ((e == expert) & (s < source))
    arrival = tl.sum(tl.reshape(tl.where(arrived_before, rows, 0), [SOURCES * EXPERTS]), 0)
    row = tl.sum(tl.reshape(tl.where(row_before, rows, 0), [SOURCES * EXPERTS]), 0)
    count = tl.sum(tl.reshape(tl.where((s == source) & (e == expert), rows, 0), [SOURCES * EXPERTS]), 0)
    for start in range(tl.program_id(1) * SIZE, count, tl.num_programs(1) * SIZE):
        i = start + tl.arange(0, SIZE)
        tl.store(recv_order + row + i, arrival + i, mask=i < count)
        tl.store(recv_row + arrival + i, row + i, mask=i < count)


def arrival_order(accepted: Tensor, recv_order: Tensor, recv_row: Tensor, *, rank: int) -> None:
    """Of the rows that arrive at ``rank`` in (source, expert) order: ``recv_order`` int32 [R], which of them each row
    in (expert, source) order is, and its inverse ``recv_row`` int32 [R].

    ``accepted`` int64 [M, E]; R is the sum of its columns of this rank's experts."""
    require_contiguous(accepted=accepted, recv_order=recv_order, recv_row=recv_row)
    world, num_experts = accepted.shape
    if not recv_order.numel():
        return
    _arrival_order[(num_experts, PROGRAMS)](
        accepted,
        rank,
        recv_order,
        recv_row,
        M=world,
        E=num_experts,
        SOURCES=next_power_of_2(world),
        EXPERTS=next_power_of_2(num_experts // world),
        SIZE=1024,
        num_warps=4,
    )
