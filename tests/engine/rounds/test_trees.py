"""Trees: who descends from whom, which path is accepted, how a dynamic tree grows; against plain loops."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from batch_columns import filled_column
from heads import over_all_tokens, some_ids

from baton.engine.drafters.base import DraftState, RoundRows
from baton.engine.pace.draft_length import DraftShape
from baton.engine.rounds.trees import Drafts, _ahead, accept_chain, accept_tree, grow_tree, sample_ahead, top_of
from baton.engine.sampling.batch import SamplingBatch
from baton.engine.sampling.state import SamplingState
from baton.kernels.operations import preferring
from baton.kernels.state.tree_types import Frontier
from baton.kernels.state.trees import ancestry
from baton.metadata.wire.request import SamplingParams

VOCAB = 23


def random_parents(rng: random.Random, num_drafts: int, max_depth: int) -> list[int]:
    parents, depths = [], [0]
    for node in range(1, num_drafts + 1):
        parent = rng.choice([each for each in range(node) if depths[each] < max_depth])
        parents.append(parent)
        depths.append(depths[parent] + 1)
    return parents


def path_to(parents: list[int], node: int) -> list[int]:
    """From the root."""
    path = [node]
    while node:
        node = parents[node - 1]
        path.insert(0, node)
    return path


@pytest.mark.parametrize("seed", range(20))
def test_ancestry_and_acceptance_equal_a_plain_walk(seed: int) -> None:
    rng = random.Random(seed)
    num_seqs, num_drafts, num_steps = 3, rng.randint(1, 12), rng.randint(1, 5)
    parents = [random_parents(rng, num_drafts, num_steps) for _ in range(num_seqs)]
    tokens = []
    for each in parents:  # siblings differ
        row: list[int] = []
        for node in range(1, num_drafts + 1):
            taken = {row[other - 1] for other in range(1, node) if each[other - 1] == each[node - 1]}
            row.append(rng.choice([token for token in range(16) if token not in taken]))
        tokens.append(row)
    targets = [[rng.randrange(4) for _ in range(num_drafts + 1)] for _ in range(num_seqs)]
    for row, (each, target) in enumerate(zip(parents, targets, strict=True)):  # follow a path some way
        leaf = path_to(each, rng.randint(0, num_drafts))
        for up, down in itertools.pairwise(leaf):
            target[up] = tokens[row][down - 1]
    limits = [rng.randint(0, num_steps) for _ in range(num_seqs)]

    visible, depths = ancestry(torch.tensor(parents), num_steps)
    drafts = Drafts(torch.tensor(tokens), torch.tensor(parents))
    accepted = accept_tree(drafts, torch.tensor(targets), torch.tensor(limits), num_steps)
    assert accepted.nodes is not None
    for row in range(num_seqs):
        for node in range(num_drafts + 1):
            path = path_to(parents[row], node)
            assert visible[row, node].nonzero().flatten().tolist() == sorted(path)
            assert depths[row, node] == len(path) - 1
        node, path = 0, [0]
        while len(path) - 1 < limits[row]:
            children = [child for child in range(1, num_drafts + 1) if parents[row][child - 1] == node]
            node = next((child for child in children if tokens[row][child - 1] == targets[row][node]), -1)
            if node < 0:
                break
            path.append(node)
        assert accepted.num_accepted[row] == len(path) - 1
        assert accepted.nodes[row, : len(path)].tolist() == path
        assert accepted.nodes.shape == (num_seqs, num_steps + 1)


def test_a_chain_is_accepted_up_to_the_first_difference_and_the_limit() -> None:
    drafts = torch.tensor([[1, 2, 3], [1, 2, 3], [1, 9, 3], [1, 2, 3]])
    targets = torch.tensor([[1, 2, 3, 4], [0, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4]])
    path = accept_chain(drafts, targets, torch.tensor([3, 3, 3, 2]))
    assert path.nodes is None and path.num_accepted.tolist() == [3, 0, 1, 2]


def model(path: list[int], seed: int) -> torch.Tensor:
    """A made-up drafter: its logits are a function of the tokens since the root."""
    generator = torch.Generator().manual_seed(hash((seed, *path)) % 2**31)
    return torch.randn(VOCAB, generator=generator) * 3


def plain_tree(shape: DraftShape, seed: int) -> list[tuple[list[int], float]]:
    """Paths (tokens from the root) with their scores, of all candidates, by loops."""
    found: list[tuple[list[int], float]] = []
    frontier: list[tuple[list[int], float]] = [([], 0.0)]
    for _ in range(shape.num_steps):
        children = []
        for path, score in frontier:
            best = model(path, seed).log_softmax(0).topk(shape.topk)
            children += [
                ([*path, i], score + v) for i, v in zip(best.indices.tolist(), best.values.tolist(), strict=True)
            ]
        found += children
        frontier = sorted(children, key=lambda each: -each[1])[: shape.topk]
    return found


@pytest.mark.parametrize("shape", [DraftShape(1, 3, 2), DraftShape(2, 2, 6), DraftShape(4, 3, 9), DraftShape(5, 4, 20)])
def test_a_dynamic_tree_has_the_best_candidates(shape: DraftShape) -> None:
    seeds = [3, 4]
    states = [SamplingState(SamplingParams(max_tokens=9, temperature=0.0), [1], vocab_size=VOCAB) for _ in seeds]
    width = 7  # the state is the path so far, then -1s

    def state_of(path: list[int]) -> list[float]:
        return [float(each) for each in path] + [-1.0] * (width - len(path))

    def expand(
        step: int, tokens: torch.Tensor, states: torch.Tensor, visible: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert visible.shape == (len(seeds), shape.topk, step * shape.topk)
        assert visible.sum(2).eq(step).all()  # a node and its ancestors, one of each step
        paths = [
            [[int(each) for each in state if each >= 0] + [token] for state, token in zip(row, own, strict=True)]
            for row, own in zip(states.tolist(), tokens.tolist(), strict=True)
        ]
        after = torch.tensor([[state_of(path) for path in row] for row in paths])
        logits = [model(path, seed) for seed, row in zip(seeds, paths, strict=True) for path in row]
        return after, torch.stack(logits)

    first = torch.stack([model([], seed) for seed in seeds]).log_softmax(1).topk(shape.topk)
    root = torch.tensor([state_of([]) for _ in seeds])
    drafts = grow_tree(shape, (first.indices, first.values), root, SamplingBatch.of(states), expand)
    assert drafts.parents is not None and drafts.tokens.shape == (len(seeds), shape.num_tokens)
    for row, seed in enumerate(seeds):
        parents, tokens = drafts.parents[row].tolist(), drafts.tokens[row].tolist()
        assert all(parent < node for node, parent in enumerate(parents, start=1))
        ours = {tuple(tokens[node - 1] for node in path_to(parents, leaf)[1:]) for leaf in range(1, len(tokens) + 1)}
        best = sorted(plain_tree(shape, seed), key=lambda each: -each[1])[: shape.num_tokens]
        assert ours == {tuple(path) for path, _ in best}


def penalizing(num_seqs: int) -> SamplingBatch:
    params = SamplingParams(max_tokens=9, repetition_penalty=1.3)
    return SamplingBatch.of([SamplingState(params, [1], vocab_size=VOCAB) for _ in range(num_seqs)])


def test_a_node_counts_its_own_path() -> None:
    """What follows it is sampled with the tokens above it in its history, not with its cousins'."""
    paths = torch.tensor([[[3, 4], [3, 5], [6, 6]]])
    frontier = Frontier.root(torch.zeros(1, 2))._replace(paths=paths)
    ahead = _ahead(penalizing(1), frontier)
    counts = filled_column(ahead, "output_counts")
    assert ahead.positions.tolist() == [3, 3, 3]
    for row, path in zip(counts, paths[0].tolist(), strict=True):
        assert {int(i): int(row[i]) for i in row.nonzero()} == {token: path.count(token) for token in path}


