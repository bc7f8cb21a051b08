"""`baton explain`: where a request's time went, as the router tells it, for people."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from urllib.parse import quote

from ..metadata.config import setting
from ..metadata.errors import RequestError, Unavailable
from .client import Client, failure

BAR = 24  # characters that stand for the whole time
_NO_KEY = (
    "; `baton explain` takes the router's admin key, --admin-key or BATON_ADMIN_KEY, else --api-key or BATON_API_KEY"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainConfig:
    """Which router to ask, and how to print."""

    url: str = setting("http://127.0.0.1:8000", "where the router listens", metavar="URL")
    admin_key: str | None = setting(None, "the router's admin key, or in BATON_ADMIN_KEY", metavar="KEY")
    api_key: str | None = setting(None, "its API key where it has no admin key, or in BATON_API_KEY", metavar="KEY")
    json: bool = setting(False, "print what the router answers, as JSON")
    log_level: str = setting("warning", "debug shows a traceback with an error")


def run(config: ExplainConfig, rid: str | None) -> int:
    """Prints the timeline of a request, or the list of recent ones. Raises Unavailable, RequestError, ConfigError."""
    path = "/debug/requests" if rid is None else f"/debug/requests/{quote(rid, safe='')}"
    answer = _ask(Client(config.url, config.admin_key or config.api_key), path)
    if config.json:
        print(json.dumps(answer, indent=2))
        return 0
    block = "█" if "utf" in (sys.stdout.encoding or "").lower() else "#"
    lines = _table(answer["requests"]) if rid is None else _lives(answer["requests"], block)
    print("\n".join(lines))
    return 0


def _ask(client: Client, path: str) -> dict[str, Any]:
    status, body = client.get(path)
    if status in (401, 403):
        raise RequestError(f"{failure(status, body)}{_NO_KEY}")
    if status != 200:
        raise failure(status, body)
    try:
        answer = json.loads(body)
    except ValueError:
        answer = None
    if not isinstance(answer, dict) or "requests" not in answer:
        raise Unavailable(f"{client.url}{path}: what answers there is no Baton router: {body[:80]!r}")
    return answer


# --- one request -------------------------------------------------------------------------------------------------


def _lives(lives: list[dict[str, Any]], block: str) -> Iterator[str]:
    for place, life in enumerate(lives):
        if place:
            yield ""
        yield from _life(life, block)


def _life(life: dict[str, Any], block: str) -> Iterator[str]:
    called = f" (x-request-id {life['client_id']})" if life["client_id"] else ""
    is_live = life["outcome"] == "live"
    yield f"{life['rid']}{called}: {'runs since' if is_live else life['outcome'] + ' in'} {_time(life['total_s'])}"
    first = "no token yet" if is_live else "no token"
    if life["ttft_s"] is not None:
        first = f"first token after {_time(life['ttft_s'])}"
    cached = f", {life['num_cached']:,} of them cached" if life["num_cached"] else ""
    num_tokens = sum(choice["num_tokens"] for choice in life["choices"])
    yield (
        f"model {life['model']}, received {_when(life['received_at'])}; {life['num_prompt']:,} prompt tokens{cached}; "
        f"{first}, {num_tokens:,} tokens"
    )
    if life["error"]:
        yield f"{life['outcome']}: {life['error']}"
    for choice in life["choices"]:
        yield ""
        if len(life["choices"]) > 1:
            yield f"choice {choice['index']}: {choice['num_tokens']:,} tokens, {choice['finish_reason'] or 'no end'}"
        yield from _choice(choice, life["total_s"], block)


def _choice(choice: dict[str, Any], total_s: float, block: str) -> Iterator[str]:
    yield f"{'part':<14}{'start ms':>12}{'took ms':>12}{'share':>7}"
    for part in choice["parts"]:
        start_s, seconds = part.get("start_s", 0.0), part.get("seconds", 0.0)
        bar = _bar(start_s, seconds, total_s, block)
        yield (f"{_line(part['name'], start_s, seconds, total_s)}  {bar}  {_details(part)}").rstrip()
        for place, (num_chunks, num_tokens, waited_s, compute_s) in enumerate(part.get("chunks", ())):
            name = f"  chunk {place + 1}" if num_chunks == 1 else f"  {num_chunks} chunks"
            waited = f", {_time(waited_s)} after the one before" if waited_s >= 0.0005 else ""
            yield f"{name:<26}{1000 * compute_s:>12,.1f}{'':{11 + BAR}}{num_tokens:,} tokens{waited}"
    if choice.get("num_forgotten"):
        yield f"  ({choice['num_forgotten']} parts in the middle are forgotten: their time counts as the part before)"
    yield _line("sum", 0.0, sum(part.get("seconds", 0.0) for part in choice["parts"]), total_s)


def _line(name: str, start_s: float, seconds: float, total_s: float) -> str:
    share = f"{seconds / total_s:.0%}" if total_s else ""
    return f"{name:<14}{1000 * start_s:>12,.1f}{1000 * seconds:>12,.1f}{share:>7}"


def _bar(start_s: float, seconds: float, total_s: float, block: str) -> str:
    """The part's place in the whole. The shortest part is still seen."""
    if not total_s:
        return " " * BAR
    first = min(BAR - 1, int(BAR * start_s / total_s))
    last = max(first + 1, min(BAR, round(BAR * (start_s + seconds) / total_s)))
    return " " * first + block * (last - first) + " " * (BAR - last)


