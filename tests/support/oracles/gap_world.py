"""A simulated decode node that computes prompts beside its streams.

Its rounds and chunks take times that it has to learn, with noise and pauses. The scheduler and the budget of chunks are
the product's own. Nothing here reads a clock.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from baton.decode_node.chunk_length import ChunkBudget, ChunkRoom, ChunksAlone, PromptTokens, Queue
from baton.decode_node.round_clock import RoundSeconds
from baton.decode_node.scheduler import DecodeScheduler
from baton.decode_node.sequence import Sequence, new_sequence
from baton.engine.pace.step_times import ChunkCosts
from baton.engine.state.pages import PagePool
from baton.engine.state.prefix_cache import PrefixCache
from baton.engine.work import Accepted, BatchRow
from baton.metadata.wire.messages import Compute
from baton.metadata.wire.request import GenerationRequest, SamplingParams, pack_ids

CONTEXT_LEN = 40_000
FULL = 1024


@dataclass
class Device:
    """Times of a large model on a large GPU. `fixed_s`: of a chunk beside a round; one forward for both takes less."""

    fixed_s: float = 0.005
    token_s: float = 2e-5
    noise: float = 0.02
    num_pauses: float = 0.002  # per step
    pause_s: float = 0.03
    wrong: float = 1.0  # by what the times that are measured at the start err
    turns: tuple[float, ...] = (1.0,)  # factors on the times of rounds, by turns of `turn_s`
    turn_s: float = 1.0
    drafts: tuple[int, ...] = (0,)  # draft steps of rounds, by the same turns
    step_s: float = 0.001  # of a draft
    random: random.Random = field(default_factory=lambda: random.Random(3))

    def round_s(self, num_seqs: int, now: float = 0.0) -> float:
        plain_s = 0.006 + 5e-5 * num_seqs + self.num_steps(now) * self.step_s
        return plain_s * self.turns[int(now / self.turn_s) % len(self.turns)]

    def num_steps(self, now: float) -> int:
        return self.drafts[int(now / self.turn_s) % len(self.drafts)]

    def chunk_s(self, num_tokens: int, depth: int) -> float:
        return self.fixed_s + self.token_s * num_tokens * (1 + depth / 20_000)

    def noisy(self, seconds: float) -> float:
        pause = self.pause_s if self.random.random() < self.num_pauses else 0.0
        return seconds * (1 + abs(self.random.gauss(0, self.noise))) + pause


class Simulation:
    """A decode node with a simulated clock."""

    def __init__(self, device: Device, max_gap_s: float | None, max_running: int = 16) -> None:
        self.device, self.now = device, 0.0
        alone = Device(token_s=device.token_s)  # one forward for chunk and round is not measured at the start
        costs = ChunkCosts({size: device.wrong * alone.chunk_s(size, 0) for size in (16, 256, FULL)})
        self.budget = ChunkBudget(costs, RoundSeconds(device.wrong * device.round_s(1)), FULL, max_gap_s)
        self.cache = PrefixCache(PagePool(40_000, 16))
        self.scheduler = DecodeScheduler(self.cache, max_running, FULL, context_len=CONTEXT_LEN, budget=self._room)
        self.gaps: list[float] = []
        self.waits: dict[str, float] = {}  # from arrival to the first token
        self._arrived: dict[str, float] = {}
        self._seen: dict[Sequence, float] = {}
        self._alone = ChunksAlone()
        self._num = 0

    def submit(self, prompt_len: int, max_tokens: int) -> Sequence | None:
        """Reserve a local prompt, if there is room."""
        self._num += 1
        rid = f"r{self._num}"
        ids = [self.device.random.randrange(1000) for _ in range(prompt_len)]
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        message = Compute("router", rid, 0, (0,), GenerationRequest(pack_ids(ids), params))
        sequence = new_sequence(message, 0, self._num, vocab_size=1000, context_len=CONTEXT_LEN)
        if not self.scheduler.reserve(sequence):
            return None
        self.scheduler.start_local(sequence.unit)
        self._arrived[rid] = self.now
        return sequence

    def stream(self, prompt_len: int = 100, max_tokens: int = 20_000) -> Sequence:
        """Start a sequence that decodes at once."""
        sequence = self.submit(prompt_len, max_tokens)
        assert sequence is not None
        sequence.compute(sequence.num_to_compute - 1)
        return sequence

    def step(self) -> None:
        begun = self.now
        plan = self.scheduler.plan()
        assert plan.rows or plan.decoding, "no step may do nothing while sequences run"
        chunk = self._chunk(plan.rows, plan.sequences) if plan.rows else None
        seconds = self.device.chunk_s(chunk.num_tokens, chunk.depth) if chunk is not None else 0.0
        if not plan.decoding:
            assert chunk is not None
            self.now += self.device.noisy(seconds)
            self._alone.add(chunk, begun)
            return
        num_seqs = len(plan.decoding)
        self.budget.begin_round(has_chunk=chunk is not None)
        num_steps = self.device.num_steps(self.now)
        self.now += self.device.noisy(seconds + self.device.round_s(num_seqs, self.now))
        alone = self._alone.take()
        if chunk is not None:
            if alone is None:
                self.budget.end_beside(num_seqs, num_steps, chunk, self.now - begun)
        elif alone is not None:
            self.budget.end_alone(num_seqs, num_steps, alone, self.now - alone.since)
        else:
            self.budget.end_round(num_seqs, num_steps, self.now - begun)
        for sequence in plan.decoding:
            self._accept(sequence)

    def run(self, seconds: float) -> Iterator[float]:
        """Yield before each step for so many seconds."""
        until = self.now + seconds
        while self.now < until:
            yield self.now
            if self.scheduler.running:
                self.step()
            else:
                self.now += 0.001

    def late_share(self, bound_s: float) -> float:
        """Return the share of gaps beyond a bound."""
        return sum(gap > bound_s for gap in self.gaps) / len(self.gaps)

    def _room(self, num_streams: int, _: int, queue: Queue) -> ChunkRoom:
        """The scheduler plans no drafts here."""
        return self.budget.room(num_streams, self.device.num_steps(self.now), queue)

    def _chunk(self, rows: list[BatchRow], sequences: list[Sequence]) -> PromptTokens:
        for row, sequence in zip(rows, sequences, strict=True):
            sequence.compute(len(row.input_ids))
        return PromptTokens.of(rows)

    def _accept(self, sequence: Sequence) -> None:
        rid = sequence.unit.rid
        if sequence in self._seen:
            self.gaps.append(self.now - self._seen[sequence])
        else:
            self.waits[rid] = self.now - self._arrived[rid]
        self._seen[sequence] = self.now
        sequence.accept(Accepted([5], [None], 0, 0), CONTEXT_LEN)
        if sequence.ended is not None:
            self.scheduler.finish(sequence)
            del self._seen[sequence]


def with_arrivals(
    device: Device, max_gap_s: float | None, *, every_s: float, prompt_len: int = 2000, seconds: float = 20.0
) -> Simulation:
    """Return what happened while prompts came at random to a node with four long streams."""
    world = Simulation(device, max_gap_s)
    for _ in range(4):
        world.stream()
    next_at = 0.0
    for now in world.run(seconds):
        if now >= next_at:
            world.submit(prompt_len, max_tokens=100)
            next_at = now + device.random.expovariate(1 / every_s)
    return world
