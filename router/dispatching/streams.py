"""Token streams: tokens on their way from nodes to clients, and tokens that are missing.

`take` is the only part of the router that runs once per token.

ZeroMQ loses queued messages when a connection breaks. A gap shows when later tokens arrive. If the gap lasts for GAP_S,
the router asks the node that sent the later tokens for the missing ones. After MAX_RESENDS such requests it moves the
sequence to other nodes. Other losses show only as silence. After SILENCE_S the router asks a node for the part that may
have been lost:

    no token of this attempt yet        the prefill node, for the first token
    tokens, but no end                  the decode node, which also asks prefill again for pages that it lacks
    all tokens, but no PrefillDone      the node that computes the prompt, if the prompt's log-probabilities are wanted:
                                        it sends them, or says that it does not know the request
"""

from __future__ import annotations

import logging
from collections import abc
from typing import NamedTuple

from ...metadata.errors import ProtocolError
from ...metadata.wire.messages import Resend, Tokens
from ...metadata.wire.request import Ended, TokenLogprobs, Unit, unpack_ids
from ..figures.metrics import Metrics
from ..nodes.node import Node
from ..requests.delta import Delta
from ..requests.request import Request, Sequence
from .effects import Effects, Output, Send

logger = logging.getLogger(__name__)

GAP_S = 0.25
MAX_RESENDS = 3
SILENCE_S = 2.0  # a sequence without tokens for so long is asked for


class SequenceEnded(NamedTuple):
    """A sequence has ended. If its node does not know (the router found a stop string), the node must be told."""

    sequence: Sequence
    is_over_at_node: bool


class TokensRefused(NamedTuple):
    """A node sent tokens of a sequence that cannot be right. None of them was taken: the sequence must move."""

    sequence: Sequence
    reason: str


