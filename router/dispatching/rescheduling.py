"""Rescheduling: moves a request to other nodes. They continue it from its prompt, received ids and parameters.

A rescheduled request waits before all others. A sequence is given up after `max_attempts` failed attempts in a row. If
a node dies or leaves, that is not the sequence's fault: the sequence moves to other nodes, up to MAX_LOSSES times in a
row. Only a request that itself kills nodes reaches this limit. Both counts start again from zero when an attempt brings
more than its first token.

If a node runs out of memory for a request, the request goes to another node, or once more to the same one if no other
serves its role. If that node runs out too, the request ends: a third would hardly have more memory.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

from ...metadata.errors import OutOfMemory, Unavailable
from ...metadata.wire.request import Unit
from ..errors import NodeFault
from ..figures.metrics import Metrics, MoveReason
from ..nodes.node import Node
from ..requests.attempt import Attempt
from ..requests.request import Request
from ..waiting.admission import Queues, RefusedRequest
from ..waiting.entry import Entry
from .cancels import Cancels
from .reservations import Reservations
from .streams import TokenStreams

logger = logging.getLogger(__name__)

MAX_LOSSES = 16  # nodes in a row that died under a sequence, before the sequence is taken for the cause


class Rescheduling:
    """Ends attempts and queues their choices again. Methods return the requests that the caller must end.

    `requests` is a view of the requests that are not over.
    """

    def __init__(
        self,
        requests: Mapping[str, Request],
        queues: Queues,
        reservations: Reservations,
        streams: TokenStreams,
        cancels: Cancels,
        metrics: Metrics,
        max_attempts: int,
    ) -> None:
        self._requests = requests
        self._queues = queues
        self._reservations = reservations
        self._streams = streams
        self._cancels = cancels
        self._metrics = metrics
        self._max_attempts = max_attempts

    def failed(
        self,
        request: Request,
        attempt: Attempt,
        choices: Iterable[int],
        reason: str,
        now: float,
        *,
        at: Node | None = None,
    ) -> list[RefusedRequest]:
        """An attempt failed for these choices: they try again. The node `at` holds nothing of them any more."""
        request.note_failure(attempt)
        moved = self._stop(request, attempt, set(choices), at, now)
        for index in moved:
            sequence = request.sequences[index]
            sequence.note_end(attempt, is_loss=False)
            num_failures = len(sequence.failures)
            if num_failures >= self._max_attempts or request.is_canary:
                return [RefusedRequest(request, _given_up(f"after {num_failures} attempts", reason))]
        self._requeue(request, moved, "failed", reason, now)
        return []

    def out_of_memory(
        self, request: Request, attempt: Attempt, choice: int, reason: str, now: float, *, at: Node
    ) -> list[RefusedRequest]:
        """The node `at` ran out of memory for a choice, which tries again unless this was the second time."""
        if request.note_out_of_memory(at, attempt) or request.is_canary:
            return self.failed(request, attempt, (choice,), reason, now, at=at)
        times = "on two nodes" if request.num_out_of_memory > 1 else f"twice on the only {at.role} node"
        return [RefusedRequest(request, _no_memory(times, reason))]

    def lost(self, node: Node, reason: str, now: float) -> list[RefusedRequest]:
        """A node is gone. The sequences that it held, or that waited for its pages, move to other nodes."""
        where = f"{node.role} node {node.node_id}: {reason}"
        refused: list[RefusedRequest] = []
        for request in list(self._requests.values()):
            request.forgive(node)
            for attempt in list(request.attempts.values()):
                if node is attempt.decode or node is attempt.prefill:
                    refused += self._lose(request, attempt, node, where, now)
        return refused

    def forgotten(self, node: Node, unit: Unit, reason: str, now: float) -> list[RefusedRequest]:
        """A node does not know a unit that has ended in the router. If it has computed the prompt, whose
        log-probabilities are missing, its PrefillDone was lost. Another attempt computes them again."""
        request = self._requests.get(unit.rid)
        attempt = request.attempts.get(unit.attempt) if request is not None else None
        if request is None or attempt is None or attempt.prompt_node is not node or not request.lacks_prompt:
            return []
        node.end_prompt(unit.rid, unit.attempt)
        return self._lose(request, attempt, node, reason, now)

    def unreachable(self, request: Request, attempt: Attempt, node: Node, now: float) -> list[RefusedRequest]:
        """A message to a node could not be sent: the node is gone, or its queue is full."""
        reason = f"{node.role} node {node.node_id} cannot be reached"
        return self._leave(request, attempt, set(attempt.choices), reason, node, now)

    def evict(self, node: Node, reason: str, now: float) -> list[RefusedRequest]:
        """The time of a draining node is over: its unfinished work moves to other nodes. A canary ends, because its
        answer would come from another node."""
        where = f"{node.role} node {node.node_id}: {reason}"
        refused: list[RefusedRequest] = []
        for request in list(self._requests.values()):
            for attempt in list(request.attempts.values()):
                if node in attempt.nodes or (node is attempt.prefill and not attempt.dispatched):
                    if request.is_canary:
                        refused.append(RefusedRequest(request, Unavailable(where)))
                        break
                    moved = self._stop(request, attempt, set(attempt.choices), None, now)
                    self._requeue(request, moved, "drained", where, now)
        return refused

    def leave_nodes(self, request: Request, reason: str, now: float) -> None:
        """Take a request out of the queue and off all its nodes."""
        for attempt in request.attempts.values():
            self._reservations.take_back(request, attempt)
        self._queues.withdraw(request)
        for attempt in request.attempts.values():
            _release(request, attempt, attempt.choices)
            if attempt.choices:
                for node in attempt.nodes:
                    self._cancels.send(node, request.rid, attempt.number, attempt.choices, reason, now)
        request.attempts.clear()
        for sequence in request.sequences:
            self._streams.close(sequence)

    def pause(self, request: Request, reason: str, now: float) -> None:
        """Take a request off its nodes until `resume`. It keeps what it has received."""
        logger.info("paused: %s", reason, extra=request.log_fields)
        self.leave_nodes(request, reason, now)
        for sequence in request.sequences:
            if sequence.finish_reason is None:
                request.timeline.begin((sequence,), "paused", now, reason=reason)
            sequence.restart()

    def resume(self, request: Request, now: float) -> None:
        """A paused request goes on from where it stands."""
        logger.info("goes on", extra=request.log_fields)
        for sequence in reversed(request.sequences):
            if sequence.finish_reason is None:
                request.timeline.begin((sequence,), "queue", now)
                self._queues.add(Entry(request, (sequence.index,)), first=True)
        self._queue_prompt(request)

    def _lose(self, request: Request, attempt: Attempt, node: Node, where: str, now: float) -> list[RefusedRequest]:
        choices = set(attempt.choices)
        if node is attempt.prefill and attempt.dispatched:
            if attempt.prefill_done:
                return []
            attempt.prefill_done = True  # the node will not say so any more
            if not request.needs_prompt_logprobs:
                choices -= attempt.admitted
        if not attempt.choices:
            request.attempts.pop(attempt.number, None)
            self._queue_prompt(request)
            return []
        return self._leave(request, attempt, choices, where, node, now)

    def _leave(
        self, request: Request, attempt: Attempt, choices: set[int], reason: str, gone: Node, now: float
    ) -> list[RefusedRequest]:
        """The attempt has lost a node."""
        moved = self._stop(request, attempt, choices, gone, now)
        for index in moved:
            sequence = request.sequences[index]
            sequence.note_end(attempt, is_loss=True)
            if sequence.num_losses > MAX_LOSSES or request.is_canary:
                words = f"after {sequence.num_losses} nodes were lost under it"
                return [RefusedRequest(request, _given_up(words, reason))]
        self._requeue(request, moved, "lost", reason, now)
        return []

    def _stop(self, request: Request, attempt: Attempt, choices: set[int], gone: Node | None, now: float) -> set[int]:
        """End the attempt for these choices, here and on its nodes except `gone`. Return those that must go on."""
        if request.is_over or attempt.number not in request.attempts:
            return set()
        choices &= attempt.choices
        if not choices:
            return choices
        self._reservations.take_back(request, attempt)
        for node in attempt.nodes:
            if node is not gone:
                reason = "it moves to other nodes"
                self._cancels.send(node, request.rid, attempt.number, choices, reason, now)
        _release(request, attempt, choices)
        attempt.choices -= choices
        if not attempt.choices:
            request.attempts.pop(attempt.number, None)
        return choices

    def _requeue(self, request: Request, choices: set[int], kind: MoveReason, reason: str, now: float) -> None:
        """Queue one entry per choice, because each goes on from its own tokens; the lowest ends up in front. Choices
        whose reservation was not answered yet are still in the queue."""
        if not choices or request.is_over:
            return
        logger.info("moves: %s", reason, extra=request.log_fields)
        self._metrics.moved(request, kind)
        for index in sorted(choices, reverse=True):
            sequence = request.sequences[index]
            request.timeline.begin((sequence,), "queue", now, reason=reason)
            if sequence.attempt is None:
                continue
            self._streams.close(sequence)
            sequence.restart()
            self._queues.add(Entry(request, (index,)), first=True)

    def _queue_prompt(self, request: Request) -> None:
        """If every sequence has ended, and no attempt computes the prompt's log-probabilities any more, queue them."""
        is_waiting = self._queues.waiting_in(request.group).has(request)
        if request.lacks_prompt and not request.computes_prompt and not is_waiting:
            self._queues.add(Entry(request, (0,)), first=True)


def _release(request: Request, attempt: Attempt, choices: set[int]) -> None:
    """Take these choices of an attempt out of the books of its nodes."""
    if attempt.decode is not None:
        attempt.decode.release(request.rid, attempt.number, choices)
    if choices >= attempt.choices and attempt.prefill is not None:
        attempt.prefill.end_prompt(request.rid, attempt.number)


def _given_up(when: str, reason: str) -> NodeFault:
    return NodeFault(f"given up {when}; the last: {reason}", Unavailable.code, f"given up {when}")


def _no_memory(times: str, reason: str) -> NodeFault:
    shown = (
        f"the request ran out of memory {times}: shorten its prompt, ask for fewer log-probabilities or choices, or "
        "send it again when fewer requests run; whoever runs the nodes can lower max_running, chunk_tokens or "
        "memory_share"
    )
    return NodeFault(f"out of memory {times}; the last: {reason}", OutOfMemory.code, shown)
