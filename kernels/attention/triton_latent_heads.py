"""Kernels before and after attention to latents on a GPU (latents.py).

    before    `absorb_latents` multiplies queries by W_K, rotates them, and stores the new latents in their pages
    after     `latent_values` multiplies the attended latents by W_V

Each is one launch for few tokens: a program multiplies a tile of tokens by a tile of one head's W_K or W_V. For more
tokens torch multiplies, and `turn_latents` only rotates and stores.
"""

# ruff: noqa: N803, N806
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false, reportPossiblyUnboundVariable=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .. import gpu
from .latents import LatentWeights, Turns, latent_values_ref
from .triton_attention import padded

_MAX_FEW = 256  # tokens; torch multiplies more of them faster


def absorb_latents(
    q: torch.Tensor, stored: torch.Tensor, weights: LatentWeights, turns: Turns, kv_layer: torch.Tensor
) -> torch.Tensor:
    """Return the absorbed and rotated queries, a new tensor [num_tokens, num_heads, rank + rope_dim], and store the
    latents in `kv_layer`.

    `q` [num_tokens, num_heads, plain_dim + rope_dim] and `stored` [num_tokens, rank + rope_dim] may be strided by
    token, and are not changed. `kv_layer` [num_pages, 1, 1, page_size, rank + rope_dim] is contiguous."""
    (num_tokens, num_heads, _), rank = q.shape, weights.rank
    heads = torch.empty((num_tokens, num_heads, stored.shape[1]), dtype=q.dtype, device=q.device)
    is_few = num_tokens <= _MAX_FEW
    if not is_few:
        plain = q[..., : weights.plain_dim].transpose(0, 1)
        torch.bmm(plain, weights.key_up, out=heads[..., :rank].transpose(0, 1))
    _launch(q, stored, weights, turns, kv_layer, heads, heads[..., rank:], None, is_few)
    return heads


def turn_latents(
    q: torch.Tensor, stored: torch.Tensor, weights: LatentWeights, turns: Turns, kv_layer: torch.Tensor
) -> torch.Tensor:
    """Rotate the ends of `q` in place, store the latents in `kv_layer`, and return them too: a new tensor [num_tokens,
    rank + rope_dim]. Arguments are as in `absorb_latents`."""
    latents = torch.empty(stored.shape, dtype=stored.dtype, device=stored.device)
    _launch(q, stored, weights, turns, kv_layer, None, q[..., weights.plain_dim :], latents, False)
    return latents


def latent_values(attended: torch.Tensor, weights: LatentWeights) -> torch.Tensor:
    """Return `latent_values_ref`. `attended` is contiguous."""
    num_tokens, num_heads, rank = attended.shape
    if num_tokens > _MAX_FEW:
        return latent_values_ref(attended, weights)
    value_dim = weights.up.shape[1] - weights.plain_dim
    assert attended.is_contiguous() and len(weights.up) == num_heads and weights.up.is_contiguous(), attended.shape
    out = torch.empty((num_tokens, num_heads * value_dim), dtype=attended.dtype, device=attended.device)
    block_m, block_v = _rows(num_tokens), 16 if num_tokens <= 16 else 32
    dependent = gpu.dependent_launch(num_tokens)
    _values_kernel[(triton.cdiv(num_tokens, block_m), num_heads, triton.cdiv(value_dim, block_v))](
        out, attended, weights.up, num_tokens, NUM_HEADS=num_heads, PLAIN_DIM=weights.plain_dim, VALUE_DIM=value_dim,
        RANK=rank, BLOCK_M=block_m, BLOCK_D=padded(rank), BLOCK_V=block_v, DEPENDENT=dependent,
        num_warps=4, launch_pdl=dependent,
    )  # fmt: skip
    return out


def _rows(num_tokens: int) -> int:
    """Return the number of tokens of a tile."""
    return 16 if num_tokens <= 16 else 32 if num_tokens <= 32 else 64


