"""Megatron's process groups as our ``Layout``."""

from __future__ import annotations

import torch.distributed as dist
from megatron.core import parallel_state as ps

from ..topology import Layout, layout


def megatron_layout() -> Layout:
    """The layout of Megatron's parallel state, checked group by group against the groups of this rank.

    ``ValueError`` where they differ: Megatron was initialised with another order than tp-cp-ep-dp-pp, which our
    adapter does not mind, but which this table would show wrongly.
    """
    found = layout(
        dist.get_world_size(),
        tp=ps.get_tensor_model_parallel_world_size(),
        pp=ps.get_pipeline_model_parallel_world_size(),
        cp=ps.get_context_parallel_world_size(),
        etp=ps.get_expert_tensor_parallel_world_size(),
        ep=ps.get_expert_model_parallel_world_size(),
    )
    theirs = {
        "tp": ps.get_tensor_model_parallel_group(),
        "cp": ps.get_context_parallel_group(),
        "dp": ps.get_data_parallel_group(),
        "dp_cp": ps.get_data_parallel_group(with_context_parallel=True),
        "pp": ps.get_pipeline_model_parallel_group(),
        "etp": ps.get_expert_tensor_parallel_group(),
        "ep_mp": ps.get_expert_model_parallel_group(),
        "ep_dp": ps.get_expert_data_parallel_group(),
    }
    for kind, group in theirs.items():
        ours, ranks = found.group_of(kind, dist.get_rank()), tuple(dist.get_process_group_ranks(group))
        if ours != ranks:
            raise ValueError(f"Megatron's {kind} group of rank {dist.get_rank()} is {ranks}, this layout's is {ours}")
    return found
