"""Pages in e4m3 with scales, against support/checkpoints/quantized.py, which rounds by a table of all e4m3 numbers."""

from __future__ import annotations

import pytest
import torch
from quantized import fp8_numbers, fp8_pool, fp8_rounded
from triton_device import DEVICE

from baton.kernels.attention.attention import (
    AttentionPlan,
    Tree,
    clear_fresh_pages,
    paged_attention,
    paged_attention_ref,
    store_kv,
)
from baton.kernels.state.fp8_pages import (
    block_size,
    blocks_at,
    has_close_blocks,
    pages_at,
    parts_of,
    scales_of,
    store_rows,
)
from baton.kernels.state.trees import move_slots_ref_

SHAPES = [(1, 10), (3, 10), (4, 16), (16, 72), (10, 128)]  # page_size, head_dim
NEAR = {"atol": 1e-3, "rtol": 1e-5}  # numbers are up to 300


def numbers(page_size: int, head_dim: int, seed: int = 0) -> torch.Tensor:
    """Random numbers of 2 layers, 7 pages, 2 planes and 3 heads, of many sizes."""
    generator = torch.Generator().manual_seed(seed)
    shape = (2, 7, 2, 3, page_size, head_dim)
    return torch.randn(shape, generator=generator) * torch.rand((*shape[:-1], 1), generator=generator) * 100


@pytest.mark.parametrize(("page_size", "head_dim"), SHAPES)
def test_scales_lie_behind_the_values_of_a_block(page_size: int, head_dim: int) -> None:
    kv = fp8_pool(numbers(page_size, head_dim))
    assert scales_of(kv).shape == kv.shape[:-1] and scales_of(kv).dtype == torch.float32
    torch.testing.assert_close(kv.float() * scales_of(kv).unsqueeze(-1), fp8_numbers(kv), rtol=0, atol=0)
    assert torch.equal(scales_of(kv[1]), scales_of(kv)[1])
    assert torch.equal(scales_of(kv[:, 2:4]), scales_of(kv)[:, 2:4])
    assert block_size(kv) % 16 == 0 and block_size(kv) >= page_size * (head_dim + 4)
    assert has_close_blocks(kv[0]) and not has_close_blocks(kv[0, :, :, :2])
    values, scales = parts_of(kv)
    assert values.data_ptr() == kv.data_ptr() and scales.shape == (*kv.shape[:-1], 1)
    assert parts_of(numbers(1, 2)[0])[0].dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("page_size", "head_dim"), SHAPES)
def test_rows_are_rounded_one_by_one(page_size: int, head_dim: int, dtype: torch.dtype) -> None:
    kv, layer = fp8_pool(numbers(page_size, head_dim)), 1
    before = kv.view(torch.uint8).clone()
    rows = numbers(page_size, head_dim, seed=1)[0].reshape(-1, head_dim)[: 5 * page_size].to(dtype)
    rows[2] = 0
    generator = torch.Generator().manual_seed(2)
    places = torch.randperm(7 * 6 * page_size, generator=generator)[: len(rows)]
    store_rows(rows, kv[layer], places)
    blocks = torch.arange(7 * 6)
    found = blocks_at(kv[layer], blocks, dtype).view(-1, head_dim)[places]
    assert found.dtype == dtype and torch.equal(found, fp8_rounded(rows))
    largest = kv[layer].float().abs().amax(-1).view(-1)[places]
    assert ((largest >= 224) & (largest <= 448))[rows.any(-1)].all()
    stored = scales_of(kv[layer]).flatten()[places]
    assert (stored.log2().frac() == 0).all(), "powers of two"
    assert torch.equal(kv.view(torch.uint8)[0], before[0])  # the other layer
    others = torch.ones(7 * 6 * page_size, dtype=torch.bool).index_fill(0, places, value=False)
    assert torch.equal(*(each.reshape(-1, head_dim)[others] for each in (kv.view(torch.uint8)[layer], before[layer])))
    pages = torch.tensor([3, 0, 5])
    torch.testing.assert_close(pages_at(kv[layer], pages, dtype), fp8_numbers(kv[layer])[pages].to(dtype).float())


