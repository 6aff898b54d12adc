"""A stand-in for the module ``deep_ep`` (v2) on CPU processes over gloo. Not DeepEP: it moves everything to everyone.

It obeys what is documented of ``ElasticBuffer`` and what its kernels can be seen to do, and is unkind where DeepEP may
be: the order of tokens and of an expert's rows is another in every call, memory that nobody wrote holds NaN or the
most negative integer, misuse that stops a GPU raises ``Trap`` on the rank that would trap.

Legend: T local tokens, K routes per token, E experts, M ranks, B num_max_tokens_per_rank, D hidden size, N lines
received (one per token and rank), RB rows of the expanded layout with padding.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

__version__ = "stand-in"
topk_idx_t = torch.int64
GARBAGE = torch.iinfo(torch.int32).min


class Trap(RuntimeError):
    """What would be a device-side assertion, or a host one."""


def require(condition: Any, what: str) -> None:
    if not bool(condition):
        raise Trap(what)


class EPHandle:
    """The fields of DeepEP's handle."""

    def __init__(
        self,
        do_expand: bool,
        num_experts: int,
        expert_alignment: int,
        num_max_tokens_per_rank: int,
        num_sms: int,
        topk_idx: torch.Tensor,
        num_recv_tokens: int,
        num_expanded_tokens: int,
        num_recv_tokens_per_expert_list: list,
        psum_num_recv_tokens_per_scaleup_rank: torch.Tensor,
        psum_num_recv_tokens_per_expert: torch.Tensor,
        num_unaligned_recv_tokens_per_expert: torch.Tensor,
        recv_src_metadata: torch.Tensor,
        dst_buffer_slot_idx: torch.Tensor,
        token_metadata_at_forward: torch.Tensor | None,
        channel_linked_list: torch.Tensor | None,
    ) -> None:
        self.__dict__.update({name: value for name, value in locals().items() if name != "self"})


class Runtime:
    """What the C++ object is to its Python wrapper."""


