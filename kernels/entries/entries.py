"""Attention to a window and, behind it, to entries that stand for several tokens each (DeepSeek-V4).

Every token t leaves a row (kv_t, gate_t). The rows of the window w of `rate` tokens become one entry:

    entry_w = rotate(norm(sum_j softmax_j(gate_j + bias_j) * kv_j))     in each column by itself, float32

If rows are twice as wide as entries, windows overlap: the first halves of the rows of window w - 1 and the second
halves of those of window w become entry w. The token that ends a window sees its entry.

The rows of a window that overlaps no other need not be kept. They are summed up token by token, always in this order,
so the sums do not depend on how a text is divided. The sums up to token t are one row again:

    kv   = sum_{j <= t} softmax_{j <= t}(gate_j + bias_j) * kv_j      gate = log sum_{j <= t} exp(gate_j + bias_j)

Keys are also values. They are rotated, so the output of a head is rotated back by the position of its token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..products.norm import Norm, rms_norm

_NOTHING = -1e30  # the gate of a token that has no part in a window


def compress(rows: Tensor, bias: Tensor, norm: Norm, *, has_before: bool) -> Tensor:
    """Return the entries of whole windows before their rotation, [num_windows, width] float32. It is the formula; of
    windows that overlap no other, entries are made of `window_sums`.

    `rows` [num_tokens, 2 * columns] float32 has kv and gate of each token, `bias` is [rate, columns] float32.
    `has_before`: the rows begin with a window whose entry is not wanted, which only overlapping windows may have."""
    (rate, columns), width = bias.shape, len(norm.weight)
    kv, gate = rows.unflatten(0, (-1, rate)).chunk(2, -1)  # each [num_windows, rate, columns]
    gate = gate + bias
    if columns > width:
        if not has_before:  # the first window of a text
            kv = torch.cat([torch.zeros_like(kv[:1]), kv])
            gate = torch.cat([torch.full_like(gate[:1], float("-inf")), gate])
        kv = torch.cat([kv[:-1, :, :width], kv[1:, :, width:]], 1)
        gate = torch.cat([gate[:-1, :, :width], gate[1:, :, width:]], 1)
    return rms_norm((kv * gate.softmax(1)).sum(1), *norm)


def window_sums(rows: Tensor, bias: Tensor, start: int, before: Tensor | None) -> Tensor:
    """Return the sums of windows up to each of the tokens from position `start` on, [num_tokens, 2 * width] float32.

    `rows` [num_tokens, 2 * width] float32 has kv and gate of each token, `bias` is [rate, width] float32. `before` [2 *
    width]: the sums up to the token before the first one; None: a window begins with the first one."""
    (rate, width), offset = bias.shape, start % len(bias)
    assert (before is None) == (offset == 0), (start, before is None)
    num_windows = -(-(offset + len(rows)) // rate)
    kv = rows.new_zeros(num_windows * rate, width)
    gate = torch.full_like(kv, _NOTHING)
    own = slice(offset, offset + len(rows))
    kv[own], gate[own] = rows.chunk(2, 1)
    gate += bias.repeat(num_windows, 1)
    if before is not None:
        kv[offset - 1], gate[offset - 1] = before.chunk(2)
    is_one = num_windows == 1
    first, stop = (max(0, offset - 1), own.stop) if is_one else (0, rate)
    kv, gate = kv.view(num_windows, rate, width), gate.view(num_windows, rate, width)
    for j in range(first + 1, stop):
        highest = torch.maximum(gate[:, j - 1], gate[:, j])
        old, new = (gate[:, j - 1] - highest).exp(), (gate[:, j] - highest).exp()
        total = old + new
        kv[:, j] = (old * kv[:, j - 1] + new * kv[:, j]) / total
        gate[:, j] = highest + total.log()
    return torch.cat([kv, gate], 2).flatten(0, 1)[own]


def rotate_pairs_(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate the last numbers of `x` [num_tokens, num_heads, width] in place, in float32, as pairs of neighbours. `cos`
    and `sin` are [num_tokens, 1, num_pairs] float32."""
    rotated = x[..., x.shape[-1] - 2 * cos.shape[-1] :].unflatten(-1, (-1, 2))
    even, odd = rotated.float().unbind(-1)
    rotated.copy_(torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1))


def attend_rows(q: Tensor, kv: Tensor, is_seen: Tensor, sinks: Tensor, scale: float) -> Tensor:
    """Return the attention of the tokens of one sequence, [num_tokens, num_heads, width] of q's dtype.

    `q` [num_tokens, num_heads, width]; `kv` [num_rows, width] are keys and values of all heads; `is_seen` [num_tokens,
    num_rows] bool; `sinks` [num_heads] float32 are scores without a value. A row that a token does not see has no
    influence on it, even if it is NaN."""
    wide = kv.float()
    scores = torch.einsum("thd,jd->thj", q.float(), wide) * scale
    scores = scores.masked_fill(~is_seen.unsqueeze(1), float("-inf"))
    scores = torch.cat([scores, sinks.view(1, -1, 1).expand(len(q), -1, 1)], 2)
    weights = scores.softmax(2)[..., :-1]
    is_bad = ~wide.isfinite().all(1)
    sums = torch.einsum("thj,jd->thd", weights, wide.masked_fill(is_bad.unsqueeze(1), 0.0))
    sees_bad = (is_bad & is_seen).any(1)
    return sums.masked_fill(sees_bad.view(-1, 1, 1), float("nan")).to(q.dtype)
