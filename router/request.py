"""What the router keeps of a request: enough to move it to other nodes at any time.

    Generation   one prompt with n choices that share its prefill
    Choice       one output: received ids -> text -> stop strings -> Delta
    Attempt      one dispatch of some choices to a (prefill, decode) pair

A request moves as (prompt, received ids, parameters), so nothing here depends on the nodes that work on it.
"""

from __future__ import annotations

from collections import abc
from typing import NamedTuple, Protocol

from ..metadata.errors import BatonError
from ..metadata.wire.request import (
    Ended,
    FinishReason,
    GenerationRequest,
    SamplingParams,
    TokenLogprobs,
    Unit,
    pack_ids,
)
from .node import Group, Node
from .text.detokenizer import make_detokenizer
from .text.stop_strings import StopStrings
from .trace import Timeline

PairId = tuple[bytes | None, bytes | None]  # routing ids of an attempt's prefill and decode node
MAX_AHEAD = 64  # messages held for one choice while an earlier one is missing


class Delta(NamedTuple):
    """What one step adds to a choice. `logprobs` has one entry a token where they were asked for."""

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


class TextOptions(NamedTuple):
    """How ids become the text that the client sees."""

    stops: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special: bool = True


class Listener(Protocol):
    """Who is told of a request's progress, on the event loop. Exactly one of on_done and on_error ends it."""

    def on_delta(self, choice: Sequence, delta: Delta, /) -> None: ...

    def on_done(self, request: Request, /) -> None: ...

    def on_error(self, request: Request, error: BatonError, /) -> None: ...


class Attempt:
    """One dispatch of some choices to a pair of nodes. `decode` is None where prefill alone gives the last token,
    `prefill` where the decode node computes the prompt itself."""

    __slots__ = (
        "admitted",
        "ask_at",
        "choices",
        "decode",
        "dispatched",
        "number",
        "prefill",
        "prefill_done",
        "sent_at",
    )

    def __init__(self, number: int, choices: set[int], prefill: Node | None, decode: Node | None, now: float) -> None:
        self.number = number
        self.choices = choices  # those of the attempt that still run
        self.prefill = prefill
        self.decode = decode
        self.dispatched = False  # it has its nodes: Prefill was sent, if it takes part
        self.prefill_done = prefill is None
        self.admitted: set[int] = set()  # choices whose pages decode has: prefill may go
        self.sent_at = now
        self.ask_at = now  # when decode is asked again for its answer to Reserve

    @property
    def pair(self) -> PairId:
        """Routing ids of its nodes."""
        return _pair_of(self.prefill, self.decode)

    @property
    def nodes(self) -> list[Node]:
        """The nodes that may hold something of this attempt."""
        legs = [self.prefill] if self.prefill is not None and self.dispatched and not self.prefill_done else []
        return [*legs, self.decode] if self.decode is not None else legs


class Ahead(NamedTuple):
    """Tokens that arrived before earlier ones."""

    first: int
    ids: list[int]
    logprobs: abc.Sequence[TokenLogprobs]
    ended: Ended | None


