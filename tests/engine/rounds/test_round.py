"""A round: its output is the target's own, whatever is drafted, and drafts that are right are all accepted.

Three parts: the accepted path through a tree; promise P2, that a draft which is the target has every token accepted,
whatever ids it uses for them; and the distribution of the output. In the last part seeds 0, 1, 2, ... are the draws, so
nothing is left to chance at run time.
"""

from __future__ import annotations

import itertools
import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drafters import make_bigram, make_right, perturbed, settings, target_of
from heads import ALGORITHM
from matrix import coach
from node_pair import params
from safetensors.torch import load_file, save_file
from scipy import stats
from solo import Solo
from thinned import is_whole, thinned

from baton.engine.drafters import frozen_kv, shifted, standalone
from baton.engine.rounds import round as rounds
from baton.engine.rounds import trees
from baton.engine.rounds.trees import Path as AcceptedPath
from baton.engine.sampling.batch import SamplingBatch
from baton.engine.sampling.row_shares import Lens
from baton.engine.state.model_pools import ModelPools
from baton.engine.state.pages import Owner
from baton.engine.work import BatchRow
from baton.kernels.sampling.sample import Choice, perturbed_argmax
from baton.metadata.wire.request import SamplingParams

NUM_STEPS, NUM_TOKENS = 3, 10
SEED = 5
PROMPT = [17, 4, 250, 33, 99]


