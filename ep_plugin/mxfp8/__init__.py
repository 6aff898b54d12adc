"""MXFP8 expert parallelism: codec, expert GEMMs, and the autograd node of a whole MoE step."""

from ..config import LegsConfig, MXFP8Config
from .dispatchers import build_mxfp8_dispatcher
from .node import mxfp8_mlp, mxfp8_moe_step
from .weights import invalidate

__all__ = [
    "LegsConfig",
    "MXFP8Config",
    "build_mxfp8_dispatcher",
    "invalidate",
    "mxfp8_mlp",
    "mxfp8_moe_step",
]
