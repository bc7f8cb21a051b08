"""Times of the chunks of a prefill node: seconds per prompt token and per prompt, for the router.

The node measures each chunk. The longest chunks tell the seconds per token, and the shortest ones what a prompt takes
besides its tokens.
"""

from __future__ import annotations

from ..engine.pace.step_times import KEPT
from ..metadata.estimate import Estimate


class ChunkSeconds:
    """Estimates by magnitude of a chunk's tokens."""

    def __init__(self) -> None:
        self._token_s: dict[int, Estimate] = {}
        self._fixed_s: dict[int, Estimate] = {}

    def observe(self, num_tokens: int, seconds: float) -> None:
        """A chunk of `num_tokens` took so long."""
        size = num_tokens.bit_length()
        self._token_s.setdefault(size, Estimate(num_kept=KEPT)).observe(seconds / num_tokens)
        fixed_s = max(0.0, seconds - num_tokens * self.token_s)
        self._fixed_s.setdefault(size, Estimate(num_kept=KEPT)).observe(fixed_s)

    @property
    def token_s(self) -> float:
        """Seconds per token; 0: no chunk was measured."""
        return self._token_s[max(self._token_s)].mean if self._token_s else 0.0

    @property
    def fixed_s(self) -> float:
        """Seconds per prompt, besides its tokens."""
        return self._fixed_s[min(self._fixed_s)].mean if self._fixed_s else 0.0
