"""The simulated prefill node: prompts wait for pages, share chunks in the order in which they came, and keep their
pages until they are handed over.

    submit --> waiting --pages--> computing --last chunk planned--> (chunk under way) --settled--> handing over --> gone

As on the real node, a chunk is submitted before the one before it is settled, if prompts are left to compute then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from ...prefill_node.chunk_length import ChunkLength, ChunkSeconds, measured_sharing_limit
from ...router.nodes.node import QUEUED_PER_SLOT
from ...router.nodes.prompt_role import PromptTimes
from ...router.placement.prompt_placement import RemoteFigures
from .agenda import Agenda
from .costs import ChunkPart, Costs
from .request import SimulatedRequest


class _Chunk(NamedTuple):
    """A chunk that the device computes."""

    num_tokens: int
    seconds: float
    ends_at: float
    finished: list[tuple[SimulatedRequest, int]]  # prompts that end in it, with their tokens in it


class SimulatedPrefillNode:
    """Owns the prompts that it was given and the tokens that its pool holds for them."""

    def __init__(
        self,
        agenda: Agenda,
        costs: Costs,
        max_running: int,
        pool_tokens: int,
        chunk_tokens: int,
        on_first: Callable[[SimulatedPrefillNode, SimulatedRequest, int], None],
    ) -> None:
        """`on_first` is called when a prompt is computed, with the tokens of its last chunk."""
        self._agenda, self._costs, self._on_first = agenda, costs, on_first
        self._max_running, self._pool_tokens, self._chunk_tokens = max_running, pool_tokens, chunk_tokens
        self._waiting = deque[SimulatedRequest]()
        self._computing = deque[SimulatedRequest]()
        self._rate = ChunkSeconds()
        limit = measured_sharing_limit(lambda tokens: costs.chunk_s([ChunkPart(tokens, 0)]), chunk_tokens)
        self._length = ChunkLength[SimulatedRequest](chunk_tokens, has_tails=True, sharing_limit=limit)
        self._is_idle = True
        self._free_at = 0.0  # when the device will have computed all chunks
        self._held_tokens = 0
        self.num_prompts = self._num_prompt_tokens = 0  # that are not handed over yet
        self.max_prompts = QUEUED_PER_SLOT * max_running
        self.busy_s = 0.0

    def remote_figures(self, request: SimulatedRequest, handoff_s: float, round_s: float) -> RemoteFigures:
        """Return the figures by which the router decides whether this node computes the prompt of a request. The
        handoff would take `handoff_s`, and rounds of the decode node take `round_s`."""
        times = PromptTimes(self._rate.token_s, self._rate.fixed_s)
        num_queued = self._num_prompt_tokens
        if times.are_known:
            num_queued = sum(each.prompt_len - each.num_computed for each in (*self._waiting, *self._computing))
            num_queued += int(max(0.0, self._free_at - self._agenda.now) / times.token_s)
        return RemoteFigures(num_queued, request.prompt_len, times, handoff_s, round_s, num_prompts=self.num_prompts)

    @property
    def is_empty(self) -> bool:
        """Whether the node holds nothing."""
        return not (self._waiting or self._computing or self._held_tokens or self.num_prompts)

    def submit(self, request: SimulatedRequest) -> None:
        """Queue a prompt."""
        self._waiting.append(request)
        self.num_prompts += 1
        self._num_prompt_tokens += request.prompt_len
        self._wake()

    def release(self, request: SimulatedRequest) -> None:
        """The pages of a prompt are handed over."""
        self._held_tokens -= request.prompt_len
        self.num_prompts -= 1
        self._num_prompt_tokens -= request.prompt_len
        self._wake()

    def _wake(self) -> None:
        if self._is_idle and self._waiting:
            self._is_idle = False
            self._step(None)

    def _step(self, before: _Chunk | None) -> None:
        """Submit a chunk, then settle the one before. If nothing can be submitted behind a chunk, settle it first."""
        chunk = self._submit_chunk()
        if before is not None:
            self._agenda.at(before.ends_at, self._settle, before, chunk)
        elif chunk is None:  # prompts that wait for pages start when others are handed over
            self._is_idle = True
        elif self._computing:
            self._step(chunk)
        else:
            self._agenda.at(chunk.ends_at, self._settle, chunk, None)

    def _settle(self, done: _Chunk, behind: _Chunk | None) -> None:
        """Handle the end of a chunk. `behind` is the next chunk, already submitted."""
        self._rate.observe(done.num_tokens, done.seconds)
        for request, num_tokens in done.finished:
            self._on_first(self, request, num_tokens)
        if behind is not None and not self._computing:
            self._agenda.at(behind.ends_at, self._settle, behind, None)
        else:
            self._step(behind)

    def _submit_chunk(self) -> _Chunk | None:
        """Plan the next chunk: at most `chunk_tokens` of the prompts whose pages fit, oldest first."""
        waiting, computing = self._waiting, self._computing
        while waiting and len(computing) < self._max_running:
            if self._held_tokens + waiting[0].prompt_len > self._pool_tokens:
                break
            self._held_tokens += waiting[0].prompt_len
            computing.append(waiting.popleft())
        most = budget = self._budget()
        pieces, finished = list[ChunkPart](), list[tuple[SimulatedRequest, int]]()
        while computing and budget:
            request = computing[0]
            num_left = request.prompt_len - request.num_computed
            if pieces and not self._length.may_share(most - budget + num_left):
                break
            num_new = min(budget, num_left)
            pieces.append(ChunkPart(num_new, request.num_computed))
            request.num_computed += num_new
            budget -= num_new
            if request.num_computed < request.prompt_len:
                break
            finished.append((request, num_new))
            computing.popleft()
        if not pieces:
            return None
        seconds = self._costs.chunk_s(pieces)
        self.busy_s += seconds
        self._free_at = max(self._agenda.now, self._free_at) + seconds
        return _Chunk(sum(piece.tokens for piece in pieces), seconds, self._free_at, finished)

    def _budget(self) -> int:
        """Return how many tokens the next chunk may have."""
        if not self._computing:
            return self._chunk_tokens
        oldest = self._computing[0]
        is_alone = len(self._computing) == 1 and not self._waiting
        return self._length.budget(oldest, oldest.prompt_len - oldest.num_computed, is_alone=is_alone)
