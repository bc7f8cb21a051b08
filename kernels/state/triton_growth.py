"""The growth of draft trees on a GPU: `grow_` and `choose` of trees.py.

Each operation is one launch, in which no program reads what another program writes.
"""

# Constants of a kernel are in capitals, and a launch is no call that a type checker knows.
# ruff: noqa: N803
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..sampling.triton_packed import LOWEST, id_of, pack, score_of
from .tree_types import Candidates, Frontier

_STATE_BLOCK = 1024  # elements of a state that are copied in one step
_COMPARED = 16  # candidates that all others are compared with in one step


def grow_(candidates: Candidates, frontier: Frontier, tokens: Tensor, scores: Tensor) -> Frontier:
    """Grow trees as `grow_ref_` does, and return the next frontier in new tensors. `candidates` are contiguous.

    One program per node of the next frontier finds the best children by itself."""
    (num_seqs, num_nodes), topk = frontier.scores.shape, tokens.shape[1]
    depth, width = frontier.paths.shape[2], frontier.states.shape[2]
    assert tokens.shape == scores.shape == (num_seqs * num_nodes, topk), (tokens.shape, frontier.scores.shape)
    assert frontier.visible.shape[2] == depth * topk, (frontier.visible.shape, depth)
    frontier = Frontier(*(each.contiguous() for each in frontier))
    after = Frontier(
        *(each.new_empty((num_seqs, topk)) for each in frontier[:3]),
        *(
            each.new_empty((num_seqs, topk, columns))
            for each, columns in zip(frontier[3:], (width, depth + 1, (depth + 1) * topk), strict=True)
        ),
    )
    _grow_kernel[(num_seqs, topk)](
        *candidates, *after, frontier.scores, frontier.ids, frontier.states, frontier.paths, frontier.visible,
        tokens.contiguous(), scores.contiguous(), candidates.tokens.shape[1], frontier.num_before(topk), width,
        NODES=num_nodes, TOPK=topk, DEPTH=depth,
        CHILDREN=triton.next_power_of_2(num_nodes * topk), VISIBLE=triton.next_power_of_2((depth + 1) * topk),
        BLOCK=_STATE_BLOCK, num_warps=1,
    )  # fmt: skip
    return after


def choose(candidates: Candidates, num_drafts: int) -> tuple[Tensor, Tensor]:
    """Return `choose_ref`, two new tensors [num_seqs, num_drafts] int64. `candidates` are contiguous."""
    num_seqs, num_candidates = candidates.tokens.shape
    assert num_drafts <= num_candidates, (num_drafts, num_candidates)
    tokens = candidates.tokens.new_empty((num_seqs, num_drafts))
    parents, nodes = torch.empty_like(tokens), torch.empty_like(candidates.tokens)
    _choose_kernel[(num_seqs,)](
        tokens, parents, nodes, *candidates, num_drafts, num_candidates,
        CANDIDATES=triton.next_power_of_2(num_candidates), COMPARED=_COMPARED, num_warps=4,
    )  # fmt: skip
    return tokens, parents


