"""A model of which some layers have a window, between two nodes: these layers have tail pages."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from heads import write_head
from node_pair import NodePair, node_pairs, params
from own_mtp import with_qwen_mtp
from thinned import halved, is_whole, thinned
from ties import Reference

from baton.engine.engine import Engine
from baton.engine.state.pages import Owner
from baton.engine.state.prefix_cache import PrefixCache
from baton.metadata.handoff.schema.schema import handoff_bytes

PAGE_SIZE, WINDOW = 4, 9
LENGTHS = (1, 4, 9, 17, 33, 60) if is_whole() else (1, 4, 17, 60)
NUM_NEW = 30 if is_whole() else 14  # tokens: more than a window and a page


def prompt(num_tokens: int, seed: int = 0) -> list[int]:
    return random.Random(seed or num_tokens).choices(range(1, 512), k=num_tokens)


@pytest.fixture(scope="module")
def model(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("gpt_oss", sliding_window=WINDOW)


@pytest.fixture(scope="module")
def reference(model: Path) -> Iterator[Reference]:
    reference = Reference(model)
    yield reference
    assert reference.num_ties <= 1, reference.num_ties


@pytest.fixture
def make_pair(model: Path) -> Iterator[Callable[..., NodePair]]:
    with node_pairs() as start:
        made: list[NodePair] = []

        def make(*, prefill: Any = (), decode: Any = (), **both: Any) -> NodePair:
            both = {"page_size": PAGE_SIZE, "num_pages": 300, "chunk_tokens": 16, **both}
            made.append(start(model, prefill=both | dict(prefill), decode=both | dict(decode)))
            return made[-1]

        yield make
        for pair in made:
            pair.check_books()


def check(pair: NodePair, reference: Reference, prompts: Sequence[list[int]], num_new: int, **options: Any) -> None:
    """Run all prompts at once, and compare each output with the reference's."""
    for index, ids in enumerate(prompts):
        pair.submit(f"{len(pair.results)} {index}", ids, params(num_new), **options)
    before = len(pair.results) - len(prompts)
    for (_, result), ids in zip(list(pair.run().items())[before:], prompts, strict=True):
        reference.assert_greedy(ids, result.ids, reference.generate(ids, num_new))


def evict_tails(cache: PrefixCache) -> None:
    cache.pool.release(cache.allocate_tails(cache.available_tails, Owner.REQUEST))


@pytest.mark.parametrize(
    ("is_local", "chunk", "transport"),
    halved([False, True], [3, PAGE_SIZE, 64], ["local", "zmq"]),
)
def test_output_is_that_of_transformers(
    is_local: bool, chunk: int, transport: str, reference: Reference, make_pair: Callable[..., NodePair]
) -> None:
    pair = make_pair(chunk_tokens=chunk, transport=transport)
    assert pair.decode.executor.windows.tail == WINDOW
    check(pair, reference, [prompt(length) for length in LENGTHS], NUM_NEW, is_local=is_local)
    if not is_local:
        schema = pair.hellos["decode"].layout
        sizes = [handoff_bytes(schema, length) for length in LENGTHS]
        assert pair.decode.stats().bytes_moved == sum(each.target_kv + each.draft_kv for each in sizes)


@pytest.mark.whole
@pytest.mark.parametrize("is_local", [False, True])
@pytest.mark.parametrize("start", [1, 101, 201])
def test_every_length_of_a_prompt_gives_the_output_of_transformers(
    start: int, is_local: bool, reference: Reference, make_pair: Callable[..., NodePair]
) -> None:
    pair = make_pair(num_pages=2000, chunk_tokens=24)
    for first in range(start, start + 100, 20):
        check(pair, reference, [prompt(first + more) for more in range(20)], 6, is_local=is_local)


@pytest.mark.parametrize("is_local", [False, True])
def test_a_hit_at_a_page_edge_continues_as_if_all_had_been_computed(
    is_local: bool, reference: Reference, make_pair: Callable[..., NodePair]
) -> None:
    pair = make_pair()
    base = prompt(50)
    check(pair, reference, [base], 20, is_local=is_local)
    for cut in (8, 30, 32, 36, 47, 48):  # in several chunks, whose tail pages the cache has
        pair.submit(f"cut {cut}", base[:cut] + prompt(5, cut), params(8), is_local=is_local)
        result = pair.run()[f"cut {cut}", 0]
        assert result.ended is not None
        assert result.ended.num_cached == cut // PAGE_SIZE * PAGE_SIZE, cut
        ids = base[:cut] + prompt(5, cut)
        reference.assert_greedy(ids, result.ids, reference.generate(ids, 8))


