"""Which heads travel between nodes with unlike numbers of ranks: each needed head once, from a rank that holds it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.metadata.errors import ConfigError
from baton.metadata.handoff.ranks.shards import (
    BlockSource,
    ByteSpan,
    PagePart,
    block_sources,
    blocks_here,
    digest_columns,
    page_parts,
)
from baton.metadata.handoff.schema.kv_layout import KvLayout, Shard, pool_of
from baton.metadata.wire.node_info import KvPlane

sizes = st.integers(1, 4)
planes = st.lists(st.integers(1, 8), min_size=1, max_size=3)


def divides(num_heads: Sequence[int], size: int) -> bool:
    return all(heads % size == 0 or size % heads == 0 for heads in num_heads)


def blocks_of(num_heads: Sequence[int], shard: Shard) -> list[tuple[int, int]]:
    """Return (plane, head) of each block of a rank's page."""
    return [(plane, head) for plane, heads in enumerate(num_heads) for head in shard.heads(heads)]


@given(num_heads=planes, source_size=sizes, size=sizes)
def test_each_needed_head_is_copied_once_from_a_rank_that_holds_it(
    num_heads: list[int], source_size: int, size: int
) -> None:
    for rank in range(size):
        ours = Shard(rank, size)
        if not divides(num_heads, source_size) or not divides(num_heads, size):
            with pytest.raises(ConfigError, match=r"\d KV heads cannot be split over \d ranks"):
                block_sources(num_heads, source_size, ours)
            continue
        mine = blocks_of(num_heads, ours)
        copied: list[int] = []
        for source in block_sources(num_heads, source_size, ours):
            theirs = blocks_of(num_heads, Shard(source.rank, source_size))
            assert [theirs[there] for there in source.there] == [mine[here] for here in source.here]
            copied += source.here
        assert sorted(copied) == list(range(len(mine)))


@given(num_heads=planes, source_size=sizes, size=sizes)
def test_a_head_of_several_ranks_comes_from_the_first(num_heads: list[int], source_size: int, size: int) -> None:
    if not divides(num_heads, source_size) or not divides(num_heads, size):
        return
    for source in (each for rank in range(size) for each in block_sources(num_heads, source_size, Shard(rank, size))):
        theirs = blocks_of(num_heads, Shard(source.rank, source_size))
        for there in source.there:
            plane, head = theirs[there]
            assert all(head not in Shard(lower, source_size).heads(num_heads[plane]) for lower in range(source.rank))


@given(num_heads=planes, size=sizes)
def test_nodes_of_one_size_copy_from_rank_to_rank_alone(num_heads: list[int], size: int) -> None:
    if not divides(num_heads, size) or any(heads < size for heads in num_heads):
        return
    for rank in range(size):
        num_blocks = len(blocks_of(num_heads, Shard(rank, size)))
        every = tuple(range(num_blocks))
        assert block_sources(num_heads, size, Shard(rank, size)) == (BlockSource(rank, every, every),)


def test_two_ranks_and_three_share_a_page_of_six_heads() -> None:
    assert block_sources([6, 6], 2, Shard(1, 3)) == (
        BlockSource(0, (2, 5), (0, 2)),
        BlockSource(1, (0, 3), (1, 3)),
    )


def layout_of(num_heads: Sequence[int], page_size: int, extra_bytes: int = 0) -> KvLayout:
    """Return a layout whose planes have unlike widths."""
    kinds = [
        KvPlane(f"p{place}", num_heads=heads, head_dim=3 + 2 * place, dtype="bfloat16", extra_bytes=extra_bytes)
        for place, heads in enumerate(num_heads)
    ]
    return KvLayout.of(pool_of(2, "bfloat16", kinds), page_size)


@given(
    num_heads=planes, draft=planes, source_size=sizes, size=sizes, page_size=st.integers(1, 5), extra=st.integers(0, 3)
)
def test_the_bytes_and_digests_of_all_parts_make_the_ranks_page(
    num_heads: list[int], draft: list[int], source_size: int, size: int, page_size: int, extra: int
) -> None:
    layouts = [layout_of(num_heads, page_size, extra), layout_of(draft, page_size)]
    if not divides([*num_heads, *draft], source_size) or not divides([*num_heads, *draft], size):
        return
    whole = [np.arange(layout.page_layer_bytes) for layout in layouts]  # of one layer, a number per byte
    for rank in range(size):
        ours = Shard(rank, size)
        own = [layout.part_of(ours) for layout in layouts]
        pages = [np.full(layout.page_layer_bytes, -1) for layout in own]
        brought: list[int] = []
        for source, part in page_parts(layouts, source_size, ours).items():
            assert part.page_bytes == sum(2 * span.num_bytes for pool in part.pools for span in pool.spans)
            brought += blocks_here(part, own).tolist()
            for page, layout, numbers, pool in zip(pages, layouts, whole, part.pools, strict=True):
                theirs = slice_of(numbers, layout, Shard(source, source_size))
                assert pool.layout.page_layer_bytes == len(theirs)
                for start, target, num_bytes in pool.spans:
                    assert (page[target : target + num_bytes] == -1).all()
                    page[target : target + num_bytes] = theirs[start : start + num_bytes]
        for page, layout, numbers in zip(pages, layouts, whole, strict=True):
            assert page.tolist() == slice_of(numbers, layout, ours).tolist()
        columns = digest_columns(layouts, ours)
        assert sorted(brought) == list(range(len(columns))) and len(set(columns.tolist())) == len(columns)


def slice_of(numbers: np.ndarray, layout: KvLayout, shard: Shard) -> np.ndarray:
    """Return the bytes of a shard, of the bytes of a page in one layer."""
    return np.concatenate([numbers[part.start : part.stop] for part in layout.bytes_of(shard)])


def test_digests_are_found_by_pool_layer_and_head() -> None:
    layouts = [layout_of([4, 4], 2), layout_of([2], 2)]
    assert digest_columns(layouts, Shard(0, 1)).tolist() == list(range(2 * 8 + 2 * 2))
    assert digest_columns(layouts, Shard(1, 2)).tolist() == [2, 3, 6, 7, 10, 11, 14, 15, 17, 19]
    assert digest_columns(layouts, Shard(3, 4)).tolist() == [3, 7, 11, 15, 17, 19]


def test_neighbouring_blocks_are_one_span() -> None:
    layout = layout_of([4, 4], 1)  # blocks of 6 and of 10 bytes
    assert PagePart.whole([layout]).pools[0].spans == (ByteSpan(0, 0, layout.page_layer_bytes),)
    parts = page_parts([layout], 2, Shard(0, 1))
    assert parts[0].pools[0].spans == (ByteSpan(0, 0, 12), ByteSpan(12, 24, 20))
    assert parts[1].pools[0].spans == (ByteSpan(0, 12, 12), ByteSpan(12, 44, 20))
    assert page_parts([layout], 2, Shard(1, 2))[1].pools[0].spans == (ByteSpan(0, 0, 32),)
