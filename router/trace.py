"""The life of a request, noted as it happens: a few marks a request, nothing a token.

A mark says what a choice begins to wait for, and when; what lies between two marks is a part. So the parts of a choice
are contiguous and sum up to its whole time, whatever happens in between (explain.py makes them). What nodes measured
on their own clocks comes as durations, which explain.py places inside the router's parts.

    receive -> queue -> reserve -> prefill -> handoff -> decode -> finish
                 ^                                         |
                 +------- moved, or paused and resumed ----+
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec

from ..metadata.wire.messages import Admitted, PrefillDone
from ..metadata.wire.request import Ended
from ..metadata.wire.times import PrefillTimes

if TYPE_CHECKING:
    from .request import Attempt, Request, Sequence

MAX_MARKS = 64  # of a choice; of more, those after FIRST_MARKS are forgotten and their time counts as the part before
FIRST_MARKS = 8
MAX_REASON = 400  # characters
KEPT_CHOICES = 1024  # of requests that are over
CONTEXT_HEADERS = ("traceparent", "tracestate")  # of W3C Trace Context
MAX_CONTEXT_HEADER = 512  # characters; longer ones are not passed on
NO_CONTEXT: Mapping[str, str] = MappingProxyType({})

Outcome = Literal["live", "done", "failed", "cancelled"]
Stage = Literal["receive", "queue", "reserve", "prefill", "handoff", "decode", "paused", "finish"]


class Prefilled(NamedTuple):
    """What is kept of PrefillDone."""

    queue_s: float
    compute_s: float
    num_cached: int
    times: PrefillTimes


class Leg:
    """One attempt of one choice on a pair of nodes, and what those told of it."""

    __slots__ = ("admitted", "attempt", "decode", "ended", "prefill", "prefilled")

    def __init__(self, attempt: Attempt) -> None:
        self.attempt = attempt.number
        self.prefill = attempt.prefill.node_id if attempt.prefill is not None else None
        self.decode = attempt.decode.node_id if attempt.decode is not None else None
        self.prefilled: Prefilled | None = None
        self.admitted: Admitted | None = None
        self.ended: Ended | None = None


class Mark(msgspec.Struct, gc=False):  # holds no container that could lead back to it
    """At `at` (monotonic seconds) this stage began; `num_tokens` had been received."""

    at: float
    stage: Stage
    num_tokens: int
    leg: Leg | None = None
    reason: str = ""  # why it moved, or is paused
    num_refused: int = 0  # how often a decode node had no room for it


class Track:
    """One choice's marks."""

    __slots__ = ("finish_reason", "marks", "num_forgotten", "num_tokens")

    def __init__(self, begun: float) -> None:
        self.marks = [Mark(begun, "receive", 0)]
        self.num_forgotten = 0
        self.num_tokens = 0  # when it was over
        self.finish_reason: str | None = None

    @property
    def last(self) -> Mark:
        """What it does now."""
        return self.marks[-1]

    def enter(self, at: float, stage: Stage, num_tokens: int, leg: Leg | None = None, reason: str = "") -> None:
        """A stage begins, at the earliest when the one before did: a message's time is that of its arrival."""
        if len(self.marks) == MAX_MARKS:
            del self.marks[FIRST_MARKS]
            self.num_forgotten += 1
        self.marks.append(Mark(max(at, self.last.at), stage, num_tokens, leg, reason[:MAX_REASON]))

    def leg(self, attempt: int) -> Leg | None:
        """The leg of an attempt; None when it was never dispatched, or is forgotten."""
        return next((mark.leg for mark in reversed(self.marks) if mark.leg and mark.leg.attempt == attempt), None)


