"""Kernels for the CPU, compiled by numba: float32 on numpy arrays. The files numba_*.py wrap them for tensors.

A decode step on a CPU is mostly many small operations. Each kernel is one call in place of three to ten of torch. All
kernels that call each other are in one file, because numba's cache on disk notices changes of a kernel's own file only.

No length of an inner loop is known at compile time, on purpose. LLVM vectorises such a loop. It would unroll a known
length of 32 into scalar code, which is slower.

`fastmath` never holds "ninf", because scores of -inf mask keys. It holds "nnan" for the maximum only, because NaN of a
broken model must stay NaN.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

logger = logging.getLogger(__name__)

_SUMS = {"reassoc", "contract", "nsz", "arcp"}
_LOG2_E = np.float32(1.4426950408889634)
_LN2_HIGH = np.float32(0.693359375)  # few bits, so that its product with an exponent is exact
_LN2_LOW = np.float32(-2.12194440e-4)  # ln 2 - _LN2_HIGH
_LOWEST = np.float32(-87.0)  # its exponential is nearly the least normal number
_LINE_BYTES = 64
_ONE = np.float32(1.0)
_ZERO = np.float32(0.0)
_NO_SINK = np.float32(-np.inf)


def compiled(flags: set[str]) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator that compiles a function at its first call, with these `fastmath` flags.

    The machine code is kept beside this file. If the package is read-only, it is kept in the user's cache directory. If
    neither can be written, each process compiles anew, and says so once."""

    def decorate(function: Callable[..., Any]) -> Any:
        try:
            return njit(cache=True, nogil=True, error_model="numpy", fastmath=flags)(function)
        except RuntimeError:  # "cannot cache function: no locator available"
            _warn_of_no_cache()
            return njit(nogil=True, error_model="numpy", fastmath=flags)(function)

    return decorate


@functools.cache
def _warn_of_no_cache() -> None:
    logger.warning(
        "the compiled kernels cannot be kept, so each start compiles them again: neither %s nor the user's cache "
        "directory can be written; set XDG_CACHE_HOME or NUMBA_CACHE_DIR to a directory that can",
        Path(__file__).parent,
    )


@intrinsic
def _prefetch_line(_typing: Any, _address: Any) -> Any:
    """Prefetch the cache line at `_address`, an int64. Any address is allowed."""

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
    """Prefetch all of a contiguous array. Hardware does not, because it sees no pattern in jumps between pages."""
    start = np.int64(block.ctypes.data)
    for offset in range(0, block.nbytes, _LINE_BYTES):
        _prefetch_line(start + offset)  # type: ignore[reportCallIssue]  # numba gives the first argument


@compiled(_SUMS)
def add_rms_norm(hidden, delta, has_delta, weight, eps, out):
    """Add `delta` to `hidden` if `has_delta`, then write hidden / sqrt(mean(hidden^2) + eps) * weight to `out`.

    `hidden`, `delta` and `out` are [num_rows, size] float32, `weight` is [size] float32."""
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
    """Write gate * sigmoid(gate) * up to `out` [num_rows, size]. `gate_up` [num_rows, 2 * size] has the gate first."""
    size = out.shape[1]
    for row in range(out.shape[0]):
        for i in range(size):
            gate = gate_up[row, i]
            small = _exp(-abs(gate))  # never overflows
            sigmoid = (_ONE if gate >= _ZERO else small) / (_ONE + small)
            out[row, i] = gate * sigmoid * gate_up[row, size + i]


