import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from baton.engine.sampling.batch import SamplingBatch
from baton.engine.sampling.sampling import processed as engine_processed
from baton.engine.sampling.state import SamplingState
from baton.metadata.wire.request import SamplingParams

VOCAB = 100
INF = float("inf")


def state(prompt: list[int], output: list[int], vocab_size: int = VOCAB, **params: object) -> SamplingState:
    return SamplingState(SamplingParams(max_tokens=64, **params), prompt, output, vocab_size=vocab_size)  # type: ignore[arg-type]


def processed(logits: torch.Tensor, *states: SamplingState) -> torch.Tensor:
    """By the function that nodes call."""
    return engine_processed(logits, SamplingBatch.of(states)).clone()


def test_repetition_penalty_is_hugging_faces() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, VOCAB, generator=generator) * 5
    prompts = torch.randint(0, VOCAB, (4, 9), generator=generator)
    outputs = torch.randint(0, VOCAB, (4, 7), generator=generator)
    for penalty in (0.5, 1.0, 1.3, 2.0):
        expected = RepetitionPenaltyLogitsProcessor(penalty)(torch.cat([prompts, outputs], 1), logits.clone())
        states = [
            state(p, o, repetition_penalty=penalty) for p, o in zip(prompts.tolist(), outputs.tolist(), strict=True)
        ]
        torch.testing.assert_close(processed(logits, *states), expected, rtol=1e-6, atol=0)


def test_presence_and_frequency_by_hand() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0, -4.0, 5.0]])
    row = state([4, 4, 1], [0, 0, 0, 3], vocab_size=5, presence_penalty=0.5, frequency_penalty=0.25)
    assert processed(logits, row).tolist() == [[1.0 - 0.5 - 0.75, 2.0, 3.0, -4.0 - 0.5 - 0.25, 5.0]]
    negative = state([], [2], vocab_size=5, presence_penalty=-1.0)
    assert processed(logits, negative).tolist() == [[1.0, 2.0, 4.0, -4.0, 5.0]]


def test_bias_comes_before_repetition_penalty_and_that_before_the_others() -> None:
    logits = torch.tensor([[1.0, -3.0, 0.0]])
    row = state(
        [1], [0], vocab_size=3, logit_bias={0: 2.0, 1: 4.0, 2: -100.0}, repetition_penalty=2.0, presence_penalty=1.0
    )
    assert processed(logits, row).tolist() == [[(1.0 + 2.0) / 2 - 1.0, (-3.0 + 4.0) / 2, -100.0]]


@pytest.mark.parametrize(("num_generated", "is_banned"), [(0, True), (2, True), (3, False), (4, False)])
def test_min_tokens_bans_the_stops_until_reached(num_generated: int, is_banned: bool) -> None:
    row = state([1, 2], [5] * num_generated, min_tokens=3, stop_ids=(7, 9), logit_bias={7: 100.0})
    result = processed(torch.zeros(1, VOCAB), row)[0]
    assert (result[[7, 9]] == -INF).all().item() is is_banned
    assert result[torch.arange(VOCAB) != 7].gt(-1).sum() == VOCAB - 1 - is_banned


def test_ids_beyond_the_vocabulary_are_ignored() -> None:
    row = state([], [], logit_bias={VOCAB: 5.0}, stop_ids=(VOCAB + 3,), min_tokens=2)
    assert not row.needs.processes
    assert processed(torch.zeros(1, VOCAB), row).count_nonzero() == 0


def test_rows_keep_to_themselves() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(5, VOCAB, generator=generator) * 4
    states = [
        state([1, 2], [3, 3]),
        state([1, 2], [3, 3], repetition_penalty=1.7),
        state([1, 2], [3, 3], frequency_penalty=0.3, presence_penalty=-0.2),
        state([1, 2], [3, 3], logit_bias={5: 3.0, 6: -3.0}),
        state([1, 2], [3, 3], min_tokens=5, stop_ids=(0,)),
    ]
    together = processed(logits, *states)
    assert torch.equal(together[0], logits[0])
    for row in range(5):
        assert torch.equal(processed(logits[row : row + 1], states[row])[0], together[row])
        assert row == 0 or not torch.equal(together[row], logits[row])
    back = processed(logits.flip(0), *reversed(states)).flip(0)
    assert torch.equal(back, together)


def test_masked_logits_stay_masked_and_nothing_becomes_nan() -> None:
    logits = torch.full((1, VOCAB), -INF)
    logits[0, 3] = 1.0
    row = state(
        [3, 4], [3, 5], repetition_penalty=1.5, presence_penalty=2.0, frequency_penalty=-2.0, logit_bias={6: 100.0}
    )
    result = processed(logits, row)
    assert not result.isnan().any()
    assert (result > -INF).nonzero().tolist() == [[0, 3]]