class Timeline:
    """One request, from the body of its HTTP request on. All times are the router's monotonic seconds."""

    __slots__ = (
        "begun",
        "client_id",
        "ended_at",
        "error",
        "first_token_at",
        "model",
        "num_cached",
        "num_prompt",
        "outcome",
        "queued_at",
        "received_at",
        "rid",
        "trace_context",
        "tracks",
    )

    def __init__(self, rid: str, model: str, num_prompt: int, num_choices: int, begun: float) -> None:
        self.rid = rid
        self.client_id: str | None = None  # its own x-request-id
        self.trace_context: Mapping[str, str] = NO_CONTEXT  # its traceparent and tracestate headers
        self.model = model
        self.num_prompt = num_prompt
        self.num_cached: int | None = None
        self.begun = self.queued_at = begun
        self.received_at = time.time() - (time.monotonic() - begun)  # wall clock, for people
        self.tracks = [Track(begun) for _ in range(num_choices)]
        self.outcome: Outcome = "live"
        self.error: str | None = None
        self.first_token_at: float | None = None
        self.ended_at: float | None = None

    @property
    def response_id(self) -> str:
        """The id of the HTTP answer, KIND-HEX. With several prompts a request is one of them: KIND-HEX-PLACE."""
        return "-".join(self.rid.split("-")[:2])

    @property
    def nodes(self) -> set[str]:
        """Ids of all nodes that worked on it."""
        legs = [mark.leg for track in self.tracks for mark in track.marks if mark.leg is not None]
        return {node for leg in legs for node in (leg.prefill, leg.decode) if node is not None}

    @property
    def num_moves(self) -> int:
        """How often a choice had to go on elsewhere."""
        return sum(mark.stage == "queue" and mark.reason != "" for track in self.tracks for mark in track.marks)

    # --- what happens, in order ------------------------------------------------------------------------------------

    def came_from(self, client_id: str | None, headers: Mapping[str, str]) -> None:
        """What the HTTP request tells: its client's own id, and the client's span."""
        self.client_id = client_id
        if "traceparent" in headers:
            context = {name: headers[name] for name in CONTEXT_HEADERS if name in headers}
            self.trace_context = {name: value for name, value in context.items() if len(value) <= MAX_CONTEXT_HEADER}

    def queued(self, now: float) -> None:
        """It was taken in and waits for nodes."""
        self.queued_at = now
        for track in self.tracks:
            track.enter(now, "queue", 0)

    def reserving(self, choices: Iterable[Sequence], attempt: Attempt, now: float) -> None:
        """A decode node was asked for pages."""
        for choice in choices:
            self.tracks[choice.index].enter(now, "reserve", len(choice.received), Leg(attempt))

    def refused(self, choices: Iterable[Sequence]) -> None:
        """The node had no room: all that time counts as waiting, however often it happens."""
        for choice in choices:
            marks = self.tracks[choice.index].marks
            if marks[-1].stage == "reserve":
                marks.pop()
                marks[-1].num_refused += 1

    def dispatched(self, choices: Iterable[Sequence], attempt: Attempt, now: float) -> None:
        """The prompt was sent to prefill, or decode computes it."""
        stage: Stage = "prefill" if attempt.prefill is not None else "decode"
        for choice in choices:
            self.tracks[choice.index].enter(now, stage, len(choice.received), Leg(attempt))

    def first_token(self, choice: Sequence, now: float) -> None:
        """Prefill's token is here."""
        track = self.tracks[choice.index]
        if track.last.stage == "prefill":
            track.enter(now, "handoff", len(choice.received), track.last.leg)

    def admitted(self, choice: Sequence, message: Admitted, now: float) -> None:
        """Decode has the pages, and runs."""
        track = self.tracks[choice.index]
        leg = track.last.leg
        if leg is None or leg.attempt != message.unit.attempt or track.last.stage not in ("prefill", "handoff"):
            return
        leg.admitted = message
        if track.last.stage == "prefill":  # prefill's own message of the first token is late, or lost
            track.enter(now, "handoff", len(choice.received), leg)
        track.enter(now, "decode", len(choice.received), leg)

    def prefill_done(self, node_id: str, message: PrefillDone) -> None:
        """What prefill tells when all tickets of an attempt have ended; the request may be over by then."""
        told = Prefilled(message.queue_s, message.compute_s, message.num_cached, message.times)
        for track in self.tracks:
            leg = track.leg(message.attempt)
            if leg is not None and leg.prefill == node_id:
                leg.prefilled = told

    def ended(self, choice: Sequence, ended: Ended) -> None:
        """A node said that the choice is over."""
        leg = self.tracks[choice.index].last.leg
        if leg is not None:
            leg.ended = ended

    def finishing(self, choice: Sequence, now: float) -> None:
        """The last tokens came at `now`; they are text by now."""
        self.tracks[choice.index].enter(now, "finish", len(choice.received))

    def moved(self, choice: Sequence, reason: str, now: float) -> None:
        """It waits anew: a node failed, died or left."""
        self.tracks[choice.index].enter(now, "queue", len(choice.received), reason=reason)

    def paused(self, choice: Sequence, reason: str, now: float) -> None:
        """No node works on it."""
        self.tracks[choice.index].enter(now, "paused", len(choice.received), reason=reason)

    def resumed(self, choice: Sequence, now: float) -> None:
        """It waits for nodes again."""
        self.tracks[choice.index].enter(now, "queue", len(choice.received))

    def over(self, request: Request, outcome: Outcome, error: str | None, now: float) -> None:
        """Nothing follows but a late PrefillDone."""
        self.outcome, self.ended_at = outcome, now
        self.error = error[:MAX_REASON] if error is not None else None
        self.look(request)

    def look(self, request: Request) -> None:
        """Takes over the figures that the request keeps anyway."""
        self.num_cached = request.num_cached
        self.first_token_at = request.first_token_at
        for track, choice in zip(self.tracks, request.sequences, strict=True):
            track.num_tokens = len(choice.received)
            track.finish_reason = choice.finish_reason


class Finished:
    """Timelines of requests that are over, the latest KEPT_CHOICES choices of them.

    Measured: 2 kB for one choice, 4 kB with MAX_CHUNKS chunks, 52 kB with MAX_MARKS marks and as many chunks as go
    with them.
    """

    def __init__(self, most: int = KEPT_CHOICES) -> None:
        self._most = most
        self._timelines: OrderedDict[str, Timeline] = OrderedDict()
        self._num_choices = 0

    def add(self, timeline: Timeline) -> None:
        """Keeps one; the oldest go. The newest is kept whatever its size."""
        self._timelines[timeline.rid] = timeline
        self._num_choices += len(timeline.tracks)
        while self._num_choices > self._most and len(self._timelines) > 1:
            self._num_choices -= len(self._timelines.popitem(last=False)[1].tracks)

    def get(self, rid: str) -> Timeline | None:
        """The one of this id."""
        return self._timelines.get(rid)

    def __iter__(self) -> Iterator[Timeline]:
        """The newest first."""
        return reversed(self._timelines.values())
