"""Command-line overrides to checked settings, with the close match named where a name is wrong."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from .settings import RunConfig, register

RECIPES = "ep_plugin.recipes"
ROOT = "config"
HIDDEN_OPTION = "schema"
FREE_SETTINGS = ("model.extra.", "variants.")  # where `+name=value` may add what no schema lists


@dataclass
class Launch:
    """The settings of one launch: ``config`` itself, and each variant's own settings by name (one, named after the
    launch, where it compares nothing). ``resolved`` is what to print and store; ``output_dir`` is Hydra's run folder.
    """

    config: RunConfig
    resolved: DictConfig
    output_dir: str
    overrides: list[str]
    variants: dict[str, RunConfig] = field(default_factory=dict)


def one_line(error: BaseException) -> str:
    """The message of ``error``, or of what caused it where it has none, on one line."""
    cause: BaseException | None = error
    while cause is not None and not str(cause).strip():
        cause = cause.__cause__ or cause.__context__
    text = " ".join(str(cause if cause is not None else type(error).__name__).split())
    for epilogue in (" full_key: ", " Config search path: "):  # what follows in Hydra's messages does not help
        text = text.split(epilogue)[0]
    return text


def compose_launch(overrides: Sequence[str]) -> Launch:
    """Compose the recipes under ``overrides``, for the launch and for each of its variants.

    Raises ``ValueError`` with one line that quotes the wrong override and names the close match.
    """
    register()
    with initialize_config_module(RECIPES, version_base="1.3", job_name="ep_plugin"):
        try:
            return _compose_launch(list(overrides))
        except (HydraException, OmegaConfBaseException) as error:
            raise ValueError(_explain(error)) from error


def recipe_options() -> dict[str, list[str]]:
    """Every config group of the recipes with its choices."""
    register()
    with initialize_config_module(RECIPES, version_base="1.3", job_name="ep_plugin"):
        return {group: list(names) for group, names in _options().items() if names}


def _compose_launch(overrides: list[str]) -> Launch:
    parsed = _check_overrides(overrides)
    config, resolved, output_dir = _compose(overrides)
    launch = Launch(config, resolved, output_dir, overrides)
    if not config.variants:
        launch.variants[config.name] = config
    for name, own in config.variants.items():
        own_keys = {o.key_or_group for o in _check_overrides(own, where=f"variants.{name}")}
        for override in parsed:
            if override.key_or_group in own_keys:
                raise ValueError(
                    f"{override.input_line} would not last: variants.{name} sets {override.key_or_group} itself;"
                    f" override variants.{name} instead"
                )
        launch.variants[name] = _compose(overrides + own)[0]
    return launch


def _compose(overrides: list[str]) -> tuple[RunConfig, DictConfig, str]:
    composed = compose(ROOT, overrides, return_hydra_config=True)
    output_dir = str(composed.hydra.run.dir)
    with open_dict(composed):
        del composed["hydra"]
    OmegaConf.resolve(composed)
    config = OmegaConf.to_object(composed)
    assert isinstance(config, RunConfig)
    return config, composed, output_dir


@functools.cache
def _options() -> dict[str, list[str]]:
    loader = GlobalHydra.instance().config_loader()
    groups = [g for g in loader.list_groups("") if g != "hydra"]
    options = {g: loader.get_group_options(g, ObjectType.CONFIG) for g in groups}
    return {g: [o for o in names if o != HIDDEN_OPTION] for g, names in options.items() if names}


def _check_overrides(overrides: Sequence[str], where: str = "") -> list[Override]:
    """Parse ``overrides`` and raise ``ValueError`` for a group, choice or setting that does not exist."""
    prefix = f"{where}: " if where else ""
    options = _options()
    for text in overrides:
        if "=" not in text and not text.startswith("~"):
            homes = [f"{group}={text}" for group, names in options.items() if text in names]
            raise ValueError(f"{prefix}{text!r} is not of the form name=value{_hint(homes)}")
    parsed = OverridesParser.create().parse_overrides(list(overrides))
    own = [o for o in parsed if not (o.is_hydra_override() or o.key_or_group.startswith("hydra"))]
    groups = [o for o in own if o.key_or_group in options]
    elsewhere = any(o.key_or_group == "hydra.searchpath" for o in parsed)  # choices that are not among ours
    for override in groups:
        group, value = override.key_or_group, override.value()
        choices = options[group]
        if isinstance(value, str) and value not in choices and not elsewhere:
            close = [f"{group}={choice}" for choice in difflib.get_close_matches(value, choices, n=1)]
            raise ValueError(f"{prefix}{group}={value} does not exist{_hint(close)}; choices: {', '.join(choices)}")
    names = _setting_names(*(o.input_line for o in parsed if o.input_line and (o in groups or o.is_hydra_override())))
    for override in own:
        key = override.key_or_group
        if key in options or key in names or key.startswith(FREE_SETTINGS):
            continue
        raise ValueError(f"{prefix}{key!r} is not a setting{_hint(_close_names(key, names, list(options)))}")
    return parsed


@functools.cache
def _setting_names(*group_overrides: str) -> list[str]:
    composed = compose(ROOT, list(group_overrides))
    return list(_walk(OmegaConf.to_container(composed, resolve=False)))


def _walk(node: Any, prefix: str = "") -> Iterator[str]:
    for key, value in node.items():
        yield f"{prefix}{key}"
        if isinstance(value, dict):
            yield from _walk(value, f"{prefix}{key}.")


def _close_names(key: str, names: list[str], groups: list[str]) -> list[str]:
    """The names that ``key`` may stand for: the same last part elsewhere, else a near spelling among its siblings,
    else overall.
    """
    last = key.rsplit(".", 1)[-1]
    parent = key[: len(key) - len(last)]
    elsewhere = [n for n in names if n.rsplit(".", 1)[-1] == last]
    if elsewhere:
        return difflib.get_close_matches(key, elsewhere, n=1) or elsewhere[:3]
    siblings = [n for n in names if n.startswith(parent) and "." not in n[len(parent) :]]
    return difflib.get_close_matches(key, siblings + groups, n=1) or difflib.get_close_matches(key, names + groups, n=1)


def _hint(candidates: list[str]) -> str:
    return f"; did you mean {' or '.join(candidates)}?" if candidates else ""


def _explain(error: Exception) -> str:
    text = one_line(error)
    if "hydra/launcher/submitit" in text:
        return "cluster=slurm needs hydra-submitit-launcher, which is not installed: pip install 'ep_plugin[slurm]'"
    cause = error.__cause__
    detail = one_line(cause) if isinstance(cause, OmegaConfBaseException) else ""
    return text if not detail or detail in text else f"{text}: {detail}"
