"""The norm in fewer torch calls, against its specification."""

from __future__ import annotations

import pytest
import torch

from baton.kernels.products.norm import rms_norm_ref
from baton.kernels.products.torch_norm import rms_norm


@pytest.mark.parametrize("shape", [(1, 10), (5, 3, 7), (0, 8), (2, 576)])
def test_equals_the_reference(shape: tuple[int, ...]) -> None:
    x, weight = torch.randn(shape), torch.randn(shape[-1])
    torch.testing.assert_close(rms_norm(x, weight, 1e-6), rms_norm_ref(x, weight, 1e-6), atol=2e-6, rtol=2e-6)
