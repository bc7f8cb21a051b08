"""The prefill node submits a chunk before it reads the results of the last one.

The tests check the order of events, what happens to a request that is dropped while its chunk is under way, and that a
chunk for which the device has no memory ends its own requests only.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from drafters import settings
from imports import check_imports
from node_pair import NodePair, Result, node_pairs, params

from baton.engine.prompts.prompts import Prompts, SubmittedChunk
from baton.engine.work import Scores
from baton.metadata.wire.membership import Welcome
from baton.metadata.wire.messages import Failed, PrefillDone, Tokens
from baton.metadata.wire.protocol import PROTOCOL_MAX
from baton.metadata.wire.request import Unit
from baton.prefill_node import chunk_work, node
from baton.prefill_node.scheduler import StepPlan

CHUNK = 8
MakePair = Callable[..., NodePair]


@pytest.fixture
def make_pair(checkpoint: Callable[..., Path]) -> Iterator[MakePair]:
    both = {"page_size": 4, "chunk_tokens": CHUNK}
    with node_pairs() as start:
        yield lambda *, overlaps=True: start(checkpoint("llama"), prefill=both, decode=both, overlaps=overlaps)


def prompt(num_tokens: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(50) for _ in range(num_tokens)]


def submit(
    pair: NodePair,
    lens: Sequence[int],
    max_tokens: int = 6,
    prompts: Mapping[int, list[int]] | None = None,
    already: int = 0,
) -> None:
    """Submit requests "0", "1", ... of these lengths, or with these prompts. Step until all of them, and `already`
    earlier ones, wait at the prefill node and are claimed."""
    for index, num_tokens in enumerate(lens):
        pair.submit(str(index), (prompts or {}).get(index) or prompt(num_tokens, index), params(max_tokens))
    scheduler, start = pair.prefill.scheduler, pair.prefill.scheduler.start
    scheduler.start = list  # type: ignore[method-assign]
    pair.step_until(lambda: len(scheduler.waiting) == already + len(lens) and is_claimed(pair))
    scheduler.start = start  # type: ignore[method-assign]


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[str]]]:
    """The chunks that prefill nodes submit and wait for, with their rids."""
    found: list[tuple[str, list[str]]] = []
    names: dict[int, str] = {}
    begin, wait = chunk_work.submit, SubmittedChunk.wait

    def submitted(prompts: Prompts, plan: StepPlan) -> chunk_work.ChunkUnderWay:
        names.update({request.key: request.rid for request, _ in plan})
        found.append(("submit", [request.rid for request, _ in plan]))
        return begin(prompts, plan)

    def waited(self: SubmittedChunk) -> Scores:
        found.append(("wait", [names[row.key] for row in self.chunk.rows]))
        return wait(self)

    monkeypatch.setattr(chunk_work, "submit", submitted)
    monkeypatch.setattr(SubmittedChunk, "wait", waited)
    return found


def watch_sent(pair: NodePair, events: list[tuple[str, list[str]]]) -> None:
    """Record first tokens and ends of requests, too."""
    send = pair.prefill.membership.send

    def sent(message: Any, router: str) -> None:
        if isinstance(message, Tokens):
            events.append(("tokens", [unit.rid for unit in message.units]))
        elif isinstance(message, PrefillDone):
            events.append(("done", [message.rid]))
        send(message, router)

    pair.prefill.membership.send = sent  # type: ignore[method-assign]


@pytest.mark.parametrize(("overlaps", "is_done"), [(False, False), (True, False), (True, True)])
def test_the_next_chunk_is_submitted_before_first_tokens_are_read(
    overlaps: bool,
    is_done: bool,
    make_pair: MakePair,
    events: list[tuple[str, list[str]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The last chunk is settled at once. If a chunk is already done, it is settled before the next is submitted."""
    monkeypatch.setattr(SubmittedChunk, "is_done", property(lambda _: is_done))
    pair = make_pair(overlaps=overlaps)
    watch_sent(pair, events)
    submit(pair, [CHUNK, CHUNK, CHUNK], max_tokens=1)
    pair.run()
    happened = [event for event in events if event[0] != "done"]
    one, two, three = ([(what, [rid]) for what in ("submit", "wait", "tokens")] for rid in "012")
    if overlaps and not is_done:
        assert happened == [one[0], two[0], *one[1:], three[0], *two[1:], *three[1:]]
    else:
        assert happened == [*one, *two, *three]


