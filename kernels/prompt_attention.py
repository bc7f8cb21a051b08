"""Causal attention of the first tokens of a prompt, which see nothing but each other: torch's fused attention (cuDNN).

    out[t] = sum over j <= t of softmax_j(q[t] . k[j] / sqrt(head_dim)) v[j]

On an H200 it takes 0.75 to 0.85 of the time of `extend_attention` (triton_extend.py) from LEAST tokens on, but cannot
read pages, and makes a plan for every shape, which takes longer than it saves: `shapes` are few, and planned at start.

A token whose key or value is no number may make earlier tokens of its prompt NaN, although they do not see it: fused
kernels multiply hidden values by 0. The other kernels of attention leave hidden values out.
"""

from __future__ import annotations

import functools
import logging
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

logger = logging.getLogger(__name__)

UNIT = 1024  # tokens
LEAST = 4 * UNIT  # of a call; below, both take as long


def prompt_attention_ref(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The specification, in float32."""
    num_tokens, num_heads, head_dim = q.shape
    k, v = (each.float().repeat_interleave(num_heads // k.shape[1], 1) for each in (k, v))
    scores = torch.einsum("thd,jhd->htj", q.float(), k) * head_dim**-0.5
    hidden = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=q.device).triu(1)
    return torch.einsum("htj,jhd->thd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v).to(q.dtype)


def prompt_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, num_seqs: int = 1) -> torch.Tensor:
    """Prompts of one length, two tokens or more, end to end: `q` [num_tokens, num_heads, head_dim], `k` and `v`
    [num_tokens, num_kv_heads, head_dim], rotated, strided by token (views of qkv) -> [num_tokens, num_heads, head_dim],
    contiguous."""
    assert q.shape[::2] == k.shape[::2] == v.shape[::2] and q.shape[1] % k.shape[1] == 0, (q.shape, k.shape, v.shape)
    q, k, v = (each.unflatten(0, (num_seqs, -1)).transpose(1, 2) for each in (q, k, v))
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if q.is_cuda else nullcontext():
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out.transpose(1, 2).flatten(0, 1).contiguous()


def whole_part(num_tokens: int) -> int:
    """Return how many of the first tokens of a single prompt `prompt_attention` takes. The others see them in pages."""
    return num_tokens // UNIT * UNIT if num_tokens >= LEAST else 0


def takes(num_seqs: int, num_tokens: int) -> bool:
    """Return whether `prompt_attention` takes prompts of `num_tokens` each without a rest."""
    return num_tokens % UNIT == 0 and num_seqs * num_tokens >= LEAST


def shapes(num_tokens: int) -> list[tuple[int, int]]:
    """Return all (prompts, tokens of each) that `prompt_attention` may get in a step of `num_tokens`."""
    lengths = range(UNIT, num_tokens + 1, UNIT)
    return [(n, length) for length in lengths for n in range(1, num_tokens // length + 1) if takes(n, length)]


@functools.cache
def serves(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Return whether `prompt_attention` is faster than our kernels: in 16 bits, from compute capability 9.0 on,
    if cuDNN serves the size of the heads."""
    if device.type != "cuda" or dtype == torch.float32 or torch.cuda.get_device_capability(device) < (9, 0):
        return False
    try:
        sample = torch.ones(64, 1, head_dim, device=device, dtype=dtype)
        prompt_attention(sample, sample, sample)
    except RuntimeError as error:
        logger.warning("no fused attention of prompts for heads of %d: %s", head_dim, error)
        return False
    return True