def test_after_a_round_only_what_it_brought_counts() -> None:
    none = torch.zeros(2, dtype=torch.int64)
    rows = RoundRows(none, none, none.unsqueeze(1), penalizing(2), DraftState())
    after = rows.after(torch.tensor([[3, 4, 5], [7, 7, 8]]), torch.tensor([0, 1]))
    counts = filled_column(after, "output_counts")
    assert after.positions.tolist() == [2, 3]
    assert [{int(i): int(row[i]) for i in row.nonzero()} for row in counts] == [{3: 1}, {7: 2}]


# --- a reduced vocabulary ---

WHOLE = 1500
ASKED: list[dict[str, Any]] = [  # rows of one batch
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 5},
    {"temperature": 0.7, "seed": 6, "top_k": 5},
    {"temperature": 1.3, "seed": 7, "top_k": 600},  # more than most draft vocabularies
    {"temperature": 0.9, "seed": 8, "top_p": 0.7},
    {"temperature": 1.0, "seed": 9, "min_p": 0.1},
    {"temperature": 0.8, "seed": 10, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 0.0, "repetition_penalty": 1.7},
    {"temperature": 1.0, "seed": 11, "frequency_penalty": 0.6, "presence_penalty": -0.4, "top_p": 0.9},
    {"temperature": 0.0, "logit_bias": {4: 3.0, 700: -2.0, 1499: 6.0}},
    {"temperature": 1.0, "seed": 12, "min_tokens": 60, "stop_ids": tuple(range(1, WHOLE, 3))},
]
KINDS = {"all": ASKED, "greedy": ASKED[:1] * 3, "random": ASKED[1:2] * 3, "filters": ASKED[:7], "penalties": ASKED[7:9]}
KINDS |= {"bias": ASKED[9:10] * 2, "stops": ASKED[10:] * 2}


