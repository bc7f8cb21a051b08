"""The next turn of a conversation: the node that computes its prompt borrows the pages that the other node has."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from node_pair import NodePair, node_pairs, params

PAGE = 4
MakePair = Callable[..., NodePair]


@pytest.fixture
def make_pair() -> Iterator[MakePair]:
    with node_pairs() as start:

        def make(model: Path, **more: object) -> NodePair:
            common = {"page_size": PAGE, "num_pages": 200, "max_running": 4} | more
            pair = start(model, prefill=dict(common), decode=dict(common))
            for borrower in (pair.prefill._borrower, pair.decode._borrower):
                if borrower is not None:  # a test must not depend on the times of this machine
                    borrower._token_s = lambda: 1.0
            return pair

        yield make


def prompt(num_tokens: int = 21, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(64) for _ in range(num_tokens)]


def first_turn(pair: NodePair, *, is_local: bool = False, salt: str = "", seed: int = 0) -> list[int]:
    """Run the first turn of a conversation. Return the prompt of the second one."""
    asked = prompt(seed=seed)
    rid = f"first {seed} {salt}"
    pair.submit(rid, asked, params(14), is_local=is_local, cache_salt=salt)
    answer = pair.run()[rid, 0].ids
    assert len(answer) == 14
    return asked + answer + prompt(7, seed + 100)


@pytest.mark.parametrize("is_local", [False, True])
def test_pages_that_the_other_node_wrote_are_not_computed_again(
    make_pair: MakePair, checkpoint: Callable[..., Path], *, is_local: bool
) -> None:
    """The first turn is computed by one role, the second one by the other. 34 tokens of the first one have KV: all but
    the last one of the answer. They fill 8 pages."""
    pair = make_pair(checkpoint("llama"))
    turn = first_turn(pair, is_local=not is_local)
    pair.submit("plain", turn, params(12), is_local=not is_local)
    expected = pair.run()["plain", 0].ids
    node = pair.decode if is_local else pair.prefill
    node.cache.flush()
    before = node.stats()
    pair.submit("second", turn, params(12), is_local=is_local, num_lent=8)
    result = pair.run()["second", 0]
    after = node.stats()
    assert result.ids == expected
    assert after.cached_tokens - before.cached_tokens >= 8 * PAGE
    assert after.computed_tokens - before.computed_tokens <= len(turn) - 8 * PAGE
    assert result.ended is not None and result.ended.num_cached >= 8 * PAGE
