"""`place_experts` of experts.py on a GPU.

A program gives the pairs of one expert their places. Many pairs are divided into segments, and a program has those of
its segment. The first place of an expert depends on the number of pairs of all experts before it. So every program
counts the pairs of all experts, or a kernel of its own counts those of each segment.
"""

# Constants of a kernel are in capitals, and a launch is no call that a type checker knows.
# ruff: noqa: N803
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .. import gpu
from .experts import Places, block_size, most_blocks

MAX_PAIRS = 1 << 24
MAX_EXPERTS = 1024
MAX_UNDIVIDED = 2048  # pairs that are one segment


def serves(chosen: Tensor, num_experts: int, *_: object, **__: object) -> bool:
    """Return whether `place_experts` takes these pairs."""
    return 0 < chosen.numel() <= MAX_PAIRS and chosen.is_contiguous() and num_experts <= MAX_EXPERTS


def place_experts(chosen: Tensor, num_experts: int, *, is_packed: bool = False) -> Places:
    """Return `place_experts_ref`."""
    num_pairs = chosen.numel()
    block = block_size(num_pairs, num_experts, is_packed=is_packed)
    num_blocks = most_blocks(num_pairs, num_experts, block)
    pairs = torch.empty(num_blocks * block, dtype=torch.int32, device=chosen.device)
    experts = torch.empty(num_blocks, dtype=torch.int32, device=chosen.device)
    num_segments, chunk, num_warps = segments_of(num_pairs)
    segment = triton.cdiv(num_pairs, num_segments)
    sizes = {"EXPERTS": max(32, triton.next_power_of_2(num_experts)), "CHUNK": chunk}
    counts = None
    if num_segments > 1:
        counts = torch.empty((num_segments, num_experts), dtype=torch.int32, device=chosen.device)
        _count_kernel[(num_segments,)](
            chosen, counts, num_pairs, num_experts, segment, **sizes, num_warps=num_warps
        )  # fmt: skip
    dependent = gpu.dependent_launch(len(chosen))
    _place_kernel[(num_experts, num_segments)](
        chosen, counts, pairs, experts, num_pairs, num_experts, num_blocks, segment, BLOCK=block,
        SEGMENTS=num_segments, **sizes, DEPENDENT=dependent, num_warps=num_warps, launch_pdl=dependent,
    )  # fmt: skip
    return Places(chosen, num_experts, pairs, experts)


def segments_of(num_pairs: int) -> tuple[int, int, int]:
    """Return the number of segments, how many pairs a program looks at together, and its number of warps."""
    if num_pairs <= MAX_UNDIVIDED:
        return 1, (512 if num_pairs <= 512 else 1024), 4
    return (8 if num_pairs <= 16384 else 16), 1024, 4


@triton.jit(do_not_specialize=["num_pairs", "num_experts", "segment"])
def _count_kernel(
    chosen_ptr,  # [num_pairs] int64
    counts_ptr,  # [num_segments, num_experts] int32, written
    num_pairs,
    num_experts,
    segment,  # pairs of a segment
    EXPERTS: tl.constexpr,  # at least num_experts
    CHUNK: tl.constexpr,
):
    """Grid: (num_segments,)."""
    expert = tl.arange(0, EXPERTS)
    first = tl.program_id(0) * segment
    counts = _counts_of(chosen_ptr, first, tl.minimum(first + segment, num_pairs), EXPERTS, CHUNK)
    tl.store(counts_ptr + tl.program_id(0) * num_experts + expert, counts, mask=expert < num_experts)


@triton.jit(do_not_specialize=["num_pairs", "num_experts", "num_blocks", "segment"])
def _place_kernel(
    chosen_ptr,  # [num_pairs] int64
    counts_ptr,  # [SEGMENTS, num_experts] int32; None: there is one segment
    pairs_ptr,  # [num_blocks * BLOCK] int32, written
    experts_ptr,  # [num_blocks] int32, written
    num_pairs,
    num_experts,
    num_blocks,
    segment,  # pairs of a segment
    EXPERTS: tl.constexpr,  # at least num_experts
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    SEGMENTS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid: (num_experts, SEGMENTS)."""
    own = tl.program_id(0)
    each, expert, within = tl.arange(0, CHUNK), tl.arange(0, EXPERTS), tl.arange(0, BLOCK)
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    if counts_ptr is None:
        counts = _counts_of(chosen_ptr, 0, num_pairs, EXPERTS, CHUNK)
        num_before = 0  # pairs of the same expert in segments before
    else:
        segments = tl.arange(0, SEGMENTS)[:, None]
        at = counts_ptr + segments * num_experts + expert[None, :]
        of_segments = tl.load(at, mask=(expert < num_experts)[None, :], other=0)
        counts = tl.sum(of_segments, 0)
        is_before = (segments < tl.program_id(1)) & (expert == own)[None, :]
        num_before = tl.sum(tl.sum(tl.where(is_before, of_segments, 0), 0), 0)
    blocks = (counts + BLOCK - 1) // BLOCK
    first, num_own = tl.sum(tl.where(expert < own, blocks, 0), 0), tl.sum(tl.where(expert == own, blocks, 0), 0)
    if num_own > 0:
        place = first * BLOCK + num_before
        start = tl.program_id(1) * segment
        end = tl.minimum(start + segment, num_pairs)
        for behind in range(start, end, CHUNK):
            pair = behind + each
            chosen = tl.load(chosen_ptr + pair, mask=pair < end, other=-1).to(tl.int32)
            is_own = (chosen == own).to(tl.int32)
            tl.store(pairs_ptr + place + tl.cumsum(is_own, 0) - 1, pair, mask=is_own != 0)
            place += tl.sum(is_own, 0)
    if tl.program_id(1) == 0:
        first_empty = first * BLOCK + tl.sum(tl.where(expert == own, counts, 0), 0)
        end = first + num_own
        tl.store(pairs_ptr + first_empty + within, -1, mask=first_empty + within < end * BLOCK)
        for behind in range(first, end, EXPERTS):
            tl.store(experts_ptr + behind + expert, own, mask=behind + expert < end)
        for block in range(tl.sum(blocks, 0) + own, num_blocks, num_experts):  # all experts share the empty blocks
            tl.store(experts_ptr + block, num_experts)
            tl.store(pairs_ptr + block * BLOCK + within, -1)


@triton.jit
def _counts_of(chosen_ptr, start, end, EXPERTS: tl.constexpr, CHUNK: tl.constexpr):
    """Return how many of the pairs from `start` to `end` chose each expert, [EXPERTS] int32."""
    each = tl.arange(0, CHUNK)
    counts = tl.zeros((EXPERTS,), dtype=tl.int32)
    for behind in range(start, end, CHUNK):
        is_pair = behind + each < end
        chosen = tl.load(chosen_ptr + behind + each, mask=is_pair, other=0).to(tl.int32)
        counts += tl.histogram(chosen, EXPERTS, mask=is_pair)
    return counts
