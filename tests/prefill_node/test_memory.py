"""The prefill node with a device whose memory really runs out (tests/support/devices/memory_limit.py).

A chunk without memory is computed again without the request that asks for most of it. The tokens of the others are
those of a run with enough memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from drafters import settings, target_of
from memory_limit import MemoryLimit
from node_pair import NodePair, Result, node_pairs, params
from thinned import halved

from baton.engine.prompts.prompts import Prompts, SubmittedChunk
from baton.engine.work import Chunk
from baton.metadata.errors import OutOfMemory
from baton.metadata.wire.request import SamplingParams

NUM_TOKENS = 5
SEEDED = params(NUM_TOKENS, temperature=1.0, top_p=0.9, num_logprobs=2)

MakePair = Callable[..., NodePair]


class Ask(NamedTuple):
    """A request of the tests."""

    prompt_len: int
    wants: SamplingParams = SEEDED
    n: int = 1
    prompt_logprobs: bool = False


@pytest.fixture
def make_pair(checkpoint: Callable[..., Path], tmp_path: Path) -> Iterator[MakePair]:
    """`make_pair("eagle", chunk=16)`: a pair with this drafter. At the end its books are checked."""
    with node_pairs() as start:

        def make(drafter: str = "none", *, overlaps: bool = False, chunk: int = 200, **more: Any) -> NodePair:
            model = target_of(drafter, checkpoint)
            both = {"page_size": 4, "max_running": 32, "chunk_tokens": chunk, **more}
            both |= {} if drafter == "none" else settings(drafter, model, tmp_path, steps=3)
            return start(model, prefill=both, decode=both, overlaps=overlaps)

        yield make


def prompt(number: int, num_tokens: int) -> list[int]:
    return [(11 * number + 3 * place * place) % 400 + 3 for place in range(num_tokens)]


class Served(NamedTuple):
    """The answer to one request: a result per choice, and the log-probabilities of its prompt."""

    choices: list[Result]
    prompt_scores: list[float]

    @property
    def ids(self) -> list[list[int]]:
        return [result.ids for result in self.choices]

    @property
    def has_failed(self) -> bool:
        return all(result.failed is not None for result in self.choices)


def serve(pair: NodePair, asks: Sequence[Ask], memory: MemoryLimit) -> tuple[list[Served], list[list[int]]]:
    """Serve requests from empty caches, whose prompts wait together. Return the answers, and the tokens of each row of
    each chunk that the node submitted."""
    for node in (pair.prefill, pair.decode):
        node.cache.flush()
    count, chunks = len(pair.results), list[list[int]]()
    names = [f"{count} {number}" for number in range(len(asks))]
    for number, ask in enumerate(asks):
        more = {"n": ask.n, "prompt_logprobs": ask.prompt_logprobs}
        pair.submit(names[number], prompt(number, ask.prompt_len), ask.wants, **more)
    scheduler, prompts = pair.prefill.scheduler, pair.prefill.prompts
    start, scheduler.start = scheduler.start, list  # type: ignore[method-assign]
    pair.step_until(lambda: len(scheduler.waiting) == len(asks) and all(ticket.holder for ticket in tickets(pair)))
    scheduler.start = start  # type: ignore[method-assign]
    with memory.around(prompts, "submit"):
        submit = prompts.submit

        def noting(chunk: Chunk) -> SubmittedChunk:
            chunks.append([len(each.row.input_ids) for each in chunk.rows])
            return submit(chunk)

        prompts.submit = noting  # type: ignore[method-assign]
        pair.run()
        pair.step_until(lambda: all(name in pair.done for name in names))
        prompts.submit = submit  # type: ignore[method-assign]
    served = [
        Served(
            [pair.results[name, choice] for choice in range(ask.n)],
            [score.logprob for score in pair.done[name].prompt_logprobs],
        )
        for name, ask in zip(names, asks, strict=True)
    ]
    return served, chunks


def tickets(pair: NodePair) -> list[Any]:
    return list(pair.prefill.handoff._book._tickets.values())


def peak_of(pair: NodePair, asks: Sequence[Ask]) -> tuple[list[Served], int]:
    """Serve requests with enough memory. Return the answers, and the most bytes that a chunk took."""
    memory = MemoryLimit()
    served, _ = serve(pair, asks, memory)
    assert not any(each.has_failed for each in served)
    return served, memory.peak


def check(served: Sequence[Served], expected: Sequence[Served], ended: Sequence[int], *, most: int = 0) -> None:
    """Check that just the requests `ended` have one error for each choice, after at most `most` right tokens, and that
    the others are as expected."""
    assert [number for number, each in enumerate(served) if each.has_failed] == list(ended)
    for number, (each, clean) in enumerate(zip(served, expected, strict=True)):
        if number not in ended:
            assert each.ids == clean.ids and all(result.ended for result in each.choices), number
            assert each.prompt_scores == pytest.approx(clean.prompt_scores, abs=1e-4)
            continue
        assert not any(result.ended for result in each.choices)
        assert all(
            own == right[: len(own)] and len(own) <= most for own, right in zip(each.ids, clean.ids, strict=True)
        )
        for result in each.choices:
            assert result.failed is not None
            assert (result.failed.code, result.failed.retryable) == ("out_of_memory", True)
            assert "no memory left for" in result.failed.message and "lower chunk_tokens" in result.failed.message


def check_that_it_serves_on(pair: NodePair, memory: MemoryLimit) -> None:
    """Check that the books balance, that nothing of the chunks is left, and that the next request is served."""
    pair.check_books()
    assert memory.num_bytes == 0
    (served,), _ = serve(pair, [Ask(7)], memory)
    assert len(served.ids[0]) == NUM_TOKENS


SHORT = [Ask(5 + number, params(NUM_TOKENS, temperature=1.0, seed=number)) for number in range(7)]
LONG = {
    "echo": Ask(60, prompt_logprobs=True),
    "choices": Ask(6, SEEDED, n=20),
    "tokens": Ask(120, params(NUM_TOKENS)),
}


@pytest.mark.parametrize(("kind", "place", "overlaps"), halved(LONG, [0, 4], [False, True]))
def test_the_request_that_takes_most_of_a_chunk_ends_alone(
    kind: str, place: int, overlaps: bool, make_pair: MakePair
) -> None:
    """It is older than some of the others."""
    pair = make_pair(overlaps=overlaps)
    asks = [*SHORT[:place], LONG[kind], *SHORT[place:]]
    expected, too_large = peak_of(pair, asks)
    _, fitting = peak_of(pair, SHORT)
    assert too_large > 1.3 * fitting
    memory = MemoryLimit((fitting + too_large) // 2)
    served, chunks = serve(pair, asks, memory)
    check(served, expected, [place])
    assert [len(rows) for rows in chunks[:2]] == [8, 7] and memory.num_failures == 1
    check_that_it_serves_on(pair, memory)


@pytest.mark.parametrize("num_fitting", [1, 3, 7])
def test_the_fewest_requests_end_of_a_chunk_that_does_not_fit(num_fitting: int, make_pair: MakePair) -> None:
    pair = make_pair()
    asks = [Ask(9, params(NUM_TOKENS, seed=number, temperature=1.0, top_p=0.9, num_logprobs=2)) for number in range(8)]
    expected, _ = peak_of(pair, asks)
    (_, fitting), (_, too_large) = (peak_of(pair, asks[:count]) for count in (num_fitting, num_fitting + 1))
    memory = MemoryLimit((fitting + too_large) // 2)
    served, chunks = serve(pair, asks, memory)
    check(served, expected, range(num_fitting, 8))
    assert [len(rows) for rows in chunks] == list(range(8, num_fitting - 1, -1))
    check_that_it_serves_on(pair, memory)


@pytest.mark.each_value
@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("drafter", ["none", "eagle", "mtp3-deepseek"])
def test_a_prompt_ends_in_its_middle_and_others_go_on(drafter: str, overlaps: bool, make_pair: MakePair) -> None:
    """Chunks of the prompt were computed and offered before one that does not fit, in which others end."""
    pair = make_pair(drafter, overlaps=overlaps, chunk=24)
    asks = [Ask(21), Ask(60, prompt_logprobs=True), Ask(7), Ask(5)]
    expected, too_large = peak_of(pair, asks)
    _, fitting = peak_of(pair, [asks[0], asks[2], asks[3]])
    memory = MemoryLimit((fitting + too_large) // 2)
    served, chunks = serve(pair, asks, memory)
    assert chunks[0] == [21, 3] and memory.num_failures == 1, chunks
    check(served, expected, [1])
    check_that_it_serves_on(pair, memory)


def test_a_chunk_that_had_no_memory_leaves_what_was_kept_of_its_prompts(
    make_pair: MakePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some drafters read the target's states of the last positions, which are kept between chunks. A chunk that fails
    after it has kept its states is computed again (tests/engine/prompts/test_prompts.py compares the drafts)."""
    pair = make_pair("mtp3-deepseek", chunk=6)
    asks = [Ask(14), Ask(9, prompt_logprobs=True), Ask(11)]
    expected, _ = serve(pair, asks, MemoryLimit())
    memory = MemoryLimit()
    begin, keep = Prompts._submit, Prompts._keep_states
    num_chunks = 0

    def enough_before(self: Prompts, chunk: Chunk) -> SubmittedChunk:
        memory.limit = None
        return begin(self, chunk)

    def full_after(self: Prompts, *args: Any) -> None:
        nonlocal num_chunks
        keep(self, *args)
        num_chunks += 1
        memory.limit = 0 if num_chunks == 3 else None

    monkeypatch.setattr(Prompts, "_submit", enough_before)
    monkeypatch.setattr(Prompts, "_keep_states", full_after)
    served, chunks = serve(pair, asks, memory)
    assert memory.num_failures == 1 and chunks[2] == [2, 4]
    check(served, expected, [1])
    check_that_it_serves_on(pair, memory)


