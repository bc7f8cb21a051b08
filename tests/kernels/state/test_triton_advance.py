"""Rows of sequences that advance by the tokens of a round."""

from __future__ import annotations

import pytest
import torch
from triton_device import DEVICE

pytest.importorskip("triton")

from baton.kernels.state import triton_rows
from baton.kernels.state.rows import Columns, advance_ref_

COLUMNS = Columns(counts=(0, 3), last_token=1)


@pytest.mark.parametrize("num_targets", [1, 2, 6])
@pytest.mark.parametrize("num_seqs", [1, 5])
def test_rows_advance_as_the_reference_says(num_seqs: int, num_targets: int) -> None:
    """Sequences apart, out of order, one invalid from its middle on; the last two are padding."""
    generator = torch.Generator().manual_seed(num_seqs)
    table = torch.randint(0, 1 << 40, (5, 9), generator=generator).to(DEVICE)
    index = torch.tensor([6, 0, 3, 8, 8][:num_seqs]).to(DEVICE)
    targets = torch.randint(0, 1 << 30, (num_seqs, num_targets), generator=generator).to(DEVICE)
    num_accepted = torch.randint(0, num_targets, (num_seqs,), generator=generator).to(DEVICE)
    is_valid = torch.ones(num_seqs, num_targets, dtype=torch.bool, device=DEVICE)
    is_valid[0, num_targets // 2] = False
    resting = torch.arange(50, 55).to(DEVICE)
    expected_table = table.clone()
    expected = advance_ref_(expected_table, COLUMNS, index, targets, is_valid, num_accepted, resting)
    # the reference sets the last row in any case, the kernel where somebody had it
    table[:, -1] = resting
    numbers = triton_rows.advance_(table, COLUMNS, index, targets, is_valid, num_accepted, resting)
    assert torch.equal(numbers, expected) and torch.equal(table, expected_table)
    assert int(numbers[0, 1]) == num_targets // 2 and (num_seqs == 1 or int(numbers[1, 1]) == num_targets)
