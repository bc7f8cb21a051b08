"""The end of a round, by each backend that runs here."""

from __future__ import annotations

import pytest
import torch
from triton_device import DEVICE

from baton.kernels.operations import preferring
from baton.kernels.state.advance import Columns, advance_

pytest.importorskip("triton")


@pytest.mark.parametrize("kind", ["reference", "triton"])
def test_rows_grow_by_what_was_accepted_and_one(kind: str) -> None:
    """Row 2 accepts one of two drafts, row 0 both; the last row is padding."""
    table = torch.tensor([[5, 6, 7, 0], [50, 60, 70, 0]], device=DEVICE)
    targets = torch.tensor([[11, 12, 13], [21, 22, 23], [1, 1, 1]], device=DEVICE)
    is_valid = torch.tensor([[True] * 3, [True, False, True], [True] * 3], device=DEVICE)
    args = (torch.tensor([2, 0, 3], device=DEVICE), targets, is_valid, torch.tensor([1, 2, 0], device=DEVICE))
    with preferring(kind):  # type: ignore[arg-type]
        numbers = advance_(table, Columns((0,), 1), *args, torch.tensor([9, 8], device=DEVICE))
    assert table.tolist() == [[8, 6, 9, 9], [23, 60, 12, 8]]
    assert numbers.tolist() == [[1, 3, 11, 12, 13], [2, 1, 21, 22, 23], [0, 3, 1, 1, 1]]
