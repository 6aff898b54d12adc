"""Waves on CPU, in several processes: the same numbers as without them, one lease for a step, refusals.

Legend: T tokens of a rank, K routes per token, E experts, D hidden size, W waves.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from ep_plugin.config import EPConfig, LegsConfig, MXFP8Config, ScheduleConfig
from ep_plugin.experts import Activation, GroupedMLP
from ep_plugin.heap import HeapAborted
from ep_plugin.layer import ForeignExperts, moe_step
from ep_plugin.waves.lanes import Lanes, drive
from ep_plugin.waves.step import usual_spare
from tests.moe import (
    PATHS,
    Inputs,
    Problem,
    differences,
    make_experts,
    make_inputs,
    oracle,
    oracles,
    poisoned_memory,
    run_step,
    same_bits,
)

Case = tuple[str, str, Problem, ScheduleConfig]  # path, weight_at, problem, schedule
TOKENS = (5, 0, 9, 3)


def schedules(*waves: int, by: tuple[str, ...] = ("token", "expert")) -> list[ScheduleConfig]:
    return [ScheduleConfig("wave_overlapped", n, b) for n in waves for b in by]


def check_cases(rank: int, world: int, cases: list[Case]) -> list[str]:
    """Run every case twice on one dispatcher; say what is wrong."""
    want = oracles(rank, world, [(problem, weight_at) for _, weight_at, problem, _ in cases])
    wrong = []
    with poisoned_memory():
        for path, weight_at, problem, schedule in cases:
            dispatcher = problem.dispatcher(path, weight_at, schedule=schedule)
            experts, mine = make_experts(problem, rank, world), make_inputs(problem)[rank]
            first, second = (run_step(dispatcher, experts, mine) for _ in range(2))
            faults = differences(first, want[problem, weight_at], problem)
            faults += [
                f"{f.name} of the second step differs"
                for f in fields(first)
                if not same_bits(getattr(first, f.name), getattr(second, f.name))
            ]
            if dispatcher.stats().get("slots_in_use"):
                faults.append(f"slots are still leased: {dispatcher.stats()}")
            if dispatcher.stats().get("slots_peak", 1) > 1:
                faults.append(f"more than one lease for a step: {dispatcher.stats()}")
            dispatcher.close()
            wrong += [f"rank {rank}, {path}, weight_at={weight_at}, {problem}, {schedule}: {fault}" for fault in faults]
    return wrong


def assert_right(pool, cases: list[Case]) -> None:
    world = cases[0][2].world
    wrong = [line for lines in pool.run(check_cases, world, cases, timeout=300) for line in lines]
    assert not wrong, f"{len(wrong)} faults\n" + "\n".join(wrong[:20])


def ways() -> list[tuple[str, str]]:
    places = ("hidden", "input", "output", "source")
    return [(p, w) for p, w in itertools.product(PATHS, places) if (p, w) != ("dedup", "source")]


def test_every_path_and_weight_place_in_float64(pool):
    """Fault: any wrong term of a wave, forward or backward; a gradient that is lost between waves or counted in two; a
    wave of no tokens that is left out on one rank alone."""
    token, expert = schedules(3)
    cases = [(*way, Problem(TOKENS), token) for way in ways()]
    cases += [(path, place, Problem(TOKENS), expert) for path in PATHS for place in ("hidden", "output")]
    cases += [(path, "hidden", Problem((5, 0)), schedules(4, by=("token",))[0]) for path in PATHS]
    cases += [
        (path, place, Problem((5, 3)), s) for path in PATHS for place in ("hidden", "input") for s in schedules(1)
    ]
    assert_right(pool, [case for case in cases if case[2].world == 4])
    assert_right(pool, [case for case in cases if case[2].world == 2])


Needs = tuple[bool, bool, bool, bool]  # gradients of x, of router weights, of the up and of the down projection


def check_frozen(rank: int, world: int, cases: list[tuple[str, str, ScheduleConfig, tuple[Needs, ...]]]) -> list[str]:
    """Steps of which not every part needs a gradient, each rank's own: what is asked for, twice from one graph."""
    wrong, problem = [], Problem((5, 3))
    for path, weight_at, schedule, needs in cases:
        of_x, of_weight, of_up, of_down = needs[rank]
        dispatcher = problem.dispatcher(path, weight_at, schedule=schedule)
        mine, experts, want = make_inputs(problem)[rank], make_experts(problem, rank, world), oracle(problem, weight_at)
        x, weight = mine.x.requires_grad_(of_x), mine.weight.requires_grad_(of_weight)
        leaves = {"dx": x, "dweight": weight}
        for (name, parameter), needed in zip(experts.named_parameters(), (of_up, of_down) * 2, strict=True):
            leaves["d" + name] = parameter.requires_grad_(needed)
        asked = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
        out = moe_step(dispatcher, x, mine.idx, weight, experts)
        for keep in (True, False):
            for name, got in zip(asked, torch.autograd.grad(out, asked.values(), mine.upstream, keep), strict=True):
                error = float((got - getattr(want[rank], name)).abs().max())
                if not error < 1e-9:
                    wrong.append(f"rank {rank}, {path}, {weight_at}, {schedule}, {needs}: {name}: {error:.3g}")
        dispatcher.close()
    return wrong


