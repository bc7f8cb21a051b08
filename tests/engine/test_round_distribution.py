"""Rounds draw from the target's distribution, whatever the draft; shared noise accepts as often as theory says.

The draft's tokens decide only how many tokens a round brings. Seeds 0, 1, 2, ... are the draws, so nothing here is left
to chance at run time.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drafters import make_bigram, make_right, perturbed
from scipy import stats
from solo import Solo

from baton.engine import round as rounds
from baton.engine import trees
from baton.engine.pages import Owner
from baton.engine.sampling import sample
from baton.engine.sampling_batch import SamplingBatch
from baton.engine.sampling_state import SamplingState
from baton.engine.work import BatchRow
from baton.metadata.wire.request import SamplingParams

VOCAB = 20
PROMPT = [3, 1, 4, 1, 5]
NUM_DRAWS = 6000
NUM_STEPS = 3
P_VALUE = 1e-3  # below it a distribution is another one

Cases = dict[str, Any]


SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
PAGES = {"page_size": 16, "num_pages": 3 * NUM_DRAWS + 1200, "num_slots": NUM_DRAWS}


@pytest.fixture
def solo(checkpoint: Callable[..., Path], tmp_path: Path) -> Solo:
    """A target and a draft that agree on about half of the tokens."""
    model = checkpoint("llama", vocab_size=VOCAB, **SIZES)
    draft = perturbed(model, tmp_path / "draft", 0.15)
    return Solo(model, speculative="standalone", draft_model=str(draft), **PAGES)


@pytest.fixture
def grow(checkpoint: Callable[..., Path], tmp_path: Path) -> Callable[[int], Solo]:
    """A target whose tokens depend on all before them, though most on the last, and a head that knows the last alone:
    it drafts trees of `topk`."""

    def make(topk: int) -> Solo:
        model = make_bigram(checkpoint("llama", vocab_size=VOCAB, **SIZES), tmp_path / "target", context=0.5)
        head = make_right("eagle", model, tmp_path / "head")
        return Solo(model, speculative="eagle", draft_model=str(head), draft_topk=topk, draft_steps=NUM_STEPS, **PAGES)

    return make


def exact(solo: Solo, params: SamplingParams) -> np.ndarray:
    """Probabilities [VOCAB, VOCAB, VOCAB] of the first three tokens, by definition: softmax of the filtered logits."""
    first = probabilities(solo, [PROMPT], params)[0]
    second = probabilities(solo, [[*PROMPT, a] for a in range(VOCAB)], params)
    pairs = [[*PROMPT, a, b] for a, b in itertools.product(range(VOCAB), repeat=2)]
    third = probabilities(solo, pairs, params).reshape(VOCAB, VOCAB, VOCAB)
    return first[:, None, None] * second[:, :, None] * third


def probabilities(solo: Solo, prompts: Sequence[list[int]], params: SamplingParams) -> np.ndarray:
    """[num_prompts, VOCAB] float64 of the next token."""
    pool = solo.engine.pool
    pages = [pool.allocate(1, Owner.REQUEST) for _ in prompts]
    logits = solo.engine.forward([BatchRow(ids, 0, own) for ids, own in zip(prompts, pages, strict=True)]).double()
    for own in pages:
        pool.release(own)
    probs = torch.softmax(logits / params.temperature, 1)
    ordered, ids = probs.sort(1, descending=True)
    is_kept = ordered.cumsum(1) - ordered < params.top_p
    kept = torch.zeros_like(probs).scatter_(1, ids, ordered * is_kept)
    return (kept / kept.sum(1, keepdim=True)).numpy()


def draw(solo: Solo, fields: Cases) -> tuple[np.ndarray, float]:
    """First three tokens [NUM_DRAWS, 3] under speculation, and the share of drafts that were accepted."""
    asked = [SamplingParams(max_tokens=8, seed=seed, **fields) for seed in range(NUM_DRAWS)]
    sequences = solo.start_many([PROMPT] * NUM_DRAWS, asked)
    waiting = sequences
    while waiting:
        solo.round(waiting, NUM_STEPS)
        waiting = [sequence for sequence in waiting if len(sequence.generated) < 3]
    counts = solo.rounds.stats
    return np.array([each.generated[:3] for each in sequences]), counts.num_accepted / counts.num_drafted


def p_value(drawn: np.ndarray, expected: np.ndarray) -> float:
    """Chi-square of outcomes [num_draws] against probabilities; rare outcomes are one class, impossible ones fail."""
    counts = np.bincount(drawn, minlength=expected.size)
    assert counts[expected == 0].sum() == 0, "a token outside the filters was drawn"
    is_common = expected * len(drawn) >= 8
    observed = [*counts[is_common], counts[~is_common].sum()]
    predicted = [*(expected[is_common] * len(drawn)), expected[~is_common].sum() * len(drawn)]
    if predicted[-1] < 8:  # too few to be a class of their own
        observed[-2:], predicted[-2:] = [sum(observed[-2:])], [sum(predicted[-2:])]
    return float(stats.chisquare(observed, np.array(predicted) * (sum(observed) / sum(predicted))).pvalue)


def check(drawn: np.ndarray, joint: np.ndarray) -> None:
    """Each token by itself, and each with its successor."""
    margins = [joint.sum((1, 2)), joint.sum((0, 2)), joint.sum((0, 1))]
    for at, margin in enumerate(margins):
        assert p_value(drawn[:, at], margin) > P_VALUE, at
    for at, pairs in enumerate((joint.sum(2), joint.sum(0))):
        assert p_value(drawn[:, at] * VOCAB + drawn[:, at + 1], pairs.ravel()) > P_VALUE, at


CASES: list[Cases] = [{"temperature": 0.7}, {"temperature": 1.0, "top_p": 0.9}, {"temperature": 1.5}]


@pytest.mark.parametrize("fields", CASES)
def test_output_has_the_targets_distribution(solo: Solo, fields: Cases) -> None:
    drawn, acceptance = draw(solo, fields)
    assert 0.2 < acceptance < 0.9, acceptance  # both outcomes of a draft are frequent
    check(drawn, exact(solo, SamplingParams(max_tokens=8, **fields)))


def test_emitting_what_follows_rejected_drafts_is_caught(solo: Solo, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison itself: tokens sampled after drafts that the target would not have chosen are distributed
    otherwise."""
    monkeypatch.setattr(rounds, "accept_chain", lambda drafts, targets, limits: trees.Path(None, limits))
    fields = {"temperature": 1.0}
    drawn, _ = draw(solo, fields)
    with pytest.raises(AssertionError):
        check(drawn, exact(solo, SamplingParams(max_tokens=8, **fields)))


