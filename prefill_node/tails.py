"""Tails of long prompts: their last tokens, which are a chunk of their own if no other prompt is here.

The decode node pulls the pages before the tail while the tail is computed. So it has little left to pull when the first
token is there, and the second token comes sooner. Without a tail all pages of a chunk are offered at once, with the
first token.
"""

from __future__ import annotations

from typing import Generic, TypeVar

LEAST_TAIL = 512  # tokens; computing them takes longer than pulling the pages of all tokens before
_UNIT = 1024  # of the tokens before a tail: fused attention takes multiples of it
_LONG = 4 * _UNIT  # tokens; pages of fewer are pulled in less time than another chunk costs

Prompt = TypeVar("Prompt")


class PromptTails(Generic[Prompt]):
    """Knows the prompt of which only the tail is left."""

    def __init__(self, chunk_tokens: int) -> None:
        """`chunk_tokens`: the most tokens of a chunk."""
        self._chunk_tokens = chunk_tokens
        self._due: Prompt | None = None

    def budget(self, oldest: Prompt, num_left: int, *, is_alone: bool) -> int:
        """Return how many tokens the next chunk may have. `oldest` comes first, and `num_left` of its tokens are left.
        `is_alone`: no other prompt is here, and a decode node pulls its pages.

        A tail is alone in its chunk, since prompts that have come meanwhile would delay its first token."""
        due, self._due = self._due, None
        if due is oldest:
            return min(num_left, self._chunk_tokens)
        before = num_before_tail(num_left, self._chunk_tokens) if is_alone else None
        if before is None:
            return self._chunk_tokens
        self._due = oldest
        return before


def num_before_tail(num_left: int, chunk_tokens: int) -> int | None:
    """Return how many of the last `num_left` tokens of a prompt are computed before its tail. None: it has none, since
    they are few or do not fit in one chunk."""
    if not _LONG <= num_left <= chunk_tokens:
        return None
    return (num_left - LEAST_TAIL) // _UNIT * _UNIT
