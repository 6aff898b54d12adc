"""Every MoE architecture of transformers 5: patched, it trains like the unpatched model, which loads its checkpoint."""

from __future__ import annotations

import functools
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ep_plugin.adapters.huggingface import PatchedModel, architectures, choose_layout, patch_model
from ep_plugin.adapters.huggingface_architectures import NOTES, REFUSED, TESTED, table
from ep_plugin.adapters.huggingface_families import Share, find_sites
from ep_plugin.config import EPConfig
from ep_plugin.topology import ProcessGroups, layout
from tests.hf_architectures import ROUNDS, TINY, build, forward, tokens

CONFIG = EPConfig(timeout_s=60)
STEPS = 3
ONE_EXPERT = re.compile(r"\.experts\.(expert_)?\d+\.")


@dataclass(frozen=True)
class Reference:
    """Three steps of the unpatched model on the batches of all ranks."""

    losses: list[list[float]]  # by step and rank
    logits: list[list[Tensor]]
    gradients: dict[str, Tensor]  # of the first step
    parameters: dict[str, Tensor]  # after the last


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    # A large eps: where a gradient is zero but for rounding, AdamW would else step by the sign of the rounding.
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)


def reference(model: nn.Module, world: int) -> Reference:
    optimizer = optimizer_of(model)
    losses, logits, gradients = [], [], {}
    for step in range(STEPS):
        optimizer.zero_grad()
        losses.append([])
        logits.append([])
        for rank in range(world):
            out, loss = forward(model, tokens(step, rank), seed=100 * step + rank)
            (loss / world).backward()
            losses[-1].append(loss.item())
            logits[-1].append(out.detach())
        for name, p in model.named_parameters():
            if p.grad is None and ONE_EXPERT.search(name):  # that no token met: elsewhere a part of a parameter
                p.grad = torch.zeros_like(p)
        if not step:
            gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
    return Reference(losses, logits, gradients, {name: p.detach().clone() for name, p in model.named_parameters()})


def own(handle: PatchedModel, name: str, whole: Tensor) -> Tensor:
    """This rank's part of a tensor of the unpatched model."""
    part = handle.parts.get(name)
    if part is None or part.share.expert is not None:
        return whole
    return part.share.own(whole, handle.groups.layout.ep_mp, dist.get_rank(handle.groups.ep_mp))


def difference(got: Tensor, wanted: Tensor, floor: float = 1e-30) -> float:
    """Largest difference, relative to the largest entry of ``wanted`` or to ``floor``."""
    assert got.shape == wanted.shape, (got.shape, wanted.shape)
    return ((got - wanted).abs().max() / wanted.abs().max().clamp(min=floor)).item() if wanted.numel() else 0.0


def check(
    rank: int, world: int, names: list[str], ep: int, config: EPConfig, save: bool, experts: str = "auto"
) -> dict[str, str]:
    """Train each architecture, patched and not; by name, what was wrong, or ''."""
    groups = ProcessGroups.create(layout(world, ep=ep))
    found = {}
    for name in names:
        make = functools.partial(build, name)
        wrong = check_one(rank, world, make, groups, config, TINY[name].tolerance, save, experts)
        found[name] = "; ".join(f"{what}: {value:.1e}" for what, value in wrong.items())
    groups.destroy()
    return found


