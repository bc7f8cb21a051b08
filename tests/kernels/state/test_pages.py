"""Checksums and copies of pages by every backend, against integers without a bound and plain loops."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from triton_device import DEVICE

from baton.kernels.operations import captures
from baton.kernels.state import pages
from baton.kernels.state.pages import gather_pages, gather_pages_ref, has_kernels, multipliers, page_checksums

pytestmark = [
    pytest.mark.usefixtures("each_backend"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # the interpreter's products wrap aloud
]


def make_pool(num_layers: int, num_pages: int, page_words: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = (num_layers, num_pages, page_words)
    return torch.randint(-(2**31), 2**31, shape, generator=generator, dtype=torch.int64).int().to(DEVICE)


def numbers(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def digest(pool: Tensor, page_numbers: Tensor, block_words: int) -> Tensor:
    sums = torch.full(
        (len(page_numbers), len(pool), pool.shape[2] // block_words), -1, dtype=torch.int64, device=DEVICE
    )
    page_checksums(pool, page_numbers, block_words, sums)
    return sums


def plain_digest(block: list[int]) -> int:
    """Return the formula's sum of a block of int32 words, in 0 .. 2^64 - 1."""
    m = [value % 2**64 for value in multipliers(len(block) + 1).tolist()]
    return (m[0] + sum(factor * (word % 2**32) for factor, word in zip(m[1:], block, strict=True))) % 2**64


@pytest.mark.parametrize(
    ("num_layers", "page_words", "block_words"), [(1, 1, 1), (2, 12, 6), (3, 30, 10), (1, 144, 48), (2, 576, 576)]
)
def test_checksums_are_the_formula(num_layers: int, page_words: int, block_words: int) -> None:
    """Of the pages named, in their order; of each, by layer, then by block."""
    pool = make_pool(num_layers, 5, page_words)
    sums = digest(pool, numbers(4, 0, 4), block_words)
    for place, page in enumerate((4, 0, 4)):
        blocks = pool[:, page].reshape(num_layers, -1, block_words).tolist()
        expected = [[plain_digest(block) for block in layer] for layer in blocks]
        assert [[value % 2**64 for value in layer] for layer in sums[place].tolist()] == expected


def test_a_range_of_words_and_of_sums() -> None:
    """The words of a range of each page are digested into a range of each layer's sums; other sums stay."""
    pool, sums = make_pool(2, 3, 20), torch.full((2, 2, 5), -1, dtype=torch.int64, device=DEVICE)
    page_checksums(pool[:, :, 5:15], numbers(2, 1), 5, sums[:, :, 1:3])
    assert torch.equal(sums[:, :, 1:3], digest(pool[:, :, 5:15].contiguous(), numbers(2, 1), 5))
    assert (sums[:, :, [0, 3, 4]] == -1).all()


def test_no_pages_have_no_checksums() -> None:
    assert digest(make_pool(2, 3, 12), numbers(), 6).shape == (0, 2, 2)


def test_multipliers_are_splitmix64_made_odd() -> None:
    """The generator's published first values for seed 0, here of the counter alone."""
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert [value % 2**64 for value in multipliers(3).tolist()] == [value | 1 for value in published]


def test_every_changed_bit_and_swapped_word_shows() -> None:
    pool = make_pool(1, 40, 1)
    pool[0, :, 0] = 0x5A5A5A5A
    for bit in range(32):
        pool[0, bit, 0] ^= -(2**31) if bit == 31 else 1 << bit
    sums = digest(pool, numbers(*range(40)), 1)[:, 0, 0]
    assert sums[:32].unique().numel() == 32 and sums[32] not in sums[:32]
    pair = numbers(1, 2, 2, 1, 0, 0, 1, 2).view(1, 4, 2)
    first, second, third, fourth = digest(pair, numbers(0, 1, 2, 3), 2)[:, 0, 0].tolist()
    assert first == fourth and len({first, second, third}) == 3


def gather(peer: Tensor, pool: Tensor, sources: Tensor, targets: Tensor) -> None:
    """Gather by the backend that is preferred, which callers of pages.py ask for too."""
    (gather_pages if captures(pool.device) else gather_pages_ref)(peer, pool, sources, targets)


@pytest.mark.parametrize("moves", [[], [(6, 1)], [(0, 3), (6, 0), (2, 2), (0, 1)]], ids=len)
def test_gathered_pages(moves: list[tuple[int, int]]) -> None:
    """All layers move, a source may serve several targets, and all other pages and the peer stay as they are."""
    peer, pool = make_pool(3, 7, 10), make_pool(3, 4, 10, seed=1)
    expected, before = pool.clone(), peer.clone()
    for source, target in moves:
        for layer in range(3):
            expected[layer, target] = peer[layer, source]
    gather(peer, pool, numbers(*(source for source, _ in moves)), numbers(*(target for _, target in moves)))
    assert torch.equal(pool, expected) and torch.equal(peer, before)


def test_kernels_are_those_of_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    for is_there in (True, False):
        monkeypatch.setattr(pages, "is_installed", {"triton": is_there}.__getitem__)
        assert has_kernels() == is_there
