"""State of a request in the router. It is enough to continue the request on other nodes at any time.

    Request    one prompt with n sequences, which share its prefill
    Sequence   one output: received ids -> text -> stop strings -> Delta
    Attempt    one run of some sequences on a (prefill, decode) pair (attempt.py)
    Need       the pages, the context and the protocol that its nodes must have (need.py)

Other nodes continue a request from its prompt, its received ids and its parameters. So nothing here depends on a node.
Messages name a sequence by its index, `choice`.
"""

from __future__ import annotations

from collections import abc
from itertools import zip_longest
from typing import NamedTuple, Protocol

from ...metadata.errors import BatonError, RequestError
from ...metadata.wire.request import (
    Ended,
    FinishReason,
    GenerationRequest,
    SamplingParams,
    TokenLogprobs,
    Unit,
    as_column,
    pack_ids,
)
from ..nodes.node import Node, NodeGroup
from ..tenants.fair_share import DEFAULT, UNSHARED, Share, Tenant
from ..text.detokenizer import CONTEXT, TokenBytes, make_detokenizer, skipped_ids
from ..text.stop_strings import StopStrings
from ..text.tokenizer import TextTokenizer
from .attempt import Attempt, PairId, pair_of
from .delta import Delta, TextOptions, TokenText
from .trace import TraceRecorder

MAX_AHEAD = 64  # messages kept per sequence while an earlier one is missing


class Listener(Protocol):
    """Receives the output of a request, on the event loop. Exactly one call of on_done or on_error ends it."""

    def on_delta(self, sequence: Sequence, delta: Delta, /) -> None: ...

    def on_done(self, request: Request, /) -> None: ...

    def on_error(self, request: Request, error: BatonError, /) -> None: ...


class Nobody:
    """The listener of a request whose client has its answer, or has left."""

    def on_delta(self, sequence: Sequence, delta: Delta, /) -> None: ...

    def on_done(self, request: Request, /) -> None: ...

    def on_error(self, request: Request, error: BatonError, /) -> None: ...


class Ahead(NamedTuple):
    """Tokens that arrived before earlier ones."""

    first: int
    ids: list[int]
    logprobs: abc.Sequence[TokenLogprobs]
    ended: Ended | None
    drafts: bytes = b""  # as in Tokens


