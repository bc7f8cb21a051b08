"""Pools of more than 2^31 elements: every kernel that indexes a pool computes offsets in 64 bits.

The pool is a sparse file, of which only the pages at its end take memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from triton_device import IS_INTERPRETED

pytest.importorskip("triton")
pytest.importorskip("numba")

from baton.kernels.attention import AttentionPlan, paged_attention, paged_attention_ref
from baton.kernels.operations import preferring
from baton.kernels.paged_rows import PagedRows, attend, attend_stored
from baton.kernels.pages import gather_pages_ref, page_checksums, page_checksums_ref
from baton.kernels.trees import move_slots_, move_slots_ref_
from baton.kernels.triton_attention import Plan, decode_attention
from baton.kernels.triton_extend import extend_attention
from baton.kernels.triton_pages import gather_pages
from baton.kernels.triton_store import norm_rotate_store

pytestmark = [
    pytest.mark.skipif(not IS_INTERPRETED, reason="the pool lies in a file of the host"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # the interpreter's products wrap aloud
]

PAGE_SIZE, NUM_HEADS, HEAD_DIM = 16, 2, 32
NUM_PAGES = 2**31 // (2 * PAGE_SIZE * HEAD_DIM) + 8  # of one KV head; a layer has more than 2^31 elements
PAGES = [NUM_PAGES - 1, 3, NUM_PAGES - 5]  # of a sequence
SEQ_LEN = 40


@pytest.fixture
def pool(tmp_path: Path) -> torch.Tensor:
    """[1, NUM_PAGES, 2, 1, PAGE_SIZE, HEAD_DIM] float32, zeros but for PAGES."""
    shape = (1, NUM_PAGES, 2, 1, PAGE_SIZE, HEAD_DIM)
    kv = torch.from_numpy(np.memmap(tmp_path / "pool", dtype=np.float32, mode="w+", shape=shape))
    assert kv.numel() > 2**31
    generator = torch.Generator().manual_seed(0)
    for page in PAGES:
        kv[0, page] = torch.randn(kv.shape[2:], generator=generator)
    return kv


def small(kv: torch.Tensor) -> torch.Tensor:
    """The pages alone, in a pool of their own: [1, 3, ...]."""
    return kv[:, PAGES].clone()


def queries(num_tokens: int) -> torch.Tensor:
    return torch.randn(num_tokens, NUM_HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(1))


TABLE, SMALL_TABLE, LENS = torch.tensor([PAGES]), torch.tensor([[0, 1, 2]]), torch.tensor([SEQ_LEN])


@pytest.mark.parametrize("way", ["decode", "extend", "stored", "gathered"])
def test_attention(way: str, pool: torch.Tensor) -> None:
    q = queries(1 if way == "stored" else 3)
    expected = paged_attention_ref(q, small(pool)[0], SMALL_TABLE, [len(q)], [SEQ_LEN], None)
    if way == "decode":
        out = decode_attention(q, pool[0], Plan.uniform(TABLE, LENS, 3, PAGE_SIZE, is_stored=True))
    elif way == "extend":
        starts = torch.tensor([0, 3], dtype=torch.int32)
        out = extend_attention(q, pool[0], Plan.ragged(TABLE, LENS, starts, 3, PAGE_SIZE))
    elif way == "stored":
        out = attend_stored(q, pool, 0, TABLE, LENS)
    else:
        windows: frozenset[int | None] = frozenset({None})
        plan = AttentionPlan.build(
            TABLE, (3,), (SEQ_LEN,), page_size=PAGE_SIZE, num_kv_heads=1, windows=windows, dtype=torch.float32
        )
        out = paged_attention(q, pool[0], plan, None)
    torch.testing.assert_close(out, expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("kind", ["numba", "triton"])
def test_new_keys_and_values(kind: str, pool: torch.Tensor) -> None:
    """Stored where the specification stores them in a small pool."""
    qkv = torch.randn(3, (NUM_HEADS + 2) * HEAD_DIM, generator=torch.Generator().manual_seed(2))
    ones, zeros = torch.ones(3, 1, HEAD_DIM), torch.zeros(3, 1, HEAD_DIM)
    expected = small(pool)
    positions = torch.arange(SEQ_LEN - 3, SEQ_LEN)
    with preferring("reference"):
        rows = PagedRows.build((ones, zeros), SMALL_TABLE, [3], LENS, positions)
        attend(qkv.clone(), expected.numpy(), 0, rows, None)
    if kind == "numba":
        attend(qkv, pool.numpy(), 0, PagedRows.build((ones, zeros), TABLE, [3], LENS, positions), None)
    else:
        plan = Plan.uniform(TABLE, LENS, 3, PAGE_SIZE)
        assert plan.rows is not None
        norm_rotate_store(qkv, ones, zeros, pool[0], plan.rows)
    torch.testing.assert_close(small(pool), expected)


def test_slots_that_move(pool: torch.Tensor) -> None:
    sources, targets = torch.tensor([[39, 17, 2]]), torch.tensor([[1, 33, 16]])
    expected = small(pool)
    move_slots_ref_(expected, SMALL_TABLE, sources, targets)
    with preferring("triton"):
        move_slots_(pool, TABLE, sources, targets)
    assert torch.equal(small(pool), expected) and not torch.equal(expected[0, 0], expected[0, 1])


def test_pages_that_are_gathered_and_digested(pool: torch.Tensor) -> None:
    words = pool.view(1, NUM_PAGES, -1).view(torch.int32)
    expected = small(pool).view(1, 3, -1).view(torch.int32)
    block_words, last = PAGE_SIZE * HEAD_DIM, torch.tensor([PAGES[2], PAGES[0]], dtype=torch.int32)
    sums = torch.empty((2, 1, 2), dtype=torch.int64)
    with preferring("triton"):
        page_checksums(words, last, block_words, sums)
    assert torch.equal(sums, page_checksums_ref(expected, torch.tensor([2, 0]), block_words))
    moves = torch.tensor([PAGES[0]], dtype=torch.int32), torch.tensor([PAGES[2]], dtype=torch.int32)
    gather_pages_ref(expected, expected, torch.tensor([0]), torch.tensor([2]))
    gather_pages(words, words, *moves)
    assert torch.equal(small(pool).view(1, 3, -1).view(torch.int32), expected)
