"""The attention of one forward, layer by layer: from fused q, k, v to the attended values, with KV in pages.

There are three ways to the same numbers. The table of operations says which serves a pool (`reader`):

    triton   kernels read pages in place (paged.py). On CUDA, torch's fused attention takes prompts and chunks of many
             tokens (prompt_pieces.py, latent_pieces.py)
    numba    kernels of a CPU read pages in place, in float32, for few new tokens per sequence
    torch    torch gathers the pages first: on a CPU in 16 bits and for prefill chunks, where the copy is small beside
             the products

If pages are in FP8, a token sees its own keys and values as they are stored, or the text would depend on the division
into chunks. So a CPU gathers all pages. On CUDA the store of a whole prompt's keys and values also writes the stored
numbers over them, and the copy of pages behind which a chunk stands returns these numbers. They are exact in 16 bits
(kernels/state/fp8_pages.py), so all ways see the same ones.

Rotary position embeddings (`RotaryEmbedding`) are the same for all layers. The pair (i, i + head_dim / 2) of a head at
position p is rotated by the angle p * inv_freq[i]. The scaling variants change `inv_freq`, and yarn also scales the
result: default and linear (RoFormer, arXiv:2104.09864), yarn (arXiv:2309.00071), llama3 (as published with Llama 3.1),
proportional (as published with Gemma 4).
None depends on the length of a sequence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from ...kernels.attention.attention import AttentionPlan, clear_fresh_pages, paged_attention, store_kv
from ...kernels.attention.paged_rows import PagedRows, attend, attend_stored
from ...kernels.operations import Kind, reader
from ...kernels.products.norm import rms_norm
from ...kernels.products.rotary import apply_rotary_, turns
from ..checkpoint.model_config import INDEX, WINDOW_POOL, ModelConfig, RopeConfig
from ..rounds.batch import ForwardBatch, MixedBatch
from ..state.model_pools import ModelPools
from .compressed import KV, CompressedAttention
from .context import AttentionContext, CosSin, FurtherPools, IdleAttention, LayerHeads, ScaledQueries
from .gathered_entries import GatheredEntries
from .paged import begin_paged, paged_queries
from .paged_entries import PagedEntries
from .picked import PickedAttention
from .pool_rows import PoolRows

Rotary = Callable[[torch.Tensor, torch.dtype], CosSin]  # a RotaryEmbedding, or one that keeps what it has made
_Queries = Callable[[torch.Tensor, int], torch.Tensor]
_MAX_COMPILED_QUERY_LEN = 16  # beyond, torch's matrix products win


def begin_attention(
    config: ModelConfig,
    rotary: Rotary,
    batch: ForwardBatch | MixedBatch,
    pools: ModelPools,
    dtype: torch.dtype,
) -> AttentionContext:
    """Return the context of a forward over `pools`, which are on the model's device. `dtype` is that of the model. The
    pool of KV is of `dtype` or e4m3 (kernels/state/fp8_pages.py)."""
    if config.tail_rows:
        batch = batch.of_tails()
    if config.compressed is not None:
        return _begin_compressed(config, batch, pools)
    context = _begin(config, rotary, batch, pools, dtype)
    seen = batch.of_tails() if config.has_tail else batch
    return FurtherPools(context, PoolRows.of(seen, pools.further)) if pools.further else context


def _begin_compressed(config: ModelConfig, batch: ForwardBatch | MixedBatch, pools: ModelPools) -> CompressedAttention:
    """Return the context of layers that see a window and entries."""
    own, seen = {KV: pools.kv, **pools.further}, batch
    if config.has_tail:
        own, seen = {**own, config.further[0].name: pools.kv, KV: pools.further[WINDOW_POOL]}, batch.of_tails()
    keys = own[KV]
    assert keys.shape[0] == config.num_layers and keys.shape[5] == config.head_dim, keys.shape
    kept, tails = PoolRows.of(batch, own), PoolRows.of(seen, own)
    if len(batch.input_ids) and reader(keys.device, keys.dtype) == "triton":
        return PagedEntries.of(kept, tails)
    return GatheredEntries(kept, tails)


def _begin(
    config: ModelConfig,
    rotary: Rotary,
    batch: ForwardBatch | MixedBatch,
    pools: ModelPools,
    dtype: torch.dtype,
) -> AttentionContext:
    """Return the context over the pool of KV, and that of values if they have one."""
    if isinstance(batch, MixedBatch):
        first, second = (_begin(config, rotary, part, pools, dtype) for part in (batch.first, batch.second))
        return first.joined(second, batch.first.num_tokens)
    if batch.attention is not None:
        return batch.attention(config, rotary)
    kv, num_planes = pools.kv, 2 if config.latent is None and config.value_dim is None else 1
    shape = (config.num_layers, num_planes, config.num_kv_heads, batch.page_size, config.head_dim)
    assert (kv.shape[0], *kv.shape[2:]) == shape, (kv.shape, shape)
    assert (None if pools.values is None else pools.values.shape[5]) == config.value_dim, config.value_dim
    if batch.num_tokens == 0:
        context: AttentionContext = IdleAttention(config.q_size)
    else:
        context = _WAYS[reader(kv.device, kv.dtype)].begin(config, batch, pools, rotary(batch.positions, dtype))
    if not config.rope.query_beta:
        return context
    return ScaledQueries(context, query_scales(config.rope, batch.positions, dtype), config.q_size)


def begin_queries(batch: ForwardBatch, kv: torch.Tensor, dtype: torch.dtype) -> _Queries:
    """Return the function that attends one rotated query per sequence, [num_seqs, num_heads, head_dim] of `dtype`, to a
    layer of `kv`, which holds all KV already, and returns the values in the query's shape."""
    return _WAYS[reader(kv.device, kv.dtype)].queries(batch, kv, dtype)


