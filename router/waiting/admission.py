"""Admission to the waiting queues: which requests may wait, for how long, and which are refused.

A client gets 429 if the queues are full, by requests or by prompt tokens, or if its request would be late at the
present pace of its group (pace.py). A request that has become late is refused before it costs a node anything. A full
queue makes room for a tenant that would still have less waiting than the one with most: it refuses the last requests
of that one. Else it makes room for a request of higher priority: it refuses the requests of the same tenant whose turn
comes last.

If no node could take a request even when idle, the request waits for such a node for at most `Bounds.node_wait_s`. Then
it ends with an error. It does not block the requests behind it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from math import ceil
from typing import NamedTuple

from ...metadata.errors import BatonError, Overloaded, RequestError, Unavailable
from ...metadata.wire.node_info import Role
from ..errors import NodeFault
from ..nodes.availability import no_node
from ..nodes.node import ROLES, Node, NodeGroup
from ..requests.request import Request
from ..tenants.fair_share import DEFAULT, Tenant
from .entry import Entry
from .pace import Pace
from .queue import WaitingQueue, turn_of

MARGIN_S = 0.15  # an answer's way through busy processes, counted as a part of its time
PATIENCE_S = 0.25  # a request that has waited less is not given up as late: nodes may have room this moment


class Bounds(NamedTuple):
    """Limits of the queues: requests and prompt tokens of all groups, time in the queue, and time to wait for a node
    that could take the request."""

    num_requests: int
    num_tokens: int
    wait_s: float
    node_wait_s: float = 10.0


class Asked(NamedTuple):
    """The size of an HTTP request. `num_tokens`: of all its prompts; `max_tokens`: of each output."""

    num_requests: int
    num_tokens: int
    max_tokens: int
    priority: int
    timeout_s: float
    tenant: Tenant = DEFAULT


class RefusedRequest(NamedTuple):
    """A request that must end with this error."""

    request: Request
    error: BatonError


class Queues:
    """The waiting queues of all groups. Decides which requests may wait. The caller ends those that it refuses."""

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self._queues: defaultdict[NodeGroup, WaitingQueue] = defaultdict(WaitingQueue)
        self._paces: defaultdict[NodeGroup, Pace] = defaultdict(Pace)
        self._served_at: dict[NodeGroup, float] = {}  # when a pair that takes requests was last there

    @property
    def groups(self) -> list[NodeGroup]:
        """Groups that have, or had, requests."""
        return list(self._queues)

    @property
    def num_waiting(self) -> int:
        """Entries that wait, over all groups."""
        return sum(map(len, self._queues.values()))

    @property
    def num_waiting_tokens(self) -> int:
        """Prompt tokens of these entries."""
        return sum(queue.num_tokens for queue in self._queues.values())

    @property
    def num_waiting_of(self) -> dict[str, int]:
        """Entries that wait for their first nodes, by tenant."""
        counts: dict[str, int] = {}
        for queue in self._queues.values():
            for name, num_entries, _ in queue.sizes:
                counts[name] = counts.get(name, 0) + num_entries
        return counts

    def waiting_in(self, group: NodeGroup) -> WaitingQueue:
        """The queue of a group."""
        return self._queues[group]

    def pace(self, group: NodeGroup) -> Pace:
        """Return the pace at which a group serves."""
        return self._paces[group]

    def knows(self, group: NodeGroup) -> bool:
        """Whether anything is kept for a group."""
        return group in self._queues or group in self._paces or group in self._served_at

    # Who waits

    def add(self, entry: Entry, *, first: bool = False) -> None:
        """Queue an entry, before all others if it was admitted before."""
        self._queues[entry.request.group].add(entry, first=first)

    def strike(self, entry: Entry, choices: Iterable[int]) -> None:
        """Take these choices out of an entry, and the entry out of its queue if none is left."""
        entry.choices = tuple(choice for choice in entry.choices if choice not in choices)
        if not entry.choices:
            self._queues[entry.request.group].remove(entry)

    def withdraw(self, request: Request) -> None:
        """Take out all entries of a request."""
        self._queues[request.group].withdraw(request)

    def forget(self, group: NodeGroup) -> None:
        """Forget a group that no longer exists. Its queue is empty."""
        queue = self._queues.pop(group, None)
        assert not queue, group.key
        self._paces.pop(group, None)
        self._served_at.pop(group, None)

    # Who may wait

    def check_fits(self, entry: Entry, now: float) -> None:
        """Raises Unavailable if nodes are missing, RequestError if the nodes that are there could never take it."""
        group, need = entry.request.group, entry.need
        if entry.is_open and entry.could_go_to((), (), group.local_nodes()):
            return
        roles = ROLES if entry.needs_decode else ROLES[:1]
        if entry.is_local:
            roles = ROLES[1:]
        missing: list[Role] = [role for role in roles if not group.live(role)]
        if missing:
            if self.may_wait(group, now):
                return
            raise no_node(f"no {missing[0]} node serves model {group.key.model!r} now", [group], missing)
        if entry.could_go_to(group.pairs(), group.live("prefill"), group.local_nodes()):
            return
        if entry.needs_decode and not any(True for _ in group.pairs()) and not entry.is_local:
            return
        num_pages = need.local_pages if entry.is_local else need.decode_pages or 0
        pages: dict[Role, int] = {"prefill": need.prefill_pages, "decode": num_pages}
        short: list[Role] = [role for role in roles if pages[role] > group.most_pages(role)]
        role: Role = short[0] if short else roles[-1]
        raise RequestError(
            f"the prompt has {len(entry.request.prompt_ids)} tokens and needs {pages[role]} pages of "
            f"{group.page_size} tokens; the largest {role} pool has {group.most_pages(role)}",
            param="prompt",
        )

    def check_room(self, group: NodeGroup, asked: Asked, now: float) -> None:
        """Raises Overloaded, which says when to come again, if this may not wait now or would be late. Raises
        RequestError if it may never wait.

        Requests that would give up their places to it do not count (`displaced`).
        """
        self._check_size(asked)
        queue, pace = self._queues[group], self._paces[group]
        _, num_excess, num_tokens = self._displaced(group, asked, now)
        if num_excess > 0:
            words = f"{self.num_waiting} requests wait already; at most {self._bounds.num_requests} may"
            raise self._overloaded(words, group, asked.tenant, now, num_excess)
        if num_tokens > 0:
            words = f"requests with {self.num_waiting_tokens} prompt tokens wait already; at most "
            words += f"{self._bounds.num_tokens} tokens may"
            num_excess = -(-len(queue) * num_tokens // max(1, queue.num_tokens))
            raise self._overloaded(words, group, asked.tenant, now, num_excess)
        num_before = queue.num_before(turn_of(now, asked.priority), asked.tenant)
        wait_s, service_s = pace.wait_s(num_before), pace.service_s(asked.max_tokens)
        patience_s = min(self._bounds.wait_s, asked.timeout_s - service_s - MARGIN_S)
        if wait_s and wait_s > patience_s:
            num_excess = round((wait_s - max(0.0, patience_s)) * (num_before + 1) / wait_s)
            words = f"{num_before} requests wait before this one: about {wait_s:.1f} s, and {service_s:.1f} s more to "
            words += f"be served; it may wait {self._bounds.wait_s:.1f} s, and last {asked.timeout_s:.1f} s in all"
            raise self._overloaded(words, group, asked.tenant, now, num_excess)

    def displaced(self, group: NodeGroup, asked: Asked, now: float) -> RefusedRequest | None:
        """Return the next request that must give up its place to this one, None if there is room."""
        entries, _, _ = self._displaced(group, asked, now)
        if not entries:
            return None
        request = entries[0].request
        reason = "its place in the queue went to a request of higher priority"
        if request.tenant.name != asked.tenant.name:
            reason = "the queue is full, and its place went to a tenant with fewer requests in it"
        return RefusedRequest(request, self.refusal(request, reason, now))

    def refusal(self, request: Request, reason: str, now: float) -> Overloaded:
        """Return the error of a request for which there is no room."""
        return self._overloaded(reason, request.group, request.tenant, now, 1)

    def may_wait(self, group: NodeGroup, now: float) -> bool:
        """Whether new requests may wait for nodes of the group: it can serve, or could lately, or a node joined lately.

        A node that joined lately may be the first of several: a restarted router meets its nodes one after the other.
        """
        if group.can_serve:
            return True
        times = [self._served_at[group]] if group in self._served_at else []
        if group.tokenizer is not None:
            times += [node.welcomed_at for role in ROLES for node in group.live(role)]
        return any(now - time <= self._bounds.node_wait_s for time in times)

    # Who has waited too long

    def is_late(self, entry: Entry, now: float) -> bool:
        """Whether a request has waited so long that it would miss its deadline, judging by how long others take."""
        request = entry.request
        if not entry.is_fresh or request.deadline is None or now - request.created_at < PATIENCE_S:
            return False
        service_s = self._paces[request.group].service_s(request.params.max_tokens)
        return now + service_s + MARGIN_S > request.deadline

    def late(self, group: NodeGroup, now: float) -> list[RefusedRequest]:
        """Return the requests of a group that are late. To be called several times per second."""
        requests = [entry.request for entry in self._queues[group].unordered if self.is_late(entry, now)]
        reason = "nodes are busy: it would not be done within its timeout_s any more"
        return [
            RefusedRequest(request, self.refusal(request, reason, now))
            for request in requests
            if request.deadline is not None and now <= request.deadline  # else it just ends by its deadline
        ]

    def stranded(
        self,
        group: NodeGroup,
        pairs: Iterable[tuple[Node, Node]],
        why_unusable: Callable[[NodeGroup], str],
        now: float,
        decodes: Sequence[Node] = (),
    ) -> list[RefusedRequest]:
        """Return the requests of a group that have waited too long for a node that could take them.

        To be called several times per second with the pairs that may get requests, and the decode nodes that may get
        local prompts.
        """
        if pairs or decodes:
            self._served_at[group] = now
        prefills = group.live("prefill")
        refused: list[RefusedRequest] = []
        known: dict[Hashable, bool] = {}  # most entries need about the same

        def could_go(entry: Entry) -> bool:
            kind = entry.kind
            if kind not in known:
                known[kind] = entry.could_go_to(pairs, prefills, decodes)
            return known[kind]

        for entry in self._queues[group].unordered:
            if entry.attempt is not None or entry.request.is_over or could_go(entry):
                entry.stranded_since = None
            elif entry.stranded_since is None:
                entry.stranded_since = now
            elif now - entry.stranded_since > self._bounds.node_wait_s:
                refused.append(
                    RefusedRequest(entry.request, self._stranded_error(entry, [*pairs, *decodes], why_unusable))
                )
        return refused

    # What is learned from those who were served

    def granted(self, request: Request, now: float) -> None:
        """A request has its nodes."""
        if not request.is_canary:
            self._paces[request.group].granted(now)
            self._queues[request.group].shares.served(request.share)

    def has_served(self, group: NodeGroup, now: float) -> None:
        """Nodes of the group have taken a request."""
        self._served_at[group] = now

    def ended(self, request: Request, now: float) -> None:
        """A request is over, complete or not. Its time predicts how long others will take."""
        if request.dispatched_at is not None and not request.is_canary:
            self._paces[request.group].served(now - request.dispatched_at, request.num_generated)

    def _overloaded(self, words: str, group: NodeGroup, tenant: Tenant, now: float, num_excess: int) -> Overloaded:
        """Return a refusal that says when the client should come again. `num_excess` entries of any tenant must leave
        before."""
        num_running = sum(node.num_units for node in group.live("decode"))
        num_running = num_running or sum(node.num_prompts for node in group.live("prefill"))
        part = self._queues[group].shares.part(tenant)
        return Overloaded(
            words,
            retry_after_s=self._paces[group].retry_after_s(
                now, ceil(num_excess * part), num_running, tenant.name, part
            ),
        )

    def _displaced(self, group: NodeGroup, asked: Asked, now: float) -> tuple[list[Entry], int, int]:
        """Return the entries that give up their places to this request, in order, and by how many requests and prompt
        tokens too many would wait then.

        As long as too many wait, the tenant with most of them gives up a place, if it still has more than the asking
        tenant would have with this request. Else an entry of the asking tenant with a later turn does.
        """
        excess = [self._num_excess(asked), self._num_excess_tokens(asked)]
        entries: list[Entry] = []
        if max(excess) <= 0:
            return entries, excess[0], excess[1]
        sizes = self._sizes(asked)
        own = sizes[asked.tenant.name]
        behind = self._queues[group].last_fresh(asked.tenant.name, turn_of(now, asked.priority))
        last = {asked.tenant.name: behind}
        while max(excess) > 0:
            measure = 0 if excess[0] > 0 else 1
            name = max(sizes, key=lambda name: sizes[name][measure])
            if sizes[name][measure] <= own[measure]:
                name = asked.tenant.name
            if name not in last:
                last[name] = self._last_fresh(name)
            entry = next(last[name], None)
            if entry is None and name == asked.tenant.name:
                break
            if entry is None:
                del sizes[name]  # nodes have been asked for all that is left
                continue
            entries.append(entry)
            for place, size in enumerate((1, entry.num_tokens)):
                excess[place] -= size
                sizes[name][place] -= size
        return entries, excess[0], excess[1]

    def _last_fresh(self, tenant: str) -> Iterator[Entry]:
        for queue in self._queues.values():
            yield from queue.last_fresh(tenant)

    def _sizes(self, asked: Asked) -> dict[str, list[int]]:
        """Return how many requests and prompt tokens of each tenant would wait, with this request."""
        sizes = {asked.tenant.name: [asked.num_requests, asked.num_tokens]}
        for queue in self._queues.values():
            for name, *size in queue.sizes:
                known = sizes.setdefault(name, [0, 0])
                known[:] = known[0] + size[0], known[1] + size[1]
        return sizes

    def _check_size(self, asked: Asked) -> None:
        """Raises RequestError for a request that may never wait."""
        if asked.num_requests > self._bounds.num_requests:
            words = f"{asked.num_requests} prompts; at most {self._bounds.num_requests} requests may wait"
            raise RequestError(f"prompt: {words}", param="prompt")
        if asked.num_tokens > self._bounds.num_tokens:
            words = f"{asked.num_tokens} prompt tokens; requests of at most {self._bounds.num_tokens} may wait"
            raise RequestError(f"prompt: {words}", param="prompt")

    def _num_excess(self, asked: Asked) -> int:
        return self.num_waiting + asked.num_requests - self._bounds.num_requests

    def _num_excess_tokens(self, asked: Asked) -> int:
        return self.num_waiting_tokens + asked.num_tokens - self._bounds.num_tokens

    def _stranded_error(
        self, entry: Entry, usable: Sequence[object], why_unusable: Callable[[NodeGroup], str]
    ) -> BatonError:
        group, wait_s = entry.request.group, self._bounds.node_wait_s
        words = f"no node of model {group.key.model!r} could take the request for {wait_s:g} s: "
        roles = ROLES[1:] if entry.is_local else ROLES
        missing: list[Role] = [role for role in roles if not group.live(role)]
        if missing:
            return no_node(words + f"no {' and no '.join(missing)} node is left", [group], missing)
        if not usable:
            shown = words + "its nodes cannot work together now"
            return NodeFault(words + why_unusable(group), Unavailable.code, shown)
        need = entry.need
        pages = need.local_pages if entry.is_local else max(need.prefill_pages, need.decode_pages or 0)
        return Unavailable(f"{words}none has room for the {pages} pages and the {need.context_len} tokens of context")
