"""Computes chunks of prompts on this process's device, samples first tokens and drafts after them.

    Chunk --submit--> SubmittedChunk (with SubmittedScores) --wait--> Scores
                            |
                      SubmittedTails --first_tokens--> FirstTokens --wait_rows--> HandoffRows

The node's scheduler describes a chunk as a plain value (work.py). `Prompts.submit` launches the target's forward over
the chunk, the drafter's forward, and the sampling of first tokens for prompts that end in the chunk. `draft` launches
the drafts after first tokens. Launching does not wait for the device. The host waits twice per chunk, however many
prompts end: for the first tokens, then for the drafts.

One pass samples the first tokens of all choices of a `Tails`, and a second pass drafts after them. Every row is
computed by itself, so a prompt whose logits are NaN does not affect others.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate, pairwise, zip_longest
from typing import NamedTuple, Self

import torch
from torch import Tensor

from ...metadata.errors import OutOfMemory, RankLost
from ...metadata.handoff.schema.buffers import MetadataBuffers, Sampled
from ...metadata.wire.request import TokenLogprobs
from ..device import recorded_event, to_device
from ..drafters.base import DraftState, PromptChunk, PromptTail, set_draft
from ..engine import Engine
from ..progress import Progress
from ..rounds.batch import Computed
from ..sampling.batch import SamplingBatch
from ..sampling.logprobs import Logprobs
from ..sampling.sampling import SubmittedSample
from ..work import BatchRow, Chunk, ChunkRow, FirstTokens, HandoffRows, Scores, Tail, Tails


class Prompts:
    """Computes chunks of prompts on one engine. A `PromptExecutor`. One thread; the device works in the order of
    submission.

    `Prompts` owns what is kept of a prompt between two chunks: the target's states of its last positions, which some
    drafters read after the last chunk.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._kept: dict[int, Tensor] = {}  # by key: [<= num_target_rows + 1, extend width]
        self._row_buffer = MetadataBuffers(engine.schema)
        self._steps = engine.group_steps
        if self._steps is not None:
            self._steps.prepare(
                lambda _: engine.compute_nothing(), lambda: engine.prompt_sizes, has_room=engine.has_room
            )

    @property
    def context_len(self) -> int:
        return self.engine.context_len

    @property
    def vocab_size(self) -> int:
        return self.engine.model_config.vocab_size

    @property
    def longest_chunk(self) -> tuple[int, float] | None:
        """Tokens and seconds of the longest chunk, as the start measured them; None: it did not."""
        return self.engine.longest_chunk

    @property
    def runs_ahead(self) -> bool:
        """Whether the device works while the host goes on, so that the next chunk is submitted meanwhile."""
        return self.engine.kind.is_apart

    @property
    def keys(self) -> frozenset[int]:
        """Keys of the prompts of which states are kept."""
        return frozenset(self._kept)

    def warm_up(self, progress: Progress | None = None) -> None:
        """Capture the graphs of small chunks if the device has graphs. `progress` counts them."""
        self.engine.capture_prompts(progress)

    def submit(self, chunk: Chunk) -> SubmittedChunk:
        """Submit a chunk and the sampling of the prompts that end in it.

        Raises OutOfMemory if the device has no memory for it. Then nothing of the chunk can be read, and its pages
        hold no defined KV beyond the tokens of earlier chunks. Its prompts may be submitted again from there.
        """
        if self._steps is not None:
            self._steps.begin_chunk([each.row for each in chunk.rows])
        kept = self._kept.copy()
        with suppress(torch.OutOfMemoryError):
            return self._submit(chunk)
        self._kept = kept
        if self._steps is not None and self._steps.is_awaited:
            raise RankLost(f"no memory for {chunk.num_tokens} prompt tokens, while other ranks wait in a forward")
        # raised out here, so that the error holds no frame of the chunk: tensors of a frame would stay allocated
        raise _out_of_memory(f"{chunk.num_tokens} prompt tokens")

    def forget(self, key: int) -> None:
        """Free what is kept of a prompt, if there is anything."""
        self._kept.pop(key, None)

    def expect(self, grammar: str) -> None:
        """Prepare for a request with this grammar, without waiting."""
        self.engine.grammars.prepare(grammar)

    def _submit(self, chunk: Chunk) -> SubmittedChunk:
        begun, engine = time.monotonic(), self.engine
        rows = [each.row for each in chunk.rows]
        with torch.inference_mode():
            computed = engine.compute(rows)
            if engine.drafter is not None:
                chunks = [
                    PromptChunk(each.token_ids, row.position, row.position + len(row.input_ids), row.pages, row.tail)
                    for each, row in zip(chunk.rows, rows, strict=True)
                ]
                engine.drafter.observe_prompt(chunks, computed.extend)
            self._keep_states(chunk, computed.extend)
            prompts, num_logprobs = [each.token_ids for each in chunk.rows], [each.num_logprobs for each in chunk.rows]
            scored = SubmittedScores.of(engine, rows, prompts, num_logprobs, computed.final)
            submitted, event = time.monotonic(), recorded_event(engine.device)
            tails = [self._submit_tails(each, chunk, computed) for each in chunk.tails]
        return SubmittedChunk(engine, chunk, begun, submitted, event, scored, tails)

    def _keep_states(self, chunk: Chunk, extend: Tensor | None) -> None:
        """Keep the target's states of the last positions of each prompt: its last one, and those that the drafter reads
        before it. `extend` [num_tokens, extend width] are the chunk's."""
        num_rows = 0 if self.engine.drafter is None else self.engine.drafter.hidden.num_target_rows
        if num_rows == 0 or extend is None:
            return
        own = extend.split([len(each.row.input_ids) for each in chunk.rows])
        for row, states in zip(chunk.rows, own, strict=True):
            self._kept[row.key] = _latest(self._kept.get(row.key), states, 1 + num_rows)

    def _submit_tails(self, work: Tails, chunk: Chunk, computed: Computed) -> SubmittedTails:
        """Submit the sampling of first tokens. What was kept of these prompts goes to the result."""
        last_tokens = list(accumulate(len(each.row.input_ids) for each in chunk.rows))
        last_logits = list(accumulate(each.row.num_logits for each in chunk.rows))
        index = torch.tensor([[ends[tail.row] - 1 for tail in work.tails] for ends in (last_tokens, last_logits)])
        index = to_device(index, computed.logits.device)
        hidden = None if computed.extend is None else computed.extend.index_select(0, index[0])
        prompts = [chunk.rows[tail.row] for tail in work.tails]
        kept = [self._kept.pop(prompt.key, None) for prompt in prompts]
        logits = computed.logits.index_select(0, index[1])
        return SubmittedTails(self.engine, self._row_buffer, work.tails, prompts, kept, logits, hidden)


