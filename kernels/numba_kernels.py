"""What numba compiles for the CPU: float32 kernels on numpy arrays, which kernels/cpu.py wraps for tensors.

Most of a decode step on a CPU is many small operations; each of these is one call where torch needs three to ten. All
kernels are in one file because numba's cache on disk notices changes of a kernel's own file only. Inner loops run over
lengths that are not known at compile time on purpose: LLVM vectorises those, where it unrolls a known length of 32 into
scalar code that is five times slower.

`fastmath` never holds "ninf", and "nnan" only for the maximum: infinities mask, and NaN of a broken model stays NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit

_SUMS = {"reassoc", "contract", "nsz", "arcp"}
_LOG2_E = np.float32(1.4426950408889634)
_LN2_HIGH = np.float32(0.693359375)  # few bits, so that its product with an exponent is exact
_LN2_LOW = np.float32(-2.12194440e-4)  # ln 2 - _LN2_HIGH
_LOWEST = np.float32(-87.0)  # exp of it is the least normal number, nearly
_ONE = np.float32(1.0)
_ZERO = np.float32(0.0)


def _compiled(flags: set[str]) -> Callable[[Callable[..., Any]], Any]:
    """Compile at the first call and keep the machine code beside this file, or in the user's cache directory where the
    package is read-only; where neither can be written, compile once per process."""

    def decorate(function: Callable[..., Any]) -> Any:
        try:
            return njit(cache=True, nogil=True, error_model="numpy", fastmath=flags)(function)
        except RuntimeError:  # "cannot cache function: no locator available"
            return njit(nogil=True, error_model="numpy", fastmath=flags)(function)

    return decorate


@_compiled(_SUMS)
def add_rms_norm(hidden, delta, weight, eps, out):
    """hidden += delta; out = hidden / sqrt(mean(hidden^2) + eps) * weight.

    `hidden`, `delta`, `out` [num_rows, size]; a `delta` of no rows adds nothing; `weight` [size]."""
    size = hidden.shape[1]
    for row in range(hidden.shape[0]):
        if delta.shape[0] > 0:
            for i in range(size):
                hidden[row, i] += delta[row, i]
        total = _ZERO
        for i in range(size):
            total += hidden[row, i] * hidden[row, i]
        scale = np.float32(_ONE / np.sqrt(total / np.float32(size) + eps))
        for i in range(size):
            out[row, i] = hidden[row, i] * scale * weight[i]


@_compiled(_SUMS)
def silu_mul(gate_up, out):
    """out = gate * sigmoid(gate) * up: `gate_up` [num_rows, 2 * size], gate first -> `out` [num_rows, size]."""
    size = out.shape[1]
    for row in range(out.shape[0]):
        for i in range(size):
            gate = gate_up[row, i]
            small = _exp(-abs(gate))  # never overflows
            sigmoid = (_ONE if gate >= _ZERO else small) / (_ONE + small)
            out[row, i] = gate * sigmoid * gate_up[row, size + i]


@_compiled(_SUMS)
def attend(
    qkv, kv, layer, cos, sin, q_norm, k_norm, eps, block_table, starts, seq_lens, positions, visible, window, out
):
    """Norm (if any) and rotate q and k, store k and v in their pages, attend. Shapes: kernels/cpu.py."""
    num_kv_heads, head_dim = kv.shape[3], kv.shape[5]
    group = out.shape[1] // num_kv_heads
    q = np.empty((group, head_dim), np.float32)
    sums = np.empty((group, head_dim), np.float32)
    scores = np.empty((group, seq_lens.max()), np.float32)
    for seq in range(seq_lens.shape[0]):
        table, first, stop, seq_len = block_table[seq], starts[seq], starts[seq + 1], seq_lens[seq]
        for head in range(num_kv_heads):
            where = (layer, head)
            _store(
                qkv, kv, where, out.shape[1] + head, num_kv_heads, cos, sin, k_norm, eps, table, first, stop, seq_len
            )
            _attend_head(
                qkv, kv, where, head * group, cos, sin, q_norm, eps, table, first, stop, seq_len, positions, visible,
                window, q, scores, sums, out,
            )  # fmt: skip


@_compiled(_SUMS)
def _store(qkv, kv, where, k_row, num_kv_heads, cos, sin, k_norm, eps, table, first, stop, seq_len):
    """The new tokens [first, stop) of one sequence and kv head. A page that begins is cleared: `clear_fresh_pages`."""
    (layer, head), page_size = where, kv.shape[4]
    for token in range(first, stop):
        slot = seq_len - stop + token
        page, row = table[slot // page_size], slot % page_size
        if row == 0:
            kv[layer, page, 0, head, 1:] = _ZERO
            kv[layer, page, 1, head, 1:] = _ZERO
        _rotated(qkv[token, k_row], k_norm, eps, cos[token, 0], sin[token, 0], _ONE, kv[layer, page, 0, head, row])
        kv[layer, page, 1, head, row] = qkv[token, k_row + num_kv_heads]


@_compiled(_SUMS)
def _attend_head(
    qkv, kv, where, q_row, cos, sin, q_norm, eps, table, first, stop, seq_len, positions, visible, window,
    q, scores, sums, out,
):  # fmt: skip
    """The new tokens of one sequence, the query heads of one kv head; `q`, `scores`, `sums` are scratch."""
    group, head_dim = q.shape
    prefix_len = seq_len - (stop - first)
    scale = np.float32(_ONE / np.sqrt(np.float32(head_dim)))
    for token in range(first, stop):
        for g in range(group):
            _rotated(qkv[token, q_row + g], q_norm, eps, cos[token, 0], sin[token, 0], scale, q[g])
        slot = prefix_len + token - first
        begin = min(slot, max(0, positions[token] - window + 1)) if window > 0 else 0
        end = slot + 1 if visible.shape[0] == 0 else seq_len
        _scores(q, kv, where, table, begin, end, scores)
        if visible.shape[0] > 0:
            _hide(scores, begin, prefix_len, first, stop, token, positions, visible, window)
        sums[:] = _ZERO
        weights = np.empty(group, np.float32)
        for g in range(group):
            weights[g] = _ONE / _softmax(scores[g, : end - begin])
        _add_values(scores, kv, where, table, begin, end, sums)
        for g in range(group):
            head_out = out[token, q_row + g]
            for d in range(head_dim):
                head_out[d] = sums[g, d] * weights[g]


@_compiled(_SUMS)
def _rotated(x, norm, eps, cos, sin, scale, out):
    """One head, all [head_dim]: norm by `norm` (unless empty), rotation, times `scale`."""
    half = x.shape[0] // 2
    factor = np.float32(scale)
    if norm.shape[0] > 0:
        total = _ZERO
        for i in range(x.shape[0]):
            total += x[i] * x[i]
        factor = np.float32(scale / np.sqrt(total / np.float32(x.shape[0]) + eps))
        for i in range(half):
            a, b = x[i] * norm[i] * factor, x[half + i] * norm[half + i] * factor
            out[i] = a * cos[i] + b * sin[i]
            out[half + i] = b * cos[half + i] + a * sin[half + i]
    else:
        for i in range(half):
            a, b = x[i] * factor, x[half + i] * factor
            out[i] = a * cos[i] + b * sin[i]
            out[half + i] = b * cos[half + i] + a * sin[half + i]


@_compiled(_SUMS)
def _scores(q, kv, where, table, begin, end, scores):
    """scores[g, j - begin] = q[g] . K[j] for j in [begin, end), page by page."""
    (layer, head), page_size = where, kv.shape[4]
    for column in range(begin // page_size, (end + page_size - 1) // page_size):
        first = column * page_size
        low, high = max(begin, first), min(end, first + page_size)
        k = kv[layer, table[column], 0, head][low - first : high - first]
        for g in range(q.shape[0]):
            row = scores[g, low - begin : high - begin]
            for j in range(k.shape[0]):
                total = _ZERO
                for d in range(q.shape[1]):
                    total += q[g, d] * k[j, d]
                row[j] = total


@_compiled(_SUMS)
def _hide(scores, begin, prefix_len, first, stop, token, positions, visible, window):
    """-inf for the new tokens that `token` does not see."""
    for other in range(first, stop):
        seen = visible[token, other - first] and (window <= 0 or positions[other] > positions[token] - window)
        column = prefix_len + other - first - begin
        if not seen and column >= 0:
            for g in range(scores.shape[0]):
                scores[g, column] = -np.inf


@_compiled(_SUMS)
def _softmax(scores):
    """scores = exp(scores - maximum), [num_keys]; returns their sum."""
    highest = _maximum(scores)
    total = _ZERO
    for j in range(scores.shape[0]):
        scores[j] = _exp(scores[j] - highest)
        total += scores[j]
    return total


@_compiled(_SUMS | {"nnan"})
def _maximum(scores):
    highest = scores[0]
    for j in range(1, scores.shape[0]):
        highest = max(highest, scores[j])
    return highest


@_compiled(_SUMS)
def _add_values(scores, kv, where, table, begin, end, sums):
    """sums[g] += scores[g, j - begin] * V[j] for j in [begin, end); four keys at a time, so that a sum is loaded and
    stored once for four products."""
    (layer, head), page_size = where, kv.shape[4]
    for column in range(begin // page_size, (end + page_size - 1) // page_size):
        first = column * page_size
        low, high = max(begin, first), min(end, first + page_size)
        v = kv[layer, table[column], 1, head][low - first : high - first]
        for g in range(sums.shape[0]):
            p = scores[g, low - begin : high - begin]
            num_fours = v.shape[0] // 4 * 4
            for j in range(0, num_fours, 4):
                a, b, c, d = p[j], p[j + 1], p[j + 2], p[j + 3]
                for i in range(sums.shape[1]):
                    sums[g, i] += (a * v[j, i] + b * v[j + 1, i]) + (c * v[j + 2, i] + d * v[j + 3, i])
            for j in range(num_fours, v.shape[0]):
                for i in range(sums.shape[1]):
                    sums[g, i] += p[j] * v[j, i]


@_compiled({"contract"})
def _exp(x):
    """exp(x) for x <= 0, exactly 0 below -87; relative error 1e-7. Cephes' expf, in operations that LLVM vectorises."""
    exponent = np.int32(x * _LOG2_E - np.float32(0.5))  # nearest, as x <= 0
    r = x - np.float32(exponent) * _LN2_HIGH
    r = r - np.float32(exponent) * _LN2_LOW
    y = np.float32(1.9875691500e-4)
    y = y * r + np.float32(1.3981999507e-3)
    y = y * r + np.float32(8.3334519073e-3)
    y = y * r + np.float32(4.1665795894e-2)
    y = y * r + np.float32(1.6666665459e-1)
    y = y * r + np.float32(5.0000001201e-1)
    y = y * r * r + r + _ONE
    power = np.int32((exponent + np.int32(127)) << np.int32(23)).view(np.float32)  # 2 ** exponent
    return _ZERO if x < _LOWEST else y * power
