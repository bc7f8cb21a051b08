"""Work and orders of handoffs survive the way through bytes, and other bytes are refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.engine.pace.draft_length import DraftShape
from baton.engine.prompts.known_tokens import MARGIN
from baton.engine.ranks.work_frames import decode, encode
from baton.engine.sampling.state import Needs, SamplingState
from baton.engine.work import (
    BatchRow,
    CatchUp,
    Chunk,
    ChunkRow,
    CopyPages,
    Forget,
    LoadSlot,
    LocalRow,
    Recompute,
    Round,
    TableChange,
    Tail,
    Tails,
    WarmUp,
)
from baton.metadata.errors import ProtocolError
from baton.metadata.handoff.ranks.orders import (
    CloseReader,
    CloseSource,
    EndUnit,
    ExpectPages,
    FetchedPages,
    FetchFailed,
    FetchPages,
    ForgetUnit,
    OfferDigests,
    OfferFailed,
    OfferPages,
    OpenSource,
    ServeUnit,
    SourceLost,
)
from baton.metadata.wire.node_info import Peer
from baton.metadata.wire.request import SamplingParams, Unit

PARAMS = SamplingParams(
    max_tokens=9, temperature=0.5, seed=2**62, logit_bias={3: 1.5}, repetition_penalty=1.2, stop_ids=(4,), min_tokens=2
)
ROUND = Round(
    slots=[3],
    num_pages=[2],
    changes=[TableChange(3, 0, [5, 6])],
    limits=[2],
    num_missed=[1],
    shape=DraftShape(2, 3, 4),
    needs=Needs(is_random=True, num_logprobs=2),
    num_logprobs=[None],
    proposed=[[7, 8]],
)
VALUES = [
    ROUND,
    CatchUp([3], [2], [TableChange(3, 1, [6])], [0], [4], 2, Needs()),
    Recompute([BatchRow([1, 2], 0, [5], 0, 2)], [[1, 2, 3]], [LocalRow(0, 7)], [4]),
    replace(ROUND, beside=Recompute([BatchRow([1, 2], 0, [5], 0)], [[1, 2, 3]], [LocalRow(0, 7)], [])),
    Forget(2**40),
    WarmUp(),
    WarmUp(expects_prompts=True),
    ExpectPages([3]),
    OpenSource(1, Peer("p", "e", "tcp://a:1", 6), ["tcp://a:1", "tcp://a:2"]),
    FetchPages(2, "e", Unit("r", 0, 1), [0], [3], [4], [2**40], b"12345678"),
    ForgetUnit(Unit("r", 0, 1)),
    CloseSource("e"),
    FetchedPages("e", 2, [0], [2**40], {0: 17}),
    FetchFailed("e", 2, Unit("r", 0, 1), "no memory"),
    SourceLost("e", 1, "gone", True),
    OfferPages(3, Unit("r", 0, 1), [0], [5], [7]),
    ServeUnit(Unit("r", 0, 1), "e"),
    EndUnit(Unit("r", 0, 1)),
    CloseReader("e"),
    OfferDigests(3, b"12345678"),
    OfferFailed(Unit("r", 0, 1), "no memory"),
]


def _states_equal(a: SamplingState, b: SamplingState) -> bool:
    return all(getattr(a, name) == getattr(b, name) for name in SamplingState.__slots__)


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_a_value_is_what_it_was(value: object) -> None:
    assert decode(encode(value)) == value  # type: ignore[arg-type]


def test_states_of_sampling_are_what_they_were() -> None:
    state = SamplingState(PARAMS, [1, 2, 3], [4, 5], vocab_size=100, choice=3)
    load = decode(encode(LoadSlot(1, [1, 2, 3, 4, 5], state, b"\x00\xff")))
    assert (load.slot, load.token_ids, load.row) == (1, [1, 2, 3, 4, 5], b"\x00\xff")
    assert _states_equal(load.sampling, state)
    work = Recompute([BatchRow([4], 3, [5, 6], 0)], [[1, 2, 3, 4, 5]], [LocalRow(0, 7, state)])
    [local] = decode(encode(work)).local
    assert (local.row, local.slot) == (0, 7) and _states_equal(local.sampling, state)
    tail = Tail(0, [state, state], [[5], [6]], CopyPages([5], [6]), True, 4)
    chunk = Chunk([ChunkRow(7, [1, 2, 3], BatchRow([2, 3], 1, [5], 1, 1), 2)], [Tails([tail])])
    sent = decode(encode(chunk))
    assert sent.rows == chunk.rows
    [[found]] = [each.tails for each in sent.tails]
    assert (found.row, found.block_tables, found.copies) == (0, [[5], [6]], CopyPages([5], [6]))
    assert all(_states_equal(each, state) for each in found.states)


def test_a_value_without_a_form_in_bytes_is_refused() -> None:
    with pytest.raises(TypeError, match="work holds a complex, which has no form in bytes"):
        encode(Forget(1j))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "frame", [b"", b"\xff", b"\x00", encode(ROUND)[:-3], encode(WarmUp())[:1] + encode(ROUND)[1:] + b"\x00"]
)
def test_other_bytes_are_refused(frame: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(frame)


def test_what_has_no_form_in_bytes_is_named() -> None:
    with pytest.raises(TypeError, match="work holds a object, which has no form in bytes"):
        encode(LoadSlot(slot=1, token_ids=[1], sampling=object(), row=None))  # type: ignore[arg-type]


def chunks_of(prompt: list[int], chunk: int) -> list[Chunk]:
    pages = list(range(1, len(prompt) // 16 + 2))
    rows = [BatchRow(prompt[start : start + chunk], start, pages) for start in range(0, len(prompt), chunk)]
    return [Chunk([ChunkRow(7, prompt, row)], []) for row in rows]


def test_a_prompt_does_not_travel_with_each_of_its_chunks() -> None:
    prompt = [10**5 + number for number in range(32_768)]
    frames = [encode(chunk) for chunk in chunks_of(prompt, 2048)]
    pages, tokens = 2048 * 3, 2048 * 5  # bytes
    assert max(map(len, frames)) < tokens + pages + 2 * MARGIN * 5 + 100
    found = decode(frames[3]).rows[0]
    assert found.row == BatchRow(prompt[3 * 2048 : 4 * 2048], 3 * 2048, list(range(1, 2050)))
    assert len(found.token_ids) == len(prompt)
    assert found.token_ids[4 * 2048 - 9 : 4 * 2048 + 9] == prompt[4 * 2048 - 9 : 4 * 2048 + 9]


def test_texts_of_recomputed_rows_do_not_travel_either() -> None:
    prompt = list(range(1000))
    rows = [BatchRow(prompt[300:400], 300, [5], 0), BatchRow([8], 0, [6], 0)]
    work = Recompute(rows, [prompt, [8, 9]])
    for value in (work, replace(ROUND, beside=work)):
        found = decode(encode(value))
        found = found.beside if isinstance(found, Round) else found
        long, short = found.token_ids
        assert found.rows == rows and short == [8, 9] and (len(long), long[350:402]) == (1000, prompt[350:402])
        assert len(encode(value)) < 1200, "the text alone has 2,740 bytes"
