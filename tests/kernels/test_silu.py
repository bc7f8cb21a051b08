"""The gate, by each backend that runs here."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from triton_device import random

from baton.kernels.operations import preferring
from baton.kernels.silu import silu_mul

pytest.importorskip("triton")


@pytest.mark.parametrize("kind", ["reference", "numba", "triton"])
@pytest.mark.parametrize(("num_rows", "size"), [(1, 10), (3, 576), (0, 4)])
def test_equals_the_formula(kind: str, num_rows: int, size: int) -> None:
    gate_up = random(num_rows, 2 * size, scale=3.0)
    with preferring(kind):  # type: ignore[arg-type]
        actual = silu_mul(gate_up)
    torch.testing.assert_close(actual, F.silu(gate_up[:, :size]) * gate_up[:, size:], rtol=2e-6, atol=1e-6)
