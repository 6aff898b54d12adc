"""The MXFP8 codec's references: bit vectors, an independent oracle in exact arithmetic, poison, layouts."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from ep_plugin.config import ROUNDINGS
from ep_plugin.kernels import mxfp8
from ep_plugin.kernels.mxfp8_swiglu import sigmoid_torch, swiglu_backward_torch, swiglu_torch
from tests.mxfp8_cases import hard_rows

INF, NAN = math.inf, math.nan
# First four values of a block, the rest zero → scale and first four elements, under floor and under rceil.
VECTORS = [
    ([0.0, -0.0, 0.0, 0.0], "00 00 80 00 00", "00 00 80 00 00"),
    ([1, -0.5, 0.25, 0.1], "77 78 F0 68 5D", "77 78 F0 68 5D"),
    ([448, -448, 1, 0.0625], "7F 7E FE 38 18", "7F 7E FE 38 18"),
    ([450, -450, 1, 0.0625], "7F 7E FE 38 18", "80 76 F6 30 10"),
    ([480, -464, -400, 3], "7F 7E FE FC 44", "80 77 F6 F4 3C"),
    ([1.75, 1.7578125, -1.75, 2**-11], "77 7E 7E FE 20", "78 76 76 F6 18"),
    ([448, 17, 19, 2**-10], "7F 7E 58 5A 00", "7F 7E 58 5A 00"),
    ([2**-120, -(2**-121), 2**-126, 2**-133], "00 70 E8 40 08", "00 70 E8 40 08"),
    ([torch.finfo(torch.bfloat16).max, -1e38, 1, 1e30], "F6 7E F1 00 00", "F7 78 E9 00 00"),
    ([1.2e-7, -3.4e-8, 9e-10, -1.5e-7], "60 78 E9 3F FA", "60 78 E9 3F FA"),
    ([1, INF, 2, 3], "FF 7F 7F 7F 7F", "FF 7F 7F 7F 7F"),
    ([1, -INF, 2, 3], "FF 7F 7F 7F 7F", "FF 7F 7F 7F 7F"),
    ([1, 2, NAN, 3], "FF 7F 7F 7F 7F", "FF 7F 7F 7F 7F"),
]


@pytest.mark.parametrize(("values", "floor", "rceil"), VECTORS)
def test_bit_vectors(values: list[float], floor: str, rceil: str) -> None:
    """A scale rule or a rounding that differs from other implementations' in any corner."""
    x = torch.zeros(1, 32, dtype=torch.float64)
    x[0, :4] = torch.tensor(values, dtype=torch.float64)
    for rounding, want in (("floor", floor), ("rceil", rceil)):
        for dtype in (torch.bfloat16, torch.float32):
            record = mxfp8.quantize_torch(x.to(torch.bfloat16).to(dtype), rounding)[0].tolist()
            assert " ".join(f"{b:02X}" for b in [record[32], *record[:4]]) == want, (rounding, dtype)
            rest = 0x7F if record[32] == 0xFF else 0
            assert record[4:32] == [rest] * 28


def _elements() -> Tensor:
    """The 127 E4M3 numbers that are not negative, by their definition."""
    numbers = [m * 2.0**-9 for m in range(8)]
    numbers += [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)]
    return torch.tensor(numbers[:127], dtype=torch.float64)


def _nearest(values: Tensor) -> Tensor:
    """The nearest E4M3 number to each float64 value, ties to an even last bit, saturating; as element bytes."""
    grid = _elements()
    magnitude = values.abs().clamp(max=448.0)
    upper = torch.searchsorted(grid, magnitude).clamp(max=126)
    lower = (upper - 1).clamp(min=0)
    below, above = magnitude - grid[lower], grid[upper] - magnitude
    pick_upper = (above < below) | ((above == below) & (upper % 2 == 0))
    return torch.where(pick_upper, upper, lower) | torch.where(values.signbit(), 0x80, 0)


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_random_rows_against_exact_arithmetic(rounding: str) -> None:
    """A rounding error that the vectors do not show; a scale taken in too few bits."""
    x = hard_rows(200, 256, torch.bfloat16)
    records = mxfp8.quantize_torch(x, rounding)
    data, scales = mxfp8.split_records(records)
    blocks = x.double().view(200, 8, 32)
    for row in range(200):
        for block in range(8):
            values = blocks[row, block]
            scale, elements = int(scales[row, block]), data.view(torch.uint8)[row, block * 32 : block * 32 + 32]
            if not values.isfinite().all():
                assert scale == 255 and (elements == 0x7F).all()
                continue
            largest = values.abs().max().item()
            if largest == 0:
                exponent = -127
            elif rounding == "floor":
                exponent = max(math.frexp(largest)[1] - 1 - 8, -127)
            else:  # the least power of two that is not below largest/448
                fraction, exponent = math.frexp(largest / 448)
                exponent = max(exponent - 1 if fraction == 0.5 else exponent, -127)
            assert scale == exponent + 127, (row, block, largest)
            assert torch.equal(elements.long(), _nearest(values * 2.0**-exponent)), (row, block)


def test_every_bfloat16_magnitude_gets_the_scale_of_the_integer_rule() -> None:
    """exp(a) − 8 + (mantissa > 0x60) for every normal bfloat16 from 2^-118 on: the float32 rule's exact form."""
    bits = torch.arange(9 << 7, 255 << 7, dtype=torch.int32)
    x = torch.zeros(len(bits), 32, dtype=torch.bfloat16)
    x[:, 17] = bits.to(torch.int16).view(torch.bfloat16)
    scales = mxfp8.quantize_torch(x)[:, 32].int()
    want = (bits >> 7) - 8 + ((bits & 0x7F) > 0x60).int()
    assert torch.equal(scales, want)


