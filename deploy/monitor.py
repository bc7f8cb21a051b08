"""Monitoring for `baton up`: reads the state of the system from the router over HTTP, and reports it in lines of text.

`look` reads which nodes have joined, which are draining and whether requests are served; `NodeNews` turns changes into
lines. `SpeculationNews` reports every few seconds how well speculation works.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from ..metadata.errors import BatonError
from .client import Client

SPECULATION_EVERY_S = 5.0

_SAMPLE = re.compile(r"^(baton_\w+)\{(.*)\} (\S+)$", re.MULTILINE)
_NODE = re.compile(r'(?:^|,)node="([^"]*)"')
_COUNTERS = {
    "baton_node_num_rounds_total": "num_rounds",
    "baton_node_num_drafted_total": "num_drafted",
    "baton_node_accepted_drafts_total": "num_accepted",
}


class Snapshot(NamedTuple):
    """The nodes and the service, as the router reported them in one look."""

    answers: bool  # whether the router answered
    joined: frozenset[str] = frozenset()  # node ids
    draining: tuple[str, ...] = ()  # one sentence per node
    trouble: str | None = None  # why no request can be served


def look(client: Client) -> Snapshot:
    """Ask the router for its nodes. Returns `answers=False` if nobody listens or no answer comes in time."""
    try:
        page = client.metrics()
        status, body = client.ready()
    except BatonError:
        return Snapshot(answers=False)
    joined: set[str] = set()
    draining: set[str] = set()
    for name, labels, value in _SAMPLE.findall(page):
        node = _NODE.search(labels)
        if name == "baton_node_draining" and node is not None:
            joined.add(node[1])
            if float(value):
                draining.add(node[1])
    try:
        answer = json.loads(body)
        if status != 200:
            return Snapshot(True, frozenset(joined), (), str(answer["error"]["message"]))
        words = {item["node"]: item["words"] for item in answer.get("degraded", [])}
    except (ValueError, KeyError, TypeError):  # another program listens on the router's port
        return Snapshot(True, frozenset(joined))
    lines = dict.fromkeys(words.get(name, f"{name} is draining") for name in sorted(draining))  # ranks have equal words
    return Snapshot(True, frozenset(joined), tuple(lines))


class NodeNews:
    """Turns the changes between two snapshots into lines for the terminal."""

    def __init__(self) -> None:
        self._last = Snapshot(answers=True)

    def lines(self, now: Snapshot) -> list[str]:
        """Return what changed since the last call. The launcher itself reports a router that does not answer."""
        if not now.answers:
            return []
        last, self._last = self._last, now
        lines: list[str] = []
        if now.trouble is not None and now.trouble != last.trouble:
            lines.append(f"nothing is served now: {now.trouble}")
        elif now.trouble is None:
            if last.trouble is not None:
                lines.append("requests are served again")
            lines += [words for words in now.draining if words not in last.draining]
            if last.draining and not now.draining:
                lines.append("no node is draining any more")
        return lines


@dataclass(slots=True)
class Counts:
    """Speculation counters of one node, since its start or over an interval."""

    num_rounds: int = 0
    num_drafted: int = 0
    num_accepted: int = 0


@dataclass(slots=True)
class Figures:
    """The speculation figures of one page of /metrics. `num_tokens` leaves out canary requests, `nodes` does not."""

    num_tokens: int = 0
    nodes: dict[str, Counts] = field(default_factory=dict)


def parse(page: str) -> Figures:
    """Read the speculation figures from a page of /metrics."""
    figures = Figures()
    for name, labels, value in _SAMPLE.findall(page):
        node = _NODE.search(labels)
        if name == "baton_output_tokens_total":
            figures.num_tokens += int(float(value))
        elif name in _COUNTERS and node is not None:
            counts = figures.nodes.setdefault(node[1], Counts())
            setattr(counts, _COUNTERS[name], getattr(counts, _COUNTERS[name]) + int(float(value)))
    return figures


class _Reading(NamedTuple):
    at: float
    figures: Figures


class SpeculationNews:
    """Reads the speculation figures every few seconds and describes the time since the last reading.

    If the algorithm is `none`, it never reads.
    """

    def __init__(self, algorithm: str, read: Callable[[], str]) -> None:
        """`read` returns the page of /metrics, or raises BatonError."""
        self._algorithm = algorithm
        self._read = read
        self._last: _Reading | None = None
        self._next_at: float | None = None if algorithm == "none" else 0.0
        self._had_tokens = False

    def due_in(self, now: float) -> float | None:
        """Return the seconds until the next reading, or None if there is none."""
        return None if self._next_at is None else max(0.0, self._next_at - now)

    def line(self, now: float) -> str | None:
        """Return the line to print at `now` (monotonic seconds).

        None if no reading is due, or if no client received a token since the last reading.
        """
        if self._next_at is None or now < self._next_at:
            return None
        self._next_at = now + SPECULATION_EVERY_S
        try:
            reading = _Reading(now, parse(self._read()))
        except BatonError:  # the router restarts or is busy: the next reading covers this time too
            return None
        last, self._last = self._last, reading
        if last is None:
            return None
        has_tokens = reading.figures.num_tokens > last.figures.num_tokens
        # Node figures come with heartbeats, so the last rounds of a request may be counted one reading later.
        is_news, self._had_tokens = has_tokens or self._had_tokens, has_tokens
        counts = _difference(last.figures, reading.figures)
        return _sentence(self._algorithm, counts, now - last.at) if is_news and counts.num_rounds else None


def _difference(old: Figures, new: Figures) -> Counts:
    """Return the counts between two readings. Nodes that started in between are left out."""
    total = Counts()
    for name, counts in new.nodes.items():
        before = old.nodes.get(name)
        if before is None or counts.num_rounds < before.num_rounds:
            continue
        total.num_rounds += counts.num_rounds - before.num_rounds
        total.num_drafted += counts.num_drafted - before.num_drafted
        total.num_accepted += counts.num_accepted - before.num_accepted
    return total


def _sentence(algorithm: str, counts: Counts, age_s: float) -> str:
    accept_length = 1 + counts.num_accepted / counts.num_rounds
    words = f"speculation {algorithm}: {accept_length:.1f} tokens per round"
    if counts.num_drafted:
        words += f", {100 * counts.num_accepted / counts.num_drafted:.0f} % of drafts accepted"
    rounds = "1 round" if counts.num_rounds == 1 else f"{counts.num_rounds:,} rounds"
    return f"{words} (last {age_s:.0f} s, {rounds})"
