"""The next turn of a conversation: the node that computes its prompt borrows the pages that the other node has."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from drafters import settings, target_of
from node_pair import ROUTER_EPOCH, NodePair, node_pairs, params
from thinned import thinned

from baton.metadata.wire.messages import Cancel

PAGE = 4
MakePair = Callable[..., NodePair]
Settings = Mapping[str, Any]
NONE: Settings = {}


@pytest.fixture
def make_pair() -> Iterator[MakePair]:
    with node_pairs() as start:

        def make(model: Path, prefill: Settings = NONE, decode: Settings = NONE, **both: Any) -> NodePair:
            common: dict[str, Any] = {"page_size": PAGE, "num_pages": 200, "max_running": 4} | both
            pair = start(model, prefill={**common, **prefill}, decode={**common, **decode})
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


def two_turns(pair: NodePair, *, is_local: bool) -> tuple[list[int], list[int]]:
    """Run the first turn, and the second one without loans. Then the node that computes the next prompt, which is the
    decode node if `is_local`, loses its cache. Return the prompt of the second turn and its answer."""
    turn = first_turn(pair, is_local=not is_local)
    pair.submit("plain", turn, params(12), is_local=not is_local)
    expected = pair.run()["plain", 0].ids
    (pair.decode if is_local else pair.prefill).cache.flush()
    return turn, expected


@pytest.mark.parametrize("is_local", [False, True])
def test_pages_that_the_other_node_wrote_are_not_computed_again(
    make_pair: MakePair, checkpoint: Callable[..., Path], *, is_local: bool
) -> None:
    """The first turn is computed by one role, the second one by the other. 34 tokens of the first one have KV: all but
    the last one of the answer. They fill 8 pages."""
    pair = make_pair(checkpoint("llama"))
    turn, expected = two_turns(pair, is_local=is_local)
    node = pair.decode if is_local else pair.prefill
    before = node.stats()
    pair.submit("second", turn, params(12), is_local=is_local, num_lent=8)
    result = pair.run()["second", 0]
    after = node.stats()
    assert result.ids == expected
    assert after.cached_tokens - before.cached_tokens >= 8 * PAGE
    assert after.computed_tokens - before.computed_tokens <= len(turn) - 8 * PAGE
    assert after.borrowed_tokens - before.borrowed_tokens >= 8 * PAGE
    assert result.ended is not None and result.ended.num_cached >= 8 * PAGE


@pytest.mark.parametrize("algorithm", ["eagle", "standalone", "ngram"])
def test_a_drafters_state_is_right_behind_borrowed_pages(
    make_pair: MakePair, checkpoint: Callable[..., Path], tmp_path: Path, algorithm: str
) -> None:
    model = target_of(algorithm, checkpoint)
    pair = make_pair(model, **settings(algorithm, model, tmp_path, steps=3))
    turn, expected = two_turns(pair, is_local=False)
    pair.submit("second", turn, params(12), num_lent=8)
    assert pair.run()["second", 0].ids == expected
    assert pair.prefill.stats().borrowed_tokens >= 7 * PAGE, "a page is keyed by the tokens behind it, too"


@pytest.mark.parametrize("is_local", [False, True])
def test_all_choices_share_what_was_borrowed(
    make_pair: MakePair, checkpoint: Callable[..., Path], *, is_local: bool
) -> None:
    pair = make_pair(checkpoint("llama"))
    turn, _ = two_turns(pair, is_local=is_local)
    asked = params(9, temperature=1.0, seed=3)
    pair.submit("lent", turn, asked, n=3, is_local=is_local, num_lent=8)
    pair.run()
    pair.submit("own", turn, asked, n=3, is_local=is_local)
    results = pair.run()
    for choice in range(3):
        assert results["lent", choice].ids == results["own", choice].ids
    node = pair.decode if is_local else pair.prefill
    assert node.stats().borrowed_tokens >= 8 * PAGE


@pytest.mark.parametrize("is_local", [False, True])
def test_a_request_that_is_cancelled_while_it_borrows_leaves_nothing(
    make_pair: MakePair, checkpoint: Callable[..., Path], *, is_local: bool
) -> None:
    """The fixture checks the books."""
    pair = make_pair(checkpoint("llama"))
    turn, _ = two_turns(pair, is_local=is_local)
    node, other = (pair.decode, pair.prefill) if is_local else (pair.prefill, pair.decode)
    assert node._borrower is not None
    pair.submit("gone", turn, params(12), is_local=is_local, num_lent=8)
    pair.step_until(lambda: node._borrower.units() or pair.results["gone", 0].ids)
    assert node._borrower.units() and not node.is_idle
    for name in ("prefill", "decode"):
        pair.send(name, Cancel(router_epoch=ROUTER_EPOCH, rid="gone", attempt=0, choices=None, reason="test"))
    del pair.results["gone", 0]
    pair.step_until(lambda: pair.is_done and not other.tickets())
    assert not node._borrower.units() and not node.tickets()


def test_pages_that_arrive_damaged_are_computed(make_pair: MakePair, checkpoint: Callable[..., Path]) -> None:
    """The checksums of the lent pages are known from an earlier loan. Then a byte of the third page changes."""
    pair = make_pair(checkpoint("llama"))
    turn, expected = two_turns(pair, is_local=False)
    pair.submit("first", turn, params(12), num_lent=8)
    assert pair.run()["first", 0].ids == expected
    pair.prefill.cache.flush()
    page = pair.decode.cache.lend(turn, "").pages[2]
    memory, borrower, server = pair.decode.handoff.end.memory[0], pair.prefill._borrower, pair.decode._server
    assert borrower is not None and server is not None
    memory.pages[:, page] ^= 1
    before = pair.prefill.stats()
    pair.submit("again", turn, params(12), num_lent=8)
    pair.step_until(borrower.units)
    while borrower.units():
        pair.prefill.step()
        server.poll()
    memory.pages[:, page] ^= 1  # the decode node itself goes on with it
    assert pair.run()["again", 0].ids == expected
    after = pair.prefill.stats()
    assert after.checksum_failures - before.checksum_failures == 3
    assert after.borrowed_tokens - before.borrowed_tokens == 2 * PAGE


def test_a_flushed_lender_lends_nothing_and_the_prompt_is_computed(
    make_pair: MakePair, checkpoint: Callable[..., Path]
) -> None:
    pair = make_pair(checkpoint("llama"))
    turn, expected = two_turns(pair, is_local=False)
    pair.decode.cache.flush()
    pair.submit("second", turn, params(12), num_lent=8)
    assert pair.run()["second", 0].ids == expected
    assert pair.prefill.stats().borrowed_tokens == 0


def test_another_tenant_borrows_nothing(make_pair: MakePair, checkpoint: Callable[..., Path]) -> None:
    pair = make_pair(checkpoint("llama"))
    turn, expected = two_turns(pair, is_local=False)
    pair.submit("second", turn, params(12), num_lent=8, cache_salt="another")
    assert pair.run()["second", 0].ids == expected
    assert pair.prefill.stats().borrowed_tokens == 0


TAILED = list(itertools.product(("gpt_oss", "qwen3_next", "deepseek_v4", "qwen3_5_text"), (False, True)))


@pytest.mark.parametrize(("model", "is_local"), thinned(TAILED, lambda i, *_: i in (1, 2, 5)))
def test_the_tail_pages_of_a_window_or_a_state_are_borrowed_too(
    make_pair: MakePair, checkpoint: Callable[..., Path], model: str, *, is_local: bool
) -> None:
    """Work continues behind the last page that was borrowed, as behind a page of its own."""
    pair = make_pair(checkpoint(model), transport="zmq" if is_local else "local")
    turn, expected = two_turns(pair, is_local=is_local)
    node, lender = (pair.decode, pair.prefill) if is_local else (pair.prefill, pair.decode)
    num_tails = node._borrower.num_tails
    assert num_tails > 0
    num_lent = len(lender.cache.lend(turn, "", None, num_tails).pages)
    before = node.stats()
    pair.submit("second", turn, params(12), is_local=is_local, num_lent=num_lent)
    assert pair.run()["second", 0].ids == expected
    after = node.stats()
    assert num_lent >= 5 and after.borrowed_tokens - before.borrowed_tokens == num_lent * PAGE
    assert after.computed_tokens - before.computed_tokens <= len(turn) - num_lent * PAGE
    assert node.cache.match(turn, "", None, num_tails) >= num_lent, "they serve the next prompt, too"


RANKED = list(itertools.product(((1, 2), (2, 1)), (False, True), ("llama", "gpt_oss")))


@pytest.mark.parametrize(("sizes", "is_local", "model"), thinned(RANKED, lambda i, *_: i in (0, 3, 5)))
def test_each_rank_borrows_its_heads_from_the_ranks_that_have_them(
    make_pair: MakePair, checkpoint: Callable[..., Path], sizes: tuple[int, int], model: str, *, is_local: bool
) -> None:
    """The prefill node and the decode node have unlike numbers of ranks. The lender's pages lie in its host tier."""
    each = [{"tp": tp, "host_cache_gb": 0.01} for tp in sizes]
    pair = make_pair(checkpoint(model), *each, transport="zmq" if is_local else "local")
    turn, expected = two_turns(pair, is_local=is_local)
    node, lender = (pair.decode, pair.prefill) if is_local else (pair.prefill, pair.decode)
    lender.cache.evict(lender.cache.num_evictable)
    assert node._borrower is not None and lender.cache.num_pages == 0
    before = node.stats()
    pair.submit("second", turn, params(12), is_local=is_local, num_lent=8)
    assert pair.run()["second", 0].ids == expected
    after = node.stats()
    assert after.borrowed_tokens - before.borrowed_tokens >= 7 * PAGE
    assert after.computed_tokens - before.computed_tokens <= len(turn) - 7 * PAGE
    assert after.checksum_failures == 0


