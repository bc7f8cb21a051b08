"""Attention of prompts to latents on a GPU in the *expanded* form: keys and values of each head, made of latents.

    k[j] = W_K c[j] | r[j]      v[j] = W_V c[j]      for the latent c[j] | r[j] of slot j

A chunk of many tokens takes fewer operations so than if all its heads attend to the latents themselves, because a
head's keys and values are narrower than a latent. All heads share r, so a program reads it from the latents.

A program of `expanded_attention` works on a tile of BLOCK_M tokens of one sequence and one head. It visits keys tile by
tile with a running softmax (triton_softmax.py). Keys of a sequence lie one after the other. Those of a long history
come in pieces, because expanded ones take much memory. Then `out` and `lse` hold the attention to all pieces so far. A
program begins with it as if it were one key, whose score is the log-sum-exp.
"""

# ruff: noqa: N803, N806, RET505
# pyright: reportArgumentType=false, reportCallIssue=false, reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .latents import Keys
from .triton_attention import padded
from .triton_extend import tile_at
from .triton_softmax import has_nan, nothing_seen, quotient, weigh, weigh_seen

_SEQS = 32  # sequences that `tile_at` looks at in one step


class ExpandedTiles(NamedTuple):
    """The sizes of `expanded_attention`'s tiles."""

    block_m: int  # tokens
    block_n: int  # keys
    num_warps: int
    num_stages: int

    @classmethod
    def choose(cls, q: torch.Tensor) -> ExpandedTiles:
        """Choose by the dtype alone."""
        if q.dtype == torch.float32:  # no tensor cores; for tests more than for speed
            return cls(16, 16, num_warps=4, num_stages=1)
        return cls(128, 64, num_warps=8, num_stages=3)


def expanded_attention(
    q: torch.Tensor,
    keys: Keys,
    starts: torch.Tensor,
    plain_dim: int,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor | None = None,
    tiles: ExpandedTiles | None = None,
) -> torch.Tensor:
    """Write the attention of the tokens to `out` [num_tokens, num_heads, value_dim], contiguous, and return it.

    `q` [num_tokens, num_heads, plain_dim + rope_dim] is rotated, and may be strided by token. `starts` [num_seqs + 1]
    int32 says where the tokens of each sequence begin. Without `lse`, each token sees a key. With `lse` [num_tokens,
    num_heads] float32, `out` is float32 too, and both hold the attention to earlier keys; before the first ones, 0 and
    -inf. `lse` is in base 2."""
    num_tokens, num_heads, width = q.shape
    num_seqs, value_dim, rope_dim = len(starts) - 1, out.shape[2], width - plain_dim
    assert out.shape == (num_tokens, num_heads, value_dim) and out.is_contiguous(), out.shape
    assert keys.expanded.shape[1] == num_heads * (plain_dim + value_dim) and keys.expanded.is_contiguous(), q.shape
    assert keys.turned.shape == (len(keys.expanded), rope_dim) and keys.turned.stride(1) == 1, keys.turned.shape
    assert q.stride(1) == width and q.stride(2) == 1 and q.dtype == keys.expanded.dtype == keys.turned.dtype, q.stride()
    assert starts.shape == keys.starts.shape and starts.dtype == keys.starts.dtype == torch.int32, starts
    assert keys.offsets is None or (keys.offsets.shape == (num_seqs,) and keys.offsets.dtype == torch.int32), keys
    assert lse is None or (lse.shape == (num_tokens, num_heads) and out.dtype == lse.dtype == torch.float32), lse
    tiles = tiles or ExpandedTiles.choose(q)
    num_tiles = num_tokens // tiles.block_m + num_seqs
    _expanded_kernel[(num_tiles, num_heads)](
        out, lse, q, keys.expanded, keys.turned, starts, keys.starts, keys.offsets, num_seqs, q.stride(0),
        keys.turned.stride(0), scale * math.log2(math.e), NUM_HEADS=num_heads, PLAIN_DIM=plain_dim, ROPE_DIM=rope_dim,
        VALUE_DIM=value_dim, BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, BLOCK_P=padded(plain_dim),
        BLOCK_R=padded(rope_dim), BLOCK_V=padded(value_dim), SEQS=_SEQS,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=("num_seqs",))
