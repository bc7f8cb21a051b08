"""Entries by Triton against their formula, on a GPU if there is one, otherwise in the interpreter."""

from __future__ import annotations

import pytest
import torch
from triton_device import DEVICE, random

pytest.importorskip("triton")

from baton.kernels.attention.paged_plan import PagedPlan
from baton.kernels.entries.entries import compress, rotate_pairs_, window_sums
from baton.kernels.entries.paged_entries import TokenPlan
from baton.kernels.entries.triton_compress import compress_paged
from baton.kernels.products.norm import Norm

PAGE_SIZE, NUM = 8, 27
TABLE, TAILS = torch.tensor([[5, 3, 1, 6]], device=DEVICE), torch.tensor([[2, 6, 4, 7]], device=DEVICE)
FREQUENCIES = torch.tensor([1.0, 0.1], device=DEVICE)


@pytest.mark.parametrize("chunks", [[NUM], [3, 1, 1, 9, 2, 7, 4]], ids=str)
@pytest.mark.parametrize(
    ("rate", "width", "overlaps", "num_kept"),
    [(4, 12, True, 8), (2, 12, True, 5), (8, 136, False, 8), (8, 12, False, 3), (4, 12, False, 5), (8, 12, False, 7)],
)
def test_entries_are_the_same_however_a_text_is_divided(
    rate: int, width: int, chunks: list[int], num_kept: int, *, overlaps: bool
) -> None:
    """Pages that keep fewer rows than they have tokens keep the last ones."""
    columns = width * (1 + overlaps)
    inputs, bias, norm = random(NUM, 2 * columns), random(rate, columns, seed=1), Norm(random(width, seed=2), 1e-6)
    rows = torch.full((8, 1, 1, num_kept, 2 * columns), float("nan"), device=DEVICE)
    entries = torch.full((8, 1, 1, PAGE_SIZE, -(-width // rate)), float("nan"), device=DEVICE)
    start = 0
    for num in chunks:
        paged = PagedPlan.uniform(TABLE, torch.tensor([start + num], device=DEVICE), num, PAGE_SIZE, is_stored=True)
        plan = TokenPlan.of(paged, TAILS, num, PAGE_SIZE)
        compress_paged(inputs[start : start + num], bias, norm, FREQUENCIES, rows, entries, plan)
        assert not plan.arrivals.any()
        start += num
    slots = torch.tensor(
        [slot for slot in range(NUM) if slot + num_kept >= min(NUM, -(-(slot + 1) // PAGE_SIZE) * PAGE_SIZE)]
    )
    at = TAILS[0][slots // PAGE_SIZE], slots % PAGE_SIZE % num_kept
    left = inputs if overlaps else window_sums(inputs, bias, 0, None)
    torch.testing.assert_close(rows[at[0], 0, 0, at[1]], left[slots], atol=1e-6, rtol=1e-5)
    rows[at[0], 0, 0, at[1]] = float("nan")
    assert rows.isnan().all()
    num = NUM // rate
    expected = compress(inputs[: num * rate], bias, norm, has_before=False).unsqueeze(1)
    angles = (rate * torch.arange(num, device=DEVICE).view(-1, 1, 1)) * FREQUENCIES
    rotate_pairs_(expected, angles.cos(), angles.sin())
    found = entries[TABLE[0]].view(-1, rate * entries.shape[4])
    torch.testing.assert_close(found[:num, :width], expected.squeeze(1), atol=1e-5, rtol=1e-5)
    assert found[num:].isnan().all()