@pytest.mark.parametrize(("topk", "fields"), [(2, CASES[0]), (3, CASES[1]), (2, CASES[2])])
def test_output_of_trees_has_the_targets_distribution(grow: Callable[[int], Solo], topk: int, fields: Cases) -> None:
    solo = grow(topk)
    drawn, acceptance = draw(solo, fields)
    assert 0.2 < acceptance < 0.9, acceptance
    check(drawn, exact(solo, SamplingParams(max_tokens=8, **fields)))


def test_emitting_what_follows_rejected_nodes_is_caught(
    grow: Callable[[int], Solo], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The defect: the path through a tree goes by the drafter's scores where no child is the target's token."""
    accept = trees.accept_tree

    def hopeful(drafts: trees.Drafts, targets: torch.Tensor, limits: torch.Tensor, num_steps: int) -> trees.Path:
        path = accept(drafts, targets, limits, num_steps)
        assert path.nodes is not None
        best = torch.where(path.num_accepted == 0, 1, path.nodes[:, 1])
        nodes = torch.cat([path.nodes[:, :1], best.unsqueeze(1), path.nodes[:, 2:]], dim=1)
        return trees.Path(nodes, path.num_accepted.clamp(min=1))

    monkeypatch.setattr(rounds, "accept_tree", hopeful)
    solo, fields = grow(2), {"temperature": 1.0}
    drawn, _ = draw(solo, fields)
    with pytest.raises(AssertionError):
        check(drawn, exact(solo, SamplingParams(max_tokens=8, **fields)))


# --- how often shared noise accepts ---


def coupled(p: torch.Tensor, q: torch.Tensor, num_draws: int) -> float:
    """How often target and draft, with logits of `p` and `q` [vocab_size] and the same noise, choose the same token."""
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
