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
from ..metadata.request import Unit
from .admission import Admission
from .cancels import Cancels
from .errors import NodeFault
from .gaps import Gaps
from .generation import Attempt, Generation
from .registry import Node
from .waiting import Entry

logger = logging.getLogger(__name__)

MoveReason = Literal["lost", "failed", "drained"]  # a node was lost, an attempt failed, or a drain ran out of time
MAX_LOSSES = 16  # nodes in a row that died under a choice, before it is taken for the cause


class Life(Protocol):
    """What moves need of request_life.py."""

    generations: dict[str, Generation]
    admission: Admission

    def fail(self, generation: Generation, error: BatonError) -> None:
        """Ends a generation with an error."""
        ...


class Moves:
    """Ends attempts, and queues their choices anew."""

    def __init__(
        self,
        life: Life,
        cancels: Cancels,
        gaps: Gaps,
        max_attempts: int,
        on_moved: Callable[[Generation, MoveReason], None],
    ) -> None:
        """`on_moved` is told of every request that goes on on other nodes."""
        self._life = life
        self._cancels = cancels
        self._gaps = gaps
        self._max_attempts = max_attempts
        self._on_moved = on_moved

    def failed(
        self, generation: Generation, attempt: Attempt, choices: Iterable[int], reason: str, *, at: Node | None = None
    ) -> None:
        """An attempt failed for these choices: they try again, at most max_attempts times. `at` holds nothing of them
        any more."""
        generation.note_failure(attempt)
        moved = self._stop(generation, attempt, set(choices), at)
        for index in moved:
            choice = generation.choices[index]
            choice.note_end(attempt, is_loss=False)
            if len(choice.failures) >= self._max_attempts or generation.is_canary:
                times = len(choice.failures)
                self._life.fail(generation, _given_up(f"after {times} attempts", reason))
                return
        self._requeue(generation, moved, "failed", reason)

    def lost(self, node: Node, reason: str) -> None:
        """A node is gone. What it held goes on elsewhere; so does what waited for its pages."""
        where = f"{node.role} node {node.node_id}: {reason}"
        for generation in list(self._life.generations.values()):
            generation.forgive(node)
            for attempt in list(generation.attempts.values()):
                if node is attempt.decode or node is attempt.prefill:
                    self._lose(generation, attempt, node, where)

    def forgotten(self, node: Node, unit: Unit, reason: str) -> None:
        """A node does not know a unit that has ended here. If it is the prefill node that still owes the prompt's
        log-probabilities, its last word was lost: they are computed again."""
        generation = self._life.generations.get(unit.rid)
        attempt = generation.attempts.get(unit.attempt) if generation is not None else None
        if generation is not None and attempt is not None and attempt.prefill is node and generation.lacks_prompt:
            node.prefilling.pop((unit.rid, unit.attempt), None)
            self._lose(generation, attempt, node, reason)

    def unreachable(self, generation: Generation, attempt: Attempt, node: Node) -> None:
        """A message to a node could not be sent: it is gone, or its queue is full."""
        reason = f"{node.role} node {node.node_id} cannot be reached"
        self._leave(generation, attempt, set(attempt.choices), reason, node)

    def evict(self, node: Node, reason: str) -> None:
        """A draining node has run out of time: what it holds still goes elsewhere."""
        for generation in list(self._life.generations.values()):
            for attempt in list(generation.attempts.values()):
                if node in attempt.nodes or (node is attempt.prefill and not attempt.dispatched):
                    if generation.is_canary:  # its answer would be another node's
                        self._life.fail(generation, Unavailable(f"{node.role} node {node.node_id}: {reason}"))
                        break
                    moved = self._stop(generation, attempt, set(attempt.choices), None)
                    self._requeue(generation, moved, "drained", f"{node.role} node {node.node_id}: {reason}")

    def leave_nodes(self, generation: Generation, reason: str) -> None:
        """Nothing of a request waits any more, nor is held by nodes."""
        self._life.admission.withdraw(generation)
        for attempt in generation.attempts.values():
            self.release(generation, attempt, attempt.choices)
            if attempt.choices:
                for node in attempt.nodes:
                    self._cancels.send(node, generation.rid, attempt.number, attempt.choices, reason)
        generation.attempts.clear()

    def pause(self, generation: Generation, reason: str) -> None:
        """Takes a request off its nodes, until `resume`."""
        logger.info("paused: %s", reason, extra={"rid": generation.rid})
        self.leave_nodes(generation, reason)
        for choice in generation.choices:
            if choice.finish_reason is None:
                generation.timeline.paused(choice, reason, time.monotonic())
                self._gaps.close(choice)
                choice.restart()
        self._life.admission.pump(generation.group)

    def resume(self, generation: Generation) -> None:
        """What was paused goes on, from where it stands."""
        logger.info("goes on", extra={"rid": generation.rid})
        for choice in reversed(generation.choices):
            if choice.finish_reason is None:
                generation.timeline.resumed(choice, time.monotonic())
                self._life.admission.submit(Entry(generation, (choice.index,)), first=True)

    def _lose(self, generation: Generation, attempt: Attempt, node: Node, where: str) -> None:
        choices = set(attempt.choices)
        if node is attempt.prefill and attempt.dispatched:
            if attempt.prefill_done:
                return
            attempt.prefill_done = True  # nobody else will say so
            if not (generation.wants_prompt_logprobs and generation.prompt_logprobs is None):
                choices -= attempt.admitted
        if not attempt.choices:
            generation.attempts.pop(attempt.number, None)
            self._compute_prompt_again(generation)
        elif choices:
            self._leave(generation, attempt, choices, where, node)

    def _leave(self, generation: Generation, attempt: Attempt, choices: set[int], reason: str, gone: Node) -> None:
        """The attempt has lost a node."""
        moved = self._stop(generation, attempt, choices, gone)
        for index in moved:
            choice = generation.choices[index]
            choice.note_end(attempt, is_loss=True)
            if choice.num_losses > MAX_LOSSES or generation.is_canary:
                self._life.fail(generation, _given_up(f"after {choice.num_losses} nodes were lost under it", reason))
                return
        self._requeue(generation, moved, "lost", reason)

    def _stop(self, generation: Generation, attempt: Attempt, choices: set[int], gone: Node | None) -> set[int]:
        """Ends the attempt for these choices, here and on its nodes but `gone`. Returns those that must go on."""
        if generation.is_over or attempt.number not in generation.attempts:
            return set()
        choices &= attempt.choices
        if not choices:
            return choices
        self._life.admission.take_back(generation, attempt)
        for node in attempt.nodes:
            if node is not gone:
                self._cancels.send(node, generation.rid, attempt.number, choices, "it moves to other nodes")
        self.release(generation, attempt, choices)
        attempt.choices -= choices
        if not attempt.choices:
            generation.attempts.pop(attempt.number, None)
        return choices

    def release(self, generation: Generation, attempt: Attempt, choices: set[int]) -> None:
        """The router counts these choices no more among what the attempt's nodes have."""
        if attempt.decode is not None:
            attempt.decode.units.difference_update(Unit(generation.rid, choice, attempt.number) for choice in choices)
        if choices >= attempt.choices and attempt.prefill is not None:
            attempt.prefill.prefilling.pop((generation.rid, attempt.number), None)

    def _requeue(self, generation: Generation, choices: set[int], kind: MoveReason, reason: str) -> None:
        """One entry a choice, because each goes on from its own tokens; the lowest ends up in front. Choices whose
        reservation had no answer yet are in the queue still."""
        if not choices or generation.is_over:
            return
        logger.info("moves: %s", reason, extra={"rid": generation.rid})
        self._on_moved(generation, kind)
        for index in sorted(choices, reverse=True):
            choice = generation.choices[index]
            generation.timeline.moved(choice, reason, time.monotonic())
            if choice.attempt is None:
                continue
            self._gaps.close(choice)
            choice.restart()
            self._life.admission.submit(Entry(generation, (index,)), first=True)
        self._life.admission.pump(generation.group)

    def _compute_prompt_again(self, generation: Generation) -> None:
        """Every choice has ended, but the log-probabilities of the prompt died with prefill."""
        is_missing = generation.wants_prompt_logprobs and generation.prompt_logprobs is None
        if is_missing and all(choice.finish_reason is not None for choice in generation.choices):
            self._life.admission.submit(Entry(generation, (0,)), first=True)


def _given_up(when: str, reason: str) -> NodeFault:
    return NodeFault(f"given up {when}; the last: {reason}", Unavailable.code, f"given up {when}")
