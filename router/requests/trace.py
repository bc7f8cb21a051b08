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

import re
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Literal, Protocol

from msgspec import Struct, field, structs

from ...metadata.wire.messages import Admitted, PrefillDone
from ...metadata.wire.request import Ended, FinishReason, PrefillTimes, PullTimes

if TYPE_CHECKING:
    from .attempt import Attempt

MAX_SPANS = 64  # per sequence; of more, those after FIRST_SPANS are joined with the span before them
FIRST_SPANS = 8
MAX_REASON = 400  # characters
MAX_FINISHED = 1024  # sequences of finished requests whose traces are kept
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-(?P<trace_id>(?!0{32})[0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")
CONTEXT_HEADERS = ("traceparent", "tracestate")  # of W3C Trace Context
MAX_CONTEXT_HEADER = 512  # characters; longer headers are dropped

_WAYS = {  # by the name of the transport
    "local": "through shared memory",
    "cuda": "from GPU to GPU",
    "nixl": "over the network by NIXL, readable",
    "plain": "over the network, readable",
    "aes": "over the network, encrypted",
    "zmq": "over the network",
    "ranks": "between the ranks of both nodes",
}

Outcome = Literal["live", "done", "failed", "cancelled"]
Stage = Literal["queue", "reserve", "prefill", "local prefill", "handoff", "decode", "paused", "finish"]


class Span(Struct, omit_defaults=True, gc=False):  # gc=False is safe: no field leads back to the span
    """A stage of a sequence and its figures. JSON leaves out figures that are zero or unknown."""

    name: str
    start_s: float = 0.0  # since the request arrived
    seconds: float = 0.0  # set when the trace is read
    node: str = ""
    attempt: int | None = None
    reason: str = ""  # queue: why the sequence was rescheduled; paused: why; reserve, prefill: why it has this node
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
    way: str = ""  # pull: how the pages travelled, in words
    num_steps: int = 0  # decode: rounds
    num_drafted: int = 0  # decode
    num_accepted: int = 0  # decode
    num_preemptions: int = 0  # preempted: how many are added up
    num_restored: int = 0  # prefill, decode: prompt tokens, recompute: all tokens from the node's host tier

    def neighbour(self, name: str, start_s: float) -> Span:
        """Return a span of the same attempt at the same node, without figures."""
        return Span(name, start_s, 0.0, self.node, self.attempt)


SpanKey = tuple[int, str, str, int | None]  # index of the sequence, name, node and attempt
Report = PrefillDone | Admitted | Ended  # divides a prefill, a handoff or a decode


class SequenceTrace(Struct, omit_defaults=True):
    """The spans of one output. The last one is open while the request is live."""

    index: int
    finish_reason: str | None
    num_tokens: int
    spans: list[Span] = field(name="parts")
    num_forgotten: int = 0  # spans joined with the one before, because there were more than MAX_SPANS

    def count(self, num_tokens: int) -> None:
        """Note how many tokens the sequence has received until now."""
        self.spans[-1].num_tokens += num_tokens - self.num_tokens
        self.num_tokens = num_tokens

    def begin(self, span: Span, num_tokens: int) -> None:
        """End the open span and begin another."""
        self.count(num_tokens)
        self.spans.append(span)
        if len(self.spans) > MAX_SPANS:
            self.spans[FIRST_SPANS - 1].num_tokens += self.spans.pop(FIRST_SPANS).num_tokens
            self.num_forgotten += 1

    def until(self, end_s: float, reports: dict[SpanKey, Report]) -> SequenceTrace:
        """Return a copy that ends at `end_s` and is divided by the reports of nodes.

        Times are rounded, not durations, so that sums stay exact. A span that took no time and tells nothing is left
        out, unless it is one that every sequence has.
        """
        spans: list[Span] = []
        for before, span in reversed(list(pairwise([Span(""), *self.spans]))):
            report = reports.get((self.index, span.name, span.node, span.attempt))
            for step in reversed(_steps(span, end_s, before, report)):
                start_s = min(round(max(step.start_s, 0.0), 6), end_s)
                is_bare = step == step.neighbour(step.name, step.start_s)
                if start_s < end_s or not is_bare or step.name in ("queue", "finish"):
                    spans.append(structs.replace(step, start_s=start_s, seconds=round(end_s - start_s, 6)))
                end_s = start_s
        return structs.replace(self, spans=spans[::-1])


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


class RequestLine(RequestSummary):
    """One request in a list."""

    num_tokens: int
    num_moves: int  # how often a sequence was rescheduled to other nodes
    longest: str  # name of the longest span of all sequences
    longest_s: float
    stage: str = ""  # name of the last span of the first sequence that has not ended, or else of the first one


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

    def line(self) -> RequestLine:
        """Return the request as a list shows it."""
        longest = max(self.spans, key=lambda span: span.seconds, default=Span("receive"))
        num_moves = sum(span.name == "queue" and span.reason != "" for span in self.spans)
        summary = self.rid, self.client_id, self.model, self.outcome, self.received_at, self.total_s, self.ttft_s
        figures = self.num_prompt, self.num_tokens, num_moves, longest.name, longest.seconds
        return RequestLine(*summary, *figures, self.stage)

    @property
    def stage(self) -> str:
        """Name of the last span of the first sequence that has not ended, or else of the first one."""
        sequence = next((each for each in self.sequences if each.finish_reason is None), self.sequences[0])
        return sequence.spans[-1].name


class Explanation(Struct, frozen=True):
    """Answer to GET /debug/requests/{rid}: all requests of that id, the newest first. Each prompt of an HTTP request is
    a request, and a client may send its own x-request-id more than once."""

    requests: list[RequestTrace]


class RecentRequests(Struct, frozen=True):
    """Answer to GET /debug/requests: live and kept requests, the newest first. Of those that have ended, the router
    keeps the last ones, with at most `most_finished` choices in all."""

    requests: list[RequestLine]
    most_finished: int = MAX_FINISHED


class RequestText(Struct, frozen=True, kw_only=True):
    """Answer to GET /debug/requests/{rid}/text: the text of each choice of a live request until now. Of a longer output
    these are its last `most_tokens` tokens."""

    rid: str
    texts: list[str]
    most_tokens: int


class SequenceLike(Protocol):
    """The attributes of a sequence that a trace reads. The next class does the same for a request."""

    index: int
    received: list[int]
    finish_reason: FinishReason | None

    @property
    def attempt(self) -> Attempt | None: ...


class RequestLike(Protocol):
    num_cached: int | None
    first_token_at: float | None

    @property
    def sequences(self) -> Iterable[SequenceLike]: ...


class TraceRecorder:
    """Records the trace of one request, from the moment when its HTTP body was read. Every `now` is monotonic.

    Nobody reads most traces. So reports of nodes are only kept here, and divide spans when the trace is read.
    """

    __slots__ = ("_reports", "begun", "queued_at", "trace", "trace_context")

    def __init__(self, rid: str, model: str, num_prompt: int, num_choices: int, begun: float) -> None:
        received_at = time.time() - (time.monotonic() - begun)  # wall clock, for people
        sequences = [SequenceTrace(index, None, 0, [Span("receive")]) for index in range(num_choices)]
        self.trace = RequestTrace(rid, None, model, "live", received_at, 0.0, None, num_prompt, None, None, sequences)
        self.trace_context: Mapping[str, str] = {}  # the client's traceparent and tracestate headers
        self.begun = self.queued_at = begun
        self._reports: dict[SpanKey, Report] = {}

    def came_from(self, client_id: str | None, headers: Mapping[str, str]) -> None:
        """Note the client's own id of the request, and the client's span if the headers name one."""
        self.trace.client_id = client_id
        if "traceparent" in headers:
            context = {name: headers[name] for name in CONTEXT_HEADERS if name in headers}
            self.trace_context = {name: value for name, value in context.items() if len(value) <= MAX_CONTEXT_HEADER}

    @property
    def trace_id(self) -> str | None:
        """Id of the trace that the client's `traceparent` names, None if it names none."""
        found = _TRACEPARENT.match(self.trace_context.get("traceparent", "")) if self.trace_context else None
        return found["trace_id"] if found is not None else None

    def queued(self, now: float) -> None:
        """The router accepted the request, which now waits for nodes."""
        self.queued_at = now
        for sequence in self.trace.sequences:
            sequence.begin(Span("queue", now - self.begun), sequence.num_tokens)

    def begin(
        self,
        choices: Iterable[SequenceLike],
        name: Stage,
        now: float,
        attempt: Attempt | None = None,
        reason: str = "",
    ) -> None:
        """End the open spans of some sequences and begin others. With an attempt, the node of a `prefill` is its
        prefill node, and that of any other span its decode node."""
        node = None if attempt is None else attempt.prefill if name == "prefill" else attempt.decode
        node_id, number = node.node_id if node is not None else "", attempt.number if attempt is not None else None
        for choice in choices:
            num_tokens = len(choice.received)
            num_prompt = self.trace.num_prompt + num_tokens if name in ("prefill", "local prefill") else 0
            span = Span(name, now - self.begun, 0.0, node_id, number, reason[:MAX_REASON], num_prompt=num_prompt)
            self.trace.sequences[choice.index].begin(span, num_tokens)

    def refused(self, choices: Iterable[SequenceLike]) -> None:
        """The decode node was full. The reservation counts as waiting, so that refusals do not add spans."""
        for choice in choices:
            spans = self.trace.sequences[choice.index].spans
            if spans[-1].name == "reserve":
                spans.pop()
                spans[-1].num_refused += 1

    def first_token(self, choice: SequenceLike, now: float) -> None:
        """The first token arrived from the prefill node."""
        if self._last(choice).name == "prefill":
            self.begin((choice,), "handoff", now, choice.attempt)

    def first_local_token(self, choice: SequenceLike, now: float) -> None:
        """The first token of an attempt arrived. If the decode node has computed the prompt, it decodes from now on."""
        if self._last(choice).name == "local prefill":
            self.begin((choice,), "decode", now, choice.attempt)

    def admitted(self, choice: SequenceLike, message: Admitted, now: float) -> None:
        """The decode node has all pages and runs the sequence."""
        if self._last(choice).attempt == message.unit.attempt:
            self.first_token(choice, now)  # in case its own message is late or lost
            last = self._last(choice)
            if last.name == "handoff":
                self._report((choice.index, "handoff", last.node, last.attempt), message)
                self.begin((choice,), "decode", now, choice.attempt)

    def prefill_done(self, node_id: str, message: PrefillDone) -> None:
        """All tickets of an attempt have ended, maybe after the end of the request."""
        if message.prompt_logprobs:  # they are large
            message = structs.replace(message, prompt_logprobs=())
        for sequence in self.trace.sequences:
            last = sequence.spans[-1]
            if last.name != "prefill" or last.attempt != message.attempt:  # the end of an open prefill is not known
                self._report((sequence.index, "prefill", node_id, message.attempt), message)

    def ended(self, choice: SequenceLike, ended: Ended) -> None:
        """A node reported the end of the sequence."""
        last = self._last(choice)
        if last.name == "decode":
            self._report((choice.index, "decode", last.node, last.attempt), ended)

    def over(self, request: RequestLike, outcome: Outcome, error: str | None, now: float) -> None:
        """The request ended. Only a late PrefillDone can follow."""
        self.look(request)
        self.trace.error = error[:MAX_REASON] if error is not None else None
        self.trace.total_s = now - self.begun
        self.trace.outcome = outcome

    def look(self, request: RequestLike) -> None:
        """Copies figures from the request into the trace. Call it before a live trace is read."""
        first, self.trace.num_cached = request.first_token_at, request.num_cached
        self.trace.ttft_s = first - self.begun if first is not None else None
        for sequence, choice in zip(self.trace.sequences, request.sequences, strict=True):
            sequence.count(len(choice.received))
            sequence.finish_reason = choice.finish_reason

    def last_span(self, index: int) -> Span:
        """Return the span of a sequence that is open while the request is live."""
        return self.trace.sequences[index].spans[-1]

    def placement(self, index: int) -> str:
        """Return why a sequence has its nodes: the reasons of its last attempt."""
        spans = self.trace.sequences[index].spans
        told = (
            span for span in spans if span.attempt is not None and span.attempt == spans[-1].attempt and span.reason
        )
        return "; ".join(f"{span.node}: {span.reason}" for span in told)

    def total_s(self, now: float) -> float:
        """Return how long the request took, or has taken until now."""
        return round(max(0.0, now - self.begun if self.trace.outcome == "live" else self.trace.total_s), 6)

    def read(self, now: float) -> RequestTrace:
        """Return a copy of the trace. If the request is live, the copy ends now."""
        received_at, total_s, ttft_s = round(self.trace.received_at, 3), self.total_s(now), self.trace.ttft_s
        ttft_s = round(ttft_s, 6) if ttft_s is not None else None
        sequences = [sequence.until(total_s, self._reports) for sequence in self.trace.sequences]
        return structs.replace(self.trace, received_at=received_at, total_s=total_s, ttft_s=ttft_s, sequences=sequences)

    def _last(self, choice: SequenceLike) -> Span:
        return self.last_span(choice.index)

    def _report(self, key: SpanKey, report: Report) -> None:
        """Keeps the first report on a span. As with spans, the number is bounded."""
        self._reports.setdefault(key, report)
        if len(self._reports) > MAX_SPANS * len(self.trace.sequences):
            del self._reports[list(self._reports)[FIRST_SPANS]]


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


def _steps(span: Span, end_s: float, before: Span, report: Report | None) -> list[Span]:
    """Return the spans that a report divides a span into, or the span itself if there is no report."""
    match report:
        case PrefillDone(times=times):
            compute_s = max(report.compute_s, sum(chunk.waited_s + chunk.compute_s for chunk in times.chunks))
            durations = {"prefill queue": report.queue_s, "prefill": compute_s, "first token": times.sample_s}
            steps = _, _, prefill, first_token = _fill(span, end_s, "dispatch", durations)
            prefill.num_prompt, prefill.num_cached = span.num_prompt - report.num_cached, report.num_cached
            prefill.prefill_times, first_token.num_tokens = times, span.num_tokens
            prefill.num_restored = times.num_restored
            prefill.reason = span.reason
        case Admitted(times=times, transfer_s=moving_s):
            durations = {"pull": times.last_s, "admission": times.admit_s}
            steps = offer, pull, _ = _fill(span, end_s, "offer", durations)
            offer.node, offer.num_tokens = before.node, span.num_tokens
            pull.num_pages, pull.num_bytes, pull.had_pages = report.num_pages, report.num_bytes, report.num_cached_pages
            pull.moving_s, pull.pull_times = round(moving_s, 6), times
            pull.way = _WAYS.get(times.transport, times.transport and f"by {times.transport}")
            pull.gb_per_s = round(report.num_bytes / moving_s / 1e9, 3) if moving_s > 0 else 0.0
        case Ended(num_steps=num_steps, num_drafted=num_drafted, num_accepted=num_accepted):
            last = structs.replace(span, num_steps=num_steps, num_drafted=num_drafted, num_accepted=num_accepted)
            steps = [last]  # earlier runs and preemptions go before the last run, which has the remaining tokens
            for each in report.preemptions:
                run = span.neighbour("decode", last.start_s)
                preempted = span.neighbour("preempted", run.start_s + each.ran_s)
                recompute = span.neighbour("recompute", preempted.start_s + each.waited_s)
                recompute.num_restored = each.num_restored
                run.num_steps = min(each.num_steps, last.num_steps)
                run.num_tokens = min(each.num_tokens, last.num_tokens)
                preempted.num_preemptions = each.num_preemptions
                last.start_s = recompute.start_s + each.recompute_s
                last.num_steps -= run.num_steps
                last.num_tokens -= run.num_tokens
                steps[-1:] = run, preempted, recompute, last
            steps[0].num_restored = report.num_restored
        case None:
            steps = [span]
    return steps


def _fill(span: Span, end_s: float, first: str, durations: dict[str, float]) -> list[Span]:
    """Return steps without figures. The others fill the end of the span with their durations, as far as it has room."""
    steps: list[Span] = []
    for name, duration in reversed(durations.items()):
        end_s = max(span.start_s, end_s - duration)
        steps.append(span.neighbour(name, end_s))
    return [span.neighbour(first, span.start_s), *reversed(steps)]
