"""Signals, bounded waits and exchanged records between GPUs, as one-program Triton kernels.

Every rank has, in its own memory, one int64 word per (channel, peer) that only this peer raises, mailboxes that peers
write records into, and one abort word. Counters live in device memory and only grow, so a captured CUDA graph can be
replayed: nothing here depends on a number that the host counts.

Order: what a stream did before ``post`` or ``send`` is visible to every rank whose ``wait`` or ``receive`` saw the
counter (a release store with system scope, an acquire load with system scope).

Only these kernels spin. They look at the abort word before the clock and give up after ``timeout_ns``.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from .fast_launch import fast
from .peers import Peers
from .triton_common import INTERPRETED, next_power_of_2, tl, triton

OK, TIMED_OUT, ABORTED = 0, 1, 2  # status[0]
STATUS_WORDS = 3
INTERPRETED_LOOK_NS = tl.constexpr(100_000)  # a look at the words costs the interpreter at least this long

_TIMED_OUT = tl.constexpr(TIMED_OUT)
_ABORTED = tl.constexpr(ABORTED)


@dataclass(frozen=True)
class Watch:
    """What a wait on one channel looks at, and what it does when it gives up.

    ``arrived``: int64 [M], the words of this rank that the peers raise. ``abort``: int64 [1], this rank's abort word, 0
    while all is well; ``abort_at``: the same word on every rank, this one included. ``abort_value``: what a wait that
    times out writes there, unless the word is set already: not 0, and enough for a peer to name this rank and ``code``.
    ``status``: int64 [3], on the device or pinned on the host, zeroed: TIMED_OUT or ABORTED, ``code``, and the bits of
    the peers that were late; the first failure stays. ``code``: names the operation to the host.
    """

    arrived: Tensor
    abort: Tensor
    abort_at: Peers
    abort_value: int
    status: Tensor
    timeout_ns: int
    code: int = 0

    @cached_property
    def arguments(self) -> tuple[Tensor, int, Tensor, Tensor, int, int, Tensor, int, int]:
        _require_plain(self.abort_at)
        if not self.abort_value:
            raise ValueError("abort_value 0 means that all is well; it must name the rank that gave up")
        return (
            self.arrived,
            self.arrived.stride(0),
            self.abort,
            self.abort_at.base,
            self.abort_at.offset,
            self.abort_value,
            self.status,
            self.timeout_ns,
            self.code,
        )


_WATCH = ["arrived_stride", "abort_offset", "abort_value", "timeout_ns", "code"]


@triton.jit
def _now(THREADS: tl.constexpr):
    """Nanoseconds, the same for all threads: a branch on a clock that each thread read for itself would tear them."""
    lanes = tl.inline_asm_elementwise(
        "mov.u64 $0, %globaltimer;", "=l,r", [tl.arange(0, THREADS)], dtype=tl.int64, is_pure=False, pack=1
    )
    return tl.max(lanes, 0)


@triton.jit
def _look(word):
    """An int64 word that a peer may write at any time: acquire, system scope."""
    return tl.atomic_add(word, 0, sem="acquire", scope="sys")


@triton.jit
def _await(
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
    M: tl.constexpr,
    THREADS: tl.constexpr,
):
    """Wait until every peer's word is >= ticket; gives 0, or why it gave up, which it has then reported."""
    late = tl.full((), 0, tl.int64)
    looks = tl.full((), 0, tl.int64)
    failure = tl.where(_look(abort) != 0, _ABORTED, 0)
    if not INTERPRETED:
        start = _now(THREADS)
    for p in range(M):
        seen = _look(arrived + p * arrived_stride)
        while (seen < ticket) & (failure == 0):
            looks += 1
            if INTERPRETED:
                waited = looks * INTERPRETED_LOOK_NS
            else:
                waited = _now(THREADS) - start
            failure = tl.where(waited > timeout_ns, _TIMED_OUT, 0)
            failure = tl.where(_look(abort) != 0, _ABORTED, failure)
            seen = _look(arrived + p * arrived_stride)
        if seen < ticket:
            late = late | (tl.full((), 1, tl.int64) << p)
    if (failure == _TIMED_OUT) & (late == 0):  # the last peer signalled between the clock and our last look
        failure = tl.where(late == 0, 0, failure)
    if failure != 0:
        if tl.load(status) == 0:
            tl.store(status + 1, code + tl.zeros((), tl.int64))
            tl.store(status + 2, late)
            tl.store(status, failure + tl.zeros((), tl.int64))
        if failure == _TIMED_OUT:
            for p in range(M):
                word = (tl.load(abort_base + p) + abort_offset).to(tl.pointer_type(tl.int64), bitcast=True)
                tl.atomic_cas(word, tl.zeros((), tl.int64), abort_value + tl.zeros((), tl.int64), scope="sys")
    return failure


