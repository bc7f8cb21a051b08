"""The columns of a sampling batch by name, those of each token of the vocabulary too."""

from __future__ import annotations

from torch import Tensor

from baton.engine.sampling.batch import SamplingBatch
from baton.kernels.sampling.processors import TokenColumns


def column(batch: SamplingBatch, name: str) -> Tensor | None:
    """Return a field of the batch, or a copy of what its history says of each token."""
    if name in TokenColumns._fields:
        return None if batch.history is None else getattr(batch.history.rows(), name)
    return getattr(batch, name)


def filled_column(batch: SamplingBatch, name: str) -> Tensor:
    """Return a column that the batch must have."""
    found = column(batch, name)
    assert found is not None, name
    return found
