"""Parts of the Megatron adapter that need neither Megatron nor processes: routes, padding, leases, options, weights and
the arguments of the script seam.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ep_plugin.adapters.megatron_names import by_global_name
from ep_plugin.adapters.megatron_options import check_options, forwards_in_flight, leases_needed
from ep_plugin.adapters.megatron_rows import Hide, HostOffsets, Padding, Reveal, routes_from_map
from ep_plugin.adapters.megatron_script import parse, settings_of
from ep_plugin.adapters.megatron_weights import lay_out, projections_of, spacing, stack
from ep_plugin.config import EPConfig
from ep_plugin.train.checkpoint import Header
from ep_plugin.train.checks import check_settings
from ep_plugin.train.compose import compose_launch
from tests import dist


def test_routes_of_a_map_are_ascending_and_padded():
    """Routes in another order, which changes sums; a probability of another expert; a gradient at an unrouted one."""
    routing = torch.tensor([[0, 1, 0, 1], [1, 0, 0, 0], [0, 0, 0, 0]], dtype=torch.bool)
    probs = torch.arange(12.0, dtype=torch.float64).view(3, 4).requires_grad_()
    ids, weights = routes_from_map(routing, probs, 3)
    assert ids.tolist() == [[1, 3, -1], [0, -1, -1], [-1, -1, -1]]
    assert weights.tolist() == [[1, 3, 0], [4, 0, 0], [0, 0, 0]]
    assert weights.dtype == torch.float64
    weights.sum().backward()
    assert torch.equal(probs.grad, routing.double())


def test_a_token_with_more_routes_than_the_bound_is_an_error():
    """A route that is dropped without a word."""
    routing = torch.ones(2, 4, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"more than 3 routes.*max_routes.*one has 4"):
        routes_from_map(routing, torch.ones(2, 4), 3)
    assert routes_from_map(routing, torch.ones(2, 4), 4)[0].shape == (2, 4)
    assert routes_from_map(routing[:0], torch.ones(0, 4), 3)[0].shape == (0, 3)


def _routes_by_kernel(rank: int, world: int) -> None:
    from ep_plugin.adapters import megatron_rows as rows

    generator = torch.Generator().manual_seed(0)
    for tokens, experts, bound, dtype in ((9, 5, 3, torch.float32), (4, 128, 8, torch.bfloat16), (0, 4, 4, None)):
        routing = torch.rand(tokens, experts, generator=generator) < 0.6 * bound / experts
        routing &= routing.cumsum(1) <= bound
        probs = torch.rand(tokens, experts, generator=generator).to(dtype or torch.float32).requires_grad_()
        results = []
        for devices in ((), ("cpu",)):
            rows.KERNEL_DEVICES = devices
            ids, weights = routes_from_map(routing, probs, bound)
            upstream = torch.arange(1.0, weights.numel() + 1).view_as(weights).to(weights.dtype)
            results.append((ids, weights, torch.autograd.grad(weights, probs, upstream)[0]))
        for ours, theirs in zip(*reversed(results), strict=True):
            assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)
    with pytest.raises(ValueError, match="more than 3 routes"):
        routes_from_map(torch.ones(2, 4, dtype=torch.bool), torch.ones(2, 4), 3)


def test_the_kernel_finds_the_same_routes():
    """Routes, weights or gradients on a GPU other than on CPU; a route too many that is dropped without a word."""
    pytest.importorskip("triton")
    dist.run_apart(_routes_by_kernel, 1, TRITON_INTERPRET="1")


def test_padding_and_back():
    """Rows in another expert's place, padding that is not zero, gradients that padding keeps."""
    offsets, sizes = torch.tensor([0, 2, 2, 5]), torch.tensor([4, 1, 3])
    rows = torch.arange(1.0, 15.0, dtype=torch.float64).view(7, 2).requires_grad_()  # two past the valid five
    padding = Padding(offsets, 7, sizes)
    padded = padding.pad(rows)
    assert padded[:, 0].tolist() == [1, 3, 0, 0, 0, 5, 7, 9]
    back = padding.unpad(padded)
    assert torch.equal(back[:5], rows[:5]) and not back[5:].any()
    (padded * torch.arange(1.0, 9.0)[:, None]).sum().backward()
    assert rows.grad[:, 0].tolist() == [1, 2, 6, 7, 8, 0, 0]
    assert torch.autograd.gradcheck(lambda r: padding.unpad(padding.pad(r) * 2), rows)
    assert Padding(offsets, 5, sizes).pad(rows.detach()[:5, 0]).tolist() == [1, 3, 0, 0, 0, 5, 7, 9]
    with pytest.raises(ValueError, match="padded capacity"):
        Padding(offsets, 5, torch.tensor([1, 1, 3]))
    empty = Padding(torch.zeros(4, dtype=torch.int64), 0, sizes)
    assert empty.pad(rows[:0]).shape == (8, 2) and empty.unpad(padded).shape == (0, 2)


