"""S5 for draft trees: nodes have the right positions, and the KV after a round equals a recompute.

The drafter is told the text and puts the right token into a chosen column among the children of each node. So the
accepted path leads through any nodes of the tree.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from drafters import ALIKE, TREES_OF_FAMILIES, settings, target_of
from node_pair import params
from scratch import Outsiders, check_against_scratch
from solo import Solo, caught, coach, plain_texts, spied
from thinned import thinned

from baton.engine.drafters import frozen_kv, shifted
from baton.engine.engine import Engine
from baton.engine.rounds import round as rounds
from baton.engine.rounds import trees
from baton.engine.sampling.batch import SamplingBatch
from baton.kernels.state.trees import Ancestry, ancestry
from baton.metadata.wire.request import SamplingParams

NAMES = ("eagle", "eagle3", "mtp-deepseek", "mtp-mimo", "frozen-kv-mtp")
LENS = (7, 12, 3)
NUM_TOKENS = 56
PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "top_p": 0.95, "frequency_penalty": 1.5},
    {"temperature": 1.3, "logit_bias": {7: 2.0}, "repetition_penalty": 1.3},
]
ROUNDS = [  # who takes part, whether anything is drafted, and what each accepts at most
    ((0,), 1, (3,)),
    ((1, 0), 1, (3, 3)),
    ((2, 1, 0), 1, (3, 1, 3)),
    ((0, 2), 0, (0, 0)),
    ((1, 2, 0), 1, (3, 3, 0)),
    ((2,), 1, (2,)),
    ((0, 1, 2), 1, (3, 3, 3)),
]

MakeSolo = Callable[..., Solo]


@pytest.fixture
def make_solo(checkpoint: Callable[..., Path], tmp_path: Path) -> MakeSolo:
    def make(name: str, *buckets: int, topk: int = 2, tokens: int | None = None) -> Solo:
        model = target_of(name, checkpoint)
        tree = {"draft_topk": topk, "draft_steps": 3, "draft_tokens": tokens}
        return Solo(model, num_slots=4, buckets=buckets, num_pages=300, **(settings(name, model, tmp_path) | tree))

    return make


def asked(index: int) -> SamplingParams:
    return params(60, seed=index, **PARAMS[index])


def prompts() -> list[list[int]]:
    rng = random.Random(24)
    return [[rng.randrange(512) for _ in range(num)] for num in LENS]


@functools.cache
def texts(model: Path) -> dict[int, list[int]]:
    """Return each prompt with the text after it, by seed."""
    return plain_texts(model, prompts(), asked, NUM_TOKENS)


def coach_trees(
    monkeypatch: pytest.MonkeyPatch,
    truths: dict[int, list[int]],
    is_told: Callable[[int, int], bool],
    column: Callable[[int, int], int],
) -> None:
    """Make the child in `column(seed, position)` of every node the right and likeliest token if `is_told(seed,
    position)`. Otherwise no child is right."""
    coach(monkeypatch, truths, lambda *_: False)  # so that greedy rows know their positions too
    original = trees.top_of

    def top_of(logits: torch.Tensor, batch: SamplingBatch, topk: int) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, scores = (each.clone() for each in original(logits, batch, topk))
        for row, (seed, position) in enumerate(zip(batch.seeds.tolist(), batch.positions.tolist(), strict=True)):
            truth = truths[seed][position] if position < len(truths[seed]) else 0
            tokens[row] = (truth + 1 + torch.arange(topk)) % 512
            scores[row] = -2 - 0.125 * torch.arange(topk)
            if is_told(seed, position):
                at = column(seed, position) % topk
                tokens[row, at], scores[row, at] = truth, -0.25
        return tokens, scores

    for module in (trees, shifted, frozen_kv):
        monkeypatch.setattr(module, "top_of", top_of)


def check(
    solo: Solo,
    monkeypatch: pytest.MonkeyPatch,
    column: Callable[[int, int], int] = lambda seed, position: (5 * position + seed) % 7,
) -> list[tuple[int, ...]]:
    """Check after every round that tokens are those of no speculation, and KV and state those of a recompute.

    Return the accepted paths, as nodes."""
    truths = texts(solo.engine.model_dir)
    coach_trees(monkeypatch, truths, lambda seed, position: (position + 3 * seed) % 9 not in (2, 6), column)
    sequences = [solo.start(prompt, asked(index)) for index, prompt in enumerate(prompts())]
    for sequence in sequences:
        check_against_scratch(solo, sequence)
    with accepted_paths() as paths:
        for members, is_drafted, limits in ROUNDS * 2:
            for sequence in sequences:
                solo.poison(sequence)
            outsiders = Outsiders(solo, [each for i, each in enumerate(sequences) if i not in members])
            results = solo.round([sequences[i] for i in members], 3 * is_drafted, limits)
            outsiders.check()
            assert all(result.num_accepted <= limit for result, limit in zip(results, limits, strict=True))
            for index in members:
                assert sequences[index].token_ids == truths[index][: len(sequences[index].token_ids)], index
                check_against_scratch(solo, sequences[index])
    return paths


@contextmanager
def accepted_paths() -> Iterator[list[tuple[int, ...]]]:
    """Return the nodes after the root that each round accepts, for every sequence."""
    accept, paths = rounds.accept_tree, []

    def noting(*args: Any) -> trees.Path:
        path = accept(*args)
        assert path.nodes is not None
        for nodes, count in zip(path.nodes.tolist(), path.num_accepted.tolist(), strict=True):
            paths.append(tuple(nodes[1 : count + 1]))
        return path

    rounds.accept_tree = noting
    try:
        yield paths
    finally:
        rounds.accept_tree = accept


@pytest.mark.parametrize(
    ("name", "topk"),
    thinned(
        [
            *itertools.product(NAMES, (2, 3)),
            ("mtp-of-glm4", 3),
            ("mtp-of-deepseek", 2),
            ("eagle3-on-gpt-oss", 3),
        ],
        lambda i, *_: i in (5, 9, 11),
    ),
)
def test_kv_after_rounds_of_trees_equals_a_recompute(
    name: str, topk: int, make_solo: MakeSolo, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = check(make_solo(name, 2, topk=topk), monkeypatch)
    assert {len(path) for path in paths} == {0, 1, 2, 3}, paths
    assert len({path for path in paths if path != tuple(range(1, len(path) + 1))}) > 4, paths


@pytest.mark.parametrize("name", thinned(NAMES, lambda i, _: i % 4 == 0))
def test_an_accepted_path_that_overlaps_its_target_is_moved_whole(
    name: str, make_solo: MakeSolo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nodes 2, 3, 4 move to slots 1, 2, 3: each is both a source and a target."""
    paths = check(make_solo(name, 2, tokens=4), monkeypatch, lambda *_: 1)
    assert {(2, 3, 4), (2, 3), (2,)} <= set(paths), paths


