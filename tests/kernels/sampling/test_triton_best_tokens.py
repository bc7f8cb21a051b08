"""The packed numbers of a share on a GPU. tests/kernels/sampling/test_best_tokens.py has the tokens."""

from __future__ import annotations

import pytest
import torch
from triton_device import DEVICE, random

pytest.importorskip("triton")

from baton.kernels.sampling.best_tokens import best_of_share_ref
from baton.kernels.sampling.triton_best_tokens import best_of_share


@pytest.mark.parametrize("num_ids", [0, 1, 1024, 1500, 2064])
def test_shares_of_one_width_have_as_many_numbers_whatever_tokens_they_have(num_ids: int) -> None:
    """The ranks gather them side by side. Their largest number is that of the specification, bit for bit."""
    logits = random(3, 2064)
    packed = best_of_share(logits, 4128, num_ids)
    assert packed.shape == (3, 3) and packed.dtype == torch.int64 and packed.device.type == DEVICE
    assert torch.equal(packed.amax(1, keepdim=True), best_of_share_ref(logits, 4128, num_ids))
