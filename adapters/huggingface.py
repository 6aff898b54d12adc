"""Expert parallelism for a transformers model: ``patch_model`` after loading, before DDP and the optimizer.

    groups = ProcessGroups.create(layout(world_size, ep=4))
    handle = patch_model(model, EPConfig(), groups)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(ddp.parameters())
    handle.attach(optimizer)
    ...
    loss.backward()
    handle.clip_grad_norm_(1.0)
    optimizer.step()

Only the call from the router into the experts is replaced. Routers, their auxiliary losses, shared experts and
everything else stay the model's own code.

Legend: T tokens, K routes per token, E experts, E_l = E/M experts of this rank, D hidden size, M = EP_MP degree, R rows
received.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..config import EPConfig, check_config, check_shape, one_of
from ..dispatch import RouteState
from ..layer import Experts, ForeignExperts, moe_step
from ..topology import ProcessGroups
from .huggingface_architectures import architectures as architectures
from .huggingface_checkpoint import Whole, save_pretrained
from .huggingface_dispatchers import Dispatchers, Shape, with_slots
from .huggingface_experts import ExpertsLayout, NotOurs, OurExperts
from .huggingface_families import Family, check_layout, find_sites, similar_modules, whole_shape
from .huggingface_gather import Part
from .huggingface_gradients import ExpertGradients
from .huggingface_replicas import broadcast_start, check_same_start
from .huggingface_routes import keep_routes
from .huggingface_state import TrainingState

EXPERTS = ("auto", "ours", "foreign")
WRAPPERS = ("", "base_model.model.", "_orig_mod.")  # what PEFT and torch.compile put before names, for DDP's list

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Metrics:
    """What the experts saw in the last training forward of every layer.

    ``drop_rate``: float64 scalar, routes dropped / routes asked, over the layers and the EP_MP group. ``expert_load``:
    int64 [E] by layer, routes that the EP_MP group asked of each expert. ``bytes_sent``: bytes of rows that this rank
    wrote to or read from other ranks since the model was patched; None: rowwise on GPUs, whose counts stay on the
    device, and DeepEP do not count. Tensors are on the device, and nothing waits for it.
    """

    drop_rate: Tensor
    expert_load: dict[str, Tensor]
    bytes_sent: int | None


class PatchedExperts:
    """One module whose call of its experts goes through a dispatcher; keeps this rank's experts of it.

    ``layout`` None: the module's own code runs on the rows that arrive.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        family: Family,
        dispatchers: Dispatchers,
        shape: Shape,
        layout: ExpertsLayout | None,
        groups: ProcessGroups | None,
    ) -> None:
        self.name, self.module, self.family = name, module, family
        self.dispatchers, self.shape = dispatchers, shape
        dispatcher = dispatchers.of(shape)
        # int64 [M, E] of the last training forward
        self.asked = self.accepted = torch.zeros(1, dispatcher.num_experts, dtype=torch.int64, device=dispatcher.device)
        whole = family.parameters(name, module)
        self.shares = {key: family.share(module, key) for key in whole}
        self.shapes = {key: whole_shape(parameter) for key, parameter in whole.items()}
        self.call = family.replacement(module, self.forward)
        ep, rank = (1, 0) if groups is None else (groups.layout.ep_mp, dist.get_rank(groups.ep_mp))
        family.cut(module, whole, ep, rank)
        self.parameters = family.parameters(name, module)
        self.places = list(_places(module, self.parameters))
        self.experts: Experts
        if layout is None:
            self.experts = ForeignExperts(family.over_rows(name, module))
        else:
            self.experts = OurExperts(layout, module) if layout.grouped else functools.partial(layout.run, module)

    def install(self, gradients: ExpertGradients) -> None:
        """Replace the module's call."""
        self.gradients = gradients
        own = getattr(self.module, self.family.entry)

        @functools.wraps(own)
        def call(*args: Any, **kwargs: Any) -> Any:
            return self.call(*args, **kwargs)

        setattr(self.module, self.family.entry, call)
        self.module.patched_experts = self  # type: ignore[assignment]

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """``hidden_states`` [..., D], ids (−1: no route) and weights [T, K] → the experts' weighted sum [..., D].

        Weights keep their dtype, which may be float32 beside bfloat16 rows. torch.compile does not trace it.
        """
        if torch.compiler.is_dynamo_compiling():
            untraced: Tensor = torch.compiler.disable(self._forward)(hidden_states, top_k_index, top_k_weights)
            return untraced
        return self._forward(hidden_states, top_k_index, top_k_weights)

    def _forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        with self.dispatchers.of(self.shape).guard("plan", self.name):
            self._check(hidden_states)
            dtype = self._row_dtype(hidden_states)
        shape = replace(self.shape, dtype=dtype)
        d = self.dispatchers.of(shape)
        rows = hidden_states.reshape(-1, d.hidden_size).to(d.dtype)
        self.dispatchers.expect(shape, rows.shape[0])
        out = moe_step(
            d,
            rows,
            top_k_index,
            top_k_weights,
            self.experts,
            layer=self.name,
            observe=self._count,
        )
        return out.view(hidden_states.shape).to(hidden_states.dtype)

    def _row_dtype(self, hidden_states: Tensor) -> torch.dtype:
        """The dtype of the rows that travel and of the experts' products: the one chosen, autocast's, as in the
        module's own code, which leaves float64 alone, or that of the weights."""
        if self.dispatchers.row_dtype is not None:
            return self.dispatchers.row_dtype
        weight = next(iter(self.parameters.values())).dtype
        device = hidden_states.device.type
        if torch.is_autocast_enabled(device) and weight != torch.float64:
            return torch.get_autocast_dtype(device)
        if hidden_states.dtype != weight:
            raise ValueError(
                f"{self.name} has weights in {weight} and was called on {hidden_states.dtype} outside autocast; set"
                " PatchedModel.dispatchers.row_dtype if that is meant (FSDP2's mixed precision)"
            )
        return weight

    def _check(self, hidden_states: Tensor) -> None:
        if hidden_states.device != self.shape.device:
            raise ValueError(
                f"{self.name} was patched on {self.shape.device} and called on {hidden_states.device}:"
                " move the model, then patch it"
            )
        for key, holder, leaf, value in self.places:
            if getattr(holder, leaf, None) is not value:
                raise RuntimeError(
                    f"{self.name}.{key} was replaced after patch_model and has lost its gradient hook: patch last"
                )
        self.gradients.see_ddp()

    def _count(self, state: RouteState) -> None:
        if self.module.training:  # a recomputation writes the same again
            self.asked, self.accepted = state.map.counts, state.map.accepted

    def __deepcopy__(self, memo: Any) -> PatchedExperts:
        """Raises: the copy of the module would go on computing with the experts of the original."""
        raise RuntimeError(
            f"{self.name} is patched, and a copy of it would compute with the original's experts: copy the model first,"
            " then patch the copy; load_state_dict carries weights between patched models"
        )

    def close(self) -> None:
        """Let a later call say that it is too late."""

        def closed(*args: Any, **kwargs: Any) -> Tensor:
            raise RuntimeError(f"{self.name} was patched and its PatchedModel is closed")

        setattr(self.module, self.family.entry, closed)


