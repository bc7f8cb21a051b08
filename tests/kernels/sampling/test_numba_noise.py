"""The compiled noise against the reference, always to the bit."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

from baton.kernels import operations
from baton.kernels.operations import preferring
from baton.kernels.sampling.noise import add_gumbel_noise_, gumbel_from_bits_ref, gumbel_noise_ref

SEED_LIMIT, POSITION_LIMIT = 2**63 - 1, 2**31 - 1
pytestmark = pytest.mark.skipif(not operations.is_installed("numba"), reason="needs numba")


def assert_same_bits(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.dtype == expected.dtype == torch.float32
    assert torch.equal(actual.view(torch.int32), expected.view(torch.int32))


def compiled_from_bits(bits: torch.Tensor) -> torch.Tensor:
    from baton.kernels.sampling import numba_noise

    out = np.empty(len(bits), np.float32)
    numba_noise.gumbel_from_bits(bits.numpy(), out)
    return torch.from_numpy(out)


def random_rows(count: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """(seeds, positions), the first rows at the ends of their ranges."""
    generator = torch.Generator().manual_seed(seed)
    seeds = torch.randint(0, SEED_LIMIT, (count,), generator=generator)
    positions = torch.randint(0, POSITION_LIMIT, (count,), generator=generator)
    ends = [(0, 0), (SEED_LIMIT, POSITION_LIMIT), (1 << 32, 1), (2**32 - 1, 0), (2**31, 2**20), (SEED_LIMIT, 0)][:count]
    seeds[: len(ends)], positions[: len(ends)] = torch.tensor(ends, dtype=torch.int64).view(-1, 2).unbind(1)
    return seeds, positions


def test_ends_of_the_range() -> None:
    near = [k for centre in (0, 2**31, 2**32) for k in range(centre - 5000, centre + 5000) if 0 <= k < 2**32]
    powers = [min(2**32 - 1, max(0, sign + 2**k)) for k in range(33) for sign in (-1, 0, 1)]
    r = torch.tensor([0, 1, 2**31 - 1, 2**31, 2**32 - 2, 2**32 - 1, *near, *powers])
    bits = (r - (r >> 31 << 32)).to(torch.int32)
    assert_same_bits(compiled_from_bits(bits), gumbel_from_bits_ref(bits))


def test_millions_of_bits() -> None:
    generator = torch.Generator().manual_seed(1)
    bits = torch.randint(-(2**31), 2**31, (1 << 22,), generator=generator).to(torch.int32)
    assert_same_bits(compiled_from_bits(bits), gumbel_from_bits_ref(bits))


@pytest.mark.parametrize("count", [0, 1, 3, 511, 512, 513, 1030])
def test_any_number_of_bits(count: int) -> None:
    bits = torch.arange(count, dtype=torch.int32) * 2_000_003
    assert_same_bits(compiled_from_bits(bits), gumbel_from_bits_ref(bits))


@pytest.mark.parametrize("num_rows", [0, 1, 6, 48])
@pytest.mark.parametrize("vocab_size", [0, 1, 7, 511, 512, 513, 4096, 50_257])
def test_sums_and_noise_equal_the_reference(num_rows: int, vocab_size: int) -> None:
    seeds, positions = random_rows(num_rows, vocab_size)
    expected = gumbel_noise_ref(seeds, positions, vocab_size)
    zeros = torch.zeros(num_rows, vocab_size)
    assert_same_bits(add_gumbel_noise_(zeros, seeds, positions), expected)
    scores = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(2))
    expected += scores
    assert add_gumbel_noise_(scores, seeds, positions) is scores
    assert_same_bits(scores, expected)


def test_large_vocabulary() -> None:
    seeds, positions = random_rows(2)
    noise = add_gumbel_noise_(torch.zeros(2, 2_000_003), seeds, positions)
    assert_same_bits(noise, gumbel_noise_ref(seeds, positions, 2_000_003))


def test_infinities_and_nan_stay() -> None:
    scores = torch.zeros(2, 600)
    scores[0, ::3], scores[1, 1::2], scores[0, 1] = -torch.inf, torch.inf, torch.nan
    before = scores.clone()
    seeds, positions = random_rows(2)
    add_gumbel_noise_(scores, seeds, positions)
    is_number = before.isfinite()
    torch.testing.assert_close(scores[~is_number], before[~is_number], rtol=0, atol=0, equal_nan=True)
    assert_same_bits(scores[is_number], gumbel_noise_ref(seeds, positions, 600)[is_number])


def test_strided_arguments_are_read_and_nothing_else_is_written() -> None:
    pairs = torch.stack(random_rows(3), 1)
    kept, table = pairs.clone(), torch.zeros(5, 700)
    add_gumbel_noise_(table[1:4], pairs[:, 0], pairs[:, 1])
    assert_same_bits(table[1:4], gumbel_noise_ref(pairs[:, 0], pairs[:, 1], 700))
    assert torch.equal(pairs, kept) and not table[0].any() and not table[4].any()


@pytest.mark.parametrize(
    "scores", [torch.zeros(4, 8)[:, ::2], torch.zeros(4, 8, dtype=torch.float64), torch.zeros(3, 8), torch.zeros(4)]
)
def test_other_scores_are_refused(scores: torch.Tensor) -> None:
    with pytest.raises(AssertionError):
        add_gumbel_noise_(scores, *random_rows(4))


def test_the_reference_adds_the_same_bits() -> None:
    seeds, positions = random_rows(6)
    scores = torch.randn(6, 1000, generator=torch.Generator().manual_seed(3))
    compiled = add_gumbel_noise_(scores.clone(), seeds, positions)
    with preferring("reference"):
        assert add_gumbel_noise_(scores, seeds, positions) is scores
        assert_same_bits(scores, compiled)


def test_without_numba_torch_serves() -> None:
    code = (
        "import sys; sys.modules['numba'] = None\n"
        "import torch; from baton.kernels.sampling.noise import add_gumbel_noise_\n"
        "one = torch.ones(1, dtype=torch.int64); print(add_gumbel_noise_(torch.zeros(1, 4), one, one).tolist())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    one = torch.ones(1, dtype=torch.int64)
    assert done.stdout.strip() == str(gumbel_noise_ref(one, one, 4).tolist())
