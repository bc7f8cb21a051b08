"""`baton doctor --cluster`: facts that a router tells of itself and its nodes, and the checks of them.

The types here are the part of the router's answers that is checked. Whatever else an older or newer router says is
skipped, so this command works with routers of other releases.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from ...metadata.bus.liveness import PEER_SILENCE_S, RARE_INTERVAL_S
from ...metadata.errors import Unavailable
from ...metadata.version import package_version
from ..client import Client, failure
from .finding import Finding

_LARGE = {f"X-Padding-{number}": "x" * 7000 for number in range(3)}  # two frames of 9,000 bytes, the largest in use
LARGE_S = 5.0
_NUM_TRACES = 8
_FAR_S = 2.0  # clocks of hosts that are set by NTP differ by less
_RESTARTS = 2
_Answer = TypeVar("_Answer", bound=Struct)


class NodeFaults(Struct, frozen=True):
    """Counters of a node that should stay at 0."""

    checksum_failures: int = 0
    dropped_frames: int = 0


class SeenNode(Struct, frozen=True):
    """A node as the router sees it. `layout` is compared as it is."""

    node_id: str
    role: str
    model: str
    last_seen_s: float = 0.0
    data_address: str = ""
    layout: dict[str, Any] = {}
    target_fingerprint: str = ""
    draft_fingerprint: str | None = None
    stats: NodeFaults = NodeFaults()
    num_restarts: int = 0


class MissingNode(Struct, frozen=True):
    """A node that is missing or takes no requests, in the router's words."""

    words: str


class SeenPair(Struct, frozen=True):
    """A prefill and a decode node, and the state of their canary."""

    prefill: str
    decode: str
    state: str


class SeenNodes(Struct, frozen=True):
    """The checked part of GET /debug/nodes."""

    nodes: tuple[SeenNode, ...]
    degraded: tuple[MissingNode, ...] = ()
    pairs: tuple[SeenPair, ...] = ()


class _Version(Struct, frozen=True):
    version: str


class _Ledgers(Struct, frozen=True):
    nodes: dict[str, dict[str, Any] | None]


class _Request(Struct, frozen=True):
    rid: str


class _Requests(Struct, frozen=True):
    requests: tuple[_Request, ...]


class _PullTimes(Struct, frozen=True):
    transport: str = ""


class _Span(Struct, frozen=True):
    node: str | None = None
    pull_times: _PullTimes | None = None


class _Sequence(Struct, frozen=True):
    parts: tuple[_Span, ...] = ()


class _Trace(Struct, frozen=True):
    choices: tuple[_Sequence, ...] = ()


class _Traces(Struct, frozen=True):
    requests: tuple[_Trace, ...] = ()


class ClusterFacts(Struct, frozen=True, kw_only=True):
    """Facts that a router told of itself and its nodes. `clock_s`: how far its clock is ahead of this host's, exact to
    `clock_error_s`; None if it names no date. `frames_error`: why an exchange of large frames failed; "" if it did not.
    `transports`: decode nodes, each with a transport that brought it the pages of one of the last requests."""

    url: str
    version: str
    clock_s: float | None = None
    clock_error_s: float = 0.0
    frames_error: str = ""
    is_ready: bool = True
    reason: str = ""
    nodes: SeenNodes = SeenNodes(())
    silent: tuple[str, ...] = ()  # nodes that did not answer a question for their ledger
    transports: frozenset[tuple[str, str]] = frozenset()


def read_cluster(client: Client) -> ClusterFacts:
    """Ask the router. If large frames are lost, nothing else is asked: the answers would not come. Raises Unavailable
    if no Baton router answers, RequestError if it refuses to tell."""
    asked_at = time.time()
    router_s = _seconds(client.exchange("/version").date)
    answered_at = time.time()
    facts = ClusterFacts(
        url=client.url,
        version=_ask(client, "/version", _Version).version,
        clock_s=None if router_s is None else router_s + 0.5 - (asked_at + answered_at) / 2,
        clock_error_s=0.5 + (answered_at - asked_at) / 2,  # the date is in whole seconds
    )
    try:
        client.exchange("/openapi.json", _LARGE, LARGE_S)
    except Unavailable as error:
        return msgspec.structs.replace(facts, frames_error=str(error))
    nodes = _ask(client, "/debug/nodes", SeenNodes)
    ledgers = _ask(client, "/debug/ledger", _Ledgers)
    status, body = client.ready()
    return msgspec.structs.replace(
        facts,
        is_ready=status == 200,
        reason="" if status == 200 else str(failure(status, body)),
        nodes=nodes,
        silent=tuple(name for name, ledger in ledgers.nodes.items() if ledger is None),
        transports=frozenset(_transports(client)),
    )