def test_rows_that_are_no_numbers_stay_none_and_large_numbers_become_the_largest() -> None:
    kv = fp8_pool(numbers(4, 16))
    rows = torch.ones(4, 16)
    rows[0, 3], rows[1, 5], rows[2, 7] = float("nan"), float("inf"), -1e30
    store_rows(rows, kv[0], torch.tensor([0, 1, 2, 3]))
    found = blocks_at(kv[0], torch.tensor([0]), torch.float16)[0]
    assert found[:2].isnan().all() and (found[3] == 1).all()
    assert found[2, 7] == -57_344 and found[2].sum() == -57_344 + 15


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize(
    ("query_lens", "is_tree"), [((4, 4), False), ((4, 4), True), ((1, 1), False), ((6, 15), False)]
)
def test_attention_reads_what_is_stored(query_lens: tuple[int, int], is_tree: bool, window: int | None) -> None:
    """The new tokens' own keys and values included, by the specification and by few torch operations."""
    page_size, head_dim, seq_lens = 4, 16, (9, 15)
    kv, generator = fp8_pool(numbers(page_size, head_dim)[0]), torch.Generator().manual_seed(3)
    table = torch.tensor([[0, 1, 2, 0], [3, 4, 5, 6]])
    num_tokens = sum(query_lens)
    q = torch.randn(num_tokens, 6, head_dim, generator=generator)
    new = torch.randn(num_tokens, 6, head_dim, generator=generator)
    positions = tree = None
    if is_tree:
        visible = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]], dtype=torch.bool).repeat(2, 1)
        positions = torch.tensor([5, 6, 6, 7, 11, 12, 12, 13])
        tree = Tree(torch.tensor([5, 11]), visible)
    plan = AttentionPlan.build(
        table, query_lens, seq_lens, page_size=page_size, num_kv_heads=3, windows=frozenset({window}),
        dtype=torch.float32, positions=positions, tree=tree,
    )  # fmt: skip
    clear_fresh_pages(kv.unsqueeze(0), plan)
    plain = fp8_numbers(kv)
    store_kv(new, kv, plan)
    first = 0
    for seq, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True)):
        for token, slot in enumerate(range(seq_len - query_len, seq_len), first):
            rows = fp8_rounded(new[token]).view(2, 3, head_dim)
            plain[table[seq, slot // page_size], :, :, slot % page_size] = rows
        first += query_len
    torch.testing.assert_close(fp8_numbers(kv), plain, rtol=0, atol=0)
    expected = paged_attention_ref(q, plain, table, query_lens, seq_lens, window, positions, tree)
    torch.testing.assert_close(paged_attention(q, kv, plan, window), expected, **NEAR)
    torch.testing.assert_close(
        paged_attention_ref(q, kv, table, query_lens, seq_lens, window, positions, tree), expected, **NEAR
    )


def test_slots_move_with_their_scales() -> None:
    kv = fp8_pool(numbers(4, 16))
    expected, table = fp8_numbers(kv), torch.tensor([[1, 2], [3, 4]])
    sources, targets = torch.tensor([[1, 6, 5], [2, 3, 7]]), torch.tensor([[0, 1, 5], [3, 2, 4]])
    move_slots_ref_(expected, table, sources, targets)
    move_slots_ref_(kv, table, sources, targets)
    assert torch.equal(fp8_numbers(kv), expected)


def test_triton_moves_slots_with_their_scales() -> None:
    pytest.importorskip("triton")
    from baton.kernels.state.triton_trees import move_slots_

    for shape in ((2, 3), (1, 1)):
        kv = fp8_pool(numbers(4, 10).to(DEVICE)[:, :, : shape[0], : shape[1]])
        expected, table = fp8_numbers(kv), torch.tensor([[1, 2], [3, 4]], device=DEVICE)
        sources = torch.tensor([[1, 6, 5], [2, 3, 7]], device=DEVICE)
        targets = torch.tensor([[0, 1, 5], [3, 2, 4]], device=DEVICE)
        move_slots_ref_(expected, table, sources, targets)
        move_slots_(kv, table, sources, targets)
        assert torch.equal(fp8_numbers(kv), expected)
