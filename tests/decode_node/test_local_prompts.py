"""Local prompts: a decode node that computes a prompt itself gives the same tokens as with a prefill node.

It does so beside sequences whose prompts came from a prefill node, drafts the same, and frees all that it took."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import drafters
import pytest
import torch
from heads import ALGORITHM
from matrix import PAGE_SIZE, Plain
from node_pair import ROUTER_EPOCH, NodePair, Result, node_pairs, params
from thinned import halved, is_whole, thinned

from baton.decode_node.chunk_length import MAX_AHEAD
from baton.engine.drafters.base import RoundRows
from baton.engine.pace.draft_length import NO_DRAFTS, DraftShape
from baton.engine.pace.mixed_sizes import MixedSizes
from baton.engine.rounds.trees import Drafts
from baton.engine.work import Recompute
from baton.metadata.wire.messages import Cancel, Resend
from baton.metadata.wire.request import Unit

MakePair = Callable[..., NodePair]


@pytest.fixture
def make_pair() -> Iterator[MakePair]:
    """`make_pair(model)`: a pair with small pages and chunks."""
    with node_pairs() as start:

        def make(model: Path, *, decode: dict[str, Any] | None = None, overlaps: bool = False, **both: Any) -> NodePair:
            both = {"page_size": PAGE_SIZE, "num_pages": 240, "max_running": 10, "chunk_tokens": 6, **both}
            return start(model, prefill=both, decode={**both, **(decode or {})}, overlaps=overlaps)

        yield make


@pytest.mark.parametrize(  # test_matrix.py has all drafters
    ("name", "is_preempted"), halved(["none", "eagle"], [False, True])
)
def test_a_local_prompt_gives_the_same_tokens_as_a_handoff(
    name: str, is_preempted: bool, plain: Callable[[str], tuple[Path, Plain]], make_pair: MakePair, tmp_path: Path
) -> None:
    """Every other request has a local prompt. All share one batch."""
    model, reference = plain(name)
    speculation = {} if name == "none" else drafters.settings(name, model, tmp_path)
    pair = make_pair(model, overlaps=is_preempted, **speculation)
    for phase in range(2):  # the second finds pages of the first
        for index, case in enumerate(reference.cases):
            is_local = index % 2 == phase
            pair.submit(f"{phase} {case.ask.name}", case.prompt, case.params, n=case.ask.n, is_local=is_local)
    for _ in range(8 if is_preempted else 0):  # some sequences lose their pages before their first token
        for _ in range(2):
            pair.step_until(lambda: pair.decode.scheduler.running)
            pair.step()
        pair.decode.settle()
        for running in list(pair.decode.scheduler.running)[::2]:
            pair.decode.scheduler.preempt(running)
    results = pair.run()
    for phase in range(2):
        for case in reference.cases:
            case.check([results[f"{phase} {case.ask.name}", choice] for choice in range(case.ask.n)])
    assert (pair.decode.stats().preemptions > 3) == is_preempted
    assert len(pair.admitted) == sum(case.ask.n for case in reference.cases)


def test_a_round_with_a_chunk_beside_it_is_submitted_while_the_round_before_is_under_way(
    checkpoint: Callable[..., Path], make_pair: MakePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = make_pair(checkpoint("llama"), overlaps=True)
    overlapping: list[bool] = []
    submit = pair.decode.rounds.submit

    def record(sequences: Any, shape: Any, limits: Any, beside: Any = None) -> Any:
        if beside is not None:
            overlapping.append(pair.decode._under_way is not None)
        return submit(sequences, shape, limits, beside)

    monkeypatch.setattr(pair.decode.rounds, "submit", record)
    pair.submit("stream", range(1, 9), params(40))
    pair.step_until(lambda: pair.decode.scheduler.num_streams)
    pair.submit("local", range(1, 31), params(4), is_local=True)
    results = pair.run()
    assert len(overlapping) > 3 and all(overlapping)
    assert len(results["local", 0].ids) == 4 and len(results["stream", 0].ids) == 40


def test_without_a_stream_few_chunks_are_submitted_ahead_of_the_device(
    checkpoint: Callable[..., Path], make_pair: MakePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device is slow: it computes a chunk while the node waits ten times."""
    pair = make_pair(checkpoint("llama"))
    ahead: list[int] = [0, 0]  # chunks, waits
    executor = type(pair.decode.executor)
    submit = executor.submit
    most: list[int] = []

    def count(self: Any, work: Any) -> None:
        submit(self, work)
        if isinstance(work, Recompute):
            ahead[0] += 1
            most.append(ahead[0])

    def look(self: Any) -> int:
        ahead[1] += 1
        if ahead[1] % 10 == 0:
            ahead[0] = max(0, ahead[0] - 1)
        return ahead[0]

    monkeypatch.setattr(executor, "submit", count)
    monkeypatch.setattr(executor, "num_chunks_ahead", property(look))
    pair.submit("local", range(1, 50), params(2), is_local=True)
    assert len(pair.run()["local", 0].ids) == 2
    assert len(most) == 7 and max(most) == MAX_AHEAD