# --- where forwards stand ---


def check_positions(name: str, solo: Solo) -> None:
    """Record the drafter's and the target's forwards in the rounds of one sequence."""
    topk, steps = solo.rounds.shape.topk, solo.rounds.shape.num_steps
    sequence = solo.start(prompts()[0], params(40))
    for _ in range(3):
        length = sequence.num_computed
        with spied(solo.drafter) as log, verified(solo.engine) as seen, proposed(solo) as drafted:
            solo.round([sequence], steps)
        if name == "frozen-kv-mtp":  # all see the target's rows and stand at the last of them
            expected = [([length - 1], (length,))] + [([length - 1] * topk, (length,) * topk)] * (steps - 1)
        else:  # nodes of a step are side by side behind those of the steps before
            expected = [([length + j] * topk, (length + (j + 1) * topk,)) for j in range(steps - 1)]
            expected.append((list(range(length, length + steps + 1)), (length + steps + 1,)))
        assert [(each.positions, each.seq_lens) for each in log] == expected
        [parents] = drafted
        depths = [0]
        for parent in parents:
            depths.append(depths[parent] + 1)
        assert max(depths) == steps
        [(positions, seq_lens)] = seen
        assert positions == [length + depth for depth in depths]
        assert seq_lens == [length + 1 + len(parents)]  # so node i is in slot length + i


@contextmanager
def verified(engine: Engine) -> Iterator[list[tuple[list[int], list[int]]]]:
    """Yield a list that grows by the positions and lengths of the target's forwards."""
    states, seen = engine.states, []

    def noting(batch: Any) -> Any:
        seen.append((batch.positions.tolist(), batch.seq_lens.tolist()))
        return states(batch)

    engine.states = noting  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        engine.states = states  # type: ignore[method-assign]


