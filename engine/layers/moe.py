"""The mixture of experts: a router sends every token to a few of many feed-forward layers (arXiv:1701.06538).

y = scaling * sum over the chosen experts e of share_e * expert_e(x), and + shared(x) if some experts are for all tokens

    score      softmax or sigmoid of the router's product, in float32
    choice     the num_active largest of score + bias, of the num_active_groups best groups of experts
    share      the score, without bias; divided by the sum of those that are chosen if norm_topk_prob

A group's score is its largest one (DeepSeek-V2, arXiv:2405.04434), or the sum of its two largest ones with their biases
(DeepSeek-V3, arXiv:2412.19437).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...kernels.linear import sum_parts
from ..model_config import ExpertsConfig
from ..products.base import Sum
from ..products.experts import Experts
from ..products.ranked import OwnRowsSum
from .mlp import Mlp
from .residual import Residual


class Routes(NamedTuple):
    """The experts of each token, and their shares of the output."""

    chosen: Tensor  # [num_tokens, num_active] int64
    shares: Tensor  # [num_tokens, num_active] float32


@dataclass(frozen=True, slots=True, eq=False)
class ExpertRouter:
    """Chooses experts. The same for every rank."""

    weight: Tensor  # [num_experts, hidden_size] float32
    bias: Tensor | None  # [num_experts] float32, added to the scores for the choice alone
    config: ExpertsConfig
    product_bias: Tensor | None = None  # [num_experts] float32, of the product

    def __call__(self, x: Tensor) -> Routes:
        """Return the routes of tokens [num_tokens, hidden_size]."""
        config = self.config
        product = F.linear(x.float(), self.weight, self.product_bias)
        scores = product.sigmoid() if config.scoring == "sigmoid" else product.softmax(-1)
        ranking = scores if self.bias is None else scores + self.bias
        if config.num_groups > 1:
            ranking = self._of_best_groups(ranking)
        chosen = ranking.topk(config.num_active).indices
        shares = scores.gather(1, chosen)
        if config.norm_topk_prob:
            shares = shares / (shares.sum(-1, keepdim=True) + (1e-20 if config.scoring == "sigmoid" else 0.0))
        return Routes(chosen, shares if config.scaling == 1 else shares * config.scaling)

    def _of_best_groups(self, ranking: Tensor) -> Tensor:
        """Return the ranking with -inf for experts of other groups: [num_tokens, num_experts]."""
        config = self.config
        groups = ranking.unflatten(1, (config.num_groups, -1))
        of_groups = groups.topk(config.num_ranking, dim=-1).values.sum(-1)
        best = of_groups.topk(config.num_active_groups).indices
        is_best = torch.zeros_like(of_groups, dtype=torch.bool).scatter_(1, best, True)
        return groups.masked_fill(~is_best.unsqueeze(-1), float("-inf")).flatten(1)


@dataclass(frozen=True, slots=True, eq=False)
class MoeMlp:
    """A `FeedForward` (decoder.py) of experts. If ranks share it, each has some hidden units of every expert."""

    router: ExpertRouter
    experts: Experts
    shared: Mlp | None  # for all tokens
    sums_over: Sum | None  # ranks

    def __call__(self, normed: Tensor) -> Tensor:
        """Return the layer's output: [num_tokens, hidden_size] -> [num_tokens, hidden_size]."""
        out = self._summand(normed)
        return out if self.sums_over is None else self.sums_over.sum(out)

    def add_to(self, stream: Residual, norm: Tensor) -> None:
        """Read the stream normed by `norm` [hidden_size] and add the layer's output to it."""
        stream.add_output(self._summand(stream.normed(norm)), self.sums_over)

    def _summand(self, x: Tensor) -> Tensor:
        """Return this rank's summand of the output; of the rows of all ranks, if each has rows of its own."""
        if isinstance(self.sums_over, OwnRowsSum):
            x = self.sums_over.gather(x)
        out = self.experts(x, *self.router(x))
        if self.shared is None:
            return out
        parts = self.shared.down.product.alone.parts(self.shared.gate_up.product.alone.gated(x))
        return out.add_(parts if parts.ndim == 2 else sum_parts(parts, out.dtype))
