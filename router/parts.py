"""What a request did, as parts that sum up to the whole.

Parts are made from cuts: one at each of the router's marks, and, within a part, where the durations that nodes told
put them, never beyond the part. A part lasts from its cut to the next one; so parts have no gaps and no overlaps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import NamedTuple

from msgspec import Struct, structs

from ..metadata.wire.messages import Admitted
from ..metadata.wire.request import Preemption
from ..metadata.wire.times import ChunkTimes
from .trace import Leg, Mark, Timeline, Track


class Part(Struct, frozen=True, omit_defaults=True):
    """What a choice did for some time. Seconds; `start_s` since the request came. Absent: zero, or not known."""

    name: str
    start_s: float = 0.0
    seconds: float = 0.0
    node: str = ""
    attempt: int | None = None
    reason: str = ""  # queue: why it moved; paused: why
    num_refused: int = 0  # queue: how often a decode node was full
    num_tokens: int = 0  # received in this part
    num_prompt: int = 0  # prefill: tokens computed
    num_cached: int = 0  # prefill: tokens found in its cache
    chunks: tuple[ChunkTimes, ...] = ()  # prefill: (chunks, tokens, seconds waited, seconds computed)
    num_offers: int = 0  # prefill: offers of pages, all choices' together
    early_pages: int = 0  # prefill: offered while later chunks were still to be computed
    num_pages: int = 0  # pull
    num_bytes: int = 0
    had_pages: int = 0  # pull: found in decode's own cache
    moving_s: float = 0.0  # pull: with pages on their way, those overlapped by prefill included
    gb_per_s: float = 0.0  # pull: num_bytes by moving_s
    transport: str = ""
    num_repeated: int = 0  # pull: pages pulled again for a wrong checksum
    num_steps: int = 0  # decode: rounds
    num_drafted: int = 0
    num_accepted: int = 0
    num_preemptions: int = 0  # preempted: so many, added up


class ChoiceLife(Struct, frozen=True, omit_defaults=True):
    """One output. The parts' seconds sum up to the request's total."""

    index: int
    finish_reason: str | None
    num_tokens: int
    parts: list[Part]
    num_forgotten: int = 0  # marks of a life too long to keep: their time is the part's before them


class RequestTimeline(Struct, frozen=True):
    """One request's life."""

    rid: str
    client_id: str | None
    model: str
    outcome: str
    error: str | None
    received_at: float  # seconds since 1970
    total_s: float  # until now where it lives
    ttft_s: float | None
    num_prompt: int
    num_cached: int | None
    choices: list[ChoiceLife]


class Cut(NamedTuple):
    """A part begins."""

    at: float
    part: Part


def timeline_of(timeline: Timeline, now: float) -> RequestTimeline:
    """The whole timeline. For a live one `Timeline.look` must have been called."""
    end = timeline.ended_at if timeline.ended_at is not None else now
    first = timeline.first_token_at
    return RequestTimeline(
        rid=timeline.rid,
        client_id=timeline.client_id,
        model=timeline.model,
        outcome=timeline.outcome,
        error=timeline.error,
        received_at=round(timeline.received_at, 3),
        total_s=_seconds(end - timeline.begun),
        ttft_s=_seconds(first - timeline.begun) if first is not None else None,
        num_prompt=timeline.num_prompt,
        num_cached=timeline.num_cached,
        choices=[_choice(index, track, timeline, end) for index, track in enumerate(timeline.tracks)],
    )


def _choice(index: int, track: Track, timeline: Timeline, end: float) -> ChoiceLife:
    last = Mark(end, "finish", track.num_tokens)
    cuts = [
        cut for mark, following in pairwise([*track.marks, last]) for cut in _cuts(mark, following, timeline.num_prompt)
    ]
    return ChoiceLife(
        index, track.finish_reason, track.num_tokens, _parts(cuts, timeline.begun, end), track.num_forgotten
    )


def _parts(cuts: list[Cut], begun: float, end: float) -> list[Part]:
    """Each from its cut to the next. Cuts are rounded, not durations: sums stay exact to the microsecond."""
    ends = [*(cut.at for cut in cuts[1:]), end]
    parts: list[Part] = []
    for cut, until in zip(cuts, ends, strict=True):
        start_s, until_s = _seconds(cut.at - begun), _seconds(until - begun)
        seconds = _seconds(until_s - start_s)
        is_bare = cut.part == Part(cut.part.name, node=cut.part.node, attempt=cut.part.attempt)
        if seconds > 0 or not is_bare:
            parts.append(structs.replace(cut.part, start_s=start_s, seconds=seconds))
    return parts


