"""Figures of a load: percentiles, goodput, errors by kind, and how far the client itself can be trusted.

    ttft       from sending a request to its first token
    tpot       time per further token, the mean of a request
    itl        between two events with tokens of a request, all of them
    gap        the largest of these times of each request
    latency    from sending a request to the end of its answer

All times are in milliseconds. `Report` is what `--json FILE` writes and `--compare` reads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

from ..simulation.figures import Slo, goodput, percentile
from .sender import Sender, SentRequest

TIMES = ("ttft", "tpot", "itl", "gap", "latency")
_MOST_LATE_MS = 2.0  # or this share of the shortest time that is judged
_LATE_SHARE = 0.05
_MOST_CPU = 0.7  # of a core; from here on answers wait for the client


class Percentiles(msgspec.Struct, frozen=True):
    """Percentiles of times in milliseconds."""

    p50: float
    p90: float
    p95: float
    p99: float
    max: float


class Goodput(msgspec.Struct, frozen=True):
    """Requests that kept both bounds. One that failed kept none."""

    ttft_ms: float
    tpot_ms: float
    per_s: float
    share: float  # of all requests


class Failures(msgspec.Struct, frozen=True):
    """Requests that failed in one way."""

    kind: str
    count: int
    message: str  # of the first


class ClientFigures(msgspec.Struct, frozen=True):
    """Figures of the client itself, which show whether it was quick enough to measure the server."""

    late: Percentiles | None  # by which requests were sent after their times
    stalls: Percentiles | None  # by which the event loop was late
    cpu_share: float  # of a core


class RequestFigures(msgspec.Struct, frozen=True):
    """One request. Times of an answer without tokens, or without further ones, are null."""

    at_s: float
    late_ms: float
    turn: int
    prompt_tokens: int | None
    cached_tokens: int
    tokens: int
    ttft_ms: float | None
    tpot_ms: float | None
    gap_ms: float | None
    latency_ms: float | None
    id: str
    error: str | None


class TurnFigures(msgspec.Struct, frozen=True):
    """Figures of all requests that were the same turn of their conversations."""

    turn: int
    requests: int
    ttft: Percentiles | None
    tpot: Percentiles | None


class LoadFigures(msgspec.Struct, frozen=True):
    """One load, sent once."""

    rate: float  # requests per second that were due
    repeat: int
    took_s: float
    is_complete: bool  # not ended by Ctrl-C
    sent: int
    answered: int
    failed: int
    unfinished: int
    requests_per_s: float
    prompt_tokens: int
    cached_tokens: int
    tokens: int
    tokens_per_s: float
    ttft: Percentiles | None
    tpot: Percentiles | None
    itl: Percentiles | None
    gap: Percentiles | None
    latency: Percentiles | None
    turns: list[TurnFigures]
    goodput: list[Goodput]
    failures: list[Failures]
    client: ClientFigures
    requests: list[RequestFigures] = []

    @property
    def doubts(self) -> list[str]:
        """The reasons not to trust these figures, one clause each."""
        found: list[str] = []
        for name, times, against in (
            ("sent requests", self.client.late, self.ttft),
            ("read answers", self.client.stalls, self.tpot or self.ttft),
        ):
            if times is not None and times.p99 > max(_MOST_LATE_MS, _LATE_SHARE * (against.p50 if against else 0.0)):
                found.append(f"it {name} up to {times.p99:.1f} ms late (p99)")
        if self.client.cpu_share > _MOST_CPU:
            found.append(f"it took {self.client.cpu_share:.0%} of a core")
        return found


class Report(msgspec.Struct, frozen=True):
    """The loads of one run of `baton bench`, and the settings that repeat it."""

    baton: str  # version of the client
    command: str
    prompt_seed: int  # the --seed that draws the same prompts
    settings: dict[str, Any]
    started: str
    url: str
    server: str
    model: str
    prompts: str  # how they were made
    python: str
    cpus: int
    loads: list[LoadFigures] = []


def percentiles(seconds: Iterable[float]) -> Percentiles | None:
    """Return the percentiles of times in seconds; None if there is none."""
    values = sorted(seconds)
    if not values:
        return None
    return Percentiles(*(percentile(values, each) * 1e3 for each in (50, 90, 95, 99, 100)))


def load_figures(sender: Sender, rate: float, repeat: int, slos: Sequence[Slo]) -> LoadFigures:
    """Return the figures of what a sender has sent."""
    ended = [each for each in sender.asked if each.reply.end_s]
    good = [each for each in ended if each.reply.error is None]
    records = [each.reply.record for each in good]
    tokens = sum(each.reply.num_tokens for each in good)
    return LoadFigures(
        rate=rate,
        repeat=repeat,
        took_s=sender.took_s,
        is_complete=sender.is_complete,
        sent=len(sender.asked),
        answered=len(good),
        failed=len(ended) - len(good),
        unfinished=len(sender.asked) - len(ended),
        requests_per_s=len(good) / sender.took_s,
        prompt_tokens=sum(each.reply.prompt_len or 0 for each in good),
        cached_tokens=sum(each.reply.num_cached for each in good),
        tokens=tokens,
        tokens_per_s=tokens / sender.took_s,
        **_times(good),
        turns=list(_turns(good)),
        goodput=[Goodput(slo.ttft_ms, slo.tpot_ms, *goodput(slo, records, len(ended), sender.took_s)) for slo in slos],
        failures=list(_failures(ended)),
        client=ClientFigures(
            percentiles(each.late_s for each in sender.asked), percentiles(sender.stalls_s), sender.cpu_share
        ),
        requests=[_request(each) for each in sender.asked],
    )


def _times(good: Sequence[SentRequest]) -> dict[str, Percentiles | None]:
    """Return the percentiles by the names of TIMES. A request with one token has no further ones."""
    records = [each.reply.record for each in good]
    further = [each.reply.record for each in good if len(each.reply.times) > 1]
    return {
        "ttft": percentiles(each.ttft_s for each in records),
        "tpot": percentiles(each.tpot_s for each in further),
        "itl": percentiles(gap for each in good for gap in each.reply.gaps_s),
        "gap": percentiles(each.gap_s for each in further),
        "latency": percentiles(each.reply.end_s - each.reply.sent_s for each in good),
    }


def _turns(good: Sequence[SentRequest]) -> Iterator[TurnFigures]:
    numbers = sorted({each.turn for each in good})
    for number in numbers if len(numbers) > 1 else ():
        those = [each for each in good if each.turn == number]
        times = _times(those)
        yield TurnFigures(number, len(those), times["ttft"], times["tpot"])


def _failures(ended: Sequence[SentRequest]) -> Iterator[Failures]:
    messages: dict[str, str] = {}
    for each in ended:
        if each.reply.error is not None:
            messages.setdefault(each.reply.error, each.reply.message)
    for kind, count in Counter(each.reply.error for each in ended if each.reply.error is not None).most_common():
        yield Failures(kind, count, messages[kind])


def _request(asked: SentRequest) -> RequestFigures:
    reply = asked.reply
    record = reply.record if reply.times else None
    has_further = len(reply.times) > 1
    return RequestFigures(
        at_s=asked.at_s,
        late_ms=asked.late_s * 1e3,
        turn=asked.turn,
        prompt_tokens=reply.prompt_len,
        cached_tokens=reply.num_cached,
        tokens=reply.num_tokens,
        ttft_ms=record.ttft_s * 1e3 if record else None,
        tpot_ms=record.tpot_s * 1e3 if record and has_further else None,
        gap_ms=record.gap_s * 1e3 if record and has_further else None,
        latency_ms=(reply.end_s - reply.sent_s) * 1e3 if reply.end_s else None,
        id=reply.rid,
        error=reply.error if reply.end_s else "unfinished",
    )
