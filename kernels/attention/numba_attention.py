"""`attend` and `attend_stored` of paged_rows.py for float32 on a CPU. Threads share the sequences."""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from .. import numba_kernels
from .paged_rows import PagedRows

_NONE = np.empty(0, dtype=np.float32)


def attend(
    qkv: torch.Tensor,
    kv: np.ndarray,
    layer: int,
    rows: PagedRows,
    window: int | None,
    norms: tuple[torch.Tensor, torch.Tensor] | None = None,
    eps: float = 0.0,
    scale: float | None = None,
    *,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return `attend_ref`, a new tensor [num_tokens, num_heads * head_dim]; `qkv` is overwritten."""
    num_tokens, num_planes, num_kv_heads, head_dim = qkv.shape[0], kv.shape[2], kv.shape[3], kv.shape[5]
    heads = qkv.numpy().reshape(num_tokens, -1, head_dim)
    num_heads = heads.shape[1] - num_planes * num_kv_heads
    assert num_tokens == len(rows.positions) and num_heads % num_kv_heads == 0, (qkv.shape, kv.shape)
    q_norm, k_norm = (_NONE, _NONE) if norms is None else (norms[0].numpy(), norms[1].numpy())
    of_heads = _NONE if sinks is None else sinks.numpy()
    out = np.empty((num_tokens, num_heads, head_dim), dtype=np.float32)
    pages = kv[layer : layer + 1]  # contiguous, which the pool need not be

    def attend_part(part: slice) -> None:
        starts = rows.starts[part.start : part.stop + 1]
        numba_kernels.attend(
            heads, pages, 0, rows.cos, rows.sin, q_norm, k_norm, eps, rows.block_table[part], starts,
            rows.seq_lens[part], rows.positions, rows.tree_starts[part], rows.visible, window or 0,
            scale or head_dim**-0.5, of_heads, out,
        )  # fmt: skip

    others = [_threads().submit(attend_part, part) for part in rows.parts[1:]]
    attend_part(rows.parts[0])
    for other in others:
        other.result()
    return torch.from_numpy(out.reshape(num_tokens, -1))


def attend_stored(
    q: torch.Tensor, kv: torch.Tensor, layer: int, block_table: torch.Tensor, seq_lens: torch.Tensor
) -> torch.Tensor:
    """Return `attend_stored_ref`, a new tensor [num_seqs, num_heads, head_dim]."""
    assert q.shape[0] == block_table.shape[0] == seq_lens.shape[0], (q.shape, block_table.shape, seq_lens.shape)
    assert q.shape[1] % kv.shape[3] == 0, (q.shape, kv.shape)
    out = np.empty(tuple(q.shape), dtype=np.float32)
    if len(out) == 0:  # the kernel looks for the longest sequence
        return torch.from_numpy(out)
    pages = kv[layer : layer + 1].numpy()  # contiguous, which the pool need not be
    table = block_table.contiguous().numpy()
    numba_kernels.attend_stored(q.contiguous().numpy(), pages, 0, table, seq_lens.numpy(), out)
    return torch.from_numpy(out)


@functools.cache
def _threads() -> ThreadPoolExecutor:
    """Return the threads beside the calling one. Compiled kernels hold no lock of the interpreter."""
    return ThreadPoolExecutor(max(1, torch.get_num_threads() - 1), "attention")
