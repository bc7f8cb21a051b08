"""Prompts on a device: plain work in, plain reports out, equal for all chunk sizes; ended prompts leave nothing."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from drafters import settings, target_of
from memory_limit import MemoryLimit

from baton.engine import engine as engines
from baton.engine.config import EngineConfig
from baton.engine.engine import Engine
from baton.engine.prompts.prompts import Prompts, SubmittedChunk
from baton.engine.sampling.state import SamplingState
from baton.engine.state.pages import Owner
from baton.engine.work import BatchRow, Chunk, ChunkRow, CopyPages, FirstTokens, HandoffRows, Tail, Tails
from baton.metadata.errors import OutOfMemory
from baton.metadata.handoff.schema.buffers import MetadataBuffers
from baton.metadata.wire.request import SamplingParams

PAGE = 4
BOUND = 1e-4
MakePrompts = Callable[[str], Prompts]


@pytest.fixture(scope="module")
def make_prompts(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> MakePrompts:
    """`make_prompts("eagle")`: a small model with this drafter, loaded once. "none": without a drafter."""
    engines: dict[str, Engine] = {}

    def make(name: str) -> Prompts:
        if name not in engines:
            model = target_of(name, checkpoint)
            drafter = {} if name == "none" else settings(name, model, tmp_path_factory.mktemp(name), steps=3)
            config = EngineConfig(model=str(model), device="cpu", threads=1, page_size=PAGE, num_pages=64, **drafter)
            engines[name] = Engine(config)
        return Prompts(engines[name])

    return make


class Prompt:
    """A prompt and its choices, with pages of its own for each choice, so that all pages may be copied."""

    def __init__(self, prompts: Prompts, key: int, num_tokens: int, num_choices: int = 1, **params: Any) -> None:
        rng = random.Random(num_tokens)
        pool, vocab_size = prompts.engine.pool, prompts.vocab_size
        self.key = key
        self.token_ids = [rng.randrange(vocab_size) for _ in range(num_tokens)]
        asked = SamplingParams(max_tokens=4, **{"temperature": 0.0, **params})
        self.states = [
            SamplingState(asked, self.token_ids, vocab_size=vocab_size, choice=choice) for choice in range(num_choices)
        ]
        num_pages = -(-num_tokens // PAGE)
        self.block_tables = [pool.allocate(num_pages, Owner.REQUEST) for _ in self.states]

    def row(self, start: int, stop: int, *, num_scored: int = 0, num_logprobs: int = 0) -> ChunkRow:
        is_last = stop == len(self.token_ids)
        row = BatchRow(self.token_ids[start:stop], start, self.block_tables[0], int(is_last), num_scored)
        return ChunkRow(self.key, self.token_ids, row, num_logprobs)

    def tail(self, row: int, *, is_handed_over: bool = True, num_cached: int = 0) -> Tail:
        first, *others = self.block_tables
        copies = CopyPages(first * len(others), [page for pages in others for page in pages])
        return Tail(row, self.states, self.block_tables, copies, is_handed_over, num_cached)


@pytest.fixture(autouse=True)
def _all_pages_free(make_prompts: MakePrompts) -> Iterator[None]:
    yield
    for name in ("none", "eagle", "mtp3-deepseek"):
        pool = make_prompts(name).engine.pool
        pool.release([page for page in range(1, pool.num_pages) if pool.owner(page) is Owner.REQUEST])


def compute(prompts: Prompts, prompt: Prompt, chunk_tokens: int) -> SubmittedChunk:
    """Compute a prompt in chunks of this size, with its first tokens and drafts. Return the last chunk."""
    num_tokens = len(prompt.token_ids)
    last = (num_tokens - 1) // chunk_tokens * chunk_tokens
    for start in range(0, last, chunk_tokens):
        prompts.submit(Chunk([prompt.row(start, start + chunk_tokens)], []))
    submitted = prompts.submit(Chunk([prompt.row(last, num_tokens)], [Tails([prompt.tail(0)])]))
    submitted.draft()
    return submitted


def kv_of(prompts: Prompts, pages: Sequence[int], num_tokens: int) -> list[torch.Tensor]:
    """Return the pages' KV in every pool, [num_layers, 2, num_kv_heads, num_tokens, head_dim]."""
    found = [kv[:, list(pages)].permute(0, 2, 3, 1, 4, 5).flatten(3, 4) for kv in prompts.engine.kvs]
    return [each[:, :, :, :num_tokens] for each in found]


