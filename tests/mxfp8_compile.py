"""Every way in which the launchers ask for MXFP8 kernels, for a compiler without a GPU.

``variants`` gives (name, call) pairs; a driver that compiles and does not launch must be set.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from ep_plugin.kernels import mxfp8_fan_out_triton as fan_out
from ep_plugin.kernels import mxfp8_own_triton as own_rows
from ep_plugin.kernels import mxfp8_put_triton as put
from ep_plugin.kernels import mxfp8_reduce_triton as reduce
from ep_plugin.kernels import mxfp8_swiglu_triton as swiglu
from ep_plugin.kernels import mxfp8_triton as codec
from ep_plugin.kernels import put_triton
from ep_plugin.kernels import sync_triton as sync
from ep_plugin.kernels.mxfp8 import record_bytes, swizzled_rows
from ep_plugin.kernels.peers import Peers

M, ROWS, BYTE = 2, 64, torch.uint8
MANY = 256  # tokens of which programs move several at once


def variants(
    widths: tuple[int, ...] = (4096,),
    routes: int = 8,
    dtype: torch.dtype = torch.bfloat16,
    wide: bool = True,
) -> Iterator[tuple[str, Callable[[], Any]]]:
    """For rows of ``widths`` values in ``dtype`` and ``routes`` per token. ``wide``: also an expert width whose rows no
    program holds at once."""
    for width in widths:
        yield from _codec(width, dtype)
        yield from _fan_out(width, routes, dtype)
        yield from _put(width, routes, dtype)
        yield from _own(width, routes, dtype)
        yield from _reduce(width, routes, dtype)
        yield from _swiglu(width, dtype)
    if wide:
        yield from _swiglu(6144, dtype)


def _floats(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def _bytes(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=BYTE)


def _longs(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int64)


def _peers() -> Peers:
    return Peers(_longs(M), _longs(M), 1 << 30, 512)


def _signal() -> sync.ChunkSignal:
    return sync.ChunkSignal(2, ROWS, _longs(2), Peers(_longs(M), offset=4096), torch.zeros(4, dtype=torch.int32))


def _codec(width: int, row: torch.dtype) -> Iterator[tuple[str, Callable[[], Any]]]:
    x, records, data = _floats(ROWS, width, dtype=row), _bytes(ROWS, record_bytes(width)), _bytes(ROWS, width)
    scales = _floats(ROWS, dtype=torch.float32)
    for count, rounding in itertools.product((None, _longs(1)), ("rceil", "floor")):
        for dtype, weight in itertools.product((torch.bfloat16, torch.float32), (None, scales)):
            given = x.to(dtype)
            call = partial(codec.quantize, given, records, rounding, row_weight=weight, num_rows=count)
            yield f"quantize {width} {dtype} {rounding} weight={weight is not None} count={count is not None}", call
        call = partial(codec.quantize_rowwise, x, data, scales, rounding, num_rows=count)
        yield f"quantize_rowwise {width} {rounding} count={count is not None}", call
    for count in (None, _longs(1)):
        for dtype in (torch.bfloat16, torch.float32):
            out = x.to(dtype)
            yield f"dequantize {width} {dtype}", partial(codec.dequantize, records, out, num_rows=count)
        yield f"rescale {width}", partial(codec.rescale, records, data, scales, num_rows=count)
    tiles = _bytes(swizzled_rows(ROWS, 4), width // 32)
    yield f"swizzle {width}", partial(codec.swizzle_scales, records[:, width:], _longs(5), tiles)


def _fan_out(width: int, top_k: int, row: torch.dtype) -> Iterator[tuple[str, Callable[[], Any]]]:
    w = record_bytes(width)
    local, tokens = torch.zeros((M, ROWS, top_k), dtype=torch.int32), _longs(M)
    by_token, by_row = _floats(M * ROWS, top_k, dtype=torch.float32), _floats(ROWS, dtype=torch.float32)
    outputs = {
        "rows": dict(rows=_floats(ROWS, width, dtype=row)),
        "data": dict(data=_bytes(ROWS, width), scales=by_row),
        "both": dict(rows=_floats(ROWS, width, dtype=row), data=_bytes(ROWS, width), scales=by_row),
    }
    for (name, out), own, extra in itertools.product(outputs.items(), (None, _bytes(ROWS, w)), (False, True)):
        meta: dict[str, Any] = {}
        if extra:
            meta = dict(weights=by_token, weights_out=by_row.clone(), route_of_row=_longs(ROWS))
        call = partial(fan_out.fan_out_records, _bytes(M * ROWS, w), local, tokens, own=own, own_rank=1, **out, **meta)
        yield f"fan_out {width} {name} own={own is not None} meta={extra}", call
    for name, out in outputs.items():
        call = partial(
            fan_out.convert_arrived, _bytes(ROWS, w), _longs(ROWS), _longs(1), top_k=top_k, max_tokens=ROWS, **out
        )
        yield f"arrived {width} {name}", call


def _put(width: int, top_k: int, row: torch.dtype) -> Iterator[tuple[str, Callable[[], Any]]]:
    x, dest = _floats(MANY, width, dtype=row), torch.zeros((MANY, top_k), dtype=torch.int32)
    weights = _floats(MANY, top_k, dtype=torch.float32)
    ways = (None, MANY), (_signal(), MANY), (_signal(), ROWS)
    calls = [(weight, *way, "rceil") for weight, way in itertools.product((None, weights), ways)]
    for weight, signal, t, rounding in (*calls, (weights, None, ROWS, "floor")):
        call = partial(
            put.quantize_put_rows,
            x[:t], _peers(), dest[:t], dest[:t], None if weight is None else weight[:t], rounding,
            num_rows=ROWS, skip_rank=1, signal=signal,
        )  # fmt: skip
        yield f"put {width} weight={weight is not None} signal={signal is not None} tokens={t} {rounding}", call
    dest = dest[:ROWS]
    words = put.as_words(_bytes(ROWS, record_bytes(width)))
    call = partial(put_triton.put_unique, words, _peers(), dest, ROWS, skip_rank=1, signal=_signal())
    yield f"put unique words {width}", call


def _own(width: int, top_k: int, row: torch.dtype) -> Iterator[tuple[str, Callable[[], Any]]]:
    x, dest = _floats(ROWS, width, dtype=row), torch.zeros((ROWS, top_k), dtype=torch.int32)
    records, weights = _bytes(ROWS, record_bytes(width)), _floats(ROWS, top_k, dtype=torch.float32)
    rows = dict(rows=x.clone())
    data = dict(data=_bytes(ROWS, width), scales=_floats(ROWS, dtype=torch.float32))
    both = rows | data
    for weight, out in ((None, {}), (None, rows), (None, data), (None, both), (weights, rows), (weights, both)):
        call = partial(own_rows.quantize_own_rows, x, records, dest, dest, weight, own_rank=1, **out)
        yield f"own {width} weight={weight is not None} {list(out)}", call


def _reduce(width: int, top_k: int, row: torch.dtype) -> Iterator[tuple[str, Callable[[], Any]]]:
    x, w = _floats(ROWS, width, dtype=row), record_bytes(width)
    local, tokens = torch.zeros((M, ROWS, top_k), dtype=torch.int32), _longs(M)
    dest, by_row, by_route = local[0], _floats(ROWS, dtype=torch.float32), _floats(ROWS, top_k, dtype=torch.float32)
    for weight, signal in itertools.product((None, by_row), (None, _signal())):
        call = partial(reduce.pre_reduce_put_records, x, local, tokens, _peers(), 1, weight, signal=signal)
        yield f"pre_reduce {width} weight={weight is not None} signal={signal is not None}", call
    partials = _bytes(M, ROWS, w)
    yield f"sum {width}", partial(reduce.sum_partial_records, partials, dest, x)
    for weight in (None, by_row):
        call = partial(
            reduce.sum_partial_records, partials, dest, x, y=x.clone(), dest_row=local[1], weights=weight, own_rank=1
        )
        yield f"sum with own {width} weight={weight is not None}", call
    for weight, kept in itertools.product((None, by_route), (None, _bytes(ROWS, top_k, w))):
        call = partial(reduce.get_reduce_records, _peers(), dest, dest, weight, x, num_rows=ROWS, gathered=kept)
        yield f"get {width} weight={weight is not None} kept={kept is not None}", call


def _swiglu(width: int, row: torch.dtype) -> Iterator[tuple[str, Callable[[], Any]]]:
    x, up = _floats(ROWS, width, dtype=row), _floats(ROWS, 2 * width, dtype=row)
    saved, records = _bytes(ROWS, record_bytes(2 * width)), _bytes(ROWS, record_bytes(width))
    by_row = _floats(ROWS, dtype=torch.float32)
    forms = {
        "plain": dict(hidden=x),
        "records": dict(records=records),
        "rowwise": dict(data=_bytes(ROWS, width), scales=by_row),
    }
    for (name, out), weights, count in itertools.product(forms.items(), (None, by_row), (None, _longs(1))):
        call = partial(swiglu.swiglu, up, weights, saved=saved, num_rows=count, **out)
        yield f"swiglu {width} {name} weight={weights is not None} count={count is not None}", call
    gradients = {
        "plain": {},
        "records": dict(records=saved.clone()),
        "rowwise": dict(data=_bytes(ROWS, 2 * width), scales=by_row.clone()),
    }
    for (name, out), weights in itertools.product(gradients.items(), (None, by_row)):
        dots = None if weights is None else by_row.clone()
        call = partial(
            swiglu.swiglu_backward,
            saved, x, weights, hidden=x.clone(), dup=up, dweights=dots, num_rows=_longs(1), **out,
        )  # fmt: skip
        yield f"swiglu backward {width} {name} weight={weights is not None}", call
