"""Rows that are gathered, assigned and packed, by each backend that runs here."""

from __future__ import annotations

import pytest
import torch
from triton_device import DEVICE, random

from baton.kernels.operations import preferring
from baton.kernels.state.rows import assign_rows_, gather_rows, packed, unpacked

pytest.importorskip("triton")


@pytest.mark.parametrize("kind", ["reference", "triton"])
def test_rows(kind: str) -> None:
    tables = [random(5, 3), torch.arange(5, device=DEVICE), random(5, 2, 7) > 0]
    index = torch.tensor([4, 0, 2], device=DEVICE)
    with preferring(kind):  # type: ignore[arg-type]
        gathered = gather_rows(tables, index)
        copies = unpacked(packed(tables), tables)
        zeros = [torch.zeros_like(table) for table in tables]
        assign_rows_(zeros, index, gathered)
        assert gather_rows([], index) == []
    for table, rows, copy, assigned in zip(tables, gathered, copies, zeros, strict=True):
        assert torch.equal(rows, table[index]) and torch.equal(copy, table)
        assert torch.equal(assigned[index], rows) and not assigned[[1, 3]].any()
