"""How many tokens a chunk has at most if several prompts share it.

All prompts of a chunk get their first tokens when it ends. Up to some size, a longer chunk computes more tokens per
second, so prompts that share it all gain. Beyond this size a chunk takes as long as its prompts one after the other:
sharing it would delay the first of them and help none.
"""

from __future__ import annotations

from collections.abc import Callable

_LEAST = 512  # tokens that prompts share in any case
_GAIN = 1.04  # a chunk twice as long must compute tokens faster by this factor
_NUM_RUNS = 3  # of each size; the shortest counts: the first may compile kernels, and a disturbance adds to a time


def sharing_limit(chunk_s: Callable[[int], float], longest: int) -> int:
    """Return the most tokens of a chunk that several prompts share. `chunk_s(num_tokens)` computes a chunk of one
    prompt and returns its seconds. `longest`: the most tokens of any chunk."""
    size = min(_LEAST, longest)
    rate = _rate(chunk_s, size) if size < longest else 0.0
    while size < longest:
        larger = min(2 * size, longest)
        larger_rate = _rate(chunk_s, larger)
        if larger_rate < _GAIN * rate:
            return size
        size, rate = larger, larger_rate
    return longest


def _rate(chunk_s: Callable[[int], float], num_tokens: int) -> float:
    """Return the tokens per second of a chunk."""
    return num_tokens / min(chunk_s(num_tokens) for _ in range(_NUM_RUNS))