def _launch(
    q: torch.Tensor,
    stored: torch.Tensor,
    weights: LatentWeights,
    turns: Turns,
    kv_layer: torch.Tensor,
    heads: torch.Tensor | None,
    turned: torch.Tensor,
    latents: torch.Tensor | None,
    absorbs: bool,
) -> None:
    """Rotate the ends of `q` to `turned` [num_tokens, num_heads, rope_dim], and store the latents. If `absorbs`, also
    multiply the beginnings of `q` by W_K to those of `heads`."""
    num_tokens, num_heads, width = q.shape
    rank, plain_dim, rope_dim = weights.rank, weights.plain_dim, width - weights.plain_dim
    assert kv_layer.shape[1:3] == (1, 1) and kv_layer.shape[4] == rank + rope_dim and kv_layer.is_contiguous(), q.shape
    assert stored.shape == (num_tokens, rank + rope_dim) and stored.stride(1) == 1, (stored.shape, stored.stride())
    assert q.stride(1) == width and q.stride(2) == 1 and q.dtype == stored.dtype == kv_layer.dtype, q.stride()
    assert turns.cos.shape == turns.sin.shape == (num_tokens, 1, rope_dim) and len(turns.rows) == num_tokens, turns
    assert weights.up.shape[0] == num_heads and weights.up.is_contiguous() and weights.norm.weight.shape == (rank,)
    block_m = _rows(num_tokens) if absorbs else 16
    block_d = min(64, padded(rank)) if absorbs else padded(rank)
    num_parts = triton.cdiv(rank, block_d)
    dependent = gpu.dependent_launch(num_tokens)
    _absorb_kernel[(triton.cdiv(num_tokens, block_m), num_heads + 1, num_parts)](
        heads, turned, latents, kv_layer, q, stored, weights.up, weights.norm.weight, turns.cos, turns.sin, turns.rows,
        num_tokens, q.stride(0), stored.stride(0), turned.stride(0), weights.norm.eps,
        ABSORBS=absorbs, IS_INTERLEAVED=weights.is_interleaved, TURNED_HEAD=turned.stride(1), PLAIN_DIM=plain_dim,
        UP_HEAD=weights.up.stride(0), RANK=rank, ROPE_DIM=rope_dim, BLOCK_M=block_m, BLOCK_P=padded(plain_dim),
        BLOCK_D=block_d, BLOCK_RANK=padded(rank), HALF=triton.next_power_of_2(rope_dim // 2),
        ROWS=triton.cdiv(block_m, triton.next_power_of_2(num_parts)), DEPENDENT=dependent,
        num_warps=4, launch_pdl=dependent,
    )  # fmt: skip


@triton.jit(do_not_specialize=("num_tokens",))
def _absorb_kernel(
    heads_ptr,  # [num_tokens, NUM_HEADS, RANK + ROPE_DIM], written if ABSORBS
    turned_ptr,  # [num_tokens, NUM_HEADS, ROPE_DIM], tokens turned_stride and heads TURNED_HEAD apart, written
    latents_ptr,  # [num_tokens, RANK + ROPE_DIM], written; None: they are stored in pages alone
    kv_ptr,  # [num_pages, PAGE_SIZE, RANK + ROPE_DIM], written
    q_ptr,  # [num_tokens, NUM_HEADS, PLAIN_DIM + ROPE_DIM], tokens q_stride apart
    stored_ptr,  # [num_tokens, RANK + ROPE_DIM], tokens stored_stride apart
    up_ptr,  # [NUM_HEADS, UP_HEAD / RANK, RANK], the first PLAIN_DIM rows of a head are W_K
    norm_ptr,  # [RANK]
    cos_ptr,  # [num_tokens, ROPE_DIM]
    sin_ptr,  # [num_tokens, ROPE_DIM], its first half negated
    rows_ptr,  # [num_tokens] int64
    num_tokens,
    q_stride,
    stored_stride,
    turned_stride,
    eps,
    ABSORBS: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    TURNED_HEAD: tl.constexpr,
    PLAIN_DIM: tl.constexpr,
    UP_HEAD: tl.constexpr,
    RANK: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid: (ceil(num_tokens / BLOCK_M), NUM_HEADS + 1, ceil(RANK / BLOCK_D)). A program makes BLOCK_D numbers of one
    head; the first one also rotates. Programs of the last head store ROWS latents each."""
    if DEPENDENT:
        gdc_launch_dependents()
    if tl.program_id(1) < tl.num_programs(1) - 1:
        _make_head(
            heads_ptr, turned_ptr, q_ptr, up_ptr, cos_ptr, sin_ptr, num_tokens, q_stride, turned_stride, ABSORBS,
            IS_INTERLEAVED, TURNED_HEAD, PLAIN_DIM, UP_HEAD, RANK, ROPE_DIM, BLOCK_M, BLOCK_P, BLOCK_D, HALF, DEPENDENT,
        )  # fmt: skip
    else:
        _store_latents(
            latents_ptr, kv_ptr, stored_ptr, norm_ptr, cos_ptr, sin_ptr, rows_ptr, num_tokens, stored_stride, eps,
            IS_INTERLEAVED, RANK, ROPE_DIM, BLOCK_M, BLOCK_RANK, HALF, ROWS, DEPENDENT,
        )  # fmt: skip


@triton.jit
def _make_head(
    heads_ptr, turned_ptr, q_ptr, up_ptr, cos_ptr, sin_ptr, num_tokens, q_stride, turned_stride, ABSORBS: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr, TURNED_HEAD: tl.constexpr, PLAIN_DIM: tl.constexpr, UP_HEAD: tl.constexpr,
    RANK: tl.constexpr, ROPE_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr,
    HALF: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Make BLOCK_D numbers of a head of BLOCK_M tokens. Arguments are those of `_absorb_kernel`."""
    head, num_heads, part = tl.program_id(1), tl.num_programs(1) - 1, tl.program_id(2)
    tokens = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    is_token, tokens = tokens < num_tokens, tokens.to(tl.int64)
    q_ptrs = q_ptr + (tokens * q_stride + head * (PLAIN_DIM + ROPE_DIM))[:, None]
    if ABSORBS:
        plains, dims = tl.arange(0, BLOCK_P), part * BLOCK_D + tl.arange(0, BLOCK_D)
        is_up = (plains < PLAIN_DIM)[:, None] & (dims < RANK)[None, :]
        up_ptrs = up_ptr + head.to(tl.int64) * UP_HEAD + plains[:, None] * RANK + dims[None, :]
        up = tl.load(up_ptrs, mask=is_up, other=0.0)
        if DEPENDENT:
            gdc_wait()
        q = tl.load(q_ptrs + plains[None, :], mask=is_token[:, None] & (plains < PLAIN_DIM)[None, :], other=0.0)
        absorbed = tl.dot(q, up, input_precision="ieee").to(q.dtype)
        heads_ptrs = heads_ptr + ((tokens * num_heads + head) * (RANK + ROPE_DIM))[:, None] + dims[None, :]
        tl.store(heads_ptrs, absorbed, mask=is_token[:, None] & (dims < RANK)[None, :])
    elif DEPENDENT:
        gdc_wait()
    if part == 0:
        first, second = _turned(q_ptrs + PLAIN_DIM, cos_ptr, sin_ptr, tokens, is_token, IS_INTERLEAVED, ROPE_DIM, HALF)
        tl.debug_barrier()  # the target may be the source
        half = tl.arange(0, HALF)
        is_half = is_token[:, None] & (half < ROPE_DIM // 2)[None, :]
        targets = turned_ptr + (tokens * turned_stride + head * TURNED_HEAD)[:, None] + half[None, :]
        tl.store(targets, first, mask=is_half)
        tl.store(targets + ROPE_DIM // 2, second, mask=is_half)


@triton.jit
def _store_latents(
    latents_ptr, kv_ptr, stored_ptr, norm_ptr, cos_ptr, sin_ptr, rows_ptr, num_tokens, stored_stride, eps,
    IS_INTERLEAVED: tl.constexpr, RANK: tl.constexpr, ROPE_DIM: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_RANK: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Norm, rotate and store ROWS latents. Arguments are those of `_absorb_kernel`."""
    WIDTH: tl.constexpr = RANK + ROPE_DIM
    places = tl.program_id(2) * ROWS + tl.arange(0, ROWS)  # in the tile of BLOCK_M tokens
    tokens = tl.program_id(0) * BLOCK_M + places
    is_token, tokens = (tokens < num_tokens) & (places < BLOCK_M), tokens.to(tl.int64)
    dims, half = tl.arange(0, BLOCK_RANK), tl.arange(0, HALF)
    row = tl.load(rows_ptr + tokens, mask=is_token, other=-1)
    weight = tl.load(norm_ptr + dims, mask=dims < RANK, other=0.0).to(tl.float32)
    if DEPENDENT:
        gdc_wait()
    sources = stored_ptr + (tokens * stored_stride)[:, None]
    is_number, is_half = is_token[:, None] & (dims < RANK)[None, :], is_token[:, None] & (half < ROPE_DIM // 2)[None, :]
    x = tl.load(sources + dims[None, :], mask=is_number, other=0.0)
    wide = x.to(tl.float32)
    wide = (wide * tl.rsqrt(tl.sum(wide * wide, 1) / RANK + eps)[:, None]).to(x.dtype).to(tl.float32)
    x = (wide * weight[None, :]).to(x.dtype)
    first, second = _turned(sources + RANK, cos_ptr, sin_ptr, tokens, is_token, IS_INTERLEAVED, ROPE_DIM, HALF)
    is_stored = (row >= 0)[:, None]
    targets = kv_ptr + (row * WIDTH)[:, None]
    tl.store(targets + dims[None, :], x, mask=is_number & is_stored)
    tl.store(targets + RANK + half[None, :], first, mask=is_half & is_stored)
    tl.store(targets + RANK + ROPE_DIM // 2 + half[None, :], second, mask=is_half & is_stored)
    if latents_ptr is not None:
        copies = latents_ptr + (tokens * WIDTH)[:, None]
        tl.store(copies + dims[None, :], x, mask=is_number)
        tl.store(copies + RANK + half[None, :], first, mask=is_half)
        tl.store(copies + RANK + ROPE_DIM // 2 + half[None, :], second, mask=is_half)


@triton.jit
def _turned(
    sources,  # [n, 1] pointers to ROPE_DIM numbers each
    cos_ptr,  # [num_tokens, ROPE_DIM]
    sin_ptr,  # [num_tokens, ROPE_DIM], its first half negated
    tokens,  # [n] int64
    is_token,  # [n] bool
    IS_INTERLEAVED: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    HALF: tl.constexpr,
):
    """Return the two rotated halves, [n, HALF] each."""
    half = tl.arange(0, HALF)[None, :]
    is_half = is_token[:, None] & (half < ROPE_DIM // 2)
    turn = tokens[:, None] * ROPE_DIM + half
    cos_a = tl.load(cos_ptr + turn, mask=is_half, other=0.0).to(tl.float32)
    cos_b = tl.load(cos_ptr + turn + ROPE_DIM // 2, mask=is_half, other=0.0).to(tl.float32)
    sin_a = tl.load(sin_ptr + turn, mask=is_half, other=0.0).to(tl.float32)
    sin_b = tl.load(sin_ptr + turn + ROPE_DIM // 2, mask=is_half, other=0.0).to(tl.float32)
    if IS_INTERLEAVED:
        a = tl.load(sources + 2 * half, mask=is_half, other=0.0)
        b = tl.load(sources + 2 * half + 1, mask=is_half, other=0.0)
    else:
        a = tl.load(sources + half, mask=is_half, other=0.0)
        b = tl.load(sources + half + ROPE_DIM // 2, mask=is_half, other=0.0)
    x, y = a.to(tl.float32), b.to(tl.float32)
    return (x * cos_a + y * sin_a).to(a.dtype), (y * cos_b + x * sin_b).to(a.dtype)


@triton.jit(do_not_specialize=("num_tokens",))
def _values_kernel(
    out_ptr,  # [num_tokens, NUM_HEADS, VALUE_DIM], written
    attended_ptr,  # [num_tokens, NUM_HEADS, RANK]
    up_ptr,  # [NUM_HEADS, PLAIN_DIM + VALUE_DIM, RANK]
    num_tokens,
    NUM_HEADS: tl.constexpr,
    PLAIN_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid: (ceil(num_tokens / BLOCK_M), NUM_HEADS, ceil(VALUE_DIM / BLOCK_V))."""
    if DEPENDENT:
        gdc_launch_dependents()
    tokens, head = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M), tl.program_id(1)
    values, dims = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V), tl.arange(0, BLOCK_D)
    is_dim, is_value = dims < RANK, values < VALUE_DIM
    up_ptrs = up_ptr + ((head.to(tl.int64) * (PLAIN_DIM + VALUE_DIM) + PLAIN_DIM + values) * RANK)[:, None]
    up = tl.load(up_ptrs + dims[None, :], mask=is_value[:, None] & is_dim[None, :], other=0.0)
    if DEPENDENT:
        gdc_wait()
    is_token, rows = tokens < num_tokens, tokens.to(tl.int64) * NUM_HEADS + head
    attended = tl.load(
        attended_ptr + rows[:, None] * RANK + dims[None, :], mask=is_token[:, None] & is_dim[None, :], other=0.0
    )
    out = tl.dot(attended, tl.trans(up), input_precision="ieee").to(attended.dtype)
    tl.store(out_ptr + rows[:, None] * VALUE_DIM + values[None, :], out, mask=is_token[:, None] & is_value[None, :])
