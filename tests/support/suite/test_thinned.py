"""Every two values of a thinned matrix meet in the gate."""

from __future__ import annotations

import itertools

import pytest
from thinned import halved, pairs


def meetings(cells: list[tuple[int, ...]]) -> set[tuple[tuple[int, int], ...]]:
    return {pair for cell in cells for pair in itertools.combinations(enumerate(cell), 2)}


@pytest.mark.parametrize("sizes", [(2, 3), (2, 2, 2), (4, 5, 2, 5), (3, 1, 4), (2,) * 7])
def test_every_two_values_meet_in_few_cells(sizes: tuple[int, ...]) -> None:
    cells = list(itertools.product(*map(range, sizes)))
    chosen = [cells[i] for i in sorted(pairs(cells))]
    assert meetings(chosen) == meetings(cells)
    largest, second = sorted(sizes)[:-3:-1]
    assert largest * second <= len(chosen) <= largest * second + len(sizes) + 2


def test_every_value_occurs_in_few_cells() -> None:
    cells = list(itertools.product("abc", "xy"))
    chosen = [cells[i] for i in sorted(pairs(cells, 1))]
    assert chosen == [("a", "x"), ("b", "y"), ("c", "x")]


def test_values_that_never_meet_are_not_asked_to() -> None:
    cells = [(0, 0, 0), (0, 1, 1), (1, 0, 0), (1, 0, 0), (1, 1, 1), (1, 1, 1)]
    assert pairs(cells) == {0, 1, 2, 4}


def test_of_two_axes_every_other_cell_is_left() -> None:
    cells = halved([1, 2, 3], "ab")
    assert [cell for cell in cells if type(cell) is tuple] == [(1, "a"), (2, "b"), (3, "a")]
    marked = halved([1, 2, 3], "ab", [True, False])
    assert sum(type(cell) is tuple for cell in marked) == 6 and len(marked) == 12


def test_an_axis_of_one_value_does_not_count() -> None:
    cells = halved([1, 2, 3], "ab", [None])
    assert [cell for cell in cells if type(cell) is tuple] == [(1, "a", None), (2, "b", None), (3, "a", None)]
