"""Causal attention of a chunk of a long prompt. The tokens before it are its history; their KV lies in pages.

    out[t] = sum over j <= num_before + t of softmax_j(q[t] . k[j] / sqrt(head_dim)) v[j]

torch's fused attention (cuDNN on a GPU) does the work, because it is faster than `extend_attention` (triton_extend.py).
It cannot read pages, so `gather_keys` copies them to contiguous keys and values in the dtype of the queries, one block
after the other. Each call also returns the logarithm of each row's sum of exponentials. `join_parts` joins the results
of two calls by it:

    |<----------------- history ----------------->|<-- chunk -->|
    |   block   |   block   |   block   |  left   |     own     |  zeros  |
    |<------- one full call each ------>|<------- one causal call ------->|

cuDNN plans each new shape, which takes longer than a call saves. So blocks have few sizes, and the number of rows of
every call is a multiple of UNIT. Blocks leave fewer tokens than the smallest has. These go to the causal call:

    rows     one row of zeros per token left, then the chunk's queries, then zeros. Only the chunk's rows are used
    keys     the tokens left, then the chunk's own, then zeros, which no row of the chunk sees

So no other kernel is needed, and a node plans all `shapes` at start. If `extend_attention` computed these tokens,
there would be a third part to join. torch has one more fused attention for GPUs that returns the logarithms
(`_scaled_dot_product_flash_attention`). It is slower than `extend_attention`. So if cuDNN does not serve,
`extend_attention` computes the whole chunk.

The working memory depends on the chunk and on the largest block, not on the length of the history.

Results differ from those of `extend_attention` in rounding only, with one exception, as in prompt_attention.py: a token
of the chunk whose key or value is no number may make earlier tokens of the chunk NaN. Slots beyond the sequence and
pages of others are not read.
"""

from __future__ import annotations

import functools
import itertools
import logging
import time
from typing import NamedTuple

import torch
import torch.nn.functional as F

from ..operations import Operation
from ..products.fp8 import E4M3
from ..state.fp8_pages import scales_of
from . import prompt_attention

logger = logging.getLogger(__name__)

UNIT = prompt_attention.UNIT  # tokens; the number of rows of a call is a multiple
LEAST = prompt_attention.LEAST  # new tokens of a chunk that is served
BLOCKS = (32_768, 16_384, 8_192, 4_096)  # keys of a full call; each a multiple of the last one


class Part(NamedTuple):
    """The attention of rows over some of the keys that they see."""

    out: torch.Tensor  # [num_rows, num_heads, head_dim], contiguous
    lse: torch.Tensor  # [num_heads, num_rows] float32, log of the sum of exp(score) of each row, natural


class Shape(NamedTuple):
    """The shape of a call of the fused attention."""

    num_rows: int
    num_keys: int
    is_causal: bool


def takes(num_tokens: int, num_before: int) -> bool:
    """Return whether `history_attention` serves a chunk of `num_tokens` tokens of a sequence behind `num_before`
    others.

    It does for LEAST tokens or more behind any history, on a device and for a dtype that it `serves`."""
    return num_tokens >= LEAST and num_before > 0


