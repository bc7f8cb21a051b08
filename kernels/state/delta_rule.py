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

A row is the output of the layer's input projections for a token, here of one key head and the value heads that share
it:

    | q | k | v of each value head | b of each value head | a of each value head |
    (q, k, v) <- silu(convolution over this row and the ones before it);  q, k <- q / |q|, k / |k|
    beta = sigmoid(b);  g = -exp(A_log) softplus(a + dt_bias), where a, dt_bias and g have decay_dim numbers
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

_EPS = 1e-6  # of the lengths of q and k


class DeltaWeights(NamedTuple):
    """The weights of one layer, float32. Value heads stand behind their key head."""

    taps: Tensor  # [num_key_heads, 2 * key_dim + num_shared * value_dim, num_taps], of the oldest row first
    a_log: Tensor  # [num_key_heads, num_shared], value heads that share a key head
    dt_bias: Tensor  # [num_key_heads, num_shared, decay_dim]; decay_dim is 1 or key_dim
    key_dim: int
    value_dim: int

    @property
    def num_before(self) -> int:
        """Number of rows before a row that its convolution reads."""
        return self.taps.shape[2] - 1

    @property
    def width(self) -> int:
        """Numbers of one key head in a row."""
        return self.taps.shape[1] + self.a_log.shape[1] * (1 + self.dt_bias.shape[2])

    @property
    def state_shape(self) -> tuple[int, int, int, int]:
        """Shape of a state: [num_key_heads, num_shared, key_dim, value_dim]."""
        return self.a_log.shape[0], self.a_log.shape[1], self.key_dim, self.value_dim


class DeltaOutputs(NamedTuple):
    """Results of the rule for `num` rows. The rows that only the first convolutions read are not counted."""

    outputs: Tensor  # [num, num_value_heads, value_dim] float32
    updates: Tensor  # likewise, U of each row
    states: list[Tensor]  # after the whole blocks, each as the state before


def gated_delta_rule(rows: Tensor, state: Tensor, weights: DeltaWeights, block: int) -> DeltaOutputs:
    """Return the outputs and updates of rows, and the states after the whole blocks among them.

    `rows` [num_rows, num_key_heads, 2 * key_dim + num_shared * (value_dim + 1 + decay_dim)] begin `num_before` rows
    before a block, zeros before the text. `state` is float32 of `state_shape`, the state at that block."""
    assert rows.shape[1:] == (len(weights.taps), weights.width), (rows.shape, weights.width)
    assert state.shape == weights.state_shape and state.dtype == torch.float32, (state.shape, state.dtype)
    outputs: list[Tensor] = []
    updates: list[Tensor] = []
    states: list[Tensor] = []
    for start in range(0, len(rows) - weights.num_before, block):
        part = rows[start : start + weights.num_before + block]
        num_new = len(part) - weights.num_before
        output, update, after = _compute_block(F.pad(part, (0, 0, 0, 0, 0, block - num_new)).float(), state, weights)
        outputs.append(output[:num_new])
        updates.append(update[:num_new])
        if num_new == block:
            state = after
            states.append(after)
    return DeltaOutputs(torch.cat(outputs), torch.cat(updates), states)


def _compute_block(rows: Tensor, state: Tensor, weights: DeltaWeights) -> tuple[Tensor, Tensor, Tensor]:
    """Return the outputs of a block [block, num_value_heads, value_dim], its updates likewise, and the state after it.
    `rows` are float32, those of the block behind `num_before` others."""
    num_before, num_channels = weights.num_before, weights.taps.shape[1]
    _, num_shared, key_dim, value_dim = state.shape
    block = len(rows) - num_before
    mixed = rows[:block, :, :num_channels] * weights.taps[:, :, 0]
    for tap in range(1, num_before + 1):
        mixed = mixed + rows[tap : tap + block, :, :num_channels] * weights.taps[:, :, tap]
    q, k, v = F.silu(mixed).transpose(0, 1).split([key_dim, key_dim, num_shared * value_dim], 2)
    q, k = (_unit(each).unsqueeze(1) for each in (q, k))  # [num_key_heads, 1, block, key_dim]
    v = v.unflatten(2, (num_shared, value_dim)).transpose(1, 2)  # [num_key_heads, num_shared, block, value_dim]
    b, a = rows[num_before:, :, num_channels:].permute(1, 2, 0).tensor_split([num_shared], 1)
    beta = torch.sigmoid(b).unsqueeze(3)  # [num_key_heads, num_shared, block, 1]
    a = a.unflatten(1, (num_shared, -1)).transpose(2, 3)  # [num_key_heads, num_shared, block, decay_dim]
    steps = -weights.a_log.exp()[:, :, None, None] * F.softplus(a + weights.dt_bias.unsqueeze(2))
    decay = steps.cumsum(2)
    system = beta * _decayed_products(k, k, decay)
    known = beta * (v - (decay.exp() * k) @ state)
    update = torch.linalg.solve_triangular(system, known, upper=False, unitriangular=True)
    q = q * key_dim**-0.5
    output = (decay.exp() * q) @ state + _decayed_products(q, k, decay) @ update
    last = decay[:, :, -1:]
    after = last.exp().transpose(2, 3) * state + ((last - decay).exp() * k).transpose(2, 3) @ update
    return output.permute(2, 0, 1, 3).flatten(1, 2), update.permute(2, 0, 1, 3).flatten(1, 2), after


def _decayed_products(x: Tensor, k: Tensor, decay: Tensor) -> Tensor:
    """Return P(x), [num_key_heads, num_shared, block, block]. `x` and `k` are [num_key_heads, 1, block, key_dim],
    `decay` [num_key_heads, num_shared, block, decay_dim] is G. No exponent is above zero, so nothing overflows."""
    block = decay.shape[2]
    is_later = torch.ones(block, block, dtype=torch.bool, device=decay.device).triu(1).unsqueeze(2)
    between = (decay.unsqueeze(3) - decay.unsqueeze(2)).masked_fill(is_later, float("-inf")).exp()
    if decay.shape[3] == 1:
        return (x @ k.transpose(2, 3)) * between.squeeze(4)
    return (between.mul_(k.unsqueeze(2)) @ x.unsqueeze(4)).squeeze(4)


def _unit(x: Tensor) -> Tensor:
    """Return vectors [..., dim] of length one."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _EPS)
