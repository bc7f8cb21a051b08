"""The prefill node: computes prompts, samples first tokens, hands over pages.

The life of a prompt here, and who moves it on:

    Prefill message --submit--> waiting --start--> computing --last chunk--> handing --last ticket ended--> PrefillDone
                       |                              |                         |
                 tickets open,                 a full page is           first tokens go to the router, the last page
                 decode may claim            offered as soon as it          and the row to decode; a first token
                                                is computed               that ends the choice revokes its ticket

Messages fill `waiting`; the scheduler starts jobs when the pool holds all of one; the handoff server ends tickets.

A chunk is submitted and settled. Where the device is not the host, the next one is submitted in between: the device
computes while the host sends first tokens, packs rows and offers pages. One stream orders what is submitted: pages of a
job that was dropped are free at once, since whoever gets them writes them after the chunk under way has read them, and
pages in the prefix cache may be those of the chunk under way, since whoever reads them is submitted later. Other
processes know no such order: pages are offered when their chunk is settled, and so computed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..engine.draft_row import set_draft
from ..engine.drafters.base import DraftState
from ..engine.engine import NO_NUMBERS, Engine
from ..engine.progress import ProgressBar
from ..engine.sampling_state import SamplingState
from ..engine.stopping import ended
from ..metadata.bus.membership import Membership, RouterGone
from ..metadata.bus.session import RouterWork
from ..metadata.errors import RequestError
from ..metadata.handoff.buffers import MetadataBuffers, Sampled
from ..metadata.handoff.server import HandoffServer
from ..metadata.handoff.tickets import TicketEnded
from ..metadata.wire.messages import Cancel, Cancelled, Failed, Prefill, PrefillDone, Resend
from ..metadata.wire.node_info import Load, NodeStats
from ..metadata.wire.request import TokenLogprobs, Unit
from .chunks import Plan, SubmittedChunk, submit
from .job import PrefillJob
from .outbox import FirstToken, FirstTokens
from .prompt_ends import FirstSample, PromptEnd, PromptEnds
from .scheduler import PrefillScheduler

logger = logging.getLogger(__name__)

STEP_LIMIT_S = 60.0  # of one chunk; a longer one means that the node is stuck


@dataclass(slots=True)
class _Counts:
    """Since the start."""

    steps: int = 0
    prompt_tokens: int = 0
    computed_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0


class PrefillNode:
    """One thread runs `step` for ever; everything here belongs to it."""

    def __init__(
        self,
        engine: Engine,
        membership: Membership,
        handoff: HandoffServer,
        max_running: int,
        chunk: int,
        *,
        overlaps: bool | None = None,
    ):
        """`overlaps`: submit a chunk before the one before is read; None: where the device is not the host."""
        self.engine = engine
        self.cache = engine.cache
        self.membership = membership
        self.handoff = handoff
        self.scheduler = PrefillScheduler(engine.cache, max_running, chunk)
        self.first_tokens = FirstTokens()
        self._row_buffer = MetadataBuffers(engine.schema)
        with ProgressBar("capturing prompt graphs") as progress:
            engine.capture_prompts(progress)
        self._jobs: dict[Unit, PrefillJob] = {}  # of every open ticket
        self._counts = _Counts()
        self._overlaps = engine.device.type != "cpu" if overlaps is None else overlaps
        self._under_way: SubmittedChunk | None = None
        self._computed_at = 0.0  # monotonic seconds, the chunk settled last

    def step(self) -> bool:
        """Receive, schedule, compute, hand over. Returns whether there is more to compute at once."""
        for message in self.membership.receive():
            self._handle(message)
        self._end_tickets()
        for job in self.scheduler.start():
            self._begin(job)
        plan = self.scheduler.plan()
        if plan or self._under_way is not None:
            self.membership.enter("prefill", STEP_LIMIT_S)
            self._compute(plan)
        return bool(self.scheduler.computing) or self._under_way is not None

    @property
    def is_idle(self) -> bool:
        """Nothing is held for anybody."""
        return self._under_way is None and not any(True for _ in self.scheduler)

    def load(self) -> Load:
        return Load(
            free_pages=self.cache.available,
            running=len(self.scheduler.computing) + len(self.scheduler.handing),
            waiting=len(self.scheduler.waiting),
            tickets=len(self._jobs),
            queued_tokens=self.scheduler.num_queued_tokens,
        )

    def stats(self) -> NodeStats:
        counts = self._counts
        return NodeStats(
            steps=counts.steps,
            prompt_tokens=counts.prompt_tokens,
            computed_tokens=counts.computed_tokens,
            cached_tokens=counts.cached_tokens,
            generated_tokens=counts.generated_tokens,
            dropped_frames=self.membership.dropped_frames + self.handoff.dropped.count,
        )

    def units(self) -> tuple[Unit, ...]:
        """Units of all requests held here."""
        return tuple(unit for job in self.scheduler for unit in job.choices)

    def tickets(self) -> tuple[Unit, ...]:
        return tuple(self._jobs)

    # --- messages ---

    def _handle(self, message: RouterWork | RouterGone) -> None:
        match message:
            case Prefill():
                self._submit(message)
            case Cancel(rid=rid, attempt=attempt, choices=choices):
                self._cancel(rid, attempt, choices)
                self.membership.send(Cancelled(rid=rid, attempt=attempt))
            case Resend(unit=unit, first=first):
                self._resend(unit, first)
            case RouterGone():
                for job in list(self.scheduler):
                    self._drop(job, set(job.choices), message.reason)
            case _:
                logger.warning("dropped a %s: no business of a prefill node", type(message).__name__)

    def _submit(self, message: Prefill) -> None:
        request, params = message.request, message.request.params
        if any((job.rid, job.attempt) == (message.rid, message.attempt) for job in self.scheduler):
            logger.warning("dropped a Prefill that came twice", extra={"rid": message.rid})
            return
        try:
            prompt_ids, received_ids = request.token_ids(self.engine.model_config.vocab_size, self.engine.context_len)
        except RequestError as error:
            for choice in message.choices:
                unit = Unit(message.rid, choice, message.attempt)
                self.membership.send(Failed(unit=unit, code=error.code, message=str(error), retryable=False))
            return
        choices = {
            Unit(message.rid, choice, message.attempt): SamplingState(
                params,
                prompt_ids,
                received_ids,
                vocab_size=self.engine.model_config.vocab_size,
                choice=choice,
                device=self.engine.device,
            )
            for choice in message.choices
        }
        token_ids = prompt_ids + received_ids
        job = PrefillJob(
            message.rid,
            message.attempt,
            choices,
            request,
            message.decode,
            len(prompt_ids),
            token_ids,
            time.monotonic(),
        )
        logger.info("prompt of %d tokens, %d choices", len(token_ids), len(choices), extra={"rid": job.rid})
        num_pages = -(-len(token_ids) // self.engine.pool.page_size)
        if self.scheduler.num_pages(job) > self.engine.pool.num_usable:
            self._refuse(job, f"a prompt of {len(token_ids)} tokens cannot be computed here")
            return
        if job.decode is not None:
            for unit in choices:
                self.handoff.open(unit, num_pages, job.decode.epoch)
                self._jobs[unit] = job
                job.tickets.add(unit)
        self.scheduler.submit(job)

    def _resend(self, unit: Unit, first: int) -> None:
        """The router lacks the unit's token number `first`, or, if it is a later one, the end of the prompt."""
        tokens = self.first_tokens.again(unit, first)
        if tokens is not None:
            self.membership.send(tokens)
        elif not any(unit in job.choices for job in self.scheduler):
            message = "the node does not know this request any more"
            self.membership.send(Failed(unit=unit, code="unavailable", message=message, retryable=True))

    def _refuse(self, job: PrefillJob, reason: str, code: str = "invalid_request_error") -> None:
        for unit in job.choices:
            self.membership.send(Failed(unit=unit, code=code, message=reason, retryable=False))

    def _cancel(self, rid: str, attempt: int, choices: tuple[int, ...] | None) -> None:
        for job in list(self.scheduler):
            if job.rid == rid and job.attempt <= attempt:
                self._drop(
                    job, {unit for unit in job.choices if choices is None or unit.choice in choices}, "cancelled"
                )

    def _drop(self, job: PrefillJob, units: set[Unit], reason: str) -> None:
        """Forget some of a job's choices; its pages are free when the last ticket has ended."""
        for unit in units:
            job.choices.pop(unit, None)
            if unit in job.tickets:
                self.handoff.revoke(unit, False, reason)
        if not job.choices and not job.tickets:
            self._finish(job)
        elif not job.choices:
            self.scheduler.stop(job)

    # --- computing ---

    def _begin(self, job: PrefillJob) -> None:
        job.started = time.monotonic()
        self._counts.prompt_tokens += len(job.token_ids)
        self._counts.cached_tokens += job.num_cached
        if self._under_way is None:  # else with its first chunk: cached pages may be those that are computed now
            self._offer_pages(job)

    def _compute(self, plan: Plan) -> None:
        """Submit a chunk, then settle the one before; this one too where chunks do not overlap, or no other one could
        be submitted before it is: a first token never waits for nothing."""
        if self._under_way is not None and self._under_way.is_done:  # faster than the host: there is nothing to hide
            self._settle()
        chunk = self._submit_chunk(plan) if plan else None
        self._settle()
        self._under_way = chunk
        if chunk is not None and self._overlaps and self.scheduler.computing:
            chunk.draft()
        else:
            self._settle()

    def _submit_chunk(self, plan: Plan) -> SubmittedChunk:
        chunk = submit(self.engine, plan)
        self._counts.steps += 1
        for job, row in plan:
            self._counts.computed_tokens += len(row.input_ids)
            if job.is_submitted:
                self.scheduler.hand_over(job)
        return chunk

    def _settle(self) -> None:
        """Wait for the chunk under way, if there is one, and take what it brought: first tokens, log-probabilities of
        prompts, pages to offer. For a job that was dropped meanwhile nobody waits any more."""
        chunk, self._under_way = self._under_way, None
        if chunk is None:
            return
        begun, computed = max(chunk.begun, self._computed_at), chunk.wait()  # the device did the one before till then
        self._computed_at = computed
        for job, row in chunk.plan:
            job.note_chunk(len(row.input_ids), begun, computed)
            job.num_computed += len(row.input_ids)
        for scores in chunk.scores:
            scores.job.prompt_logprobs += scores.read()
        for ends in chunk.ends:
            firsts = [
                self._send_first(end, sample, computed) for end, sample in zip(ends.ends, ends.tokens(), strict=True)
            ]
            ends.draft()
            ends.wait()
            self._digest(ends)
            for end, choices in zip(ends.ends, firsts, strict=True):
                self._hand_over(end, choices, ends)
        for job, _ in chunk.plan:
            if not job.is_computed:
                self._offer_pages(job)

    def _send_first(self, end: PromptEnd, sample: FirstSample, computed: float) -> list[FirstToken]:
        """The prompt was computed at this time: tell the router the first tokens of the choices that are still wanted,
        or that there are none; returns them."""
        job = end.job
        job.computed = computed
        if not job.choices:
            return []
        if None in sample.token_ids:  # the same logits for every choice
            message = NO_NUMBERS.format(position=len(job.token_ids))
            self._refuse(job, message, code="model_error")
            self._drop(job, set(job.choices), message)
            return []
        choices = [
            self._begin_choice(job, unit, token, entry)
            for unit, token, entry in zip(end.units, *sample, strict=True)
            if unit in job.choices and token is not None
        ]
        if choices:
            self._counts.generated_tokens += len(choices)
            self.membership.send(self.first_tokens.make(job, choices))
            job.sample_s = time.monotonic() - computed
        return choices

    def _begin_choice(self, job: PrefillJob, unit: Unit, token: int, logprobs: TokenLogprobs | None) -> FirstToken:
        state = job.choices[unit]
        state.append(token)
        end = ended(state, token, self.engine.context_len, job.num_cached)
        return FirstToken(unit, Sampled(token, job.num_cached, logprobs), end)

    def _hand_over(self, end: PromptEnd, choices: list[FirstToken], ends: PromptEnds) -> None:
        """The last pages and the rows of choices that go on; the tickets of the others are revoked."""
        job = end.job
        rows: dict[Unit, bytes] = {}
        for unit, sampled, over in choices:
            if unit in job.tickets and over is None:
                rows[unit] = self._row(sampled, ends.drafted(unit))
            elif unit in job.tickets and over is not None:
                self.handoff.revoke(unit, True, over.reason)
        self._offer(job, len(job.pages), dict(zip(end.units, end.block_tables, strict=True)), rows)
        if job.choices and not job.tickets:
            self._finish(job)

    def _row(self, sampled: Sampled, draft: DraftState | None) -> bytes:
        self._row_buffer.set_sampled(sampled)
        if draft is not None:
            set_draft(self._row_buffer, draft)
        return self._row_buffer.pack()

    # --- handing over ---

    def _digest(self, ends: PromptEnds) -> None:
        """The prompts' last pages are complete: a GPU computes the checksums of all at once."""
        tables = [table[end.job.num_offered :] for end in ends.ends if end.job.tickets for table in end.block_tables]
        pages = [page for table in tables for page in table]
        self.handoff.digest(pages, [self.engine.pool.generation(page) for page in pages])

    def _offer_pages(self, job: PrefillJob) -> None:
        """Offer every page of a prompt under way that will not be written again. A shifted drafter writes slots of the
        last prompt positions after the first token is sampled, so their pages wait for that."""
        num_ready = min(job.num_computed // self.engine.pool.page_size, job.num_shared)
        self._offer(job, num_ready, dict.fromkeys(job.choices, job.pages), {})

    def _offer(
        self, job: PrefillJob, num_ready: int, block_tables: Mapping[Unit, Sequence[int]], rows: Mapping[Unit, bytes]
    ) -> None:
        """The first `num_ready` pages of each choice, less those offered before; rows with the last ones."""
        if num_ready == job.num_offered or not job.tickets:
            return
        indices = list(range(job.num_offered, num_ready))
        for unit in job.choices:
            if unit in job.tickets:
                pages = block_tables[unit][job.num_offered : num_ready]
                generations = [self.engine.pool.generation(page) for page in pages]
                self.handoff.offer(unit, indices, pages, generations, rows.get(unit))
        job.num_offered = num_ready
        job.num_offers += 1
        job.early_pages = job.early_pages if job.is_computed else num_ready

    def _end_tickets(self) -> None:
        for event in self.handoff.poll():
            if not isinstance(event, TicketEnded):
                continue
            job = self._jobs.pop(event.unit)
            job.tickets.discard(event.unit)
            if not job.is_computed:  # decode gave the choice up: nobody waits for its first token
                job.choices.pop(event.unit, None)
            if not job.tickets and (job.is_computed or not job.choices):
                self._finish(job)
            elif not job.choices:
                self.scheduler.stop(job)

    def _finish(self, job: PrefillJob) -> None:
        self.scheduler.remove(job)
        logger.info("prompt done", extra={"rid": job.rid})
        self.membership.send(
            PrefillDone(
                rid=job.rid,
                attempt=job.attempt,
                queue_s=max(0.0, job.started - job.arrived),
                compute_s=max(0.0, job.computed - job.started),
                num_cached=job.num_cached,
                load=self.load(),
                times=job.times,
                prompt_logprobs=tuple(job.prompt_logprobs),
            )
        )
