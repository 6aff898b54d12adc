"""The checks of ``node8``: every dispatcher on every folding, forward and backward, against the oracle in float64.

The cases are the fuzzer's, chosen here instead of drawn. The experts' gradients are summed over EP_DP, as a trainer
does it, and compared with the sum that the oracle gives for all EP groups.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ..dispatch import Dispatcher, build_dispatcher
from ..heap import Heap, open_heap
from ..topology import ProcessGroups
from .fuzz_case import MOST_TOKENS, NAMES, Case, Setting, differences, step

TIMEOUT_S = 60.0
EXPERT_GRADIENTS = NAMES.index("dup")  # from here on, ``step`` gives gradients of experts


class Mismatch(RuntimeError):
    """A rank got something else than the oracle says; the message quotes every case and rank."""


def check_folding(groups: ProcessGroups, paths: tuple[str, ...], device: torch.device, heap: str) -> int:
    """Compare ``paths`` (``local``, ``block``, ``dedup``, ``route``, ``deepep``) on the EP groups of ``groups``.

    Collective over WORLD; gives the number of cases. Raises ``Mismatch`` on all ranks."""
    shared: Heap | None = None
    wrong: list[str] = []
    count = 0
    for path in paths:
        for weight_at in ("hidden", "output"):
            setting = _setting(path, weight_at, groups.layout.ep, device)
            config = setting.config("shm" if device.type == "cpu" else heap, TIMEOUT_S)
            if shared is None and config.dispatcher == "rowwise":
                shared = open_heap(config.heap, groups.ep_mp, device, TIMEOUT_S)
            dispatcher = build_dispatcher(
                config,
                num_experts=setting.num_experts,
                top_k=setting.top_k,
                hidden_size=setting.hidden,
                dtype=getattr(torch, setting.dtype),
                group=groups.ep_mp,
                device=device,
                heap=shared if config.dispatcher == "rowwise" else None,
            )
            for case in _cases(setting):
                wrong += [
                    f"{path}, weight_at {weight_at}, {line}" for line in _compare(case, dispatcher, groups, device)
                ]
                count += 1
            dispatcher.close()
    if shared is not None:
        shared.close()
    if wrong:
        raise Mismatch("; ".join(wrong))
    return count


def _setting(path: str, weight_at: str, ep: int, device: torch.device) -> Setting:
    cpu = device.type == "cpu"
    return Setting(
        ep=ep, etp=1, path=path, weight_at=weight_at, policy="dropless", factor=float(ep), schedule="none", waves=2,
        by="token", dtype="float32" if cpu else "bfloat16", local_experts=4, top_k=4,
        hidden=16 if cpu else 256, width=8 if cpu else 32,
    )  # fmt: skip


def _cases(setting: Setting) -> list[Case]:
    """All ranks full; and ranks of other sizes, one of them empty, with tokens that go nowhere and all on one rank."""
    full = (MOST_TOKENS,) * setting.ep
    uneven = tuple((5 * rank) % (MOST_TOKENS + 1) for rank in range(setting.ep))
    mixed = "distinct" if setting.path == "deepep" else "any"  # DeepEP takes an expert once for a token
    return [
        Case(setting, tokens, routes, "float32", "int64", strided=False, seed=seed)
        for seed, (tokens, routes) in enumerate([(full, "distinct"), (uneven, mixed)])
    ]


def _compare(case: Case, dispatcher: Dispatcher[Any], groups: ProcessGroups, device: torch.device) -> list[str]:
    """What is wrong on any rank; the same list on all of them."""
    world, rank = groups.layout.world_size, groups.rank
    place = groups.layout.coordinate(rank)
    number, ep_rank = place["ep_dp"], place["ep_mp"]
    gathered: list[Any] = [None] * world
    dist.all_gather_object(gathered, case.oracle(rank) if rank < groups.layout.ep_dp else None)
    oracles = gathered[: groups.layout.ep_dp]
    got = step(case, number, ep_rank, dispatcher, case.setting.experts(ep_rank, device), device)
    dispatcher.check()
    want = list(oracles[number][ep_rank])
    for i in range(EXPERT_GRADIENTS, len(NAMES)):
        total = got[i].double()
        dist.all_reduce(total, group=groups.ep_dp)
        got[i] = total.to(got[i].dtype)
        want[i] = torch.stack([oracle[ep_rank][i] for oracle in oracles]).sum(0)
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, differences(case, got, want, number, ep_rank))
    return [f"{case.routes} routes, rank {r}: {line}" for r, lines in enumerate(everyone) for line in lines]
