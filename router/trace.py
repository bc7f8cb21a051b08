"""Traces of requests: the stages of each sequence of a request, and how long each took.

    receive -> queue -> reserve -> prefill -> handoff -> decode -> finish
                 ^                                         |
                 +------ rescheduled, or paused and resumed

The router begins a span when a sequence starts to wait for something else, and the span lasts until the next one
begins. So the spans of a sequence have no gaps and sum up to the time of the whole request. Nodes report durations,
because the clocks of two hosts cannot be compared. The router divides its own spans by these durations:

    prefill -> dispatch | prefill queue | prefill | first token    (durations fill the end of the span)
    handoff -> offer | pull | admission                            (the end)
    decode  -> decode | preempted | recompute | decode ...         (the beginning)

A trace takes some spans per request and nothing per token.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sized
from itertools import pairwise
from types import MappingProxyType
from typing import Literal, Protocol

from msgspec import Struct, field, structs

from ..metadata.wire.messages import Admitted, PrefillDone
from ..metadata.wire.request import Ended
from ..metadata.wire.times import PrefillTimes, PullTimes

MAX_SPANS = 64  # per sequence; of more, those after FIRST_SPANS are joined with the span before them
FIRST_SPANS = 8
MAX_REASON = 400  # characters
MAX_FINISHED = 1024  # sequences of finished requests whose traces are kept
CONTEXT_HEADERS = ("traceparent", "tracestate")  # of W3C Trace Context
MAX_CONTEXT_HEADER = 512  # characters; longer headers are dropped
NO_CONTEXT: Mapping[str, str] = MappingProxyType({})

Outcome = Literal["live", "done", "failed", "cancelled"]


class Span(Struct, omit_defaults=True, gc=False):  # gc=False is safe: no field leads back to the span
    """A stage of a sequence and its figures. JSON leaves out figures that are zero or unknown."""

    name: str
    start_s: float = 0.0  # since the request arrived
    seconds: float = 0.0  # set when the trace is read
    node: str = ""
    attempt: int | None = None
    reason: str = ""  # queue: why the sequence was rescheduled; paused: why
    num_refused: int = 0  # queue: how often a decode node was full
    num_tokens: int = 0  # received during this span
    num_prompt: int = 0  # prefill: tokens computed
    num_cached: int = 0  # prefill: tokens found in the prefix cache
    prefill_times: PrefillTimes = PrefillTimes()
    num_pages: int = 0  # pull
    num_bytes: int = 0  # pull
    had_pages: int = 0  # pull: pages found in the decode node's own cache
    moving_s: float = 0.0  # pull: time with pages under way, including the time that prefill overlaps
    gb_per_s: float = 0.0  # pull: num_bytes per moving_s
    pull_times: PullTimes = PullTimes()
    num_steps: int = 0  # decode: rounds
    num_drafted: int = 0  # decode
    num_accepted: int = 0  # decode
    num_preemptions: int = 0  # preempted: how many are added up

    def neighbour(self, name: str, start_s: float = 0.0) -> Span:
        """Return a span of the same attempt at the same node, without figures."""
        return Span(name, start_s, node=self.node, attempt=self.attempt)


class SequenceTrace(Struct, omit_defaults=True):
    """The spans of one output. The last one is open while the request is live."""

    index: int
    finish_reason: str | None
    num_tokens: int
    spans: list[Span] = field(name="parts")
    num_forgotten: int = 0  # spans joined with the one before, because there were more than MAX_SPANS

    def begin(self, span: Span, num_tokens: int) -> None:
        """Ends the open span and begins another."""
        self.count(num_tokens)
        self.end(span.start_s)
        self.spans.append(span)
        self._bound()

    def end(self, at_s: float) -> None:
        """Cuts off what lies after the end: the durations of a node may exceed the time that the router measured."""
        for span in reversed(self.spans):
            if span.start_s <= at_s:
                break
            span.start_s = at_s

    def count(self, num_tokens: int) -> None:
        """Notes how many tokens the sequence has received until now."""
        self.spans[-1].num_tokens += num_tokens - self.num_tokens
        self.num_tokens = num_tokens

    def divide(self, index: int, first: Span, *others: tuple[Span, float]) -> None:
        """Replaces a span that is over. The others fill its end with their durations, as far as it has room."""
        first.start_s, at_s = self.spans[index].start_s, self.spans[index + 1].start_s
        for span, duration in reversed(others):
            span.start_s = at_s = max(first.start_s, at_s - duration)
        self.spans[index : index + 1] = [first, *(span for span, _ in others)]
        self._bound()

    def divide_prefill(self, index: int, message: PrefillDone) -> None:
        """Replaces a prefill by its steps."""
        span, times = self.spans[index], message.times
        compute_s = max(message.compute_s, sum(chunk.waited_s + chunk.compute_s for chunk in times.chunks))
        dispatch, waiting = span.neighbour("dispatch"), span.neighbour("prefill queue")
        prefill, first_token = span.neighbour("prefill"), span.neighbour("first token")
        prefill.num_prompt, prefill.num_cached = span.num_prompt - message.num_cached, message.num_cached
        prefill.prefill_times, first_token.num_tokens = times, span.num_tokens
        self.divide(index, dispatch, (waiting, message.queue_s), (prefill, compute_s), (first_token, times.sample_s))

    def divide_handoff(self, message: Admitted) -> None:
        """Replaces the handoff, which was the last span but one, by its steps."""
        prefill, handoff = self.spans[-3:-1]
        offer, pull, admission = prefill.neighbour("offer"), handoff.neighbour("pull"), handoff.neighbour("admission")
        offer.num_tokens, times, moving_s = handoff.num_tokens, message.times, message.transfer_s
        pull.num_pages, pull.num_bytes, pull.had_pages = message.num_pages, message.num_bytes, message.num_cached_pages
        pull.moving_s, pull.pull_times = round(moving_s, 6), times
        pull.gb_per_s = round(message.num_bytes / moving_s / 1e9, 3) if moving_s > 0 else 0.0
        self.divide(len(self.spans) - 2, offer, (pull, times.last_s), (admission, times.admit_s))

    def divide_decode(self, ended: Ended) -> None:
        """Puts earlier runs and preemptions before the last run, which keeps the remaining steps and tokens."""
        last = self.spans.pop()
        last.num_steps, last.num_drafted, last.num_accepted = ended.num_steps, ended.num_drafted, ended.num_accepted
        for each in ended.preemptions:
            run = last.neighbour("decode", last.start_s)
            preempted = last.neighbour("preempted", run.start_s + each.ran_s)
            recompute = last.neighbour("recompute", preempted.start_s + each.waited_s)
            run.num_steps, run.num_tokens = each.num_steps, min(each.num_tokens, last.num_tokens)
            preempted.num_preemptions = each.num_preemptions
            last.start_s = recompute.start_s + each.recompute_s
            last.num_steps -= run.num_steps
            last.num_tokens -= run.num_tokens
            self.spans += run, preempted, recompute
        self.spans.append(last)
        self._bound()

    def until(self, end_s: float) -> SequenceTrace:
        """Return a copy that ends at `end_s`. Times are rounded, not durations, so that sums stay exact.

        A span that took no time and tells nothing is left out, unless it is one that every sequence has.
        """
        starts = [round(min(span.start_s, end_s), 6) for span in self.spans]
        spans: list[Span] = []
        for span, (start_s, next_s) in zip(self.spans, pairwise([*starts, round(end_s, 6)]), strict=True):
            is_bare = span == span.neighbour(span.name, span.start_s)
            if next_s > start_s or not is_bare or span.name in ("queue", "finish"):
                spans.append(structs.replace(span, start_s=start_s, seconds=round(next_s - start_s, 6)))
        return structs.replace(self, spans=spans)

    def _bound(self) -> None:
        while len(self.spans) > MAX_SPANS:
            joined = self.spans.pop(FIRST_SPANS)
            self.spans[FIRST_SPANS - 1].num_tokens += joined.num_tokens
            self.num_forgotten += 1


class RequestSummary(Struct):
    """The fields that a trace and a line of the list have in common."""

    rid: str
    client_id: str | None  # the client's own x-request-id
    model: str
    outcome: Outcome
    received_at: float  # seconds since 1970
    total_s: float  # until now if the request is live
    ttft_s: float | None
    num_prompt: int


class RequestTrace(RequestSummary):
    """One request, with the spans of all its sequences. The seconds of each sequence sum up to `total_s`."""

    error: str | None
    num_cached: int | None
    sequences: list[SequenceTrace] = field(name="choices")

    @property
    def ids(self) -> tuple[str | None, ...]:
        """Ids by which the request can be found: its own (KIND-HEX, or KIND-HEX-INDEX if its HTTP request has several
        prompts), that of the HTTP response (KIND-HEX), and the client's."""
        return self.rid, "-".join(self.rid.split("-")[:2]), self.client_id

    @property
    def num_tokens(self) -> int:
        """Output tokens of all sequences."""
        return sum(sequence.num_tokens for sequence in self.sequences)

    @property
    def spans(self) -> list[Span]:
        """Spans of all sequences."""
        return [span for sequence in self.sequences for span in sequence.spans]

    @property
    def nodes(self) -> set[str]:
        """Ids of all nodes that worked on the request."""
        return {span.node for span in self.spans if span.node}

    @property
    def longest(self) -> str:
        """Name of the longest span."""
        return max(self.spans, key=lambda span: span.seconds, default=Span("receive")).name

    @property
    def longest_s(self) -> float:
        """Seconds of the longest span."""
        return max((span.seconds for span in self.spans), default=0.0)

    @property
    def num_moves(self) -> int:
        """How often a sequence was rescheduled to other nodes."""
        return sum(span.name == "queue" and span.reason != "" for span in self.spans)