class ElasticBuffer:
    """``dispatch`` in the expanded layout and ``combine``, between the ranks of ``group``."""

    made: list[ElasticBuffer] = []

    def __init__(
        self,
        group: dist.ProcessGroup,
        num_bytes: int | None = None,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        deterministic: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True,
        num_allocated_qps: int = 0,
        num_cpu_timeout_secs: int = 300,
        num_gpu_timeout_secs: int = 100,
        explicitly_destroy: bool = False,
    ) -> None:
        require(num_max_tokens_per_rank > 0 and hidden > 0 and num_topk > 0, "a buffer of no size")
        self.group, self.world, self.rank = group, dist.get_world_size(group), dist.get_rank(group)
        self.most, self.hidden, self.explicitly_destroy = num_max_tokens_per_rank, hidden, explicitly_destroy
        self.num_bytes = self.world * num_max_tokens_per_rank * hidden * 2
        self.runtime: Runtime | None = Runtime()
        self.random = torch.Generator().manual_seed(1000 * self.rank + len(self.made))
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.made.append(self)
        dist.barrier(group)

    def destroy(self) -> None:
        require(self.explicitly_destroy, "destroy() needs explicitly_destroy=True")
        require(self.runtime is not None, "destroyed twice")
        dist.barrier(self.group)
        self.runtime = None

    def _gather(self, *own: Any) -> list[Any]:
        everyone: list[Any] = [None] * self.world
        dist.all_gather_object(everyone, own, group=self.group)
        return everyone

    def _shuffled(self, n: int) -> list[int]:
        return torch.randperm(n, generator=self.random).tolist()

    def dispatch(
        self,
        x: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        num_experts: int | None = None,
        num_max_tokens_per_rank: int | None = None,
        expert_alignment: int | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        handle: EPHandle | None = None,
        do_handle_copy: bool = True,
        do_cpu_sync: bool | None = None,
        do_expand: bool = False,
    ) -> tuple[Any, Any, Any, EPHandle, None]:
        require(self.runtime is not None, "used after destroy()")
        require(do_expand, "the stand-in knows the expanded layout alone")
        require(num_experts is not None and num_sms > 0, "num_experts and num_sms must be given with a handle")
        assert num_experts is not None
        self.calls.append(("dispatch", dict(cached=handle is not None, num_qps=num_qps, num_sms=num_sms)))
        x, sf = x if isinstance(x, tuple) else (x, None)
        require(x.dim() == 2 and x.is_contiguous() and x.shape[1] * x.element_size() % 32 == 0, f"x {tuple(x.shape)}")
        require(x.dtype == torch.bfloat16 or (x.dtype == torch.float8_e4m3fn and sf is not None), f"x is {x.dtype}")
        if handle is not None:
            require(topk_idx is None and not do_cpu_sync, "topk_idx and do_cpu_sync exclude a handle")
            require(handle.do_expand and num_experts == handle.num_experts, "a handle of another layout")
            require(num_sms == handle.num_sms, "a handle of another SM count")
            require(num_max_tokens_per_rank in (None, handle.num_max_tokens_per_rank), "a handle of another size")
            require(x.shape[0] == handle.topk_idx.shape[0], f"{x.shape[0]} tokens, but a handle of others")
            return self._again(x, sf, topk_weights, handle)
        assert topk_idx is not None
        most = self.most if num_max_tokens_per_rank is None else num_max_tokens_per_rank
        require(most <= self.most and x.shape[1] * x.element_size() <= 2 * self.hidden, "the buffer is too small")
        tokens, top_k = topk_idx.shape
        require(x.shape[0] == tokens <= most, f"{tokens} tokens of at most {most}")
        require(topk_idx.dtype == topk_idx_t and topk_idx.is_contiguous(), f"topk_idx is {topk_idx.dtype}")
        require(((topk_idx >= -1) & (topk_idx < num_experts)).all(), "an expert id out of range")
        for line in topk_idx.tolist():
            chosen = [e for e in line if e >= 0]
            require(len(set(chosen)) == len(chosen), f"a token names an expert twice: {line}")
        if topk_weights is not None:
            require(topk_weights.dtype == torch.float32 and topk_weights.is_contiguous(), "weights must be float32")
            require(topk_weights.shape == topk_idx.shape, "weights of another shape")
        return self._first(
            x, sf, topk_idx, topk_weights, num_experts, most, expert_alignment or 1, num_sms, do_cpu_sync
        )

    def _first(
        self,
        x: torch.Tensor,
        sf: torch.Tensor | None,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor | None,
        num_experts: int,
        most: int,
        align: int,
        num_sms: int,
        do_cpu_sync: bool | None,
    ) -> tuple[Any, Any, Any, EPHandle, None]:
        tokens, top_k = topk_idx.shape
        local, world = num_experts // self.world, self.world
        first, sync = self.rank * local, do_cpu_sync is None or do_cpu_sync
        # Every token takes the next slot at each rank that it goes to, in an order that nobody controls.
        slots = torch.full((tokens, top_k), -1, dtype=torch.int32)
        lists: list[list[int]] = [[] for _ in range(world)]
        for t in self._shuffled(tokens):
            seen: set[int] = set()
            for k, expert in enumerate(topk_idx[t].tolist()):
                if expert >= 0 and expert // local not in seen:
                    seen.add(expert // local)
                    slots[t, k] = self.rank * most + len(lists[expert // local])
                    lists[expert // local].append(t)
        everyone = self._gather(most, num_sms, num_experts, topk_idx, lists)
        require(len({e[:3] for e in everyone}) == 1, f"ranks disagree: {[e[:3] for e in everyone]}")
        lines = [(s, t) for s, e in enumerate(everyone) for t in e[4][self.rank]]
        by_source = torch.tensor([len(e[4][self.rank]) for e in everyone], dtype=torch.int32)
        ids = [everyone[s][3][t].tolist() for s, t in lines]
        counts = torch.zeros(local, dtype=torch.int64)
        for line in ids:
            for expert in line:
                if first <= expert < first + local:
                    counts[expert - first] += 1
        padded = -(-counts // align) * align
        starts = padded.cumsum(0) - padded
        held = (len(lines), int(padded.sum())) if sync else (world * most, world * most * min(top_k, local))
        if not sync:
            held = (held[0], -(-(held[1] + (align - 1) * local) // align) * align)
        metadata = torch.full((held[0], 2 + top_k), GARBAGE, dtype=torch.int32)
        metadata[: len(lines), 2:] = -1
        taken = starts.clone()
        for i in self._shuffled(len(lines)):
            (s, t), line = lines[i], ids[i]
            lanes = [k for k, expert in enumerate(line) if first <= expert < first + local]
            metadata[i, 0], metadata[i, 1] = s * most + t, s * top_k + lanes[0]
            for k in lanes:
                metadata[i, 2 + k] = taken[line[k] - first]
                taken[line[k] - first] += 1
        handle = EPHandle(
            True, num_experts, align, most, num_sms, topk_idx, *held, counts.tolist() if sync else [],
            by_source.cumsum(0).to(torch.int32), taken.to(torch.int32), counts.to(torch.int32), metadata, slots,
            None, None,
        )  # fmt: skip
        return self._again(x, sf, topk_weights, handle)

    def _lines(self, handle: EPHandle) -> torch.Tensor:
        """int64 [N, 2 + K]: the lines that are written."""
        return handle.recv_src_metadata[: int(handle.psum_num_recv_tokens_per_scaleup_rank[-1])].long()

    def _again(
        self, x: torch.Tensor, sf: torch.Tensor | None, weights: torch.Tensor | None, handle: EPHandle
    ) -> tuple[Any, Any, Any, EPHandle, None]:
        most = handle.num_max_tokens_per_rank
        data = x.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)
        data = data.view(x.shape[0], x.shape[1] * x.element_size())
        everyone = self._gather(data, sf, weights, handle.dst_buffer_slot_idx)
        lines = self._lines(handle)
        rows = torch.full((handle.num_expanded_tokens, x.shape[1]), float("nan"), dtype=torch.float32).to(x.dtype)
        scales = None if sf is None else torch.full((rows.shape[0], sf.shape[1]), GARBAGE, dtype=sf.dtype)
        out = None if weights is None else torch.full((rows.shape[0],), float("nan"))
        starts = [0, *handle.psum_num_recv_tokens_per_scaleup_rank.tolist()]
        for i, line in enumerate(lines):
            source, t = divmod(int(line[0]), most)
            theirs, scale, weight, slots = everyone[source]
            lane = int(line[1]) % handle.topk_idx.shape[1]
            require(slots[t, lane] == source * most + i - starts[source], "a handle of another dispatch")
            for k in (line[2:] >= 0).nonzero().flatten().tolist():
                row = int(line[2 + k])
                rows.view(torch.uint8)[row] = theirs[t]
                if scales is not None:
                    scales[row] = scale[t]
                if out is not None:
                    out[row] = weight[t, k]
        return (rows if scales is None else (rows, scales)), None, out, handle, None

    def combine(
        self,
        x: torch.Tensor,
        handle: EPHandle,
        topk_weights: torch.Tensor | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
    ) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        require(self.runtime is not None, "used after destroy()")
        require(x.dtype == torch.bfloat16 and x.dim() == 2 and x.is_contiguous(), f"x is {x.dtype} {tuple(x.shape)}")
        require(x.shape[1] == self.hidden, f"x has {x.shape[1]} columns, the buffer was made for {self.hidden}")
        self.calls.append(("combine", dict(weights=topk_weights is not None, num_qps=num_qps, num_sms=num_sms)))
        if topk_weights is not None:
            require(topk_weights.dtype == torch.float32 and topk_weights.dim() == 1, "weights of the expanded layout")
            require(topk_weights.is_contiguous(), "weights must be contiguous")
        most, (tokens, top_k) = handle.num_max_tokens_per_rank, handle.topk_idx.shape
        partial, scalars = [], []
        for line in self._lines(handle):
            rows = [int(row) for row in line[2:] if row >= 0]
            require(rows and max(rows) < x.shape[0], f"rows {rows} of {x.shape[0]}")
            total = torch.zeros(x.shape[1])
            for row in rows:
                total += x[row].float()
            partial.append((int(line[0]), total.to(x.dtype)))
            if topk_weights is not None:
                found = torch.zeros(top_k)
                for k in range(top_k):
                    if line[2 + k] >= 0:
                        found[k] = topk_weights[int(line[2 + k])]
                scalars.append(found)
        everyone = self._gather(partial, scalars)
        out, back = torch.zeros(tokens, x.shape[1]), torch.zeros(tokens, top_k)
        for theirs, found in everyone:  # ranks in ascending order
            for i, (token, row) in enumerate(theirs):
                if token // most == self.rank:
                    out[token % most] += row.float()
                    if topk_weights is not None:
                        back[token % most] += found[i]
        return out.to(x.dtype), back if topk_weights is not None else None, None
