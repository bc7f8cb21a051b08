"""min-p, top-k and top-p: which tokens of a row may be drawn.

They apply in this order (vLLM's), each to what the one before left, after temperature. Every filter comes down to one
threshold a row: tokens of equal score stay or go together, whatever order a sort gave them.

Top-p must cut at the same place for a row alone, in a batch and on another device, where float sums differ in their
order. So the weights exp(score) are computed by IEEE additions and multiplications alone and rounded to integers of
2^-40: their sums are exact in any order. Tokens below 2^-40 of the likeliest weigh nothing.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..metadata.request import SamplingParams

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
_NUM_CANDIDATES = 256  # top-p looks at so many tokens before it sorts the whole row


def keep_likely(scores: Tensor, params: Sequence[SamplingParams]) -> None:
    """Set to -inf, in place, the tokens that the rows' min_p, top_k and top_p exclude; at least one stays.

    Args:
        scores: [num_rows, vocab_size] float32, log-weights after temperature, shifted so that each row's largest is 0.
        params: one a row.
    """
    assert scores.dtype == torch.float32 and scores.shape[0] == len(params), (scores.dtype, scores.shape, len(params))
    rows = [row for row, p in enumerate(params) if p.min_p > 0 or p.top_k > 0 or p.top_p < 1]
    if not rows:
        return
    whole = len(rows) == len(params)
    chosen = scores if whole else scores[rows]  # [num_filtered, vocab_size]
    asked = [params[row] for row in rows]
    threshold = _min_p_threshold(asked, scores.device)
    threshold = _top_k_threshold(chosen, asked, threshold)
    threshold = _top_p_threshold(chosen, asked, threshold)
    chosen.masked_fill_(chosen < threshold[:, None], _NEGATIVE_INFINITY)
    if not whole:
        scores[rows] = chosen


def _min_p_threshold(params: Sequence[SamplingParams], device: torch.device) -> Tensor:
    """p / p_max >= min_p is score >= log(min_p); [num_rows] float32."""
    logs = [math.log(p.min_p) if p.min_p > 0 else _NEGATIVE_INFINITY for p in params]
    return torch.tensor(logs, dtype=torch.float32, device=device)


def _top_k_threshold(scores: Tensor, params: Sequence[SamplingParams], threshold: Tensor) -> Tensor:
    """The larger of `threshold` and the k-th largest score of the row; [num_rows] float32."""
    vocab_size = scores.shape[1]
    ks = [min(p.top_k, vocab_size) if p.top_k > 0 else vocab_size for p in params]
    rows = [row for row, k in enumerate(ks) if k < vocab_size]
    if not rows:
        return threshold
    last = torch.tensor([ks[row] - 1 for row in rows], dtype=torch.int64, device=scores.device)  # index of the k-th
    largest = scores[rows].topk(max(ks[row] for row in rows)).values  # [num_asking, max k], descending
    threshold = threshold.clone()
    threshold[rows] = torch.maximum(threshold[rows], largest.gather(1, last[:, None]).squeeze(1))
    return threshold


def _top_p_threshold(scores: Tensor, params: Sequence[SamplingParams], threshold: Tensor) -> Tensor:
    """The larger of `threshold` and the score of the last token of the smallest set, from the likeliest on, that holds
    top_p of the weight of the tokens at or above `threshold`; [num_rows] float32."""
    rows = [row for row, p in enumerate(params) if p.top_p < 1]
    if not rows:
        return threshold
    scores, lowest = scores[rows], threshold[rows, None]  # [num_asking, vocab_size], [num_asking, 1]
    shares = torch.tensor([params[row].top_p for row in rows], dtype=torch.float64, device=scores.device)
    total = _weights(scores, lowest).sum(1)
    needed = (total.to(torch.float64) * shares).ceil_().to(torch.int64)[:, None]  # [num_asking, 1]
    num_candidates = min(_NUM_CANDIDATES, scores.shape[1])
    largest = scores.topk(num_candidates).values
    held = _weights(largest, lowest).cumsum(1)
    if num_candidates < scores.shape[1] and bool((held[:, -1:] < needed).any()):
        largest = scores.sort(1, descending=True).values
        held = _weights(largest, lowest).cumsum(1)
    last = (held < needed).sum(1, keepdim=True)  # [num_asking, 1], index of the last token kept
    last.clamp_(max=largest.shape[1] - 1)  # holds but for NaN logits, which must not cost the rows beside them
    threshold = threshold.clone()
    threshold[rows] = torch.maximum(lowest, largest.gather(1, last)).squeeze(1)
    return threshold


def _weights(scores: Tensor, lowest: Tensor) -> Tensor:
    """exp(scores) in units of 2^-40, 0 below `lowest` [num_rows, 1]; int64, same shape as `scores` (each <= 0)."""
    exponent = scores.clamp(min=_MIN_SCORE).mul_(_LOG2_E)
    whole = exponent.round()
    fraction = exponent.sub_(whole)
    *rest, highest = _EXP2_COEFFICIENTS
    power = torch.mul(fraction, highest)
    for coefficient in reversed(rest[1:]):
        power.add_(coefficient).mul_(fraction)
    power.add_(rest[0])
    scale = whole.to(torch.int32).add_(127 + _WEIGHT_BITS).bitwise_left_shift_(23).view(torch.float32)
    return power.mul_(scale).to(torch.int64).mul_(scores >= lowest)