class Sequence:
    """One output of a request."""

    __slots__ = (
        "_ahead",
        "_detokenizer",
        "_include_stop",
        "_min_tokens",
        "_stops",
        "ahead_from",
        "asked_at",
        "attempt",
        "failures",
        "finish_reason",
        "gap_since",
        "index",
        "num_before",
        "num_losses",
        "num_resends",
        "received",
        "request",
        "seen_at",
    )

    def __init__(self, request: Request, index: int, options: TextOptions) -> None:
        self.request = request
        self.index = index
        self.received: list[int] = []
        self.attempt: Attempt | None = None
        self.finish_reason: FinishReason | None = None
        self.seen_at: float | None = None  # time of the last token
        self.gap_since: float | None = None  # since when a token is missing
        self.ahead_from: Node | None = None  # who sent what lies beyond the gap
        self.num_before = 0  # tokens received before the present attempt
        self.failures: list[PairId] = []  # pairs that failed, none after more than a first token
        self.num_losses = 0  # nodes that died under it, likewise
        self.num_resends = 0
        self.asked_at = 0.0  # when the last message was asked for that may have been lost
        self._ahead: list[Ahead] = []
        self._min_tokens = request.params.min_tokens
        self._include_stop = options.include_stop
        tokenizer = request.group.tokenizer
        assert tokenizer is not None, "a request before its group's tokenizer"
        self._detokenizer = make_detokenizer(tokenizer, request.prompt_ids, skip_special=options.skip_special)
        self._stops = StopStrings(options.stops, include=options.include_stop)

    @property
    def unit(self) -> Unit:
        """Identity of the work now under way."""
        assert self.attempt is not None, f"choice {self.index} of {self.request.rid} is not under way"
        return Unit(self.request.rid, self.index, self.attempt.number)

    @property
    def num_left(self) -> int:
        """Tokens still to generate at most."""
        return self.request.params.max_tokens - len(self.received)

    def merge(
        self, first: int, ids: list[int], logprobs: abc.Sequence[TokenLogprobs], ended: Ended | None, now: float
    ) -> Delta | None:
        """Takes tokens that begin at output index `first`: trims what is known, holds what lies ahead of a gap.

        Returns what the client may see now, None when that is nothing new.
        """
        num_received = len(self.received)
        if first == num_received and ended is None and len(ids) == 1 and not self._ahead:
            return self._accept_one(ids[0], logprobs)
        if first > num_received:
            if len(self._ahead) < MAX_AHEAD:
                self._ahead.append(Ahead(first, ids, logprobs, ended))
            if self.gap_since is None:
                self.gap_since = now
            return None
        delta = self._accept(Ahead(first, ids, logprobs, ended))
        while self._ahead and self.finish_reason is None:
            reachable = [item for item in self._ahead if item.first <= len(self.received)]
            if not reachable:
                break
            self._ahead = [item for item in self._ahead if item.first > len(self.received)]
            for item in sorted(reachable):
                if self.finish_reason is None:
                    delta = _joined(delta, self._accept(item))
        if not self._ahead:
            self.gap_since = self.ahead_from = None
            self.num_resends = 0
        return delta if delta.token_ids or delta.finish_reason else None

    def restart(self) -> None:
        """The attempt is over without an end; the next one goes on from what was received."""
        self.attempt = self.gap_since = self.ahead_from = None
        self.num_before = len(self.received)
        self.num_resends = 0
        self._ahead.clear()

    def note_end(self, attempt: Attempt, *, is_loss: bool) -> None:
        """The attempt failed, or (`is_loss`) lost a node. Counting starts anew where it brought more than the first
        token, which every prefill node gives."""
        if len(self.received) - self.num_before > 1:
            self.failures.clear()
            self.num_losses = 0
        if is_loss:
            self.num_losses += 1
        else:
            self.failures.append(attempt.pair)

    def _accept_one(self, token_id: int, logprobs: abc.Sequence[TokenLogprobs]) -> Delta:
        """What `_accept` does, for the common case of one more token."""
        self.received.append(token_id)
        text = self._detokenizer.step(token_id)
        if text:
            text = self._stops.feed(text, may_stop=len(self.received) >= self._min_tokens)
            if self._stops.found is not None:
                self.finish_reason = "stop"
        return Delta(text, [token_id], list(logprobs), self.finish_reason, self._stops.found)

    def _accept(self, item: Ahead) -> Delta:
        known = len(self.received) - item.first
        fresh = item.ids[known:]
        num_fresh = len(fresh)
        pieces: list[str] = []
        stop_id = item.ended.stop_id if item.ended is not None and not self._include_stop else None
        for place, token_id in enumerate(fresh):
            self.received.append(token_id)
            if stop_id == token_id and place == num_fresh - 1:
                break  # a stop token is counted and not shown
            piece = self._detokenizer.step(token_id)
            if piece:
                pieces.append(self._stops.feed(piece, may_stop=len(self.received) >= self._min_tokens))
                if self._stops.found is not None:
                    num_fresh = place + 1
                    break
        stop_reason: int | str | None = self._stops.found
        if stop_reason is not None:
            self.finish_reason = "stop"
        elif item.ended is not None:
            stop_reason = self._finish(item.ended, pieces)
        shown = list(item.logprobs[known : known + num_fresh]) if item.logprobs else []
        return Delta("".join(pieces), fresh[:num_fresh], shown, self.finish_reason, stop_reason)

    def _finish(self, ended: Ended, pieces: list[str]) -> int | str | None:
        """The output ended on the node: what was held back is settled, and may complete a stop string itself."""
        tail = self._detokenizer.flush()
        if tail:
            pieces.append(self._stops.feed(tail, may_stop=len(self.received) >= self._min_tokens))
        if self._stops.found is not None:
            self.finish_reason = "stop"
            return self._stops.found
        pieces.append(self._stops.flush())
        self.finish_reason = ended.reason
        return ended.stop_id


def _joined(a: Delta, b: Delta) -> Delta:
    return Delta(a.text + b.text, a.token_ids + b.token_ids, a.logprobs + b.logprobs, b.finish_reason, b.stop_reason)