@pytest.mark.parametrize(("has_hidden", "has_logits"), [(True, True), (False, True), (True, False), (False, False)])
def test_everything_along_a_path_is_that_of_its_nodes(has_hidden: bool, has_logits: bool) -> None:
    num_seqs, num_nodes = 3, 7
    generator = torch.Generator().manual_seed(2)
    nodes = torch.tensor([[0, 3, 6, 2], [0, 1, 2, 3], [0, 5, 5, 0]])
    targets = torch.randint(0, 1000, (num_seqs, num_nodes), generator=generator)
    is_valid = torch.rand(num_seqs, num_nodes, generator=generator) > 0.5
    hidden = torch.randn(num_seqs, num_nodes, 4, generator=generator) if has_hidden else None
    logits = torch.randn(num_seqs * num_nodes, 9, generator=generator) if has_logits else None
    path = AcceptedPath(nodes, torch.tensor([3, 0, 1]))
    found = rounds._along(path, targets, is_valid, hidden, logits)
    flat = None if logits is None else logits.view(num_seqs, num_nodes, -1)
    for ours, theirs in zip(found, (targets, is_valid, hidden, flat), strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None and theirs is not None:
            expected = torch.stack([theirs[row, each] for row, each in enumerate(nodes)])
            assert ours.dtype == theirs.dtype and torch.equal(ours.view(expected.shape), expected)


def round_with_a_node_that_is_no_number(solo: Solo, monkeypatch: pytest.MonkeyPatch, broken: int | None) -> Any:
    """The first round of a sequence whose drafts are right. The target's logits at node `broken` are NaN; None: no
    node's. Returns the nodes of the accepted path, and what the round brought."""
    model, num_nodes = solo.engine.model, NUM_TOKENS + 1
    logits, accept = model.logits, rounds.accept_tree
    paths: list[list[int]] = []

    def breaking(hidden: torch.Tensor, *lens: Any) -> torch.Tensor:
        scores = logits(hidden, *lens)
        if len(scores) == num_nodes and broken is not None:  # the drafter asks for fewer rows
            scores[broken] = float("nan")
        return scores

    def accepting(*rest: Any) -> AcceptedPath:
        path = accept(*rest)
        assert path.nodes is not None
        paths.append(path.nodes[0, : int(path.num_accepted[0]) + 1].tolist())
        return path

    sequence = solo.start(PROMPT, params(30, seed=SEED))
    with monkeypatch.context() as patched:
        patched.setattr(model, "logits", breaking)
        patched.setattr(rounds, "accept_tree", accepting)
        [accepted] = solo.round([sequence], NUM_STEPS)
    solo.rounds.release(sequence)
    return paths[0], accepted


def test_only_nodes_of_the_path_end_it_when_their_logits_are_no_numbers(
    checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node beside the path changes nothing. A node of the path ends what the round brings before its own token."""
    model = target_of("eagle", checkpoint)
    tree = {"draft_topk": 3, "draft_steps": NUM_STEPS, "draft_tokens": NUM_TOKENS}
    solo = Solo(model, num_slots=2, num_pages=400, **(settings("eagle", model, tmp_path) | tree))
    plain = solo.start(PROMPT, params(30, seed=SEED))
    coach(solo.drafter, {SEED: PROMPT + solo.run(plain, 20, 0)}, lambda *_: True)
    path, clean = round_with_a_node_that_is_no_number(solo, monkeypatch, None)
    assert len(path) == len(clean.token_ids) == NUM_STEPS + 1 and path != list(range(NUM_STEPS + 1)), path
    for node in range(NUM_TOKENS + 1):
        _, accepted = round_with_a_node_that_is_no_number(solo, monkeypatch, node)
        if node in path:
            assert accepted.token_ids == clean.token_ids[: path.index(node)], (node, path)
        else:
            assert accepted == clean, (node, path)


# --- P2: a draft that is the target has every token accepted, greedy and seeded ---

PROMPTS = [random.Random(i).choices(range(512), k=3 + 4 * i) for i in range(5)]
RIGHT = ("eagle", "eagle3", "mtp-deepseek", "mtp-mimo", "frozen-kv-mtp")
SAMPLED: dict[str, Any] = {"temperature": 1.0, "top_p": 0.95, "repetition_penalty": 1.1, "frequency_penalty": 0.1}


def run_chains(solo: Solo, fields: dict[str, Any]) -> tuple[int, int]:
    """(accepted, drafted) over a batch that drafts 5, 1, 0, 3 and 5 tokens."""
    sequences = [solo.start(prompt, params(60, seed=i, **fields), chunk=6) for i, prompt in enumerate(PROMPTS)]
    for num_steps in (5, 1, 0, 3, 5):
        solo.round(sequences, num_steps)
    return solo.rounds.stats.num_accepted, solo.rounds.stats.num_drafted


def check_all_accepted(solo: Solo, fields: dict[str, Any]) -> None:
    num_accepted, num_drafted = run_chains(solo, fields)
    assert num_accepted == num_drafted == 14 * len(PROMPTS)


class Permuted:
    """A model whose own id i is the target's id `ids[i]`: the way in and the way out as a draft vocabulary has them."""

    def __init__(self, model: Any, ids: torch.Tensor) -> None:
        """`model` has rows of embedding and output matrix in the order of `ids` [vocab_size] int64."""
        self.model, self.ids = model, ids
        self.own_ids = ids.argsort()  # by target id

    def forward(self, batch: Any, pools: ModelPools) -> torch.Tensor:
        return self.model.forward(replace(batch, input_ids=self.own_ids[batch.input_ids]), pools)

    def logits(self, hidden: torch.Tensor, lens: Lens | None = None) -> torch.Tensor:
        own = self.model.logits(hidden, lens)
        return own.new_full(own.shape, float("-inf")).index_copy_(1, self.ids, own)

    def best(self, hidden: torch.Tensor) -> Choice:
        return perturbed_argmax(self.logits(hidden))


@pytest.fixture
def permuted(checkpoint: Callable[..., Path], tmp_path: Path) -> Solo:
    """The target drafts for itself in a permuted vocabulary."""
    model = checkpoint("llama")
    draft = Path(shutil.copytree(model, tmp_path / "permuted"))
    ids = torch.randperm(512, generator=torch.Generator().manual_seed(7))
    tensors = load_file(draft / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = tensors[name][ids].contiguous()
    save_file(tensors, draft / "model.safetensors", {"format": "pt"})
    solo = Solo(model, speculative="standalone", draft_model=str(draft))
    solo.drafter._model = Permuted(solo.drafter._model, ids)  # type: ignore[attr-defined]
    return solo


@pytest.mark.parametrize("fields", [{"temperature": 0.0}, SAMPLED], ids=["greedy", "sampled"])
def test_a_permuted_vocabulary_is_always_accepted(permuted: Solo, fields: dict[str, Any]) -> None:
    check_all_accepted(permuted, fields)


def test_noise_of_the_drafts_own_ids_is_caught(permuted: Solo, monkeypatch: pytest.MonkeyPatch) -> None:
    """The defect: the draft draws with the noise of its own ids, and maps afterwards: right greedily, else hardly."""
    ids = permuted.drafter._model.ids  # type: ignore[attr-defined]
    original = trees.sample_ahead

    def own_noise(logits: torch.Tensor, *rest: Any) -> torch.Tensor:
        return ids[original(logits[:, ids], *rest)]

    monkeypatch.setattr(standalone, "sample_ahead", own_noise)
    check_all_accepted(permuted, {"temperature": 0.0})
    permuted.rounds.stats.num_accepted = permuted.rounds.stats.num_drafted = 0
    num_accepted, num_drafted = run_chains(permuted, {"temperature": 1.0})
    assert num_accepted < 0.8 * num_drafted, (num_accepted, num_drafted)


@pytest.mark.each_value
@pytest.mark.parametrize("fields", [{"temperature": 0.0}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", RIGHT)
def test_a_head_that_is_the_target_is_always_accepted(
    name: str, fields: dict[str, Any], checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """The target's next token depends on the last alone. Heads have published layouts; EAGLE-3 permutes by d2t."""
    model = make_bigram(checkpoint("llama"), tmp_path / "bigram")
    head = make_right(name, model, tmp_path / "head")
    check_all_accepted(Solo(model, speculative=ALGORITHM[name], draft_model=str(head)), fields)


def test_noise_of_another_position_is_caught(
    checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The defect: a draft draws with the noise of the position it stands at, not of the token it proposes."""
    model = make_bigram(checkpoint("llama"), tmp_path / "bigram")
    solo = Solo(model, speculative="eagle", draft_model=str(make_right("eagle", model, tmp_path / "head")))
    original = trees.sample_ahead

    def early(logits: torch.Tensor, base: SamplingBatch, drafted: torch.Tensor) -> torch.Tensor:
        return original(logits, base.ahead(torch.full((1, 1), -1), drafted[:, :0]), drafted)

    monkeypatch.setattr(shifted, "sample_ahead", early)
    num_accepted, num_drafted = run_chains(solo, {"temperature": 1.5})
    assert num_accepted < 0.8 * num_drafted, (num_accepted, num_drafted)


def make_trees(name: str, directory: Path, model: Path, **shape: int) -> Solo:
    """A head of kind `name` that is the target, a bigram, and drafts trees."""
    bigram = make_bigram(model, directory / "bigram")
    head = make_right(name, bigram, directory / "head")
    return Solo(bigram, speculative=ALGORITHM[name], draft_model=str(head), **shape)


def run_trees(solo: Solo, fields: dict[str, Any]) -> float:
    """Share of accepted drafts, over rounds of which one drafts nothing."""
    sequences = [solo.start(prompt, params(60, seed=i, **fields), chunk=6) for i, prompt in enumerate(PROMPTS)]
    for num_steps in (solo.rounds.shape.num_steps, 0, *[solo.rounds.shape.num_steps] * 4):
        solo.round(sequences, num_steps)
    assert solo.rounds.stats.num_verified == 5 * len(PROMPTS)
    return solo.rounds.stats.num_accepted / solo.rounds.stats.num_drafted


@pytest.mark.each_value
@pytest.mark.parametrize("fields", [{"temperature": 0.0}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", RIGHT)
def test_a_whole_tree_of_a_head_that_is_the_target_is_always_accepted(
    name: str, fields: dict[str, Any], checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """Two steps, every candidate verified: the target's path is among them, whatever their scores."""
    solo = make_trees(name, tmp_path, checkpoint("llama"), draft_topk=3, draft_steps=2, draft_tokens=12)
    assert run_trees(solo, fields) == 1.0


@pytest.mark.parametrize("name", ["eagle", "frozen-kv-mtp"])
def test_noise_of_another_position_in_a_tree_is_caught(
    name: str, checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The defect: nodes draw with the noise of the depth they stand at, not of the one that they propose."""
    solo = make_trees(name, tmp_path, checkpoint("llama"), draft_topk=3, draft_steps=2, draft_tokens=12)
    original = trees.top_of

    def early(logits: torch.Tensor, base: SamplingBatch, topk: int) -> tuple[torch.Tensor, torch.Tensor]:
        return original(logits, base.ahead(torch.full((1, 1), -1), base.ints.new_empty(base.num_rows, 0)), topk)

    for module in (trees, shifted, frozen_kv):
        monkeypatch.setattr(module, "top_of", early)
    assert run_trees(solo, {"temperature": 1.5}) < 0.8


# --- the distribution of the output ---

VOCAB = 20
ROOT = [3, 1, 4, 1, 5]
NUM_DRAWS = 6000 if is_whole() else 3000
P_VALUE = 1e-3  # below it a distribution is another one

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
PAGES = {"page_size": 16, "num_pages": 3 * NUM_DRAWS + 1200, "num_slots": NUM_DRAWS}


@pytest.fixture
def half_right(checkpoint: Callable[..., Path], tmp_path: Path) -> Solo:
    """A target and a draft that agree on about half of the tokens."""
    model = checkpoint("llama", vocab_size=VOCAB, **SIZES)
    draft = perturbed(model, tmp_path / "draft", 0.15)
    return Solo(model, speculative="standalone", draft_model=str(draft), **PAGES)


@pytest.fixture
def make_half_right_trees(checkpoint: Callable[..., Path], tmp_path: Path) -> Callable[[int], Solo]:
    """A target whose tokens depend on all before them, though most on the last, and a head that knows the last alone:
    it drafts trees of `topk`."""

    def make(topk: int) -> Solo:
        model = make_bigram(checkpoint("llama", vocab_size=VOCAB, **SIZES), tmp_path / "target", context=0.5)
        head = make_right("eagle", model, tmp_path / "head")
        return Solo(model, speculative="eagle", draft_model=str(head), draft_topk=topk, draft_steps=NUM_STEPS, **PAGES)

    return make


def exact(solo: Solo, params: SamplingParams) -> np.ndarray:
    """Probabilities [VOCAB, VOCAB, VOCAB] of the first three tokens, by definition: softmax of the filtered logits."""
    first = probabilities(solo, [ROOT], params)[0]
    second = probabilities(solo, [[*ROOT, a] for a in range(VOCAB)], params)
    pairs = [[*ROOT, a, b] for a, b in itertools.product(range(VOCAB), repeat=2)]
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


def draw(solo: Solo, fields: dict[str, Any]) -> tuple[np.ndarray, float]:
    """First three tokens [NUM_DRAWS, 3] under speculation, and the share of drafts that were accepted."""
    asked = [SamplingParams(max_tokens=8, seed=seed, **fields) for seed in range(NUM_DRAWS)]
    sequences = solo.start_many([ROOT] * NUM_DRAWS, asked)
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


def check_distribution(drawn: np.ndarray, mixed: np.ndarray) -> None:
    """Each token by itself, and each with its successor."""
    margins = [mixed.sum((1, 2)), mixed.sum((0, 2)), mixed.sum((0, 1))]
    for at, margin in enumerate(margins):
        assert p_value(drawn[:, at], margin) > P_VALUE, at
    for at, pairs in enumerate((mixed.sum(2), mixed.sum(0))):
        assert p_value(drawn[:, at] * VOCAB + drawn[:, at + 1], pairs.ravel()) > P_VALUE, at


CASES: list[dict[str, Any]] = [{"temperature": 0.7}, {"temperature": 1.0, "top_p": 0.9}, {"temperature": 1.5}]


@pytest.mark.parametrize("fields", thinned(CASES, lambda i, _: i == 1))
def test_output_has_the_targets_distribution(half_right: Solo, fields: dict[str, Any]) -> None:
    drawn, acceptance = draw(half_right, fields)
    assert 0.2 < acceptance < 0.9, acceptance  # both outcomes of a draft are frequent
    check_distribution(drawn, exact(half_right, SamplingParams(max_tokens=8, **fields)))


def test_emitting_what_follows_rejected_drafts_is_caught(half_right: Solo, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison itself: tokens sampled after drafts that the target would not have chosen are distributed
    otherwise."""
    monkeypatch.setattr(rounds, "accept_chain", lambda drafts, targets, limits: trees.Path(None, limits))
    fields = {"temperature": 1.0}
    drawn, _ = draw(half_right, fields)
    with pytest.raises(AssertionError):
        check_distribution(drawn, exact(half_right, SamplingParams(max_tokens=8, **fields)))


@pytest.mark.parametrize(
    ("topk", "fields"), thinned([(2, CASES[0]), (3, CASES[1]), (2, CASES[2])], lambda i, *_: i == 1)
)
def test_output_of_trees_has_the_targets_distribution(
    make_half_right_trees: Callable[[int], Solo], topk: int, fields: dict[str, Any]
) -> None:
    solo = make_half_right_trees(topk)
    drawn, acceptance = draw(solo, fields)
    assert 0.2 < acceptance < 0.9, acceptance
    check_distribution(drawn, exact(solo, SamplingParams(max_tokens=8, **fields)))


def test_emitting_what_follows_rejected_nodes_is_caught(
    make_half_right_trees: Callable[[int], Solo], monkeypatch: pytest.MonkeyPatch
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
    solo, fields = make_half_right_trees(2), {"temperature": 1.0}
    drawn, _ = draw(solo, fields)
    with pytest.raises(AssertionError):
        check_distribution(drawn, exact(solo, SamplingParams(max_tokens=8, **fields)))