def _cuts(mark: Mark, following: Mark, num_prompt: int) -> Iterable[Cut]:
    """The parts between two marks."""
    leg, num_tokens = mark.leg, following.num_tokens - mark.num_tokens
    span = (mark.at, following.at)
    match mark.stage:
        case "prefill" if leg is not None:
            return _prefill(span, leg, num_prompt + mark.num_tokens, num_tokens)
        case "handoff" if leg is not None and leg.admitted is not None:
            return _handoff(span, leg, leg.admitted)
        case "decode" if leg is not None:
            return _decode(span, leg, num_tokens)
        case "queue" | "paused":
            return [Cut(mark.at, Part(mark.stage, reason=mark.reason, num_refused=mark.num_refused))]
        case _:
            node = leg.decode or "" if leg is not None else ""
            attempt = leg.attempt if leg is not None else None
            return [Cut(mark.at, Part(mark.stage, node=node, attempt=attempt, num_tokens=num_tokens))]


def _prefill(span: tuple[float, float], leg: Leg, num_prompt: int, num_tokens: int) -> Iterator[Cut]:
    """dispatch (the message waits for the node's step) | prefill queue | prefill | first token, placed from the end."""
    told = leg.prefilled
    part = Part("prefill", node=leg.prefill or "", attempt=leg.attempt)
    if told is None:
        yield Cut(span[0], structs.replace(part, num_prompt=num_prompt, num_tokens=num_tokens))
        return
    chunks = told.times.chunks
    compute_s = max(told.compute_s, sum(chunk.waited_s + chunk.compute_s for chunk in chunks))
    at = _back(span, (told.queue_s, compute_s, told.times.sample_s))
    yield Cut(span[0], structs.replace(part, name="dispatch"))
    yield Cut(at[0], structs.replace(part, name="prefill queue"))
    yield Cut(
        at[1],
        structs.replace(
            part,
            num_prompt=num_prompt - told.num_cached,
            num_cached=told.num_cached,
            chunks=chunks,
            num_offers=told.times.num_offers,
            early_pages=told.times.early_pages,
        ),
    )
    yield Cut(at[2], structs.replace(part, name="first token", num_tokens=num_tokens))


def _handoff(span: tuple[float, float], leg: Leg, admitted: Admitted) -> Iterator[Cut]:
    """offer (until decode has taken the last one) | pull | admission, placed from the end."""
    times = admitted.times
    at = _back(span, (times.last_s, times.admit_s))
    node, attempt, moving_s = leg.decode or "", leg.attempt, admitted.transfer_s
    yield Cut(span[0], Part("offer", node=leg.prefill or "", attempt=attempt))
    yield Cut(
        at[0],
        Part(
            "pull",
            node=node,
            attempt=attempt,
            num_pages=admitted.num_pages,
            num_bytes=admitted.num_bytes,
            had_pages=admitted.num_cached_pages,
            moving_s=_seconds(moving_s),
            gb_per_s=round(admitted.num_bytes / moving_s / 1e9, 3) if moving_s > 0 else 0.0,
            transport=times.transport,
            num_repeated=times.num_repeated,
        ),
    )
    yield Cut(at[1], Part("admission", node=node, attempt=attempt))


def _decode(span: tuple[float, float], leg: Leg, num_tokens: int) -> Iterator[Cut]:
    """decode | preempted | recompute | decode ..., placed from the beginning."""
    ended = leg.ended
    at, until = span
    part = Part("decode", node=leg.decode or "", attempt=leg.attempt)
    preemptions: tuple[Preemption, ...] = ended.preemptions if ended is not None else ()
    for each in preemptions:
        yield Cut(at, structs.replace(part, num_steps=each.num_steps, num_tokens=each.num_tokens))
        at = min(until, at + each.ran_s)
        yield Cut(at, structs.replace(part, name="preempted", num_preemptions=each.num_preemptions))
        at = min(until, at + each.waited_s)
        yield Cut(at, structs.replace(part, name="recompute"))
        at = min(until, at + each.recompute_s)
    num_steps = ended.num_steps - sum(each.num_steps for each in preemptions) if ended is not None else 0
    num_tokens = max(0, num_tokens - sum(each.num_tokens for each in preemptions))
    drafted, accepted = (ended.num_drafted, ended.num_accepted) if ended is not None else (0, 0)
    yield Cut(
        at,
        structs.replace(part, num_steps=num_steps, num_tokens=num_tokens, num_drafted=drafted, num_accepted=accepted),
    )


def _back(span: tuple[float, float], durations: tuple[float, ...]) -> list[float]:
    """Where each of these durations begins when they fill the end of the span, as far as it has room."""
    at = span[1]
    starts: list[float] = []
    for duration in reversed(durations):
        at = max(span[0], at - duration)
        starts.append(at)
    return starts[::-1]


def _seconds(value: float) -> float:
    return round(value, 6)
