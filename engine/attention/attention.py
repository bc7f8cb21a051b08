"""The attention of one forward, layer by layer: from fused q, k, v to the attended values, with KV in pages.

There are three ways to the same numbers. The table of operations says which serves a pool (`reader`):

    triton   kernels read pages in place (paged.py). On CUDA, torch's fused attention takes prompts and chunks of many
             tokens (prompt_pieces.py, latent_pieces.py)
    numba    kernels of a CPU read pages in place, in float32, for few new tokens per sequence (gathered.py)
    torch    torch gathers the pages first: on a CPU in 16 bits and for prefill chunks, where the copy is small beside
             the products (gathered.py)

If pages are in FP8, a token sees its own keys and values as they are stored, or the text would depend on the division
into chunks. So a CPU gathers all pages. On CUDA the store of a whole prompt's keys and values also writes the stored
numbers over them, and the copy of pages behind which a chunk stands returns these numbers. They are exact in 16 bits
(kernels/state/fp8_pages.py), so all ways see the same ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch

from ...kernels.operations import Kind, reader
from ..checkpoint.model_config import ModelConfig
from ..rounds.batch import ForwardBatch, JointBatch
from .context import AttentionContext, CosSin, IdleAttention
from .gathered import begin_compiled, begin_gathered, compiled_queries, gathered_queries
from .paged import begin_paged, paged_queries
from .rope import RotaryEmbedding

_Queries = Callable[[torch.Tensor, int], torch.Tensor]


class _Way(NamedTuple):
    """One way to compute attention."""

    begin: Callable[[ModelConfig, ForwardBatch, torch.Tensor, CosSin], AttentionContext]
    queries: Callable[[ForwardBatch, torch.Tensor, torch.dtype], _Queries]


_WAYS: Mapping[Kind, _Way] = MappingProxyType(
    {
        "triton": _Way(begin_paged, paged_queries),
        "numba": _Way(begin_compiled, compiled_queries),
        "torch": _Way(begin_gathered, gathered_queries),
    }
)


def begin_attention(
    config: ModelConfig,
    rotary: RotaryEmbedding,
    batch: ForwardBatch | JointBatch,
    kv: torch.Tensor,
    dtype: torch.dtype,
) -> AttentionContext:
    """Return the context of a forward over `kv` [num_layers, num_pages, num_planes, num_kv_heads, page_size, head_dim],
    of the model's device, and of `dtype` or e4m3 (kernels/state/fp8_pages.py). `dtype` is that of the model."""
    if isinstance(batch, JointBatch):
        first, second = (begin_attention(config, rotary, part, kv, dtype) for part in (batch.first, batch.second))
        return first.joined(second, batch.first.num_tokens)
    if batch.attention is not None:
        return batch.attention(config, rotary)
    num_planes = 2 if config.latent is None else 1
    shape = (config.num_layers, num_planes, config.num_kv_heads, batch.page_size, config.head_dim)
    assert (kv.shape[0], *kv.shape[2:]) == shape, (kv.shape, shape)
    if batch.num_tokens == 0:
        return IdleAttention(config.q_size)
    return _WAYS[reader(kv.device, kv.dtype)].begin(config, batch, kv, rotary(batch.positions, dtype))


def begin_queries(batch: ForwardBatch, kv: torch.Tensor, dtype: torch.dtype) -> _Queries:
    """Return the function that attends one rotated query per sequence, [num_seqs, num_heads, head_dim] of `dtype`, to a
    layer of `kv`, which holds all KV already, and returns the values in the query's shape."""
    return _WAYS[reader(kv.device, kv.dtype)].queries(batch, kv, dtype)
