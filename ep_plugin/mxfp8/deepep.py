"""``deepep`` with MXFP8 rows in the dispatch of the forward pass; the other three movements are bfloat16 (DeepEP sums
bfloat16 alone, and the backward of its sum travels as its input did).

A record goes through DeepEP as a bfloat16 row of half as many columns, so that it arrives as it left. Where its length
is no multiple of 32 bytes, which DeepEP's copies need, elements and scales go as DeepEP's own pair (x, scales) and are
put together on arrival, which costs a pass over the received rows.

Legend: T local tokens, D hidden size, RB rows that the buffers of received rows hold, W = D + D/32 bytes of a record.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..config import MXFP8Config
from ..dispatch.base import Arrived
from ..dispatch.deepep import DeepEPDispatcher, DeepEPState
from .gemm import ExpertGemm
from .movements import MXFP8Movements, Wires

COPIES = 32  # bytes, of which DeepEP's rows must be a multiple


class DeepEPMXFP8(MXFP8Movements, DeepEPDispatcher):
    """``deepep``; ``LegsConfig.validate`` refuses the legs that it does not carry."""

    def __init__(self, *args: Any, mxfp8: MXFP8Config, wires: Wires, gemm: ExpertGemm, **kwargs: Any) -> None:
        self.set_mxfp8(mxfp8, wires, gemm)
        super().__init__(*args, **kwargs)

    def _sample(self) -> Any:
        plain = torch.ones((1, self.hidden_size), dtype=self.dtype, device=self.device)
        wire = self.wires.dispatch
        return as_payload(wire.encode(plain)) if wire.records else None

    def send(self, state: DeepEPState, x: Tensor, topk_weight: Tensor, arrived: Arrived) -> tuple[Tensor, Tensor]:
        wire = self.wires.dispatch
        if not wire.records:
            return super().send(state, x, topk_weight, arrived)
        rows, weights = self._send(state, as_payload(wire.encode(x)), topk_weight, arrived)
        return as_records(rows), weights


def as_payload(records: Tensor) -> Tensor | tuple[Tensor, Tensor]:
    """uint8 [T, W] → what DeepEP's dispatch takes: bfloat16 [T, W/2], or (float8_e4m3fn [T, D], int32 [T, D/128])."""
    count, width = records.shape
    if width % COPIES == 0:
        return records.contiguous().view(-1).view(torch.bfloat16).view(count, width // 2)
    hidden = width * 32 // 33
    elements, scales = records[:, :hidden].contiguous(), records[:, hidden:].contiguous()
    packed = scales.view(-1).view(torch.int32).view(count, hidden // 128)
    return elements.view(torch.float8_e4m3fn), packed


def as_records(rows: Tensor | tuple[Tensor, Tensor]) -> Tensor:
    """The inverse, of the rows that arrived: uint8 [RB, W]."""
    if isinstance(rows, Tensor):
        return rows.view(torch.uint8)
    elements, packed = rows
    return torch.cat([elements.view(torch.uint8), packed.contiguous().view(torch.uint8)], 1)
