"""Matrices of which the gate runs a part. The other cells are marked `whole`: they run with BATON_WHOLE_MATRIX=1."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import pytest


def thinned(cells: Iterable[Any], is_kept: Callable[..., bool]) -> list[Any]:
    """Return all cells, each a tuple or one value. Those for which `is_kept(index, *values)` is False are marked
    `whole`."""
    return [_whole(cell) if not is_kept(i, *_values(cell)) else cell for i, cell in enumerate(cells)]


def halved(*axes: Iterable[Any]) -> list[Any]:
    """Return all combinations of the axes. The gate runs every other one of two axes, and of three axes or more those
    that `pairs` chooses. An axis of one value does not count."""
    cells = [tuple(zip(*cell, strict=True)) for cell in itertools.product(*map(enumerate, map(list, axes)))]
    places = [places for places, _ in cells]
    num_axes = sum(len(set(axis)) > 1 for axis in zip(*places, strict=True))
    kept = pairs(places) if num_axes > 2 else {i for i, each in enumerate(places) if sum(each) % 2 == 0}
    return thinned([values for _, values in cells], lambda i, *_: i in kept)


def pairs(cells: Sequence[tuple[Hashable, ...]], num_values: int = 2) -> set[int]:
    """Return the places of a few cells in which every two values meet that meet in any cell, or every value occurs if
    `num_values` is 1. Each time the first cell is taken in which most pairs are new."""
    own = [set(itertools.combinations(enumerate(cell), num_values)) for cell in cells]
    left, kept = set[Any]().union(*own), set[int]()
    while left:
        kept.add(max(range(len(cells)), key=lambda i: len(own[i] & left)))
        left = left.difference(*(own[i] for i in kept))
    return kept


def every(cells: Iterable[Any], step: int, *, first: int = 0) -> list[Any]:
    """Return all cells, of which the gate runs one in `step`."""
    return thinned(cells, lambda i, *_: i % step == first)


def num_examples(count: int) -> int:
    """Return how many random examples a test draws: a third of `count` in the gate."""
    return count if is_whole() else count // 3


def is_whole() -> bool:
    """Return whether tests marked `whole` run."""
    return "BATON_WHOLE_MATRIX" in os.environ


def _whole(cell: Any) -> Any:
    return pytest.param(*_values(cell), marks=pytest.mark.whole)


def _values(cell: Any) -> tuple[Any, ...]:
    return cell if type(cell) is tuple else (cell,)
