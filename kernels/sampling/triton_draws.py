"""The draw of a token (sample.py) with the noise of few tokens.

The noise of a token takes some eighty instructions, and nearly no token can be drawn. So a block of tokens is first
compared with the best perturbed score that is known, by bounds of the noise that take a few instructions:

    noise = -log(-log1p(-u)) <= -log(u)        of the token's uniform number u, as -log1p(-u) >= u

    1. the block's largest score and its least u    if their bound is below the best, nothing of the block is read
    2. the bound of each token                      the noise is computed for tokens whose bound reaches the best

A bound need not be exact, as it has a margin. The scores that decide have the bits of the reference.
"""

# Constants of a kernel are in capitals, and a launch is no call that a type checker knows.
# ruff: noqa: N803
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from .triton_noise import gumbel_from_bits_of, ids_at, noise_bound_of, random_bits
from .triton_packed import LOWEST, id_of, pack, score_of
from .triton_scores import scores_of


@triton.jit
def has_maximum(largest):
    """Return whether a row's largest logit (packed) is a finite number. If it is not, the row has no scores, and its
    token is that of the largest logit: as torch's argmax has it, the first of infinite ones."""
    return tl.abs(score_of(largest)) < float("inf")


@triton.jit
def perturbed_largest(largest, seed, position, num_logits, logit_ids_ptr, MAPPED: tl.constexpr):
    """Return the token of the largest logit (packed), packed with its perturbed score: its score is 0."""
    index = id_of(largest).to(tl.int32)
    ids = ids_at(index, num_logits, logit_ids_ptr, MAPPED)
    return pack(gumbel_from_bits_of(random_bits(seed, position, ids)), index)


@triton.jit
def best_of_block(
    row_ptr,
    start,
    num_logits,
    largest_score,
    maximum,
    temperature,
    seed,
    position,
    threshold,
    best,
    logit_ids_ptr,
    MAPPED: tl.constexpr,
    FILTERED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return `best`, or the best of BLOCK logits of a row from `start` on, packed with its perturbed score.

    Args:
        row_ptr: [num_logits], the row; its largest logit `maximum` is finite.
        largest_score: the largest score of the block.
        threshold: tokens with lower scores are excluded if FILTERED.
        best: a token that may be drawn, packed with its perturbed score.
    """
    index = start + tl.arange(0, BLOCK)
    bits = random_bits(seed, position, ids_at(index, num_logits, logit_ids_ptr, MAPPED))
    bounds = tl.where(index < num_logits, noise_bound_of(bits), -float("inf"))
    if largest_score + tl.max(bounds, axis=0) >= score_of(best):
        logits = tl.load(row_ptr + index, mask=index < num_logits, other=-float("inf")).to(tl.float32)
        scores = scores_of(logits, maximum, temperature)
        if FILTERED:
            scores = tl.where(scores < threshold, -float("inf"), scores)
        bounded = pack(scores + bounds, index)
        highest = tl.max(bounded, axis=0)
        while score_of(highest) >= score_of(best):
            is_highest = bounded == highest
            score = tl.max(tl.where(is_highest, scores, -float("inf")), axis=0)
            ids = ids_at(id_of(highest).to(tl.int32), num_logits, logit_ids_ptr, MAPPED)
            perturbed = score + gumbel_from_bits_of(random_bits(seed, position, ids))
            best = tl.maximum(best, pack(perturbed, id_of(highest).to(tl.int32)))
            bounded = tl.where(is_highest, LOWEST, bounded)
            highest = tl.max(bounded, axis=0)
    return best
