"""``dispatcher='block'`` whose rows are permuted and summed by TransformerEngine's fused kernels (``permute='te'``).

Legend: T local tokens, K routes per token, E experts, M ranks, E_l experts of a rank, N rows sent, R rows received, D
hidden size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..routing import RouteMap
from .block import BlockDispatcher, BlockState

NARROW = 32  # columns of the rows from which TransformerEngine's row map is made


@dataclass
class TEBlockState(BlockState):
    """Adds TransformerEngine's form of the same permutations.

    ``mask`` int32 [T, E] of the routes that are sent, ``experts`` int64 [T, K] (E for none), ``row_map`` int32
    [T, 2·E + 1] as TransformerEngine makes it; ``chunks`` int64 [2, M·E_l]: rows of every (source, expert) in the order
    of arrival, and of every (expert, source)."""

    mask: Tensor
    experts: Tensor
    row_map: Tensor
    chunks: Tensor

    def tensors(self) -> tuple[Any, ...]:
        return (*super().tensors(), self.mask, self.experts, self.row_map, self.chunks)

    @classmethod
    def restore(cls, layer: str, tensors: tuple[Any, ...]) -> TEBlockState:
        return cls(layer, RouteMap(*tensors[:6]), *tensors[6:])


class TEBlockDispatcher(BlockDispatcher):
    """``BlockDispatcher`` over TransformerEngine's kernels: the same rows in the same order, sums in float32.

    ``ValueError`` where TransformerEngine cannot be imported or ``device`` is no GPU."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.te = transformer_engine(torch.device(kwargs["device"]))
        super().__init__(*args, **kwargs)

    def _made(self, state: BlockState, topk_idx: Tensor) -> TEBlockState:
        route_map = state.map
        experts = torch.where(route_map.dest_rank >= 0, topk_idx.to(torch.int64), self.num_experts)
        marked = torch.zeros((experts.shape[0], self.num_experts + 1), dtype=torch.int32, device=experts.device)
        mask = marked.scatter_(1, experts, 1)[:, :-1].contiguous()
        rows = state.send_routes.numel()
        _check_once(mask, rows)
        row_map = mask.new_empty(0)
        if rows:  # no layer's rows are at hand yet, and none are needed
            narrow = torch.zeros((len(mask), NARROW), dtype=self.dtype, device=mask.device)
            _, row_map = self.te.moe_permute(narrow, mask, rows, map_type="mask")
        blocks = route_map.accepted.view(self.world, self.world, self.num_local_experts)[:, self.rank]
        chunks = torch.stack([blocks.reshape(-1), blocks.t().reshape(-1)]).to(torch.int64)
        return TEBlockState(**vars(state), mask=mask, experts=experts, row_map=row_map, chunks=chunks)

    def fan_out(self, state: BlockState, x: Tensor, scale: Tensor | None) -> Tensor:
        assert isinstance(state, TEBlockState)
        if scale is not None or not state.send_routes.numel():
            return super().fan_out(state, x, scale)
        rows, _ = self.te.moe_permute(x.contiguous(), state.mask, state.send_routes.numel(), map_type="mask")
        return rows

    def merge(self, state: BlockState, rows: Tensor, weights: Tensor | None) -> Tensor:
        assert isinstance(state, TEBlockState)
        shape = torch.Size((state.num_tokens, rows.shape[1]))
        if not state.send_routes.numel():
            return rows.new_zeros(shape)
        dense = None
        if weights is not None:
            wide = weights.new_zeros((len(state.experts), self.num_experts + 1))
            dense = wide.scatter_(1, state.experts, weights)[:, :-1].contiguous()
        merged: Tensor = self.te.moe_unpermute(
            rows.contiguous(), state.row_map, merging_probs=dense, restore_shape=shape, map_type="mask"
        )
        return merged

    def sort(self, state: BlockState, rows: Tensor) -> Tensor:
        return self._sorted(state, rows, back=False)

    def unsort(self, state: BlockState, rows: Tensor) -> Tensor:
        return self._sorted(state, rows, back=True)

    def _sorted(self, state: BlockState, rows: Tensor, back: bool) -> Tensor:
        assert isinstance(state, TEBlockState)
        if rows.dtype != self.dtype or rows.shape[1:] != (self.hidden_size,) or not len(rows):
            return super().unsort(state, rows) if back else super().sort(state, rows)  # ids and weights: narrow
        ranks, experts = self.world, self.num_local_experts
        order = torch.arange(ranks * experts, device=rows.device)
        order = order.view(experts, ranks).t() if back else order.view(ranks, experts).t()
        out: Tensor = self.te.moe_sort_chunks_by_index(rows.contiguous(), state.chunks[int(back)], order.reshape(-1))
        return out


def _check_once(mask: Tensor, rows: int) -> None:
    """``ValueError`` (on a GPU a device-side assertion) where ``mask`` [T, E] has not one entry for every row."""
    message = "a token names an expert twice, which permute='te' cannot carry: use permute='torch'"
    if mask.is_cuda:
        torch._assert_async(mask.sum() == rows, message)
    elif int(mask.sum()) != rows:
        raise ValueError(message)


def transformer_engine(device: torch.device) -> Any:
    """TransformerEngine's module of torch functions, for rows on ``device``."""
    if device.type != "cuda":
        raise ValueError(f"permute='te' runs on GPUs, and the rows are on {device.type}: use permute='torch'")
    try:
        import transformer_engine.pytorch as te
    except Exception as error:  # half an installation fails in many ways
        raise ValueError(
            f"permute='te' needs TransformerEngine (pip install 'transformer-engine[pytorch,core_cu13]'), whose import"
            f" failed: {type(error).__name__}: {error}. Use permute='torch' without it"
        ) from error
    return te
