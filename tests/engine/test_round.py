"""What a round takes from the nodes of a tree: that of the accepted path, wherever in the tree it leads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from drafters import settings, target_of
from matrix import coach
from node_pair import params
from solo import Solo

from baton.engine import round as rounds
from baton.engine.trees import Path as AcceptedPath

NUM_STEPS, NUM_TOKENS = 3, 10
SEED = 5
PROMPT = [17, 4, 250, 33, 99]
MakeSolo = Callable[[], Solo]


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

    def breaking(hidden: torch.Tensor) -> torch.Tensor:
        scores = logits(hidden)
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
