"""Attention on a CPU: by compiled kernels that read pages in place, or by torch over gathered pages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from ...kernels.attention.attention import AttentionPlan, clear_fresh_pages, paged_attention, store_kv
from ...kernels.attention.paged_rows import PagedRows, attend, attend_stored
from ...kernels.products.norm import rms_norm
from ...kernels.products.rotary import apply_rotary_
from ..checkpoint.model_config import ModelConfig
from ..rounds.batch import ForwardBatch
from .context import AttentionContext, CosSin, LayerHeads

_MAX_COMPILED_QUERY_LEN = 16  # beyond, torch's matrix products win


def begin_compiled(config: ModelConfig, batch: ForwardBatch, kv: torch.Tensor, cos_sin: CosSin) -> AttentionContext:
    """Return the context by kernels that read pages in place, or over gathered pages if a sequence has many new
    tokens. Arguments are as in `begin_attention`."""
    if batch.tree is None and max(batch.query_lens) > _MAX_COMPILED_QUERY_LEN:
        return begin_gathered(config, batch, kv, cos_sin)
    rows = PagedRows.build(cos_sin, batch.block_table, batch.query_lens, batch.seq_lens, batch.positions, batch.tree)
    return _CompiledAttention(config, rows, kv.numpy())


def begin_gathered(config: ModelConfig, batch: ForwardBatch, kv: torch.Tensor, cos_sin: CosSin) -> AttentionContext:
    """Return the context over gathered pages. Arguments are as in `begin_compiled`."""
    plan = batch.attention_plan(config.num_kv_heads, config.sliding_window, cos_sin[0].dtype, kv.shape[2])
    clear_fresh_pages(kv, plan)
    return _GatheredAttention(config, plan, kv.unbind(0), *cos_sin)


def compiled_queries(
    batch: ForwardBatch, kv: torch.Tensor, _: torch.dtype
) -> Callable[[torch.Tensor, int], torch.Tensor]:
    """Do the work of `begin_queries` by kernels that read pages in place."""
    return lambda q, layer: attend_stored(q, kv, layer, batch.block_table, batch.seq_lens)


def gathered_queries(
    batch: ForwardBatch, kv: torch.Tensor, dtype: torch.dtype
) -> Callable[[torch.Tensor, int], torch.Tensor]:
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
        apply_rotary_(qkv[:, :num_rotated, config.head_dim - config.rotated_size :], self.cos, self.sin)
        kv_layer = self.kv_layers[heads.layer]
        store_kv(qkv[:, num_heads:], kv_layer, self.plan)
        out = paged_attention(q, kv_layer, self.plan, heads.window, config.softmax_scale, sinks=heads.sinks)
        return out.reshape(num_tokens, -1)
