"""The expert MLP of one wave, forward and backward, as plain functions: who owns the pipeline decides what runs when.

The arithmetic is that of ``experts.grouped_mlp``. Weight gradients are not made here: they need the rows of all waves.

Legend: R rows of a wave (padding included), E_l experts, D hidden size, F expert width, G = 2F if gated else F.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..experts.activation import Activation, Placed, hidden_gradients, hidden_rows_of
from ..experts.grouped_linear import groups_of, weighted_rows
from ..experts.groups import Groups, column, zero_padding
from ..kernels.reduce import accumulation_dtype
from .lanes import Spared


@dataclass
class Made:
    """Of one wave's forward: ``y`` [R, D], and for backward ``projected`` [R, G] and ``hidden`` [R, F]."""

    y: Tensor
    projected: Tensor
    hidden: Tensor


@dataclass
class Gradients:
    """Of one wave: ``rows`` [R, D] and ``weights`` [R] (None where the experts do not apply them), and the factors of
    weight gradients: ``projected`` [R, G], ``y`` [R, D], both in the dtype of the products. Bias gradients in the
    accumulation dtype, or None."""

    rows: Tensor
    weights: Tensor | None
    projected: Tensor
    y: Tensor
    up_bias: Tensor | None
    down_bias: Tensor | None


@dataclass(frozen=True)
class WaveMLP:
    """The parameters (of all or some of a rank's experts), and how they are applied."""

    up: Tensor
    down: Tensor
    up_bias: Tensor | None
    down_bias: Tensor | None
    activation: Activation
    transposed: bool
    weight_at: str
    backend: str
    dtype: torch.dtype  # of the products

    def of(self, experts: slice) -> WaveMLP:
        """The same for some of the experts."""
        if experts == slice(0, self.up.shape[0]):
            return self
        biases = [None if b is None else b[experts] for b in (self.up_bias, self.down_bias)]
        return replace(self, up=self.up[experts], down=self.down[experts], up_bias=biases[0], down_bias=biases[1])

    def groups(self, offsets: Tensor, num_rows: int | None, total: int) -> Groups:
        """The products over ``total`` rows with these ``offsets``."""
        return groups_of(self.backend, offsets, num_rows, total)

    def operand(self, rows: Tensor, weights: Tensor, valid: int) -> Tensor:
        """Dispatched rows [R, D] as the up projection reads them."""
        return weighted_rows(rows, weights if self.weight_at == "input" else None, valid, self.dtype)

    def forward(
        self,
        rows: Tensor,
        weights: Tensor,
        offsets: Tensor,
        num_rows: int | None,
        out: Tensor | None,
        spared: Spared,
    ) -> Made:
        """``rows`` [R, D], their ``weights`` [R], ``offsets`` [E_l + 1]; y goes into ``out`` where that is given and
        the experts apply the weights. ``spared`` is put around GEMMs."""
        groups = self.groups(offsets, num_rows, rows.shape[0])
        with spared(True):
            projected = groups.matmul(self.operand(rows, weights, groups.valid), self._forwards(self.up))
        if self.up_bias is not None:
            groups.add_bias(projected, self.up_bias.to(self.dtype), None)
        at_hidden = weights if self.weight_at == "hidden" else None
        hidden = hidden_rows_of(projected, at_hidden, offsets, self.activation, num_rows)
        target = None
        if out is not None and self.weight_at in ("input", "hidden") and out.dtype == self.dtype:
            target = out[: rows.shape[0]]
        with spared(False):
            y = groups.matmul(hidden, self._forwards(self.down), target)
        if self.down_bias is not None:
            groups.add_bias(y, self.down_bias.to(self.dtype), column(at_hidden, accumulation_dtype(self.dtype)))
        return Made(y.to(rows.dtype), projected, hidden)

    def backward(
        self,
        grad_y: Tensor,
        rows: Tensor | None,
        weights: Tensor,
        projected: Tensor,
        groups: Groups,
        num_rows: int | None,
        place: Placed | None,
        spared: Spared,
    ) -> Gradients:
        """From ``grad_y`` [R, D] and what forward ``projected`` [R, G]; ``rows`` [R, D] is needed under
        ``weight_at='input'`` alone, for the gradient of the weights. ``place``: where hidden rows and their gradient go
        besides."""
        total, rows_dtype, offsets = grad_y.shape[0], grad_y.dtype, groups.offsets
        grad_y = grad_y.to(self.dtype)
        acc = accumulation_dtype(self.dtype)
        at_hidden = weights if self.weight_at == "hidden" else None
        with spared(True):
            dhidden = groups.matmul(grad_y, self._backwards(self.down))
        found = hidden_gradients(projected, dhidden, at_hidden, offsets, self.activation, num_rows, placed=place)
        del dhidden
        dweights = found.weights
        up_bias = down_bias = None
        if self.down_bias is not None:
            down_bias = groups.sum(grad_y, column(at_hidden, acc))
            if dweights is not None:
                dweights = dweights + groups.dot_bias(grad_y, self.down_bias.to(self.dtype))
        if self.up_bias is not None:
            up_bias = groups.sum(found.up, None)
        with spared(False):
            product = groups.matmul(found.up, self._backwards(self.up))
        if self.weight_at == "input":
            valid = groups.valid
            if rows is not None:
                dots = torch.zeros(total, dtype=acc, device=grad_y.device)
                dots[:valid] = (product[:valid].to(acc) * rows[:valid].to(acc)).sum(-1)
                dweights = zero_padding(dots, offsets)
            drows = weighted_rows(product, weights, valid, rows_dtype)
        else:
            drows = product.to(rows_dtype)
        return Gradients(drows, dweights, found.up, grad_y, up_bias, down_bias)

    def outer(self, groups: Groups, rows: Tensor, grad: Tensor) -> Tensor:
        """The gradient of a projection's weight from its input ``rows`` [R, ·] and the gradient of its output."""
        return groups.outer(rows, grad) if self.transposed else groups.outer(grad, rows)

    def _forwards(self, weight: Tensor) -> Tensor:
        weight = weight.to(self.dtype)
        return weight if self.transposed else weight.transpose(1, 2)

    def _backwards(self, weight: Tensor) -> Tensor:
        weight = weight.to(self.dtype)
        return weight.transpose(1, 2) if self.transposed else weight
