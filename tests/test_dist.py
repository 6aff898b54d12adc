"""The multi-process harness itself: a failing, a hanging and a killed rank are reported, and the next task runs."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.dist import Pool, run_fresh

REPOSITORY = Path(__file__).parent.parent


def total_rank(rank, world, start):
    value = torch.tensor(rank + start)
    dist.all_reduce(value)
    return int(value), os.getpid()


def raise_on_one(rank, world, bad):
    if rank == bad:
        raise ValueError(f"wrong on {rank}")
    dist.barrier()


def exit_on_one(rank, world, bad):
    if rank == bad:
        raise SystemExit(0)


def hang_on_one(rank, world, bad):
    while rank == bad:
        time.sleep(0.05)


def die_on_one(rank, world, bad):
    if rank == bad:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def leave_traces(rank, world):
    os.environ["EP_TEST_TRACE"] = "1"
    torch.set_default_dtype(torch.float64)
    dist.new_group([0])
    return torch.rand(1).item()


def find_traces(rank, world):
    return "EP_TEST_TRACE" in os.environ, torch.get_default_dtype(), dist.get_world_size(), torch.rand(1).item()


@pytest.fixture(scope="module")
def own_pool():
    pool = Pool()
    yield pool
    pool.close()


def pids(pool, world):
    return [pid for _, pid in pool.run(total_rank, world, 0)]


def test_values_come_back_by_rank_and_processes_stay(own_pool):
    """Catches a worker started anew for every task, and ranks that do not share one group."""
    first = own_pool.run(total_rank, 3, 10)
    assert [total for total, _ in first] == [33, 33, 33]
    assert [pid for _, pid in first] == pids(own_pool, 3)
    assert [total for total, _ in own_pool.run(total_rank, 2, 0)] == [1, 1]
    assert pids(own_pool, 2) == [pid for _, pid in first][:2]


def test_a_raising_rank_fails_the_task_and_frees_its_peers(own_pool):
    """Catches a failure that is swallowed, and peers left in a collective until the long time-out."""
    start = time.monotonic()
    with pytest.raises(AssertionError, match="wrong on 1") as failure:
        own_pool.run(raise_on_one, 3, 1)
    assert time.monotonic() - start < 30
    assert "raise_on_one failed on rank" in str(failure.value) and "--- rank 1: raised" in str(failure.value)
    assert [total for total, _ in own_pool.run(total_rank, 3, 0)] == [3, 3, 3]


def test_a_rank_that_cannot_join_does_not_spoil_the_next_task(own_pool):
    """Catches a worker reused after its group could not be made, which then waits under another group's name."""
    before = pids(own_pool, 2)
    with pytest.raises(AssertionError, match="rank 0: raised") as failure:
        own_pool.run(total_rank, 2, NoNetworkIn(before[0]), timeout=20)
    assert "no-such-interface" in str(failure.value)
    assert [total for total, _ in own_pool.run(total_rank, 2, 5, timeout=20)] == [11, 11]


class NoNetworkIn:
    """An argument that, when it reaches one process, hides the network from gloo there."""

    def __init__(self, pid):
        self.pid = pid

    def __reduce__(self):
        return hide_network, (self.pid,)


def hide_network(pid):
    if os.getpid() == pid:
        os.environ["GLOO_SOCKET_IFNAME"] = "no-such-interface"
    return 0


def test_an_exiting_rank_is_a_failure(own_pool):
    """Catches SystemExit(0) taken for success."""
    with pytest.raises(AssertionError, match="SystemExit"):
        own_pool.run(exit_on_one, 2, 0)


def test_a_hanging_rank_is_killed_with_its_stack_and_replaced(own_pool):
    """Catches a harness that waits for ever, and one that keeps the stuck process."""
    before = pids(own_pool, 2)
    with pytest.raises(AssertionError, match="rank 1: hung") as failure:
        own_pool.run(hang_on_one, 2, 1, timeout=2)
    assert "hang_on_one" in str(failure.value).split("rank 1: hung")[1]
    after = pids(own_pool, 2)
    assert after[0] == before[0]
    assert after[1] not in before


def test_a_killed_rank_is_reported_and_replaced(own_pool):
    """Catches a death that looks like a hang or like success."""
    before = pids(own_pool, 2)
    with pytest.raises(AssertionError, match="rank 0: died\nexit code -9"):
        own_pool.run(die_on_one, 2, 0)
    assert pids(own_pool, 2)[0] != before[0]


def test_tasks_do_not_see_each_other(own_pool):
    """Catches environment, default dtype, groups and random state carried into the next test."""
    first = own_pool.run(leave_traces, 2)
    for trace, dtype, world, _ in own_pool.run(find_traces, 2):
        assert (trace, dtype, world) == (False, torch.float32, 2)
    assert own_pool.run(leave_traces, 2) == first


def test_workers_end_when_the_test_session_is_killed(tmp_path):
    """Catches processes left running after the parent died without cleaning up, one of them busy in a task."""
    script = (
        "import os, tests.test_dist as t; p = t.Pool(); print(*t.pids(p, 2), flush=True); p.run(t.hang_on_one, 2, 1)"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
        env={**os.environ, "TMPDIR": str(tmp_path)},  # a killed session cannot remove its folder
    )
    workers = [int(pid) for pid in parent.stdout.readline().split()]
    time.sleep(0.5)
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and (alive := [pid for pid in workers if running(pid)]):
        time.sleep(0.1)
    assert len(workers) == 2 and not alive


def running(pid):
    """A zombie that nobody reaps is not running."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_fresh_processes_report_exit_code_and_stderr():
    """Catches a crash of a process that the parent does not see, and a stuck peer that is left running."""
    raised, hung, died = run_fresh(fresh_outcomes, 3, timeout=4)
    assert raised.code == 1 and "ValueError: wrong on 0" in raised.stderr and not raised.hung
    assert hung.hung and hung.code == -signal.SIGKILL and "fresh_outcomes" in hung.stderr
    assert died.code == -signal.SIGTERM and not died.hung and "printed" in died.stdout


def fresh_outcomes(rank, world):
    if rank == 0:
        raise ValueError("wrong on 0")
    if rank == 1:
        time.sleep(1000)
    print("printed", flush=True)
    os.kill(os.getpid(), signal.SIGTERM)


def test_fresh_processes_that_succeed_exit_zero():
    """Catches a harness whose clean-up itself fails."""
    exits = run_fresh(total_rank, 2, 0)
    assert [exit.code for exit in exits] == [0, 0], exits
