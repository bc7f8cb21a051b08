"""Values of work: the tokens of a chunk, and the rows that catching up may bring."""

from __future__ import annotations

from baton.engine.pace.draft_length import NO_DRAFTS, DraftShape
from baton.engine.work import BatchRow, Chunk, ChunkRow, catch_up_sizes


def test_a_chunk_has_the_new_tokens_of_all_its_rows() -> None:
    rows = [
        ChunkRow(1, [1, 2, 3, 4], BatchRow([3, 4], 2, [5])),
        ChunkRow(2, [7, 8, 9], BatchRow([7, 8, 9], 0, [6], 0)),
        ChunkRow(3, [7], BatchRow([7], 0, [4])),
    ]
    assert Chunk(rows, []).num_tokens == 6
    assert Chunk([], []).num_tokens == 0


def test_one_row_or_those_of_a_round_are_caught_up_on() -> None:
    """A round brings a token for each step of its chain or of a path of its tree, and the bonus."""
    assert catch_up_sizes(DraftShape(5)) == (1, 6)
    assert catch_up_sizes(DraftShape(3, 4, 20)) == (1, 4)
    assert catch_up_sizes(NO_DRAFTS) == (1, 1)