def test_stand_ins_carry_gradients_and_own_no_storage():
    """A stand-in that shares storage with what the schedule must not free."""
    x = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    stand_in = Hide.apply(x)
    assert stand_in.shape == x.shape and stand_in.untyped_storage().nbytes() == 8
    leaf = stand_in.detach().requires_grad_()
    out = Reveal.apply(leaf, x.detach()) * 3
    leaf.untyped_storage().resize_(0)
    out.sum().backward()
    assert torch.equal(leaf.grad, torch.full_like(x, 3))
    stand_in.backward(leaf.grad)
    assert torch.equal(x.grad, torch.full_like(x, 3))
    assert HostOffsets(torch.tensor([0, 2])).get().tolist() == [0, 2]


def outstanding(pp: int, rank: int, chunks: int, group: int, microbatches: int) -> int:
    """The most forwards without their backward: a pipeline rank runs its warm-up, then one forward, one backward."""
    total = microbatches * chunks
    warmup = pp - rank - 1 if chunks == 1 else 2 * (pp - rank - 1) + (chunks - 1) * group
    warmup = min(warmup, total)
    held = most = warmup
    for _ in range(total - warmup):
        held += 1
        most = max(most, held)
        held -= 1
    return most


@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize("pp", [2, 4])
def test_forwards_in_flight_are_those_of_the_schedule(pp: int, chunks: int):
    """Leases too few for a stage of a pipeline, or for one with few microbatches."""
    for rank in range(pp):
        for microbatches in (pp, 2 * pp, 3 * pp):
            found = forwards_in_flight(
                pp_size=pp, pp_rank=rank, chunks=chunks, group_size=pp, overlap=False, num_microbatches=microbatches
            )
            assert found == outstanding(pp, rank, chunks, pp, microbatches)
    at = dict(pp_rank=0, chunks=chunks, group_size=pp, num_microbatches=None)
    more = forwards_in_flight(pp_size=pp, overlap=True, **at) - forwards_in_flight(pp_size=pp, overlap=False, **at)
    assert more == 1
    alone = dict(pp_size=1, pp_rank=0, chunks=1, group_size=1, overlap=False)
    assert forwards_in_flight(num_microbatches=None, **alone) == 1


def megatron_config(**settings: Any) -> SimpleNamespace:
    """The settings of a TransformerConfig that the adapter looks at, at their defaults."""
    defaults: dict[str, Any] = dict(
        moe_apply_probs_on_input=False,
        moe_pad_expert_input_to_capacity=False,
        recompute_granularity=None,
        recompute_modules=None,
        recompute_method=None,
        recompute_num_layers=None,
        fp8=None,
        fp8_recipe="delayed",
        use_te_activation_func=False,
    )
    return SimpleNamespace(**{**defaults, **settings})