def _begin_compiled(config: ModelConfig, batch: ForwardBatch, pools: ModelPools, cos_sin: CosSin) -> AttentionContext:
    """Return the context by kernels that read pages in place, or over gathered pages if a sequence has many new
    tokens, or values are narrower than keys. Arguments are as in `begin_attention`."""
    is_long = batch.tree is None and max(batch.query_lens) > _MAX_COMPILED_QUERY_LEN
    if is_long or pools.values is not None:
        return _begin_gathered(config, batch, pools, cos_sin)
    rows = PagedRows.build(cos_sin, batch.block_table, batch.query_lens, batch.seq_lens, batch.positions, batch.tree)
    kv = pools.kv.numpy()
    if config.index is None:
        return _CompiledAttention(config, rows, kv)
    keys = pools.further[INDEX]
    return PickedAttention.of(
        config.index, batch, cos_sin, keys, lambda seen: _CompiledAttention(config, rows.seeing(seen), kv)
    )


def _begin_gathered(config: ModelConfig, batch: ForwardBatch, pools: ModelPools, cos_sin: CosSin) -> AttentionContext:
    """Return the context over gathered pages. Arguments are as in `_begin_compiled`."""
    kv = pools.kv
    plan = batch.attention_plan(config.num_kv_heads, config.sliding_window, cos_sin[0].dtype, kv.shape[2])
    clear_fresh_pages(kv, plan)
    if pools.values is not None:
        clear_fresh_pages(pools.values, plan)
    context = _GatheredAttention(config, plan, kv.unbind(0), pools.values, *cos_sin)
    if config.index is None:
        return context
    keys = pools.further[INDEX]
    return PickedAttention.of(
        config.index, batch, cos_sin, keys, lambda seen: replace(context, plan=plan.seeing(seen, cos_sin[0].dtype))
    )


def _compiled_queries(batch: ForwardBatch, kv: torch.Tensor, _: torch.dtype) -> _Queries:
    """Do the work of `begin_queries` by kernels that read pages in place."""
    return lambda q, layer: attend_stored(q, kv, layer, batch.block_table, batch.seq_lens)


def _gathered_queries(batch: ForwardBatch, kv: torch.Tensor, dtype: torch.dtype) -> _Queries:
    """Do the work of `begin_queries` over gathered pages."""
    plan = batch.attention_plan(kv.shape[3], (None,), dtype)
    return lambda q, layer: paged_attention(q, kv[layer], plan, None)


@dataclass(frozen=True, slots=True, eq=False)
class _CompiledAttention(AttentionContext):
    config: ModelConfig
    rows: PagedRows
    kv: np.ndarray  # [num_layers, num_pages, num_planes, num_kv_heads, page_size, head_dim] float32

    def __call__(self, qkv: torch.Tensor, heads: LayerHeads) -> torch.Tensor:
        eps, scale = self.config.rms_norm_eps, self.config.softmax_scale
        return attend(qkv, self.kv, heads.layer, self.rows, heads.window, heads.norms, eps, scale, sinks=heads.sinks)


