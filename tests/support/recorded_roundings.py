"""The roundings of an engine in this process, which transformers' model follows (quantized.py)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from quantized import Roundings
from torch import Tensor

from baton.engine.products.fp8 import RowRounding


@contextmanager
def recorded_roundings() -> Iterator[Roundings]:
    """Record the rows that the block rounds to e4m3."""
    roundings, numbers = Roundings(), RowRounding.numbers

    def recorded(rounding: RowRounding, x: Tensor) -> Tensor:
        rounded = numbers(rounding, x)
        roundings.add(x, rounded if rounding.stored is None else rounded * rounding.stored)
        return rounded

    with patch.object(RowRounding, "numbers", recorded):
        yield roundings
