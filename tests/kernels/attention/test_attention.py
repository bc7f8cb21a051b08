"""The few-operations attention against its specification, and the specification against a plain softmax."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from large_pool import IN_A_FILE, PAGE_SIZE, SEQ_LEN, SMALL_TABLE, TABLE, make_large_pool, make_queries, small_pool
from thinned import halved

from baton.kernels.attention.attention import (
    AttentionPlan,
    clear_fresh_pages,
    paged_attention,
    paged_attention_ref,
    store_kv,
)

NUM_PAGES, HEAD_DIM = 64, 16
SHAPES = {
    "one decode": ((1,), (9,)),
    "first token": ((1,), (1,)),
    "ragged decode": ((1, 1, 1, 1), (3, 17, 8, 1)),
    "even decode": ((1, 1, 1), (12, 12, 12)),
    "fresh prompt": ((21,), (21,)),
    "fresh prompts": ((5, 5), (5, 5)),
    "chunk": ((7,), (30,)),
    "uniform verify": ((4, 4, 4), (9, 22, 4)),
    "long chunks": ((20, 20), (33, 20)),
    "mixture": ((1, 6, 1, 19, 6, 2), (8, 6, 31, 25, 20, 2)),
}


def make_pool(query_lens, seq_lens, num_heads, num_kv_heads, page_size, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    max_pages = max(-(-seq_len // page_size) for seq_len in seq_lens)
    ids = (torch.randperm(NUM_PAGES - 1, generator=generator) + 1).tolist()
    table = torch.zeros(len(seq_lens), max_pages, dtype=torch.int64)
    for seq, seq_len in enumerate(seq_lens):
        for column in range(-(-seq_len // page_size)):
            table[seq, column] = ids.pop()
    kv = torch.full((1, NUM_PAGES, 2, num_kv_heads, page_size, HEAD_DIM), float("nan"), dtype=dtype)
    for seq, seq_len in enumerate(seq_lens):  # what earlier forwards stored, page tails cleared by them
        kept = table[seq, : -(-seq_len // page_size)]
        kv[0, kept] = torch.randn(kv[0, kept].shape, generator=generator).to(dtype)
    q = torch.randn(sum(query_lens), num_heads, HEAD_DIM, generator=generator).to(dtype)
    return q, kv, table


def plan_of(table, query_lens, seq_lens, page_size, num_kv_heads, window, dtype=torch.float32) -> AttentionPlan:
    return AttentionPlan.build(
        table,
        query_lens,
        seq_lens,
        page_size=page_size,
        num_kv_heads=num_kv_heads,
        windows=frozenset({window, None}),
        dtype=dtype,
    )


@pytest.mark.parametrize(
    ("shape", "window", "heads", "page_size"),
    halved(SHAPES, [None, 1, 6, 1000], [(4, 2), (3, 3), (6, 1)], [1, 4, 16]),
)
def test_equals_the_reference(shape: str, window: int | None, heads: tuple[int, int], page_size: int) -> None:
    num_heads, num_kv_heads = heads
    query_lens, seq_lens = SHAPES[shape]
    if page_size == 1 and sum(seq_lens) >= NUM_PAGES:
        page_size = 2
    q, kv, table = make_pool(query_lens, seq_lens, num_heads, num_kv_heads, page_size)
    plan = plan_of(table, query_lens, seq_lens, page_size, num_kv_heads, window)
    ours = paged_attention(q, kv[0], plan, window)
    expected = paged_attention_ref(q, kv[0].nan_to_num(), table, query_lens, seq_lens, window)
    torch.testing.assert_close(ours, expected, atol=2e-6, rtol=0)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("num_kv_heads", [1, 2])
def test_the_keys_of_a_single_plane_are_also_the_values(shape: str, num_kv_heads: int) -> None:
    """As with K and V that are equal. The scale is that of the caller."""
    (query_lens, seq_lens), scale = SHAPES[shape], 0.3
    q, kv, table = make_pool(query_lens, seq_lens, 4, num_kv_heads, 4)
    kv[:, :, 1] = kv[:, :, 0]
    single, others = kv[0, :, :1].contiguous(), (table, query_lens, seq_lens)
    expected = paged_attention_ref(q * (scale * HEAD_DIM**0.5), kv[0].nan_to_num(), *others, None)
    found = paged_attention_ref(q, single.nan_to_num(), *others, None, scale=scale)
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=0)
    sizes = {"page_size": 4, "num_kv_heads": num_kv_heads, "windows": frozenset({None}), "dtype": torch.float32}
    plan = AttentionPlan.build(*others, **sizes, num_planes=1)
    torch.testing.assert_close(paged_attention(q, single, plan, None, scale), expected, atol=2e-6, rtol=0)
    new = torch.randn(len(q), num_kv_heads, HEAD_DIM)
    store_kv(new, single, plan)
    last = table[0, (seq_lens[0] - 1) // 4], (seq_lens[0] - 1) % 4
    assert torch.equal(single[last[0], 0, :, last[1]], new[query_lens[0] - 1])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 2), (6, 1)])
def test_sinks_equal_the_reference(shape: str, window: int | None, num_heads: int, num_kv_heads: int) -> None:
    query_lens, seq_lens = SHAPES[shape]
    q, kv, table = make_pool(query_lens, seq_lens, num_heads, num_kv_heads, 4)
    sinks = torch.tensor([9.0, *[0.5] * (num_heads - 2), -60.0])
    plan = plan_of(table, query_lens, seq_lens, 4, num_kv_heads, window)
    ours = paged_attention(q, kv[0], plan, window, sinks=sinks)
    expected = paged_attention_ref(q, kv[0].nan_to_num(), table, query_lens, seq_lens, window, sinks=sinks)
    torch.testing.assert_close(ours, expected, atol=2e-6, rtol=0)
    without = paged_attention(q, kv[0], plan, window)
    torch.testing.assert_close(ours[:, -1], without[:, -1], atol=2e-6, rtol=0)
    assert (ours[:, 0].abs().amax(1) < without[:, 0].abs().amax(1)).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_16_bits(dtype: torch.dtype) -> None:
    query_lens, seq_lens = SHAPES["mixture"]
    q, kv, table = make_pool(query_lens, seq_lens, 4, 2, 4, dtype)
    for sinks in (None, torch.tensor([2.0, 0.0, -3.0, 1.0])):
        ours = paged_attention(q, kv[0], plan_of(table, query_lens, seq_lens, 4, 2, 6, dtype), 6, sinks=sinks)
        expected = paged_attention_ref(q, kv[0].nan_to_num(), table, query_lens, seq_lens, 6, sinks=sinks)
        assert ours.dtype == dtype
        bound = 2 * torch.finfo(dtype).eps * float(kv.nan_to_num().abs().max())  # both round weights and results
        torch.testing.assert_close(ours, expected, atol=bound, rtol=0)


@pytest.mark.parametrize("query_len", [1, 2, 40])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_key_that_is_nan_reaches_whoever_sees_it(query_len: int, has_sinks: bool, dtype: torch.dtype) -> None:
    sinks = torch.zeros(4) if has_sinks else None
    for seq_len in range(query_len, query_len + 20):
        q, kv, table = make_pool((query_len,), (seq_len,), 4, 2, 4, dtype)
        kv[0, table[0, 0], 0, :, 0] = float("nan")
        for window in (None, 64):
            plan = plan_of(table, (query_len,), (seq_len,), 4, 2, window, dtype)
            assert paged_attention(q, kv[0], plan, window, sinks=sinks).isnan().all(), (seq_len, window)


def test_whole_prompts_see_a_key_that_is_nan() -> None:
    for seq_len in range(1, 40):
        q, kv, table = make_pool((seq_len,), (seq_len,), 4, 2, 4)
        kv[0, table[0, 0], 0, :, 0] = float("nan")
        sizes: dict[str, Any] = {"page_size": 4, "num_kv_heads": 2, "dtype": torch.float32}
        plan = AttentionPlan.build(table, (seq_len,), (seq_len,), **sizes, windows=frozenset({None}))
        assert paged_attention(q, kv[0], plan, None).isnan().all(), seq_len


def test_the_reference_is_the_formula() -> None:
    """One query at a time, over keys looked up slot by slot."""
    query_lens, seq_lens, window, page_size = (2, 1), (7, 5), 4, 4
    q, kv, table = make_pool(query_lens, seq_lens, 4, 2, page_size)
    sinks = torch.tensor([0.0, 1.5, -2.0, 80.0])
    out = paged_attention_ref(q, kv[0].nan_to_num(), table, query_lens, seq_lens, window)
    with_sinks = paged_attention_ref(q, kv[0].nan_to_num(), table, query_lens, seq_lens, window, sinks=sinks)
    queries = [(0, 5), (0, 6), (1, 4)]  # (sequence, position)
    for row, (seq, position) in enumerate(queries):
        for head in range(4):
            slots = [(table[seq, j // page_size], j % page_size) for j in range(position - window + 1, position + 1)]
            k = torch.stack([kv[0, page, 0, head // 2, slot] for page, slot in slots])
            v = torch.stack([kv[0, page, 1, head // 2, slot] for page, slot in slots])
            scores = k @ q[row, head] / HEAD_DIM**0.5
            torch.testing.assert_close(out[row, head], scores.softmax(0) @ v, atol=1e-6, rtol=0)
            weights = torch.cat((scores, sinks[head : head + 1])).softmax(0)[:-1]
            torch.testing.assert_close(with_sinks[row, head], weights @ v, atol=1e-6, rtol=0)


def test_store_and_clear() -> None:
    query_lens, seq_lens, page_size, num_kv_heads = (1, 6, 3), (9, 7, 8), 4, 2
    _, _, table = make_pool(query_lens, seq_lens, 4, num_kv_heads, page_size)
    kv = torch.full((3, NUM_PAGES, 2, num_kv_heads, page_size, HEAD_DIM), 5.0)
    plan = plan_of(table, query_lens, seq_lens, page_size, num_kv_heads, None)
    clear_fresh_pages(kv, plan)
    new = torch.randn(10, 2 * num_kv_heads, HEAD_DIM)
    store_kv(new, kv[1], plan)
    expected = torch.full_like(kv, 5.0)
    expected[:, table[0, 2]] = 0  # position 8 begins a page
    expected[:, table[1, 1]] = 0  # positions 4 to 6 begin one; 1 to 3 go on with an older page
    positions = [(0, 8), *((1, p) for p in range(1, 7)), *((2, p) for p in range(5, 8))]
    for row, (seq, position) in enumerate(positions):
        page, slot = table[seq, position // page_size], position % page_size
        expected[1, page, :, :, slot] = new[row].view(2, num_kv_heads, HEAD_DIM)
    assert torch.equal(kv, expected)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
@pytest.mark.parametrize("half", [0, 1], ids=["key", "value"])
@pytest.mark.parametrize(
    ("shape", "seq", "slot"), [("chunk", 0, 26), ("fresh prompts", 1, 2), ("uniform verify", 1, 20)]
)
def test_a_number_that_is_none_spoils_only_rows_that_see_it(
    shape: str, seq: int, slot: int, half: int, number: float
) -> None:
    """By gathered pages and by the specification."""
    query_lens, seq_lens = SHAPES[shape]
    q, kv, table = make_pool(query_lens, seq_lens, 4, 2, 10)
    plan = plan_of(table, query_lens, seq_lens, 10, 2, None)
    clean = paged_attention(q, kv[0], plan, None)
    kv[0, table[seq, slot // 10], half, :, slot % 10] = number
    first = sum(query_lens[:seq])
    positions = torch.arange(seq_lens[seq] - query_lens[seq], seq_lens[seq])
    sees = torch.zeros(len(q), dtype=torch.bool)
    sees[first : first + query_lens[seq]] = positions >= slot
    sinks = torch.full((4,), -90.0)  # they change nothing
    for out in (
        paged_attention(q, kv[0], plan, None),
        paged_attention(q, kv[0], plan, None, sinks=sinks),
        paged_attention_ref(q, kv[0], table, query_lens, seq_lens, None),
    ):
        torch.testing.assert_close(out[~sees], clean[~sees], atol=2e-6, rtol=0)
        assert sees.any() and (~sees[first : first + query_lens[seq]]).any()
        assert (half == 0 and number == number) or not out[sees].isfinite().any()


@IN_A_FILE
def test_a_pool_of_more_than_2_31_elements(tmp_path: Path) -> None:
    q, pool = make_queries(3), make_large_pool(tmp_path)
    expected = paged_attention_ref(q, small_pool(pool)[0], SMALL_TABLE, [3], [SEQ_LEN], None)
    out = paged_attention(q, pool[0], plan_of(TABLE, (3,), (SEQ_LEN,), PAGE_SIZE, 1, None), None)
    torch.testing.assert_close(out, expected, atol=2e-5, rtol=2e-5)
