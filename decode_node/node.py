"""The decode node: reserves pages, pulls the prompt's KV, generates.

The life of a unit here, and who moves it on:

    Reserve message --> reserved --pages arrived, checked--> running --last token--> ended (pages to the prefix cache)
    Compute message --> reserved ---------at once----------> running
             |             |                                 |    ^
           refused    revoked, failed,                    preempt resume
        (Room follows)  cancelled                            v    |
                                                           preempted

Reserve messages fill `reserved`, the handoff client empties it; the scheduler moves the rest. A Compute message's
prompt is computed here, as after a preemption.
"""

from __future__ import annotations

import logging
import time
from typing import NamedTuple

import msgspec

from ..engine.adaptive import StepChooser
from ..engine.draft_row import get_draft
from ..engine.drafters.base import DraftState
from ..engine.engine import NO_NUMBERS, Engine
from ..engine.graphs import graph_sizes
from ..engine.progress import ProgressBar
from ..engine.rounds import Accepted, Rounds, Submitted
from ..engine.slots import MAX_MISSED
from ..engine.step_times import StepTimes
from ..engine.stopping import ended
from ..engine.trees import DraftShape
from ..metadata.bus.membership import Membership, RouterGone
from ..metadata.bus.session import RouterWork
from ..metadata.errors import ProtocolError
from ..metadata.handoff.buffers import MetadataBuffers, Sampled
from ..metadata.handoff.client import Arrived, HandoffClient, Revoked, TransferFailed
from ..metadata.wire.messages import Admitted, Cancel, Cancelled, Compute, Failed, Resend, Reserve
from ..metadata.wire.node_info import Load, NodeStats
from ..metadata.wire.request import TokenLogprobs, Unit
from .outbox import Outbox
from .reservations import Reservations
from .scheduler import DecodeScheduler, Plan
from .sequence import Sequence
from .step_clock import StepClock

logger = logging.getLogger(__name__)

STEP_LIMIT_S = 60.0  # of one round; a longer one means that the node is stuck
_MAX_MEASURED = 16  # sequences of the largest round that is timed at the start; larger ones are extrapolated


class _UnderWay(NamedTuple):
    """A round that was submitted."""

    sequences: list[Sequence]
    slots: list[int]
    submitted: Submitted
    since: float  # monotonic seconds