class Request:
    """One prompt with n choices, from its submission to exactly one end."""

    __slots__ = (
        "_next_attempt",
        "attempts",
        "created_at",
        "deadline",
        "dispatched_at",
        "failed_pairs",
        "first_token_at",
        "group",
        "is_canary",
        "is_over",
        "is_paused",
        "listener",
        "num_accepted",
        "num_cached",
        "num_drafted",
        "num_rounds",
        "params",
        "priority",
        "prompt_ids",
        "prompt_logprobs",
        "rid",
        "salt",
        "sequences",
        "timeline",
        "wants_prompt_logprobs",
    )

    def __init__(
        self,
        rid: str,
        group: Group,
        prompt_ids: list[int],
        params: SamplingParams,
        listener: Listener,
        *,
        num_choices: int = 1,
        options: TextOptions = TextOptions(),  # noqa: B008 - immutable
        salt: str = "",
        wants_prompt_logprobs: bool = False,
        now: float,
        timeout_s: float | None = None,
        is_canary: bool = False,
        priority: int = 0,
    ) -> None:
        """`timeout_s`: how long it may take from `now` on; None: as long as the router allows any request. Of those
        that wait, lower numbers of `priority` go first."""
        self.rid = rid
        self.group = group
        self.prompt_ids = prompt_ids
        self.params = params
        self.listener = listener
        self.salt = salt
        self.wants_prompt_logprobs = wants_prompt_logprobs
        self.prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
        self.num_cached: int | None = None  # the first attempt's
        self.num_rounds = self.num_drafted = self.num_accepted = 0  # of choices that nodes ended
        self.attempts: dict[int, Attempt] = {}
        self.failed_pairs: set[PairId] = set()  # routing ids; others are tried first
        self.created_at = now
        self.priority = priority
        self.deadline = None if timeout_s is None else now + timeout_s
        self.dispatched_at: float | None = None  # when it first got nodes
        self.first_token_at: float | None = None
        self.is_over = False
        self.is_paused = False  # its client does not read: no node works on it
        self.is_canary = is_canary
        self._next_attempt = 0
        self.sequences = [Sequence(self, index, options) for index in range(num_choices)]
        self.timeline = Timeline(rid, group.key.model, len(prompt_ids), num_choices, now)

    @property
    def num_generated(self) -> int:
        """Output tokens of all choices, those past a stop string not counted."""
        return sum(len(choice.received) for choice in self.sequences)

    @property
    def is_complete(self) -> bool:
        """Every choice has ended, and the prompt's log-probabilities are here if they were asked for."""
        if self.wants_prompt_logprobs and self.prompt_logprobs is None:
            return False
        return self._has_ended

    @property
    def lacks_prompt(self) -> bool:
        """Only the prompt's log-probabilities are missing."""
        return self.wants_prompt_logprobs and self.prompt_logprobs is None and self._has_ended

    @property
    def _has_ended(self) -> bool:
        return all(choice.finish_reason is not None for choice in self.sequences)

    def note_failure(self, attempt: Attempt) -> None:
        """The next attempts prefer other pairs of nodes."""
        self.failed_pairs.add(attempt.pair)

    def forgive(self, node: Node) -> None:
        """The node is gone: what failed on it (its peers may have noticed first) failed because of that."""
        self.failed_pairs = {pair for pair in self.failed_pairs if node.routing_id not in pair}
        for choice in self.sequences:
            choice.failures = [pair for pair in choice.failures if node.routing_id not in pair]

    def has_failed_on(self, prefill: Node, decode: Node | None) -> bool:
        """Whether an attempt failed on this pair."""
        return _pair_of(prefill, decode) in self.failed_pairs

    def begin_attempt(self, choices: set[int], prefill: Node | None, decode: Node | None, now: float) -> Attempt:
        """A new attempt of these choices, under a number never used before."""
        attempt = Attempt(self._next_attempt, choices, prefill, decode, now)
        self._next_attempt += 1
        self.attempts[attempt.number] = attempt
        return attempt

    def wire_request(self, choice: int) -> GenerationRequest:
        """What nodes must know to compute this choice from where it stands."""
        return GenerationRequest(
            prompt_ids=pack_ids(self.prompt_ids),
            params=self.params,
            received_ids=pack_ids(self.sequences[choice].received),
            cache_salt=self.salt,
            prompt_logprobs=self.wants_prompt_logprobs and self.prompt_logprobs is None,
        )


def _pair_of(prefill: Node | None, decode: Node | None) -> PairId:
    return prefill and prefill.routing_id, decode and decode.routing_id
