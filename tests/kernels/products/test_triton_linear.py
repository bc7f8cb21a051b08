"""The products of few rows against float64, and what is left to torch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from thinned import every, thinned
from torch import Tensor
from triton_device import DEVICE, IS_INTERPRETED, random

pytest.importorskip("triton")

from triton.runtime.errors import OutOfResources

from baton.kernels.products import linear_configs, triton_linear
from baton.kernels.products.linear_configs import MAX_ROWS, Config, DoesNotFitError, ProductShape
from baton.kernels.products.norm import Norm, rms_norm_ref
from baton.kernels.products.silu import silu_mul_ref
from baton.kernels.products.triton_linear import choose, fuses, gated_linear, linear, linear_parts, sum_parts

NAN = float("nan")
HALF = torch.float16  # the interpreter multiplies matrices of no bfloat16
DTYPES = [torch.float16] if IS_INTERPRETED else [torch.float16, torch.bfloat16]
TOLERANCE = {torch.float16: 3e-3, torch.bfloat16: 2e-2}  # of sums of variance 1: rounding of the result, twice if gated
CASES = [  # (num_rows, out_size, in_size, config): odd numbers of rows of W, columns that no tile divides
    (1, 70, 272, Config("vector", 1, 256)),
    (1, 7, 272, Config("vector", 4, 64)),
    (1, 33, 512, Config("vector", 2, 512)),
    (3, 70, 272, Config("vector", 2, 512)),
    (8, 5, 64, Config("vector", 4, 64)),
    (1, 34, 128, Config("dot", 16, 64)),
    (5, 70, 272, Config("dot", 32, 64)),
    (16, 32, 256, Config("dot", 32, 64, split_k=2)),
    (17, 70, 272, Config("dot", 32, 64, split_k=3)),
    (32, 64, 48, Config("dot", 16, 64, split_k=4)),
    (33, 70, 272, Config("dot", 32, 64)),
    (64, 34, 256, Config("dot", 64, 64, split_k=2)),
    (5, 70, 272, Config("dot", 21, 64)),  # rows of W per program: no power of 2
    (8, 71, 256, Config("dot", 36, 64, split_k=2)),
    (17, 70, 272, Config("dot", 9, 64, split_k=3)),
]


def operands(num_rows: int, out_size: int, in_size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """x, weight and bias inside larger tensors of NaN, so that reading beyond them shows."""
    x = torch.full((num_rows + 2, in_size + 8), NAN, dtype=dtype, device=DEVICE)[1:-1, :in_size]
    weight = torch.full((out_size + 4, in_size), NAN, dtype=dtype, device=DEVICE)[2:-2]
    bias = torch.full((out_size + 16,), NAN, dtype=dtype, device=DEVICE)[8:-8]
    x.copy_(random(num_rows, in_size))
    weight.copy_(random(out_size, in_size, seed=1, scale=in_size**-0.5))
    bias.copy_(random(out_size, seed=2))
    return x, weight, bias


def assert_near(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert actual.dtype == dtype and actual.is_contiguous()
    torch.testing.assert_close(actual.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "out_size", "in_size", "config"), CASES)
def test_every_kernel(num_rows: int, out_size: int, in_size: int, config: Config, dtype: torch.dtype) -> None:
    x, weight, bias = operands(num_rows, out_size, in_size, dtype)
    plain = F.linear(x.double(), weight.double())
    assert_near(linear(x, weight, None, config), plain, dtype)
    assert_near(linear(x, weight, bias, config), plain + bias.double(), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_rows", "out_size", "in_size", "config"),
    thinned(CASES, lambda i, *case: case[3].split_k > 1 or i % 4 == 0),
)
def test_parts_of_a_product(num_rows: int, out_size: int, in_size: int, config: Config, dtype: torch.dtype) -> None:
    x, weight, _ = operands(num_rows, out_size, in_size, dtype)
    whole, parts = linear(x, weight, None, config), linear_parts(x, weight, config)
    if config.split_k == 1:
        assert torch.equal(parts, whole)
    else:
        assert parts.shape == (config.split_k, num_rows, out_size) and parts.dtype == torch.float32
        assert torch.equal(sum_parts(parts, dtype), whole)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "out_size", "in_size", "config"), every(CASES, 2))
def test_every_kernel_gated(num_rows: int, out_size: int, in_size: int, config: Config, dtype: torch.dtype) -> None:
    x, weight, _ = operands(num_rows, 2 * out_size, in_size, dtype)
    expected = silu_mul_ref(F.linear(x.double(), weight.double()))
    actual = gated_linear(x, weight, config)
    assert actual.shape == (num_rows, out_size)
    assert_near(actual, expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_rows", "out_size", "in_size", "config"),
    every([case for case in CASES if case[3].kind == "vector"], 2, first=1),
)
def test_what_a_vector_takes_along(
    num_rows: int, out_size: int, in_size: int, config: Config, dtype: torch.dtype
) -> None:
    """A norm before, a residual after: to the bit what the product alone and the reference make of it."""
    x, weight, bias = operands(num_rows, out_size, in_size, dtype)
    x.mul_(torch.logspace(-2, 2, num_rows, device=DEVICE).unsqueeze(1))
    norm = Norm(random(in_size, dtype=dtype, seed=3), 1e-3)
    normed = rms_norm_ref(x, *norm)
    whole = config._replace(block_k=512)  # as a norm has it, so that sums are in one order
    assert_equal_but(1, linear(x, weight, bias, config, norm=norm), linear(normed, weight, bias, whole))
    residual = random(num_rows, out_size, dtype=dtype, seed=4)
    expected = residual + linear(x, weight, bias, config)
    added = linear(x, weight, bias, config, residual=residual)
    assert added is residual and torch.equal(added, expected)
    pair = torch.cat([weight, weight.flip(0)])
    assert_equal_but(1, gated_linear(x, pair, config, norm=norm), gated_linear(normed, pair, whole))


def assert_equal_but(percent: float, actual: Tensor, expected: Tensor) -> None:
    """Sums of squares in another order may round a few numbers otherwise, by a unit in the last place each."""
    assert (actual != expected).float().mean() <= percent / 100 + 2 / actual.numel()
    torch.testing.assert_close(actual, expected, rtol=TOLERANCE[actual.dtype], atol=TOLERANCE[actual.dtype])


def test_only_a_vector_takes_along() -> None:
    x, weight, _ = operands(2, 70, 160, HALF)
    assert fuses(x[:1], weight) and fuses(x[:1], weight, is_gated=True) and not fuses(x, weight)
    for config in (Config("dot", 16, 32), Config("dot", 16, 32, split_k=2)):
        with pytest.raises(AssertionError):
            linear(x, weight, None, config, residual=x.new_zeros(2, 70))
        with pytest.raises(AssertionError):
            gated_linear(x, weight, config, norm=Norm(weight[0], 1e-3))


def test_a_vector_of_bfloat16() -> None:
    x, weight, bias = operands(2, 40, 96, torch.bfloat16)
    expected = F.linear(x.double(), weight.double(), bias.double())
    assert_near(linear(x, weight, bias, Config("vector", 2, 128)), expected, torch.bfloat16)


@pytest.mark.parametrize("config", [Config("vector", 2, 64), Config("dot", 16, 32, split_k=2)])
def test_a_row_does_not_depend_on_the_others(config: Config) -> None:
    x, weight, _ = operands(3, 40, 64, HALF)
    together = linear(x, weight, None, config)
    x[0], x[2] = 7.0, NAN
    assert torch.equal(linear(x, weight, None, config)[1], together[1])


@pytest.mark.parametrize("num_rows", [1, 2, 8, 32, 33, 64])
def test_chosen_by_shape(num_rows: int) -> None:
    x, weight, bias = operands(num_rows, 70, 160, HALF)
    config = choose(x, weight)
    assert config is not None and (config.kind == "vector") == (num_rows == 1)
    assert_near(linear(x, weight, bias), F.linear(x.double(), weight.double(), bias.double()), HALF)
    assert_near(gated_linear(x, weight), silu_mul_ref(F.linear(x.double(), weight.double())), HALF)


def test_measured_configurations_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = Config("dot", 16, 32)
    shapes = {ProductShape(70, 160, 1): Config("vector", 4, 32), ProductShape(70, 160, 4): None}
    monkeypatch.setattr(linear_configs, "CHOSEN", shapes | {ProductShape(70, 160, 8): measured})
    chosen = [choose(*operands(num_rows, 70, 160, HALF)[:2]) for num_rows in (1, 2, 4, 5, 8, 9)]
    assert chosen[:5] == [Config("vector", 4, 32), None, None, measured, measured]
    assert chosen[5] == linear_configs.default(ProductShape(70, 160, 16))
    assert choose(*operands(8, 70, 160, HALF)[:2], is_gated=True) != measured


def test_a_configuration_that_does_not_fit_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(*args: object, **kwargs: object) -> None:
        raise OutOfResources(395392, 232448, "shared memory")

    monkeypatch.setattr(triton_linear, "vector_product", launch)
    x, weight, _ = operands(1, 70, 160, HALF)
    with pytest.raises(DoesNotFitError, match=r"vector.*395392"):
        linear(x, weight, None, Config("vector", 2, 256))


def test_what_torch_does() -> None:
    x, weight, bias = operands(MAX_ROWS + 1, 20, 32, HALF)
    one = x[:1]
    others = [
        (x, weight),
        (x[:0], weight),
        (one.float(), weight.float()),
        (one[:, :24], weight[:, :24].contiguous()),
        (one[:, ::2], weight[:, :16].contiguous()),
        (one, weight.T.contiguous().T),
    ]
    for rows, matrix in others:
        assert choose(rows, matrix) is None, (rows.shape, matrix.shape)
        expected = F.linear(rows, matrix, bias.to(rows.dtype))
        assert torch.equal(linear(rows, matrix, bias.to(rows.dtype)), expected)
    assert choose(one, weight) is not None
    assert_near(gated_linear(x, weight), silu_mul_ref(F.linear(x.double(), weight.double())), HALF)
