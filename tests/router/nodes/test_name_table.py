"""The table of names is a set."""

from __future__ import annotations

import random

import pytest

from baton.router.nodes.told_pages import NameTable


@pytest.mark.parametrize("num_expected", [0, 300])
@pytest.mark.parametrize("bits", [6, 9, 60])
def test_it_holds_what_a_set_holds(num_expected: int, bits: int) -> None:
    """Names of few bits collide, and clusters run around the end of the array."""
    rng = random.Random(bits)
    table, held = NameTable(num_expected), set[int]()
    names = [rng.randrange(1, 1 << bits) << rng.choice([0, 0, 3]) for _ in range(200)]
    for step in range(3000):
        some = rng.choices(names, k=rng.randint(1, 4))
        if rng.random() < (0.7 if step % 1000 < 300 else 0.45):
            table.add(some)
            held.update(some)
        else:
            table.remove(some)
            held.difference_update(some)
        assert len(table) == len(held)
        assert all((name in table) == (name in held) for name in rng.choices(names, k=5))
    assert {name for name in names if name in table} == held
    table.remove(names)
    assert len(table) == 0 and not any(table._slots)


def test_zero_is_no_name() -> None:
    table = NameTable()
    table.add([0, 5])
    assert 0 not in table and 5 in table and len(table) == 1


def test_a_table_of_the_expected_size_does_not_grow() -> None:
    table = NameTable(50_000)
    before = table.num_bytes
    rng = random.Random(0)
    table.add(rng.getrandbits(64) for _ in range(50_000))
    assert len(table) == 50_000 and table.num_bytes == before == 1 << 20