@pytest.mark.parametrize(
    ("name", "is_joined"),
    thinned(itertools.product(drafters.ORDINARY, (False, True)), lambda i, name, _: i % 12 in (0, 11) or i == 3),
)
def test_a_drafter_proposes_the_same_after_a_local_prompt(
    name: str, is_joined: bool, checkpoint: Callable[..., Path], make_pair: MakePair, tmp_path: Path
) -> None:
    """A local prompt with one received token has the same rounds as the prompt without it after a handoff. If the first
    round shares the forward of the last chunk, it drafts nothing. So it drafts nothing after the handoff, too."""
    model = drafters.target_of(name, checkpoint)
    pair = make_pair(model, **drafters.settings(name, model, tmp_path, steps=3))
    without_drafts: list[None] = []  # rounds to come
    scheduler = pair.decode.scheduler
    if not is_joined:
        scheduler.mixed = MixedSizes(())

    def choose(*_: Any) -> DraftShape:
        if without_drafts:
            without_drafts.pop()
            return NO_DRAFTS
        return scheduler.shape

    scheduler._choose = choose
    proposed = record_drafts(pair)
    for prompt_len in (1, 12, 13) if is_whole() else (1, 12):  # 12: whole pages
        prompt = [(7 * index + prompt_len) % 50 for index in range(prompt_len)]
        sampled = params(9, temperature=1.0, seed=prompt_len)
        without_drafts += [None] if is_joined else []
        pair.submit(f"remote {prompt_len}", prompt, sampled)
        remote = pair.run()[f"remote {prompt_len}", 0]
        expected, drafts = counts(remote), proposed.copy()
        assert len(drafts) > 2
        for chunk_tokens in (1, PAGE_SIZE):
            pair.decode.cache.flush()
            pair.decode.scheduler.chunk_tokens = chunk_tokens
            for more in ("",) if is_joined else ("", " again"):  # the second finds pages of the first, maybe all
                proposed.clear()
                rid = f"local {prompt_len} {chunk_tokens}{more}"
                pair.submit(rid, prompt, sampled, received=remote.ids[:1], is_local=True)
                local = pair.run()[rid, 0]
                assert local.ids[1:] == remote.ids[1:], rid
                assert proposed == drafts and counts(local) == expected, rid
        proposed.clear()


