"""The attention of one forward, layer by layer: from fused q, k, v to the attended values, keeping KV in its pages.

Three ways to the same numbers: compiled kernels that read pages where they lie, on CUDA (Triton) and on a CPU (float32,
few new tokens a sequence), and torch operations that gather them first (all else: 16 bits and prefill chunks on a CPU,
where the copy is small beside the products)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from ..kernels import cpu, gpu
from ..kernels.attention import AttentionPlan, clear_fresh_pages, paged_attention, store_kv
from ..kernels.norm import rms_norm
from ..kernels.rotary import apply_rotary_
from .batch import ForwardBatch
from .model_config import ModelConfig
from .rope import RotaryEmbedding
from .weights import LayerWeights

if TYPE_CHECKING:
    from ..kernels.triton_attention import Plan

_MAX_COMPILED_QUERY_LEN = 16  # beyond, torch's matrix products win


class Attention(Protocol):
    def __call__(self, index: int, layer: LayerWeights, qkv: torch.Tensor) -> torch.Tensor:
        """Layer `index` of the forward: `qkv` [num_tokens, q_size + 2 * kv_size], which may be overwritten ->
        [num_tokens, q_size]. The new tokens' KV is stored on return."""
        ...


def begin_attention(config: ModelConfig, rotary: RotaryEmbedding, batch: ForwardBatch, kv: torch.Tensor) -> Attention:
    """`kv` [num_layers, num_pages, 2, num_kv_heads, page_size, head_dim] of the model's dtype and device."""
    shape = (config.num_layers, 2, config.num_kv_heads, batch.page_size, config.head_dim)
    assert (kv.shape[0], *kv.shape[2:]) == shape, (kv.shape, shape)
    cos_sin = rotary(batch.positions, kv.dtype)
    if gpu.compiled(kv):
        return _TritonAttention(config, triton_plan(batch), kv.unbind(0), *cos_sin)
    is_short = batch.tree is not None or max(batch.query_lens) <= _MAX_COMPILED_QUERY_LEN
    if is_short and cpu.compiled(kv):
        rows = cpu.PagedRows.build(
            cos_sin, batch.block_table, batch.query_lens, batch.seq_lens, batch.positions, batch.tree
        )
        return _CompiledAttention(config, rows, kv.numpy())
    plan = batch.attention_plan(config.num_kv_heads, config.sliding_window, kv.dtype)
    clear_fresh_pages(kv, plan)
    return _GatheredAttention(config, plan, kv.unbind(0), *cos_sin)


@dataclass(frozen=True, slots=True, eq=False)
class _CompiledAttention:
    config: ModelConfig
    rows: cpu.PagedRows
    kv: np.ndarray  # as `begin_attention` takes it

    def __call__(self, index: int, layer: LayerWeights, qkv: torch.Tensor) -> torch.Tensor:
        norms = None if layer.q_norm is None or layer.k_norm is None else (layer.q_norm, layer.k_norm)
        window = self.config.sliding_window[index]
        return cpu.attend(qkv, self.kv, index, self.rows, window, norms, self.config.rms_norm_eps)


def triton_plan(batch: ForwardBatch, *, is_stored: bool = False) -> Plan:
    """Of the kernels on CUDA. Prompts and their chunks, of whatever lengths, share one kernel; rounds have another."""
    from ..kernels.triton_attention import Plan

    table, seq_lens = batch.block_table, batch.seq_lens
    if batch.starts is not None:
        return Plan.ragged(table, seq_lens, batch.starts, batch.num_tokens, batch.page_size)
    query_len = batch.query_lens[0]
    return Plan.uniform(table, seq_lens, query_len, batch.page_size, batch.tree, batch.positions, is_stored=is_stored)


@dataclass(frozen=True, slots=True, eq=False)
class _TritonAttention:
    config: ModelConfig
    plan: Plan
    kv_layers: tuple[torch.Tensor, ...]  # each [num_pages, 2, num_kv_heads, page_size, head_dim]
    cos: torch.Tensor  # [num_tokens, 1, head_dim]
    sin: torch.Tensor  # [num_tokens, 1, head_dim], signed

    def __call__(self, index: int, layer: LayerWeights, qkv: torch.Tensor) -> torch.Tensor:
        from ..kernels.triton_attention import decode_attention
        from ..kernels.triton_extend import extend_attention
        from ..kernels.triton_store import norm_rotate_store

        assert self.plan.rows is not None
        norms = None if layer.q_norm is None or layer.k_norm is None else (layer.q_norm, layer.k_norm)
        kv_layer, eps = self.kv_layers[index], self.config.rms_norm_eps
        q = norm_rotate_store(qkv, self.cos, self.sin, kv_layer, self.plan.rows, norms, eps, gpu.dependent_launch())
        attend = decode_attention if self.plan.starts is None else extend_attention
        return attend(q, kv_layer, self.plan, self.config.sliding_window[index]).flatten(1)


@dataclass(frozen=True, slots=True, eq=False)
class _GatheredAttention:
    config: ModelConfig
    plan: AttentionPlan
    kv_layers: tuple[torch.Tensor, ...]  # each [num_pages, 2, num_kv_heads, page_size, head_dim]
    cos: torch.Tensor  # [num_tokens, 1, head_dim]
    sin: torch.Tensor  # [num_tokens, 1, head_dim], signed

    def __call__(self, index: int, layer: LayerWeights, qkv: torch.Tensor) -> torch.Tensor:
        config = self.config
        num_tokens, num_heads, num_rotated = qkv.shape[0], config.num_heads, config.num_heads + config.num_kv_heads
        qkv = qkv.view(num_tokens, num_rotated + config.num_kv_heads, config.head_dim)
        q, k = qkv[:, :num_heads], qkv[:, num_heads:num_rotated]
        if layer.q_norm is not None and layer.k_norm is not None:
            q.copy_(rms_norm(q, layer.q_norm, config.rms_norm_eps))
            k.copy_(rms_norm(k, layer.k_norm, config.rms_norm_eps))
        apply_rotary_(qkv[:, :num_rotated], self.cos, self.sin)
        kv_layer = self.kv_layers[index]
        store_kv(qkv[:, num_heads:], kv_layer, self.plan)
        return paged_attention(q, kv_layer, self.plan, config.sliding_window[index]).view(num_tokens, -1)