def _details(part: dict[str, Any]) -> str:
    figures = _FIGURES.get(part["name"], lambda _: "")(part)
    attempt = f"attempt {part['attempt'] + 1}" if part.get("attempt") else ""
    return ", ".join(filter(None, (part.get("node", ""), attempt, figures)))


def _queue(part: dict[str, Any]) -> str:
    refused = part.get("num_refused", 0)
    full = f"found no room {refused} time{'s' * (refused > 1)}" if refused else ""
    return "; ".join(filter(None, (f"moved: {part['reason']}" if part.get("reason") else "", full)))


def _prefill(part: dict[str, Any]) -> str:
    cached = f", {part['num_cached']:,} more were cached" if part.get("num_cached") else ""
    offers, early = part.get("num_offers", 0), part.get("early_pages", 0)
    offered = f"; {offers} offer{'s' * (offers > 1)}" if offers else ""
    return (
        f"{part.get('num_prompt', 0):,} tokens{cached}{offered}{f', {early} pages while it computed' if early else ''}"
    )


def _pull(part: dict[str, Any]) -> str:
    size = part.get("num_bytes", 0) / 1e6
    rate = f" at {part['gb_per_s']:g} GB/s" if part.get("gb_per_s") else ""
    over = f" over {part['transport']}" if part.get("transport") else ""
    had = f", {part['had_pages']} more were cached" if part.get("had_pages") else ""
    again = f", {part['num_repeated']} pulled again" if part.get("num_repeated") else ""
    moving = f"; {_time(part.get('moving_s', 0.0))} on their way, overlap with prefill included"
    num_pages = part.get("num_pages", 0)
    return f"{num_pages} page{'s' * (num_pages != 1)}, {size:,.1f} MB{rate}{over}{had}{again}{moving}"


def _decode(part: dict[str, Any]) -> str:
    steps = f" in {part['num_steps']:,} rounds" if part.get("num_steps") else ""
    drafted, accepted = part.get("num_drafted", 0), part.get("num_accepted", 0)
    drafts = f", {accepted:,} of {drafted:,} drafts accepted" if drafted else ""
    return f"{part.get('num_tokens', 0):,} tokens{steps}{drafts}"


def _preempted(part: dict[str, Any]) -> str:
    num = part.get("num_preemptions", 1)
    return "its pages went to older requests" + (f", {num} times" if num > 1 else "")


_FIGURES = {
    "queue": _queue,
    "paused": lambda part: part.get("reason", ""),
    "prefill": _prefill,
    "pull": _pull,
    "decode": _decode,
    "preempted": _preempted,
}


# --- the list ------------------------------------------------------------------------------------------------------


def _table(lines: list[dict[str, Any]]) -> Iterator[str]:
    if not lines:
        yield "no request yet, since the router's start"
        return
    width = max(len(line["rid"]) for line in lines)
    yield f"{'request':<{width}}  {'received':<19}  {'outcome':<9}  {'took ms':>10}  {'tokens':>7}  moves  longest part"
    for line in lines:
        yield (
            f"{line['rid']:<{width}}  {_when(line['received_at'])}  {line['outcome']:<9}  "
            f"{1000 * line['total_s']:>10,.1f}  {line['num_tokens']:>7,}  {line['num_moves'] or '':>5}  "
            f"{line['longest']} {_time(line['longest_s'])}"
        )


def _time(seconds: float) -> str:
    return f"{seconds:,.2f} s" if seconds >= 1 else f"{1000 * seconds:.1f} ms"


def _when(received_at: float) -> str:
    return datetime.fromtimestamp(received_at).astimezone().strftime("%Y-%m-%d %H:%M:%S")
