"""The grouped expert MLP: up projection, activation, down projection over the rows a dispatcher hands over.

Legend: R rows, E experts, E_l local experts, D hidden size, F expert width, G = 2F if gated else F.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from ..config import WEIGHT_AT, one_of
from ..dispatch.base import Dispatched, Rebuild
from .activation import Activation, hidden_rows_of, weighted_activation
from .grouped_linear import Backend, grouped_linear

WeightAt = Literal["input", "hidden", "output", "source"]


@dataclass(frozen=True)
class ExpertMLP:
    """The parameters of a grouped MLP and how they are applied, as `grouped_mlp` takes them: for whoever runs the
    experts by himself, wave by wave."""

    up: Tensor
    down: Tensor
    up_bias: Tensor | None
    down_bias: Tensor | None
    activation: Activation
    transposed: bool = False
    backend: Backend = "auto"


def _hidden_again(tensors: tuple[Tensor, ...], num_rows: int | None, *, activation: Activation) -> Tensor:
    """The down projection's input from offsets [E_l+1], the up output [R, G] and, if applied here, the weights [R]."""
    offsets, up, *weights = tensors
    return hidden_rows_of(up, weights[0] if weights else None, offsets, activation, num_rows)


def grouped_mlp(
    d: Dispatched,
    up: Tensor,
    down: Tensor,
    *,
    activation: Activation,
    weight_at: WeightAt,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    transposed: bool = False,
    recompute_hidden: bool = False,
    backend: Backend = "auto",
) -> Tensor:
    """y[r] = down_e(activation(up_e(rows[r]))), e the expert that owns row r, the router weight where `weight_at` says.

    Args:
        d: rows, weights, offsets as a dispatcher gives them.
        up: [E_l, G, D] (gate half first, or interleaved), or [E_l, D, G] if `transposed`. up_bias: [E_l, G].
        down: [E_l, D, F], or [E_l, F, D] if `transposed`. down_bias: [E_l, D].
        weight_at: "input" = rows·w before the up projection; "hidden" = hidden·w before the down projection, whose bias
            becomes w·bias; "output" and "source" = not here.
        recompute_hidden: compute the down projection's input again in backward instead of keeping it.

    Returns y [R, D] in the dtype of d.rows: the prefix of d.output if that is given and the router weight is applied
    here. Otherwise y is new memory, because who weights it later needs it again in backward.

    Kept for backward, besides parameters: d.rows itself (or d.rebuild.tensors), the up output [R, G], the hidden rows
    [R, F] (unless `recompute_hidden`), and the weights [R].

    The products follow autocast; weighting and activation run in acc dtype and round once.
    """
    one_of("weight_at", weight_at, WEIGHT_AT)
    hidden_weights = d.weights if weight_at == "hidden" else None
    projected = grouped_linear(
        d.rows,
        up,
        d.offsets,
        bias=up_bias,
        row_weight=d.weights if weight_at == "input" else None,
        transposed=transposed,
        num_rows=d.num_rows,
        saved_rows=d.rebuild,
        backend=backend,
    )
    hidden = weighted_activation(projected, hidden_weights, d.offsets, activation, num_rows=d.num_rows, consume=True)
    saved_hidden = None
    if recompute_hidden:
        kept = (d.offsets, projected) if hidden_weights is None else (d.offsets, projected, hidden_weights)
        again = partial(_hidden_again, activation=activation)
        saved_hidden = Rebuild(tuple(tensor.detach() for tensor in kept), again)
    y = grouped_linear(
        hidden,
        down,
        d.offsets,
        bias=down_bias,
        bias_weight=hidden_weights if down_bias is not None else None,
        transposed=transposed,
        num_rows=d.num_rows,
        saved_rows=saved_hidden,
        out=d.output if weight_at in ("input", "hidden") else None,
        backend=backend,
    )
    return y.to(d.rows.dtype)