def test_a_prompt_alone_is_settled_in_the_step_that_ends_it(make_pair: MakePair) -> None:
    pair = make_pair()
    submit(pair, [2 * CHUNK], max_tokens=1)
    request = pair.prefill.scheduler.waiting[0]
    assert pair.prefill.step() and (request.num_submitted, request.num_computed) == (CHUNK, 0)
    assert not pair.prefill.step() and request.is_computed and pair.prefill.is_idle
    pair.run()


def test_pages_of_earlier_chunks_are_handed_over_while_a_chunk_is_computed(
    make_pair: MakePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last pages of a prompt do not wait for the chunk behind it."""
    pair, waits = make_pair(), []
    chunks_waited_for: list[SubmittedChunk] = []

    def is_computed(submitted: SubmittedChunk) -> bool:
        if not chunks_waited_for or submitted is chunks_waited_for[0]:  # it ends the first prompt
            chunks_waited_for.append(submitted)
            return True
        pair.decode.step()
        waits.append(Unit("0", 0, 9) in pair.prefill.tickets())
        return not waits[-1] or len(waits) == 1000

    monkeypatch.setattr(SubmittedChunk, "is_computed", property(is_computed))
    submit(pair, [CHUNK // 2, 3 * CHUNK])
    pair.run()
    assert False in waits, "the ticket of the first prompt ended only after the second chunk"


def watch_offers(pair: NodePair, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that grows by the offered pages, and check that their chunks have been waited for."""
    offered: list[int] = []
    unsettled: dict[int, set[int]] = {}  # by chunk
    begin, wait, offer = chunk_work.submit, SubmittedChunk.wait, pair.prefill.handoff.offer

    def submitted(prompts: Prompts, plan: StepPlan) -> chunk_work.ChunkUnderWay:
        chunk = begin(prompts, plan)
        spans = [(request, row.position // 4, -(-(row.position + len(row.input_ids)) // 4)) for request, row in plan]
        unsettled[id(chunk.submitted)] = {page for request, first, stop in spans for page in request.pages[first:stop]}
        return chunk

    def waited(self: SubmittedChunk) -> Scores:
        unsettled.pop(id(self))
        return wait(self)

    def checked(unit: Unit, indices: Any, pages: list[int], *more: Any) -> None:
        for under_way in unsettled.values():
            assert not under_way.intersection(pages), (unit, pages, under_way)
        offered.extend(pages)
        offer(unit, indices, pages, *more)

    monkeypatch.setattr(chunk_work, "submit", submitted)
    monkeypatch.setattr(SubmittedChunk, "wait", waited)
    monkeypatch.setattr(pair.prefill.handoff, "offer", checked)
    return offered


def test_pages_are_offered_when_their_chunk_is_settled(make_pair: MakePair, monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds also for pages that another prompt finds in the prefix cache while they are computed."""
    pair = make_pair()
    offered = watch_offers(pair, monkeypatch)
    monkeypatch.setattr(pair.prefill.scheduler, "max_running", 2)
    first = prompt(CHUNK)
    submit(pair, [CHUNK, 3 * CHUNK, 0], prompts={2: [*first, 1, 2, 3]})
    pair.run()
    hit = pair.results["2", 0].ended
    assert hit is not None and hit.num_cached == CHUNK
    assert len(offered) == (8 + 24 + 12) // 4


def is_claimed(pair: NodePair) -> bool:
    """Return whether the decode node has claimed all tickets."""
    tickets = [pair.prefill.handoff._book.get(unit) for unit in pair.prefill.tickets()]
    return all(ticket is not None and ticket.holder is not None for ticket in tickets)


def under_way(make_pair: MakePair) -> NodePair:
    """Return a pair with one chunk under way: the ends of requests "0" and "1", and a part of "2"."""
    pair = make_pair()
    submit(pair, [3, 3, CHUNK])
    pair.prefill.step()
    chunk = pair.prefill._under_way
    assert chunk is not None and [len(ends) for ends in chunk.ends] == [2] and len(chunk.plan) == 3
    return pair


def forget(pair: NodePair, rid: str) -> None:
    """Drop the request at the decode node, and expect no result of it."""
    for sequence in pair.decode.scheduler.find(rid, 9, None):
        pair.decode._drop(sequence, "test")
    pair.results.pop((rid, 0))


@pytest.mark.parametrize("rids", ["0", "2", "01", "012"])
def test_a_request_cancelled_under_way_gets_no_first_token(
    rids: str, make_pair: MakePair, events: list[tuple[str, list[str]]]
) -> None:
    pair = under_way(make_pair)
    watch_sent(pair, events)
    expected = {"0", "1", "2"} - set(rids)
    for rid in rids:
        pair.prefill._cancel(rid, 9, None)
        forget(pair, rid)
    results = pair.run()
    assert {rid for (rid, _), result in results.items() if len(result.ids) == 6} == expected
    assert {rid for what, told in events if what == "tokens" for rid in told} == expected
    assert sorted(rid for what, told in events if what == "done" for rid in told) == ["0", "1", "2"]


def test_a_choice_cancelled_under_way_does_not_change_the_others(make_pair: MakePair) -> None:
    pair = make_pair()
    sampled = params(6, temperature=1.5, seed=3)
    pair.submit("whole", prompt(6), sampled, n=3)
    whole = [result.ids for result in pair.run().values()]
    pair.results.clear()
    pair.submit("some", prompt(6), sampled, n=3)
    submit(pair, [2 * CHUNK], already=1)
    pair.prefill.step()
    assert pair.prefill._under_way is not None
    pair.prefill._cancel("some", 9, (1,))
    [sequence] = pair.decode.scheduler.find("some", 9, (1,))
    pair.decode._drop(sequence, "test")
    pair.results.pop(("some", 1))
    results = pair.run()
    assert [results["some", 0].ids, results["some", 2].ids] == [whole[0], whole[2]]


def test_requests_whose_tickets_end_under_way_get_no_first_token(
    make_pair: MakePair, events: list[tuple[str, list[str]]]
) -> None:
    """The decode node is gone, so no first token is sent, and the pages are freed at once."""
    pair = under_way(make_pair)
    watch_sent(pair, events)
    pair.prefill.handoff.close_peer(pair._hellos["decode"].epoch)
    for rid in "012":
        forget(pair, rid)
    pair.run()
    assert "tokens" not in {what for what, _ in events}


def test_a_new_router_under_way_ends_the_requests_of_the_old_one(make_pair: MakePair) -> None:
    pair = under_way(make_pair)
    for name in ("prefill", "decode"):
        pair.send(name, Welcome(router_epoch="another", protocol=PROTOCOL_MAX, need_tokenizer=False))
    pair.results.clear()
    pair._take = lambda *_: None  # type: ignore[method-assign]
    pair.run(timeout_s=10)


# --- what the device keeps of prompts ---


@pytest.fixture
def make_layered_pair(checkpoint: Callable[..., Path], tmp_path: Path) -> Iterator[MakePair]:
    """Pairs whose drafter reads states of several prompt positions, so that some are kept between chunks."""
    model = checkpoint("llama")
    drafter = settings("mtp3-deepseek", model, tmp_path, steps=3)
    both = {"page_size": 4, "chunk_tokens": CHUNK, **drafter}
    with node_pairs() as start:
        yield lambda *, overlaps=True: start(model, prefill=both, decode=both, overlaps=overlaps)


@pytest.mark.parametrize("overlaps", [False, True])
def test_nothing_is_kept_of_prompts_that_are_computed_or_dropped(overlaps: bool, make_layered_pair: MakePair) -> None:
    pair = make_layered_pair(overlaps=overlaps)
    kept = pair.prefill.prompts
    submit(pair, [3 * CHUNK, 3 * CHUNK, 5])
    first, dropped, _ = pair.prefill.scheduler.waiting
    pair.step_until(lambda: first.is_submitted and dropped.num_submitted)
    assert kept.keys == {dropped.key}, "the first prompt has handed its states to its end"
    pair.prefill._cancel("1", 9, None)
    forget(pair, "1")
    results = pair.run()
    assert not kept.keys
    assert all(len(result.ids) == 6 for result in results.values())


# --- out of memory ---


def limit_memory(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, is_too_big: Callable[..., bool]) -> None:
    """Let a device function run out of memory if `is_too_big` says so of its arguments."""
    function = getattr(owner, name)

    def limited(*args: Any, **kwargs: Any) -> Any:
        if is_too_big(*args):
            raise torch.OutOfMemoryError("tried to allocate 376 MiB")
        return function(*args, **kwargs)

    monkeypatch.setattr(owner, name, limited)


def check_failed(result: Result) -> None:
    assert result.failed is not None and (result.failed.code, result.failed.retryable) == ("out_of_memory", True)
    assert "no memory left" in result.failed.message and "lower chunk_tokens" in result.failed.message


@pytest.mark.each_value
@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("bad_position", [0, CHUNK])
def test_a_chunk_that_does_not_fit_ends_its_requests_alone(
    bad_position: int,
    overlaps: bool,
    make_layered_pair: MakePair,
    events: list[tuple[str, list[str]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also if earlier chunks of a request were computed and offered."""
    pair = make_layered_pair(overlaps=overlaps)
    failures: list[Unit] = []
    send = pair.prefill.membership.send

    def sent(message: Any, router: str) -> None:
        if isinstance(message, Failed):
            failures.append(message.unit)
        send(message, router)

    pair.prefill.membership.send = sent  # type: ignore[method-assign]
    bad = prompt(2 * CHUNK + 3, seed=9)
    reference = make_layered_pair(overlaps=overlaps)
    submit(reference, [6, 7, CHUNK])
    expected = {rid: result.ids for (rid, _), result in reference.run().items()}

    def is_bad(batch: Any, *_: Any) -> bool:
        """Return whether the chunk holds this position of the bad prompt."""
        return bool((batch.input_ids == bad[bad_position]).logical_and(batch.positions == bad_position).any())

    with monkeypatch.context() as patch:
        limit_memory(patch, pair.prefill.prompts.engine.model, "forward_with_aux", is_bad)
        pair.submit("bad", bad, params(6), n=2)
        pair.run()
        for choice in range(2):
            check_failed(pair.results.pop(("bad", choice)))
        assert sorted(unit.choice for unit in failures) == [0, 1], "each choice has one error"
        submit(pair, [6, 7, CHUNK])
        assert {rid: result.ids for (rid, _), result in pair.run().items()} == expected
    assert not pair.prefill.prompts.keys and not pair.prefill.tickets()
    pair.check_books()
    pair.results.clear()
    pair.submit("again", bad, params(6), n=2)
    assert all(len(result.ids) == 6 for result in pair.run().values()), "the memory is there now"


def test_the_largest_prompt_ends_of_a_chunk_that_does_not_fit(
    make_pair: MakePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The chunk before it is under way, and its prompt is served, like the smaller one of the chunk."""
    pair = make_pair()
    submit(pair, [CHUNK, 3, 4])
    with monkeypatch.context() as patch:
        limit_memory(
            patch, pair.prefill.prompts.engine.model, "forward_with_aux", lambda batch, *_: batch.num_tokens == 7
        )
        results = pair.run()
    assert len(results["0", 0].ids) == len(results["1", 0].ids) == 6
    check_failed(results["2", 0])
    assert not results["2", 0].ids


@pytest.mark.parametrize("overlaps", [False, True])
def test_drafts_that_do_not_fit_end_only_what_a_decode_node_would_continue(
    overlaps: bool, make_layered_pair: MakePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = make_layered_pair(overlaps=overlaps)
    drafter = pair.prefill.prompts.engine.drafter
    with monkeypatch.context() as patch:
        limit_memory(patch, drafter, "finish_prompt", lambda *_: True)
        pair.submit("whole", prompt(4, 3), params(1))
        submit(pair, [5, 2 * CHUNK], already=1)
        results = dict(pair.run())
    whole = results["whole", 0]
    assert whole.failed is None and len(whole.ids) == 1
    for rid in "01":
        check_failed(results[rid, 0])
        assert len(results[rid, 0].ids) == 1, "the first token was sent, so the request goes on elsewhere after it"
    pair.check_books()
    pair.results.clear()
    submit(pair, [5])
    assert len(pair.run()["0", 0].ids) == 6


# --- imports ---


def test_the_node_imports_no_torch() -> None:
    """Imports every module of prefill_node/ but main, which loads the engine, in a new interpreter."""
    folder = Path(node.__file__).parent
    modules = {path.stem for path in folder.glob("*.py")} - {"__init__", "main"}
    assert modules >= {"node", "scheduler"}
    forbidden = {"torch", "triton", "transformers", "safetensors", "baton.engine.prompts.prompts"}
    check_imports((f"baton.prefill_node.{name}" for name in modules), forbidden)
