"""One checksum per layer, K or V, and KV head, in wire order; the comparison names the wrong blocks."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash
from handoff_nodes import DRAFT_SCHEMA, SCHEMA, make_memory

from baton.metadata.handoff.pages import first_difference, page_checksums, row_checksum
from baton.metadata.handoff.schema.schema import blocks_per_page, pools


@pytest.mark.parametrize("schema", [SCHEMA, DRAFT_SCHEMA], ids=["target", "target+draft"])
def test_every_block_has_its_own_checksum_in_wire_order(schema):
    memory = make_memory(schema, 4, seed=3)
    expected = []
    for pool, layout in zip(memory, pools(schema).values(), strict=True):
        size = schema.page_size * layout.head_dim * {"float32": 4, "bfloat16": 2}[layout.dtype]
        for layer in range(layout.num_layers):
            blocks = pool.pages[layer, 2].reshape(2, layout.num_kv_heads, size)
            expected += [xxhash.xxh3_64_intdigest(blocks[kv, h]) for kv in (0, 1) for h in range(layout.num_kv_heads)]
    checksums = page_checksums(memory, 2)
    assert np.frombuffer(checksums, "<u8").tolist() == expected
    assert len(expected) == blocks_per_page(schema)


def test_any_flipped_bit_is_found_in_its_block():
    memory = make_memory(DRAFT_SCHEMA, 3, seed=3)
    before = page_checksums(memory, 1)
    assert first_difference(page_checksums(memory, 1), before) is None
    block = 0
    for pool in memory:
        [run] = pool.layout.runs
        for layer in range(pool.layout.num_layers):
            for start in range(0, run.end, run.block_bytes):
                for at in (start, start + run.block_bytes - 1):
                    pool.pages[layer, 1, at] ^= 1
                    assert first_difference(page_checksums(memory, 1), before) == block
                    pool.pages[layer, 1, at] ^= 1
                block += 1
    assert page_checksums(memory, 2) != before


def test_lengths_that_differ_are_a_difference():
    assert first_difference(b"12345678", b"") == 0


def test_a_rows_checksum_fits_a_count():
    assert 0 <= row_checksum(b"row") <= 2**62
    assert row_checksum(b"row") != row_checksum(b"rov")
