"""Seconds of rounds without a chunk beside them, by draft steps and magnitude of the batch, as they were measured."""

from __future__ import annotations

from ..engine.pace.step_times import KEPT


class RoundSeconds:
    """The last measurements of each kind. The least of KEPT counts: a disturbance only adds to a time."""

    def __init__(self, seconds: float) -> None:
        """`seconds`: of a round of one sequence without drafts, measured at the start."""
        self._lasts: dict[tuple[int, int], list[float]] = {(0, 1): [seconds]}

    def observe(self, num_seqs: int, num_steps: int, seconds: float) -> None:
        """A round of `num_seqs` sequences with `num_steps` draft steps took so long."""
        lasts = self._lasts.setdefault((num_steps, num_seqs.bit_length()), [])
        lasts.append(seconds)
        del lasts[:-KEPT]

    def expected(self, num_seqs: int, num_steps: int) -> float:
        """Return the seconds of such a round. A kind that was never measured takes those of the kind most like it."""
        kind = (num_steps, num_seqs.bit_length())
        like = min(self._lasts, key=lambda each: (abs(each[0] - kind[0]), abs(each[1] - kind[1]), each))
        return min(self._lasts[like])
