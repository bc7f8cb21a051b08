"""The layer with a gated delta rule in place of attention (Qwen3-Next, Qwen3.5 and Kimi-Linear).

The layer has three pools with tail pages (engine/attention/pool_rows.py). DELTA_ROWS holds the output of the input
projections for each token. DELTA_UPDATES holds what each token adds to the state, its key, and the decay since the
start of its block. DELTA_STATES holds the recurrent state after each block of tokens, divided among the slots of the
block.

    tokens   | block                          | block                          |  part of a block
    pages    | rows, updates, state after it  | rows, updates, state after it  |  rows, updates

A forward reads the state at the end of the last whole block before its new tokens, and the rows since. It computes
these rows once more, and then the new ones. So prompts, chunks, single steps and drafts are computed in the same way
(kernels/state/delta_rule.py). The kernels of a round read the updates of earlier rows instead of computing them once
more (kernels/state/paged_delta.py). A sequence needs the pages of two blocks, however long it is. Another text may
continue behind a cached page, because the page holds the state at its end.

If new tokens complete a block, the forward writes the state after it, even if some of them are drafts. If the target
rejects such a draft, the next round begins inside this block. It writes the rows and the state again before a forward
reads them. A forward never writes a state that it reads, so it may be repeated.

Rows of a tree of drafts lie in slots that no text has, so a forward that verifies a tree writes no states behind them.
The rows of the accepted path are moved to the slots behind the root. Kernels then store the states after the blocks
that the path may complete (`store_passed_states`). In plain torch, if drafts may be trees, each forward begins as many
blocks earlier as a path may complete (`ModelConfig.with_trees`), and writes the states after them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ...kernels.products.norm import Norm, rms_norm
from ...kernels.state.delta_rule import DeltaWeights, gated_delta_rule, gated_delta_tree
from ...kernels.state.paged_delta import (
    DeltaInputs,
    DeltaPlan,
    DeltaPools,
    DeltaSizes,
    delta_prompt,
    delta_round,
    delta_tree,
    gate_heads,
    have_kernels,
    pass_edges,
)
from ..attention.context import AttentionContext
from ..attention.pool_rows import NewRows, PoolRows
from ..checkpoint.model_config import DELTA_ROWS, DELTA_STATES, DELTA_UPDATES, DeltaConfig, delta_block
from ..products.base import Rows
from ..products.linear import Linear


@dataclass(frozen=True, slots=True, eq=False)
class DeltaNet:
    """A `SelfAttention` (decoder.py) with a gated delta rule."""

    place: int  # of the layer in its pools
    inputs: tuple[Linear, ...]  # hidden_size -> the parts of `part_sizes`, divided by key heads, or of a low rank
    part_sizes: tuple[int, ...]  # of the projections; together they give each key head q, k, values, gates, b and a
    ups: tuple[Linear | None, ...]  # of each part: from its low rank to all key heads; None: it is divided by them
    weights: DeltaWeights
    norm: Tensor  # [value_dim], of the outputs of a head
    eps: float
    activation: Callable[[Tensor], Tensor]  # of the gates
    out: Linear  # num_value_heads * value_dim -> hidden_size
    longest_path: int = 0  # tokens that a tree of drafts may bring at once; 0: drafts are chains

    @property
    def reader(self) -> Linear | None:
        return self.inputs[0] if len(self.inputs) == 1 else None

    def __call__(self, normed: Rows, context: AttentionContext) -> Tensor:
        """Store the new tokens' rows and the states that they complete, and return the gated outputs: [num_tokens,
        hidden_size] -> [num_tokens, num_value_heads * value_dim]."""
        weights, (num_heads, num_shared, _, value_dim) = self.weights, self.weights.state_shape
        parts = zip(self._projected(normed), self.ups, strict=True)
        of_heads = [(part if up is None else up(part)).unflatten(1, (num_heads, -1)) for part, up in parts]
        if len(of_heads[0]) and have_kernels(weights.taps.device, num_shared, weights.decay_dim):
            return self._by_kernels(of_heads, context.further)
        num_channels, num_gates = weights.taps.shape[2], num_shared * value_dim
        qkv, gate, ba = torch.cat(of_heads, 2).tensor_split([num_channels, num_channels + num_gates], 2)
        rows = torch.cat([qkv, ba], 2)
        context.further.store(DELTA_ROWS, self.place, rows.flatten(1))
        outputs = rows.new_zeros(len(rows), num_heads * num_shared, value_dim)
        for new in context.further.new_rows():
            outputs[new.tokens] = self._outputs(context.further, new, rows[new.tokens]).to(rows.dtype)
        y = rms_norm(outputs.flatten(0, 1), self.norm, self.eps).view_as(outputs)
        return (y * self.activation(gate.reshape(outputs.shape).float())).to(rows.dtype).flatten(1)

    def _projected(self, normed: Rows) -> Sequence[Tensor]:
        """Return the parts of the input projections, each [num_tokens, size]. A part is a view of one projection."""
        projected, parts = [linear(normed) for linear in self.inputs], list[Tensor]()
        for size in self.part_sizes:
            if projected[0].shape[1] == 0:
                projected.pop(0)
            parts.append(projected[0][:, :size])
            projected[0] = projected[0][:, size:]
        return parts

    def _by_kernels(self, parts: Sequence[Tensor], rows: PoolRows) -> Tensor:
        """Do the work of a forward by kernels that read and write pages in place. `parts`: each [num_tokens,
        num_key_heads, width]."""
        assert self.activation in (F.silu, torch.sigmoid), self.activation
        inputs, weights = _divided(parts, self.weights), self.weights
        pools = DeltaPools(*(rows.pools[name][self.place] for name in (DELTA_ROWS, DELTA_UPDATES, DELTA_STATES)))
        outputs: list[Tensor] = []
        for tokens, plan in rows.once("delta", lambda: _plans(rows)):
            own = DeltaInputs(*(each[tokens] for each in inputs))
            if plan.paths is not None:
                outputs.append(delta_tree(own, weights, pools, plan))
            elif plan.is_round:
                outputs.append(delta_round(own, weights, pools, plan, is_alone=len(rows.batches) == 1))
            else:
                outputs.append(delta_prompt(own, weights, pools, plan))
        whole = outputs[0] if len(outputs) == 1 else torch.cat(outputs[::-1])
        is_sigmoid = self.activation is torch.sigmoid
        return gate_heads(whole, inputs.gate, Norm(self.norm, self.eps), is_sigmoid=is_sigmoid)

    def _outputs(self, pools: PoolRows, new: NewRows, rows: Tensor) -> Tensor:
        """Return the outputs of one sequence's new tokens, [num_new, num_value_heads, value_dim] float32. `rows`
        [num_new, num_key_heads, width] are theirs."""
        weights, block = self.weights, delta_block(pools.pools[DELTA_ROWS].shape[4])
        num_back = -(-self.longest_path // block)
        edge = max(0, new.start // block - num_back) * block
        first = edge - weights.num_before
        before = pools.read(DELTA_ROWS, self.place, new.pages, max(0, first), new.start)
        rows = torch.cat([F.pad(before, (0, 0, 0, 0, max(0, -first), 0)), rows])
        state = self._state(pools, new.pages, edge, block)
        if new.sees is None:
            made = gated_delta_rule(rows, state, weights, block)
        else:
            made = gated_delta_tree(rows, state, weights, block, new.sees)
        pools.write(DELTA_UPDATES, self.place, new.pages, new.start, made.updates[-new.num_tokens :])
        for number, state in enumerate(made.states):
            self._keep(pools, new.pages, edge + number * block, block, state)
        return made.outputs[-new.num_tokens :]

    def _state(self, pools: PoolRows, pages: Tensor, edge: int, block: int) -> Tensor:
        """Return the state at `edge`, the end of a block; zeros at the start of the text."""
        shape = self.weights.state_shape
        if edge == 0:
            return torch.zeros(shape, dtype=pools.pools[DELTA_STATES].dtype, device=pages.device)
        divided = pools.read(DELTA_STATES, self.place, pages, edge - block, edge).transpose(0, 1).flatten(1)
        return divided[:, : shape[1] * shape[2] * shape[3]].reshape(shape)

    def _keep(self, pools: PoolRows, pages: Tensor, start: int, block: int, state: Tensor) -> None:
        """Keep the state after the block that begins at `start`."""
        divided = F.pad(state.flatten(1), (0, block * pools.pools[DELTA_STATES].shape[5] - state[0].numel()))
        pools.write(DELTA_STATES, self.place, pages, start, divided.unflatten(1, (block, -1)).transpose(0, 1))


def store_passed_states(
    delta: DeltaConfig, pools: Mapping[str, Tensor], table: Tensor, starts: Tensor, num_new: int, page_size: int
) -> None:
    """Store the states after the blocks that end in the `num_new` slots from `starts` [num_seqs] int64 on, where rows
    of accepted paths lie now. `pools` are those of all layers, `table` [num_seqs, max_pages] int64 is of tail pages."""
    updates, states = pools[DELTA_UPDATES], pools[DELTA_STATES]
    if have_kernels(updates.device, delta.num_shared, delta.decay_dim):
        block = delta_block(page_size)
        sizes = DeltaSizes(delta.num_shared, delta.key_dim, delta.value_dim, delta.decay_dim, block)
        pass_edges(updates, states, sizes, table, starts, num_new)


def _divided(parts: Sequence[Tensor], weights: DeltaWeights) -> DeltaInputs:
    """Return the numbers of each kind as views of the projections' outputs, whose `parts` are side by side for each key
    head. A kind lies in one part."""
    _, num_shared, key_dim, value_dim = weights.state_shape
    rest, found, of_values = list(parts), list[Tensor](), num_shared * value_dim
    for width in (key_dim, key_dim, of_values, of_values, num_shared, num_shared * weights.dt_bias.shape[2]):
        if rest[0].shape[2] == 0:
            rest.pop(0)
        found.append(rest[0][:, :, :width])
        rest[0] = rest[0][:, :, width:]
    return DeltaInputs(*found)


def _plans(rows: PoolRows) -> list[tuple[slice, DeltaPlan]]:
    """Return the tokens of each batch of a forward and their plan, the last batch first: the first one may have the
    next token of a sequence in it."""
    plans, first = list[tuple[slice, DeltaPlan]](), 0
    for batch in rows.batches:
        tokens = slice(first, first + batch.num_tokens)
        block, first = delta_block(batch.page_size), tokens.stop
        table, lens = batch.block_table, batch.seq_lens
        if batch.num_tokens and batch.tree is not None:
            plans.append((tokens, DeltaPlan.of_trees(table, lens, batch.tree.visible, block)))
        elif batch.num_tokens:
            plan = DeltaPlan.of(table, lens, batch.starts, batch.num_tokens, batch.page_size, block)
            plans.append((tokens, plan))
    return plans[::-1]
