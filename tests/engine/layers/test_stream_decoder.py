"""The decoder layer over streams: each sublayer reads them, and adds to them, by the weights of its own site."""

from __future__ import annotations

from typing import Any, cast

import torch

from baton.engine.attention.compressed import CompressedAttention
from baton.engine.layers.stream_decoder import StreamLayer
from baton.kernels.products.norm import Norm
from baton.kernels.streams.streams import (
    PendingStreams,
    StreamRules,
    StreamWeights,
    read_streams,
    write_streams,
    written,
)

SIZE, HC_MULT, RULES = 8, 3, StreamRules(20, 1e-6, 1e-6)


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def site(seed: int) -> StreamWeights:
    num = (2 + HC_MULT) * HC_MULT
    return StreamWeights(random(num, HC_MULT * SIZE, seed=seed), random(num, seed=seed + 1), random(3, seed=seed + 2))


def test_both_sublayers_read_and_write_all_streams() -> None:
    sites, norms = (site(0), site(10)), [Norm(random(SIZE, seed=seed), 1e-6) for seed in (20, 21)]
    context, ids = cast(CompressedAttention, object()), torch.tensor([4, 7])

    def attention(x: torch.Tensor, own: object) -> torch.Tensor:
        assert own is context
        return 2 * x

    def mlp(x: torch.Tensor, input_ids: torch.Tensor) -> torch.Tensor:
        return x * input_ids.unsqueeze(1)

    whole: Any = StreamLayer(sites[0], norms[0], cast(Any, attention), sites[1], norms[1], cast(Any, mlp), RULES)
    streams = random(2, HC_MULT, SIZE, seed=30)
    before = streams.clone()
    out = written(whole(PendingStreams(streams), ids, context))
    x, shares = read_streams(streams, sites[0], norms[0], RULES)
    middle = write_streams(streams, 2 * x, shares)
    x, shares = read_streams(middle, sites[1], norms[1], RULES)
    assert torch.equal(out, write_streams(middle, x * ids.unsqueeze(1), shares)) and torch.equal(streams, before)
    assert not torch.equal(out, written(whole(PendingStreams(streams), ids.flip(0), context)))
