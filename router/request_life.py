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

from ..metadata.errors import BatonError, ProtocolError, TransferError, Unavailable
from ..metadata.hub import Hub
from ..metadata.messages import (
    Admitted,
    Beat,
    Cancelled,
    Failed,
    Hello,
    Leaving,
    LedgerReport,
    PrefillDone,
    Reserved,
    Room,
    TokenizerFile,
    Tokens,
    ToNode,
    ToRouter,
)
from .admission import Admission
from .canary import PairHealth
from .cancels import Cancels
from .config import RouterConfig
from .drains import Drains
from .errors import DeadlineExceeded, NodeFault, RequestCancelled, outcome_of
from .gaps import Gaps
from .generation import Attempt, Choice, Generation
from .intake import Bounds
from .metrics import Metrics
from .moves import Moves
from .registry import Group, Node, Registry
from .timeline import Finished, Outcome, Timeline
from .token_flow import TokenFlow
from .waiting import Entry, Pinned

logger = logging.getLogger(__name__)

TICK_S = 0.05


class RequestLife:
    """All requests and the nodes they run on. Everything happens on the event loop."""

    def __init__(self, config: RouterConfig, epoch: str, metrics: Metrics) -> None:
        self.epoch = epoch
        self.metrics = metrics
        self.registry = Registry(epoch, self._send_raw, self._joined, self._lost)
        bounds = Bounds(config.max_waiting, config.max_waiting_tokens, config.max_queue_s)
        self.admission = Admission(epoch, bounds, self, node_wait_s=config.node_wait_s)
        self.health = PairHealth(self, config.canary_interval_s)
        self.generations: dict[str, Generation] = {}
        self.finished = Finished()  # timelines of requests that are over
        self.on_over: Callable[[Timeline], None] | None = None
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
        for generation in list(self.generations.values()):
            self.fail(generation, Unavailable("the router is shutting down"))
        if self._ticker is not None:
            self._ticker.cancel()

    def submit(self, generation: Generation) -> None:
        """Takes a request in; its listener hears of it from now on. Raises Overloaded, Unavailable, RequestError."""
        entry = Entry(generation, tuple(range(len(generation.choices))))
        self.admission.check_fits(entry)
        self.generations[generation.rid] = generation
        generation.timeline.queued(time.monotonic())
        logger.info(
            "received: %d prompt tokens, %d choices, at most %d tokens",
            len(generation.prompt_ids),
            len(generation.choices),
            generation.params.max_tokens,
            extra={"rid": generation.rid},
        )
        self.admission.submit(entry)

    def cancel(self, generation: Generation, reason: str) -> None:
        """Ends a request without telling its listener. Nothing happens when it is over already."""
        if generation.is_over:
            return
        self._end(generation, reason, "cancelled", reason)
        self.metrics.count_request(generation.group.key.model, "cancelled")
        logger.info("cancelled: %s", reason, extra={"rid": generation.rid})

    def find(self, rid: str) -> list[Generation]:
        """What runs or waits under the id of a response: one generation, or one for each of its prompts."""
        return [
            generation
            for generation in self.generations.values()
            if not generation.is_canary and rid in (generation.rid, generation.timeline.response_id)
        ]

    def abort(self, generation: Generation, reason: str) -> None:
        """Cancels a request on behalf of somebody else than who waits for it: its listener gets one clear error."""
        if generation.is_over:
            return
        self.cancel(generation, reason)
        generation.listener.on_error(generation, RequestCancelled(f"the request was cancelled: {reason}"))

    def set_paused(self, generation: Generation, is_paused: bool) -> None:
        """Takes a request off its nodes, where it holds nothing from then on, or lets it go on from where it stands."""
        if not generation.is_over and generation.is_paused != is_paused:
            generation.is_paused = is_paused
            if is_paused:
                self._moves.pause(generation, "its client does not read")
            else:
                self._moves.resume(generation)

    def drain(self, node_id: str, timeout_s: float | None = None) -> Node:
        """The node takes nothing new; what it has not finished after `timeout_s` (None: the router's drain_timeout_s)
        goes on elsewhere. Raises NotFound."""
        return self._drains.begin(node_id, self._drain_timeout_s if timeout_s is None else timeout_s)

    def undrain(self, node_id: str) -> Node:
        """Takes `drain` back. Raises NotFound, and HttpRefusal when the node leaves by its own word."""
        node = self._drains.undo(node_id)
        self._joined(node)
        return node

    def submit_canary(self, generation: Generation, pair: Pinned) -> bool:
        """Sends a request through one pair, or to one node alone, outside the queue. False when there is no room."""
        self.generations[generation.rid] = generation
        if self.admission.ask_now(Entry(generation, (0,), pair)):
            return True
        del self.generations[generation.rid]
        generation.is_over = True
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
            case Beat():
                self.registry.beat(node, message, now)
                self.admission.pump(node.group)
            case Reserved():
                if not self.admission.reserved(node, message, now):
                    self._cancels.send_unwanted(node, message, self.generations.get(message.rid))
            case Room():
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

    def dispatched(self, generation: Generation, attempt: Attempt, now: float) -> None:
        """An attempt has its nodes."""
        generation.timeline.dispatched((generation.choices[index] for index in attempt.choices), attempt, now)
        if attempt.number == 0 and not generation.is_canary:
            self.metrics.dispatched(generation, now)

    def fail(self, generation: Generation, error: BatonError) -> None:
        """Ends a request with one clear error."""
        if generation.is_over:
            return
        error.rid = generation.rid
        self._end(generation, "it failed", "failed", str(error))
        if not generation.is_canary:
            self.metrics.count_request(generation.group.key.model, outcome_of(error))
        logger.warning("failed: %s", error, extra={"rid": generation.rid})
        generation.listener.on_error(generation, error)

    def unreachable(self, generation: Generation, attempt: Attempt, node: Node) -> None:
        """A message of an attempt could not be sent to a node."""
        self._moves.unreachable(generation, attempt, node)

    def unanswered(self, generation: Generation, attempt: Attempt) -> None:
        """The decode node did not answer a reservation."""
        reason = "the decode node did not answer the reservation"
        self._moves.failed(generation, attempt, attempt.choices, reason)

    def is_usable(self, prefill: Node, decode: Node | None) -> bool:
        """Whether this pair may be given requests (its last canary did not fail)."""
        return self.health.may_answer_alone(prefill) if decode is None else self.health.is_usable(prefill, decode)

    def why_unusable(self, group: Group) -> str:
        """Why no pair of a group works, in words."""
        return self.health.failure_in(group)

    def choice_over(self, choice: Choice, *, is_over_at_node: bool) -> None:
        """A choice has ended: by its node, or by a stop string that only the router sees."""
        generation, attempt = choice.generation, choice.attempt
        self._gaps.close(choice)
        if attempt is None:
            return
        if not is_over_at_node:
            for node in attempt.nodes:
                self._cancels.send(node, generation.rid, attempt.number, (choice.index,), "a stop string was found")
        if attempt.decode is not None:
            attempt.decode.units.discard(choice.unit)
        attempt.choices.discard(choice.index)
        if not attempt.choices and attempt.prefill_done:
            generation.attempts.pop(attempt.number, None)
        self.health.made_room(time.monotonic())
        self.admission.pump(generation.group)

    def done(self, generation: Generation) -> None:
        """Every choice has ended as it should."""
        if generation.is_over:
            return
        self._end(generation, "it is complete", "done")
        self.admission.intake.served(generation, time.monotonic())
        if not generation.is_canary:
            self.metrics.done(generation, time.monotonic())
        logger.log(
            logging.DEBUG if generation.is_canary else logging.INFO,
            "done: %d tokens, %.3f s, %s",
            generation.num_generated,
            time.monotonic() - generation.created_at,
            ",".join(str(choice.finish_reason) for choice in generation.choices),
            extra={"rid": generation.rid},
        )
        generation.listener.on_done(generation)

    def _prefill_done(self, node: Node, message: PrefillDone) -> None:
        node.set_load(message.load)
        node.prefilling.pop((message.rid, message.attempt), None)
        self.metrics.prefill(node, message)
        generation = self.generations.get(message.rid)
        timeline = generation.timeline if generation is not None else self.finished.get(message.rid)
        if timeline is not None:
            timeline.prefill_done(node.node_id, message)
        attempt = generation.attempts.get(message.attempt) if generation is not None else None
        if generation is not None and attempt is not None and attempt.prefill is node:
            attempt.prefill_done = True
            if generation.num_cached is None:
                generation.num_cached = message.num_cached
            if generation.wants_prompt_logprobs and generation.prompt_logprobs is None:
                generation.prompt_logprobs = message.prompt_logprobs
            if not attempt.choices:
                generation.attempts.pop(attempt.number, None)
            if generation.is_complete:
                self.done(generation)
        self.admission.pump(node.group)

    def _admitted(self, node: Node, message: Admitted, now: float) -> None:
        self.metrics.transfer(node, message)
        choice = self._flow.find(message.unit, node)
        if choice is not None and choice.attempt is not None and choice.attempt.decode is node:
            choice.attempt.admitted.add(choice.index)
            choice.generation.timeline.admitted(choice, message, now)
            if choice.attempt.prefill is not None:
                self.health.worked(choice.attempt.prefill, node, now)

    def _failed(self, node: Node, message: Failed) -> None:
        choice = self._flow.find(message.unit, node)
        if choice is None or choice.attempt is None:  # over, or elsewhere: also what a client's leaving brought about
            self._moves.forgotten(node, message.unit, message.message)
            return
        generation, attempt = choice.generation, choice.attempt
        where = f"{node.role} node {node.node_id}: {message.message}"
        if not message.retryable:
            self.fail(generation, NodeFault(where, message.code))
            return
        if attempt.prefill is not None and attempt.decode is not None:
            failure = where if message.code == TransferError.code else None
            self.health.doubt(attempt.prefill, attempt.decode, failure)
            self.health.look(time.monotonic())
        self._moves.failed(generation, attempt, {choice.index}, where, at=node)

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

    def _end(self, generation: Generation, reason: str, outcome: Outcome, error: str | None = None) -> None:
        """Frees everything, here and on the nodes."""
        generation.is_over = True
        generation.timeline.over(generation, outcome, error, time.monotonic())
        if self.generations.pop(generation.rid, None) is not None and not generation.is_canary:
            self.finished.add(generation.timeline)
            if self.on_over is not None:
                self.on_over(generation.timeline)
        self._moves.leave_nodes(generation, reason)
        for choice in generation.choices:
            self._gaps.close(choice)
        self.admission.pump(generation.group)

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
        for generation in list(self.generations.values()):
            self._check_times(generation, now)

    def _is_used(self, group: Group) -> bool:
        return any(generation.group is group for generation in self.generations.values())

    def _check_times(self, generation: Generation, now: float) -> None:
        latest = generation.created_at + self._timeout_s
        deadline = latest if generation.deadline is None else min(latest, generation.deadline)
        if now > deadline:
            limit_s = deadline - generation.created_at
            self.admission.intake.served(generation, now)
            self.fail(generation, DeadlineExceeded(f"the request took longer than its limit of {limit_s:g} s"))
            return
        for choice in generation.choices:
            self._gaps.check_silence(choice, now)

    def _tokens_lost(self, choice: Choice, attempt: Attempt) -> None:
        reason = f"tokens of {choice.unit} were lost and not sent again"
        self._moves.failed(choice.generation, attempt, {choice.index}, reason)
