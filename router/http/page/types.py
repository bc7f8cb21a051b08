"""The snapshot of the service that GET /live answers, and the answers beside it. The OpenAPI document is generated from
these types."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from ....metadata.wire.node_info import Role
from ...requests.trace import Stage

Sees = Literal["everything", "counts"]  # operators see everything
LiveStage = Stage | Literal["receive"]
LiveState = Literal["ready", "draining", "faulty", "silent", "joining", "gone"]


class RootAnswer(Struct, frozen=True):
    """Answer of GET / to programs. Browsers get the page."""

    words: str


class LiveRouter(Struct, frozen=True, kw_only=True):
    """The router. `reason`: why requests are not served as meant, None if they are."""

    version: str
    epoch: str
    uptime_s: float
    is_ready: bool
    is_draining: bool
    reason: str | None


class LiveCounts(Struct, frozen=True):
    """Requests that wait for nodes, and requests that nodes work on, at this moment."""

    waiting: int
    running: int


class EndedRequests(Struct, frozen=True):
    """Requests that ended, by outcome."""

    done: int
    failed: int
    cancelled: int
    refused: int


class LiveTotals(Struct, frozen=True, kw_only=True):
    """Counters since the router's start. Those from `preemptions` on are sums over the nodes that are here now, since
    their starts."""

    requests: EndedRequests
    prompt_tokens: int  # of finished requests
    cached_tokens: int  # of these, found in a prefix cache
    output_tokens: int
    transfer_bytes: int
    transfer_pages: int
    moves: int
    preemptions: int
    num_rounds: int
    num_drafted: int
    accepted_at: list[int]


class LatencyBuckets(Struct, frozen=True):
    """A histogram: how many values lie at or below each bound and above the one before. One more count than bounds: the
    values above the last bound."""

    bounds_s: tuple[float, ...]
    counts: list[int]


class Latencies(Struct, frozen=True):
    """Histograms of all requests since the router's start."""

    ttft: LatencyBuckets
    itl: LatencyBuckets
    queue: LatencyBuckets
    handoff: LatencyBuckets


class OwnedPages(Struct, frozen=True, kw_only=True):
    """Pages of a node's pool by owner. The five owners sum to `total`."""

    total: int
    free: int
    request: int
    ticket: int
    cache: int
    padding: int


class NodeCounters(Struct, frozen=True, kw_only=True):
    """Counters of a node since its start."""

    steps: int
    computed_tokens: int
    cached_tokens: int
    generated_tokens: int
    preemptions: int
    bytes_moved: int
    transfer_seconds: float
    num_rounds: int
    num_drafted: int
    accepted_at: tuple[int, ...]


class LiveNode(Struct, frozen=True, kw_only=True):
    """One node. `why`: why it takes no work now, "" if it does. A lost node stays for a minute, as `gone`: then its
    figures are zero or null."""

    id: str
    role: Role
    model: str
    group: str | None  # of ranks
    rank: int
    num_ranks: int
    state: LiveState
    why: str
    last_seen_s: float
    phase: str | None = None
    phase_age_s: float | None = None
    step: int | None = None
    pages: OwnedPages | None = None  # None until the node has answered, and if nobody asked it
    free_pages: int = 0
    num_pages: int = 0
    free_tails: int = 0  # tail pages
    num_tails: int = 0
    page_size: int = 0
    max_running: int = 0
    running: int = 0
    waiting: int = 0
    tickets: int = 0
    queued_tokens: int = 0
    round_s: float = 0.0
    counters: NodeCounters | None = None


class LivePair(Struct, frozen=True):
    """A prefill and a decode node that take new work. `why`: what is wrong with the pair, "" if nothing is."""

    prefill: str
    decode: str
    state: Literal["ready", "untried", "faulty"]
    why: str


class LiveRequest(Struct, frozen=True, kw_only=True):
    """A live request, shown by its first choice. `why`: what it waits for, and why it has its nodes."""

    rid: str
    model: str
    stage: LiveStage
    node: str
    prefill: str
    decode: str
    num_prompt: int
    num_tokens: int
    age_s: float
    why: str


class LiveWait(Struct, frozen=True):
    """Requests that wait in one place for one reason."""

    where: str
    why: str
    count: int
    oldest_s: float


class Snapshot(Struct, frozen=True, kw_only=True):
    """State of the service at one moment. Who does not operate the router sees counts only: then the lists from `nodes`
    on are empty. `requests` are the newest live ones; `num_requests` counts all live ones."""

    at: float  # seconds since 1970
    sees: Sees
    router: LiveRouter
    models: list[str]
    counts: LiveCounts
    totals: LiveTotals
    latencies: Latencies
    nodes: list[LiveNode] = []
    pairs: list[LivePair] = []
    requests: list[LiveRequest] = []
    num_requests: int = 0
    waits: list[LiveWait] = []
