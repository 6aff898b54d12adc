"""Expert GEMMs over rows that travelled as MXFP8: which hardware multiplies what.

    cpu_ref      CPU: both operands quantised in blocks of 32, multiplied in float32. The arithmetic of ``sm100_mx``.
    sm90_bf16    rows decoded to bfloat16, weights as they are, torch's grouped GEMM. The default on Hopper.
    sm90_fp8row  Hopper: both operands with one power of two per row, torch's rowwise FP8 grouped GEMM.
    sm100_mx     Blackwell: both operands in blocks of 32, torch's block-scaled grouped GEMM.
    sm100_te     the same operands, TransformerEngine's products of an expert each; the host waits for the row counts.

Weight gradients are bfloat16 products everywhere (in the rows' dtype), of decoded rows. The product with a row's width
contracts the weight's inputs, the one in backward its outputs; each has quantised weights of its own, because blocks
lie along the contracted axis.

Legend: R rows (padding included), E_l experts of this rank, K contracted width, N width of the result. Expert e owns
rows offsets[e] … offsets[e + 1] − 1; rows past offsets[-1] are not read, and their results are unspecified.
"""

from __future__ import annotations

import functools
import logging
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..config import GEMMS, MXFP8Config, one_of
from ..experts.groups import GroupedMM, Groups, HostLoop, grouped_mm_refusal, valid_rows
from ..kernels.mxfp8 import split_records
from ..watch import before_host_looks
from .codec import Form, Operand, dequantize, quantize, quantize_rowwise, swizzle_scales
from .weights import WeightCache

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RowGroups:
    """Which rows belong to which expert, and the dtype of plain rows.

    ``offsets`` int64 [E_l + 1]; ``num_rows``: offsets[-1] where the host knows it."""

    offsets: Tensor
    num_rows: int | None
    dtype: torch.dtype

    def plain(self, rows: Tensor, weight: Tensor) -> Groups:
        """Plain products over the groups of ``rows`` [R, ·] with ``weight``: torch's grouped GEMM on GPUs, else a loop.

        Raises ``ValueError`` saying what the grouped GEMM cannot take: a loop would wait for the device.
        """
        valid = valid_rows(self.offsets, self.num_rows, rows.shape[0])
        if not rows.is_cuda:
            return HostLoop(self.offsets, valid)
        refusal = grouped_mm_refusal(rows, weight, self.dtype)
        if refusal is not None:
            raise ValueError(f"MXFP8 experts on GPUs: {refusal}")
        return GroupedMM(self.offsets, valid)

    def sums(self, rows: int) -> Groups:
        """Sums over the groups of ``rows`` rows, biases among them; nothing here is multiplied as matrices."""
        valid = valid_rows(self.offsets, self.num_rows, rows)
        return GroupedMM(self.offsets, valid) if self.offsets.is_cuda else HostLoop(self.offsets, valid)


class ExpertGemm(ABC):
    """One way to multiply expert rows with expert weights. ``form``: how ``product`` takes its rows."""

    name: str
    form: Form

    def __init__(self, rounding: str = "rceil") -> None:
        self.rounding = rounding
        self.weights = WeightCache()

    @staticmethod
    @abstractmethod
    def refusal(device: torch.device) -> str | None:
        """Why this GEMM cannot run on ``device``, in words; None if it can."""

    @abstractmethod
    def product(self, rows: Operand, weight: Tensor, layout: RowGroups, contract: int) -> Tensor:
        """Row r times the matrix of its expert: [R, K] × ``weight`` [E_l, ·, ·] → [R, N], plain.

        ``contract``: the weight's axis of length K, 1 or 2.
        """

    def weight_gradient(self, left: Tensor, right: Tensor, weight: Tensor, layout: RowGroups) -> Tensor:
        """The gradient of ``weight`` [E_l, A, B]: leftᵀ·right over each expert's rows of ``left`` [R, A], ``right`` [R,
        B], both plain; zero for an expert without rows."""
        return layout.plain(left, weight).outer(left, right).to(weight.dtype)

    def _weight_rows(self, weight: Tensor, contract: int) -> Tensor:
        """[E_l, N, K]: the weight with the contracted axis last."""
        return weight if contract == 2 else weight.transpose(1, 2)


