"""The kernels between our routes and DeepEP's against their references, for the interpreter and for GPUs.

Import this where Triton may be imported: on a GPU machine, or in a process started with ``TRITON_INTERPRET=1``."""

from __future__ import annotations

import torch
from torch import Tensor

from ep_plugin.kernels import deepep_routes as reference
from ep_plugin.kernels import deepep_routes_triton as kernels

SHAPES = [(5, 3, 4), (70, 8, 16), (0, 2, 4), (9, 1, 1), (3, 5, 300), (2, 32, 40)]  # T, K, E


def equal(got: Tensor, want: Tensor, what: str) -> None:
    assert got.dtype == want.dtype and got.shape == want.shape, f"{what}: {got.dtype} {got.shape}"
    assert torch.equal(got, want), f"{what}: {got} is not {want}"


def check_routes(device: str, strided: bool, index: torch.dtype) -> None:
    """Distinct experts, merged weights and their gradients, in both layouts of memory."""
    for seed, (tokens, top_k, experts) in enumerate(SHAPES):
        g = torch.Generator().manual_seed(seed)
        low, high = (-3, experts + 2) if seed % 2 else (-1, experts)  # with and without bad ids
        idx = torch.randint(low, high, (tokens, top_k), generator=g).to(index).to(device)
        weights = torch.rand(tokens, top_k, generator=g, dtype=torch.float64).to(torch.bfloat16).to(device)
        if strided:
            idx, weights = idx.t().contiguous().t(), weights.t().contiguous().t()
        flags, own = (torch.zeros(1, dtype=torch.int32, device=device) for _ in range(2))
        want_ids, want_first = reference.distinct_experts_torch(idx, experts, flags)
        ids, first = kernels.distinct_experts(idx, experts, own)
        equal(ids, want_ids, "ids")
        equal(first, want_first, "first")
        equal(own, flags, "flags")
        merged = kernels.merge_weights(weights, first)
        torch.testing.assert_close(merged, reference.merge_weights_torch(weights, first), rtol=1e-6, atol=1e-6)
        grads = torch.rand(tokens, top_k, generator=g).to(device)
        equal(kernels.spread_gradients(grads, first), reference.spread_gradients_torch(grads, first), "gradients")


def check_rows(device: str) -> None:
    """Routes of rows past garbage, and rows times weights up to a row that only the device knows."""
    top_k, bound = 3, 40
    g = torch.Generator().manual_seed(0)
    metadata = torch.full((20, 2 + top_k), torch.iinfo(torch.int32).min, dtype=torch.int32)
    metadata[:11, 0] = torch.randperm(50, generator=g)[:11]
    metadata[:11, 2:] = -1
    rows = torch.randperm(22, generator=g).to(torch.int32)
    metadata[:11, 2], metadata[:11, 4] = rows[:11], rows[11:22]
    metadata = metadata.to(device)
    for count, ends in ((0, [0, 0, 0]), (11, [7, 7, 22]), (11, [8, 7, 22]), (11, [7, 7, 40])):
        lines = torch.tensor([count], dtype=torch.int32, device=device)
        offsets = torch.tensor([0, *((0, 0, 0) if count == 0 else (7, 7, 22))], device=device)
        said = torch.tensor(ends, dtype=torch.int32, device=device)
        results = []
        for call in (reference.arrived_torch, kernels.arrived):
            routes, weights = torch.full((bound,), -7, device=device), torch.full((bound,), 5.0, device=device)
            flags = torch.zeros(1, dtype=torch.int32, device=device)
            call(metadata, lines, said, offsets, routes, weights, flags)
            results.append((routes, weights, flags))
        for got, want in zip(results[1], results[0], strict=True):
            equal(got, want, "routes, weights, flags")
        assert bool(results[0][2]) == (ends != offsets[1:].tolist())
    for width in (8, 33, 600):
        y, weights = (
            torch.randn(bound, width, generator=g).to(torch.bfloat16).to(device),
            torch.rand(bound, generator=g),
        )
        for count in (0, 17, bound):
            valid = torch.tensor([count], device=device)
            want = reference.scale_rows_torch(y, weights.to(device), valid)
            got = kernels.scale_rows(y, weights.to(device), valid)
            equal(got[:count], want[:count], f"rows of {width}")
