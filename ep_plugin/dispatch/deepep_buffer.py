"""DeepEP's buffer and handles behind a few calls that say everything explicitly.

What its API leaves implicit, gets wrong or answers with a crash is kept here: a communicator that must be live before
the buffer is made, counts that differ in meaning between modes, a destructor that talks to peers who may be gone.

Legend: T local tokens, K routes per token, E experts, E_l = E / M experts of a rank, M ranks, D hidden size, B the most
tokens per rank that a call is compiled for, RB rows that the buffers of received rows hold.
"""

from __future__ import annotations

import atexit
import ctypes
import inspect
import logging
import os
import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..config import DeepEPConfig
from ..heap import HeapAborted, HeapClosed, HeapTimeout, Phase
from ..watch import GroupWatch

logger = logging.getLogger(__name__)

HANDLE_TENSORS = (
    "topk_idx",
    "psum_num_recv_tokens_per_scaleup_rank",
    "psum_num_recv_tokens_per_expert",
    "num_unaligned_recv_tokens_per_expert",
    "recv_src_metadata",
    "dst_buffer_slot_idx",
    "token_metadata_at_forward",
    "channel_linked_list",
)
HANDLE_NUMBERS = ("num_max_tokens_per_rank", "num_recv_tokens", "num_expanded_tokens")
HANDLE_CONSTANTS = ("do_expand", "num_experts", "expert_alignment", "num_sms", "num_recv_tokens_per_expert_list")
Payload = Tensor | tuple[Tensor, Tensor]
SMALLEST_BUCKET = 128
TRAPS_LATER_S = 15


def bucket_of(num_tokens: int) -> int:
    """B for batches of up to ``num_tokens`` tokens: a power of two, since DeepEP compiles kernels for each value."""
    return max(SMALLEST_BUCKET, 1 << max(0, num_tokens - 1).bit_length())


def worst_case_rows(bucket: int, *, world: int, top_k: int, num_local_experts: int) -> int:
    """RB where the host does not wait for the counts: every token of every rank goes to all experts that it can."""
    return world * bucket * min(top_k, num_local_experts)


def check_library(library: ModuleType | Any) -> None:
    """``RuntimeError`` naming what of the handle's fields this build of DeepEP has in addition, or lacks."""
    known = {*HANDLE_TENSORS, *HANDLE_NUMBERS, *HANDLE_CONSTANTS}
    fields = set(inspect.signature(library.EPHandle.__init__).parameters) - {"self"}
    if fields != known:
        raise RuntimeError(
            f"this build of DeepEP ({getattr(library, '__version__', 'unknown version')}) has handles of another form:"
            f" {sorted(fields - known)} are new, {sorted(known - fields)} are missing; 2.1 is what is supported"
        )


@dataclass(frozen=True)
class Handle:
    """One dispatch as autograd can keep it: ``tensors`` in the order of ``HANDLE_TENSORS`` (None where DeepEP has
    none), ``numbers`` int64 [3] on the host in the order of ``HANDLE_NUMBERS``."""

    tensors: tuple[Tensor | None, ...]
    numbers: Tensor

    def __getattr__(self, name: str) -> Any:
        if name in HANDLE_TENSORS:
            return self.tensors[HANDLE_TENSORS.index(name)]
        raise AttributeError(name)


@dataclass(frozen=True)
class BufferShape:
    """What a buffer is made for."""

    num_experts: int
    top_k: int
    hidden_size: int
    bucket: int


class _Exit:
    """``begun``: the interpreter has begun to end, so that ``sys.last_type`` says whether by an exception."""

    begun = False

    def begin(self) -> None:
        self.begun = True


_exit = _Exit()
atexit.register(_exit.begin)  # before whoever registered earlier, and closes a dispatcher then