class CpuReference(ExpertGemm):
    """``cpu_ref``."""

    name, form = "cpu_ref", "records"

    @staticmethod
    def refusal(device: torch.device) -> str | None:
        return None if device.type == "cpu" else f"it is the reference for CPUs, and the rows are on {device.type}"

    def product(self, rows: Operand, weight: Tensor, layout: RowGroups, contract: int) -> Tensor:
        records = self.weights.get(weight, ("records", contract), lambda w: self._quantized(w, contract))
        matrices = dequantize(records.flatten(0, 1), torch.float32).unflatten(0, records.shape[:2])
        decoded = dequantize(rows.data, torch.float32, offsets=layout.offsets)
        return layout.plain(decoded, matrices).matmul(decoded, matrices.transpose(1, 2)).to(layout.dtype)

    def _quantized(self, weight: Tensor, contract: int) -> Tensor:
        """Records uint8 [E_l, N, K + K/32]."""
        by_row = self._weight_rows(weight, contract)
        return quantize(by_row.flatten(0, 1), self.rounding).unflatten(0, by_row.shape[:2])


class Sm90Bf16(ExpertGemm):
    """``sm90_bf16``."""

    name, form = "sm90_bf16", "plain"

    @staticmethod
    def refusal(device: torch.device) -> str | None:
        return _capability_refusal(device, lambda major: major >= 9, "9.0 or later")

    def product(self, rows: Operand, weight: Tensor, layout: RowGroups, contract: int) -> Tensor:
        matrices = weight.detach().to(layout.dtype)
        groups = layout.plain(rows.data, matrices)
        return groups.matmul(rows.data, matrices if contract == 1 else matrices.transpose(1, 2))


class Sm90Fp8Row(ExpertGemm):
    """``sm90_fp8row``."""

    name, form = "sm90_fp8row", "rowwise"

    def __init__(self, rounding: str = "rceil", fast_accum: bool = False) -> None:
        super().__init__(rounding)
        self.fast_accum = fast_accum

    @staticmethod
    def refusal(device: torch.device) -> str | None:
        return _capability_refusal(device, lambda major: major == 9, "9.x")

    def product(self, rows: Operand, weight: Tensor, layout: RowGroups, contract: int) -> Tensor:
        assert rows.scales is not None
        data, scales = self.weights.get(weight, ("rowwise", contract), lambda w: self._quantized(w, contract))
        if not rows.data.shape[0]:
            return rows.data.new_empty((0, data.shape[1]), dtype=layout.dtype)
        product: Tensor = torch._scaled_grouped_mm(
            rows.data,
            data.transpose(1, 2),
            rows.scales,
            scales,
            offs=layout.offsets[1:].to(torch.int32),
            out_dtype=torch.bfloat16,
            use_fast_accum=self.fast_accum,
        )
        return product.to(layout.dtype)

    def _quantized(self, weight: Tensor, contract: int) -> tuple[Tensor, Tensor]:
        """E4M3 [E_l, N, K] and one power of two for each of its rows, float32 [E_l, N]."""
        by_row = self._weight_rows(weight, contract)
        rowwise = quantize_rowwise(by_row.flatten(0, 1), self.rounding)
        assert rowwise.scales is not None
        return rowwise.data.unflatten(0, by_row.shape[:2]), rowwise.scales.unflatten(0, by_row.shape[:2])


