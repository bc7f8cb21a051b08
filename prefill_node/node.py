"""The prefill node: computes prompts, samples first tokens, hands over pages.

The life of a prompt here, and who moves it on:

    Prefill message --submit--> waiting --start--> computing --last chunk--> handing --last ticket ended--> PrefillDone
                       |                              |                         |
                 tickets open,                 a full page is           first tokens go to the router, the last page
                 decode may claim            offered as soon as it          and the row to decode; a first token
                                                is computed               that ends the choice revokes its ticket

Messages fill `waiting`; the scheduler starts jobs when the pool holds all of one; the handoff server ends tickets.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ..engine.batch import BatchRow
from ..engine.draft_row import set_draft
from ..engine.drafters.base import Drafter, DraftState, PromptChunk, PromptTail
from ..engine.engine import NO_NUMBERS, Computed, Engine
from ..engine.logprobs import compute_logprobs
from ..engine.sampling_batch import SamplingBatch
from ..engine.sampling_state import SamplingState
from ..engine.stopping import ended
from ..metadata.buffers import MetadataBuffers, Sampled
from ..metadata.errors import RequestError
from ..metadata.handoff_server import HandoffServer
from ..metadata.membership import Membership, RouterGone
from ..metadata.messages import Cancel, Cancelled, Failed, Prefill, PrefillDone, Resend
from ..metadata.node_info import Load, NodeStats
from ..metadata.request import Ended, Unit
from ..metadata.session import Work
from ..metadata.tickets import TicketEnded
from .job import PrefillJob
from .outbox import FirstTokens
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

    def __init__(self, engine: Engine, membership: Membership, handoff: HandoffServer, max_running: int, chunk: int):
        self.engine = engine
        self.cache = engine.cache
        self.membership = membership
        self.handoff = handoff
        self.scheduler = PrefillScheduler(engine.cache, max_running, chunk)
        self.first_tokens = FirstTokens()
        self._row_buffer = MetadataBuffers(engine.schema)
        self._jobs: dict[Unit, PrefillJob] = {}  # of every open ticket
        self._counts = _Counts()

    def step(self) -> bool:
        """Receive, schedule, compute, hand over. Returns whether there is more to compute at once."""
        for message in self.membership.receive():
            self._handle(message)
        self._end_tickets()
        for job in self.scheduler.start():
            self._begin(job)
        plan = self.scheduler.plan()
        if plan:
            self.membership.enter("prefill", STEP_LIMIT_S)
            begun = time.monotonic()
            self._process(plan, self.engine.compute([row for _, row in plan]), begun)
        return bool(self.scheduler.computing)

    @property
    def _num_target_rows(self) -> int:
        """States of positions before the last prompt position that the drafter takes with its."""
        return 0 if self.engine.drafter is None else self.engine.drafter.hidden.num_target_rows

    @property
    def is_idle(self) -> bool:
        """Nothing is held for anybody."""
        return not any(True for _ in self.scheduler)

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

    def _handle(self, message: Work | RouterGone) -> None:
        match message:
            case Prefill():
                self._submit(message)
            case Cancel(rid=rid, attempt=attempt, choices=choices):
                self._cancel(rid, attempt, choices)
                self.membership.send(Cancelled(rid=rid, attempt=attempt))
            case Resend(unit=unit):
                self._resend(unit)
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

    def _resend(self, unit: Unit) -> None:
        tokens = self.first_tokens.again(unit)
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
        self._offer_pages(job)

    def _process(self, plan: list[tuple[PrefillJob, BatchRow]], computed: Computed, begun: float) -> None:
        """What the forward, begun at that time, brought: draft KV, pages to offer, log-probabilities of the prompt,
        first tokens."""
        self._counts.steps += 1
        if self.engine.drafter is not None:
            self._draft_chunks(self.engine.drafter, plan, computed.extend)
        at = num_tokens = 0
        now = time.monotonic()
        for job, row in plan:
            job.note_chunk(len(row.input_ids), begun, now)
            job_logits = computed.logits[at : at + row.num_logits]
            at += row.num_logits
            num_tokens += len(row.input_ids)
            job.num_computed += len(row.input_ids)
            if computed.extend is not None:
                job.keep_rows(computed.extend[num_tokens - len(row.input_ids) : num_tokens], 1 + self._num_target_rows)
            self._counts.computed_tokens += len(row.input_ids)
            if job.request.prompt_logprobs:
                self._score_prompt(job, row.position, job_logits)
            if job.is_computed:
                self._complete(job, job_logits[-1:])
            else:
                self._offer_pages(job)

    def _score_prompt(self, job: PrefillJob, position: int, logits: torch.Tensor) -> None:
        """Log-probabilities of the prompt's tokens position + 1 .. under the logits of position .. ."""
        targets = job.token_ids[position + 1 : min(position + 1 + logits.shape[0], job.prompt_len)]
        if targets:
            num_logprobs = job.request.params.num_logprobs or 0
            ids = torch.tensor(targets, dtype=torch.int64, device=logits.device)
            scored = compute_logprobs(logits[: len(targets)], ids, num_logprobs).to_rows([num_logprobs] * len(targets))
            job.prompt_logprobs += [entry for entry in scored if entry is not None]

    def _draft_chunks(
        self, drafter: Drafter, plan: list[tuple[PrefillJob, BatchRow]], extend: torch.Tensor | None
    ) -> None:
        chunks = [
            PromptChunk(job.token_ids, row.position, row.position + len(row.input_ids), job.pages) for job, row in plan
        ]
        with torch.inference_mode():
            drafter.observe_prompt(chunks, extend)

    def _complete(self, job: PrefillJob, logits: torch.Tensor) -> None:
        """The prompt is computed: sample each choice's first token, tell the router, hand the last pages over.

        `logits` [1, vocab_size] is of the last prompt position."""
        job.computed = time.monotonic()
        self.scheduler.hand_over(job)
        units, states = list(job.choices), list(job.choices.values())
        if units:
            ids, logprobs = self.engine.sample(logits.expand(len(units), -1), states)
            if None in ids:  # the same logits for every choice
                message = NO_NUMBERS.format(position=len(job.token_ids))
                self._refuse(job, message, code="model_error")
                self._drop(job, set(units), message)
                return
            ids = [token for token in ids if token is not None]
            self._counts.generated_tokens += len(ids)
            ends = [self._append(state, token, job.num_cached) for state, token in zip(states, ids, strict=True)]
            self.membership.send(self.first_tokens.make(job, units, ids, logprobs, ends))
            job.sample_s = time.monotonic() - job.computed
            rows: dict[Unit, bytes] = {}
            for unit, token, entry, end, draft in zip(
                units, ids, logprobs, ends, self._draft_tails(job, states, ids), strict=True
            ):
                if unit in job.tickets and end is None:
                    rows[unit] = self._row(Sampled(token, job.num_cached, entry), draft)
                elif unit in job.tickets and end is not None:
                    self.handoff.revoke(unit, True, end.reason)
            self._offer_pages(job, rows)
        if not job.tickets:
            self._finish(job)

    def _append(self, state: SamplingState, token: int, num_cached: int) -> Ended | None:
        state.append(token)
        return ended(state, token, self.engine.context_len, num_cached)

    def _draft_tails(self, job: PrefillJob, states: list[SamplingState], ids: list[int]) -> list[DraftState | None]:
        """Every choice's draft state after its first token; its draft KV of the last prompt positions is stored."""
        drafter = self.engine.drafter
        if drafter is None or not job.tickets:
            return [None] * len(ids)
        block_tables = [job.pages_of(index) for index in range(len(ids))]
        for block_table in block_tables[1:]:
            for source, copy in zip(job.pages[job.num_shared :], block_table[job.num_shared :], strict=True):
                self.engine.copy_page(source, copy)
        rows = job.extend_rows
        tails = [
            PromptTail(job.token_ids, token, block_table, None if rows is None else rows[:-1])
            for token, block_table in zip(ids, block_tables, strict=True)
        ]
        with torch.inference_mode():
            last = None if rows is None else rows[-1:].expand(len(ids), -1)
            drafts = drafter.finish_prompt(tails, last, SamplingBatch.of(states, self.engine.device))
            return [drafts.row(index) for index in range(len(ids))]

    def _row(self, sampled: Sampled, draft: DraftState | None) -> bytes:
        self._row_buffer.set_sampled(sampled)
        if draft is not None:
            set_draft(self._row_buffer, draft)
        return self._row_buffer.pack()

    # --- handing over ---

    def _offer_pages(self, job: PrefillJob, rows: Mapping[Unit, bytes] | None = None) -> None:
        """Offer every page that will not be written again: full ones, and the last ones, with each choice's row, when
        the prompt is computed.

        A shifted drafter writes slots of the last prompt positions after the first token is sampled, so their pages
        wait for that.
        """
        num_ready = len(job.pages)
        if not job.is_computed:
            num_ready = min(job.num_computed // self.engine.pool.page_size, job.num_shared)
        if num_ready == job.num_offered or not job.tickets:
            return
        indices = list(range(job.num_offered, num_ready))
        offered = [job.pages_of(index)[job.num_offered : num_ready] for index in range(len(job.choices))]
        for unit, pages in zip(job.choices, offered, strict=True):
            if unit in job.tickets:
                generations = [self.engine.pool.generation(page) for page in pages]
                self.handoff.offer(unit, indices, pages, generations, (rows or {}).get(unit))
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
