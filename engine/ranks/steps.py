"""The steps of a rank group: before each forward of the target, its ranks say what they run, and agree.

    work of this rank --Proposal--> Board <--Proposal-- another rank: its work, or none
                                      |
                                      '--agree--> rows of each rank --> the forward

A rank that has work proposes it. A rank that has none looks for steps of the others between two looks for messages
(`join`), and runs them without rows of its own, or on padding. If no rank has work, no step happens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from ...metadata.errors import ChunkOutOfMemory, RankLost
from ...metadata.wire.node_info import GroupRank
from ..pace.draft_length import NO_DRAFTS, DraftShape
from ..products.ranked import RankRows
from ..prompts.sizes import NO_PROMPT_SIZES, PromptSizes
from ..work import BatchRow
from .agreement import Agreed, Proposal, agree, longest_chunk
from .board import Board
from .group import TIMEOUT_S


class RankMembership(Protocol):
    """The part of a node's membership that its rank group needs."""

    @property
    def is_leaving(self) -> bool: ...
    @property
    def is_over(self) -> bool: ...

    def leave(self, why: str) -> None: ...

    def enter(self, phase: str, limit_s: float) -> None: ...


NUM_VALUES = len(Proposal._fields)
_PAUSE_S = 1e-4
_QUIET_S = 0.1  # longer than a round