class Sequence:
    """One output of a request."""

    __slots__ = (
        "_ahead",
        "_detokenizer",
        "_include_stop",
        "_min_tokens",
        "_stop_string",
        "_stops",
        "ahead_from",
        "asked_at",
        "attempt",
        "failures",
        "finish_reason",
        "gap_since",
        "index",
        "marks_drafts",
        "max_tokens",
        "num_before",
        "num_losses",
        "num_resends",
        "options",
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
        self._ahead: list[Ahead] = []  # empty unless `gap_since` is set
        self.marks_drafts = request.marks_drafts
        self.max_tokens = request.params.max_tokens
        self._min_tokens = request.params.min_tokens
        self._include_stop = options.include_stop
        self.options = options
        tokenizer = request.group.tokenizer
        assert tokenizer is not None, "a request before its group's tokenizer"
        self._detokenizer = make_detokenizer(
            tokenizer, request.prompt_ids, skip_special=options.skip_special, markers=options.markers
        )
        self._stops = StopStrings(options.stops, include=options.include_stop) if options.stops else None
        self._stop_string: str | None = None  # the one that was found

    @property
    def unit(self) -> Unit:
        """Name of the work that is now under way."""
        assert self.attempt is not None, f"choice {self.index} of {self.request.rid} is not under way"
        return Unit(self.request.rid, self.index, self.attempt.number)

    def new_token_bytes(self, tokenizer: TextTokenizer) -> TokenBytes:
        """Return the bytes that the tokens of this output, from its first on, add to its text."""
        skipped = skipped_ids(tokenizer, skip_special=self.options.skip_special, markers=self.options.markers)
        return TokenBytes(tokenizer, self.request.prompt_ids, skipped)

    def hidden_places(self, delta: Delta) -> abc.Collection[int]:
        """Return the places of the tokens in new output that end it and are not in its text, although others of their
        kind are."""
        is_hidden = isinstance(delta.stop_reason, int) and not self._include_stop
        return (len(delta.token_ids) - 1,) if is_hidden else ()

    def last_text(self, num_tokens: int) -> str:
        """Return the text of the last received tokens, at most so many. It is decoded anew, because nobody keeps it."""
        tokenizer = self.request.group.tokenizer
        assert tokenizer is not None, "a request before its group's tokenizer"
        before = [*self.request.prompt_ids[-CONTEXT:], *self.received[:-num_tokens]][-CONTEXT:]
        detokenizer = make_detokenizer(
            tokenizer, before, skip_special=self.options.skip_special, markers=self.options.markers
        )
        return "".join(map(detokenizer.step, self.received[-num_tokens:]))

    @property
    def num_left(self) -> int:
        """Largest number of tokens still to generate."""
        return self.max_tokens - len(self.received)

    def merge(
        self,
        first: int,
        ids: list[int],
        logprobs: abc.Sequence[TokenLogprobs],
        ended: Ended | None,
        now: float,
        drafts: bytes = b"",
    ) -> Delta | None:
        """Take tokens that begin at output index `first`. Known tokens are dropped; tokens beyond a gap are kept back.

        Returns the output that the client may see now, None if there is nothing new.
        """
        num_received = len(self.received)
        if (
            first == num_received
            and ended is None
            and len(ids) == 1
            and self.gap_since is None
            and not self.marks_drafts
        ):
            return self._accept_one(ids[0], logprobs)
        if first > num_received:
            if len(self._ahead) < MAX_AHEAD:
                self._ahead.append(Ahead(first, ids, logprobs, ended, drafts))
            if self.gap_since is None:
                self.gap_since = now
            return None
        delta = self._accept(Ahead(first, ids, logprobs, ended, drafts))
        while self._ahead and self.finish_reason is None:
            reachable = [item for item in self._ahead if item.first <= len(self.received)]
            if not reachable:
                break
            self._ahead = [item for item in self._ahead if item.first > len(self.received)]
            for item in sorted(reachable, key=lambda each: each.first):  # nothing else of them has an order
                if self.finish_reason is None:
                    delta = _joined(delta, self._accept(item))
        if not self._ahead:
            self.gap_since = self.ahead_from = None
            self.num_resends = 0
        return delta if delta.token_ids or delta.finish_reason else None

    def continue_after(self, token_ids: abc.Iterable[int]) -> None:
        """Begin with output that the client has already: neither its tokens nor its text are given again. Raises
        RequestError if a stop string ends it."""
        for token_id in token_ids:
            self._accept_one(token_id, ())
            if self.finish_reason is not None:
                raise RequestError(
                    f"received_token_ids: the stop string {self._stop_string!r} ends them; nothing is left to generate",
                    param="received_token_ids",
                )
        self.restart()

    def restart(self) -> None:
        """The attempt is over, but the output is not: the next attempt continues after the received tokens."""
        self.attempt = self.gap_since = self.ahead_from = None
        self.num_before = len(self.received)
        self.num_resends = 0
        self._ahead.clear()

    def note_end(self, attempt: Attempt, *, is_loss: bool) -> None:
        """The attempt failed, or (`is_loss`) lost a node. Counting starts anew if it brought more than the first token,
        which every prefill node gives."""
        if len(self.received) - self.num_before > 1:
            self.failures.clear()
            self.num_losses = 0
        if is_loss:
            self.num_losses += 1
        else:
            self.failures.append(attempt.pair)

    def _accept_one(self, token_id: int, logprobs: abc.Sequence[TokenLogprobs]) -> Delta:
        """Do what `_accept` does, for the common case of one more token."""
        self.received.append(token_id)
        text = self._detokenizer.step(token_id)
        if text and self._stops is not None:
            text = self._until_stop(text, self._stops)
        return Delta(text, [token_id], list(logprobs), self.finish_reason, self._stop_string)

    def _until_stop(self, text: str, stops: StopStrings) -> str:
        """Return what the client may see of new text. A stop string in it ends the output."""
        text = stops.feed(text, may_stop=len(self.received) >= self._min_tokens)
        if stops.found is not None:
            self._stop_string, self.finish_reason = stops.found, "stop"
        return text

    def _accept(self, item: Ahead) -> Delta:
        known = len(self.received) - item.first
        fresh = item.ids[known:]
        num_fresh = len(fresh)
        chunks: list[str] = []
        stop_id = item.ended.stop_id if item.ended is not None and not self._include_stop else None
        for offset, token_id in enumerate(fresh):
            self.received.append(token_id)
            if stop_id == token_id and offset == num_fresh - 1:
                break  # a stop token counts, but is not shown
            text = self._detokenizer.step(token_id)
            chunks.append(self._until_stop(text, self._stops) if text and self._stops is not None else text)
            if self._stop_string is not None:
                num_fresh = offset + 1
                break
        stop_reason: int | str | None = self._stop_string
        if stop_reason is None and item.ended is not None:
            stop_reason = self._finish(item.ended, chunks)
        if item.ended is not None:  # here and not on arrival: beyond a gap a message may come twice, or be dropped
            self.request.count(item.ended)
            self.request.timeline.ended(self, item.ended)
        shown = list(item.logprobs[known : known + num_fresh]) if item.logprobs else []
        drafts = _token_texts(chunks, num_fresh, item.drafts[known:]) if self.marks_drafts else ()
        return Delta("".join(chunks), fresh[:num_fresh], shown, self.finish_reason, stop_reason, drafts)

    def _finish(self, ended: Ended, chunks: list[str]) -> int | str | None:
        """The node ended the output: text that was held back is released, and may complete a stop string."""
        tail = self._detokenizer.flush()
        chunks.append(self._until_stop(tail, self._stops) if tail and self._stops is not None else tail)
        if self._stop_string is not None:
            return self._stop_string
        if self._stops is not None:
            chunks.append(self._stops.flush())
        self.finish_reason = ended.reason
        return ended.stop_id


def _joined(a: Delta, b: Delta) -> Delta:
    columns = a.text + b.text, a.token_ids + b.token_ids, a.logprobs + b.logprobs
    return Delta(*columns, b.finish_reason, b.stop_reason, [*a.drafts, *b.drafts])


def _token_texts(chunks: list[str], num_tokens: int, drafts: bytes) -> list[TokenText]:
    """Return the text of each token. `chunks`: those of the first tokens, and text that was held back until the end.
    `drafts`: a byte for each token, or nothing if the node does not say."""
    texts = chunks[:num_tokens] + [""] * (num_tokens - len(chunks))
    if texts:
        texts[-1] += "".join(chunks[num_tokens:])
    return [TokenText(text, bool(drafts[place]) if place < len(drafts) else None) for place, text in enumerate(texts)]


class Request:
    """One prompt with n sequences, from its submission to exactly one end."""

    __slots__ = (
        "_next_attempt",
        "_out_of_memory",
        "accept_counts",
        "attempts",
        "cache_salt",
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
        "marks_drafts",
        "num_accepted",
        "num_cached",
        "num_charged",
        "num_drafted",
        "num_rounds",
        "params",
        "priority",
        "prompt_ids",
        "prompt_logprobs",
        "rid",
        "sender",
        "sequences",
        "session",
        "share",
        "tenant",
        "timeline",
        "wants_prompt_logprobs",
    )

    def __init__(
        self,
        rid: str,
        group: NodeGroup,
        prompt_ids: abc.Iterable[int],
        params: SamplingParams,
        listener: Listener,
        *,
        num_choices: int = 1,
        options: TextOptions = TextOptions(),  # noqa: B008 - immutable
        cache_salt: str = "",
        wants_prompt_logprobs: bool = False,
        marks_drafts: bool = False,
        now: float,
        timeout_s: float | None = None,
        is_canary: bool = False,
        priority: int = 0,
        tenant: Tenant = DEFAULT,
        sender: str = DEFAULT.name,
        session: bytes | None = None,
    ) -> None:
        """`timeout_s`: the longest time that it may take from `now` on; None: the router's limit. Of a tenant's
        requests that wait, lower numbers of `priority` go first. Requests of one `session` prefer the same nodes. Logs
        name the `sender`."""
        self.rid = rid
        self.group = group
        self.prompt_ids = as_column(prompt_ids)  # a million of them may wait here
        self.params = params
        self.listener: Listener = listener
        self.cache_salt = cache_salt
        self.wants_prompt_logprobs = wants_prompt_logprobs
        self.marks_drafts = marks_drafts  # the client reads which tokens are accepted drafts
        self.prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
        self.num_cached: int | None = None  # the first attempt's
        self.num_rounds = self.num_drafted = self.num_accepted = 0  # summed over the sequences that nodes ended
        self.accept_counts: list[int] = []  # likewise: of the rounds, how many accepted 0, 1, ... drafts
        self.attempts: dict[int, Attempt] = {}
        self.failed_pairs: set[PairId] = set()  # other pairs are tried first
        self.created_at = now
        self.priority = priority
        self.tenant = tenant
        self.sender = sender
        self.session = session
        self.share: Share = UNSHARED  # what was computed for its tenant; the queue sets it
        self.num_charged = 0  # prompt tokens that the tenant was charged for
        self.deadline = None if timeout_s is None else now + timeout_s
        self.dispatched_at: float | None = None  # when it first got nodes
        self.first_token_at: float | None = None
        self.is_over = False
        self.is_paused = False  # no node works on it, because its client does not read
        self.is_canary = is_canary
        self._next_attempt = 0
        self._out_of_memory: dict[str, int] = {}  # by node id: the first attempt that began after it ran out
        self.sequences = [Sequence(self, index, options) for index in range(num_choices)]
        self.timeline = TraceRecorder(rid, group.key.model, len(self.prompt_ids), num_choices, now)

    @property
    def log_fields(self) -> dict[str, str]:
        """Fields of its log lines: its id, and that of the client's trace if the client sent one."""
        trace_id = self.timeline.trace_id
        return {"rid": self.rid} if trace_id is None else {"rid": self.rid, "trace_id": trace_id}

    def release(self) -> None:
        """The request is over, and nobody reads its output any more. Forget the listener and the sequences, which refer
        back: so all are freed with their tokens at once, and not by the next full collection of garbage."""
        assert self.is_over, self.rid
        self.listener, self.sequences = Nobody(), []

    def charge_prompt(self, num_uncached: int) -> None:
        """Its first nodes will compute about so many tokens of the prompt."""
        self.num_charged = num_uncached
        self.share.charge(num_uncached)

    def found_cached(self, num_cached: int) -> None:
        """A node found so many tokens of the prompt in its cache. What the first attempt found counts."""
        if self.num_cached is None:
            self.num_cached = num_cached
            self.share.charge(len(self.prompt_ids) - num_cached - self.num_charged)

    def count(self, ended: Ended) -> None:
        """A node ended a sequence: add its counts."""
        self.found_cached(ended.num_cached)
        self.num_rounds += ended.num_rounds
        self.num_drafted += ended.num_drafted
        self.num_accepted += ended.num_accepted
        both = zip_longest(self.accept_counts, ended.accept_counts, fillvalue=0)
        self.accept_counts = [before + more for before, more in both]

    @property
    def num_generated(self) -> int:
        """Output tokens of all sequences, without those after a stop string."""
        return sum(len(sequence.received) for sequence in self.sequences)

    @property
    def is_complete(self) -> bool:
        """Whether every sequence has ended, and the prompt's log-probabilities are here if they were asked for."""
        return self._has_ended and not self.needs_prompt_logprobs

    @property
    def needs_prompt_logprobs(self) -> bool:
        """Whether the prompt's log-probabilities were asked for and are not here."""
        return self.wants_prompt_logprobs and self.prompt_logprobs is None

    def take_prompt_logprobs(self, logprobs: tuple[TokenLogprobs, ...]) -> None:
        """Take the prompt's log-probabilities if they were asked for and are complete: one for each token but the
        first. A node that dropped the request before its prompt was computed sends fewer."""
        if self.needs_prompt_logprobs and len(logprobs) == len(self.prompt_ids) - 1:
            self.prompt_logprobs = logprobs

    @property
    def computes_prompt(self) -> bool:
        """Whether an attempt under way will bring the prompt's log-probabilities."""
        return any(not attempt.prefill_done for attempt in self.attempts.values())

    @property
    def lacks_prompt(self) -> bool:
        """Whether only the prompt's log-probabilities are missing."""
        return self.needs_prompt_logprobs and self._has_ended

    @property
    def _has_ended(self) -> bool:
        return all(sequence.finish_reason is not None for sequence in self.sequences)

    def note_failure(self, attempt: Attempt) -> None:
        """Make the next attempts prefer other pairs of nodes."""
        self.failed_pairs.add(attempt.pair)

    def forgive(self, node: Node) -> None:
        """A node is gone. Forget failures on it: the loss caused them, and other nodes noticed it before the router."""
        self.failed_pairs = {pair for pair in self.failed_pairs if node.routing_id not in pair}
        for sequence in self.sequences:
            sequence.failures = [pair for pair in sequence.failures if node.routing_id not in pair]

    def has_failed_on(self, prefill: Node | None, decode: Node | None) -> bool:
        """Whether an attempt failed on this pair."""
        return pair_of(prefill, decode) in self.failed_pairs

    def note_out_of_memory(self, node: Node, attempt: Attempt) -> bool:
        """Record that a node ran out of memory for a choice of this attempt. Return whether the request may try again:
        not after a second node, and not after a second try on the same node. Choices that were there at the same time
        count as one try."""
        first_after = self._out_of_memory.setdefault(node.node_id, self._next_attempt)
        return len(self._out_of_memory) == 1 and attempt.number < first_after

    @property
    def num_out_of_memory(self) -> int:
        """Number of different nodes that ran out of memory for it."""
        return len(self._out_of_memory)

    def ran_out_on(self, node: Node) -> bool:
        """Whether this node ran out of memory for it."""
        return node.node_id in self._out_of_memory

    def begin_attempt(self, choices: set[int], prefill: Node | None, decode: Node | None, now: float) -> Attempt:
        """Return a new attempt of these choices, under a number never used before."""
        attempt = Attempt(self._next_attempt, choices, prefill, decode, now)
        attempt.prefill_done = prefill is None and not self.needs_prompt_logprobs
        self._next_attempt += 1
        self.attempts[attempt.number] = attempt
        return attempt

    def learn(self, attempt: Attempt, first_at: float, second_at: float, now: float) -> None:
        """Correct the estimates of the role that computed the prompt: the first two tokens of the attempt have come, or
        will come, at these times. Scored prompts teach nothing, since they take longer than others."""
        expected_s = attempt.place.expected_s
        if attempt.is_learnt or expected_s is None or self.wants_prompt_logprobs:
            return
        attempt.is_learnt = True
        actual_s = (first_at + second_at) / 2 - attempt.placed_at
        self.group.errors[attempt.place.where].observe(expected_s, actual_s, now)

    def wire_request(self, choice: int) -> GenerationRequest:
        """Return the message part that tells nodes how to continue this choice."""
        return GenerationRequest(
            prompt_ids=pack_ids(self.prompt_ids),
            params=self.params,
            received_ids=pack_ids(self.sequences[choice].received),
            cache_salt=self.cache_salt,
            prompt_logprobs=self.needs_prompt_logprobs,
            marks_drafts=self.marks_drafts,
        )