@triton.jit(do_not_specialize=("num_candidates", "num_before"))
def _grow_kernel(
    candidate_tokens_ptr,  # [num_seqs, num_candidates] int64; the columns of these children are written
    candidate_scores_ptr,  # [num_seqs, num_candidates] float32, likewise
    candidate_parents_ptr,  # [num_seqs, num_candidates] int64, likewise
    new_tokens_ptr,  # [num_seqs, TOPK] int64, written
    new_scores_ptr,  # [num_seqs, TOPK] float32, written
    new_ids_ptr,  # [num_seqs, TOPK] int64, written
    new_states_ptr,  # [num_seqs, TOPK, width] of the states' dtype, written
    new_paths_ptr,  # [num_seqs, TOPK, DEPTH + 1] int64, written
    new_visible_ptr,  # [num_seqs, TOPK, (DEPTH + 1) * TOPK] bool, written
    scores_ptr,  # [num_seqs, NODES] float32
    ids_ptr,  # [num_seqs, NODES] int64
    states_ptr,  # [num_seqs, NODES, width]
    paths_ptr,  # [num_seqs, NODES, DEPTH] int64
    visible_ptr,  # [num_seqs, NODES, DEPTH * TOPK] bool
    child_tokens_ptr,  # [num_seqs, NODES, TOPK] int64
    child_scores_ptr,  # [num_seqs, NODES, TOPK] float32, relative to their parents'
    num_candidates,
    num_before,  # candidates before these children
    width,
    NODES: tl.constexpr,
    TOPK: tl.constexpr,
    DEPTH: tl.constexpr,
    CHILDREN: tl.constexpr,
    VISIBLE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid: (num_seqs, TOPK). A program writes one node of the next frontier; the first also writes the candidates."""
    seq, rank = tl.program_id(0).to(tl.int64), tl.program_id(1)
    child = tl.arange(0, CHILDREN)
    is_child = child < NODES * TOPK
    at = seq * (NODES * TOPK) + child
    tokens = tl.load(child_tokens_ptr + at, mask=is_child, other=0)
    scores = tl.load(scores_ptr + seq * NODES + child // TOPK, mask=is_child, other=0.0)
    scores += tl.load(child_scores_ptr + at, mask=is_child, other=0.0)
    scores = tl.where(scores == scores, scores, -float("inf"))
    if rank == 0:
        at = seq * num_candidates + num_before + child
        parents = tl.load(ids_ptr + seq * NODES + child // TOPK, mask=is_child, other=0)
        tl.store(candidate_tokens_ptr + at, tokens, mask=is_child)
        tl.store(candidate_scores_ptr + at, scores, mask=is_child)
        tl.store(candidate_parents_ptr + at, parents, mask=is_child)

    left = tl.where(is_child, pack(scores, child), LOWEST)
    best = tl.max(left, 0)
    for _ in range(rank):
        left = tl.where(left == best, LOWEST, left)
        best = tl.max(left, 0)
    chosen = id_of(best)
    token, at = tl.sum(tl.where(child == chosen, tokens, 0), 0), seq * TOPK + rank
    tl.store(new_tokens_ptr + at, token)
    tl.store(new_scores_ptr + at, score_of(best))
    tl.store(new_ids_ptr + at, num_before + chosen)

    parent = seq * NODES + chosen // TOPK
    step = tl.arange(0, VISIBLE)
    path = tl.load(paths_ptr + parent * DEPTH + step, mask=step < DEPTH, other=0)
    tl.store(new_paths_ptr + at * (DEPTH + 1) + step, tl.where(step == DEPTH, token, path), mask=step <= DEPTH)
    visible = tl.load(visible_ptr + parent * (DEPTH * TOPK) + step, mask=step < DEPTH * TOPK, other=0) != 0
    visible = visible | (step == DEPTH * TOPK + rank)
    tl.store(new_visible_ptr + at * ((DEPTH + 1) * TOPK) + step, visible, mask=step < (DEPTH + 1) * TOPK)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        state = tl.load(states_ptr + parent * width + column, mask=column < width)
        tl.store(new_states_ptr + at * width + column, state, mask=column < width)


@triton.jit(do_not_specialize=("num_drafts", "num_candidates"))
def _choose_kernel(
    tokens_ptr,  # [num_seqs, num_drafts] int64, written
    parents_ptr,  # [num_seqs, num_drafts] int64, written
    nodes_ptr,  # [num_seqs, num_candidates] int64, scratch: the number of candidates chosen up to each
    candidate_tokens_ptr,  # [num_seqs, num_candidates] int64
    candidate_scores_ptr,  # [num_seqs, num_candidates] float32
    candidate_parents_ptr,  # [num_seqs, num_candidates] int64
    num_drafts,
    num_candidates,
    CANDIDATES: tl.constexpr,
    COMPARED: tl.constexpr,
):
    """Grid: (num_seqs,). A candidate's rank is the number of better ones; those of rank below num_drafts are chosen.

    A chosen candidate becomes the node whose number is the count of candidates chosen up to it."""
    seq = tl.program_id(0).to(tl.int64)
    candidate_scores_ptr += seq * num_candidates
    candidate = tl.arange(0, CANDIDATES)
    is_any = candidate < num_candidates
    own = pack(tl.load(candidate_scores_ptr + candidate, mask=is_any, other=0.0), candidate)
    rank = tl.zeros([CANDIDATES], tl.int32)
    for start in range(0, num_candidates, COMPARED):
        other = start + tl.arange(0, COMPARED)
        others = pack(tl.load(candidate_scores_ptr + other, mask=other < num_candidates, other=0.0), other)
        is_better = (others[None, :] > own[:, None]) & (other < num_candidates)[None, :]
        rank += tl.sum(is_better.to(tl.int32), 1)
    is_chosen = is_any & (rank < num_drafts)
    node = tl.cumsum(is_chosen.to(tl.int32), 0)
    at = seq * num_candidates + candidate
    tl.store(nodes_ptr + at, node.to(tl.int64), mask=is_any)
    tl.debug_barrier()  # other threads have the parents' nodes
    tokens = tl.load(candidate_tokens_ptr + at, mask=is_chosen, other=0)
    parent = tl.load(candidate_parents_ptr + at, mask=is_chosen, other=-1)
    parent_node = tl.load(nodes_ptr + seq * num_candidates + parent, mask=is_chosen & (parent >= 0), other=0)
    at = seq * num_drafts + node - 1
    tl.store(tokens_ptr + at, tokens, mask=is_chosen)
    tl.store(parents_ptr + at, parent_node, mask=is_chosen)
