"""`place_experts` of kernels/experts.py on a GPU, by one program per expert."""

# Constants of a kernel are in capitals, and a launch is no call that a type checker knows.
# ruff: noqa: N803
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from . import gpu
from .experts import Places, block_size, most_blocks

MAX_PAIRS = 1 << 24
MAX_EXPERTS = 1024


def serves(chosen: Tensor, num_experts: int) -> bool:
    """Return whether `place_experts` takes these pairs."""
    return 0 < chosen.numel() <= MAX_PAIRS and chosen.is_contiguous() and num_experts <= MAX_EXPERTS


def place_experts(chosen: Tensor, num_experts: int) -> Places:
    """Return `place_experts_ref`."""
    num_pairs = chosen.numel()
    block = block_size(num_pairs, num_experts)
    num_blocks = most_blocks(num_pairs, num_experts, block)
    pairs = torch.empty(num_blocks * block, dtype=torch.int32, device=chosen.device)
    experts = torch.empty(num_blocks, dtype=torch.int32, device=chosen.device)
    dependent, (chunk, num_warps) = gpu.dependent_launch(len(chosen)), chunk_of(num_pairs)
    _place_kernel[(num_experts,)](
        chosen, pairs, experts, num_pairs, num_experts, num_blocks,
        EXPERTS=max(32, triton.next_power_of_2(num_experts)), BLOCK=block, CHUNK=chunk, DEPENDENT=dependent,
        num_warps=num_warps, launch_pdl=dependent,
    )  # fmt: skip
    return Places(chosen, num_experts, pairs, experts)


def chunk_of(num_pairs: int) -> tuple[int, int]:
    """Return how many pairs a program looks at together, and its number of warps."""
    if num_pairs <= 256:
        return 256, 1
    return (1024, 4) if num_pairs <= 4096 else (4096, 8)


@triton.jit(do_not_specialize=["num_pairs", "num_experts", "num_blocks"])
def _place_kernel(
    chosen_ptr,  # [num_pairs] int64
    pairs_ptr,  # [num_blocks * BLOCK] int32, written
    experts_ptr,  # [num_blocks] int32, written
    num_pairs,
    num_experts,
    num_blocks,
    EXPERTS: tl.constexpr,  # at least num_experts
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid: (num_experts,). A program counts the pairs of all experts, and gives those of its own their places."""
    own = tl.program_id(0)
    each, expert, within = tl.arange(0, CHUNK), tl.arange(0, EXPERTS), tl.arange(0, BLOCK)
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    counts = tl.zeros((EXPERTS,), dtype=tl.int32)
    for start in range(0, num_pairs, CHUNK):
        is_pair = start + each < num_pairs
        chosen = tl.load(chosen_ptr + start + each, mask=is_pair, other=0).to(tl.int32)
        counts += tl.histogram(chosen, EXPERTS, mask=is_pair)
    blocks = (counts + BLOCK - 1) // BLOCK
    first, num_used = tl.sum(tl.where(expert < own, blocks, 0), 0), tl.sum(blocks, 0)
    num_own = tl.sum(tl.where(expert == own, blocks, 0), 0)
    if num_own > 0:
        place = first * BLOCK
        for start in range(0, num_pairs, CHUNK):
            pair = start + each
            chosen = tl.load(chosen_ptr + pair, mask=pair < num_pairs, other=-1).to(tl.int32)
            is_own = (chosen == own).to(tl.int32)
            tl.store(pairs_ptr + place + tl.cumsum(is_own, 0) - 1, pair, mask=is_own != 0)
            place += tl.sum(is_own, 0)
        end = first + num_own
        tl.store(pairs_ptr + place + within, -1, mask=place + within < end * BLOCK)
        for start in range(first, end, EXPERTS):
            tl.store(experts_ptr + start + expert, own, mask=start + expert < end)
    for block in range(num_used + own, num_blocks, num_experts):  # all programs share the empty blocks
        tl.store(experts_ptr + block, num_experts)
        tl.store(pairs_ptr + block * BLOCK + within, -1)
