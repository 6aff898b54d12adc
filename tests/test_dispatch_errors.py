"""Inputs that do not fit and ranks that fail: the rank says what is wrong with its values, and its peers stop at once.

Legend: T tokens of a rank, K routes per token, E experts, D hidden size, R rows of a rank.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ep_plugin.config import EPConfig
from ep_plugin.dispatch import Dispatched, Dispatcher, build_dispatcher
from ep_plugin.experts import GroupedMLP
from ep_plugin.layer import moe_step
from tests.moe import PATHS, Inputs, Problem, make_experts, make_inputs

FORMS = ("dedup", "route")
PROBLEM = Problem((4, 3, 5), num_experts=6, top_k=2, hidden=8, dtype=torch.float32)
PROMPT_S = 10.0  # how soon peers must hear of a failure; their time-out is 30 s

Experts = Callable[[Dispatched, str], Tensor]


@dataclass
class Fault:
    """What the bad rank does, the error it gets, and the phase that its peers are told of."""

    name: str
    bad: Callable[[Dispatcher, Inputs, Experts], object]
    error: type[Exception]
    message: str
    phase: str


def with_ids(change: Callable[[Tensor], Tensor]) -> Callable[[Dispatcher, Inputs, Experts], object]:
    return lambda d, i, experts: moe_step(d, i.x, change(i.idx), i.weight, experts, layer="layers.1")


def with_x(change: Callable[[Tensor], Tensor]) -> Callable[[Dispatcher, Inputs, Experts], object]:
    return lambda d, i, experts: moe_step(d, change(i.x), i.idx, i.weight, experts, layer="layers.1")


def with_weight(change: Callable[[Tensor], Tensor]) -> Callable[[Dispatcher, Inputs, Experts], object]:
    return lambda d, i, experts: moe_step(d, i.x, i.idx, change(i.weight), experts, layer="layers.1")


def with_y(change: Callable[[Tensor], Tensor]) -> Callable[[Dispatcher, Inputs, Experts], object]:
    def bad(d: Dispatcher, i: Inputs, experts: Experts) -> object:
        return moe_step(d, i.x, i.idx, i.weight, lambda *args: change(experts(*args)), layer="layers.1")

    return bad


def no_memory(*args: object) -> Tensor:
    raise RuntimeError("experts ran out of memory")


def weights_where_none_belong(d: Dispatcher, i: Inputs, experts: Experts) -> object:
    state = d.plan(i.idx, layer="layers.1")
    dispatched = d.dispatch(state, i.x, i.weight)
    return d.combine(state, experts(dispatched, "hidden"), dispatched.weights)


def dispatch_twice(d: Dispatcher, i: Inputs, experts: Experts) -> object:
    state = d.plan(i.idx, layer="layers.1")
    d.dispatch(state, i.x, i.weight)
    return d.dispatch(state, i.x, i.weight)


def set_id(value: int) -> Callable[[Tensor], Tensor]:
    def change(idx: Tensor) -> Tensor:
        idx = idx.clone()
        idx[-1, 0] = value
        return idx

    return change


FAULTS = [
    Fault("ids of another K", with_ids(lambda i: i[:, :1]), ValueError, r"\(3, 1\).*\[T, 2\]", "plan"),
    Fault("ids in one dimension", with_ids(lambda i: i.flatten()), ValueError, r"\(6,\).*\[T, 2\]", "plan"),
    Fault("ids as floats", with_ids(lambda i: i.float()), ValueError, "torch.float32.*integer", "plan"),
    Fault("ids as booleans", with_ids(lambda i: i > 0), ValueError, "torch.bool.*integer", "plan"),
    Fault("id E", with_ids(set_id(6)), ValueError, r"6.*\[-1, 6\)", "plan"),
    Fault("id -2", with_ids(set_id(-2)), ValueError, r"-2.*\[-1, 6\)", "plan"),
    Fault("too many tokens", with_ids(lambda i: i.repeat(4, 1)), ValueError, "12 tokens exceed max_tokens=8", "plan"),
    Fault("x of another dtype", with_x(lambda x: x.double()), ValueError, "float64.*float32", "dispatch"),
    Fault("x of another width", with_x(lambda x: x[:, :7]), ValueError, r"\(3, 7\).*hidden size 8", "dispatch"),
    Fault("x of other tokens", with_x(lambda x: x[:2]), ValueError, r"\(2, 8\).*3 tokens", "dispatch"),
    Fault("weights of another K", with_weight(lambda w: w[:, :1]), ValueError, r"\(3, 1\).*\(3, 2\)", "dispatch"),
    Fault("weights as integers", with_weight(lambda w: w.long()), ValueError, "torch.int64.*floating", "dispatch"),
    Fault("y with a row more", with_y(lambda y: torch.cat([y, y[:1]])), ValueError, r"expected \[\d+, 8\]", "combine"),
    Fault("y of another width", with_y(lambda y: y[:, :4]), ValueError, r", 4\).*expected \[\d+, 8\]", "combine"),
    Fault("y of another dtype", with_y(lambda y: y.double()), ValueError, "float64.*float32", "combine"),
    Fault("weights twice", weights_where_none_belong, ValueError, "weight_at='hidden'.*None", "combine"),
    Fault("dispatched twice", dispatch_twice, RuntimeError, "layers.1.*twice for one plan", "dispatch"),
    Fault(
        "experts fail",
        lambda d, i, experts: moe_step(d, i.x, i.idx, i.weight, no_memory, layer="layers.1"),
        RuntimeError,
        "experts ran out of memory",
        "experts",
    ),
    Fault(
        "metrics fail",
        lambda d, i, experts: moe_step(d, i.x, i.idx, i.weight, experts, layer="layers.1", observe=no_memory),
        RuntimeError,
        "ran out of memory",
        "observe",
    ),
]  # fmt: skip


BLOCK_TAKES = ("too many tokens", "dispatched twice")  # what is no fault there
BLOCK_FAULTS = [fault for fault in FAULTS if fault.name not in BLOCK_TAKES]


def one_bad_rank(rank: int, world: int, path: str) -> list[tuple[str, str, float]]:
    """Of every fault: the type and text of the error on this rank, and the seconds it took."""
    mine, found = make_inputs(PROBLEM)[rank], []
    experts = make_experts(PROBLEM, rank, world)
    for fault in BLOCK_FAULTS if path == "block" else FAULTS:
        # A process group is of no use after a failure: its collectives are no longer in step.
        dispatcher = PROBLEM.dispatcher(path, max_tokens=8, group=dist.new_group() if path == "block" else None)
        for layer in ("layers.0", "layers.0"):
            moe_step(dispatcher, mine.x, mine.idx, mine.weight, experts, layer=layer)
        dist.barrier()
        start = time.monotonic()
        try:
            if rank == 1:
                fault.bad(dispatcher, mine, experts)
            moe_step(dispatcher, mine.x, mine.idx, mine.weight, experts, layer="layers.1")
            moe_step(dispatcher, mine.x, mine.idx, mine.weight, experts, layer="layers.2")
            found.append(("none", "", 0.0))
        except Exception as error:
            found.append((type(error).__name__, str(error), time.monotonic() - start))
        dispatcher.close()
    return found


@pytest.mark.parametrize("path", PATHS)
def test_a_rank_that_rejects_its_input_stops_the_others(pool, path):
    """Fault: an error that does not quote the values, peers that wait for their time-out or fail without saying which
    rank, layer and phase was the cause."""
    check_bad_rank(pool.run(one_bad_rank, 3, path), BLOCK_FAULTS if path == "block" else FAULTS)


def check_bad_rank(results: list[list[tuple[str, str, float]]], faults: list[Fault]) -> None:
    """What the ranks said in ``one_bad_rank``."""
    for fault, *by_rank in zip(faults, *results, strict=True):
        kind, text, _ = by_rank[1]
        assert kind == fault.error.__name__ and re.search(fault.message, text), (fault.name, kind, text)
        for rank in (0, 2):
            kind, text, seconds = by_rank[rank]
            assert kind == "HeapAborted", (fault.name, kind, text)
            assert text.startswith(f"rank 1 stopped the group in {fault.phase} of layers.1: {fault.error.__name__}"), (
                text
            )
            assert re.search(fault.message, text), (fault.name, text)
            assert seconds < PROMPT_S, (fault.name, seconds)


def disagree(rank: int, world: int, form: str) -> list[tuple[str, str]]:
    """Ranks that are not in the same step; the error of each case on this rank."""
    mine, experts = make_inputs(PROBLEM)[rank], make_experts(PROBLEM, rank, world)
    found = []

    def step(dispatcher: Dispatcher, layer: str) -> Tensor:
        return moe_step(dispatcher, mine.x.clone().requires_grad_(), mine.idx, mine.weight, experts, layer=layer)

    def another_layer(dispatcher: Dispatcher) -> None:
        step(dispatcher, "layers.7" if rank == 2 else "layers.3")

    def a_layer_left_out(dispatcher: Dispatcher) -> None:
        for layer in ("layers.1", "layers.2", "layers.3"):
            if rank != 0 or layer != "layers.2":
                step(dispatcher, layer)

    def forward_against_backward(dispatcher: Dispatcher) -> None:
        out = step(dispatcher, "layers.3")
        if rank == 0:
            step(dispatcher, "layers.4")
        else:
            out.sum().backward()

    def plan_without_dispatch(dispatcher: Dispatcher) -> None:
        if rank == 0:
            dispatcher.plan(mine.idx, layer="layers.3")
        for layer in ("layers.3", "layers.3", "layers.3"):
            step(dispatcher, layer)

    for case in (another_layer, a_layer_left_out, forward_against_backward, plan_without_dispatch):
        dispatcher = PROBLEM.dispatcher(form, timeout_s=20.0, group=dist.new_group() if form == "block" else None)
        step(dispatcher, "layers.0")
        dist.barrier()
        try:
            case(dispatcher)
            found.append(("none", "the step went through"))
        except Exception as error:
            found.append((type(error).__name__, str(error)))
        dispatcher.close()
    return found


@pytest.mark.parametrize("path", PATHS)
def test_ranks_in_different_steps_are_told_so(pool, path):
    """Fault: ranks that run different layers, or one forward and one backward, exchange rows of different steps, hang,
    or fail without saying that they disagree."""
    check_disagreements(pool.run(disagree, 3, path))


def check_disagreements(results: list[list[tuple[str, str]]]) -> None:
    """What the ranks said in ``disagree``."""
    told = [
        "EP ranks disagree.*layers.7",
        "EP ranks disagree.*layers.2.*layers.3|EP ranks disagree.*layers.3.*layers.2",
        "EP ranks disagree.*combine backward.*layers.3",
        # Ranks 1 and 2 take rank 0's second plan for its dispatch, and may find bad rows before they find this out.
        "EP ranks disagree.*layers.3|IndexError.*layers.3|dispatch of layers.3: IndexError",
    ]
    for number, pattern in enumerate(told):
        for rank in range(3):
            kind, text = results[rank][number]
            assert kind in ("RuntimeError", "HeapAborted", "IndexError"), (number, rank, kind, text)
            assert kind == "IndexError" or re.search(pattern, text), (number, rank, kind, text)


def too_few_slots(rank: int, world: int, form: str) -> list[str]:
    """Two forwards in flight with one slot; then a dispatcher whose ranks 1 and 2 alone have one left."""
    mine, experts = make_inputs(PROBLEM)[rank], make_experts(PROBLEM, rank, world)

    def step(dispatcher: Dispatcher) -> Tensor:
        x = mine.x.clone().requires_grad_()
        return moe_step(dispatcher, x, mine.idx, mine.weight, experts, layer="layers.5")

    messages = []
    for forwards, dropped in ((2, False), (2, True)):
        dispatcher = PROBLEM.dispatcher(form, slots=1)
        step(dispatcher).sum().backward()
        kept = []
        try:
            for _ in range(forwards):
                kept.append(step(dispatcher))
                if dropped and rank != 0:
                    kept.clear()
            messages.append("none")
        except RuntimeError as error:
            messages.append(str(error))
        del kept
        dispatcher.close()
    return messages


@pytest.mark.parametrize("form", FORMS)
def test_too_few_slots_is_a_clear_error_on_all_ranks(pool, form):
    """Fault: a pool that runs out hangs, grows although its size was fixed, or overwrites a payload."""
    for messages in pool.run(too_few_slots, 3, form):
        for message, ranks in zip(messages, (r"\[0, 1, 2\]", r"\[0\]"), strict=True):
            assert re.search(rf"all 1 payload slots are leased on EP ranks {ranks}: slots=1 must be at least", message)


@pytest.mark.parametrize(
    ("settings", "shape", "message"),
    [
        ({"dispatcher": "rowise"}, {}, "rowise.*rowwise"),
        ({"form": "dedup", "weight_at": "source"}, {}, "weight_at='source'.*form='route'"),
        ({"slots": 0}, {}, "slots=0"),
        ({"slots": "4"}, {}, "slots='4' must be"),
        ({"timeout_s": "4"}, {}, "timeout_s='4' must be"),
        ({"dispatcher": "local"}, {"dtype": "bfloat16"}, "dtype='bfloat16' must be"),
        ({"dispatcher": "local"}, {"dtype": torch.int8}, "dtype=torch.int8 must be"),
        ({"capacity": "rank"}, {}, r"capacity='rank' must be a CapacityConfig: capacity=CapacityConfig"),
        ({"max_tokens": -1}, {}, "max_tokens=-1"),
        ({"dispatcher": "rowwise"}, {}, "torchrun"),
        ({"dispatcher": "local"}, {"top_k": 9}, "top_k=9.*num_experts=8"),
    ],
)
def test_bad_settings_need_no_processes(settings, shape, message):
    """Fault: a setting that is only refused after groups or buffers were made."""
    with pytest.raises(ValueError, match=message):
        build_dispatcher(
            EPConfig(**settings), **{"num_experts": 8, "top_k": 2, "hidden_size": 4, "dtype": torch.float32, **shape}
        )


def test_what_is_no_config_and_experts_of_another_number():
    """Fault: Python's own error about an attribute, or one about the offsets of rows, for a newcomer's slip."""
    shape = {"num_experts": 4, "top_k": 2, "hidden_size": 4, "dtype": torch.float32}
    with pytest.raises(ValueError, match=r"config='rowwise' must be an EPConfig: EPConfig\(dispatcher='rowwise'\)"):
        build_dispatcher("rowwise", **shape)
    dispatcher = build_dispatcher(EPConfig(dispatcher="local"), **shape)
    half = GroupedMLP(4, 4, 4, num_local=2, dtype=torch.float32)
    with pytest.raises(ValueError, match="these experts are 2, and the dispatcher sends rows of 4: num_local must be"):
        moe_step(dispatcher, torch.ones(3, 4), torch.zeros(3, 2, dtype=torch.int64), torch.ones(3, 2), half)


def bad_shapes(rank: int, world: int) -> list[str]:
    with pytest.raises(ValueError, match="num_experts=3000 is more than the 2040"):
        Problem((1, 1, 1), num_experts=3000).dispatcher("route")
    messages = []
    for path in ("block", "dedup"):
        for problem in (Problem((1, 1, 1), num_experts=8), Problem((1, 1, 1), num_experts=3, top_k=4)):
            with pytest.raises(ValueError) as caught:
                problem.dispatcher(path)
            messages.append(str(caught.value))
    return messages


def test_tensors_on_another_device_are_refused_by_name():
    """Catches an address of one device's memory that goes to a kernel of another."""
    one = build_dispatcher(
        EPConfig(dispatcher="local", weight_at="output"), num_experts=4, top_k=2, hidden_size=8, dtype=torch.float32,
        device=torch.device("cpu"),
    )  # fmt: skip
    idx, x, weight = torch.zeros(3, 2, dtype=torch.int64), torch.zeros(3, 8), torch.zeros(3, 2)
    with pytest.raises(ValueError, match="topk_idx is on meta; this dispatcher moves rows on cpu"):
        one.plan(idx.to("meta"))
    with pytest.raises(ValueError, match="x is on meta"):
        one.dispatch(one.plan(idx), x.to("meta"), weight)
    with pytest.raises(ValueError, match="topk_weight is on meta"):
        one.dispatch(one.plan(idx), x, weight.to("meta"))
    state = one.plan(idx)
    dispatched = one.dispatch(state, x, weight)
    with pytest.raises(ValueError, match="y is on meta"):
        one.combine(state, dispatched.rows.to("meta"), dispatched.weights)


