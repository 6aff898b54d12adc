"""``experts="plugin"``: our grouped experts over the weights of Megatron's expert modules.

Legend: H hidden size, N rows.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.activations import quick_gelu, squared_relu
from torch import Tensor, nn

from ..experts.activation import Activation
from ..experts.mlp import WeightAt, grouped_mlp
from .megatron_dispatcher import PluginTokenDispatcher
from .megatron_weights import lay_out, projections_of


class PluginExperts:
    """Takes the place of the ``forward`` of Megatron's ``module`` (SequentialMLP or TEGroupedMLP)."""

    def __init__(self, module: nn.Module, dispatcher: PluginTokenDispatcher) -> None:
        self.dispatcher = dispatcher
        config: Any = dispatcher.config
        self.activation = activation_of(config)
        self.weight_at: WeightAt = dispatcher.shared.config.weight_at  # type: ignore[assignment]  # validated
        self.recompute_hidden = config.recompute_granularity == "selective" and "moe_act" in (
            config.recompute_modules or ()
        )
        self.projections = projections_of(module, dispatcher.num_local_experts)
        self._seen: tuple[int, ...] | None = None
        self._descending = False
        for parameters in self._groups():
            lay_out(parameters)
        dispatcher.descending = self.descending

    def _groups(self) -> list[list[nn.Parameter]]:
        return [group for projection in self.projections for group in projection.parameters() if group]

    def descending(self) -> bool:
        """Whether the weights lie in descending order of the experts, so that rows must arrive in it too.

        Collective over the EP group when the weights have moved, which they do on all ranks alike; ``ValueError`` where
        the ranks differ.
        """
        groups = self._groups()
        seen = tuple(p.data_ptr() for group in groups for p in (group[0], group[-1]))
        if seen != self._seen:
            own = {lay_out(group) < 0 for group in groups}
            every: list[set[bool] | None] = [None] * self.dispatcher.ep_size
            dist.all_gather_object(every, own, group=self.dispatcher.ep_group)
            if any(orders != own for orders in every) or len(own) > 1:
                raise ValueError(
                    "experts='plugin' needs the weights of all experts in one order in memory, ascending or descending;"
                    f" descending by EP rank: {every}: use experts='megatron'"
                )
            self._descending = own.pop()
            self._seen = tuple(p.data_ptr() for group in groups for p in (group[0], group[-1]))
        return self._descending

    def __call__(self, rows: Tensor, tokens_per_expert: Tensor, probs: Tensor, **_: Any) -> tuple[Tensor, None]:
        """Rows [N, H] and their probabilities [N] → ([N, H], None), as Megatron's experts; where the dispatcher is
        ``fused``, tokens [T, H] and the probabilities of their routes [T, K] → tokens [T, H]."""
        (up, up_bias), (down, down_bias) = (projection.stacked() for projection in self.projections)
        if self.dispatcher.fused:
            from ..mxfp8 import mxfp8_mlp

            dispatcher, state = self.dispatcher.planned(rows)
            y = mxfp8_mlp(
                dispatcher,
                state,
                rows,
                probs,
                up,
                down,
                up_bias=up_bias,
                down_bias=down_bias,
                activation=self.activation,
            )
            return y, None
        dispatched = self.dispatcher.dispatched(rows, probs)
        y = grouped_mlp(
            dispatched,
            up,
            down,
            up_bias=up_bias,
            down_bias=down_bias,
            activation=self.activation,
            weight_at=self.weight_at,
            recompute_hidden=self.recompute_hidden,
        )
        return y, None


def activation_of(config: Any) -> Activation:
    """Megatron's activation settings as ours; ``ValueError`` for a function that is not an elementwise one we know."""
    names = {F.silu: "silu", F.gelu: "gelu", F.relu: "relu", quick_gelu: "quick_gelu", squared_relu: "relu2"}
    function = config.activation_func
    if function not in names:
        known = ", ".join(names.values())
        raise ValueError(f"experts='plugin' knows the activations {known}; activation_func is {function}")
    limit, offset = getattr(config, "activation_func_clamp_value", None), getattr(config, "glu_linear_offset", 0.0)
    if not config.gated_linear_unit:
        return Activation(names[function], gated=False)
    return Activation(names[function], gated=True, limit=limit, up_offset=offset)
