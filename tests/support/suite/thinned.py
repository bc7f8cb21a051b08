"""Matrices of which the gate runs a part. The other cells are marked `whole`: they run with BATON_WHOLE_MATRIX=1."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable
from typing import Any

import pytest


def thinned(cells: Iterable[Any], is_kept: Callable[..., bool]) -> list[Any]:
    """Return all cells, each a tuple or one value. Those for which `is_kept(index, *values)` is False are marked
    `whole`."""
    return [_whole(cell) if not is_kept(i, *_values(cell)) else cell for i, cell in enumerate(cells)]


def halved(*axes: Iterable[Any]) -> list[Any]:
    """Return all combinations of the axes, of which the gate runs every other one. With three axes or more, every two
    values of two axes still meet."""
    cells = [tuple(zip(*cell, strict=True)) for cell in itertools.product(*map(enumerate, axes))]
    is_kept = [sum(places) % 2 == 0 for places, _ in cells]
    return thinned([values for _, values in cells], lambda i, *_: is_kept[i])


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