class Sm100Mx(ExpertGemm):
    """``sm100_mx``. Its packing is tested; the product itself has not run, for want of such a GPU."""

    name, form = "sm100_mx", "records"

    @staticmethod
    def refusal(device: torch.device) -> str | None:
        # The native call on an older GPU destroys the CUDA context of the process.
        return _capability_refusal(device, lambda major: major == 10, "10.x")

    def product(self, rows: Operand, weight: Tensor, layout: RowGroups, contract: int) -> Tensor:
        refusal = self.refusal(weight.device)
        if refusal is not None:
            raise RuntimeError(f"gemm='sm100_mx' cannot run here: {refusal}")
        packed = self.weights.get(weight, ("mx", contract), lambda w: self.pack_weight(w, contract))
        if not rows.data.shape[0]:
            return rows.data.new_empty((0, packed[0].shape[1]), dtype=layout.dtype)
        data, scales = self.pack_rows(rows.data, layout.offsets)
        tiles, block = F.SwizzleType.SWIZZLE_32_4_4, F.ScalingType.BlockWise1x32
        product: Tensor = F.scaled_grouped_mm(  # type: ignore[attr-defined]
            data,
            packed[0].transpose(1, 2),
            scale_a=scales,
            scale_recipe_a=block,
            scale_b=packed[1],
            scale_recipe_b=block,
            swizzle_a=tiles,
            swizzle_b=tiles,
            offs=layout.offsets[1:].to(torch.int32),
            output_dtype=torch.bfloat16,
        )
        return product.to(layout.dtype)

    def pack_rows(self, records: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
        """Records [R, K + K/32] → E4M3 [R, K], contiguous, and the scales' tiles (float8_e8m0fnu), by group."""
        data, scales = split_records(records)
        return data.contiguous(), swizzle_scales(scales, offsets).view(torch.float8_e8m0fnu)

    def pack_weight(self, weight: Tensor, contract: int) -> tuple[Tensor, Tensor]:
        """E4M3 [E_l, N, K] and its scales' tiles (float8_e8m0fnu) [E_l, N padded to 128 · K/32 padded to 4]."""
        by_row = self._weight_rows(weight, contract)
        experts, rows, _ = by_row.shape
        data, scales = split_records(quantize(by_row.flatten(0, 1), self.rounding))
        offsets = torch.arange(experts + 1, device=weight.device) * rows
        tiles = swizzle_scales(scales, offsets)[: experts * (-(-rows // 128) * 128)]
        return data.contiguous().unflatten(0, by_row.shape[:2]), tiles.reshape(experts, -1).view(torch.float8_e8m0fnu)


class Sm100TE(Sm100Mx):
    """``sm100_te``. Its packing is tested; the product itself has not run, for want of such a GPU."""

    name = "sm100_te"

    @staticmethod
    def refusal(device: torch.device) -> str | None:
        missing = Sm100Mx.refusal(device)
        if missing is None:
            try:
                transformer_engine()
            except Exception as error:  # half an installation fails in many ways
                missing = f"it needs TransformerEngine, whose import failed: {type(error).__name__}: {error}"
        return missing

    def product(self, rows: Operand, weight: Tensor, layout: RowGroups, contract: int) -> Tensor:
        refusal = self.refusal(weight.device)
        if refusal is not None:
            raise RuntimeError(f"gemm={self.name!r} cannot run here: {refusal}")
        te = transformer_engine()
        weights = self.weights.get(weight, ("te", contract), lambda w: self.pack_weight(w, contract))
        out = torch.empty((rows.data.shape[0], weights[0].shape[1]), dtype=layout.dtype, device=rows.data.device)
        place, sizes, data, scales = self.pack_groups(rows.data, layout.offsets)
        if not place.numel():
            return out
        padded = torch.empty((len(data), out.shape[1]), dtype=torch.bfloat16, device=out.device)
        te.grouped_gemm(
            [te.mxfp8(matrix, tiles.view(-1, scales.shape[1])) for matrix, tiles in zip(*weights, strict=True)],
            [te.mxfp8(part, tiles) for part, tiles in zip(data.split(sizes), scales.split(sizes), strict=True)],
            padded,
            sizes,
        )
        out[: len(place)] = padded[place].to(layout.dtype)
        return out

    def pack_groups(self, records: Tensor, offsets: Tensor) -> tuple[Tensor, list[int], Tensor, Tensor]:
        """Records [R, K + K/32] with every group padded by zero rows to whole tiles of 128: the place int64 [valid R]
        of each row, the padded group sizes, E4M3 [sum(sizes), K] and the scales' tiles (float8_e8m0fnu)."""
        before_host_looks(offsets.device)
        counts = offsets.diff().cpu()
        sizes = (counts + 127) // 128 * 128
        shift = torch.repeat_interleave(sizes.cumsum(0) - sizes - (counts.cumsum(0) - counts), counts)
        place = (torch.arange(len(shift)) + shift).to(records.device)
        data, scales = split_records(records[: len(shift)])
        padded = torch.zeros((int(sizes.sum()), data.shape[1]), dtype=torch.uint8, device=records.device)
        padded[place] = data.view(torch.uint8)
        tiles = swizzle_scales(scales, offsets)[: len(padded)]
        return place, sizes.tolist(), padded.view(torch.float8_e4m3fn), tiles.view(torch.float8_e8m0fnu)


class TransformerEngine:
    """What of TransformerEngine multiplies MXFP8 operands whose scales lie in tiles already."""

    def __init__(self) -> None:
        import transformer_engine.pytorch  # noqa: F401  loads the library of the next two
        import transformer_engine_torch
        from transformer_engine.pytorch.cpp_extensions import general_grouped_gemm
        from transformer_engine.pytorch.tensor.storage.mxfp8_tensor_storage import MXFP8TensorStorage

        self._gemm, self._storage = general_grouped_gemm, MXFP8TensorStorage
        self._e4m3 = transformer_engine_torch.DType.kFloat8E4M3

    def mxfp8(self, data: Tensor, tiles: Tensor) -> Any:
        """E4M3 [rows, K] and the tiles of its scales [rows padded to 128, K/32 padded to 4] as one operand."""
        return self._storage(
            data.view(torch.uint8),
            tiles.view(torch.uint8),
            None,
            None,
            self._e4m3,
            None,
            True,  # in tiles
            fake_dtype=torch.bfloat16,
        )

    def grouped_gemm(self, weights: list[Any], rows: list[Any], out: Tensor, sizes: list[int]) -> None:
        """``out`` [sum(sizes), N] = the rows of each group times their weight [N, K] transposed."""
        self._gemm(weights, rows, [out], [None] * len(rows), out.dtype, m_splits=sizes, single_output=True)


@functools.cache
def transformer_engine() -> TransformerEngine:
    """Imported once; whatever a broken installation raises."""
    return TransformerEngine()


_BACKENDS: dict[str, Any] = {cls.name: cls for cls in (CpuReference, Sm90Bf16, Sm90Fp8Row, Sm100Mx, Sm100TE)}


def _capability_refusal(device: torch.device, takes: Any, wanted: str) -> str | None:
    if device.type != "cuda":
        return f"it needs a CUDA GPU of compute capability {wanted}, and the rows are on {device.type}"
    capability = torch.cuda.get_device_capability(device)
    if takes(capability[0]):
        return None
    return f"it needs compute capability {wanted}, this GPU has {'.'.join(map(str, capability))}"


def choose_gemm(config: MXFP8Config, device: torch.device) -> ExpertGemm:
    """The GEMM that ``config.gemm`` names; ``auto``: ``cpu_ref`` on CPU, the native one on Blackwell, ``sm90_bf16`` on
    Hopper, said in the log. Raises ``ValueError`` saying what ``device`` lacks."""
    one_of("mxfp8.gemm", config.gemm, GEMMS)
    names = ("cpu_ref", "sm100_mx", "sm90_bf16") if config.gemm == "auto" else (config.gemm,)
    refusals = {}
    for name in names:
        refusal = _BACKENDS[name].refusal(device)
        if refusal is None:
            if config.gemm == "auto":
                logger.info("mxfp8.gemm=auto: %s on %s", name, device)
            if name == "sm90_fp8row":
                return Sm90Fp8Row(config.rounding, config.fast_accum)
            return _BACKENDS[name](config.rounding)
        refusals[name] = refusal
    reasons = "; ".join(f"{name}: {why}" for name, why in refusals.items())
    raise ValueError(f"mxfp8.gemm={config.gemm!r} cannot run on {device}: {reasons}")
