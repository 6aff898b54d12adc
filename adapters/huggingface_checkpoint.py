"""A plain transformers checkpoint out of a model whose experts, and perhaps dense layers, are sharded.

What is written loads in transformers without this package, whatever the degrees were. One file's tensors are gathered
at a time, so no rank holds the whole model.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..topology import ProcessGroups
from .huggingface_gather import Part, gather

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclass(frozen=True)
class Whole:
    """The unpatched model's state dict, of which ``model`` holds this rank's part: ``parts`` says of which parameters
    the experts are divided over ``groups``. FSDP2's DTensors are gathered over their own mesh."""

    model: nn.Module
    parts: dict[str, Part]
    groups: ProcessGroups | None

    @property
    def leads(self) -> bool:
        """Whether this is data-parallel rank 0."""
        return self.groups is None or dist.get_rank(self.groups.dp) == 0

    def names(self) -> list[str]:
        """All its names, on every rank alike, also where each expert has parameters of its own."""
        own = list(self.model.state_dict())
        return own + [name for name in self.parts if name not in set(own)]

    def state(self, names: list[str] | None = None, *, all_ranks: bool = False) -> dict[str, Tensor]:
        """Its tensors ``names`` (None: all) on the CPU of data-parallel rank 0, ``{}`` elsewhere, or on ``all_ranks``.

        Collective over DP."""
        own = self.model.state_dict()
        wanted = self.names() if names is None else names
        state = {name: _full(own[name].detach()) for name in wanted if name in own}
        return gather(state, {n: self.parts[n] for n in wanted if n in self.parts}, self.groups, all_ranks)

    def sizes(self) -> dict[str, int]:
        """Bytes by name."""
        own = self.model.state_dict()
        width = max((own[name].element_size() for name in self.parts if name in own), default=0)
        sizes = {name: own[name].numel() * own[name].element_size() for name in own}
        return sizes | {name: part.shape.numel() * width for name, part in self.parts.items()}


def save_pretrained(
    whole: Whole, save: Callable[..., None], folder: str | Path, *, max_shard_bytes: int, **kwargs: Any
) -> None:
    """Write a checkpoint to ``folder`` by ``save``, transformers' own method of the model, file by file.

    Collective over DP; rank 0 writes. It holds one file's tensors at a time: a layer, or as many as fit into
    ``max_shard_bytes``. ``kwargs`` are for ``save``. Raises ``ValueError`` for a model with LoRA layers, whose names
    transformers would not know again.
    """
    folder = Path(folder)
    adapters = [name for name in whole.names() if ".lora_" in name or ".base_layer." in name]
    if adapters:
        raise ValueError(
            f"the model holds LoRA layers ({adapters[0]}): save them with the PEFT model's save_pretrained on rank 0,"
            " or merge_and_unload them first"
        )
    files = list(_files(whole, max_shard_bytes))
    written: dict[str, str] = {}
    total = 0
    for number, names in enumerate(files, 1):
        state = whole.state(names)
        if whole.leads:
            file = WEIGHTS if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
            scratch = folder / ".part"
            save(scratch, state_dict=state, max_shard_size="1000TB", **kwargs)
            written |= dict.fromkeys(_keys(scratch / WEIGHTS), file)
            total += (scratch / WEIGHTS).stat().st_size
            for made in scratch.iterdir():
                made.replace(folder / (file if made.name == WEIGHTS else made.name))
            shutil.rmtree(scratch)
    if whole.leads:
        _clean(folder, set(written.values()))
        if len(files) > 1:
            index = {"metadata": {"total_size": total}, "weight_map": written}
            (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    if whole.groups is not None:
        dist.barrier(whole.groups.dp)


def _full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _files(whole: Whole, limit: int) -> Iterator[list[str]]:
    """The names of each file. A layer stays together, because transformers makes several of its tensors into one or one
    into several; so does what is in no layer, among which weights may be tied."""
    layers: dict[str, list[str]] = {}
    for name in whole.names():
        parts = name.split(".")
        layer = next((i for i, part in enumerate(parts) if part.isdigit()), -1)
        layers.setdefault(".".join(parts[: layer + 1]), []).append(name)
    sizes = whole.sizes()
    file: list[str] = []
    held = 0
    for names in layers.values():
        size = sum(sizes[name] for name in names)
        if file and held + size > limit:
            yield file
            file, held = [], 0
        file, held = file + names, held + size
    yield file


def _keys(file: Path) -> list[str]:
    from safetensors import safe_open

    with safe_open(file, "pt") as opened:
        return list(opened.keys())


def _clean(folder: Path, files: set[str]) -> None:
    """Remove weights of an earlier save, which transformers would read instead."""
    for old in [*folder.glob("model-*-of-*.safetensors"), folder / WEIGHTS, folder / INDEX]:
        if old.name not in files:
            old.unlink(missing_ok=True)
