"""min-p, top-k and top-p: which tokens of a row may be drawn.

They apply in this order (vLLM's), each to what the one before left, after temperature. Every filter comes down to one
threshold a row: tokens of equal score stay or go together, whatever order a sort gave them.

Top-p must cut at the same place for a row alone, in a batch and on another device, where float sums differ in their
order. So the weights exp(score) are computed by IEEE additions and multiplications alone and rounded to integers of
2^-40: their sums are exact in any order. Tokens below 2^-40 of the likeliest weigh nothing.
"""

import numpy as np
import torch
from torch import Tensor

from .sampling_batch import SamplingBatch

_NEGATIVE_INFINITY = float("-inf")
_WEIGHT_BITS = 40  # weights are at most 2^40, so int64 sums hold for 2^22 tokens
_MIN_SCORE = -32.0  # exp(-32) < 2^-40
_LOG2_E = 1.4426950216293335
# 2^f on [-0.5, 0.5]: degree 6 least-squares fit at 400 Chebyshev nodes in float64, rounded to float32 (error 2e-8)
_EXP2_COEFFICIENTS = (
    1.0,
    0.6931471824645996,
    0.24022650718688965,
    0.05550327152013779,
    0.00961802527308464,
    0.0013400432653725147,
    0.00015469732170458883,
)


def keep_likely(scores: Tensor, batch: SamplingBatch) -> None:
    """Set to -inf, in place, the tokens that the rows' min_p, top_k and top_p exclude; at least one stays.

    `scores` [num_rows, vocab_size] float32: log-weights after temperature, shifted so that each row's largest is 0.
    """
    assert scores.dtype == torch.float32 and len(scores) == batch.num_rows, (scores.dtype, scores.shape)
    if not (batch.needs.ranks or batch.needs.cuts):
        return
    threshold = batch.log_min_p  # p / p_max >= min_p is score >= log(min_p)
    if batch.needs.ranks:
        threshold = _rank_threshold(scores, batch, threshold)
    scores.masked_fill_(scores < threshold, _NEGATIVE_INFINITY)


def _rank_threshold(scores: Tensor, batch: SamplingBatch, threshold: Tensor) -> Tensor:
    """The largest of `threshold`, the k-th largest score, and the score of the last token of the smallest set, from the
    likeliest on, that holds top_p of the weight those two leave; [num_rows, 1] float32."""
    vocab_size = scores.shape[1]
    ranked = _descending(scores)
    threshold = torch.maximum(threshold, ranked.gather(1, batch.top_k.clamp(max=vocab_size) - 1))
    # The clamps matter to NaN logits alone, which must not cost the rows beside them.
    last_left = (ranked >= threshold).sum(1, keepdim=True).sub_(1).clamp_(min=0)  # [num_rows, 1] index in ranked
    held = _weights(ranked).cumsum(1)
    share = batch.top_p
    needed = held.gather(1, last_left).to(torch.float64).mul_(share).ceil_().to(torch.int64)
    last = (held < needed).sum(1, keepdim=True).clamp_(max=vocab_size - 1)
    last = torch.where(share < 1, last, last_left)  # tokens without weight stay where top_p is off
    return torch.maximum(threshold, ranked.gather(1, last))


def _descending(scores: Tensor) -> Tensor:
    """Each row sorted; on CPU by numpy, whose vectorised sort of values alone is 30 times faster than torch's."""
    if scores.device.type == "cpu":
        return torch.from_numpy(np.sort(scores.numpy(), axis=1)).flip(1)
    return scores.sort(1, descending=True).values


def _weights(scores: Tensor) -> Tensor:
    """exp(scores) in units of 2^-40 for scores <= 0; int64, same shape."""
    exponent = scores.clamp(min=_MIN_SCORE).mul_(_LOG2_E)
    whole = exponent.round()
    fraction = exponent.sub_(whole)
    *rest, highest = _EXP2_COEFFICIENTS
    power = torch.mul(fraction, highest)
    for coefficient in reversed(rest[1:]):
        power.add_(coefficient).mul_(fraction)
    power.add_(rest[0])
    scale = whole.to(torch.int32).add_(127 + _WEIGHT_BITS).bitwise_left_shift_(23).view(torch.float32)
    return power.mul_(scale).to(torch.int64)
