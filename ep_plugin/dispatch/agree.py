"""Settings and shapes that must be alike on all ranks of an EP group, compared before anything is made."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from ..config import EPConfig
from ..heap import Phase
from ..watch import GroupWatch

ALIKE = ("dispatcher", "form", "heap", "transport", "weight_at", "max_tokens", "slots")


def agree(config: EPConfig, group: dist.ProcessGroup | None, **shape: Any) -> None:
    """``ValueError`` on all ranks, naming the setting, where what must be alike on them is not; collective.

    ``shape``: whatever else must be alike, by name. A rank that does not come is named after ``config.timeout_s``."""
    own = {name: getattr(config, name) for name in ALIKE}
    own |= {f"capacity.{name}": value for name, value in vars(config.capacity).items()}
    own |= {f"deepep.{name}": value for name, value in vars(config.deepep).items()}
    own |= {"launch.chunks": config.launch.chunks}
    own |= {name: value if isinstance(value, int | float | None) else str(value) for name, value in shape.items()}
    everyone = GroupWatch(group, config.timeout_s).gather(own, Phase("build", f"dispatcher {config.dispatcher!r}"))
    for name in own | {name: None for settings in everyone for name in settings}:
        values = [settings.get(name) for settings in everyone]
        if any(value != values[0] for value in values):
            said = ", ".join(f"rank {rank}: {value!r}" for rank, value in enumerate(values))
            raise ValueError(f"the ranks of the EP group were given different settings of {name}: {said}")
