"""Kernels that numba compiles for the CPU: float32, on numpy arrays. The files numba_*.py wrap them for tensors.

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
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

_SUMS = {"reassoc", "contract", "nsz", "arcp"}
_LOG2_E = np.float32(1.4426950408889634)
_LN2_HIGH = np.float32(0.693359375)  # few bits, so that its product with an exponent is exact
_LN2_LOW = np.float32(-2.12194440e-4)  # ln 2 - _LN2_HIGH
_LOWEST = np.float32(-87.0)  # exp of it is the least normal number, nearly
_LINE_BYTES = 64
_ONE = np.float32(1.0)
_ZERO = np.float32(0.0)


def compiled(flags: set[str]) -> Callable[[Callable[..., Any]], Any]:
    """Compile at the first call and keep the machine code beside this file, or in the user's cache directory where the
    package is read-only; where neither can be written, compile once per process."""

    def decorate(function: Callable[..., Any]) -> Any:
        try:
            return njit(cache=True, nogil=True, error_model="numpy", fastmath=flags)(function)
        except RuntimeError:  # "cannot cache function: no locator available"
            return njit(nogil=True, error_model="numpy", fastmath=flags)(function)

    return decorate


@intrinsic
def _prefetch_line(_typing: Any, _address: Any) -> Any:
    """Ask for the cache line at `_address` [int64]; any address may be asked for."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        line = builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())
        flag = ir.IntType(32)
        function_type = ir.FunctionType(ir.VoidType(), [line.type, flag, flag, flag])
        function = builder.module.declare_intrinsic("llvm.prefetch", [line.type], function_type)
        builder.call(function, [line, flag(0), flag(3), flag(1)])  # to read, keep close, data
        return context.get_dummy_value()

    return types.void(types.int64), generate


@compiled(_SUMS)
def _prefetch(block):
    """Ask for all of a contiguous array. Hardware sees no pattern in jumps between pages: with this a step of 8
    sequences of 150 tokens attends in 0.63 ms, without in 0.92 (demo model, weights between the layers' pages)."""
    start = np.int64(block.ctypes.data)
    for offset in range(0, block.nbytes, _LINE_BYTES):
        _prefetch_line(start + offset)  # type: ignore[reportCallIssue]  # numba gives the first argument


@compiled(_SUMS)
def add_rms_norm(hidden, delta, has_delta, weight, eps, out):
    """hidden += delta, if it has one; out = hidden / sqrt(mean(hidden^2) + eps) * weight.

    `hidden`, `delta`, `out` [num_rows, size]; `weight` [size]."""
    size = hidden.shape[1]
    for row in range(hidden.shape[0]):
        if has_delta:
            for i in range(size):
                hidden[row, i] += delta[row, i]
        total = _ZERO
        for i in range(size):
            total += hidden[row, i] * hidden[row, i]
        scale = np.float32(_ONE / np.sqrt(total / np.float32(size) + eps))
        for i in range(size):
            out[row, i] = hidden[row, i] * scale * weight[i]


@compiled(_SUMS)
def silu_mul(gate_up, out):
    """out = gate * sigmoid(gate) * up: `gate_up` [num_rows, 2 * size], gate first -> `out` [num_rows, size]."""
    size = out.shape[1]
    for row in range(out.shape[0]):
        for i in range(size):
            gate = gate_up[row, i]
            small = _exp(-abs(gate))  # never overflows
            sigmoid = (_ONE if gate >= _ZERO else small) / (_ONE + small)
            out[row, i] = gate * sigmoid * gate_up[row, size + i]


