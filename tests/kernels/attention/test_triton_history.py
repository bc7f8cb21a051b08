"""The kernels of kernels/attention/history.py against their references, where sizes are odd or large."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from large_pool import IN_A_FILE, PAGE_SIZE, SEQ_LEN, SMALL_TABLE, TABLE, WRAPS, make_large_pool, small_pool
from quantized import fp8_pool
from triton_device import DEVICE, random

pytest.importorskip("triton")

from baton.kernels.attention import triton_history
from baton.kernels.attention.history import Part, gather_keys_ref, join_parts_ref
from baton.kernels.state.triton_store import norm_rotate_store, token_rows


@pytest.mark.parametrize("num_heads", [1, 16, 21, 40])
@pytest.mark.parametrize("head_dim", [8, 72, 128])
def test_a_join_of_any_number_of_heads(num_heads: int, head_dim: int) -> None:
    """Also parts of which other rows lie in front, as what is left of a history does."""
    rows = [random(9, num_heads, head_dim, seed=seed) for seed in (0, 1)]
    lses = [random(num_heads, 9, seed=seed) for seed in (2, 3)]
    first, second = (Part(out[2:7], lse[:, 2:7]) for out, lse in zip(rows, lses, strict=True))
    outs = [torch.full((5, num_heads, head_dim), float("nan"), device=DEVICE) for _ in range(2)]
    found, expected = triton_history.join_parts(outs[0], first, second), join_parts_ref(outs[1], first, second)
    torch.testing.assert_close(outs[0], outs[1])
    torch.testing.assert_close(found, expected)


def test_a_row_without_a_number_is_none_afterwards() -> None:
    first, second = (Part(random(3, 2, 16, seed=seed), random(2, 3, seed=seed)) for seed in (0, 1))
    first.lse[0, 1] = float("nan")
    second.out[2, 1, 0] = float("nan")
    out = torch.empty(3, 2, 16, device=DEVICE)
    triton_history.join_parts(out, first, second)
    is_nan = out.isnan()
    assert is_nan[1, 0].all() and is_nan[2, 1, 0] and is_nan.sum() == 17


@pytest.mark.parametrize(("page_size", "head_dim"), [(1, 8), (3, 20), (64, 128)])
def test_gathered_keys(page_size: int, head_dim: int) -> None:
    """More keys than one program copies, from a view of a larger table."""
    kv_layer = random(200, 2, 3, page_size, head_dim)
    table = torch.randperm(200, generator=torch.Generator().manual_seed(0)).view(2, 100).to(DEVICE)[:, 3:97]
    for start, stop, num_keys in ((5, 91, 100), (0, 64, 64), (1, 1, 3)):
        found = triton_history.gather_keys(kv_layer, table, 1, start, stop, num_keys, kv_layer.dtype)
        assert torch.equal(found, gather_keys_ref(kv_layer, table, 1, start, stop, num_keys, kv_layer.dtype))


def test_values_narrower_than_keys_are_filled_up_with_zeros() -> None:
    k, v = random(20, 1, 3, 4, 24), random(20, 1, 3, 4, 10)
    table = torch.randperm(20, generator=torch.Generator().manual_seed(0)).view(2, 10).to(DEVICE)
    found = triton_history.gather_keys(k, table, 1, 5, 31, 40, k.dtype, v)
    assert torch.equal(found, gather_keys_ref(k, table, 1, 5, 31, 40, k.dtype, v))
    assert found[1, :, :26, :10].any() and not found[1, ..., 10:].any() and not found[:, :, 26:].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("page_size", "head_dim"), [(3, 10), (16, 128)])
def test_pages_in_fp8_return_what_the_store_wrote_back(page_size: int, head_dim: int, dtype: torch.dtype) -> None:
    """So a whole prompt and a chunk behind it see the same keys and values."""
    num_tokens, heads, num_pages = 20, (5, 2), -(-20 // page_size)
    kv_layer = fp8_pool(torch.zeros(num_pages + 2, 2, heads[1], page_size, head_dim, device=DEVICE))
    table = (torch.randperm(num_pages, generator=torch.Generator().manual_seed(0)) + 2).unsqueeze(0).to(DEVICE)
    qkv = random(num_tokens, (heads[0] + 2 * heads[1]) * head_dim, dtype=dtype)
    qkv *= torch.logspace(-6, 4, num_tokens, device=DEVICE).unsqueeze(1)
    angles = random(num_tokens, 1, head_dim // 2, dtype=dtype)
    cos, sin = torch.cat((angles.cos(), angles.cos()), -1), torch.cat((-angles.sin(), angles.sin()), -1)
    rows = token_rows(table, torch.tensor([num_tokens], device=DEVICE), num_tokens, page_size, num_tokens)
    norm_rotate_store(qkv, cos, sin, kv_layer, rows, writes_back=True)
    found = triton_history.gather_keys(kv_layer, table, 0, 0, num_tokens, num_tokens, dtype)
    stored = qkv.unflatten(1, (-1, head_dim))[:, heads[0] :].unflatten(1, (2, -1))
    assert torch.equal(found, stored.permute(1, 2, 0, 3))
    assert torch.equal(found, gather_keys_ref(kv_layer, table, 0, 0, num_tokens, num_tokens, dtype))


def test_slots_that_the_table_does_not_have_are_refused() -> None:
    kv_layer, table = random(3, 2, 1, 4, 8), torch.zeros(1, 2, dtype=torch.int64, device=DEVICE)
    for seq, start, stop, num_keys in ((0, 0, 9, 9), (0, 4, 2, 4), (0, 0, 8, 4), (1, 0, 4, 4)):
        with pytest.raises(AssertionError):
            triton_history.gather_keys(kv_layer, table, seq, start, stop, num_keys, kv_layer.dtype)


@IN_A_FILE
@WRAPS
def test_a_pool_of_more_than_2_31_elements(tmp_path: Path) -> None:
    pool = make_large_pool(tmp_path)
    found = triton_history.gather_keys(pool[0], TABLE, 0, 1, SEQ_LEN, 3 * PAGE_SIZE, pool.dtype)
    small = small_pool(pool)[0]
    assert torch.equal(found, gather_keys_ref(small, SMALL_TABLE, 0, 1, SEQ_LEN, 3 * PAGE_SIZE, pool.dtype))
