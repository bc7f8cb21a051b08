"""The prefill node computes prompts, samples their first tokens, and hands their pages over to decode nodes.

The life of a request here:

    Prefill message --submit--> waiting --start--> computing --last chunk--> handing_over --last ticket--> PrefillDone
                       |                              |                          |               ended
                 tickets open,                 a full page is            first tokens go to the router;
                 a decode node                 offered as soon           the last page and the metadata row
                 may claim them                as it is computed         go to the decode node; a first token
                                                                         that ends its choice revokes its ticket

Messages fill `waiting`. The scheduler starts requests when the pool can hold all their pages. A request leaves
`handing_over` when its last ticket has ended.

The node submits a chunk to the device. It settles the chunk later: it waits for the results and processes them. On a
GPU the node submits the next chunk in between, so the device computes while the host sends first tokens, packs rows and
offers pages. The device works in the order of submission. Therefore the pages of a dropped request can be reused at
once: their next owner writes them after the chunk under way. Likewise a new request may read pages of the prefix cache
that the chunk under way still computes. Other processes do not share this order, so the node offers pages only after it
has settled their chunk.

If the device has no memory for a chunk, the request that asks for most of it ends with an error. The node computes the
others again in the next step.
"""

from __future__ import annotations

import functools
import itertools
import logging
import time
from collections import Counter
from dataclasses import dataclass

from ..engine.pace.padding import measure_prompt
from ..engine.progress import ProgressBar
from ..engine.prompts.executor import BegunTails, PromptExecutor
from ..engine.sampling.state import ended
from ..engine.work import FirstTokens, HandoffRows, no_token
from ..metadata.bus.membership import DataLinks, Membership, RouterGone
from ..metadata.bus.session import RouterWork
from ..metadata.errors import OutOfMemory, RequestError
from ..metadata.handoff.borrower import Borrower, BorrowTotals
from ..metadata.handoff.client import HandoffClient
from ..metadata.handoff.handing_on import HandingOn, KeptTexts
from ..metadata.handoff.server import HandoffServer
from ..metadata.handoff.transfer import LoanOver
from ..metadata.wire.membership import HandedOn, Keep
from ..metadata.wire.messages import Cancel, Cancelled, Failed, Prefill, PrefillDone, Resend
from ..metadata.wire.node_info import Load, NodeStats
from ..metadata.wire.request import MAX_TEXT, TokenLogprobs, Unit
from . import chunk_work
from .chunk_length import ChunkSeconds, measured_sharing_limit
from .chunk_work import ChunkUnderWay, PromptEnd
from .outbox import FirstToken, Outbox
from .request import Request, new_request
from .scheduler import PlannedChunk, PrefillScheduler, StepPlan
from .tickets import FailedUnit, Tickets

logger = logging.getLogger(__name__)

_PAUSE_S = 1e-4  # between looks for messages of handoffs while a chunk is computed
STEP_LIMIT_S = 60.0  # the node counts as stuck if one chunk takes longer


@dataclass(slots=True)
class _Counts:
    """Totals since the start."""

    steps: int = 0
    prompt_tokens: int = 0
    computed_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0


