"""Signals, records and route maps by the Triton kernels, one process playing all ranks or being one. See kernel_cases.

Legend: M ranks, E experts, K routes per token, T tokens of a rank.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from ep_plugin.config import CapacityConfig
from ep_plugin.kernels import route_map_triton as route_map
from ep_plugin.kernels import sync_triton as sync
from ep_plugin.kernels.peers import Peers
from ep_plugin.routing import build_route_map, count_routes
from tests.kernel_cases import same_bits

ABORT, SIGNALS = 0, 8  # words of a control region: the abort word, one signal per peer, then the mailboxes
MAIL_WORDS = 600
CODE = 77


def control_words(world: int) -> int:
    return SIGNALS + world + 2 * world * MAIL_WORDS


@dataclass
class Control:
    """The control region of one rank, as words, and where to find those of all ranks."""

    words: Tensor
    base: Tensor
    rank: int
    status: Tensor

    def __post_init__(self) -> None:
        self.world = self.base.numel()
        self.counter = torch.zeros(2, dtype=torch.int64, device=self.words.device)
        self.ticket = torch.zeros(1, dtype=torch.int64, device=self.words.device)
        self.mail = self.words[SIGNALS + self.world :][: 2 * self.world * MAIL_WORDS].view(2, self.world, MAIL_WORDS)

    @staticmethod
    def of_all(world: int, device: str | torch.device, pinned: bool = False) -> list[Control]:
        """One process plays all ranks."""
        regions = [torch.zeros(control_words(world), dtype=torch.int64, device=device) for _ in range(world)]
        base = torch.tensor([r.data_ptr() for r in regions], device=device)
        status = [torch.zeros(3, dtype=torch.int64, device="cpu" if pinned else device) for _ in regions]
        status = [s.pin_memory() for s in status] if pinned else status
        return [Control(r, base, i, s) for i, (r, s) in enumerate(zip(regions, status, strict=True))]

    def at(self, word: int) -> Peers:
        return Peers(self.base, offset=8 * word)

    def post(self) -> None:
        sync.post(self.counter, self.at(SIGNALS + self.rank), self.ticket)

    def send(self, record: Tensor) -> None:
        mailbox = self.at(SIGNALS + self.world + self.rank * MAIL_WORDS)
        stride = 8 * self.world * MAIL_WORDS
        sync.send(record, self.counter, mailbox, stride, self.at(SIGNALS + self.rank), self.ticket)

    def watch(self, timeout_s: float) -> sync.Watch:
        return sync.Watch(
            arrived=self.words[SIGNALS : SIGNALS + self.world],
            abort=self.words[ABORT : ABORT + 1],
            abort_at=self.at(ABORT),
            abort_value=1 + self.rank + (CODE << 16),
            status=self.status,
            timeout_ns=int(timeout_s * 1e9),
            code=CODE,
        )

    def wait(self, timeout_s: float = 30.0) -> None:
        sync.wait(self.ticket, self.watch(timeout_s))

    def receive(self, length: int, timeout_s: float = 30.0) -> Tensor:
        records = torch.full((self.world, length), 12345, device=self.words.device)
        sync.receive(self.ticket, self.counter, self.mail, records, self.watch(timeout_s))
        return records

    def failure(self) -> tuple[int, int, int]:
        """(kind, code, late peers); waits for the device."""
        if self.words.is_cuda:
            torch.cuda.synchronize(self.words.device)
        kind, code, late = self.status.tolist()
        return kind, code, late


def check_posts(world: int, device: str) -> None:
    """Counters rise at every rank, also past 2^31, and a wait that is satisfied says nothing."""
    ranks = Control.of_all(world, device)
    start = 2**31 - 2
    for c in ranks:
        c.counter[0] = start
    for turn in range(1, 5):
        for c in ranks:
            c.post()
        for c in ranks:
            assert c.ticket.item() == start + turn
            assert c.words[SIGNALS : SIGNALS + world].tolist() == [start + turn] * world
            c.wait()
            assert c.failure() == (sync.OK, 0, 0)
            assert c.words[ABORT].item() == 0


def check_exchanges(world: int, device: str) -> None:
    """Every rank's record arrives whole; the mailbox of the last exchange is not the one of this; posts in between do
    not disturb the turns; a rank may be one exchange ahead."""
    ranks = Control.of_all(world, device)
    for turn, length in enumerate((1, 7, 300, 513, 4)):
        records = torch.randint(-(2**62), 2**62, (world, length), device=device)
        for c in ranks:
            c.send(records[c.rank].contiguous())
            if turn == 2:
                c.post()
        for c in ranks:
            same_bits(c.receive(length), records, f"records of exchange {turn}")
            assert c.failure() == (sync.OK, 0, 0)
    first, second = ranks[0], ranks[-1]
    one, two = torch.full((world, 3), 1, device=device), torch.full((world, 3), 2, device=device)
    for c in ranks:
        c.send(one[c.rank])
    same_bits(first.receive(3), one, "records before a fast rank's next exchange")
    if world > 1:
        first.send(two[0])  # the others have not read the last one yet
        same_bits(second.receive(3), one, "records while a fast rank is one exchange ahead")


def check_late_peer(world: int, device: str) -> None:
    """A wait gives up after its time, names the late peers, stops all ranks; what follows then moves nothing."""
    ranks = Control.of_all(world, device)
    late = [r for r in range(world) if r % 2]
    for c in ranks:
        if c.rank not in late:
            c.send(torch.arange(5, device=device))
    start = time.monotonic()
    records = ranks[0].receive(5, timeout_s=0.05)
    mask = sum(1 << r for r in late)
    assert ranks[0].failure() == (sync.TIMED_OUT, CODE, mask)
    waited = time.monotonic() - start
    assert 0.04 < waited < 20, waited
    assert (records == -1).all(), records
    for c in ranks:
        assert c.words[ABORT].item() == 1 + (CODE << 16), f"rank {c.rank} was not told"
    # The next rank's wait looks at the abort word first, although its own time is long, and keeps the first word.
    start = time.monotonic()
    ranks[1].ticket.fill_(1)
    ranks[1].wait(timeout_s=1000.0)
    assert ranks[1].failure() == (sync.ABORTED, CODE, mask)
    assert time.monotonic() - start < 20
    assert ranks[1].words[ABORT].item() == 1 + (CODE << 16)
    # A second failure does not hide the first.
    ranks[0].wait(timeout_s=0.01)
    assert ranks[0].failure() == (sync.TIMED_OUT, CODE, mask)


def check_abort(world: int, device: str) -> None:
    """A host that stops the group is heard by a wait whose peers have all signalled, and does not overwrite."""
    ranks = Control.of_all(world, device)
    for c in ranks:
        c.post()
    sync.set_abort(ranks[0].at(ABORT), 41)
    sync.set_abort(ranks[0].at(ABORT), 42)
    for c in ranks:
        assert c.words[ABORT].item() == 41
        c.wait()
        assert c.failure() == (sync.ABORTED, CODE, 0)


def check_route_map(
    world: int, experts: int, top_k: int, tokens: list[int], seed: int, device: str, dtype: torch.dtype = torch.int64
) -> None:
    """The kernels' map equals ``routing.build_route_map`` under all four policies, exact ceilings included."""
    rng = random.Random(seed)
    g = torch.Generator(device=device).manual_seed(seed)
    ids = []
    for t in tokens:
        skew = torch.rand(1, experts, generator=g, device=device) ** rng.choice((0, 3))
        found = (torch.rand(t, experts, generator=g, device=device) * skew).topk(top_k, 1).indices
        gone = torch.rand(t, top_k, generator=g, device=device) < 0.1
        repeated = torch.randint(0, experts, (t, top_k), generator=g, device=device)
        again = torch.rand(t, top_k, generator=g, device=device) < 0.1
        found = torch.where(gone, -1, torch.where(again, repeated, found)).to(dtype)
        ids.append(found.t().contiguous().t() if seed % 2 else found)
    counts = torch.stack([count_routes(i, experts) for i in ids])
    num_tokens = torch.tensor(tokens, device=device)
    outs = [route_map.DeviceMap.empty(t, top_k, experts, world, device) for t in tokens]
    records = torch.full((world, route_map.HEADER + experts), 12345, device=device)
    header = (3, 2**32 - 5, 2**40)
    for i, out, record, t in zip(ids, outs, records, tokens, strict=True):
        route_map.count(i, out.block_counts, out.flags)
        route_map.offsets_and_record(out.block_counts, record, (*header, t))
    same_bits(records[:, route_map.HEADER :].contiguous(), counts, "counts")
    assert records[:, : route_map.HEADER].tolist() == [[*header, t] for t in tokens]

    for policy in ("dropless", "rank", "source", "expert"):
        capacity = CapacityConfig(policy, rng.choice((0.3, 1.0, 1.2, 0.30000000000000004, 1e9)))
        for rank, (i, out) in enumerate(zip(ids, outs, strict=True)):
            want = build_route_map(i, counts, num_tokens, rank=rank, capacity=capacity)
            bound = int(want.accepted.sum(0).view(world, -1).sum(1).max())
            for tensor in (out.dest_rank, out.dest_row, out.counts, out.accepted, out.tokens, out.offsets):
                tensor.fill_(12345)
            route_map.accept(records, out, rank=rank, capacity=capacity, top_k=top_k, bound=bound)
            route_map.build(i, out, rank=rank, bound=bound)
            for name in ("counts", "accepted", "tokens", "offsets", "dest_rank", "dest_row"):
                what = f"seed {seed}, {capacity}, {name} of rank {rank}"
                same_bits(getattr(out, name), getattr(want, name), what)
            assert out.flags.item() == 0