@compiled(_SUMS)
def attend(
    qkv,  # [num_tokens, num_heads + num_planes * num_kv_heads, head_dim] float32; queries and keys are overwritten
    kv,  # [num_layers, num_pages, num_planes, num_kv_heads, page_size, head_dim] float32, written
    layer,
    cos,  # [num_tokens, 1, rotary_dim] float32
    sin,  # [num_tokens, 1, rotary_dim] float32, its first half negated
    q_norm,  # [head_dim] float32; [0]: heads are not normed
    k_norm,  # [head_dim] float32; [0]: heads are not normed
    eps,
    block_table,  # [num_seqs, max_pages] int64
    starts,  # [num_seqs + 1] int64
    seq_lens,  # [num_seqs] int64
    positions,  # [num_tokens] int64
    tree_starts,  # [num_seqs] int64
    visible,  # [num_tokens, num_columns] bool; no rows: causal
    window,  # 0: none
    scale,  # of scores
    sinks,  # [num_heads] float32; [0]: none
    out,  # [num_tokens, num_heads, head_dim] float32, written
):
    """Norm and rotate queries and keys in place, store keys and values in their pages, and attend: `attend_ref`.

    The sequences may be a part of a forward's. `starts` then counts tokens of the whole forward, as do the rows of
    `qkv`, `cos`, `sin`, `positions`, `visible` and `out`."""
    num_heads, head_dim = out.shape[1:]
    num_kv_heads, first_rotated = kv.shape[3], head_dim - cos.shape[2]
    scores = np.empty((num_heads, seq_lens.max()), np.float32)
    factor = np.float32(scale)
    for seq in range(seq_lens.shape[0]):
        table, first, stop, seq_len = block_table[seq], starts[seq], starts[seq + 1], seq_lens[seq]
        for token in range(first, stop):
            if q_norm.shape[0] > 0:
                _norm_heads(qkv[token, :num_heads], q_norm, eps)
                _norm_heads(qkv[token, num_heads : num_heads + num_kv_heads], k_norm, eps)
            _rotate_heads(qkv[token, : num_heads + num_kv_heads], first_rotated, cos[token, 0], sin[token, 0])
            _store(qkv[token, num_heads:], kv, layer, table, seq_len - stop + token)
        for token in range(first, stop):
            slot = seq_len - stop + token
            begin = min(slot, max(0, positions[token] - window + 1)) if window > 0 else 0
            end = slot + 1 if visible.shape[0] == 0 else seq_len
            _scores(qkv[token, :num_heads], factor, kv, layer, table, begin, end, scores)
            if visible.shape[0] > 0:
                tree_start = tree_starts[seq]
                window_start = positions[token] - window + 1 if window > 0 else np.int64(-1)
                _hide(scores, begin, tree_start, seq_len, visible[token], positions[first:stop], window_start)
            for head in range(num_heads):
                _softmax(scores[head, : end - begin], sinks[head] if sinks.shape[0] > 0 else _NO_SINK)
            _weighted_values(scores, kv, layer, table, begin, end, visible.shape[0] > 0, out[token])


@compiled(_SUMS)
def attend_stored(q, kv, layer, block_table, seq_lens, out):
    """Attend one query per sequence to all slots of the sequence's length: `attend_stored_ref`.

    `q` and `out` are [num_seqs, num_heads, head_dim] float32, `kv`, `block_table` and `seq_lens` as in `attend`."""
    num_heads, head_dim = out.shape[1:]
    scores = np.empty((num_heads, seq_lens.max()), np.float32)
    scale = np.float32(_ONE / np.sqrt(np.float32(head_dim)))
    for seq in range(seq_lens.shape[0]):
        end = seq_lens[seq]
        _scores(q[seq], scale, kv, layer, block_table[seq], 0, end, scores)
        for head in range(num_heads):
            _softmax(scores[head, :end], _NO_SINK)
        _weighted_values(scores, kv, layer, block_table[seq], 0, end, False, out[seq])


@compiled(_SUMS)
def _norm_heads(heads, weight, eps):
    """Norm `heads` [num_heads, head_dim] in place, each by itself; `weight` is [head_dim]."""
    for head in range(heads.shape[0]):
        x = heads[head]
        total = _ZERO
        for i in range(x.shape[0]):
            total += x[i] * x[i]
        factor = np.float32(_ONE / np.sqrt(total / np.float32(x.shape[0]) + eps))
        for i in range(x.shape[0]):
            x[i] = x[i] * factor * weight[i]


@compiled(_SUMS)
def _rotate_heads(heads, first, cos, sin):
    """Rotate the numbers of `heads` [num_heads, head_dim] from `first` on in place, as `rotary_ref` does.

    `cos` and `sin` are [head_dim - first]."""
    half = cos.shape[0] // 2
    for head in range(heads.shape[0]):
        a, b = heads[head, first : first + half], heads[head, first + half :]
        for i in range(half):
            x, y = a[i], b[i]
            a[i] = x * cos[i] + y * sin[i]
            b[i] = y * cos[half + i] + x * sin[half + i]