@pytest.mark.parametrize("name", ["eagle", "mtp3-deepseek"])
def test_a_drafter_observes_the_round_that_shares_the_forward_of_the_last_chunk(
    name: str, checkpoint: Callable[..., Path], make_pair: MakePair, tmp_path: Path
) -> None:
    """The round drafts for a stream beside it. A drafter of several layers needs the state after the prompt there."""
    model = drafters.target_of(name, checkpoint)
    pair = make_pair(model, **drafters.settings(name, model, tmp_path, steps=3))
    drafter, scheduler = pair.decode.executor.engine.drafter, pair.decode.scheduler
    propose, proposed = drafter.propose, dict[tuple[int, int], list[int]]()

    def record(rows: RoundRows, shape: DraftShape) -> Drafts:
        drafts = propose(rows, shape)
        places = zip(rows.lengths.tolist(), rows.last_tokens.tolist(), strict=True)
        proposed.update(zip(places, drafts.tokens.tolist(), strict=True))
        return drafts

    drafter.propose = record
    prompt, sampled = [3, 1, 4, 1, 5, 9, 2, 6, 5], params(9, temperature=1.0, seed=3)
    chosen = [NO_DRAFTS]  # in the first round after the handoff
    scheduler._choose = lambda *_: chosen.pop() if chosen else scheduler.shape
    pair.submit("remote", prompt, sampled)
    remote = pair.run()["remote", 0]
    expected = proposed.copy()
    pair.decode.cache.flush()
    pair.submit("stream", range(20, 28), params(40, seed=1))
    pair.step_until(lambda: scheduler.num_streams)
    pair.submit("local", prompt, sampled, received=remote.ids[:1], is_local=True)
    assert pair.run()["local", 0].ids[1:] == remote.ids[1:]
    assert len(expected) > 2
    for place, drafts in expected.items():
        assert proposed[place][: len(drafts)] == drafts, "near its end the prompt alone drafts less"


def record_drafts(pair: NodePair) -> list[list[list[int]]]:
    """Return a list to which the decode node's drafter adds what it proposes in each round."""
    proposed: list[list[list[int]]] = []
    drafter = pair.decode.executor.engine.drafter
    propose = drafter.propose

    def record(rows: RoundRows, shape: DraftShape) -> Drafts:
        drafts = propose(rows, shape)
        proposed.append(drafts.tokens.tolist())
        return drafts

    drafter.propose = record
    return proposed


def counts(result: Result) -> tuple[int, int, int]:
    assert result.ended is not None
    return result.ended.num_rounds, result.ended.num_drafted, result.ended.num_accepted


@pytest.mark.parametrize(
    "name",
    thinned(
        ["eagle", "eagle3", "mtp-deepseek", "mtp-mimo", "frozen-kv-mtp"],
        lambda i, name: name in ("eagle3", "mtp-deepseek"),
    ),
)
def test_a_drafter_that_is_right_is_right_from_the_first_token_on(
    name: str, checkpoint: Callable[..., Path], make_pair: MakePair, tmp_path: Path
) -> None:
    bigram = drafters.make_bigram(checkpoint("llama"), tmp_path / "bigram")
    head = drafters.make_right(name, bigram, tmp_path / "head")
    pair = make_pair(bigram, speculative=ALGORITHM[name], draft_model=str(head), draft_steps=3)
    for index, prompt_len in enumerate((3, 5, 12, 23)):
        pair.submit(f"{prompt_len}", range(1, prompt_len + 1), params(12, seed=index), n=1 + index % 2, is_local=True)
    for (rid, _), result in pair.run().items():
        num_rounds, num_drafted, num_accepted = counts(result)
        assert num_rounds == 3 and num_accepted == num_drafted >= 8, (rid, result.ended)


def test_one_choice_computes_the_prompt_and_the_others_share_its_pages(
    checkpoint: Callable[..., Path], make_pair: MakePair
) -> None:
    pair = make_pair(checkpoint("llama"), speculative="ngram", draft_steps=2)
    sampled = params(6, temperature=1.0, seed=3, num_logprobs=1)
    pair.submit("remote", range(1, 31), sampled, n=3, cache_salt="other")
    pair.submit("local", range(1, 31), sampled, n=3, is_local=True)
    results = pair.run()
    for choice in range(3):
        ours, theirs = results["local", choice], results["remote", choice]
        assert ours.ids == theirs.ids and [each.top_ids for each in ours.logprobs] == [
            each.top_ids for each in theirs.logprobs
        ]
        assert ours.ended is not None and ours.ended.num_cached == 0
    assert pair.decode.stats().computed_tokens == 29 + 2, "the others compute one token each"
    assert pair.decode.stats().prompt_tokens == 90


