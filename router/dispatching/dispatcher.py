"""The life of a request, from its submission to exactly one end. Pure logic: no socket, no clock, no event loop.

    submit -> waiting -> Reserve -> Reserved -> Prefill -> first Tokens -> Admitted -> Tokens ... -> end
                 ^       (decode)   (decode)    (prefill)  (prefill)       (decode)    (decode)
                 '------- rescheduled: an attempt failed, a node was lost, or a drain ran out of time

If the decode node computes the prompt itself (prompt_placement.py), it gets Compute instead of Reserve, and all tokens
come from it.

A request ends when every sequence has finished (a node said so, or the router found a stop string), when its client or
an operator cancels it, or with an error. Nodes that may still hold something of it get Cancel until they answer.

Every public method takes the time in monotonic seconds and returns effects (effects.py), which its caller must do in
order. A node's message, a failed send, a tick: each is one event. The parts below decide; none of them knows this file.

    queue, reservations, placement   the waiting requests, the questions to decode nodes, the choice of nodes
    streams                          tokens for clients, and missing tokens
    rescheduling, cancels, drains    requests that move to other nodes, and work that nodes must drop
    registry, health                 the joined nodes, and the pairs of them that work
    cached_texts                     texts that nodes keep for a node that leaves, or forget
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from heapq import heappop, heappush
from typing import NamedTuple

from ...metadata.errors import BatonError, OutOfMemory, ProtocolError, RequestError, TransferError, Unavailable
from ...metadata.wire.membership import (
    CachedPages,
    CanaryTold,
    Cordon,
    Flush,
    HandOn,
    Heartbeat,
    Hello,
    Inspect,
    Leaving,
    LedgerReport,
    Proven,
    TellCanary,
    TellPages,
    TokenizerFile,
)
from ...metadata.wire.messages import (
    Admitted,
    Cancelled,
    CapacityFreed,
    Compute,
    Failed,
    Prefill,
    PrefillDone,
    Reserve,
    Reserved,
    Tokens,
    ToNode,
    ToRouter,
)
from ...metadata.wire.node_info import Service
from ..config import RouterConfig
from ..errors import DeadlineExceeded, NodeFault, RequestCancelled, outcome_of
from ..figures.metrics import Metrics
from ..health.health import Effect as HealthEffect
from ..health.health import PairHealth, PairsReady, StartCanary, TellOutcome, TellProven
from ..nodes.drains import Drains
from ..nodes.node import Node, NodeGroup
from ..nodes.registry import Registry, overdue
from ..placement.placement import Placement
from ..requests.attempt import Attempt
from ..requests.request import Request, Sequence
from ..requests.trace import FinishedTraces, Outcome
from ..waiting.admission import Asked, Bounds, Queues, RefusedRequest
from ..waiting.entry import Entry, PairFull, Pinned
from .cached_texts import CachedTexts
from .cancels import Cancels
from .effects import Done, Effect, Effects, Error, Ledger, Over, Send, SendUnknown
from .rescheduling import Rescheduling
from .reservations import Reservations
from .streams import SequenceEnded, TokenStreams

logger = logging.getLogger(__name__)

SLOW_TICK_S = 0.25  # what need not be looked at on every tick
MIN_LOOK_S = 0.01  # between two looks at a request at least
FEW_NODES = 16  # among so many, one that joins is looked at at once
WINDOW = 16  # entries per group that may have a reservation under way at once


class _Look(NamedTuple):
    """When a request is looked at next; of those at the same time, the one with the lower number first."""

    due_at: float
    number: int
    request: Request


class Dispatcher:
    """All requests that are not over, and the nodes that they run on."""

    def __init__(self, config: RouterConfig, epoch: str, metrics: Metrics) -> None:
        self.epoch = epoch
        self.finished = FinishedTraces()
        self._config = config
        self._metrics = metrics
        self._effects: Effects = []
        self._requests: dict[str, Request] = {}
        self._comings: list[tuple[Node, str | None]] = []  # nodes that joined, or were lost and why
        self._watched: list[_Look] = []  # a heap of requests, and of some that are over
        self._num_looks = 0
        self._to_pump: set[NodeGroup] = set()  # where requests that wait may have room since this event
        self.registry = Registry(
            epoch,
            self._send_unknown,
            self._joined,
            lambda node, reason: self._comings.append((node, reason)),
            config.local_prefill,
        )
        self.health = PairHealth(self.registry.groups, config.canary_interval_s, epoch)
        bounds = Bounds(config.max_waiting, config.max_waiting_tokens, config.max_queue_s, config.node_wait_s)
        self.queues = Queues(bounds)
        self.cancels = Cancels(epoch, self._effects)
        self.reservations = Reservations(epoch)
        self._placement = Placement(
            lambda prefill, decode: self.health.is_usable(prefill, decode),
            lambda group: self.queues.waiting_in(group).shares.are_several,
        )
        self._streams = TokenStreams(epoch, self._requests, metrics, self._effects)
        self._rescheduling = Rescheduling(
            self._requests,
            self.queues,
            self.reservations,
            self._streams,
            self.cancels,
            metrics,
            config.max_attempts,
        )
        self._drains = Drains(self.registry.nodes)
        self._texts = CachedTexts(epoch, self.registry.nodes, self._effects)
        self._slow_tick_at = self._looked_at = -math.inf

    @property
    def requests(self) -> Mapping[str, Request]:
        """Requests that are not over, by rid."""
        return self._requests

    # What clients and operators ask for

    def make_room(self, group: NodeGroup, asked: Asked, now: float) -> list[Effect]:
        """Check the room right before `submit`. If the queues are full, other requests may be refused for it: those of
        a tenant with more of them, or those of its own tenant with lower priority."""
        self.queues.check_room(group, asked, now)
        while (displaced := self.queues.displaced(group, asked, now)) is not None:
            self._fail(displaced.request, displaced.error, now)
        return self._take(now)

    def submit(self, request: Request, now: float) -> list[Effect]:
        """Take a request in. Its listener hears of it from now on. Raises Overloaded, Unavailable or RequestError."""
        entry = Entry(request, tuple(range(len(request.sequences))))
        self.queues.check_fits(entry, now)
        self._requests[request.rid] = request
        self._watch(request, now)
        request.timeline.queued(now)
        logger.info(
            "received: %d prompt tokens, %d choices, at most %d tokens, from %s",
            len(request.prompt_ids),
            len(request.sequences),
            request.params.max_tokens,
            request.sender,
            extra=request.log_fields,
        )
        self.queues.add(entry)
        self._to_pump.add(request.group)
        return self._take(now)

    def cancel(self, request: Request, reason: str, now: float) -> list[Effect]:
        """End a request without telling its listener. Nothing happens if it is over."""
        self._cancel(request, reason, now)
        return self._take(now)

    def abort(self, request: Request, reason: str, now: float) -> list[Effect]:
        """End a request that someone other than its waiting client cancels. Its listener gets one clear error."""
        if self._cancel(request, reason, now):
            self._tell_error(request, RequestCancelled(f"the request was cancelled: {reason}"), now)
        return self._take(now)

    def refuse(self, request: Request, reason: str, now: float) -> list[Effect]:
        """End a request that waits, because there is no room for it."""
        self._fail(request, self.queues.refusal(request, reason, now), now)
        return self._take(now)

    def set_paused(self, request: Request, is_paused: bool, now: float) -> list[Effect]:
        """Take a request off its nodes, so that it holds nothing, or let it go on from where it stands."""
        if not request.is_over and request.is_paused != is_paused:
            request.is_paused = is_paused
            if is_paused:
                self._rescheduling.pause(request, "its client does not read", now)
            else:
                self._rescheduling.resume(request, now)
            self._to_pump.add(request.group)
        return self._take(now)

    def drain(self, node_id: str, timeout_s: float | None, now: float) -> list[Effect]:
        """Give a node no new work. After `timeout_s` (None: the configured drain_timeout_s) its unfinished work moves
        to other nodes. Raises NotFound."""
        self._drains.begin(node_id, now + (self._config.drain_timeout_s if timeout_s is None else timeout_s))
        self._tell_drains()
        return self._take(now)

    def undrain(self, node_id: str, now: float) -> list[Effect]:
        """Undo `drain`. Raises NotFound, and Conflict if the node itself said that it leaves."""
        for node in self._drains.undo(node_id):
            self._take_in(node, now)
        self._tell_drains()
        return self._take(now)

    def ask_ledgers(self, query: int, now: float, *, flush: bool) -> list[Effect]:
        """Ask all nodes for their page ledgers. With `flush` they empty their prefix caches first."""
        for node in self.registry.nodes.values():
            if flush:
                self._placement.figures.forget_cache(node)
            kind = Flush if flush else Inspect
            self._effects.append(Send(node, kind(router_epoch=self.epoch, query=query)))
        return self._take(now)

    def forget_salts(self, prefix: str, now: float) -> list[Effect]:
        """Have the cached pages of all salts that begin so removed: now, and again some time after the last request of
        such a salt, which leaves pages."""
        self._texts.forget(prefix, now)
        return self._take(now)

    def close(self, now: float) -> list[Effect]:
        """End every request with an error."""
        for request in list(self._requests.values()):
            self._fail(request, Unavailable("the router is shutting down"), now)
        return self._take(now)

    # What happens on the bus, and time

    def on_message(self, peer: bytes, message: ToRouter, now: float) -> list[Effect]:
        """Handle a node's message. Raises ProtocolError for a message that no node may send."""
        node = self.registry.nodes.get(peer)
        if isinstance(message, Hello):
            self.registry.hello(peer, message, now)
        elif node is None:
            self.registry.greet_again(peer)
        else:
            self._on_node_message(node, message, now)
        return self._take(now)

    def on_connection_lost(self, peer: bytes, now: float) -> list[Effect]:
        """A node's connection closed: the node is dead, or will say Hello again."""
        self.registry.connection_lost(peer, now)
        return self._take(now)

    def on_send_failed(self, node: Node, message: ToNode, now: float) -> list[Effect]:
        """A message could not be sent: the node is gone or its queue is full. It gets no request before its next
        heartbeat. What the message asked for goes on elsewhere."""
        node.lose_touch()
        match message:
            case Reserve() | Compute():
                self._reserve_failed(message, now)
            case Prefill():
                request = self._requests.get(message.rid)
                attempt = request.attempts.get(message.attempt) if request is not None else None
                if request is not None and attempt is not None and attempt.prefill is node:
                    self._end_all(self._rescheduling.unreachable(request, attempt, node, now), now)
                    self._to_pump.add(request.group)
            case Proven():
                self.health.untold(node)
            case _:
                pass  # it is repeated, or its loss shows
        return self._take(now)

    def tick(self, now: float) -> list[Effect]:
        """Handle all deadlines and timeouts that are due. Call it many times per second."""
        for sequence in self._streams.check_gaps(now):
            self._tokens_failed(sequence, f"tokens of choice {sequence.index} were lost and not sent again", now)
        self._to_pump |= self._placement.take_held()
        if now - self._slow_tick_at >= SLOW_TICK_S:
            self._slow_tick_at = now
            self._slow_tick(now)
        return self._take(now)

    def _joined(self, node: Node) -> None:
        """A node joined. It is cordoned at once if an operator drains its name; the rest follows in `_settle_nodes`."""
        self._drains.joined(node)
        self._comings.append((node, None))

    def _settle_nodes(self, now: float) -> None:
        """Handle the nodes that joined or were lost."""
        while self._comings:
            node, reason = self._comings.pop(0)
            if reason is None:
                self._take_in(node, now)
            else:
                self._lose(node, reason, now)

    def _take(self, now: float) -> list[Effect]:
        """Handle the nodes that joined or were lost, give nodes to requests that wait, and return all effects."""
        if self._comings:
            self._settle_nodes(now)
        while self._to_pump:
            self._pump(self._to_pump.pop(), now)
        effects = self._effects.copy()
        self._effects.clear()
        return effects

    def _on_node_message(self, node: Node, message: ToRouter, now: float) -> None:
        match message:
            case Tokens():
                for event in self._streams.take(node, message, now):
                    if isinstance(event, SequenceEnded):
                        self._sequence_ended(event.sequence, is_over_at_node=event.is_over_at_node, now=now)
                    else:
                        self._tokens_failed(event.sequence, event.reason, now)
            case Heartbeat():
                before = node.beat
                self.registry.beat(node, message, now)
                self._ask_pages(node, now)
                if message.service is not None:
                    self._heard_service(node, None if before is None else before.service, message.service, now)
                self._to_pump.add(node.group)
            case Reserved():
                self._reserved(node, message, now)
            case CapacityFreed():
                node.make_room(message.load, now)
                self._room_made(node.group, now)
            case PrefillDone():
                self._prefill_done(node, message, now)
            case Admitted():
                self._admitted(node, message, now)
            case Failed():
                self._failed(node, message, now)
            case Cancelled():
                self.cancels.acknowledged(node, message)
            case CachedPages():
                node.cache.take(message)
                self._ask_pages(node, now)
            case CanaryTold(outcome=outcome):
                self._carry_out(self.health.heard(node, outcome, now), now)
            case LedgerReport():
                self._effects.append(Ledger(node, message))
            case TokenizerFile():
                self._tokenizer(node, message, now)
            case HandOn():
                self._texts.hand_on(node, message)
            case Leaving():
                if message.done:
                    self._drains.left(node)
                self.registry.leaving(node, message, now)
            case _:
                raise ProtocolError(f"{type(message).__name__} from a node that has joined", node=node.node_id)

    def _ask_pages(self, node: Node, now: float) -> None:
        """Ask a node to tell its cached pages anew if some of its news is missing."""
        if node.knows(TellPages) and node.cache.asks(now):
            self._effects.append(Send(node, TellPages(router_epoch=self.epoch)))

    def _heard_service(self, node: Node, before: Service | None, service: Service, now: float) -> None:
        """A node says what other routers' operators have asked of it."""
        if before is not None and service.num_flushes > before.num_flushes:
            self._placement.figures.forget_cache(node)
        if service.is_cordoned == node.is_cordoned and not self._drains.told:
            return
        if self._drains.heard(node, service, now + self._config.drain_timeout_s):
            self._take_in(node, now)

    def _tell_drains(self) -> None:
        for node, is_cordoned in self._drains.to_tell() if self._drains.told else ():
            self._effects.append(Send(node, Cordon(router_epoch=self.epoch, is_cordoned=is_cordoned)))

    # A request waits, and gets its nodes

    def _pump(self, group: NodeGroup, now: float) -> None:
        """Give nodes to requests that wait, as far as there is room.

        A request that no node had room for blocks all behind it, so that small requests do not starve large ones. As
        long as nobody was refused, up to WINDOW reservations are under way at once.
        """
        if self.registry.groups.get(group.key) is not group:
            return  # it was forgotten
        pace, waiting = self.queues.pace(group), self.queues.waiting_in(group)
        if not waiting:
            pace.unblocked()
            return
        fits = self._placement.fitting(group)
        num_under_way = 0
        for entry in waiting:
            if entry.request.is_over or not entry.choices or self.queues.is_late(entry, now):
                continue
            if entry.attempt is None and entry.pair is None and not fits(entry):
                continue  # it waits for a node that is not there, and is in nobody's way
            if (entry.attempt is None and not self._place(entry, now)) or entry.was_refused:
                pace.blocked(now)
                return
            num_under_way += 1
            if num_under_way == WINDOW:
                return
        pace.unblocked()

    def _place(self, entry: Entry, now: float) -> bool:
        """Ask a decode node, or dispatch at once if none is needed. False if there is no room now."""
        place = self._placement.choose(entry, now)
        if place is None:
            return False
        request = entry.request
        attempt = request.begin_attempt(set(place.choices), place.prefill, place.decode, now)
        attempt.place, attempt.prefill_reason = place.prompt, place.prefill_reason
        if place.decode is None:
            self._dispatch(entry, attempt, now)
            return True
        if place.prefill is None:
            attempt.lender = self._placement.figures.lender(place.decode, entry, now)
        message = self.reservations.begin(entry, attempt, place.decode, now)
        if place.prefill is None:
            attempt.num_uncached = self._placement.figures.begin_prompt(place.decode, entry, attempt.number, now)
        request.timeline.begin(_sequences(request, place.choices), "reserve", now, attempt, place.decode_reason)
        self._effects.append(Send(place.decode, message))
        return True

    def _reserve_failed(self, message: Reserve | Compute, now: float) -> None:
        """The decode node cannot be reached. If it may have got an earlier copy, its answer is still awaited."""
        entry = self.reservations.get(message.rid, message.attempt)
        attempt = entry.attempt if entry is not None else None
        if entry is None or attempt is None or attempt.num_asks > 1:
            return
        request = entry.request
        self.reservations.take_back(request, attempt)
        del request.attempts[attempt.number]
        request.timeline.refused(_sequences(request, attempt.choices))
        if entry.pair is not None:
            self._fail(request, PairFull("its node cannot be reached"), now)
        else:
            self._to_pump.add(request.group)

    def _reserved(self, node: Node, message: Reserved, now: float) -> None:
        """Handle a decode node's answer: dispatch the choices that it granted. The others keep waiting."""
        node.report(message.load, now)
        answer = self.reservations.answered(node, message)
        if answer is None:
            self.cancels.send_unwanted(node, message, self._requests.get(message.rid), now)
            return
        entry, attempt, granted = answer
        request = entry.request
        refused = attempt.choices.difference(granted)
        if refused:
            entry.was_refused = True
            node.refuse(now)
            request.timeline.refused(_sequences(request, refused))
        if granted:
            self.queues.has_served(request.group, now)
            attempt.choices = set(granted)
            self._dispatch(entry, attempt, now)
        else:
            del request.attempts[attempt.number]
            self._refused(entry, node, now)
        self._to_pump.add(request.group)

    def _refused(self, entry: Entry, node: Node, now: float) -> None:
        """Handle a refusal of all choices. A busy node is no failure. An empty node that refused is not asked again; if
        no other node could take the request, the request fails."""
        request = entry.request
        if entry.pair is not None:
            self._fail(request, PairFull(f"decode node {node.node_id} is full"), now)
            return
        if not node.is_empty:
            return
        entry.unfit.add(node.routing_id)
        if not entry.could_go_to(request.group.pairs(), (), request.group.local_nodes()):
            error = RequestError(
                f"the prompt's {len(request.prompt_ids)} tokens and the room to generate do not fit an empty pool: the "
                f"largest decode pool has {request.group.most_pages('decode')} pages of {request.group.page_size} "
                "tokens",
                param="prompt",
            )
            self._fail(request, error, now)

    def _dispatch(self, entry: Entry, attempt: Attempt, now: float) -> None:
        """The attempt has its nodes: its choices wait no more, and its prefill node gets the prompt."""
        request, prefill = entry.request, attempt.prefill
        self.queues.strike(entry, attempt.choices)
        for sequence in _sequences(request, attempt.choices):
            sequence.attempt = attempt
        attempt.dispatched = True
        attempt.sent_at = now
        if prefill is not None:
            attempt.lender = self._placement.figures.lender(prefill, entry, now)
            attempt.num_uncached = self._placement.figures.begin_prompt(prefill, entry, attempt.number, now)
        if request.dispatched_at is None:
            request.dispatched_at = now
            request.charge_prompt(attempt.num_uncached)
        stage = "local prefill" if prefill is None else "prefill"
        reason = "; ".join(filter(None, (attempt.place.clause, attempt.prefill_reason, _loan_words(attempt))))
        request.timeline.begin(_sequences(request, attempt.choices), stage, now, attempt, reason)
        if attempt.number == 0 and not request.is_canary:
            self._metrics.dispatched(request, now)
        if not request.is_canary:
            self._metrics.placed(request, attempt.place)
        self.queues.granted(request, now)
        choices = tuple(sorted(attempt.choices))
        logger.log(
            logging.DEBUG if request.is_canary else logging.INFO,
            "dispatched: attempt %d, choices %s, prefill %s, decode %s, waited %.3f s",
            attempt.number,
            ",".join(map(str, choices)),
            prefill.node_id if prefill is not None else "local",
            attempt.decode.node_id if attempt.decode is not None else "none",
            now - request.created_at,
            extra=request.log_fields,
        )
        if attempt.decode is not None and not request.is_canary:
            self._placement.figures.will_cache(attempt.decode, entry, now)
        if prefill is None:
            return
        message = Prefill(
            router_epoch=self.epoch,
            rid=request.rid,
            attempt=attempt.number,
            choices=choices,
            request=request.wire_request(choices[0]),
            decode=attempt.decode.peer_of(prefill) if attempt.decode is not None else None,
            lender=attempt.lender,
        )
        self._effects.append(Send(prefill, message))

    # Nodes work on it

    def _prefill_done(self, node: Node, message: PrefillDone, now: float) -> None:
        """A prompt is computed, and its log-probabilities are here if they were asked for."""
        node.report(message.load, now)
        request = self._requests.get(message.rid)
        if node.role == "prefill":
            node.end_prompt(message.rid, message.attempt)
            self._metrics.prefill(node, message)
            timeline = request.timeline if request is not None else self.finished.get(message.rid)
            if timeline is not None:
                timeline.prefill_done(node.node_id, message)
        attempt = request.attempts.get(message.attempt) if request is not None else None
        if request is not None and attempt is not None and attempt.prompt_node is node:
            attempt.prefill_done = True
            request.found_cached(message.num_cached)
            request.take_prompt_logprobs(message.prompt_logprobs)
            if not attempt.choices:
                request.attempts.pop(attempt.number, None)
            self._end_if_complete(request, now)
        self._to_pump.add(node.group)

    def _admitted(self, node: Node, message: Admitted, now: float) -> None:
        """The decode node has all pages of a sequence."""
        self._metrics.transfer(node, message)
        sequence = self._streams.find(message.unit, node)
        attempt = sequence.attempt if sequence is not None else None
        if sequence is not None and attempt is not None and attempt.decode is node:
            attempt.admitted.add(sequence.index)
            sequence.request.timeline.admitted(sequence, message, now)
            if attempt.prefill is not None:
                self.health.worked(attempt.prefill, node, now)
                if sequence.seen_at is not None and len(sequence.received) > sequence.num_before:
                    # a sequence waits half a round on average, until the next one begins
                    wait_s = node.load.round_s / 2
                    node.group.handoff_s.observe(max(0.0, now - sequence.seen_at + wait_s))
                    sequence.request.learn(attempt, sequence.seen_at, now + wait_s + node.load.round_s, now)

    def _failed(self, node: Node, message: Failed, now: float) -> None:
        """A node could not go on with a unit."""
        sequence = self._streams.find(message.unit, node)
        attempt = sequence.attempt if sequence is not None else None
        if sequence is None or attempt is None:  # over or elsewhere; a client that left causes this too
            self._end_all(self._rescheduling.forgotten(node, message.unit, message.message, now), now)
            self._to_pump.add(node.group)
            return
        request = sequence.request
        where = f"{node.role} node {node.node_id}: {message.message}"
        if not message.retryable:
            self._fail(request, NodeFault(where, message.code), now)
            return
        if attempt.decode is not None:
            failure = where if attempt.prefill is not None and message.code == TransferError.code else None
            self.health.doubt(attempt.prefill, attempt.decode, failure, now)
            self._look(now)
        if message.code == OutOfMemory.code:
            refused = self._rescheduling.out_of_memory(request, attempt, sequence.index, where, now, at=node)
        else:
            refused = self._rescheduling.failed(request, attempt, {sequence.index}, where, now, at=node)
        self._end_all(refused, now)
        self._to_pump.add(request.group)

    def _tokens_failed(self, sequence: Sequence, reason: str, now: float) -> None:
        """A node does not send missing tokens again, or sent tokens that cannot be right."""
        request, attempt = sequence.request, sequence.attempt
        if attempt is not None:
            self._end_all(self._rescheduling.failed(request, attempt, {sequence.index}, reason, now), now)
            self._to_pump.add(request.group)

    def _sequence_ended(self, sequence: Sequence, *, is_over_at_node: bool, now: float) -> None:
        """A sequence has ended: its node said so, or a stop string was found, which the nodes do not know."""
        request, attempt = sequence.request, sequence.attempt
        self._streams.close(sequence)
        if attempt is not None:
            if not is_over_at_node:
                for node in attempt.nodes:
                    reason = "a stop string was found"
                    self.cancels.send(node, request.rid, attempt.number, (sequence.index,), reason, now)
            if attempt.decode is not None:
                attempt.decode.release(request.rid, attempt.number, (sequence.index,))
                if attempt.prefill is None:
                    self.health.worked(None, attempt.decode, now)
            attempt.choices.discard(sequence.index)
            if not attempt.choices and attempt.prefill_done:
                request.attempts.pop(attempt.number, None)
            self._room_made(request.group, now)
        self._end_if_complete(request, now)

    # It ends

    def _end_if_complete(self, request: Request, now: float) -> None:
        """End a request that has all that it asked for, or whose prompt's log-probabilities will never come."""
        if request.is_complete:
            self._done(request, now)
        elif request.lacks_prompt and not request.is_paused and not self._will_compute_prompt(request):
            where = "no node sent the log-probabilities of the whole prompt"
            self._fail(request, NodeFault(where, Unavailable.code), now)

    def _will_compute_prompt(self, request: Request) -> bool:
        return request.computes_prompt or self.queues.waiting_in(request.group).has(request)

    def _done(self, request: Request, now: float) -> None:
        """Every sequence has ended as it should."""
        if request.is_over:
            return
        self._end(request, "it is complete", "done", None, now)
        self.queues.ended(request, now)
        if not request.is_canary:
            self._metrics.done(request, now)
        logger.log(
            logging.DEBUG if request.is_canary else logging.INFO,
            "done: %d tokens, %.3f s, %s",
            request.num_generated,
            now - request.created_at,
            ",".join(str(sequence.finish_reason) for sequence in request.sequences),
            extra=request.log_fields,
        )
        if request.is_canary:
            self._carry_out(self.health.answered(request, now), now)
        else:
            self._effects.append(Done(request))

    def _cancel(self, request: Request, reason: str, now: float) -> bool:
        if request.is_over:
            return False
        self._end(request, reason, "cancelled", reason, now)
        self._metrics.count_request(request.group.key.model, "cancelled", request.tenant.name)
        logger.info("cancelled: %s", reason, extra=request.log_fields)
        return True

    def _fail(self, request: Request, error: BatonError, now: float) -> None:
        """End a request with one clear error."""
        if request.is_over:
            return
        error.rid = request.rid
        self._end(request, "it failed", "failed", str(error), now)
        logger.warning("failed: %s", error, extra=request.log_fields)
        if not request.is_canary:
            self._metrics.count_request(request.group.key.model, outcome_of(error), request.tenant.name)
        self._tell_error(request, error, now)

    def _tell_error(self, request: Request, error: BatonError, now: float) -> None:
        if not request.is_canary:
            self._effects.append(Error(request, error))
        elif isinstance(error, PairFull):
            self.health.no_room(request, now)
        else:
            self._carry_out(self.health.failed(request, str(error), now), now)

    def _end_all(self, refused: Iterable[RefusedRequest], now: float) -> None:
        for request, error in refused:
            self._fail(request, error, now)

    def _end(self, request: Request, reason: str, outcome: Outcome, error: str | None, now: float) -> None:
        """Free everything that the request holds, here and on the nodes."""
        request.is_over = True
        request.timeline.over(request, outcome, error, now)
        if self._requests.pop(request.rid, None) is not None and not request.is_canary:
            self.finished.add(request.timeline)
            self._effects.append(Over(request.timeline))
        if request.attempts or not request.is_complete:
            self._rescheduling.leave_nodes(request, reason, now)
        self._to_pump.add(request.group)

    # Nodes come and go, and pairs are tested

    def _take_in(self, node: Node, now: float) -> None:
        """A node has joined, or takes requests again. If many do so at once, ticks look at them together."""
        self._drains.joined(node)
        if len(self.registry.nodes) <= FEW_NODES or now - self._looked_at >= SLOW_TICK_S:
            self._look(now)
        self._to_pump.add(node.group)

    def _lose(self, node: Node, reason: str, now: float) -> None:
        """A node is gone: what it held goes on elsewhere."""
        self._placement.figures.forget_cache(node)
        self._texts.lost(node)
        self.health.forget(node)
        self._end_all(self._rescheduling.lost(node, reason, now), now)
        self.cancels.forget(node)
        self._to_pump.add(node.group)

    def _tokenizer(self, node: Node, message: TokenizerFile, now: float) -> None:
        try:
            self.registry.take_tokenizer(node, message)
        except ProtocolError as error:
            logger.error("node %s: %s", node.node_id, error)
            return
        self._look(now)

    def _room_made(self, group: NodeGroup, now: float) -> None:
        """A decode node may have room: canaries that found none go first, then requests that wait."""
        self._carry_out(self.health.capacity_freed(now), now)
        self._to_pump.add(group)

    def _look(self, now: float) -> None:
        """Note which groups compute prompts locally, and start the canaries that are due."""
        self._looked_at = now
        for group in list(self.registry.groups.values()):
            if group.look(now, self._config.node_wait_s, hands_over=self.health.hands_over(group)) and group.nodes:
                logger.info("%s", group.placement_words)
                self._to_pump.add(group)
        self._carry_out(self.health.look(now), now)

    def _carry_out(self, effects: Iterable[HealthEffect], now: float) -> None:
        """Do what the health of pairs asks for."""
        for effect in effects:
            match effect:
                case StartCanary(request, nodes):
                    self._start_canary(request, nodes, now)
                case PairsReady(group):
                    self._to_pump.add(group)
                case TellProven(node, epochs):
                    self._effects.append(Send(node, Proven(router_epoch=self.epoch, epochs=epochs)))
                case TellOutcome(node, outcome):
                    self._effects.append(Send(node, TellCanary(router_epoch=self.epoch, outcome=outcome)))

    def _start_canary(self, request: Request, nodes: Pinned, now: float) -> None:
        """Send a request through one pair, or to one node alone, outside the queue."""
        self._requests[request.rid] = request
        self._watch(request, now)
        self.queues.waiting_in(request.group)  # from now on the ticks look after this group
        if not self._place(Entry(request, (0,), nodes), now):
            del self._requests[request.rid]
            request.is_over = True
            self.health.no_room(request, now)

    # Time

    def _slow_tick(self, now: float) -> None:
        self.registry.check(now)
        self._settle_nodes(now)
        for group in self.registry.trim(self._is_used):
            self.queues.forget(group)
            self.health.forget_group(group)
        self._check_reservations(now)
        for group in self.queues.groups:
            self._end_all(self.queues.late(group, now), now)
            pairs = self._placement.usable_pairs(group)
            decodes = self._placement.usable_alone(group)
            self._end_all(self.queues.stranded(group, pairs, self.health.why_unusable, now, decodes), now)
            self._to_pump.add(group)
        self._look(now)
        self.cancels.repeat(now)
        self._tell_drains()
        if self._texts.forgotten:
            self._texts.repeat(self._requests.values(), now)
        for node in overdue(self.registry.nodes.values(), now):
            self._end_all(self._rescheduling.evict(node, "its time to drain is over", now), now)
            self._to_pump.add(node.group)
        while self._watched and self._watched[0].due_at <= now:
            self._watch_on(heappop(self._watched).request, now)

    def _check_reservations(self, now: float) -> None:
        """Give up reservations that a decode node does not answer. Ask again if an answer may have been lost."""
        reason = "the decode node did not answer the reservation"
        for request, attempt in self.reservations.overdue(now):
            self._end_all(self._rescheduling.failed(request, attempt, attempt.choices, reason, now), now)
        for node, message in self.reservations.repeat(now):
            self._effects.append(Send(node, message))

    def _watch_on(self, request: Request, now: float) -> None:
        """Check deadline and silence of a request, and note when to do it again. So thousands of streams that flow are
        looked at once in SILENCE_S each."""
        deadline = self._check_deadline(request, now)
        if not request.is_over:
            looks_at = [self._streams.check_silence(sequence, now) for sequence in request.sequences]
            latest = now if request.is_canary else deadline  # health changes deadlines of canaries
            self._watch(request, max(now + MIN_LOOK_S, min(latest, *looks_at)))

    def _watch(self, request: Request, due_at: float) -> None:
        self._num_looks += 1
        heappush(self._watched, _Look(due_at, self._num_looks, request))

    def _check_deadline(self, request: Request, now: float) -> float:
        """End a request whose deadline is over. Return the deadline."""
        latest = request.created_at + self._config.request_timeout_s
        deadline = latest if request.deadline is None else min(latest, request.deadline)
        if now > deadline and not request.is_over:
            limit_s = deadline - request.created_at
            self.queues.ended(request, now)
            error = DeadlineExceeded(f"the request took longer than its limit of {limit_s:g} s")
            self._fail(request, error, now)
        return deadline

    def _is_used(self, group: NodeGroup) -> bool:
        return any(request.group is group for request in self._requests.values())

    def _send_unknown(self, peer: bytes, message: ToNode, protocol: int) -> bool:
        self._effects.append(SendUnknown(peer, message, protocol))
        return True


def _loan_words(attempt: Attempt) -> str:
    """Return which node may lend pages of the prompt, "" if none."""
    lender = attempt.lender
    return "" if lender is None else f"{lender.peer.node_id} may lend the first {lender.num_pages:,} pages"


def _sequences(request: Request, choices: Iterable[int]) -> list[Sequence]:
    return [request.sequences[index] for index in choices]
