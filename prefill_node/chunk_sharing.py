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
_MOST_S = 1.0  # of one run: a device that takes longer is not measured further


def sharing_limit(chunk_s: Callable[[int], float], longest: int) -> int | None:
    """Return the most tokens of a chunk that several prompts share. None: any chunk, up to the longest one.
    `chunk_s(num_tokens)` computes a chunk of one prompt and returns its seconds. `longest`: the most tokens of any
    chunk."""
    if longest <= _LEAST:
        return None
    size, rate = _LEAST, _rate(chunk_s, _LEAST)
    while rate and size < longest:
        larger = min(2 * size, longest)
        larger_rate = _rate(chunk_s, larger)
        if 0 < larger_rate < _GAIN * rate:
            return size
        size, rate = larger, larger_rate
    return None


def may_share(num_tokens: int, limit: int | None) -> bool:
    """Whether several prompts may share a chunk that has `num_tokens` tokens with all that is left of them. `limit` is
    that of `sharing_limit`."""
    return limit is None or num_tokens <= limit


def _rate(chunk_s: Callable[[int], float], num_tokens: int) -> float:
    """Return the tokens per second of a chunk; 0: it takes too long to be measured."""
    best_s = min(chunk_s(num_tokens) for _ in range(_NUM_RUNS - 1))
    return 0.0 if best_s > _MOST_S else num_tokens / min(best_s, chunk_s(num_tokens))