class GroupSteps:
    """Takes part in the steps for one rank. The executor of the rank gives it its sizes. One thread."""

    def __init__(self, board: Board, rows: RankRows, group: str, epoch: str) -> None:
        """`rows`: the number of rows of every rank, which the products of the model read. `group`, `epoch`: the group's
        name, and that of this start."""
        self.place = GroupRank(group, epoch, board.rank, board.size)
        self.board = board
        self._rows = rows
        self._num_drafts = [0]  # by number of steps
        self._buckets: Sequence[int] = ()
        self._prompt_sizes: Callable[[], PromptSizes] = lambda: NO_PROMPT_SIZES
        self._has_room: Callable[[int], bool] = lambda _: True
        self._run_idle: Callable[[Agreed], None] = lambda _: None
        self._streams: Callable[[], tuple[int, bool]] = lambda: (0, False)
        self._shape = NO_DRAFTS
        self._last: Agreed | None = None
        self._stepped_at = 0.0  # monotonic seconds
        self._round: Agreed | None = None  # of the round that is submitted next
        self.joins_chunks = True
        self.is_awaited = False  # other ranks wait for the forward of this one
        self.num_idle = 0  # steps in which this rank had no work

    def prepare(
        self,
        run_idle: Callable[[Agreed], None],
        prompt_sizes: Callable[[], PromptSizes] = lambda: NO_PROMPT_SIZES,
        shape: DraftShape = NO_DRAFTS,
        buckets: Sequence[int] = (),
        *,
        joins_chunks: bool = True,
        has_room: Callable[[int], bool] = lambda _: True,
    ) -> None:
        """Say how this rank runs a step in which it has no work, and which sizes its graphs have. `joins_chunks`: a
        chunk shares the forward of the round of this rank; otherwise it is submitted before the round. `has_room`: says
        whether the device has memory for a forward of so many rows of all ranks together."""
        self._has_room = has_room
        self.joins_chunks = joins_chunks
        self._run_idle, self._prompt_sizes = run_idle, prompt_sizes
        self._shape, self._buckets = shape, sorted(buckets)
        steps = range(shape.num_steps + 1)
        self._num_drafts = [shape.with_steps(num).num_drafts if num in shape.choices else 0 for num in steps]

    def watch_streams(self, streams: Callable[[], tuple[int, bool]]) -> None:
        """From now on, tell the other ranks how many sequences a chunk of theirs delays, and whether one more starts as
        soon as its pages have arrived."""
        self._streams = streams

    @property
    def streams_elsewhere(self) -> tuple[int, bool]:
        """Sequences of the other ranks that a chunk delays, as they said in the last step, and whether one more starts
        soon. If that was long ago, they have ended: ranks with streams step all the time."""
        if self._last is None or time.monotonic() - self._stepped_at > _QUIET_S:
            return 0, False
        others = [each for rank, each in enumerate(self._last.proposals) if rank != self.board.rank]
        return sum(each.num_streams for each in others), any(each.is_awaited for each in others)

    @property
    def has_chunk_elsewhere(self) -> bool:
        """Whether another rank computed a chunk in the last step, so that the step took longer."""
        proposals = () if self._last is None else self._last.proposals
        return any(each.has_chunk for rank, each in enumerate(proposals) if rank != self.board.rank)

    def begin_chunk(self, rows: Sequence[BatchRow]) -> None:
        """Agree on a forward of these rows alone. Raises OutOfMemory if a rank has no memory for it, and this chunk is
        the longest. Then nothing has changed."""
        self._agree(
            Proposal(
                chunk_len=_num_tokens(rows),
                chunk_bucket=self._prompt_sizes().holding(rows) or 0,
                has_chunk=1,
            )
        )

    def agree_round(
        self, num_seqs: int, shape: DraftShape, beside: Sequence[BatchRow] = (), *, may_draft: bool = True
    ) -> DraftShape:
        """Agree on a round, which is submitted next, and a chunk `beside` it in its forward. Return the shape that its
        drafts must have. `may_draft`: False if a sequence has no position to draft from. Raises ChunkOutOfMemory as
        `begin_chunk`."""
        most = self._shape.num_steps if may_draft else 0
        chunk_len = _num_tokens(beside)
        proposal = Proposal(num_seqs, shape.num_steps, most, chunk_len, has_round=1, has_chunk=int(chunk_len > 0))
        self._round = self._agree(proposal)
        return self._shape.with_steps(self._round.num_steps)

    def begin_round(self, num_seqs: int, shape: DraftShape, beside: Sequence[BatchRow] = ()) -> Agreed:
        """Return what the ranks agreed on for this round. Agree now if they have not."""
        if self._round is None:
            self.agree_round(num_seqs, shape, beside)
        agreed, self._round = self._round, None
        assert agreed is not None
        return agreed

    def end_forward(self) -> None:
        """This rank has submitted all of the forward that needs other ranks. What fails from now on is its own."""
        self.is_awaited = False

    def begin_service(self) -> None:
        """From now on, a rank must take part in a step soon. Before service it may load, or compile kernels."""
        self.board.timeout_s = TIMEOUT_S

    def run(self, step: Callable[[], bool], membership: RankMembership) -> bool:
        """Do a step of this rank's node, or, if it ran no forward, a step of another rank. Return whether there is more
        to do at once. The ranks leave together. Raises RankLost."""
        if self.board.has_ended:
            raise RankLost("another rank of the group has ended")
        if membership.is_leaving:
            self.board.leave()
        elif self.board.is_leaving:
            membership.leave("the group of this rank leaves")
        before = self.board.step
        is_busy = step()
        if self.board.step > before:
            return True
        is_called = self.board.is_called
        if is_busy or is_called:  # otherwise the router would take the last phase for a stuck one
            membership.enter("group", TIMEOUT_S)
        if is_called:
            return self.join()
        if is_busy:  # its work waits for the streams of other ranks, whose next step it joins
            time.sleep(_PAUSE_S)
        return is_busy

    def sleep(self, wait: Callable[[Sequence[int]], None]) -> None:
        """Wait for messages, or until another rank has work. `wait` gets a descriptor that wakes this rank."""
        if self.board.sleep():
            wait([self.board.socket.fileno()])
        self.board.wake()

    def may_end(self, membership: RankMembership, *, is_idle: bool) -> bool:
        """Return whether this rank may exit: the ranks exit together when none has anything left to do, or each when
        its time to drain is over. A request that comes to a rank after that moves to another node."""
        is_over = membership.is_over
        if not membership.is_leaving or (is_over and not is_idle):
            return is_over
        return self.board.finish(is_idle=is_over)

    def join(self) -> bool:
        """Run the next step without work of this rank, if another rank waits for it. Return whether one did."""
        if not self.board.is_called:
            return False
        self.num_idle += 1
        agreed = self._agree_once(Proposal())
        if agreed is not None:
            self._run_idle(agreed)
        return True

    def _agree(self, proposal: Proposal) -> Agreed:
        """Agree on the next forward. If a rank has no memory for it, the ranks agree again without the longest chunk,
        whose rank raises ChunkOutOfMemory."""
        while True:
            agreed = self._agree_once(proposal)
            if agreed is not None:
                return agreed

    def _agree_once(self, proposal: Proposal) -> Agreed | None:
        """Return the next forward; None: a rank has no memory for it. Only a forward with a chunk takes memory that the
        start has not taken."""
        num_streams, is_awaited = self._streams()
        self.board.post(proposal._replace(num_streams=num_streams, is_awaited=int(is_awaited)))
        proposals = [Proposal(*values) for values in self.board.wait()]
        agreed = self._last = agree(proposals, self._buckets, self._num_drafts)
        self._stepped_at = time.monotonic()
        if agreed.has_chunks:
            self.board.post(Proposal(lacks_memory=int(not self._has_room(sum(agreed.lens)))))
            lacking = [rank for rank, values in enumerate(self.board.wait()) if Proposal(*values).lacks_memory]
            if lacking and longest_chunk(agreed) == self.board.rank:
                raise ChunkOutOfMemory(
                    f"rank {lacking[0]} has no memory left for a chunk of {proposal.chunk_len} tokens; lower "
                    "chunk_tokens or memory_share"
                )
            if lacking:
                return None
        self._rows.lens, self.is_awaited = agreed.lens, True
        return agreed


def _num_tokens(rows: Sequence[BatchRow]) -> int:
    return sum(len(row.input_ids) for row in rows)
