import math

import pytest
import torch
from transformers import LogitsProcessor, MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from baton.engine.sampling.batch import SamplingBatch
from baton.engine.sampling.state import SamplingState
from baton.kernels.sampling import filters
from baton.kernels.sampling.filters import Filters, keep_likely
from baton.metadata.wire.request import SamplingParams

INF = float("inf")


def params(**fields: object) -> SamplingParams:
    return SamplingParams(max_tokens=8, **fields)  # type: ignore[arg-type]


def filters_of(rows: list[SamplingParams], vocab_size: int) -> Filters | None:
    draws = SamplingBatch.of([SamplingState(row, [0], vocab_size=vocab_size) for row in rows]).draws
    return None if draws is None else draws.filters


def shifted(logits: torch.Tensor) -> torch.Tensor:
    return logits - logits.amax(1, keepdim=True)


def random_logits(num_rows: int, vocab_size: int, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return shifted(torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale)


def kept(scores: torch.Tensor, rows: list[SamplingParams]) -> torch.Tensor:
    result = scores.clone()
    columns = filters_of(rows, scores.shape[1])
    if columns is not None:
        keep_likely(result, columns)
    is_kept = result > -INF
    assert torch.equal(result[is_kept], scores[is_kept])
    return is_kept


def kept_by_transformers(scores: torch.Tensor, row: SamplingParams) -> torch.Tensor:
    """min-p, top-k, top-p in our order, by transformers' own classes."""
    warpers: list[LogitsProcessor] = []
    if row.min_p > 0:
        warpers.append(MinPLogitsWarper(row.min_p))
    if row.top_k > 0:
        warpers.append(TopKLogitsWarper(row.top_k))
    if row.top_p < 1:
        warpers.append(TopPLogitsWarper(row.top_p))
    scores, ids = scores.double(), torch.zeros(1, 1, dtype=torch.int64)
    for warper in warpers:
        scores = warper(ids, scores)  # type: ignore[arg-type]
    return scores > -INF


@pytest.mark.parametrize("vocab_size", [50, 1000, 5000])
@pytest.mark.parametrize(
    "fields",
    [
        {"top_k": 1},
        {"top_k": 7},
        {"top_k": 49},
        {"top_p": 0.1},
        {"top_p": 0.9},
        {"top_p": 0.999},
        {"min_p": 0.02},
        {"min_p": 0.5},
        {"top_k": 20, "top_p": 0.8},
        {"min_p": 0.01, "top_p": 0.95},
        {"min_p": 0.05, "top_k": 5},
        {"min_p": 0.003, "top_k": 30, "top_p": 0.7},
    ],
)
def test_keeps_what_transformers_keeps(fields: dict[str, object], vocab_size: int) -> None:
    for scale in (0.1, 1.0, 4.0):
        scores = random_logits(6, vocab_size, seed=vocab_size, scale=scale)
        assert torch.equal(kept(scores, [params(**fields)] * 6), kept_by_transformers(scores, params(**fields)))


def test_rows_with_unlike_filters_keep_to_themselves() -> None:
    rows = [
        params(),
        params(top_k=3),
        params(top_p=0.5),
        params(min_p=0.1),
        params(top_k=40, top_p=0.9),
        params(top_k=8, min_p=0.01),
        params(top_p=0.97, min_p=0.001),
        params(top_k=600),
    ]
    scores = random_logits(8, 700)
    together = kept(scores, rows)
    for row in range(8):
        assert torch.equal(kept(scores[row : row + 1], rows[row : row + 1])[0], together[row])
        assert torch.equal(kept_by_transformers(scores[row : row + 1], rows[row])[0], together[row])
    assert together[0].all()
    assert together[1].sum() == 3


@pytest.mark.parametrize("fields", [{"top_p": 0.0}, {"top_p": 1e-30}, {"min_p": 1.0}, {"top_k": 1}])
def test_the_likeliest_always_stays_alone(fields: dict[str, object]) -> None:
    scores = random_logits(4, 333)
    assert kept(scores, [params(**fields)] * 4).nonzero()[:, 1].tolist() == scores.argmax(1).tolist()


def test_a_set_that_holds_exactly_top_p_is_enough() -> None:
    scores = torch.tensor([[0.0, -1.0, -2.0]])
    weights = filters._weights(scores)[0].double()
    share = (weights[0] / weights.sum()).item()
    assert math.ceil(share * weights.sum().item()) == weights[0].item()
    assert kept(scores, [params(top_p=share)]).sum() == 1
    assert kept(scores, [params(top_p=share + 1e-9)]).sum() == 2


def test_a_row_without_top_p_keeps_its_tail_beside_one_with() -> None:
    scores = shifted(torch.linspace(0, -60, 200)[None].expand(2, -1))
    assert kept(scores, [params(top_k=150), params(top_p=0.5)]).sum(1).tolist() == [150, 3]


def test_k_beyond_the_vocabulary_is_off() -> None:
    assert kept(random_logits(2, 40), [params(top_k=40), params(top_k=10**9)]).all()


def test_equal_scores_stay_or_go_together() -> None:
    scores = torch.tensor([[0.0, -1.0, -1.0, -1.0, -2.0]])
    for fields in ({"top_k": 2}, {"top_p": 0.5}, {"top_k": 3, "top_p": 0.5}):
        assert kept(scores, [params(**fields)]).tolist() == [[True, True, True, True, False]]


def test_banned_tokens_stay_banned() -> None:
    scores = torch.full((4, 600), -INF)
    scores[:, 17] = 0.0
    rows = [params(top_k=5), params(top_p=0.9), params(min_p=0.1), params(top_k=500, top_p=0.99, min_p=0.01)]
    assert kept(scores, rows).nonzero().tolist() == [[row, 17] for row in range(4)]


def test_order_of_the_vocabulary_does_not_matter() -> None:
    scores = random_logits(3, 4096, scale=1.5)
    order = torch.randperm(4096, generator=torch.Generator().manual_seed(4))
    rows = [params(top_p=p) for p in (0.4, 0.9, 0.995)]
    assert torch.equal(kept(scores[:, order], rows), kept(scores, rows)[:, order])


def test_weights_are_exp_in_fixed_point() -> None:
    scores = torch.cat([torch.linspace(-31.9, 0, 5000), torch.tensor([0.0, -INF, -1e30, -33.0])])[None]
    weights = filters._weights(scores)[0]
    expected = scores.double().exp()[0] * 2.0**40
    assert ((weights - expected).abs() <= 1 + 3e-6 * expected).all()
    assert weights[-4:].tolist() == [2**40, 0, 0, 0]


def test_exponential_comes_from_the_stated_fit() -> None:
    x = torch.linspace(-0.5, 0.5, 4001, dtype=torch.float64)
    power = sum(c * x**i for i, c in enumerate(filters.EXP2_COEFFICIENTS))
    assert (power / 2**x - 1).abs().max() < 3e-8
    assert all(c == torch.tensor(c, dtype=torch.float32).item() for c in filters.EXP2_COEFFICIENTS)
    assert pytest.approx(1 / math.log(2), rel=6e-8) == filters.LOG2_E


def test_nan_harms_only_its_own_row() -> None:
    scores = random_logits(2, 900)
    scores[0] = float("nan")
    rows = [params(top_p=0.5, top_k=700, min_p=1e-4)] * 2
    columns = filters_of(rows, scores.shape[1])
    assert columns is not None
    keep_likely(scores, columns)
    assert torch.equal(scores[1] > -INF, kept(random_logits(2, 900)[1:], rows[1:])[0])