class RequestLine(RequestSummary):
    """One request in a list."""

    num_tokens: int
    num_moves: int
    longest: str  # name of the longest span of all sequences
    longest_s: float


class Explanation(Struct, frozen=True):
    """Answer to GET /debug/requests/{rid}: all requests of that id, the newest first. Each prompt of an HTTP request is
    a request, and a client may send its own x-request-id more than once."""

    requests: list[RequestTrace]


class RecentRequests(Struct, frozen=True):
    """Answer to GET /debug/requests: live and kept requests, the newest first."""

    requests: list[RequestLine]


class TracedNode(Protocol):
    """The attributes of a node that a trace reads. The next three do the same for attempt, sequence and request."""

    @property
    def node_id(self) -> str: ...


class TracedAttempt(Protocol):
    @property
    def number(self) -> int: ...
    @property
    def prefill(self) -> TracedNode | None: ...
    @property
    def decode(self) -> TracedNode | None: ...


class TracedSequence(Protocol):
    @property
    def index(self) -> int: ...
    @property
    def received(self) -> Sized: ...
    @property
    def finish_reason(self) -> str | None: ...
    @property
    def attempt(self) -> TracedAttempt | None: ...


class TracedRequest(Protocol):
    @property
    def num_cached(self) -> int | None: ...
    @property
    def first_token_at(self) -> float | None: ...
    @property
    def sequences(self) -> Iterable[TracedSequence]: ...