class DeepEPBuffer:
    """One ``ElasticBuffer`` over ``group``, shared by all layers of a shape. Collective to make and to destroy.

    ``library``: the module ``deep_ep``. ``timeout_s``: kernels wait a little longer for a peer before they trap, which
    ends the process's CUDA context; whoever waits on the host so long can say what is missing before."""

    def __init__(
        self,
        library: ModuleType | Any,
        group: dist.ProcessGroup,
        shape: BufferShape,
        config: DeepEPConfig,
        *,
        hybrid: bool,
        timeout_s: float,
        device: torch.device,
    ) -> None:
        check_library(library)
        self.library, self.group, self.shape, self.config, self.device = library, group, shape, config, device
        if device.type == "cuda":
            # The communicator's address is taken, and a group that has not communicated yet has none.
            dist.all_reduce(torch.zeros(1, device=device), group=group)
            torch.cuda.synchronize(device)
        seconds = int(timeout_s) + TRAPS_LATER_S
        self._buffer: Any = library.ElasticBuffer(
            group,
            num_max_tokens_per_rank=shape.bucket,
            hidden=shape.hidden_size,
            num_topk=shape.top_k,
            allow_hybrid_mode=hybrid,
            num_allocated_qps=config.allocated_qps,
            num_cpu_timeout_secs=seconds,
            num_gpu_timeout_secs=seconds,
            explicitly_destroy=True,
        )
        # Its destructor would free memory that peers may still write to: it must only run after destroy().
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._buffer.runtime))

    @property
    def num_bytes(self) -> int:
        """Bytes of symmetric memory, without DeepEP's workspace."""
        return int(self._buffer.num_bytes)

    def dispatch(
        self, x: Payload, topk_idx: Tensor, topk_weight: Tensor, bucket: int
    ) -> tuple[Payload, Tensor, Handle]:
        """Rows [RB, …] in expert order, dense from row 0 on, their weights float32 [RB], and the handle.

        ``x`` bfloat16 [T, …] rows of any width that is a multiple of 16, or float8_e4m3fn [T, D] with its scales [T, …]
        in elements of 4 bytes; rows come as ``x`` went. ``topk_idx`` int64 [T, K] without repeated
        experts, not changed as long as the handle lives; ``topk_weight`` float32 [T, K]. Rows past the received ones
        are uninitialised in all three, and so is the order of rows within an expert undetermined."""
        rows, _, weights, raw, _ = self._buffer.dispatch(
            x,
            topk_idx=topk_idx.to(self.library.topk_idx_t),
            topk_weights=topk_weight,
            num_experts=self.shape.num_experts,
            num_max_tokens_per_rank=bucket,
            expert_alignment=1,
            num_sms=self.config.sms,
            num_qps=self.config.qps,
            do_handle_copy=False,
            do_cpu_sync=self.config.host_sync,
            do_expand=True,
        )
        numbers = torch.tensor([int(getattr(raw, name)) for name in HANDLE_NUMBERS], dtype=torch.int64)
        return rows, weights, Handle(tuple(getattr(raw, name) for name in HANDLE_TENSORS), numbers)

    def dispatch_again(self, x: Tensor, handle: Handle) -> Tensor:
        """``x`` bfloat16 [T, …] to the same rows [RB, …] as the dispatch that gave ``handle``."""
        rows, *_ = self._buffer.dispatch(
            x,
            handle=self._raw(handle),
            num_experts=self.shape.num_experts,
            num_sms=self.config.sms,
            num_qps=self.config.qps,
            do_expand=True,
        )
        out: Tensor = rows
        return out

    def combine(self, rows: Tensor, handle: Handle, weights: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """The sum of each token's rows, bfloat16 [T, D], and one scalar of each route, float32 [T, K], 0 where there
        is none.

        ``rows`` bfloat16 [>= R, D], ``weights`` float32 [>= R]."""
        out, scalars, _ = self._buffer.combine(
            rows, self._raw(handle), topk_weights=weights, num_sms=self.config.sms, num_qps=self.config.qps
        )
        return out, scalars

    def _raw(self, handle: Handle) -> Any:
        values: dict[str, Any] = dict(zip(HANDLE_TENSORS, handle.tensors, strict=True))
        values |= dict(zip(HANDLE_NUMBERS, handle.numbers.tolist(), strict=True))
        return self.library.EPHandle(
            **values,
            do_expand=True,
            num_experts=self.shape.num_experts,
            expert_alignment=1,
            num_sms=self.config.sms,
            num_recv_tokens_per_expert_list=[],
        )

    def try_out(self, sample: Payload | None = None) -> None:
        """Collective: move one token per rank every way, so that all kernels are compiled before a step or a graph
        needs them. ``sample``: a token of another kind that will be dispatched. ``RuntimeError`` where the numbers are
        not right."""
        shape = self.shape
        idx = torch.arange(shape.top_k, device=self.device).unsqueeze(0) * (shape.num_experts // shape.top_k)
        weight = torch.full((1, shape.top_k), 0.5, device=self.device)
        x = torch.ones((1, shape.hidden_size), dtype=torch.bfloat16, device=self.device)
        rows, weights, handle = self.dispatch(x, idx, weight, shape.bucket)
        assert isinstance(rows, Tensor)
        plain, _ = self.combine(rows, handle)
        again, scalars = self.combine(self.dispatch_again(x, handle), handle, weights)
        assert scalars is not None
        if sample is not None:
            self.dispatch(sample, idx, weight, shape.bucket)
        right = (plain == shape.top_k).all() & (again == shape.top_k).all() & (scalars == 0.5).all()
        if not bool(right):
            raise RuntimeError(
                f"DeepEP moved a token of ones to {shape.top_k} experts and gave back {plain[0, :4].tolist()},"
                f" {again[0, :4].tolist()} and weights {scalars.tolist()}: this build does not work here"
            )

    def close(self, watch: GroupWatch, *, broken: bool = False) -> None:
        """Destroy the buffer if all ranks of the group come to do so, else leave it to the end of the process.
        Idempotent.

        ``broken``: this rank failed in a step, so that peers may be waiting elsewhere. Destroying would wait for them
        on the device, and a kernel that waits in vain ends the CUDA context."""
        buffer, self._buffer = self._buffer, None
        if buffer is None:
            return
        if not self._all_come(watch, broken or (_exit.begun and hasattr(sys, "last_type"))):
            logger.warning("DeepEP's buffer is left to the end of the process: a rank of its group failed or is gone")
            return
        runtime = buffer.runtime
        buffer.destroy()
        ctypes.pythonapi.Py_DecRef(ctypes.py_object(runtime))
        forget_communicator(self.library, self.group)

    @staticmethod
    def _all_come(watch: GroupWatch, broken: bool) -> bool:
        phase = Phase("close", "DeepEP's buffer")
        if not dist.is_initialized():
            return False
        if broken:
            watch.stop(phase, "it failed before")
            return False
        try:
            watch.gather(True, phase)
            return True
        except (HeapAborted, HeapClosed, HeapTimeout) as error:
            logger.warning("%s", error)
            return False


def forget_communicator(library: ModuleType | Any, group: dist.ProcessGroup) -> None:
    """DeepEP keeps every group that it has seen in a table for ever; a group must be able to go."""
    storage = getattr(sys.modules.get(f"{library.__name__}.utils.comm"), "_storage", None)
    if isinstance(storage, dict):
        storage.pop(group, None)


def no_network(nodes: int) -> None:
    """Tell DeepEP to set up no queue pairs where the group is on one node; else it needs an RDMA network."""
    if nodes == 1 and "EP_DISABLE_GIN" not in os.environ:
        logger.info("the EP group is on one node: EP_DISABLE_GIN=1, no queue pairs are made")
        os.environ["EP_DISABLE_GIN"] = "1"


__all__ = [
    "BufferShape",
    "Payload",
    "DeepEPBuffer",
    "Handle",
    "bucket_of",
    "check_library",
    "no_network",
    "worst_case_rows",
]
