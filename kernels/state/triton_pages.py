"""The operations of pages.py on a GPU: copy pages of KV from another pool, and compute checksums of pages.

The other pool may lie in another process or on another GPU. Only its address is needed (`PoolAddress`). A copy is as
fast as memory, because each lane has 8 loads of 16 bytes under way at once.
"""

# ruff: noqa: N803
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from ..direct_launch import launch
from .pages import _GOLDEN, _MULTIPLIER_1, _MULTIPLIER_2, PoolAddress, WordSpan

_GATHER_WORDS = 4096  # per program of `_gather_kernel`
_TILE_WORDS = 4096  # that a program of `_checksums_kernel` loads in one step
# Blocks per program of `_checksums_kernel`. With _FEW_ROWS, few pages fill more of the GPU, and a step takes a longer
# piece of each block. It is used if _ROWS would give fewer programs than _FEW_PROGRAMS.
_ROWS, _FEW_ROWS = 16, 4
_FEW_PROGRAMS = 512

_STEP, _M1, _M2 = tl.constexpr(_GOLDEN), tl.constexpr(_MULTIPLIER_1), tl.constexpr(_MULTIPLIER_2)


def gather_pages(
    peer: torch.Tensor | PoolAddress,
    pool: torch.Tensor,
    sources: torch.Tensor,
    targets: torch.Tensor,
    stream: torch.cuda.Stream | None = None,
    spans: Sequence[WordSpan] | None = None,
) -> None:
    """Copy all layers of pages `sources` of `peer` to pages `targets` of `pool`, by work on `stream` (None: the current
    one). If there are `spans`, copy only these words of the pages. Each span is one launch.

    `pool` [num_layers, num_pages, page_words] int32 is contiguous. `peer` is too. It may have another number of pages,
    and with `spans` another number of words per page. `sources` and `targets` [num_moves] int32 lie on the pool's
    device or in pinned memory. They are page numbers of the pools. No target is named twice.
    """
    num_layers, num_pages, page_words = pool.shape
    assert pool.dtype == peer.dtype == torch.int32 and pool.is_contiguous(), (pool.dtype, peer.dtype, pool.stride())
    assert sources.shape == targets.shape and sources.dtype == targets.dtype == torch.int32, (sources, targets)
    if isinstance(peer, torch.Tensor):
        assert peer.shape[0] == num_layers and peer.is_contiguous(), (peer.shape, pool.shape)
        num_peer_pages, peer_words = peer.shape[1:]
    else:
        num_peer_pages, peer_words = peer.num_pages, peer.page_words or page_words
    assert spans is not None or peer_words == page_words, (peer_words, page_words)
    others = (sources, targets, num_peer_pages, num_pages)
    for span in [WordSpan(0, 0, page_words)] if spans is None else spans:
        assert span.source + span.num_words <= peer_words and span.target + span.num_words <= page_words, span
        constants = _gather_constants(peer_words, page_words, span)
        grid = (sources.shape[0] * constants["NUM_PIECES"], num_layers, 1)
        launch(_gather_kernel, grid, (peer, pool), others, constants, pool.device, stream)


