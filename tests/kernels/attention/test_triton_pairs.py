"""Numbers in e4m3 that kernels read in pairs are what torch makes of them, all 256 codes."""

# ruff: noqa: N803

from __future__ import annotations

import pytest
import torch
from triton_device import DEVICE, IS_INTERPRETED

pytest.importorskip("triton")

import triton
import triton.language as tl

from baton.kernels.attention.triton_pairs import in_pairs, join_sums, numbers_of, scores_of, split_queries, weigh_pairs

DTYPES = [torch.float32] if IS_INTERPRETED else [torch.float32, torch.bfloat16]


@triton.jit
def _numbers_kernel(out_ptr, pairs_ptr, scales_ptr, N: tl.constexpr, D: tl.constexpr):
    """Write `numbers_of` of `pairs_ptr` [N, D / 2] uint16 to `out_ptr` [N, D]."""
    rows, dims = tl.arange(0, N), tl.arange(0, D)
    pairs = tl.load(pairs_ptr + rows[:, None] * (D // 2) + tl.arange(0, D // 2)[None, :])
    numbers = numbers_of(pairs, tl.load(scales_ptr + rows), out_ptr.dtype.element_ty)
    tl.store(out_ptr + rows[:, None] * D + dims[None, :], numbers)


@triton.jit
def _products_kernel(
    out_ptr,
    scores_ptr,
    q_ptr,
    k_ptr,
    k_scales_ptr,
    v_ptr,
    v_scales_ptr,
    M: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
):
    """Write the scores of `q_ptr` [M, D] and the attention to `k_ptr` and `v_ptr` [N, D / 2] uint16."""
    rows, keys, dims, halves = tl.arange(0, M), tl.arange(0, N), tl.arange(0, D), tl.arange(0, D // 2)
    q = tl.load(q_ptr + rows[:, None] * D + dims[None, :])
    places = keys[:, None] * (D // 2) + halves[None, :]
    even, odd = split_queries(q)
    scores = scores_of(even, odd, tl.load(k_ptr + places), tl.load(k_scales_ptr + keys))
    tl.store(scores_ptr + rows[:, None] * N + keys[None, :], scores)
    sums, zeros = tl.zeros([M, D // 2], tl.float32), tl.zeros([M], tl.float32)
    even, odd, total, _ = weigh_pairs(
        scores, 1.0, tl.load(v_ptr + places), tl.load(v_scales_ptr + keys), sums, sums, zeros, zeros - 1e30, q.dtype
    )
    tl.store(out_ptr + rows[:, None] * D + dims[None, :], join_sums(even, odd) / total[:, None])


def codes(num_rows: int, head_dim: int, seed: int = 0) -> torch.Tensor:
    """Return random e4m3 numbers but NaN, [num_rows, head_dim] on DEVICE."""
    generator = torch.Generator().manual_seed(seed)
    found = torch.randint(0, 256, (num_rows, head_dim), dtype=torch.uint8, generator=generator)
    return torch.where(found & 0x7F == 0x7F, 0, found).to(DEVICE).view(torch.float8_e4m3fn)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("exponent", [-100, -9, 0, 7])
def test_all_codes_in_all_places(exponent: int, dtype: torch.dtype) -> None:
    values = torch.arange(512, device=DEVICE).add(torch.arange(0, 512, 128, device=DEVICE).unsqueeze(1))
    values = values.remainder(256).to(torch.uint8).view(32, 64).view(torch.float8_e4m3fn)
    scales = torch.full((32,), 2.0**exponent, device=DEVICE)
    out = torch.empty(32, 64, dtype=dtype, device=DEVICE)
    _numbers_kernel[(1,)](out, in_pairs(out, values), scales, N=32, D=64)
    expected = (values.float() * scales.unsqueeze(1)).to(dtype)
    is_number = ~expected.isnan()
    assert torch.equal(out[is_number], expected[is_number])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_scale_that_is_none_makes_all_numbers_none(dtype: torch.dtype) -> None:
    scales, out = torch.ones(16, device=DEVICE), torch.empty(16, 32, dtype=dtype, device=DEVICE)
    scales[3] = float("nan")
    _numbers_kernel[(1,)](out, in_pairs(out, codes(16, 32)), scales, N=16, D=32)
    assert (out.isnan().any(1) == scales.isnan()).all() and out[3].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("exponent", [-30, -9, 7])
def test_products(exponent: int, dtype: torch.dtype) -> None:
    """Also with the largest scales, and with small numbers in one row of queries and large ones in another."""
    k, v, scales = codes(16, 32, 1), codes(16, 32, 2), torch.full((16,), 2.0**exponent, device=DEVICE)
    q = torch.randn(16, 32, generator=torch.Generator().manual_seed(3)).to(DEVICE) / (2.0**exponent * 448)
    q[0], q[1] = q[0] * 1e-3, q[1] * 10
    q = q.to(dtype)
    out, scores = torch.empty(16, 32, device=DEVICE), torch.empty(16, 16, device=DEVICE)
    _products_kernel[(1,)](out, scores, q, in_pairs(q, k), scales, in_pairs(q, v), scales, M=16, N=16, D=32)
    expected = q.double() @ (k.double() * 2.0**exponent).T
    torch.testing.assert_close(scores.double(), expected, rtol=1e-4, atol=1e-4)
    attended = torch.exp2(scores.double() - scores.double().amax(1, keepdim=True))
    attended = attended / attended.sum(1, keepdim=True) @ (v.double() * 2.0**exponent)
    near = 2.0 ** (exponent + 9) * (2e-5 if dtype == torch.float32 else 1e-2)
    torch.testing.assert_close(out.double(), attended, rtol=0, atol=near)


def test_which_layers_are_read_in_pairs() -> None:
    layer = torch.zeros(3, 2, 1, 4, 32, dtype=torch.float8_e4m3fn)
    assert in_pairs(torch.empty(0), layer).shape == (3, 2, 1, 4, 16)
    assert in_pairs(torch.empty(0, dtype=torch.bfloat16), layer).dtype == torch.uint16
    for q, other in ((torch.half, layer), (torch.float32, layer[..., :9]), (torch.float32, layer[..., :16])):
        assert in_pairs(torch.empty(0, dtype=q), other) is other
    assert in_pairs(torch.empty(0), layer.float()).dtype == torch.float32
