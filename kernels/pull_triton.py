"""One-sided reads of token rows by the expert rank, as a Triton kernel (see pull.py for what it does).

Legend: T tokens of a source, M ranks, R expert rows, D row width. A source rank outside [0, M) or a row outside [0, T)
is skipped. Rows are moved in blocks of columns; one work item is one (row, block).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from torch import Tensor

from .fast_launch import fast
from .peers import Peers
from .triton_common import PEER_INTEGERS, Launch, cdiv, peer_address, require_contiguous, rows_at, tl, triton

PULL = Launch(1056, block=1024)  # a read waits for the link and back, so more of them are under way than in a PUT


@fast
@triton.jit(do_not_specialize=[*PEER_INTEGERS, "num_tokens", "num_rows"])
def _pull_rows(
    base,
    handles,
    handle_stride,
    max_handle,
    offset,
    num_tokens,
    source_rank,
    source_row,
    out,
    num_rows,
    M: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    blocks: tl.constexpr = (D + BLOCK - 1) // BLOCK
    first = tl.program_id(0).to(tl.int64)
    for item in range(first, num_rows * blocks, tl.num_programs(0)):
        i = item // blocks
        cols = (item % blocks) * BLOCK + tl.arange(0, BLOCK)
        rank = tl.load(source_rank + i)
        row = tl.load(source_row + i).to(tl.int64)
        if (rank >= 0) & (rank < M) & (row >= 0) & (row < num_tokens):
            address = peer_address(base, handles, handle_stride, max_handle, offset, rank)
            if address != 0:
                values = tl.load(rows_at(address, out) + row * D + cols, mask=cols < D)
                tl.store(out + i * D + cols, values, mask=cols < D)


def pull_rows(
    peers: Peers, source_rank: Tensor, source_row: Tensor, out: Tensor, *, num_tokens: int, launch: Launch = PULL
) -> None:
    """Every expert row from its token's rank, as ``pull_rows_torch``; rows outside [0, ``num_tokens``) are not read.

    ``peers`` [num_tokens, D] on each rank; ``source_rank``, ``source_row`` int32 [R]; ``out`` [at least R, D].
    """
    require_contiguous(source_rank=source_rank, source_row=source_row, out=out)
    num_rows, width = source_rank.numel(), out.shape[1]
    if num_rows > out.shape[0]:
        raise ValueError(f"{num_rows} rows do not fit in out {list(out.shape)}")
    if not num_rows:
        return
    block = launch.columns(width)
    launch = launch.of_whole_lanes(block, out.element_size())
    _pull_rows[launch.grid(num_rows * cdiv(width, block))](
        *peers.arguments,
        num_tokens,
        source_rank,
        source_row,
        out,
        num_rows,
        M=peers.world,
        D=width,
        BLOCK=block,
        **launch.options,
    )
