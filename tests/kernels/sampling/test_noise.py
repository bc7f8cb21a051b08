import math

import numpy as np
import pytest
import torch
from heads import some_ids
from scipy import stats

from baton.kernels.operations import preferring
from baton.kernels.sampling import noise
from baton.kernels.sampling.noise import (
    add_gumbel_noise_,
    gumbel_from_bits_ref,
    gumbel_noise_at,
    gumbel_noise_ref,
    random_bits_ref,
)

SEED_LIMIT = 2**63 - 1


def as_bits(r: list[int]) -> torch.Tensor:
    """Unsigned 32-bit numbers as int32 bits."""
    return torch.tensor([x - (x >> 31 << 32) for x in r], dtype=torch.int32)


def rows(seeds: list[int], positions: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor(seeds, dtype=torch.int64), torch.tensor(positions, dtype=torch.int64)


def uniform(bits: torch.Tensor) -> np.ndarray:
    return ((bits.to(torch.int64) & 0xFFFFFFFF).double().numpy() + 0.5) * 2.0**-32


def exact_noise(bits: torch.Tensor) -> np.ndarray:
    """The formula in float64, the upper half by the exact 1 - u."""
    r = bits.to(torch.int64).numpy() & 0xFFFFFFFF
    u, w = (r + 0.5) * 2.0**-32, (2**32 - 1 - r + 0.5) * 2.0**-32
    return -np.log(np.where(u < 0.5, -np.log1p(-u), -np.log(w)))


@pytest.mark.parametrize("r", [0, 1, 2, 2**31 - 1, 2**31, 2**31 + 1, 2**32 - 2, 2**32 - 1])
def test_ends_of_the_range_are_finite_and_right(r: int) -> None:
    actual = gumbel_from_bits_ref(as_bits([r])).item()
    u = (r + 0.5) * 2.0**-32
    expected = -math.log(-math.log1p(-u) if r < 2**31 else -math.log((2**32 - r - 0.5) * 2.0**-32))
    assert actual == pytest.approx(expected, rel=1e-6)


def test_naive_float32_would_fail_here() -> None:
    u = torch.tensor([2**32 - 1], dtype=torch.float32).add(0.5).mul(2.0**-32)
    assert not torch.isfinite(-torch.log(-torch.log1p(-u))).all()
    assert torch.isfinite(gumbel_from_bits_ref(as_bits([2**32 - 1]))).all()


def test_error_against_float64() -> None:
    generator = torch.Generator().manual_seed(1)
    near = [k for centre in (0, 2**31, 2**32) for k in range(centre - 3000, centre + 3000) if 0 <= k < 2**32]
    powers = [min(2**32 - 1, max(0, sign + 2**k)) for k in range(33) for sign in (-1, 0, 1)]
    random = torch.randint(-(2**31), 2**31, (1_000_000,), generator=generator).to(torch.int32)
    bits = torch.cat([as_bits(near + powers), random])
    actual, expected = gumbel_from_bits_ref(bits).double().numpy(), exact_noise(bits)
    error = np.abs(actual - expected) / np.maximum(1.0, np.abs(expected))
    assert error.max() < 5e-7


def test_coefficients_come_from_the_stated_fit() -> None:
    nodes = 0.25 + 0.25 * np.cos(np.pi * (np.arange(400) + 0.5) / 400)
    fit = np.polynomial.Chebyshev.fit(nodes, -np.log1p(-nodes) / nodes, 8, domain=[0, 0.5])
    coefficients = fit.convert(kind=np.polynomial.Polynomial).coef
    np.testing.assert_allclose(noise._LOG1P_COEFFICIENTS, coefficients, rtol=1e-5)
    assert all(c == float(np.float32(c)) for c in (*noise._LOG1P_COEFFICIENTS, noise._LN_2))
    f = np.linspace(1e-6, 0.5, 10_001)
    relative = np.polyval(noise._LOG1P_COEFFICIENTS[::-1], f) * f / -np.log1p(-f) - 1
    assert np.abs(relative).max() < 6e-8


def test_golden_values() -> None:
    """Pinned: a change here changes the text of every seeded request."""
    seeds, positions = rows([0, 1, SEED_LIMIT, 1 << 32], [0, 1, 2**20, 7])
    ids = torch.tensor([[0, 1, 4095, 128_255]])
    assert random_bits_ref(seeds, positions, ids).tolist() == GOLDEN_BITS
    assert gumbel_noise_at(seeds, positions, ids).view(torch.int32).tolist() == GOLDEN_NOISE


GOLDEN_BITS = [
    [2052808090, -42039115, 51091279, -517363651],
    [-1980695794, 1105681387, -718038510, 1260698505],
    [1313724364, 1831748677, 1497132671, 160056774],
    [-2008488210, 335014143, -1792341937, 279487315],
]
GOLDEN_NOISE = [
    [1054641829, -1077669186, 1083022996, -1086329070],
    [1048783665, 1067130320, -1089152105, 1065831929],
    [1065416752, 1058424759, 1062790252, 1079071701],
    [1049393244, 1075883836, 1040842740, 1076672751],
]


@pytest.mark.parametrize("name", ["tokens", "positions", "seeds", "high words of seeds"])
def test_distribution_is_gumbel(name: str) -> None:
    count = 100_000
    many, one = torch.arange(count), torch.zeros(count, dtype=torch.int64)
    first = torch.tensor([[5]])
    sample = {
        "tokens": lambda: gumbel_noise_ref(*rows([42], [9]), count),
        "positions": lambda: gumbel_noise_at(one, many, first),
        "seeds": lambda: gumbel_noise_at(many, one, first),
        "high words of seeds": lambda: gumbel_noise_at(many << 32 & SEED_LIMIT, one, first),
    }[name]()
    assert stats.kstest(sample.flatten().double().numpy(), stats.gumbel_r.cdf).pvalue > 1e-3
    counts = np.histogram(np.exp(-np.exp(-sample.double().numpy())), bins=256, range=(0, 1))[0]
    assert stats.chisquare(counts).pvalue > 1e-3


@pytest.mark.parametrize(
    ("seed_step", "position_step", "token_step"),
    [(0, 1, 0), (0, 2, 0), (0, 0, 1), (0, 0, 2), (1, 0, 0), (1 << 32, 0, 0), (1, 1, 0), (0, 1, 1), (0, 1, -1)],
)
def test_neighbours_are_independent(seed_step: int, position_step: int, token_step: int) -> None:
    """16 x 16 cells of (u, u of a neighbour), by the leading and by the trailing bits, over three kinds of rows."""
    ids = torch.arange(1, 2049)[None]
    for seed in (0, 12345, 2**62 + 17):
        seeds = torch.full((64,), seed, dtype=torch.int64)
        positions = torch.arange(64)
        first = random_bits_ref(seeds, positions, ids)
        second = random_bits_ref(seeds + seed_step, positions + position_step, ids + token_step)
        for shift in (28, 0):
            cells = (first >> shift & 15) * 16 + (second >> shift & 15)
            assert stats.chisquare(torch.bincount(cells.flatten(), minlength=256).numpy()).pvalue > 1e-4
        correlation = np.corrcoef(uniform(first).ravel(), uniform(second).ravel())[0, 1]
        assert abs(correlation) < 4.5 / math.sqrt(first.numel())


def test_every_input_bit_moves_every_output_bit() -> None:
    count = 20_000
    generator = torch.Generator().manual_seed(2)
    seeds = torch.randint(0, SEED_LIMIT, (count,), generator=generator)
    positions = torch.randint(0, 4096, (count,), generator=generator)
    ids = torch.randint(0, 150_000, (count, 1), generator=generator)
    base = random_bits_ref(seeds, positions, ids)
    flips = [(seeds ^ (1 << bit), positions, ids) for bit in range(63)]
    flips += [(seeds, positions ^ (1 << bit), ids) for bit in range(20)]
    flips += [(seeds, positions, ids ^ (1 << bit)) for bit in range(18)]
    for changed in flips:
        difference = random_bits_ref(*changed) ^ base  # [count, 1]
        moved = (difference >> torch.arange(32, dtype=torch.int32) & 1).double().mean(0)
        assert (moved - 0.5).abs().max() < 6 * 0.5 / math.sqrt(count)


def test_rows_with_near_keys_share_no_sequence() -> None:
    """One 32-bit key a row would give rows, whose keys differ in few bits, the same values at exchanged ids."""
    positions = torch.arange(2**16)
    seeds = torch.full_like(positions, 3)
    key_1, _ = noise._row_keys(seeds, positions)
    order = key_1.flatten().argsort()
    near = (key_1[order[1:], 0] >> 15 == key_1[order[:-1], 0] >> 15).nonzero().flatten()[:32]
    assert len(near) == 32
    ids = torch.arange(2**15)[None]
    num_shared = 0
    for i in near.tolist():
        pair = order[i : i + 2]
        bits = random_bits_ref(seeds[pair], positions[pair], ids)
        num_shared += bits.numel() - bits.unique().numel()
    assert num_shared < 32 * 2**30 / 2**32 + 6 * math.sqrt(8)


def test_given_ids_have_the_noise_of_those_ids() -> None:
    seeds, positions = rows([1, 2, 3], [10, 10, 11])
    whole = gumbel_noise_ref(seeds, positions, 1000)
    permutation = torch.randperm(1000, generator=torch.Generator().manual_seed(0))
    ids = torch.stack([permutation, permutation.flip(0), permutation.roll(5)])
    assert torch.equal(gumbel_noise_at(seeds, positions, ids), whole.gather(1, ids))
    assert torch.equal(gumbel_noise_at(seeds, positions, permutation[None]), whole[:, permutation])
    assert torch.equal(gumbel_noise_at(seeds, positions, ids.to(torch.int32)), whole.gather(1, ids))


def test_rows_and_blocks_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds, positions = rows([7, 8, 9, 7], [0, 5, 5, 1])
    whole = gumbel_noise_ref(seeds, positions, 5003)
    for row in range(4):
        assert torch.equal(gumbel_noise_ref(seeds[row : row + 1], positions[row : row + 1], 5003)[0], whole[row])
    monkeypatch.setattr(noise, "_BLOCK_SIZE", 777)
    assert torch.equal(gumbel_noise_ref(seeds, positions, 5003), whole)


def test_no_rows_and_strided_arguments() -> None:
    empty = torch.zeros(0, dtype=torch.int64)
    assert gumbel_noise_ref(empty, empty, 10).shape == (0, 10)
    pairs = torch.tensor([[1, 50], [2, 60], [3, 70]])
    strided = gumbel_noise_ref(pairs[:, 0], pairs[:, 1], 64)
    assert torch.equal(strided, gumbel_noise_ref(*rows([1, 2, 3], [50, 60, 70]), 64))


def test_arguments_are_not_written() -> None:
    seeds, positions = rows([5, 6], [1, 2])
    ids = torch.arange(8, dtype=torch.int32)[None]
    bits = random_bits_ref(seeds, positions, ids)
    kept = [x.clone() for x in (seeds, positions, ids, bits)]
    gumbel_noise_at(seeds, positions, ids)
    gumbel_from_bits_ref(bits)
    assert all(torch.equal(a, b) for a, b in zip(kept, (seeds, positions, ids, bits), strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_gives_the_same_bits() -> None:
    generator = torch.Generator().manual_seed(3)
    seeds = torch.randint(0, SEED_LIMIT, (8,), generator=generator)
    positions = torch.arange(8) * 1000
    expected = gumbel_noise_ref(seeds, positions, 128_256)
    actual = gumbel_noise_at(seeds.cuda(), positions.cuda(), torch.arange(128_256, device="cuda")[None]).cpu()
    assert torch.equal(actual.view(torch.int32), expected.view(torch.int32))
    bits = torch.randint(-(2**31), 2**31, (1 << 24,), generator=generator).to(torch.int32)
    assert torch.equal(gumbel_from_bits_ref(bits.cuda()).cpu(), gumbel_from_bits_ref(bits))


@pytest.mark.parametrize("kind", ["reference", "numba", "triton"])
@pytest.mark.parametrize(("num_ids", "vocab_size"), [(1, 70_000), (600, 70_000), (1300, 1500), (50, 50)])
def test_noise_of_some_ids_is_added(kind: str, num_ids: int, vocab_size: int) -> None:
    if kind != "reference":
        pytest.importorskip(kind)
    ids, generator = some_ids(num_ids, vocab_size), torch.Generator().manual_seed(1)
    seeds, positions = (torch.randint(0, 2**31 - 1, (3,), generator=generator) for _ in range(2))
    scores = torch.randn(3, num_ids, generator=generator)
    scores[:, ::7] = -math.inf
    expected = scores + gumbel_noise_ref(seeds, positions, vocab_size)[:, ids.long()]
    with preferring(kind):  # type: ignore[arg-type]
        assert add_gumbel_noise_(scores, seeds, positions, ids) is scores
    assert torch.equal(scores.view(torch.int32), expected.view(torch.int32))
