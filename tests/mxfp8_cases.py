"""MXFP8 kernels against their torch references, on any device: under Triton's interpreter on CPU, compiled on GPUs.

Each function raises AssertionError with the first difference. References run on the CPU, so that a GPU is compared
with another machine's arithmetic, not with its own.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor

from ep_plugin.config import ROUNDINGS, CapacityConfig
from ep_plugin.kernels import mxfp8 as ref
from ep_plugin.kernels import mxfp8_reduce as ref_reduce
from ep_plugin.kernels import mxfp8_swiglu as ref_swiglu
from ep_plugin.kernels.fan_out import fan_out_torch, row_routes_torch
from ep_plugin.routing import build_route_map, count_routes

GUARD = 0xAB  # what lies where nothing may be written


def same(got: Tensor, want: Tensor, what: object) -> None:
    """Bit-equal, except that any NaN equals any NaN."""
    got = got.cpu()
    assert got.shape == want.shape and got.dtype == want.dtype, (what, got.shape, got.dtype, want.shape, want.dtype)
    if want.dtype.is_floating_point and want.dtype.itemsize > 1:
        integer = {2: torch.int16, 4: torch.int32}[want.dtype.itemsize]
        bad = (got.view(integer) != want.view(integer)) & ~(got.isnan() & want.isnan())
    else:
        bad = got.view(torch.uint8) != want.view(torch.uint8)
    first = bad.nonzero()[:3].tolist()
    assert not first, (what, first, [(got[tuple(i)].item(), want[tuple(i)].item()) for i in first])


def hard_rows(rows: int, width: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Rows of every kind: all exponents, wild bit patterns, subnormal numbers, ties, zeros, NaN and Inf."""
    g = torch.Generator().manual_seed(seed)
    scale = torch.exp2(torch.randint(-140, 100, (rows, 1), generator=g).float())
    x = torch.randn(rows, width, generator=g) * scale
    wild = torch.randint(-(2**31), 2**31, (rows, width), generator=g).to(torch.int32).view(torch.float32)
    wild = torch.where(torch.isfinite(wild), wild, 0.5)
    ties = torch.randint(-127, 128, (rows, width), generator=g).float() / 8
    kind = torch.arange(rows)[:, None] % 5
    x = torch.where(kind == 1, wild, torch.where(kind == 2, ties, x))
    x[3::10] = 0.0
    x[4::10, 1] = float("inf")
    x[8::10, width - 1] = float("nan")
    x[9::10, 0] = -0.0
    return x.to(dtype)


def check_codec(device: str, dtype: torch.dtype, width: int, rounding: str, rows: int = 41, valid: int = 33) -> None:
    from ep_plugin.kernels import mxfp8_triton as kernels

    what = (dtype, width, rounding)
    x = hard_rows(rows, width, dtype, seed=width)
    weight = torch.rand(rows) + 0.1
    count = torch.tensor([valid], device=device)
    for row_weight in (None, weight):
        want = ref.quantize_torch(x, rounding, row_weight=row_weight)
        want[valid:] = GUARD
        got = torch.full((rows, ref.record_bytes(width)), GUARD, dtype=torch.uint8, device=device)
        on_device = None if row_weight is None else row_weight.to(device)
        kernels.quantize(x.to(device), got, rounding, row_weight=on_device, num_rows=count)
        same(got, want, ("quantize", *what))
    records = ref.quantize_torch(x, rounding)
    for out_dtype in (torch.float32, torch.bfloat16):
        want = ref.dequantize_torch(records, out_dtype)
        want[valid:] = 7.0
        out = torch.full((rows, width), 7.0, dtype=out_dtype, device=device)
        kernels.dequantize(records.to(device), out, num_rows=count)
        same(out, want, ("dequantize", out_dtype, *what))
    for name, (data, scales) in {
        "rescale": ref.rescale_torch(records),
        "quantize_rowwise": ref.quantize_rowwise_torch(x, rounding),
    }.items():
        data, scales = data.view(torch.uint8), scales.clone()
        data[valid:], scales[valid:] = GUARD, 7.0
        got_data = torch.full((rows, width), GUARD, dtype=torch.uint8, device=device)
        got_scales = torch.full((rows,), 7.0, device=device)
        if name == "rescale":
            kernels.rescale(records.to(device), got_data, got_scales, num_rows=count)
        else:
            kernels.quantize_rowwise(x.to(device), got_data, got_scales, rounding, num_rows=count)
        same(got_data, data, (name, *what))
        same(got_scales, scales, (name, *what))


