"""Rotation and its cosines and sines, by each backend that runs here."""

from __future__ import annotations

import pytest
import torch
from triton_device import DEVICE, random

from baton.kernels.operations import preferring
from baton.kernels.products.rotary import apply_rotary_, rotary_ref, turns

pytest.importorskip("triton")


@pytest.mark.parametrize("kind", ["reference", "triton"])
@pytest.mark.parametrize("head_dim", [10, 64, 576])
def test_a_rotation_turns_pairs_by_their_angle(kind: str, head_dim: int) -> None:
    """Rotate by complex numbers: (a + ib) e^(i position frequency)."""
    half, positions = head_dim // 2, torch.tensor([0, 3, 17], device=DEVICE)
    frequencies = random(half).abs()
    both = torch.stack((frequencies.repeat(2), torch.cat((-frequencies, frequencies))))
    with preferring(kind):  # type: ignore[arg-type]
        cos, sin = turns(positions, both, 1.0, torch.float32)
    x = random(3, 5, head_dim, seed=1)
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.exp(1j * positions[:, None, None] * frequencies)
    expected = torch.cat((turned.real, turned.imag), -1)
    torch.testing.assert_close(rotary_ref(x, cos, sin), expected, atol=1e-5, rtol=1e-5)
    assert apply_rotary_(x, cos, sin) is x
    torch.testing.assert_close(x, expected, atol=1e-5, rtol=1e-5)