@dataclass(slots=True)
class SubmittedChunk:
    """A chunk that the device computes or has computed."""

    engine: Engine
    chunk: Chunk
    begun: float  # monotonic seconds
    submitted: float
    event: torch.cuda.Event | None  # recorded after the chunk's KV; None: the KV was computed before `submit` returned
    scored: SubmittedScores  # readable when `event` has happened
    tails: list[SubmittedTails]

    @property
    def is_done(self) -> bool:
        """Whether a device reports that it has computed everything. Always False on a CPU."""
        events = [self.event, *(each.event for each in self.tails)]
        return all(event is not None and event.query() for event in events)

    @property
    def is_computed(self) -> bool:
        """Whether the chunk's KV is computed, so that `wait` returns at once."""
        return self.event is None or self.event.query()

    def wait(self) -> Scores:
        """Wait until the chunk's KV is computed, and report it."""
        computed = self.submitted
        if self.event is not None:
            self.event.synchronize()
            computed = time.monotonic()
        self.engine.check()
        return Scores(self.begun, computed, self.scored.read())

    def draft(self) -> None:
        """Submit the drafter's work after the first tokens, too."""
        for each in self.tails:
            each.draft()


class SubmittedScores(NamedTuple):
    """Log-probabilities of the scored tokens of rows, which the device computes or has computed: the state of each
    position scores the token that follows it."""

    rows: Sequence[BatchRow]
    num_logprobs: Sequence[int]  # of each row: likeliest tokens that are reported with each score
    logprobs: Sequence[Logprobs | None]  # of each row; None: it has no scored token

    @classmethod
    def of(
        cls,
        engine: Engine,
        rows: Sequence[BatchRow],
        token_ids: Sequence[Sequence[int]],
        num_logprobs: Sequence[int],
        final: Tensor | None,
    ) -> Self:
        """Submit the log-probabilities of the tokens that each row scores.

        Args:
            token_ids: of each row, the whole prompt.
            num_logprobs: of each row.
            final: states of all rows after the final norm, [num_tokens, hidden_size]. None: no token is scored.
        """
        logprobs: list[Logprobs | None] = []
        start = 0
        for row, prompt, num_top in zip(rows, token_ids, num_logprobs, strict=True):
            num_scored, first = row.num_scored, row.position + 1
            if num_scored:
                assert final is not None, "states of scored tokens were not kept"
                ids = to_device(torch.tensor(prompt[first : first + num_scored]), final.device)
                logprobs.append(engine.score(final[start : start + num_scored], ids, num_top))
            else:
                logprobs.append(None)
            start += len(row.input_ids)
        return cls(rows, num_logprobs, logprobs)

    def read(self) -> list[list[TokenLogprobs]]:
        """Return the log-probabilities of each row's scored tokens. The next `recorded_event` after `of` has
        happened."""
        own = zip(self.rows, self.num_logprobs, self.logprobs, strict=True)
        return [_read(row.num_scored, num_top, scored) for row, num_top, scored in own]


