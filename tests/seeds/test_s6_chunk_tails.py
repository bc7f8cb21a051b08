"""S6: draft KV, proposals and acceptance do not depend on the chunks of a prompt, nor on prefix hits.

Chains run through the real handoff. The test compares the decode node's state before its first round, and the drafts
that its rounds accept, for chunks of 1, page - 1, page and page + 1 tokens with the whole prompt. In the gate one
drafter of each class meets one of these chunks, also with prefix hits, and the others are compared with one process.
With BATON_WHOLE_MATRIX=1 each meets all four.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from drafters import ALL, STREAM_MTP, settings, target_of
from heads import SIX_LAYERS
from node_pair import NodePair, node_pairs, params
from solo import Solo, caught, coach, gather, plain_texts
from thinned import is_whole, thinned

from baton.engine.drafters import shifted, standalone
from baton.engine.drafters.base import PromptChunk

PAGE = 4
CHUNKS = (1, PAGE - 1, PAGE, PAGE + 1)
WHOLE = 64
NUM_TOKENS = 10
BOUND = 1e-4


def prompts() -> list[list[int]]:
    """Return prompts of many lengths. The last three share two full pages; the first of them goes on for one token."""
    rng = random.Random(6)
    cases = [
        [rng.randrange(512) for _ in range(num)] for num in ((1, 3, 4, 5, 8, 9, 13) if is_whole() else (1, 4, 5, 9))
    ]
    stem = [rng.randrange(512) for _ in range(9)]
    return [*cases, [*stem, 1, 2], [*stem[:8], 3, 4, 5], [*stem[:8], 6]]


@dataclass
class Seen:
    """The records of one request's rounds."""

    kv: torch.Tensor | None = None  # [num_layers, 2, num_kv_heads, L, head_dim], draft's, when the first began
    proposals: list[list[int]] = field(default_factory=list)
    num_accepted: list[int] = field(default_factory=list)


MakePair = Callable[..., NodePair]


@pytest.fixture
def make_pair() -> Iterator[MakePair]:
    with node_pairs() as start:

        def make(model: Path, **both: Any) -> NodePair:
            both = {"page_size": PAGE, "num_pages": 128, **both}
            return start(model, prefill=both, decode=both)

        yield make


def asked(index: int) -> Any:
    return params(NUM_TOKENS, temperature=float(index % 2), seed=index)


def run(pair: NodePair, name: str, chosen: slice = slice(None)) -> list[Seen]:
    """Run all prompts, or some, one after the other, because the last bits of matrix products depend on the batch."""
    engine, rounds = pair.decode.executor.engine, pair.decode.rounds
    assert engine.drafter is not None
    seen = [Seen() for _ in prompts()]
    submit, collect = rounds.submit, rounds.collect

    current: list[int] = []  # the prompt whose round it is

    def submitting(sequences: Any, *rest: Any) -> Any:
        [sequence] = sequences
        index = int(sequence.unit.rid.removeprefix(name))
        current[:] = [index]
        if not seen[index].proposals and engine.draft_pools is not None:
            table = sequence.tail.pages if engine.has_draft_tails else sequence.pages
            kv, held = gather(engine.draft_pools.kv, table, sequence.num_computed), engine.draft_window
            seen[index].kv = kv[:, :, :, max(0, kv.shape[3] - held) :] if held else kv
        return submit(sequences, *rest)

    def collecting(submitted: Any) -> Any:
        results = collect(submitted)
        seen[current[0]].num_accepted.append(results.rows[0].num_accepted)
        return results

    propose = engine.drafter.propose

    def proposing(rows: Any, shape: Any) -> Any:
        drafts = propose(rows, shape)
        seen[current[0]].proposals += drafts.tokens.tolist()
        return drafts

    rounds.submit, rounds.collect, engine.drafter.propose = submitting, collecting, proposing  # type: ignore[method-assign]
    for index, prompt in list(enumerate(prompts()))[chosen]:
        pair.submit(f"{name}{index}", prompt, asked(index))
        pair.run()
    rounds.submit, rounds.collect, engine.drafter.propose = submit, collect, propose  # type: ignore[method-assign]
    return seen