@triton.jit
def _raise_words(base, offset, value, M: tl.constexpr, LANES: tl.constexpr):
    """Store ``value`` in our word at every rank, after everything that came before."""
    p = tl.arange(0, LANES)
    address = tl.load(base + p, mask=p < M, other=0) + offset
    words = address.to(tl.pointer_type(tl.int64), bitcast=True)
    tl.atomic_xchg(words, value + tl.zeros((LANES,), tl.int64), mask=p < M, sem="release", scope="sys")


@fast
@triton.jit(do_not_specialize=["offset"])
def _post(counter, base, offset, ticket, M: tl.constexpr, LANES: tl.constexpr):
    posted = tl.load(counter) + 1
    tl.store(counter, posted)
    if ticket is not None:
        tl.store(ticket, posted)
    _raise_words(base, offset, posted, M, LANES)


def post(counter: Tensor, signals: Peers, ticket: Tensor | None = None) -> None:
    """Raise our word at every rank by one, after everything this stream did before.

    ``counter``: int64 [2], ours for the channel (posts, and exchanges received). ``signals``: the word (channel, this
    rank) on every rank. ``ticket``: int64 [1], receives the new count: what ``wait`` waits for.
    """
    _require_plain(signals)
    lanes = next_power_of_2(signals.world)
    _post[(1,)](counter, signals.base, signals.offset, ticket, M=signals.world, LANES=lanes, num_warps=1)


@dataclass(frozen=True)
class ChunkSignal:
    """A kernel that moves rows signals each of ``chunks`` parts of a batch by itself, without a launch in between.

    Part i is tokens [``max_tokens``·i // ``chunks``, ``max_tokens``·(i + 1) // ``chunks``). ``counter``: int64 [>= 1],
    ours for the channel, raised by ``chunks``. ``signals``: the word (channel, this rank) on every rank. ``arrivals``:
    int32 [2·chunks], zero between launches: programs that have finished a part, of which the last one signals, and
    tiles of the part that a program has taken. Multiprocessors get unequal shares of the link; with tiles dealt out in
    advance the slowest one would hold every part back."""

    chunks: int
    max_tokens: int
    counter: Tensor
    signals: Peers
    arrivals: Tensor

    @property
    def parts(self) -> list[tuple[int, int]]:
        """(begin, end) of every part."""
        edges = [self.max_tokens * i // self.chunks for i in range(self.chunks + 1)]
        return list(zip(edges[:-1], edges[1:], strict=True))

    @staticmethod
    def arguments(signal: "ChunkSignal | None") -> tuple[Tensor | None, Tensor | None, Tensor | None, int]:
        """What kernels take: arrivals, counter, base and offset of the words."""
        if signal is None:
            return None, None, None, 0
        _require_plain(signal.signals)
        return signal.arrivals, signal.counter, signal.signals.base, signal.signals.offset


@triton.jit
def next_tile(arrivals, part, tile, parts: tl.constexpr):
    """The tile of a part that this program moves next: the next that none has taken or, without ``arrivals``, one of
    every so many. ``tile``: its last one, negative before the first."""
    if arrivals is None:
        following = tl.where(tile < 0, tl.program_id(0), tile + tl.num_programs(0))
    else:
        following = tl.atomic_add(arrivals + parts + part, 1, sem="relaxed")
    return following


@triton.jit
def part_edge(max_tokens, part, parts: tl.constexpr):
    """The first token of a part, as in ``ChunkSignal.parts``."""
    return max_tokens * part // parts


@triton.jit
def last_signals(arrived, programs, value, base, offset, M: tl.constexpr):
    """The last of ``programs`` programs to come here raises our word at every rank to ``value``; whether this was it.

    A later part may be signalled by another program before this one gets to it, so words are raised, never set.
    """
    tl.debug_barrier()  # the rows of all threads come before the one thread's release
    last = tl.atomic_add(arrived, 1, sem="acq_rel", scope="sys") == programs - 1
    if last:
        tl.store(arrived, 0)
        for p in range(M):
            word = (tl.load(base + p) + offset).to(tl.pointer_type(tl.int64), bitcast=True)
            tl.atomic_max(word, value, sem="release", scope="sys")
    return last


@fast
@triton.jit(do_not_specialize=_WATCH)
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
    M: tl.constexpr,
):
    _await(
        tl.load(ticket),
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


def wait(ticket: Tensor, watch: Watch) -> None:
    """Hold the stream until every peer's word has reached ``ticket`` (int64 [1]); their earlier writes are then
    visible. When it fails it says so in ``watch.status`` and lets the stream go on, over data that did not all arrive.
    """
    _wait[(1,)](ticket, *watch.arguments, M=watch.arrived.numel(), num_warps=1)


@fast
@triton.jit(do_not_specialize=["length", "mail_offset", "parity_stride", "offset"])
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
    M: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    posted = tl.load(counter) + 1
    parity = tl.load(counter + 1) % 2
    for p in range(M):
        address = tl.load(mail_base + p) + mail_offset + parity * parity_stride
        box = address.to(tl.pointer_type(tl.int64), bitcast=True)
        for tile in range(0, length, BLOCK):
            i = tile + tl.arange(0, BLOCK)
            tl.store(box + i, tl.load(record + i, mask=i < length), mask=i < length)
    tl.debug_barrier()  # all threads' stores come before the one thread's release, and their loads before its store
    tl.store(counter, posted)
    if ticket is not None:
        tl.store(ticket, posted)
    _raise_words(base, offset, posted, M, LANES)


def send(
    record: Tensor,
    counter: Tensor,
    mailboxes: Peers,
    parity_stride: int,
    signals: Peers,
    ticket: Tensor,
) -> None:
    """Write ``record`` (int64 [n]) into our mailbox at every rank and ``post``.

    ``mailboxes``: our mailbox on every rank; exchanges of a channel use it and the one ``parity_stride`` bytes further
    on by turns, since a slow peer may still read the last one. ``receive`` before the next ``send``.
    """
    _require_plain(mailboxes)
    _require_plain(signals)
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
        M=signals.world,
        LANES=next_power_of_2(signals.world),
        BLOCK=256,
        num_warps=4,
    )


