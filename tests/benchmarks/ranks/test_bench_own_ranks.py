"""The table of ranks with sequences of their own."""

from __future__ import annotations

from bench_own_ranks import Point, table


def test_ranks_are_compared_with_one_gpu_that_has_as_many_streams() -> None:
    points = [Point("one GPU", 64, 8.0, 5), Point("two ranks", 64, 5.0), Point("two ranks, one idle", 32, 4.0)]
    assert table(points).splitlines()[2:] == [
        "| 64 | one GPU | 8.00 | 8000 | 1.00 | 5 |",
        "| 64 | two ranks | 5.00 | 12800 | 1.60 | 0 |",
        "| 32 | two ranks, one idle | 4.00 | 8000 | nan | 0 |",
    ]