@pytest.mark.parametrize("other", ["cpu", "cuda:0", "meta"])
def test_tensors_of_another_gpu_are_refused(other):
    """Catches GPU 0's memory in a kernel of GPU 1, and a GPU without a number taken for another one."""
    one = build_dispatcher(EPConfig(dispatcher="local"), num_experts=4, top_k=2, hidden_size=8, dtype=torch.float32)
    one.device = torch.device("cuda", 1)
    one._check_device("x", SimpleNamespace(device=torch.device("cuda", 1)))
    with pytest.raises(ValueError, match=f"x is on {other}; this dispatcher moves rows on cuda:1"):
        one._check_device("x", SimpleNamespace(device=torch.device(other)))
    one.device = torch.device("cuda")
    one._check_device("x", SimpleNamespace(device=torch.device("cuda", 1)))


def test_a_heap_of_another_gpu_than_the_current_one(monkeypatch):
    """Catches kernels that are launched on GPU 0 with GPU 1's addresses, because nobody called set_device."""
    from ep_plugin.heap.device import require_current

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert require_current("heap='torch'", torch.device("cuda")) == torch.device("cuda", 0)
    assert require_current("heap='torch'", torch.device("cuda", 0)) == torch.device("cuda", 0)
    with pytest.raises(ValueError, match=r"is on cuda:1, but .* on cuda:0: call torch.cuda.set_device\(1\)"):
        require_current("heap='torch'", torch.device("cuda", 1))


