"""Which ranks form which group, from the parallel degrees: pure arithmetic first, process groups second.

A pipeline stage has one set of ranks and two grids over it (report, equation 8 and its folded form):

    dense layers   TP × C × D          tp fastest, then cp, then dp
    expert layers  ETP × M_E × D_E     etp fastest, then ep_mp, then ep_dp

so TP·C·D = ETP·M_E·D_E; pipeline stages are the slowest axis of both. The rank lists equal Megatron-Core's for its
default order tp-cp-ep-dp-pp.
"""

from __future__ import annotations

import argparse
import datetime
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

DENSE_GRID = ("tp", "cp", "dp", "pp")
EXPERT_GRID = ("etp", "ep_mp", "ep_dp", "pp")


@dataclass(frozen=True)
class GroupKind:
    """One way to partition the world: ranks that differ only in ``varying``, axes of ``grid``, are a group."""

    grid: tuple[str, ...]
    varying: tuple[str, ...]
    purpose: str


KINDS: dict[str, GroupKind] = {
    "tp": GroupKind(DENSE_GRID, ("tp",), "slices of one dense layer"),
    "cp": GroupKind(DENSE_GRID, ("cp",), "slices of one sequence"),
    "dp": GroupKind(DENSE_GRID, ("dp",), "different data"),
    "pp": GroupKind(DENSE_GRID, ("pp",), "pipeline stages"),
    "dp_cp": GroupKind(DENSE_GRID, ("cp", "dp"), "reduces dense gradients"),
    "tp_pp": GroupKind(DENSE_GRID, ("tp", "pp"), "one complete set of dense parameters"),
    "etp": GroupKind(EXPERT_GRID, ("etp",), "slices of one expert"),
    "ep_mp": GroupKind(EXPERT_GRID, ("ep_mp",), "exchanges token rows"),
    "ep_dp": GroupKind(EXPERT_GRID, ("ep_dp",), "reduces expert gradients"),
    "etp_ep": GroupKind(EXPERT_GRID, ("etp", "ep_mp"), "one complete set of a stage's experts"),
    "etp_ep_pp": GroupKind(EXPERT_GRID, ("etp", "ep_mp", "pp"), "one complete set of expert parameters"),
}


@dataclass(frozen=True)
class Layout:
    """The parallel degrees of a world of processes, checked against each other; :func:`layout` makes one."""

    world_size: int
    tp: int
    pp: int
    cp: int
    etp: int
    ep: int

    def __post_init__(self) -> None:
        _check_degrees(self.world_size, {name: getattr(self, name) for name in ("tp", "pp", "cp", "etp", "ep")})

    @property
    def ep_mp(self) -> int:
        """M_E: over how many ranks the experts of a stage are spread (the field ``ep``)."""
        return self.ep

    @property
    def dp(self) -> int:
        """D: replicas of the dense parameters that see different data."""
        return self.world_size // (self.pp * self.tp * self.cp)

    @property
    def ep_dp(self) -> int:
        """D_E: replicas of every expert shard."""
        return self.world_size // (self.pp * self.etp * self.ep)

    def groups(self, kind: str) -> tuple[tuple[int, ...], ...]:
        """All groups of one of ``KINDS``: each ascending, ordered by first rank; together they partition the world."""
        return _groups(self, kind)

    def group_of(self, kind: str, rank: int) -> tuple[int, ...]:
        """The group of ``kind`` that holds global rank ``rank``."""
        self._check_rank(rank)
        return next(ranks for ranks in self.groups(kind) if rank in ranks)

    def coordinate(self, rank: int) -> dict[str, int]:
        """Global ``rank``'s place on every axis of both grids: tp, cp, dp, etp, ep_mp, ep_dp, pp."""
        self._check_rank(rank)
        return self._place(DENSE_GRID, rank) | self._place(EXPERT_GRID, rank)

    def experts(self, rank: int, num_experts: int) -> range:
        """The global ids of the experts whose parameters global ``rank`` stores (report, Figure 11)."""
        return experts_of(num_experts, self.ep, self.coordinate(rank)["ep_mp"])

    def table(self, num_experts: int | None = None, limit: int = 64) -> str:
        """The layout as text: degrees, coordinates (and experts) of each rank, groups; at most ``limit`` of a kind."""
        header = ["rank", *dict.fromkeys((*DENSE_GRID[:-1], *EXPERT_GRID))] + (["experts"] if num_experts else [])
        rows = []
        for rank in range(min(self.world_size, limit)):
            place = self.coordinate(rank)
            row = [str(rank), *(str(place[axis]) for axis in header[1:] if axis in place)]
            rows.append(row + ([span_text(self.experts(rank, num_experts))] if num_experts else []))
        lines = [
            self.equation(),
            "",
            *_align([header, *rows]),
            *_more(self.world_size, limit, "ranks"),
            "",
        ]
        rows = []
        for kind, what in KINDS.items():
            groups = self.groups(kind)
            shown = [f"[{span_text(ranks)}]" for ranks in groups[:limit]] + _more(len(groups), limit, "groups")
            alone = len(groups) == self.world_size
            rows.append([kind, str(len(groups[0])), what.purpose, "each alone" if alone else " ".join(shown)])
        return "\n".join(lines + _align([["group", "size", "purpose", "ranks"], *rows]))

    def equation(self) -> str:
        """The degrees of both grids: 8 ranks = PP 1 × (TP 2 · …) = PP 1 × (ETP 1 · …)."""
        return (
            f"{self.world_size} ranks = PP {self.pp} × (TP {self.tp} · CP {self.cp} · DP {self.dp})"
            f" = PP {self.pp} × (ETP {self.etp} · EP_MP {self.ep_mp} · EP_DP {self.ep_dp})"
        )

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank={rank} is not in [0, {self.world_size}), the ranks of this layout")

    def _place(self, grid: Sequence[str], rank: int) -> dict[str, int]:
        place = {}
        for axis in grid:
            rank, place[axis] = divmod(rank, getattr(self, axis))
        return place


