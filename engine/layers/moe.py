"""The mixture of experts: a router sends every token to a few of many feed-forward layers (arXiv:1701.06538).

y = sum over the chosen experts e of share_e * expert_e(x), and + shared(x) if some experts are for all tokens, or
    + sigmoid(gate . x) * shared(x)

kernels/experts/routes.py says which experts are chosen, and what their shares are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels.experts.routes import Routes, Routing, routes, shares_of
from ...kernels.products.silu import clamped_silu_mul
from ..checkpoint.model_config import ExpertsConfig
from ..products.base import Rows, Sum
from ..products.experts import Experts
from ..products.ranked import OwnRowsSum
from .decoder import Mlp, Residual


@dataclass(frozen=True, slots=True, eq=False)
class ExpertRouter:
    """Chooses experts. The same for every rank."""

    weight: Tensor  # [num_experts, hidden_size] float32
    bias: Tensor | None  # [num_experts] float32, added to the scores for the choice alone
    config: ExpertsConfig
    product_bias: Tensor | None = None  # [num_experts] float32, of the product
    table: Tensor | None = None  # [vocab_size, num_active] int64, experts by token id; None: those of the best scores

    def __call__(self, x: Tensor, input_ids: Tensor | None = None) -> Routes:
        """Return the routes of tokens [num_tokens, hidden_size]. A table needs their ids, [num_tokens] int64."""
        if self.table is not None:
            assert input_ids is not None, "a table chooses by token ids"
            return shares_of(x, self.weight, self.table[input_ids], self._routing)
        return routes(x, self.weight, self.product_bias, self.bias, self._routing)

    @property
    def _routing(self) -> Routing:
        config = self.config
        return Routing(
            config.num_active,
            config.scoring,
            config.norm_topk_prob,
            config.scaling,
            config.num_groups,
            config.num_active_groups,
            config.num_ranking,
        )


@dataclass(frozen=True, slots=True, eq=False)
class MoeMlp:
    """A `FeedForward` (decoder.py) of experts. If ranks share it, each has some hidden units of every expert."""

    router: ExpertRouter
    experts: Experts
    shared: Mlp | None  # for all tokens
    sums_over: Sum | None  # ranks
    shared_gate: Tensor | None = None  # [1, hidden_size], of `shared`; None: it has none

    def __call__(self, normed: Tensor, input_ids: Tensor | None = None) -> Tensor:
        """Return the layer's output: [num_tokens, hidden_size] -> [num_tokens, hidden_size]. `input_ids` [num_tokens]
        int64: if the router has a table."""
        out = self._summand(normed, normed, input_ids)
        return out if self.sums_over is None else self.sums_over.sum(out)

    def add_to(self, stream: Residual, norm: Tensor) -> None:
        """Read the stream normed by `norm` [hidden_size] and add the layer's output to it."""
        stream.add_output(self._summand(*stream.normed_for_experts(self.experts, norm)), self.sums_over)

    def _summand(self, x: Tensor, rows: Rows, input_ids: Tensor | None = None) -> Tensor:
        """Return this rank's summand of the output; of the rows of all ranks, if each has rows of its own. `rows` are x
        as the experts take it."""
        if isinstance(self.sums_over, OwnRowsSum):
            x = rows = self.sums_over.gather(x)
            if input_ids is not None:
                input_ids = self.sums_over.gather(input_ids.unsqueeze(1)).squeeze(1)
        others = None
        if self.shared is not None:
            gate_up, clamp = self.shared.gate_up.product.alone, self.router.config.clamp
            gated = gate_up.gated(x) if clamp is None else clamped_silu_mul(gate_up(x), clamp)
            others = self.shared.down.product.alone.parts(gated)
        if self.shared_gate is not None and others is not None:
            others = others * torch.sigmoid(x @ self.shared_gate.T)
        return self.experts(rows, *self.router(x, input_ids), others)
