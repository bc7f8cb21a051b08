"""The chunk rate of a prefill node: seconds per prompt token and per prompt, for the router.

The node measures each chunk. By magnitude of the chunk, the least of the last KEPT measurements counts, since a
disturbance only adds to a time. The longest chunks tell the seconds per token, and the shortest ones what a prompt
takes besides its tokens.
"""

from __future__ import annotations

from ..engine.pace.step_times import KEPT


class ChunkRate:
    """The last measurements of one node."""

    def __init__(self) -> None:
        self._lasts: dict[int, list[tuple[float, int]]] = {}  # (seconds, tokens), by magnitude of the tokens

    def observe(self, num_tokens: int, seconds: float) -> None:
        """A chunk of `num_tokens` took so long."""
        lasts = self._lasts.setdefault(num_tokens.bit_length(), [])
        lasts.append((seconds, num_tokens))
        del lasts[:-KEPT]

    @property
    def token_s(self) -> float:
        """Seconds per token; 0: no chunk was measured."""
        if not self._lasts:
            return 0.0
        return min(seconds / num_tokens for seconds, num_tokens in self._lasts[max(self._lasts)])

    @property
    def fixed_s(self) -> float:
        """Seconds per prompt, besides its tokens."""
        if not self._lasts:
            return 0.0
        return min(
            max(0.0, seconds - num_tokens * self.token_s) for seconds, num_tokens in self._lasts[min(self._lasts)]
        )
