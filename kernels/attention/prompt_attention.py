"""Causal attention among the first tokens of prompts, by torch's fused attention (cuDNN).

    out[t] = sum over j <= t of softmax_j(q[t] . k[j] / sqrt(head_dim)) v[j]

From LEAST tokens on, a GPU of compute capability 9.0 does this faster than `extend_attention` (triton_extend.py).
But cuDNN cannot read pages, so this file serves only tokens that have nothing before them (history.py serves long
chunks that have). It also plans each new shape, which takes longer than one call saves. So only a few `shapes` are
served, and a node plans all of them at start.

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

UNIT = 1024  # tokens; the lengths of prompts that are served are multiples
LEAST = 4 * UNIT  # tokens of a call; with fewer, `extend_attention` takes no longer


def prompt_attention_ref(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return the attention of one prompt, computed in float32: [num_tokens, num_heads, head_dim] of q's dtype.

    Arguments are as in `prompt_attention`."""
    num_tokens, num_heads, head_dim = q.shape
    k, v = (each.float().repeat_interleave(num_heads // k.shape[1], 1) for each in (k, v))
    scores = torch.einsum("thd,jhd->htj", q.float(), k) * head_dim**-0.5
    hidden = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=q.device).triu(1)
    return torch.einsum("htj,jhd->thd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v).to(q.dtype)


def prompt_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, num_seqs: int = 1) -> torch.Tensor:
    """Return the attention of `num_seqs` prompts, [num_tokens, num_heads, head_dim], contiguous.

    The prompts lie end to end and have one length, two tokens or more. `q` [num_tokens, num_heads, head_dim] and `k`
    [num_tokens, num_kv_heads, head_dim] are rotated. `v` has k's shape. All may be strided by token, as views of qkv
    are."""
    assert q.shape[::2] == k.shape[::2] == v.shape[::2] and q.shape[1] % k.shape[1] == 0, (q.shape, k.shape, v.shape)
    q, k, v = (each.unflatten(0, (num_seqs, -1)).transpose(1, 2) for each in (q, k, v))
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if q.is_cuda else nullcontext():
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out.transpose(1, 2).flatten(0, 1).contiguous()


def whole_part(num_tokens: int) -> int:
    """Return how many of the `num_tokens` tokens of a single prompt `prompt_attention` serves: the first ones.

    `extend_attention` serves the others, and reads the keys of the first ones from pages."""
    return num_tokens // UNIT * UNIT if num_tokens >= LEAST else 0


def takes(num_seqs: int, num_tokens: int) -> bool:
    """Return whether `prompt_attention` serves all tokens of `num_seqs` prompts of `num_tokens` each."""
    return num_tokens % UNIT == 0 and num_seqs * num_tokens >= LEAST


def shapes(num_tokens: int) -> list[tuple[int, int]]:
    """Return all pairs (number of prompts, tokens of each) that may be served in a step of `num_tokens` tokens."""
    lengths = range(UNIT, num_tokens + 1, UNIT)
    return [(n, length) for length in lengths for n in range(1, num_tokens // length + 1) if takes(n, length)]


@functools.cache
def serves(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Return whether `prompt_attention` is faster than `extend_attention` for tensors of this device and dtype.

    It is for 16 bits and compute capability 9.0 or more, if cuDNN supports heads of `head_dim`."""
    if device.type != "cuda" or dtype == torch.float32 or torch.cuda.get_device_capability(device) < (9, 0):
        return False
    try:
        sample = torch.ones(64, 1, head_dim, device=device, dtype=dtype)
        prompt_attention(sample, sample, sample)
    except RuntimeError as error:
        logger.warning("no fused attention of prompts for heads of %d: %s", head_dim, error)
        return False
    return True
