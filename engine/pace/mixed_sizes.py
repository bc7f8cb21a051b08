"""The sizes of mixed batches: a round and a chunk of prompts that share one forward. Without torch, so that a node can
tell before it plans a chunk whether the chunk will share the round's forward.

A forward over padding costs less than a second forward as long as it is small. So a few buckets serve all rounds, and
the largest drafts also serve smaller ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .draft_length import NO_DRAFTS, DraftShape

CHUNK_SIZES = (64, 128, 256, 512, 1024)  # tokens of the chunks; longer ones save nothing of a forward of their own
MAX_PROMPTS = 8  # of a chunk
MIN_BATCH, MIN_GROWTH = 8, 2  # sequences of the smallest bucket, and from one bucket to the next
MAX_ROUND_ROWS = 512  # of a round with drafts; a larger one gains less than its padding costs
MAX_PADDING = 192  # rows of a forward: on an H200 they cost about half of what reading the weights of an 8B model costs


class MixedSize(NamedTuple):
    """Sizes of a forward that a round and a chunk share."""

    num_seqs: int  # of the round's bucket
    shape: DraftShape
    num_tokens: int  # of the chunk

    @property
    def num_round_rows(self) -> int:
        return self.num_seqs * (self.shape.num_drafts + 1)

    @property
    def num_rows(self) -> int:
        return self.num_round_rows + self.num_tokens


def sizes_alone(buckets: Sequence[int], shape: DraftShape) -> list[MixedSize]:
    """Return the sizes of rounds without a chunk whose steps are graphs, for these numbers of sequences: with as many
    drafts as there may be, and without."""
    return [MixedSize(num_seqs, each, 0) for num_seqs in buckets for each in sorted({shape.with_steps(0), shape})]


@dataclass(frozen=True, slots=True)
class MixedSizes:
    """The sizes that a device is prepared for, smallest first. None: it needs no preparation, so every chunk shares
    the forward of the round beside it."""

    sizes: Sequence[MixedSize] | None = None
    shape: DraftShape = NO_DRAFTS  # the most that a round drafts

    @property
    def max_prompts(self) -> int | None:
        """The most prompts of a chunk that shares a forward; None: any number."""
        return None if self.sizes is None else MAX_PROMPTS

    def lengths(self, num_seqs: int, num_steps: int) -> list[int]:
        """Return the lengths of chunks, rising, for which forwards with such a round are prepared. A chunk of another
        length is padded to the next one. Empty if lengths make no difference, or if no chunk shares the forward."""
        lengths = sorted({size.num_tokens for size in self.sizes or ()})
        return [each for each in lengths if self.holds(num_seqs, num_steps, each)]

    def holds(self, num_seqs: int, num_steps: int, num_tokens: int, num_prompts: int = 1) -> bool:
        """Return whether a chunk of `num_tokens` of some prompts shares the forward of a round of `num_seqs` sequences
        with `num_steps` draft steps."""
        if not self.sizes:
            return self.sizes is None
        return fitting(self.sizes, num_seqs, self.shape.with_steps(num_steps), num_tokens, num_prompts) is not None


EVERY_SIZE, NO_SIZE = MixedSizes(), MixedSizes(())


def mixed_sizes(batches: Sequence[int], shape: DraftShape) -> list[MixedSize]:
    """Return the sizes that are worth graphs, smallest first, for buckets of `batches` sequences (in rising order) and
    rounds that draft at most `shape`."""
    chosen: list[int] = []
    for size in batches:
        if size == batches[-1] or size >= (MIN_GROWTH * chosen[-1] if chosen else MIN_BATCH):
            chosen.append(size)
    sizes = [
        MixedSize(num_seqs, each, num_tokens)
        for num_seqs in chosen
        for each in sorted({shape.with_steps(0), shape})
        for num_tokens in CHUNK_SIZES
    ]
    return sorted(
        (size for size in sizes if not size.shape.num_steps or size.num_round_rows <= MAX_ROUND_ROWS),
        key=lambda size: size.num_rows,
    )


def fitting(
    sizes: Sequence[MixedSize], num_seqs: int, shape: DraftShape, num_tokens: int, num_prompts: int = 1
) -> MixedSize | None:
    """Return the one of `sizes` (smallest first) with the least padding for a round and a chunk of `num_tokens`. None:
    no size holds them, or the padding costs as much as a forward of the chunk's own."""
    if num_prompts > MAX_PROMPTS:
        return None
    drafts = shape.num_steps > 0
    for size in sizes:
        holds = size.num_seqs >= num_seqs and size.num_tokens >= num_tokens
        if holds and drafts == (size.shape.num_steps > 0) and shape.num_steps <= size.shape.num_steps:
            num_padding = size.num_rows - num_seqs * (shape.num_drafts + 1) - num_tokens
            return size if num_padding <= MAX_PADDING else None
    return None
