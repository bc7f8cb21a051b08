"""Float32 on a CPU: rows of a forward through the kernels of kernels/numba_kernels.py, in place of many torch calls.

`compiled` says whether they serve a device and dtype; where they do not (CUDA, 16 bits, no numba) the torch functions
of kernels/attention.py, norm.py and rotary.py do the same.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import ModuleType

import numpy as np
import torch

from .attention import Tree

logger = logging.getLogger(__name__)

_NO_NORM = np.empty(0, dtype=np.float32)
_THREADED_PRODUCTS = 4096  # queries times keys of a part that is worth a thread: some 0.1 ms
_CAUSAL = np.empty((0, 0), dtype=np.bool_)


def compiled(tensor: torch.Tensor) -> bool:
    """Whether this module's functions serve tensors of this device and dtype."""
    return tensor.is_cpu and tensor.dtype is torch.float32 and _kernels() is not None


@functools.cache
def _kernels() -> ModuleType | None:
    """Numba is imported where it is used first: a node on CUDA does without."""
    try:
        from . import numba_kernels
    except ImportError as error:
        logger.warning("numba cannot be used (%s); decoding on this CPU is slower without it", error)
        return None
    return numba_kernels


def add_rms_norm_(hidden: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """hidden += delta (None: nothing) in place, then its norm as `rms_norm`, a new tensor; all [num_rows, size]."""
    assert hidden.shape[1:] == weight.shape and (delta is None or delta.shape == hidden.shape), (hidden.shape, delta)
    rows = hidden.numpy()
    out = np.empty(rows.shape, dtype=np.float32)
    other = rows if delta is None else delta.numpy()
    _compiled().add_rms_norm(rows, other, delta is not None, weight.numpy(), eps, out)
    return torch.from_numpy(out)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up: [num_rows, 2 * size], gate first -> [num_rows, size], a new tensor."""
    out = np.empty((gate_up.shape[0], gate_up.shape[1] // 2), dtype=np.float32)
    _compiled().silu_mul(gate_up.numpy(), out)
    return torch.from_numpy(out)


@dataclass(frozen=True, slots=True, eq=False)
class PagedRows:
    """What all layers of one forward share, for `attend`. Sequences lie end to end; new token i of a sequence has slot
    seq_len - query_len + i. In a tree it sees all slots before `tree_starts`, and of those from there on the ones that
    `visible` says."""

    cos: np.ndarray  # [num_tokens, 1, head_dim] float32
    sin: np.ndarray  # [num_tokens, 1, head_dim] float32, signed as `apply_rotary_` takes it
    block_table: np.ndarray  # [num_seqs, max_pages] int64
    starts: np.ndarray  # [num_seqs + 1] int64, the first token of each sequence, and the end
    seq_lens: np.ndarray  # [num_seqs] int64, after this forward
    positions: np.ndarray  # [num_tokens] int64, which windows count by; the slots, but for the nodes of a tree
    tree_starts: np.ndarray  # [num_seqs] int64, the first slot that `visible` speaks of
    visible: np.ndarray  # [num_tokens, num_columns] bool: a token sees slot tree_start + i; no rows: those up to itself
    parts: tuple[slice, ...]  # sequences that one thread attends; all together cover all

    @classmethod
    def build(
        cls,
        rotary: tuple[torch.Tensor, torch.Tensor],
        block_table: torch.Tensor,
        query_lens: Sequence[int],
        seq_lens: torch.Tensor,
        positions: torch.Tensor,
        tree: Tree | None = None,
    ) -> PagedRows:
        """All tensors on the CPU; `rotary` is (cos, sin); `seq_lens` [num_seqs] int64."""
        starts = np.zeros(len(query_lens) + 1, dtype=np.int64)
        np.cumsum(query_lens, out=starts[1:])
        assert positions.shape == (starts[-1],) and block_table.shape[0] == len(seq_lens) == len(query_lens)
        assert tree is None or (len(tree.visible) == starts[-1] and len(tree.starts) == len(seq_lens)), tree
        lens = seq_lens.numpy()
        return cls(
            cos=rotary[0].numpy(),
            sin=rotary[1].numpy(),
            block_table=block_table.numpy(),
            starts=starts,
            seq_lens=lens,
            positions=positions.numpy(),
            tree_starts=lens if tree is None else tree.starts.numpy(),
            visible=_CAUSAL if tree is None else tree.visible.numpy(),
            parts=_parts(query_lens, lens),
        )


def attend(
    qkv: torch.Tensor,
    kv: np.ndarray,
    layer: int,
    rows: PagedRows,
    window: int | None,
    norms: tuple[torch.Tensor, torch.Tensor] | None = None,
    eps: float = 0.0,
) -> torch.Tensor:
    """Norm queries and keys by `norms` (two of [head_dim]; None: not), rotate them, store keys and values as `store_kv`
    and `clear_fresh_pages` do, and attend as `paged_attention_ref`: [num_tokens, num_heads * head_dim], a new tensor.

    `qkv` [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim] float32, overwritten; `kv` is the pool, [num_layers,
    num_pages, 2, num_kv_heads, page_size, head_dim] float32. Slots beyond a sequence's length are not read."""
    num_tokens, num_kv_heads, head_dim = qkv.shape[0], kv.shape[3], kv.shape[5]
    heads = qkv.numpy().reshape(num_tokens, -1, head_dim)
    num_heads = heads.shape[1] - 2 * num_kv_heads
    assert num_tokens == len(rows.positions) and num_heads % num_kv_heads == 0, (qkv.shape, kv.shape)
    q_norm, k_norm = (_NO_NORM, _NO_NORM) if norms is None else (norms[0].numpy(), norms[1].numpy())
    out = np.empty((num_tokens, num_heads, head_dim), dtype=np.float32)
    kernel = _compiled().attend

    def attend_part(part: slice) -> None:
        starts = rows.starts[part.start : part.stop + 1]
        kernel(
            heads, kv, layer, rows.cos, rows.sin, q_norm, k_norm, eps, rows.block_table[part], starts,
            rows.seq_lens[part], rows.positions, rows.tree_starts[part], rows.visible, window or 0, out,
        )  # fmt: skip

    others = [_threads().submit(attend_part, part) for part in rows.parts[1:]]
    attend_part(rows.parts[0])
    for other in others:
        other.result()
    return torch.from_numpy(out.reshape(num_tokens, -1))


def attend_stored(
    q: torch.Tensor, kv: torch.Tensor, layer: int, block_table: torch.Tensor, seq_lens: torch.Tensor
) -> torch.Tensor:
    """One rotated query a sequence over KV that is stored already: `q` [num_seqs, num_heads, head_dim] -> the same
    shape. `kv` as `attend` takes it, `block_table` [num_seqs, max_pages] and `seq_lens` [num_seqs] int64."""
    assert q.shape[0] == block_table.shape[0] == seq_lens.shape[0] and q.shape[1] % kv.shape[3] == 0, (
        q.shape,
        kv.shape,
    )
    out = np.empty(tuple(q.shape), dtype=np.float32)
    if len(out) == 0:  # the kernel looks for the longest sequence
        return torch.from_numpy(out)
    _compiled().attend_stored(q.contiguous().numpy(), kv.numpy(), layer, block_table.numpy(), seq_lens.numpy(), out)
    return torch.from_numpy(out)


def _parts(query_lens: Sequence[int], seq_lens: np.ndarray) -> tuple[slice, ...]:
    """Runs of sequences with about equal work, as many as torch has threads and work is worth."""
    num_threads = min(torch.get_num_threads(), len(seq_lens))
    if num_threads == 1:
        return (slice(0, len(seq_lens)),)
    done = np.cumsum(np.multiply(query_lens, seq_lens))
    num_parts = max(1, min(num_threads, int(done[-1]) // _THREADED_PRODUCTS))
    stops = np.searchsorted(done, done[-1] * np.arange(1, num_parts) / num_parts) + 1
    bounds = sorted({0, *stops.tolist(), len(seq_lens)})
    return tuple(slice(start, stop) for start, stop in itertools.pairwise(bounds))


@functools.cache
def _threads() -> ThreadPoolExecutor:
    """Beside the calling thread; kernels hold no lock of the interpreter."""
    return ThreadPoolExecutor(max(1, torch.get_num_threads() - 1), "attention")


def _compiled() -> ModuleType:
    kernels = _kernels()
    assert kernels is not None, "ask `compiled` first"
    return kernels
