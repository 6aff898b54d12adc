"""Settings of the MXFP8 path."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from ..config import one_of
from ..kernels.mxfp8 import ROUNDINGS

FORMATS = ("mxfp8", "bf16")
GEMMS = ("auto", "cpu_ref", "sm90_bf16", "sm90_fp8row", "sm100_mx")


@dataclass
class LegsConfig:
    """How rows travel in each of the four movements (report, Table 8): ``mxfp8``, or ``bf16``, which is the rows' own
    dtype."""

    dispatch: str = "mxfp8"
    combine: str = "mxfp8"
    combine_backward: str = "mxfp8"
    dispatch_backward: str = "mxfp8"


@dataclass
class MXFP8Config:
    """MXFP8 expert parallelism.

    ``rounding`` of the scales: ``rceil`` never saturates, ``floor`` is the rule of the OCP specification. ``legs``: the
    format of each movement. ``gemm``: what multiplies expert rows (see ``gemm``); ``auto`` chooses by the device.
    ``fast_accum``: ``sm90_fp8row`` keeps fewer bits between the steps of a sum; faster, less exact."""

    rounding: str = "rceil"
    legs: LegsConfig = field(default_factory=LegsConfig)
    gemm: str = "auto"
    fast_accum: bool = False

    def validate(self, dispatcher: str | None = None) -> None:
        """Raise ``ValueError`` quoting the setting, its value and what would be right for ``dispatcher``."""
        one_of("mxfp8.rounding", self.rounding, ROUNDINGS)
        one_of("mxfp8.gemm", self.gemm, GEMMS)
        for leg in fields(self.legs):
            value = getattr(self.legs, leg.name)
            one_of(f"mxfp8.legs.{leg.name}", value, FORMATS)
            if dispatcher == "deepep" and leg.name != "dispatch" and value != "bf16":
                raise ValueError(
                    f"mxfp8.legs.{leg.name}={value!r}: DeepEP carries MXFP8 in the dispatch of the forward pass only;"
                    " set the other three legs to 'bf16', or use dispatcher='rowwise' or 'block'"
                )
        if self.fast_accum and self.gemm != "sm90_fp8row":
            raise ValueError(f"mxfp8.fast_accum=True is a setting of gemm='sm90_fp8row', not of gemm={self.gemm!r}")