def _transports(client: Client) -> Iterator[tuple[str, str]]:
    recent = _ask(client, f"/debug/requests?outcome=done&limit={_NUM_TRACES}", _Requests)
    for request in recent.requests:
        for trace in _ask(client, f"/debug/requests/{request.rid}", _Traces).requests:
            for span in (span for sequence in trace.choices for span in sequence.parts):
                if span.node is not None and span.pull_times is not None and span.pull_times.transport:
                    yield span.node, span.pull_times.transport


def _ask(client: Client, path: str, kind: type[_Answer]) -> _Answer:
    absent = f"there is no GET {path}: this is no Baton router, or an older one than this command"
    return client.decoded(path, client.read(path, absent=absent), kind)


def _seconds(date: str) -> float | None:
    try:
        return parsedate_to_datetime(date).timestamp()
    except ValueError:
        return None


def check_cluster(facts: ClusterFacts) -> Iterator[Finding]:
    """Yield the findings of all checks that the facts allow, in the order of the tables."""
    for name, check in (WAY_CHECKS if facts.frames_error else WAY_CHECKS | NODE_CHECKS).items():
        for finding in check(facts):
            yield Finding(finding.level, finding.what, finding.mend, name)


def _versions(facts: ClusterFacts) -> Iterator[Finding]:
    own = package_version()
    if facts.version == own:
        yield Finding("ok", f"router {facts.version}, as this command; a node's log names its protocol")
        return
    mend = "Neighbouring releases serve side by side; upgrade router and nodes one after the other."
    yield Finding("note", f"the router is {facts.version}, this command {own}", mend)


def _ready(facts: ClusterFacts) -> Iterator[Finding]:
    roles = [node.role for node in facts.nodes.nodes]
    here = f"{roles.count('prefill')} prefill and {roles.count('decode')} decode nodes"
    if facts.is_ready:
        yield Finding("ok", f"{facts.url} serves, with {here}")
        return
    mend = "Start or undrain what is missing; the log of a node that has not joined says why."
    yield Finding("error", f"{facts.url} does not serve: {facts.reason}", mend)


def _degraded(facts: ClusterFacts) -> Iterator[Finding]:
    for each in facts.nodes.degraded:
        yield Finding("warning", each.words, "Look at the node's log; start or undrain it, if it should serve.")


def _silence(facts: ClusterFacts) -> Iterator[Finding]:
    most_s = RARE_INTERVAL_S + PEER_SILENCE_S
    late = {node.node_id: node.last_seen_s for node in facts.nodes.nodes if node.last_seen_s > most_s}
    mend = "Look at the node's log and at the load of its host; if it hangs, stop and start it."
    for name, seconds in late.items():
        yield Finding("warning", f"{name} was last heard {seconds:.1f} s ago", mend)
    for name in facts.silent:
        if name not in late:
            yield Finding("warning", f"{name} sends heartbeats, but does not answer questions", mend)
    if not late and not facts.silent and facts.nodes.nodes:
        yield Finding("ok", f"every joined node answers: {len(facts.nodes.nodes)}")


def _pairs(facts: ClusterFacts) -> Iterator[Finding]:
    unlike = [pair for pair in facts.nodes.pairs if pair.state != "ready"]
    for pair in unlike:
        is_wrong = "faulty" in pair.state or "undecided" in pair.state
        mend = "Stop the node that computes wrongly, and check its GPU and its checkpoint."
        wait = "It gets a canary every two seconds: ask again in a moment."
        yield Finding(
            "error" if is_wrong else "note",
            f"{pair.prefill} with {pair.decode}: {pair.state}",
            mend if is_wrong else wait,
        )
    if facts.nodes.pairs and not unlike:
        yield Finding("ok", f"canaries are right through {len(facts.nodes.pairs)} of {len(facts.nodes.pairs)} pairs")


