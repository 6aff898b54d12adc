"""Random route sets for the Triton kernels, moved by them and by the torch references.

Import this where Triton may be imported: on a GPU machine, or in a process started with ``TRITON_INTERPRET=1``. One
process may play all ranks (their regions are then buffers on one device) or be one rank of a heap.

Legend: T tokens of a rank, T_max tokens of a stripe, K routes per token, E experts, M ranks, D row width, R rows of a
rank, RB rows its buffers hold.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ep_plugin.config import CapacityConfig
from ep_plugin.dispatch.layout import Part, Region
from ep_plugin.heap.base import SymmBuffer
from ep_plugin.kernels import fan_out_triton, pull_triton, put_triton, reduce_triton, scalars_triton
from ep_plugin.kernels.peers import Peers
from ep_plugin.kernels.pull import pull_rows_torch
from ep_plugin.kernels.put import put_meta_torch, put_rows_torch, put_unique_torch, put_values_torch
from ep_plugin.kernels.reduce import (
    accumulation_dtype,
    get_reduce_torch,
    get_rows_torch,
    get_values_torch,
    partial_sums_torch,
    pre_reduce_put_torch,
    put_scalars_torch,
    sum_partials_torch,
    sum_routes_torch,
    take_scalars_torch,
)
from ep_plugin.kernels.sync_triton import ChunkSignal
from ep_plugin.kernels.triton_common import Launch
from ep_plugin.routing import build_route_map, count_routes

KINDS = ("distinct", "repeats", "one rank", "none", "uneven")
STALE = 1  # what the row numbers of an earlier step look like: valid, and wrong
SLOTS = 3
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Shape:
    """What a kernel is compiled for, and the most tokens of a rank."""

    world: int
    experts: int
    top_k: int
    width: int
    dtype: torch.dtype
    max_tokens: int

    @property
    def acc(self) -> torch.dtype:
        return accumulation_dtype(self.dtype)


def same_bits(got: Tensor, want: Tensor, what: str) -> None:
    """Fail with the first place where two tensors differ in a bit; NaNs are alike whatever they carry."""
    assert got.shape == want.shape and got.dtype == want.dtype, f"{what}: {got.shape} {got.dtype}, not {want.shape}"
    integers = INTEGERS[got.dtype.itemsize]
    differ = got.contiguous().view(integers) != want.contiguous().view(integers)
    if got.dtype.is_floating_point:
        differ &= ~(got.isnan() & want.isnan())
    if differ.any():
        place = differ.nonzero()[0].tolist()
        raise AssertionError(
            f"{what}: {int(differ.sum())} of {differ.numel()} differ, first at {place}: {got[tuple(place)].item()!r}, "
            f"not {want[tuple(place)].item()!r}"
        )


def poison(tensor: Tensor) -> Tensor:
    """NaN in floats, a number that is a valid row in integers: neither may be left or read where it matters."""
    return tensor.fill_(float("nan") if tensor.dtype.is_floating_point else STALE)


class Case:
    """Everything that all ranks hold in one step, from a seed, and what the torch references make of it."""

    def __init__(self, shape: Shape, seed: int, device: str | torch.device) -> None:
        self.shape, self.seed, self.device = shape, seed, torch.device(device)
        self.rng = random.Random(seed)
        g = torch.Generator(device=device).manual_seed(seed)
        kind = KINDS[seed % len(KINDS)]
        m, e, k, d = shape.world, shape.experts, shape.top_k, shape.width
        self.tokens = [self.rng.randint(0, shape.max_tokens) for _ in range(m)]
        if kind == "uneven":
            self.tokens = [0] * (m - 1) + [shape.max_tokens]
        self.x = [self._random(g, t, d) for t in self.tokens]
        self.weights = [torch.rand(t, k, generator=g, device=device).to(shape.acc) for t in self.tokens]
        self.ids = [self._ids(kind, t, g) for t in self.tokens]
        counts = torch.stack([count_routes(i, e) for i in self.ids])
        self.num_tokens = torch.tensor(self.tokens, device=device)
        policy = self.rng.choice(("dropless", "rank", "source", "expert"))
        self.capacity = CapacityConfig(policy, self.rng.choice((0.3, 1.0, 1.25)))
        self.maps = [
            build_route_map(i, counts, self.num_tokens, rank=r, capacity=self.capacity) for r, i in enumerate(self.ids)
        ]
        self.rows = [int(x.offsets[-1]) for x in self.maps]
        self.bound = max(self.rows) + self.rng.randint(1, 3)
        self.y = [self._random(g, self.bound, d) for _ in range(m)]  # expert outputs
        self.scale = [torch.rand(self.bound, generator=g, device=device).to(shape.acc) for _ in range(m)]
        for y, scale, rows in zip(self.y, self.scale, self.rows, strict=True):
            poison(y[rows:])
            poison(scale[rows:])
        self.early = self.rng.random() < 0.5  # rows cross by expert id, before the map is known
        stripe = m * shape.max_tokens
        self.region = Region(
            Part("stage", (stripe, d), shape.dtype),
            Part("local_rows", (stripe, k), torch.int32),
            Part("weights", (stripe, k), shape.acc),
            Part("rows", (self.bound, d), shape.dtype),
            Part("scaled", (self.bound, d), shape.dtype),
            Part("row_weights", (self.bound,), shape.acc),
            Part("routes", (self.bound,), torch.int64),
            Part("partials", (m, shape.max_tokens, d), shape.dtype),
            Part("scalars", (m, shape.max_tokens, k), shape.acc),
            Part("y", (self.bound, d), shape.dtype),
            Part("scale", (self.bound,), shape.acc),
        )

    def _random(self, g: torch.Generator, *shape: int) -> Tensor:
        """Normal numbers with some zeros of either sign and some very small ones, subnormal where the references keep
        those (torch's scattered sums on GPUs flush them)."""
        values = torch.randn(*shape, generator=g, device=self.device, dtype=torch.float64)
        odd = torch.rand(*shape, generator=g, device=self.device)
        values = torch.where(odd < 0.05, torch.copysign(torch.zeros_like(values), values), values)
        small = 1e-39 if self.device.type == "cpu" else 1e-30
        return torch.where(odd > 0.95, values * small, values).to(self.shape.dtype)

    def _ids(self, kind: str, num_tokens: int, g: torch.Generator) -> Tensor:
        m, e, k = self.shape.world, self.shape.experts, self.shape.top_k
        if kind == "none":
            return torch.full((num_tokens, k), -1, device=self.device)
        if kind == "repeats":
            return torch.randint(-1, e, (num_tokens, k), generator=g, device=self.device)
        if kind == "one rank":
            return torch.randint(0, e // m, (num_tokens, k), generator=g, device=self.device)
        return torch.rand(num_tokens, e, generator=g, device=self.device).topk(k, 1).indices

    def first(self, rank: int) -> int:
        """First row of the stripe of ``rank``."""
        return rank * self.shape.max_tokens

    def put_routes(self, rank: int) -> Tensor:
        """Ranks that the rows of ``rank`` cross to."""
        if not self.early:
            return self.maps[rank].dest_rank
        ids = self.ids[rank]
        return torch.where(ids >= 0, ids.div(self.shape.experts // self.shape.world, rounding_mode="floor"), -1)

    def parts(self) -> dict[str, list[Tensor]]:
        """Every part of every rank, poisoned."""
        found = {}
        for name in self.region._parts:
            part = self.region[name]
            found[name] = [
                poison(torch.empty(part.shape, dtype=part.dtype, device=self.device)) for _ in range(self.shape.world)
            ]
        return found

    def after_put(self) -> dict[str, list[Tensor]]:
        """What dispatch leaves in every rank's region (report, Table 8, forward), by the references."""
        p, k = self.parts(), self.shape.top_k
        for r, (m, x, w) in enumerate(zip(self.maps, self.x, self.weights, strict=True)):
            put_unique_torch(x, p["stage"], self.put_routes(r), self.first(r))
            put_meta_torch(m.dest_rank, m.dest_row, w, p["local_rows"], p["weights"], self.first(r))
            put_rows_torch(x, p["rows"], m.dest_rank, m.dest_row)
            put_rows_torch(x, p["scaled"], m.dest_rank, m.dest_row, w)
            put_values_torch(w, p["row_weights"], m.dest_rank, m.dest_row)
            ids = self.first(r) * k + torch.arange(w.numel(), device=self.device).view_as(w)
            put_values_torch(ids, p["routes"], m.dest_rank, m.dest_row)
        return p

    def after_return(self, p: dict[str, list[Tensor]], weighted: bool) -> None:
        """What combine adds to it: partial sums and scalars at the sources."""
        for r in range(self.shape.world):
            local = p["local_rows"][r].view(self.shape.world, self.shape.max_tokens, self.shape.top_k)
            known = torch.arange(self.shape.max_tokens, device=self.device) < self.num_tokens[:, None]
            local = torch.where(known[:, :, None], local, -1)
            by_route = self.scale[r][local.clamp(min=0).long()] if weighted else None
            pre_reduce_put_torch(self.y[r], local, self.tokens, p["partials"], r, by_route)
            put_scalars_torch(self.scale[r], local, self.tokens, p["scalars"], r)
            p["y"][r].copy_(self.y[r])
            p["scale"][r].copy_(self.scale[r])


class Memory:
    """Regions of all ranks as one process sees them. ``peers`` finds a part through the slots' handles."""

    def __init__(self, case: Case, base: Tensor, views: Sequence[Tensor], slots: Sequence[int]) -> None:
        """``views``: the slot of each rank as uint8, None where this process does not look at it."""
        self.region, self.views, self.base = case.region, views, base
        records = torch.full((len(slots), 3), -1, device=base.device)
        records[:, 1] = torch.tensor(slots) * case.region.nbytes
        self.handles = records[:, 1]
        self.most = (SLOTS - 1) * case.region.nbytes

    @staticmethod
    def on(case: Case) -> Memory:
        """One process plays all ranks."""
        buffers = [torch.empty(SLOTS * case.region.nbytes, dtype=torch.uint8, device=case.device) for _ in case.tokens]
        slots = [case.rng.randrange(SLOTS) for _ in buffers]
        nbytes = case.region.nbytes
        base = torch.tensor([b.data_ptr() for b in buffers], device=case.device)
        memory = Memory(case, base, [b[s * nbytes :][:nbytes] for b, s in zip(buffers, slots, strict=True)], slots)
        for r in range(len(buffers)):
            memory.poison(r)
        return memory

    @staticmethod
    def of_heap(case: Case, buffer: SymmBuffer) -> Memory:
        """This process is one rank; ``buffer`` has room for all slots. All ranks draw the same slot numbers."""
        nbytes = case.region.nbytes
        slots = [case.rng.randrange(SLOTS) for _ in case.tokens]
        views = [buffer.view(r, s * nbytes, (nbytes,), torch.uint8) for r, s in enumerate(slots)]
        return Memory(case, buffer.ptrs, views, slots)

    def __getitem__(self, key: tuple[str, int]) -> Tensor:
        """A part of a rank."""
        return self.region.view(self.views[key[1]], key[0])

    def poison(self, rank: int) -> None:
        for name in self.region._parts:
            poison(self[name, rank])

    def peers(self, name: str) -> Peers:
        return Peers(self.base, self.handles, self.most, self.region[name].offset)


def launches(case: Case) -> Launch:
    """Few programs with several rows each, or many; on a GPU one block and one number of warps per shape, because each
    is compiled anew."""
    if case.device.type == "cpu":
        return Launch(case.rng.randint(1, 5), block=case.rng.choice((None, 16)), tile=case.rng.choice((0, 256)))
    kind = case.shape.width % 7
    tile = case.rng.choice((0, 1 << 14))
    return Launch(case.rng.choice((1, 3, 7, 132, 1056)), (1, 2, 4, 8)[kind % 4], (None, 512)[kind % 2], tile)


def chunks(case: Case, most: int) -> list[tuple[int, int]]:
    """[0, most) cut in up to three, some perhaps empty."""
    cuts = sorted(case.rng.randint(0, most) for _ in range(case.rng.randint(0, 2)))
    return list(zip([0, *cuts], [*cuts, most], strict=True))


def put(case: Case, rank: int, memory: Memory) -> None:
    """Dispatch of ``rank`` by the kernels, both forms."""
    m, x, w, shape = case.maps[rank], case.x[rank], case.weights[rank], case.shape
    routes = case.ids[rank] if case.early else m.dest_rank
    per_rank = shape.experts // shape.world if case.early else 1
    for begin, end in chunks(case, case.tokens[rank]):
        put_triton.put_unique(
            x, memory.peers("stage"), routes, case.first(rank), begin, end, experts_per_rank=per_rank,
            launch=launches(case),
        )  # fmt: skip
    put_triton.put_meta(
        m.dest_rank, m.dest_row, w, memory.peers("local_rows"), memory.peers("weights"), case.first(rank)
    )
    to = (m.dest_rank, m.dest_row)
    put_triton.put_rows(x, memory.peers("rows"), *to, num_rows=case.bound, launch=launches(case))
    by_route = x.unsqueeze(1).repeat(1, shape.top_k, 1)
    scaled = by_route if case.rng.random() < 0.5 else x
    put_triton.put_rows(scaled, memory.peers("scaled"), *to, w, num_rows=case.bound, launch=launches(case))
    put_triton.put_values(w, memory.peers("row_weights"), *to, num_rows=case.bound)
    first = case.first(rank) * shape.top_k
    put_triton.put_values(None, memory.peers("routes"), *to, num_rows=case.bound, first=first)


def check_put(case: Case, rank: int, memory: Memory, want: dict[str, list[Tensor]]) -> None:
    """The whole region of ``rank``: what had to be written, and nothing else."""
    for name in want:
        same_bits(memory[name, rank], want[name][rank], f"seed {case.seed}, {name} of rank {rank} after dispatch")


def check_fan_out(case: Case, rank: int, memory: Memory, want: dict[str, list[Tensor]]) -> None:
    """Stage to expert rows: all at once with weights and routes; in chunks of sources and tokens; own rows from x."""
    shape, stage = case.shape, memory["stage", rank]
    what = f"seed {case.seed}, fan-out of rank {rank}"
    local = memory["local_rows", rank].view(shape.world, shape.max_tokens, shape.top_k)
    rows, scaled = torch.empty_like(want["rows"][rank]), torch.empty_like(want["rows"][rank])
    weights, routes = torch.empty_like(want["row_weights"][rank]), torch.empty_like(want["routes"][rank])
    for tensor in (rows, scaled, weights, routes):
        poison(tensor)
    fan_out_triton.fan_out(
        stage, local, case.num_tokens, rows, weights=memory["weights", rank].view(-1), weights_out=weights,
        route_of_row=routes, launch=launches(case),
    )  # fmt: skip
    same_bits(rows, want["rows"][rank], what)
    same_bits(weights, want["row_weights"][rank], what + ", weights")
    same_bits(routes, want["routes"][rank], what + ", routes")

    stage = stage.clone()
    poison(stage[case.first(rank) : case.first(rank) + shape.max_tokens])
    for begin, end in chunks(case, shape.max_tokens):
        cut = case.rng.randint(0, shape.world)
        for first, sources in ((rank, cut), (rank + cut, shape.world - cut)):
            fan_out_triton.fan_out(
                stage, local, case.num_tokens, scaled, scale=case.scale[rank], x_own=case.x[rank], own_rank=rank,
                first_source=first, sources=sources, begin=begin, end=end, launch=launches(case),
            )  # fmt: skip
    product = (want["rows"][rank].to(shape.acc) * case.scale[rank].unsqueeze(1)).to(shape.dtype)
    same_bits(scaled, product, what + ", scaled, in chunks, own rows from x")

    num_rows = case.maps[rank].offsets[-1:]
    for tensor, value in ((rows, 0), (weights, 0), (routes, -1)):
        filled = tensor.clone()
        fan_out_triton.fill_tail(filled, num_rows, value)
        tensor[case.rows[rank] :] = value
        same_bits(filled, tensor, what + ", padding")


def give_back(case: Case, rank: int, memory: Memory, weighted: bool) -> None:
    """The expert rank's half of combine: partial sums and scalars to the sources, rows left to be pulled."""
    shape = case.shape
    local = memory["local_rows", rank].view(shape.world, shape.max_tokens, shape.top_k)
    scale = case.scale[rank] if weighted else None
    for begin, end in chunks(case, shape.max_tokens):
        cut = case.rng.randint(0, shape.world)
        for first, sources in ((rank, cut), (rank + cut, shape.world - cut)):
            reduce_triton.pre_reduce_put(
                case.y[rank], local, case.num_tokens, memory.peers("partials"), rank, scale,
                first_source=first, sources=sources, begin=begin, end=end, launch=launches(case),
            )  # fmt: skip
    scalars_triton.put_scalars(case.scale[rank], local, case.num_tokens, memory.peers("scalars"), rank)
    memory["y", rank].copy_(case.y[rank])
    memory["scale", rank].copy_(case.scale[rank])


def check_sums(case: Case, rank: int, memory: Memory, want: dict[str, list[Tensor]], weighted: bool) -> None:
    """The token source's half of combine, both forms, against the references over the references' own regions."""
    shape, m, num_tokens = case.shape, case.maps[rank], case.tokens[rank]
    what = f"seed {case.seed}, combine at rank {rank}"

    def empty(*size: int, dtype: torch.dtype = shape.dtype) -> Tensor:
        return poison(torch.empty(size, dtype=dtype, device=case.device))

    sums = sum_partials_torch(want["partials"][rank], m.dest_rank)
    out = empty(num_tokens, shape.width)
    for begin, end in chunks(case, num_tokens):
        reduce_triton.sum_partials(
            memory["partials", rank], m.dest_rank, out, begin=begin, end=end, launch=launches(case)
        )
    same_bits(out, sums, what + ", sum of partials")

    partials = memory["partials", rank].clone()
    poison(partials[rank])  # made in registers instead
    out = empty(num_tokens, shape.width)
    reduce_triton.sum_partials(
        partials, m.dest_rank, out, y=case.y[rank], dest_row=m.dest_row,
        weights=case.scale[rank] if weighted else None, own_rank=rank, launch=launches(case),
    )  # fmt: skip
    same_bits(out, sums, what + ", sum with the own partial in registers")

    got = empty(num_tokens, shape.top_k, dtype=shape.acc)
    scalars_triton.take_scalars(memory["scalars", rank], m.dest_rank, got)
    same_bits(got, take_scalars_torch(want["scalars"][rank], m.dest_rank), what + ", scalars")

    weights = case.weights[rank] if weighted else None
    out, gathered = empty(num_tokens, shape.width), empty(num_tokens, shape.top_k, shape.width)
    reduce_triton.get_reduce(
        memory.peers("y"), m.dest_rank, m.dest_row, weights, out, num_rows=case.bound, gathered=gathered,
        launch=launches(case),
    )  # fmt: skip
    same_bits(out, get_reduce_torch(want["y"], m.dest_rank, m.dest_row, weights), what + ", pulled sum")
    same_bits(gathered, get_rows_torch(want["y"], m.dest_rank, m.dest_row), what + ", pulled rows")
    sent = torch.cat([empty(1, shape.width), gathered.flatten(0, 1)])[1:]  # which starts where it happens to
    index = torch.arange(sent.shape[0], device=sent.device).view_as(m.dest_rank)
    routes = torch.where(m.dest_rank >= 0, index, -1), m.dest_rank, len(want["y"]), weights
    same_bits(reduce_triton.sum_routes_triton(sent, *routes), sum_routes_torch(sent, *routes), what + ", sum of routes")

    got = empty(num_tokens, shape.top_k, dtype=shape.acc)
    scalars_triton.get_values(memory.peers("scale"), m.dest_rank, m.dest_row, got, num_rows=case.bound)
    same_bits(got, get_values_torch(want["scale"], m.dest_rank, m.dest_row), what + ", pulled scalars")


def check_movements(case: Case) -> None:
    """All movements of one step, one process playing all ranks."""
    memory, want, ranks = Memory.on(case), case.after_put(), range(case.shape.world)
    for r in ranks:
        put(case, r, memory)
    for r in ranks:
        check_put(case, r, memory, want)
        check_fan_out(case, r, memory, want)
    weighted = case.rng.random() < 0.5
    case.after_return(want, weighted)
    for r in ranks:
        give_back(case, r, memory, weighted)
    for r in ranks:
        check_put(case, r, memory, want)
        check_sums(case, r, memory, want, weighted)


def check_chunk_signals(case: Case) -> None:
    """Kernels that signal each chunk themselves: every rank's word and the counter rise by the number of chunks, turn
    after turn, and the rows are those of one launch without signals."""
    shape, world = case.shape, case.shape.world
    words = torch.zeros((world, world), dtype=torch.int64, device=case.device)  # [rank, peer that raises it]
    base = torch.tensor([row.data_ptr() for row in words], device=case.device)
    parts = case.rng.randint(1, 4)
    counters = torch.zeros((world, 2), dtype=torch.int64, device=case.device)
    counters[:, 0] = 2**31 - 3
    signals = [
        ChunkSignal(
            chunks=parts,
            max_tokens=shape.max_tokens,
            counter=counters[r],
            signals=Peers(base, offset=8 * r),
            arrivals=torch.zeros(2 * parts, dtype=torch.int32, device=case.device),
        )
        for r in range(world)
    ]
    want = case.after_put()
    for rank, m in enumerate(case.maps):  # nobody sends to itself
        others = torch.where(case.put_routes(rank) == rank, -1, case.put_routes(rank))
        poison(want["stage"][rank][case.first(rank) : case.first(rank) + shape.max_tokens])
        put_unique_torch(case.x[rank], want["stage"], others, case.first(rank))
        assert m.dest_rank.shape[0] == case.tokens[rank]
    case.after_return(want, True)
    for turn in range(2):
        memory = Memory.on(case)
        for rank in range(world):
            routes = case.ids[rank] if case.early else case.maps[rank].dest_rank
            put_triton.put_unique(
                case.x[rank], memory.peers("stage"), routes, case.first(rank), skip_rank=rank,
                experts_per_rank=shape.experts // world if case.early else 1, signal=signals[rank],
                launch=launches(case),
            )  # fmt: skip
            local = want["local_rows"][rank].view(world, shape.max_tokens, shape.top_k)
            reduce_triton.pre_reduce_put(
                case.y[rank], local, case.num_tokens, memory.peers("partials"), rank, case.scale[rank],
                signal=signals[rank], launch=launches(case),
            )  # fmt: skip
            risen = 2**31 - 3 + 2 * parts * (turn + 1)
            assert words[:, rank].tolist() == [risen] * world, f"signals of rank {rank} in turn {turn}"
            assert counters[rank].tolist() == [risen, 0]
            assert not signals[rank].arrivals.any(), "arrivals must be zero for the next launch"
        for rank in range(world):
            for name in ("stage", "partials"):
                same_bits(memory[name, rank], want[name][rank], f"seed {case.seed}, {name} of rank {rank}")


def check_pull(case: Case) -> None:
    """Expert rows that their ranks pull from the tokens' ranks: those that PUT leaves there, whatever the sources hold
    elsewhere; none from a rank without a slot, nor by a row number that is no token's."""
    shape, memory = case.shape, Memory.on(case)
    peers, tokens = memory.peers("stage"), shape.max_tokens
    for r, x in enumerate(case.x):
        memory["stage", r][: x.shape[0]] = x
    put = case.after_put()["rows"]
    for r in range(shape.world):
        what = f"seed {case.seed}, rows that rank {r} pulls"
        source_rank, source_row = (torch.full((case.bound,), -1, dtype=torch.int32, device=case.device) for _ in "12")
        for source, m in enumerate(case.maps):
            t, k = (m.dest_rank == r).nonzero(as_tuple=True)
            row = m.dest_row[t, k].long()
            source_rank[row], source_row[row] = source, t.int()
        pulled, wanted = poison(torch.empty_like(put[r])), poison(torch.empty_like(put[r]))
        pull_rows_torch([memory["stage", p] for p in range(shape.world)], source_rank, source_row, wanted)
        pull_triton.pull_rows(peers, source_rank, source_row, pulled, num_tokens=tokens, launch=launches(case))
        same_bits(wanted, put[r], what + " by the reference")
        same_bits(pulled, put[r], what)
        lost = memory.handles.clone()
        memory.handles.fill_(-1)
        for ranks, rows in ((source_rank, source_row), (source_rank + shape.world, source_row)):
            poison(pulled)
            pull_triton.pull_rows(peers, ranks, rows, pulled, num_tokens=tokens, launch=launches(case))
            same_bits(pulled, poison(torch.empty_like(pulled)), what + ", of ranks without a slot")
            memory.handles.copy_(lost)
        outside = torch.where(source_row % 2 == 0, tokens + source_row, -2 - source_row)
        pull_triton.pull_rows(peers, source_rank, outside, pulled, num_tokens=tokens, launch=launches(case))
        same_bits(pulled, poison(torch.empty_like(pulled)), what + ", of tokens that are none")


def check_lost_handles(case: Case) -> None:
    """A rank that advertised no slot (or garbage, after an abort) is left alone, and pulls from it give zero."""
    memory, want, shape = Memory.on(case), case.after_put(), case.shape
    case.after_return(want, False)
    lost = case.seed % shape.world
    memory.handles[lost] = (-1, memory.most + memory.region.nbytes, 128, 2**62, -(2**63))[case.seed % 5]
    untouched = case.parts()
    for r in range(shape.world):
        memory["y", r].copy_(case.y[r])
        memory["scale", r].copy_(case.scale[r])
        put(case, r, memory)
    for r in range(shape.world):
        local = want["local_rows"][r].view(shape.world, shape.max_tokens, shape.top_k)
        reduce_triton.pre_reduce_put(case.y[r], local, case.num_tokens, memory.peers("partials"), r)
        scalars_triton.put_scalars(case.scale[r], local, case.num_tokens, memory.peers("scalars"), r)
    untouched["y"], untouched["scale"] = case.y, case.scale
    for r in range(shape.world):
        check_put(case, r, memory, untouched if r == lost else want)
        m = case.maps[r]
        dest = torch.where(m.dest_rank == lost, -1, m.dest_rank)
        out = poison(torch.empty_like(case.x[r]))
        gathered = poison(torch.empty((*m.dest_rank.shape, shape.width), dtype=shape.dtype, device=case.device))
        reduce_triton.get_reduce(
            memory.peers("y"), m.dest_rank, m.dest_row, None, out, num_rows=case.bound, gathered=gathered
        )
        same_bits(out, get_reduce_torch(case.y, dest, m.dest_row), "sum of what could be pulled")
        same_bits(gathered, get_rows_torch(case.y, dest, m.dest_row), "rows that could be pulled")
        got = poison(torch.empty_like(case.weights[r]))
        scalars_triton.get_values(memory.peers("scale"), m.dest_rank, m.dest_row, got, num_rows=case.bound)
        same_bits(got, get_values_torch(case.scale, dest, m.dest_row), "scalars that could be pulled")


def check_garbage_rows(case: Case) -> None:
    """Row numbers and token counts that a peer left half written lead nowhere outside the buffers."""
    shape, rank = case.shape, case.seed % case.shape.world
    want = case.after_put()
    good = want["local_rows"][rank].view(shape.world, shape.max_tokens, shape.top_k)
    stripe = torch.arange(shape.max_tokens, device=case.device)
    good = torch.where((stripe < case.num_tokens[:, None])[:, :, None], good, -1)
    wild = torch.tensor([case.bound, 2**31 - 1, -5, -(2**31)], dtype=torch.int32, device=case.device)
    at = torch.arange(good.numel(), device=case.device).view_as(good)
    bad = torch.where(good < 0, wild[at % 4], good)
    tokens = torch.tensor([(2**40, -7, shape.max_tokens + 1)[(case.seed + r) % 3] for r in range(shape.world)])
    reached = torch.where((tokens >= 0)[:, None, None].to(case.device), good, -1)
    tokens = tokens.to(case.device)
    memory = Memory.on(case)

    rows = poison(torch.empty_like(want["rows"][rank]))
    fan_out_triton.fan_out(want["stage"][rank], bad, tokens, rows, x_own=case.x[rank], own_rank=rank)
    expected = poison(torch.empty_like(rows))
    kept = reached[reached >= 0].long()
    expected[kept] = want["rows"][rank][kept]
    same_bits(rows, expected, "fan-out over garbage")

    reduce_triton.pre_reduce_put(case.y[rank], bad, tokens, memory.peers("partials"), rank)
    scalars_triton.put_scalars(case.scale[rank], bad, tokens, memory.peers("scalars"), rank)
    everyone = [shape.max_tokens] * shape.world
    pre_reduce_put_torch(case.y[rank], reached, everyone, want["partials"], rank)
    put_scalars_torch(case.scale[rank], reached, everyone, want["scalars"], rank)
    for r in range(shape.world):
        same_bits(memory["partials", r], want["partials"][r], "partials over garbage")
        same_bits(memory["scalars", r], want["scalars"][r], "scalars over garbage")

    m = case.maps[rank]
    odd = (torch.arange(m.dest_rank.numel(), device=case.device) % 3).view_as(m.dest_rank)
    dest_rank = torch.where((odd == 1) & (m.dest_rank < 0), shape.world, m.dest_rank)
    dest_row = torch.where(odd == 2, case.bound, m.dest_row)
    poisoned = case.parts()
    put_triton.put_rows(case.x[rank], memory.peers("rows"), dest_rank, dest_row, num_rows=case.bound)
    put_triton.put_values(case.weights[rank], memory.peers("row_weights"), dest_rank, dest_row, num_rows=case.bound)
    kept_rank = torch.where(odd == 2, -1, m.dest_rank)
    put_rows_torch(case.x[rank], poisoned["rows"], kept_rank, m.dest_row)
    put_values_torch(case.weights[rank], poisoned["row_weights"], kept_rank, m.dest_row)
    for r in range(shape.world):
        same_bits(memory["rows", r], poisoned["rows"][r], "rows PUT to garbage")
        same_bits(memory["row_weights", r], poisoned["row_weights"][r], "scalars PUT to garbage")


def check_order(device: str | torch.device) -> None:
    """Sums run in ascending k and ascending rank: over numbers of which every other order gives another sum."""
    large = 2.0**30
    in_order = torch.tensor([large, 1.0, -large, 1.0], device=device)
    for dtype in (torch.float32, torch.bfloat16):
        y = in_order.to(dtype).unsqueeze(1).repeat(1, 24)
        one = torch.ones((1, 24), dtype=dtype, device=device)
        index = torch.arange(4, dtype=torch.int32, device=device).view(1, 1, 4)
        partials = torch.zeros((1, 1, 24), dtype=dtype, device=device)
        reduce_triton.pre_reduce_put(y, index, torch.ones(1, dtype=torch.int64, device=device), Peers.of([partials]), 0)
        same_bits(partials[0], one, f"{dtype} partial in ascending k")
        dest = torch.zeros((1, 4), dtype=torch.int32, device=device)
        out = torch.zeros_like(one)
        reduce_triton.get_reduce(Peers.of([y]), dest, index[0], None, out, num_rows=4)
        same_bits(out, one, f"{dtype} pulled sum in ascending k")

        ranks = torch.tensor([[3, 2, 1, 0]], dtype=torch.int32, device=device)
        reduce_triton.get_reduce(Peers.of(list(y.split(1))), ranks, torch.zeros_like(ranks), None, out, num_rows=1)
        same_bits(out, one, f"{dtype} pulled sum in ascending rank")
        by_rank = y.unsqueeze(1).contiguous()
        reduce_triton.sum_partials(by_rank, ranks, out)
        same_bits(out, one, f"{dtype} sum in ascending rank")
        for own in range(4):
            others = by_rank.clone()
            poison(others[own])
            rows = torch.where(ranks == own, 0, -1)
            reduce_triton.sum_partials(others, ranks, out, y=by_rank[own], dest_row=rows, own_rank=own)
            same_bits(out, one, f"{dtype} sum with the own partial of rank {own} in its place")
        for reference in (
            partial_sums_torch(y, index[0]),
            sum_partials_torch(by_rank, ranks),
            get_reduce_torch(list(y.split(1)), ranks, torch.zeros_like(ranks)),
        ):
            same_bits(reference, one, f"{dtype} reference")
        assert partial_sums_torch(y, index[0].flip(1))[0, 0] != 1, "these numbers do not tell one order from another"


def check_rounding(device: str | torch.device) -> None:
    """A product is rounded to nearest even in 16 bits: every bf16 and fp16 pattern times one, halves of a last bit,
    numbers below and above the range."""
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32, device=device).to(torch.int16)
    ties = torch.tensor(
        [1.0, 1 + 2**-8, 1 + 2**-9, 1 - 2**-9, 1 + 3 * 2**-9, 2**-20, 2**-133, 3e38, 1e5], device=device
    )
    for dtype in (torch.bfloat16, torch.float16):
        x = patterns.view(dtype).view(1, -1)
        for scale in ties.view(-1, 1, 1):
            want, got = [torch.zeros_like(x)], [torch.zeros_like(x)]
            zero = torch.zeros((1, 1), dtype=torch.int32, device=device)
            put_rows_torch(x, want, zero, zero, scale)
            put_triton.put_rows(x, Peers.of(got), zero, zero, scale, num_rows=1)
            same_bits(got[0], want[0], f"{dtype} times {scale.item()!r}")
