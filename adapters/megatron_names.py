"""Parameters of a Megatron model by names that do not depend on the parallel degrees."""

from __future__ import annotations

import re
from typing import TypeVar

from torch import nn

T = TypeVar("T")
OF_EXPERT = re.compile(r"(weight|bias)(\d+)")  # TransformerEngine's grouped linear maps number their parameters


def by_global_name(model: nn.Module, tensors: dict[str, T]) -> dict[str, T]:
    """``tensors`` of ``model``'s parameters (by parameter name), named by global layer number and global expert id.

    Experts of TransformerEngine's grouped modules get the names that experts in modules of their own have."""
    from megatron.core.transformer.moe.moe_layer import BaseMoELayer
    from megatron.core.transformer.transformer_layer import TransformerLayer

    renamed = dict(tensors)
    for name, module in model.named_modules():
        if not isinstance(module, TransformerLayer if name else BaseMoELayer):
            continue  # a layer, or a model that is nothing but one MoE layer
        moe = getattr(module, "mlp", module)
        for key in [key for key in renamed if key.startswith(f"{name}." if name else "")]:
            parts = key.removeprefix(f"{name}.").split(".")
            if "local_experts" in parts:
                at = parts.index("local_experts") + 1
                parts[at] = str(moe.local_expert_indices[int(parts[at])])
            elif "experts" in parts and (numbered := OF_EXPERT.fullmatch(parts[-1])):
                parts[-1] = numbered[1]
                parts[-2:-2] = ["local_experts", str(moe.local_expert_indices[int(numbered[2])])]
            renamed[".".join(["layer", str(module.layer_number), *parts])] = renamed.pop(key)
    return renamed
