"""The real DeepEP's recorded answers: our dispatcher on top of them, and the stand-in against them.

``tests/gpu/record_deepep.py`` makes the recordings, ``deepep_recording`` says what is in them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests import deepep_case, deepep_standin
from tests.deepep_recording import CASES, Recorded, Recording, Replayed, same

RECORDINGS = sorted((Path(__file__).parent / "data").glob("deepep_*.npz"))


def same_results(recording: Recording, case: str, rank: int, got: dict[str, torch.Tensor]) -> list[str]:
    wrong = []
    for name, tensor in got.items():
        want = recording.tensor(f"{case}/{rank}/result/out/{name}")
        if want is None or want.dtype != tensor.dtype or not torch.equal(want, tensor):
            wrong.append(f"{case}, rank {rank}: {name} is {tensor}, recorded is {want}")
    return wrong


def replay(rank: int, world: int, path: Path | Recording) -> list[str]:
    recording = path if isinstance(path, Recording) else Recording.load(path)
    library, wrong = Replayed(recording, rank), []
    for case in recording.meta["cases"]:
        dispatcher = deepep_case.build(case, library, torch.device("cpu"))
        library.begin(case)
        got = deepep_case.step(case, dispatcher)
        library.begin("")
        dispatcher.check()
        dispatcher.close()
        wrong += same_results(recording, case, rank, got)
    return wrong


def rows_by_route(got: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The results with each expert's rows in the order of their routes."""
    experts = torch.bucketize(torch.arange(got["rows"].shape[0]), got["offsets"][1:], right=True)
    order = torch.argsort(experts * 2**32 + got["route_of_row"])
    return got | {name: got[name][order] for name in ("rows", "weights", "route_of_row")}


def stand_in(rank: int, world: int, path: Path) -> list[str]:
    """What the stand-in makes of the same inputs; the order of rows is free."""
    recording, wrong = Recording.load(path), []
    for case in recording.meta["cases"]:
        dispatcher = deepep_case.build(case, deepep_standin, torch.device("cpu"))
        got = rows_by_route(deepep_case.step(case, dispatcher))
        dispatcher.close()
        prefix = f"{case}/{rank}/result/out"
        want = rows_by_route({name: recording.tensor(f"{prefix}/{name}") for name in got})
        for name, tensor in got.items():
            if not same(want[name], tensor):
                wrong.append(f"{case}, rank {rank}: {name} is {tensor}, DeepEP's is {want[name]}")
    return wrong


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.stem)
def test_the_dispatcher_makes_of_the_real_answers_what_it_made_on_a_gpu(pool, path):
    """Fault: a call to DeepEP with other arguments than those that worked, or another reading of its answers."""
    assert path.stat().st_size < 400_000
    wrong = [line for lines in pool.run(replay, 2, path) for line in lines]
    assert not wrong, wrong


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.stem)
def test_the_stand_in_answers_as_the_real_library_did(pool, path):
    """Fault: the stand-in has semantics of its own, so that passing over it means nothing."""
    wrong = [line for lines in pool.run(stand_in, 2, path) for line in lines]
    assert not wrong, wrong


def record(rank: int, world: int) -> Recording:
    recording = Recording()
    recording.meta |= {"cases": list(CASES)[:2]}
    library = Recorded(deepep_standin, recording, rank)
    for case in recording.meta["cases"]:
        dispatcher = deepep_case.build(case, library, torch.device("cpu"))
        library.begin(case)
        recording.add(f"{case}/{rank}/result", {}, {}, dict(deepep_case.step(case, dispatcher)))
        library.begin("")
        dispatcher.close()
    return recording


def test_a_recording_comes_back_from_its_file_and_a_change_in_it_is_noticed(pool, tmp_path):
    """Fault: a recorder that loses tensors, or a replay that accepts anything."""
    parts = pool.run(record, 2)
    whole = parts[0]
    whole.arrays |= parts[1].arrays
    whole.save(tmp_path / "deepep_x.npz")
    assert pool.run(replay, 2, tmp_path / "deepep_x.npz") == [[], []]
    whole.arrays["ragged/0/1/in/x"][0, 0] ^= 1
    with pytest.raises(AssertionError, match="x differs from what was recorded"):
        pool.run(replay, 2, whole)
