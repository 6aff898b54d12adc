"""How rows travel in each movement: as they are, or as MXFP8 records.

Legend: n rows, D hidden size, W bytes of a record (D + D/32) or elements of a plain row.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from ..config import MXFP8Config
from ..dispatch.base import Arrived, RouteState
from ..kernels.mxfp8 import record_bytes
from .codec import Form, Received, dequantize, quantize
from .gemm import ExpertGemm


@dataclass(frozen=True)
class Wire:
    """The format of one movement. ``plain`` is the rows' dtype outside."""

    records: bool
    hidden_size: int
    plain: torch.dtype
    rounding: str

    @property
    def dtype(self) -> torch.dtype:
        """Of what travels."""
        return torch.uint8 if self.records else self.plain

    @property
    def width(self) -> int:
        """W."""
        return record_bytes(self.hidden_size) if self.records else self.hidden_size

    @property
    def nbytes(self) -> int:
        """Of one row on the wire."""
        return self.width * self.dtype.itemsize

    def encode(
        self,
        rows: Tensor,
        *,
        weights: Tensor | None = None,
        out: Tensor | None = None,
        offsets: Tensor | None = None,
    ) -> Tensor:
        """Plain ``rows`` [n, D] (times ``weights`` float32 [n]) → what travels, [n, W], in ``out`` if given.

        Rounded once: a product with the weight is not rounded before it is quantised. ``offsets``: only the rows before
        offsets[-1] need it."""
        if self.records:
            return quantize(rows, row_weight=weights, rounding=self.rounding, out=out, offsets=offsets)
        if weights is not None:
            rows = (rows.to(weights.dtype) * weights.unsqueeze(1)).to(self.plain)
        return rows.to(self.plain) if out is None else out.copy_(rows)

    def decode(self, rows: Tensor) -> Tensor:
        """What travelled, [n, W] → plain rows [n, D]."""
        return dequantize(rows, self.plain) if self.records else rows


@dataclass(frozen=True)
class Wires:
    """One for each movement of Table 8."""

    dispatch: Wire
    combine: Wire
    combine_backward: Wire
    dispatch_backward: Wire

    @staticmethod
    def of(config: MXFP8Config, hidden_size: int, plain: torch.dtype) -> Wires:
        """As ``config.legs`` says. Raises ``ValueError`` for a hidden size or dtype that MXFP8 cannot carry."""
        record_bytes(hidden_size)
        if plain not in (torch.bfloat16, torch.float16, torch.float32):
            raise ValueError(f"MXFP8 rows are made of bfloat16, float16 or float32, not of {plain}")

        def wire(leg: str) -> Wire:
            return Wire(getattr(config.legs, leg) == "mxfp8", hidden_size, plain, config.rounding)

        return Wires(**{leg.name: wire(leg.name) for leg in fields(config.legs)})


class MXFP8Movements:
    """What an MXFP8 dispatcher has beside a plain one: the format of each movement, and the GEMM that reads the rows.

    ``send`` and ``send_grad`` take plain rows and give what travelled; ``give_back`` and ``return_grad`` take and give
    plain rows. ``receive`` and ``receive_grad`` are what the node calls for the former two: a movement that puts rows
    in order by itself makes there, in the same pass, what the GEMM reads."""

    mxfp8: MXFP8Config
    wires: Wires
    gemm: ExpertGemm

    def set_mxfp8(self, config: MXFP8Config, wires: Wires, gemm: ExpertGemm) -> None:
        self.mxfp8, self.wires, self.gemm = config, wires, gemm

    def receive(
        self: Any, state: RouteState, x: Tensor, topk_weight: Tensor, arrived: Arrived
    ) -> tuple[Received, Tensor]:
        """Dispatch forward: the rows and their weights float32 [R]; fills ``arrived``."""
        rows, weights = self.send(state, x, topk_weight, arrived)
        return Received(rows), weights

    def receive_grad(
        self: Any, state: RouteState, grad: Tensor, scale: Tensor | None, forms: Iterable[Form] = ()
    ) -> Received:
        """Combine backward: the gradient [T, D] of each row's token (times ``scale`` float32 [T, K]).

        ``forms``: those that will be asked for."""
        return Received(self.send_grad(state, grad, scale))
