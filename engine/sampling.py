"""The sampler: the token at a position is the argmax of its processed logits plus Gumbel noise (DESIGN.md section 6).

    processed = processors(raw logits, history)                              processors.py
    score     = processed                                                    greedy rows
    score     = filters((processed - max) / temperature) + noise             the others: filters.py, kernels/noise.py
    token     = argmax(score), the lowest id of equals

The noise is a pure function of (seed, absolute position, token id) and every step treats a row by itself, exactly. So
the same logits give the same token alone, in any batch, after a preemption, and on another node.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels.noise import gumbel_noise
from .filters import keep_likely
from .logprobs import Logprobs, compute_logprobs
from .processors import process_logits
from .sampling_state import SamplingBatch


class SampleResult(NamedTuple):
    """One token for each row of the batch."""

    token_ids: Tensor  # [num_rows] int64
    is_valid: Tensor  # [num_rows] bool; False: the row's logits are no numbers, and neither is its token a choice
    logprobs: Logprobs | None  # None when no row asks


def sample(logits: Tensor, batch: SamplingBatch, *, with_logprobs: bool = True) -> SampleResult:
    """Sample one token a row; `logits` is left as it was.

    Args:
        logits: [num_rows, vocab_size] float32, bfloat16 or float16; rows as in `batch`.
        batch: see `SamplingBatch.of`.
        with_logprobs: False for a draft, whose log-probabilities nobody wants.
    """
    scores = logits if batch.is_plain_greedy else perturbed_scores(logits, batch)
    token_ids = scores.argmax(-1)  # promises the first of equals
    logprobs = compute_logprobs(logits, token_ids, batch.num_logprobs) if with_logprobs else None
    is_valid = logits.gather(1, token_ids.unsqueeze(1)).squeeze(1).isnan().logical_not_()  # argmax finds a NaN first
    return SampleResult(token_ids, is_valid, logprobs)


def perturbed_scores(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """What `sample` takes the argmax of: a new [num_rows, vocab_size] float32, -inf where a token is excluded."""
    assert logits.ndim == 2 and logits.shape[0] == len(batch.states), (logits.shape, len(batch.states))
    scores = logits.to(torch.float32, copy=True)
    process_logits(scores, batch.states)
    rows = batch.random_rows
    if len(rows) == len(batch.states):
        _perturb(scores, batch)
    elif rows:
        index = torch.tensor(rows, dtype=torch.int64, device=scores.device)
        scores.index_copy_(0, index, _perturb(scores.index_select(0, index), batch))
    return scores


def tie_gap(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """Difference of each row's two best scores, [num_rows] float32; inf where only one token may be drawn.

    The unit is that of the processed logits for greedy rows, of logits / temperature for the others. Below the bound
    of promise P1, another order of summation may choose the other token.
    """
    best = perturbed_scores(logits, batch).topk(2).values
    return best[:, 0] - best[:, 1]


def _perturb(scores: Tensor, batch: SamplingBatch) -> Tensor:
    """Temperature, filters and noise on the random rows alone, [num_random, vocab_size], in place."""
    scores.sub_(scores.amax(1, keepdim=True)).div_(batch.temperatures)  # at most 0: no temperature overflows
    keep_likely(scores, [batch.states[row].params for row in batch.random_rows])
    return scores.add_(gumbel_noise(batch.seeds, batch.positions, scores.shape[1]))