def page_checksums(
    pool: torch.Tensor,
    pages: torch.Tensor,
    block_words: int,
    sums: torch.Tensor,
    stream: torch.cuda.Stream | None = None,
) -> None:
    """Store checksums as `store_checksums_ref` does, in one launch."""
    num_layers, pool_pages, num_words = pool.shape
    page_words, layer_sums = pool.stride(1), sums.stride(1)
    assert pool.dtype == torch.int32 and pool.stride() == (pool_pages * page_words, page_words, 1), pool.stride()
    assert num_words % block_words == 0 and pages.dtype == torch.int32, (num_words, block_words, pages.dtype)
    num_blocks = num_words // block_words
    assert sums.shape == (pages.shape[0], num_layers, num_blocks) and sums.dtype == torch.int64, sums.shape
    assert sums.stride() == (num_layers * layer_sums, layer_sums, 1), sums.stride()
    assert sums.device in (pool.device, torch.device("cpu")), sums.device
    most_rows = _ROWS if pages.shape[0] >= least_of_many(num_layers, num_blocks) else _FEW_ROWS
    constants = _checksums_constants(num_blocks, block_words, most_rows, page_words, layer_sums)
    grid = (pages.shape[0] * -(-num_blocks // constants["ROWS"]), num_layers, 1)
    launch(_checksums_kernel, grid, (pool, sums), (pages, pool_pages), constants, pool.device, stream)


def least_of_many(num_layers: int, num_blocks: int) -> int:
    """Return from how many pages on `page_checksums` launches its kernel for many pages. `num_blocks` is per layer."""
    return -(-_FEW_PROGRAMS * _ROWS // (num_layers * num_blocks))


@functools.cache
def _gather_constants(peer_words: int, page_words: int, span: WordSpan) -> dict[str, Any]:
    words = min(_GATHER_WORDS, triton.next_power_of_2(span.num_words))
    pages = {"PEER_WORDS": peer_words, "PAGE_WORDS": page_words}
    copied = {"SOURCE": span.source, "TARGET": span.target, "NUM_WORDS": span.num_words}
    return {**pages, **copied, "NUM_PIECES": triton.cdiv(span.num_words, _GATHER_WORDS), "WORDS": words}


@functools.cache
def _checksums_constants(
    num_blocks: int, block_words: int, most_rows: int, page_words: int, layer_sums: int
) -> dict[str, Any]:
    rows = min(most_rows, triton.next_power_of_2(num_blocks))
    words = min(_TILE_WORDS // rows, triton.next_power_of_2(block_words))
    strides = {"PAGE_WORDS": page_words, "LAYER_SUMS": layer_sums}
    return {"NUM_BLOCKS": num_blocks, "BLOCK_WORDS": block_words, **strides, "ROWS": rows, "WORDS": words}


@triton.jit(
    do_not_specialize=("num_peer_pages", "num_pages"), do_not_specialize_on_alignment=("sources_ptr", "targets_ptr")
)
def _gather_kernel(
    peer_ptr,  # [num_layers, num_peer_pages, PEER_WORDS] int32
    pool_ptr,  # [num_layers, num_pages, PAGE_WORDS] int32, written
    sources_ptr,  # [num_moves] int32
    targets_ptr,  # [num_moves] int32
    num_peer_pages,
    num_pages,
    PEER_WORDS: tl.constexpr,
    PAGE_WORDS: tl.constexpr,
    SOURCE: tl.constexpr,  # first word of the span in a page of the peer
    TARGET: tl.constexpr,  # first word of the span in a page of the pool
    NUM_WORDS: tl.constexpr,  # of the span
    NUM_PIECES: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Grid: (num_moves * NUM_PIECES, num_layers, 1). A program copies WORDS words of a span of one page of one layer.

    If the sizes and offsets are multiples of 16 bytes, each load and store of a lane has 16 bytes."""
    move = tl.program_id(0) // NUM_PIECES
    layer = tl.program_id(1).to(tl.int64)
    words = tl.program_id(0) % NUM_PIECES * WORDS + tl.arange(0, WORDS)
    source = tl.load(sources_ptr + move)
    target = tl.load(targets_ptr + move)
    inside = words < NUM_WORDS
    copied = tl.load(peer_ptr + (layer * num_peer_pages + source) * PEER_WORDS + SOURCE + words, mask=inside)
    tl.store(pool_ptr + (layer * num_pages + target) * PAGE_WORDS + TARGET + words, copied, mask=inside)


@triton.jit
def _multipliers(index):
    """Return the multipliers m(index) of pages.py, uint64, for int32 indices of any shape."""
    state = (index.to(tl.uint64) + 1) * _STEP
    state = (state ^ (state >> 30)) * _M1
    state = (state ^ (state >> 27)) * _M2
    return (state ^ (state >> 31)) | 1


@triton.jit(do_not_specialize=("pool_pages",), do_not_specialize_on_alignment=("pages_ptr",))
def _checksums_kernel(
    pool_ptr,  # [num_layers, pool_pages, PAGE_WORDS] int32; blocks are the first NUM_BLOCKS * BLOCK_WORDS of a page
    sums_ptr,  # [num_pages, num_layers, NUM_BLOCKS] int64, layers LAYER_SUMS apart, written
    pages_ptr,  # [num_pages] int32
    pool_pages,
    NUM_BLOCKS: tl.constexpr,
    BLOCK_WORDS: tl.constexpr,
    PAGE_WORDS: tl.constexpr,
    LAYER_SUMS: tl.constexpr,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Grid: (num_pages * ceil(NUM_BLOCKS / ROWS), num_layers, 1). A program digests ROWS blocks of one page and layer.

    It computes each multiplier once for all its blocks."""
    groups: tl.constexpr = (NUM_BLOCKS + ROWS - 1) // ROWS
    place = tl.program_id(0) // groups
    layer = tl.program_id(1).to(tl.int64)
    blocks = tl.program_id(0) % groups * ROWS + tl.arange(0, ROWS)
    page = tl.load(pages_ptr + place)
    start = pool_ptr + (layer * pool_pages + page) * PAGE_WORDS
    total = tl.zeros([ROWS, WORDS], tl.uint64)
    for first in range(0, BLOCK_WORDS, WORDS):
        words = first + tl.arange(0, WORDS)
        inside = (blocks[:, None] < NUM_BLOCKS) & (words[None, :] < BLOCK_WORDS)
        data = tl.load(start + blocks[:, None] * BLOCK_WORDS + words[None, :], mask=inside, other=0)
        total += data.to(tl.uint32, bitcast=True).to(tl.uint64) * _multipliers(words + 1)[None, :]
    sums = tl.sum(total, 1) + _multipliers(tl.zeros([ROWS], tl.int32))
    row = sums_ptr + place * (tl.num_programs(1) * LAYER_SUMS) + layer * LAYER_SUMS
    tl.store(row + blocks, sums.to(tl.int64, bitcast=True), mask=blocks < NUM_BLOCKS)