def _places(
    module: nn.Module, parameters: dict[str, nn.Parameter]
) -> Iterator[tuple[str, nn.Module, str, nn.Module | nn.Parameter]]:
    """Every attribute on the way from ``module`` to its ``parameters``: (name so far, holder, attribute, value)."""
    seen = set()
    for key in parameters:
        holder, path = module, key.split(".")
        for depth, leaf in enumerate(path, 1):
            value = getattr(holder, leaf)
            if (id(holder), leaf) not in seen:
                seen.add((id(holder), leaf))
                yield ".".join(path[:depth]), holder, leaf, value
            holder = value


class PatchedModel:
    """What ``patch_model`` gives back: gradients, checkpoints and metrics of a model whose experts are sharded."""

    def __init__(
        self,
        model: nn.Module,
        groups: ProcessGroups | None,
        dispatchers: Dispatchers,
        layers: list[PatchedExperts],
        gradients: ExpertGradients,
    ) -> None:
        self.model, self.groups = model, groups
        self.dispatchers, self.layers, self.gradients = dispatchers, layers, gradients
        self._unfollow = dispatchers.follow(model)
        # Every expert parameter of the whole model, by name; where experts are modules of their own, also other ranks'.
        self.parts = {
            _full(layer.name, key): Part(share, layer.shapes[key])
            for layer in layers
            for key, share in layer.shares.items()
        }
        self._own_save: Any = getattr(model, "save_pretrained", None)
        if self._own_save is not None:
            save = functools.wraps(self._own_save)(functools.partial(self._save_pretrained, self._own_save))
            model.save_pretrained = save  # type: ignore[assignment]
        if hasattr(model, "generate"):
            model.generate = _in_step(model.generate)

    @property
    def expert_parameters(self) -> dict[str, nn.Parameter]:
        """This rank's experts by their name in the model."""
        return self.gradients.experts

    def sync_gradients(self) -> None:
        """Make all gradients those of the global batch; see ``ExpertGradients.sync``. Needed once per step unless
        attached."""
        self.gradients.sync()

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Call ``sync_gradients`` before every step of ``optimizer`` that needs it. ``ValueError`` if it does not hold
        the experts."""
        self.gradients.attach(optimizer)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
        """Like ``torch.nn.utils.clip_grad_norm_`` of the unpatched model; gives its norm, equal on all ranks.

        Syncs the gradients first. torch's own function would clip every rank by another norm.
        """
        return self.gradients.clip(max_norm, norm_type, error_if_nonfinite)

    def full_state_dict(self, *, all_ranks: bool = False) -> dict[str, Tensor]:
        """The state dict of the unpatched model, experts gathered; collective over the EP_MP group.

        On the CPU and on data-parallel rank 0 only (``{}`` elsewhere), unless ``all_ranks``. As with ``state_dict``,
        what is not gathered may share memory with the model. ``model.save_pretrained(folder, state_dict=...)`` writes
        it as a plain checkpoint.
        """
        return Whole(self.model, self.parts, self.groups).state(all_ranks=all_ranks)

    def save_pretrained(self, folder: str | Path, *, max_shard_bytes: int = 5 << 30, **kwargs: Any) -> None:
        """Write a plain transformers checkpoint, which loads without this package; collective, rank 0 writes.

        No rank holds the whole model: one file is gathered at a time, of at least one layer and otherwise at most
        ``max_shard_bytes``. ``kwargs`` are for the model's own ``save_pretrained``.
        """
        whole = Whole(self.model, self.parts, self.groups)
        save_pretrained(whole, self._own_save, folder, max_shard_bytes=max_shard_bytes, **kwargs)

    def save_training_state(self, folder: str | Path, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Write parameters and ``optimizer``'s state with torch's distributed checkpoint; collective.

        Any other EP degree and world size can read it, and so can another way of sharing out the state."""
        self._training_state(optimizer).save(folder)

    def load_training_state(self, folder: str | Path, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Read what ``save_training_state`` wrote, in place; collective."""
        self._training_state(optimizer).load(folder)

    def _training_state(self, optimizer: torch.optim.Optimizer | None) -> TrainingState:
        return TrainingState(self.model, optimizer, self.parts, None if self.groups is None else self.groups.ep_mp)

    def _save_pretrained(
        self, own_save: Any, *args: Any, state_dict: dict[str, Tensor] | None = None, **kwargs: Any
    ) -> Any:
        """``save_pretrained`` of a patched model; refuses a state dict in which experts are missing."""
        if self.groups is not None and self.groups.layout.ep_mp > 1:
            for name, part in self.parts.items():
                if state_dict is None or self._lacks(state_dict, name, part):
                    own = part.share.experts // self.groups.layout.ep_mp
                    raise ValueError(
                        f"{name} would be saved with this rank's {own} experts alone; call"
                        " PatchedModel.save_pretrained(folder) on all ranks"
                    )
        return own_save(*args, state_dict=state_dict, **kwargs)

    def _lacks(self, state_dict: dict[str, Tensor], name: str, part: Part) -> bool:
        """Whether ``state_dict`` holds a part of a parameter, or, of those of single experts, not all."""
        if name in state_dict:
            return state_dict[name].shape != part.shape
        return part.share.expert is not None

    def metrics(self) -> Metrics:
        """Drops, load and traffic for a trainer's display; no communication."""
        asked = torch.stack([layer.asked.sum() for layer in self.layers]).sum()
        accepted = torch.stack([layer.accepted.sum() for layer in self.layers]).sum()
        return Metrics(
            drop_rate=(asked - accepted).double() / asked.clamp(min=1),
            expert_load={layer.name: layer.asked.sum(0) for layer in self.layers},
            bytes_sent=self.dispatchers.bytes_sent(),
        )

    def close(self) -> None:
        """Release dispatchers and hooks; collective, before the process groups go. The model cannot run after it.
        Idempotent."""
        self._unfollow()
        for layer in self.layers:
            layer.close()
        self.gradients.close()
        self.dispatchers.close()


def _in_step(generate: Any) -> Any:
    """transformers' ``generate``, whose ranks go on until all have finished: the others need a rank's experts."""

    @functools.wraps(generate)
    def in_step(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("synced_gpus") is None:
            kwargs["synced_gpus"] = dist.is_initialized() and dist.get_world_size() > 1
        return generate(*args, **kwargs)

    return in_step


def patch_model(
    model: nn.Module,
    config: EPConfig,
    groups: ProcessGroups | None = None,
    *,
    pattern: str | None = None,
    experts: str = "auto",
    top_k: int | None = None,
    broadcast: bool = False,
) -> PatchedModel:
    """Shard the experts of ``model`` over the EP_MP group, in place, and send their tokens through ``config``'s
    dispatcher.

    Every rank passes the whole model and keeps E/M experts of each experts module, under the same parameter names.
    Collective; call it when the model is on its device and has its weights, before DDP and before the optimizer is
    built.

    Args:
        groups: from ``ProcessGroups.create``; None for a single process.
        pattern: names of the experts modules to patch, as a shell pattern ("model.layers.1?.*"); None: all. Others stay
        replicated.
        experts: "ours" reads the weights in place; "foreign" runs each module's own code on the rows that arrive;
        "auto" is "ours" except
            where experts compute something of their own (another activation, dropout), which is said once in the log.
        top_k: K; None takes it from the module's config or the block around it.
        broadcast: give all ranks the first rank's weights. Otherwise they must be equal already, which is checked.

    Raises ``ValueError``, before anything is changed, for a model without (matching) experts modules, an unknown
    layout, settings or degrees that do not fit, or ranks that start from different weights.
    """
    check_config(config)
    one_of("experts", experts, EXPERTS)
    if config.weight_at == "input":
        raise ValueError(
            "weight_at='input' scales what experts read, but these models scale what they return; use 'hidden'"
        )
    _check_groups(config, groups)
    if isinstance(model, DistributedDataParallel):
        raise ValueError("the model is already wrapped by DDP: patch the model first, then wrap it")
    modules = _choose(model, pattern)
    layouts = {name: choose_layout(name, module, family, experts) for name, (module, family) in modules.items()}
    shapes = {name: _shape(model, name, *found, config, groups, top_k) for name, found in modules.items()}
    if config.schedule.kind == "auto":
        shapes = {name: replace(s, expert_width=_width(modules[name][0], layouts[name])) for name, s in shapes.items()}
    if config.precision == "mxfp8":
        _check_mxfp8(modules, layouts)
    _check_sharded(modules, groups)
    if groups is not None:
        broadcast_start(model, groups) if broadcast else check_same_start(model, groups)

    config = with_slots(config, list(shapes.values()), _checkpoints(model))
    dispatchers = Dispatchers(config, None if groups is None else groups.ep_mp)
    for shape in shapes.values():
        dispatchers.of(shape)
    layers = [
        PatchedExperts(name, module, family, dispatchers, shapes[name], layouts[name], groups)
        for name, (module, family) in modules.items()
    ]
    sharded = {_full(layer.name, key): p for layer in layers for key, p in layer.parameters.items()}
    ignored = set(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))
    ignored |= {f"{wrapper}{name}" for wrapper in WRAPPERS for name in sharded}
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, list(ignored))
    keep_routes(model)
    gradients = ExpertGradients(model, sharded, groups)
    gradients.checks.append(dispatchers.check)
    for layer in layers:
        layer.install(gradients)
    return PatchedModel(model, groups, dispatchers, layers, gradients)


