"""Agreement of data-parallel ranks on their next forward. Pure functions, without torch.

    Proposal of each rank --agree--> Agreed, the same on every rank

The ranks divide the hidden units of the target's feed-forward layers. So they run the target's forwards together, one
after another, and each layer needs to know how many rows every rank has. That is all that must be equal. The rows of a
forward are of any kind: a prompt chunk of one rank and a round of another share it. Everything else of a step is a
rank's own: its drafter, its rows that are caught up, its sampling.

A CUDA graph has as many rows of each rank. Therefore rounds that no chunk disturbs have the largest bucket and the
largest draft shape of all ranks, and chunks beside no round are padded to the largest bucket of prompts.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple


class Proposal(NamedTuple):
    """Proposal of a rank for the next forward. Each field is an integer. The defaults are those of an idle rank."""

    num_seqs: int = 0  # of a round
    num_steps: int = 0  # of its drafts
    most_steps: int = 0  # that it can draft: 0 if a sequence has no position to draft from
    chunk_len: int = 0  # prompt tokens
    chunk_bucket: int = 0  # the smallest bucket of prompts that holds them; 0: none does
    num_streams: int = 0  # sequences that a chunk of another rank would delay
    is_awaited: int = 0  # whether one more decodes as soon as its pages have arrived
    has_round: int = 0  # it takes part in rounds, or prepares for them
    has_chunk: int = 0
    lacks_memory: int = 0  # for the forward that the ranks have just agreed on

    @property
    def is_idle(self) -> bool:
        return not (self.has_round or self.has_chunk)


class Agreed(NamedTuple):
    """The next forward of all ranks."""

    lens: tuple[int, ...]  # rows of each rank in the target's forward, padding included
    num_steps: int  # drafts of every round
    least_seqs: int  # of the bucket of every round; 0: each rank uses the bucket of its own round
    has_rounds: bool  # an idle rank runs a round of padding; otherwise a forward without rows
    has_chunks: bool
    proposals: tuple[Proposal, ...]


def agree(proposals: Sequence[Proposal], buckets: Sequence[int], num_drafts: Sequence[int]) -> Agreed:
    """Return the forward that ranks with these proposals run.

    `buckets`: batch sizes that every rank has, rising. `num_drafts`: for each number of steps, the drafts of a sequence
    in a round."""
    rounds = [each for each in proposals if each.has_round]
    chunks = [each for each in proposals if each.has_chunk]
    num_steps = min(
        max((each.num_steps for each in rounds), default=0), min((each.most_steps for each in rounds), default=0)
    )
    num_rows = num_drafts[num_steps] + 1
    if chunks and not rounds:
        size = max(each.chunk_bucket for each in chunks) if all(each.chunk_bucket for each in chunks) else 0
        lens = tuple(size or each.chunk_len for each in proposals)
        return Agreed(lens, 0, 0, False, True, tuple(proposals))
    least = 0 if chunks else max((each.num_seqs for each in rounds), default=0)
    lens = tuple(
        _padded(max(each.num_seqs, least), buckets, each.num_seqs) * num_rows * (each.has_round or not chunks)
        + each.chunk_len
        for each in proposals
    )
    return Agreed(lens, num_steps, least, bool(rounds) and not chunks, bool(chunks), tuple(proposals))


def longest_chunk(agreed: Agreed) -> int:
    """Return the rank that gives its chunk up if a rank has no memory for a forward: the one with the longest."""
    lengths = [each.chunk_len for each in agreed.proposals]
    return lengths.index(max(lengths))


def _padded(num_seqs: int, buckets: Sequence[int], own: int) -> int:
    """Return the size of the smallest bucket that holds `num_seqs` sequences, or `own` if none does."""
    index = bisect_left(buckets, num_seqs)
    return buckets[index] if index < len(buckets) else own
