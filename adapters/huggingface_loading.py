"""Loading a checkpoint so that no rank ever holds all experts: each reads its own from the files.

transformers reads for a parameter that is a sharded DTensor only the slice of this rank, whether the checkpoint keeps
experts stacked or one by one. So the experts are DTensors while the model loads, and plain parameters of E_l experts
when it is done.

Legend: E experts, E_l = E/M experts of this rank, M = EP_MP degree.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from ..config import EPConfig
from ..topology import ProcessGroups, experts_of
from .huggingface import PatchedModel, patch_model
from .huggingface_experts import PER_EXPERT, find_experts


def from_pretrained(
    name_or_path: str | Path,
    config: EPConfig,
    groups: ProcessGroups,
    *,
    model_class: Any = None,
    device: torch.device | str = "cpu",
    pattern: str | None = None,
    experts: str = "ours",
    top_k: int | None = None,
    **kwargs: Any,
) -> PatchedModel:
    """Load a transformers checkpoint onto ``device`` and patch it; every rank reads its own experts alone.

    Collective. ``handle.model`` is the model, in evaluation mode as transformers leaves it.

    Args:
        name_or_path: a folder or an id of the hub, as for transformers' ``from_pretrained``.
        groups: from ``ProcessGroups.create``.
        model_class: a class of transformers, or an auto class; None is ``AutoModelForCausalLM``.
        pattern, experts, top_k: as for ``patch_model``.
        kwargs: for transformers' ``from_pretrained``; ``dtype`` for one.

    Raises ``ValueError`` where transformers cannot read shards (before 5.23), the checkpoint lacks experts, or
    ``patch_model`` would refuse the model.
    """
    try:
        from transformers.distributed.sharding_utils import DtensorShardOperation  # noqa: F401
    except ImportError as error:
        raise ValueError(
            "reading a rank's own experts needs transformers ≥ 5.23: load the whole model and call patch_model instead"
        ) from error
    device = torch.device(device)
    name_or_path = str(name_or_path)
    cls, kwargs = _model_class(name_or_path, model_class, kwargs)
    loading = _loading_class(cls, DeviceMesh.from_group(groups.ep_mp, device.type), groups, pattern)
    if device.type != "cpu":
        kwargs["device_map"] = {"": device}
    model, report = loading.from_pretrained(name_or_path, output_loading_info=True, **kwargs)
    model.__class__ = cls
    _check_report(name_or_path, report, _to_plain(model))
    return patch_model(model, config, groups, pattern=pattern, experts=experts, top_k=top_k)


def _model_class(name_or_path: str, model_class: Any, kwargs: dict[str, Any]) -> tuple[type[nn.Module], dict[str, Any]]:
    """The concrete class of the checkpoint's model, and ``kwargs`` with its config."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.models.auto.auto_factory import _get_model_class

    model_class = AutoModelForCausalLM if model_class is None else model_class
    if not hasattr(model_class, "_model_mapping"):
        return model_class, kwargs
    config = kwargs.pop("config", None)
    if config is None:
        hub = {key: kwargs[key] for key in ("revision", "token", "cache_dir", "trust_remote_code") if key in kwargs}
        config = AutoConfig.from_pretrained(name_or_path, **hub)
    return _get_model_class(config, model_class._model_mapping), kwargs | {"config": config}


def _loading_class(cls: Any, mesh: DeviceMesh, groups: ProcessGroups, pattern: str | None) -> Any:
    """A subclass of ``cls`` whose experts are DTensors without memory until they are read."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        cls.__init__(self, *args, **kwargs)
        for name, module in find_experts(self).items():
            if pattern is not None and not fnmatchcase(name, pattern):
                continue
            for key, parameter in module._parameters.items():
                if parameter is not None and key in PER_EXPERT:
                    setattr(module, key, _placeholder(parameter, mesh, groups))

    # Under the name of its parent, which transformers looks at.
    return type(cls.__name__, (cls,), {"__init__": __init__, "__module__": cls.__module__})


def _placeholder(parameter: nn.Parameter, mesh: DeviceMesh, groups: ProcessGroups) -> nn.Parameter:
    if not parameter.is_meta:
        raise ValueError(
            "transformers has made the experts before their weights are read, so that every rank holds all of them;"
            " this version cannot load shard by shard"
        )
    own = experts_of(parameter.shape[0], groups.layout.ep_mp, dist.get_rank(groups.ep_mp))
    local = parameter.data[own.start : own.stop]
    shape, stride = parameter.shape, parameter.stride()
    sharded = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)
    return nn.Parameter(sharded, requires_grad=parameter.requires_grad)


def _to_plain(model: nn.Module) -> list[str]:
    """Replace the DTensors by this rank's parts [E_l, ...] and give their names."""
    names = []
    for prefix, module in model.named_modules():
        for key, parameter in module._parameters.items():
            if isinstance(parameter, DTensor):
                own = nn.Parameter(parameter.to_local().detach(), requires_grad=parameter.requires_grad)
                own.whole_experts = parameter.shape[0]  # type: ignore[attr-defined]
                setattr(module, key, own)
                names.append(f"{prefix}.{key}")
    return names


def _check_report(name_or_path: str, report: dict[str, Any], experts: list[str]) -> None:
    missing = sorted(set(report["missing_keys"]) & set(experts))
    mismatched = sorted(str(name) for name, *_ in report["mismatched_keys"])
    for what, names in (("lacks", missing), ("has other shapes for", mismatched)):
        if names:
            raise ValueError(f"{name_or_path} {what} {len(names)} of the model's parameters, {names[0]} first")