def test_shapes_that_do_not_fit_the_group(pool):
    """Fault (seen elsewhere): divisibility fails late, in a view of the first step."""
    for messages in pool.run(bad_shapes, 3):
        assert re.search(r"num_experts=8 is not divisible by the EP degree 3.*\[1, 2, 4, 8\]", messages[0])
        assert re.search("top_k=4 is larger than num_experts=3", messages[1])
        assert messages[:2] == messages[2:]


def fails_in_backward(rank: int, world: int, form: str) -> tuple[str, str, float]:
    """Rank 1's experts fail in their backward."""
    mine = make_inputs(PROBLEM)[rank]
    dispatcher = PROBLEM.dispatcher(form, group=dist.new_group() if form == "block" else None)

    def experts(d: Dispatched, weight_at: str) -> Tensor:
        y = d.rows * 2
        if rank == 1:
            y.register_hook(no_memory)
        return y

    start = time.monotonic()
    try:
        x = mine.x.clone().requires_grad_()
        moe_step(dispatcher, x, mine.idx, mine.weight, experts, layer="layers.1").sum().backward()
        return "none", "", 0.0
    except RuntimeError as error:
        return type(error).__name__, str(error), time.monotonic() - start
    finally:
        dispatcher.close()


@pytest.mark.parametrize("form", PATHS)
def test_experts_that_fail_in_backward_and_close_stop_the_others(pool, form):
    """Fault: peers wait out their time-out for a rank that has failed in backward and left."""
    results = pool.run(fails_in_backward, 3, form)
    assert "experts ran out of memory" in results[1][1]
    for rank in (0, 2):
        kind, text, seconds = results[rank]
        assert kind in ("PeerDied", "HeapAborted") and re.search("rank 1.*closed its|rank 1", text), text
        assert "dispatch backward of layers.1" in text and seconds < PROMPT_S, (text, seconds)


