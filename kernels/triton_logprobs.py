"""The log-probabilities of kernels/logprobs.py on a GPU, in two launches and without a copy of the logits.

They are the top-k of triton_sample.py without noise. The log-probability of the chosen token comes with it. k is always
the same, so that no request waits for a kernel to be compiled.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .logprobs import TopLogprobs
from .triton_sample import MAX_TOPK, topk_of


def top_logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> TopLogprobs:
    """Return `top_logprobs_ref`; values may differ in the last bits, and tokens of equal values in their order."""
    assert token_ids.shape == logits.shape[:1] and token_ids.dtype == torch.int64, (token_ids.shape, token_ids.dtype)
    ids, values, chosen = topk_of(logits, min(MAX_TOPK, logits.shape[1]), None, chosen_ids=token_ids.contiguous())
    assert num_top <= ids.shape[1], (num_top, logits.shape)
    return TopLogprobs(chosen, ids[:, :num_top].contiguous(), values[:, :num_top].contiguous())
