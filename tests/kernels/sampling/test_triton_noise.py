"""A uniform hash becomes the reference's noise to the bit; test_triton_sample.py draws with it."""

from __future__ import annotations

import pytest
import torch
from triton_device import DEVICE, random

pytest.importorskip("triton")

from baton.kernels.sampling.noise import gumbel_from_bits_ref, gumbel_noise_ref
from baton.kernels.sampling.triton_noise import add_gumbel_noise_, gumbel_from_bits


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's products wrap aloud
def test_bits_and_sums() -> None:
    bits = torch.tensor([0, 1, -1, 2**31 - 1, -(2**31), 12345], dtype=torch.int32)
    ours = gumbel_from_bits(bits.to(DEVICE)).cpu()
    assert torch.equal(ours.view(torch.int32), gumbel_from_bits_ref(bits).view(torch.int32))
    scores, seeds, positions = random(2, 1500), torch.tensor([3, 2**62], device=DEVICE), torch.arange(2, device=DEVICE)
    expected = scores.cpu() + gumbel_noise_ref(seeds.cpu(), positions.cpu(), 1500)
    assert torch.equal(add_gumbel_noise_(scores, seeds, positions).cpu(), expected)
