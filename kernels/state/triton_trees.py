"""The operations of trees.py on a GPU, but for growth (triton_growth.py).

Each operation is one launch, in which no program reads what another program writes.
"""

# Constants of a kernel are in capitals, and a launch is no call that a type checker knows.
# ruff: noqa: N803
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .fp8_pages import block_size, has_close_blocks, parts_of
from .tree_types import Ancestry


def ancestry(parents: Tensor, num_steps: int) -> Ancestry:
    """Return `ancestry_ref` of `parents` [num_seqs, num_drafts] int64, in new tensors."""
    num_seqs, num_drafts = parents.shape
    parents = parents.contiguous()
    num_nodes = num_drafts + 1
    visible = torch.empty((num_seqs, num_nodes, num_nodes), dtype=torch.bool, device=parents.device)
    depths = torch.empty((num_seqs, num_nodes), dtype=torch.int64, device=parents.device)
    _ancestry_kernel[(num_seqs, num_nodes)](
        visible, depths, parents, num_drafts, STEPS=num_steps, NODES=triton.next_power_of_2(num_nodes), num_warps=1
    )
    return Ancestry(visible, depths)


def walk_chain(tokens: Tensor, targets: Tensor, limits: Tensor) -> Tensor:
    """Return `walk_chain_ref`, a new tensor [num_seqs]. `tokens` has contiguous rows, `limits` any stride."""
    num_seqs, num_drafts = tokens.shape
    assert targets.shape == (num_seqs, num_drafts + 1) and limits.shape == (num_seqs,), (targets.shape, limits.shape)
    assert tokens.stride(1) == 1 or num_drafts == 1, tokens.stride()
    num_accepted = torch.empty(num_seqs, dtype=torch.int64, device=tokens.device)
    _chain_kernel[(num_seqs,)](
        num_accepted, tokens, targets.contiguous(), limits, tokens.stride(0), limits.stride(0), num_drafts,
        DRAFTS=triton.next_power_of_2(num_drafts), num_warps=1,
    )  # fmt: skip
    return num_accepted


def walk_tree(
    tokens: Tensor, parents: Tensor, targets: Tensor, limits: Tensor, num_steps: int
) -> tuple[Tensor, Tensor]:
    """Return `walk_tree_ref`, new tensors [num_seqs, num_steps + 1] and [num_seqs]. `limits` may have any stride."""
    num_seqs, num_drafts = tokens.shape
    assert parents.shape == tokens.shape and targets.shape == (num_seqs, num_drafts + 1), (tokens.shape, targets.shape)
    tokens, parents, targets = tokens.contiguous(), parents.contiguous(), targets.contiguous()
    nodes = torch.empty((num_seqs, num_steps + 1), dtype=torch.int64, device=tokens.device)
    num_accepted = torch.empty(num_seqs, dtype=torch.int64, device=tokens.device)
    _walk_kernel[(num_seqs,)](
        nodes, num_accepted, tokens, parents, targets, limits, limits.stride(0), num_drafts,
        STEPS=num_steps, DRAFTS=triton.next_power_of_2(num_drafts), num_warps=1,
    )  # fmt: skip
    return nodes, num_accepted


def move_slots_(kv: Tensor, block_table: Tensor, sources: Tensor, targets: Tensor) -> None:
    """Copy slots as `move_slots_ref_` does. `kv` and the rows of `block_table` are contiguous, or `kv` is in e4m3. Its
    scales take a launch of their own."""
    num_layers, num_pages, num_planes, num_kv_heads, page_size, _ = kv.shape
    num_seqs, num_moves = sources.shape
    assert block_table.stride(1) == 1 and targets.shape == sources.shape, sources.shape
    assert has_close_blocks(kv.flatten(0, 1)), kv.stride()
    if not num_moves:
        return
    for part in parts_of(kv):
        block, width = block_size(kv) * kv.itemsize // part.itemsize, part.shape[5]
        _move_kernel[(num_seqs, num_layers, num_planes * num_kv_heads)](
            part, block_table, sources.contiguous(), targets.contiguous(), block_table.stride(0), num_pages, num_moves,
            PAGE_SIZE=page_size, HEAD_DIM=width, BLOCK=block, MOVES=triton.next_power_of_2(num_moves),
            BLOCK_D=triton.next_power_of_2(width), num_warps=1,
        )  # fmt: skip


@triton.jit(do_not_specialize=("num_drafts",))
def _ancestry_kernel(
    visible_ptr,  # [num_seqs, num_drafts + 1, num_drafts + 1] bool, written
    depths_ptr,  # [num_seqs, num_drafts + 1] int64, written
    parents_ptr,  # [num_seqs, num_drafts] int64
    num_drafts,
    STEPS: tl.constexpr,
    NODES: tl.constexpr,
):
    """Grid: (num_seqs, num_drafts + 1). A program climbs from one node to the root."""
    seq, node = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    at = seq * (num_drafts + 1) + node
    other = tl.arange(0, NODES)
    is_visible, depth = other == node, node * 0
    for _ in tl.static_range(STEPS):
        up = tl.load(parents_ptr + seq * num_drafts + node - 1, mask=node > 0, other=0)
        depth += (node > 0).to(tl.int64)
        node = up
        is_visible = is_visible | (other == node)
    tl.store(depths_ptr + at, depth)
    tl.store(visible_ptr + at * (num_drafts + 1) + other, is_visible, mask=other <= num_drafts)