def check_one(
    rank: int,
    world: int,
    make: Callable[[], nn.Module],
    groups: ProcessGroups,
    config: EPConfig,
    tolerance: float,
    save: bool,
    experts: str = "auto",
) -> dict[str, float]:
    """What differs by more than ``tolerance`` between a patched and an unpatched model of ``make``, and by how much."""
    expected = reference(make(), world)
    model = make()
    names = [key for key, _ in model.named_parameters()]
    whole = sum(p.numel() for p in model.parameters())
    handle = patch_model(model, config, groups, experts=experts)
    sharded = sum(part.shape.numel() for part in handle.parts.values())
    held = sum(p.numel() for p in handle.expert_parameters.values())
    assert sharded and held * groups.layout.ep_mp == sharded, "not P_E / M_E"
    assert sum(p.numel() for p in model.parameters()) == whole - sharded + held
    assert set(handle.expert_parameters) <= set(handle.parts) <= set(names)
    optimizer = optimizer_of(model)
    handle.attach(optimizer)
    largest = max(float(g.abs().max()) for g in expected.gradients.values())
    worst: dict[str, float] = {}
    for step in range(STEPS):
        optimizer.zero_grad()
        out, loss = forward(model, tokens(step, rank), seed=100 * step + rank)
        loss.backward()
        handle.sync_gradients()
        worst[f"loss {step}"] = abs(loss.item() - expected.losses[step][rank]) / max(1.0, expected.losses[step][rank])
        worst[f"logits {step}"] = difference(out.detach(), expected.logits[step][rank])
        if not step:
            for key, p in model.named_parameters():
                if p.grad is None:
                    assert not bool(expected.gradients.get(key, torch.zeros(1)).any()), f"{key} has no gradient"
                else:
                    wanted = own(handle, key, expected.gradients[key])
                    worst[f"gradient of {key}"] = difference(p.grad, wanted, floor=1e-4 * largest)
        optimizer.step()
    for key, p in model.named_parameters():
        # Three steps may amplify what the first gradient was rounded by.
        worst[f"{key} after {STEPS} steps"] = (
            difference(p.detach(), own(handle, key, expected.parameters[key]), 1e-2) / 10
        )
    if save:
        worst |= save_and_load(model, handle)
    handle.close()
    return {what: value for what, value in worst.items() if not value <= tolerance}


def save_and_load(model: nn.Module, handle: PatchedModel) -> dict[str, float]:
    """Save the patched model; its checkpoint, loaded without us, must hold the same and compute the same."""
    state = handle.full_state_dict()
    with tempfile.TemporaryDirectory() as folder:
        loaded = None
        if state:
            model.save_pretrained(folder, state_dict=dict(state))  # which takes out what it has written
            loaded = type(model).from_pretrained(folder, dtype=model.dtype, attn_implementation="eager").train()
            if hasattr(model.config, "_experts_implementation"):
                loaded.set_experts_implementation("eager")
    out, _ = forward(model, tokens(9, 0), seed=9)
    if loaded is None:
        return {}
    again = loaded.state_dict()
    missing = state.keys() ^ again.keys()
    worst = {f"{key} is not in both": float("inf") for key in missing}
    for key in state.keys() - missing:  # transformers loads some parameters in float32 whatever they were
        worst[f"{key} reloaded"] = float(not torch.equal(again[key], state[key].to(again[key].dtype)))
    logits = difference(forward(loaded, tokens(9, 0), seed=9)[0].detach(), out.detach())
    return worst | {"logits reloaded": 0.0 if logits < ROUNDS else logits}


@pytest.mark.slow
def test_every_architecture_trains_and_saves_like_the_unpatched_model(pool):
    """Catches a layout read wrongly, weights applied at another place, and a checkpoint with another order or name."""
    report(pool.run(check, 2, list(TINY), 2, CONFIG, True, timeout=400))


# Classes named after experts that hold none of their own that could be divided.
NOT_DIVIDED = {"AriaSharedExpertsMLP", "InklingSharedExperts", "DbrxExpertGLU"}
BORROWED = {"sarvam_mla": "DeepseekV3ForCausalLM", "sarvam_moe": "Glm4MoeForCausalLM"}


