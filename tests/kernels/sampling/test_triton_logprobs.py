"""What only the kernels of log-probabilities promise; their values are tested with those of the other backends
(test_logprobs.py)."""

from __future__ import annotations

import pytest
import torch
from triton_device import DEVICE, random

pytest.importorskip("triton")

from baton.kernels.sampling.triton_logprobs import top_logprobs


def test_a_row_alone_equals_the_row_in_a_batch() -> None:
    logits = random(5, 4100, dtype=torch.bfloat16, scale=3.0)
    token_ids = torch.tensor([0, 4099, 17, 2048, 2047], device=DEVICE)
    together = top_logprobs(logits, token_ids, 3)
    for row in range(5):
        alone = top_logprobs(logits[row : row + 1], token_ids[row : row + 1], 3)
        assert all(torch.equal(one[0], all_[row]) for one, all_ in zip(alone, together, strict=True))


def test_a_row_of_no_numbers_harms_no_other() -> None:
    logits = random(2, 300)
    expected = top_logprobs(logits, torch.zeros(2, dtype=torch.int64, device=DEVICE), 2)
    logits[0, 3] = float("nan")
    found = top_logprobs(logits, torch.zeros(2, dtype=torch.int64, device=DEVICE), 2)
    assert found.chosen[0].isnan() and found.top_logprobs[0].isnan().all()
    assert all(torch.equal(ours[1], theirs[1]) for ours, theirs in zip(found, expected, strict=True))


def test_no_rows_and_other_ids() -> None:
    none = top_logprobs(random(0, 9), torch.zeros(0, dtype=torch.int64, device=DEVICE), 4)
    assert [each.shape for each in none] == [(0,), (0, 4), (0, 4)]
    for token_ids in (torch.zeros(2, dtype=torch.int32), torch.zeros(3, dtype=torch.int64)):
        with pytest.raises(AssertionError):
            top_logprobs(random(2, 9), token_ids.to(DEVICE), 4)