@fast
@triton.jit(do_not_specialize=[*_WATCH, "length", "parity_stride", "source_stride"])
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
    M: tl.constexpr,
    BLOCK: tl.constexpr,
    THREADS: tl.constexpr,
):
    parity = tl.load(counter + 1) % 2
    received = tl.load(counter + 1) + 1
    failure = _await(
        tl.load(ticket),
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
        THREADS,
    )
    tl.debug_barrier()
    for p in range(M):
        box = mail + parity * parity_stride + p * source_stride
        for tile in range(0, length, BLOCK):
            i = tile + tl.arange(0, BLOCK)
            words = tl.load(box + i, mask=i < length, other=-1, volatile=True)
            tl.store(records + p * length + i, tl.where(failure == 0, words, -1), mask=i < length)
    tl.store(counter + 1, received)


def receive(ticket: Tensor, counter: Tensor, mail: Tensor, records: Tensor, watch: Watch) -> None:
    """Wait for every rank's ``send`` and copy what they sent into ``records`` (int64 [M, n]).

    ``mail``: int64 [2, M, words >= n], this rank's mailboxes by parity and source. If the wait fails all records are
    −1: no handle, no tokens, no counts, so that what follows moves nothing.
    """
    require_mail(records, mail)
    _receive[(1,)](
        ticket,
        counter,
        mail,
        mail.stride(0),
        mail.stride(1),
        records,
        records.shape[1],
        *watch.arguments,
        M=records.shape[0],
        BLOCK=256,
        THREADS=128,
        num_warps=4,
    )


@fast
@triton.jit(do_not_specialize=["offset", "value"])
def _set_abort(base, offset, value, M: tl.constexpr):
    for p in range(M):
        word = (tl.load(base + p) + offset).to(tl.pointer_type(tl.int64), bitcast=True)
        tl.atomic_cas(word, tl.zeros((), tl.int64), value + tl.zeros((), tl.int64), scope="sys")


def set_abort(abort_at: Peers, value: int) -> None:
    """Stop every rank from the host: its abort word becomes ``value``, unless it is set already."""
    _require_plain(abort_at)
    _set_abort[(1,)](abort_at.base, abort_at.offset, value, M=abort_at.world, num_warps=1)


def _require_plain(peers: Peers) -> None:
    if peers.handles is not None:
        raise ValueError("signals, mailboxes and abort words lie at fixed places: these peers must have no handles")


def require_mail(records: Tensor, mail: Tensor) -> None:
    """ValueError unless ``records`` [M, n] fit what ``mail`` [2, M, words] holds."""
    if records.shape[0] != mail.shape[1] or not records.is_contiguous() or mail.stride(2) != 1:
        raise ValueError(
            f"records {list(records.shape)} must be contiguous [M, n] and mail {list(mail.shape)} [2, M, words] with "
            f"words one behind another"
        )