@pytest.mark.parametrize("name", ["none", "eagle", "mtp3-deepseek"])
@pytest.mark.parametrize("chunk_tokens", [1, PAGE - 1, PAGE, PAGE + 1])
def test_chunks_equal_the_whole_prompt(chunk_tokens: int, name: str, make_prompts: MakePrompts) -> None:
    """First tokens, the KV of every choice, and what the metadata rows hold."""
    prompts = make_prompts(name)

    def run(key: int, size: int) -> tuple[FirstTokens, list[list[torch.Tensor]], list[MetadataBuffers]]:
        prompt = Prompt(prompts, key, 14, num_choices=2, temperature=1.0, seed=3, num_logprobs=2)
        [tails] = compute(prompts, prompt, size).tails
        [first] = tails.first_tokens()
        [packed] = tails.wait_rows()
        rows = [MetadataBuffers(prompts.engine.schema) for _ in packed.rows]
        for row, data in zip(rows, packed.rows, strict=True):
            assert data is not None
            row.unpack(data)
        return first, [kv_of(prompts, pages, 14) for pages in prompt.block_tables], rows

    whole_first, whole_kv, whole_rows = run(1, 64)
    first, kv, rows = run(2, chunk_tokens)
    assert first.token_ids == whole_first.token_ids and not prompts.keys
    if name == "none":
        kv, whole_kv = kv[:1], whole_kv[:1]  # no first token changes a page, so none is copied
    for choice in range(len(kv)):
        assert torch.equal(kv[choice][0], kv[0][0]), "the target's KV does not depend on the choice"
        for ours, theirs in zip(kv[choice], whole_kv[choice], strict=True):
            assert torch.allclose(ours, theirs, atol=BOUND), choice
    for ours, theirs in zip(rows, whole_rows, strict=True):
        for field in prompts.engine.schema.row:
            assert torch.allclose(ours.get(field.name).float(), theirs.get(field.name).float(), atol=BOUND), field.name


def test_rows_hold_the_first_token_and_the_count_of_cached_tokens(make_prompts: MakePrompts) -> None:
    prompts = make_prompts("eagle")
    prompt = Prompt(prompts, 1, 9, num_choices=3, temperature=1.5, seed=8, num_logprobs=1)
    tail = prompt.tail(0, num_cached=4)
    submitted = prompts.submit(Chunk([prompt.row(0, 9)], [Tails([tail])]))
    submitted.draft()
    [first], [packed] = submitted.tails[0].first_tokens(), submitted.tails[0].wait_rows()
    row, found = MetadataBuffers(prompts.engine.schema), []
    for data in packed.rows:
        assert data is not None
        row.unpack(data)
        found.append(row.get_sampled(prompts.vocab_size))
    assert [each.first_token for each in found] == first.token_ids
    assert {each.num_cached for each in found} == {4}
    for each, logprobs in zip(found, first.logprobs, strict=True):
        assert logprobs is not None and each.logprobs is not None
        assert each.logprobs.top_ids == logprobs.top_ids
        assert each.logprobs.logprob == pytest.approx(logprobs.logprob)


