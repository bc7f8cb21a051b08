"""The bound on gaps between tokens: how many tokens of local prompts a step of the simulated decode node computes."""

from __future__ import annotations

from .costs import Costs, Piece

ROUNDS = 1.5  # of the node's own round, if no bound is given
SMALLEST = 16  # tokens; a smaller chunk takes as long


class GapBound:
    """The largest chunks that keep a step within the bound."""

    def __init__(self, costs: Costs, chunk_tokens: int, max_gap_s: float | None) -> None:
        """`chunk_tokens`: the largest chunk at all. `max_gap_s` None: ROUNDS of the present round."""
        self._costs, self._chunk_tokens, self._max_gap_s = costs, chunk_tokens, max_gap_s

    def largest(self, batch: int, context_tokens: int, history: int) -> int:
        """Return the most tokens behind `history` that fit beside a round; 0 if even SMALLEST ones do not fit. Without
        a round that is the largest chunk."""
        if not batch:
            return self._chunk_tokens
        round_s = self._costs.round_s(batch, context_tokens)
        spare_s = (ROUNDS * round_s if self._max_gap_s is None else self._max_gap_s) - round_s

        def fits(num_tokens: int) -> bool:
            return self._costs.beside_s([Piece(num_tokens, history)], batch) <= spare_s

        if not fits(SMALLEST):
            return 0
        low, high = SMALLEST, self._chunk_tokens + 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low