class TokenStreams:
    """Tokens of all requests. `requests` is a view of the requests that are not over."""

    def __init__(self, epoch: str, requests: abc.Mapping[str, Request], metrics: Metrics, effects: Effects) -> None:
        self._epoch = epoch
        self._requests = requests
        self._metrics = metrics
        self._effects = effects
        self._gaps: set[Sequence] = set()  # sequences with a missing token

    def take(self, node: Node, message: Tokens, now: float) -> abc.Iterator[SequenceEnded | TokensRefused]:
        """Hand each sequence the tokens that one step of a node brought. Yield each sequence that ended, or must move.

        The caller ends it before the next one gets its tokens: a fault in one request keeps no other from its end.

        Units that are over, or run elsewhere by now, are passed over. If the message's columns do not fit together,
        all its sequences must move. Then it raises ProtocolError.
        """
        ids, firsts, counts = unpack_ids(message.ids), unpack_ids(message.firsts), unpack_ids(message.counts)
        try:
            _check(node, message, ids, firsts, counts)
        except ProtocolError as error:
            for unit in message.units:  # the node would send the same again
                sequence = self.find(unit, node)
                if sequence is not None:
                    yield _refused(node, sequence, str(error))
            raise
        start = 0
        for row, unit in enumerate(message.units):
            count = counts[row]
            sequence = self.find(unit, node)
            if sequence is not None and firsts[row] + count > sequence.max_tokens:
                last, most = firsts[row] + count, sequence.max_tokens
                yield _refused(node, sequence, f"it sent token number {last}, but the request asked for at most {most}")
            elif sequence is not None:
                if message.num_cached is not None:
                    sequence.request.found_cached(message.num_cached)
                logprobs, end = message.logprobs.get(row, ()), message.ended.get(row)
                if len(sequence.received) == sequence.num_before:
                    sequence.request.timeline.first_local_token(sequence, now)
                    if node.role == "decode":  # it has computed a local prompt
                        node.end_prompt(unit.rid, unit.attempt)
                drafts = b""
                if sequence.marks_drafts:  # prefill nodes give first tokens, which are sampled
                    drafts = bytes(count) if node.role == "prefill" else message.drafts.get(row, b"")[:count]
                new = ids[start : start + count]
                delta = self._merge(node, sequence, firsts[row], new, logprobs, end, now, drafts)
                if delta is not None:
                    self._deliver(sequence, delta, now)
                    if delta.finish_reason is not None:
                        yield SequenceEnded(sequence, end is not None)
            start += count
        if node.role == "prefill":  # it gives first tokens only
            for unit in message.units:
                sequence = self.find(unit, node)
                if sequence is not None:
                    sequence.request.timeline.first_token(sequence, now)

    def find(self, unit: Unit, node: Node) -> Sequence | None:
        """Return the sequence whose present attempt has this unit on this node. None if it is over or has moved."""
        request = self._requests.get(unit.rid)
        if request is None or unit.choice >= len(request.sequences):
            return None
        sequence = request.sequences[unit.choice]
        attempt = sequence.attempt
        if attempt is None or attempt.number != unit.attempt or sequence.finish_reason is not None:
            return None
        return sequence if node is attempt.decode or node is attempt.prefill else None

    def close(self, sequence: Sequence) -> None:
        """Stop asking for missing tokens: none is missing, or nobody waits for them any more."""
        self._gaps.discard(sequence)

    def check_gaps(self, now: float) -> list[Sequence]:
        """Ask for tokens that have been missing for long. Return the sequences whose node does not send them again.

        To be called many times per second.
        """
        given_up: list[Sequence] = []
        for sequence in list(self._gaps):
            attempt, node = sequence.attempt, sequence.ahead_from
            if sequence.gap_since is None or now - sequence.gap_since <= GAP_S:
                continue
            if attempt is None or node is None:
                self._gaps.discard(sequence)
            elif sequence.num_resends >= MAX_RESENDS:
                given_up.append(sequence)
            else:
                sequence.num_resends += 1
                sequence.gap_since = now
                logger.warning(
                    "choice %d: token %d is missing; asking %s again",
                    sequence.index,
                    len(sequence.received),
                    node.node_id,
                    extra=sequence.request.log_fields,
                )
                self._resend(sequence, node)
        return given_up

    def check_silence(self, sequence: Sequence, now: float) -> float:
        """Ask the node that owes a sequence its next token, if that node has been silent for long. Return when to check
        again."""
        attempt, has_ended = sequence.attempt, sequence.finish_reason is not None
        if attempt is None or (has_ended and (attempt.prefill_done or not sequence.request.lacks_prompt)):
            return now + SILENCE_S
        heard_at = max(sequence.seen_at or 0.0, sequence.asked_at, attempt.sent_at)
        if now - heard_at > SILENCE_S:
            sequence.asked_at = heard_at = now
            is_first = len(sequence.received) == sequence.num_before and not attempt.prefill_done
            in_order = (attempt.prefill, attempt.decode) if is_first or has_ended else (attempt.decode, attempt.prefill)
            node = next((each for each in in_order if each is not None), None)
            if node is not None:
                self._resend(sequence, node)
        return heard_at + SILENCE_S

    def _merge(
        self,
        node: Node,
        sequence: Sequence,
        first: int,
        ids: list[int],
        logprobs: abc.Sequence[TokenLogprobs],
        ended: Ended | None,
        now: float,
        drafts: bytes,
    ) -> Delta | None:
        had_gap = sequence.gap_since is not None
        delta = sequence.merge(first, ids, logprobs, ended, now, drafts)
        if sequence.gap_since is None:
            self._gaps.discard(sequence)
        elif not had_gap:  # only the node that went on beyond the gap knows the missing tokens for sure
            sequence.ahead_from = node
            self._gaps.add(sequence)
        return delta

    def _deliver(self, sequence: Sequence, delta: Delta, now: float) -> None:
        request = sequence.request
        if not request.is_canary:
            num_tokens = len(delta.token_ids)
            request.share.charge(num_tokens)
            self._metrics.tenants.counts[request.tenant.name].num_output += num_tokens
            self._metrics.tokens(request, sequence, num_tokens, now)
        if sequence.seen_at is None:
            self._first_tokens(sequence, now)
        sequence.seen_at = now
        if delta.finish_reason is not None:
            request.timeline.begin((sequence,), "finish", now)
        if request.is_canary:
            request.listener.on_delta(sequence, delta)
        else:
            self._effects.append(Output(sequence, delta))

    def _first_tokens(self, sequence: Sequence, now: float) -> None:
        """The first tokens of a sequence have come."""
        request, attempt = sequence.request, sequence.attempt
        if attempt is not None and attempt.prefill is None and attempt.decode is not None:
            request.learn(attempt, now, now + attempt.decode.load.round_s, now)
        if request.first_token_at is None:
            request.first_token_at = now

    def _resend(self, sequence: Sequence, node: Node) -> None:
        message = Resend(router_epoch=self._epoch, unit=sequence.unit, first=len(sequence.received))
        self._effects.append(Send(node, message))


def _check(node: Node, message: Tokens, ids: list[int], firsts: list[int], counts: list[int]) -> None:
    """Raise ProtocolError if the columns of a Tokens message do not fit together."""
    if min(firsts, default=0) < 0 or min(counts, default=0) < 0 or sum(counts) != len(ids):
        lens = f"first indices {firsts[:4]}, counts {counts[:4]} and {len(ids)} ids"
        raise ProtocolError(f"Tokens: {lens} do not fit together", node=node.node_id)
    if message.logprobs and any(
        row >= len(counts) or len(column) != counts[row] for row, column in message.logprobs.items()
    ):
        rows = {row: len(column) for row, column in message.logprobs.items()}
        raise ProtocolError(
            f"Tokens: log-probabilities by row {rows} do not fit counts {counts[:4]}", node=node.node_id
        )
    if ids and min(ids) < 0:
        raise ProtocolError(f"Tokens with id {min(ids)}; an id is 0 or more", node=node.node_id)
    for end in message.ended.values():
        if end.num_accepted > end.num_drafted:
            words = f"{end.num_accepted} drafts accepted of {end.num_drafted}"
            raise ProtocolError(f"Tokens: {words}; no more can be accepted than were drafted", node=node.node_id)


def _refused(node: Node, sequence: Sequence, words: str) -> TokensRefused:
    logger.warning("%s node %s: %s", node.role, node.node_id, words, extra=sequence.request.log_fields)
    return TokensRefused(sequence, f"{node.role} node {node.node_id}: {words}")