def test_frozen_parts(pool):
    """Fault: what backward reads is kept only where the gradient that it is named for is needed, or gradients of
    weights that another rank needs are zero because this one has no use for its own."""
    everything, no_router = (True,) * 4, (True, False, True, True)
    alike = [no_router, (True, True, False, True), (True, False, False, True), (True, False, True, False)]
    alike += [(False, True, False, False), (False, False, False, True)]
    ranks = [(needs, needs) for needs in alike]
    one, two = schedules(1, 2, by=("token",))
    cases = [(path, place, s, n) for path in PATHS for place in ("input", "output") for s in (one, two) for n in ranks]
    for other in (no_router, (True, False, False, False)):  # of the CPU's dispatchers block alone lets ranks differ
        cases += [("block", place, one, (everything, other)) for place in ("hidden", "input", "output", "source")]
    wrong = [line for lines in pool.run(check_frozen, 2, cases, timeout=120) for line in lines]
    assert not wrong, f"{len(wrong)} faults\n" + "\n".join(wrong[:20])


def check_rows_alive(rank: int, world: int) -> list[str]:
    """Dispatched rows that are alive when others are made, forward and again backward, where nothing overlaps."""
    wrong, problem = [], Problem((5, 3))
    made: list[StorageWeakRef] = []

    def watched(rows: torch.Tensor) -> torch.Tensor:
        alive = sum(not storage.expired() for storage in made)
        if alive:
            wrong.append(f"rank {rank}, {what}: {alive} of the {len(made)} made before")
        made.append(StorageWeakRef(rows.untyped_storage()))
        return rows

    for weight_at, schedule, of_up in itertools.product(("input", "hidden"), schedules(3), (True, False)):
        what = f"weight_at={weight_at}, {schedule}, up projection needs a gradient: {of_up}"
        dispatcher = problem.dispatcher("dedup", weight_at, schedule=schedule)
        send = dispatcher.inner.send

        def sent(state: Any, x: Any, weight: Any, arrived: Any, send: Any = send) -> Any:
            rows, weights = send(state, x, weight, arrived)
            again = arrived.rebuild.rows
            arrived.rebuild.rows = lambda *args: watched(again(*args))
            return watched(rows), weights

        dispatcher.inner.send = sent
        mine, experts = make_inputs(problem)[rank], make_experts(problem, rank, world)
        experts.up.requires_grad_(of_up)
        moe_step(dispatcher, mine.x, mine.idx, mine.weight.requires_grad_(), experts).backward(mine.upstream)
        dispatcher.close()
    if len(made) != 42:  # 8 steps of 3 waves, and again 6 of these: rows at the input, or for the up projection
        wrong.append(f"rank {rank}: rows were made {len(made)} times")
    return wrong


def test_rows_live_no_longer_than_their_wave(pool):
    """Fault: a wave's dispatched rows stay until the whole step is done."""
    wrong = [line for lines in pool.run(check_rows_alive, 2, timeout=60) for line in lines]
    assert not wrong, f"{len(wrong)} faults\n" + "\n".join(wrong[:20])


def test_capacity_is_that_of_the_whole_batch(pool):
    """Fault: quotas are applied to each wave, so that another set of routes is dropped than without waves."""
    problems = [Problem(TOKENS, policy=policy, factor=0.6) for policy in ("rank", "source", "expert")]
    assert_right(pool, [(path, "hidden", problem, s) for path in PATHS for problem in problems for s in schedules(2)])


