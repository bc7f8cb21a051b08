"""The Triton sampler against kernels/sampling/noise.py to the bit, and against the formula of
engine/sampling/sampling.py."""

from __future__ import annotations

import pytest
import torch
from heads import over_all_tokens, some_ids
from torch import Tensor
from triton_device import DEVICE, IS_INTERPRETED, random

pytest.importorskip("triton")

import triton
import triton.language as tl

from baton.engine.sampling.batch import SamplingBatch
from baton.engine.sampling.sampling import sample
from baton.engine.sampling.state import SamplingState
from baton.kernels.sampling import triton_filters
from baton.kernels.sampling.filters import Filters
from baton.kernels.sampling.noise import gumbel_from_bits_ref, gumbel_noise_ref
from baton.kernels.sampling.sample import Draws, perturbed_argmax_ref, perturbed_scores
from baton.kernels.sampling.triton_noise import add_gumbel_noise_, gumbel_from_bits
from baton.kernels.sampling.triton_sample import _perturbed, perturbed_argmax, perturbed_topk
from baton.metadata.wire.request import SamplingParams

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's infinities are loud
INF, NAN = float("inf"), float("nan")


def noise_of(num_rows: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Random seeds and positions, the ends of their ranges among them."""
    generator = torch.Generator().manual_seed(seed)
    seeds = torch.randint(0, 2**63 - 1, (num_rows,), generator=generator)
    positions = torch.randint(0, 2**31 - 1, (num_rows,), generator=generator)
    seeds[:1], positions[1:2] = 2**63 - 1, 2**31 - 1
    return seeds.to(DEVICE), positions.to(DEVICE)


def temperatures(num_rows: int) -> Tensor:
    """Greedy and others in turn."""
    return torch.tensor([0.7, 0.0, 1.0, 1.3, 1e-6], device=DEVICE).repeat(num_rows)[:num_rows]


def scores_ref(logits: Tensor, seeds: Tensor, positions: Tensor, temperature: Tensor) -> Tensor:
    """engine/sampling/sampling.py without filters and processors, on the CPU."""
    scores, temperature = logits.cpu().float(), temperature.cpu().unsqueeze(1)
    is_greedy = temperature == 0
    perturbed = (scores - scores.amax(1, keepdim=True)).div_(temperature.masked_fill(is_greedy, 1.0))
    perturbed += gumbel_noise_ref(seeds.cpu(), positions.cpu(), logits.shape[1])
    return torch.where(is_greedy, scores, perturbed)


def same_bits(actual: Tensor, expected: Tensor) -> bool:
    return torch.equal(actual.cpu().view(torch.int32), expected.cpu().view(torch.int32))


# --- noise ------------------------------------------------------------------------------------------------------------


def test_noise_of_bits_equals_the_reference() -> None:
    ends = [k for centre in (0, 2**31, 2**32) for k in range(centre - 300, centre + 300) if 0 <= k < 2**32]
    ends += [min(2**32 - 1, max(0, 2**k + sign)) for k in range(33) for sign in (-1, 0, 1)]
    some = torch.randint(-(2**31), 2**31, (200_001,), generator=torch.Generator().manual_seed(1)).to(torch.int32)
    bits = torch.cat([torch.tensor([r - (r >> 31 << 32) for r in ends], dtype=torch.int32), some])
    assert same_bits(gumbel_from_bits(bits.to(DEVICE)), gumbel_from_bits_ref(bits))


@pytest.mark.parametrize(("num_rows", "vocab_size"), [(1, 1), (3, 1023), (2, 2049), (0, 5)])
def test_noise_added_equals_the_reference(num_rows: int, vocab_size: int) -> None:
    seeds, positions = noise_of(num_rows)
    scores = random(num_rows, vocab_size)
    scores[:, ::7] = -INF
    expected = scores.cpu() + gumbel_noise_ref(seeds.cpu(), positions.cpu(), vocab_size)
    assert add_gumbel_noise_(scores, seeds, positions) is scores
    assert same_bits(scores, expected)


def test_adding_noise_writes_its_rows_only() -> None:
    table = torch.zeros(4, 700, device=DEVICE)
    add_gumbel_noise_(table[1:3], *noise_of(2))
    assert table[1:3].all() and not table[0].any() and not table[3].any()


# --- argmax -----------------------------------------------------------------------------------------------------------


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("num_rows", "vocab_size"), [(1, 1), (5, 1023), (7, 2500), (0, 9)])
def test_argmax_equals_the_formula(num_rows: int, vocab_size: int, dtype: torch.dtype) -> None:
    logits, (seeds, positions) = random(num_rows, vocab_size, dtype=dtype, scale=4.0), noise_of(num_rows)
    before, temperature = logits.clone(), temperatures(num_rows)
    choice = perturbed_argmax(logits, Draws(seeds, positions, temperature))
    expected = scores_ref(logits, seeds, positions, temperature).argmax(1)
    assert choice.token_ids.tolist() == expected.tolist()
    assert choice.is_valid.all() and torch.equal(logits, before)
    assert perturbed_argmax(logits).token_ids.tolist() == logits.cpu().float().argmax(1).tolist()


def test_many_draws_equal_the_formula() -> None:
    """Flat logits, so that the noise decides, in many rows: a wrong last bit of it shows."""
    logits, (seeds, positions) = random(48, 300, scale=0.01), noise_of(48)
    temperature = torch.full((48,), 0.9, device=DEVICE)
    choice = perturbed_argmax(logits, Draws(seeds, positions, temperature))
    assert choice.token_ids.tolist() == scores_ref(logits, seeds, positions, temperature).argmax(1).tolist()


@triton.jit
def _scores_kernel(logits_ptr, out_ptr, seeds_ptr, positions_ptr, temperature, VOCAB_SIZE: tl.constexpr):  # noqa: N803
    row, ids = tl.program_id(0), tl.arange(0, VOCAB_SIZE)
    logits = tl.load(logits_ptr + row * VOCAB_SIZE + ids)
    seed, position = tl.load(seeds_ptr + row), tl.load(positions_ptr + row)
    scores = _perturbed(logits, tl.max(logits, axis=0), temperature, seed, position, ids, 0.0, False)
    tl.store(out_ptr + row * VOCAB_SIZE + ids, scores)


@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_scores_equal_the_formula_to_the_bit(temperature: float) -> None:
    logits, (seeds, positions) = random(4, 1024, scale=4.0), noise_of(4)
    scores = torch.empty_like(logits)
    _scores_kernel[(4,)](logits, scores, seeds, positions, temperature, VOCAB_SIZE=1024, enable_fp_fusion=False)
    assert same_bits(scores, scores_ref(logits, seeds, positions, torch.full((4,), temperature)))


def test_argmax_equals_the_sampler_of_the_engine() -> None:
    params = [SamplingParams(max_tokens=8, temperature=t, seed=s) for t, s in ((0.0, 1), (1.0, 2), (0.4, 3))]
    states = [SamplingState(each, [1, 2, 3], vocab_size=1500) for each in params]
    logits, batch = random(3, 1500, scale=3.0), SamplingBatch.of(states, DEVICE)
    choice = perturbed_argmax(logits, batch.draws)
    assert choice.token_ids.tolist() == sample(logits, batch).token_ids.tolist()


FILTERED = Filters(
    torch.tensor([-INF, -INF, -3.0, -6.0, -INF], device=DEVICE),
    torch.tensor([4, 3, 2**31 - 1, 40, 2**31 - 1], device=DEVICE),
    torch.tensor([1.0, 0.5, 1.0, 0.9, 0.6], dtype=torch.float64, device=DEVICE),
)


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("filters", [FILTERED, FILTERED._replace(top_k=None, top_p=None)], ids=["all", "min_p"])
def test_filtered_rows_equal_the_reference(filters: Filters, dtype: torch.dtype) -> None:
    """Greedy and random rows with unlike filters; flat, so that filters decide."""
    logits, (seeds, positions) = random(5, 2500, dtype=dtype, scale=1.5), noise_of(5)
    temperature = temperatures(5)
    host_filters = Filters(*(None if each is None else each.cpu() for each in filters))
    on_host = Draws(seeds.cpu(), positions.cpu(), temperature.cpu(), host_filters)
    draws = Draws(seeds, positions, temperature, filters)
    choice = perturbed_argmax(logits, draws)
    assert choice.token_ids.tolist() == perturbed_argmax_ref(logits.cpu(), on_host).token_ids.tolist()
    scores = perturbed_scores(logits.cpu(), on_host)
    token_ids, log_softmax = perturbed_topk(logits, 3, draws)
    best, expected_ids = scores.topk(3)
    is_left = best > -INF
    assert torch.equal(token_ids.cpu()[is_left], expected_ids[is_left])
    expected = best - scores.logsumexp(1, keepdim=True)
    torch.testing.assert_close(log_softmax.cpu(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("most", [32, 1024])
def test_a_row_is_drawn_from_its_few_likely_tokens_or_from_all(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steep rows and flat ones, filtered and not: tokens that are gathered are drawn where they are searched."""
    monkeypatch.setattr(triton_filters, "_FEW", 32)
    monkeypatch.setattr(triton_filters, "_MOST_GATHERED", most)
    monkeypatch.setattr(triton_filters, "_MOST_PARTS", 64)
    monkeypatch.setattr(triton_filters, "_SPLIT_SIZE", 512)
    num_rows = 8
    logits, (seeds, positions) = random(num_rows, 2500, seed=4), noise_of(num_rows)
    logits *= torch.tensor([8.0, 0.1] * 4, device=DEVICE)[:, None]
    logits[6, 1000:1010] = logits[6].max() + 1.0  # equals, in two splits
    temperature = torch.tensor([0.7, 1.3] * 4, device=DEVICE)
    filters = Filters(
        torch.full((num_rows,), -INF, device=DEVICE),
        torch.tensor([5, 5, 2**31 - 1, 2**31 - 1, 2**31 - 1, 2**31 - 1, 4, 9], device=DEVICE),
        torch.tensor([1.0, 1.0, 0.9, 0.9, 1.0, 1.0, 0.8, 0.7], dtype=torch.float64, device=DEVICE),
    )
    draws = Draws(seeds, positions, temperature, filters)
    on_host = Draws(seeds.cpu(), positions.cpu(), temperature.cpu(), Filters(*(each.cpu() for each in filters)))
    expected = perturbed_argmax_ref(logits.cpu(), on_host).token_ids.tolist()
    assert perturbed_argmax(logits, draws).token_ids.tolist() == expected


@pytest.mark.skipif(IS_INTERPRETED, reason="the interpreter runs one program after the other")
@pytest.mark.parametrize("scale", [0.01, 1.0, 4.0])
def test_programs_that_draw_one_row_agree(scale: float) -> None:
    """Rows without filters, beside rows that have them: all splits of such a row raise its token at the same time."""
    num_rows = 8
    top_k = torch.tensor([2**31 - 1] * 6 + [50, 5])
    filters = Filters(torch.full((num_rows,), -INF), top_k, torch.ones(num_rows, dtype=torch.float64))
    for seed in range(8):
        logits = random(num_rows, 128_256, dtype=torch.bfloat16, seed=seed, scale=scale)
        seeds, positions = (each.cpu() for each in noise_of(num_rows, seed))
        expected = perturbed_argmax_ref(logits.cpu(), Draws(seeds, positions, torch.ones(num_rows), filters)).token_ids
        columns = (each.repeat(16).to(DEVICE) for each in (seeds, positions, torch.ones(num_rows)))
        draws = Draws(*columns, Filters(*(each.repeat(16).to(DEVICE) for each in filters)))
        found = perturbed_argmax(logits.repeat(16, 1), draws).token_ids
        assert torch.equal(found.cpu(), expected.repeat(16)), seed


def test_the_lowest_of_equals() -> None:
    logits = torch.zeros(3, 3000, device=DEVICE)
    logits[0, [1500, 1501, 2900]] = 1.0
    logits[1] = -1.0
    logits[1, 700], logits[1, 2000] = -0.0, 0.0
    assert perturbed_argmax(logits).token_ids.tolist() == [1500, 700, 0]


def test_infinities() -> None:
    """As torch's argmax has it: a row that is excluded whole, infinite logits, and one token that may be drawn."""
    logits = random(4, 1200)
    logits[0], logits[2, 1100], logits[3] = -INF, INF, -INF
    logits[3, 1100] = 2.0
    seeds, positions = noise_of(4)
    for temperature in (torch.zeros(4, device=DEVICE), torch.ones(4, device=DEVICE)):
        choice = perturbed_argmax(logits, Draws(seeds, positions, temperature))
        assert choice.token_ids.tolist() == scores_ref(logits, seeds, positions, temperature).argmax(1).tolist()
        assert choice.is_valid.all()


@pytest.mark.parametrize(("top_k", "top_p"), [(5, 1.0), (700, 0.9), (5, 0.9)])
def test_an_infinite_logit_is_drawn_whatever_filters_there_are(top_k: int, top_p: float) -> None:
    logits, (seeds, positions) = random(2, 700), noise_of(2)
    logits[0, 5], logits[1, 699] = INF, INF
    filters = Filters(
        torch.full((2,), -INF, device=DEVICE),
        torch.full((2,), top_k, device=DEVICE),
        torch.full((2,), top_p, dtype=torch.float64, device=DEVICE),
    )
    choice = perturbed_argmax(logits, Draws(seeds, positions, torch.ones(2, device=DEVICE), filters))
    assert choice.token_ids.tolist() == [5, 699] and choice.is_valid.all()


def test_a_nan_is_found_and_spoils_its_row_alone() -> None:
    logits, (seeds, positions) = random(4, 2100), noise_of(4)
    temperature = torch.tensor([0.0, 0.0, 1.0, 1.0], device=DEVICE)
    expected = perturbed_argmax(logits, Draws(seeds, positions, temperature))
    logits[0, 2000] = logits[0, 2050] = logits[2, 1500] = NAN
    logits.view(torch.int32)[0, 2000] ^= -(2**31)  # its sign is no matter
    choice = perturbed_argmax(logits, Draws(seeds, positions, temperature))
    assert choice.is_valid.tolist() == [False, True, False, True]
    assert choice.token_ids[0] == 2000
    assert choice.token_ids[1::2].tolist() == expected.token_ids[1::2].tolist()


def test_rows_that_lie_apart_and_alone() -> None:
    """A row's token depends on nothing beside the row."""
    table, (seeds, positions), temperature = random(5, 1400), noise_of(5), temperatures(5)
    table[:, 1300:] = 1e9
    logits = table[:, :1300]
    together = perturbed_argmax(logits, Draws(seeds, positions, temperature)).token_ids
    assert together.tolist() == scores_ref(logits, seeds, positions, temperature).argmax(1).tolist()
    for row in range(5):
        one = slice(row, row + 1)
        alone = perturbed_argmax(logits[one], Draws(seeds[one], positions[one], temperature[one]))
        assert alone.token_ids.item() == together[row]


# --- top-k ------------------------------------------------------------------------------------------------------------


SHAPES = [(5, 2049, 4), (2, 5000, 16), (3, 17, 9), (1, 1, 1), (0, 9, 2)]  # num_rows, vocab_size, k


@pytest.mark.parametrize(("num_rows", "vocab_size", "k"), SHAPES)
@pytest.mark.parametrize("is_random", [True, False])
def test_topk_equals_the_formula(num_rows: int, vocab_size: int, k: int, is_random: bool) -> None:
    logits, (seeds, positions) = random(num_rows, vocab_size, scale=4.0), noise_of(num_rows)
    temperature = temperatures(num_rows)
    if is_random:
        token_ids, log_softmax = perturbed_topk(logits, k, Draws(seeds, positions, temperature))
        scores = scores_ref(logits, seeds, positions, temperature)
    else:
        token_ids, log_softmax = perturbed_topk(logits, k)
        scores = logits.cpu()
    best, expected_ids = scores.topk(k)
    assert token_ids.tolist() == expected_ids.tolist()
    expected = best - scores.logsumexp(1, keepdim=True)
    torch.testing.assert_close(log_softmax.cpu(), expected, rtol=1e-5, atol=1e-5)


def test_topk_of_equals_and_of_few() -> None:
    """Equal scores by id; where fewer than k tokens are left, excluded ones follow with no probability."""
    logits = torch.zeros(2, 4100, device=DEVICE)
    logits[1] = -INF
    logits[1, [3000, 4099]] = torch.tensor([1.0, 2.0], device=DEVICE)
    token_ids, log_softmax = perturbed_topk(logits, 4)
    assert token_ids.tolist() == [[0, 1, 2, 3], [4099, 3000, 0, 1]]
    expected = torch.tensor([[-0.3132617, -1.3132617, -INF, -INF]])
    torch.testing.assert_close(log_softmax[1:].cpu(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(log_softmax[0].cpu(), torch.full((4,), 4100.0).log().neg())


@pytest.mark.parametrize("k", [0, 21, 9])
def test_other_widths_are_refused(k: int) -> None:
    with pytest.raises(AssertionError):
        perturbed_topk(torch.zeros(1, 8 if k == 9 else 64, device=DEVICE), k)


@pytest.mark.parametrize(
    "columns",
    [
        lambda s, p, t: (s.int(), p, t),
        lambda s, p, t: (s, p[:2], t),
        lambda s, p, t: (s, p, t.double()),
        lambda s, p, t: (s, p, t.unsqueeze(1)),
    ],
)
def test_other_columns_are_refused(columns) -> None:
    with pytest.raises(AssertionError):
        perturbed_argmax(random(3, 8), Draws(*columns(*noise_of(3), temperatures(3))))


@pytest.mark.parametrize("most", [32, 1024])
def test_few_likely_tokens_of_a_reduced_vocabulary_are_drawn_with_their_own_noise(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether they are drawn where they are searched, or from all."""
    monkeypatch.setattr(triton_filters, "_FEW", 32)
    monkeypatch.setattr(triton_filters, "_MOST_GATHERED", most)
    monkeypatch.setattr(triton_filters, "_SPLIT_SIZE", 256)
    num_rows, logit_ids = 3, some_ids(611, 2500).to(DEVICE)
    logits, (seeds, positions) = random(num_rows, 611, seed=4), noise_of(num_rows)
    temperature = torch.full((num_rows,), 0.9, device=DEVICE)
    filters = Filters(
        torch.full((num_rows,), -INF, device=DEVICE),
        torch.tensor([5, 40, 700], device=DEVICE),
        torch.tensor([1.0, 1.0, 0.1], dtype=torch.float64, device=DEVICE),
    )
    draws = Draws(seeds, positions, temperature, filters)
    ours = perturbed_argmax(logits, draws, logit_ids)
    assert torch.equal(ours.token_ids, perturbed_argmax(over_all_tokens(logits, logit_ids, 2500), draws).token_ids)
    on_host = Draws(seeds.cpu(), positions.cpu(), temperature.cpu(), Filters(*(each.cpu() for each in filters)))
    assert ours.token_ids.tolist() == perturbed_argmax_ref(logits.cpu(), on_host, logit_ids.cpu()).token_ids.tolist()


def test_topk_of_equals_in_a_reduced_vocabulary() -> None:
    logit_ids = some_ids(2100, 5000).to(DEVICE)
    logits = random(4, 2100).mul(2).round().div(2)
    ours = perturbed_topk(logits, 9, None, logit_ids)[0]
    assert torch.equal(ours, perturbed_topk(over_all_tokens(logits, logit_ids, 5000), 9)[0])
