"""A slot of the decode node keeps nothing of an ended sequence for the next one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from matrix import coach, force_steps, rounds_paused
from node_pair import NodePair, params, replace

from baton.decode_node import node
from baton.engine.step_times import StepTimes

PROMPT = [17, 4, 250, 33, 17, 4, 250, 99, 8]
SETTINGS = {"page_size": 4, "max_running": 3, "speculative": "ngram", "draft_steps": 3}


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch, checkpoint: Callable[..., Path]) -> Iterator[NodePair]:
    """An adaptive pair with the n-gram drafter, which drafts in every round."""
    monkeypatch.setattr(node.StepTimes, "measure", lambda *_: StepTimes({(1, 0): 1.0, (1, 1): 1.0}))
    with closing(NodePair(checkpoint("llama"), prefill=SETTINGS, decode=SETTINGS, is_adaptive=True)) as pair:
        force_steps(pair, lambda _: 3)
        yield pair
        pair.check_books()


def test_a_sequence_does_not_inherit_the_acceptance_of_the_slot_it_gets(pair: NodePair) -> None:
    chooser, results = pair.decode.chooser, pair.results
    assert chooser is not None
    wants = params(24, temperature=1.0, seed=3)
    pair.submit("plain", PROMPT, replace(wants, draft_steps=0))
    truth = PROMPT + pair.run()["plain", 0].ids
    coach(pair.decode.executor.engine.drafter, {3: truth}, lambda *_: True)
    pair.submit("mostly wrong", PROMPT, params(60, temperature=1.0, seed=4))
    pair.submit("always right", PROMPT, wants)
    with rounds_paused(pair):
        pair.step_until(lambda: len(pair.decode.scheduler.running) == 2)
    pair.step_until(lambda: results["always right", 0].ended)
    wrong, right, unused = map(chooser.acceptance, range(3))
    assert wrong + 0.05 < unused < right - 0.05, (wrong, unused, right)
    chooser._num_halvings, chooser._until_look = 2, 5
    with rounds_paused(pair):  # no round has run with them yet
        pair.submit("next", PROMPT, wants)
        pair.step_until(lambda: len(pair.decode.scheduler.running) == 2)
        assert [each.slot for each in pair.decode.scheduler.running] == [0, 1]
        assert list(map(chooser.acceptance, range(3))) == [wrong, unused, unused]
        assert chooser._num_halvings == chooser._until_look == 0, "another sequence is a reason to try again"
    pair.run()


def proposals_of(pair: NodePair, rid: str, prompt: Sequence[int], cache_salt: str) -> list[list[int]]:
    """Return the proposals for a request, round by round."""
    drafter, found = pair.decode.executor.engine.drafter, list[list[int]]()
    lookup = drafter.lookup

    def looking(*rest: Any) -> list[int]:
        found.append(lookup(*rest))
        return found[-1]

    drafter.lookup = looking
    pair.submit(rid, prompt, params(12, temperature=1.0, seed=7), cache_salt=cache_salt)
    pair.run()
    drafter.lookup = lookup
    return found


def test_no_proposal_comes_from_another_salt_or_from_the_last_sequence_in_the_slot(pair: NodePair) -> None:
    """A finished text is found only by requests with the same cache salt."""
    alone = proposals_of(pair, "first", PROMPT, "one")
    proposals_of(pair, "between", [5, *PROMPT[::-1], 6], "another")
    for cache_salt in ("", "a third", "a fourth"):
        assert proposals_of(pair, f"of {cache_salt}", PROMPT, cache_salt) == alone
    assert proposals_of(pair, "again", PROMPT, "one") != alone
    assert not pair.decode.executor.engine.drafter._own, "texts of ended sequences"