@dataclass(frozen=True, slots=True, eq=False)
class _GatheredAttention(AttentionContext):
    config: ModelConfig
    plan: AttentionPlan
    kv_layers: tuple[torch.Tensor, ...]  # each [num_pages, num_planes, num_kv_heads, page_size, head_dim]
    values: torch.Tensor | None  # [num_layers, num_pages, 1, num_kv_heads, page_size, value_dim]; None: beside keys
    cos: torch.Tensor  # [num_tokens, 1, rotary_dim]
    sin: torch.Tensor  # [num_tokens, 1, rotary_dim], signed

    def __call__(self, qkv: torch.Tensor, heads: LayerHeads) -> torch.Tensor:
        config, norms = self.config, heads.norms
        num_tokens, num_heads, num_rotated = qkv.shape[0], config.num_heads, config.num_heads + config.num_kv_heads
        qkv = qkv.view(num_tokens, -1, config.head_dim)
        q, k = qkv[:, :num_heads], qkv[:, num_heads:num_rotated]
        if norms is not None:
            q.copy_(rms_norm(q, norms.q, config.rms_norm_eps))
            k.copy_(rms_norm(k, norms.k, config.rms_norm_eps))
        apply_rotary_(qkv[:, :num_rotated, -self.cos.shape[-1] :], self.cos, self.sin)
        kv_layer = self.kv_layers[heads.layer]
        if self.values is None:
            values = None
            store_kv(qkv[:, num_heads:], kv_layer, self.plan)
        else:
            values = self.values[heads.layer]
            store_kv(qkv[:, num_heads:num_rotated], kv_layer, self.plan)
            store_kv(qkv[:, num_rotated:, : values.shape[-1]], values, self.plan)
        scale, sinks = config.softmax_scale, heads.sinks
        out = paged_attention(q, kv_layer, self.plan, heads.window, scale, sinks=sinks, values=values)
        return out.reshape(num_tokens, -1)


class _Way(NamedTuple):
    """One way to compute attention."""

    begin: Callable[[ModelConfig, ForwardBatch, ModelPools, CosSin], AttentionContext]
    queries: Callable[[ForwardBatch, torch.Tensor, torch.dtype], _Queries]


_WAYS: Mapping[Kind, _Way] = MappingProxyType(
    {
        "triton": _Way(begin_paged, paged_queries),
        "numba": _Way(_begin_compiled, _compiled_queries),
        "torch": _Way(_begin_gathered, _gathered_queries),
    }
)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Return the radians per position of each pair: [head_dim / 2] float32 on the CPU."""
    inv_freq = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    match rope.rope_type:
        case "default":
            return inv_freq
        case "linear":
            return inv_freq / rope.factor
        case "llama3":
            return _llama3(rope, inv_freq)
        case "yarn":
            return _yarn(rope, inv_freq, head_dim)
        case "proportional":
            inv_freq[int(rope.share * head_dim // 2) :] = 0.0
            return inv_freq / rope.factor


def query_scales(rope: RopeConfig, positions: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the factor of the queries at `positions` [num_tokens] int64, [num_tokens, 1] of `dtype` (attention
    temperature by position, as published with Llama 4): 1 within the original context, then slowly more."""
    lengths = (positions.float() / rope.original_context_len).floor_()  # of the original context that lie before
    return lengths.log1p_().mul_(rope.query_beta).add_(1.0).to(dtype).unsqueeze(1)


def rotary_order(head_dim: int, rotary_dim: int) -> list[int]:
    """Return the order of a head's rows in which all pairs are (i, i + head_dim / 2), if only the first `rotary_dim`
    rows are rotated, as pairs (i, i + rotary_dim / 2). The others become pairs of a frequency of 0."""
    half, rest = rotary_dim // 2, list(range(rotary_dim, head_dim))
    num_first = head_dim // 2 - half
    return [*range(half), *rest[:num_first], *range(half, rotary_dim), *rest[num_first:]]


class RotaryEmbedding:
    """Makes cosines and sines for given positions. It holds the frequencies only, no table per context length."""

    def __init__(self, rope: RopeConfig, head_dim: int, device: torch.device, rotary_dim: int | None = None) -> None:
        """`rotary_dim`: numbers of a head that are rotated, whose rows are in `rotary_order`; None: all."""
        inv_freq = inverse_frequencies(rope, rotary_dim or head_dim)
        inv_freq = F.pad(inv_freq, (0, head_dim // 2 - len(inv_freq)))
        cos_freq, sin_freq = torch.cat((inv_freq, inv_freq)), torch.cat((-inv_freq, inv_freq))  # sin(-a) = -sin(a)
        self._frequencies = torch.stack((cos_freq, sin_freq)).to(device)  # [2, head_dim] float32
        self._scale = rope.attention_factor

    def __call__(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and signed sines of `positions` [num_tokens] int64, each [num_tokens, 1, head_dim] of `dtype`:
        the arguments of `kernels.rotary.apply_rotary_`."""
        return turns(positions, self._frequencies, self._scale, dtype)


def _llama3(rope: RopeConfig, inv_freq: torch.Tensor) -> torch.Tensor:
    rotations = rope.original_context_len * inv_freq / (2 * math.pi)  # over the original context
    kept = (rotations - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)
    return kept * inv_freq + (1 - kept) * inv_freq / rope.factor


def _yarn(rope: RopeConfig, inv_freq: torch.Tensor, head_dim: int) -> torch.Tensor:
    def dimension_of(rotations: float) -> float:
        return head_dim * math.log(rope.original_context_len / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    stretched = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0.0, 1.0)
    return stretched * inv_freq / rope.factor + (1 - stretched) * inv_freq
