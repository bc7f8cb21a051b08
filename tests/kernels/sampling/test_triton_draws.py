"""Draws that compute the noise of few tokens against the noise of all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from triton_device import DEVICE, IS_INTERPRETED, random

pytest.importorskip("triton")

import triton
import triton.language as tl

from baton.kernels.sampling import triton_draws
from baton.kernels.sampling.filters import Filters
from baton.kernels.sampling.noise import gumbel_from_bits_ref
from baton.kernels.sampling.sample import Draws, perturbed_argmax_ref
from baton.kernels.sampling.triton_noise import noise_bound_of
from baton.kernels.sampling.triton_sample import perturbed_argmax

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's infinities are loud
INF = float("inf")


def rows() -> Tensor:
    """Rows of a steep, a flat, a two-valued and an equal distribution, and one with a single token left."""
    logits = random(6, 2100, scale=3.0, seed=2)
    logits[1] *= 1e-4
    logits[2] = (logits[2] > 2).float()
    logits[3] = 1.0
    logits[4] = -INF
    logits[4, 1800] = -7.0
    logits[5] = logits[5] * 0.05
    logits[5, 1030] = 15.0
    return logits


def no_filters() -> Filters:
    """The filters of rows without any, in a batch where another row has some: such a row is drawn by one program."""
    top_k = torch.full((6,), 2**31 - 1, device=DEVICE)
    return Filters(torch.full((6,), -INF, device=DEVICE), top_k, torch.ones(6, dtype=torch.float64, device=DEVICE))


@pytest.mark.parametrize("is_filtered", [False, True])
@pytest.mark.parametrize("temperature", [0.01, 1.0, 100.0])
def test_tokens_are_those_of_all_noise(temperature: float, is_filtered: bool) -> None:
    logits, seeds = rows(), torch.arange(6, device=DEVICE) * 7919
    temperatures = torch.full((6,), temperature, device=DEVICE)
    draws = Draws(seeds, seeds + 1, temperatures, no_filters() if is_filtered else None)
    expected = perturbed_argmax_ref(logits.cpu(), Draws(*(each.cpu() for each in draws[:3])))
    assert perturbed_argmax(logits, draws).token_ids.tolist() == expected.token_ids.tolist()


@pytest.mark.skipif(not IS_INTERPRETED, reason="calls are counted in the interpreter")
def test_few_tokens_need_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """The likeliest token of a row, and the best of three blocks, or few more."""
    calls = 0
    function = triton_draws.gumbel_from_bits_of

    def counted(bits: Any) -> Any:
        nonlocal calls
        assert bits.numel.value == 1
        calls += 1
        return function(bits)

    monkeypatch.setattr(triton_draws, "gumbel_from_bits_of", counted)
    logits = rows()
    seeds = torch.arange(6, device=DEVICE)
    perturbed_argmax(logits, Draws(seeds, seeds, torch.ones(6, device=DEVICE), no_filters()))
    assert 6 < calls <= 3 * 6 * 3


@triton.jit
def _bounds_kernel(bits_ptr, out_ptr, count, BLOCK: tl.constexpr):  # noqa: N803
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + at, noise_bound_of(tl.load(bits_ptr + at, mask=at < count, other=0)), mask=at < count)


def test_bounds_of_noise_are_bounds_and_close_where_noise_is_high() -> None:
    ends = torch.tensor([0, 1, 2, 3, 255, 256, 2**31 - 1, -(2**31), -2, -1], dtype=torch.int32)
    some = torch.randint(-(2**31), 2**31, (100_000,), generator=torch.Generator().manual_seed(1)).to(torch.int32)
    bits = torch.cat([ends, 2 ** torch.arange(31, dtype=torch.int32), some])
    bounds = torch.empty(len(bits), device=DEVICE)
    _bounds_kernel[(triton.cdiv(len(bits), 1024),)](bits.to(DEVICE), bounds, len(bits), BLOCK=1024)
    noise = gumbel_from_bits_ref(bits)
    excess = bounds.cpu() - noise
    assert (excess > 5e-4).all() and (excess[noise > 5] < 1e-2).all()