@triton.jit(do_not_specialize=("tokens_stride", "limits_stride", "num_drafts"))
def _chain_kernel(
    num_accepted_ptr,  # [num_seqs] int64, written
    tokens_ptr,  # [num_seqs, num_drafts] int64, rows tokens_stride apart
    targets_ptr,  # [num_seqs, num_drafts + 1] int64
    limits_ptr,  # [num_seqs] int64, limits_stride apart
    tokens_stride,
    limits_stride,
    num_drafts,
    DRAFTS: tl.constexpr,
):
    """Grid: (num_seqs,)."""
    seq = tl.program_id(0).to(tl.int64)
    draft = tl.arange(0, DRAFTS)
    is_draft = draft < num_drafts
    tokens = tl.load(tokens_ptr + seq * tokens_stride + draft, mask=is_draft, other=0)
    targets = tl.load(targets_ptr + seq * (num_drafts + 1) + draft, mask=is_draft, other=0)
    num_equal = tl.min(tl.where(is_draft & (tokens == targets), num_drafts, draft), 0)
    num_equal = tl.minimum(num_equal, num_drafts).to(tl.int64)
    tl.store(num_accepted_ptr + seq, tl.minimum(num_equal, tl.load(limits_ptr + seq * limits_stride)))


@triton.jit(do_not_specialize=("limits_stride", "num_drafts"))
def _walk_kernel(
    nodes_ptr,  # [num_seqs, STEPS + 1] int64, written
    num_accepted_ptr,  # [num_seqs] int64, written
    tokens_ptr,  # [num_seqs, num_drafts] int64
    parents_ptr,  # [num_seqs, num_drafts] int64
    targets_ptr,  # [num_seqs, num_drafts + 1] int64
    limits_ptr,  # [num_seqs] int64, limits_stride apart
    limits_stride,
    num_drafts,
    STEPS: tl.constexpr,
    DRAFTS: tl.constexpr,
):
    """Grid: (num_seqs,). A program walks down one tree."""
    seq = tl.program_id(0).to(tl.int64)
    draft = tl.arange(0, DRAFTS)
    is_draft = draft < num_drafts
    tokens = tl.load(tokens_ptr + seq * num_drafts + draft, mask=is_draft, other=-1)
    parents = tl.load(parents_ptr + seq * num_drafts + draft, mask=is_draft, other=-1)
    limit = tl.load(limits_ptr + seq * limits_stride)
    node, count = seq * 0, seq * 0
    tl.store(nodes_ptr + seq * (STEPS + 1), node)
    is_on = limit > 0
    for depth in tl.static_range(1, STEPS + 1):
        target = tl.load(targets_ptr + seq * (num_drafts + 1) + node)
        child = tl.min(tl.where((tokens == target) & (parents == node) & is_draft, draft, DRAFTS), 0)
        is_on = is_on & (child < DRAFTS) & (limit >= depth)
        node = tl.where(is_on, child.to(tl.int64) + 1, node)
        count += is_on.to(tl.int64)
        tl.store(
            nodes_ptr + seq * (STEPS + 1) + depth, tl.where(is_on, node, tl.minimum(num_drafts, depth).to(tl.int64))
        )
    tl.store(num_accepted_ptr + seq, count)


@triton.jit(do_not_specialize=("table_stride", "num_pages", "num_moves"))
def _move_kernel(
    kv_ptr,  # [num_layers, num_pages, num_planes * num_kv_heads, PAGE_SIZE, HEAD_DIM], blocks BLOCK apart, written
    table_ptr,  # [num_seqs, max_pages] int64, rows table_stride apart
    sources_ptr,  # [num_seqs, num_moves] int64
    targets_ptr,  # [num_seqs, num_moves] int64
    table_stride,
    num_pages,
    num_moves,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    MOVES: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Grid: (num_seqs, num_layers, num_planes * num_kv_heads). A program loads all moved rows of one head, then stores
    them."""
    seq, layer, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2)
    move, dims = tl.arange(0, MOVES), tl.arange(0, BLOCK_D)
    is_move = move < num_moves
    source = tl.load(sources_ptr + seq * num_moves + move, mask=is_move, other=0)
    target = tl.load(targets_ptr + seq * num_moves + move, mask=is_move, other=0)
    is_move = is_move & (source != target)
    page = tl.load(table_ptr + seq * table_stride + source // PAGE_SIZE, mask=is_move, other=0)
    new_page = tl.load(table_ptr + seq * table_stride + target // PAGE_SIZE, mask=is_move, other=0)
    heads = tl.num_programs(2)
    base = kv_ptr + (layer * num_pages * heads + head) * BLOCK
    is_in = is_move[:, None] & (dims < HEAD_DIM)[None, :]
    at = page * heads * BLOCK + source % PAGE_SIZE * HEAD_DIM
    moved = tl.load(base + at[:, None] + dims[None, :], mask=is_in)
    tl.debug_barrier()  # a slot may be source of one move and target of another
    at = new_page * heads * BLOCK + target % PAGE_SIZE * HEAD_DIM
    tl.store(base + at[:, None] + dims[None, :], moved, mask=is_in)
