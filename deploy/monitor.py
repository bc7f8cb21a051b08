"""Words of `baton up` and `baton top` for the snapshots that the router answers (GET /live)."""

from __future__ import annotations

import textwrap
from pathlib import Path

from ..router.http.page.types import Snapshot
from .client import Client
from .rates import Rates, Sums, Window
from .terminal import Status, count, duration, flow, say

LOOK_EVERY_S = 1.0
PLAIN_EVERY_S = 5.0  # between lines of figures where there is no terminal
_PATH = "/live?once=true"
_ABSENT = "there is no GET /live: this is no Baton router, or an older one than this command"
_TIMEOUT_S = 2.0


def look(client: Client, *, with_pages: bool = True) -> Snapshot:
    """Ask the router for a snapshot. `with_pages`: the router asks its nodes for their pages by owner.

    Raises Unavailable or RequestError."""
    path = _PATH if with_pages else f"{_PATH}&pages=false"
    return client.decoded(path, client.read(path, _TIMEOUT_S, _ABSENT), Snapshot)


def service_words(snapshot: Snapshot, now: Rates | None) -> list[str]:
    """Return the figures of the service as short texts. `now`: the rates; None after the first snapshot."""
    counts = snapshot.counts
    words = [f"{counts.running:,} running", f"{counts.waiting:,} waiting"]
    if now is None:
        return words
    words = [f"{now.requests_per_s:.1f} requests/s", f"{now.tokens_per_s:,.0f} tokens/s", *words]
    for name, latency in (("ttft", now.ttft), ("itl", now.itl)):
        if latency is not None:
            words.append(f"{name} p50 {about(latency.p50_s)}, p95 {about(latency.p95_s)}")
    if now.acceptance is not None:
        words.append(f"{now.acceptance:.0%} of drafts accepted, {now.tokens_per_round:.1f} tokens per round")
    if now.cached_share is not None:
        words.append(f"{now.cached_share:.0%} of prompts cached")
    ended = now.requests
    words += [f"{num:,} {name}" for name, num in (("failed", ended.failed), ("refused", ended.refused)) if num]
    return words


def about(seconds: float) -> str:
    """Return a percentile, which is only as exact as the histogram's buckets."""
    return duration(seconds) if not 0.01 <= seconds < 1 else f"{1000 * seconds:.0f} ms"


def troubles(snapshot: Snapshot) -> dict[tuple[str, str], str]:
    """Return a sentence for each node that is not ready, by its id and state."""
    return {
        (node.id, node.state): node.why if node.state == "draining" else f"{node.id} is {node.state}: {node.why}"
        for node in snapshot.nodes
        if node.state != "ready"
    }


class NodeNews:
    """Turns the changes between two snapshots into lines for the terminal."""

    def __init__(self) -> None:
        self._reason: str | None = None
        self._troubles: dict[tuple[str, str], str] = {}

    def lines(self, snapshot: Snapshot) -> list[str]:
        """Return what changed since the last call. The launcher itself reports nodes that end and join."""
        router = snapshot.router
        before, self._reason = self._reason, router.reason
        if router.reason is not None:
            return [f"nothing is served now: {router.reason}"] if router.reason != before else []
        old, now = self._troubles, troubles(snapshot)
        self._troubles = {key: words for key, words in now.items() if key[1] not in ("gone", "joining")}
        lines = [] if before is None else ["requests are served again"]
        lines += dict.fromkeys(words for key, words in self._troubles.items() if key not in old)  # once for all ranks
        if old and not self._troubles:
            lines.append("all nodes take requests again")
        return lines


class Monitor:
    """The display of `baton up`: news between snapshots, the status block, and the sums at the end."""

    def __init__(self, status: Status) -> None:
        self._status = status
        self._news = NodeNews()
        self._window = Window()
        self._sums = Sums()
        self._last: Snapshot | None = None
        self._plain_at = 0.0

    def take(self, snapshot: Snapshot | None, now: float) -> None:
        """Show a snapshot that came at `now` (monotonic seconds). None: the router does not answer."""
        self._last = snapshot or self._last
        if snapshot is None:
            return self._status.draw(["the router does not answer"])
        for line in self._news.lines(snapshot):
            self._status.tell(line)
        self._sums.add(snapshot)
        rates = self._window.add(snapshot)
        words = service_words(snapshot, rates)
        lines = flow(words, self._status.width)
        for text in dict.fromkeys(troubles(snapshot).values()):
            lines += textwrap.wrap(text, self._status.width)
        self._status.draw(lines)
        if rates is not None and rates.output_tokens and not self._status.is_terminal and now >= self._plain_at:
            self._plain_at = now + PLAIN_EVERY_S
            say("; ".join(words))
        return None

    def summary(self, num_restarts: int, run_dir: Path) -> str:
        """Return what has happened since the start, in one sentence."""
        sums = self._sums
        ended = {name: getattr(sums.requests, name) for name in ("failed", "cancelled", "refused")}
        others = "".join(f", {number:,} {name}" for name, number in ended.items() if number)
        rate = f" ({sums.tokens / sums.busy_s:,.0f} tokens/s while busy)" if sums.busy_s else ""
        return (
            f"{count(sums.requests.done, 'request')} done{others}; {count(sums.tokens, 'token')}{rate}; "
            f"{count(sums.moves, 'move')}, {count(num_restarts, 'restart')}; logs in {run_dir}"
        )
