"""Residual streams whose weights follow from the streams of each token (manifold-constrained hyper-connections of
DeepSeek-V4, after arXiv:2409.19606).

A sublayer reads one state from the `hc_mult` streams s_a of a token, and adds its output y to all of them. The weights
by which it does so are called its site:

    r, w, m = split(fn flat(s) / rms(flat(s)))          one row of each token, float32
    read    = sigmoid(scale_0 r + base_r) + eps
    write   = 2 sigmoid(scale_1 w + base_w)
    mix     = sinkhorn(softmax(scale_2 m + base_m) + eps)    rows and columns sum to one
    x       = norm(sum_a read_a s_a);    s_b <- sum_a mix[a, b] s_a + write_b y

Behind the last layer the streams collapse to sum_a (sigmoid(scale r + base) + eps) s_a. All weights are float32. A
token's numbers depend on no other token.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..operations import Operation
from ..products.norm import Norm, rms_norm


class StreamRules(NamedTuple):
    """Settings of all sites of a model."""

    num_steps: int  # of Sinkhorn's normalisation, each of rows and columns
    eps: float  # added to shares and to the sums that divide them
    norm_eps: float  # of the norm of all streams


class StreamWeights(NamedTuple):
    """Weights of one site, or of the end of the layers, where num_shares is hc_mult and there is one scale."""

    fn: Tensor  # [num_shares, hc_mult * hidden_size] float32
    base: Tensor  # [num_shares] float32; num_shares is (2 + hc_mult) * hc_mult
    scale: Tensor  # [3] float32: of read, write and mix


class StreamShares(NamedTuple):
    """Weights with which `write_streams` adds the output of a sublayer to the streams, and mixes the streams."""

    write: Tensor  # [num_tokens, hc_mult] float32
    mix: Tensor  # [num_tokens, hc_mult, hc_mult] float32, from, to


class PendingStreams(NamedTuple):
    """Streams, and the output of a sublayer that is still to be added to them."""

    streams: Tensor  # [num_tokens, hc_mult, hidden_size]
    y: Tensor | None = None  # [num_tokens, hidden_size]; None: nothing is to be added
    shares: StreamShares | None = None  # of y


def cross_streams_ref(
    pending: PendingStreams, weights: StreamWeights, norm: Norm, rules: StreamRules
) -> tuple[Tensor, Tensor, StreamShares]:
    """Return the streams after the pending sublayer, and `read_streams` of them, for the next one."""
    streams = written(pending)
    return streams, *read_streams(streams, weights, norm, rules)


def end_streams_ref(pending: PendingStreams, weights: StreamWeights, rules: StreamRules) -> tuple[Tensor, Tensor]:
    """Return the streams after the pending sublayer, and `collapse_streams` of them."""
    streams = written(pending)
    return streams, collapse_streams(streams, weights, rules)


def written(pending: PendingStreams) -> Tensor:
    """Return the streams after the pending sublayer."""
    if pending.y is None or pending.shares is None:
        return pending.streams
    return write_streams(pending.streams, pending.y, pending.shares)


def read_streams(
    streams: Tensor, weights: StreamWeights, norm: Norm, rules: StreamRules
) -> tuple[Tensor, StreamShares]:
    """Return the input of a sublayer, normed, [num_tokens, hidden_size], and the shares for `write_streams`. `streams`
    is [num_tokens, hc_mult, hidden_size]."""
    hc_mult = streams.shape[1]
    read, write, mix = _products(streams, weights, rules).split([hc_mult, hc_mult, hc_mult * hc_mult], 1)
    bases = weights.base.split([hc_mult, hc_mult, hc_mult * hc_mult])
    scales = weights.scale.unbind()
    read = torch.sigmoid(read * scales[0] + bases[0]) + rules.eps
    write = 2 * torch.sigmoid(write * scales[1] + bases[1])
    mix = torch.softmax((mix * scales[2] + bases[2]).unflatten(1, (hc_mult, hc_mult)), -1) + rules.eps
    mix = mix / (mix.sum(1, keepdim=True) + rules.eps)
    for _ in range(rules.num_steps - 1):
        mix = mix / (mix.sum(2, keepdim=True) + rules.eps)
        mix = mix / (mix.sum(1, keepdim=True) + rules.eps)
    return rms_norm(_collapsed(streams, read), *norm), StreamShares(write, mix)


def write_streams_ref(streams: Tensor, y: Tensor, shares: StreamShares) -> Tensor:
    """Return the mixed streams with the output `y` [num_tokens, hidden_size] of a sublayer added to each: a new tensor
    [num_tokens, hc_mult, hidden_size]."""
    mixed = torch.matmul(shares.mix.transpose(1, 2), streams.float())
    return (mixed + shares.write.unsqueeze(2) * y.unsqueeze(1).float()).to(streams.dtype)


def collapse_streams(streams: Tensor, weights: StreamWeights, rules: StreamRules) -> Tensor:
    """Return the one state that the streams collapse to, [num_tokens, hidden_size]. `streams` is [num_tokens, hc_mult,
    hidden_size]."""
    read = torch.sigmoid(_products(streams, weights, rules) * weights.scale + weights.base) + rules.eps
    return _collapsed(streams, read)


def _products(streams: Tensor, weights: StreamWeights, rules: StreamRules) -> Tensor:
    flat = streams.flatten(1).float()
    normed = flat * torch.rsqrt(flat.square().mean(1, keepdim=True) + rules.norm_eps)
    return F.linear(normed, weights.fn)


def _collapsed(streams: Tensor, read: Tensor) -> Tensor:
    return (read.unsqueeze(2) * streams).sum(1).to(streams.dtype)


cross_streams = Operation("cross_streams", cross_streams_ref, by=lambda pending, *_, **__: pending.streams)
end_streams = Operation("end_streams", end_streams_ref, by=lambda pending, *_, **__: pending.streams)
write_streams = Operation("write_streams", write_streams_ref)