def test_route_sets(pool):
    """Fault: a wave, a rank or an expert without rows; buffers that grow between the waves of a batch."""
    problems = [
        Problem((0, 0, 1, 0)),
        Problem((6, 2, 5, 0), "to_last_rank"),
        Problem((4, 3, 0, 5), "one_expert", dtype=torch.bfloat16, weight_dtype=torch.float32),
        Problem((4, 3, 0, 2), "none"),
        Problem((4, 200, 0, 1), hidden=8, width=4, top_k=2, strided=True),
    ]
    cases = [(path, "hidden", problem, schedules(2)[0]) for path in PATHS for problem in problems]
    cases += [("dedup", "hidden", problem, schedules(2)[1]) for problem in problems]
    assert_right(pool, cases)


def test_what_waits_for_what():
    """Fault: rows start to travel back before the GEMM behind the same mark has its multiprocessors, nothing is done
    while the first rows arrive, or GEMMs leave multiprocessors to waves that there are not."""
    for waves, want in (
        (1, ["there 0", "meanwhile", "experts 0", "after 0", "back 0"]),
        (2, ["there 0", "meanwhile", "experts 0", "there 1", "after 0", "back 0", "experts 1", "after 1", "back 1"]),
    ):
        order: list[str] = []
        lanes = Lanes(torch.device("cpu"), overlapped=True)

        def step(name: str, order: list[str] = order) -> Callable[..., None]:
            return lambda wave, *_: order.append(f"{name} {wave}")

        with lanes.open(waves) as pipeline:
            pipeline.spare = 16
            stages = [step(name) for name in ("there", "experts", "back", "after")]
            drive(pipeline, *stages, lambda order=order: order.append("meanwhile"))
            for around, left in ((pipeline.beside_others, waves > 1), (pipeline.spared, True)):
                with around(True):
                    assert torch._C._get_sm_carveout_experimental() == (16 if left else None), around
        assert order == want and torch._C._get_sm_carveout_experimental() is None


def test_multiprocessors_that_are_left() -> None:
    """Fault: wide experts, whose GEMMs last long, leave as many multiprocessors for as long."""
    wanted = {(0, 768): 16, (0, 1536): 16, (0, 6144): 4, (0, 65536): 2, (8, 768): 8, (128, 768): 32, (1, 8192): 1}
    assert {shape: usual_spare(*shape) for shape in wanted} == wanted


def identity(problem: Problem, rank: int, world: int) -> GroupedMLP:
    """Experts whose products are exact whatever their order: y = max(x, 0)."""
    local = problem.num_experts // world
    eye = torch.eye(problem.hidden, dtype=problem.dtype).expand(local, -1, -1)
    up, down = (torch.nn.Parameter(eye.clone()) for _ in range(2))
    return GroupedMLP.from_parameters(up, down, activation=Activation("relu", gated=False))


