"""Log-probabilities of tokens under a row's own distribution: log-softmax of the raw logits, before any processing."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..operations import Operation

_BLOCK_NUMBERS = 1 << 24  # of float32, so that a long prompt takes no more memory than a short one


class TopLogprobs(NamedTuple):
    """Log-probabilities of rows."""

    chosen: Tensor  # [num_rows] float32
    top_ids: Tensor  # [num_rows, num_top] int64, likeliest first, equal ones by ascending id
    top_logprobs: Tensor  # [num_rows, num_top] float32


def top_logprobs_ref(logits: Tensor, token_ids: Tensor, num_top: int) -> TopLogprobs:
    """Return the log-probabilities of `token_ids` [num_rows] int64 and of the `num_top` likeliest tokens.

    `logits` [num_rows, vocab_size] are float32, bfloat16 or float16, rows contiguous; `num_top` is at most the size of
    the vocabulary."""
    assert logits.shape[0] == token_ids.shape[0] and num_top <= logits.shape[1], (logits.shape, token_ids.shape)
    num_rows = max(1, _BLOCK_NUMBERS // logits.shape[1])
    if len(logits) <= num_rows:
        return _of_block(logits, token_ids, num_top)
    blocks = zip(logits.split(num_rows), token_ids.split(num_rows), strict=True)
    return TopLogprobs(*map(torch.cat, zip(*(_of_block(*block, num_top) for block in blocks), strict=True)))


def _of_block(logits: Tensor, token_ids: Tensor, num_top: int) -> TopLogprobs:
    logprobs = logits.to(torch.float32).log_softmax(-1)
    chosen = logprobs.gather(1, token_ids[:, None]).squeeze(1)
    ids = logprobs.topk(num_top).indices.sort(1).values
    values, order = logprobs.gather(1, ids).sort(stable=True, dim=1, descending=True)
    return TopLogprobs(chosen, ids.gather(1, order), values)


top_logprobs = Operation("top_logprobs", top_logprobs_ref)