def _checkpoints(model: nn.Module) -> bool:
    """Whether activation checkpointing is on, by transformers' newer name or its older one."""
    for name in ("is_activation_checkpointing", "is_gradient_checkpointing"):
        if hasattr(type(model), name):
            return bool(getattr(model, name))
    return False


def _check_mxfp8(modules: dict[str, tuple[nn.Module, Family]], layouts: dict[str, ExpertsLayout | None]) -> None:
    """``ValueError`` for experts that MXFP8 cannot compute: other people's code, widths that are no blocks of 32."""
    for name, layout in layouts.items():
        module = modules[name][0]
        if layout is None or not layout.grouped:
            raise ValueError(
                f"precision='mxfp8' computes the experts itself, but those of {name} ({type(module).__name__}) run"
                " their own code or lie apart in memory: use experts='ours' where it is known, or precision='bf16'"
            )
        width = _width(module, layout)
        if width is not None and width % 32:
            raise ValueError(f"precision='mxfp8' needs an expert width that is a multiple of 32; {name} has {width}")


def _width(module: nn.Module, layout: ExpertsLayout | None) -> int | None:
    """F of one expert, where our grouped MLP computes them."""
    if layout is None or not layout.grouped:
        return None
    return int(layout.tensors(module)[1].shape[1 if layout.transposed else 2])