@pytest.mark.parametrize("at_once", [1, 4, 6, 1024])
def test_scores_are_of_the_tokens_that_follow(
    at_once: int, make_prompts: MakePrompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second of two rows of a chunk is scored, up to the prompt's last token, a few rows of logits at a time."""
    monkeypatch.setattr(engines, "SCORED_AT_ONCE", at_once)
    prompts = make_prompts("none")
    num_rows: list[int] = []
    compute = prompts.engine.model.logits

    def counted(states: torch.Tensor) -> torch.Tensor:
        num_rows.append(len(states))
        return compute(states)

    monkeypatch.setattr(prompts.engine.model, "logits", counted)
    plain, scored = Prompt(prompts, 1, 5), Prompt(prompts, 2, 7)
    rows = [plain.row(0, 5), scored.row(0, 7, num_scored=6, num_logprobs=2)]
    report = prompts.submit(Chunk(rows, [])).wait()
    assert num_rows[0] == 2, "logits of the last tokens"
    assert max(num_rows[1:]) == min(at_once, 6) and sum(num_rows[1:]) == 6
    logits = prompts.engine.forward([replace(scored.row(0, 7).row, num_logits=7)])
    expected = logits.log_softmax(-1)
    assert [len(entries) for entries in report.logprobs] == [0, 6]
    for position, entry in enumerate(report.logprobs[1]):
        assert entry.logprob == pytest.approx(float(expected[position, scored.token_ids[position + 1]]), abs=BOUND)
        assert entry.top_ids == tuple(expected[position].topk(2).indices.tolist())


def test_a_chunk_on_the_cpu_is_computed_when_it_is_submitted(make_prompts: MakePrompts) -> None:
    prompts = make_prompts("none")
    prompt = Prompt(prompts, 1, 5)
    submitted = prompts.submit(Chunk([prompt.row(0, 5)], [Tails([prompt.tail(0)])]))
    report = submitted.wait()
    assert report.begun == submitted.begun <= report.computed == submitted.submitted
    assert not submitted.is_done, "no device says so"
    assert not prompts.runs_ahead


def test_only_prompts_that_are_handed_over_have_rows(make_prompts: MakePrompts) -> None:
    """Rows and drafts of the others do not depend on which prompts these are."""
    prompts = make_prompts("mtp3-deepseek")

    def run(first_key: int, handed: Sequence[bool]) -> list[Sequence[bytes | None]]:
        asks = [Prompt(prompts, first_key + i, 5 + 3 * i, num_choices=1 + i % 2) for i in range(4)]
        rows = [prompt.row(0, len(prompt.token_ids)) for prompt in asks]
        tails = [
            prompt.tail(i, is_handed_over=is_handed)
            for i, (prompt, is_handed) in enumerate(zip(asks, handed, strict=True))
        ]
        submitted = prompts.submit(Chunk(rows, [Tails(tails)]))
        submitted.draft()
        return [each.rows for each in submitted.tails[0].wait_rows()]

    whole = run(1, [True] * 4)
    assert [len(rows) for rows in whole] == [1, 2, 1, 2]
    some = run(5, [False, True, False, True])
    assert [len(rows) for rows in some] == [0, 2, 0, 2]
    row, other = (MetadataBuffers(prompts.engine.schema) for _ in range(2))
    for prompt in (1, 3):
        for ours, theirs in zip(some[prompt], whole[prompt], strict=True):
            assert ours is not None and theirs is not None
            row.unpack(ours)
            other.unpack(theirs)
            for field in prompts.engine.schema.row:
                assert torch.allclose(row.get(field.name).float(), other.get(field.name).float(), atol=BOUND)
    assert run(9, [False] * 4) == [[], [], [], []] and not prompts.keys


def test_states_are_kept_until_the_tail_or_until_they_are_forgotten(make_prompts: MakePrompts) -> None:
    prompts = make_prompts("mtp3-deepseek")
    first, second = Prompt(prompts, 7, 12), Prompt(prompts, 8, 12)
    prompts.submit(Chunk([first.row(0, 4), second.row(0, 4)], []))
    assert prompts.keys == {7, 8}
    prompts.forget(8)
    prompts.forget(9)  # does nothing: it is not known
    assert prompts.keys == {7}
    submitted = prompts.submit(Chunk([first.row(4, 12)], [Tails([first.tail(0)])]))
    assert not prompts.keys
    prompts.forget(7)  # the drafts do not need it any more
    submitted.draft()
    assert all(row is not None for row in submitted.tails[0].wait_rows()[0].rows)


def test_a_drafter_that_reads_one_state_keeps_none(make_prompts: MakePrompts) -> None:
    for name in ("none", "eagle"):
        prompts = make_prompts(name)
        prompts.submit(Chunk([Prompt(prompts, 1, 12).row(0, 4)], []))
        assert not prompts.keys, name


def test_logits_that_are_nan_give_no_token_and_no_row(
    make_prompts: MakePrompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = make_prompts("mtp3-deepseek")
    good, bad = Prompt(prompts, 1, 6), Prompt(prompts, 2, 5, num_choices=2)
    expected = compute(prompts, good, 64).tails[0].first_tokens()[0].token_ids
    logits = prompts.engine.model.logits

    def broken(hidden: torch.Tensor) -> torch.Tensor:
        found = logits(hidden)
        found[1, 3] = float("nan")
        return found

    chunk = Chunk([good.row(0, 6), bad.row(0, 5)], [Tails([good.tail(0), bad.tail(1)])])
    with monkeypatch.context() as patch:
        patch.setattr(prompts.engine.model, "logits", broken)
        submitted = prompts.submit(chunk)
    submitted.draft()
    [tails] = submitted.tails
    assert [each.token_ids for each in tails.first_tokens()] == [expected, [None, None]]
    of_good, of_bad = tails.wait_rows()
    assert list(of_bad.rows) == [None, None]
    assert len(of_good.rows) == 1 and of_good.rows[0] is not None


def test_rows_cannot_be_read_before_the_drafts_are_submitted(make_prompts: MakePrompts) -> None:
    prompts = make_prompts("eagle")
    prompt = Prompt(prompts, 1, 5)
    [tails] = prompts.submit(Chunk([prompt.row(0, 5)], [Tails([prompt.tail(0)])])).tails
    with pytest.raises(AssertionError, match="call `draft` first"):
        tails.wait_rows()


def out_of_memory(*_: Any) -> Any:
    raise torch.OutOfMemoryError("tried to allocate 376 MiB")


@pytest.mark.parametrize(("owner", "name"), [("model", "forward_with_aux"), ("drafter", "observe_prompt")])
def test_a_chunk_for_which_there_is_no_memory(
    owner: str, name: str, make_prompts: MakePrompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the size and holds no frame, whose tensors would stay allocated."""
    prompts = make_prompts("eagle")
    prompt = Prompt(prompts, 1, 9)
    chunk = Chunk([prompt.row(0, 9)], [Tails([prompt.tail(0)])])
    with monkeypatch.context() as patch:
        patch.setattr(getattr(prompts.engine, owner), name, out_of_memory)
        with pytest.raises(
            OutOfMemory, match="no memory left for 9 prompt tokens; lower chunk_tokens or memory_share"
        ) as found:
            prompts.submit(chunk)
    assert found.value.__context__ is None
    assert prompts.submit(chunk).tails[0].first_tokens() == compute(prompts, prompt, 64).tails[0].first_tokens()


def test_drafts_for_which_there_is_no_memory(make_prompts: MakePrompts, monkeypatch: pytest.MonkeyPatch) -> None:
    """First tokens are known all the same, and a second `draft` does not try again."""
    prompts = make_prompts("eagle")
    prompt = Prompt(prompts, 1, 9)
    submitted = prompts.submit(Chunk([prompt.row(0, 9)], [Tails([prompt.tail(0)])]))
    with monkeypatch.context() as patch:
        patch.setattr(prompts.engine.drafter, "finish_prompt", out_of_memory)
        submitted.draft()
    submitted.draft()
    [tails] = submitted.tails
    assert tails.first_tokens() == compute(prompts, prompt, 64).tails[0].first_tokens()
    [rows] = tails.wait_rows()
    assert not rows.rows and "no memory left for the drafts after the first tokens" in rows.no_memory


@pytest.mark.parametrize("name", ["eagle", "mtp3-deepseek"])
@pytest.mark.parametrize("place", ["_keep_states", "_submit_tails"])
def test_a_chunk_without_memory_can_be_submitted_again(
    name: str, place: str, make_prompts: MakePrompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if it fails at its end. The states that it kept of its prompts, or gave to their ends, are as before."""
    prompts = make_prompts(name)
    prompt, other = Prompt(prompts, 1, 9), Prompt(prompts, 2, 7)
    function = getattr(Prompts, place)

    def fail_after(*args: Any) -> Any:
        function(*args)
        out_of_memory()

    def rows(*, is_short_of_memory: bool) -> tuple[Any, ...]:
        prompts.submit(Chunk([prompt.row(0, 7)], []))
        ends = [Tails([prompt.tail(0)])]
        if is_short_of_memory:
            before = prompts.keys
            with monkeypatch.context() as patch, pytest.raises(OutOfMemory):
                patch.setattr(Prompts, place, fail_after)
                prompts.submit(Chunk([prompt.row(7, 9), other.row(0, 7)], [Tails([prompt.tail(0), other.tail(1)])]))
            assert prompts.keys == before
        submitted = prompts.submit(Chunk([prompt.row(7, 9)], ends))
        submitted.draft()
        [tails] = submitted.tails
        return tails.first_tokens(), tails.wait_rows()

    assert rows(is_short_of_memory=True) == rows(is_short_of_memory=False)
    assert not prompts.keys


@pytest.mark.parametrize("name", ["eagle", "mtp3-deepseek"])
def test_drafts_without_memory_leave_out_the_prompt_with_most_choices(name: str, make_prompts: MakePrompts) -> None:
    """The rows and the draft KV of the others are as without a limit."""
    prompts = make_prompts(name)
    wants = {"temperature": 1.0, "seed": 5, "repetition_penalty": 1.4, "top_p": 0.9}

    def draft(memory: MemoryLimit, *which: int) -> tuple[list[HandoffRows], list[list[torch.Tensor]]]:
        """Draft after some of four prompts. The first is not handed over."""
        sizes = {0: (7, 2), 1: (9, 1), 2: (5, 4), 3: (6, 2)}
        asked = {index: Prompt(prompts, index, *sizes[index], **wants) for index in which}
        rows = [prompt.row(0, len(prompt.token_ids)) for prompt in asked.values()]
        ends = [prompt.tail(place, is_handed_over=index > 0) for place, (index, prompt) in enumerate(asked.items())]
        submitted = prompts.submit(Chunk(rows, [Tails(ends)]))
        with memory:
            submitted.draft()
        [tails] = submitted.tails
        tails.first_tokens()
        kvs = [kv_of(prompts, pages, len(each.token_ids)) for each in asked.values() for pages in each.block_tables]
        return tails.wait_rows(), kvs

    whole, fitting = MemoryLimit(), MemoryLimit()
    expected, kvs = draft(whole, 0, 1, 2, 3)
    draft(fitting, 0, 1, 3)
    memory = MemoryLimit((whole.peak + fitting.peak) // 2)
    rows, limited_kvs = draft(memory, 0, 1, 2, 3)
    assert memory.num_failures == 1 and [bool(each.no_memory) for each in rows] == [False, False, True, False]
    assert [len(each.rows) for each in rows] == [0, 1, 0, 2]
    for place in (1, 3):
        for ours, theirs in zip(rows[place].rows, expected[place].rows, strict=True):
            one, other = MetadataBuffers(prompts.engine.schema), MetadataBuffers(prompts.engine.schema)
            assert ours is not None and theirs is not None
            one.unpack(ours)
            other.unpack(theirs)
            for field in prompts.engine.schema.row:
                assert torch.allclose(one.get(field.name).float(), other.get(field.name).float(), atol=BOUND), (
                    field.name
                )
    for choice in (2, 7, 8):  # of the second and the fourth prompt
        for ours, theirs in zip(limited_kvs[choice], kvs[choice], strict=True):
            assert torch.allclose(ours, theirs, atol=BOUND)