class SubmittedTails:
    """Submits the sampling and the drafting after prompts that end in one chunk, and reads the results."""

    def __init__(
        self,
        engine: Engine,
        row_buffer: MetadataBuffers,
        tails: Sequence[Tail],
        prompts: Sequence[ChunkRow],
        kept: Sequence[Tensor | None],
        logits: Tensor,
        hidden: Tensor | None,
    ) -> None:
        """Submit the sampling. The caller has entered inference mode.

        Args:
            row_buffer: one metadata row on the host, to pack rows in.
            prompts: the tails' rows of the chunk.
            kept: for each prompt the states of its last positions, [<= num_target_rows + 1, extend width]. None: the
                drafter reads none.
            logits: [num_tails, vocab_size], of the last prompt positions.
            hidden: [num_tails, extend width], extend states of the last prompt positions. None: the drafter reads none.
        """
        assert tails and len(logits) == len(tails), (len(tails), logits.shape)
        self._engine = engine
        self._row_buffer = row_buffer
        self._tails = tails
        self._prompts = prompts
        self._kept = kept
        self._hidden = hidden
        states = [state for tail in tails for state in tail.states]
        self._num_logprobs = [state.params.num_logprobs for state in states]
        sampling, self._broken = SamplingBatch.of(states, engine.device), [False] * len(states)
        masked = sampling
        if sampling.needs.masks:
            masks, self._broken = engine.grammars.next(states)
            masked = sampling.within(to_device(torch.from_numpy(masks), engine.device))
        self._sample = SubmittedSample.of(self._per_choice(logits, range(len(tails))), masked)
        self._handed = [index for index, tail in enumerate(tails) if tail.is_handed_over]
        if len(self._handed) < len(tails):
            states = [state for index in self._handed for state in tails[index].states]
            sampling = SamplingBatch.of(states, engine.device)
        self._sampling = sampling  # before the first tokens, for the choices of all prompts in `_handed` now
        self._sampled = tuple(self._handed)
        self._first_tokens: list[FirstTokens] | None = None  # None: the host has not read them
        self._draft: DraftState | None = None
        self._event: torch.cuda.Event | None = None
        self._without_memory: set[int] = set()  # prompts that were to be handed over

    @property
    def event(self) -> torch.cuda.Event | None:
        """The event after the work that was submitted last; None on a CPU."""
        return self._sample.event if self._event is None else self._event

    def draft(self) -> None:
        """Submit the drafter's work for all choices that are handed over, before their first tokens are known on the
        host. It stores the draft KV of the last prompt positions. A second call does nothing.

        If the device has no memory for it, leave out the prompt with most choices and try again."""
        if self._engine.drafter is None or self._draft is not None or not self._handed:
            return
        while self._handed and self._draft is None:
            with suppress(torch.OutOfMemoryError), torch.inference_mode():
                self._draft = self._finish_prompts().to_host()
            if self._draft is None:
                largest = max(self._handed, key=lambda index: (len(self._tails[index].states), index))
                self._handed.remove(largest)
                self._without_memory.add(largest)
        self._event = recorded_event(self._engine.device)

    def first_tokens(self) -> list[FirstTokens]:
        """Wait for the first tokens and return them, prompt by prompt."""
        if self._first_tokens is None:
            ids, logprobs = self._sample.read(self._num_logprobs)
            ids = [None if is_broken else token for token, is_broken in zip(ids, self._broken, strict=True)]
            self._engine.check()
            self._first_tokens = [FirstTokens(ids[start:stop], logprobs[start:stop]) for start, stop in self._spans()]
        return self._first_tokens

    def wait_rows(self) -> list[HandoffRows]:
        """Wait until the drafts are computed, and return the metadata rows, prompt by prompt. The draft KV is then in
        the pages. Submit the drafts first. A prompt for whose drafts the device had no memory has none. Its first
        tokens can be read all the same.
        """
        if self._event is not None:
            self._event.synchronize()
        self._engine.check()
        assert self._draft is not None or self._engine.drafter is None or not self._handed, "call `draft` first"
        rows = [HandoffRows([]) for _ in self._tails]
        for index in self._without_memory:
            rows[index] = HandoffRows([], str(_out_of_memory("the drafts after the first tokens")))
        num_packed, first_tokens = 0, self.first_tokens()
        for index in self._handed:
            rows[index] = self._pack(self._tails[index], first_tokens[index], num_packed)
            num_packed += len(self._tails[index].states)
        return rows

    def _pack(self, tail: Tail, first: FirstTokens, start: int) -> HandoffRows:
        """Return the metadata rows of a prompt. The drafter's states of its choices begin at row `start`."""
        buffer, packed = self._row_buffer, list[bytes | None]()
        for choice, (token, logprobs) in enumerate(zip(first.token_ids, first.logprobs, strict=True)):
            if token is None:
                packed.append(None)
                continue
            buffer.set_sampled(Sampled(token, tail.num_cached, logprobs))
            if self._draft is not None:
                set_draft(buffer, self._draft.row(start + choice))
            packed.append(buffer.pack())
        return HandoffRows(packed)

    def _finish_prompts(self) -> DraftState:
        drafter = self._engine.drafter
        assert drafter is not None
        tails: list[PromptTail] = []
        for index in self._handed:
            tail, prompt, kept = self._tails[index], self._prompts[index], self._kept[index]
            for source, target in zip(tail.copies.sources, tail.copies.targets, strict=True):
                self._engine.copy_page(source, target)
            before = None if kept is None else kept[:-1]
            tails += [
                PromptTail(prompt.token_ids, block_table, before, tail_table)
                for block_table, tail_table in zip_longest(tail.block_tables, tail.tail_tables)
            ]
        tokens = self._sample.token_ids
        if len(self._handed) < len(self._tails):
            spans = self._spans()
            tokens = _rows(tokens, [row for index in self._handed for row in range(*spans[index])])
        hidden = None if self._hidden is None else self._per_choice(self._hidden, self._handed)
        after = self._sampling_of(self._handed).ahead(torch.ones_like(tokens[:1, None]), tokens[:, None])
        return drafter.finish_prompt(tails, tokens, hidden, after)

    def _sampling_of(self, prompts: Sequence[int]) -> SamplingBatch:
        """Return the sampling of the choices of these prompts, before their first tokens."""
        if len(prompts) == len(self._sampled):
            return self._sampling
        of_prompt = [index for index in self._sampled for _ in self._tails[index].states]
        rows = torch.tensor([row for row, index in enumerate(of_prompt) if index in prompts])
        return self._sampling.take(to_device(rows, self._engine.device))

    def _spans(self) -> list[tuple[int, int]]:
        """Return the first row of each prompt's choices, and the row after the last one."""
        return list(pairwise(accumulate((len(tail.states) for tail in self._tails), initial=0)))

    def _per_choice(self, values: Tensor, prompts: Sequence[int]) -> Tensor:
        """Return the rows of these prompts, repeated for each of their choices."""
        return _rows(values, [index for index in prompts for _ in self._tails[index].states])


def _read(num_scored: int, num_top: int, scored: Logprobs | None) -> list[TokenLogprobs]:
    if scored is None:
        return []
    return [entry for entry in scored.to_rows([num_top] * num_scored) if entry is not None]


def _latest(kept: Tensor | None, states: Tensor, num_rows: int) -> Tensor:
    """Return a copy of the last `num_rows` rows of `kept` and then `states`, each [num_positions, width]."""
    latest = states[-num_rows:]
    if kept is not None:
        latest = torch.cat([kept, latest])[-num_rows:]
    return latest.clone()


def _rows(values: Tensor, index: Sequence[int]) -> Tensor:
    """Select rows of `values` [num_rows, ...]. If `index` names all rows in order, return `values` itself."""
    if list(index) == list(range(len(values))):
        return values
    return values.index_select(0, to_device(torch.tensor(index), values.device))


def _out_of_memory(what: str) -> OutOfMemory:
    return OutOfMemory(f"the device has no memory left for {what}; lower chunk_tokens or memory_share")
