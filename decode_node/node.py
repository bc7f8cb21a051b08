"""The decode node reserves pages, pulls the KV of prompts from prefill nodes, and generates.

The life of a sequence here:

    Reserve message --> reserved --all pages pulled and checked--> running --last token--> ended
    Compute message --> reserved ------------at once-------------> running    (pages to the prefix cache)
             |             |                                       |     ^
          refused   revoked, failed,                            preempt  resume
             |      cancelled                                      v     |
    CapacityFreed follows                                         preempted

Reserve and Compute messages fill `reserved`. The events of the handoff client empty it. The scheduler moves the rest.
The prompt of a Compute message is a local prompt: this node computes it in chunks, like the tokens of a resumed
sequence. The first round of the sequence runs the last token of the prompt and samples the first token. If the last
chunk is short enough to share a forward with this round, it does. If a request
has several choices, the first choice computes the prompt, and the others take its pages from the prefix cache. If the
request asks for log-probabilities of the prompt, the first choice computes every position, also those that are cached,
and the node sends PrefillDone when it has them all.

The node submits a round to its executor (engine/rounds/executor.py). It settles the round later: it waits for the
results and processes them. On a GPU the node submits the next round in between, so the device computes while the host
processes tokens. While pages of a prompt are on the way, the node submits the next round as late as it can, so that the
sequence joins it. If the device is a GPU, the node does not sleep then, so that it submits no round too late.

Collaborators: pacing.py learns how long rounds and chunks take, and memory_relief.py takes work off a round for which
the device has no memory.
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from ..engine.progress import ProgressBar
from ..engine.rounds.executor import Executor
from ..engine.rounds.rounds import LocalChunk, Rounds
from ..engine.state.prefix_cache import PrefixCache
from ..engine.work import Accepted, no_token
from ..metadata.bus.membership import DataLinks, Membership, RouterGone
from ..metadata.bus.session import RouterWork
from ..metadata.errors import ChunkOutOfMemory, OutOfMemory, ProtocolError, RoundOutOfMemory
from ..metadata.handoff.borrower import Borrower, BorrowTotals
from ..metadata.handoff.client import HandoffClient
from ..metadata.handoff.handing_on import HandingOn, KeptTexts
from ..metadata.handoff.server import HandoffServer
from ..metadata.handoff.transfer import Arrived, Event, LoanOver, Revoked, TransferFailed
from ..metadata.wire.membership import HandedOn, Keep
from ..metadata.wire.messages import Admitted, Cancel, Cancelled, Compute, Failed, PrefillDone, Resend, Reserve
from ..metadata.wire.node_info import Lender, Load, NodeStats
from ..metadata.wire.request import MAX_TEXT, Unit
from .chunk_length import MAX_AHEAD, PromptTokens
from .memory_relief import MemoryRelief
from .outbox import Outbox
from .pacing import Pacing, SubmittedRound
from .reservations import Reservations
from .scheduler import DecodeScheduler, StepPlan, Streams
from .sequence import Sequence

if TYPE_CHECKING:
    from ..metadata.handoff.schema.buffers import Sampled

logger = logging.getLogger(__name__)

_PAUSE_S = 1e-4  # between looks for messages while a round is computed
STEP_LIMIT_S = 60.0  # the node counts as stuck if one round takes longer


@dataclass(slots=True)
class _Counts:
    """Totals since the start."""

    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    generated_tokens: int = 0
    pages_moved: int = 0
    bytes_moved: int = 0
    transfer_seconds: float = 0.0


class _Admission(NamedTuple):
    """A sequence that was admitted, and what the router is to be told."""

    sequence: Sequence
    num_pulled: int  # tokens whose KV has arrived
    message: Admitted
    begun: float  # monotonic seconds


class DecodeNode:
    """Runs the loop: one thread calls `step` for ever, and nothing here is shared with another thread."""

    def __init__(
        self,
        executor: Executor,
        cache: PrefixCache,
        membership: Membership,
        handoff: HandoffClient,
        chunk: int,
        server: HandoffServer | None = None,
        *,
        is_adaptive: bool = False,
        overlaps: bool | None = None,
        expects_prompts: bool = True,
        max_gap_s: float | None = None,
    ):
        """`cache` owns the pages that `executor` writes. `chunk`: the most prompt tokens that a step computes.
        `server` lends pages of the cache; None: the node lends and borrows none.
        `is_adaptive`: adapt the draft length to the measured benefit; otherwise draft all steps.
        `overlaps`: submit a round before the results of the last one are read; None: if the device is a GPU.
        `expects_prompts`: prepare for local prompts; otherwise they are computed as well, but delay other sequences
        more. `max_gap_s`: the operator's bound on the time between tokens beside chunks of prompts; None: the node's
        own."""
        self.executor = executor
        self.cache = cache
        self.membership = membership
        self.handoff, self._server = handoff, server
        self.links = DataLinks(handoff, server)
        with ProgressBar("capturing round graphs") as progress:
            executor.warm_up(progress, expects_prompts=expects_prompts)
        self.rounds = Rounds(executor)
        self._overlaps = executor.runs_ahead if overlaps is None else overlaps
        self.pacing = Pacing(
            self.rounds,
            chunk,
            cache.pool.page_size,
            is_adaptive=is_adaptive,
            max_gap_s=max_gap_s,
            overlaps=self._overlaps,
        )
        self._clock, self._budget = self.pacing.clock, self.pacing.budget
        self.scheduler = self._make_scheduler(chunk)
        if cache.tier is not None:
            cache.tier.compute_token_s = lambda: self.load().prompt_token_s
        if executor.group_steps is not None:
            executor.group_steps.watch_streams(lambda: self.scheduler.streams)
        self._under_way: SubmittedRound | None = None
        self._admitted: list[_Admission] = []  # since the last round was submitted
        self._relief = MemoryRelief(self.rounds, self.scheduler, self._fail)
        self.outbox = Outbox()
        sizes = {"vocab_size": executor.vocab_size, "context_len": executor.context_len}
        self._reservations = Reservations(self.scheduler, self.outbox, self.load, membership.send, self._fail, **sizes)
        self._borrower = None if server is None else Borrower(cache, handoff, self._prompt_token_s)
        self._kept = None if self._borrower is None else KeptTexts(cache, self._borrower)
        self._handing_on = HandingOn(cache, membership, server)
        self._counts = _Counts()
        self._put_off: list[RouterWork | RouterGone] = []  # messages that came while the device computed

    def _make_scheduler(self, chunk: int) -> DecodeScheduler:
        executor, chooser = self.executor, self.pacing.chooser
        return DecodeScheduler(
            self.cache,
            executor.num_slots,
            chunk,
            shape=executor.shape,
            context_len=executor.context_len,
            num_prompt_states=executor.num_prompt_states,
            choose=None if chooser is None else self.pacing.choose,
            rests=None if chooser is None else chooser.rests,
            budget=self._budget.room,
            mixed=executor.mixed_sizes,
            windows=executor.windows,
            on_finish=self._release,
            streams_elsewhere=self._streams_elsewhere,
        )

    def step(self) -> bool:
        """Receive, admit, schedule, compute, send. Return whether there is more to compute at once."""
        self._clock.begin_step()
        self._take_arrivals()
        self._clock.end_arrivals()
        self._await_arrivals()
        self._await_chunks()
        self.pacing.count_rounds_elsewhere()
        plan = self._plan()
        if plan.rows or plan.decoding or self._under_way is not None:
            self.membership.enter("decode", STEP_LIMIT_S)
            self._compute(plan)
        else:
            self.pacing.alone.take()
        self._announce()
        if self.membership.is_leaving and self._holds_nothing:
            self._handing_on.go_on()
        self.cache.tend()
        for sequence in plan.failed:
            words = "the pool cannot hold this request alone"
            self._fail(sequence.router, sequence.unit, "out_of_pages", words, is_retryable=False)
        self._reservations.announce_capacity()
        self._clock.end_step()
        return bool(self.scheduler.running) or self._under_way is not None or bool(self._put_off)

    @property
    def is_idle(self) -> bool:
        """Whether the node holds no sequence. If it leaves, it has also handed its cached texts on."""
        return self._holds_nothing and (not self.membership.is_leaving or self._handing_on.is_over)

    @property
    def _holds_nothing(self) -> bool:
        return self._under_way is None and not self.scheduler

    def load(self) -> Load:
        scheduler = self.scheduler
        # prompts that are not computed yet will be streams when the next ones come
        num_streams = scheduler.num_streams or min(1, len(scheduler))
        num_steps = self._under_way.num_steps if self._under_way is not None else 0
        rate = self._budget.rate(num_streams, num_steps)
        return Load(
            free_pages=self.cache.available,
            free_tails=self.cache.available_tails,
            running=len(scheduler.running) + len(scheduler.reserved),
            waiting=len(scheduler.preempted),
            queued_tokens=scheduler.num_queued_tokens,
            prompt_token_s=rate.token_s,
            prompt_fixed_s=rate.fixed_s,
            round_s=rate.round_s,
            has_prompt_room=rate.has_room,
            paced_prompt_tokens=rate.num_paced,
            prompt_rest_token_s=rate.rest_token_s,
            quarantined_slots=self.handoff.num_quarantined,
            num_routers=len(self.membership.routers),
        )

    def _prompt_token_s(self) -> float:
        """Return the seconds in which it computes a token of a prompt beside its streams; 0: unknown."""
        return self._budget.rate(self.scheduler.num_streams or 1, 0).token_s

    def stats(self) -> NodeStats:
        counts, rounds = self._counts, self.rounds.stats
        borrowed = BorrowTotals() if self._borrower is None else self._borrower.totals
        ends = [end for end in (self.handoff, self._server) if end is not None]
        return NodeStats(
            steps=counts.steps,
            prompt_tokens=counts.prompt_tokens,
            cached_tokens=counts.cached_tokens,
            computed_tokens=counts.computed_tokens,
            generated_tokens=counts.generated_tokens,
            preemptions=self.scheduler.num_preemptions,
            borrowed_tokens=borrowed.num_pages * self.cache.pool.page_size,
            pages_moved=counts.pages_moved + borrowed.num_pages,
            bytes_moved=counts.bytes_moved + borrowed.num_bytes,
            checksum_failures=self.handoff.num_checksum_failures,
            dropped_frames=self.membership.dropped_frames + sum(end.dropped.count for end in ends),
            cache_changes=self.cache.num_changes,
            host=None if self.cache.tier is None else self.cache.tier.figures,
            transfer_seconds=counts.transfer_seconds + borrowed.seconds,
            num_rounds=rounds.num_verified,
            num_drafted=rounds.num_drafted,
            accepted_at=tuple(rounds.accepted_at),
            masked_rounds=rounds.masked_rounds,
            late_masks=rounds.late_masks,
            mask_seconds=rounds.mask_s,
            idle_rounds=() if self.executor.group_steps is None else (self.executor.group_steps.num_idle,),
        )

    def units(self) -> tuple[Unit, ...]:
        """Return the units of all sequences held here."""
        return tuple(sequence.unit for sequence in self.scheduler)

    def num_units(self) -> Counter[str]:
        """Count the units by the epoch of the router that they are of."""
        return Counter(sequence.router for sequence in self.scheduler)

    def tickets(self) -> tuple[Unit, ...]:
        """Return the units of all reserved sequences, whose pages are not complete, and of the loans to other nodes."""
        loans = () if self._server is None else self._server.loans()
        return (*self.scheduler.reserved, *loans)

    # --- messages ---

    def _handle(self, message: RouterWork | RouterGone) -> None:
        match message:
            case Reserve() | Compute():
                self._reserve(message)
            case Cancel(rid=rid, attempt=attempt, choices=choices):
                for sequence in self.scheduler.find(rid, attempt, choices):
                    self._drop(sequence, message.reason or "cancelled")
                self.membership.send(Cancelled(rid=rid, attempt=attempt), message.router_epoch)
            case Resend():
                self._resend(message)
            case Keep():
                if self._kept is not None:
                    self._kept.add(message)
            case HandedOn():
                self._handing_on.take(message)
            case RouterGone(router=router, reason=reason):
                for sequence in [each for each in self.scheduler if each.router == router]:
                    self._drop(sequence, reason)
                self._reservations.forget(router)
            case _:
                logger.warning("dropped a %s message: decode nodes do not take it", type(message).__name__)

    def _reserve(self, message: Reserve | Compute) -> None:
        for sequence in self._reservations.grant(message):
            if sequence.sampling.params.grammar is not None:
                self.executor.expect(sequence.sampling.params.grammar)
            if isinstance(message, Compute):
                if not self._borrows(sequence, message.lender):
                    self._start_local(sequence)
            else:
                assert sequence.lease is not None
                num_prompt_pages = -(-len(sequence.token_ids) // self.cache.pool.page_size)
                num_cached_pages = len(sequence.lease.pages)
                pages = sequence.pages[:num_prompt_pages]
                if sequence.tail is not None:
                    num_tails = num_prompt_pages - sequence.tail.first
                    pages = pages + sequence.tail.own[:num_tails]
                self.handoff.claim(sequence.unit, message.prefill, num_cached_pages, pages)

    def _borrows(self, sequence: Sequence, lender: Lender | None) -> bool:
        """Begin to borrow pages of a local prompt, if another node has some and that is sooner than computing. The
        sequence stays reserved until the loan is over. Other choices of its request take the pages from the cache."""
        if self._borrower is None or lender is None or sequence.unit.choice:
            return False
        assert sequence.lease is not None, sequence.unit
        most = self.scheduler.pages.most_cached(sequence)
        return self._borrower.begin(sequence.unit, lender, sequence.token_ids, sequence.pages, sequence.lease, most)

    def _start_local(self, sequence: Sequence) -> None:
        """Run a sequence whose prompt is computed here."""
        self.scheduler.start_local(sequence.unit)
        if self._take_slot(sequence, None):
            self._send_scores(sequence)
            self._counts.prompt_tokens += len(sequence.token_ids)
            self._counts.cached_tokens += sequence.num_cached
            logger.info(
                "computes a prompt of %d tokens, %d of them cached",
                len(sequence.token_ids),
                sequence.num_cached,
                extra={"rid": sequence.unit.rid},
            )

    def _take_slot(self, sequence: Sequence, row: bytes | None) -> bool:
        """Give a running sequence a slot in rounds, with the drafter's state in `row` if it has one. False: there is no
        memory for it, and the sequence has ended."""
        try:
            self.rounds.admit(sequence, row)
        except OutOfMemory as error:
            self._relief.end(sequence, error)
            return False
        assert sequence.slot is not None, sequence.unit
        if self.pacing.chooser is not None:
            self.pacing.chooser.admit(sequence.slot)
        sequence.clock.start(sequence.num_generated)
        return True

    def _streams_elsewhere(self) -> Streams:
        """Return the streams of the other ranks of this node's group."""
        steps = self.executor.group_steps
        return Streams() if steps is None else Streams(*steps.streams_elsewhere)

    def _release(self, sequence: Sequence) -> None:
        """Take the slot of a sequence that is over."""
        self.rounds.release(sequence)
        if self.pacing.chooser is not None:
            self.pacing.chooser.wake()

    def _resend(self, message: Resend) -> None:
        """Send the unit's tokens from number `first` on again. If its pages do not come, ask for the offers again."""
        router, unit, first = message.router_epoch, message.unit, message.first
        sequence = self.scheduler.get(unit)
        if sequence is None:
            tokens = self.outbox.again_of_ended(unit, first)
            if tokens is None:
                words = "the node does not know this request any more"
                self._fail(router, unit, "unavailable", words, is_retryable=True)
            else:
                self.membership.send(tokens, router)
        elif first > sequence.num_generated and unit in self.scheduler.reserved and not self.handoff.ask_offers(unit):
            # the router has the prefill node's first token, so the offers that go with it were sent and lost
            self._drop(sequence, "an offer was lost")
            self._fail(router, unit, "transfer_error", "an offer of the prefill node was lost", is_retryable=True)
        else:
            self.membership.send(self.outbox.again(sequence, first), router)

    def _drop(self, sequence: Sequence, reason: str) -> None:
        if sequence.unit in self.scheduler.reserved:
            if self._borrower is not None:
                self._borrower.drop(sequence.unit, reason)
            self.handoff.drop(sequence.unit, reason)
        self._catch_up(sequence)
        self.scheduler.finish(sequence)

    def _fail(self, router: str, unit: Unit, code: str, message: str, *, is_retryable: bool) -> None:
        logger.warning("%s: %s", code, message, extra={"rid": unit.rid})
        failed = Failed(unit=unit, code=code, message=message[:MAX_TEXT], retryable=is_retryable)
        self.membership.send(failed, router)

    # --- arrivals ---

    def _take_arrivals(self) -> None:
        """Process all messages and events that are there."""
        put_off, self._put_off = self._put_off, []
        for message in [*put_off, *self.membership.receive()]:
            self._handle(message)
        for event in self.handoff.poll():
            self._arrive(event)
        if self._server is not None:
            self._server.poll()  # nobody waits for a loan's end

    @property
    def _expects_arrivals(self) -> bool:
        """Whether pages are on the way, or prompts are computed here, of which the next may come at any time."""
        return bool(self.scheduler.reserved) or self._counts.prompt_tokens > 0

    def _await_arrivals(self) -> None:
        """If something is to come, wait until the device nearly needs the next round, so that it joins that one."""
        if self._under_way is None or not self._expects_arrivals:
            return
        under_way = self._under_way
        until = self._clock.submit_by(under_way.num_steps, has_chunk=under_way.has_chunk)
        since = time.monotonic()
        while self._expects_arrivals and time.monotonic() < until and not self.executor.is_done:
            self._pause()
            since = time.monotonic()
            self._take_arrivals()
        if self.executor.is_done:
            self._clock.overrun(since)

    def _pause(self) -> None:
        """Let other threads run between two looks for messages."""
        if self.executor.runs_ahead and self.scheduler.reserved:
            os.sched_yield()
        else:
            time.sleep(_PAUSE_S)

    def _answer_reservations(self) -> None:
        """While the device computes the round under way and has the next one to do, answer reservations: a prompt is
        not computed before the answer. Messages from the first other one on wait for the next step."""
        under_way = self._under_way
        if under_way is None:
            return
        until = self._clock.submit_by(under_way.num_steps, has_chunk=under_way.has_chunk)
        since = time.monotonic()
        while not self._put_off and time.monotonic() < until and not self.executor.is_done:
            self._pause()
            since = time.monotonic()
            for message in self.membership.receive():
                if self._put_off or not isinstance(message, Reserve):
                    self._put_off.append(message)
                else:
                    self._reserve(message)
        if self.executor.is_done:
            self._clock.overrun(since)

    def _arrive(self, event: Event) -> None:
        """Process an event of the handoff client."""
        if isinstance(event, LoanOver):
            self._end_loan(event)
            return
        sequence = self.scheduler.reserved.get(event.unit)
        if sequence is None:
            return
        match event:
            case Arrived(unit=unit, row=row):
                try:
                    sampled = self.executor.read_row(row)
                except ProtocolError as error:
                    self.scheduler.finish(sequence)
                    self._fail(sequence.router, unit, error.code, str(error), is_retryable=False)
                else:
                    self._admit(sequence, event, sampled)
            case TransferFailed(unit=unit, reason=reason, is_refused=is_refused, code=code):
                self.scheduler.finish(sequence)
                self._fail(sequence.router, unit, code, reason, is_retryable=not is_refused)
            case Revoked():  # the prefill node told the router: the only token, or why there is none
                self.scheduler.finish(sequence)

    def _end_loan(self, event: LoanOver) -> None:
        """Compute what a local prompt has not borrowed, unless the loan goes on."""
        assert self._borrower is not None and self._kept is not None, event
        if self._borrower.take(event) is None:
            return
        if event.unit in self._kept:
            self._kept.end(event.unit)
            self.scheduler.pages.note_release()
        else:
            sequence = self.scheduler.reserved[event.unit]
            self.scheduler.pages.retake(sequence)
            self._start_local(sequence)

    def _admit(self, sequence: Sequence, event: Arrived, sampled: Sampled) -> None:
        """Run a sequence whose pages have arrived. If there is no memory for it, it ends with an error."""
        begun = time.monotonic()
        assert sequence.lease is not None
        num_cached_pages = len(sequence.lease.pages)
        self.scheduler.start_pulled(event.unit)
        num_pulled = sequence.num_computed
        sequence.append_first(sampled.first_token, sampled.logprobs, sampled.num_cached)
        if not self._take_slot(sequence, event.row):
            return
        self._counts.pages_moved += event.num_pages
        self._counts.bytes_moved += event.num_bytes
        self._counts.transfer_seconds += event.transfer_s
        message = Admitted(
            unit=event.unit,
            transfer_s=event.transfer_s,
            num_pages=event.num_pages,
            num_bytes=event.num_bytes,
            num_cached_pages=num_cached_pages,
            times=event.times,
        )
        self._admitted.append(_Admission(sequence, num_pulled, message, begun))

    def _announce(self) -> None:
        """Tell the router which sequences were admitted, and their first tokens, unless they have ended meanwhile. The
        device has their round to do by now. Their pages are found in the prefix cache from now on."""
        admitted, self._admitted = self._admitted, []
        for sequence, num_pulled, message, begun in admitted:
            if self.scheduler.get(message.unit) is not sequence:
                continue
            if sequence.lease is not None:  # otherwise it was preempted, and its pages are in the cache
                self.scheduler.share_computed(sequence, num_pulled)
            logger.info("admitted, %d pages pulled", message.num_pages, extra={"rid": message.unit.rid})
            times = msgspec.structs.replace(message.times, admit_s=time.monotonic() - begun)
            self.membership.send(msgspec.structs.replace(message, times=times), sequence.router)
            self._send([sequence])

    def _await_chunks(self) -> None:
        """Without a stream, wait until the device has few chunks before it: a stream that starts meanwhile waits for
        them."""
        if self.executor.num_chunks_ahead < MAX_AHEAD:
            return
        self.membership.enter("decode", STEP_LIMIT_S)
        while self.executor.num_chunks_ahead >= MAX_AHEAD and not self.scheduler.num_streams:
            self._pause()
            self._take_arrivals()

    # --- rounds ---

    def _plan(self) -> StepPlan:
        """Plan the next step. If it needs the results of the round under way, or has a chunk that is computed apart
        from a round, settle that round first."""
        plan = self.scheduler.plan()
        if self._under_way is None:
            return plan
        is_apart = plan.rows and (not plan.decoding or plan.is_scored)
        if plan.is_premature or is_apart or self.rounds.reads_tokens(plan.shape):
            self.settle()
            return self.scheduler.plan(plan.shape)
        return plan

    def _compute(self, plan: StepPlan) -> None:
        """Submit the planned step, then settle the round before. If rounds do not overlap, settle the new one too."""
        self._counts.steps += 1
        step_since = self._clock.step_since
        chunk = plan.chunk
        is_scored = plan.is_scored
        beside = None
        if chunk is not None and (is_scored or not plan.decoding):
            if not self._recompute(plan):
                chunk, is_scored = None, False
            elif not plan.decoding:
                self.pacing.alone.add(chunk, step_since)
                if self._streams_elsewhere().has_any:  # it shared the forward of their rounds
                    self._budget.begin_round(has_chunk=True)
        elif chunk is not None:
            beside = LocalChunk(plan.sequences, plan.rows)
        begun = self._submit_round(plan, beside, chunk, step_since) if plan.decoding else None
        self._announce()
        if is_scored:  # now, while the device has the round to do
            self._settle_scores(plan)
        if begun is not None:
            self._answer_reservations()
            self.settle()
            for sequence, limit in zip(begun.sequences, begun.submitted.limits, strict=True):
                sequence.join_round(limit)
            self._under_way = begun
        if begun is None or not self._overlaps:
            self.settle()

    def _recompute(self, plan: StepPlan) -> bool:
        """Submit the planned chunk. False: the device has no memory for it, and the sequence that asks for most has
        ended."""
        try:
            self.rounds.recompute(plan.sequences, plan.rows)
        except OutOfMemory as error:
            self._relief.of_chunk(plan, error)
            return False
        self._note_computed(plan)
        return True

    def _note_computed(self, plan: StepPlan) -> None:
        """Record that the device computes the planned chunk."""
        for sequence, row in zip(plan.sequences, plan.rows, strict=True):
            sequence.compute(len(row.input_ids))
            self._counts.computed_tokens += len(row.input_ids)
            if sequence.is_local:
                self.scheduler.share_computed(sequence)

    def _settle_scores(self, plan: StepPlan) -> None:
        """Wait for the log-probabilities of the planned chunks. Send those of the prompts that are complete."""
        report = self.rounds.collect_scores()
        for sequence, row, logprobs in zip(plan.sequences, plan.rows, report.logprobs, strict=True):
            if row.num_scored:
                sequence.take_scores(row.position, logprobs)
                self._send_scores(sequence)

    def _send_scores(self, sequence: Sequence) -> None:
        """Send the log-probabilities of a local prompt, in the message that a prefill node sends, if they were asked
        for and are complete."""
        scores = sequence.prompt_scores
        if scores is None or not scores.is_complete:
            return
        unit = sequence.unit
        self.membership.send(
            PrefillDone(
                rid=unit.rid,
                attempt=unit.attempt,
                queue_s=0.0,
                compute_s=time.monotonic() - scores.begun,
                num_cached=sequence.num_cached,
                load=self.load(),
                prompt_logprobs=tuple(scores.logprobs),
            ),
            sequence.router,
        )
        sequence.forget_scores()

    def _submit_round(
        self, plan: StepPlan, beside: LocalChunk | None, chunk: PromptTokens | None, step_since: float
    ) -> SubmittedRound | None:
        """Submit a round, and the planned chunk if it is `beside`. If the device has no memory for them, make ready for
        less, and return None."""
        since = self._clock.submit()
        try:
            submitted = self.rounds.submit(plan.decoding, plan.shape, plan.limits, beside)
        except ChunkOutOfMemory as error:
            self._relief.of_chunk(plan, error)
            return None
        except OutOfMemory as error:
            if isinstance(error, RoundOutOfMemory):
                self._note_computed(plan)
            self.settle()  # the round before has tokens for them
            self._relief.of_round([each for each in plan.decoding if each.slot is not None], plan.shape, error)
            return None
        if beside is not None:
            self._note_computed(plan)
        self._budget.begin_round(has_chunk=chunk is not None)
        return SubmittedRound(plan.decoding, submitted, since, step_since, chunk, plan.is_scored)

    def settle(self) -> None:
        """Wait for the round under way, if there is one, and process its results."""
        done, self._under_way = self._under_way, None
        if done is None:
            return
        results = self.rounds.collect(done.submitted).rows
        times = self.pacing.settle(done)
        for sequence in done.sequences:
            sequence.leave_round()
        rows = zip(done.sequences, done.submitted.slots, results, strict=True)
        live = [(sequence, slot, accepted) for sequence, slot, accepted in rows if accepted is not None]
        for sequence, _, accepted in live:
            self._accept(sequence, accepted)
        self._send(done.sequences)
        self.pacing.learn(done, times, [(slot, accepted) for _, slot, accepted in live])

    def _accept(self, sequence: Sequence, accepted: Accepted) -> None:
        """Append the tokens of a round, and end the sequence if one of them ends it or the logits were NaN."""
        self._counts.generated_tokens += sequence.accept(accepted, self.executor.context_len)
        if sequence.ended is not None:
            self._catch_up(sequence)
            logger.info("ended: %s", sequence.ended.reason, extra={"rid": sequence.unit.rid})
            self.scheduler.finish(sequence)
        elif len(accepted.token_ids) <= accepted.num_accepted:
            self.scheduler.finish(sequence)
            message = no_token(len(sequence.token_ids), sequence.sampling.params)
            self._fail(sequence.router, sequence.unit, "model_error", message, is_retryable=False)

    def _catch_up(self, sequence: Sequence) -> None:
        """Let the drafter see all rows of a sequence that is over, if more pages can be cached then."""
        if sequence.slot is not None and self.scheduler.pages.lack_drafts(sequence):
            with suppress(OutOfMemory):  # then fewer of its pages enter the cache
                self.rounds.catch_up([sequence])

    def _send(self, sequences: list[Sequence]) -> None:
        for router in dict.fromkeys([sequence.router for sequence in sequences]):
            own = [sequence for sequence in sequences if sequence.router == router]
            for tokens in self.outbox.unsent(own):
                self.membership.send(tokens, router)
