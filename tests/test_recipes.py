"""The recipes: every choice composes, wrong names are caught with the close match, other applications can use them."""

import functools

import hydra
import pytest
import torch
from hydra.errors import HydraException
from omegaconf import OmegaConf

from ep_plugin.config import EPConfig
from ep_plugin.train.checks import check_comparable, check_settings
from ep_plugin.train.compose import Launch, compose_launch, recipe_options
from ep_plugin.train.model import transformers_config
from ep_plugin.train.settings import RunConfig

EXPERIMENTS = recipe_options()["experiment"]


@functools.cache
def composed(experiment: str) -> Launch:
    return compose_launch([f"experiment={experiment}"])


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_experiment_composes_and_fits_four_ranks(experiment):
    """Catches a recipe with a misspelt setting, or one that no longer passes the checks."""
    launch = composed(experiment)
    assert launch.config.name == experiment
    for config in launch.variants.values():
        assert check_settings(config, 4).world_size == 4
    check_comparable(launch.variants)


@pytest.mark.parametrize("group", ["ep", "model", "trainer"])
def test_every_choice_of_a_group_composes(group):
    """Catches a choice that does not fit the schema."""
    choices = recipe_options()[group]
    assert choices
    for choice in choices:
        compose_launch([f"{group}={choice}"]).config.validate()


@pytest.mark.parametrize(
    ("model", "billions"),
    [
        ("hf_olmoe_1b_7b", 6.92),
        ("hf_mixtral_8x7b", 46.70),
        ("hf_qwen1_5_moe_a2_7b", 14.32),
        ("hf_qwen3_30b_a3b", 30.53),
        ("hf_qwen3_235b_a22b", 235.09),
        ("hf_gpt_oss_20b", 20.91),
    ],
)
def test_named_models_have_the_sizes_of_their_names(model, billions):
    """Catches a size of a public model mistyped: the number of its parameters is published."""
    from transformers import AutoModelForCausalLM

    config = transformers_config(compose_launch([f"model={model}"]).config.model)
    with torch.device("meta"):
        made = AutoModelForCausalLM.from_config(config)
    assert sum(p.numel() for p in made.parameters()) / 1e9 == pytest.approx(billions, abs=0.01)


def test_recipes_of_whole_models_have_slots_for_their_layers():
    """Catches a model whose fifth layer finds no slot on GPUs, where nothing is computed again."""
    for name in (name for name in recipe_options()["experiment"] if name.startswith("hf_")):
        config = compose_launch([f"experiment={name}"]).config
        if not config.trainer.hf.checkpointing:
            assert (config.ep.slots or 4) >= config.model.num_layers, name


def test_the_choices_mean_what_they_are_called():
    """Catches ep=... recipes that set another dispatcher or form than their name says."""
    ep = {name: compose_launch([f"ep={name}", "topology.ep=1"]).config for name in recipe_options()["ep"]}
    assert {name: (c.ep.dispatcher, c.patch_experts) for name, c in ep.items()} == {
        "none": ("local", False),
        "local": ("local", True),
        "block": ("block", True),
        "deepep": ("deepep", True),
        "rowwise": ("rowwise", True),
        "rowwise_route": ("rowwise", True),
    }
    assert (ep["rowwise"].ep.form, ep["rowwise_route"].ep.form) == ("dedup", "route")


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("ep.dispatchr=block", "did you mean ep.dispatcher?"),
        ("ep.capacity.polcy=rank", "did you mean ep.capacity.policy?"),
        ("trainer.stepps=3", "did you mean trainer.steps?"),
        ("dispatcher=block", "did you mean ep.dispatcher?"),
        ("lr=1e-3", "did you mean trainer.lr?"),
        ("topolgy.ep=2", "did you mean topology.ep?"),
        ("expriment=demo", "did you mean experiment?"),
        ("experiment=demoo", "did you mean experiment=demo?"),
        ("ep=rowise", "did you mean ep=rowwise?"),
        ("demo", "did you mean experiment=demo"),
        ("+ep.dispatchr=block", "did you mean ep.dispatcher?"),
        ("~trainer.stepps", "did you mean trainer.steps?"),
        ("trainer.lr=fast", "'fast'"),
        ("topology.ep=1.5", "'1.5'"),
        ("trainer.lr=1,2", "trainer.lr=1,2"),
        ("trainer.lr=[", "'['"),
    ],
)
def test_a_wrong_override_is_one_line_with_the_close_match(override, expected):
    """Catches a typo that is taken silently, answered without the close name, or spread over several lines."""
    with pytest.raises(ValueError) as error:
        compose_launch([override])
    message = str(error.value)
    assert expected in message
    assert "\n" not in message and "full_key" not in message


