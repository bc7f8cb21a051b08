"""Entries by Triton: the rows of new tokens go into tail pages, and each token that ends a window makes its entry.

A window's rows are those of the forward, or lie in pages already. So one launch does both, and no program waits for
another one.
"""

# ruff: noqa: N803, N806
# pyright: reportArgumentType=false, reportCallIssue=false, reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..products.norm import Norm
from .paged_entries import TokenPlan
from .triton_heads import turned, turns_of

_ROWS = 8  # of a window that a program reads at once


def compress_paged(
    inputs: Tensor,
    bias: Tensor,
    norm: Norm,
    frequencies: Tensor,
    inputs_layer: Tensor,
    entries_layer: Tensor,
    plan: TokenPlan,
) -> None:
    """Store kv and gate of all tokens, `inputs` [num_tokens, 2 * columns] of any float type, in `inputs_layer`
    [num_pages, 1, 1, page_size, 2 * columns] float32, whose pages are tail pages. Store the entries of windows that end
    with one of the tokens in `entries_layer` [num_pages, 1, 1, page_size, part], normed and rotated.

    `bias` [rate, columns] float32; `norm` [width]; `frequencies` [num_pairs] float32, radians per position."""
    (num_tokens, num_inputs), (rate, columns), width = inputs.shape, bias.shape, len(norm.weight)
    page_size, part = entries_layer.shape[3:]
    assert num_inputs == 2 * columns == inputs_layer.shape[4] and inputs.stride(1) == 1, (inputs.shape, bias.shape)
    assert columns in (width, 2 * width) and page_size % rate == 0 and rate * part >= width, (columns, width, part)
    assert inputs_layer.is_contiguous() and entries_layer.is_contiguous() and bias.is_contiguous()
    assert inputs_layer.shape[3] == page_size and len(plan.slots) == num_tokens, inputs_layer.shape
    if not num_tokens:
        return
    num_rows = rate * columns // width
    _compress_kernel[(num_tokens,)](
        inputs_layer, entries_layer, inputs, bias, norm.weight, frequencies, plan.slots, plan.seqs, plan.firsts,
        plan.table, plan.tail_table, inputs.stride(0), plan.table.stride(0), plan.tail_table.stride(0), norm.eps,
        RATE=rate, COLUMNS=columns, WIDTH=width, PAIRS=len(frequencies), PAGE_SIZE=page_size, STRIDE=rate * part,
        BLOCK_R=min(_ROWS, triton.next_power_of_2(num_rows)), BLOCK_P=triton.next_power_of_2(width // 2),
        BLOCK_I=triton.next_power_of_2(num_inputs), num_warps=4 if width <= 256 else 8,
    )  # fmt: skip


@triton.jit(do_not_specialize=("table_stride", "tail_stride"))
def _compress_kernel(
    pages_ptr,  # [num_tail_pages, PAGE_SIZE, 2 * COLUMNS] float32, written
    entries_ptr,  # [num_pages, PAGE_SIZE / RATE, STRIDE], written
    inputs_ptr,  # [num_tokens, 2 * COLUMNS], tokens input_stride apart
    bias_ptr,  # [RATE, COLUMNS] float32
    norm_ptr,  # [WIDTH]
    frequencies_ptr,  # [PAIRS] float32
    slots_ptr,  # [num_tokens] int32
    seqs_ptr,  # [num_tokens] int32
    firsts_ptr,  # [num_tokens] int32
    table_ptr,  # [num_seqs, max_pages] int64, rows table_stride apart
    tails_ptr,  # [num_seqs, max_pages] int64, rows tail_stride apart
    input_stride,
    table_stride,
    tail_stride,
    eps,
    RATE: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
    PAIRS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    STRIDE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    """Grid: (num_tokens,)."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    if slot >= 0:
        seq = tl.load(seqs_ptr + token).to(tl.int64)
        tails_ptr += seq * tail_stride
        own, numbers = inputs_ptr + token * input_stride, tl.arange(0, BLOCK_I)
        is_input = numbers < 2 * COLUMNS
        row = tl.load(tails_ptr + slot // PAGE_SIZE) * PAGE_SIZE + slot % PAGE_SIZE
        values = tl.load(own + numbers, mask=is_input, other=0.0).to(tl.float32)
        tl.store(pages_ptr + row * (2 * COLUMNS) + numbers, values, mask=is_input)
        if (slot + 1) % RATE == 0:
            first = tl.load(firsts_ptr + token)
            pairs = tl.arange(0, BLOCK_P)
            is_pair = pairs < WIDTH // 2
            even, odd = _entry(
                own, pages_ptr, bias_ptr, tails_ptr, slot, first, pairs, is_pair, input_stride,
                RATE, COLUMNS, WIDTH, PAGE_SIZE, BLOCK_R, BLOCK_P,
            )  # fmt: skip
            scale = tl.rsqrt(tl.sum(even * even + odd * odd, 0) / WIDTH + eps)
            even *= scale * tl.load(norm_ptr + 2 * pairs, mask=is_pair, other=0.0).to(tl.float32)
            odd *= scale * tl.load(norm_ptr + 2 * pairs + 1, mask=is_pair, other=0.0).to(tl.float32)
            begin = slot - RATE + 1
            cos, sin = turns_of(begin, pairs, frequencies_ptr, WIDTH, PAIRS)
            even, odd = turned(even, odd, cos, sin)
            page = tl.load(table_ptr + seq * table_stride + begin // PAGE_SIZE)
            entry = entries_ptr + (page * (PAGE_SIZE // RATE) + begin % PAGE_SIZE // RATE) * STRIDE
            tl.store(entry + 2 * pairs, even.to(entries_ptr.dtype.element_ty), mask=is_pair)
            tl.store(entry + 2 * pairs + 1, odd.to(entries_ptr.dtype.element_ty), mask=is_pair)


@triton.jit
def _entry(
    own_ptr,  # the inputs of the token that ends the window
    pages_ptr,
    bias_ptr,
    tails_ptr,  # [max_pages] int64, of the sequence
    slot,
    first,  # the first slot whose inputs are those of the forward
    pairs,  # [BLOCK_P]
    is_pair,
    input_stride,
    RATE: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Return the numbers of even and odd columns of an entry before its norm, [BLOCK_P] float32 each. Windows overlap
    if COLUMNS is twice WIDTH."""
    ROWS: tl.constexpr = RATE * (COLUMNS // WIDTH)
    even, even_total = tl.zeros([BLOCK_P], tl.float32), tl.zeros([BLOCK_P], tl.float32)
    odd, odd_total = tl.zeros([BLOCK_P], tl.float32), tl.zeros([BLOCK_P], tl.float32)
    even_high = tl.full([BLOCK_P], -3.4028234663852886e38, tl.float32)
    odd_high = even_high
    for begin in range(0, ROWS, BLOCK_R):
        rows = begin + tl.arange(0, BLOCK_R)
        at = slot - ROWS + 1 + rows  # slots
        is_row = (rows < ROWS) & (at >= 0)
        is_new = is_row & (at >= first)
        is_old = is_row & (at < first)
        pages = tl.load(tails_ptr + tl.maximum(at, 0) // PAGE_SIZE, mask=is_old, other=0)
        old = pages_ptr + (pages * PAGE_SIZE + tl.maximum(at, 0) % PAGE_SIZE) * (2 * COLUMNS)
        new = own_ptr + (at - slot).to(tl.int64) * input_stride
        half = tl.where(rows < ROWS - RATE, 0, COLUMNS - WIDTH)  # of the window before, first halves
        columns = half[:, None] + 2 * pairs[None, :]
        bias = bias_ptr + (rows % RATE)[:, None] * COLUMNS + columns
        is_new, is_old = is_new[:, None] & is_pair[None, :], is_old[:, None] & is_pair[None, :]
        new, old = new[:, None] + columns, old[:, None] + columns
        even, even_total, even_high = _weigh(
            new, old, bias, is_new, is_old, even, even_total, even_high, COLUMNS
        )  # fmt: skip
        odd, odd_total, odd_high = _weigh(
            new + 1, old + 1, bias + 1, is_new, is_old, odd, odd_total, odd_high, COLUMNS
        )  # fmt: skip
    return even / tl.where(is_pair, even_total, 1.0), odd / tl.where(is_pair, odd_total, 1.0)


@triton.jit
def _weigh(new, old, bias, is_new, is_old, sums, total, highest, COLUMNS: tl.constexpr):
    """Return the state of a softmax by columns, [BLOCK_P] each, after some more rows at `new` or `old` [BLOCK_R,
    BLOCK_P]."""
    kv = tl.load(new, mask=is_new, other=0.0).to(tl.float32) + tl.load(old, mask=is_old, other=0.0)
    gate = tl.load(new + COLUMNS, mask=is_new, other=0.0).to(tl.float32)
    gate += tl.load(old + COLUMNS, mask=is_old, other=0.0)
    gate = tl.where(is_new | is_old, gate + tl.load(bias, mask=is_new | is_old, other=0.0), float("-inf"))
    new_highest = tl.maximum(highest, tl.max(gate, 0))
    weights = tl.exp(gate - new_highest[None, :])
    correction = tl.exp(highest - new_highest)
    total = total * correction + tl.sum(weights, 0)
    return sums * correction + tl.sum(weights * kv, 0), total, new_highest