def _expanded_kernel(
    out_ptr,  # [num_tokens, NUM_HEADS, VALUE_DIM] of q's dtype, written; with lse float32, read too
    lse_ptr,  # [num_tokens, NUM_HEADS] float32, read and written; None: these are all keys
    q_ptr,  # [num_tokens, NUM_HEADS, PLAIN_DIM + ROPE_DIM], tokens q_stride apart
    kv_ptr,  # [num_keys, NUM_HEADS, PLAIN_DIM + VALUE_DIM] of q's dtype
    turned_ptr,  # [num_keys, ROPE_DIM] of q's dtype, keys turned_stride apart
    starts_ptr,  # [num_seqs + 1] int32
    key_starts_ptr,  # [num_seqs + 1] int32
    offsets_ptr,  # [num_seqs] int32; None: all 0
    num_seqs,
    q_stride,
    turned_stride,
    scale,
    NUM_HEADS: tl.constexpr,
    PLAIN_DIM: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
    SEQS: tl.constexpr,
):
    """Grid: (num_tiles, NUM_HEADS). A tile may have no rows. The last tiles run first: they have most keys."""
    WIDTH: tl.constexpr = NUM_HEADS * (PLAIN_DIM + VALUE_DIM)
    tile, head = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
    seq, start, query_len, first_row = tile_at(starts_ptr, num_seqs, tile, 1, BLOCK_M, SEQS)
    first_key = tl.load(key_starts_ptr + seq)
    num_keys = tl.load(key_starts_ptr + seq + 1) - first_key
    offset = 0
    if offsets_ptr is not None:
        offset = tl.load(offsets_ptr + seq)
    end = tl.minimum(tl.minimum(first_row + BLOCK_M, query_len) + offset, num_keys)
    if (first_row < query_len) & (end > 0):
        rows = first_row + tl.arange(0, BLOCK_M)
        is_row, last_seen = rows < query_len, rows + offset
        full = tl.minimum(tl.maximum(first_row + offset + 1, 0), num_keys) // BLOCK_N * BLOCK_N  # seen by all rows
        plains, turns, dims = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_V)
        q_ptrs = q_ptr + ((start + rows).to(tl.int64) * q_stride + head * (PLAIN_DIM + ROPE_DIM))[:, None]
        q = tl.load(q_ptrs + plains[None, :], mask=is_row[:, None] & (plains < PLAIN_DIM)[None, :], other=0.0)
        is_turned = is_row[:, None] & (turns < ROPE_DIM)[None, :]
        turned_q = tl.load(q_ptrs + PLAIN_DIM + turns[None, :], mask=is_turned, other=0.0)
        kv_ptr += first_key.to(tl.int64) * WIDTH + head * (PLAIN_DIM + VALUE_DIM)
        turned_ptr += first_key.to(tl.int64) * turned_stride
        out_rows = (start + rows).to(tl.int64) * NUM_HEADS + head
        outs = out_rows[:, None] * VALUE_DIM + dims[None, :]
        is_out = is_row[:, None] & (dims < VALUE_DIM)[None, :]
        sums, total, highest = _state(out_ptr, lse_ptr, outs, is_out, out_rows, is_row, BLOCK_M, BLOCK_V)
        sums, total, highest = _weighted(
            q, turned_q, kv_ptr, turned_ptr, turned_stride, 0, full, last_seen, scale, sums, total, highest, False,
            False, WIDTH, PLAIN_DIM, ROPE_DIM, VALUE_DIM, BLOCK_N, BLOCK_P, BLOCK_R, BLOCK_V,
        )  # fmt: skip
        sums, total, highest = _weighted(
            q, turned_q, kv_ptr, turned_ptr, turned_stride, full, end, last_seen, scale, sums, total, highest, True,
            False, WIDTH, PLAIN_DIM, ROPE_DIM, VALUE_DIM, BLOCK_N, BLOCK_P, BLOCK_R, BLOCK_V,
        )  # fmt: skip
        if has_nan(sums):
            sums, total, highest = _state(out_ptr, lse_ptr, outs, is_out, out_rows, is_row, BLOCK_M, BLOCK_V)
            sums, total, highest = _weighted(
                q, turned_q, kv_ptr, turned_ptr, turned_stride, 0, end, last_seen, scale, sums, total, highest, True,
                True, WIDTH, PLAIN_DIM, ROPE_DIM, VALUE_DIM, 16, BLOCK_P, BLOCK_R, BLOCK_V,
            )  # fmt: skip
        tl.store(out_ptr + outs, quotient(sums, total).to(out_ptr.dtype.element_ty), mask=is_out)
        if lse_ptr is not None:
            tl.store(lse_ptr + out_rows, highest + tl.log2(total), mask=is_row)


