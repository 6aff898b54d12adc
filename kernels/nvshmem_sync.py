"""Signals, bounded waits and exchanged records through NVSHMEM's device functions: ``sync_triton`` for ranks that have
no pointers to each other's memory.

The words, mailboxes and abort words are the same ones; only how they are reached differs. A wait spins on our own
memory as there, and tells the other ranks through NVSHMEM when it gives up.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from torch import Tensor

from .nvshmem_library import lanes, library_kernel, put_bytes, quiet, see_arrivals, set_where_zero, signal_ranks
from .peers import Peers
from .sync_triton import _TIMED_OUT, _WATCH, Watch, _await, _require_plain, require_mail
from .triton_common import tl, triton


@library_kernel
@triton.jit(do_not_specialize=["offset", "me"])
def _post(counter, base, offset, ticket, me, M: tl.constexpr, LANES: tl.constexpr):
    posted = tl.load(counter) + 1
    tl.store(counter, posted)
    if ticket is not None:
        tl.store(ticket, posted)
    quiet()
    signal_ranks(tl.load(base + me) + offset, posted, base, me, M, LANES)


@library_kernel
@triton.jit(do_not_specialize=["length", "mail_offset", "parity_stride", "offset", "me"])
def _send(
    record,
    length,
    counter,
    mail_base,
    mail_offset,
    parity_stride,
    base,
    offset,
    ticket,
    me,
    M: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    posted = tl.load(counter) + 1
    parity = tl.load(counter + 1) % 2
    address = tl.load(mail_base + me) + mail_offset + parity * parity_stride
    box = address.to(tl.pointer_type(tl.int64), bitcast=True)
    for tile in range(0, length, BLOCK):
        i = tile + tl.arange(0, BLOCK)
        tl.store(box + i, tl.load(record + i, mask=i < length), mask=i < length)
    tl.debug_barrier()  # the whole record is in our own mailbox, from where it travels
    nbytes = length * tl.full((), 8, tl.int64)
    if length > 0:
        for step in range(1, M):
            rank = ((me + step) % M + tl.zeros((), tl.int32)).to(tl.int32)
            put_bytes(address, address, nbytes, rank, mail_base, me)
    tl.store(counter, posted)
    if ticket is not None:
        tl.store(ticket, posted)
    quiet()
    signal_ranks(tl.load(base + me) + offset, posted, base, me, M, LANES)


@triton.jit
def _tell(failure, ticket, arrived, arrived_stride, abort_base, abort_offset, abort_value, me, M, LANES):
    """After a wait: make visible what arrived, or tell every rank that this one has given up."""
    if failure == 0:
        for p in range(M):
            see_arrivals((arrived + p * arrived_stride).to(tl.int64, bitcast=True), ticket)
    if failure == _TIMED_OUT:
        set_where_zero(tl.load(abort_base + me) + abort_offset, abort_value, abort_base, me, M, LANES)


@library_kernel
@triton.jit(do_not_specialize=[*_WATCH, "me"])
def _wait(
    ticket,
    arrived,
    arrived_stride,
    abort,
    abort_base,
    abort_offset,
    abort_value,
    status,
    timeout_ns,
    code,
    me,
    M: tl.constexpr,
    LANES: tl.constexpr,
):
    wanted = tl.load(ticket)
    failure = _await(
        wanted,
        arrived,
        arrived_stride,
        abort,
        abort_base,
        abort_offset,
        abort_value,
        status,
        timeout_ns,
        code,
        M,
        32,
    )
    _tell(failure, wanted, arrived, arrived_stride, abort_base, abort_offset, abort_value, me, M, LANES)


@library_kernel
@triton.jit(do_not_specialize=[*_WATCH, "length", "parity_stride", "source_stride", "me"])
def _receive(
    ticket,
    counter,
    mail,
    parity_stride,
    source_stride,
    records,
    length,
    arrived,
    arrived_stride,
    abort,
    abort_base,
    abort_offset,
    abort_value,
    status,
    timeout_ns,
    code,
    me,
    M: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    parity = tl.load(counter + 1) % 2
    received = tl.load(counter + 1) + 1
    wanted = tl.load(ticket)
    failure = _await(
        wanted,
        arrived,
        arrived_stride,
        abort,
        abort_base,
        abort_offset,
        abort_value,
        status,
        timeout_ns,
        code,
        M,
        32,
    )
    _tell(failure, wanted, arrived, arrived_stride, abort_base, abort_offset, abort_value, me, M, LANES)
    for p in range(M):
        box = mail + parity * parity_stride + p * source_stride
        for tile in range(0, length, BLOCK):
            i = tile + tl.arange(0, BLOCK)
            words = tl.load(box + i, mask=i < length, other=-1, volatile=True)
            tl.store(records + p * length + i, tl.where(failure == 0, words, -1), mask=i < length)
    tl.store(counter + 1, received)


@library_kernel
@triton.jit(do_not_specialize=["offset", "value", "me"])
def _set_abort(base, offset, value, me, M: tl.constexpr, LANES: tl.constexpr):
    set_where_zero(tl.load(base + me) + offset, value + tl.zeros((), tl.int64), base, me, M, LANES)


class LibrarySignals:
    """``post``, ``wait``, ``send``, ``receive`` and ``set_abort`` of ``sync_triton`` for rank ``me`` of the NVSHMEM
    world. Of the addresses in ``Peers`` only our own are used; the words a wait looks at are our own anyway, and so
    must be all of ``Watch.abort_at.base``."""

    def __init__(self, me: int) -> None:
        self.me = me

    def post(self, counter: Tensor, signals: Peers, ticket: Tensor | None = None) -> None:
        """As ``sync_triton.post``; also completes what NVSHMEM still moves for this rank."""
        _require_plain(signals)
        world = signals.world
        _post[(1,)](counter, signals.base, signals.offset, ticket, self.me, M=world, LANES=lanes(world), num_warps=1)

    def wait(self, ticket: Tensor, watch: Watch) -> None:
        """As ``sync_triton.wait``."""
        world = watch.arrived.numel()
        _wait[(1,)](ticket, *watch.arguments, self.me, M=world, LANES=lanes(world), num_warps=1)

    def send(
        self, record: Tensor, counter: Tensor, mailboxes: Peers, parity_stride: int, signals: Peers, ticket: Tensor
    ) -> None:
        """As ``sync_triton.send``."""
        _require_plain(mailboxes)
        _require_plain(signals)
        world = signals.world
        _send[(1,)](
            record,
            record.numel(),
            counter,
            mailboxes.base,
            mailboxes.offset,
            parity_stride,
            signals.base,
            signals.offset,
            ticket,
            self.me,
            M=world,
            LANES=lanes(world),
            BLOCK=256,
            num_warps=1,
        )

    def receive(self, ticket: Tensor, counter: Tensor, mail: Tensor, records: Tensor, watch: Watch) -> None:
        """As ``sync_triton.receive``."""
        require_mail(records, mail)
        world = records.shape[0]
        _receive[(1,)](
            ticket,
            counter,
            mail,
            mail.stride(0),
            mail.stride(1),
            records,
            records.shape[1],
            *watch.arguments,
            self.me,
            M=world,
            LANES=lanes(world),
            BLOCK=256,
            num_warps=1,
        )

    def set_abort(self, abort_at: Peers, value: int) -> None:
        """As ``sync_triton.set_abort``."""
        _require_plain(abort_at)
        world = abort_at.world
        _set_abort[(1,)](abort_at.base, abort_at.offset, value, self.me, M=world, LANES=lanes(world), num_warps=1)
