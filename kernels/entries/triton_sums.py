"""Sums of windows that do not overlap, by Triton (entries.py): a page keeps those up to its last tokens, and each token
that ends a window makes its entry of them.

One program sums up some columns of a window, token after token, and stores the sums on the way. If a page has several
windows, and a sequence may have so many new tokens that their sums are written over those that the first window reads,
a second launch stores them.
"""

# ruff: noqa: N803
# pyright: reportArgumentType=false, reportCallIssue=false, reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .. import gpu
from ..attention.triton_shares import is_last
from ..products.norm import Norm
from .paged_entries import TokenPlan
from .triton_heads import turned, turns_of

_COLUMNS = 64  # that a program sums up
_AT_ONCE = 8  # tokens whose rows are loaded before they are added


def sum_windows(
    inputs: Tensor,
    bias: Tensor,
    norm: Norm,
    frequencies: Tensor,
    sums_layer: Tensor,
    entries_layer: Tensor,
    plan: TokenPlan,
) -> None:
    """Store the sums up to the tokens in `sums_layer` [num_pages, 1, 1, num_kept, 2 * width] float32, and entries, as
    `compress_paged` does. `inputs` [num_tokens, 2 * width]; `bias` [rate, width] float32."""
    num_tokens, (rate, width) = len(inputs), bias.shape
    page_size, num_kept = entries_layer.shape[3], sums_layer.shape[3]
    is_one = num_kept == page_size or rate == page_size or (plan.query_len is not None and plan.query_len < num_kept)
    made = torch.empty((num_tokens, width if is_one else 2 * width), dtype=torch.float32, device=inputs.device)
    block, dependent = min(_COLUMNS, triton.next_power_of_2(width)), gpu.dependent_launch(num_tokens)
    _sums_kernel[(num_tokens, triton.cdiv(width, block))](
        sums_layer, entries_layer, made, plan.arrivals, inputs, bias, norm.weight, frequencies, plan.slots, plan.seqs,
        plan.firsts, plan.ends, plan.table, plan.tail_table, inputs.stride(0), plan.table.stride(0),
        plan.tail_table.stride(0), norm.eps, STORES=is_one, RATE=rate, WIDTH=width, PAIRS=len(frequencies),
        PAGE_SIZE=page_size, NUM_KEPT=num_kept, STRIDE=rate * entries_layer.shape[4], AT_ONCE=_AT_ONCE, BLOCK=block,
        BLOCK_P=triton.next_power_of_2(width // 2), DEPENDENT=dependent, num_warps=2, launch_pdl=dependent,
    )  # fmt: skip
    if not is_one:
        _store_kernel[(num_tokens,)](
            sums_layer, made, plan.slots, plan.seqs, plan.ends, plan.tail_table, plan.tail_table.stride(0),
            WIDTH=width, PAGE_SIZE=page_size, NUM_KEPT=num_kept, BLOCK=triton.next_power_of_2(2 * width),
            DEPENDENT=dependent, num_warps=4, launch_pdl=dependent,
        )  # fmt: skip


@triton.jit(do_not_specialize=("table_stride", "tail_stride"))
def _sums_kernel(
    pages_ptr,  # [num_tail_pages, NUM_KEPT, 2 * WIDTH] float32, read, and written if STORES
    entries_ptr,  # [num_pages, PAGE_SIZE / RATE, STRIDE], written
    made_ptr,  # [num_tokens, WIDTH] float32, or [num_tokens, 2 * WIDTH] if not STORES; written and read
    arrivals_ptr,  # [num_tokens] int32, zeros before and after
    inputs_ptr,  # [num_tokens, 2 * WIDTH], tokens input_stride apart
    bias_ptr,  # [RATE, WIDTH] float32
    norm_ptr,  # [WIDTH]
    frequencies_ptr,  # [PAIRS] float32
    slots_ptr,  # [num_tokens] int32
    seqs_ptr,  # [num_tokens] int32
    firsts_ptr,  # [num_tokens] int32
    ends_ptr,  # [num_tokens] int32
    table_ptr,  # [num_seqs, max_pages] int64, rows table_stride apart
    tails_ptr,  # [num_seqs, max_pages] int64, rows tail_stride apart
    input_stride,
    table_stride,
    tail_stride,
    eps,
    STORES: tl.constexpr,
    RATE: tl.constexpr,
    WIDTH: tl.constexpr,
    PAIRS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    NUM_KEPT: tl.constexpr,  # rows of a page
    STRIDE: tl.constexpr,
    AT_ONCE: tl.constexpr,
    BLOCK: tl.constexpr,  # columns of a program
    BLOCK_P: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid: (num_tokens, ceil(WIDTH / BLOCK)). The program of the last new token of a window sums it up. The last
    program of a token that ends a window norms and rotates its entry."""
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots_ptr + token)
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    end = tl.load(ends_ptr + token)
    if (slot >= 0) & (((slot + 1) % RATE == 0) | (slot + 1 == end)):
        seq = tl.load(seqs_ptr + token).to(tl.int64)
        tails_ptr += seq * tail_stride
        columns = part * BLOCK + tl.arange(0, BLOCK)
        begin = slot // RATE * RATE
        start = tl.maximum(begin, tl.load(firsts_ptr + token))
        before = _row(tails_ptr, tl.maximum(start - 1, 0), PAGE_SIZE, NUM_KEPT)
        is_before = (columns < WIDTH) & (start > begin)
        kv = tl.load(pages_ptr + before * 2 * WIDTH + columns, mask=is_before, other=0.0)
        gate = tl.load(pages_ptr + before * 2 * WIDTH + WIDTH + columns, mask=is_before, other=-1e30)
        own_ptr, stored = inputs_ptr + token * input_stride, tl.maximum(start, slot + 1 - NUM_KEPT)
        for some in range(start, stored, AT_ONCE):  # their sums are not kept
            for i in tl.static_range(AT_ONCE):
                kv, gate = _added(
                    kv, gate, own_ptr, bias_ptr, some + i, slot, some + i < stored, columns, input_stride, RATE, WIDTH
                )
        for at in range(stored, slot + 1):
            kv, gate = _added(kv, gate, own_ptr, bias_ptr, at, slot, True, columns, input_stride, RATE, WIDTH)
            is_kept = (columns < WIDTH) & _stays(at, end, PAGE_SIZE, NUM_KEPT)
            if STORES:
                to = pages_ptr + _row(tails_ptr, at, PAGE_SIZE, NUM_KEPT) * 2 * WIDTH
            else:
                to = made_ptr + (token + at - slot) * 2 * WIDTH
            tl.store(to + columns, kv, mask=is_kept)
            tl.store(to + WIDTH + columns, gate, mask=is_kept)
        if (slot + 1) % RATE == 0:
            made_ptr += token * WIDTH * (1 if STORES else 2)
            tl.store(made_ptr + columns, kv, mask=columns < WIDTH)
            if is_last(arrivals_ptr + token, tl.num_programs(1)):
                page = tl.load(table_ptr + seq * table_stride + begin // PAGE_SIZE)
                to = entries_ptr + (page * (PAGE_SIZE // RATE) + begin % PAGE_SIZE // RATE) * STRIDE
                store_entry(to, made_ptr, norm_ptr, frequencies_ptr, begin, eps, WIDTH, PAIRS, BLOCK_P)


@triton.jit
def _added(
    kv,  # [BLOCK] float32, of the sums
    gate,  # [BLOCK] float32
    own_ptr,  # the inputs of the token in `slot`
    bias_ptr,
    at,  # the slot of the token that is added
    slot,
    is_token,
    columns,
    input_stride,
    RATE: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Return the sums with one token more. A token that is masked out changes no bit of them."""
    is_read = (columns < WIDTH) & is_token
    own_ptr += (at - slot).to(tl.int64) * input_stride
    new_kv = tl.load(own_ptr + columns, mask=is_read, other=0.0).to(tl.float32)
    new_gate = tl.load(own_ptr + WIDTH + columns, mask=is_read, other=-1e30).to(tl.float32)
    new_gate += tl.load(bias_ptr + at % RATE * WIDTH + columns, mask=is_read, other=0.0)
    highest = tl.maximum(gate, new_gate)
    old, new = tl.exp(gate - highest), tl.exp(new_gate - highest)
    total = old + new
    return (old * kv + new * new_kv) / total, highest + tl.log(total)


@triton.jit
def _row(tails_ptr, slot, PAGE_SIZE: tl.constexpr, NUM_KEPT: tl.constexpr):
    return tl.load(tails_ptr + slot // PAGE_SIZE) * NUM_KEPT + slot % PAGE_SIZE % NUM_KEPT


@triton.jit
def _stays(slot, end, PAGE_SIZE: tl.constexpr, NUM_KEPT: tl.constexpr):
    """Return whether the sums up to the token at `slot` stay in its row. They do not if a later token of this forward
    has the same row. `end` is the slot behind the forward's last token."""
    return (slot + NUM_KEPT >= end) | (slot % PAGE_SIZE + NUM_KEPT >= PAGE_SIZE)


@triton.jit
def store_entry(
    to,  # [WIDTH], written
    made_ptr,  # [WIDTH] float32
    norm_ptr,  # [WIDTH]
    frequencies_ptr,  # [PAIRS] float32
    begin,  # the first slot of the window
    eps,
    WIDTH: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Norm and rotate an entry, and store it."""
    pairs = tl.arange(0, BLOCK_P)
    is_pair = pairs < WIDTH // 2
    even = tl.load(made_ptr + 2 * pairs, mask=is_pair, other=0.0)
    odd = tl.load(made_ptr + 2 * pairs + 1, mask=is_pair, other=0.0)
    scale = tl.rsqrt(tl.sum(even * even + odd * odd, 0) / WIDTH + eps)
    even *= scale * tl.load(norm_ptr + 2 * pairs, mask=is_pair, other=0.0).to(tl.float32)
    odd *= scale * tl.load(norm_ptr + 2 * pairs + 1, mask=is_pair, other=0.0).to(tl.float32)
    cos, sin = turns_of(begin, pairs, frequencies_ptr, WIDTH, PAIRS)
    even, odd = turned(even, odd, cos, sin)
    tl.store(to + 2 * pairs, even.to(to.dtype.element_ty), mask=is_pair)
    tl.store(to + 2 * pairs + 1, odd.to(to.dtype.element_ty), mask=is_pair)


@triton.jit(do_not_specialize=("tail_stride",))
def _store_kernel(
    pages_ptr,  # [num_tail_pages, NUM_KEPT, 2 * WIDTH] float32, written
    sums_ptr,  # [num_tokens, 2 * WIDTH] float32
    slots_ptr,  # [num_tokens] int32
    seqs_ptr,  # [num_tokens] int32
    ends_ptr,  # [num_tokens] int32
    tails_ptr,  # [num_seqs, max_pages] int64, rows tail_stride apart
    tail_stride,
    WIDTH: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    NUM_KEPT: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid: (num_tokens,)."""
    token, numbers = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    slot = tl.load(slots_ptr + token)
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    if (slot >= 0) & _stays(slot, tl.load(ends_ptr + token), PAGE_SIZE, NUM_KEPT):
        row = _row(tails_ptr + tl.load(seqs_ptr + token).to(tl.int64) * tail_stride, slot, PAGE_SIZE, NUM_KEPT)
        sums = tl.load(sums_ptr + token * 2 * WIDTH + numbers, mask=numbers < 2 * WIDTH)
        tl.store(pages_ptr + row * 2 * WIDTH + numbers, sums, mask=numbers < 2 * WIDTH)
