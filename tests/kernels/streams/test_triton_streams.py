"""Streams by Triton against their specification, on a GPU if there is one, otherwise in the interpreter."""

from __future__ import annotations

import pytest
import torch
from triton_device import IS_INTERPRETED, random

pytest.importorskip("triton")

from baton.kernels.products.norm import Norm
from baton.kernels.streams import triton_streams
from baton.kernels.streams.streams import (
    PendingStreams,
    StreamRules,
    StreamShares,
    StreamWeights,
    cross_streams_ref,
    end_streams_ref,
    write_streams_ref,
)

RULES = StreamRules(20, 1e-6, 1e-5)
DTYPES = [torch.float32, torch.float16] if IS_INTERPRETED else [torch.float32, torch.float16, torch.bfloat16]


def pending_of(num_tokens: int, hc_mult: int, size: int, dtype: torch.dtype) -> PendingStreams:
    mix = random(num_tokens, hc_mult, hc_mult, seed=1).abs()
    shares = StreamShares(random(num_tokens, hc_mult, seed=2), mix / mix.sum(1, keepdim=True))
    streams = random(num_tokens, hc_mult, size, dtype=dtype, seed=3)
    return PendingStreams(streams, random(num_tokens, size, dtype=dtype, seed=4), shares)


def weights_of(num_shares: int, num_scales: int, width: int) -> StreamWeights:
    fn = random(num_shares, width, seed=5, scale=width**-0.5 * 4)
    return StreamWeights(fn, random(num_shares, seed=6), random(num_scales, seed=7))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_tokens", "hc_mult", "size"), [(1, 4, 128), (9, 3, 72), (70, 2, 40)])
def test_streams_between_sublayers(num_tokens: int, hc_mult: int, size: int, dtype: torch.dtype) -> None:
    pending, norm = pending_of(num_tokens, hc_mult, size, dtype), Norm(random(size, seed=8), 1e-5)
    bound = {"atol": 1e-4, "rtol": 1e-4} if dtype == torch.float32 else {"atol": 0.02, "rtol": 0.02}
    site = weights_of((2 + hc_mult) * hc_mult, 3, hc_mult * size)
    start = PendingStreams(pending.streams[:, :1].expand(-1, hc_mult, -1))  # embeddings: all streams are one
    for each in (pending, start):
        found, expected = (
            triton_streams.cross_streams(each, site, norm, RULES),
            cross_streams_ref(each, site, norm, RULES),
        )
        torch.testing.assert_close(found[:2], expected[:2], **bound)
        torch.testing.assert_close(found[2], expected[2], **bound)
        assert (found[2].mix.sum(1) - 1).abs().max() < 1e-4
    end = weights_of(hc_mult, 1, hc_mult * size)
    torch.testing.assert_close(
        triton_streams.end_streams(pending, end, RULES), end_streams_ref(pending, end, RULES), **bound
    )
    assert pending.y is not None and pending.shares is not None
    torch.testing.assert_close(triton_streams.write_streams(*pending), write_streams_ref(*pending), **bound)


def test_a_token_does_not_depend_on_the_others() -> None:
    pending, norm = pending_of(3, 4, 128, torch.float32), Norm(random(128, seed=8), 1e-5)
    assert pending.y is not None and pending.shares is not None
    site = weights_of(24, 3, 512)
    whole = triton_streams.cross_streams(pending, site, norm, RULES)
    own = StreamShares(*(each[1:2].contiguous() for each in pending.shares))
    alone = triton_streams.cross_streams(PendingStreams(pending.streams[1:2], pending.y[1:2], own), site, norm, RULES)
    for found, expected in zip((*alone[:2], *alone[2]), (*whole[:2], *whole[2]), strict=True):
        assert torch.equal(found[0], expected[1])
