"""`baton explain`: prints where a request spent its time, from the router's trace, for people."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from urllib.parse import quote

import msgspec

from ..metadata.config import setting
from ..metadata.errors import BatonError, RequestError
from ..router.requests.trace import Explanation, RecentRequests, RequestLine, RequestTrace, SequenceTrace, Span
from .client import Client
from .terminal import count, duration, printable

BAR = 24  # characters that stand for the whole time


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainConfig:
    """Configuration of `baton explain`: the router to ask, and the form of the output."""

    url: str = setting(
        "http://127.0.0.1:8000", "where the router listens; several, with commas between them", metavar="URL"
    )
    admin_key: str | None = setting(None, "the router's admin key, or in BATON_ADMIN_KEY", metavar="KEY")
    api_key: str | None = setting(None, "its API key if it has no admin key, or in BATON_API_KEY", metavar="KEY")
    json: bool = setting(False, "print what the router answers, as JSON")
    log_level: str = setting("warning", "debug shows a traceback with an error")


def run(config: ExplainConfig, rid: str | None) -> int:
    """Print the trace of a request, or the list of recent ones. Raises Unavailable, RequestError, ConfigError."""
    clients = [Client(url.strip(), config.admin_key or config.api_key) for url in config.url.split(",")]
    if rid is None:
        for client in clients:
            if len(clients) > 1 and not config.json:
                print(f"{client.url}:")
            _print_recent(client, is_json=config.json)
    else:
        _print_one(clients, rid, is_json=config.json)
    return 0


def _print_recent(client: Client, *, is_json: bool) -> None:
    body = client.read(path := "/debug/requests")
    if is_json:
        print(msgspec.json.format(body, indent=2).decode())
    else:
        print("\n".join(map(printable, _table(client.decoded(path, body, RecentRequests).requests))))


def _print_one(clients: Sequence[Client], rid: str, *, is_json: bool) -> None:
    """Print the trace that one of the routers has: no router knows the requests of another."""
    path = f"/debug/requests/{quote(rid, safe='')}"
    problems: list[str] = []
    for client in clients:
        try:
            body = client.read(path)
            answer = client.decoded(path, body, Explanation)
        except BatonError as error:
            if len(clients) == 1:
                raise
            problems.append(f"{client.url}: {error}")
            continue
        if is_json:
            print(msgspec.json.format(body, indent=2).decode())
        else:
            block = "█" if "utf" in (sys.stdout.encoding or "").lower() else "#"
            print("\n\n".join("\n".join(request_lines(trace, block)) for trace in answer.requests))
        return
    raise RequestError("; ".join(problems))


def request_lines(trace: RequestTrace, block: str) -> Iterator[str]:
    """Yield a request's life as lines that a terminal obeys in nothing. `block`: the character of bars."""
    return map(printable, _request_lines(trace, block))


def _request_lines(trace: RequestTrace, block: str) -> Iterator[str]:
    called = f" (x-request-id {trace.client_id})" if trace.client_id else ""
    is_live = trace.outcome == "live"
    yield f"{trace.rid}{called}: {'running for' if is_live else trace.outcome + ' in'} {duration(trace.total_s)}"
    no_token = "no token yet" if is_live else "no token"
    first = f"first token after {duration(trace.ttft_s)}" if trace.ttft_s is not None else no_token
    cached = f", {trace.num_cached:,} of them cached" if trace.num_cached else ""
    yield (
        f"model {trace.model}, received {_when(trace.received_at)}; {trace.num_prompt:,} prompt tokens{cached}; "
        f"{first}, {trace.num_tokens:,} tokens"
    )
    if trace.error:
        yield f"{trace.outcome}: {trace.error}"
    for sequence in trace.sequences:
        yield ""
        if len(trace.sequences) > 1:
            yield f"choice {sequence.index}: {sequence.num_tokens:,} tokens, {sequence.finish_reason or 'not finished'}"
        yield from _sequence(sequence, trace.total_s, block)