@lru_cache(maxsize=256)
def _groups(layout: Layout, kind: str) -> tuple[tuple[int, ...], ...]:
    if kind not in KINDS:
        raise ValueError(f"group kind {kind!r} is not one of {', '.join(KINDS)}")
    grid, varying = KINDS[kind].grid, KINDS[kind].varying
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(layout.world_size):
        place = layout._place(grid, rank)
        groups.setdefault(tuple(place[axis] for axis in grid if axis not in varying), []).append(rank)
    return tuple(map(tuple, groups.values()))


def layout(world_size: int, *, tp: int = 1, pp: int = 1, cp: int = 1, etp: int = 1, ep: int = 1) -> Layout:
    """The layout of these degrees; needs neither torch nor a process group.

    ``ep`` is M_E, the EP_MP degree; D and D_E follow from the world size. Raises ValueError that quotes the values and
    the degrees that would work when TP·CP·PP or ETP·M_E·PP does not divide the world.
    """
    return Layout(world_size, tp=tp, pp=pp, cp=cp, etp=etp, ep=ep)


def _check_degrees(world_size: int, degrees: dict[str, int]) -> None:
    for name, value in {"world_size": world_size, **degrees}.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}={value!r} must be an integer of at least 1")

    def fits(degrees: dict[str, int], names: tuple[str, ...]) -> bool:
        return world_size % prod(degrees[name] for name in names) == 0

    stage_products = (("tp", "cp", "pp"), ("etp", "ep", "pp"))
    for names in stage_products:
        if fits(degrees, names):
            continue
        advice = []
        for name in names:
            would_do = [
                other
                for other in _divisors(world_size)
                if all(fits({**degrees, name: other}, product) for product in stage_products)
            ]
            if would_do:
                advice.append(f"{name} may be {_listing(would_do)}")
        values = [degrees[name] for name in names]
        raise ValueError(
            f"{'·'.join(names)} = {'·'.join(map(str, values))} = {prod(values)} does not divide"
            f" world_size={world_size}; "
            + ("with the other degrees kept, " + ", or ".join(advice) if advice else "no change of one degree would do")
            + f"; each product must be one of {_listing(_divisors(world_size))}"
        )


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _listing(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))


def experts_of(num_experts: int, ep: int, ep_rank: int) -> range:
    """The global ids of the experts stored by ``ep_rank`` of an EP_MP group of size ``ep``: contiguous equal blocks.

    Raises ValueError, with the degrees that would work, when ``num_experts`` is not a multiple of ``ep``.
    """
    if num_experts < 1 or ep < 1 or num_experts % ep:
        raise ValueError(
            f"num_experts={num_experts} cannot be spread evenly over ep={ep} ranks; "
            f"ep may be {_listing(_divisors(num_experts)) or 'nothing'}"
        )
    if not 0 <= ep_rank < ep:
        raise ValueError(f"ep_rank={ep_rank} is not in [0, {ep}), the ranks of the EP_MP group")
    each = num_experts // ep
    return range(ep_rank * each, (ep_rank + 1) * each)


