"""Norm and rotation of new queries and keys, and the store of new keys and values in their pages, on a GPU.

`norm_rotate_store` does all of it in one launch per layer. For each token it applies the RMS norm to the query and key
heads, if the model norms heads (kernels/products/norm.py). It rotates them (kernels/products/rotary.py). It copies keys
and values to the slots that `token_rows` found once per forward.

The host reads no tensor's value, and grids depend on shapes alone. So a CUDA graph can hold both launches.
"""

# ruff: noqa: N803
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .. import gpu
from ..products.fp8 import E4M3
from ..products.triton_fp8_rows import e4m3, scales_for
from .fp8_pages import MOST, block_size, has_close_blocks, scales_of

_TOKENS = 64  # per program of `_rows_kernel`
_SEQS = 64  # sequences that `_count_up_to` looks at in one step
_HEADS = 16  # per program of `_store_kernel`
_MOST = tl.constexpr(MOST)
_RUN_TIME = ("num_tokens", "num_seqs", "query_len", "table_stride", "max_pages")  # a new value compiles nothing


def token_rows(
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    num_tokens: int,
    page_size: int,
    query_len: int | None,
    starts: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return where new tokens are stored, [num_tokens] int64: page * page_size + slot in the page.

    The place is -1, for no place, if the token's slot is below 0 or beyond the table.

    `block_table` [num_seqs, max_pages] int64 has contiguous rows. `seq_lens` [num_seqs] int64 holds the lengths after
    the forward. Each sequence has `query_len` new tokens. If that is None, sequence i has the tokens starts[i] ..
    starts[i + 1] - 1; `starts` is [num_seqs + 1] int32."""
    num_seqs, max_pages = block_table.shape
    assert block_table.dtype == seq_lens.dtype == torch.int64 and seq_lens.shape == (num_seqs,), seq_lens
    assert block_table.stride(1) == 1 and seq_lens.is_contiguous(), block_table.stride()
    rows = torch.empty(num_tokens, dtype=torch.int64, device=block_table.device)
    if query_len is not None:
        assert num_tokens == num_seqs * query_len, (num_tokens, num_seqs, query_len)
    else:
        assert starts is not None and starts.shape == (num_seqs + 1,) and starts.dtype == torch.int32, starts
    _rows_kernel[(triton.cdiv(num_tokens, _TOKENS),)](
        rows, block_table, seq_lens, starts, num_tokens, num_seqs, query_len or 0, block_table.stride(0), max_pages,
        PAGE_SIZE=page_size, TOKENS=_TOKENS, SEQS=_SEQS, num_warps=2,
    )  # fmt: skip
    return rows


def norm_rotate_store(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    kv_layer: torch.Tensor,
    rows: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor] | None = None,
    eps: float = 0.0,
    *,
    writes_back: bool = False,
    values: torch.Tensor | None = None,
) -> torch.Tensor:
    """Norm and rotate queries and keys in place, and store keys and values in `kv_layer`.

    Return the queries, a view of `qkv` [num_tokens, num_heads, head_dim].

    `qkv` [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim] has contiguous rows. `cos` and `sin` [num_tokens, 1,
    head_dim] are contiguous; the first half of `sin` is negated already. `kv_layer` [num_pages, 2, num_kv_heads,
    page_size, head_dim] is contiguous and has qkv's dtype, or it is a layer of a pool in e4m3, in which each head is
    stored as `store_rows` rounds it (fp8_pages.py). If the caller asks for it (`writes_back`), the numbers that such a
    pool holds replace keys and values in `qkv`; otherwise these are not rounded. `rows` [num_tokens] int64 comes from
    `token_rows`. `norms` holds the weights of queries and keys, [head_dim] each; None: heads are not normed. `values`
    [num_pages, 1, num_kv_heads, page_size, value_dim] is contiguous: a layer of their own pool, which gets the first
    numbers of each value. Then `kv_layer` has keys alone.

    The norm is rounded to its weight's dtype, which is qkv's or float32, before it is multiplied by the weight, and to
    qkv's dtype after. The rotation is rounded once."""
    _, num_planes, num_kv_heads, page_size, head_dim = kv_layer.shape
    assert num_planes == (2 if values is None else 1) and (values is None or values.is_contiguous()), kv_layer.shape
    num_tokens, num_all_heads = qkv.shape[0], qkv.shape[1] // head_dim
    num_heads = num_all_heads - 2 * num_kv_heads
    assert qkv.shape[1] == num_all_heads * head_dim and num_heads > 0 and head_dim % 2 == 0, (qkv.shape, kv_layer.shape)
    assert cos.shape == sin.shape == (num_tokens, 1, head_dim) and rows.shape == (num_tokens,), (cos.shape, rows.shape)
    assert qkv.stride(1) == 1 and cos.is_contiguous() and sin.is_contiguous() and has_close_blocks(kv_layer)
    assert kv_layer.dtype in (qkv.dtype, E4M3), (kv_layer.dtype, qkv.dtype)
    assert all(norm.shape == (head_dim,) and norm.dtype in (qkv.dtype, torch.float32) for norm in norms or ()), norms
    scales = scales_of(kv_layer) if kv_layer.dtype == E4M3 else None
    q_norm, k_norm = (None, None) if norms is None else norms
    dependent = gpu.dependent_launch(num_tokens)
    _store_kernel[(num_tokens, triton.cdiv(num_all_heads, _HEADS))](
        qkv, cos, sin, kv_layer, values, scales, rows, q_norm, k_norm, qkv.stride(0), eps,
        NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, PAGE_SIZE=page_size, HEAD_DIM=head_dim,
        BLOCK=block_size(kv_layer), VALUE_DIM=head_dim if values is None else values.shape[4],
        WRITES_BACK=writes_back and scales is not None,
        HEADS=min(_HEADS, triton.next_power_of_2(num_all_heads)), HALF=triton.next_power_of_2(head_dim // 2),
        DEPENDENT=dependent, num_warps=4, launch_pdl=dependent,
    )  # fmt: skip
    return qkv[:, : num_heads * head_dim].unflatten(1, (num_heads, head_dim))


@triton.jit
def _count_up_to(starts_ptr, num_seqs, limit, SEQS: tl.constexpr):
    """Return how many of the ascending `starts_ptr` [num_seqs] int32 are at most `limit` [n] int32: [n] int32."""
    count = tl.zeros_like(limit)
    for first in range(0, num_seqs, SEQS):
        seqs = first + tl.arange(0, SEQS)
        starts = tl.load(starts_ptr + seqs, mask=seqs < num_seqs, other=0x7FFFFFFF)
        count += tl.sum((starts[None, :] <= limit[:, None]).to(tl.int32), 1)
    return count


@triton.jit(do_not_specialize=_RUN_TIME)
def _rows_kernel(
    rows_ptr,  # [num_tokens] int64, written
    table_ptr,  # [num_seqs, max_pages] int64, rows table_stride apart
    seq_lens_ptr,  # [num_seqs] int64
    starts_ptr,  # [num_seqs + 1] int32; None: each sequence has query_len new tokens
    num_tokens,
    num_seqs,
    query_len,
    table_stride,
    max_pages,
    PAGE_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    SEQS: tl.constexpr,
):
    """Grid: (ceil(num_tokens / TOKENS),)."""
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    inside = tokens < num_tokens
    if starts_ptr is None:
        seqs = tokens // query_len
        num_after = query_len - tokens % query_len
    else:
        seqs = _count_up_to(starts_ptr, num_seqs, tl.minimum(tokens, num_tokens - 1), SEQS) - 1
        num_after = tl.load(starts_ptr + seqs + 1) - tokens
    slots = tl.load(seq_lens_ptr + seqs, mask=inside, other=0).to(tl.int32) - num_after
    columns = slots // PAGE_SIZE
    stored = inside & (slots >= 0) & (columns < max_pages)
    pages = tl.load(table_ptr + seqs.to(tl.int64) * table_stride + columns, mask=stored, other=0)
    tl.store(rows_ptr + tokens, tl.where(stored, pages * PAGE_SIZE + slots % PAGE_SIZE, -1), mask=inside)


@triton.jit
def _store_kernel(
    qkv_ptr,  # [num_tokens, NUM_HEADS + 2 * NUM_KV_HEADS, HEAD_DIM], tokens qkv_stride apart, written but for values
    cos_ptr,  # [num_tokens, HEAD_DIM]
    sin_ptr,  # [num_tokens, HEAD_DIM], its first half negated
    kv_ptr,  # [num_pages, 2, NUM_KV_HEADS, PAGE_SIZE, HEAD_DIM] of qkv's dtype or e4m3, blocks BLOCK apart, written
    v_ptr,  # [num_pages, NUM_KV_HEADS, PAGE_SIZE, VALUE_DIM], written; None: values are in kv_ptr
    scales_ptr,  # [num_pages, 2, NUM_KV_HEADS, PAGE_SIZE] float32, blocks BLOCK / 4 apart, written; None: no scales
    rows_ptr,  # [num_tokens] int64
    q_norm_ptr,  # [HEAD_DIM] of qkv's dtype or float32; None: heads are not normed
    k_norm_ptr,  # [HEAD_DIM] of the same dtype; None: heads are not normed
    qkv_stride,
    eps,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    WRITES_BACK: tl.constexpr,  # with scales: keys and values are written as they are stored
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid: (num_tokens, ceil(all heads / HEADS)). A program holds both halves of its heads, [HEADS, HALF] each."""
    if DEPENDENT:
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    dims = tl.arange(0, HALF)[None, :]
    half: tl.constexpr = HEAD_DIM // 2
    inside = (heads < NUM_HEADS + 2 * NUM_KV_HEADS) & (dims < half)
    is_q, is_rotated = heads < NUM_HEADS, heads < NUM_HEADS + NUM_KV_HEADS
    row = tl.load(rows_ptr + token)
    source = qkv_ptr + token * qkv_stride + heads * HEAD_DIM + dims
    turn = token * HEAD_DIM + dims
    cos_a, cos_b = _load_halves(cos_ptr + turn, half, dims < half, tl.float32)
    sin_a, sin_b = _load_halves(sin_ptr + turn, half, dims < half, tl.float32)
    if DEPENDENT:
        gdc_wait()
    a, b = _load_halves(source, half, inside, qkv_ptr.dtype.element_ty)
    x, y = a.to(tl.float32), b.to(tl.float32)
    if q_norm_ptr is not None:
        x, y = _normed(x, y, a.dtype, q_norm_ptr, k_norm_ptr, is_q, dims, eps, HEAD_DIM)
    first = tl.where(is_rotated, (x * cos_a + y * sin_a).to(a.dtype), a)
    second = tl.where(is_rotated, (y * cos_b + x * sin_b).to(a.dtype), b)
    _store_halves(source, half, first, second, inside & is_rotated)
    # K heads, then V heads, follow one another in a page as they do in qkv
    page, slot = row // PAGE_SIZE, row % PAGE_SIZE
    if v_ptr is None:
        block = page * (2 * NUM_KV_HEADS * BLOCK) + slot * HEAD_DIM
    else:
        block = page * (NUM_KV_HEADS * BLOCK) + slot * HEAD_DIM
    target = kv_ptr + block + (heads - NUM_HEADS) * BLOCK + dims
    stored = inside & (heads >= NUM_HEADS) & (row >= 0)
    if scales_ptr is not None:
        first, second, scales = _in_e4m3(first.to(tl.float32), second.to(tl.float32))
        if WRITES_BACK:
            written = (first.to(tl.float32) * scales).to(a.dtype), (second.to(tl.float32) * scales).to(a.dtype)
            _store_halves(source, half, written[0], written[1], inside & (heads >= NUM_HEADS))
        scales_at = scales_ptr + page * (NUM_KV_HEADS * BLOCK // 2) + slot + (heads - NUM_HEADS) * (BLOCK // 4)
        is_head = (heads >= NUM_HEADS) & (heads < NUM_HEADS + 2 * NUM_KV_HEADS) & (row >= 0)
        tl.store(scales_at, scales, mask=is_head)
    if v_ptr is not None:
        is_value = stored & (heads >= NUM_HEADS + NUM_KV_HEADS)
        v_block = page * (NUM_KV_HEADS * PAGE_SIZE * VALUE_DIM) + slot * VALUE_DIM
        v_target = v_ptr + v_block + (heads - NUM_HEADS - NUM_KV_HEADS) * (PAGE_SIZE * VALUE_DIM) + dims
        tl.store(v_target, first, mask=is_value & (dims < VALUE_DIM))
        tl.store(v_target + half, second, mask=is_value & (dims + half < VALUE_DIM))
        stored &= heads < NUM_HEADS + NUM_KV_HEADS
    _store_halves(target, half, first, second, stored)


@triton.jit
def _load_halves(ptr, half: tl.constexpr, mask, dtype: tl.constexpr):
    """Return the numbers at `ptr` [..., HALF], and those `half` further, in `dtype`; 0 outside the mask."""
    return tl.load(ptr, mask=mask, other=0.0).to(dtype), tl.load(ptr + half, mask=mask, other=0.0).to(dtype)


@triton.jit
def _store_halves(ptr, half: tl.constexpr, first, second, mask):
    """Store `first` at `ptr` [..., HALF], and `second` `half` numbers further."""
    tl.store(ptr, first, mask=mask)
    tl.store(ptr + half, second, mask=mask)


@triton.jit
def _normed(x, y, dtype: tl.constexpr, q_norm_ptr, k_norm_ptr, is_q, dims, eps, HEAD_DIM: tl.constexpr):
    """Return both halves of heads, [HEADS, HALF] float32, after their norm. It is rounded to the weight's dtype before
    it is multiplied by its weight, and to `dtype` after."""
    half: tl.constexpr = HEAD_DIM // 2
    scale = tl.rsqrt((tl.sum(x * x, 1) + tl.sum(y * y, 1)) / HEAD_DIM + eps)[:, None]
    first: tl.constexpr = q_norm_ptr.dtype.element_ty
    x = (x * scale).to(first).to(tl.float32) * _weight(q_norm_ptr, k_norm_ptr, is_q, dims, half)
    y = (y * scale).to(first).to(tl.float32) * _weight(q_norm_ptr + half, k_norm_ptr + half, is_q, dims, half)
    return x.to(dtype).to(tl.float32), y.to(dtype).to(tl.float32)


@triton.jit
def _in_e4m3(x, y):
    """Return both halves of heads, [HEADS, HALF] float32 with zeros beyond a head's end, in e4m3, and the scales of
    heads, [HEADS, 1] float32, as `store_rows` rounds them (fp8_pages.py)."""
    largest = tl.maximum(tl.max(tl.abs(x), 1), tl.max(tl.abs(y), 1))
    is_number = (tl.abs(x) < float("inf")) & (tl.abs(y) < float("inf"))
    is_good = tl.min(is_number.to(tl.int32), 1) != 0
    scales = scales_for(tl.minimum(largest, _MOST), True)
    scales = tl.where(is_good, scales, float("nan"))[:, None]
    return e4m3(tl.div_rn(x, scales)), e4m3(tl.div_rn(y, scales)), scales


@triton.jit
def _weight(q_norm_ptr, k_norm_ptr, is_q, dims, half: tl.constexpr):
    """Return the norm's weights for each head, [HEADS, HALF] float32: the queries' or the keys'."""
    q_weight = tl.load(q_norm_ptr + dims, mask=dims < half, other=0.0)
    k_weight = tl.load(k_norm_ptr + dims, mask=dims < half, other=0.0)
    return tl.where(is_q, q_weight, k_weight).to(tl.float32)
