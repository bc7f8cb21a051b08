"""A tree's path and what moves along it: which drafts the target accepts, and their KV to where a sequence goes on."""

from __future__ import annotations

import torch
from torch import Tensor

from . import gpu


def walk_tree_ref(
    tokens: Tensor, parents: Tensor, targets: Tensor, limits: Tensor, num_steps: int
) -> tuple[Tensor, Tensor]:
    """The specification. From the root to the child that the target samples, the first of several, while there is one
    and no more than `limits` [num_seqs]: `tokens`, `parents` [num_seqs, N] of nodes 1 .. N, `targets` [num_seqs, N + 1]
    -> nodes [num_seqs, num_steps + 1], the root first, the last one repeated; and how many are below the root,
    [num_seqs]. All int64."""
    node = torch.zeros_like(limits).unsqueeze(1)
    count, nodes = torch.zeros_like(limits), [node]
    is_on = limits > 0
    for depth in range(1, num_steps + 1):
        matches = (tokens == targets.gather(1, node)) & (parents == node)
        is_on = is_on & matches.any(1) & (limits >= depth)
        node = torch.where(is_on.unsqueeze(1), matches.long().argmax(1, keepdim=True) + 1, node)
        count = count + is_on
        nodes.append(node)
    return torch.cat(nodes, dim=1), count


def walk_tree(
    tokens: Tensor, parents: Tensor, targets: Tensor, limits: Tensor, num_steps: int
) -> tuple[Tensor, Tensor]:
    """`walk_tree_ref`, in one launch on CUDA."""
    if gpu.compiled(tokens):
        from . import triton_trees

        return triton_trees.walk_tree(tokens, parents, targets, limits, num_steps)
    return walk_tree_ref(tokens, parents, targets, limits, num_steps)


def move_slots_ref_(kv: Tensor, block_table: Tensor, sources: Tensor, targets: Tensor) -> None:
    """The specification. In every layer, KV of slots `sources` into slots `targets`, each [num_seqs, n] int64, by
    sequence; all sources are read before any target is written, so the two may overlap, and targets are different.

    `kv` [num_layers, num_pages, 2, num_kv_heads, page_size, head_dim], `block_table` [num_seqs, num_columns] int64."""
    page_size = kv.shape[4]
    pages, rows = block_table.gather(1, sources // page_size), sources % page_size
    new_pages, new_rows = block_table.gather(1, targets // page_size), targets % page_size
    for layer in kv:
        layer[new_pages, :, :, new_rows] = layer[pages, :, :, rows]


def move_slots_(kv: Tensor, block_table: Tensor, sources: Tensor, targets: Tensor) -> None:
    """`move_slots_ref_`, in one launch on CUDA."""
    if gpu.compiled(kv):
        from . import triton_trees

        triton_trees.move_slots_(kv, block_table, sources, targets)
    else:
        move_slots_ref_(kv, block_table, sources, targets)
