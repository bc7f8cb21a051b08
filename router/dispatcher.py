"""The life of a request, from its submission to exactly one end.

    submit -> waiting -> Reserve -> Prefill -> first Tokens (prefill) -> Admitted -> Tokens (decode) ... -> end
                 ^                                                                    |
                 +-------- moved: a node failed, died, or drains (moves.py) ----------+

An end is: every choice has finished (by a node, or here by a stop string), an error (its deadline among them), or that
somebody cancels it. At each of the latter, and when a stop string is found, both legs get Cancel, repeated until they
answer Cancelled.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from ..metadata.bus.hub import Hub
from ..metadata.errors import BatonError, ProtocolError, TransferError, Unavailable
from ..metadata.wire.messages import (
    Admitted,
    Cancelled,
    CapacityFreed,
    Failed,
    Heartbeat,
    Hello,
    Leaving,
    LedgerReport,
    PrefillDone,
    Reserved,
    TokenizerFile,
    Tokens,
    ToNode,
    ToRouter,
)
from .admission import Admission
from .cancels import Cancels
from .config import RouterConfig
from .drains import Drains
from .errors import DeadlineExceeded, NodeFault, RequestCancelled, outcome_of
from .gaps import Gaps
from .health import PairHealth
from .intake import Bounds
from .metrics import Metrics
from .node import Group, Node
from .queue import Entry, Pinned
from .registry import Registry
from .request import Attempt, Request, Sequence
from .rescheduling import Moves
from .streams import TokenFlow
from .trace import FinishedTraces, Outcome, TraceRecorder

logger = logging.getLogger(__name__)

TICK_S = 0.05


class Dispatcher:
    """All requests and the nodes they run on. Everything happens on the event loop."""

    def __init__(self, config: RouterConfig, epoch: str, metrics: Metrics) -> None:
        self.epoch = epoch
        self.metrics = metrics
        self.registry = Registry(epoch, self._send_raw, self._joined, self._lost)
        bounds = Bounds(config.max_waiting, config.max_waiting_tokens, config.max_queue_s)
        self.admission = Admission(epoch, bounds, self, node_wait_s=config.node_wait_s)
        self.health = PairHealth(self, config.canary_interval_s)
        self.requests: dict[str, Request] = {}
        self.finished = FinishedTraces()
        self.on_over: Callable[[TraceRecorder], None] | None = None
        self.on_ledger: Callable[[Node, LedgerReport], None] | None = None
        self._timeout_s = config.request_timeout_s
        self._drain_timeout_s = config.drain_timeout_s
        self._gaps = Gaps(epoch, self.send, self._tokens_lost)
        self._cancels = Cancels(epoch, self.send)
        self._moves = Moves(self, self._cancels, self._gaps, config.max_attempts, metrics.moved)
        self._drains = Drains(self.registry, self._moves)
        self._flow = TokenFlow(self, self._gaps, metrics)
        self._hub: Hub | None = None
        self._ticker: asyncio.TimerHandle | None = None
        self._slow_tick_at = 0.0

    def start(self, hub: Hub) -> None:
        """Serves from now on, in the running event loop."""
        self._hub = hub
        self._tick()

    def close(self) -> None:
        """Ends every request with an error and stops."""
        for request in list(self.requests.values()):
            self.fail(request, Unavailable("the router is shutting down"))
        if self._ticker is not None:
            self._ticker.cancel()

    def submit(self, request: Request) -> None:
        """Takes a request in; its listener hears of it from now on. Raises Overloaded, Unavailable, RequestError."""
        entry = Entry(request, tuple(range(len(request.sequences))))
        self.admission.check_fits(entry)
        self.requests[request.rid] = request
        request.timeline.queued(time.monotonic())
        logger.info(
            "received: %d prompt tokens, %d choices, at most %d tokens",
            len(request.prompt_ids),
            len(request.sequences),
            request.params.max_tokens,
            extra={"rid": request.rid},
        )
        self.admission.submit(entry)

    def cancel(self, request: Request, reason: str) -> None:
        """Ends a request without telling its listener. Nothing happens when it is over already."""
        if request.is_over:
            return
        self._end(request, reason, "cancelled", reason)
        self.metrics.count_request(request.group.key.model, "cancelled")
        logger.info("cancelled: %s", reason, extra={"rid": request.rid})

    def abort(self, request: Request, reason: str) -> None:
        """Cancels a request on behalf of somebody else than who waits for it: its listener gets one clear error."""
        if request.is_over:
            return
        self.cancel(request, reason)
        request.listener.on_error(request, RequestCancelled(f"the request was cancelled: {reason}"))

    def set_paused(self, request: Request, is_paused: bool) -> None:
        """Takes a request off its nodes, where it holds nothing from then on, or lets it go on from where it stands."""
        if not request.is_over and request.is_paused != is_paused:
            request.is_paused = is_paused
            if is_paused:
                self._moves.pause(request, "its client does not read")
            else:
                self._moves.resume(request)

    def drain(self, node_id: str, timeout_s: float | None = None) -> Node:
        """The node takes nothing new; what it has not finished after `timeout_s` (None: the router's drain_timeout_s)
        goes on elsewhere. Raises NotFound."""
        return self._drains.begin(node_id, self._drain_timeout_s if timeout_s is None else timeout_s)

    def undrain(self, node_id: str) -> Node:
        """Takes `drain` back. Raises NotFound, and HttpRefusal when the node leaves by its own word."""
        node = self._drains.undo(node_id)
        self._joined(node)
        return node

    def submit_canary(self, request: Request, pair: Pinned) -> bool:
        """Sends a request through one pair, or to one node alone, outside the queue. False when there is no room."""
        self.requests[request.rid] = request
        if self.admission.ask_now(Entry(request, (0,), pair)):
            return True
        del self.requests[request.rid]
        request.is_over = True
        return False

    def on_message(self, peer: bytes, message: ToRouter) -> None:
        """Every message of every node."""
        now = time.monotonic()
        if isinstance(message, Hello):
            self.registry.hello(peer, message, now)
            return
        node = self.registry.nodes.get(peer)
        if node is None:
            self.registry.greet_again(peer)
            return
        match message:
            case Tokens():
                self._flow.take(node, message, now)
            case Heartbeat():
                self.registry.beat(node, message, now)
                self.admission.pump(node.group)
            case Reserved():
                if not self.admission.reserved(node, message, now):
                    self._cancels.send_unwanted(node, message, self.requests.get(message.rid))
            case CapacityFreed():
                node.full_since = None
                node.set_load(message.load)
                self.health.made_room(now)
                self.admission.pump(node.group)
            case PrefillDone():
                self._prefill_done(node, message)
            case Admitted():
                self._admitted(node, message, now)
            case Failed():
                self._failed(node, message)
            case Cancelled():
                self._cancels.acknowledged(node, message)
            case LedgerReport():
                if self.on_ledger is not None:
                    self.on_ledger(node, message)
            case TokenizerFile():
                self._tokenizer(node, message)
            case Leaving():
                if message.done:
                    self._drains.left(node)
                self.registry.leaving(node, message)

    def on_connection_lost(self, peer: bytes) -> None:
        """A node's connection closed: it is dead, or comes back and introduces itself."""
        self.registry.connection_lost(peer)

    def send(self, node: Node, message: ToNode) -> bool:
        """Sends to a node; False when it is gone or its queue is full: then it gets no request before its next beat."""
        if self._send_raw(node.routing_id, message, node.protocol):
            return True
        node.is_reachable = False
        return False

    def dispatched(self, request: Request, attempt: Attempt, now: float) -> None:
        """An attempt has its nodes."""
        request.timeline.dispatched((request.sequences[index] for index in attempt.choices), attempt, now)
        if attempt.number == 0 and not request.is_canary:
            self.metrics.dispatched(request, now)

    def fail(self, request: Request, error: BatonError) -> None:
        """Ends a request with one clear error."""
        if request.is_over:
            return
        error.rid = request.rid
        self._end(request, "it failed", "failed", str(error))
        if not request.is_canary:
            self.metrics.count_request(request.group.key.model, outcome_of(error))
        logger.warning("failed: %s", error, extra={"rid": request.rid})
        request.listener.on_error(request, error)

    def unreachable(self, request: Request, attempt: Attempt, node: Node) -> None:
        """A message of an attempt could not be sent to a node."""
        self._moves.unreachable(request, attempt, node)

    def unanswered(self, request: Request, attempt: Attempt) -> None:
        """The decode node did not answer a reservation."""
        reason = "the decode node did not answer the reservation"
        self._moves.failed(request, attempt, attempt.choices, reason)

    def is_usable(self, prefill: Node, decode: Node | None) -> bool:
        """Whether this pair may be given requests (its last canary did not fail)."""
        return self.health.may_answer_alone(prefill) if decode is None else self.health.is_usable(prefill, decode)

    def why_unusable(self, group: Group) -> str:
        """Why no pair of a group works, in words."""
        return self.health.failure_in(group)

    def choice_over(self, choice: Sequence, *, is_over_at_node: bool) -> None:
        """A choice has ended: by its node, or by a stop string that only the router sees."""
        request, attempt = choice.request, choice.attempt
        self._gaps.close(choice)
        if attempt is None:
            return
        if not is_over_at_node:
            for node in attempt.nodes:
                self._cancels.send(node, request.rid, attempt.number, (choice.index,), "a stop string was found")
        if attempt.decode is not None:
            attempt.decode.units.discard(choice.unit)
        attempt.choices.discard(choice.index)
        if not attempt.choices and attempt.prefill_done:
            request.attempts.pop(attempt.number, None)
        self.health.made_room(time.monotonic())
        self.admission.pump(request.group)

    def done(self, request: Request) -> None:
        """Every choice has ended as it should."""
        if request.is_over:
            return
        self._end(request, "it is complete", "done")
        self.admission.intake.served(request, time.monotonic())
        if not request.is_canary:
            self.metrics.done(request, time.monotonic())
        logger.log(
            logging.DEBUG if request.is_canary else logging.INFO,
            "done: %d tokens, %.3f s, %s",
            request.num_generated,
            time.monotonic() - request.created_at,
            ",".join(str(choice.finish_reason) for choice in request.sequences),
            extra={"rid": request.rid},
        )
        request.listener.on_done(request)

    def _prefill_done(self, node: Node, message: PrefillDone) -> None:
        node.set_load(message.load)
        node.prefilling.pop((message.rid, message.attempt), None)
        self.metrics.prefill(node, message)
        request = self.requests.get(message.rid)
        timeline = request.timeline if request is not None else self.finished.get(message.rid)
        if timeline is not None:
            timeline.prefill_done(node.node_id, message)
        attempt = request.attempts.get(message.attempt) if request is not None else None
        if request is not None and attempt is not None and attempt.prefill is node:
            attempt.prefill_done = True
            if request.num_cached is None:
                request.num_cached = message.num_cached
            if request.wants_prompt_logprobs and request.prompt_logprobs is None:
                request.prompt_logprobs = message.prompt_logprobs
            if not attempt.choices:
                request.attempts.pop(attempt.number, None)
            if request.is_complete:
                self.done(request)
        self.admission.pump(node.group)

    def _admitted(self, node: Node, message: Admitted, now: float) -> None:
        self.metrics.transfer(node, message)
        choice = self._flow.find(message.unit, node)
        if choice is not None and choice.attempt is not None and choice.attempt.decode is node:
            choice.attempt.admitted.add(choice.index)
            choice.request.timeline.admitted(choice, message, now)
            if choice.attempt.prefill is not None:
                self.health.worked(choice.attempt.prefill, node, now)

    def _failed(self, node: Node, message: Failed) -> None:
        choice = self._flow.find(message.unit, node)
        if choice is None or choice.attempt is None:  # over, or elsewhere: also what a client's leaving brought about
            self._moves.forgotten(node, message.unit, message.message)
            return
        request, attempt = choice.request, choice.attempt
        where = f"{node.role} node {node.node_id}: {message.message}"
        if not message.retryable:
            self.fail(request, NodeFault(where, message.code))
            return
        if attempt.prefill is not None and attempt.decode is not None:
            failure = where if message.code == TransferError.code else None
            self.health.doubt(attempt.prefill, attempt.decode, failure)
            self.health.look(time.monotonic())
        self._moves.failed(request, attempt, {choice.index}, where, at=node)

    def _tokenizer(self, node: Node, message: TokenizerFile) -> None:
        try:
            self.registry.take_tokenizer(node, message)
        except ProtocolError as error:
            logger.error("node %s: %s", node.node_id, error)
            return
        self.health.look(time.monotonic())

    def _joined(self, node: Node) -> None:
        self._drains.joined(node)
        self.health.look(time.monotonic())
        self.admission.pump(node.group)

    def _lost(self, node: Node, reason: str) -> None:
        """Moves everything that a node held."""
        self.admission.affinity.forget(node.routing_id)
        self.health.forget(node)
        self._moves.lost(node, reason)

    def _end(self, request: Request, reason: str, outcome: Outcome, error: str | None = None) -> None:
        """Frees everything, here and on the nodes."""
        request.is_over = True
        request.timeline.over(request, outcome, error, time.monotonic())
        if self.requests.pop(request.rid, None) is not None and not request.is_canary:
            self.finished.add(request.timeline)
            if self.on_over is not None:
                self.on_over(request.timeline)
        self._moves.leave_nodes(request, reason)
        for choice in request.sequences:
            self._gaps.close(choice)
        self.admission.pump(request.group)

    def _send_raw(self, peer: bytes, message: ToNode, protocol: int) -> bool:
        assert self._hub is not None, "the hub has not been started"
        return self._hub.send(peer, message, protocol)

    def _tick(self) -> None:
        now = time.monotonic()
        self._ticker = asyncio.get_running_loop().call_later(TICK_S, self._tick)
        self._gaps.check(now)
        if now - self._slow_tick_at < 5 * TICK_S:
            return
        self._slow_tick_at = now
        self.registry.check(now)
        for group in self.registry.trim(self._is_used):
            self.admission.forget(group)
            self.health.forget_group(group)
        self.admission.check(now)
        self.health.look(now)
        for node in self.registry.nodes.values():
            self._cancels.repeat(node, now)
        self._drains.check(now)
        for request in list(self.requests.values()):
            self._check_times(request, now)

    def _is_used(self, group: Group) -> bool:
        return any(request.group is group for request in self.requests.values())

    def _check_times(self, request: Request, now: float) -> None:
        latest = request.created_at + self._timeout_s
        deadline = latest if request.deadline is None else min(latest, request.deadline)
        if now > deadline:
            limit_s = deadline - request.created_at
            self.admission.intake.served(request, now)
            self.fail(request, DeadlineExceeded(f"the request took longer than its limit of {limit_s:g} s"))
            return
        for choice in request.sequences:
            self._gaps.check_silence(choice, now)

    def _tokens_lost(self, choice: Sequence, attempt: Attempt) -> None:
        reason = f"tokens of {choice.unit} were lost and not sent again"
        self._moves.failed(choice.request, attempt, {choice.index}, reason)