class TraceRecorder:
    """Records the trace of one request, from the moment when its HTTP body was read. Every `now` is monotonic."""

    __slots__ = ("begun", "queued_at", "trace", "trace_context")

    def __init__(self, rid: str, model: str, num_prompt: int, num_choices: int, begun: float) -> None:
        received_at = round(time.time() - (time.monotonic() - begun), 3)  # wall clock, for people
        sequences = [SequenceTrace(index, None, 0, [Span("receive")]) for index in range(num_choices)]
        self.trace = RequestTrace(rid, None, model, "live", received_at, 0.0, None, num_prompt, None, None, sequences)
        self.trace_context = NO_CONTEXT  # the client's traceparent and tracestate headers
        self.begun = self.queued_at = begun

    def came_from(self, client_id: str | None, headers: Mapping[str, str]) -> None:
        """Notes the client's own id of the request, and the client's span if the headers name one."""
        self.trace.client_id = client_id
        if "traceparent" in headers:
            context = {name: headers[name] for name in CONTEXT_HEADERS if name in headers}
            self.trace_context = {name: value for name, value in context.items() if len(value) <= MAX_CONTEXT_HEADER}

    def queued(self, now: float) -> None:
        """The router accepted the request, which now waits for nodes."""
        self.queued_at = now
        for sequence in self.trace.sequences:
            sequence.begin(self._span("queue", now), 0)

    def reserving(self, choices: Iterable[TracedSequence], attempt: TracedAttempt, now: float) -> None:
        """The router asked a decode node for pages."""
        for choice in choices:
            self._begin(choice, self._span("reserve", now, attempt.decode, attempt.number))

    def refused(self, choices: Iterable[TracedSequence]) -> None:
        """The decode node was full. The reservation counts as waiting, so that refusals do not add spans."""
        for choice in choices:
            spans = self.trace.sequences[choice.index].spans
            if spans[-1].name == "reserve":
                spans.pop()
                spans[-1].num_refused += 1

    def dispatched(self, choices: Iterable[TracedSequence], attempt: TracedAttempt, now: float) -> None:
        """The prompt was sent to the prefill node, or to the decode node if that computes it itself."""
        name = "decode" if attempt.prefill is None else "prefill"
        for choice in choices:
            span = self._span(name, now, attempt.prefill or attempt.decode, attempt.number)
            span.num_prompt = self.trace.num_prompt + len(choice.received) if attempt.prefill is not None else 0
            self._begin(choice, span)

    def first_token(self, choice: TracedSequence, now: float) -> None:
        """The first token arrived from the prefill node."""
        attempt = choice.attempt
        if attempt is not None and self._last(choice).name == "prefill":
            self._begin(choice, self._span("handoff", now, attempt.decode, attempt.number))

    def admitted(self, choice: TracedSequence, message: Admitted, now: float) -> None:
        """The decode node has all pages and runs the sequence."""
        if self._last(choice).attempt != message.unit.attempt:
            return
        self.first_token(choice, now)  # in case its own message is late or lost
        last = self._last(choice)
        if last.name == "handoff":
            self._begin(choice, last.neighbour("decode", self._seconds(now)))
            self.trace.sequences[choice.index].divide_handoff(message)

    def prefill_done(self, node_id: str, message: PrefillDone) -> None:
        """All tickets of an attempt have ended, maybe after the end of the request."""
        for sequence in self.trace.sequences:
            for index in reversed(range(len(sequence.spans) - 1)):  # the end of an open prefill is not known
                span, before = sequence.spans[index], sequence.spans[index - 1]
                if (span.name, span.attempt, span.node) == ("prefill", message.attempt, node_id):
                    if before.name != "prefill queue":  # else it is divided
                        sequence.divide_prefill(index, message)
                    break

    def ended(self, choice: TracedSequence, ended: Ended) -> None:
        """A node reported the end of the sequence."""
        last = self._last(choice)
        if last.name == "decode" and not last.num_steps:  # else the message came twice
            self.trace.sequences[choice.index].count(len(choice.received))
            self.trace.sequences[choice.index].divide_decode(ended)

    def finishing(self, choice: TracedSequence, now: float) -> None:
        """The last tokens arrived at `now`, and are text by now."""
        self._begin(choice, self._span("finish", now))

    def moved(self, choice: TracedSequence, reason: str, now: float) -> None:
        """The sequence waits for other nodes, because one of its nodes failed, died or left."""
        self._begin(choice, self._span("queue", now, reason=reason))

    def paused(self, choice: TracedSequence, reason: str, now: float) -> None:
        """The sequence was taken off its nodes."""
        self._begin(choice, self._span("paused", now, reason=reason))

    def resumed(self, choice: TracedSequence, now: float) -> None:
        """The sequence waits for nodes again."""
        self._begin(choice, self._span("queue", now))

    def over(self, request: TracedRequest, outcome: Outcome, error: str | None, now: float) -> None:
        """The request ended. Only a late PrefillDone can follow."""
        self.look(request)
        self.trace.error = error[:MAX_REASON] if error is not None else None
        self.trace.total_s = self.total_s(now)
        self.trace.outcome = outcome

    def look(self, request: TracedRequest) -> None:
        """Copies figures from the request into the trace. Call it before a live trace is read."""
        first, self.trace.num_cached = request.first_token_at, request.num_cached
        self.trace.ttft_s = self._seconds(first) if first is not None else None
        for sequence, choice in zip(self.trace.sequences, request.sequences, strict=True):
            sequence.count(len(choice.received))
            sequence.finish_reason = choice.finish_reason

    def total_s(self, now: float) -> float:
        """Return how long the request took, or has taken until now."""
        return self._seconds(now) if self.trace.outcome == "live" else self.trace.total_s

    def read(self, now: float) -> RequestTrace:
        """Return a copy of the trace. If the request is live, the copy ends now."""
        self.trace.total_s = self.total_s(now)
        sequences = [sequence.until(self.trace.total_s) for sequence in self.trace.sequences]
        return structs.replace(self.trace, sequences=sequences)

    def _seconds(self, now: float) -> float:
        return round(max(0.0, now - self.begun), 6)

    def _span(
        self, name: str, now: float, node: TracedNode | None = None, attempt: int | None = None, reason: str = ""
    ) -> Span:
        node_id = node.node_id if node is not None else ""
        return Span(name, self._seconds(now), node=node_id, attempt=attempt, reason=reason[:MAX_REASON])

    def _begin(self, choice: TracedSequence, span: Span) -> None:
        self.trace.sequences[choice.index].begin(span, len(choice.received))

    def _last(self, choice: TracedSequence) -> Span:
        return self.trace.sequences[choice.index].spans[-1]


class FinishedTraces:
    """Traces of finished requests: the latest, with at most MAX_FINISHED sequences in all."""

    def __init__(self, most: int = MAX_FINISHED) -> None:
        self._most = most
        self._recorders: OrderedDict[str, TraceRecorder] = OrderedDict()
        self._num_sequences = 0

    def add(self, recorder: TraceRecorder) -> None:
        """Keeps a trace and drops the oldest ones. The newest is kept whatever its size."""
        self._recorders[recorder.trace.rid] = recorder
        self._num_sequences += len(recorder.trace.sequences)
        while self._num_sequences > self._most and len(self._recorders) > 1:
            self._num_sequences -= len(self._recorders.popitem(last=False)[1].trace.sequences)

    def get(self, rid: str) -> TraceRecorder | None:
        """Return the recorder of a request, None if it is not kept."""
        return self._recorders.get(rid)

    def __iter__(self) -> Iterator[TraceRecorder]:
        """Yield the newest first."""
        return reversed(self._recorders.values())