def check_every_element(device: str) -> None:
    """All 256 elements at all 256 scales decode alike, and encode again to themselves."""
    from ep_plugin.kernels import mxfp8_triton as kernels

    data = torch.arange(256, dtype=torch.uint8).repeat(256, 1)
    scales = torch.arange(256, dtype=torch.uint8)[:, None].repeat(1, 8)
    records = torch.cat([data, scales], dim=1)
    want = ref.dequantize_torch(records)
    out = torch.empty(256, 256, device=device)
    kernels.dequantize(records.to(device), out)
    same(out, want, "every element")
    numbers = torch.where((data & 0x7F) == 0x7F, 0, data)  # NaN elements poison their block: another test
    numbers[:, 0::32] = 0x7E  # 448 in every block, so that it gets its scale back
    records = torch.cat([numbers, scales.clamp(max=246)], dim=1)
    again = torch.empty_like(records, device=device)
    kernels.quantize(ref.dequantize_torch(records).to(device), again)
    same(again, records, "every element again")


def check_swizzle(device: str, counts: list[int], columns: int, spare: int = 5) -> None:
    from ep_plugin.kernels import mxfp8_triton as kernels

    offsets = torch.tensor([0, *counts]).cumsum(0)
    rows = int(offsets[-1]) + spare
    scales = torch.randint(0, 255, (rows, columns), dtype=torch.uint8)
    want = ref.swizzle_scales_torch(scales, offsets)
    out = torch.full(want.shape, GUARD, dtype=torch.uint8, device=device)
    apart = torch.zeros(rows, columns + 3, dtype=torch.uint8, device=device)  # as inside records
    apart[:, 3:] = scales.to(device)
    kernels.swizzle_scales(apart[:, 3:], offsets.to(device), out)
    same(out, want, ("swizzle", counts, columns))


