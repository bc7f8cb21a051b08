"""Sampling filters min-p, top-k and top-p, which exclude unlikely tokens of a row.

They apply in this order, which is vLLM's, after temperature. Each filter sees the tokens that the one before it kept.
It keeps the tokens whose score reaches a threshold of the row, so tokens of equal score stay or go together.

    score = (logit - the row's largest logit) / temperature       at most 0

Top-p must cut at the same place for a row alone, in a batch and on another device, where float sums differ in their
order. So the weights exp(score) are computed by IEEE additions and multiplications alone and rounded to integers of
2^-40: their sums are exact in any order. Tokens below 2^-40 of the likeliest weigh nothing.

sample.py draws tokens by these thresholds. triton_filters.py finds them on a GPU.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

WEIGHT_BITS = 40  # weights are at most 2^40, so int64 sums hold for 2^22 tokens
MIN_SCORE = -32.0  # exp(-32) < 2^-40
LOG2_E = 1.4426950216293335
# 2^f on [-0.5, 0.5]: degree 6 least-squares fit at 400 Chebyshev nodes in float64, rounded to float32 (error 2e-8)
EXP2_COEFFICIENTS = (
    1.0,
    0.6931471824645996,
    0.24022650718688965,
    0.05550327152013779,
    0.00961802527308464,
    0.0013400432653725147,
    0.00015469732170458883,
)


class Filters(NamedTuple):
    """The filters of rows, each column contiguous."""

    log_min_p: Tensor  # [num_rows] float32, -inf: off
    top_k: Tensor | None = None  # [num_rows] int64, at least 1; more than there are tokens: off
    top_p: Tensor | None = None  # [num_rows] float64, 0 to 1; 1: off. None (both): off in all rows


def keep_likely(scores: Tensor, filters: Filters) -> None:
    """Set to -inf, in place, the tokens that a row's filters exclude; at least one stays.

    `scores` [num_rows, vocab_size] float32: see above.
    """
    threshold = score_thresholds(scores, filters).unsqueeze(1)
    scores.masked_fill_(scores < threshold, float("-inf"))


def score_thresholds(scores: Tensor, filters: Filters) -> Tensor:
    """Return the least score that each row keeps, [num_rows] float32. `scores` as for `keep_likely`.

    It is the largest of three thresholds: log(min_p); the k-th largest score; and the threshold of top_p. For the last
    one, take the tokens that the first two thresholds leave, from the likeliest on, until they hold top_p of the weight
    of all these tokens. The score of the last token taken is the threshold."""
    assert scores.dtype == torch.float32 and scores.shape[:1] == filters.log_min_p.shape, (scores.dtype, scores.shape)
    if filters.top_k is None or filters.top_p is None:
        return filters.log_min_p  # p / p_max >= min_p is score >= log(min_p)
    vocab_size = scores.shape[1]
    threshold, share = filters.log_min_p.unsqueeze(1), filters.top_p.unsqueeze(1)
    ranked = _descending(scores)
    threshold = torch.maximum(threshold, ranked.gather(1, filters.top_k.unsqueeze(1).clamp(max=vocab_size) - 1))
    # The clamps matter to NaN logits alone, which must not cost the rows beside them.
    last_left = (ranked >= threshold).sum(1, keepdim=True).sub_(1).clamp_(min=0)  # [num_rows, 1] index in ranked
    held = _weights(ranked).cumsum(1)
    needed = held.gather(1, last_left).to(torch.float64).mul_(share).ceil_().to(torch.int64)
    last = (held < needed).sum(1, keepdim=True).clamp_(max=vocab_size - 1)
    last = torch.where(share < 1, last, last_left)  # tokens without weight stay where top_p is off
    return torch.maximum(threshold, ranked.gather(1, last)).squeeze(1)


def _descending(scores: Tensor) -> Tensor:
    """Return each row sorted; on a CPU by numpy, whose vectorised sort of values alone is 30 times faster than
    torch's."""
    if scores.device.type == "cpu":
        return torch.from_numpy(np.sort(scores.numpy(), axis=1)).flip(1)
    return scores.sort(1, descending=True).values


def _weights(scores: Tensor) -> Tensor:
    """Return exp(scores) in units of 2^-40 for scores <= 0; int64, same shape."""
    exponent = scores.clamp(min=MIN_SCORE).mul_(LOG2_E)
    whole = exponent.round()
    fraction = exponent.sub_(whole)
    *rest, highest = EXP2_COEFFICIENTS
    power = torch.mul(fraction, highest)
    for coefficient in reversed(rest[1:]):
        power.add_(coefficient).mul_(fraction)
    power.add_(rest[0])
    scale = whole.to(torch.int32).add_(127 + WEIGHT_BITS).bitwise_left_shift_(23).view(torch.float32)
    return power.mul_(scale).to(torch.int64)