@compiled(_SUMS)
def _store(new, kv, layer, table, slot):
    """Store one token's keys and values, `new` [num_planes * num_kv_heads, head_dim], in `slot` of the pages `table`.

    A page that begins with this slot is cleared first, as `clear_fresh_pages` does."""
    num_planes, num_kv_heads, page_size, head_dim = kv.shape[2:]
    page, row = table[slot // page_size], slot % page_size
    if row == 0:
        kv[layer, page] = _ZERO
    for plane in range(num_planes):
        for head in range(num_kv_heads):
            target, source = kv[layer, page, plane, head, row], new[plane * num_kv_heads + head]
            for i in range(head_dim):
                target[i] = source[i]


@compiled(_SUMS)
def _scores(q, scale, kv, layer, table, begin, end, scores):
    """Write scale * q[head] . K[j] to scores[head, j - begin], for slots j in [begin, end).

    `q` is [num_heads, head_dim], `table` [max_pages] int64. Pages are read one by one, all heads of a page together,
    which is their order in memory. The page after is prefetched, and after the last one the first values."""
    num_planes, num_kv_heads, page_size = kv.shape[2:5]
    group = q.shape[0] // num_kv_heads
    first_column, stop_column = begin // page_size, (end + page_size - 1) // page_size
    for column in range(first_column, stop_column):
        first = column * page_size
        low, high = max(begin, first), min(end, first + page_size)
        next_column, next_plane = (column + 1, 0) if column + 1 < stop_column else (first_column, num_planes - 1)
        _prefetch(kv[layer, table[next_column], next_plane])
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
    """Write -inf to the scores of the slots in [tree_start, seq_len) that a token does not see.

    The score of slot j is in column j - begin. The token sees slot j only if visible[j - tree_start] is True, `visible`
    [num_columns] bool. The last slots hold the new tokens, whose `positions` must be `window_start` or higher."""
    first_new = seq_len - positions.shape[0]
    for slot in range(max(tree_start, begin), seq_len):
        seen = visible[slot - tree_start] and (slot < first_new or positions[slot - first_new] >= window_start)
        if not seen:
            for head in range(scores.shape[0]):
                scores[head, slot - begin] = -np.inf


@compiled(_SUMS)
def _softmax(scores, sink):
    """Compute the softmax of one row [num_keys] and a sink, in place. A sink of -inf is none."""
    highest = max(_maximum(scores), sink)
    total = _exp(sink - highest)
    for j in range(scores.shape[0]):
        scores[j] = _exp(scores[j] - highest)
        total += scores[j]
    factor = _ONE / total
    for j in range(scores.shape[0]):
        scores[j] *= factor


@compiled(_SUMS | {"nnan"})
def _maximum(scores):
    """Return the largest of `scores` [num_keys]; any number if one is NaN."""
    highest = scores[0]
    for j in range(1, scores.shape[0]):
        highest = max(highest, scores[j])
    return highest


@compiled(_SUMS)
def _weighted_values(weights, kv, layer, table, begin, end, has_hidden, sums):
    """Write the sum over slots j in [begin, end) of weights[head, j - begin] * V[j] to sums[head].

    `sums` is [num_heads, head_dim]. Four keys are added in one step, so that a sum is loaded and stored once for four
    products. If `has_hidden`, a key of weight 0 adds 0, even if its values are NaN."""
    num_planes, num_kv_heads, page_size = kv.shape[2:5]
    group = sums.shape[0] // num_kv_heads
    for head in range(sums.shape[0]):
        for i in range(sums.shape[1]):
            sums[head, i] = _ZERO
    first_column, stop_column = begin // page_size, (end + page_size - 1) // page_size
    for column in range(first_column, stop_column):
        first = column * page_size
        low, high = max(begin, first), min(end, first + page_size)
        if column + 1 < stop_column:
            _prefetch(kv[layer, table[column + 1], num_planes - 1])
        for kv_head in range(num_kv_heads):
            v = kv[layer, table[column], num_planes - 1, kv_head][low - first : high - first]
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
    """Return exp(x) for x <= 0, with a relative error of 1e-7; exactly 0 below -87.

    It is Cephes' expf, in operations that LLVM vectorises."""
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