def run_bits(rank: int, world: int, problem: Problem) -> list[str]:
    """The same bits as without waves, and one lease for each layer of two."""
    wrong = []
    mine = make_inputs(problem)[rank]

    def step(d: Any, experts: GroupedMLP, run: Callable[..., Any] = moe_step) -> list[torch.Tensor]:
        x, w = mine.x.detach().requires_grad_(), mine.weight.detach().requires_grad_()
        experts.zero_grad()
        out = run(d, x, mine.idx, w, experts, layer="a")
        if run is not moe_step and d.stats().get("slots_in_use"):
            wrong.append(f"rank {rank}: a checkpointed step holds a slot")
        out.backward(mine.upstream)
        return [out.detach(), x.grad, w.grad, experts.up.grad.clone(), experts.down.grad.clone()]

    def checkpointed(*args: Any, **kwargs: Any) -> torch.Tensor:
        return checkpoint(moe_step, *args, use_reentrant=False, **kwargs)

    for path in PATHS:
        plain = problem.dispatcher(path)
        waves = problem.dispatcher(path, schedule=ScheduleConfig("wave_overlapped", 3))
        one = problem.dispatcher(path, schedule=ScheduleConfig("wave_overlapped", 1))
        experts = identity(problem, rank, world)
        want = step(plain, experts)
        for what, got in (
            ("", step(waves, experts)),
            (", checkpointed", step(waves, experts, checkpointed)),
            (", one wave", step(one, experts)),
        ):
            for name, a, b in zip(("out", "dx", "dweight", "dup", "ddown"), got, want, strict=True):
                if not same_bits(a, b):
                    wrong.append(f"rank {rank}, {path}{what}: {name} differs by {(a - b).abs().max()}")
        x = mine.x.detach().requires_grad_()
        first = moe_step(waves, x, mine.idx, mine.weight, experts, layer="first")
        second = moe_step(waves, first, mine.idx, mine.weight, experts, layer="second")
        second.backward(mine.upstream)
        del first, second
        stats = waves.stats()
        if stats.get("slots_peak", 2) != 2 or stats.get("slots_in_use"):
            wrong.append(f"rank {rank}, {path}: two layers leased {stats}")
        for dispatcher in (plain, waves, one):
            dispatcher.close()
    return wrong


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_same_bits_as_without_waves(pool, dtype):
    """Fault: a sum in another order or rounded once more, the sums of weight gradients among them; a recompute that
    gives other rows; a slot for each wave, or one that outlives its step."""
    problem = Problem(TOKENS, hidden=8, dtype=dtype)
    wrong = [line for lines in pool.run(run_bits, problem.world, problem, timeout=120) for line in lines]
    assert not wrong, "\n".join(wrong)


def refusals(rank: int, world: int) -> list[str]:
    problem = Problem((3, 4))
    mine = make_inputs(problem)[rank]
    said = []

    def refused(call: Callable[[], object]) -> None:
        try:
            call()
        except (ValueError, RuntimeError) as error:
            said.append(str(error))

    def build(path: str, **schedule: Any) -> Any:
        return problem.dispatcher(path, schedule=ScheduleConfig(**schedule))

    refused(lambda: build("block", kind="wave_overlapped", waves=7, by="expert"))
    refused(lambda: build("block", width=16))
    waves = build("block", kind="wave_overlapped")
    foreign = ForeignExperts(lambda rows, expert, weights: rows)
    refused(lambda: moe_step(waves, mine.x, mine.idx, mine.weight, foreign))
    refused(lambda: waves.plan(mine.idx))
    waves.close()
    return said


def test_refusals(pool):
    """Fault: a case that waves cannot take fails later, elsewhere or silently."""
    for said in pool.run(refusals, 2, timeout=60):
        for words in (
            "schedule.waves=7 by expert, but a rank has 6 experts",
            "schedule.width=16: the width of dispatcher='block'",
            "needs experts that this project computes (experts.GroupedMLP), not ForeignExperts",
            "plan was called by itself, but schedule.kind='wave_overlapped'",
        ):
            assert any(words in line for line in said), (words, said)
    for schedule, words in (
        (ScheduleConfig("waves"), "schedule.kind='waves' is not one of"),
        (ScheduleConfig("wave_overlapped", 0), "schedule.waves=0 must be 1 to 64"),
        (ScheduleConfig(by="rank"), "schedule.by='rank' is not one of"),
        (ScheduleConfig("auto"), "set schedule.table to a file that ep-bench waves wrote"),
    ):
        with pytest.raises(ValueError, match=words):
            EPConfig(schedule=schedule).validate()
    with pytest.raises(ValueError, match="dispatcher='local' has none"):
        EPConfig(dispatcher="local", schedule=ScheduleConfig("wave_overlapped")).validate()


def fail_on_one_rank(rank: int, world: int) -> str:
    problem = Problem((3, 4))
    mine = make_inputs(problem)[rank]
    waves = problem.dispatcher("dedup", schedule=ScheduleConfig("wave_overlapped"))
    experts = make_experts(problem, rank, world)
    run_step(waves, experts, mine)
    dist.barrier()  # the other may still be in that step when this one fails
    x = mine.x.float() if rank == 1 else mine.x
    try:
        run_step(waves, experts, Inputs(x, mine.idx, mine.weight, mine.upstream), layer="layers.3")
    except (ValueError, HeapAborted) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def test_a_rank_that_rejects_its_input_stops_the_others(pool):
    """Fault: its peers wait for a wave that never comes."""
    other, own = pool.run(fail_on_one_rank, 2, timeout=60)
    assert "x has dtype torch.float32" in own
    assert other.startswith("HeapAborted") and "layers.3" in other


