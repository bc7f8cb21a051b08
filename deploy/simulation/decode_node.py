"""The simulated decode node: reserves room, runs rounds, and computes local prompts in chunks beside them.

    ask --> asked --granted--> awaited --pages have come--> ready --> running --last token--> gone
                         `---> computing (chunks of a local prompt) --^    |
                                    ^------------- preempted <-------------'

As on the real node, messages are handled when a round has ended, or at once if the node is idle or waits for pages. A
sequence joins a round only until that is submitted. If the pool is full, the youngest sequence gives way. The time of a
step does not depend on how many sequences the program simulates: a round changes counters, and a sequence is
touched when it joins and when it leaves. How many tokens of local prompts a step computes is decided by the real node's
ChunkBudget, which learns from the simulated times.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping
from typing import Protocol

from ...decode_node.chunk_length import ChunkBudget, ChunkRoom, ChunksAlone, PromptRate, PromptTokens, Queue
from ...decode_node.round_clock import LEAST_AHEAD_S, SHARE_AHEAD, RoundSeconds
from ...engine.pace.step_times import ChunkCosts
from ...router.nodes.prompt_role import PromptTimes
from ...router.placement.node_choice import DecodeFigures
from ...router.placement.prompt_placement import LocalFigures
from .agenda import Agenda
from .costs import ChunkPart, Costs
from .request import SLACK, SimulatedRequest


class DecodeOwner(Protocol):
    """The router, as a decode node sees it."""

    def granted(self, node: SimulatedDecodeNode, request: SimulatedRequest) -> None:
        """The node holds room for a request."""
        ...

    def ended(self, request: SimulatedRequest) -> None:
        """The last token of a request has come."""
        ...


class Gaps:
    """The largest gap between rounds since any earlier round."""

    def __init__(self) -> None:
        self._gaps: list[tuple[int, float]] = []  # (round, gap), gaps that are larger than all after them

    def add(self, number: int, seconds: float) -> None:
        """Round `number` ended so long after the round before."""
        gaps = self._gaps
        while gaps and gaps[-1][1] <= seconds:
            gaps.pop()
        gaps.append((number, seconds))

    def largest_since(self, number: int) -> float:
        """Return the largest gap at the end of round `number` or of a later one; 0 if there was none."""
        at = bisect_left(self._gaps, number, key=lambda gap: gap[0])
        return self._gaps[at][1] if at < len(self._gaps) else 0.0


class RememberedCosts(ChunkCosts):
    """The chunk costs of a real node, which remember their answers until the next measurement: a simulation asks them a
    thousand times as often."""

    def __init__(self, seconds: Mapping[int, float]) -> None:
        super().__init__(seconds)
        self._known: dict[tuple[int, int, bool], float] = {}
        self._known_most: dict[tuple[float, int, int, bool], int] = {}

    def seconds(self, num_tokens: int, depth: int, *, is_mixed: bool) -> float:
        key = num_tokens, depth, is_mixed
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = super().seconds(num_tokens, depth, is_mixed=is_mixed)
        return found

    def most_tokens(self, within_s: float, depth: int, most: int, *, is_mixed: bool) -> int:
        key = within_s, depth, most, is_mixed
        found = self._known_most.get(key)
        if found is None:
            found = self._known_most[key] = super().most_tokens(within_s, depth, most, is_mixed=is_mixed)
        return found

    def observe(self, num_tokens: int, depth: int, seconds: float, *, is_mixed: bool) -> None:
        self._known.clear()
        self._known_most.clear()
        super().observe(num_tokens, depth, seconds, is_mixed=is_mixed)


class SimulatedDecodeNode:
    """Owns its sequences and the tokens that its pool holds for them."""

    def __init__(
        self,
        agenda: Agenda,
        costs: Costs,
        max_running: int,
        pool_tokens: int,
        chunk_tokens: int,
        max_gap_s: float | None,
        owner: DecodeOwner,
    ) -> None:
        """`chunk_tokens`: the most tokens of a chunk. `max_gap_s`: the operator's bound on gaps between tokens; None:
        the node's own (decode_node/chunk_length.py)."""
        self._agenda, self._costs, self._owner = agenda, costs, owner
        self._chunk_tokens = chunk_tokens
        table = RememberedCosts.measure(lambda num_tokens: costs.chunk_s([ChunkPart(num_tokens, 0)]), chunk_tokens)
        lengths = [each for each in costs.mixed.lengths(1, 0) if each <= chunk_tokens]
        table.learn_mixed(lambda tokens: costs.beside_s([ChunkPart(tokens, 0)], 1), lengths)
        round_s = RoundSeconds(costs.round_s(1, 0))
        self._budget = ChunkBudget(table, round_s, chunk_tokens, max_gap_s, costs.mixed)
        self._alone = ChunksAlone()
        self._max_running, self._pool_tokens = max_running, pool_tokens
        self._asked: list[SimulatedRequest] = []
        self._num_awaited = 0
        self._ready: list[tuple[float, SimulatedRequest]] = []  # since when
        self._computing: list[tuple[int, SimulatedRequest]] = []  # by age
        self._running: set[SimulatedRequest] = set()
        self._preempted: list[tuple[int, SimulatedRequest]] = []  # by age
        self._ends: dict[int, list[SimulatedRequest]] = {}  # sequences of `running` by their last round
        self._gaps = Gaps()
        self._round = 0  # that is under way or ended last
        self._ended_at = 0.0  # the last round
        self._joined: list[SimulatedRequest] = []  # sequences whose first round is under way or begins next
        self._had_first: list[SimulatedRequest] = []  # sequences whose first token came in the last round
        self._pieces: list[tuple[SimulatedRequest, int]] = []  # chunks under way
        self._is_idle = True
        self._cutoff = 0.0  # sequences that are ready later miss the next round
        self._num_units = 0
        self._asked_tokens = 0
        self._reserved_tokens = 0  # of sequences that hold pages and do not run
        self._context_tokens = 0  # of running sequences
        self.num_preemptions = 0
        self.busy_s = 0.0

    @property
    def figures(self) -> DecodeFigures:
        """The node's load as the router knows it, in pages of one token."""
        free_tokens = self._pool_tokens - self._held_tokens - self._asked_tokens
        return DecodeFigures(free_tokens, self._num_units, self._max_running, bool(self._preempted))

    @property
    def round_s(self) -> float:
        """The time of a round under the present load, of one sequence at least."""
        return self._costs.round_s(max(1, len(self._running)), self._context_tokens)

    def local_figures(self, request: SimulatedRequest) -> LocalFigures:
        """Return the figures by which the router decides whether this node computes the prompt of a request."""
        rate, figures = self._rate, self.figures
        num_asked = sum(each.prompt_len for each in self._asked if each.is_local)
        return LocalFigures(
            self._num_queued_tokens + num_asked,
            request.prompt_len,
            PromptTimes(rate.token_s, rate.fixed_s, rate.num_paced, rate.rest_token_s),
            rate.round_s,
            rate.has_room,
            figures.num_running,
            figures.max_running,
            0 if figures.is_full else figures.room,
            request.length + SLACK,
        )

    @property
    def is_empty(self) -> bool:
        """Whether the node holds nothing."""
        held = (self._asked, self._ready, self._computing, self._running, self._preempted, self._ends, self._joined)
        counts = (self._num_awaited, self._num_units, self._asked_tokens, self._reserved_tokens, self._context_tokens)
        return not any(held) and not any(counts)

    def ask(self, request: SimulatedRequest) -> None:
        """The router asks for room: for pages that a prefill node will hand over, or for a local prompt."""
        self._num_units += 1
        self._asked.append(request)
        self._asked_tokens += request.length + SLACK
        if self._is_idle or (self._num_awaited and self._agenda.now <= self._cutoff):
            self._take_messages()

    def arrive(self, request: SimulatedRequest) -> None:
        """The pages of a prompt and its first token have come."""
        self._num_awaited -= 1
        self._reserved_tokens += 1
        self._ready.append((self._agenda.now, request))
        self._wake()

    @property
    def _rate(self) -> PromptRate:
        """The times of prompts under the present load. Prompts that are not computed yet count as streams."""
        return self._budget.rate(len(self._running) or min(1, self._num_units), 0)

    @property
    def _num_queued_tokens(self) -> int:
        """Tokens of local and preempted sequences that are still to compute."""
        queued = (*self._computing, *self._preempted)
        return sum(request.length - 1 - request.num_computed for _, request in queued)

    @property
    def _held_tokens(self) -> int:
        return self._reserved_tokens + self._context_tokens + SLACK * len(self._running)

    def _take_messages(self) -> None:
        """Handle what the router asked for meanwhile. Preempted sequences come first."""
        asked, num_granted = self._asked, 0
        for request in asked:
            num_tokens = request.length + SLACK
            if self._preempted or self._held_tokens + num_tokens > self._pool_tokens:
                break
            num_granted += 1
            self._asked_tokens -= num_tokens
            self._reserved_tokens += num_tokens
            self._grant(request)
        if num_granted:
            self._asked = asked[num_granted:]

    def _grant(self, request: SimulatedRequest) -> None:
        if not request.is_local:
            self._num_awaited += 1
            self._owner.granted(self, request)
            return
        if request.prompt_len > 1:
            insort(self._computing, (request.order, request))
        else:
            self._ready.append((self._agenda.now, request))
        self._wake()

    def _wake(self) -> None:
        if self._is_idle:
            self._is_idle = False
            self._agenda.at(self._agenda.now, self._step)

    # --- steps ---

    def _step(self) -> None:
        """Begin a step: a round of the running sequences, and chunks of those that are computed here."""
        now = self._agenda.now
        if self._preempted:
            self._resume()
        if self._ready:
            self._join()
        while self._running and self._held_tokens + len(self._running) > self._pool_tokens:
            self._preempt()
        self._pieces = self._plan_chunks() if self._computing else []
        if self._pieces:
            self._join_computed()
        batch = len(self._running)
        if not batch and not self._pieces:
            assert not self._computing and not self._ready, "a step without a round computes chunks"
            self._is_idle = True
            self._alone.take()
            self._take_messages()
            return
        seconds = ahead_s = 0.0
        if batch:
            self._round += 1
            self._budget.begin_round(has_chunk=bool(self._pieces))
            seconds = self._costs.round_s(batch, self._context_tokens)
            ahead_s = max(LEAST_AHEAD_S, SHARE_AHEAD * seconds)
        if self._pieces:
            pieces = [ChunkPart(num_tokens, request.num_computed) for request, num_tokens in self._pieces]
            seconds += self._costs.beside_s(pieces, batch)
        self.busy_s += seconds
        self._cutoff = now + seconds - ahead_s
        self._agenda.at(now + seconds, self._end_step, batch, seconds)
        self._take_messages()  # a local prompt that is granted now begins in the next step

    def _end_step(self, batch: int, seconds: float) -> None:
        self._learn(batch, seconds)
        for request, num_tokens in self._pieces:
            request.num_computed += num_tokens
            if request.num_computed == request.length - 1 and request not in self._running:
                self._computing.remove((request.order, request))
                self._ready.append((0.0, request))
        if batch:
            self._end_round()
        self._step()

    def _learn(self, batch: int, seconds: float) -> None:
        """Let the budget of chunks observe a step of `seconds`, as the real node does."""
        now, chunk = self._agenda.now, None
        if self._pieces:
            num_tokens = sum(num for _, num in self._pieces)
            depth = sum(num * request.num_computed for request, num in self._pieces) // num_tokens
            chunk = PromptTokens(num_tokens, depth, len(self._pieces))
        if not batch:
            assert chunk is not None, "a step without a round computes chunks"
            self._alone.add(chunk, now - seconds)
            return
        alone = self._alone.take()
        if chunk is not None and alone is None:
            self._budget.end_beside(batch, 0, chunk, seconds)
        elif chunk is not None:
            return
        elif alone is not None:
            self._budget.end_alone(batch, 0, alone, now - alone.since)
        else:
            self._budget.end_round(batch, 0, seconds)

    def _end_round(self) -> None:
        now = self._agenda.now
        if len(self._running) > len(self._joined):
            self._gaps.add(self._round, now - self._ended_at)
        self._ended_at = now
        self._context_tokens += len(self._running)
        for request in self._had_first:
            request.second_s = now - request.first_s
        self._had_first = []
        for request in self._joined:
            if request.num_received:
                request.end_gap(now)
            else:
                request.first_s = now
                self._had_first.append(request)
        self._joined = []
        for request in self._ends.pop(self._round, ()):
            self._leave(request)
            self._num_units -= 1
            self._owner.ended(request)

    def _join(self) -> None:
        """Let sequences that were ready in time take part in the next round."""
        late: list[tuple[float, SimulatedRequest]] = []
        number, has_round = self._round + 1, bool(self._running)
        for since, request in self._ready:
            if has_round and since > self._cutoff:
                late.append((since, request))
                continue
            self._reserved_tokens -= request.length + SLACK
            self._context_tokens += request.length
            self._running.add(request)
            self._joined.append(request)
            request.joined_round = number
            self._ends.setdefault(number + request.num_left - 1, []).append(request)
        self._ready = late

    def _join_computed(self) -> None:
        """Let sequences that the planned chunk makes ready take part in the planned round, if both share a forward."""
        ready = [request for request, num in self._pieces if request.num_computed + num == request.length - 1]
        num_tokens = sum(num for _, num in self._pieces)
        if self._costs.shares_forward(len(self._running) + len(ready), 0, num_tokens, len(self._pieces)):
            for request in ready:
                self._computing.remove((request.order, request))
                self._ready.append((0.0, request))
            self._join()

    def _leave(self, request: SimulatedRequest) -> None:
        """Take a sequence out of rounds, and count what they have brought it."""
        num_rounds = self._round - request.joined_round + 1
        self._running.remove(request)
        self._context_tokens -= request.length + num_rounds
        if num_rounds:
            request.num_received += num_rounds
            request.last_s = self._ended_at
            request.gap_s = max(request.gap_s, self._gaps.largest_since(request.joined_round + 1))
        else:
            self._joined.remove(request)
        if request in self._had_first:
            self._had_first.remove(request)

    def _plan_chunks(self) -> list[tuple[SimulatedRequest, int]]:
        num_streams, pieces = len(self._running), list[tuple[SimulatedRequest, int]]()
        room = ChunkRoom(self._chunk_tokens)
        if num_streams or self._num_awaited:
            num_done = self._computing[0][1].num_computed
            queue = Queue(self._num_queued_tokens, num_done, num_done)
            room = self._budget.room(num_streams, 0, queue)
        budget = min(self._chunk_tokens, room.num_tokens)
        for _, request in self._computing:
            if budget <= 0 or len(pieces) == room.num_prompts:
                break
            num_new = min(budget, request.length - 1 - request.num_computed)
            pieces.append((request, num_new))
            budget -= num_new
        return pieces

    # --- memory ---

    def _preempt(self) -> None:
        """The youngest sequence gives its pages back, to be computed again later."""
        computing = (request for _, request in self._computing)
        youngest = max((*self._running, *computing), key=lambda request: request.order)
        if youngest in self._running:
            ends = self._ends[youngest.joined_round + youngest.num_left - 1]
            ends.remove(youngest)
            if not ends:
                del self._ends[youngest.joined_round + youngest.num_left - 1]
            self._leave(youngest)
        else:
            self._computing.remove((youngest.order, youngest))
            self._reserved_tokens -= youngest.length + SLACK
        youngest.num_computed = 0
        insort(self._preempted, (youngest.order, youngest))
        self.num_preemptions += 1

    def _resume(self) -> None:
        """Compute preempted sequences again, the oldest first, when they leave each running one room for a token."""
        while self._preempted:
            _, request = self._preempted[0]
            num_tokens = request.length + SLACK
            if self._held_tokens + num_tokens + len(self._running) > self._pool_tokens:
                return
            self._preempted.pop(0)
            self._reserved_tokens += num_tokens
            insort(self._computing, (request.order, request))