@contextmanager
def proposed(solo: Solo) -> Iterator[list[list[int]]]:
    """Yield a list that grows by the parents of the nodes that the drafter proposes for its only sequence."""
    propose, seen = solo.drafter.propose, []

    def noting(*args: Any) -> trees.Drafts:
        drafts = propose(*args)
        assert drafts.parents is not None
        seen.extend(drafts.parents.tolist())
        return drafts

    solo.drafter.propose = noting  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        solo.drafter.propose = propose  # type: ignore[method-assign]


@pytest.mark.parametrize("name", thinned([*NAMES, *TREES_OF_FAMILIES], lambda _, name: name not in ALIKE))
def test_each_node_of_a_tree_has_the_right_position(name: str, make_solo: MakeSolo) -> None:
    check_positions(name, make_solo(name))


# --- the defects put back ---


def no_move(self: Engine, *_: torch.Tensor) -> None:
    """The defect: accepted nodes stay in their slots."""


def from_the_last_on(
    self: Engine, table: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor, *tails: torch.Tensor | None
) -> None:
    """The defect: slots are moved one by one in descending order. In ascending order the result would be right."""
    for step in range(sources.shape[1] - 1, -1, -1):
        MOVE(self, table, sources[:, step : step + 1], targets[:, step : step + 1], *tails)


def at_their_slots(parents: torch.Tensor, num_steps: int) -> Ancestry:
    """The defect: a node has the position of its slot."""
    tree = ANCESTRY(parents, num_steps)
    return tree._replace(depths=torch.arange(tree.depths.shape[1]).expand_as(tree.depths))


def seeing_all_before(parents: torch.Tensor, num_steps: int) -> Ancestry:
    """The defect: a node attends to its siblings."""
    tree = ANCESTRY(parents, num_steps)
    return tree._replace(visible=torch.ones_like(tree.visible).tril())


def of_the_first_nodes(path: trees.Path, targets: Any, is_valid: Any, hidden: Any, logits: Any) -> Any:
    """The defect: draft extend reads the states of the first nodes instead of those of the accepted path."""
    new_targets, new_valid, new_hidden, new_logits = ALONG(path, targets, is_valid, hidden, logits)
    return new_targets, new_valid, hidden[:, : new_hidden.shape[1]], new_logits


def with_everybodys_history(rows: Any, drafts: trees.Drafts, tree: Ancestry) -> SamplingBatch:
    """The defect: penalties count all drafts instead of the node's own path."""
    return rows.sampling.ahead(tree.depths, drafts.tokens)


MOVE, ANCESTRY, ALONG = Engine.move_kv, ancestry, rounds._along
DEFECTS: Sequence[tuple[Any, str, Any]] = [
    (Engine, "move_kv", no_move),
    (Engine, "move_kv", from_the_last_on),
    (rounds, "ancestry", at_their_slots),
    (rounds, "ancestry", seeing_all_before),
    (rounds, "_along", of_the_first_nodes),
    (rounds, "_node_sampling", with_everybodys_history),
]


@pytest.mark.parametrize(("owner", "attribute", "defect"), DEFECTS, ids=lambda each: getattr(each, "__name__", None))
def test_defects_of_trees_are_caught(
    owner: Any, attribute: str, defect: Any, make_solo: MakeSolo, monkeypatch: pytest.MonkeyPatch
) -> None:
    solo = make_solo("eagle", 2, tokens=4)
    original = getattr(owner, attribute)
    monkeypatch.setattr(owner, attribute, lambda *args: (defect if solo.rounds.stats.num_verified else original)(*args))
    with caught():
        check(solo, monkeypatch, lambda *_: 1)


@pytest.mark.parametrize("name", ["eagle", "frozen-kv-mtp"])
def test_a_node_at_another_position_is_caught(name: str, make_solo: MakeSolo, monkeypatch: pytest.MonkeyPatch) -> None:
    """The defects: the target's nodes have the positions of their slots; the drafter's nodes are one position ahead."""
    solo = make_solo(name)
    monkeypatch.setattr(rounds, "ancestry", at_their_slots)
    with caught():
        check_positions(name, solo)
    monkeypatch.undo()
    module: Any = frozen_kv if name == "frozen-kv-mtp" else shifted
    batch = module.ForwardBatch

    class Ahead(batch):
        @classmethod
        def uniform(cls, input_ids: torch.Tensor, positions: torch.Tensor, *rest: Any) -> Any:
            return batch.uniform(input_ids, positions + 1, *rest)

    monkeypatch.setattr(module, "ForwardBatch", Ahead)
    with caught():
        check_positions(name, solo)