def test_tail_pages_that_have_not_come_do_not_enter_the_cache(
    reference: Reference, make_pair: Callable[..., NodePair]
) -> None:
    pair, ids = make_pair(), prompt(50)
    check(pair, reference, [ids], 30)
    cache = pair.decode.cache
    assert cache.match(ids, num_tails=2) == 12, "the ends of prompt and text have their tail pages"
    evict_tails(cache)
    before = cache.match(ids), cache.match(ids, num_tails=2)
    assert before == (12, 0)
    pair.submit("dropped", ids, params(5))
    pair.step_until(lambda: pair.decode.scheduler.reserved)
    [sequence] = pair.decode.scheduler.reserved.values()
    pair.decode._drop(sequence, "cancelled")
    assert (cache.match(ids), cache.match(ids, num_tails=2)) == before
    del pair.results["dropped", 0]
    check(pair, reference, [ids], 30, is_local=True)


def test_a_sequence_alone_that_holds_copies_of_cached_pages_is_preempted_and_not_failed(
    reference: Reference, make_pair: Callable[..., NodePair]
) -> None:
    """Its hit was cut back for want of tail pages, so it computed pages that the cache has, too."""
    pair, base = make_pair(decode={"num_pages": 45}), prompt(100)
    check(pair, reference, [base], 2)
    cache = pair.decode.cache
    evict_tails(cache)
    assert cache.match(base) == 25 and cache.match(base, num_tails=2) == 0
    check(pair, reference, [base], 60, is_local=True)
    assert pair.decode.scheduler.num_preemptions > 0


def test_tail_pages_bound_no_hits_of_many_conversations(make_pair: Callable[..., NodePair]) -> None:
    pair = make_pair(num_pages=1000, max_running=4)
    texts = [prompt(40, 1 + index) for index in range(20)]
    for turn in range(2):
        for index, text in enumerate(texts):
            pair.submit(f"{turn} {index}", text, params(2))
        results = pair.run()
        for index, text in enumerate(texts):
            ended = results[f"{turn} {index}", 0].ended
            assert ended is not None and ended.num_cached == (turn and 40)
            text += [*results[f"{turn} {index}", 0].ids, *prompt(5, 100 + index)]
    pools = pair.prefill.cache.pool
    assert pools.num_tails < pools.num_pages // 3


@pytest.mark.parametrize(
    ("page_size", "turn_len", "num_turns", "num_side_by_side"),
    thinned([(4, 125, 2, 2), (4, 125, 2, 3), (8, 250, 8, 6), (64, 2000, 8, 1)], lambda i, *_: i == 0),
)
def test_turns_on_a_decode_node_compute_little_more_than_their_new_tokens(
    page_size: int, turn_len: int, num_turns: int, num_side_by_side: int, checkpoint: Callable[..., Path]
) -> None:
    """Conversations of a model with recurrent states, side by side. Their states are the largest part of the memory,
    and there are tail pages for few of them. A turn is a question and, the last quarter, an answer."""
    model = checkpoint("qwen3_next", max_position_embeddings=num_turns * turn_len + 1000)
    path = model.with_name(f"{model.name}-mtp")
    model = path if path.exists() else with_qwen_mtp(model, path)
    num_pages = num_turns * turn_len // page_size * (num_side_by_side + 1)
    both: dict[str, Any] = {"page_size": page_size, "num_pages": num_pages, "chunk_tokens": 4 * page_size}
    both |= {"speculative": "mtp", "draft_steps": 3, "max_running": 1}
    texts, answer_len = [list[int]() for _ in range(num_side_by_side)], turn_len // 4
    num_computed = 0
    with node_pairs() as start:
        pair = start(model, prefill=both, decode=both)
        for turn in range(num_turns):
            for index, text in enumerate(texts):
                text += prompt(turn_len - answer_len, 1 + turn * num_side_by_side + index)
                pair.submit(f"{turn} {index}", text, params(answer_len), is_local=turn > 0)
                result = pair.run(timeout_s=170)[f"{turn} {index}", 0]
                assert result.ended is not None, result
                num_computed += (turn > 0) * (len(text) - result.ended.num_cached + answer_len)
                text += result.ids
        ledger = pair.decode.cache.tail_ledger()
    assert ledger is not None
    num_new = (num_turns - 1) * num_side_by_side * turn_len
    print(f"computed {num_computed / num_new:.3f} of {num_new}; {ledger.cache} tail pages are cached")
    assert num_computed <= 1.05 * num_new


