"""How well speculation does just now, in a line of `baton up`: read from GET /metrics, nothing is kept elsewhere."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from ..metadata.errors import BatonError

EVERY_S = 5.0
_SAMPLE = re.compile(r"^(baton_\w+)\{(.*)\} (\S+)$", re.MULTILINE)
_NODE = re.compile(r'(?:^|,)node="([^"]*)"')
_COUNTERS = {
    "baton_node_num_rounds_total": "num_rounds",
    "baton_node_num_drafted_total": "num_drafted",
    "baton_node_accepted_drafts_total": "num_accepted",
}


@dataclass(slots=True)
class Counts:
    """One node's counters of speculation, since its start or over an interval."""

    num_rounds: int = 0
    num_drafted: int = 0
    num_accepted: int = 0


@dataclass(slots=True)
class Figures:
    """What /metrics tells of speculation at one moment. `num_tokens` leaves out canaries, the counts do not."""

    num_tokens: int = 0
    nodes: dict[str, Counts] = field(default_factory=dict)


def parse(page: str) -> Figures:
    """The figures of a page of /metrics."""
    figures = Figures()
    for name, labels, value in _SAMPLE.findall(page):
        node = _NODE.search(labels)
        if name == "baton_output_tokens_total":
            figures.num_tokens += int(float(value))
        elif name in _COUNTERS and node is not None:
            counts = figures.nodes.setdefault(node[1], Counts())
            setattr(counts, _COUNTERS[name], getattr(counts, _COUNTERS[name]) + int(float(value)))
    return figures


class _Look(NamedTuple):
    at: float
    figures: Figures


class Acceptance:
    """Looks at the figures every few seconds. With algorithm `none` never."""

    def __init__(self, algorithm: str, read: Callable[[], str]) -> None:
        """`read` gives the page of /metrics, or raises BatonError."""
        self._algorithm = algorithm
        self._read = read
        self._last: _Look | None = None
        self._next_at: float | None = None if algorithm == "none" else 0.0
        self._had_tokens = False

    def due_in(self, now: float) -> float | None:
        """Seconds until the next look; None when there is none."""
        return None if self._next_at is None else max(0.0, self._next_at - now)

    def line(self, now: float) -> str | None:
        """What to say at `now` (seconds, monotonic): nothing before a look is due, and when no client got a token."""
        if self._next_at is None or now < self._next_at:
            return None
        self._next_at = now + EVERY_S
        try:
            look = _Look(now, parse(self._read()))
        except BatonError:  # the router is being restarted, or busy: the next look covers the time
            return None
        last, self._last = self._last, look
        if last is None:
            return None
        has_tokens = look.figures.num_tokens > last.figures.num_tokens
        # the last rounds of a request may be told only after its tokens, as nodes' figures come with heartbeats
        is_news, self._had_tokens = has_tokens or self._had_tokens, has_tokens
        counts = _between(last.figures, look.figures)
        return _words(self._algorithm, counts, now - last.at) if is_news and counts.num_rounds else None


def _between(old: Figures, new: Figures) -> Counts:
    """What was counted between two moments, by nodes that lived through both."""
    total = Counts()
    for name, counts in new.nodes.items():
        before = old.nodes.get(name)
        if before is None or counts.num_rounds < before.num_rounds:
            continue
        total.num_rounds += counts.num_rounds - before.num_rounds
        total.num_drafted += counts.num_drafted - before.num_drafted
        total.num_accepted += counts.num_accepted - before.num_accepted
    return total


def _words(algorithm: str, counts: Counts, age_s: float) -> str:
    length = 1 + counts.num_accepted / counts.num_rounds
    words = f"speculation {algorithm}: {length:.1f} tokens a round"
    if counts.num_drafted:
        words += f", {100 * counts.num_accepted / counts.num_drafted:.0f} % of drafts accepted"
    rounds = "1 round" if counts.num_rounds == 1 else f"{counts.num_rounds:,} rounds"
    return f"{words} (last {age_s:.0f} s, {rounds})"
