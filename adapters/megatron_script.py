"""Run a Megatron training script as it is, our backends among the choices of its own flags:

torchrun ... -m ep_plugin.adapters.megatron [--ep name=value ...] SCRIPT [its arguments ...]

--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend BACKEND chooses: rowwise, rowwise_route, block or local.
--ep sets anything else of EPConfig (``--ep max_tokens=8192``, ``--ep capacity.factor=1.5``), or ``experts`` and
``max_routes`` of ``use_dispatcher``.
"""

from __future__ import annotations

import argparse
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ..config import EPConfig

BACKENDS = {
    "rowwise": {"dispatcher": "rowwise", "form": "dedup"},
    "rowwise_route": {"dispatcher": "rowwise", "form": "route"},
    "block": {"dispatcher": "block"},
    "local": {"dispatcher": "local"},
}
FIELD = "moe_flex_dispatcher_backend"
FLAG = "--moe-flex-dispatcher-backend"


def parse(arguments: Sequence[str]) -> tuple[list[str], str, list[str]]:
    """``--ep`` settings, the script and its own arguments; ends with a usage line where there is no script."""
    settings: list[str] = []
    rest = list(arguments)
    while rest and rest[0].startswith("-"):
        if rest[0] == "--ep" and len(rest) > 1:
            settings.append(rest[1])
            rest = rest[2:]
        elif rest[0].startswith("--ep="):
            settings.append(rest.pop(0)[len("--ep=") :])
        else:
            _stop(
                __doc__ if rest[0] in ("-h", "--help") else f"unknown option {rest[0]!r} before the script\n\n{__doc__}"
            )
    if not rest:
        _stop(__doc__)
    if not Path(rest[0]).is_file():
        _stop(f"{rest[0]!r} is not a file\n\n{__doc__}")
    return settings, rest[0], rest[1:]


def _stop(message: str | None) -> None:
    print(message, file=sys.stderr)
    sys.exit(2)


def settings_of(backend: str, settings: Sequence[str]) -> tuple[EPConfig, dict[str, Any]]:
    """The ``EPConfig`` of a backend's name with ``settings`` over it, and the arguments of ``use_dispatcher``.

    ``ValueError`` for a setting that does not exist or does not fit.
    """
    own: Any = OmegaConf.create({"experts": "megatron", "max_routes": None})
    config: Any = OmegaConf.merge(OmegaConf.structured(EPConfig), BACKENDS[backend])
    for setting in settings:
        name, equals, _ = setting.partition("=")
        part = OmegaConf.from_dotlist([setting])
        try:
            if not equals:
                raise ValueError(f"--ep {setting}: expected name=value")
            if name in own:
                own = OmegaConf.merge(own, part)
            else:
                config = OmegaConf.merge(config, part)
        except OmegaConfBaseException as error:
            raise ValueError(f"--ep {setting}: {str(error).splitlines()[0]}") from error
    built: Any = OmegaConf.to_object(config)
    built.validate()
    arguments: Any = OmegaConf.to_container(own)
    return built, arguments


def install(settings: Sequence[str] = ()) -> None:
    """Make our backends choices of Megatron's flex dispatcher in this process, before its arguments are parsed."""
    from megatron.core.transformer import transformer_config
    from megatron.core.transformer.moe import moe_layer

    for backend in BACKENDS:
        settings_of(backend, settings if backend == "rowwise" else [])  # a wrong setting costs one line, not a start
    field = transformer_config.TransformerConfig.__dataclass_fields__[FIELD]
    field.type = Literal[(*get_args(field.type), *BACKENDS)]
    transformer_config.TransformerConfig.__annotations__[FIELD] = field.type
    _widen_flags()
    moe_layer.MoEFlexTokenDispatcher = _flex_or_ours(moe_layer.MoEFlexTokenDispatcher, tuple(settings))
    moe_layer.MoELayer.__init__ = _with_our_experts(moe_layer.MoELayer.__init__)


def _widen_flags() -> None:
    """Scripts whose parser lists the backends itself accept ours too."""
    add_argument = argparse._ActionsContainer.add_argument

    def widened(self: Any, *names: Any, **settings: Any) -> Any:
        if FLAG in names and settings.get("choices") is not None:
            settings["choices"] = list(dict.fromkeys((*settings["choices"], *BACKENDS)))
        return add_argument(self, *names, **settings)

    argparse._ActionsContainer.add_argument = widened  # type: ignore[method-assign]


def _flex_or_ours(flex: type, settings: tuple[str, ...]) -> type:
    """Megatron's flex dispatcher for its own backends, ours for ours."""
    from .megatron_dispatcher import PluginTokenDispatcher, SharedDispatchers

    shared: dict[str, tuple[SharedDispatchers, dict[str, Any]]] = {}

    class FlexOrOurs(flex):
        def __new__(cls, num_local_experts: int, indices: list[int], config: Any, pg_collection: Any = None) -> Any:
            backend = getattr(config, FIELD)
            if backend not in BACKENDS:
                return flex(num_local_experts, indices, config=config, pg_collection=pg_collection)
            if backend not in shared:
                ours, arguments = settings_of(backend, settings)
                shared[backend] = SharedDispatchers(ours), arguments
            dispatchers, arguments = shared[backend]
            layer = f"moe layer {len(dispatchers.users)}"
            return PluginTokenDispatcher(
                num_local_experts, indices, config, pg_collection, shared=dispatchers, layer=layer, **arguments
            )

    return FlexOrOurs


def _with_our_experts(init: Any) -> Any:
    """The layer's ``__init__``, after which ``experts=plugin`` takes effect."""
    import functools

    from .megatron_dispatcher import PluginTokenDispatcher
    from .megatron_experts import PluginExperts

    @functools.wraps(init)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        dispatcher = self.token_dispatcher
        if isinstance(dispatcher, PluginTokenDispatcher) and dispatcher.experts == "plugin":
            self.experts.forward = PluginExperts(self.experts, dispatcher)

    return wrapped


def main(arguments: Sequence[str] | None = None) -> None:
    """``python -m ep_plugin.adapters.megatron``; bad settings end with one line and exit code 2."""
    settings, script, rest = parse(sys.argv[1:] if arguments is None else arguments)
    try:
        install(settings)
    except ValueError as error:
        _stop(f"ep_plugin.adapters.megatron: {error}")
    sys.argv = [script, *rest]
    sys.path.insert(0, str(Path(script).resolve().parent))  # as python SCRIPT does
    runpy.run_path(script, run_name="__main__")
