"""A control region reached through NVSHMEM's device functions, for the checks of kernel_control_cases."""

from __future__ import annotations

import torch
from torch import Tensor

from ep_plugin.kernels.nvshmem_sync import LibrarySignals
from tests.kernel_control_cases import ABORT, CODE, MAIL_WORDS, SIGNALS, Control, control_words, sync

__all__ = ["ABORT", "CODE", "SIGNALS", "LibraryControl", "control_words", "sync"]


class LibraryControl(Control):
    """``Control`` whose signals, records and waits are those of ``transport=device``."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.library = LibrarySignals(self.rank)

    @staticmethod
    def of_all(world: int, device: str | torch.device, pinned: bool = False) -> list[LibraryControl]:  # type: ignore[override]
        plain = _of_all(world, device, pinned)
        return [LibraryControl(c.words, c.base, c.rank, c.status) for c in plain]

    def post(self) -> None:
        self.library.post(self.counter, self.at(SIGNALS + self.rank), self.ticket)

    def send(self, record: Tensor) -> None:
        mailbox = self.at(SIGNALS + self.world + self.rank * MAIL_WORDS)
        stride = 8 * self.world * MAIL_WORDS
        self.library.send(record, self.counter, mailbox, stride, self.at(SIGNALS + self.rank), self.ticket)

    def wait(self, timeout_s: float = 30.0) -> None:
        self.library.wait(self.ticket, self.watch(timeout_s))

    def receive(self, length: int, timeout_s: float = 30.0) -> Tensor:
        records = torch.full((self.world, length), 12345, device=self.words.device)
        self.library.receive(self.ticket, self.counter, self.mail, records, self.watch(timeout_s))
        return records


_of_all = Control.of_all
