"""Ranks of a group agree on the rows of each forward."""

from __future__ import annotations

import itertools

import pytest

from baton.engine.pace.draft_length import NO_DRAFTS, DraftShape
from baton.engine.ranks.agreement import Proposal, agree
from baton.engine.sampling.state import Needs
from baton.engine.work import Round, widened

CHAIN = DraftShape(5)
CHAIN_DRAFTS = tuple(CHAIN.with_steps(steps).num_drafts for steps in range(6))
IDLE = Proposal()


def a_round(num_seqs: int, num_steps: int = 0, most_steps: int = 5, **more: int) -> Proposal:
    return Proposal(num_seqs, num_steps, most_steps, has_round=1, **more)


def a_chunk(chunk_len: int, bucket: int = 0) -> Proposal:
    return Proposal(chunk_len=chunk_len, chunk_bucket=bucket, has_chunk=1)


def test_a_round_with_wider_drafts_accepts_no_more() -> None:
    work = Round([3, 1], [1, 1], [], [2, 5], [0, 0], DraftShape(2), Needs(), [None, None], [[7, 8], [9, 4]])
    wider = widened(work, CHAIN)
    assert wider.shape == CHAIN and wider.limits == [2, 2]
    assert wider.proposed == [[7, 8, 8, 8, 8], [9, 4, 4, 4, 4]]
    assert widened(wider, CHAIN) is wider


def test_rounds_have_the_largest_shape_of_all_ranks() -> None:
    agreed = agree([a_round(3, 1), IDLE, a_round(1, 5), a_round(2, 0)], (), CHAIN_DRAFTS)
    assert agreed.num_steps == 5 and agreed.has_rounds and not agreed.has_chunks
    assert agreed.lens == (3 * 6, 0, 6, 2 * 6)


def test_no_rank_drafts_if_one_has_a_sequence_without_a_position_to_draft_from() -> None:
    agreed = agree([a_round(3, 5), a_round(1, 0, most_steps=0)], (), CHAIN_DRAFTS)
    assert (agreed.num_steps, agreed.lens) == (0, (3, 1))


@pytest.mark.parametrize(
    ("num_seqs", "padded"), [((2, 0), (2, 2)), ((3, 1), (4, 4)), ((9, 0), (9, 0)), ((9, 1), (9, 1))]
)
def test_all_ranks_use_the_bucket_of_the_largest_batch(num_seqs: tuple[int, int], padded: tuple[int, int]) -> None:
    """An idle rank replays the graph on padding. No graph holds a batch beyond the largest bucket."""
    agreed = agree([a_round(num, 5) if num else IDLE for num in num_seqs], [2, 4, 8], CHAIN_DRAFTS)
    assert agreed.lens == tuple(num * 6 for num in padded) and agreed.least_seqs == max(num_seqs)


def test_chunks_have_the_bucket_of_the_longest_or_none() -> None:
    """A graph has as many rows of each rank, so a chunk that fits no graph keeps all ranks from theirs."""
    for proposals, lens in (
        ((a_chunk(3, 4), IDLE), (4, 4)),
        ((a_chunk(3, 4), a_chunk(6, 8)), (8, 8)),
        ((a_chunk(3, 0), a_chunk(6, 8)), (3, 6)),
        ((IDLE, a_chunk(9)), (0, 9)),
    ):
        agreed = agree(proposals, [2], CHAIN_DRAFTS)
        assert agreed.lens == lens and not agreed.has_rounds and agreed.has_chunks


def test_streams_of_other_ranks_do_not_wait_for_a_chunk() -> None:
    """A chunk of one rank and a round of another are rows of the same forward. Each has its own number of them."""
    agreed = agree([a_chunk(512, 512), a_round(3, 2), IDLE], [2, 4], CHAIN_DRAFTS)
    assert agreed.lens == (512, 4 * 3, 0) and agreed.has_chunks
    assert not agreed.has_rounds and agreed.least_seqs == 0, "an idle rank needs no padding: no graph is replayed"


def test_a_chunk_beside_a_round_of_its_own_rank_shares_its_forward() -> None:
    mixed = a_round(2, 1, chunk_len=16, has_chunk=1)
    assert agree([mixed, a_round(1, 1)], (), CHAIN_DRAFTS).lens == (2 * 2 + 16, 2)


def test_every_rank_evaluates_the_same_function() -> None:
    """The order of ranks changes nothing but the order of the rows."""
    proposals = (a_round(3, 2), a_chunk(7), IDLE, a_round(1, 4))
    for order in itertools.permutations(range(4)):
        agreed = agree([proposals[rank] for rank in order], [1, 2, 4], CHAIN_DRAFTS)
        whole = agree(proposals, [1, 2, 4], CHAIN_DRAFTS)
        assert agreed.lens == tuple(whole.lens[rank] for rank in order)
        assert agreed[1:5] == whole[1:5]


def test_trees_are_drafted_whole() -> None:
    tree = DraftShape(3, 2, 4)
    drafts = [NO_DRAFTS.num_drafts, 0, 0, tree.num_drafts]
    assert agree([a_round(2, 3, 3), a_round(1, 0, 3)], (), drafts).lens == (2 * 5, 5)