def test_no_architecture_is_forgotten():
    """Catches an architecture that a new transformers brings and nobody has looked at, and a table that promises more
    than is tested."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as BY_TYPE

    rows = {row.name: row for row in architectures()}
    assert not [row.name for row in rows.values() if row.status == "untested"]
    assert (
        {row.name for row in rows.values() if row.status == "refused"} == REFUSED.keys() == {"doge", "vitpose_backbone"}
    )
    trained = {name.split()[0] for name in TINY}
    assert {name for name, row in rows.items() if row.status == "tested"} == TESTED == trained | BORROWED.keys()
    assert {name: BY_TYPE[name] for name in BORROWED} == BORROWED
    assert NOTES.keys() <= TESTED


def test_every_class_of_experts_is_in_a_tested_model():
    """Catches a second kind of experts in a package, of which no tested model has a layer, and one that is not patched
    although its model is."""
    wanted = {kind for row in architectures() if row.status == "tested" for kind in row.experts} - NOT_DIVIDED
    seen, own_code = set(), set()
    for name in TINY:
        for module, family in find_sites(build(name)).values():
            seen |= {type(part).__name__ for part in module.modules()}
            if choose_layout(name, module, family, "auto") is None:
                own_code.add(name)
    assert not wanted - seen
    assert own_code == {"muse_spark"} == {name for name, note in NOTES.items() if "transformers' code" in note}


def test_documentation_lists_what_is_tested():
    """Catches a table in the documentation that is not the one that is tested."""
    page = (Path(__file__).parents[1] / "docs" / "huggingface.md").read_text()
    assert table(architectures()) in page, f"put this into docs/huggingface.md:\n{table(architectures())}"


def test_doge_is_refused():
    """Catches a model without experts modules that is trained as if it were sharded."""
    from transformers import DogeConfig, DogeForCausalLM

    config = DogeConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, num_experts=16)
    with pytest.raises(ValueError, match="DogeForCausalLM has no experts module"):
        patch_model(DogeForCausalLM(config), EPConfig(dispatcher="local"))


REPRESENTATIVE = ["mixtral", "deepseek_v3", "gpt_oss", "llama4", "dbrx", "longcat_flash", "jetmoe"]
REPRESENTATIVE += ["switch_transformers", "nllb_moe", "muse_spark"]


@pytest.mark.slow
@pytest.mark.parametrize(("world", "ep"), [(2, 1), (4, 2), (4, 4)])
def test_architectures_of_every_form_in_other_foldings(pool, world, ep):
    """Catches replicas of experts that are not summed, or summed twice, in the forms that differ."""
    config = replace(CONFIG, dispatcher="block") if ep == 2 else CONFIG
    report(pool.run(check, world, REPRESENTATIVE, ep, config, ep == 4, timeout=400))


@pytest.mark.slow
def test_own_code_of_every_form_on_the_rows_that_arrive(pool):
    """Catches local ids off by the rank's first expert, and weights applied twice or not at all, in every form."""
    names = ["mixtral", "gpt_oss", "llama4", "dbrx", "jetmoe", "switch_transformers", "nllb_moe"]
    report(pool.run(check, 2, names, 2, CONFIG, False, "foreign", timeout=300))
    output = replace(CONFIG, weight_at="output")
    report(pool.run(check, 2, ["mixtral", "dbrx", "switch_transformers"], 2, output, False, "foreign", timeout=300))


def test_settings_that_a_form_cannot_take_are_errors():
    """Catches weights applied at another place than the model's, and code that cannot run on single routes."""
    local = EPConfig(dispatcher="local")
    with pytest.raises(ValueError, match="weight_at='output': Llama4TextMoe applies router weights at its input"):
        patch_model(build("llama4"), replace(local, weight_at="output"))
    with pytest.raises(
        ValueError, match="LongcatFlashExperts cannot run on tokens with one route each: use experts='ours'"
    ):
        patch_model(build("longcat_flash"), local, experts="foreign")
    with pytest.raises(ValueError, match=r"gate_up_proj ends in 4 rows of no expert, not divisible by the EP degree 8"):
        Share(8, tail=4).check("gate_up_proj", 8)


@pytest.mark.parametrize(
    ("name", "key"),
    [("switch_transformers", "dropout_rate"), ("nllb_moe", "moe_token_dropout"), ("nllb_moe", "activation_dropout")],
)
def test_dropout_inside_experts_is_transformers_own(name, key):
    """Catches a dropout that is left out without a word."""
    model, plain = build(name, **{key: 0.5}), build(name, **{key: 0.5})
    with pytest.raises(ValueError, match="dropout"):
        patch_model(build(name, **{key: 0.5}), EPConfig(dispatcher="local"), experts="ours")
    handle = patch_model(model, EPConfig(dispatcher="local"))
    ids = tokens(0, 0)
    trained = forward(model, ids, seed=0)[0]
    model.eval(), plain.eval()
    evaluated, expected = (forward(one, ids, seed=0)[0] for one in (model, plain))
    assert difference(evaluated, expected) < ROUNDS
    assert difference(trained, expected) > 1e-2
    handle.close()


def report(found: list[dict[str, str]]) -> None:
    wrong = {name: text for by_rank in found for name, text in by_rank.items() if text}
    passing = [name for name in found[0] if name not in wrong]
    print(f"{len(passing)} architectures train like the unpatched model: {', '.join(passing)}")
    assert not wrong, "\n".join(f"{name}: {text[:600]}" for name, text in wrong.items())
