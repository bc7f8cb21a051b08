"""Pages gathered and digested by Triton, against plain torch and plain integers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from large_pool import HEAD_DIM, IN_A_FILE, NUM_PAGES, PAGE_SIZE, PAGES, make_large_pool, small_pool
from triton_device import DEVICE, IS_INTERPRETED

pytest.importorskip("triton")

from baton.kernels.state import triton_pages
from baton.kernels.state.pages import PoolAddress, WordSpan, gather_pages_ref, page_checksums_ref

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's products wrap aloud

SHAPES = [(1, 2, 1), (2, 5, 4), (3, 7, 24), (2, 4, 5000), (1, 9, 8192)]  # layers, pages, words of a page


def make_pool(num_layers: int, num_pages: int, page_words: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = (num_layers, num_pages, page_words)
    return torch.randint(-(2**31), 2**31, shape, generator=generator, dtype=torch.int64).int().to(DEVICE)


def checksums(pool: torch.Tensor, pages: torch.Tensor, block_words: int) -> torch.Tensor:
    shape = (pages.shape[0], pool.shape[0], pool.shape[2] // block_words)
    sums = torch.empty(shape, dtype=torch.int64, device=DEVICE)
    triton_pages.page_checksums(pool, pages, block_words, sums)
    return sums


def numbers(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize("is_tensor", [True] if IS_INTERPRETED else [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_gather_equals_the_reference(shape: tuple[int, int, int], is_tensor: bool) -> None:
    num_layers, num_pages, page_words = shape
    peer, pool = make_pool(num_layers, num_pages + 3, page_words), make_pool(*shape, seed=1)
    expected = pool.clone()
    sources, targets = numbers(num_pages + 2, 0, 1)[: num_pages - 1], numbers(1, 0, num_pages - 1)[: num_pages - 1]
    gather_pages_ref(peer, expected, sources, targets)
    assert not torch.equal(expected, pool)
    before = peer.clone()
    triton_pages.gather_pages(
        peer if is_tensor else PoolAddress(peer.data_ptr(), num_pages + 3), pool, sources, targets
    )
    assert torch.equal(pool, expected) and torch.equal(peer, before)


@pytest.mark.parametrize(
    "spans", [[], [(0, 4, 4)], [(8, 0, 4), (0, 4, 8)], [(1, 3, 5)], [(0, 0, 12)]], ids=lambda spans: str(len(spans))
)
def test_spans_of_pages_equal_the_reference(spans: list[tuple[int, int, int]]) -> None:
    """The peer's pages have another size."""
    peer, pool = make_pool(3, 7, 12), make_pool(3, 5, 16, seed=1)
    expected, before = pool.clone(), pool.clone()
    sources, targets, words = numbers(6, 0), numbers(1, 4), [WordSpan(*span) for span in spans]
    for layer, (source, target) in ((layer, pair) for layer in range(3) for pair in ((6, 1), (0, 4))):
        for start, place, size in spans:
            expected[layer, target, place : place + size] = peer[layer, source, start : start + size]
    triton_pages.gather_pages(peer, pool, sources, targets, spans=words)
    assert torch.equal(pool, expected)
    if spans:
        gather_pages_ref(peer, before, sources, targets, words)
        assert torch.equal(before, expected) and not torch.equal(before, make_pool(3, 5, 16, seed=1))


def test_spans_beyond_a_page_are_refused() -> None:
    peer, pool = make_pool(1, 2, 4), make_pool(1, 2, 8)
    for span in (WordSpan(1, 0, 4), WordSpan(0, 5, 4)):
        with pytest.raises(AssertionError, match="num_words=4"):
            triton_pages.gather_pages(peer, pool, numbers(1), numbers(1), spans=[span])
    with pytest.raises(AssertionError):
        triton_pages.gather_pages(peer, pool, numbers(1), numbers(1))


def test_nothing_to_gather_launches_nothing() -> None:
    pool = make_pool(1, 2, 4)
    before = pool.clone()
    triton_pages.gather_pages(make_pool(1, 2, 4, seed=1), pool, numbers(), numbers())
    assert torch.equal(pool, before)
    assert checksums(pool, numbers(), 2).shape == (0, 1, 2)


@pytest.mark.parametrize("few", [0, 1 << 30], ids=["many", "few"])  # programs below which pages are few
@pytest.mark.parametrize(
    ("shape", "block_words"),
    [((1, 2, 1), 1), ((2, 5, 4), 2), ((3, 7, 24), 3), ((2, 4, 5000), 500), ((1, 3, 40 * 8), 8), ((2, 3, 2048), 512)],
)
def test_checksums_equal_the_reference(
    shape: tuple[int, int, int], block_words: int, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_pages, "_FEW_PROGRAMS", few)
    pool = make_pool(*shape)
    pages = numbers(shape[1] - 1, 0)
    sums = checksums(pool, pages, block_words)
    assert torch.equal(sums, page_checksums_ref(pool, pages, block_words))
    assert sums.unique().numel() == sums.numel() == 2 * shape[0] * shape[2] // block_words


def test_blocks_of_two_sizes_are_digested_in_two_launches() -> None:
    """The blocks of a size are a range of each page's words, and their checksums are a range of each layer's."""
    pool, pages = make_pool(3, 4, 3 * 5 + 2 * 7), numbers(2, 0, 3)
    sums = torch.full((3, 3, 3 + 2), -1, dtype=torch.int64, device=DEVICE)
    triton_pages.page_checksums(pool[:, :, :15], pages, 5, sums[:, :, :3])
    assert bool((sums[:, :, 3:] == -1).all())
    triton_pages.page_checksums(pool[:, :, 15:], pages, 7, sums[:, :, 3:])
    expected = [
        page_checksums_ref(pool[:, :, :15].clone(), pages, 5),
        page_checksums_ref(pool[:, :, 15:].clone(), pages, 7),
    ]
    assert torch.equal(sums, torch.cat(expected, dim=2))


@IN_A_FILE
def test_a_pool_of_more_than_2_31_elements(tmp_path: Path) -> None:
    """Its last page is digested and moved as in a small pool."""
    kv = make_large_pool(tmp_path)
    pool, block_words = kv.view(1, NUM_PAGES, -1).view(torch.int32), PAGE_SIZE * HEAD_DIM
    expected = small_pool(kv).view(1, 3, -1).view(torch.int32)
    sums = checksums(pool, numbers(PAGES[2], PAGES[0]), block_words)
    assert torch.equal(sums, page_checksums_ref(expected, numbers(2, 0), block_words))
    gather_pages_ref(expected, expected, numbers(0), numbers(2))
    triton_pages.gather_pages(pool, pool, numbers(PAGES[0]), numbers(PAGES[2]))
    assert torch.equal(small_pool(kv).view(1, 3, -1).view(torch.int32), expected)