@compiled(_SUMS)
def attend(
    qkv, kv, layer, cos, sin, q_norm, k_norm, eps, block_table, starts, seq_lens, positions, tree_starts, visible,
    window, out,
):  # fmt: skip
    """Norm (if any) and rotate q and k in place, store k and v in their pages, attend. Shapes: kernels/cpu.py."""
    num_heads, head_dim = out.shape[1:]
    num_kv_heads = kv.shape[3]
    scores = np.empty((num_heads, seq_lens.max()), np.float32)
    scale = np.float32(_ONE / np.sqrt(np.float32(head_dim)))
    for seq in range(seq_lens.shape[0]):
        table, first, stop, seq_len = block_table[seq], starts[seq], starts[seq + 1], seq_lens[seq]
        for token in range(first, stop):
            if q_norm.shape[0] > 0:
                _norm_heads(qkv[token, :num_heads], q_norm, eps)
                _norm_heads(qkv[token, num_heads : num_heads + num_kv_heads], k_norm, eps)
            _rotate_heads(qkv[token, : num_heads + num_kv_heads], cos[token, 0], sin[token, 0])
            _store(qkv[token, num_heads:], kv, layer, table, seq_len - stop + token)
        for token in range(first, stop):
            slot = seq_len - stop + token
            begin = min(slot, max(0, positions[token] - window + 1)) if window > 0 else 0
            end = slot + 1 if visible.shape[0] == 0 else seq_len
            _scores(qkv[token, :num_heads], scale, kv, layer, table, begin, end, scores)
            if visible.shape[0] > 0:
                tree_start = tree_starts[seq]
                window_start = positions[token] - window + 1 if window > 0 else np.int64(-1)
                _hide(scores, begin, tree_start, seq_len, visible[token], positions[first:stop], window_start)
            for head in range(num_heads):
                _softmax(scores[head, : end - begin])
            _weighted_values(scores, kv, layer, table, begin, end, visible.shape[0] > 0, out[token])


@compiled(_SUMS)
def attend_stored(q, kv, layer, block_table, seq_lens, out):
    """One query a sequence, `q` and `out` [num_seqs, num_heads, head_dim], over all slots of its length."""
    num_heads, head_dim = out.shape[1:]
    scores = np.empty((num_heads, seq_lens.max()), np.float32)
    scale = np.float32(_ONE / np.sqrt(np.float32(head_dim)))
    for seq in range(seq_lens.shape[0]):
        end = seq_lens[seq]
        _scores(q[seq], scale, kv, layer, block_table[seq], 0, end, scores)
        for head in range(num_heads):
            _softmax(scores[head, :end])
        _weighted_values(scores, kv, layer, block_table[seq], 0, end, False, out[seq])


@compiled(_SUMS)
def _norm_heads(heads, weight, eps):
    """`heads` [num_heads, head_dim] in place."""
    for head in range(heads.shape[0]):
        x = heads[head]
        total = _ZERO
        for i in range(x.shape[0]):
            total += x[i] * x[i]
        factor = np.float32(_ONE / np.sqrt(total / np.float32(x.shape[0]) + eps))
        for i in range(x.shape[0]):
            x[i] = x[i] * factor * weight[i]


@compiled(_SUMS)
def _rotate_heads(heads, cos, sin):
    """`heads` [num_heads, head_dim] in place, as `rotary_ref`; `cos`, `sin` [head_dim]."""
    half = heads.shape[1] // 2
    for head in range(heads.shape[0]):
        a, b = heads[head, :half], heads[head, half:]
        for i in range(half):
            x, y = a[i], b[i]
            a[i] = x * cos[i] + y * sin[i]
            b[i] = y * cos[half + i] + x * sin[half + i]


