"""Tokens that are missing: ZeroMQ loses queued messages when a connection breaks.

A gap shows when later tokens arrive; after a quarter of a second the node is asked for what is missing, and when that
does not help the choice moves to other nodes. The loss of a choice's *last* message shows only as silence,
and so does that of its first where decode's, which repeats it, does not come: prefill is asked for it before long.
Where the first has come and decode does not have the pages, an offer may have been lost: decode is asked, which asks
prefill. Where all tokens are here and the prompt's log-probabilities are not, prefill is asked, and says if it has
forgotten the request.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from ..metadata.wire.messages import Resend, ToNode
from .node import Node
from .request import Attempt, Sequence

logger = logging.getLogger(__name__)

GAP_S = 0.25
MAX_RESENDS = 3
SILENCE_S = 2.0  # a choice without tokens for so long is asked for what may have been lost: the node says what it has


class Gaps:
    """The choices that wait for a missing token."""

    def __init__(
        self,
        epoch: str,
        send: Callable[[Node, ToNode], bool],
        give_up: Callable[[Sequence, Attempt], None],
    ) -> None:
        self._epoch = epoch
        self._send = send
        self._give_up = give_up
        self._choices: set[Sequence] = set()

    def open(self, choice: Sequence, node: Node) -> None:
        """Tokens beyond a gap came from `node`."""
        choice.ahead_from = node
        self._choices.add(choice)

    def close(self, choice: Sequence) -> None:
        """Nothing is missing, or nobody waits for it any more."""
        self._choices.discard(choice)

    def check(self, now: float) -> None:
        """Asks for what has been missing for long; to be called many times a second."""
        for choice in list(self._choices):
            if choice.gap_since is not None and now - choice.gap_since > GAP_S:
                self._ask(choice, now)

    def check_silence(self, choice: Sequence, now: float) -> None:
        """Asks the node that owes a choice its next token when it has been silent for long."""
        attempt, has_ended = choice.attempt, choice.finish_reason is not None
        if attempt is None or (has_ended and (attempt.prefill_done or not choice.request.lacks_prompt)):
            return
        if now - max(choice.seen_at or 0.0, choice.asked_at, attempt.sent_at) > SILENCE_S:
            choice.asked_at = now
            is_first = len(choice.received) == choice.num_before and not attempt.prefill_done
            by_turns = (attempt.prefill, attempt.decode) if is_first or has_ended else (attempt.decode, attempt.prefill)
            node = next((each for each in by_turns if each is not None), None)
            if node is not None:
                self._resend(choice, node)

    def _ask(self, choice: Sequence, now: float) -> None:
        attempt, node = choice.attempt, choice.ahead_from
        if attempt is None or node is None:
            self._choices.discard(choice)
            return
        if choice.num_resends >= MAX_RESENDS:
            self._give_up(choice, attempt)
            return
        choice.num_resends += 1
        choice.gap_since = now
        logger.warning(
            "choice %d: token %d is missing; asking %s again",
            choice.index,
            len(choice.received),
            node.node_id,
            extra={"rid": choice.request.rid},
        )
        self._resend(choice, node)

    def _resend(self, choice: Sequence, node: Node) -> None:
        self._send(node, Resend(router_epoch=self._epoch, unit=choice.unit, first=len(choice.received)))
