"""What the server of test workers imports, so that they need not: torch, and parts of it that others import.

Triton is left out, because it decides at its import whether it interprets. torch looks for it while it is hidden, and
is made to look again."""

import gc
import sys
from importlib import import_module

import pytest  # noqa: F401
import torch.utils._triton as torch_and_triton

import ep_plugin.heap.shm  # noqa: F401
import tests.moe  # noqa: F401

sys.modules["triton"] = None  # type: ignore[assignment]
try:
    for name in ("torch._dynamo", "torch._inductor.compile_fx", "torch.distributed.optim", "torch.distributed.fsdp"):
        import_module(name)
finally:
    del sys.modules["triton"]
for found in vars(torch_and_triton).values():
    getattr(found, "cache_clear", lambda: None)()
gc.freeze()  # collections in workers, of which tests make many, need not look at all this
