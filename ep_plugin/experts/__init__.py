"""Expert computation over expert-contiguous rows: grouped linear maps, activations and the grouped expert MLP."""

from .activation import Activation, weighted_activation
from .grouped_linear import grouped_linear
from .mlp import ExpertMLP, GroupedMLP, WeightAt, grouped_mlp

__all__ = [
    "Activation",
    "ExpertMLP",
    "GroupedMLP",
    "WeightAt",
    "grouped_linear",
    "grouped_mlp",
    "weighted_activation",
]
