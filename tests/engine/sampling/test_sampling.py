import numpy as np
import pytest
import torch
from scipy import stats

from baton.engine.sampling.batch import SamplingBatch
from baton.engine.sampling.sampling import perturbed_scores, sample, tie_gap
from baton.engine.sampling.state import SamplingState
from baton.kernels.sampling.noise import gumbel_noise_ref
from baton.metadata.wire.request import SamplingParams, choice_seed

INF = float("inf")
VOCAB = 300


def state(prompt: list[int] | None = None, output: list[int] | None = None, choice: int = 0, **fields: object):
    params = SamplingParams(max_tokens=64, **fields)  # type: ignore[arg-type]
    return SamplingState(params, prompt or [1, 2, 3], output or [], vocab_size=VOCAB, choice=choice)


def random_logits(num_rows: int, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * scale


def draw(logits: torch.Tensor, *states: SamplingState) -> list[int]:
    return sample(logits, SamplingBatch.of(states)).token_ids.tolist()


def test_greedy_is_argmax_and_ties_go_to_the_lowest_id() -> None:
    logits = torch.randint(0, 3, (200, VOCAB), generator=torch.Generator().manual_seed(1)).float()
    expected = logits.numpy().argmax(1).tolist()  # numpy promises the first
    plain = [state(temperature=0.0)] * 200
    assert draw(logits, *plain) == expected
    assert draw(logits.to(torch.bfloat16), *plain) == expected
    assert draw(logits, *[state(temperature=0.0, logit_bias={0: -1.0})] * 200)[0] != -1
    biased = [state(temperature=0.0, logit_bias={299: -5.0})] * 200
    assert draw(logits, *biased) == logits[:, :299].numpy().argmax(1).tolist()


def test_token_is_the_argmax_of_logits_and_noise() -> None:
    logits = random_logits(5)
    states = [state(list(range(n + 1)), [0] * n, seed=n) for n in range(5)]
    noise = gumbel_noise_ref(torch.arange(5), torch.tensor([2 * n + 1 for n in range(5)]), VOCAB)
    assert draw(logits, *states) == (logits + noise).argmax(1).tolist()


def test_logits_are_left_as_they_were() -> None:
    logits = random_logits(3)
    kept = logits.clone()
    states = [state(top_k=3), state(temperature=0.0, logit_bias={1: 5.0}), state(temperature=0.0)]
    batch = SamplingBatch.of(states)
    sample(logits, batch)
    tie_gap(logits, batch)
    assert torch.equal(logits, kept)


MIXED: list[dict[str, object]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 5},
    {"temperature": 0.3, "seed": 2**63 - 1, "top_k": 20},
    {"temperature": 2.0, "seed": 0, "top_p": 0.8},
    {"temperature": 1.5, "seed": 77, "min_p": 0.02},
    {"temperature": 0.0, "repetition_penalty": 2.0},
    {"temperature": 1.0, "seed": 5, "repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2},
    {"temperature": 1.0, "seed": 9, "logit_bias": {3: 4.0}, "min_tokens": 30, "stop_ids": (0, 5)},
    {"temperature": 0.9, "seed": 11, "top_k": 50, "top_p": 0.9, "min_p": 0.001},
]


def model_logits(position: int) -> torch.Tensor:
    """A made-up model: its logits depend on the position, the likely tokens mostly stay so; [1, VOCAB]."""
    return random_logits(1, scale=1.5) + random_logits(1, seed=position, scale=0.3)


def generate(fields: dict[str, object], num_tokens: int, output: list[int] | None = None) -> list[int]:
    row = state([7, 8], output, **fields)
    tokens = list(output or [])
    while len(tokens) < num_tokens:
        tokens += draw(model_logits(row.position), row)
        row.append(tokens[-1])
    return tokens


def test_draws_are_equal_alone_in_any_batch_and_after_a_rebuild() -> None:
    alone = [generate(fields, 24) for fields in MIXED]
    assert len({tuple(tokens) for tokens in alone}) == len(MIXED)
    for order in (list(range(len(MIXED))), list(reversed(range(len(MIXED)))), [4, 1, 8, 2]):
        states = [state([7, 8], **MIXED[i]) for i in order]
        for step in range(24):
            logits = model_logits(2 + step).expand(len(order), -1)
            result = sample(logits, SamplingBatch.of(states)).token_ids.tolist()
            assert result == [alone[i][step] for i in order]
            for row, token_id in zip(states, result, strict=True):
                row.append(token_id)
    for fields, tokens in zip(MIXED, alone, strict=True):
        for cut in (1, 11, 23):
            assert generate(fields, 24, tokens[:cut]) == tokens


def test_choices_draw_apart_and_choice_zero_with_the_requests_seed() -> None:
    logits = torch.zeros(1, VOCAB)
    draws = [[draw(logits, state([0] * n, seed=4, choice=choice))[0] for n in range(1, 30)] for choice in range(3)]
    assert draws[0] != draws[1] != draws[2] != draws[0]
    own = [draw(logits, state([0] * n, seed=choice_seed(4, 2)))[0] for n in range(1, 30)]
    assert own == draws[2]


def chi_square(draws: torch.Tensor, expected: torch.Tensor) -> float:
    """p-value; cells expected fewer than 8 times are joined into one."""
    counts = torch.bincount(draws, minlength=len(expected)).double().numpy()
    wanted = (expected.double() * len(draws)).numpy()
    large = wanted >= 8
    counts = np.append(counts[large], counts[~large].sum())
    wanted = np.append(wanted[large], wanted[~large].sum())
    if wanted[-1] < 1:
        assert counts[-1] <= 8, counts[-1]
        counts, wanted = counts[:-1], wanted[:-1]
    return float(stats.chisquare(counts, wanted * counts.sum() / wanted.sum()).pvalue)


NUM_DRAWS = 8192


def many_draws(logits: torch.Tensor, vary: str, **fields: object) -> torch.Tensor:
    params = [SamplingParams(max_tokens=1, seed=i if vary == "seeds" else 123, **fields) for i in range(NUM_DRAWS)]  # type: ignore[arg-type]
    prompt = [0] * NUM_DRAWS
    states = [
        SamplingState(p, prompt[: i + 1] if vary == "positions" else [0], vocab_size=logits.shape[1])
        for i, p in enumerate(params)
    ]
    return sample(logits.expand(NUM_DRAWS, -1), SamplingBatch.of(states)).token_ids


@pytest.mark.parametrize("vary", ["positions", "seeds"])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("top_p", [1.0, 0.85])
def test_draws_follow_the_softmax(temperature: float, top_p: float, vary: str) -> None:
    logits = random_logits(1, seed=5, scale=1.5)[:, :64]
    probs = torch.softmax(logits[0].double() / temperature, -1)
    if top_p < 1:
        order = probs.argsort(descending=True)
        before = probs[order].cumsum(0) - probs[order]
        probs[order[before >= top_p]] = 0
        probs /= probs.sum()
    draws = many_draws(logits, vary, temperature=temperature, top_p=top_p)
    assert chi_square(draws, probs) > 1e-3
    assert probs[draws].min() > 0


def test_consecutive_draws_are_independent() -> None:
    probs = torch.tensor([0.4, 0.3, 0.2, 0.1])
    draws = many_draws(probs.log()[None], "positions", temperature=1.0)
    for lag in (1, 2, 3):
        pairs = draws[:-lag] * 4 + draws[lag:]
        assert chi_square(pairs, torch.outer(probs, probs).flatten()) > 1e-3


@pytest.mark.parametrize("temperature", [1e-9, 1e-6, 1e-3, 1.0, 100.0])
@pytest.mark.parametrize(
    "fields", [{}, {"top_k": 10**6}, {"top_p": 0.0}, {"top_p": 1e-12, "min_p": 1.0}, {"min_p": 1e-30}]
)
@pytest.mark.parametrize("scale", [0.0, 1.0, 1e4, 1e34])
def test_extremes_give_valid_tokens(temperature: float, fields: dict[str, object], scale: float) -> None:
    logits = random_logits(4, scale=scale)
    logits[1, :150] = -INF
    logits[2, 1:] = -INF
    logits[3, :-1] = -INF
    batch = SamplingBatch.of([state(temperature=temperature, seed=3, **fields)] * 4)
    assert not perturbed_scores(logits, batch).isnan().any()
    tokens = sample(logits, batch).token_ids.tolist()
    assert tokens[1] >= 150 and tokens[2] == 0 and tokens[3] == VOCAB - 1
    assert tie_gap(logits, batch)[2:].tolist() == [INF, INF]


@pytest.mark.parametrize("fields", [{"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.9}])
def test_a_row_with_a_logit_that_is_no_number_is_not_valid(fields: dict[str, object]) -> None:
    logits = random_logits(3)
    logits[1, 200] = float("nan")
    result = sample(logits, SamplingBatch.of([state(seed=3, **fields)] * 3))
    assert result.is_valid.tolist() == [True, False, True]


def test_low_temperature_is_greedy_and_high_is_not() -> None:
    logits = random_logits(50)
    assert draw(logits, *[state(temperature=1e-6, seed=1)] * 50) == logits.argmax(1).tolist()
    assert draw(logits, *[state(temperature=100.0, seed=1)] * 50) != logits.argmax(1).tolist()


def test_min_tokens_keeps_a_certain_stop_away() -> None:
    logits = torch.zeros(2, VOCAB)
    logits[:, 4] = 50.0
    fields: dict[str, object] = {"min_tokens": 2, "stop_ids": (4,)}
    early = [state(None, [9], temperature=t, **fields) for t in (0.0, 1.0)]
    late = [state(None, [9, 9], temperature=t, **fields) for t in (0.0, 1.0)]
    assert 4 not in draw(logits, *early)
    assert draw(logits, *late) == [4, 4]


def test_logprobs_are_of_the_raw_logits() -> None:
    logits = random_logits(3)
    states = [
        state(temperature=0.5, top_k=2, logit_bias={8: 100.0}, num_logprobs=2, seed=1),
        state(temperature=0.0),
        state(temperature=0.0, num_logprobs=0),
    ]
    result = sample(logits, SamplingBatch.of(states))
    assert result.logprobs is not None and result.token_ids.tolist()[0] == 8
    rows = result.logprobs.to_rows([2, None, 0])
    expected = logits.log_softmax(-1)
    assert rows[0] is not None and rows[1] is None and rows[2] is not None
    assert rows[0].logprob == pytest.approx(expected[0, 8].item(), abs=1e-5)
    assert list(rows[0].top_ids) == expected[0].topk(2).indices.tolist()
    assert rows[2].logprob == pytest.approx(expected[2].max().item(), abs=1e-5) and rows[2].top_ids == ()
    assert sample(logits[1:2], SamplingBatch.of(states[1:2])).logprobs is None


def test_tie_gap_says_how_close_it_was() -> None:
    logits = torch.full((2, VOCAB), -50.0)
    logits[:, 3], logits[:, 200] = 1.0, 1.0 - 2.0**-16
    greedy, seeded = state(temperature=0.0), state(temperature=0.5, seed=6)
    gaps = tie_gap(logits, SamplingBatch.of([greedy, seeded]))
    assert gaps[0].item() == 2.0**-16
    noise = gumbel_noise_ref(torch.tensor([6]), torch.tensor([seeded.position]), VOCAB)[0]
    expected = abs((noise[3] - noise[200] + 2.0**-15).item())
    assert gaps[1].item() == pytest.approx(expected, abs=2e-6)


def test_half_precision_logits_are_processed_in_float32() -> None:
    logits = random_logits(4).to(torch.bfloat16)
    batch = SamplingBatch.of([state(seed=i, temperature=0.7, top_p=0.9, num_logprobs=1) for i in range(4)])
    assert torch.equal(perturbed_scores(logits, batch), perturbed_scores(logits.float(), batch))
    assert sample(logits, batch).token_ids.tolist() == sample(logits.float(), batch).token_ids.tolist()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_draws_the_same_tokens() -> None:
    logits = random_logits(len(MIXED), seed=3)
    for length in range(1, 40):
        prompt = list(range(length))
        states = [state(prompt, [1, 2], **fields) for fields in MIXED]
        result = sample(logits.cuda(), SamplingBatch.of(states, "cuda"))
        assert result.token_ids.tolist() == sample(logits, SamplingBatch.of(states)).token_ids.tolist()


# --- target and draft share their noise ---


def coupled(p: torch.Tensor, q: torch.Tensor, num_draws: int) -> float:
    """Return the share of draws in which target and draft choose the same token.

    They have the probabilities `p` and `q`, each [vocab_size], and the same noise."""
    states = [
        SamplingState(SamplingParams(max_tokens=1, seed=seed), [0], vocab_size=len(p)) for seed in range(num_draws)
    ]
    batch = SamplingBatch.of(states)
    tokens = [sample(x.log().expand(num_draws, -1), batch, with_logprobs=False).token_ids for x in (p, q)]
    return float((tokens[0] == tokens[1]).float().mean())


def test_acceptance_of_shared_noise() -> None:
    """The probability that both argmaxes agree is sum_j 1 / sum_i max(p_i / p_j, q_i / q_j); it lies between
    (1 - d) / (1 + d) and the optimum 1 - d, d the total variation (Daliri, Musco and Suresh 2024)."""
    generator = torch.Generator().manual_seed(12)
    num_draws, num_pairs, vocab_size = 1500, 40, 64
    rates, optima = [], []
    for _ in range(num_pairs):
        logits = 3 * torch.randn(vocab_size, generator=generator)  # peaked, as a language model's are
        p = torch.softmax(logits, 0)
        q = torch.softmax(logits + 0.7 * torch.randn(vocab_size, generator=generator), 0)
        theory = float((1 / torch.maximum(p[:, None] / p, q[:, None] / q).sum(0)).sum())
        distance = float((p - q).abs().sum() / 2)
        rate = coupled(p, q, num_draws)
        assert abs(rate - theory) < 4.5 * (theory * (1 - theory) / num_draws) ** 0.5 + 1e-3, (rate, theory)
        assert (1 - distance) / (1 + distance) - 1e-6 <= theory <= 1 - distance + 1e-6
        rates.append(rate)
        optima.append(1 - distance)
    assert np.mean(rates) > 0.93 * np.mean(optima), (np.mean(rates), np.mean(optima))


def test_equal_distributions_always_agree() -> None:
    p = torch.softmax(3 * torch.randn(64, generator=torch.Generator().manual_seed(2)), 0)
    assert coupled(p, p.clone(), 500) == 1.0