def test_a_typo_inside_a_variant_names_the_variant():
    """Catches overrides of variants that skip the checks of the command line."""
    with pytest.raises(ValueError, match=r"variants\.ep4: 'ep\.frm' is not a setting; did you mean ep\.form\?"):
        compose_launch(["experiment=demo", 'variants.ep4=["ep.frm=route"]'])


def test_settings_reach_every_variant_and_variants_keep_their_own():
    """Catches variants that forget the command line, or a command line that is silently undone by them."""
    launch = compose_launch(["experiment=demo", "trainer.steps=7", "ep.form=route"])
    assert [c.trainer.steps for c in launch.variants.values()] == [7, 7, 7]
    assert [c.ep.form for c in launch.variants.values()][1:] == ["route", "route"]
    assert [c.topology.ep for c in launch.variants.values()] == [1, 4, 2]
    with pytest.raises(ValueError, match=r"topology\.ep=2 would not last: variants\.no_ep sets topology\.ep itself"):
        compose_launch(["experiment=demo", "topology.ep=2"])


def test_variants_that_see_other_batches_are_refused():
    """Catches a comparison of curves that were never meant to agree."""
    launch = compose_launch(["experiment=demo", 'variants.ep4=["ep=rowwise","topology.ep=4","trainer.seq_len=64"]'])
    with pytest.raises(ValueError, match=r"variants\.ep4 has trainer\.seq_len=64, but variants\.no_ep has 128"):
        check_comparable(launch.variants)


def test_extra_model_settings_may_be_added():
    """Catches a closed dictionary where the architecture's own settings belong."""
    assert compose_launch(["+model.extra.clip_qkv=3.0"]).config.model.extra == {"clip_qkv": 3.0}


def test_recipes_of_a_users_own_folder(tmp_path):
    """Catches checks of names that know the package's own choices only, or that stop where others are added."""
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\nname: mine\ntrainer: {steps: 3}\n")
    path = f"hydra.searchpath=[file://{tmp_path}]"
    assert compose_launch([path, "experiment=mine"]).config.trainer.steps == 3
    with pytest.raises(ValueError, match="did you mean trainer.steps"):
        compose_launch([path, "experiment=mine", "trainer.stepps=4"])
    with pytest.raises(ValueError, match="Could not find 'experiment/mien'.*demo.*mine"):
        compose_launch([path, "experiment=mien"])


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_the_printed_settings_give_the_same_run_again(experiment):
    """Catches resolved settings that lose or change something on the way through YAML."""
    launch = composed(experiment)
    again = OmegaConf.merge(OmegaConf.structured(RunConfig), OmegaConf.create(OmegaConf.to_yaml(launch.resolved)))
    assert OmegaConf.to_object(again) == launch.config


def test_another_application_gets_typed_groups(tmp_path):
    """Catches groups that other applications can load but that then take any name and type."""
    (tmp_path / "main.yaml").write_text(
        "defaults: [{ep: rowwise}, {model: mixtral_tiny}, _self_]\n"
        "hydra: {searchpath: [pkg://ep_plugin.recipes]}\n"
        "lr: 0.1\n"
    )
    with hydra.initialize_config_dir(str(tmp_path), version_base="1.3"):
        config = hydra.compose("main", ["ep=block", "ep.timeout_s=5"])
        assert OmegaConf.to_object(config.ep) == EPConfig(dispatcher="block", timeout_s=5.0)
        assert (config.model.architecture, config.lr) == ("mixtral", 0.1)
        for wrong in ("ep.dispatchr=block", "ep.timeout_s=soon"):
            with pytest.raises(HydraException):
                hydra.compose("main", [wrong])