def test_poison_stays_in_its_block_and_visible() -> None:
    """An overflow that a cast hides, or that spreads to a neighbour's values."""
    x = torch.ones(2, 96)
    x[0, 40] = INF
    values = mxfp8.dequantize_torch(mxfp8.quantize_torch(x))
    assert values[0, 32:64].isnan().all()
    assert torch.equal(values[0, :32], x[0, :32]) and torch.equal(values[1], x[1])
    data, scales = mxfp8.rescale_torch(mxfp8.quantize_torch(x))
    assert scales[0].isnan() and (data.view(torch.uint8)[0] == 0x7F).all() and scales[1].isfinite()
    overflow = mxfp8.quantize_torch(torch.full((1, 32), 3e38), row_weight=torch.tensor([2.0]))
    assert (overflow[0, :32] == 0x7F).all() and overflow[0, 32] == 255


def test_the_weight_is_applied_before_the_one_rounding() -> None:
    """A product that is rounded to bfloat16 first."""
    x = torch.randn(64, 64, dtype=torch.bfloat16)
    weight = torch.rand(64)
    want = mxfp8.quantize_torch(x.float() * weight[:, None])
    assert torch.equal(mxfp8.quantize_torch(x, row_weight=weight), want)
    rounded = mxfp8.quantize_torch((x.float() * weight[:, None]).to(torch.bfloat16))
    assert not torch.equal(want, rounded), "the case cannot tell"


def test_rescaling_is_nearly_the_payload() -> None:
    """A rescale that loses more than the bits below the row's grid."""
    x = torch.randn(256, 1024, dtype=torch.bfloat16)
    records = mxfp8.quantize_torch(x)
    payload = mxfp8.dequantize_torch(records).double()
    data, scales = mxfp8.rescale_torch(records)
    error = data.double() * scales[:, None] - payload
    assert 10 * math.log10(payload.square().sum() / error.square().sum().clamp(min=1e-300)) > 60
    assert torch.equal(scales, scales.log2().round().exp2())


def test_quantisation_noise_of_normal_values() -> None:
    """Elements that lose a bit: E4M3 gives about 31.5 dB."""
    x = torch.randn(512, 1024, dtype=torch.float64)
    for rounding in ROUNDINGS:
        error = mxfp8.dequantize_torch(mxfp8.quantize_torch(x.float(), rounding)).double() - x
        assert 10 * math.log10(x.square().sum() / error.square().sum()) > 30


def test_swizzle_formula() -> None:
    """A tile in the wrong place, a group that does not start on a tile, padding that is not 2^-127."""
    counts, columns = [130, 0, 5], 7
    offsets = torch.tensor([0, *counts]).cumsum(0)
    scales = torch.randint(1, 255, (int(offsets[-1]) + 3, columns), dtype=torch.uint8)
    out = mxfp8.swizzle_scales_torch(scales, offsets)
    assert out.shape[0] >= 128 * 3 and out.shape[0] % 128 == 0 and out.shape[1] == 8
    flat, seen = out.flatten(), torch.zeros(out.numel(), dtype=torch.bool)
    first = 0
    for e, n in enumerate(counts):
        for r in range(n):
            for c in range(columns):
                at = first + ((r // 128) * 2 + c // 4) * 512 + (r % 32) * 16 + ((r % 128) // 32) * 4 + c % 4
                assert flat[at] == scales[int(offsets[e]) + r, c]
                seen[at] = True
        first += -(-n // 128) * 2 * 512
    assert not flat[~seen].any()


@pytest.mark.parametrize("width", [0, 31, 48, 33])
def test_widths_that_are_no_blocks_are_refused(width: int) -> None:
    """Rows whose last block would read past them."""
    with pytest.raises(ValueError, match=str(width)):
        mxfp8.record_bytes(width)
    with pytest.raises(ValueError, match="99999"):
        mxfp8.record_width(99999)


def test_no_rows() -> None:
    """Shapes that only exist with at least one row."""
    records = mxfp8.quantize_torch(torch.empty(0, 64))
    assert records.shape == (0, 66) and mxfp8.dequantize_torch(records).shape == (0, 64)
    data, scales = mxfp8.rescale_torch(records)
    assert data.shape == (0, 64) and scales.shape == (0,)


def test_sigmoid_is_the_sigmoid() -> None:
    """A wrong coefficient or range reduction of the polynomial."""
    x = torch.linspace(-80, 200, 100_001)
    want = torch.sigmoid(x.double())
    assert ((sigmoid_torch(x).double() - want) / want).abs().max() < 5e-6  # |x|·2^-24 of the argument's rounding
    assert (sigmoid_torch(torch.tensor([-1e30])) < 1e-37).all() and sigmoid_torch(torch.tensor([1e30])) == 1


def test_swiglu_gradients() -> None:
    """A wrong derivative, or a weight missing from one of the three results."""
    up = torch.randn(9, 128, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(9, dtype=torch.float64, requires_grad=True)
    gate, linear = up.chunk(2, dim=1)
    hidden = torch.nn.functional.silu(gate) * linear * weights[:, None]
    grad = torch.randn_like(hidden)
    hidden.backward(grad)
    arguments = up.detach().float(), grad.float(), weights.detach().float()
    got, dup, dweights = swiglu_backward_torch(*arguments)
    assert dweights is not None
    pairs = ((got, hidden), (dup, up.grad), (dweights, weights.grad), (swiglu_torch(*arguments[::2]), hidden))
    for mine, theirs in pairs:
        assert theirs is not None
        torch.testing.assert_close(mine.double(), theirs.detach(), rtol=1e-5, atol=1e-5)