def blocks(num_before: int) -> list[int]:
    """Return the sizes of the blocks of a history, in order: the largest that fits, again and again."""
    sizes: list[int] = []
    for size in BLOCKS:
        sizes += [size] * ((num_before - sum(sizes)) // size)
    return sizes


def shapes(num_tokens: int) -> list[Shape]:
    """Return the shapes of all calls that chunks of up to `num_tokens` tokens need, behind any history."""
    most_left = BLOCKS[-1] - 1
    if num_tokens < LEAST:
        return []
    full = [Shape(rows, keys, False) for rows in range(LEAST, _rounded(num_tokens) + 1, UNIT) for keys in BLOCKS]
    causal = [Shape(rows, rows, True) for rows in range(LEAST, _rounded(num_tokens + most_left) + 1, UNIT)]
    return full + causal


def longest_rehearsal() -> int:
    """Return the length of a history that needs as much working memory as any, and runs each kind of call and join."""
    return 2 * BLOCKS[0] + BLOCKS[-1] - 1


def history_attention(
    q: torch.Tensor,
    kv_layer: torch.Tensor,
    block_table: torch.Tensor,
    seq: int,
    num_before: int,
    values: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the attention of a chunk of sequence `seq`, [num_tokens, num_heads, head_dim], contiguous.

    `q` [num_tokens, num_heads, head_dim] is rotated, and may be strided by token. The chunk's KV is stored in
    `kv_layer` [num_pages, 2, num_kv_heads, page_size, head_dim] already, behind that of `num_before` tokens. It has q's
    dtype or is in e4m3 (fp8_pages.py). `block_table` [num_seqs, max_pages] int64 is on the device. `values`: as in
    `gather_keys_ref`. The host reads no tensor."""
    num_tokens, num_heads, head_dim = q.shape
    assert kv_layer.dim() == 5 and kv_layer.shape[1::3] == (2 if values is None else 1, head_dim), kv_layer.shape
    assert num_heads % kv_layer.shape[2] == 0 and kv_layer.dtype in (q.dtype, E4M3), (q.shape, kv_layer.shape, q.dtype)
    assert num_tokens > 0 and num_before >= 0 and 0 <= seq < len(block_table), (num_tokens, num_before, seq)
    sizes = blocks(num_before)
    start = sum(sizes)  # of the causal call's keys
    left = num_before - start
    num_rows, num_full = _rounded(left + num_tokens), _rounded(num_tokens)  # of the causal call and of full ones
    rows = q.new_zeros(max(num_rows, left + num_full), num_heads, head_dim)
    rows[left : left + num_tokens] = q

    def part(first: int, stop: int, num_keys: int, rows: torch.Tensor, skipped: int = 0) -> Part:
        """Attend over slots first .. stop - 1. The chunk's rows are those behind the `skipped` ones."""
        keys = gather_keys(kv_layer, block_table, seq, first, stop, num_keys, q.dtype, values)
        found = attend_part(rows, keys, is_causal=first == start)
        own = slice(skipped, skipped + num_tokens)
        return Part(found.out[own], found.lse[:, own])

    joined = part(start, num_before + num_tokens, num_rows, rows[:num_rows], left)
    for size, stop in zip(sizes, itertools.accumulate(sizes), strict=True):
        dtype = q.dtype if stop == start else torch.float32
        joined = _joined(joined, part(stop - size, stop, size, rows[left : left + num_full]), dtype)
    return joined.out


def attend_part(q: torch.Tensor, kv: torch.Tensor, *, is_causal: bool) -> Part:
    """Return the attention of `q` [num_rows, num_heads, head_dim] over the keys and values `kv` [2, num_kv_heads,
    num_keys, head_dim], both contiguous. Causal: there are as many keys as rows, and row i sees the first i + 1 keys.

    On a CPU, torch's fused attention for CPUs does it, with which tests run the rest of this file."""
    num_rows, num_heads, head_dim = q.shape
    assert kv.shape[::3] == (2, head_dim) and num_heads % kv.shape[1] == 0, (q.shape, kv.shape)
    assert q.is_contiguous() and kv.is_contiguous() and (not is_causal or kv.shape[2] == num_rows), (q.shape, kv.shape)
    query = q.unflatten(0, (1, num_rows)).transpose(1, 2)  # [1, num_heads, num_rows, head_dim]
    k, v = kv.unsqueeze(1).unbind(0)  # [1, num_kv_heads, num_keys, head_dim]
    aten = torch.ops.aten
    if q.is_cuda:
        out, lse, *_ = aten._scaled_dot_product_cudnn_attention(query, k, v, None, True, 0.0, is_causal)
    else:
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(query, k, v, 0.0, is_causal)
    return Part(out.transpose(1, 2).squeeze(0).contiguous(), lse.reshape(num_heads, num_rows))


def gather_keys_ref(
    kv_layer: torch.Tensor,
    block_table: torch.Tensor,
    seq: int,
    start: int,
    stop: int,
    num_keys: int,
    dtype: torch.dtype,
    values: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the keys and values in slots start .. stop - 1 of sequence `seq`, then zeros: [2, num_kv_heads, num_keys,
    head_dim] of `dtype`, contiguous.

    `kv_layer` [num_pages, 2, num_kv_heads, page_size, head_dim] is of `dtype` or e4m3 (fp8_pages.py). `block_table` is
    [num_seqs, max_pages] int64. `values` [num_pages, 1, num_kv_heads, page_size, value_dim]: a layer of a pool of their
    own; then `kv_layer` has keys alone, and zeros lie behind each value."""
    page_size = kv_layer.shape[3]
    slots = torch.arange(start, stop, device=kv_layer.device)
    at = block_table[seq, slots // page_size], slice(None), slice(None), slots % page_size
    found = kv_layer[at]  # [num_slots, 2, num_kv_heads, head_dim]
    if values is not None:
        found = torch.cat([found, F.pad(values[at], (0, kv_layer.shape[4] - values.shape[4]))], 1)
    if kv_layer.dtype == E4M3:
        found = (found.float() * scales_of(kv_layer)[at].unsqueeze(-1)).to(dtype)
    keys = found.new_zeros(2, kv_layer.shape[2], num_keys, kv_layer.shape[4])
    keys[:, :, : stop - start] = found.permute(1, 2, 0, 3)
    return keys


def join_parts_ref(out: torch.Tensor, first: Part, second: Part) -> torch.Tensor:
    """Write the attention of rows over the keys of two parts to `out` [num_rows, num_heads, head_dim], and return its
    log-sum-exp, [num_heads, num_rows] float32.

    Computes in float32. `out` is contiguous, of any float dtype, and may be `first.out`."""
    lse = torch.stack((first.lse, second.lse))
    weights = lse.softmax(0).transpose(1, 2).unsqueeze(3)  # [2, num_rows, num_heads, 1]
    out.copy_(first.out * weights[0] + second.out * weights[1])
    return lse.logsumexp(0)


gather_keys = Operation("gather_keys", gather_keys_ref)
join_parts = Operation("join_parts", join_parts_ref)


def plan(
    num_tokens: int, num_heads: int, kv_layer: torch.Tensor, dtype: torch.dtype, values: torch.Tensor | None = None
) -> None:
    """Let the library plan all `shapes` of chunks of up to `num_tokens` tokens, and compile the kernels beside it.

    The chunks have `num_heads` query heads of `dtype`, and pages like those of `kv_layer` [num_pages, 2, num_kv_heads,
    page_size, head_dim], and of `values`, if these have a pool of their own."""
    started, head_dim = time.monotonic(), kv_layer.shape[4]
    table = torch.zeros(1, 1, dtype=torch.int64, device=kv_layer.device)
    found = shapes(num_tokens)
    for num_rows, num_keys, is_causal in found:
        keys = gather_keys(kv_layer, table, 0, 0, 0, num_keys, dtype, values)
        part = attend_part(keys.new_zeros(num_rows, num_heads, head_dim), keys, is_causal=is_causal)
        if num_rows == LEAST:
            for first, joined in itertools.product((dtype, torch.float32), repeat=2):
                _joined(Part(part.out.to(first), part.lse), part, joined)
    logger.info("%d shapes of attention over histories planned in %.1f s", len(found), time.monotonic() - started)


@functools.cache
def serves(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Return whether `history_attention` is faster than `extend_attention` for tensors of this device and dtype.

    It is where `prompt_attention` is, if the fused attention returns the natural log-sum-exp. A call of the smallest
    shape of each kind tries that."""
    if not prompt_attention.serves(device, dtype, head_dim):
        return False
    num_rows, num_keys = LEAST, BLOCKS[-1]
    rows = torch.ones(num_rows, 2, head_dim, device=device, dtype=dtype)
    seen = torch.arange(1, num_rows + 1, device=device)  # keys of each row of a causal call
    for is_causal, expected in ((False, torch.full_like(seen, num_keys)), (True, seen)):
        keys = torch.ones(2, 1, num_rows if is_causal else num_keys, head_dim, device=device, dtype=dtype)
        try:
            found = attend_part(rows, keys, is_causal=is_causal).lse
        except RuntimeError as error:
            logger.warning("no fused attention over histories for heads of %d: %s", head_dim, error)
            return False
        expected = expected.log() + head_dim**0.5
        if not torch.allclose(found, expected.expand_as(found), rtol=1e-2):
            logger.warning("the fused attention returns the log-sum-exp %s, not %s", found[0, -1], expected[-1])
            return False
    return True


def _rounded(num_tokens: int) -> int:
    """Return the number of rows of a call for this number of tokens."""
    return -(-num_tokens // UNIT) * UNIT


def _joined(first: Part, second: Part, dtype: torch.dtype) -> Part:
    """Return both parts together, of this dtype. The memory of `first` is used again if it has the dtype float32."""
    out = first.out if first.out.dtype == dtype == torch.float32 else torch.empty_like(first.out, dtype=dtype)
    return Part(out, join_parts(out, first, second))