@triton.jit
def _state(out_ptr, lse_ptr, outs, is_out, out_rows, is_row, BLOCK_M: tl.constexpr, BLOCK_V: tl.constexpr):
    """Return the state (sums, total, highest) after the keys of earlier pieces."""
    sums, total, highest = nothing_seen(BLOCK_M, BLOCK_V)
    if lse_ptr is not None:
        lse = tl.load(lse_ptr + out_rows, mask=is_row, other=float("-inf"))
        has_seen = lse != float("-inf")  # NaN has
        sums = tl.load(out_ptr + outs, mask=is_out, other=0.0)
        total, highest = tl.where(has_seen, 1.0, 0.0), tl.where(has_seen, lse, highest)
    return sums, total, highest


@triton.jit
def _weighted(
    q,  # [BLOCK_M, BLOCK_P]
    turned_q,  # [BLOCK_M, BLOCK_R]
    kv_ptr,  # keys and values of the sequence and head, keys WIDTH apart
    turned_ptr,  # the shared part of the sequence's keys
    turned_stride,
    begin,
    end,
    last_seen,  # [BLOCK_M] int32, the last key that each row sees
    scale,
    sums,  # [BLOCK_M, BLOCK_V] float32
    total,  # [BLOCK_M] float32
    highest,  # [BLOCK_M] float32
    HIDES: tl.constexpr,
    SELECTS: tl.constexpr,
    WIDTH: tl.constexpr,
    PLAIN_DIM: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Continue the running softmax over keys begin .. end - 1. Without HIDES, they are whole tiles that all rows see.

    With SELECTS, keys that a row does not see may be NaN."""
    plains, turns, dims = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_V)
    for first in tl.range(begin, end, BLOCK_N, num_stages=1 if SELECTS else None):
        slots = first + tl.arange(0, BLOCK_N)
        is_key = slots < end
        ptrs = kv_ptr + slots.to(tl.int64)[:, None] * WIDTH
        turned_ptrs = turned_ptr + slots[:, None] * turned_stride + turns[None, :]
        k = _load(ptrs + plains[None, :], is_key, plains, PLAIN_DIM, BLOCK_P, HIDES)
        turned_k = _load(turned_ptrs, is_key, turns, ROPE_DIM, BLOCK_R, HIDES)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        scores = tl.dot(turned_q, tl.trans(turned_k), scores, input_precision="ieee")
        v = _load(ptrs + (PLAIN_DIM + dims)[None, :], is_key, dims, VALUE_DIM, BLOCK_V, HIDES)
        is_seen = slots[None, :] <= tl.minimum(last_seen, end - 1)[:, None]
        if SELECTS:
            sums, total, highest = weigh_seen(scores, is_seen, scale, v, sums, total, highest)
        elif HIDES:
            sums, total, highest = weigh(tl.where(is_seen, scores, float("-inf")), scale, v, sums, total, highest)
        else:
            sums, total, highest = weigh(scores, scale, v, sums, total, highest)
    return sums, total, highest


@triton.jit
def _load(ptrs, is_key, dims, DIM: tl.constexpr, BLOCK: tl.constexpr, HIDES: tl.constexpr):
    """Return the numbers at `ptrs` [BLOCK_N, BLOCK], 0 where there is none."""
    if HIDES:
        return tl.load(ptrs, mask=is_key[:, None] & (dims < DIM)[None, :], other=0.0)
    elif DIM == BLOCK:
        return tl.load(ptrs)
    else:
        return tl.load(ptrs, mask=(dims < DIM)[None, :], other=0.0)
