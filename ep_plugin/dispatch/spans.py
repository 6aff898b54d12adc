"""Named ranges of every phase in profiles: ``ep/<phase>/<layer>`` and, inside, ``ep/<what it does>``.

They are ``torch.profiler`` ranges, so they appear in its traces, and as NVTX ranges under
``torch.autograd.profiler.emit_nvtx``. ``emit_nvtx`` here, or ``EP_PLUGIN_NVTX=1`` in the environment, makes them NVTX
ranges without any profiler of torch, for Nsight Systems.
"""

from __future__ import annotations

import os
import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.profiler import record_function


class _NvtxRange(record_function):
    """The same range for torch's profiler and for NVTX."""

    def __enter__(self) -> Any:
        torch.cuda.nvtx.range_push(self.name)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.cuda.nvtx.range_pop()


_range: type[record_function] = record_function
_always = os.environ.get("EP_PLUGIN_SPANS", "0") not in ("", "0")
_NOTHING: AbstractContextManager[None] = nullcontext()


def span(name: str) -> AbstractContextManager[Any]:
    """A range ``ep/<name>`` around a ``with`` block; the benchmarks read the time of each phase from these."""
    if _range is not record_function or _always or _profiled():
        return _range(f"ep/{name}")
    return _NOTHING


def _profiled() -> bool:
    """Whether a profiler of torch's is on: in this thread, or one that profiles all threads."""
    return torch.autograd._profiler_enabled() or torch.autograd.profiler._is_profiler_enabled


def emit_nvtx(on: bool = True) -> None:
    """Make NVTX ranges of all spans from now on, or stop doing so. Raises ``RuntimeError`` where there is no CUDA."""
    global _range
    if on and not torch.cuda.is_available():
        raise RuntimeError("NVTX ranges need a GPU: torch.cuda.is_available() is False")
    _range = _NvtxRange if on else record_function


if os.environ.get("EP_PLUGIN_NVTX", "0") not in ("", "0"):
    if torch.cuda.is_available():
        emit_nvtx()
    else:
        warnings.warn("EP_PLUGIN_NVTX is set, but this process has no CUDA device: no NVTX ranges", stacklevel=2)
