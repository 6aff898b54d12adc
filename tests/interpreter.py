"""Triton's interpreter in fewer steps, for processes that import this before their first kernel.

Much of its time goes into putting its functions in place of triton.language's, again whenever a kernel calls another
function, although they stay in place until the launch ends; and into finding the NumPy type of a Triton type."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

_patch, _find_type = interpreter._patch_lang, interpreter._get_np_dtype
_patched: set[Any] = set()  # modules of triton.language, in the launch that runs
_types: dict[str, np.dtype] = {}


@functools.cache
def _modules_of(fn: Callable[..., Any]) -> set[Any]:
    return {m for m in fn.__globals__.values() if inspect.ismodule(m) and m in (tl, tl.core)}


def _patch_once(fn: Callable[..., Any]) -> Any:
    """What undoes it at the end of a launch; callers other than launches do not look at it."""
    modules = _modules_of(fn)
    if modules <= _patched:
        return SimpleNamespace(restore=lambda: None)
    launch = not _patched
    scope = _patch(fn)
    _patched.update(modules)
    if launch and scope is not None:  # Triton 3.5 undoes nothing
        undo = scope.restore

        def end() -> None:
            _patched.clear()
            undo()

        scope.restore = end
    return scope


def _known_type(dtype: Any) -> np.dtype:
    name = dtype.scalar.name
    if name not in _types:
        _types[name] = _find_type(dtype)
    return _types[name]


interpreter._patch_lang = _patch_once
interpreter._get_np_dtype = _known_type
