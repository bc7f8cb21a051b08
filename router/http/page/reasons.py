"""Reasons in words, for operators: why a node takes no work, why a pair does not work, and why a request waits. Each is
a function of the books, which it only reads. Why a request has its nodes is in its trace."""

from __future__ import annotations

from typing import Literal, NamedTuple

from ...health.health import PairHealth
from ...nodes.availability import drain_summary, drain_words
from ...nodes.mismatch import missing_partner
from ...nodes.node import ROLES, Node, NodeGroup
from ...nodes.registry import Registry
from ...requests.attempt import Attempt
from ...requests.request import Request
from ...requests.trace import Span
from ...waiting.entry import Entry
from ...waiting.queue import WaitingQueue
from .types import LiveState

SILENT_S = 1.0  # for so long a heartbeat may be due


class Standing(NamedTuple):
    """State of a node, and why it takes no work, "" if it does."""

    state: LiveState
    why: str = ""


class PairStanding(NamedTuple):
    """State of a pair, and what is wrong with it, "" if nothing is."""

    state: Literal["ready", "untried", "faulty"]
    why: str = ""


def pair_standing(health: PairHealth, prefill: Node | None, decode: Node | None) -> PairStanding:
    """Return the state of a pair, or of a decode node alone."""
    state = health.state(prefill, decode)
    if state == "ready":
        return PairStanding("ready")
    if state == "untried":
        return PairStanding("untried", "no canary request has passed yet")
    return PairStanding("faulty", state)


def node_standing(node: Node, pairs: list[PairStanding], registry: Registry, now: float) -> Standing:
    """Return the state of a joined node. `pairs`: the states of its pairs, and of the node alone if it computes local
    prompts."""
    if node.is_draining:
        return Standing("draining", drain_words(node))
    if not node.is_reachable:
        return Standing("silent", "a message could not be sent to it; it gets work again after its next heartbeat")
    if node.silence_s(now) > SILENT_S:
        return Standing("silent", f"its last heartbeat came {now - node.last_seen:.1f} s ago")
    if not node.is_live:
        return Standing("joining", _missing_ranks(node))
    if node.group.tokenizer is None:
        if node.group.has_bad_tokenizer:
            return Standing("faulty", "the tokenizer file of its model cannot be read")
        return Standing("joining", "the tokenizer of its model has not arrived yet")
    if not pairs:
        return Standing("joining", _missing_partner(node, registry))
    if any(pair.state == "ready" for pair in pairs):
        late = "its news of cached pages is late: it gets prompts by its load alone"
        return Standing("ready", _why_full(node, now) or late * (node.cache.state(now) == "late"))
    faults = [pair.why for pair in pairs if pair.state == "faulty"]
    return Standing("faulty", faults[0]) if faults else Standing("joining", pairs[0].why)


def _missing_ranks(node: Node) -> str:
    place = node.hello.place
    if place is None:
        return "it takes no work yet"
    num_here = sum(other.unit_key == node.unit_key for other in node.group.nodes.values())
    return f"{num_here} of the {place.size} ranks of its group {place.group} have joined"


def _missing_partner(node: Node, registry: Registry) -> str:
    other = next(role for role in ROLES if role != node.role)
    why = missing_partner(node, registry.nodes.values())
    if why is not None:
        return why
    draining = [each for each in node.group.nodes.values() if each.role == other and each.is_draining]
    return f"no {other} node takes work: {drain_summary(draining)}" if draining else f"no {other} node is here"


def _why_full(node: Node, now: float) -> str:
    """Return why a node that is ready has no room for more, "" if it has."""
    if node.role == "prefill":
        most = node.max_prompts
        return f"full: it holds {node.num_prompts} of at most {most} prompts" if node.num_prompts >= most else ""
    if node.num_units >= node.max_running:
        return f"full: it runs {node.num_units} of at most {node.max_running} sequences"
    num_tails, free_tails = node.hello.capacity.num_tails, node.load.free_tails
    if node.is_full(now):
        tails = f", and {free_tails} of {num_tails} tail pages" if num_tails else ""
        return f"full: it had no pages for the last sequence; {node.room} of {node.num_pages} are free{tails}"
    if node.room <= 0:
        return f"full: none of its {node.num_pages} pages is free"
    if num_tails and not free_tails:
        return f"full: none of its {num_tails} tail pages is free"
    if node.group.computes_locally and not node.load.has_prompt_room:
        return "beside its streams it has no room for a prompt within --max-gap-ms"
    return ""


class GroupQueue(NamedTuple):
    """The queue of a group: its entries by request, and why requests that could go to some node wait."""

    entries: dict[int, Entry]  # by id(request)
    why: str


def group_queue(group: NodeGroup, queue: WaitingQueue, health: PairHealth, now: float) -> GroupQueue:
    """Return what waits in the queue of a group, and why."""
    why = _why_queue(group, queue, health, now) if len(queue) else ""
    return GroupQueue({id(entry.request): entry for entry in queue.unordered}, why)


def _why_queue(group: NodeGroup, queue: WaitingQueue, health: PairHealth, now: float) -> str:
    pairs = [pair for pair in group.pairs() if health.is_usable(*pair)]
    alone = [node for node in group.local_nodes() if health.is_usable(None, node)]
    if not pairs and not alone:
        missing = [role for role in ROLES if not group.live(role)]
        draining = drain_summary(node for node in group.nodes.values() if node.role in missing)
        if missing:
            return f"no {' and no '.join(missing)} node takes work{draining and ': ' + draining}"
        return health.why_unusable(group)
    by_role = ({prefill for prefill, _ in pairs}, {*alone, *(decode for _, decode in pairs)})
    for role, nodes in zip(ROLES, by_role, strict=True):
        full = sorted((node.node_id, why) for node in nodes if (why := _why_full(node, now)))
        if full and len(full) == len(nodes):
            return f"no {role} node takes more: {full[0][0]} is {full[0][1]}"
    if queue.shares.are_several:
        return "several tenants take turns, and a node gets the next prompt when it has computed most of its prompts"
    return "it waits for its turn: requests before it go first"


def why_waits(request: Request, attempt: Attempt | None, span: Span, queue: GroupQueue) -> str:
    """Return what a live request waits for, "" if it just runs. `span` is its last one."""
    if span.name == "queue":
        words = [_why_queued(queue.entries.get(id(request)), queue), span.reason and f"moved: {span.reason}"]
        return "; ".join(filter(None, words))
    if attempt is None:
        return f"{span.node} is asked for pages" if span.name == "reserve" else span.reason
    return _under_way(span.name, attempt.prefill if span.name == "prefill" else attempt.decode)


def _why_queued(entry: Entry | None, queue: GroupQueue) -> str:
    if entry is None or entry.stranded_since is None:
        return queue.why
    pages = entry.need.local_pages if entry.is_local else max(entry.need.prefill_pages, entry.need.decode_pages or 0)
    return f"no node that works has {pages} pages and {entry.need.context_len} tokens of context for it: {queue.why}"


def _under_way(stage: str, node: Node | None) -> str:
    """Return what happens in a stage that a request does not control, "" if it just runs."""
    if node is None:
        return ""
    match stage:
        case "prefill" | "local prefill":
            return f"{node.node_id} has {_counted(node.num_prompts, 'prompt')} to compute"
        case "handoff":
            return f"{node.node_id} pulls the pages of the prompt"
        case _:
            return ""


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
