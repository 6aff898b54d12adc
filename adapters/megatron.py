"""Megatron-Core (0.16 to 0.19) with our dispatchers, in one of three places.

After building, before DDP and graph capture (also as a Megatron-Bridge pre-wrap hook):

    use_dispatcher(model, EPConfig(dispatcher="rowwise"))

By spec, when the layer spec is in hand:

    spec = plug_spec(get_gpt_layer_local_spec(num_experts=8, ...), EPConfig())

In a training script that stays as it is, our backends named with Megatron's own flags:

    torchrun ... -m ep_plugin.adapters.megatron pretrain_gpt.py --moe-token-dispatcher-type flex \\
        --moe-flex-dispatcher-backend rowwise ...

Routers, auxiliary losses, shared experts, gradient reduction and checkpoints stay Megatron's own.
"""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Sequence
from fnmatch import fnmatchcase
from types import SimpleNamespace
from typing import Any

try:
    from megatron.core.transformer.moe.moe_layer import BaseMoELayer, MoELayer
except ImportError as error:  # pragma: no cover
    raise ImportError(
        f"ep_plugin.adapters.megatron needs megatron-core: pip install 'ep_plugin[megatron]' ({error})"
    ) from error

from torch import nn

from ..config import EPConfig
from .megatron_dispatcher import PluginTokenDispatcher, SharedDispatchers
from .megatron_experts import PluginExperts

__all__ = ["PluginTokenDispatcher", "SharedDispatchers", "plug_spec", "use_dispatcher"]

logger = logging.getLogger(__name__)


def use_dispatcher(
    model: nn.Module | Sequence[nn.Module],
    config: EPConfig | None = None,
    pattern: str | None = None,
    *,
    experts: str = "megatron",
    max_routes: int | None = None,
) -> SharedDispatchers:
    """Give the MoE layers of ``model`` (or of its pipeline chunks) the dispatcher that ``config`` names.

    Call it on all ranks after the model is built, before DDP, the optimizer and any graph capture. ``pattern``: a
    shell pattern over module names (``decoder.layers.*.mlp``); None takes every MoE layer. ``experts``: "megatron"
    keeps Megatron's experts, "plugin" computes them with ours over the same parameters. ``max_routes``: the most routes
    that a routing map gives a token (None: moe_router_topk).

    Gives the shared dispatchers: their ``stats``, ``check`` and ``close``. Raises ``ValueError`` where nothing matches,
    or a setting cannot be honoured; the model is unchanged then.
    """
    config = EPConfig() if config is None else config
    chunks = list(model) if isinstance(model, Sequence) else [model]
    found = [
        (chunk, name, module)
        for chunk, part in enumerate(chunks)
        for name, module in part.named_modules()
        if isinstance(module, BaseMoELayer)
    ]
    chosen = [item for item in found if pattern is None or fnmatchcase(item[1], pattern)]
    if not chosen:
        names = ", ".join(name for _, name, _ in found) or "none"
        wanted = "" if pattern is None else f" matches pattern {pattern!r}"
        raise ValueError(f"no MoE layer of the model{wanted}; its MoE layers: {names}")
    shared = SharedDispatchers(config)
    plugged = [(module, *_plug(module, shared, experts, max_routes, name, chunk)) for chunk, name, module in chosen]
    for module, dispatcher, routed in plugged:
        _attach(module, dispatcher, routed)
    logger.info("%s carries the rows of %d MoE layers", config.dispatcher, len(plugged))
    return shared


def _plug(
    layer: Any, shared: SharedDispatchers, experts: str, max_routes: int | None, name: str, chunk: int = 0
) -> tuple[PluginTokenDispatcher, PluginExperts | None]:
    """What ``layer`` needs, made but not yet put into it."""
    old = getattr(layer, "_training_token_dispatcher", None) or layer.token_dispatcher
    dispatcher = PluginTokenDispatcher(
        layer.num_local_experts,
        layer.local_expert_indices,
        layer.config,
        SimpleNamespace(ep=old.ep_group, expt_tp=old.tp_group, tp_ep=old.tp_ep_group),
        shared=shared,
        experts=experts,
        max_routes=max_routes,
        layer=name,
        chunk=chunk,
    )
    return dispatcher, PluginExperts(layer.experts, dispatcher) if experts == "plugin" else None


def _attach(layer: Any, dispatcher: PluginTokenDispatcher, experts: PluginExperts | None) -> None:
    if layer.use_shared_expert and layer.config.moe_shared_expert_overlap:
        dispatcher.set_shared_experts(layer.shared_experts)
    layer.token_dispatcher = dispatcher
    if hasattr(layer, "_training_token_dispatcher"):  # the layer changes between it and one for inference
        layer._training_token_dispatcher = dispatcher
    if experts is not None:
        layer.experts.forward = experts


def plug_layer(
    shared: SharedDispatchers, experts: str = "megatron", max_routes: int | None = None, base: type = MoELayer
) -> type:
    """A subclass of Megatron's MoE layer ``base`` that builds itself with our dispatchers."""

    class PluginMoELayer(base):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            _attach(self, *_plug(self, shared, experts, max_routes, f"moe layer {len(shared.users)}"))

    return PluginMoELayer


def plug_spec(
    spec: Any, config: EPConfig | None = None, *, experts: str = "megatron", max_routes: int | None = None
) -> Any:
    """A copy of ``spec`` whose MoE layers build themselves with the dispatcher that ``config`` names.

    ``spec``: a transformer layer's, or a block's with its ``layer_specs`` (what GPTModel takes). Settings as in
    ``use_dispatcher``. ``ValueError`` where there is no MoE layer in it.
    """
    shared = SharedDispatchers(EPConfig() if config is None else config)
    spec = copy.deepcopy(spec)
    blocks = getattr(spec, "submodules", None)
    layers = getattr(spec, "layer_specs", None) or getattr(blocks, "layer_specs", None) or [spec]
    plugged: set[int] = set()  # one spec may stand for many layers
    for layer in layers:
        mlp = layer.submodules.mlp
        target = mlp.func if isinstance(mlp, functools.partial) else getattr(mlp, "module", None)
        if id(mlp) in plugged or not (isinstance(target, type) and issubclass(target, BaseMoELayer)):
            continue
        ours = plug_layer(shared, experts, max_routes, target)
        if isinstance(mlp, functools.partial):  # from 0.18 on
            layer.submodules.mlp = functools.partial(ours, *mlp.args, **mlp.keywords)
        else:
            mlp.module = ours
        plugged.add(id(layer.submodules.mlp))
    if not plugged:
        raise ValueError("the spec has no MoE layer: build it with num_experts set")
    return spec


if __name__ == "__main__":
    from ep_plugin.adapters.megatron_script import main

    main()