class DecodeNode:
    """One thread runs `step` for ever; everything here belongs to it."""

    def __init__(
        self,
        engine: Engine,
        membership: Membership,
        handoff: HandoffClient,
        max_running: int,
        chunk: int,
        *,
        is_adaptive: bool = False,
        overlaps: bool | None = None,
    ):
        """`is_adaptive`: draft what pays, by times measured now and while it runs; else always all steps. `overlaps`:
        submit a round before the one before is read; None: where the device is not the host."""
        self.engine = engine
        self.cache = engine.cache
        self.membership = membership
        self.handoff = handoff
        self.rounds = Rounds(engine, max_running, buckets=graph_sizes(engine.kv, max_running))
        with ProgressBar("capturing round graphs") as progress:
            self.rounds.warm_up(progress)
        self.chooser: StepChooser | None = None
        if is_adaptive and self.rounds.shape.num_steps:
            times = StepTimes.measure(self.rounds.measure, min(max_running, _MAX_MEASURED), self.rounds.shape.choices)
            self.chooser = StepChooser(self.rounds.shape, times, max_running)
        self.scheduler = DecodeScheduler(
            engine.cache,
            max_running,
            chunk,
            shape=self.rounds.shape,
            context_len=engine.context_len,
            choose=None if self.chooser is None else self._choose,
            rests=None if self.chooser is None else self.chooser.rests,
            on_finish=self.rounds.release,
        )
        self._overlaps = engine.device.type != "cpu" if overlaps is None else overlaps
        self._under_way: _UnderWay | None = None
        self._clock = StepClock(self._overlaps)
        self.outbox = Outbox()
        self._row_buffer = MetadataBuffers(engine.schema)
        self._reservations = Reservations(engine, self.scheduler, self.outbox, self.load, membership.send, self._fail)
        self._num_steps = self._num_generated = self._num_recomputed = 0
        self._num_moved_pages = self._num_moved_bytes = 0
        self._transfer_seconds = 0.0

    def step(self) -> bool:
        """Receive, admit, compute, send. Returns whether there is more to compute at once."""
        self._clock.begin()
        for message in self.membership.receive():
            self._handle(message)
        admitted = [sequence for event in self.handoff.poll() if (sequence := self._arrive(event)) is not None]
        self._send(admitted)
        self._clock.ready()
        plan = self._plan()
        if plan.rows or plan.decoding or self._under_way is not None:
            self.membership.enter("decode", STEP_LIMIT_S)
            self._compute(plan)
        for sequence in plan.failed:
            self._fail(sequence.unit, "out_of_pages", "the pool cannot hold this request alone", is_retryable=False)
        self._reservations.offer_room()
        self._clock.end()
        return bool(self.scheduler.running) or self._under_way is not None

    @property
    def is_idle(self) -> bool:
        """Nothing is held for anybody."""
        return self._under_way is None and not any(True for _ in self.scheduler)

    def load(self) -> Load:
        scheduler = self.scheduler
        return Load(
            free_pages=self.cache.available,
            running=len(scheduler.running) + len(scheduler.reserved),
            waiting=len(scheduler.preempted),
        )

    def stats(self) -> NodeStats:
        return NodeStats(
            steps=self._num_steps,
            computed_tokens=self._num_recomputed,
            generated_tokens=self._num_generated,
            preemptions=self.scheduler.num_preemptions,
            pages_moved=self._num_moved_pages,
            bytes_moved=self._num_moved_bytes,
            checksum_failures=self.handoff.num_checksum_failures,
            dropped_frames=self.membership.dropped_frames + self.handoff.dropped.count,
            transfer_seconds=self._transfer_seconds,
            num_rounds=self.rounds.stats.num_verified,
            num_drafted=self.rounds.stats.num_drafted,
            accepted_at=tuple(self.rounds.stats.accepted_at),
        )

    def units(self) -> tuple[Unit, ...]:
        """Units of all requests held here."""
        return tuple(sequence.unit for sequence in self.scheduler)

    def tickets(self) -> tuple[Unit, ...]:
        return tuple(self.scheduler.reserved)

    # --- messages ---

    def _handle(self, message: RouterWork | RouterGone) -> None:
        match message:
            case Reserve() | Compute():
                self._reserve(message)
            case Cancel(rid=rid, attempt=attempt, choices=choices):
                for sequence in self.scheduler.find(rid, attempt, choices):
                    self._drop(sequence, message.reason or "cancelled")
                self.membership.send(Cancelled(rid=rid, attempt=attempt))
            case Resend(unit=unit, first=first):
                self._resend(unit, first)
            case RouterGone():
                for sequence in self.scheduler:
                    self._drop(sequence, message.reason)
            case _:
                logger.warning("dropped a %s: no business of a decode node", type(message).__name__)

    def _reserve(self, message: Reserve | Compute) -> None:
        for sequence in self._reservations.grant(message):
            if isinstance(message, Compute):
                self._begin(sequence)
                continue
            assert sequence.lease is not None
            num_prompt_pages = -(-len(sequence.token_ids) // self.engine.pool.page_size)
            self.handoff.claim(
                sequence.unit, message.prefill, len(sequence.lease.pages), sequence.pages[:num_prompt_pages]
            )

    def _begin(self, sequence: Sequence) -> None:
        """Runs a sequence whose prompt is computed here. A drafter with KV leaves it behind: prefill alone makes its
        state after a prompt."""
        self.scheduler.begin(sequence.unit)
        drafter = self.engine.drafter
        if drafter is not None and drafter.has_kv:
            sequence.num_missed = MAX_MISSED + 1
        self._take_slot(sequence, None if drafter is None else drafter.allocate(1))
        logger.info("computes %d tokens alone", sequence.num_to_compute, extra={"rid": sequence.unit.rid})

    def _take_slot(self, sequence: Sequence, draft: DraftState | None) -> None:
        """Gives a running sequence its place in rounds. Before its first one all its tokens but the last have KV."""
        self.rounds.admit(sequence, len(sequence.token_ids) - 1, draft)
        if self.chooser is not None and sequence.slot is not None:
            self.chooser.admit(sequence.slot)
        sequence.clock.start(sequence.num_generated)

    def _resend(self, unit: Unit, first: int) -> None:
        sequence = next((each for each in self.scheduler if each.unit == unit), None) or self.outbox.find_ended(unit)
        if sequence is None:
            self._fail(unit, "unavailable", "the node does not know this request any more", is_retryable=True)
        elif first > sequence.num_generated and unit in self.scheduler.reserved and not self.handoff.ask_offers(unit):
            # the router has had prefill's first token for long, and the offers that go with it do not come
            self._drop(sequence, "an offer was lost")
            self._fail(unit, "transfer_error", "an offer of the prefill node was lost", is_retryable=True)
        else:
            self.membership.send(self.outbox.again(sequence, first))

    def _drop(self, sequence: Sequence, reason: str) -> None:
        if sequence.unit in self.scheduler.reserved:
            self.handoff.drop(sequence.unit, reason)
        self.scheduler.finish(sequence)

    def _fail(self, unit: Unit, code: str, message: str, *, is_retryable: bool) -> None:
        logger.warning("%s: %s", code, message, extra={"rid": unit.rid})
        self.membership.send(Failed(unit=unit, code=code, message=message[:4096], retryable=is_retryable))

    # --- arrivals ---

    def _arrive(self, event: Arrived | TransferFailed | Revoked) -> Sequence | None:
        """The sequence that runs from now on, if one does."""
        sequence = self.scheduler.reserved.get(event.unit)
        if sequence is None:
            return None
        match event:
            case Arrived(unit=unit, row=row):
                try:
                    self._row_buffer.unpack(row)
                    sampled = self._row_buffer.get_sampled(self.engine.model_config.vocab_size)
                except ProtocolError as error:
                    self.scheduler.finish(sequence)
                    self._fail(unit, error.code, str(error), is_retryable=False)
                else:
                    self._admit(sequence, event, sampled)
                    return sequence
            case TransferFailed(unit=unit, reason=reason, is_refused=is_refused):
                self.scheduler.finish(sequence)
                self._fail(unit, "transfer_error", reason, is_retryable=not is_refused)
            case Revoked():  # the router has it from prefill: the only token, or why there is none
                self.scheduler.finish(sequence)
        return None

    def _admit(self, sequence: Sequence, event: Arrived, sampled: Sampled) -> None:
        begun = time.monotonic()
        assert sequence.lease is not None
        have = len(sequence.lease.pages)
        self.scheduler.admit(event.unit)
        sequence.num_cached = sampled.num_cached
        sequence.append(sampled.first_token, sampled.logprobs)
        drafter = self.engine.drafter
        draft = None if drafter is None else get_draft(self._row_buffer, drafter, sequence.token_ids)
        self._take_slot(sequence, draft)
        self._num_moved_pages += event.num_pages
        self._num_moved_bytes += event.num_bytes
        self._transfer_seconds += event.transfer_s
        logger.info("admitted, %d pages pulled", event.num_pages, extra={"rid": event.unit.rid})
        self.membership.send(
            Admitted(
                unit=event.unit,
                transfer_s=event.transfer_s,
                num_pages=event.num_pages,
                num_bytes=event.num_bytes,
                num_cached_pages=have,
                times=msgspec.structs.replace(event.times, admit_s=time.monotonic() - begun),
            )
        )

    # --- rounds ---

    def _plan(self) -> Plan:
        """The next step, while a round may be under way."""
        plan = self.scheduler.plan()
        if self._under_way is None:
            return plan
        if plan.is_premature or plan.rows or self.rounds.reads_tokens(plan.shape):
            self.settle()
            return self.scheduler.plan(plan.shape)
        return plan

    def _compute(self, plan: Plan) -> None:
        """One step of everybody in the plan: it is submitted, then the round before is read, or this one where rounds
        do not overlap."""
        self._num_steps += 1
        if plan.rows:
            computed = self.engine.compute(plan.rows)
            self.rounds.recompute(plan.sequences, plan.rows, computed.extend)
            for sequence, row in zip(plan.sequences, plan.rows, strict=True):
                sequence.num_computed += len(row.input_ids)
                self._num_recomputed += len(row.input_ids)
        begun: _UnderWay | None = None
        if plan.decoding:
            since, slots = self._clock.submit(), _slots(plan.decoding)
            begun = _UnderWay(plan.decoding, slots, self.rounds.submit(plan.decoding, plan.shape, plan.limits), since)
        self.settle()
        if begun is not None:
            for sequence, limit in zip(plan.decoding, begun.submitted.limits, strict=True):
                sequence.num_coming = 1 + limit
        self._under_way = begun
        if not self._overlaps:
            self.settle()

    def settle(self) -> None:
        """Wait for the round under way, if there is one, and take what it brought."""
        done, self._under_way = self._under_way, None
        if done is None:
            return
        results = self.rounds.collect(done.submitted)
        seconds = self._clock.settle(done.since)
        for sequence in done.sequences:
            sequence.num_coming = 0
        rows = zip(done.sequences, done.slots, results, strict=True)
        lived = [(sequence, slot, each) for sequence, slot, each in rows if each is not None]
        for sequence, _, accepted in lived:
            self._accept(sequence, accepted)
        self._send(done.sequences)
        time_of = self._clock.judge(seconds)
        if self.chooser is not None and lived and not self.chooser.passes_over(done.submitted.shape.num_steps):
            self.chooser.observe(
                [slot for _, slot, _ in lived],
                done.submitted.shape.num_steps,
                [each.num_drafted for _, _, each in lived],
                [each.num_accepted for _, _, each in lived],
                *time_of,
                done.submitted.num_caught_up,
            )

    def _choose(self, sequences: list[Sequence], usable: list[int]) -> DraftShape:
        assert self.chooser is not None
        num_missed = self.rounds.num_missed(sequences)
        return self.rounds.shape.with_steps(self.chooser.choose(_slots(sequences), usable, num_missed))

    def _accept(self, sequence: Sequence, accepted: Accepted) -> None:
        """Append what a round brought, up to the token that ends the sequence."""
        sequence.clock.step(sequence.num_generated)
        sequence.num_rounds += accepted.num_drafted > 0
        sequence.num_drafted += accepted.num_drafted
        sequence.num_accepted += accepted.num_accepted
        for token, entry in zip(accepted.token_ids, accepted.logprobs, strict=True):
            sequence.num_computed += 1
            self._num_generated += 1
            self._append(sequence, token, entry)
            if sequence.ended is not None:
                return
        if len(accepted.token_ids) <= accepted.num_accepted:
            self._fail_numbers(sequence)

    def _fail_numbers(self, sequence: Sequence) -> None:
        self.scheduler.finish(sequence)
        message = NO_NUMBERS.format(position=len(sequence.token_ids))
        self._fail(sequence.unit, "model_error", message, is_retryable=False)

    def _append(self, sequence: Sequence, token: int, logprobs: TokenLogprobs | None) -> None:
        sequence.append(token, logprobs)
        end = ended(sequence.sampling, token, self.engine.context_len, sequence.num_cached)
        if end is not None:
            sequence.ended = msgspec.structs.replace(
                end,
                num_rounds=sequence.num_rounds,
                num_drafted=sequence.num_drafted,
                num_accepted=sequence.num_accepted,
                num_steps=sequence.clock.num_steps,
                preemptions=tuple(sequence.clock.told),
            )
            logger.info("ended: %s", end.reason, extra={"rid": sequence.unit.rid})
            self.scheduler.finish(sequence)

    def _send(self, sequences: list[Sequence]) -> None:
        for tokens in self.outbox.unsent(sequences):
            self.membership.send(tokens)


def _slots(sequences: list[Sequence]) -> list[int]:
    """All of them were admitted."""
    return [sequence.slot for sequence in sequences if sequence.slot is not None]
