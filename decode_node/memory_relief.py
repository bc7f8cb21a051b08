"""Memory relief: takes work off a round or a chunk for which the device has no memory.

If a round had no memory, the node tries again without drafts. If it has none for that either, the sequence that asks
for most ends with an error, and the node tries again with the others. The README says why the others continue exactly.
"""

from __future__ import annotations

from ..engine.pace.draft_length import DraftShape
from ..engine.rounds.rounds import Rounds
from ..metadata.errors import OutOfMemory
from .reservations import Fail
from .scheduler import DecodeScheduler, StepPlan
from .sequence import Sequence


class MemoryRelief:
    """Ends sequences for which there is no memory, and makes the others ready for another try."""

    def __init__(self, rounds: Rounds, scheduler: DecodeScheduler, fail: Fail) -> None:
        self._rounds, self._scheduler, self._fail = rounds, scheduler, fail

    def of_chunk(self, plan: StepPlan, error: OutOfMemory) -> None:
        """End the sequence that asks for most of a chunk that had no memory. The next step tries again."""
        rows = zip(plan.sequences, plan.rows, strict=True)
        largest, _ = max(rows, key=lambda each: (each[1].num_scored, len(each[1].input_ids), each[0].order))
        self.end(largest, error)

    def of_round(self, sequences: list[Sequence], shape: DraftShape, error: OutOfMemory) -> None:
        """Take work off a round that had no memory: its drafts, or else one sequence, which ends with an error. The
        others continue from their tokens, and draft no more."""
        is_drafting = shape.num_steps > 0 and not all(sequence.is_left_behind for sequence in sequences)
        if sequences and not is_drafting:
            largest = max(sequences, key=_demand)
            sequences.remove(largest)
            self.end(largest, error)
        for sequence in sequences:
            try:
                self._rounds.reload(sequence)
            except OutOfMemory as no_slot:
                self.end(sequence, no_slot)

    def end(self, sequence: Sequence, error: OutOfMemory) -> None:
        """End a sequence with an error. Another node, or this one later, may have the memory."""
        self._scheduler.finish(sequence)
        self._fail(sequence.router, sequence.unit, error.code, str(error), is_retryable=True)


def _demand(sequence: Sequence) -> tuple[bool, bool, bool, int]:
    """Return a key that is largest for the sequence that asks most of a round's memory. One row that asks for
    log-probabilities, penalties or filters makes the round compute them for all. Of equals, the youngest is largest."""
    needs = sequence.sampling.needs
    return needs.num_logprobs is not None, needs.processes, needs.ranks or needs.cuts, sequence.order