@pytest.mark.parametrize("is_local", [False, True])
def test_preempted_sequences_continue_as_before(
    is_local: bool, reference: Reference, make_pair: Callable[..., NodePair]
) -> None:
    pair = make_pair(num_pages=40)
    check(pair, reference, [prompt(length) for length in (9, 17, 33, 60)], 28, is_local=is_local)
    assert pair.decode.scheduler.num_preemptions > 0


def test_tail_pages_alone_bound_how_many_sequences_run(
    reference: Reference, make_pair: Callable[..., NodePair], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Engine, "_num_tails", lambda *_: 1 + 13)
    pair, most = make_pair(), 0
    for index in range(6):
        pair.submit(str(index), prompt(40, index + 1), params(20))
    while not pair.is_done:
        pair.step()
        most = max(most, len(pair.decode.scheduler.running) + len(pair.decode.scheduler.reserved))
        assert pair.decode.cache.pool.num_free > 100
    assert most == 4, "each holds three of twelve"
    assert pair.hellos["decode"].capacity.num_tails == pair.decode.load().free_tails == 13
    for index in range(6):
        ids = prompt(40, index + 1)
        reference.assert_greedy(ids, pair.results[str(index), 0].ids, reference.generate(ids, 20))


@pytest.mark.parametrize("tree", [{}, {"draft_topk": 3, "draft_tokens": 10}], ids=["chain", "tree"])
def test_drafts_change_no_token(
    tree: dict[str, int], model: Path, reference: Reference, make_pair: Callable[..., NodePair], tmp_path: Path
) -> None:
    head = write_head(tmp_path / "head", "eagle", model)
    pair = make_pair(speculative="eagle", draft_model=str(head), draft_steps=3, **tree)
    check(pair, reference, [prompt(length) for length in LENGTHS], NUM_NEW)
    assert pair.decode.rounds.stats.num_drafted > 0


@pytest.mark.parametrize("fault", ["shifted", "stale"])
def test_a_row_that_stands_elsewhere_is_noticed(
    fault: str, make_pair: Callable[..., NodePair], reference: Reference
) -> None:
    """The output depends on each tail page: a row that is shifted by one token, or one of an earlier sequence, moves
    logits."""
    pair, ids = make_pair(), prompt(41)
    check(pair, reference, [ids], 12)
    pair.submit("wrong", ids, params(12))
    pair.step_until(lambda: pair.decode.scheduler.running)
    pair.decode.settle()
    [sequence] = pair.decode.scheduler.running
    engine = pair.decode.executor.engine  # pyright: ignore[reportAttributeAccessIssue]
    tails, tail = engine.target_pools.by_window[1].kv, sequence.tail
    assert tail is not None
    page, other = tail.pages[39 // PAGE_SIZE], tail.pages[-1]
    tails[:, page] = tails[:, page].roll(1, dims=3) if fault == "shifted" else tails[:, other]
    assert pair.run()["wrong", 0].ids != reference.generate(ids, 12)


@pytest.mark.whole
@pytest.mark.parametrize(("prefill", "decode"), [({}, {"tp": 2}), ({"tp": 2}, {}), ({}, {"dp_attention": 2})])
def test_ranks_have_their_heads_of_tail_pages(
    prefill: dict[str, int], decode: dict[str, int], reference: Reference, make_pair: Callable[..., NodePair]
) -> None:
    pair = make_pair(prefill=prefill, decode=decode)
    check(pair, reference, [prompt(length) for length in LENGTHS], 20)


def test_three_choices_and_a_request_that_moved_have_the_text_of_each_alone(
    make_pair: Callable[..., NodePair],
) -> None:
    pair, asked, ids = make_pair(), params(9, temperature=1.0, seed=3), prompt(30)
    pair.submit("three True", ids, asked, n=3, is_local=True)
    pair.run()
    assert pair.decode.stats().computed_tokens == 29 + 1 + 1, "the others compute what is behind the last whole page"
    pair.submit("three False", ids, asked, n=3)
    pair.submit("alone", ids, asked)
    results = pair.run()
    texts = [results["three False", choice].ids for choice in range(3)]
    assert texts[0] == results["alone", 0].ids and len({tuple(text) for text in texts}) == 3
    assert [results["three True", choice].ids for choice in range(3)] == texts
    for is_local in (False, True):
        pair.submit(f"moved {is_local}", ids, asked, received=texts[0][:4], is_local=is_local)
        assert pair.run()[f"moved {is_local}", 0].ids[4:] == texts[0][4:]
