"""The gated delta rule (arXiv:2412.06464) behind a causal convolution, in blocks at fixed places of a text.

Every value head has a state S [key_dim, value_dim]. With unit vectors q_t and k_t, a value v_t, beta_t in (0, 1) and a
decay g_t <= 0 of each token:

    S <- exp(g_t) S;   S <- S + k_t (beta_t (v_t - S^T k_t))^T;   o_t = S^T q_t / sqrt(key_dim)

The decay is one number, or one for each row of S (Kimi Delta Attention, arXiv:2510.26692).

A block of B tokens behind the state S is computed at once. G_i is the sum of the block's decays up to token i, and
P(x)_ij = sum of x_i k_j exp(G_i - G_j) over key_dim for j <= i, else 0:

    (1 + tril(beta_i P(k)_ij, -1)) U = beta (v - (exp(G) k) S)
    o = (exp(G) q) S + P(q) U;   S after the block = exp(G_B) S + (exp(G_B - G) k)^T U

A row depends only on the rows before it. Blocks begin at multiples of B, and an incomplete block is padded to B rows.
So every product has one shape, and the numbers of a token are equal bit for bit, however a text is divided into
chunks and steps. States exist only at the ends of whole blocks.

A state is kept in float32 or bfloat16, and all else is float32. In bfloat16 a state is rounded once per block, when it
is kept. The next block starts from the rounded state, as a chunk that begins there does.

A tree of drafts behind the rows of a block is computed by the same system: P_ij is 0 if row j is no ancestor of row i,
and G_i is the sum of the decays along the path to row i.

A row is the output of the layer's input projections for a token, here of one key head and the value heads that share
it:

    | q | k | v of each value head | b of each value head | a of each value head |
    (q, k, v) <- silu(convolution over this row and the ones before it);  q, k <- q / |q|, k / |k|
    beta = sigmoid(b);  g = -exp(A_log) softplus(a + dt_bias), where a, dt_bias and g have decay_dim numbers
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..formats import update_width

_EPS = 1e-6  # of the lengths of q and k


class DeltaWeights(NamedTuple):
    """The weights of one layer, float32. Value heads stand behind their key head."""

    taps: Tensor  # [num_key_heads, num_taps, 2 * key_dim + num_shared * value_dim], of the oldest row first
    a_log: Tensor  # [num_key_heads, num_shared], value heads that share a key head
    dt_bias: Tensor  # [num_key_heads, num_shared, decay_dim]; decay_dim is 1 or key_dim
    key_dim: int
    value_dim: int

    @property
    def num_before(self) -> int:
        """Number of rows before a row that its convolution reads."""
        return self.taps.shape[1] - 1

    @property
    def decay_dim(self) -> int:
        """Numbers by which the state of a value head decays."""
        return self.dt_bias.shape[2]

    @property
    def width(self) -> int:
        """Numbers of one key head in a row."""
        return self.taps.shape[2] + self.a_log.shape[1] * (1 + self.dt_bias.shape[2])

    @property
    def update_width(self) -> int:
        """Numbers of one key head in `DeltaOutputs.updates`."""
        return update_width(self.key_dim, self.value_dim, *self.dt_bias.shape[1:])

    @property
    def state_shape(self) -> tuple[int, int, int, int]:
        """Shape of a state: [num_key_heads, num_shared, key_dim, value_dim]."""
        return self.a_log.shape[0], self.a_log.shape[1], self.key_dim, self.value_dim


class DeltaOutputs(NamedTuple):
    """Results of the rule for `num` rows. The rows that only the first convolutions read are not counted."""

    outputs: Tensor  # [num, num_value_heads, value_dim] float32
    updates: Tensor  # [num, num_key_heads, update_width] float32: U of the value heads, k, G of the value heads, zeros
    states: list[Tensor]  # after the whole blocks, each of the shape and type of the state before


def gated_delta_rule(rows: Tensor, state: Tensor, weights: DeltaWeights, block: int) -> DeltaOutputs:
    """Return the outputs and updates of rows, and the states after the whole blocks among them.

    `rows` [num_rows, num_key_heads, 2 * key_dim + num_shared * (value_dim + 1 + decay_dim)] begin `num_before` rows
    before a block, zeros before the text. `state` of `state_shape`, float32 or bfloat16, is the state at that block."""
    _check(rows, state, weights)
    num_before, outputs, updates, states = weights.num_before, list[Tensor](), list[Tensor](), list[Tensor]()
    sources = [slice(tap, tap + block) for tap in range(num_before + 1)]
    is_seen = torch.ones(block, block, dtype=torch.bool, device=rows.device).tril()
    for start in range(0, len(rows) - num_before, block):
        part = rows[start : start + num_before + block]
        num_new = len(part) - num_before
        own = _inputs(F.pad(part, (0, 0, 0, 0, 0, block - num_new)).float(), weights, sources)
        decay = own.steps.cumsum(2)
        output, update = _compute(own, decay, is_seen, state)
        outputs.append(_by_row(output)[:num_new])
        updates.append(_kept(update, own.k, decay, weights)[:num_new])
        if num_new == block:
            last = decay[:, :, -1:]
            added = ((last - decay).exp() * own.k).transpose(2, 3) @ update
            state = (last.exp().transpose(2, 3) * state.float() + added).to(state.dtype)
            states.append(state)
    return DeltaOutputs(torch.cat(outputs), torch.cat(updates), states)


def gated_delta_tree(rows: Tensor, state: Tensor, weights: DeltaWeights, block: int, sees: Tensor) -> DeltaOutputs:
    """Return the outputs and updates of the last rows, which are nodes of a tree of drafts, and the states after the
    whole blocks before them.

    `sees` [num_nodes, num_nodes] bool: node j is node i or an ancestor of it, and parents come before children. All
    nodes see the rows before them. Each is convolved along its own path. Other arguments are as in
    `gated_delta_rule`."""
    _check(rows, state, weights)
    num_before, num_nodes, states = weights.num_before, len(sees), list[Tensor]()
    num_whole = (len(rows) - num_before - num_nodes) // block * block
    if num_whole:
        states = gated_delta_rule(rows[: num_before + num_whole], state, weights, block).states
        rows, state = rows[num_whole:], states[-1]
    num_rows = len(rows) - num_before
    is_seen = torch.ones(num_rows, num_rows, dtype=torch.bool, device=rows.device).tril()
    is_seen[-num_nodes:, -num_nodes:] = sees
    shared = num_before + num_rows - num_nodes
    paths = [[*range(shared), *(shared + own.nonzero().flatten()).tolist()] for own in sees]
    windows = [list(range(row, row + num_before + 1)) for row in range(num_rows - num_nodes)]
    windows += [path[-num_before - 1 :] for path in paths]
    sources = torch.tensor(windows, device=rows.device).unbind(1)
    own = _inputs(rows.float(), weights, sources)
    output, update = _compute(own, is_seen.float() @ own.steps, is_seen, state)
    blocks = (is_seen.sum(1) - 1) // block
    since_edge = (is_seen & (blocks[:, None] == blocks)).float() @ own.steps
    return DeltaOutputs(_by_row(output)[-num_nodes:], _kept(update, own.k, since_edge, weights)[-num_nodes:], states)


class _Inputs(NamedTuple):
    """The numbers that the rule reads of some rows, float32."""

    q: Tensor  # [num_key_heads, 1, num_rows, key_dim]
    k: Tensor  # likewise
    v: Tensor  # [num_key_heads, num_shared, num_rows, value_dim]
    beta: Tensor  # [num_key_heads, num_shared, num_rows, 1]
    steps: Tensor  # [num_key_heads, num_shared, num_rows, decay_dim], g of each row


def _check(rows: Tensor, state: Tensor, weights: DeltaWeights) -> None:
    assert rows.shape[1:] == (len(weights.taps), weights.width), (rows.shape, weights.width)
    assert state.shape == weights.state_shape, (state.shape, weights.state_shape)
    assert state.dtype in (torch.float32, torch.bfloat16), state.dtype


def _inputs(rows: Tensor, weights: DeltaWeights, sources: Sequence[slice | Tensor]) -> _Inputs:
    """Convolve rows. `sources`: for each tap, the rows that it reads, in the order of the results. `rows` are float32,
    behind `num_before` others."""
    num_channels = weights.taps.shape[2]
    _, num_shared, key_dim, value_dim = weights.state_shape
    mixed = rows[sources[0], :, :num_channels] * weights.taps[:, 0]
    for tap, source in enumerate(sources[1:], 1):
        mixed = mixed + rows[source, :, :num_channels] * weights.taps[:, tap]
    q, k, v = F.silu(mixed).transpose(0, 1).split([key_dim, key_dim, num_shared * value_dim], 2)
    q, k = (_unit(each).unsqueeze(1) for each in (q, k))
    b, a = rows[weights.num_before :, :, num_channels:].permute(1, 2, 0).tensor_split([num_shared], 1)
    a = a.unflatten(1, (num_shared, -1)).transpose(2, 3)
    steps = -weights.a_log.exp()[:, :, None, None] * F.softplus(a + weights.dt_bias.unsqueeze(2))
    v = v.unflatten(2, (num_shared, value_dim)).transpose(1, 2)
    return _Inputs(q * key_dim**-0.5, k, v, torch.sigmoid(b).unsqueeze(3), steps)


def _compute(inputs: _Inputs, decay: Tensor, is_seen: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return the outputs and updates of rows behind `state`, each like `v`. `decay` is G of each row, the sum of the
    steps that it sees. `is_seen` [num_rows, num_rows] bool: row i sees row j, no later one."""
    (q, k, v, beta, _), state = inputs, state.float()
    system = beta * _decayed_products(k, k, decay, is_seen)
    known = beta * (v - (decay.exp() * k) @ state)
    update = torch.linalg.solve_triangular(system, known, upper=False, unitriangular=True)
    return (decay.exp() * q) @ state + _decayed_products(q, k, decay, is_seen) @ update, update


