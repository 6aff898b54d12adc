"""What the real DeepEP was given and gave back, in a file that tests on CPU can run against.

A recording is an ``.npz`` of named arrays. ``meta`` is JSON: versions, and for every case its name and settings. The
calls of rank r in case c are ``c/r/0``, ``c/r/1``, …, each with ``/call`` (JSON: which call, its plain arguments, the
lengths of buffers whose tails nobody wrote) and ``/in/<name>``, ``/out/<name>`` for tensors. bfloat16 is stored as
int16. Tails are left out; ``Replayed`` fills them with garbage.

Legend: T tokens of a rank, K routes per token, N lines of metadata, R rows received, RB rows that buffers hold.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ep_plugin.dispatch.deepep_buffer import HANDLE_NUMBERS, HANDLE_TENSORS
from tests import deepep_standin

CASES: dict[str, dict[str, Any]] = {  # what ``Problem`` takes, and what more the settings are
    "ragged": dict(tokens=(6, 3), routes="distinct"),
    "empty rank": dict(tokens=(0, 5), routes="any", seed=1),
    "one rank": dict(tokens=(4, 4), routes="to_last_rank", seed=2),
    "dropped": dict(tokens=(7, 2), routes="distinct", policy="rank", factor=0.7, seed=3),
    "weighted sum": dict(tokens=(5, 4), routes="any", seed=4),
}
SHAPE = dict(num_experts=8, top_k=3, hidden=256, width=16)
MOST = 8  # tokens a rank


def to_array(tensor: Tensor) -> np.ndarray:
    tensor = tensor.detach().cpu().contiguous()
    return (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def same(want: Tensor, got: Tensor) -> bool:
    """Equal; float32 up to the order of a sum."""
    if want.dtype != got.dtype or want.shape != got.shape:
        return False
    return torch.allclose(want, got, 1e-5, 1e-5) if want.dtype == torch.float32 else torch.equal(want, got)


class Recording:
    """Calls of all cases by rank, in memory; every rank has its own until ``save``."""

    def __init__(self) -> None:
        self.arrays: dict[str, np.ndarray] = {}
        self.meta: dict[str, Any] = {"cases": list(CASES)}

    def add(self, prefix: str, call: dict[str, Any], given: dict[str, Tensor], got: dict[str, Tensor | None]) -> None:
        self.arrays[f"{prefix}/call"] = np.array(json.dumps(call))
        for kind, tensors in (("in", given), ("out", got)):
            for name, tensor in tensors.items():
                if tensor is not None:
                    self.arrays[f"{prefix}/{kind}/{name}"] = to_array(tensor)
                    if tensor.dtype == torch.bfloat16:
                        self.arrays[f"{prefix}/{kind}/{name}/bfloat16"] = np.array(True)

    def save(self, path: Path) -> None:
        np.savez_compressed(path, meta=np.array(json.dumps(self.meta)), **self.arrays)  # type: ignore[arg-type]

    @staticmethod
    def load(path: Path) -> Recording:
        found = Recording()
        with np.load(path) as file:
            found.arrays = {name: file[name] for name in file.files}
        found.meta = json.loads(str(found.arrays.pop("meta")))
        return found

    def tensor(self, name: str) -> Tensor | None:
        if name not in self.arrays:
            return None
        tensor = torch.from_numpy(self.arrays[name].copy())
        return tensor.view(torch.bfloat16) if f"{name}/bfloat16" in self.arrays else tensor

    def call(self, prefix: str) -> dict[str, Any] | None:
        name = f"{prefix}/call"
        return json.loads(str(self.arrays[name])) if name in self.arrays else None


class Recorded:
    """``deep_ep`` on a GPU whose buffers write down all that passes; stands where the module would."""

    def __init__(self, library: Any, recording: Recording, rank: int) -> None:
        self.library, self.recording, self.rank = library, recording, rank
        self.__name__, self.__version__ = library.__name__, library.__version__
        self.topk_idx_t, self.EPHandle = library.topk_idx_t, library.EPHandle
        self.case, self.number = "", 0

    def begin(self, case: str) -> None:
        """The calls from now on belong to ``case``; "" for none."""
        self.case, self.number = case, 0

    def ElasticBuffer(self, *args: Any, **kwargs: Any) -> Any:
        buffer = self.library.ElasticBuffer(*args, **kwargs)
        dispatch, combine = buffer.dispatch, buffer.combine

        def recorded_dispatch(x: Tensor, **given: Any) -> Any:
            result = dispatch(x, **given)
            rows, _, weights, handle, _ = result
            # The line and row counts on the host: a recording may wait.
            lines = int(handle.psum_num_recv_tokens_per_scaleup_rank[-1])
            valid = int(handle.psum_num_recv_tokens_per_expert[-1])
            got = {"rows": rows[:valid], "weights": None if weights is None else weights[:valid]}
            if given.get("handle") is None:
                got |= {name: getattr(handle, name) for name in HANDLE_TENSORS}
                got["recv_src_metadata"] = handle.recv_src_metadata[:lines]
            numbers = {name: int(getattr(handle, name)) for name in HANDLE_NUMBERS}
            self._add("dispatch", dict(x=x, **given), got, dict(held=rows.shape[0], **numbers))
            return result

        def recorded_combine(rows: Tensor, handle: Any, **given: Any) -> Any:
            out, scalars, event = result = combine(rows, handle, **given)
            valid = int(handle.psum_num_recv_tokens_per_expert[-1])
            weights = given.pop("topk_weights", None)
            tensors = dict(x=rows[:valid], topk_weights=None if weights is None else weights[:valid])
            self._add("combine", dict(**tensors, **given), dict(out=out, scalars=scalars), {})
            return result

        buffer.dispatch, buffer.combine = recorded_dispatch, recorded_combine
        return buffer

    def _add(self, name: str, given: dict[str, Any], got: dict[str, Tensor | None], more: dict[str, Any]) -> None:
        if not self.case:
            return
        tensors = {key: value for key, value in given.items() if isinstance(value, Tensor)}
        plain = {key: value for key, value in given.items() if isinstance(value, int | bool | None)}
        plain["cached"] = given.get("handle") is not None
        call = {"name": name, "arguments": plain, **more}
        self.recording.add(f"{self.case}/{self.rank}/{self.number}", call, tensors, got)
        self.number += 1


class Replayed(Recorded):
    """``deep_ep`` as it answered: a call with other arguments than were recorded is an error."""

    def __init__(self, recording: Recording, rank: int) -> None:
        super().__init__(deepep_standin, recording, rank)

    def ElasticBuffer(self, *args: Any, **kwargs: Any) -> Any:
        buffer = deepep_standin.ElasticBuffer(*args, **kwargs)
        own = buffer.dispatch, buffer.combine

        def replayed_dispatch(x: Tensor, **given: Any) -> Any:
            if not self.case:
                return own[0](x, **given)
            prefix, call = self._next("dispatch", dict(x=x, **given))
            rows = self._padded(prefix, "rows", call["held"])
            handle = given.get("handle") or self._handle(prefix, call, given)
            return rows, None, self._padded(prefix, "weights", call["held"]), handle, None

        def replayed_combine(rows: Tensor, handle: Any, **given: Any) -> Any:
            if not self.case:
                return own[1](rows, handle, **given)
            valid = int(handle.psum_num_recv_tokens_per_expert[-1])
            weights = given.pop("topk_weights", None)
            weights = None if weights is None else weights[:valid]
            prefix, _ = self._next("combine", dict(x=rows[:valid], topk_weights=weights, handle=handle, **given))
            return self.recording.tensor(f"{prefix}/out/out"), self.recording.tensor(f"{prefix}/out/scalars"), None

        buffer.dispatch, buffer.combine = replayed_dispatch, replayed_combine
        return buffer

    def _next(self, name: str, given: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """The recorded call that this must be."""
        prefix = f"{self.case}/{self.rank}/{self.number}"
        self.number += 1
        call = self.recording.call(prefix)
        if call is None or call["name"] != name:
            raise AssertionError(f"{prefix}: {name} was called, recorded is {call}")
        for key, value in given.items():
            if isinstance(value, Tensor):
                want = self.recording.tensor(f"{prefix}/in/{key}")
                if want is None or not same(want, value):
                    raise AssertionError(f"{prefix}: {key} differs from what was recorded: {value} and {want}")
            elif isinstance(value, int | bool) and call["arguments"].get(key) != value:
                raise AssertionError(f"{prefix}: {key}={value}, recorded is {call['arguments'].get(key)}")
        return prefix, call

    def _padded(self, prefix: str, name: str, held: int) -> Tensor | None:
        valid = self.recording.tensor(f"{prefix}/out/{name}")
        if valid is None:
            return None
        tail = torch.full((held - valid.shape[0], *valid.shape[1:]), float("nan")).to(valid.dtype)
        return torch.cat([valid, tail])

    def _handle(self, prefix: str, call: dict[str, Any], given: dict[str, Any]) -> Any:
        tensors = {name: self.recording.tensor(f"{prefix}/out/{name}") for name in HANDLE_TENSORS}
        lines = tensors["recv_src_metadata"]
        assert lines is not None
        tail = torch.full((call["num_recv_tokens"] - lines.shape[0], lines.shape[1]), deepep_standin.GARBAGE)
        tensors["recv_src_metadata"] = torch.cat([lines, tail.to(lines.dtype)])
        numbers = {name: call[name] for name in HANDLE_NUMBERS}
        return self.EPHandle(
            **tensors, **numbers, do_expand=True, num_experts=given["num_experts"], num_sms=given["num_sms"],
            expert_alignment=given["expert_alignment"], num_recv_tokens_per_expert_list=[],
        )  # fmt: skip
