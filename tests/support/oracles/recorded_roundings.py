"""The roundings of an engine, which transformers' model follows (quantized.py)."""

from __future__ import annotations

import os
import pickle
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from forked import RANK_CONTEXT
from quantized import Roundings
from torch import Tensor

from baton.engine.products.fp8 import RowRounding


@contextmanager
def recorded_roundings() -> Iterator[Roundings]:
    """Record the rows that the block rounds to e4m3, here and in the ranks that start in the block (forked.py)."""
    with (
        tempfile.TemporaryDirectory() as folder,
        patch.dict(os.environ, {RANK_CONTEXT: f"{__name__} {written_roundings.__name__} {folder}"}),
        written_roundings(folder),
    ):
        yield Roundings(Path(folder))


@contextmanager
def written_roundings(folder: str) -> Iterator[None]:
    """Write the rows that this process rounds to a file in `folder`."""
    numbers = RowRounding.numbers
    with (Path(folder) / str(os.getpid())).open("ab") as file:

        def recorded(rounding: RowRounding, x: Tensor) -> Tensor:
            rounded = numbers(rounding, x)
            meant = rounded if rounding.stored is None else rounded * rounding.stored
            pickle.dump((x.float().numpy(), meant.numpy()), file)
            file.flush()
            return rounded

        with patch.object(RowRounding, "numbers", recorded):
            yield