def _sequence(sequence: SequenceTrace, total_s: float, block: str) -> Iterator[str]:
    yield f"{'span':<14}{'start ms':>12}{'took ms':>12}{'share':>7}"
    for span in sequence.spans:
        attempt = f"attempt {span.attempt + 1}" if span.attempt else ""
        details = ", ".join(filter(None, (span.node, attempt, _figures(span))))
        line = _line(span.name, span.start_s, span.seconds, total_s)
        yield f"{line}  {_bar(span, total_s, block)}  {details}".rstrip()
        for index, chunk in enumerate(span.prefill_times.chunks):
            name = f"  chunk {index + 1}" if chunk.num_chunks == 1 else f"  {chunk.num_chunks} chunks"
            waited = f", {duration(chunk.waited_s)} after the one before" if chunk.waited_s >= 0.0005 else ""
            yield f"{name:<26}{1000 * chunk.compute_s:>12,.1f}{'':{11 + BAR}}{chunk.num_tokens:,} tokens{waited}"
    if sequence.num_forgotten:
        yield f"  ({sequence.num_forgotten} spans in the middle were dropped: their time counts as the span before)"
    yield _line("sum", 0.0, sum(span.seconds for span in sequence.spans), total_s)


def _line(name: str, start_s: float, seconds: float, total_s: float) -> str:
    share = f"{seconds / total_s:.0%}" if total_s else ""
    return f"{name:<14}{1000 * start_s:>12,.1f}{1000 * seconds:>12,.1f}{share:>7}"


def _bar(span: Span, total_s: float, block: str) -> str:
    """Draws where the span lies in the whole. The shortest span is still seen."""
    if not total_s:
        return " " * BAR
    first = min(BAR - 1, int(BAR * span.start_s / total_s))
    last = max(first + 1, min(BAR, round(BAR * (span.start_s + span.seconds) / total_s)))
    return " " * first + block * (last - first) + " " * (BAR - last)


def _figures(span: Span) -> str:
    prefill, pull = span.prefill_times, span.pull_times
    match span.name:
        case "queue":
            moved = f"moved: {span.reason}" if span.reason else ""
            full = f"decode was full {count(span.num_refused, 'time')}" if span.num_refused else ""
            return "; ".join(filter(None, (moved, full)))
        case "paused" | "reserve":
            return span.reason
        case "prefill":
            restored = f" ({span.num_restored:,} of them in host memory)" if span.num_restored else ""
            cached = f", {span.num_cached:,} more were cached{restored}" if span.num_cached else ""
            offered = f"; {count(prefill.num_offers, 'offer')}" if prefill.num_offers else ""
            early = f", {count(prefill.early_pages, 'page')} before the last chunk" if prefill.early_pages else ""
            reason = f"; {span.reason}" if span.reason else ""
            return f"{span.num_prompt:,} tokens{cached}{offered}{early}{reason}"
        case "local prefill":
            reason = f"; {span.reason}" if span.reason else ""
            return f"at most {span.num_prompt:,} tokens on the decode node{reason}"
        case "pull":
            rate = f" at {span.gb_per_s:g} GB/s" if span.gb_per_s else ""
            way = f" {span.way}" if span.way else ""
            cached = f", {span.had_pages} more were cached" if span.had_pages else ""
            again = f", {pull.num_repeated} pulled again" if pull.num_repeated else ""
            size = f"{count(span.num_pages, 'page')}, {span.num_bytes / 1e6:,.1f} MB"
            moving = f"; {duration(span.moving_s)} on their way, overlap with prefill included"
            return f"{size}{rate}{way}{cached}{again}{moving}"
        case "decode":
            steps = f" in {span.num_steps:,} rounds" if span.num_steps else ""
            drafts = f", {span.num_accepted:,} of {span.num_drafted:,} drafts accepted" if span.num_drafted else ""
            restored = f"; {span.num_restored:,} prompt tokens came from host memory" if span.num_restored else ""
            return f"{span.num_tokens:,} tokens{steps}{drafts}{restored}"
        case "recompute" if span.num_restored:
            return f"{span.num_restored:,} tokens came from host memory"
        case "preempted":
            again = f", {span.num_preemptions} times" if span.num_preemptions > 1 else ""
            return f"its pages went to older requests{again}"
        case _:
            return ""


def _table(lines: list[RequestLine]) -> Iterator[str]:
    if not lines:
        yield "no request yet, since the router's start"
        return
    width = max(len(line.rid) for line in lines)
    yield f"{'request':<{width}}  {'received':<19}  {'outcome':<9}  {'took ms':>10}  {'tokens':>7}  moves  longest span"
    for line in lines:
        yield (
            f"{line.rid:<{width}}  {_when(line.received_at)}  {line.outcome:<9}  {1000 * line.total_s:>10,.1f}  "
            f"{line.num_tokens:>7,}  {line.num_moves or '':>5}  {line.longest} {duration(line.longest_s)}"
        )


def _when(received_at: float) -> str:
    return datetime.fromtimestamp(received_at).astimezone().strftime("%Y-%m-%d %H:%M:%S")