def _map_of(ids: Tensor, records: Tensor, rank: int, bound: int) -> route_map.DeviceMap:
    world, experts = records.shape[0], records.shape[1] - route_map.HEADER
    out = route_map.DeviceMap.empty(*ids.shape, experts, world, ids.device)
    route_map.count(ids, out.block_counts, out.flags)
    route_map.offsets_and_record(out.block_counts, records[rank], (1, 2, 0, ids.shape[0]))
    route_map.accept(records, out, rank=rank, capacity=CapacityConfig(), top_k=ids.shape[1], bound=bound)
    route_map.build(ids, out, rank=rank, bound=bound)
    return out


def check_map_failures(device: str) -> None:
    """What the host cannot see in time is flagged, and never leaves the buffers: too many rows, a bad id, ranks that
    run different layers, records that did not arrive."""
    ids = torch.tensor([[0, 1], [1, 3], [0, 1]], device=device)
    records = torch.zeros((2, 8), dtype=torch.int64, device=device)
    _map_of(ids[:2], records, 1, 9)

    full = _map_of(ids, records, 0, 9)
    assert full.flags.item() == 0 and full.offsets.tolist() == [0, 3, 8] and full.dest_row[2].tolist() == [1, 5]
    cut = _map_of(ids, records, 0, 4)
    assert cut.flags.item() == route_map.OVERFLOW
    assert cut.offsets.tolist() == [0, 3, 4], "offsets must end where the buffer does"
    assert cut.dest_row.tolist() == [[0, 3], [-1, 0], [1, -1]] and cut.dest_rank[2].tolist() == [0, -1]
    other = _map_of(ids[:2], records.clone(), 1, 4)
    assert other.flags.item() == route_map.OVERFLOW, "a rank with room must know that another one overflowed"

    bad = _map_of(torch.tensor([[0, 4], [2**32, -2], [1, -1]], device=device), records.clone(), 0, 9)
    assert bad.flags.item() == route_map.BAD_ID
    assert bad.dest_rank.tolist() == [[0, -1], [-1, -1], [0, -1]]

    for column in (0, 1):
        wrong = records.clone()
        wrong[1, column] += 1
        stopped = _map_of(ids, wrong, 0, 9)
        assert stopped.flags.item() == route_map.DISAGREE
        assert stopped.offsets.tolist() == [0, 0, 0] and (stopped.dest_rank == -1).all()

    lost = torch.full_like(records, -1)
    out = route_map.DeviceMap.empty(3, 2, 4, 2, device)
    route_map.count(ids, out.block_counts, out.flags)
    route_map.offsets_and_record(out.block_counts, records[0].clone(), (1, 2, 0, 3))
    route_map.accept(lost, out, rank=0, capacity=CapacityConfig("rank", 1.0), top_k=2, bound=9)
    route_map.build(ids, out, rank=0, bound=9)
    assert out.tokens.tolist() == [0, 0] and out.offsets.tolist() == [0, 0, 0] and (out.dest_rank == -1).all()
