"""Keys and values that Triton norms, rotates and stores, against the specifications of norm and rotation."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from large_pool import (
    HEAD_DIM,
    IN_A_FILE,
    LENS,
    NUM_HEADS,
    PAGE_SIZE,
    SEQ_LEN,
    SMALL_TABLE,
    TABLE,
    WRAPS,
    make_large_pool,
    make_rotation,
    small_pool,
)
from quantized import fp8_numbers, fp8_pool, fp8_rounded
from triton_device import DEVICE, ULP

pytest.importorskip("triton")

from attention_case import Case

from baton.kernels.attention.paged_rows import PagedRows, attend_ref
from baton.kernels.products.norm import rms_norm_ref
from baton.kernels.products.rotary import rotary_ref
from baton.kernels.state import triton_store
from baton.kernels.state.triton_store import norm_rotate_store, token_rows

EPS = 1e-6


def places(case: Case) -> list[tuple[int, int]]:
    """Return (page, slot in the page) of each new token."""
    spans = zip(case.query_lens, case.seq_lens, strict=True)
    slots = [(seq, slot) for seq, (query_len, end) in enumerate(spans) for slot in range(end - query_len, end)]
    return [(int(case.table[seq, slot // case.page_size]), slot % case.page_size) for seq, slot in slots]


@pytest.mark.each_value
@pytest.mark.parametrize("with_norms", [False, True, torch.float32], ids=["plain", "norms", "float32 norms"])
@pytest.mark.parametrize(
    ("query_lens", "page_size", "heads", "head_dim", "dtype"),
    [
        ((3, 3, 3), 4, (6, 2), 16, torch.float32),
        ((5, 1, 0, 9), 4, (6, 2), 20, torch.float16),
        ((5, 1, 0, 9), 1, (5, 1), 10, torch.float32),
        ((2, 2), 3, (14, 2), 72, torch.float32),  # more heads than a program has
        ((60,), 48, (7, 1), 80, torch.bfloat16),
        ((1,), 10, (5, 1), 576, torch.float32),
    ],
    ids=str,
)
def test_norm_rotate_store(
    query_lens: tuple[int, ...],
    page_size: int,
    heads: tuple[int, int],
    head_dim: int,
    dtype: torch.dtype,
    with_norms: bool | torch.dtype,
) -> None:
    """New rows are stored where `token_rows` says; q and k change in `qkv`, v and all other slots do not."""
    seq_lens = tuple(query_len + i for i, query_len in enumerate(query_lens))
    case = Case(query_lens, seq_lens, heads, head_dim, page_size, dtype)
    num_heads, num_kv_heads = heads
    num_tokens, generator = len(case.qkv), case.generator
    angles = torch.randn(num_tokens, 1, head_dim // 2, generator=generator)
    cos = torch.cat((angles.cos(), angles.cos()), -1).to(DEVICE, dtype)
    sin = torch.cat((-angles.sin(), angles.sin()), -1).to(DEVICE, dtype)
    kind = dtype if with_norms is True else torch.float32
    norms = torch.randn(2, head_dim, generator=generator).to(DEVICE, kind).unbind(0) if with_norms else None
    qkv = torch.full((num_tokens, case.qkv.shape[1] + 24), 7.0, dtype=dtype, device=DEVICE)
    ours = qkv[:, 8:-16].copy_(case.qkv)  # strided by token
    q, k, v = case.qkv.view(num_tokens, -1, head_dim).split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    if norms is not None:
        q, k = rms_norm_ref(q, norms[0], EPS), rms_norm_ref(k, norms[1], EPS)
    q, k = (rotary_ref(x.float(), cos.float(), sin.float()).to(dtype) for x in (q, k))
    expected, spots = case.kv.clone(), places(case)
    for row, (page, slot) in enumerate(spots):
        expected[page, 0, :, slot], expected[page, 1, :, slot] = k[row], v[row]
    query_len = query_lens[0] if len(set(query_lens)) == 1 else None
    rows = token_rows(case.table, case.lens, num_tokens, page_size, query_len, case.starts)
    assert rows.tolist() == [page * page_size + slot for page, slot in spots]
    out = norm_rotate_store(ours, cos, sin, case.kv, rows, norms, EPS)
    assert out.data_ptr() == ours.data_ptr()
    unit = {torch.float32: 2e-6, torch.float16: 2.0**-9, torch.bfloat16: 2.0**-6}[dtype]
    near = {"atol": 4 * unit, "rtol": unit}
    torch.testing.assert_close(out, q, **near)
    torch.testing.assert_close(case.kv, expected, equal_nan=True, **near)
    assert torch.equal(case.kv[:, 1].nan_to_num(), expected[:, 1].nan_to_num())
    after = ours.view(num_tokens, -1, head_dim) if ours.is_contiguous() else ours.unflatten(1, (-1, head_dim))
    torch.testing.assert_close(after[:, num_heads : num_heads + num_kv_heads], k, **near)
    assert torch.equal(after[:, num_heads + num_kv_heads :], v)
    assert (qkv[:, :8] == 7).all() and (qkv[:, -16:] == 7).all()


def test_rows_of_slots_that_are_not_there() -> None:
    """A padding row of length 0, and slots beyond the table."""
    table = torch.tensor([[5, 6], [0, 0], [7, 8]], device=DEVICE)
    lens = torch.tensor([5, 0, 9], device=DEVICE)
    assert token_rows(table, lens, 6, 4, 2).tolist() == [23, 24, -1, -1, 35, -1]
    starts = torch.tensor([0, 1, 2, 4], dtype=torch.int32, device=DEVICE)
    assert token_rows(table, lens, 4, 4, None, starts).tolist() == [24, -1, 35, -1]


@pytest.mark.parametrize("page_size", [1, 3, 10, 48])
@pytest.mark.parametrize("is_ragged", [False, True])
def test_rows_of_more_tokens_than_a_program_has(
    page_size: int, is_ragged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table is a part of a wider one. Sequences are searched in several steps."""
    monkeypatch.setattr(triton_store, "_TOKENS", 8)
    monkeypatch.setattr(triton_store, "_SEQS", 4)
    query_lens = (3, 0, 1, 7, 0, 0, 9, 2, 1, 4, 3) if is_ragged else (3,) * 11
    seq_lens = [query_len + 5 * i for i, query_len in enumerate(query_lens)]
    num_columns = -(-max(seq_lens) // page_size)
    generator = torch.Generator().manual_seed(page_size)
    wide = torch.randint(0, 1000, (11, num_columns + 3), generator=generator)
    table, ends = wide[:, 1 : 1 + num_columns], torch.tensor([0, *query_lens]).cumsum(0)
    expected = [
        int(table[seq, slot // page_size]) * page_size + slot % page_size
        for seq, (query_len, end) in enumerate(zip(query_lens, seq_lens, strict=True))
        for slot in range(end - query_len, end)
    ]
    starts = ends.to(DEVICE, torch.int32) if is_ragged else None
    lens = torch.tensor(seq_lens, device=DEVICE)
    table = wide.to(DEVICE)[:, 1 : 1 + num_columns]
    rows = token_rows(table, lens, len(expected), page_size, None if is_ragged else 3, starts)
    assert rows.tolist() == expected


def test_a_token_without_a_row_is_stored_nowhere() -> None:
    pool = torch.full((3, 2, 2, 4, 16), 7.0, device=DEVICE)
    qkv, turn = torch.randn(1, 6 * 16, device=DEVICE), torch.ones(1, 1, 16, device=DEVICE)
    norm_rotate_store(qkv, turn, turn, pool[1:], torch.tensor([-1], device=DEVICE))
    assert (pool == 7).all()


@pytest.mark.parametrize(("head_dim", "value_dim"), [(16, 16), (24, 10), (72, 40)])
def test_values_narrower_than_keys_lie_in_a_pool_of_their_own(head_dim: int, value_dim: int) -> None:
    qkv, turn = torch.randn(5, 8 * head_dim, device=DEVICE), torch.randn(5, 1, head_dim, device=DEVICE)
    rows = torch.tensor([7, 2, -1, 0, 11], device=DEVICE)
    pool, own = torch.full((4, 2, 2, 3, head_dim), 7.0, device=DEVICE), qkv.clone()
    k, v = pool[:, :1].clone(), torch.full((5, 1, 2, 3, value_dim), 7.0, device=DEVICE)
    q = norm_rotate_store(qkv, turn, turn, pool, rows)
    assert torch.equal(norm_rotate_store(own, turn, turn, k, rows, values=v[:4]), q) and torch.equal(own, qkv)
    assert torch.equal(k, pool[:, :1]) and torch.equal(v[:4], pool[:, 1:, ..., :value_dim])
    assert (v[4] == 7).all()


def test_nan_stays_with_its_token() -> None:
    """Also through norms, whose sums hold all numbers of a head."""
    norms = torch.ones(16, device=DEVICE), torch.ones(16, device=DEVICE)
    qkv, turn = torch.randn(3, 4 * 16, device=DEVICE), torch.ones(3, 1, 16, device=DEVICE)
    pool, clean, rows = torch.zeros(2, 2, 1, 3, 16, device=DEVICE), qkv.clone(), torch.tensor([4, 1, 5], device=DEVICE)
    norm_rotate_store(clean, turn, turn, clean_pool := pool.clone(), rows, norms, EPS)
    qkv[1, 5] = float("nan")  # of the first of two query heads
    out = norm_rotate_store(qkv, turn, turn, pool, rows, norms, EPS)
    assert out[1, 0].isnan().all() and torch.equal(out[1, 1], clean[1, 16:32])
    assert torch.equal(qkv[::2], clean[::2]) and torch.equal(pool, clean_pool)


@IN_A_FILE
@WRAPS
def test_a_pool_of_more_than_2_31_elements(tmp_path: Path) -> None:
    """New keys and values are stored where the specification stores them in a small pool."""
    pool = make_large_pool(tmp_path)
    qkv = torch.randn(3, (NUM_HEADS + 2) * HEAD_DIM, generator=torch.Generator().manual_seed(2))
    positions, expected = torch.arange(SEQ_LEN - 3, SEQ_LEN), small_pool(pool)
    rows = PagedRows.build(make_rotation(3), SMALL_TABLE, [3], LENS, positions)
    attend_ref(qkv.clone(), expected.numpy(), 0, rows, None)
    norm_rotate_store(qkv, *make_rotation(3), pool[0], token_rows(TABLE, LENS, 3, PAGE_SIZE, 3))
    torch.testing.assert_close(small_pool(pool), expected)


@pytest.mark.parametrize(
    ("page_size", "heads", "head_dim", "dtype", "with_norms"),
    [
        (4, (6, 2), 16, torch.float32, True),
        (1, (5, 1), 10, torch.float32, False),
        (3, (14, 2), 72, torch.float16, True),  # more heads than a program has
        (48, (7, 1), 80, torch.bfloat16, False),
    ],
    ids=str,
)
def test_keys_and_values_in_fp8_are_those_that_would_be_stored_rounded_once_more(
    page_size: int, heads: tuple[int, int], head_dim: int, dtype: torch.dtype, with_norms: bool
) -> None:
    """A head of zeros has a scale, and one with a number that is not finite has none."""
    generator = torch.Generator().manual_seed(1)
    plain = Case((5, 1, 0, 9), (7, 1, 4, 30), heads, head_dim, page_size, dtype)
    plain.qkv[2, -head_dim:] = 0
    plain.qkv[4, -head_dim] = 6e4  # more than the largest scale holds
    plain.qkv[3, -head_dim:] = torch.tensor(([1.0, float("inf"), float("nan")] + [2.0] * head_dim)[:head_dim])
    num_tokens, num_kv_heads = len(plain.qkv), heads[1]
    angles = torch.randn(num_tokens, 1, head_dim // 2, generator=generator)
    cos = torch.cat((angles.cos(), angles.cos()), -1).to(DEVICE, dtype)
    sin = torch.cat((-angles.sin(), angles.sin()), -1).to(DEVICE, dtype)
    norms = torch.randn(2, head_dim, generator=generator).to(DEVICE, dtype).unbind(0) if with_norms else None
    rows = token_rows(plain.table, plain.lens, num_tokens, page_size, None, plain.starts)
    qkv, fp8 = plain.qkv.clone(), fp8_pool(plain.kv)
    norm_rotate_store(plain.qkv, cos, sin, plain.kv, rows, norms, EPS)
    before = fp8_numbers(fp8)
    written, pool = qkv.clone(), fp8_pool(plain.kv)
    out = norm_rotate_store(qkv, cos, sin, fp8, rows, norms, EPS)
    bound = 0.0 if DEVICE == "cpu" else ULP[dtype]  # a compiler may fuse a product and a sum in one of two kernels
    torch.testing.assert_close(out, plain.q, atol=bound, rtol=bound, equal_nan=True)
    torch.testing.assert_close(qkv, plain.qkv, atol=bound, rtol=bound, equal_nan=True)
    expected = before.clone()
    for page, slot in places(plain):
        expected[page, :, :, slot] = fp8_rounded(plain.kv[page, :, :, slot].float())
    found, (page, slot) = fp8_numbers(fp8), places(plain)[3]
    spoilt = page, 1, num_kv_heads - 1, slot
    assert found[spoilt].isnan().all()
    expected[spoilt] = float("nan")
    assert torch.equal(found.nan_to_num(1e9), expected.nan_to_num(1e9))
    out = norm_rotate_store(written, cos, sin, pool, rows, norms, EPS, writes_back=True)
    torch.testing.assert_close(out, plain.q, atol=bound, rtol=bound, equal_nan=True)
    assert torch.equal(pool.view(torch.uint8), fp8.view(torch.uint8))
    k_and_v = written.view(num_tokens, -1, head_dim)[:, heads[0] :].unflatten(1, (2, num_kv_heads))
    for row, (page, slot) in enumerate(places(plain)):
        assert torch.equal(k_and_v[row].float().nan_to_num(1e9), found[page, :, :, slot].nan_to_num(1e9)), row