class GroupedMLP(nn.Module):
    """The experts [first_expert, first_expert + num_local) of an MoE layer as two parameters (four with biases).

    Parameters: up [E_l, G, D] with the gate half first, down [E_l, D, F], up_bias [E_l, G] and down_bias [E_l, D] or
    None.
    Initial values depend on `seed` and the global expert id alone, so every sharding starts from the same experts.

    Args:
        num_experts: E over all ranks. hidden: D. width: F.
        first_expert, num_local: this rank's experts; num_local None = all from first_expert on.
        activation: see Activation. bias: with biases (they start at zero).
        std: standard deviation of both projections; None = 1/√(inputs).
        recompute_hidden, backend: see grouped_mlp and grouped_linear.
    """

    up: nn.Parameter
    down: nn.Parameter
    up_bias: nn.Parameter | None
    down_bias: nn.Parameter | None
    seed: int | None
    std: float | None

    def __init__(
        self,
        num_experts: int,
        hidden: int,
        width: int,
        *,
        first_expert: int = 0,
        num_local: int | None = None,
        seed: int = 0,
        activation: Activation | None = None,
        bias: bool = False,
        std: float | None = None,
        recompute_hidden: bool = False,
        backend: Backend = "auto",
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ):
        super().__init__()
        activation = activation if activation is not None else Activation()
        num_local = num_experts - first_expert if num_local is None else num_local
        if first_expert < 0 or num_local < 1 or first_expert + num_local > num_experts:
            raise ValueError(
                f"experts {first_expert} … {first_expert + num_local - 1} are not a part of 0 … {num_experts - 1}"
            )
        if hidden < 1 or width < 1:
            raise ValueError(f"hidden={hidden} and width={width} must be positive")

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(num_local, *shape, dtype=dtype, device=device))

        inner = activation.inputs_per_output * width
        self._set(
            parameter(inner, hidden),
            parameter(hidden, width),
            parameter(inner) if bias else None,
            parameter(hidden) if bias else None,
        )
        self.first_expert, self.seed, self.std = first_expert, seed, std
        self.activation, self.transposed = activation, False
        self.recompute_hidden, self.backend = recompute_hidden, backend
        self.reset_parameters()

    @classmethod
    def from_parameters(
        cls,
        up: nn.Parameter,
        down: nn.Parameter,
        up_bias: nn.Parameter | None = None,
        down_bias: nn.Parameter | None = None,
        *,
        activation: Activation,
        transposed: bool = False,
        recompute_hidden: bool = False,
        backend: Backend = "auto",
    ) -> GroupedMLP:
        """Experts over a trainer's own parameters: the same objects, no copies. Layouts as in grouped_mlp.

        A trainer that exchanges its parameter objects (sharded ones) calls grouped_mlp with the current ones instead.
        """
        self = cls.__new__(cls)
        nn.Module.__init__(self)
        experts, inner, hidden = up.shape if not transposed else (up.shape[0], up.shape[2], up.shape[1])
        width, rest = divmod(inner, activation.inputs_per_output)
        expected = (experts, width, hidden) if transposed else (experts, hidden, width)
        if rest or tuple(down.shape) != expected:
            raise ValueError(
                f"up {list(up.shape)} and down {list(down.shape)} do not fit: with transposed={transposed} and "
                f"gated={activation.gated} down must be {list(expected)}"
            )
        for name, bias, shape in (("up_bias", up_bias, (experts, inner)), ("down_bias", down_bias, (experts, hidden))):
            if bias is not None and tuple(bias.shape) != shape:
                raise ValueError(f"{name} must be {list(shape)}, got {list(bias.shape)}")
        self._set(up, down, up_bias, down_bias)
        self.first_expert, self.seed, self.std = 0, None, None
        self.activation, self.transposed = activation, transposed
        self.recompute_hidden, self.backend = recompute_hidden, backend
        return self

    def _set(
        self, up: nn.Parameter, down: nn.Parameter, up_bias: nn.Parameter | None, down_bias: nn.Parameter | None
    ) -> None:
        self.up, self.down = up, down
        self.register_parameter("up_bias", up_bias)
        self.register_parameter("down_bias", down_bias)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws every expert again from (seed, global expert id, projection), the same on every device and sharding."""
        if self.seed is None:
            raise ValueError("these experts read a trainer's own parameters, which the trainer initialises")
        if self.up.is_meta:
            return
        for name, parameter in (("up", self.up), ("down", self.down)):
            std = self.std if self.std is not None else 1 / math.sqrt(parameter.shape[2])
            for local in range(parameter.shape[0]):
                generator = torch.Generator().manual_seed(_seed(self.seed, self.first_expert + local, name))
                # Drawn in float32 whatever the dtype, so that the experts differ by rounding alone.
                parameter[local] = torch.randn(parameter.shape[1:], generator=generator, dtype=torch.float32) * std
        for bias in (self.up_bias, self.down_bias):
            if bias is not None:
                bias.zero_()

    def forward(self, d: Dispatched, weight_at: WeightAt = "hidden") -> Tensor:
        """Expert rows [R, D] → expert outputs [R, D]; see grouped_mlp. ``ValueError`` for another number of experts."""
        arrived = d.offsets.numel() - 1
        if arrived != self.up.shape[0]:
            raise ValueError(
                f"these experts are {self.up.shape[0]}, and the dispatcher sends rows of {arrived}: num_local must be"
                " num_experts divided by the EP degree"
            )
        return grouped_mlp(
            d,
            self.up,
            self.down,
            up_bias=self.up_bias,
            down_bias=self.down_bias,
            activation=self.activation,
            weight_at=weight_at,
            transposed=self.transposed,
            recompute_hidden=self.recompute_hidden,
            backend=self.backend,
        )

    def mlp(self) -> ExpertMLP:
        """The current parameters and how they are applied."""
        return ExpertMLP(
            self.up, self.down, self.up_bias, self.down_bias, self.activation, self.transposed, self.backend
        )

    def extra_repr(self) -> str:
        up = list(self.up.shape)
        return f"up={up}, down={list(self.down.shape)}, activation={self.activation.name}, transposed={self.transposed}"


def _seed(seed: int, expert: int, name: str) -> int:
    digest = hashlib.blake2b(f"{seed}/{expert}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