def test_a_node_without_tail_pages_for_a_loan_computes_the_prompt(
    make_pair: MakePair, checkpoint: Callable[..., Path]
) -> None:
    pair = make_pair(checkpoint("gpt_oss"))
    turn, expected = two_turns(pair, is_local=False)
    cache = pair.prefill.cache
    pair.submit("second", turn, params(12), num_lent=8)
    take = cache.take_tails
    cache.take_tails = lambda n: None if n else take(n)
    assert pair.run()["second", 0].ids == expected
    assert pair.prefill.stats().borrowed_tokens == 0


def test_damaged_tail_pages_are_computed(make_pair: MakePair, checkpoint: Callable[..., Path]) -> None:
    """Behind a part of the pages no work continues, so all of the prompt is computed."""
    pair = make_pair(checkpoint("gpt_oss"))
    turn, expected = two_turns(pair, is_local=False)
    pair.submit("first", turn, params(12), num_lent=8)
    assert pair.run()["first", 0].ids == expected
    pair.prefill.cache.flush()
    lender, borrower, server = pair.decode, pair.prefill._borrower, pair.decode._server
    assert borrower is not None and server is not None
    tail = lender.cache.lend(turn, "", None, borrower.num_tails).tails[-1]
    [memory] = [pool for pool in lender.handoff.end.memory if pool.holds(tail)]
    before = pair.prefill.stats()
    pair.submit("again", turn, params(12), num_lent=8)
    memory.pages[:, tail - memory.first] ^= 1
    pair.step_until(borrower.units)
    while borrower.units():
        pair.prefill.step()
        server.poll()
    memory.pages[:, tail - memory.first] ^= 1
    assert pair.run()["again", 0].ids == expected
    after = pair.prefill.stats()
    assert after.checksum_failures > before.checksum_failures
    assert after.borrowed_tokens == before.borrowed_tokens
