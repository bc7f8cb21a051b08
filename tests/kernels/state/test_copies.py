"""Copies of numbers and columns, by each backend that runs here."""

from __future__ import annotations

import pytest
import torch
from triton_device import IS_INTERPRETED

from baton.kernels.operations import preferring
from baton.kernels.state.copies import copy_columns_, copy_numbers_

pytestmark = pytest.mark.skipif(not IS_INTERPRETED, reason="test_triton_copies.py copies between host and device")


@pytest.mark.parametrize("kind", ["reference", "triton"])
@pytest.mark.parametrize("num_columns", [1, 7, 300])
def test_copies(kind: str, num_columns: int) -> None:
    source, target = torch.arange(900).view(3, 300), torch.full((3, 300), -1)
    with preferring(kind):  # type: ignore[arg-type]
        assert copy_columns_(target, source, num_columns) is target
        assert torch.equal(target[:, :num_columns], source[:, :num_columns]) and (target[:, num_columns:] == -1).all()
        assert copy_numbers_(target, source) is target
    assert torch.equal(target, source)
