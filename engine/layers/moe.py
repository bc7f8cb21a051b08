"""The mixture of experts: a router sends every token to a few of many feed-forward layers (arXiv:1701.06538).

p = softmax(router(x));  y = sum over the num_active best experts e of p_e * expert_e(x)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..products.linear import Linear
from .mlp import Mlp
from .residual import Residual


@dataclass(frozen=True, slots=True, eq=False)
class MoeMlp:
    """A `FeedForward` (decoder.py) of experts."""

    router: Linear  # hidden_size -> num_experts
    experts: tuple[Mlp, ...]
    num_active: int  # experts of each token
    norm_topk_prob: bool  # the weights of a token's experts sum to one

    def __call__(self, normed: Tensor) -> Tensor:
        """Return the layer's output: [num_tokens, hidden_size] -> [num_tokens, hidden_size]."""
        probabilities = self.router(normed).softmax(-1, dtype=torch.float32)
        weights, chosen = probabilities.topk(self.num_active)  # [num_tokens, num_active]
        if self.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        mix = _mix_grouped if normed.is_cpu else _mix_all
        return mix(normed, chosen, weights.to(normed.dtype), self.experts)

    def add_to(self, stream: Residual, norm: Tensor) -> None:
        """Read the stream normed by `norm` [hidden_size] and add the layer's output to it."""
        stream.add_output(self(stream.normed(norm)))


def _mix_grouped(x: Tensor, chosen: Tensor, weights: Tensor, experts: Sequence[Mlp]) -> Tensor:
    """Run each expert on the tokens that chose it: [num_tokens, hidden_size] -> [num_tokens, hidden_size].

    `chosen` and `weights` [num_tokens, num_active]: the experts of each token, int64, and their shares. The host reads
    `chosen`, which costs nothing on a CPU."""
    out = torch.zeros_like(x)
    for index in sorted(set(chosen.flatten().tolist())):
        tokens, place = (chosen == index).nonzero(as_tuple=True)
        out.index_add_(0, tokens, experts[index](x[tokens]) * weights[tokens, place].unsqueeze(1))
    return out


def _mix_all(x: Tensor, chosen: Tensor, weights: Tensor, experts: Sequence[Mlp]) -> Tensor:
    """Run every expert on all tokens. Arguments and result are those of `_mix_grouped`.

    No shape depends on a tensor's values, so a CUDA graph can hold it; it is the specification, not a fast kernel."""
    share = x.new_zeros(len(x), len(experts)).scatter_(1, chosen, weights)  # [num_tokens, num_experts]
    is_chosen = torch.zeros_like(share, dtype=torch.bool).scatter_(1, chosen, True)
    out = torch.zeros_like(x)
    for index, expert in enumerate(experts):
        y = expert(x) * share[:, index : index + 1]
        out += y.masked_fill(~is_chosen[:, index : index + 1], 0.0)  # a product by 0 would keep an infinity
    return out
