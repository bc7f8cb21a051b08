"""Products and what is fused with them, by each backend that runs here."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from triton_device import DEVICE, random

from baton.kernels.operations import preferring
from baton.kernels.products.linear import fuses, gated_linear, linear, linear_parts, sum_parts
from baton.kernels.products.norm import Norm, rms_norm_ref
from baton.kernels.products.silu import silu_mul_ref

pytest.importorskip("triton")
EPS = 1e-5


@pytest.mark.parametrize("kind", ["reference", "triton"])
@pytest.mark.parametrize(("num_rows", "in_size", "out_size"), [(1, 48, 10), (5, 160, 34), (70, 32, 14)])
def test_products(kind: str, num_rows: int, in_size: int, out_size: int) -> None:
    x, weight = random(num_rows, in_size, dtype=torch.float16), random(out_size, in_size, dtype=torch.float16, seed=1)
    bias, residual = random(out_size, dtype=torch.float16, seed=2), random(num_rows, out_size, dtype=torch.float16)
    norm = Norm(random(in_size, dtype=torch.float16, seed=3), EPS)
    product = F.linear(x, weight)
    with preferring(kind):  # type: ignore[arg-type]
        plain, gated, parts = linear(x, weight, bias), gated_linear(x, weight), linear_parts(x, weight)
        parts = sum_parts(parts, x.dtype) if parts.ndim == 3 else parts
        can_fuse = fuses(x, weight)
        fused = linear(x, weight, norm=norm, residual=residual.clone()) if can_fuse or kind == "reference" else None
    assert can_fuse == (kind == "triton" and num_rows == 1)
    for actual, expected in ((plain, F.linear(x, weight, bias)), (gated, silu_mul_ref(product)), (parts, product)):
        torch.testing.assert_close(actual, expected, atol=5e-2, rtol=1e-2)
    if fused is not None:
        expected = residual + F.linear(rms_norm_ref(x, norm.weight, EPS), weight)
        torch.testing.assert_close(fused, expected, atol=5e-2, rtol=1e-2)
    assert plain.device.type == DEVICE
