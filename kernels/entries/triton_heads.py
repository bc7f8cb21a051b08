"""Norms and rotation of heads by Triton, and the store of keys into pages. entries.py has the formulas."""

# ruff: noqa: N803
# pyright: reportArgumentType=false, reportCallIssue=false, reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .. import gpu
from .paged_entries import HeadTurns, TokenPlan

_MANY_TOKENS = 64  # from here on, programs have several heads


def turn_heads_(q: Tensor, key: Tensor | None, turns: HeadTurns, keys_layer: Tensor | None, plan: TokenPlan) -> None:
    """Norm and rotate queries `q` [num_tokens, num_heads, width] in place. Norm and rotate `key` [num_tokens, width],
    and store it in `keys_layer` [num_pages, 1, 1, page_size, width], whose pages are tail pages.

    Tokens without a place are not stored. `q` is contiguous, `key` may be strided by token."""
    num_tokens, num_heads, width = q.shape
    num_pairs, key_norm = len(turns.frequencies), turns.key_norm
    assert q.is_contiguous() and width % 2 == 0 and 2 * num_pairs <= width, (q.shape, q.stride(), num_pairs)
    assert len(plan.slots) == num_tokens, (len(plan.slots), num_tokens)
    page_size = 1
    if key is not None:
        assert keys_layer is not None and key_norm is not None, "keys are normed and stored"
        assert key.shape == (num_tokens, width) and key.stride(1) == 1 and key.dtype == q.dtype, key.shape
        assert keys_layer.is_contiguous() and keys_layer.shape[4] == width, keys_layer.shape
        assert len(key_norm.weight) == width and key_norm.weight.is_contiguous(), key_norm.weight.shape
        page_size = keys_layer.shape[3]
    if not num_tokens:
        return
    of_program = 1 if num_tokens < _MANY_TOKENS else min(8, triton.next_power_of_2(num_heads))
    num_blocks, dependent = triton.cdiv(num_heads, of_program), gpu.dependent_launch(num_tokens)
    _turn_kernel[(num_tokens, num_blocks + (key is not None))](
        q, key, keys_layer, None if key_norm is None else key_norm.weight, turns.frequencies, plan.slots, plan.seqs,
        plan.tail_table, 0 if key is None else key.stride(0), plan.tail_table.stride(0), turns.eps or 0.0,
        0.0 if key_norm is None else key_norm.eps, HAS_NORM=turns.eps is not None, HEADS=num_heads, WIDTH=width,
        PAIRS=num_pairs, PAGE_SIZE=page_size, BLOCK_H=of_program, BLOCK_P=triton.next_power_of_2(width // 2),
        DEPENDENT=dependent, num_warps=max(1, min(4, of_program * width // 256)), launch_pdl=dependent,
    )  # fmt: skip


@triton.jit(do_not_specialize=("table_stride",))
def _turn_kernel(
    q_ptr,  # [num_tokens, HEADS, WIDTH], written
    key_ptr,  # [num_tokens, WIDTH], tokens key_stride apart; None: there are no keys
    keys_ptr,  # [num_pages, PAGE_SIZE, WIDTH], written
    weight_ptr,  # [WIDTH], of keys
    frequencies_ptr,  # [PAIRS] float32
    slots_ptr,  # [num_tokens] int32
    seqs_ptr,  # [num_tokens] int32
    table_ptr,  # [num_seqs, max_pages] int64, rows table_stride apart
    key_stride,
    table_stride,
    eps,
    key_eps,
    HAS_NORM: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    PAIRS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_P: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid: (num_tokens, blocks of heads, and one more for the key)."""
    token, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots_ptr + token)
    pairs = tl.arange(0, BLOCK_P)
    is_in = pairs < WIDTH // 2
    cos, sin = turns_of(tl.maximum(slot, 0), pairs, frequencies_ptr, WIDTH, PAIRS)
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    if block * BLOCK_H < HEADS:
        heads = block * BLOCK_H + tl.arange(0, BLOCK_H)
        is_q = (heads < HEADS)[:, None] & is_in[None, :]
        ptrs = q_ptr + (token * HEADS + heads)[:, None] * WIDTH + 2 * pairs[None, :]
        even, odd = tl.load(ptrs, mask=is_q, other=0.0), tl.load(ptrs + 1, mask=is_q, other=0.0)
        if HAS_NORM:
            wide_even, wide_odd = even.to(tl.float32), odd.to(tl.float32)
            square = tl.sum(wide_even * wide_even + wide_odd * wide_odd, 1) / WIDTH
            scale = tl.rsqrt(square + eps).to(even.dtype)
            even, odd = even * scale[:, None], odd * scale[:, None]
        even, odd = turned(even.to(tl.float32), odd.to(tl.float32), cos[None, :], sin[None, :])
        tl.store(ptrs, even.to(q_ptr.dtype.element_ty), mask=is_q)
        tl.store(ptrs + 1, odd.to(q_ptr.dtype.element_ty), mask=is_q)
    elif key_ptr is not None:  # noqa: SIM102
        if slot >= 0:
            ptrs = key_ptr + token * key_stride + 2 * pairs
            even = tl.load(ptrs, mask=is_in, other=0.0).to(tl.float32)
            odd = tl.load(ptrs + 1, mask=is_in, other=0.0).to(tl.float32)
            scale = tl.rsqrt(tl.sum(even * even + odd * odd, 0) / WIDTH + key_eps)
            even_weight = tl.load(weight_ptr + 2 * pairs, mask=is_in, other=0.0)
            odd_weight = tl.load(weight_ptr + 2 * pairs + 1, mask=is_in, other=0.0)
            even = ((even * scale).to(even_weight.dtype) * even_weight).to(key_ptr.dtype.element_ty)
            odd = ((odd * scale).to(odd_weight.dtype) * odd_weight).to(key_ptr.dtype.element_ty)
            even, odd = turned(even.to(tl.float32), odd.to(tl.float32), cos, sin)
            table_ptr += tl.load(seqs_ptr + token).to(tl.int64) * table_stride
            row = tl.load(table_ptr + slot // PAGE_SIZE) * PAGE_SIZE + slot % PAGE_SIZE
            tl.store(keys_ptr + row * WIDTH + 2 * pairs, even.to(keys_ptr.dtype.element_ty), mask=is_in)
            tl.store(keys_ptr + row * WIDTH + 2 * pairs + 1, odd.to(keys_ptr.dtype.element_ty), mask=is_in)


@triton.jit
def turns_of(position, pairs, frequencies_ptr, WIDTH: tl.constexpr, PAIRS: tl.constexpr):
    """Return cosines and sines of a head's `pairs` at a position, of the shape of `pairs`; 1 and 0 for those that are
    not rotated."""
    turned_pair = pairs - (WIDTH // 2 - PAIRS)
    is_turned = (turned_pair >= 0) & (turned_pair < PAIRS)
    angles = position.to(tl.float32) * tl.load(frequencies_ptr + turned_pair, mask=is_turned, other=0.0)
    return tl.cos(angles), tl.sin(angles)


@triton.jit
def turned(even, odd, cos, sin):
    """Return pairs after their rotation, float32."""
    return even * cos - odd * sin, odd * cos + even * sin
