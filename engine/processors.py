"""Logit processors: what a request's parameters and history change before temperature.

Order (vLLM's): logit_bias, min_tokens, repetition penalty, frequency penalty, presence penalty. Only elementwise IEEE
operations without fusion, so a row's result does not depend on the rows beside it: one that asks for nothing gets
zeros added and is divided by one. A NaN stays one, so that the row is known to hold no numbers.
"""

import torch
from torch import Tensor

from .sampling_batch import SamplingBatch

NEGATIVE_INFINITY = float("-inf")


def process_logits(logits: Tensor, batch: SamplingBatch) -> None:
    """Change `logits` [num_rows, vocab_size] float32 in place."""
    assert logits.dtype == torch.float32 and logits.shape[0] == batch.num_rows, (logits.dtype, logits.shape)
    if batch.bias is not None:
        logits += batch.bias
    if batch.stops is not None:
        logits.masked_fill_(batch.stops & batch.bans_now & ~logits.isnan(), NEGATIVE_INFINITY)
    if batch.output_counts is not None and batch.prompt_mask is not None:
        _penalize(logits, batch, batch.prompt_mask, batch.output_counts)


def _penalize(logits: Tensor, batch: SamplingBatch, prompt_mask: Tensor, counts: Tensor) -> None:
    """Repetition over prompt and output (Keskar et al. 2019, arXiv:1909.05858: divide what is positive, multiply the
    rest); frequency and presence over the output alone, subtracted."""
    assert logits.shape == counts.shape == prompt_mask.shape, (logits.shape, counts.shape, prompt_mask.shape)
    repetition, frequency, presence = batch.penalties
    occurs = counts > 0
    penalized = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits.copy_(torch.where(prompt_mask | occurs, penalized, logits))
    logits -= counts.to(torch.float32).mul_(frequency)
    logits -= occurs.to(torch.float32).mul_(presence)
