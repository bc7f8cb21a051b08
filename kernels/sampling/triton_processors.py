"""The logit processors of processors.py in one launch. The columns of a sequence are read where they lie; the
tokens of its draft are compared with each id, and what a grammar allows is looked up by the bit.

A row that asks for nothing reads no column but the bias. Differences and divisions round as torch's do.
"""

# Constants of a kernel are in capitals, and a launch is no call that a type checker knows.
# ruff: noqa: N803, SIM102
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .noise import check_token_ids
from .processors import History
from .triton_noise import ids_at

_BLOCK = 1024  # logits of a program
# One kernel serves all requests: nobody waits for another to be compiled.
_RUN_TIME = ("num_drafted", "num_words", "penalizes", "biases", "bans", "masks")
_COLUMNS = ("places_ptr", "drafted_ptr", "is_counted_ptr", "penalties_ptr", "bans_ptr", "allowed_ptr")
_DTYPES = (torch.bool, torch.int32, torch.float32, torch.bool)  # of TokenColumns


def process_logits(
    logits: Tensor,
    history: History,
    penalties: Tensor,
    bans_now: Tensor,
    logit_ids: Tensor | None = None,
    allowed: Tensor | None = None,
) -> Tensor:
    """Return `process_logits_ref`."""
    num_rows, num_logits = logits.shape
    assert logits.stride(1) == 1 and history.places.shape == (num_rows,), (logits.stride(), history.places.shape)
    vocab_size = num_logits
    if logit_ids is not None:
        check_token_ids(logits, logit_ids)
        vocab_size = next((each.shape[1] for each in history.columns if each is not None), num_logits)
    for column, dtype in zip(history.columns, _DTYPES, strict=True):
        if column is not None:
            assert column.dtype is dtype and column.shape[1:] == (vocab_size,) and column.is_contiguous(), column.shape
    assert penalties.shape == (3, num_rows) and penalties.dtype is torch.float32, penalties
    assert penalties.is_contiguous() and bans_now.is_contiguous(), (penalties.stride(), bans_now.stride())
    assert bans_now.shape == (num_rows,) and bans_now.dtype is torch.bool, bans_now
    if allowed is not None:
        assert allowed.dtype is torch.int32 and allowed.is_contiguous(), (allowed.dtype, allowed.stride())
        assert len(allowed) == num_rows and allowed.shape[1] * 32 >= vocab_size, (allowed.shape, vocab_size)
    places, drafted, is_counted = (each.contiguous() for each in history[1:])
    assert drafted.shape == is_counted.shape == (num_rows, drafted.shape[1]), (drafted.shape, is_counted.shape)
    out = torch.empty((num_rows, num_logits), dtype=torch.float32, device=logits.device)
    if num_rows == 0:
        return out
    mask, counts, bias, stops = history.columns
    no_bits = out.view(torch.bool)
    _process_kernel[num_rows, triton.cdiv(num_logits, _BLOCK)](
        logits, out, no_bits if mask is None else mask, out.view(torch.int32) if counts is None else counts,
        out if bias is None else bias, no_bits if stops is None else stops, places, drafted, is_counted,
        penalties, bans_now, out if logit_ids is None else logit_ids,
        out.view(torch.int32) if allowed is None else allowed, logits.stride(0), num_logits, vocab_size,
        drafted.shape[1], 0 if allowed is None else allowed.shape[1], int(counts is not None), int(bias is not None),
        int(stops is not None), int(allowed is not None),
        MAPPED=logit_ids is not None, BLOCK=_BLOCK, enable_fp_fusion=False,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=_RUN_TIME, do_not_specialize_on_alignment=_COLUMNS)
def _process_kernel(
    logits_ptr,  # [num_rows, num_logits], rows `stride` apart
    out_ptr,  # [num_rows, num_logits] float32, written
    mask_ptr,  # [num_kept, vocab_size] bool, read if `penalizes`
    counts_ptr,  # [num_kept, vocab_size] int32, read if `penalizes`
    bias_ptr,  # [num_kept, vocab_size] float32, read if `biases`
    stops_ptr,  # [num_kept, vocab_size] bool, read if `bans`
    places_ptr,  # [num_rows] int64
    drafted_ptr,  # [num_rows, num_drafted] int64
    is_counted_ptr,  # [num_rows, num_drafted] bool
    penalties_ptr,  # [3, num_rows] float32
    bans_ptr,  # [num_rows] bool
    logit_ids_ptr,  # [num_logits] int32, read if MAPPED
    allowed_ptr,  # [num_rows, num_words] int32, read if `masks`
    stride,
    num_logits,
    vocab_size,
    num_drafted,
    num_words,
    penalizes,  # 1 if there are mask and counts, else 0; likewise the next three
    biases,
    bans,
    masks,
    MAPPED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid: (num_rows, ceil(num_logits / BLOCK))."""
    row, num_rows = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_logit, ids = index < num_logits, ids_at(index, num_logits, logit_ids_ptr, MAPPED)
    scores = tl.load(logits_ptr + row * stride + index, mask=is_logit, other=0.0).to(tl.float32)
    at = tl.load(places_ptr + row) * vocab_size + ids
    if biases != 0:
        scores += tl.load(bias_ptr + at, mask=is_logit, other=0.0)
    if bans != 0:
        if tl.load(bans_ptr + row) != 0:
            is_stop = tl.load(stops_ptr + at, mask=is_logit, other=0) != 0
            scores = tl.where(is_stop & (scores == scores), -float("inf"), scores)
    if penalizes != 0:
        repetition = tl.load(penalties_ptr + row)
        frequency, presence = tl.load(penalties_ptr + num_rows + row), tl.load(penalties_ptr + 2 * num_rows + row)
        if (repetition != 1.0) | (frequency != 0.0) | (presence != 0.0):
            counts = tl.load(counts_ptr + at, mask=is_logit, other=0)
            for draft in range(num_drafted):
                if tl.load(is_counted_ptr + row * num_drafted + draft) != 0:
                    counts += (ids == tl.load(drafted_ptr + row * num_drafted + draft)).to(tl.int32)
            occurs = counts > 0
            is_seen = occurs | (tl.load(mask_ptr + at, mask=is_logit, other=0) != 0)
            divided = tl.div_rn(scores, tl.zeros_like(scores) + repetition)
            penalized = tl.where(scores > 0.0, divided, scores * repetition)
            scores = tl.where(is_seen, penalized, scores)
            scores -= counts.to(tl.float32) * frequency
            scores -= tl.where(occurs, 1.0, 0.0) * presence
    if masks != 0:
        words = tl.load(allowed_ptr + row * num_words + ids // 32, mask=is_logit, other=0)
        is_allowed = ((words >> (ids % 32)) & 1) != 0
        scores = tl.where(is_allowed | (scores != scores), scores, -float("inf"))
    tl.store(out_ptr + row * num_logits + index, scores, mask=is_logit)
