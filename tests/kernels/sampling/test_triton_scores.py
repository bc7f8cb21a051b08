"""Weights of scores against kernels/sampling/filters.py to the bit."""

from __future__ import annotations

import pytest
import torch
from triton_device import DEVICE

pytest.importorskip("triton")

import triton
import triton.language as tl

from baton.kernels.sampling.filters import _weights as weights_ref
from baton.kernels.sampling.triton_scores import weights_of

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's infinities are loud
INF = float("inf")


@triton.jit
def _weights_kernel(scores_ptr, out_ptr, count, BLOCK: tl.constexpr):  # noqa: N803
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    scores = tl.load(scores_ptr + at, mask=at < count, other=0.0)
    tl.store(out_ptr + at, weights_of(scores), mask=at < count)


def test_weights_have_the_bits_of_the_reference() -> None:
    """Where exponents are rounded half to even, too."""
    halves = (torch.arange(-64, 1) / 2 / 1.4426950216293335).float()
    ends = torch.tensor([0.0, -0.0, -INF, -1e30, -32.0, -32.1, -31.9, -1e-30])
    scores = torch.cat([torch.linspace(-33, 0, 30_001), halves, torch.nextafter(halves, ends[:1]), ends])
    out = torch.empty(len(scores), dtype=torch.int64, device=DEVICE)
    grid = (triton.cdiv(len(scores), 1024),)
    _weights_kernel[grid](scores.to(DEVICE), out, len(scores), BLOCK=1024, enable_fp_fusion=False)
    assert torch.equal(out.cpu(), weights_ref(scores[None])[0])
