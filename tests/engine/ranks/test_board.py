"""Ranks of a group post and read values, and end and leave together."""

from __future__ import annotations

import pytest
from thread_ranks import in_threads

from baton.engine.ranks.board import Board
from baton.engine.ranks.steps import NUM_VALUES
from baton.metadata.errors import RankLost


def test_every_rank_reads_what_all_have_posted_in_each_step(boards: list[Board]) -> None:
    found: dict[int, list[list[tuple[int, ...]]]] = {rank: [] for rank in range(3)}

    def run(board: Board) -> None:
        for step in range(200):
            board.post([board.rank * 1000 + step] * NUM_VALUES)
            found[board.rank].append(board.wait())

    in_threads([lambda board=board: run(board) for board in boards])
    wanted = [[(rank * 1000 + step,) * NUM_VALUES for rank in range(3)] for step in range(200)]
    assert all(each == wanted for each in found.values())


def test_a_rank_that_does_not_come_ends_the_wait_of_the_others(boards: list[Board]) -> None:
    boards[0].timeout_s = 0.05
    boards[1].post([1] * NUM_VALUES)
    boards[0].post([0] * NUM_VALUES)
    with pytest.raises(RankLost, match=r"rank 2 took part in no step for 0\.05 s"):
        boards[0].wait()
    boards[2].end()
    with pytest.raises(RankLost, match="another rank of the group has ended"):
        boards[1].wait()


def test_the_ranks_leave_together_when_all_have_finished(boards: list[Board]) -> None:
    assert not boards[1].is_leaving
    boards[0].leave()
    assert all(board.is_leaving for board in boards)
    assert [board.finish(is_idle=True) for board in boards] == [False, False, True]
    assert boards[0].finish(is_idle=True)


def test_a_rank_that_gets_a_request_while_others_finish_is_waited_for_until_the_group_is_over(
    boards: list[Board],
) -> None:
    """The router may not have read yet that the group leaves. A rank that went on alone would lose the others."""
    first, *others = boards
    assert not first.finish(is_idle=True)
    assert not first.finish(is_idle=False)
    assert not any(board.finish(is_idle=True) for board in others), "the first has work"
    assert first.finish(is_idle=True)
    assert first.finish(is_idle=False), "too late: the others may be gone"
    first.post([1] * NUM_VALUES)
    with pytest.raises(RankLost, match="another rank of the group has ended"):
        first.wait()
