"""How many payload slots a training schedule needs: what to set ``EPConfig.slots`` to before training.

An MoE layer holds one slot from its forward until its backward is done. Under activation checkpointing it gives the
slot back at once; the recompute takes one for every MoE layer of the checkpointed region together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .config import one_of

SCHEDULES = ("gpipe", "1f1b", "interleaved")
DEFAULT_SLOTS = 4  # of rowwise on GPUs, where nothing else is known


def slots_for(
    schedule: str,
    *,
    layers: int | Sequence[int],
    microbatches: int = 1,
    stages: int = 1,
    rank: int = 0,
    checkpointed: int = 0,
) -> int:
    """Payload slots that pipeline rank ``rank`` of ``stages`` ranks needs; the same on all ranks of its EP group.

    ``schedule``: ``gpipe`` (all forwards, then all backwards), ``1f1b``, or ``interleaved`` (1F1B over several model
    chunks of every rank). ``layers``: MoE layers of this rank outside checkpointed regions, one number per model chunk.
    ``checkpointed``: MoE layers of its largest checkpointed region. ``microbatches`` of one training step.

    With equal chunks this is forwards in flight · layers + checkpointed, and of forwards there are in flight at most,
    for n microbatches, P stages and V chunks,

        gpipe         n·V
        1f1b          min(n, P − rank)
        interleaved   min(n·V, (V − 1)·m + 2·(P − 1 − rank) + 1),   m = n / max(1, ⌊n / P⌋)

    (Narayanan et al., arXiv:2104.04473, sections 2.2.1 and 2.2.2; m microbatches run through one chunk before the next,
    P where P divides n.) ``torch.distributed.pipelining`` runs these, and Megatron-Core with its default
    ``microbatch_group_size_per_vp_stage``. Where every layer is checkpointed, none waits: the answer is
    ``checkpointed`` under every schedule. Where a region's forward runs before other layers of its chunk, one
    microbatch's slots of those are free again at its recompute, so fewer may do.

    Raises ``ValueError`` for numbers that make no schedule.
    """
    one_of("schedule", schedule, SCHEDULES)
    chunks = [layers] if isinstance(layers, int) else list(layers)
    if not chunks or min(chunks) < 0 or checkpointed < 0:
        raise ValueError(f"layers={layers}, checkpointed={checkpointed} must count MoE layers, per chunk at least 0")
    if microbatches < 1 or not 0 <= rank < stages:
        raise ValueError(f"microbatches={microbatches}, stages={stages}, rank={rank}: rank must be in [0, stages)")
    if schedule == "1f1b" and len(chunks) > 1:
        raise ValueError(f"layers={layers}: 1f1b has one chunk a rank; use schedule='interleaved'")
    held = peak = 0
    for change in _changes(schedule, chunks, microbatches, stages, rank):
        held += change
        peak = max(peak, held)
    return peak + checkpointed


def _changes(schedule: str, chunks: list[int], microbatches: int, stages: int, rank: int) -> Iterator[int]:
    """Slots taken by every forward (> 0) and given back by every backward (< 0), in the order they run."""
    total, last, together = microbatches * len(chunks), len(chunks) - 1, microbatches
    if schedule == "gpipe":
        ahead = total
    elif schedule == "1f1b":
        ahead = stages - 1 - rank
    else:
        rounds = max(1, microbatches // stages)
        if microbatches % rounds:
            raise ValueError(
                f"microbatches={microbatches} do not divide into the {rounds} rounds of interleaved 1F1B over"
                f" {stages} stages"
            )
        together = microbatches // rounds
        ahead = last * together + 2 * (stages - 1 - rank)
    ahead = min(ahead, total)  # forwards that run before the first one that a backward follows
    for step in range(total + ahead):
        if step < total:
            yield chunks[step // together % len(chunks)]
        if step >= ahead:
            yield -chunks[last - (step - ahead) // together % len(chunks)]
