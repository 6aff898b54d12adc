"""Settings and shapes that must be alike on all ranks of an EP group, compared before anything is made."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import torch.distributed as dist

from ..config import EPConfig
from ..heap import Phase
from ..watch import GroupWatch
from .tuned import read_table

MAY_DIFFER = ("timeout_s", "diagnostic_fill", "launch.put", "launch.fan_out", "launch.reduce", "launch.sum")


def agree(config: EPConfig, group: dist.ProcessGroup | None, **shape: Any) -> None:
    """``ValueError`` on all ranks, naming the setting, where what must be alike on them is not; collective.

    ``shape``: whatever else must be alike, by name. A rank that does not come is named after ``config.timeout_s``."""
    own = {name: value for name, value in _flat(config) if name not in MAY_DIFFER}
    if config.launch.table is not None:
        own["launch.table"] = read_table(config.launch.table)  # what it says, wherever it lies
    own |= {name: value if isinstance(value, int) else str(value) for name, value in shape.items()}
    everyone = GroupWatch(group, config.timeout_s).gather(own, Phase("build", f"dispatcher {config.dispatcher!r}"))
    for name in own | {name: None for settings in everyone for name in settings}:
        values = [settings.get(name) for settings in everyone]
        if any(value != values[0] for value in values):
            said = ", ".join(f"rank {rank}: {value!r}" for rank, value in enumerate(values))
            raise ValueError(f"the ranks of the EP group were given different settings of {name}: {said}")


def _flat(settings: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The settings of a dataclass and of those inside it, by dotted name."""
    for field in fields(settings):
        value = getattr(settings, field.name)
        if is_dataclass(value):
            yield from _flat(value, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", value