def test_leases_cover_what_backward_keeps():
    """A pool too small for layers that recompute, or sized for rows that Megatron's experts keep themselves."""
    route, dedup = EPConfig(form="route"), EPConfig()

    def leases(ep: EPConfig, experts: str, **settings: Any) -> int:
        return leases_needed(megatron_config(**settings), ep, experts, layers=6, in_flight=3)

    full = dict(recompute_granularity="full", recompute_num_layers=2)
    assert leases(dedup, "megatron") == 2
    assert leases(route, "megatron") == leases(dedup, "plugin") == leases(route, "plugin") == 18
    assert leases(route, "megatron", recompute_granularity="selective", recompute_modules=["moe"]) == 2
    assert leases(route, "megatron", recompute_granularity="selective", recompute_modules=["core_attn"]) == 18
    assert leases(route, "megatron", recompute_method="uniform", **full) == 2
    assert leases(route, "megatron", recompute_method="uniform", **{**full, "recompute_num_layers": 4}) == 4
    assert leases(route, "megatron", recompute_method="block", **full) == 4 * 3 + 1


@pytest.mark.parametrize(
    ("named", "settings", "ep", "experts"),
    [
        ("dispatcher='local'", {}, EPConfig(dispatcher="local"), "megatron"),
        ("weight_at='output'", {}, EPConfig(weight_at="output"), "megatron"),
        ("weight_at='hidden'", dict(moe_apply_probs_on_input=True), EPConfig(), "plugin"),
        ("moe_paged_stash", dict(moe_paged_stash=True), EPConfig(), "megatron"),
        ("moe_preprocess", dict(cuda_graph_impl="local", cuda_graph_scope=["moe_preprocess"]), EPConfig(), "plugin"),
        ("cuda_graph_impl='full_iteration'", dict(cuda_graph_impl="full_iteration"), EPConfig(), "megatron"),
        ("expert_fc1", dict(offload_modules=["expert_fc1"]), EPConfig(form="route"), "megatron"),
        ("fp8", dict(fp8="hybrid"), EPConfig(), "plugin"),
        ("quant_recipe", dict(quant_recipe=object()), EPConfig(), "plugin"),
        ("moe_single_grouped_weight", dict(moe_single_grouped_weight=True), EPConfig(), "plugin"),
        ("expert_gtp_weight_remat_size", dict(expert_gtp_weight_remat_size=2), EPConfig(), "plugin"),
        ("fp8_recipe='custom'", dict(fp8="e4m3", fp8_recipe="custom"), EPConfig(), "megatron"),
        ("op_fuser", dict(use_transformer_engine_op_fuser=True), EPConfig(), "megatron"),
        ("delay_wgrad_compute", dict(delay_wgrad_compute=True), EPConfig(), "plugin"),
        ("experts='both'", {}, EPConfig(), "both"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(named: str, settings: dict[str, Any], ep: EPConfig, experts: str):
    """A setting of Megatron's that is ignored without a word."""
    with pytest.raises(ValueError, match=named):
        check_options(megatron_config(**settings), ep, experts, ep_size=2, etp_size=1)


def test_what_can_be_honoured_is_not_refused():
    """A refusal that takes more than it must."""
    for settings in (
        dict(fp8="hybrid", delay_wgrad_compute=True),
        *(dict(fp8="e4m3", fp8_recipe=recipe) for recipe in ("delayed", "tensorwise", "blockwise", "mxfp8")),
        dict(fp8=None, fp8_recipe="custom", quant_recipe=object()),
        dict(cuda_graph_impl="full_iteration", moe_pad_expert_input_to_capacity=True),
        dict(cuda_graph_impl="transformer_engine", cuda_graph_scope=["attn", "moe_router"]),
    ):
        check_options(megatron_config(**settings), EPConfig(), "megatron", ep_size=2, etp_size=2)
    check_options(megatron_config(cuda_graph_impl="full_iteration"), EPConfig(), "plugin", ep_size=2, etp_size=1)
    with pytest.raises(ValueError, match="expert_tensor_parallel_size=2"):
        check_options(megatron_config(), EPConfig(), "plugin", ep_size=2, etp_size=2)


class GroupedLinear(nn.Module):
    """Parameters as Transformer Engine's grouped linear layer has them."""

    def __init__(self, experts: int, out: int, inputs: int) -> None:
        super().__init__()
        for i in range(experts):
            self.register_parameter(f"weight{i}", nn.Parameter(torch.randn(out, inputs)))


def test_weights_of_all_experts_are_one_tensor_over_their_own_memory():
    """A copy that the optimizer does not update, or a gradient that reaches another expert."""
    experts = nn.Module()
    experts.linear_fc1, experts.linear_fc2 = GroupedLinear(3, 4, 2), GroupedLinear(3, 2, 4)
    before = [p.detach().clone() for p in experts.linear_fc1.parameters()]
    up, _ = projections_of(experts, 3)
    weights = up.parameters()[0]
    lay_out(weights)
    stacked, bias = up.stacked()
    assert bias is None and stacked.shape == (3, 4, 2)
    assert all(torch.equal(a, b) for a, b in zip(stacked, before, strict=True))
    assert [w.data_ptr() for w in weights] == [s.data_ptr() for s in stacked]
    (stacked * torch.arange(3.0).view(3, 1, 1)).sum().backward()
    assert [float(w.grad.mean()) for w in experts.linear_fc1.parameters()] == [0, 1, 2]
    with torch.no_grad():
        weights[1].add_(1)
    assert torch.equal(up.stacked()[0][1], weights[1])
    experts.double()  # moves every parameter
    assert spacing(up.parameters()[0]) is None
    assert up.stacked()[0].dtype == torch.float64 and spacing(up.parameters()[0]) == 8


def test_experts_have_the_same_names_in_modules_of_either_kind(monkeypatch: pytest.MonkeyPatch):
    """Weights of the wrong expert where a layer of one kind is compared with, or filled from, one of the other."""
    layer_module, block_module = ModuleType("moe_layer"), ModuleType("transformer_layer")
    layer_module.BaseMoELayer = type("BaseMoELayer", (nn.Module,), {})
    block_module.TransformerLayer = type("TransformerLayer", (nn.Module,), {})
    monkeypatch.setitem(sys.modules, "megatron.core.transformer.moe.moe_layer", layer_module)
    monkeypatch.setitem(sys.modules, "megatron.core.transformer.transformer_layer", block_module)
    found = []
    for grouped in (True, False):
        layer = layer_module.BaseMoELayer()
        layer.layer_number, layer.local_expert_indices, layer.experts = 3, [4, 5], nn.Module()
        if grouped:
            layer.experts.linear_fc1 = GroupedLinear(2, 4, 2)
        else:
            layer.experts.local_experts = nn.ModuleList([nn.Module(), nn.Module()])
            for expert in layer.experts.local_experts:
                expert.linear_fc1 = nn.Linear(2, 4, bias=False)
        names = by_global_name(layer, {name: i for i, (name, _) in enumerate(layer.named_parameters())})
        found.append(names)
    assert found[0] == found[1] == {f"layer.3.experts.local_experts.{4 + i}.linear_fc1.weight": i for i in range(2)}


def test_weights_inside_somebodys_buffer_are_read_there():
    """Parameters taken out of the distributed optimizer's buffer, which would then no longer update them."""
    buffer = torch.randn(3, 5, 4)
    ascending = [nn.Parameter(part[:3]) for part in buffer]
    assert stack(ascending).data_ptr() == buffer.data_ptr() and spacing(ascending) == 20
    descending = ascending[::-1]
    stacked = stack(descending)
    assert spacing(descending) == -20 and stacked.data_ptr() == buffer.data_ptr()
    assert torch.equal(stacked[0], descending[2])
    (stacked * torch.arange(3.0).view(3, 1, 1)).sum().backward()
    assert [float(p.grad.mean()) for p in descending] == [2, 1, 0]
    with pytest.raises(ValueError, match=r"at \[0, 40, 20\].*experts='megatron'.*bucket_size"):
        stack([ascending[0], ascending[2], ascending[1]])


def test_unknown_experts_are_refused():
    """Weights of a layout that nobody checked."""
    with pytest.raises(ValueError, match="Linear.*experts='megatron'"):
        projections_of(nn.Linear(2, 2), 2)


def test_the_script_seams_arguments(tmp_path: Any, capsys: pytest.CaptureFixture[str]):
    """Arguments of the script taken for ours, or the reverse; a misspelt setting that trains with the default."""
    script = tmp_path / "train.py"
    script.write_text("")
    ours, found, rest = parse(["--ep", "max_tokens=64", "--ep=form=route", str(script), "--ep", "theirs", "--lr", "1"])
    assert (ours, found, rest) == (["max_tokens=64", "form=route"], str(script), ["--ep", "theirs", "--lr", "1"])
    config, arguments = settings_of("rowwise", ["max_tokens=64", "capacity.factor=2", "experts=plugin"])
    assert (config.dispatcher, config.form, config.max_tokens, config.capacity.factor) == ("rowwise", "dedup", 64, 2.0)
    assert arguments == {"experts": "plugin", "max_routes": None}
    assert settings_of("rowwise_route", [])[0].form == "route"
    mistakes = {"max_tokenz=64": "max_tokenz", "form=rout": "'rout'", "capacity.factor=x": "'x'", "form": "name=value"}
    for wrong, named in mistakes.items():
        with pytest.raises(ValueError, match=named):
            settings_of("rowwise", [wrong])
    for arguments in ([], ["--epp", "form=route", str(script)], [str(tmp_path / "missing.py")]):
        with pytest.raises(SystemExit) as stopped:
            parse(arguments)
        assert stopped.value.code == 2
    assert "missing.py" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["model=olmoe_tiny"], "model.architecture='olmoe'"),
        (["topology.pp=2", "trainer.megatron.virtual_stages=2"], "model.num_layers=2 does not divide .* = 4"),
        (["trainer.megatron.virtual_stages=2"], "virtual_stages=2 needs a pipeline"),
        (["trainer.megatron.microbatches=3"], "trainer.batch_size=16 does not divide .* = 12"),
        (["topology.cp=2"], "transformer_engine=true"),
        (["topology.tp=8"], "topology.tp|tp·cp·pp|tp may be"),
        (["ep.weight_at=output"], "weight_at='output'"),
        (["trainer.resume=somewhere"], "trainer.resume='somewhere' is not a checkpoint"),
        (["trainer.megatron.experts=ours"], "trainer.megatron.experts='ours'"),
    ],
)
def test_wrong_settings_of_a_launch_are_found_before_it_starts(overrides: list[str], named: str):
    """Settings that fail inside Megatron, after the processes have met."""
    launch = compose_launch(["experiment=megatron_tiny", *overrides])
    with pytest.raises(ValueError, match=named):
        check_settings(launch.config, 4)


def test_a_checkpoint_goes_on_with_the_trainer_that_wrote_it(tmp_path: Any):
    """A folder that Megatron cannot read, found when the processes have met; degrees refused that Megatron can load."""
    header = Header(5, 8, 8, True, "megatron")
    (tmp_path / "trainer.json").write_text(json.dumps(asdict(header)))
    overrides = [f"trainer.resume={tmp_path}", "trainer.steps=9"]
    check_settings(compose_launch(["experiment=megatron_tiny", *overrides]).config, 4)
    with pytest.raises(ValueError, match="trainer=megatron; this run has trainer=transformers"):
        check_settings(compose_launch(["experiment=train_tiny", *overrides]).config, 4)
    with pytest.raises(ValueError, match="has done 5 steps already"):
        check_settings(compose_launch(["experiment=megatron_tiny", *overrides, "trainer.steps=5"]).config, 4)


def test_transformers_trainer_still_refuses_megatrons_degrees():
    """Tensor parallel degrees that the transformers trainer would ignore."""
    with pytest.raises(ValueError, match=r"topology.tp=2.*trainer=megatron"):
        check_settings(compose_launch(["experiment=demo", "topology.tp=2", "variants={}"]).config, 4)
