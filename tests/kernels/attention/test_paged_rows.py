"""The specification of attention to paged rows, and the division of sequences among threads."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from baton.kernels.attention.attention import Tree, paged_attention_ref
from baton.kernels.attention.paged_rows import PagedRows, attend_ref, attend_stored_ref


def rows_of(query_lens: list[int], seq_lens: list[int], tree: Tree | None = None) -> PagedRows:
    num_tokens = sum(query_lens)
    rotary = torch.ones(num_tokens, 1, 4), torch.zeros(num_tokens, 1, 4)
    spans = zip(query_lens, seq_lens, strict=True)
    positions = torch.cat([torch.arange(seq_len - query_len, seq_len) for query_len, seq_len in spans])
    table = torch.arange(1, 1 + 4 * len(seq_lens)).view(len(seq_lens), 4)
    return PagedRows.build(rotary, table, query_lens, torch.tensor(seq_lens), positions, tree)


def test_new_tokens_are_stored_and_attended() -> None:
    """Without rotation: keys and values come from qkv as they are, and a page that begins is cleared."""
    kv = torch.full((1, 12, 2, 1, 3, 4), 7.0)
    qkv = torch.randn(3, 4 * 4)
    rows = rows_of([2, 1], [5, 4])
    out = attend_ref(qkv.clone(), kv.numpy(), 0, rows, None)
    heads = qkv.view(3, 4, 4)
    page, slot = rows.block_table[0, 4 // 3], 4 % 3
    assert torch.equal(kv[0, page, 0, 0, slot], heads[1, 2]) and torch.equal(kv[0, page, 1, 0, slot], heads[1, 3])
    page = rows.block_table[1, 1]
    assert torch.equal(kv[0, page, 0, 0, 0], heads[2, 2]) and (kv[0, page, :, :, 1:] == 0).all()
    table = torch.from_numpy(rows.block_table)
    expected = paged_attention_ref(heads[:, :2], kv[0], table, [2, 1], [5, 4], None)
    torch.testing.assert_close(out, expected.flatten(1))
    stored = attend_stored_ref(heads[1:, :2], kv, 0, table, torch.tensor([5, 4]))
    torch.testing.assert_close(stored, expected[1:])


def test_the_last_numbers_of_heads_are_rotated_and_a_single_plane_has_keys_that_are_the_values() -> None:
    kv, qkv, rows = torch.zeros(1, 12, 1, 1, 3, 6), torch.randn(3, 3 * 6), rows_of([2, 1], [2, 1])
    rows.cos.fill(0.0)  # a quarter turn
    rows.sin[..., :2], rows.sin[..., 2:] = -1.0, 1.0
    out = attend_ref(qkv.clone(), kv.numpy(), 0, rows, None, scale=0.7)
    heads = qkv.view(3, 3, 6)
    heads = torch.cat((heads[..., :2], -heads[..., 4:], heads[..., 2:4]), -1)
    table = torch.from_numpy(rows.block_table)
    assert torch.equal(kv[0, table[0, 0], 0, 0, :2], heads[:2, 2]) and torch.equal(
        kv[0, table[1, 0], 0, 0, 0], heads[2, 2]
    )
    weights = (heads[1, :2] @ heads[:2, 2].T * 0.7).softmax(-1)  # of the second token
    torch.testing.assert_close(out[1], (weights @ heads[:2, 2]).flatten())


def test_lengths_and_trees_are_those_given() -> None:
    tree = Tree(torch.tensor([3, 3]), torch.tensor([[True, False], [True, True], [True, False]]))
    rows = rows_of([2, 1], [5, 4], tree)
    assert rows.query_lens == [2, 1] and rows.tree is not None and torch.equal(rows.tree.visible, tree.visible)
    assert rows_of([2, 1], [5, 4]).tree is None


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_parts_cover_all_sequences(num_threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        parts = rows_of([1] * 6, [9000, 20, 5000, 1, 333, 9000]).parts
    finally:
        torch.set_num_threads(before)
    assert len(parts) <= num_threads and np.concatenate([range(6)[part] for part in parts]).tolist() == list(range(6))
