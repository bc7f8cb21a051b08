"""The layer with a gated delta rule in place of attention (Qwen3-Next): states at the ends of blocks, and rows since.

Two pools have tail pages (engine/attention/pool_rows.py): DELTA_ROWS has what the input projections give for each
token, and DELTA_STATES has the state after each block, divided among the rows of its tokens. A token reads at most two
blocks back, so a sequence holds few of these pages, and cached ones are the states behind which other texts continue.

    tokens   | block                 | block                 |  part of a block
    pages    | rows, state after it  | rows, state after it  |  rows

New tokens read the state at the last edge of blocks before them, and the rows since. Whatever follows is computed
again: so a prompt, a chunk of one, a step and a verified draft are one form (kernels/state/delta_rule.py). A round that
passes an edge writes the state there, drafts included. If a draft before the edge is rejected, the next round begins
before the edge, and writes rows and state again before anybody reads them. No round writes a state that it reads, so a
round may be repeated.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ...kernels.products.norm import rms_norm
from ...kernels.state.delta_rule import DeltaWeights, gated_delta_rule
from ..attention.context import AttentionContext
from ..attention.pool_rows import NewRows, PoolRows
from ..checkpoint.model_config import DELTA_ROWS, DELTA_STATES, delta_block
from ..products.base import Rows
from ..products.linear import Linear


@dataclass(frozen=True, slots=True, eq=False)
class DeltaNet:
    """A `SelfAttention` (decoder.py) with a gated delta rule."""

    place: int  # of the layer in its pools
    inputs: Linear  # hidden_size -> the parts of `part_sizes`, each divided by key heads
    part_sizes: tuple[int, ...]  # which together are, of each key head: q, k, values, gates, b, a
    weights: DeltaWeights
    norm: Tensor  # [value_dim], of the outputs of a head
    eps: float
    out: Linear  # num_value_heads * value_dim -> hidden_size

    @property
    def reader(self) -> Linear:
        return self.inputs

    def __call__(self, normed: Rows, context: AttentionContext) -> Tensor:
        """Store the new tokens' rows and the states that they complete, and return the gated outputs: [num_tokens,
        hidden_size] -> [num_tokens, num_value_heads * value_dim]."""
        weights, (num_heads, num_shared, _, value_dim) = self.weights, self.weights.state_shape
        parts = [part.unflatten(1, (num_heads, -1)) for part in self.inputs(normed).split(self.part_sizes, 1)]
        sizes = [weights.taps.shape[1], num_shared * value_dim, 2 * num_shared]
        qkv, gate, ba = torch.cat(parts, 2).split(sizes, 2)
        rows = torch.cat([qkv, ba], 2)
        context.further.store(DELTA_ROWS, self.place, rows.flatten(1))
        outputs = rows.new_zeros(len(rows), num_heads * num_shared, value_dim)
        for new in context.further.new_rows():
            outputs[new.tokens] = self._outputs(context.further, new, rows[new.tokens]).to(rows.dtype)
        y = rms_norm(outputs.flatten(0, 1), self.norm, self.eps).view_as(outputs)
        return (y * F.silu(gate.reshape(outputs.shape).float())).to(rows.dtype).flatten(1)

    def _outputs(self, pools: PoolRows, new: NewRows, rows: Tensor) -> Tensor:
        """Return the outputs of one sequence's new tokens, [num_new, num_value_heads, value_dim] float32. `rows`
        [num_new, num_key_heads, width] are theirs."""
        weights, block = self.weights, delta_block(pools.pools[DELTA_ROWS].shape[4])
        edge = new.start // block * block
        first = edge - weights.num_before
        before = pools.read(DELTA_ROWS, self.place, new.pages, max(0, first), new.start)
        rows = torch.cat([F.pad(before, (0, 0, 0, 0, max(0, -first), 0)), rows])
        outputs, states = gated_delta_rule(rows, self._state(pools, new.pages, edge, block), weights, block)
        for state in states:
            self._keep(pools, new.pages, edge, block, state)
            edge += block
        return outputs[len(outputs) - (new.tokens.stop - new.tokens.start) :]

    def _state(self, pools: PoolRows, pages: Tensor, edge: int, block: int) -> Tensor:
        """Return the state at an edge, before which there is a whole block, or the text begins."""
        shape = self.weights.state_shape
        if edge == 0:
            return torch.zeros(shape, device=pages.device)
        divided = pools.read(DELTA_STATES, self.place, pages, edge - block, edge).transpose(0, 1).flatten(1)
        return divided[:, : shape[1] * shape[2] * shape[3]].reshape(shape)

    def _keep(self, pools: PoolRows, pages: Tensor, start: int, block: int, state: Tensor) -> None:
        """Keep the state after the block that begins at `start`."""
        divided = F.pad(state.flatten(1), (0, block * pools.pools[DELTA_STATES].shape[5] - state[0].numel()))
        pools.write(DELTA_STATES, self.place, pages, start, divided.unflatten(1, (block, -1)).transpose(0, 1))
