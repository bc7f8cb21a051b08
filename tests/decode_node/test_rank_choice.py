"""The rank of a new sequence: the one that knows its prompt, unless it has many more sequences than another."""

from __future__ import annotations

import pytest

from baton.decode_node.rank_choice import RankRoom, preferred_ranks


@pytest.mark.parametrize(
    ("rooms", "order"),
    [
        ([(0, 3, 50), (4, 4, 50)], [1, 0]),  # the prefix counts more than one sequence
        ([(0, 3, 50), (0, 2, 10)], [1, 0]),  # then the number of sequences
        ([(0, 3, 10), (0, 3, 50)], [1, 0]),  # then the pages
        ([(0, 3, 50), (0, 3, 50)], [0, 1]),
        ([(9, 6, 50), (4, 0, 50), (0, 1, 50)], [1, 2, 0]),  # the rank with most of the prompt is crowded
        ([(9, 27, 50), (4, 20, 50)], [0, 1]),  # seven more than twenty are not many
        ([(9, 28, 50), (4, 20, 50)], [1, 0]),
        ([(2, 5, 50), (7, 4, 50), (0, 0, 50)], [2, 1, 0]),  # among crowded ranks the emptier one comes first
    ],
)
def test_the_best_rank_comes_first(rooms: list[tuple[int, int, int]], order: list[int]) -> None:
    assert preferred_ranks([RankRoom(*room) for room in rooms]) == order