@compiled(_SUMS)
def _store(new, kv, layer, table, slot):
    """One token's keys and values, `new` [2 * num_kv_heads, head_dim]. A page that begins is cleared first, as
    `clear_fresh_pages` does."""
    num_kv_heads, page_size, head_dim = kv.shape[3:]
    page, row = table[slot // page_size], slot % page_size
    if row == 0:
        kv[layer, page] = _ZERO
    for head in range(num_kv_heads):
        k, v = kv[layer, page, 0, head, row], kv[layer, page, 1, head, row]
        for i in range(head_dim):
            k[i] = new[head, i]
        for i in range(head_dim):
            v[i] = new[num_kv_heads + head, i]


@compiled(_SUMS)
def _scores(q, scale, kv, layer, table, begin, end, scores):
    """scores[head, j - begin] = scale * q[head] . K[j] for j in [begin, end). Page by page and all heads of a page
    together, as they lie in memory."""
    num_kv_heads, page_size = kv.shape[3:5]
    group = q.shape[0] // num_kv_heads
    first_column, stop_column = begin // page_size, (end + page_size - 1) // page_size
    for column in range(first_column, stop_column):
        first = column * page_size
        low, high = max(begin, first), min(end, first + page_size)
        _prefetch(kv[layer, table[column + 1], 0] if column + 1 < stop_column else kv[layer, table[first_column], 1])
        for kv_head in range(num_kv_heads):
            k = kv[layer, table[column], 0, kv_head][low - first : high - first]
            for head in range(kv_head * group, (kv_head + 1) * group):
                row, x = scores[head, low - begin : high - begin], q[head]
                for j in range(k.shape[0]):
                    total = _ZERO
                    for d in range(x.shape[0]):
                        total += x[d] * k[j, d]
                    row[j] = total * scale


@compiled(_SUMS)
def _hide(scores, begin, tree_start, seq_len, visible, positions, window_start):
    """-inf for the slots [tree_start, seq_len) that a token does not see, `visible` [seq_len - tree_start or more];
    slot j has column j - begin. The last slots are new tokens, whose `positions` must lie in the window."""
    first_new = seq_len - positions.shape[0]
    for slot in range(max(tree_start, begin), seq_len):
        seen = visible[slot - tree_start] and (slot < first_new or positions[slot - first_new] >= window_start)
        if not seen:
            for head in range(scores.shape[0]):
                scores[head, slot - begin] = -np.inf


@compiled(_SUMS)
def _softmax(scores):
    """Compute the softmax of one row [num_keys], in place."""
    highest = _maximum(scores)
    total = _ZERO
    for j in range(scores.shape[0]):
        scores[j] = _exp(scores[j] - highest)
        total += scores[j]
    factor = _ONE / total
    for j in range(scores.shape[0]):
        scores[j] *= factor


@compiled(_SUMS | {"nnan"})
def _maximum(scores):
    highest = scores[0]
    for j in range(1, scores.shape[0]):
        highest = max(highest, scores[j])
    return highest


@compiled(_SUMS)
def _weighted_values(weights, kv, layer, table, begin, end, has_hidden, sums):
    """Compute sums[head] = sum of weights[head, j - begin] * V[j] for j in [begin, end), four keys at a time, so that a
    sum is loaded and stored once for four products. If keys may be hidden, those of weight 0 add 0, even if their
    values are NaN."""
    num_kv_heads, page_size = kv.shape[3:5]
    group = sums.shape[0] // num_kv_heads
    for head in range(sums.shape[0]):
        for i in range(sums.shape[1]):
            sums[head, i] = _ZERO
    first_column, stop_column = begin // page_size, (end + page_size - 1) // page_size
    for column in range(first_column, stop_column):
        first = column * page_size
        low, high = max(begin, first), min(end, first + page_size)
        if column + 1 < stop_column:
            _prefetch(kv[layer, table[column + 1], 1])
        for kv_head in range(num_kv_heads):
            v = kv[layer, table[column], 1, kv_head][low - first : high - first]
            num_in_fours = v.shape[0] // 4 * 4
            for head in range(kv_head * group, (kv_head + 1) * group):
                p, y = weights[head, low - begin : high - begin], sums[head]
                for j in range(0, num_in_fours, 4):
                    a, b, c, d = p[j], p[j + 1], p[j + 2], p[j + 3]
                    if has_hidden and (a == _ZERO or b == _ZERO or c == _ZERO or d == _ZERO):
                        for i in range(y.shape[0]):
                            y[i] += (_product(a, v[j, i]) + _product(b, v[j + 1, i])) + (
                                _product(c, v[j + 2, i]) + _product(d, v[j + 3, i])
                            )
                        continue
                    for i in range(y.shape[0]):
                        y[i] += (a * v[j, i] + b * v[j + 1, i]) + (c * v[j + 2, i] + d * v[j + 3, i])
                for j in range(num_in_fours, v.shape[0]):
                    if has_hidden and p[j] == _ZERO:
                        continue
                    for i in range(y.shape[0]):
                        y[i] += p[j] * v[j, i]


@compiled(_SUMS)
def _product(weight, value):
    """Return weight * value; 0 if the weight is 0."""
    return weight * value if weight != _ZERO else _ZERO


@compiled({"contract"})
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