def check(ours: list[Seen], theirs: list[Seen]) -> None:
    for index, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert (a.kv is None) == (b.kv is None)
        if a.kv is not None and b.kv is not None:
            assert a.kv.shape == b.kv.shape
            assert float((a.kv - b.kv).abs().max()) < BOUND, (index, (a.kv - b.kv).abs().amax((0, 1, 2, 4)))
        assert a.proposals == b.proposals, index
        assert a.num_accepted == b.num_accepted, index


@functools.cache
def texts(model: Path) -> dict[int, list[int]]:
    """Return each prompt with the text after it, by seed."""
    return plain_texts(model, prompts(), asked, NUM_TOKENS)


def truths(model: Path, monkeypatch: pytest.MonkeyPatch, num_told: int = 4) -> None:
    """Tell the drafters `num_told` tokens of five, so that rounds accept some of their drafts."""
    known = texts(model)  # before the drafters are told anything
    coach(monkeypatch, known, lambda seed, position: (position + seed + 2) % 5 < num_told)


CHUNK_OF = {"standalone": 1, "eagle3": PAGE, "mtp-mimo": PAGE + 1, "mtp3-deepseek": PAGE - 1}


@pytest.mark.parametrize("name", thinned(ALL, lambda _, name: name in CHUNK_OF))
def test_chunks_and_prefix_hits_make_no_difference(
    name: str, checkpoint: Callable[..., Path], make_pair: MakePair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = target_of(name, checkpoint)
    drafter = settings(name, model, tmp_path, steps=3)
    truths(model, monkeypatch)
    whole = run(make_pair(model, **drafter, chunk_tokens=WHOLE, prefix_cache=False), "r")
    assert sum(sum(seen.num_accepted) for seen in whole) > 0
    for chunk in CHUNKS if is_whole() else [CHUNK_OF[name]]:
        pair = make_pair(model, **drafter, chunk_tokens=chunk)
        check(run(pair, "cold"), whole)
        check(run(pair, "again"), whole)
        assert sum(admitted.num_cached_pages for admitted in pair.admitted) > 4  # decode's own prefix hits
        assert any(result.ended and result.ended.num_cached for result in pair.results.values())


ALONE = ("eagle", "frozen-kv-mtp", "eagle-on-latents", SIX_LAYERS)


@pytest.mark.parametrize(
    "name",  # the chunks and hits of the others are in the test above
    thinned([*ALL, SIX_LAYERS], lambda _, name: name in ALONE),
)
def test_acceptance_through_the_handoff_is_that_of_one_process(
    name: str, checkpoint: Callable[..., Path], make_pair: MakePair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Promise P3 holds exactly, round by round. With six layers most prompts are shorter than the rows handed over."""
    most = 6 if name == SIX_LAYERS else 3
    model = target_of(name, checkpoint)
    drafter = settings(name, model, tmp_path, steps=most)
    truths(model, monkeypatch, 2 if name == SIX_LAYERS else 4)  # fewer: its own proposals show what it was handed
    solo = Solo(model, **drafter)
    alone, proposals = [], list[list[list[int]]]()
    propose = solo.drafter.propose

    def proposing(rows: Any, shape: Any) -> Any:
        drafts = propose(rows, shape)
        proposals[-1] += drafts.tokens.tolist()
        return drafts

    solo.drafter.propose = proposing  # type: ignore[method-assign]
    for index, prompt in enumerate(prompts()):
        proposals.append([])
        sequence = solo.start(prompt, asked(index))
        while len(sequence.generated) < NUM_TOKENS:
            num_steps = min(most, NUM_TOKENS - len(sequence.generated) - 1)  # as decode's scheduler bounds it
            solo.round([sequence], num_steps)
        alone.append(sequence.num_accepted)
    for chunk in (PAGE + 1, WHOLE) if is_whole() else (PAGE + 1,):
        handed = run(make_pair(model, **drafter, chunk_tokens=chunk), "r")
        assert [seen.num_accepted for seen in handed] == alone
        assert [seen.proposals for seen in handed] == proposals


# --- the defects put back ---


def check_against_whole(
    name: str, model: Path, directory: Path, make_pair: MakePair, chunk: int, mutate: Callable[[NodePair], None]
) -> None:
    drafter = settings(name, model, directory, steps=3)
    some = slice(-5, None)  # the longer ones, the last of which share pages
    whole = run(make_pair(model, **drafter, chunk_tokens=WHOLE, prefix_cache=False), "r", some)
    pair = make_pair(model, **drafter, chunk_tokens=chunk)
    mutate(pair)
    check(run(pair, "cold", some), whole)


@pytest.mark.parametrize(
    ("name", "is_dropped"),
    [
        ("eagle", True),
        ("eagle3", False),
        ("mtp-mimo", False),
        pytest.param(STREAM_MTP, True, marks=pytest.mark.whole),
        pytest.param(STREAM_MTP, False, marks=pytest.mark.whole),
    ],
)
def test_a_chunk_tail_without_its_next_token_is_caught(
    name: str,
    is_dropped: bool,
    checkpoint: Callable[..., Path],
    make_pair: MakePair,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The defect: tokens are shifted within a chunk, so its last row is missing or has the wrong next token."""
    observe_prompt = shifted.ShiftedDrafter.observe_prompt

    def within(self: Any, chunks: Any, hidden: torch.Tensor) -> None:
        cut: list[PromptChunk] = []
        for chunk in chunks:
            ids = chunk.token_ids[: chunk.stop]
            is_last = chunk.stop == len(chunk.token_ids)
            tail = [] if is_last or is_dropped else [chunk.token_ids[chunk.start]]
            cut.append(replace(chunk, token_ids=[*ids, *tail]))
        observe_prompt(self, cut, hidden)

    model = target_of(name, checkpoint)

    def mutate(_: NodePair) -> None:
        monkeypatch.setattr(shifted.ShiftedDrafter, "observe_prompt", within)

    with caught():
        check_against_whole(name, model, tmp_path, make_pair, PAGE, mutate)


def test_a_page_matched_without_its_next_token_is_caught(
    checkpoint: Callable[..., Path], make_pair: MakePair, tmp_path: Path
) -> None:
    """The defect: prefix caches key a page by its own tokens alone, though its last draft row depends on the next."""

    def forget(pair: NodePair) -> None:
        for node in (pair.prefill, pair.decode):
            node.cache.lookahead = 0

    with caught():
        check_against_whole("eagle", checkpoint("llama"), tmp_path, make_pair, PAGE, forget)


def test_an_unshifted_chunk_without_draft_kv_is_caught(
    checkpoint: Callable[..., Path], make_pair: MakePair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The defect: a standalone draft sees only the last chunk of a prompt."""
    observe_prompt = standalone.StandaloneDrafter.observe_prompt

    def last_only(self: Any, chunks: Any, hidden: Any) -> None:
        kept = [chunk for chunk in chunks if chunk.stop == len(chunk.token_ids)]
        if kept:
            observe_prompt(self, kept, hidden)

    def mutate(_: NodePair) -> None:
        monkeypatch.setattr(standalone.StandaloneDrafter, "observe_prompt", last_only)

    with caught():
        check_against_whole("standalone", checkpoint("llama"), tmp_path, make_pair, PAGE, mutate)


def test_a_tail_offered_before_the_first_token_is_caught(
    checkpoint: Callable[..., Path], make_pair: MakePair, tmp_path: Path
) -> None:
    """The defect: the last page is offered before the draft row after the sampled token is written into it."""

    def mutate(pair: NodePair) -> None:
        engine = pair.prefill.prompts.engine
        finish = engine.drafter.finish_prompt  # type: ignore[union-attr]

        def late(tails: Any, *rest: Any) -> Any:
            kvs = engine.kvs
            kept = [kvs[1][:, tail.pages[-1]].clone() for tail in tails]
            drafts = finish(tails, *rest)
            for tail, page in zip(tails, kept, strict=True):
                kvs[1][:, tail.pages[-1]] = page
            return drafts

        engine.drafter.finish_prompt = late  # type: ignore[union-attr, method-assign]

    with caught():
        check_against_whole("mtp-deepseek", checkpoint("llama"), tmp_path, make_pair, WHOLE, mutate)
