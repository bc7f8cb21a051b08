"""Attention to a window and, behind it, to entries that stand for several tokens each (DeepSeek-V4).

Every token t leaves a row (kv_t, gate_t). The rows of the window w of `rate` tokens become one entry:

    entry_w = rotate(norm(sum_j softmax_j(gate_j + bias_j) * kv_j))     in each column by itself, float32

If rows are twice as wide as entries, windows overlap: the first halves of the rows of window w - 1 and the second
halves of those of window w become entry w. The token that ends a window sees its entry.

Keys are also values. They are rotated, so the output of a head is rotated back by the position of its token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..products.norm import Norm, rms_norm


def compress(rows: Tensor, bias: Tensor, norm: Norm, *, has_before: bool) -> Tensor:
    """Return the entries of whole windows before their rotation, [num_windows, width] float32.

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
