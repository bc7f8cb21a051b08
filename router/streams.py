"""Tokens on their way from nodes to listeners: the only part of the router that runs once a token."""

from __future__ import annotations

from collections import abc
from typing import Protocol

from ..metadata.errors import ProtocolError
from ..metadata.wire.messages import Tokens
from ..metadata.wire.request import Ended, TokenLogprobs, Unit, unpack_ids
from .gaps import Gaps
from .metrics import Metrics
from .node import Node
from .request import Delta, Request, Sequence


class Life(Protocol):
    """What the flow needs of request_life.py."""

    requests: dict[str, Request]

    def choice_over(self, choice: Sequence, *, is_over_at_node: bool) -> None:
        """A choice has ended: by its node, or by a stop string that only the router sees."""
        ...

    def done(self, request: Request) -> None:
        """Every choice has ended as it should."""
        ...


class TokenFlow:
    """Takes `Tokens` messages apart and hands each choice what is its own."""

    def __init__(self, dispatcher: Life, gaps: Gaps, metrics: Metrics) -> None:
        self._dispatcher = dispatcher
        self._gaps = gaps
        self._metrics = metrics

    def take(self, node: Node, message: Tokens, now: float) -> None:
        """A message of one step. Units that are over, or run elsewhere by now, are passed over. Raises ProtocolError
        or ValueError when its columns do not fit together."""
        ids = unpack_ids(message.ids)
        if ids and min(ids) < 0:
            raise ProtocolError(f"Tokens with id {min(ids)}", node=node.node_id)
        place = 0
        columns = zip(message.units, unpack_ids(message.firsts), unpack_ids(message.counts), strict=True)
        for row, (unit, first, count) in enumerate(columns):
            if count < 0 or first < 0 or place + count > len(ids):
                raise ProtocolError(f"Tokens of {unit}: columns do not fit together", node=node.node_id)
            choice = self.find(unit, node)
            if choice is not None:
                if message.num_cached is not None and choice.request.num_cached is None:
                    choice.request.num_cached = message.num_cached
                logprobs, ended = message.logprobs.get(row, ()), message.ended.get(row)
                delta = self._merge(node, choice, first, ids[place : place + count], logprobs, ended, now)
                if delta is not None:
                    self._deliver(choice, delta, is_over_at_node=ended is not None, now=now)
            place += count
        if node.role == "prefill":  # which gives first tokens, and no others
            for choice in filter(None, (self.find(unit, node) for unit in message.units)):
                choice.request.timeline.first_token(choice, now)

    def find(self, unit: Unit, node: Node) -> Sequence | None:
        """The choice that a unit is the present attempt of, on this node; None for what is over, moved or not its."""
        request = self._dispatcher.requests.get(unit.rid)
        if request is None or unit.choice >= len(request.sequences):
            return None
        choice = request.sequences[unit.choice]
        attempt = choice.attempt
        if attempt is None or attempt.number != unit.attempt or choice.finish_reason is not None:
            return None
        return choice if node in (attempt.prefill, attempt.decode) else None

    def _merge(
        self,
        node: Node,
        choice: Sequence,
        first: int,
        ids: list[int],
        logprobs: abc.Sequence[TokenLogprobs],
        ended: Ended | None,
        now: float,
    ) -> Delta | None:
        had_gap = choice.gap_since is not None
        delta = choice.merge(first, ids, logprobs, ended, now)
        if ended is not None and choice.request.num_cached is None:
            choice.request.num_cached = ended.num_cached
        if ended is not None:
            choice.request.num_rounds += ended.num_rounds
            choice.request.num_drafted += ended.num_drafted
            choice.request.num_accepted += ended.num_accepted
            choice.request.timeline.ended(choice, ended)
        if choice.gap_since is None:
            self._gaps.close(choice)
        elif not had_gap:  # whoever fills it in part, or says again what is known, is not who went on without it
            self._gaps.open(choice, node)
        return delta

    def _deliver(self, choice: Sequence, delta: Delta, *, is_over_at_node: bool, now: float) -> None:
        request = choice.request
        if not request.is_canary:
            self._metrics.tokens(request, choice, len(delta.token_ids), now)
        choice.seen_at = now
        if request.first_token_at is None:
            request.first_token_at = now
        if delta.finish_reason is not None:
            request.timeline.finishing(choice, now)
            self._dispatcher.choice_over(choice, is_over_at_node=is_over_at_node)
        request.listener.on_delta(choice, delta)
        if delta.finish_reason is not None and request.is_complete:
            self._dispatcher.done(request)
