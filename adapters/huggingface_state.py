"""Training state in torch's distributed checkpoint format, which any other EP degree can read.

A sharded expert parameter and the optimizer's tensors of its shape are written as parts of the whole tensor; what all
ranks hold alike is written once. On loading every rank reads what it stores now, so the degrees, the world size and the
way in which the optimizer's state is spread over ranks may all be others than when it was written.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from .huggingface_gather import Part
from .huggingface_optimizer import parts_of

TAIL = "#tail"  # after the key of the rows that belong to no expert
GROUPS = "optimizer.groups"  # the key of the optimizer's parameter groups: names and hyperparameters


@dataclass(frozen=True)
class TrainingState:
    """The parameters and buffers of ``model`` (unless its ``weights`` are elsewhere) and the state of ``optimizer``
    (None: the model alone).

    ``parts`` says of which parameters the experts are divided over ``ep_group`` (None: of none)."""

    model: nn.Module
    optimizer: torch.optim.Optimizer | None = None
    parts: Mapping[str, Part] = field(default_factory=dict)
    ep_group: dist.ProcessGroup | None = None
    weights: bool = True

    def save(self, folder: str | Path) -> None:
        """Write to ``folder``; collective over WORLD."""
        state: dict[str, Any] = self._model()
        for name, key, tensor in self._optimizer():
            state |= self._pieces(f"optimizer.{name}.{key}", name, tensor)
        if self.optimizer is not None:
            state[GROUPS] = self._groups()
        dcp.save(state, checkpoint_id=str(folder))

    def load(self, folder: str | Path) -> None:
        """Read what ``save`` wrote, in place; collective over WORLD.

        Raises ``ValueError`` where ``folder`` holds no such state, or parameters that share a group of the optimizer
        had other settings each."""
        if not Path(folder, ".metadata").is_file():
            raise ValueError(f"{str(folder)!r} holds no training state: there is no .metadata in it")
        written = dcp.FileSystemReader(str(folder)).read_metadata().state_dict_metadata
        state: dict[str, Any] = self._model()
        missing = [name for name in state if name not in written]
        if missing:
            raise ValueError(f"the state in {str(folder)!r} lacks {len(missing)} tensors, {missing[0]} first")
        wanted = {} if self.optimizer is None else self._wanted(written)
        for (name, key), tensor in wanted.items():
            state |= self._pieces(f"optimizer.{name}.{key}", name, tensor)
        if self.optimizer is not None:
            if GROUPS not in written:
                raise ValueError(f"{str(folder)!r} was written without an optimizer's state")
            state[GROUPS] = None
        dcp.load(state, checkpoint_id=str(folder))
        if self.optimizer is not None:
            self._put(wanted, state[GROUPS])

    def _model(self) -> dict[str, Any]:
        state: dict[str, Any] = {}
        for name, tensor in self.model.state_dict().items() if self.weights else ():
            state |= self._pieces(f"model.{name}", name, tensor.detach())
        return state

    def _names(self) -> dict[Tensor, str]:
        return {parameter: name for name, parameter in self.model.named_parameters()}

    def _optimizer(self) -> Iterator[tuple[str, str, Tensor]]:
        """Parameter's name, key and tensor of the state that this rank holds."""
        names = self._names()
        for part in () if self.optimizer is None else parts_of(self.optimizer):
            for parameter, state in part.state.items():
                for key, tensor in state.items():
                    name = names[parameter]
                    if not isinstance(tensor, Tensor):
                        raise ValueError(
                            f"the optimizer keeps {key}={tensor!r} for {name}; only tensors are known here as its state"
                        )
                    yield name, key, tensor

    def _wanted(self, written: Mapping[str, Any]) -> dict[tuple[str, str], Tensor]:
        """Memory for the state of the parameters that this rank's optimizer steps, by parameter's name and key."""
        assert self.optimizer is not None
        names, keys = self._names(), defaultdict(list)
        for full in written:
            if full.startswith("optimizer.") and not full.endswith(TAIL):
                name, _, key = full.removeprefix("optimizer.").rpartition(".")
                keys[name].append(key)
        wanted: dict[tuple[str, str], Tensor] = {}
        for parameter in (
            p for part in parts_of(self.optimizer) for group in part.param_groups for p in group["params"]
        ):
            name = names[parameter]
            shape = next(iter(self._pieces("", name, parameter.detach()).values())).shape
            for key in keys[name]:
                about = written[f"optimizer.{name}.{key}"]
                if not isinstance(about, TensorStorageMetadata):
                    raise ValueError(f"optimizer.{name}.{key} is not a tensor in this checkpoint")
                whole, dtype = about.size == shape, about.properties.dtype
                like = parameter.detach()
                wanted[name, key] = (
                    torch.zeros_like(like, dtype=dtype) if whole else torch.zeros(about.size, dtype=dtype)
                )
        return wanted

    def _put(self, wanted: dict[tuple[str, str], Tensor], groups: list[tuple[list[str], dict[str, Any]]]) -> None:
        assert self.optimizer is not None
        names, states = self._names(), defaultdict[str, dict[str, Tensor]](dict)
        for (name, key), tensor in wanted.items():
            states[name][key] = tensor
        for part in parts_of(self.optimizer):
            own = part.state_dict()
            parameters = [p for group in part.param_groups for p in group["params"]]
            own["state"] = {index: states[names[p]] for index, p in enumerate(parameters) if names[p] in states}
            part.load_state_dict(own)
        settings = {name: given for members, given in groups for name in members}
        for group in self.optimizer.param_groups:
            # Not of all: where each expert has parameters of its own, rank 0 wrote the names of its experts.
            found = [settings[names[p]] for p in group["params"] if names[p] in settings]
            if not found or any(other != found[0] for other in found):
                raise ValueError(
                    f"the parameters in the optimizer's group with {names[group['params'][0]]} had"
                    f" {'different' if found else 'no'} settings when the state was written: group them alike"
                )
            group.update(found[0])

    def _groups(self) -> list[tuple[list[str], dict[str, Any]]]:
        """Of every group of the optimizer the parameters' names and the settings."""
        assert self.optimizer is not None
        names = self._names()
        return [
            ([names[p] for p in group["params"]], {key: value for key, value in group.items() if key != "params"})
            for group in self.optimizer.param_groups
        ]

    def _pieces(self, key: str, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """What to write for ``tensor``, which belongs to parameter ``name``, under ``key``.

        A part of a divided parameter, or a tensor of its shape, is a piece of the whole one; its rows of no expert are
        another piece. Everything else is written as it is."""
        part = self.parts.get(name)
        if part is None or part.share.expert is not None or self.ep_group is None or isinstance(tensor, DTensor):
            return {key: tensor}
        share, world = part.share, dist.get_world_size(self.ep_group)
        end = share.experts // world * share.rows
        if tensor.shape != (end + share.tail // world, *part.shape[1:]):
            return {key: tensor}
        mesh = DeviceMesh.from_group(self.ep_group, tensor.device.type)
        pieces = {key: tensor[:end]} | ({key + TAIL: tensor[end:]} if share.tail else {})
        return {k: DTensor.from_local(piece, mesh, [Shard(0)], run_check=False) for k, piece in pieces.items()}