def test_the_next_choice_computes_the_prompt_if_the_first_is_cancelled(
    checkpoint: Callable[..., Path], make_pair: MakePair
) -> None:
    pair = make_pair(checkpoint("llama"))
    pair.submit("r", range(1, 41), params(6), n=2, is_local=True)
    pair.step_until(lambda: 0 < pair.decode.stats().computed_tokens < 30)
    pair.send("decode", Cancel(router_epoch=ROUTER_EPOCH, rid="r", attempt=0, choices=(0,), reason="test"))
    del pair.results["r", 0]
    second = pair.run()["r", 1]
    pair.submit("same", range(1, 41), params(6), cache_salt="other")
    assert second.ids == pair.run()["same", 0].ids


def test_a_local_prompt_of_one_output_token(checkpoint: Callable[..., Path], make_pair: MakePair) -> None:
    pair = make_pair(checkpoint("llama"), speculative="ngram", draft_steps=2)
    for prompt_len in (1, 9):
        for is_local in (False, True):
            rid = f"{prompt_len} {is_local}"
            pair.submit(rid, range(1, prompt_len + 1), params(1, num_logprobs=2), is_local=is_local)
            if not is_local:
                pair.run()
        remote, local = (pair.run()[f"{prompt_len} {is_local}", 0] for is_local in (False, True))
        assert len(local.ids) == 1 and local.ids == remote.ids
        assert local.logprobs[0].top_ids == remote.logprobs[0].top_ids


def test_without_memory_for_a_chunk_the_longest_prompt_ends_and_the_others_go_on(
    checkpoint: Callable[..., Path], make_pair: MakePair, tmp_path: Path
) -> None:
    model = checkpoint("llama")
    settings = drafters.settings("mtp3-deepseek", model, tmp_path, steps=3)
    pair = make_pair(model, **settings)
    pair.submit("same", range(1, 10), params(6))
    same = pair.run()["same", 0]
    pair.decode.cache.flush()
    pair.decode.scheduler.chunk_tokens = 24
    drafter = pair.decode.executor.engine.drafter
    finish_prompt, num_calls = drafter.finish_prompt, itertools.count()

    def finish(*args: Any) -> Any:
        if next(num_calls) < 2:  # beside a round, and without one
            raise torch.OutOfMemoryError("no memory")
        return finish_prompt(*args)

    drafter.finish_prompt = finish
    pair.submit("long", range(1, 41), params(6), is_local=True)
    pair.submit("short", range(1, 10), params(6), is_local=True)
    results = pair.run()
    failed = results["long", 0].failed
    assert failed is not None and failed.code == "out_of_memory" and failed.retryable
    assert results["short", 0].ids == same.ids


def test_a_local_prompt_needs_no_prefill_node(checkpoint: Callable[..., Path], make_pair: MakePair) -> None:
    pair = make_pair(checkpoint("llama"))
    pair.submit("r", range(1, 30), params(5, num_logprobs=2), is_local=True)
    result = pair.run()["r", 0]
    assert len(result.ids) == len(result.logprobs) == 5
    assert result.ended is not None and (result.ended.num_prompt, result.ended.num_cached) == (29, 0)
    assert pair.prefill.stats().steps == 0 and pair.decode.stats().computed_tokens == 28
    assert not pair.admitted and not pair.done


def test_nodes_report_how_long_prompts_take(checkpoint: Callable[..., Path], make_pair: MakePair) -> None:
    pair = make_pair(checkpoint("llama"))
    idle = pair.decode.load()
    assert idle.prompt_token_s > 0 and idle.round_s > 0 and idle.has_prompt_room, "measured at the start"
    assert pair.prefill.load().prompt_token_s > 0.0, "likewise"
    pair.submit("stream", range(1, 12), params(60))
    pair.step_until(lambda: len(pair.decode.scheduler.running) == 1)
    assert pair.prefill.load().prompt_token_s > 0.0
    busy = pair.decode.load()
    assert busy.prompt_token_s > idle.prompt_token_s, "beside a stream"
    pair.submit("r", range(1, 40), params(5), is_local=True)
    pair.step_until(lambda: pair.decode.load().queued_tokens > 0)
    pair.run()