def asked(fields: list[dict[str, Any]], seed: int = 0) -> SamplingBatch:
    """Rows with prompts and outputs of the whole vocabulary."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(WHOLE) for _ in range(40)] for _ in fields]
    return SamplingBatch.of([
        SamplingState(SamplingParams(max_tokens=99, **each), prompt, prompt[:9], vocab_size=WHOLE)
        for each, prompt in zip(fields, prompts, strict=True)
    ])  # fmt: skip


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's infinities are loud
@pytest.mark.parametrize(
    ("backend", "num_logits", "kind"),
    [("numba", num, kind) for num in (1, 37, 1025, WHOLE) for kind in KINDS]
    + [("triton", 1, "penalties"), ("triton", 37, "all"), ("triton", 1025, "bias"), ("triton", 1025, "stops")],
)
def test_drafts_of_a_reduced_vocabulary_are_those_of_minus_infinity_for_all_other_tokens(
    backend: str, num_logits: int, kind: str
) -> None:
    """A choice after drafted tokens, of the reduced vocabulary and others, and the best tokens of a tree's step."""
    pytest.importorskip(backend)
    logit_ids, base = some_ids(num_logits, WHOLE, seed=num_logits + 1), asked(KINDS[kind])
    num_rows, generator = base.num_rows, torch.Generator().manual_seed(2)
    drafted = torch.randint(0, WHOLE, (num_rows, 4), generator=generator)
    drafted[:, 1:3] = logit_ids[drafted[:, 1:3] % min(num_logits, 4)]
    logits = torch.randn(num_rows, num_logits, generator=generator) * 2
    whole = over_all_tokens(logits, logit_ids, WHOLE)
    topk = 3
    with preferring(backend):  # type: ignore[arg-type]
        ours = sample_ahead(logits, base.over(logit_ids), drafted)
        theirs = sample_ahead(whole, base, drafted)
        tokens, scores = top_of(logits, base.over(logit_ids).ahead(torch.full((1, 1), 4), drafted), topk)
        best, all_scores = top_of(whole, base.ahead(torch.full((1, 1), 4), drafted), topk)
    assert num_logits != 1 or logit_ids.item() % 3 != 1, "a row of which all tokens are banned has no choice"
    assert torch.equal(ours, theirs)
    is_left = all_scores > -torch.inf
    assert tokens.shape == scores.shape == (num_rows, topk) and tokens.dtype is torch.int64
    assert torch.equal(tokens[is_left], best[is_left]) and torch.equal(scores > -torch.inf, is_left)
    torch.testing.assert_close(scores, all_scores, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_logits", [1, 37, 1025])
def test_trees_of_a_reduced_vocabulary_are_those_of_minus_infinity_for_all_other_tokens(
    num_logits: int, kind: str
) -> None:
    logit_ids, base, shape = some_ids(num_logits, WHOLE, seed=num_logits + 1), asked(KINDS[kind]), DraftShape(4, 3, 9)
    table = torch.randn(WHOLE, num_logits, generator=torch.Generator().manual_seed(4)) * 2
    root = torch.zeros(base.num_rows, 1)
    grown = []
    for is_whole in (False, True):
        batch = base if is_whole else base.over(logit_ids)

        def logits_after(tokens: torch.Tensor, is_whole: bool = is_whole) -> torch.Tensor:
            logits = table[tokens.flatten()]
            return over_all_tokens(logits, logit_ids, WHOLE) if is_whole else logits

        def expand(
            _step: int,
            tokens: torch.Tensor,
            states: torch.Tensor,
            _visible: torch.Tensor,
            logits_after: Callable[[torch.Tensor], torch.Tensor] = logits_after,
        ) -> tuple[torch.Tensor, torch.Tensor]:
            return states, logits_after(tokens)

        first = top_of(logits_after(torch.arange(base.num_rows)), batch, shape.topk)
        grown.append(grow_tree(shape, first, root, batch, expand))
    ours, theirs = grown
    assert ours.parents is not None and theirs.parents is not None
    for row in range(base.num_rows):
        mine, others = (likely_paths(each, row, logit_ids) for each in (ours, theirs))
        assert mine == others and (num_logits == 1 or len(mine) > 1)


def likely_paths(drafts: Drafts, row: int, logit_ids: torch.Tensor) -> list[tuple[int, ...]]:
    """Return the paths of a tree, without nodes that have no probability: those of tokens without a logit, of the
    second and later children of one token, and below them."""
    assert drafts.parents is not None
    paths: dict[int, tuple[int, ...] | None] = {0: ()}
    for node, (token, parent) in enumerate(zip(drafts.tokens[row].tolist(), drafts.parents[row].tolist(), strict=True)):
        above = paths[parent]
        path = None if above is None or token not in logit_ids.tolist() else (*above, token)
        paths[node + 1] = None if path in paths.values() else path
    return [path for path in paths.values() if path]