@pytest.mark.parametrize("overlaps", [False, True])
def test_drafts_without_memory_end_the_request_with_most_choices(overlaps: bool, make_pair: MakePair) -> None:
    """Its first tokens were sent, so it goes on elsewhere after them. The others are served."""
    pair = make_pair("eagle", overlaps=overlaps)
    asks = [Ask(9), Ask(7, SEEDED, n=6), Ask(6)]

    def serve_within(memory: MemoryLimit, asks: Sequence[Ask]) -> list[Served]:
        with memory.around(pair.prefill.prompts.engine.drafter, "finish_prompt"):
            served, _ = serve(pair, asks, MemoryLimit())
        return served

    whole, fitting = MemoryLimit(), MemoryLimit()
    expected = serve_within(whole, asks)
    serve_within(fitting, [asks[0], asks[2]])
    memory = MemoryLimit((whole.peak + fitting.peak) // 2)
    served = serve_within(memory, asks)
    assert memory.num_failures == 1
    for result, clean in zip(served[1].choices, expected[1].choices, strict=True):
        assert result.failed is not None and result.failed.code == "out_of_memory"
        assert result.ids == clean.ids[:1]
    check([served[0], served[2]], [expected[0], expected[2]], [])
    check_that_it_serves_on(pair, MemoryLimit())


# --- handoffs ---


@pytest.mark.each_value
@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize(
    ("role", "name", "transport"),
    [
        ("prefill", "checksums", "local"),
        ("prefill", "pack", "zmq"),
        ("decode", "first_difference", "zmq"),
        ("decode", "first_difference", "local"),
    ],
)
def test_a_handoff_without_memory_ends_its_request_alone(
    role: str, name: str, transport: str, overlaps: bool, make_pair: MakePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages on a GPU take memory while they are digested or copied by way of the host. Here the object that does this
    says that there is none, for the pages of one request. The books are checked at the end."""
    pair = make_pair(overlaps=overlaps, chunk=8, transport=transport)
    asks = [Ask(9), Ask(21), Ask(6)]
    expected, _ = serve(pair, asks, MemoryLimit())
    pages, num_failures = getattr(pair, role).handoff._pages, 0
    method = getattr(pages, name)

    def is_bad(page: int) -> bool:
        scheduler = getattr(pair, role).scheduler
        owners = [each for each in scheduler if page in each.pages[: 21 // 4 + 1]]
        return [len(each.token_ids) for each in owners if len(each.token_ids) >= 21] != []

    def limited(which: Any, *rest: Any) -> Any:
        nonlocal num_failures
        if any(map(is_bad, [which] if isinstance(which, int) else which)):
            num_failures += 1
            raise OutOfMemory("the device has no memory left for copying pages of a handoff; lower chunk_tokens")
        return method(which, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(pages, name, limited)
        served, _ = serve(pair, asks, MemoryLimit())
    assert num_failures
    check(served, expected, [1], most=1)
    check_that_it_serves_on(pair, MemoryLimit())