MX = Problem((5, 0, 9, 3), num_experts=8, top_k=3, hidden=64, width=32, dtype=torch.bfloat16)
LEGS = (LegsConfig(), LegsConfig("mxfp8", "bf16", "bf16", "bf16"))


def check_mxfp8(rank: int, world: int, cases: list[tuple[str, str, ScheduleConfig, LegsConfig]]) -> list[str]:
    """Waves against the step without them, both with MXFP8 rows."""
    wrong = []
    experts, mine = make_experts(MX, rank, world), make_inputs(MX)[rank]
    for path, weight_at, schedule, legs in cases:
        settings = dict(precision="mxfp8", mxfp8=MXFP8Config(legs=legs))
        plain, waves = (MX.dispatcher(path, weight_at, schedule=s, **settings) for s in (ScheduleConfig(), schedule))
        want = run_step(plain, experts, mine)
        steps = []
        for _ in range(2):
            steps.append(run_step(waves, experts, mine))
            dist.barrier()  # a slot whose gradients peers still read is in use
        first, second = steps
        for f in fields(first):
            a, b = getattr(first, f.name).double(), getattr(want, f.name).double()
            # By expert a token's sum is quantised once more for each wave.
            loose = schedule.by == "expert" and f.name in ("out", "dx")
            error = float((a - b).abs().max() / b.abs().max().clamp(min=1.0)) if b.numel() else 0.0
            if not error <= (0.0 if schedule.waves == 1 else 0.1 if loose else 0.01):
                wrong.append(f"rank {rank}, {path}, {weight_at}, {schedule}, {legs}: {f.name}: {error:.3g}")
            if not same_bits(getattr(first, f.name), getattr(second, f.name)):
                wrong.append(f"rank {rank}, {path}, {weight_at}, {schedule}, {legs}: {f.name} of the second step")
        stats = waves.stats()
        if stats.get("slots_in_use") or stats.get("slots_peak", 1) > 1:
            wrong.append(f"rank {rank}, {path}, {schedule}: leases {stats}")
        plain.close()
        waves.close()
    return wrong


def test_mxfp8_rows(pool):
    """Fault: a phase of the MXFP8 node is left out, runs for the wrong wave, or reads rows that gradients replaced."""
    token, expert = schedules(2)
    cases = [(path, "hidden", token, legs) for path in PATHS for legs in LEGS]
    cases += [("route", "source", token, LEGS[0]), ("dedup", "output", token, LEGS[0])]
    cases += [("dedup", "hidden", expert, LEGS[0]), ("block", "hidden", expert, LEGS[0])]
    one = ScheduleConfig("wave_overlapped", 1)
    cases += [(path, "hidden", one, legs) for path in PATHS for legs in (*LEGS, LegsConfig("bf16"))]
    wrong = [line for lines in pool.run(check_mxfp8, MX.world, cases, timeout=300) for line in lines]
    assert not wrong, f"{len(wrong)} faults\n" + "\n".join(wrong[:20])


def one_parameter(rank: int, world: int) -> list[str]:
    """Experts whose projections are one tensor, in waves and without."""
    problem = replace(MX, tokens=(5, 3), width=64, dtype=torch.float32)
    mine, wrong = make_inputs(problem)[rank], []
    weight = torch.nn.Parameter(torch.randn(4, 64, 64, generator=torch.Generator().manual_seed(rank)) / 8)
    experts = GroupedMLP.from_parameters(weight, weight, activation=Activation("relu", gated=False))
    gradients = []
    for schedule in (ScheduleConfig(), *schedules(1, 2, by=("token",))):
        dispatcher = problem.dispatcher("block", schedule=schedule, precision="mxfp8")
        weight.grad = None
        moe_step(dispatcher, mine.x, mine.idx, mine.weight, experts).backward(mine.upstream)
        gradients.append(weight.grad)
        dispatcher.close()
        if not torch.allclose(gradients[-1], gradients[0], rtol=1e-5, atol=1e-5):
            wrong.append(f"rank {rank}, {schedule}")
    return wrong


def test_mxfp8_projections_that_are_one_parameter(pool):
    """Fault: the factors of one projection's gradient are told from the other's by whose weight it is."""
    assert sum(pool.run(one_parameter, 2, timeout=60), []) == []
