"""How kernels of one row divide their columns. Their products: test_triton_fp8_vector.py, test_triton_expert_row.py."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from baton.kernels.triton_row_products import chunk_of


@pytest.mark.parametrize(
    ("in_size", "item_size", "chunk"),
    [(2048, 2, 256), (1408, 2, 128), (2048, 1, 512), (768, 1, 256), (2880, 2, 128), (72, 2, 128), (40, 4, 64)],
)
def test_chunks_are_whole_if_they_can_be(in_size: int, item_size: int, chunk: int) -> None:
    assert chunk_of(in_size, item_size) == chunk
