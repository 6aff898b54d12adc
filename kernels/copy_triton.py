"""Copy of the valid prefix of a buffer whose row count only the device knows, as a Triton kernel."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from torch import Tensor

from .fast_launch import fast
from .triton_common import Launch, cdiv, require_contiguous, tl, triton

COPY = Launch(2112)


@fast
@triton.jit(do_not_specialize=["bound"])
def _copy_prefix(source, target, num_rows, bound, D: tl.constexpr, BLOCK: tl.constexpr):
    blocks: tl.constexpr = (D + BLOCK - 1) // BLOCK
    rows = tl.minimum(tl.maximum(tl.load(num_rows), 0), bound)
    for item in range(tl.program_id(0).to(tl.int64), rows * blocks, tl.num_programs(0)):
        row = item // blocks
        cols = (item % blocks) * BLOCK + tl.arange(0, BLOCK)
        tl.store(target + row * D + cols, tl.load(source + row * D + cols, mask=cols < D), mask=cols < D)


def copy_prefix(source: Tensor, target: Tensor, num_rows: Tensor, *, launch: Launch = COPY) -> None:
    """``target[:n] = source[:n]`` with n = ``num_rows`` (int64 [1]) or the shorter of the two, whichever is less.

    ``source``, ``target`` [any, D] of one dtype.
    """
    require_contiguous(source=source, target=target)
    bound, width = min(source.shape[0], target.shape[0]), source.shape[1]
    if not bound:
        return
    block = launch.columns(width)
    launch = launch.of_whole_lanes(block, source.element_size())
    grid = launch.grid(bound * cdiv(width, block))
    _copy_prefix[grid](source, target, num_rows, bound, D=width, BLOCK=block, **launch.options)