def gradient_on_some_ranks(rank: int, world: int, form: str, which: str) -> tuple[str, str]:
    """Rank 1's ``which`` needs no gradient."""
    mine, experts = make_inputs(PROBLEM)[rank], make_experts(PROBLEM, rank, world)
    dispatcher = PROBLEM.dispatcher(form)
    x = mine.x.clone().requires_grad_(which != "x" or rank != 1)
    weight = mine.weight.clone().requires_grad_(which != "topk_weight" or rank != 1)
    try:
        moe_step(dispatcher, x, mine.idx, weight, experts, layer="layers.1").sum().backward()
        return "none", ""
    except RuntimeError as error:
        return type(error).__name__, str(error)
    finally:
        dispatcher.close()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("which", ["x", "topk_weight"])
def test_an_input_that_needs_a_gradient_on_some_ranks_alone(pool, form, which):
    """Fault: ranks that need the gradient read what nobody wrote, and train on it."""
    for kind, text in pool.run(gradient_on_some_ranks, 3, form, which):
        assert kind in ("RuntimeError", "HeapAborted"), (kind, text)
        assert re.search(r"EP ranks disagree in dispatch backward of layer 'layers.1'.*both gradients", text), text


def after_close(rank: int, world: int, form: str) -> list[str]:
    """What a backward and a forward say after close, with a graph still alive."""
    mine, experts, messages = make_inputs(PROBLEM)[rank], make_experts(PROBLEM, rank, world), []
    dispatcher = PROBLEM.dispatcher(form)
    x = mine.x.clone().requires_grad_()
    out = moe_step(dispatcher, x, mine.idx, mine.weight, experts, layer="layers.1")
    dispatcher.close()
    dispatcher.close()
    for call in (out.sum().backward, lambda: moe_step(dispatcher, x, mine.idx, mine.weight, experts)):
        try:
            call()
            messages.append("none")
        except RuntimeError as error:
            messages.append(str(error))
    return messages


