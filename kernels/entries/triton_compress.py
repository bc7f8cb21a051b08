"""Entries by Triton: the rows of new tokens go into tail pages, and each token that ends a window makes its entry. Of
windows that do not overlap, sums are kept instead (triton_sums.py).

An entry's rows are those of the forward, or lie in pages already. So one launch does both, and no program waits for
another one. If a page keeps the rows of its last tokens alone, and a sequence may have so many new tokens that their
rows are written over those that its first windows read, a second launch stores them.
"""

# ruff: noqa: N803, N806
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
from .triton_sums import store_entry, sum_windows

_ROWS, _COLUMNS = 32, 64  # of a window that a program reads at once


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
    [num_pages, 1, 1, num_kept, 2 * columns] float32, whose pages are tail pages and keep the rows of their last
    `num_kept` tokens; if windows do not overlap, store the sums up to each token. Store the entries of windows that
    end with one of the tokens in `entries_layer` [num_pages, 1, 1, page_size, part], normed and rotated.

    `bias` [rate, columns] float32; `norm` [width]; `frequencies` [num_pairs] float32, radians per position."""
    (num_tokens, num_inputs), (rate, columns), width = inputs.shape, bias.shape, len(norm.weight)
    page_size, part = entries_layer.shape[3:]
    assert num_inputs == 2 * columns == inputs_layer.shape[4] and inputs.stride(1) == 1, (inputs.shape, bias.shape)
    assert columns in (width, 2 * width) and page_size % rate == 0 and rate * part >= width, (columns, width, part)
    assert inputs_layer.is_contiguous() and entries_layer.is_contiguous() and bias.is_contiguous()
    assert inputs_layer.shape[3] <= page_size and len(plan.slots) == num_tokens, inputs_layer.shape
    if not num_tokens:
        return
    if columns == width:
        sum_windows(inputs, bias, norm, frequencies, inputs_layer, entries_layer, plan)
        return
    block, num_rows = min(_COLUMNS, triton.next_power_of_2(width)), 2 * rate
    num_programs, dependent = triton.cdiv(width, block), gpu.dependent_launch(num_tokens)
    made = torch.empty((num_tokens, width), dtype=torch.float32, device=inputs.device)
    num_spare = inputs_layer.shape[3] - num_rows + 1  # new rows that leave those which windows of the forward read
    is_one = inputs_layer.shape[3] == page_size or (plan.query_len is not None and plan.query_len <= num_spare)
    for makes, stores in ((True, True),) if is_one else ((True, False), (False, True)):
        _compress_kernel[(num_tokens, num_programs)](
            inputs_layer, entries_layer, made, plan.arrivals, inputs, bias, norm.weight, frequencies, plan.slots,
            plan.seqs, plan.firsts, plan.ends, plan.table, plan.tail_table, inputs.stride(0), plan.table.stride(0),
            plan.tail_table.stride(0), norm.eps, MAKES=makes, STORES=stores, RATE=rate, COLUMNS=columns, WIDTH=width,
            PAIRS=len(frequencies), PAGE_SIZE=page_size, NUM_KEPT=inputs_layer.shape[3], STRIDE=rate * part,
            STORED=triton.cdiv(num_inputs, num_programs), BLOCK=block,
            BLOCK_R=min(_ROWS, triton.next_power_of_2(num_rows)), BLOCK_P=triton.next_power_of_2(width // 2),
            BLOCK_S=triton.next_power_of_2(triton.cdiv(num_inputs, num_programs)), DEPENDENT=dependent, num_warps=4,
            launch_pdl=dependent,
        )  # fmt: skip


@triton.jit(do_not_specialize=("table_stride", "tail_stride"))
def _compress_kernel(
    pages_ptr,  # [num_tail_pages, NUM_KEPT, 2 * COLUMNS] float32, written
    entries_ptr,  # [num_pages, PAGE_SIZE / RATE, STRIDE], written
    made_ptr,  # [num_tokens, WIDTH] float32, entries before their norm, written and read
    arrivals_ptr,  # [num_tokens] int32, zeros before and after
    inputs_ptr,  # [num_tokens, 2 * COLUMNS], tokens input_stride apart
    bias_ptr,  # [RATE, COLUMNS] float32
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
    MAKES: tl.constexpr,
    STORES: tl.constexpr,
    RATE: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
    PAIRS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    NUM_KEPT: tl.constexpr,  # rows of a page
    STRIDE: tl.constexpr,
    STORED: tl.constexpr,  # inputs that a program stores
    BLOCK: tl.constexpr,  # columns of an entry that a program makes
    BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_S: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid: (num_tokens, ceil(WIDTH / BLOCK)). The last program of a token norms and rotates its entry."""
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots_ptr + token)
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    if slot >= 0:
        seq = tl.load(seqs_ptr + token).to(tl.int64)
        tails_ptr += seq * tail_stride
        own, numbers = inputs_ptr + token * input_stride, part * STORED + tl.arange(0, BLOCK_S)
        # of the tokens of the forward that share a row, the last one has it
        stays = (slot + NUM_KEPT >= tl.load(ends_ptr + token)) | (slot % PAGE_SIZE + NUM_KEPT >= PAGE_SIZE)
        if STORES:
            is_input = (tl.arange(0, BLOCK_S) < STORED) & (numbers < 2 * COLUMNS) & stays
            row = tl.load(tails_ptr + slot // PAGE_SIZE) * NUM_KEPT + slot % PAGE_SIZE % NUM_KEPT
            values = tl.load(own + numbers, mask=is_input, other=0.0).to(tl.float32)
            tl.store(pages_ptr + row * (2 * COLUMNS) + numbers, values, mask=is_input)
        if MAKES and (slot + 1) % RATE == 0:
            first, columns = tl.load(firsts_ptr + token), part * BLOCK + tl.arange(0, BLOCK)
            made = _made(
                own, pages_ptr, bias_ptr, tails_ptr, slot, first, columns, input_stride,
                RATE, COLUMNS, WIDTH, PAGE_SIZE, NUM_KEPT, BLOCK, BLOCK_R,
            )  # fmt: skip
            made_ptr += token * WIDTH
            tl.store(made_ptr + columns, made, mask=columns < WIDTH)
            if is_last(arrivals_ptr + token, tl.num_programs(1)):
                begin = slot - RATE + 1
                page = tl.load(table_ptr + seq * table_stride + begin // PAGE_SIZE)
                to = entries_ptr + (page * (PAGE_SIZE // RATE) + begin % PAGE_SIZE // RATE) * STRIDE
                store_entry(to, made_ptr, norm_ptr, frequencies_ptr, begin, eps, WIDTH, PAIRS, BLOCK_P)


@triton.jit
def _made(
    own_ptr,  # the inputs of the token that ends the window
    pages_ptr,
    bias_ptr,
    tails_ptr,  # [max_pages] int64, of the sequence
    slot,
    first,  # the first slot whose inputs are those of the forward
    columns,  # [BLOCK]
    input_stride,
    RATE: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    NUM_KEPT: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Return some columns of an entry before its norm, [BLOCK] float32."""
    ROWS: tl.constexpr = 2 * RATE
    sums, total = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    highest = tl.full([BLOCK], -3.4028234663852886e38, tl.float32)
    for begin in tl.static_range(0, ROWS, BLOCK_R):
        rows = begin + tl.arange(0, BLOCK_R)
        at = slot - ROWS + 1 + rows  # slots
        is_row = (rows < ROWS) & (at >= 0)
        is_new = (is_row & (at >= first))[:, None] & (columns < WIDTH)[None, :]
        is_old = is_row & (at < first)
        pages = tl.load(tails_ptr + tl.maximum(at, 0) // PAGE_SIZE, mask=is_old, other=0)
        old = pages_ptr + (pages * NUM_KEPT + tl.maximum(at, 0) % PAGE_SIZE % NUM_KEPT) * (2 * COLUMNS)
        new = own_ptr + (at - slot).to(tl.int64) * input_stride
        half = tl.where(rows < RATE, 0, WIDTH)  # of the window before, first halves
        number = half[:, None] + columns[None, :]
        is_old = is_old[:, None] & (columns < WIDTH)[None, :]
        is_read = is_new | is_old
        new, old = new[:, None] + number, old[:, None] + number
        kv = tl.load(new, mask=is_new, other=0.0).to(tl.float32) + tl.load(old, mask=is_old, other=0.0)
        gate = tl.load(new + COLUMNS, mask=is_new, other=0.0).to(tl.float32)
        gate += tl.load(old + COLUMNS, mask=is_old, other=0.0)
        gate += tl.load(bias_ptr + (rows % RATE)[:, None] * COLUMNS + number, mask=is_read, other=0.0)
        gate = tl.where(is_read, gate, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(gate, 0))
        weights = tl.exp(gate - new_highest[None, :])
        correction = tl.exp(highest - new_highest)
        total = total * correction + tl.sum(weights, 0)
        sums = sums * correction + tl.sum(weights * kv, 0)
        highest = new_highest
    return sums / tl.where(columns < WIDTH, total, 1.0)
