"""Logit processors: what a request's parameters and history change before temperature.

Order (vLLM's): logit_bias, min_tokens, repetition penalty, frequency penalty, presence penalty. Only elementwise IEEE
operations without fusion, so a row's result does not depend on the rows beside it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .sampling_state import SamplingState

NEGATIVE_INFINITY = float("-inf")


def process_logits(logits: Tensor, states: Sequence[SamplingState]) -> None:
    """Change `logits` [num_rows, vocab_size] float32 in place; rows that ask for nothing are not touched."""
    assert logits.dtype == torch.float32 and logits.shape[0] == len(states), (logits.dtype, logits.shape, len(states))
    for row, state in enumerate(states):
        if not state.needs_processing:
            continue
        _bias(logits[row], state)
        if state.bans_stops:
            logits[row, state.stop_ids] = NEGATIVE_INFINITY
        _penalize(logits[row], state)


def _bias(logits: Tensor, state: SamplingState) -> None:
    if state.bias_ids is not None and state.bias_values is not None:
        logits[state.bias_ids] += state.bias_values


def _penalize(logits: Tensor, state: SamplingState) -> None:
    """Repetition over prompt and output (Keskar et al. 2019, arXiv:1909.05858: divide what is positive, multiply the
    rest); frequency and presence over the output alone, subtracted."""
    params, counts = state.params, state.output_counts
    if counts is None:
        return
    assert logits.shape == counts.shape, (logits.shape, counts.shape)
    if state.prompt_mask is not None:
        ids = (state.prompt_mask | (counts > 0)).nonzero().squeeze(1)  # [num_seen] int64
        seen = logits[ids]
        penalty = torch.tensor(params.repetition_penalty, dtype=torch.float32, device=logits.device)
        logits[ids] = torch.where(seen > 0, seen / penalty, seen * penalty)
    if params.frequency_penalty:
        logits -= counts.to(torch.float32).mul_(params.frequency_penalty)
    if params.presence_penalty:
        logits -= (counts > 0).to(torch.float32).mul_(params.presence_penalty)
