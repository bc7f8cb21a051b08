"""A rank does the works that its pipe brings, and reports those that have a result."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from node_pair import params

from baton.decode_node.config import DecodeConfig
from baton.engine.engine import Engine
from baton.engine.products.ranked import RankRows
from baton.engine.ranks.processes import REPORT
from baton.engine.ranks.work_frames import decode
from baton.engine.ranks.worker import RankWorker, is_awaited, message, serve_rank
from baton.engine.rounds.draft_shape import DraftShape
from baton.engine.sampling.state import Needs, SamplingState
from baton.engine.work import (
    BatchRow,
    CatchUp,
    Chunk,
    ChunkReport,
    ChunkRow,
    CopyPages,
    Forget,
    LoadSlot,
    Recompute,
    Round,
    RoundTokens,
    Scores,
    TableChange,
    Tail,
    Tails,
)

IDS = [7, 8, 9, 7, 8]
ROWS = RankRows()


class ScriptedPipe:
    """Brings the frames, then is closed. `is_early`: a frame comes before the report of the round before it."""

    def __init__(self, frames: list[bytes], *, is_early: bool) -> None:
        self.frames, self.sent = frames, list[bytes]()
        self._is_early = is_early

    def poll(self, timeout: float, /) -> bool:
        return self._is_early and len(self.frames) > 0

    def recv_bytes(self) -> bytes:
        if not self.frames:
            raise EOFError
        return self.frames.pop(0)

    def send_bytes(self, buf: bytes, /) -> None:
        self.sent.append(buf)


@pytest.fixture
def worker(checkpoint: Callable[..., Path]) -> RankWorker:
    model = str(checkpoint("llama"))
    config = DecodeConfig(model=model, device="cpu", threads=1, page_size=4, num_pages=16, speculative="ngram")
    return RankWorker(Engine(config), 2, ROWS)


@pytest.mark.parametrize("is_early", [False, True])
def test_a_rank_serves_its_pipe(is_early: bool, worker: RankWorker) -> None:
    """It computes a prompt, gives the sequence a slot, and runs rounds. A work without a result sends nothing. Reports
    come in the order of the works, also if a round is begun before the one before has reported."""
    state = SamplingState(params(4), IDS, vocab_size=worker.executor.vocab_size)
    tail = Tail(0, [state], [[1, 2]], CopyPages((), ()), True, 0)
    chunk = Chunk([ChunkRow(1, IDS, BatchRow(IDS, 0, [1, 2], 1, 4), 1)], [Tails([tail])])
    again = Recompute([BatchRow(IDS, 0, [1, 2], 0, 4)], [[*IDS, 3]], [], [2])
    works = [
        chunk,
        Forget(1),
        LoadSlot(0, [*IDS, 3], SamplingState(params(4), IDS, [3], vocab_size=worker.executor.vocab_size)),
        Round([], [], [], [], [], DraftShape(0), Needs(), []),
        again,
        Recompute([BatchRow(IDS, 0, [1, 2], 0)], [[*IDS, 3]]),
        Round([0], [2], [TableChange(0, 0, [1, 2])], [0], [0], DraftShape(0), Needs(), [None]),
        Round([], [], [], [], [], DraftShape(0), Needs(), []),
    ]
    pipe = ScriptedPipe([message((len(IDS), 3), work) for work in works], is_early=is_early)
    with pytest.raises(EOFError):
        serve_rank(pipe, worker)
    assert ROWS.lens == (len(IDS), 3), "the products read the rows of every rank"
    assert all(each[:1] == REPORT for each in pipe.sent)
    assert pipe.sent.pop(3) == REPORT, "rank 0 may use the pages when these tokens are computed"
    prompt, first_idle, scores, tokens, idle = (decode(each[1:]) for each in pipe.sent)
    assert isinstance(prompt, ChunkReport) and isinstance(scores, Scores) and isinstance(tokens, RoundTokens)
    [[first]], [[rows]] = prompt.first_tokens, prompt.rows
    assert first.token_ids[0] is not None and rows.rows[0] is not None and not rows.no_memory
    assert [each.logprob for each in prompt.scores.logprobs[0]] == pytest.approx(
        [each.logprob for each in scores.logprobs[0]]
    )
    assert len(tokens.rows) == 1 and first_idle == idle == RoundTokens([])
    assert [is_awaited(work) for work in works] == [True, False, False, True, True, True, True, True]
    assert not is_awaited(None) and not is_awaited(CatchUp([], [], [], [], [], 1, Needs()))