def test_an_operators_bound_without_room_keeps_prompts_from_most_rounds(
    checkpoint: Callable[..., Path], make_pair: MakePair
) -> None:
    """The bound is shorter than any round. The text is the same as ever."""
    model = checkpoint("llama")
    pair = make_pair(model)
    pair.submit("same stream", range(1, 12), params(60))
    pair.submit("same", range(1, 40), params(5))
    same = pair.run()
    with node_pairs() as start_pair:
        both = {"page_size": PAGE_SIZE, "num_pages": 240, "max_running": 10, "chunk_tokens": 6}
        bounded = start_pair(model, prefill=both, decode={**both, "max_gap_ms": 1e-3}, overlaps=False)
        bounded.submit("stream", range(1, 12), params(60))
        bounded.step_until(lambda: len(bounded.decode.scheduler.running) == 1)
        assert not bounded.decode.load().has_prompt_room
        bounded.submit("r", range(1, 40), params(5), is_local=True)
        bounded.step_until(lambda: not bounded.decode.scheduler.num_streams)
        # the stream had all rounds to itself; a chunk may be computed in the step in which it ends
        assert bounded.decode.stats().computed_tokens in (0, 6)
        results = bounded.run()
    assert results["stream", 0].ids == same["same stream", 0].ids and results["r", 0].ids == same["same", 0].ids


def test_another_cache_salt_does_not_find_pages_of_the_prefill_node(
    checkpoint: Callable[..., Path], make_pair: MakePair
) -> None:
    pair = make_pair(checkpoint("llama"))
    prompt = list(range(1, 30))
    pair.submit("with prefill", prompt, params(5), cache_salt="a")
    pair.run()
    pair.submit("same", prompt, params(5), cache_salt="a", is_local=True)
    assert pair.run()["same", 0].ended.num_cached == 28
    assert pair.decode.stats().computed_tokens == 0
    pair.submit("own", prompt, params(5), cache_salt="b", is_local=True)
    assert pair.run()["own", 0].ended.num_cached == 0
    assert pair.decode.stats().computed_tokens == 28
    assert len({tuple(result.ids) for result in pair.results.values()}) == 1


def test_a_local_prompt_continues_from_received_tokens(checkpoint: Callable[..., Path], make_pair: MakePair) -> None:
    pair = make_pair(checkpoint("llama"))
    sampled = params(12, temperature=1.0, seed=7, repetition_penalty=1.2)
    pair.submit("whole", range(1, 12), sampled)
    whole = pair.run()["whole", 0].ids
    for count in (1, 5, 11):
        pair.submit(f"after {count}", range(1, 12), sampled, received=whole[:count], is_local=True)
        assert pair.run()[f"after {count}", 0].ids[count:] == whole[count:]
    pair.submit("a prompt of one token", [3], params(4), is_local=True)
    pair.submit("the same", [3], params(4))
    results = pair.run()
    assert results["a prompt of one token", 0].ids == results["the same", 0].ids


def test_a_refused_request_is_granted_when_capacity_becomes_free(
    checkpoint: Callable[..., Path], make_pair: MakePair
) -> None:
    pair = make_pair(checkpoint("llama"), decode={"max_running": 1})
    pair.submit("first", range(1, 12), params(20))
    pair.submit("second", range(1, 12), params(20), is_local=True)
    pair.step_until(lambda: pair.is_full)
    assert [unit.rid for unit in pair.decode.units()] == ["first"]
    results = pair.run()
    assert results["first", 0].ids == results["second", 0].ids


def test_a_cancelled_request_frees_everything(checkpoint: Callable[..., Path], make_pair: MakePair) -> None:
    pair = make_pair(checkpoint("llama"))
    pair.submit("r", range(1, 40), params(20), is_local=True)
    pair.step_until(lambda: 0 < pair.decode.stats().computed_tokens < 38)
    pair.send("decode", Resend(router_epoch=ROUTER_EPOCH, unit=Unit("r", 0, 0), first=0))
    pair.send("decode", Cancel(router_epoch=ROUTER_EPOCH, rid="r", attempt=0, choices=None, reason="test"))
    pair.step_until(lambda: pair.decode.is_idle)
    assert pair.results["r", 0].failed is None and not pair.decode.units()
    pair.results.clear()