def _layouts(facts: ClusterFacts) -> Iterator[Finding]:
    first: dict[str, SeenNode] = {}
    is_alike = True
    for node in facts.nodes.nodes:
        other = first.setdefault(node.model, node)
        if words := _difference(other, node):
            is_alike = False
            mend = (
                "Start both with the same model, page size, drafter and types, or give the models unlike --model-name."
            )
            yield Finding("warning", f"nodes of model {node.model} do not fit each other: {words}", mend)
    if is_alike and facts.nodes.nodes:
        yield Finding("ok", f"nodes of one model fit each other: {', '.join(first)}")


def _difference(one: SeenNode, other: SeenNode) -> str:
    """Return the first field in which two nodes of a model differ, with both values; "" if there is none."""
    values = [
        {**node.layout, "weights": node.target_fingerprint, "drafter's weights": node.draft_fingerprint}
        for node in (one, other)
    ]
    for name in values[0] | values[1]:
        a, b = (each.get(name) for each in values)
        if a != b:
            return f"{name} is {_short(a)} on {one.node_id} and {_short(b)} on {other.node_id}"
    return ""


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _handoff(facts: ClusterFacts) -> Iterator[Finding]:
    is_one_host = all("127.0.0.1" in node.data_address for node in facts.nodes.nodes if node.data_address)
    for name, transport in sorted(facts.transports):
        if transport in ("nixl", "plain", "aes", "zmq") and is_one_host:
            what = f"pages come to {name} by {transport}, though all nodes are on one host"
            mend = (
                f"Run the nodes as one user in one PID namespace (containers: --pid), without --transport {transport}."
            )
            yield Finding("warning", what, mend)
        else:
            yield Finding("ok", f"pages come to {name} by {transport}")
    if not facts.transports:
        yield Finding("ok", "no finished request shows yet by which transport pages come")
    for node in facts.nodes.nodes:
        if node.stats.checksum_failures:
            what = f"{node.node_id} has received {node.stats.checksum_failures} damaged pages"
            yield Finding("warning", what, "Check the memory and the network of its host and of the prefill nodes'.")
        if node.stats.dropped_frames:
            what = f"{node.node_id} has dropped {node.stats.dropped_frames} frames that were no messages for it"
            yield Finding("warning", what, "Look in its log for who sent them.")


def _restarts(facts: ClusterFacts) -> Iterator[Finding]:
    for node in facts.nodes.nodes:
        if node.num_restarts > _RESTARTS:
            what = f"{node.node_id} has started {node.num_restarts} times again"
            yield Finding("warning", what, "The end of its earlier logs says why it died.")


def _clock(facts: ClusterFacts) -> Iterator[Finding]:
    if facts.clock_s is None:
        yield Finding("note", "the router names no date, so its clock cannot be compared", "Ask it without a proxy.")
    elif abs(facts.clock_s) - facts.clock_error_s > _FAR_S:
        side = "ahead of" if facts.clock_s > 0 else "behind"
        what = f"the router's clock is {abs(facts.clock_s):.1f} s {side} this host's"
        mend = "Set the clocks by NTP: no request depends on them, but logs and traces of several hosts do."
        yield Finding("warning", what, mend)
    else:
        yield Finding("ok", f"the router's clock is within {_FAR_S:g} s of this host's")


def _frames(facts: ClusterFacts) -> Iterator[Finding]:
    if not facts.frames_error:
        yield Finding("ok", "large frames pass between here and the router, both ways")
        return
    what = f"the router answers small requests, but not large ones: {facts.frames_error}"
    mend = "Compare `ping -M do -s 1400 ROUTER` with `-s 100`, and set the interface to the MTU that passes."
    yield Finding("error", what, mend)


WAY_CHECKS: dict[str, Callable[[ClusterFacts], Iterator[Finding]]] = {  # of the router, and the way to it
    "versions": _versions,
    "clock": _clock,
    "MTU": _frames,
}
NODE_CHECKS: dict[str, Callable[[ClusterFacts], Iterator[Finding]]] = {
    "service": _ready,
    "degraded": _degraded,
    "heartbeats": _silence,
    "canaries": _pairs,
    "layouts": _layouts,
    "handoff": _handoff,
    "restarts": _restarts,
}
