"""Block tables on the host hold exactly the pages of each slot, whatever changes they got before."""

from __future__ import annotations

import random

import numpy as np
import pytest

from baton.engine.state.block_tables import BlockTables
from baton.engine.work import TableChange

NUM_SLOTS, NUM_COLUMNS = 4, 12


def rows_of(tables: BlockTables, slots: list[int], num_rows: int, num_columns: int) -> list[list[int]]:
    table = np.full((num_rows, num_columns), 99, dtype=np.int64)
    tables.copy_rows(slots, table)
    return table.tolist()


def test_tables_follow_every_change() -> None:
    """Slots grow by a page, get other pages, or fewer: columns behind the pages are 0."""
    choose = random.Random(1)
    tables = BlockTables(NUM_SLOTS, NUM_COLUMNS)
    expected: list[list[int]] = [[] for _ in range(NUM_SLOTS)]
    for _ in range(300):
        slot = choose.randrange(NUM_SLOTS)
        first = choose.choice([0, len(expected[slot])])
        new = [choose.randrange(1, 99) for _ in range(choose.randrange(NUM_COLUMNS - first + 1))]
        expected[slot] = expected[slot][:first] + new
        tables.apply([TableChange(slot, first, new)])
        slots = choose.sample(range(NUM_SLOTS), 3)
        padded = [(expected[each] + [0] * NUM_COLUMNS)[:NUM_COLUMNS] for each in slots]
        assert rows_of(tables, slots, 3, NUM_COLUMNS) == padded


def test_rows_behind_the_sequences_name_the_padding_page() -> None:
    tables = BlockTables(NUM_SLOTS, NUM_COLUMNS)
    tables.apply([TableChange(1, 0, [5, 6, 7]), TableChange(3, 0, [8])])
    assert rows_of(tables, [3, 1], 4, 2) == [[8, 0], [5, 6], [0, 0], [0, 0]]


@pytest.mark.parametrize("change", [TableChange(1, 2, [5]), TableChange(1, 0, [5] * (NUM_COLUMNS + 1))], ids=str)
def test_a_change_behind_a_hole_or_beyond_the_table_is_our_bug(change: TableChange) -> None:
    tables = BlockTables(NUM_SLOTS, NUM_COLUMNS)
    tables.apply([TableChange(1, 0, [5])])
    with pytest.raises(AssertionError):
        tables.apply([change])
