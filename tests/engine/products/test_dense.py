"""Plain products: torch's numbers without a GPU, and the Triton kernels by what they fuse (in the interpreter)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from triton_device import random

pytest.importorskip("triton")

from baton.engine.products.dense import DenseProduct
from baton.kernels.operations import preferring
from baton.kernels.products import linear_configs
from baton.kernels.products.linear_configs import ROW_CLASSES, Config, ProductShape
from baton.kernels.products.norm import Norm, rms_norm_ref
from baton.kernels.products.silu import silu_mul_ref

OUT, IN = 96, 64
VECTOR = Config("vector", 16, 128)
PARTS = Config("dot", 32, 32, split_k=2)


def product(dtype: torch.dtype, *, has_bias: bool) -> DenseProduct:
    weight = random(OUT, IN, dtype=dtype, seed=1, scale=IN**-0.5)
    return DenseProduct.of(weight, random(OUT, dtype=dtype, seed=2) if has_bias else None)


@pytest.mark.parametrize("has_bias", [True, False])
def test_float32_is_the_product_of_torch(has_bias: bool) -> None:
    dense, x = product(torch.float32, has_bias=has_bias), random(3, IN, seed=3)
    expected = F.linear(x, dense.weight, dense.bias)
    torch.testing.assert_close(dense(x), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(dense.gated(x), silu_mul_ref(expected), atol=1e-5, rtol=1e-5)
    assert (dense.out_size, dense.in_size) == (OUT, IN) and not dense.fuses(x)


Choose = Callable[[Config], None]


@pytest.fixture
def choose(monkeypatch: pytest.MonkeyPatch) -> Iterator[Choose]:
    """Return a function that has Triton serve all products, by one configuration."""

    def chosen(config: Config) -> None:
        shapes = [ProductShape(OUT, IN, rows, is_gated) for rows in ROW_CLASSES for is_gated in (False, True)]
        monkeypatch.setattr(linear_configs, "CHOSEN", dict.fromkeys(shapes, config))

    with preferring("triton"):
        yield chosen


def test_a_kernel_norms_before_and_adds_after(choose: Choose) -> None:
    choose(VECTOR)
    dense, x = product(torch.float16, has_bias=True), random(1, IN, dtype=torch.float16, seed=3)
    norm = Norm(random(IN, dtype=torch.float16, seed=4), 1e-5)
    residual = random(1, OUT, dtype=torch.float16, seed=5)
    assert dense.fuses(x) and not dense.fuses(x, is_gated=True)  # no kernel gates with a bias
    expected = residual + F.linear(rms_norm_ref(x, *norm), dense.weight, dense.bias)
    out = dense(x, norm=norm, residual=residual)
    assert out is residual
    torch.testing.assert_close(out, expected, atol=1e-2, rtol=1e-2)


def test_a_kernel_norms_before_and_gates_after(choose: Choose) -> None:
    choose(VECTOR)
    dense, x = product(torch.float16, has_bias=False), random(1, IN, dtype=torch.float16, seed=3)
    norm = Norm(random(IN, dtype=torch.float16, seed=4), 1e-5)
    assert dense.fuses(x, is_gated=True)
    expected = silu_mul_ref(F.linear(rms_norm_ref(x, *norm), dense.weight))
    torch.testing.assert_close(dense.gated(x, norm=norm), expected, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("has_bias", [True, False])
def test_parts_are_left_to_the_reader_unless_there_is_a_bias(has_bias: bool, choose: Choose) -> None:
    choose(PARTS)
    dense, x = product(torch.float16, has_bias=has_bias), random(3, IN, dtype=torch.float16, seed=3)
    expected, parts = F.linear(x, dense.weight, dense.bias), dense.parts(x)
    assert parts.ndim == (2 if has_bias else 3) and not dense.fuses(x)
    whole = parts if has_bias else parts.sum(0).half()
    torch.testing.assert_close(whole, expected, atol=1e-2, rtol=1e-2)
