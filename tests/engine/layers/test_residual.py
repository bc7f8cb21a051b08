"""The residual stream: whichever kernels norm, multiply and add, the numbers are those of the plain operations."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from thinned import halved
from triton_device import DEVICE, random

pytest.importorskip("triton")

from baton.engine.layers.decoder import Residual
from baton.engine.products.dense import DenseProduct
from baton.engine.products.fp8 import Fp8Product, RowRounding
from baton.engine.products.linear import Linear
from baton.kernels.operations import preferring
from baton.kernels.products import linear_configs
from baton.kernels.products.fp8 import Fp8Weight, RoundedRows, fp8_linear_ref, round_rows_ref
from baton.kernels.products.linear_configs import ROW_CLASSES, Config, ProductShape
from baton.kernels.products.norm import rms_norm_ref
from baton.kernels.products.silu import silu_mul_ref

SIZE, INNER, EPS = 64, 96, 1e-5
FUSED, PLAIN = Config("vector", 16, 128), None
PARTS = Config("dot", 32, 32, split_k=2)


def layers(dtype: torch.dtype) -> tuple[list[Linear], list[torch.Tensor]]:
    shapes = [(SIZE, SIZE), (2 * INNER, SIZE), (SIZE, INNER)]  # mixes what it reads, gate and up, down
    biases = [random(SIZE, dtype=dtype, seed=5), None, None]
    linears = [
        Linear.dense(random(*shape, dtype=dtype, seed=seed, scale=shape[1] ** -0.5), biases[seed])
        for seed, shape in enumerate(shapes)
    ]
    return linears, [random(SIZE, dtype=dtype, seed=seed) for seed in (6, 7, 8)]


def by_stream(hidden: torch.Tensor, num_layers: int) -> tuple[torch.Tensor, torch.Tensor]:
    (mix, gate_up, down), norms = layers(hidden.dtype)
    stream = Residual(hidden.clone(), EPS)
    for _ in range(num_layers):
        stream.add(mix, mix(stream.normed(norms[0])))
        stream.add(down, stream.gated_product(gate_up, norms[1]))
    return stream.normed(norms[2]), stream.settled()


def by_hand(hidden: torch.Tensor, num_layers: int) -> tuple[torch.Tensor, torch.Tensor]:
    (mix, gate_up, down), norms = layers(hidden.dtype)

    def product(linear: Linear, x: torch.Tensor) -> torch.Tensor:
        assert isinstance(linear.product, DenseProduct)
        return F.linear(x, linear.product.weight, linear.product.bias)

    for _ in range(num_layers):
        hidden = hidden + product(mix, product(mix, rms_norm_ref(hidden, norms[0], EPS)))
        gated = silu_mul_ref(product(gate_up, rms_norm_ref(hidden, norms[1], EPS)))
        hidden = hidden + product(down, gated)
    return rms_norm_ref(hidden, norms[2], EPS), hidden


@pytest.mark.parametrize("plain", [PLAIN, PARTS])
@pytest.mark.parametrize("fused", [(), ("mix",), ("down",), ("gate_up", "down"), ("mix", "gate_up", "down")])
def test_any_products_may_be_fused(
    fused: tuple[str, ...], plain: Config | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: dict[ProductShape, Config | None] = {}
    for name, sizes in {"mix": (SIZE, SIZE), "down": (SIZE, INNER), "gate_up": (2 * INNER, SIZE)}.items():
        for rows in ROW_CLASSES:
            chosen[ProductShape(*sizes, rows, name == "gate_up")] = FUSED if name in fused else plain
    monkeypatch.setattr(linear_configs, "CHOSEN", chosen)
    hidden = random(3, SIZE, dtype=torch.float16, seed=9)
    with preferring("triton"):
        ours = by_stream(hidden, 2)
    for actual, expected in zip(ours, by_hand(hidden, 2), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-2, atol=1e-2)


def test_float32_on_any_device() -> None:
    hidden = random(3, SIZE, seed=9)
    for actual, expected in zip(by_stream(hidden, 2), by_hand(hidden, 2), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    assert hidden.device.type == DEVICE


def fp8_linear_of(out_size: int, in_size: int, dtype: torch.dtype, seed: int, *, has_bias: bool) -> Linear:
    values, scales = round_rows_ref(random(out_size, in_size, seed=seed, scale=in_size**-0.5), in_size)
    bias = random(out_size, dtype=dtype, seed=5) if has_bias else None
    rounding = RowRounding(in_size, False, None)
    return Linear(Fp8Product(Fp8Weight(values, scales, in_size), rounding, bias, in_size, out_size, dtype))


@pytest.mark.parametrize(("num_rows", "has_bias"), halved([1, 3, 70], [False, True]))
def test_fp8_products_take_rows_that_their_neighbours_round(num_rows: int, has_bias: bool) -> None:
    """The numbers are those of norms, roundings, products and gates one by one, but for flips to the next e4m3."""
    dtype = torch.float16 if DEVICE == "cpu" else torch.bfloat16
    shapes = [(SIZE, SIZE), (2 * INNER, SIZE), (SIZE, INNER)]
    mix, gate_up, down = (
        fp8_linear_of(*shape, dtype, seed, has_bias=has_bias and seed < 2) for seed, shape in enumerate(shapes)
    )
    norms = [random(SIZE, dtype=dtype, seed=seed) for seed in (6, 7, 8)]
    hidden = random(num_rows, SIZE, dtype=dtype, seed=9)
    stream, expected = Residual(hidden.clone(), EPS), hidden

    def product(linear: Linear, x: torch.Tensor) -> torch.Tensor:
        of = linear.product
        assert isinstance(of, Fp8Product)
        return fp8_linear_ref(round_rows_ref(x, x.shape[1]), of.weight, of.bias, dtype)

    with preferring("triton"):
        for _ in range(2):
            rows = stream.normed_for(mix, norms[0])
            assert isinstance(rows, RoundedRows)
            stream.add(mix, mix(rows))
            stream.add(down, stream.gated_product(gate_up, norms[1], down))
        ours = stream.normed(norms[2]), stream.settled()
    for _ in range(2):
        expected = expected + product(mix, product(mix, rms_norm_ref(expected, norms[0], EPS)))
        gated = silu_mul_ref(product(gate_up, rms_norm_ref(expected, norms[1], EPS)))
        expected = expected + product(down, gated)
    for actual, theirs in zip(ours, (rms_norm_ref(expected, norms[2], EPS), expected), strict=True):
        assert (actual - theirs).float().norm() < (0.02 if dtype is torch.float16 else 0.04) * theirs.float().norm()
