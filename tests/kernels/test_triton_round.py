"""What a round begins and ends with: the turns of positions, and rows advanced by what it brought."""

from __future__ import annotations

import pytest
import torch
from triton_device import DEVICE, ULP

pytest.importorskip("triton")

from baton.kernels import triton_advance, triton_rotary
from baton.kernels.advance import Columns, advance_ref_
from baton.kernels.rotary import turns_ref

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
    numbers = triton_advance.advance_(table, COLUMNS, index, targets, is_valid, num_accepted, resting)
    assert torch.equal(numbers, expected) and torch.equal(table, expected_table)
    assert int(numbers[0, 1]) == num_targets // 2 and (num_seqs == 1 or int(numbers[1, 1]) == num_targets)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("num_tokens", "head_dim", "scale"), [(1, 64, 1.0), (11, 80, 1.25), (3, 8, 1.0)])
def test_turns(num_tokens: int, head_dim: int, scale: float, dtype: torch.dtype) -> None:
    positions = torch.randint(0, 131_072, (num_tokens,), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    half = 10_000.0 ** -torch.linspace(0, 1, head_dim // 2)
    frequencies = torch.stack((torch.cat((half, half)), torch.cat((-half, half)))).to(DEVICE)
    spread = torch.stack((positions, positions - 1), dim=1)[:, 0]
    expected = turns_ref(positions, frequencies, scale, dtype)
    for actual, turned in zip(triton_rotary.turns(spread, frequencies, scale, dtype), expected, strict=True):
        assert actual.shape == (num_tokens, 1, head_dim) and actual.dtype == dtype and actual.is_contiguous()
        torch.testing.assert_close(actual, turned, rtol=2 * ULP[dtype], atol=1e-6)
