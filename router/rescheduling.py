"""Requests that go on elsewhere: (prompt, received ids, parameters) are queued anew, in front of all others.

A choice whose attempts *fail* is given up after `max_attempts` of them in a row. Nodes that *die* under it, or leave,
are not its fault: it goes on as long as there are others, up to a bound that only a request reaches which itself kills
nodes. Both counts start anew when an attempt brings more than its first token.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from typing import Literal, Protocol

from ..metadata.errors import BatonError, Unavailable
from ..metadata.wire.request import Unit
from .admission import Admission
from .cancels import Cancels
from .errors import NodeFault
from .gaps import Gaps
from .node import Node
from .queue import Entry
from .request import Attempt, Request

logger = logging.getLogger(__name__)

MoveReason = Literal["lost", "failed", "drained"]  # a node was lost, an attempt failed, or a drain ran out of time
MAX_LOSSES = 16  # nodes in a row that died under a choice, before it is taken for the cause


class Life(Protocol):
    """What moves need of request_life.py."""

    requests: dict[str, Request]
    admission: Admission

    def fail(self, request: Request, error: BatonError) -> None:
        """Ends a request with an error."""
        ...


class Moves:
    """Ends attempts, and queues their choices anew."""

    def __init__(
        self,
        dispatcher: Life,
        cancels: Cancels,
        gaps: Gaps,
        max_attempts: int,
        on_moved: Callable[[Request, MoveReason], None],
    ) -> None:
        """`on_moved` is told of every request that goes on on other nodes."""
        self._dispatcher = dispatcher
        self._cancels = cancels
        self._gaps = gaps
        self._max_attempts = max_attempts
        self._on_moved = on_moved

    def failed(
        self, request: Request, attempt: Attempt, choices: Iterable[int], reason: str, *, at: Node | None = None
    ) -> None:
        """An attempt failed for these choices: they try again, at most max_attempts times. `at` holds nothing of them
        any more."""
        request.note_failure(attempt)
        moved = self._stop(request, attempt, set(choices), at)
        for index in moved:
            choice = request.sequences[index]
            choice.note_end(attempt, is_loss=False)
            if len(choice.failures) >= self._max_attempts or request.is_canary:
                times = len(choice.failures)
                self._dispatcher.fail(request, _given_up(f"after {times} attempts", reason))
                return
        self._requeue(request, moved, "failed", reason)

    def lost(self, node: Node, reason: str) -> None:
        """A node is gone. What it held goes on elsewhere; so does what waited for its pages."""
        where = f"{node.role} node {node.node_id}: {reason}"
        for request in list(self._dispatcher.requests.values()):
            request.forgive(node)
            for attempt in list(request.attempts.values()):
                if node is attempt.decode or node is attempt.prefill:
                    self._lose(request, attempt, node, where)

    def forgotten(self, node: Node, unit: Unit, reason: str) -> None:
        """A node does not know a unit that has ended here. If it is the prefill node that still owes the prompt's
        log-probabilities, its last word was lost: they are computed again."""
        request = self._dispatcher.requests.get(unit.rid)
        attempt = request.attempts.get(unit.attempt) if request is not None else None
        if request is not None and attempt is not None and attempt.prefill is node and request.lacks_prompt:
            node.end_prompt(unit.rid, unit.attempt)
            self._lose(request, attempt, node, reason)

    def unreachable(self, request: Request, attempt: Attempt, node: Node) -> None:
        """A message to a node could not be sent: it is gone, or its queue is full."""
        reason = f"{node.role} node {node.node_id} cannot be reached"
        self._leave(request, attempt, set(attempt.choices), reason, node)

    def evict(self, node: Node, reason: str) -> None:
        """A draining node has run out of time: what it holds still goes elsewhere."""
        for request in list(self._dispatcher.requests.values()):
            for attempt in list(request.attempts.values()):
                if node in attempt.nodes or (node is attempt.prefill and not attempt.dispatched):
                    if request.is_canary:  # its answer would be another node's
                        self._dispatcher.fail(request, Unavailable(f"{node.role} node {node.node_id}: {reason}"))
                        break
                    moved = self._stop(request, attempt, set(attempt.choices), None)
                    self._requeue(request, moved, "drained", f"{node.role} node {node.node_id}: {reason}")

    def leave_nodes(self, request: Request, reason: str) -> None:
        """Nothing of a request waits any more, nor is held by nodes."""
        self._dispatcher.admission.withdraw(request)
        for attempt in request.attempts.values():
            self.release(request, attempt, attempt.choices)
            if attempt.choices:
                for node in attempt.nodes:
                    self._cancels.send(node, request.rid, attempt.number, attempt.choices, reason)
        request.attempts.clear()

    def pause(self, request: Request, reason: str) -> None:
        """Takes a request off its nodes, until `resume`."""
        logger.info("paused: %s", reason, extra={"rid": request.rid})
        self.leave_nodes(request, reason)
        for choice in request.sequences:
            if choice.finish_reason is None:
                request.timeline.paused(choice, reason, time.monotonic())
                self._gaps.close(choice)
                choice.restart()
        self._dispatcher.admission.pump(request.group)

    def resume(self, request: Request) -> None:
        """What was paused goes on, from where it stands."""
        logger.info("goes on", extra={"rid": request.rid})
        for choice in reversed(request.sequences):
            if choice.finish_reason is None:
                request.timeline.resumed(choice, time.monotonic())
                self._dispatcher.admission.submit(Entry(request, (choice.index,)), first=True)

    def _lose(self, request: Request, attempt: Attempt, node: Node, where: str) -> None:
        choices = set(attempt.choices)
        if node is attempt.prefill and attempt.dispatched:
            if attempt.prefill_done:
                return
            attempt.prefill_done = True  # nobody else will say so
            if not (request.wants_prompt_logprobs and request.prompt_logprobs is None):
                choices -= attempt.admitted
        if not attempt.choices:
            request.attempts.pop(attempt.number, None)
            self._compute_prompt_again(request)
        elif choices:
            self._leave(request, attempt, choices, where, node)

    def _leave(self, request: Request, attempt: Attempt, choices: set[int], reason: str, gone: Node) -> None:
        """The attempt has lost a node."""
        moved = self._stop(request, attempt, choices, gone)
        for index in moved:
            choice = request.sequences[index]
            choice.note_end(attempt, is_loss=True)
            if choice.num_losses > MAX_LOSSES or request.is_canary:
                self._dispatcher.fail(request, _given_up(f"after {choice.num_losses} nodes were lost under it", reason))
                return
        self._requeue(request, moved, "lost", reason)

    def _stop(self, request: Request, attempt: Attempt, choices: set[int], gone: Node | None) -> set[int]:
        """Ends the attempt for these choices, here and on its nodes but `gone`. Returns those that must go on."""
        if request.is_over or attempt.number not in request.attempts:
            return set()
        choices &= attempt.choices
        if not choices:
            return choices
        self._dispatcher.admission.take_back(request, attempt)
        for node in attempt.nodes:
            if node is not gone:
                self._cancels.send(node, request.rid, attempt.number, choices, "it moves to other nodes")
        self.release(request, attempt, choices)
        attempt.choices -= choices
        if not attempt.choices:
            request.attempts.pop(attempt.number, None)
        return choices

    def release(self, request: Request, attempt: Attempt, choices: set[int]) -> None:
        """The router counts these choices no more among what the attempt's nodes have."""
        if attempt.decode is not None:
            attempt.decode.release(request.rid, attempt.number, choices)
        if choices >= attempt.choices and attempt.prefill is not None:
            attempt.prefill.end_prompt(request.rid, attempt.number)

    def _requeue(self, request: Request, choices: set[int], kind: MoveReason, reason: str) -> None:
        """One entry a choice, because each goes on from its own tokens; the lowest ends up in front. Choices whose
        reservation had no answer yet are in the queue still."""
        if not choices or request.is_over:
            return
        logger.info("moves: %s", reason, extra={"rid": request.rid})
        self._on_moved(request, kind)
        for index in sorted(choices, reverse=True):
            choice = request.sequences[index]
            request.timeline.moved(choice, reason, time.monotonic())
            if choice.attempt is None:
                continue
            self._gaps.close(choice)
            choice.restart()
            self._dispatcher.admission.submit(Entry(request, (index,)), first=True)
        self._dispatcher.admission.pump(request.group)

    def _compute_prompt_again(self, request: Request) -> None:
        """Every choice has ended, but the log-probabilities of the prompt died with prefill."""
        is_missing = request.wants_prompt_logprobs and request.prompt_logprobs is None
        if is_missing and all(choice.finish_reason is not None for choice in request.sequences):
            self._dispatcher.admission.submit(Entry(request, (0,)), first=True)


def _given_up(when: str, reason: str) -> NodeFault:
    return NodeFault(f"given up {when}; the last: {reason}", Unavailable.code, f"given up {when}")
