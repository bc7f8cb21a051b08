"""Products in a packed form, compared with the plain one."""

from __future__ import annotations

import torch

from baton.engine.products.base import Product
from baton.engine.products.linear import Linear


def check_equals_plain(kind: type[Product], weight: torch.Tensor, num_rows: int, *, has_bias: bool) -> None:
    """Check that `kind` serves `weight` [out_size, in_size] float32, with the numbers of the plain product."""
    (out_size, in_size), generator = weight.shape, torch.Generator().manual_seed(1)
    bias = torch.randn(out_size, generator=generator) if has_bias else None
    packed, plain = Linear.of(weight.clone(), bias), Linear.dense(weight, bias)
    assert isinstance(packed.product, kind)
    assert (packed.out_size, packed.in_size) == (out_size, in_size)
    x = torch.randn(num_rows, in_size, generator=generator)
    torch.testing.assert_close(packed(x), plain(x), atol=1e-6, rtol=0)
    torch.testing.assert_close(packed.gated(x), plain.gated(x), atol=1e-6, rtol=0)
