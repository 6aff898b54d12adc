"""What a rank says of the step it is in, so that ranks in different steps are told so and do not use each other's rows.

Exchanged records start with a stamp: the number of the exchange, its operation, and the end of the layer's name."""

from __future__ import annotations

import struct
from collections.abc import Sequence

OPERATIONS = ("plan", "dispatch", "combine", "combine backward", "dispatch backward")
NAME_BYTES = 32  # of a layer's name
STAMP_WORDS = 2 + NAME_BYTES // 8


def stamp(number: int, operation: str, layer: str) -> tuple[int, ...]:
    """``STAMP_WORDS`` int64 words that name exchange ``number``, one of ``OPERATIONS`` and the layer."""
    name = layer.encode()[-NAME_BYTES:].ljust(NAME_BYTES)
    return (number, OPERATIONS.index(operation), *struct.unpack(f"{NAME_BYTES // 8}q", name))


def check_stamps(stamps: Sequence[Sequence[int]], rank: int, number: int, operation: str, layer: str) -> None:
    """``RuntimeError`` naming both ranks and steps where another rank's stamp is not that of ``rank``."""
    mine = stamp(number, operation, layer)
    for other, said in enumerate(stamps):
        if tuple(said) != mine:
            its_number, its_operation, *words = said
            name = struct.pack(f"{NAME_BYTES // 8}q", *words).decode(errors="replace").rstrip()
            raise RuntimeError(
                f"EP ranks disagree: rank {rank} is in {operation} of layer {layer!r} (exchange {number}), rank"
                f" {other} is in {OPERATIONS[its_operation]} of layer {name!r} (exchange {its_number})."
                " All ranks of an EP group must run the same layers in the same order"
            )