@dataclass(frozen=True)
class ProcessGroups:
    """This rank's process group of every kind, each its own communicator even where two hold the same ranks.

    Groups of one rank are real groups too; those of all kinds are one object.
    """

    layout: Layout
    rank: int
    tp: ProcessGroup
    cp: ProcessGroup
    dp: ProcessGroup
    pp: ProcessGroup
    dp_cp: ProcessGroup
    tp_pp: ProcessGroup
    etp: ProcessGroup
    ep_mp: ProcessGroup
    ep_dp: ProcessGroup
    etp_ep: ProcessGroup
    etp_ep_pp: ProcessGroup

    @classmethod
    def create(cls, layout: Layout, *, timeout: datetime.timedelta | None = None) -> ProcessGroups:
        """Make all groups; collective over WORLD, called once by every rank.

        ``timeout`` bounds every group's collectives (None: the backend's own). Raises ValueError before any group is
        made if the layout is for another world size, or torch.distributed has not been started.
        """
        import torch.distributed as dist

        if not dist.is_initialized():
            raise ValueError(
                "ProcessGroups.create needs torch.distributed: start the program with torchrun and call"
                " init_process_group first"
            )
        if layout.world_size != dist.get_world_size():
            raise ValueError(
                f"the layout is for world_size={layout.world_size}, but {dist.get_world_size()} processes are running"
            )
        rank = dist.get_rank()
        mine: dict[str, ProcessGroup] = {}
        alone: ProcessGroup | None = None
        for kind in KINDS:
            partition = layout.groups(kind)
            if len(partition) == layout.world_size and alone is not None:
                mine[kind] = alone
                continue
            for ranks in partition:
                group = dist.new_group(list(ranks), timeout=timeout, group_desc=kind)
                if rank in ranks:
                    mine[kind] = group
            if len(partition) == layout.world_size:
                alone = mine[kind]
        return cls(layout, rank, **mine)

    def destroy(self) -> None:
        """Destroy this rank's groups, not WORLD; called by every rank, after whatever uses the groups is closed."""
        import torch.distributed as dist

        for group in {id(group): group for group in (getattr(self, kind) for kind in KINDS)}.values():
            dist.destroy_process_group(group)


def span_text(numbers: Iterable[int]) -> str:
    """Ascending numbers with runs shortened: 0-3, 8, 9."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" if b > a + 1 else f"{a},{b}" for a, b in runs)


def _more(count: int, limit: int, what: str) -> list[str]:
    return [f"… {count - limit} more {what}"] if count > limit else []


def _align(rows: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def main(arguments: Sequence[str] | None = None) -> None:
    """``ep-topology``: print the layout of the given degrees; an impossible one ends with one line and exit code 2."""
    parser = argparse.ArgumentParser(prog="ep-topology", description="Print which ranks form which parallel group.")
    parser.add_argument("--world", type=int, required=True, help="number of processes")
    for name, meaning in (
        ("tp", "tensor parallel degree"),
        ("pp", "pipeline stages"),
        ("cp", "context parallel degree"),
        ("etp", "tensor parallel degree inside an expert"),
        ("ep", "expert parallel degree (EP_MP)"),
    ):
        parser.add_argument(f"--{name}", type=int, default=1, help=f"{meaning} (default 1)")
    parser.add_argument("--experts", type=int, help="number of routed experts: show which ones each rank stores")
    parser.add_argument("--draw", action="store_true", help="draw the ranks side by side instead of listing them")
    parser.add_argument("--svg", metavar="FILE", help="draw them into an SVG file as well")
    options = parser.parse_args(arguments)
    try:
        chosen = layout(options.world, tp=options.tp, pp=options.pp, cp=options.cp, etp=options.etp, ep=options.ep)
        from .drawing import topology_svg, topology_text

        print(topology_text(chosen, options.experts) if options.draw else chosen.table(options.experts))
        if options.svg is not None:
            Path(options.svg).write_text(topology_svg(chosen, options.experts))
    except (OSError, ValueError) as error:
        parser.exit(2, f"ep-topology: {error}\n")