def _full(module: str, key: str) -> str:
    return f"{module}.{key}" if module else key


def _check_groups(config: EPConfig, groups: ProcessGroups | None) -> None:
    if groups is None:
        if dist.is_initialized() and dist.get_world_size() > 1:
            raise ValueError(
                f"groups=None is for one process, but {dist.get_world_size()} are running: pass"
                " ProcessGroups.create(layout(world_size, ep=...))"
            )
        return
    if not isinstance(groups, ProcessGroups):
        raise ValueError(
            f"groups is a {type(groups).__name__}, not ProcessGroups: pass ProcessGroups.create(layout(...))"
        )
    others = {name: getattr(groups.layout, name) for name in ("tp", "pp", "cp", "etp")}
    if any(degree != 1 for degree in others.values()):
        raise ValueError(f"transformers models are sharded over experts alone here: {others} must all be 1")
    if config.dispatcher == "local" and groups.layout.ep_mp > 1:
        raise ValueError(f"dispatcher='local' keeps all experts on every rank, so ep={groups.layout.ep_mp} must be 1")


def _choose(model: nn.Module, pattern: str | None) -> dict[str, tuple[nn.Module, Family]]:
    """The modules to patch and their families, by name."""
    for name, module in model.named_modules():
        if hasattr(module, "patched_experts"):
            raise ValueError(f"{name} is already patched")
    found = find_sites(model)
    if not found:
        similar = list(similar_modules(model))
        hint = f"; these are not called like one: {'; '.join(similar)}" if similar else ""
        raise ValueError(
            f"{type(model).__name__} has no experts module, forward(hidden_states, top_k_index, top_k_weights){hint}"
        )
    chosen = {name: site for name, site in found.items() if pattern is None or fnmatchcase(name, pattern)}
    if not chosen:
        raise ValueError(f"pattern={pattern!r} matches none of the experts modules: {', '.join(found)}")
    return chosen