class PrefillNode:
    """Runs the loop: one thread calls `step` for ever, and nothing here is shared with another thread."""

    def __init__(
        self,
        prompts: PromptExecutor,
        scheduler: PrefillScheduler,
        membership: Membership,
        handoff: HandoffServer,
        client: HandoffClient | None = None,
        *,
        overlaps: bool | None = None,
        measures_sharing: bool = False,
    ):
        """`scheduler` owns the pages that `prompts` writes. `client` borrows pages of other nodes; None: the node
        borrows none. `measures_sharing`: prompts share a chunk only up to a size
        that is measured now. `overlaps`: submit a chunk before the results of the last one are read; None: if the
        device is a GPU."""
        self.prompts = prompts
        self.cache = scheduler.cache
        self.membership = membership
        self.handoff, self._client = handoff, client
        self.links = DataLinks(handoff, client)
        self.scheduler = scheduler
        self.outbox = Outbox()
        with ProgressBar("capturing prompt graphs") as progress:
            prompts.warm_up(progress)
        if measures_sharing:
            _limit_sharing(scheduler, prompts)
        self._tickets = Tickets(self.cache.pool, handoff)
        self._counts = _Counts()
        self._rate = ChunkSeconds()
        if prompts.longest_chunk is not None:  # a canary alone would tell the seconds per token of a short chunk
            self._rate.observe(*prompts.longest_chunk)
        if self.cache.tier is not None:
            self.cache.tier.compute_token_s = lambda: self._rate.token_s
        self._borrower = None if client is None else Borrower(self.cache, client, lambda: self._rate.token_s)
        self._loans_over: list[Unit] = []
        self._kept = None if self._borrower is None else KeptTexts(self.cache, self._borrower)
        self._handing_on = HandingOn(self.cache, membership, None if client is None else handoff)
        self._keys = itertools.count()
        self._overlaps = prompts.runs_ahead if overlaps is None else overlaps
        self._under_way: ChunkUnderWay | None = None
        self._computed_at = 0.0  # monotonic seconds: when the last settled chunk was computed

    def step(self) -> bool:
        """Receive, schedule, compute, hand over. Return whether there is more to compute at once."""
        for message in self.membership.receive():
            self._handle(message)
        self._end_tickets()
        self._end_loans()
        self.scheduler.num_routers = len(self.membership.routers)
        for request in self.scheduler.start():
            self._begin(request)
        plan = self.scheduler.plan()
        if self.membership.is_leaving and self._holds_nothing:
            self._handing_on.go_on()
        self.cache.tend()
        if plan or self._under_way is not None:
            self.membership.enter("prefill", STEP_LIMIT_S)
            self._compute(plan)
        if self.scheduler.computing or self._under_way is not None:
            return True
        if self.scheduler.is_fetching:
            time.sleep(_PAUSE_S)
            return True
        return False

    @property
    def is_idle(self) -> bool:
        """Whether the node holds no request. If it leaves, it has also handed its cached texts on."""
        return self._holds_nothing and (not self.membership.is_leaving or self._handing_on.is_over)

    @property
    def _holds_nothing(self) -> bool:
        return self._under_way is None and not any(True for _ in self.scheduler)

    def load(self) -> Load:
        return Load(
            free_pages=self.cache.available,
            free_tails=self.cache.available_tails,
            running=len(self.scheduler.computing) + len(self.scheduler.handing_over),
            waiting=len(self.scheduler.held) + len(self.scheduler.waiting),
            tickets=len(self._tickets.units()),
            queued_tokens=self.scheduler.num_queued_tokens,
            prompt_token_s=self._rate.token_s,
            prompt_fixed_s=self._rate.fixed_s,
            max_prompts=self.scheduler.max_prompts,
            num_routers=self.scheduler.num_routers,
        )

    def stats(self) -> NodeStats:
        counts = self._counts
        ends = [end for end in (self.handoff, self._client) if end is not None]
        borrowed = BorrowTotals() if self._borrower is None else self._borrower.totals
        return NodeStats(
            steps=counts.steps,
            prompt_tokens=counts.prompt_tokens,
            computed_tokens=counts.computed_tokens,
            cached_tokens=counts.cached_tokens,
            generated_tokens=counts.generated_tokens,
            borrowed_tokens=borrowed.num_pages * self.cache.page_size,
            pages_moved=borrowed.num_pages,
            bytes_moved=borrowed.num_bytes,
            transfer_seconds=borrowed.seconds,
            checksum_failures=0 if self._client is None else self._client.num_checksum_failures,
            dropped_frames=self.membership.dropped_frames + sum(end.dropped.count for end in ends),
            cache_changes=self.cache.num_changes,
            host=None if self.cache.tier is None else self.cache.tier.figures,
        )

    def units(self) -> tuple[Unit, ...]:
        """Return the units of all choices that are still wanted."""
        return tuple(unit for request in self.scheduler for unit in request.choices)

    def num_units(self) -> Counter[str]:
        """Count these units by the epoch of the router that they are of."""
        return Counter(request.router for request in self.scheduler for _ in request.choices)

    def tickets(self) -> tuple[Unit, ...]:
        """Return the units of all open tickets and loans."""
        return (*self._tickets.units(), *self.handoff.loans())

    # --- messages ---

    def _handle(self, message: RouterWork | RouterGone) -> None:
        match message:
            case Prefill():
                self._submit(message)
            case Cancel(rid=rid, attempt=attempt, choices=choices):
                self._cancel(rid, attempt, choices)
                self.membership.send(Cancelled(rid=rid, attempt=attempt), message.router_epoch)
            case Resend():
                self._resend(message)
            case Keep():
                if self._kept is not None:
                    self._kept.add(message)
            case HandedOn():
                self._handing_on.take(message)
            case RouterGone(router=router, reason=reason):
                for request in [each for each in self.scheduler if each.router == router]:
                    self._drop(request, set(request.choices), reason)
            case _:
                logger.warning("dropped a %s message: prefill nodes do not take it", type(message).__name__)

    def _submit(self, message: Prefill) -> None:
        if any((request.rid, request.attempt) == (message.rid, message.attempt) for request in self.scheduler):
            logger.warning("dropped a Prefill message that came twice", extra={"rid": message.rid})
            return
        try:
            request = new_request(
                message,
                key=next(self._keys),
                vocab_size=self.prompts.vocab_size,
                context_len=self.prompts.context_len,
            )
        except RequestError as error:
            for choice in message.choices:
                unit = Unit(message.rid, choice, message.attempt)
                self._fail(message.router_epoch, unit, error.code, str(error))
            return
        if request.generation.params.grammar is not None:
            self.prompts.expect(request.generation.params.grammar)
        num_tokens = len(request.token_ids)
        logger.info("prompt of %d tokens, %d choices", num_tokens, len(request.choices), extra={"rid": request.rid})
        if self.scheduler.num_pages(request) > self.cache.pool.num_usable:
            self._refuse(request, f"a prompt of {num_tokens} tokens cannot be computed here")
            return
        self._tickets.open(request)
        self.scheduler.submit(request)

    def _resend(self, message: Resend) -> None:
        """Send the unit's first token again if the router lacks it. Report a unit that the node does not know."""
        router, unit = message.router_epoch, message.unit
        tokens = self.outbox.again(unit, message.first)
        if tokens is not None:
            self.membership.send(tokens, router)
        elif not any(unit in request.choices for request in self.scheduler):
            words = "the node does not know this request any more"
            self._fail(router, unit, "unavailable", words, is_retryable=True)

    def _cancel(self, rid: str, attempt: int, choices: tuple[int, ...] | None) -> None:
        for request in self.scheduler.find(rid, attempt):
            units = {unit for unit in request.choices if choices is None or unit.choice in choices}
            self._drop(request, units, "cancelled")

    def _drop(self, request: Request, units: set[Unit], reason: str) -> None:
        """Forget some choices of a request. Its pages become free when its last ticket has ended."""
        for unit in units:
            request.drop_choice(unit)
            self._tickets.revoke(request, unit, is_finished=False, reason=reason)
        if not request.choices:
            self._drop_loan(request, reason)
        if not request.choices and not request.tickets:
            self._finish(request)
        elif not request.choices:
            self.scheduler.stop(request)

    def _drop_loan(self, request: Request, reason: str) -> None:
        if self._borrower is not None:
            self._borrower.drop(request.loan, reason)

    def _refuse(
        self, request: Request, reason: str, code: str = "invalid_request_error", *, is_retryable: bool = False
    ) -> None:
        for unit in request.choices:
            self._fail(request.router, unit, code, reason, is_retryable=is_retryable)

    def _fail(self, router: str, unit: Unit, code: str, message: str, *, is_retryable: bool = False) -> None:
        failed = Failed(unit=unit, code=code, message=message[:MAX_TEXT], retryable=is_retryable)
        self.membership.send(failed, router)

    def _end_tickets(self) -> None:
        for event in self._tickets.poll():
            request, unit = event.request, event.unit
            if isinstance(event, FailedUnit):
                self._end_choice_for_memory(request, unit, event.reason)
                continue
            if not request.is_computed:  # the decode node gave the choice up and does not need its first token
                request.drop_choice(unit)
                if not request.choices:
                    self._drop_loan(request, "no node wants the prompt any more")
            if not request.tickets and (request.is_computed or not request.choices):
                self._finish(request)
            elif not request.choices:
                self.scheduler.stop(request)

    # --- computing ---

    def _begin(self, request: Request) -> None:
        """Borrow pages of a request that has got its own, or compute it."""
        if self._borrows(request):
            self.scheduler.await_loan(request)
        else:
            self._begin_computing(request)

    def _borrows(self, request: Request) -> bool:
        """Begin to borrow pages of the prompt, if another node has some and that is sooner than computing."""
        if self._borrower is None or request.lender is None:
            return False
        assert request.lease is not None, request.rid
        most = self.scheduler.most_cached(request)
        return self._borrower.begin(request.loan, request.lender, request.token_ids, request.pages, request.lease, most)

    def _pull(self) -> None:
        """Pull pages that are borrowed."""
        for event in () if self._client is None else self._client.poll():
            assert isinstance(event, LoanOver) and self._borrower is not None, event
            unit = self._borrower.take(event)
            if unit is not None:
                self._loans_over.append(unit)

    def _end_loans(self) -> None:
        """Pull, and compute the prompts whose loans are over."""
        self._pull()
        over, self._loans_over = self._loans_over, []
        for unit in over:
            if self._kept is not None and unit in self._kept:
                self._kept.end(unit)
            for request in [each for each in self.scheduler.borrowing if each.loan == unit]:  # none if it was dropped
                self.scheduler.end_loan(request)
                self._begin_computing(request)

    def _begin_computing(self, request: Request) -> None:
        self._counts.prompt_tokens += len(request.token_ids)
        self._counts.cached_tokens += request.num_cached
        if self._under_way is None and self.cache.is_settled:  # otherwise cached pages may not be complete yet
            self._tickets.offer_computed(request)

    def _compute(self, plan: StepPlan) -> None:
        """Submit a chunk, then settle the one before.

        The new chunk is settled too if chunks do not overlap, or if no further chunk is left to submit before that:
        then waiting would only delay first tokens.
        """
        if self._under_way is not None and self._under_way.submitted.is_done:  # the device is faster than the host
            self._settle()
        chunk = self._submit_chunk(plan) if plan else None
        self._settle()
        self._under_way = chunk
        if chunk is not None and self._overlaps and self.scheduler.computing:
            chunk.submitted.draft()
        else:
            self._settle()

    def _submit_chunk(self, plan: StepPlan) -> ChunkUnderWay | None:
        """Submit a chunk. If the device has no memory for it, end the request that asks for most, and return None."""
        try:
            chunk = chunk_work.submit(self.prompts, plan)
        except OutOfMemory as error:
            self._end_for_memory(max(plan, key=_demand).request, error)
            return None
        self._counts.steps += 1
        self._tickets.digest_ahead(request for request, _ in plan)
        for request, row in plan:
            self._counts.computed_tokens += len(row.input_ids)
            if request.is_submitted:
                self.scheduler.hand_over(request)
        return chunk

    def _settle(self) -> None:
        """Wait for the chunk under way, if there is one, and process its results: first tokens, log-probabilities of
        prompts, and pages to offer. A request that was dropped meanwhile has no choices and no tickets left.

        While the device computes, the node serves handoffs of earlier chunks. Else their last pages would be handed
        over a chunk later: other ranks report checksums, and decode nodes claim and pull, at any time."""
        chunk, self._under_way = self._under_way, None
        if chunk is None:
            return
        while not chunk.submitted.is_computed:
            self._end_tickets()
            self._pull()
            time.sleep(_PAUSE_S)
        report = chunk.submitted.wait()
        begun = max(report.begun, self._computed_at)  # the device did the last chunk until then
        self._computed_at = report.computed
        self._rate.observe(sum(len(row.input_ids) for _, row in chunk.plan), report.computed - begun)
        for (request, row), logprobs in zip(chunk.plan, report.logprobs, strict=True):
            request.finish_chunk(len(row.input_ids), begun, report.computed)
            request.add_prompt_logprobs(logprobs)
        for ends, submitted in zip(chunk.ends, chunk.submitted.tails, strict=True):
            self._settle_ends(ends, submitted, report.computed)
        for request, _ in chunk.plan:
            if not request.is_computed:
                self._tickets.offer_computed(request)

    def _settle_ends(self, ends: list[PromptEnd], submitted: BegunTails, computed: float) -> None:
        """Send first tokens as soon as they are known, then hand the last pages over when the drafts are done."""
        samples = zip(ends, submitted.first_tokens(), strict=True)
        first_tokens = [self._send_first(end, sample, computed) for end, sample in samples]
        submitted.draft()
        rows = submitted.wait_rows()
        self._tickets.digest_last([end for end, own in zip(ends, rows, strict=True) if not own.no_memory])
        for end, choices, own in zip(ends, first_tokens, rows, strict=True):
            if own.no_memory:
                self._end_without_drafts(end, choices, own.no_memory)
            else:
                self._hand_over(end, choices, own)

    def _end_without_drafts(self, end: PromptEnd, choices: list[FirstToken], reason: str) -> None:
        """End the choices that a decode node would continue, since there was no memory for the drafts after them."""
        request = end.request
        for unit, _, _, over in choices:
            if over is not None:
                self._tickets.revoke(request, unit, is_finished=True, reason=over.reason)
            elif unit in request.tickets:
                self._end_choice_for_memory(request, unit, reason)
        if request.choices and not request.tickets:
            self._finish(request)

    def _end_choice_for_memory(self, request: Request, unit: Unit, reason: str) -> None:
        """End a choice with an error, unless it is not wanted any more."""
        if unit in request.choices:
            logger.warning("out of memory: %s", reason, extra={"rid": request.rid})
            self._fail(request.router, unit, OutOfMemory.code, reason, is_retryable=True)
            self._drop(request, {unit}, reason)

    def _end_for_memory(self, request: Request, error: OutOfMemory) -> None:
        """End all choices of a request with one error each. Another node, or this one later, may have the memory."""
        logger.warning("out of memory: %s", error, extra={"rid": request.rid})
        self._refuse(request, str(error), error.code, is_retryable=True)
        self._drop(request, set(request.choices), str(error))

    def _send_first(self, end: PromptEnd, sample: FirstTokens, computed: float) -> list[FirstToken]:
        """Send the first tokens of the choices that are still wanted, or a failure. Return the tokens sent."""
        request = end.request
        request.finish_prompt(computed)
        if not request.choices:
            return []
        if None in sample.token_ids:  # all choices have the same logits
            message = no_token(len(request.token_ids), request.generation.params)
            self._refuse(request, message, code="model_error")
            self._drop(request, set(request.choices), message)
            return []
        choices = [
            self._begin_choice(request, unit, token, entry)
            for unit, token, entry in zip(end.units, sample.token_ids, sample.logprobs, strict=True)
            if unit in request.choices and token is not None
        ]
        if choices:
            self._counts.generated_tokens += len(choices)
            self.membership.send(self.outbox.first_tokens(request, choices), request.router)
            request.finish_sampling()
        return choices

    def _begin_choice(self, request: Request, unit: Unit, token: int, logprobs: TokenLogprobs | None) -> FirstToken:
        state = request.choices[unit]
        state.append(token)
        end = ended(state, token, self.prompts.context_len, request.num_cached)
        return FirstToken(unit, token, logprobs, end)

    def _hand_over(self, end: PromptEnd, choices: list[FirstToken], packed: HandoffRows) -> None:
        """Offer the last pages and the rows of the choices that go on, and revoke the tickets of the others."""
        request = end.request
        by_unit = dict(zip(end.units, packed.rows, strict=False))  # a prompt that is not handed over has none
        rows: dict[Unit, bytes] = {}
        for unit, _, _, over in choices:
            row = by_unit.get(unit)
            if over is not None:
                self._tickets.revoke(request, unit, is_finished=True, reason=over.reason)
            elif unit in request.tickets and row is not None:
                rows[unit] = row
        self._tickets.offer_last(end, rows)
        if request.choices and not request.tickets:
            self._finish(request)

    def _finish(self, request: Request) -> None:
        self.scheduler.remove(request)
        self.prompts.forget(request.key)
        logger.info("prompt done", extra={"rid": request.rid})
        self.membership.send(
            PrefillDone(
                rid=request.rid,
                attempt=request.attempt,
                queue_s=max(0.0, request.started - request.arrived),
                compute_s=max(0.0, request.computed - request.started),
                num_cached=request.num_cached,
                load=self.load(),
                times=request.times,
                prompt_logprobs=tuple(request.prompt_logprobs),
            ),
            request.router,
        )


def _limit_sharing(scheduler: PrefillScheduler, prompts: PromptExecutor) -> None:
    """Measure up to which size of a chunk prompts gain by sharing it."""
    chunk_s = functools.partial(measure_prompt, prompts, scheduler.page_size)
    limit = measured_sharing_limit(chunk_s, min(scheduler.chunk_tokens, prompts.context_len))
    scheduler.share_up_to(limit)
    if limit is not None:
        logger.info("prompts share chunks of up to %d tokens", limit)


def _demand(planned: PlannedChunk) -> tuple[int, int, int]:
    """Return a key that is largest for the request that asks most of a chunk's memory: first by rows as wide as the
    vocabulary, then by tokens. Of equals, the youngest is largest."""
    request, row = planned
    num_sampled = len(request.choices) if planned.is_last else 0
    return row.num_scored + num_sampled, len(row.input_ids), request.key