def _by_row(x: Tensor) -> Tensor:
    """Return [num_key_heads, num_shared, num_rows, value_dim] as [num_rows, num_value_heads, value_dim]."""
    return x.permute(2, 0, 1, 3).flatten(1, 2)


def _kept(update: Tensor, k: Tensor, decay: Tensor, weights: DeltaWeights) -> Tensor:
    """Return what rounds read of rows, [num_rows, num_key_heads, update_width]. `decay`: of each row since its edge."""
    parts = [each.permute(2, 0, 1, 3).flatten(2) for each in (update, k, decay)]
    kept = torch.cat(parts, 2)
    return F.pad(kept, (0, weights.update_width - kept.shape[2]))


def _decayed_products(x: Tensor, k: Tensor, decay: Tensor, is_seen: Tensor) -> Tensor:
    """Return P(x), [num_key_heads, num_shared, num_rows, num_rows]. `x` and `k` are [num_key_heads, 1, num_rows,
    key_dim], `decay` [num_key_heads, num_shared, num_rows, decay_dim] is G. No exponent is above zero, so nothing
    overflows."""
    between = (decay.unsqueeze(3) - decay.unsqueeze(2)).masked_fill(~is_seen.unsqueeze(2), float("-inf")).exp()
    if decay.shape[3] == 1:
        return (x @ k.transpose(2, 3)) * between.squeeze(4)
    return (between.mul_(k.unsqueeze(2)) @ x.unsqueeze(4)).squeeze(4)


def _unit(x: Tensor) -> Tensor:
    """Return vectors [..., dim] of length one."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _EPS)