_said: set[str] = set()


def choose_layout(name: str, module: nn.Module, family: Family, experts: str) -> ExpertsLayout | None:
    """How our grouped MLP reads the experts of ``module``; None: their own code runs. ``experts`` as for
    ``patch_model``, whose errors this raises."""
    if experts == "foreign":
        if not family.runs_rows:
            raise ValueError(f"{type(module).__name__} cannot run on tokens with one route each: use experts='ours'")
        return None
    try:
        check_layout(name, module, family)
        return family.layout(name, module)
    except NotOurs as error:
        if experts == "ours" or not family.runs_rows:
            raise
        kind = type(module).__name__
        if kind not in _said:
            _said.add(kind)
            logger.info("%s runs its own code on the rows that arrive: %s", kind, error.why)
        return None


def _shape(
    model: nn.Module,
    name: str,
    module: nn.Module,
    family: Family,
    config: EPConfig,
    groups: ProcessGroups | None,
    top_k: int | None,
) -> Shape:
    first = next(iter(family.parameters(name, module).values()))
    if top_k is None:
        parent = model.get_submodule(name.rpartition(".")[0]) if name else None
        top_k = family.top_k(module, parent)
        if top_k is None:
            raise ValueError(
                f"{name} does not say how many routes a token has (no config.num_experts_per_tok): pass top_k="
            )
    weight_at = None if family.weight_at == config.weight_at else family.weight_at
    if weight_at is not None and config.weight_at != "hidden":
        raise ValueError(
            f"weight_at={config.weight_at!r}: {type(module).__name__} applies router weights at its {weight_at};"
            " leave weight_at at its default"
        )
    ep = 1 if groups is None else groups.layout.ep_mp
    experts, width = family.experts(module), family.width(module)
    check_shape(num_experts=experts, top_k=top_k, hidden_size=width, ep=ep)
    return Shape(experts, top_k, width, first.dtype, first.device, weight_at)


def _check_sharded(modules: dict[str, tuple[nn.Module, Family]], groups: ProcessGroups | None) -> None:
    """``ValueError`` for expert parameters that are shared, cannot be divided, or are not ready to be."""
    ep = 1 if groups is None else groups.layout.ep_mp
    owners: dict[nn.Parameter, str] = {}
    for name, (module, family) in modules.items():
        found = family.parameters(name, module)
        if any(p.grad is not None for p in found.values()):
            raise ValueError(f"{name} holds gradients: patch the model before its first backward, or set them to None")
        if any(p.is_meta for p in found.values()):
            raise ValueError(f"{name} has weights on the meta device; load or initialise the model before patching it")
        for key, parameter in found.items():
            full = _full(name, key)
            if parameter in owners:
                raise ValueError(
                    f"{full} and {owners[parameter]} are one parameter; layers that share experts are not known"
                )
            owners[parameter] = full
            family.share(module, key).check(full, ep)