@pytest.mark.parametrize("form", PATHS)
def test_a_closed_dispatcher_says_so(pool, form):
    """Fault: use after close reads freed memory, hangs, or blames something else."""
    for messages in pool.run(after_close, 3, form):
        assert all("closed" in message or "close()" in message for message in messages), messages


def build_with_other_settings(rank: int, world: int) -> list[str]:
    found = []
    for change in (dict(weight_at="output"), dict(form="route"), dict(max_tokens=8), dict(dispatcher="block")):
        config = EPConfig(**change) if rank == 1 else EPConfig()
        try:
            build_dispatcher(config, num_experts=6, top_k=2, hidden_size=8, dtype=torch.float32)
            found.append("built")
        except ValueError as error:
            found.append(str(error))
    return found


def test_ranks_with_different_settings_are_told_so(pool):
    """Wrong numbers without an error, or a hang: settings that change what a rank sends, and differ."""
    for found in pool.run(build_with_other_settings, 3):
        assert found[0].endswith(
            "different settings of weight_at: rank 0: 'hidden', rank 1: 'output', rank 2: 'hidden'"
        )
        assert "form: rank 0: 'dedup', rank 1: 'route'" in found[1]
        assert "max_tokens: rank 0: None, rank 1: 8" in found[2]
        assert "dispatcher: rank 0: 'rowwise', rank 1: 'block'" in found[3]


def block_with_one_gradient(rank: int, world: int, which: str) -> tuple[bool, bool]:
    dispatcher = PROBLEM.dispatcher("block", "hidden")
    experts, mine = make_experts(PROBLEM, rank, world), make_inputs(PROBLEM)[rank]
    x, weight = mine.x.detach().clone(), mine.weight.detach().clone()
    x.requires_grad_(which != "x" or rank == 0)
    weight.requires_grad_(which != "weight" or rank == 0)
    moe_step(dispatcher, x, mine.idx, weight, experts, layer="layers.0").sum().backward()
    return x.grad is not None, weight.grad is not None


@pytest.mark.parametrize("which", ["x", "weight"])
def test_block_moves_gradients_that_only_some_ranks_need(pool, which):
    """A collective that only the ranks enter whose input needs a gradient: the others would wait for it, or mix rows
    up."""
    got = pool.run(block_with_one_gradient, 3, which)
    assert [x if which == "x" else w for x, w in got] == [True, False, False]
    assert all(w if which == "x" else x for x, w in got)
