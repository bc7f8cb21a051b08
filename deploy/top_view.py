"""The picture of the service that `baton top` draws, by rich. Texts of the router never become markup."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from urllib.parse import quote

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ..metadata.errors import BatonError
from ..router.http.page.types import LiveNode, LiveRequest, Snapshot
from ..router.requests.trace import Explanation
from .client import Client
from .explain import request_lines
from .monitor import about, look, service_words, troubles
from .rates import Rates, Window
from .terminal import flow, printable

_OWNERS = ("request", "ticket", "cache", "padding", "free")
_TIMEOUT_S = 2.0  # of a question for spans: keys wait for it
_BAR = 12  # characters that stand for all pages of a node
_NARROW = 70  # columns; with fewer, the tables show less
_MIN_REQUESTS = 3
_BEFORE_WHY = 58  # columns that the rest of a request's row takes at most
_COUNTS_ONLY = (
    "This key sees counts only: nodes and requests are shown for the router's admin key (--admin-key, BATON_ADMIN_KEY)."
)
_COLORS = {"ready": "green", "draining": "yellow", "joining": "yellow"}
_ORDERS: dict[str, Callable[[LiveRequest], float]] = {
    "age": lambda request: request.age_s,
    "tokens": lambda request: request.num_tokens,
    "prompt": lambda request: request.num_prompt,
}


class View:
    """The newest snapshot, what the user has chosen, and the console."""

    _snapshot: Snapshot
    _rates: Rates | None = None
    _error: str | None = None  # why there is no newer snapshot
    _explained: str | None = None  # id of the request whose spans are shown
    _spans: Sequence[Text] = ()  # of it, or why there are none
    _chosen = 0  # index of a request

    def __init__(self, client: Client) -> None:
        self._client = client
        self._console = Console(highlight=False, markup=False)
        self._live = Live(console=self._console, screen=True, auto_refresh=False)
        self._window = Window()
        self._orders = [*_ORDERS]

    @property
    def is_on_terminal(self) -> bool:
        """Whether the output is a terminal that can be drawn on."""
        return self._console.is_terminal and not self._console.is_dumb_terminal

    def screen(self) -> Live:
        """Return a context in which `draw` has the whole screen."""
        return self._live

    def look(self) -> None:
        """Read a new snapshot. Raises Unavailable or RequestError."""
        self._snapshot = look(self._client)
        self._rates, self._error = self._window.add(self._snapshot), None

    def try_look(self) -> None:
        """Read a new snapshot, else show the last one with the reason. Read the shown spans anew, too."""
        try:
            self.look()
        except BatonError as error:
            self._error = str(error)
        self._read_spans()

    def press(self, key: bytes) -> None:
        """Do what a key is for. Other keys do nothing."""
        match key:
            case b"\x1b[A" | b"k":
                self._chosen -= 1
            case b"\x1b[B" | b"j":
                self._chosen += 1
            case b"s":
                self._orders.append(self._orders.pop(0))
            case b"\n" if self._explained is None and self._snapshot.requests:
                self._explained = self._requests()[self._chosen].rid
                self._read_spans()
            case b"\n" | b"\x1b":
                self._explained = None
            case _:
                return
        self._chosen = max(0, min(self._chosen, len(self._snapshot.requests) - 1))

    def print(self) -> None:
        """Print everything once."""
        for part in self._parts(self._requests()):
            self._console.print(part)

    def draw(self) -> None:
        """Draw as much as the screen holds."""
        console = self._console
        if self._explained is not None:
            parts: list[RenderableType] = [*self._spans, Text("Enter goes back, q leaves", "dim")]
            return self._live.update(Group(*parts), refresh=True)
        requests = self._requests()
        self._chosen = max(0, min(self._chosen, len(requests) - 1))
        above = sum(len(console.render_lines(part)) for part in self._parts([]))
        num_shown = max(_MIN_REQUESTS, console.height - above - 2)
        first = max(0, self._chosen - num_shown + 1)
        keys = Text(f"q leaves, s sorts (now by {self._orders[0]}), arrows choose, Enter shows the spans", "dim")
        parts = [*self._parts(requests[first : first + num_shown], self._chosen - first), keys]
        return self._live.update(Group(*parts), refresh=True)

    def _requests(self) -> list[LiveRequest]:
        return sorted(self._snapshot.requests, key=_ORDERS[self._orders[0]], reverse=True)

    def _parts(self, requests: list[LiveRequest], chosen: int | None = None) -> Iterator[RenderableType]:
        """Yield the parts of the picture from above."""
        snapshot, rates, width = self._snapshot, self._rates, self._console.width
        router = snapshot.router
        state = "ready" if router.reason is None else f"not ready: {router.reason}"
        style = "bold green" if router.reason is None else "bold red"
        yield _text(f"{', '.join(snapshot.models) or 'no model'} at {self._client.url}: {state}", style)
        if self._error is not None:
            yield _text(f"no newer figures: {self._error}", "bold red")
        yield _text("\n".join(flow(service_words(snapshot, rates), width)))
        if snapshot.sees == "counts":
            yield _text(_COUNTS_ONLY, "yellow")
            return
        yield Text()
        yield _nodes(snapshot, rates, width >= _NARROW, self._console.encoding)
        full = (f"{node.id}: {node.why}" for node in snapshot.nodes if node.state == "ready" and node.why)
        for words in dict.fromkeys((*troubles(snapshot).values(), *full)):
            yield _text(words, "yellow")
        if snapshot.waits:
            yield Text("\nwaiting", "bold")
        for wait in snapshot.waits:
            words = f"{wait.count:,} in {wait.where}, the oldest for {about(wait.oldest_s)}"
            yield _text(f"{words}: {wait.why}" if wait.why else words)
        if snapshot.requests:
            num_left = snapshot.num_requests - len(snapshot.requests)
            yield Text(f"\n{num_left:,} older requests are not listed" if num_left > 0 else "")
            yield _request_table(requests, chosen, width)

    def _read_spans(self) -> None:
        """Read the spans of the request that the user has opened, if there is one."""
        if self._explained is None:
            return
        path = f"/debug/requests/{quote(self._explained, safe='')}"
        try:
            answer = self._client.decoded(path, self._client.read(path, _TIMEOUT_S), Explanation)
        except BatonError as error:
            self._spans = [_text(str(error), "bold red")]
            return
        block = _blocks(self._console.encoding)[0]
        self._spans = [_text(line) for trace in answer.requests for line in request_lines(trace, block)]


def _nodes(snapshot: Snapshot, rates: Rates | None, is_wide: bool, encoding: str) -> RenderableType:
    """Return a row per node, and what the bars mean."""
    table = _table(is_wide)
    for name in ("node", "state"):
        table.add_column(name, no_wrap=True)
    for name in ("running", "tokens/s", *(("transfer", "heard", "pages") if is_wide else ())):
        table.add_column(name, no_wrap=True, justify="left" if name == "pages" else "right")
    blocks = _blocks(encoding)
    for node in snapshot.nodes:
        rate = None if rates is None else rates.nodes.get(node.id)
        tokens = "" if rate is None else f"{rate.computed_tokens_per_s + rate.generated_tokens_per_s:,.0f}"
        cells = [
            _text(node.id),
            _text(node.state, _COLORS.get(node.state, "red")),
            Text(f"{node.running}/{node.max_running}"),
            Text(tokens),
        ]
        if is_wide:
            transfer = "" if rate is None else _speed(rate.bytes_per_s)
            cells += [Text(transfer), Text(f"{node.last_seen_s:.1f} s"), Text(_pages(node, blocks))]
        table.add_row(*cells)
    legend = "  ".join(f"{block} {owner}" for owner, block in zip(_OWNERS, blocks, strict=True))
    return Group(table, Text(f"pages: {legend}", "dim")) if is_wide else table


def _speed(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.2f} GB/s" if bytes_per_s >= 1e9 else f"{bytes_per_s / 1e6:.1f} MB/s"


def _blocks(encoding: str) -> str:
    """Return the characters of bars, one for each owner of pages."""
    return "█▓▒▪░" if "utf" in encoding.lower() else "#%=+."


def _pages(node: LiveNode, blocks: str) -> str:
    """Return a bar of a node's pages by owner, and the share that is not free; of tail pages, the share alone."""
    owned = node.pages
    if owned is None or not owned.total:
        return ""
    ends = accumulate((getattr(owned, owner) for owner in _OWNERS), initial=0)
    edges = [round(_BAR * end / owned.total) for end in ends]
    bar = "".join(block * (b - a) for block, (a, b) in zip(blocks, pairwise(edges), strict=True))
    tails = f", tails {1 - node.free_tails / node.num_tails:.0%}" if node.num_tails else ""
    return f"{bar} {1 - owned.free / owned.total:.0%}{tails}"


def _request_table(requests: list[LiveRequest], chosen: int | None, width: int) -> Table:
    is_wide = width >= _NARROW
    table = _table(is_wide)
    table.add_column("request", no_wrap=True, max_width=14 if is_wide else 10)
    table.add_column("stage", no_wrap=True)
    for name in ("prompt", "tokens", "age") if is_wide else ("tokens", "age"):
        table.add_column(name, no_wrap=True, justify="right")
    if is_wide:
        table.add_column("why", no_wrap=True, max_width=width - _BEFORE_WHY)
    for index, request in enumerate(requests):
        tokens, age = f"{request.num_tokens:,}", f"{request.age_s:.1f} s"
        figures = (f"{request.num_prompt:,}", tokens, age, request.why) if is_wide else (tokens, age)
        table.add_row(*map(_text, (request.rid, request.stage, *figures)), style="reverse" if index == chosen else "")
    return table


def _table(is_wide: bool) -> Table:
    return Table(box=None, padding=(0, 2 if is_wide else 1, 0, 0), header_style="bold")


def _text(words: str, style: str = "") -> Text:
    """Return a text of the router, without characters that a terminal would obey."""
    return Text("\n".join(map(printable, words.split("\n"))), style, overflow="fold")