def check_swiglu(
    device: str,
    dtype: torch.dtype,
    width: int,
    rounding: str,
    weighted: tuple[bool, ...] = (False, True),
    *,
    apart: bool = True,
    rows: int = 12,
    valid: int = 10,
) -> None:
    """``apart``: each form of the hidden rows in a launch of its own; otherwise those that can be in one are."""
    from ep_plugin.kernels import mxfp8_swiglu_triton as kernels

    g = torch.Generator().manual_seed(width)
    what = (dtype, width, rounding)
    up = torch.randn(rows, 2 * width, generator=g) * torch.exp2(torch.randint(-6, 6, (rows, 1), generator=g).float())
    up[3, 5], up[4, width + 2], up[5], up[6, 1] = float("inf"), float("nan"), 0.0, -200.0
    up[7, 3], up[7, width + 3] = 1e30, 1e30
    up[8] = 1e-30
    up = up.to(dtype)
    grad = torch.randn(rows, width, generator=g).to(dtype)
    count = torch.tensor([valid], device=device)

    def empty(*shape: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    by_row = torch.rand(rows, generator=g)
    for weights in (by_row if w else None for w in weighted):
        w = None if weights is None else weights.to(device)
        want = ref_swiglu.swiglu_torch(up, weights)[:valid]
        saved, hidden = empty(rows, ref.record_bytes(2 * width)), empty(rows, width, dtype=dtype)
        records, data = empty(rows, ref.record_bytes(width)), empty(rows, width)
        scales = empty(rows, dtype=torch.float32)
        forms = [{"saved": saved, "hidden": hidden}, {"records": records}, {"data": data, "scales": scales}]
        for out in forms if apart else [forms[0] | forms[1], forms[2]]:
            kernels.swiglu(up.to(device), w, **out, rounding=rounding, num_rows=count)
        same(hidden[:valid], want.to(dtype), ("hidden", *what))
        same(records[:valid], ref.quantize_torch(want, rounding), ("records", *what))
        same(saved[:valid], ref.quantize_torch(up, rounding)[:valid], ("saved", *what))
        want_data, want_scales = ref.quantize_rowwise_torch(want, rounding)
        same(data[:valid], want_data.view(torch.uint8), ("data", *what))
        same(scales[:valid], want_scales, ("scales", *what))
        assert not any(t[valid:].any() for t in (saved, hidden, records, data, scales)), ("past the rows", *what)

        kept = ref.quantize_torch(up, rounding)
        want, want_dup, want_dw = ref_swiglu.swiglu_backward_torch(ref.dequantize_torch(kept), grad, weights)
        hidden, dup = empty(rows, width, dtype=dtype), empty(rows, 2 * width, dtype=dtype)
        records, data = empty(rows, ref.record_bytes(2 * width)), empty(rows, 2 * width)
        dw = None if weights is None else empty(rows, dtype=torch.float32)
        arguments = (kept.to(device), grad.to(device), w)
        kernels.swiglu_backward(
            *arguments, hidden=hidden, dup=dup, records=records, dweights=dw, rounding=rounding, num_rows=count
        )
        kernels.swiglu_backward(*arguments, data=data, scales=scales, rounding=rounding, num_rows=count)
        same(hidden[:valid], want[:valid].to(dtype), ("hidden again", *what))
        same(dup[:valid], want_dup[:valid].to(dtype), ("dup", *what))
        same(records[:valid], ref.quantize_torch(want_dup, rounding)[:valid], ("dup records", *what))
        want_data, want_scales = ref.quantize_rowwise_torch(want_dup, rounding)
        same(data[:valid], want_data.view(torch.uint8)[:valid], ("dup data", *what))
        same(scales[:valid], want_scales[:valid], ("dup scales", *what))
        if dw is not None and want_dw is not None:
            finite = want_dw[:valid].isfinite()
            largest = want_dw[:valid][finite].abs().max().item()
            torch.testing.assert_close(
                dw[:valid].cpu(), want_dw[:valid], rtol=1e-4, atol=1e-5 * largest, equal_nan=True
            )
        assert not any(t[valid:].any() for t in (hidden, dup, records, data, scales)), ("past the rows", *what)


def check_movements(
    device: str,
    dtype: torch.dtype,
    width: int,
    rounding: str = "rceil",
    weights: tuple[bool, ...] = (False, True),
    seed: int = 0,
) -> None:
    """Fan-out and sums of records between three ranks whose memory is all here."""
    from ep_plugin.kernels import mxfp8_fan_out_triton as fan_out_kernels
    from ep_plugin.kernels import mxfp8_reduce_triton as kernels
    from ep_plugin.kernels.peers import Peers

    world, t_max, top_k, experts, tokens = 3, 6, 3, 6, [6, 0, 4]
    g = torch.Generator().manual_seed(seed)
    ids = [torch.randint(-1, experts, (t, top_k), generator=g) for t in tokens]
    counts, sizes = torch.stack([count_routes(i, experts) for i in ids]), torch.tensor(tokens)
    capacity = CapacityConfig("rank", 0.9)
    maps = [build_route_map(i, counts, sizes, rank=r, capacity=capacity) for r, i in enumerate(ids)]
    local = torch.full((world, world, t_max, top_k), -1, dtype=torch.int32)
    for source, m in enumerate(maps):
        for rank in range(world):
            local[rank, source, : tokens[source]] = torch.where(m.dest_rank == rank, m.dest_row, -1)
    num_rows = [int(m.offsets[-1]) for m in maps]
    bound = max(num_rows) + 3
    ys = [torch.randn(bound, width, generator=g).to(dtype) for _ in maps]
    row_weights = [torch.rand(bound, generator=g) for _ in maps]
    nbytes = ref.record_bytes(width)
    what = (dtype, width, rounding)

    for weighted in weights:
        want = [torch.full((world, t_max, nbytes), GUARD, dtype=torch.uint8) for _ in maps]
        got = [w.to(device, copy=True) for w in want]
        peers = Peers.of(got)
        for rank in range(world):
            w = row_weights[rank] if weighted else None
            by_token = None if w is None else w[local[rank].clamp(min=0).long()]
            ref_reduce.pre_reduce_put_records_torch(ys[rank], local[rank], tokens, want, rank, by_token, rounding)
            kernels.pre_reduce_put_records(
                ys[rank].to(device),
                local[rank].to(device),
                sizes.to(device),
                peers,
                rank,
                None if w is None else w.to(device),
                rounding,
            )
        for a, b in zip(got, want, strict=True):
            same(a, b, ("pre-reduce", weighted, *what))
        for source, m in enumerate(maps):
            total = ref_reduce.sum_partial_records_torch(want[source], m.dest_rank, dtype)
            out = torch.full((tokens[source], width), 9.0, dtype=dtype, device=device)
            kernels.sum_partial_records(want[source].to(device), m.dest_rank.to(device), out)
            same(out, total, ("sum", weighted, *what))
            without_own = want[source].to(device, copy=True)
            without_own[source] = 0xFF
            kernels.sum_partial_records(
                without_own,
                m.dest_rank.to(device),
                out,
                y=ys[source].to(device),
                dest_row=m.dest_row.to(device),
                weights=row_weights[source].to(device) if weighted else None,
                own_rank=source,
                rounding=rounding,
            )
            same(out, total, ("sum with own", weighted, *what))

        rows = [ref.quantize_torch(y) for y in ys]
        on_device, guard = [r.to(device) for r in rows], torch.full((1, nbytes), GUARD, dtype=torch.uint8)
        for source, m in enumerate(maps):
            w = torch.rand(tokens[source], top_k, generator=g) if weighted else None
            total = ref_reduce.get_reduce_records_torch(rows, m.dest_rank, m.dest_row, w, dtype)
            out = torch.full((tokens[source], width), 9.0, dtype=dtype, device=device)
            pulled = torch.zeros(tokens[source], top_k, nbytes, dtype=torch.uint8)
            gathered = None if weighted else pulled.to(device, copy=True)
            pull = partial(
                kernels.get_reduce_records,
                Peers.of(on_device),
                m.dest_rank.to(device),
                m.dest_row.to(device),
                None if w is None else w.to(device),
                out,
            )
            pull(num_rows=bound, gathered=gathered)
            same(out, total, ("get", weighted, *what))
            if gathered is not None:
                by_rank = zip(m.dest_rank[m.dest_rank >= 0], m.dest_row[m.dest_rank >= 0], strict=True)
                pulled[m.dest_rank >= 0] = torch.stack([guard[0], *(rows[rank][row] for rank, row in by_rank)])[1:]
                same(gathered, pulled, ("gathered", *what))
            if tokens[source]:
                few = int(m.dest_row.median())  # a row that is asked for, and the first that is past the buffer
                within = torch.where(m.dest_row < few, m.dest_rank, -1)
                total_within = ref_reduce.get_reduce_records_torch(rows, within, m.dest_row, w, dtype)
                pull(num_rows=few, gathered=gathered)
                same(out, total_within, ("get past the buffer", weighted, *what))
            if source:
                continue
            sent = torch.cat([guard, *rows]).to(device)[1:]  # which starts where it happens to
            starts = torch.tensor([0, *(len(r) for r in rows)]).cumsum(0)
            index = torch.where(m.dest_rank >= 0, m.dest_row + starts[m.dest_rank.clamp(min=0)], -1).to(device)
            by_route = None if w is None else w.to(device)
            out = kernels.sum_route_records_triton(sent, index, m.dest_rank.to(device), world, by_route, dtype)
            same(out, total, ("sum of routes", weighted, *what))

    stage = torch.full((world * t_max, nbytes), 0xFF, dtype=torch.uint8)
    own = [ref.quantize_torch(torch.randn(t, width, generator=g) * 4) for t in tokens]
    for source in range(world):
        stage[source * t_max : source * t_max + tokens[source]] = own[source]
    by_token = torch.rand(world * t_max, top_k, generator=g)
    for rank in range(world):
        n = num_rows[rank]
        routes = row_routes_torch(local[rank], sizes, n)
        records = fan_out_torch(stage, routes, top_k)
        for separate in (False, True):
            there = stage.to(device, copy=True)
            if separate:
                there[rank * t_max : (rank + 1) * t_max] = GUARD
            want_data, want_scales = ref.rescale_torch(records)
            for room in (bound, n - 1):  # which ends before the last row
                rows_out = torch.full((bound, width), 5.0, dtype=dtype, device=device)
                data = torch.full((bound, width), GUARD, dtype=torch.uint8, device=device)
                scales = torch.full((bound,), 5.0, device=device)
                weights_out = torch.full((bound,), 5.0, device=device)
                found = torch.full((bound,), -1, dtype=torch.int64, device=device)
                fan_out_kernels.fan_out_records(
                    there,
                    local[rank].to(device),
                    sizes.to(device),
                    rows=rows_out[:room],
                    data=data[:room],
                    scales=scales[:room],
                    weights=by_token.to(device),
                    weights_out=weights_out[:room],
                    route_of_row=found[:room],
                    own=own[rank].to(device) if separate else None,
                    own_rank=rank,
                )
                m = min(n, room)
                same(rows_out[:m], ref.dequantize_torch(records[:m], dtype), ("fan-out", *what))
                same(data[:m], want_data[:m].view(torch.uint8), ("fan-out data", *what))
                same(scales[:m], want_scales[:m], ("fan-out scales", *what))
                same(weights_out[:m], by_token.view(-1)[routes[:m]], ("fan-out weights", *what))
                assert torch.equal(found[:m].cpu(), routes[:m])
                untouched = (rows_out[m:] == 5).all() & (data[m:] == GUARD).all() & (scales[m:] == 5).all()
                assert bool(untouched & (weights_out[m:] == 5).all() & (found[m:] == -1).all()), ("past", room, *what)


def check_all(device: str, thorough: bool, share: tuple[int, int] = (0, 1)) -> None:
    """Everything above; ``thorough`` takes widths that only compiled kernels get through in reasonable time. ``share``
    (i, n): only every n-th check from the i-th on, the rest being done elsewhere."""
    checks = list(_compiled(device) if thorough else _interpreted(device))[share[0] :: share[1]]
    if not thorough:
        for check in checks:
            check()
        return

    def on_device(check: Callable[[], None]) -> None:
        with torch.cuda.device(device):
            check()

    # Nearly all the time goes into compiling, most of which lets other threads go on.
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        list(pool.map(on_device, checks))


def _interpreted(device: str) -> Iterator[Callable[[], None]]:
    """The long ones first, neighbours about equally long."""
    yield from _routes(device)
    for width in (32, 160):
        yield partial(check_movements, device, torch.bfloat16, width)
    yield partial(check_movements, device, torch.float32, 96, "floor")
    for rounding in ROUNDINGS:
        yield partial(check_swiglu, device, torch.bfloat16, 32, rounding)
    yield partial(check_swiglu, device, torch.float32, 96, "rceil")
    # A row that no program holds at once.
    yield partial(check_swiglu, device, torch.bfloat16, 4128, "rceil", (True,), rows=9, valid=9)
    for width in (32, 160):
        for rounding in ROUNDINGS:
            yield partial(check_codec, device, torch.bfloat16, width, rounding)
        yield partial(check_codec, device, torch.float32, width, "rceil")
    yield partial(check_codec, device, torch.float16, 96, "rceil", rows=21, valid=17)
    yield partial(check_codec, device, torch.bfloat16, 2080, "rceil", rows=11, valid=9)  # more than one tile of a row
    yield from _any_width(device)


def _compiled(device: str) -> Iterator[Callable[[], None]]:
    """Every width, dtype, rounding and choice of weights is compiled anew, which takes longer than all the rest: what
    is here meets in pairs, not each with each."""
    from tests.mxfp8_route_cases import check_many_rows, check_routes

    bf16, f32 = torch.bfloat16, torch.float32
    unweighted, weighted = (False,), (True,)
    for w in (False, True):
        yield partial(check_many_rows, device, w)
    yield from _routes(device, apart=False)
    for width, w in itertools.product((2880, 7168), (False, True)):
        yield partial(check_routes, device, bf16, width, weighted=w, apart=False)
    yield partial(check_movements, device, bf16, 32, "rceil", unweighted)
    yield partial(check_movements, device, bf16, 160, "floor", weighted)
    yield partial(check_movements, device, bf16, 4096, "rceil")
    yield partial(check_movements, device, f32, 96, "floor", unweighted)
    yield partial(check_swiglu, device, bf16, 32, "rceil")
    yield partial(check_swiglu, device, f32, 160, "rceil", weighted, apart=False)
    # 2880 and 7168: rows that no program holds at once.
    for width in (2880, 4096, 7168):
        yield partial(check_swiglu, device, bf16, width, "rceil", weighted, apart=False)
        yield partial(check_swiglu, device, bf16, width, "floor", unweighted, apart=False)
    for width in (32, 160, 2880, 4096, 7168):
        yield partial(check_codec, device, bf16, width, "rceil")
    for width in (160, 7168):
        yield partial(check_codec, device, bf16, width, "floor")
    for width in (160, 4096):
        yield partial(check_codec, device, f32, width, "rceil")
    yield partial(check_codec, device, torch.float16, 160, "rceil")
    yield from _any_width(device)


def _routes(device: str, apart: bool = True) -> Iterator[Callable[[], None]]:
    """Rows by route. ``apart``: every form of those that stay also alone, for all and not for two cases."""
    from tests.mxfp8_route_cases import check_routes

    routes = partial(check_routes, device, torch.bfloat16)
    yield partial(routes, 160)
    # Scale bytes in words; several rows, blocks of columns and tiles of each program.
    yield partial(routes, 384, rounding="floor", tokens=(9, 0, 4), weighted=True, block=128, apart=apart)
    yield partial(routes, 384, "none stays", rounding="floor", tokens=(9, 0, 4), block=256, apart=apart)
    yield partial(routes, 32, "all stay", weighted=True)
    yield partial(routes, 96, tokens=(5,), apart=apart)
    yield partial(routes, 96, tokens=(3, 2, 0, 1), top_k=3, apart=apart)


def _any_width(device: str) -> Iterator[Callable[[], None]]:
    yield partial(check_every_element, device)
    for counts, columns in (([5, 0, 300, 129], 9), ([0, 0], 4), ([1], 128), ([128, 256], 1)):
        yield partial(check_swizzle, device, counts, columns)
