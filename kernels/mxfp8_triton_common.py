"""What the MXFP8 kernels share: scales, elements and values of blocks of 32 (see mxfp8.py for the rules).

Values are float32 tiles [blocks, 32]; scales are int32 [blocks] or [blocks, 1].
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from .triton_common import INTERPRETED, tl, triton, widen


@triton.jit
def bytes_at(address):
    """A byte address as a pointer to bytes; records of a multiple of 512 values start on multiples of 16 bytes."""
    return tl.multiple_of(address.to(tl.pointer_type(tl.uint8), bitcast=True), 16)


@triton.jit
def magnitude_bits(values):
    """float32 bits without the sign: their order is that of the magnitudes, and NaN and Inf come last."""
    return values.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def scale_bytes(bits, CEIL: tl.constexpr):
    """Scale byte of a block whose largest magnitude has these ``bits``."""
    if CEIL:
        d = (bits.to(tl.float32, bitcast=True) * 0.0022321429569274187).to(tl.int32, bitcast=True)  # float32(1/448)
        exponent = d >> 23
        mantissa = d & 0x7FFFFF
        over_half = tl.where(mantissa > 0x400000, 1, 0)
        scale = tl.where(exponent == 0, over_half, exponent + tl.where(mantissa != 0, 1, 0))
    else:
        scale = tl.maximum((bits >> 23) - 8, 0)
    return tl.where(bits >= 0x7F800000, 255, scale)


@triton.jit
def power_of_two(scale):
    """2^(scale − 127) in float32; NaN for 255."""
    bits = tl.where(scale == 0, 0x400000, scale << 23)
    return tl.where(scale == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def to_elements(values, scale):
    """``values`` over 2^(scale − 127) as E4M3 bytes, rounded to nearest even, saturating; 7F where the scale is 255."""
    inverse = tl.where(scale < 254, (254 - scale) << 23, tl.where(scale == 254, 0x400000, 0x7FC00000))
    scaled = values * inverse.to(tl.float32, bitcast=True)
    if not INTERPRETED:  # the instruction saturates, and turns NaN into 7F
        return scaled.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    # The interpreter's own cast rounds ties among subnormal numbers wrongly.
    bits = scaled.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    bits = bits & 0x7FFFFFFF
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    shifted = bits.to(tl.float32, bitcast=True) + 16384.0  # whose last bit is 2^-9
    small = shifted.to(tl.int32, bitcast=True) - 0x46800000
    data = tl.where(bits < 0x3C800000, small, tl.minimum(normal, 0x7E)) | sign
    return tl.where(bits > 0x7F800000, 0x7F, data).to(tl.uint8)


@triton.jit
def to_values(data, scale):
    """E4M3 bytes times 2^(scale − 127) in float32, exact."""
    values = data.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    if INTERPRETED:  # the interpreter reads the NaN elements as numbers
        nan = tl.full((), 0x7FC00000, tl.int32).to(tl.float32, bitcast=True)
        values = tl.where((data & 0x7F) == 0x7F, nan, values)
    return values * power_of_two(scale)


@triton.jit
def round_to_elements(values, scale):
    """``to_values(to_elements(values, scale), scale)`` in integers, for values whose elements are stored too: there the
    ptxas of CUDA 12.8 joins two instructions of the first cast, and decodes one's result before it is there."""
    inverse = tl.where(scale < 254, (254 - scale) << 23, tl.where(scale == 254, 0x400000, 0x7FC00000))
    bits = (values * inverse.to(tl.float32, bitcast=True)).to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    normal = tl.minimum((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) & ~0xFFFFF, 0x43E00000)  # 448
    small = (magnitude.to(tl.float32, bitcast=True) + 16384.0) - 16384.0  # of which the last bit is 2^-9
    rounded = tl.where(magnitude < 0x3C800000, small.to(tl.int32, bitcast=True), normal)
    rounded = tl.where(magnitude > 0x7F800000, 0x7FC00000, rounded) | (bits ^ magnitude)
    return rounded.to(tl.float32, bitcast=True) * power_of_two(scale)


@triton.jit
def load_blocks(record, group, WIDTH: tl.constexpr, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """Blocks ``group`` [n] of ``COUNT`` values from column ``FIRST`` of the record of ``WIDTH`` values at ``record``.

    Gives the elements uint8 [n, 32] and the scale bytes int32 [n], zero for blocks past the end.
    """
    inside = group < COUNT // 32
    cols = group[:, None] * 32 + tl.arange(0, 32)[None, :]
    data = tl.load(record + FIRST + cols, mask=inside[:, None], other=0)
    scale = tl.load(record + WIDTH + FIRST // 32 + group, mask=inside, other=0).to(tl.int32)
    return data, scale


@triton.jit
def load_values(record, group, WIDTH: tl.constexpr, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """As ``load_blocks``, decoded: float32 [n, 32]."""
    data, scale = load_blocks(record, group, WIDTH, FIRST, COUNT)
    return to_values(data, scale[:, None])


@triton.jit
def store_values(record, values, group, inside, WIDTH: tl.constexpr, FIRST: tl.constexpr, CEIL: tl.constexpr):
    """Quantise float32 [n, 32] into blocks ``group`` of the record at pointer ``record``, where ``inside`` [n]."""
    scale = scale_bytes(tl.max(magnitude_bits(values), axis=1), CEIL)
    cols = group[:, None] * 32 + tl.arange(0, 32)[None, :]
    tl.store(record + FIRST + cols, to_elements(values, scale[:, None]), mask=inside[:, None])
    tl.store(record + WIDTH + FIRST // 32 + group, scale.to(tl.uint8), mask=inside)


@triton.jit
def load_float32(pointer, group, inside):
    """Blocks ``group`` [n] of a row of any float dtype at ``pointer``, as float32 [n, 32]; zero where not
    ``inside``."""
    cols = group[:, None] * 32 + tl.arange(0, 32)[None, :]
    return widen(tl.load(pointer + cols, mask=inside[:, None], other=0.0), tl.float32)
