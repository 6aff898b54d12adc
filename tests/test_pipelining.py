"""MoE layers in pipeline schedules: gradients as without a pipeline, and payload slots as many as the schedule says.

The EP groups of the stages are disjoint, each with its own heap; the stages send activations to each other over gloo.
Nothing of torch's schedules had to be worked round, except that they leave the other stages waiting when one fails:
``run_case`` destroys the pipeline's group then, as a trainer's launcher ends the processes.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from ep_plugin.dispatch import slots_for
from tests.pipelining_models import Case, run_case

RUNS = {
    "1f1b": Case("1f1b", (2, 2)),
    "1f1b, rows per route": Case("1f1b", (2, 1), form="route"),
    "1f1b, checkpointed": Case("1f1b", (3, 3), region=3),
    "1f1b, partly checkpointed": Case("1f1b", (3, 3), region=2, form="route"),
    "interleaved": Case("interleaved", (1, 1, 1, 1)),
    "interleaved, rows per route": Case("interleaved", (2, 1, 1, 2), microbatches=2, form="route"),
    "interleaved, chunks that differ": Case("interleaved", (1, 0, 2, 1), microbatches=6),
    "interleaved, checkpointed": Case("interleaved", (2, 2, 2, 2), region=2),
    "gpipe": Case("gpipe", (1, 2), microbatches=3),
}
SLOTS = {  # of pipeline ranks 0 and 1, worked out by hand
    "1f1b": (4, 2),
    "1f1b, rows per route": (4, 1),
    "1f1b, checkpointed": (3, 3),
    "1f1b, partly checkpointed": (4, 3),
    "interleaved": (5, 3),
    "interleaved, rows per route": (6, 4),
    "interleaved, chunks that differ": (7, 1),
    "interleaved, checkpointed": (2, 2),
    "gpipe": (3, 6),
}

ONE_RANK = {  # all stages on each of two EP ranks: what a machine with two GPUs can run
    "interleaved, two stages on a rank": Case("interleaved", (1, 2), pp=1),
    "interleaved, four stages on a rank, checkpointed": Case("interleaved", (2, 2, 2, 2), region=2, pp=1),
    "interleaved, three stages, rows per route": Case("interleaved", (1, 0, 2), form="route", pp=1),
    "1f1b, one stage": Case("1f1b", (3,), pp=1),
    "gpipe, one stage": Case("gpipe", (2,), microbatches=3, pp=1),
}
ONE_RANK_SLOTS = {
    "interleaved, two stages on a rank": 3,
    "interleaved, four stages on a rank, checkpointed": 2,
    "interleaved, three stages, rows per route": 3,
    "1f1b, one stage": 3,
    "gpipe, one stage": 6,
}


@pytest.mark.parametrize("name", ONE_RANK)
def test_stages_of_one_rank(pool, name):
    """Catches what the test below catches, where a stage hands its output to the next one without a transfer."""
    for result in pool.run(run_case, 2, ONE_RANK[name], timeout=60):
        assert result.get("raised") is None
        assert result["error"] < 1e-12
        assert result["peak"] == result["needed"] == ONE_RANK_SLOTS[name]
        assert result["in_use"] == 0


@pytest.mark.parametrize("name", RUNS)
def test_a_schedule_gives_the_gradients_of_the_whole_model_with_exactly_its_slots(pool, name):
    """Catches a payload that a later microbatch overwrites before its weight gradient has read it, one that is held
    longer than its backward, and a wrong number of slots for the schedule."""
    for rank, result in enumerate(pool.run(run_case, 4, RUNS[name], timeout=60)):
        assert result.get("raised") is None
        assert result["error"] < 1e-12
        assert result["peak"] == result["needed"] == SLOTS[name][rank // 2]
        assert result["in_use"] == 0


@pytest.mark.parametrize(
    ("name", "short_rank"),
    [("1f1b", 0), ("1f1b", 1), ("1f1b, checkpointed", 1), ("interleaved", 0), ("interleaved", 1), ("gpipe", 0)],
)
def test_one_slot_fewer_is_an_error_on_every_rank_of_the_stage(pool, name, short_rank):
    """Catches a rank that is left waiting when its peers run out of slots, and a number of slots that is too large."""
    case = Case(**{**vars(RUNS[name]), "short_rank": short_rank})
    slots = SLOTS[name][short_rank] - 1
    for rank, result in enumerate(pool.run(run_case, 4, case, timeout=60)):
        ran_out = f"all {slots} payload slots are leased on EP ranks [0, 1]: slots={slots} must be at least"
        found = any(ran_out in message for message in result["raised"])
        assert found == (rank // 2 == short_rank), result["raised"]


def _stages(stages: int, chunks: int) -> list[Any]:
    """What a schedule asks of its stages to lay out the order of a rank."""
    return [
        SimpleNamespace(num_stages=stages * chunks, group_size=stages, group_rank=0, stage_index=chunk * stages)
        for chunk in range(chunks)
    ]


def _peak(order: list[Any], stages: int, layers: tuple[int, ...]) -> int:
    """Most MoE layers that wait for their backward, in torch's own order of one rank."""
    held = peak = 0
    for action in filter(None, order):
        change = {"FORWARD": 1, "FULL_BACKWARD": -1}.get(action.computation_type.name, 0)
        held += change * layers[action.stage_index // stages]
        peak = max(peak, held)
    assert held == 0
    return peak


@pytest.mark.parametrize("layers", [(1,), (2,), (1, 1), (2, 0), (0, 1, 3)])
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_slots_follow_the_order_of_torch(stages, layers):
    """Catches a formula that is off for some rank, number of microbatches or chunk."""
    for microbatches in (stages, stages + 1, 2 * stages, 5 * stages):
        if len(layers) == 1:
            schedules = {
                "gpipe": ScheduleGPipe(_stages(stages, 1)[0], microbatches),
                "1f1b": Schedule1F1B(_stages(stages, 1)[0], microbatches),
            }
        elif microbatches % max(1, microbatches // stages) == 0:
            schedules = {"interleaved": ScheduleInterleaved1F1B(_stages(stages, len(layers)), microbatches)}
        else:
            continue
        for name, schedule in schedules.items():
            for rank in range(stages):
                needed = slots_for(name, layers=layers, microbatches=microbatches, stages=stages, rank=rank)
                assert needed == _peak(schedule.pipeline_order[rank], stages, layers), (name, microbatches, rank)


def test_slots_follow_the_warmup_of_megatron():
    """Catches a number that Megatron-Core's interleaved schedule would exceed."""
    schedules = pytest.importorskip("megatron.core.pipeline_parallel.schedules")
    for stages, chunks, rounds in ((2, 2, 1), (4, 2, 3), (4, 3, 1)):
        for rank in range(stages):
            group = SimpleNamespace(size=lambda stages=stages: stages, rank=lambda rank=rank: rank)
            where = SimpleNamespace(pp_group=group, virtual_pipeline_model_parallel_size=chunks)
            total, _, warmup, _ = schedules.get_pp_rank_microbatches(
                rounds * stages, chunks, stages, p2p_communicator=where
            )
            needed = slots_for(
                "interleaved", layers=(1,) * chunks, microbatches=rounds * stages, stages=stages, rank=rank
            )
            assert needed == min(total, warmup + 1)


def test_checkpointed_layers_add_their_region():
    """Catches recomputed layers that are counted for every forward in flight, or not at all."""
    assert slots_for("1f1b", layers=0, stages=4, microbatches=8, checkpointed=5) == 5
    assert slots_for("1f1b", layers=2, stages=4, microbatches=8, checkpointed=5) == 4 * 2 + 5
    assert slots_for("1f1b", layers=2) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(schedule="1f1d", layers=1), "did you mean '1f1b'"),
        (dict(schedule="1f1b", layers=(1, 1)), "use schedule='interleaved'"),
        (dict(schedule="1f1b", layers=-1), "layers=-1"),
        (dict(schedule="gpipe", layers=()), "layers=()"),
        (dict(schedule="gpipe", layers=1, microbatches=0), "microbatches=0"),
        (dict(schedule="1f1b", layers=1, stages=2, rank=2), "rank must be in"),
        (dict(schedule="interleaved", layers=(1, 1), stages=2, microbatches=5), "microbatches=5 do not divide"),
    ],
)
def test_numbers_that_make_no_schedule_are_refused(arguments, message):
    """Catches an answer given for a schedule that does not exist."""
    with pytest.raises(ValueError) as error:
        slots_for(**arguments)
    assert message in str(error.value)
