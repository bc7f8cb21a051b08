"""The length of a chunk, that is how many prompt tokens a step of a prefill node computes, and the seconds that chunks
take, for the router.

A chunk has at most `most` tokens (`--chunk`). Two rules make it shorter:

- Sharing. All prompts of a chunk get their first tokens when it ends. Up to some size, a longer chunk computes more
  tokens per second, so all prompts that share it gain. Beyond this size a chunk takes as long as its prompts one after
  the other: sharing it would delay the first of them and help none.
- Tails. The last tokens of a long prompt are a chunk of their own if no other prompt is here. The decode node pulls the
  pages before the tail while the tail is computed. So it has little left to pull when the first token is there, and the
  second token comes sooner. Without a tail all pages of a chunk are offered at once, with the first token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from ..engine.pace.step_times import KEPT
from ..metadata.estimate import Estimate

LEAST_TAIL = 512  # tokens; computing them takes longer than pulling the pages of all tokens before
_UNIT = 1024  # of the tokens before a tail: fused attention takes multiples of it
_LONG = 4 * _UNIT  # tokens; pages of fewer are pulled in less time than another chunk costs
_LEAST_SHARED = 512  # tokens that prompts share in any case
_GAIN = 1.04  # a chunk twice as long must compute tokens faster by this factor
_NUM_RUNS = 3  # of each size; the shortest counts: the first may compile kernels, and a disturbance adds to a time
_MOST_S = 1.0  # of one run: a device that takes longer is not measured further

Prompt = TypeVar("Prompt")


class ChunkLength(Generic[Prompt]):
    """Decides the lengths of one node's chunks. `sharing_limit`: the most tokens of a chunk that several prompts share;
    None: they share any chunk."""

    def __init__(self, most: int, *, has_tails: bool, sharing_limit: int | None = None) -> None:
        """`most`: tokens of a chunk. `has_tails`: the last tokens of a long prompt are a chunk of their own."""
        self._most, self._has_tails = most, has_tails
        self.sharing_limit = sharing_limit
        self._tail_of: Prompt | None = None  # the prompt of which only the tail is left

    def budget(self, oldest: Prompt, num_left: int, *, is_alone: bool) -> int:
        """Return how many tokens the next chunk may have. `oldest` comes first, and `num_left` of its tokens are left.
        `is_alone`: no other prompt is here, and a decode node pulls its pages.

        A tail is alone in its chunk, since prompts that have come meanwhile would delay its first token."""
        tail_of, self._tail_of = self._tail_of, None
        if tail_of is oldest:
            return min(num_left, self._most)
        before = num_before_tail(num_left, self._most) if is_alone and self._has_tails else None
        if before is None:
            return self._most
        self._tail_of = oldest
        return before

    def may_share(self, num_tokens: int) -> bool:
        """Whether a prompt may join others in a chunk, which then has `num_tokens` tokens with all that is left of this
        prompt."""
        return self.sharing_limit is None or num_tokens <= self.sharing_limit


def num_before_tail(num_left: int, most: int) -> int | None:
    """Return how many of the last `num_left` tokens of a prompt are computed before its tail. None: it has none, since
    they are few or do not fit in one chunk."""
    if not _LONG <= num_left <= most:
        return None
    return (num_left - LEAST_TAIL) // _UNIT * _UNIT


def measured_sharing_limit(chunk_s: Callable[[int], float], longest: int) -> int | None:
    """Return the most tokens of a chunk that several prompts share. None: any chunk, up to the longest one.
    `chunk_s(num_tokens)` computes a chunk of one prompt and returns its seconds. `longest`: the most tokens of any
    chunk."""
    if longest <= _LEAST_SHARED:
        return None
    size, rate = _LEAST_SHARED, _rate(chunk_s, _LEAST_SHARED)
    while rate and size < longest:
        larger = min(2 * size, longest)
        larger_rate = _rate(chunk_s, larger)
        if 0 < larger_rate < _GAIN * rate:
            return size
        size, rate = larger, larger_rate
    return None


def _rate(chunk_s: Callable[[int], float], num_tokens: int) -> float:
    """Return the tokens per second of a chunk; 0: it takes too long to be measured."""
    best_s = min(chunk_s(num_tokens) for _ in range(_NUM_RUNS - 1))
    return 0.0 if best_s > _MOST_S else num_tokens / min(best_s, chunk_s(num_tokens))


class ChunkSeconds:
    """Seconds per prompt token and per prompt, for the router: estimates by magnitude of a chunk's tokens.

    The longest chunks tell the seconds per token, and the shortest ones what a prompt takes besides its tokens."""

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
