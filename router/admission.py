"""The waiting queue of a group, and how its requests get their nodes.

    submit -> waiting (ids only, no pages) -> Reserve at a decode node -> Reserved -> Prefill -> running

The order is waiting.py's. A request that no node had room for blocks all behind it, so that large requests are not
starved by small ones. As long as nobody was refused, up to WINDOW reservations are under way at once; a refused
request can be overtaken only by those and by one of higher priority.

Who may wait at all is intake.py's part.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Hashable
from typing import Protocol

from ..metadata.errors import BatonError, RequestError, Unavailable
from ..metadata.wire.messages import Compute, Prefill, Reserve, Reserved, ToNode
from ..metadata.wire.node_info import Role
from ..metadata.wire.request import Unit
from .availability import no_node
from .intake import Bounds, Intake
from .node import ROLES, Group, Node
from .placement import DecodeFigures, PrefillFigures, PrefixAffinity, choose_decode, choose_prefill
from .queue import Entry, WaitingQueue
from .request import Attempt, Request
from .stranded import Stranded

logger = logging.getLogger(__name__)

WINDOW = 16  # reservations under way at once
ASK_S = 0.5  # a reservation without an answer is asked for again that often: before its claims are given up
ANSWER_S = 10.0  # ... and is taken back after so long
FULL_S = 2.0  # a node that said "full" is asked again after so long at the latest
QUEUED_PER_SLOT = 2  # prompts that a prefill node may hold for each of its running slots


class PairFull(Unavailable):
    """A pinned request found no room. Full is no failure of the pair."""


class Life(Protocol):
    """What admission asks of request_life.py."""

    def send(self, node: Node, message: ToNode) -> bool:
        """Sends to a node; False when it is gone or its queue is full."""
        ...

    def fail(self, request: Request, error: BatonError) -> None:
        """Ends a request with an error."""
        ...

    def unreachable(self, request: Request, attempt: Attempt, node: Node) -> None:
        """A message of an attempt could not be sent to a node."""
        ...

    def unanswered(self, request: Request, attempt: Attempt) -> None:
        """The decode node did not answer a reservation."""
        ...

    def is_usable(self, prefill: Node, decode: Node | None) -> bool:
        """Whether this pair may be given requests."""
        ...

    def why_unusable(self, group: Group) -> str:
        """Why no pair of the group works, in words."""
        ...

    def dispatched(self, request: Request, attempt: Attempt, now: float) -> None:
        """An attempt has its nodes."""
        ...


class Admission:
    """Waiting requests of all groups."""

    def __init__(self, epoch: str, bounds: Bounds, dispatcher: Life, *, node_wait_s: float = 10.0) -> None:
        self.affinity = PrefixAffinity()
        self._epoch = epoch
        self._dispatcher = dispatcher
        self._queues: defaultdict[Group, WaitingQueue] = defaultdict(WaitingQueue)
        self.intake = Intake(bounds, self._queues, dispatcher.fail)
        self._asked: dict[tuple[str, int], Entry] = {}
        self.stranded = Stranded(dispatcher, node_wait_s)

    @property
    def num_waiting(self) -> int:
        """Entries that wait, over all groups."""
        return self.intake.num_waiting

    def num_waiting_in(self, group: Group) -> int:
        """Entries that wait in one group."""
        return len(self._queues[group])

    def check_fits(self, entry: Entry) -> None:
        """Raises Unavailable without nodes, RequestError when no nodes that are there could ever hold the request."""
        group, need = entry.request.group, entry.need
        roles = ROLES if entry.needs_decode else ROLES[:1]
        missing: list[Role] = [role for role in roles if not group.live(role)]
        if missing:
            if self.stranded.may_wait(group, time.monotonic()):
                return
            raise no_node(f"no {missing[0]} node serves model {group.key.model!r} now", [group], missing)
        pairs = list(group.pairs())
        if entry.could_go_to(pairs, group.live("prefill")) or (entry.needs_decode and not pairs):
            return
        pages: dict[Role, int] = {"prefill": need.prefill_pages, "decode": need.decode_pages or 0}
        short: list[Role] = [role for role in roles if pages[role] > group.most_pages(role)]
        role: Role = short[0] if short else roles[-1]
        raise RequestError(
            f"the prompt has {len(entry.request.prompt_ids)} tokens and needs {pages[role]} pages of "
            f"{group.page_size} tokens; the largest {role} pool has {group.most_pages(role)}",
            param="prompt",
        )

    def submit(self, entry: Entry, *, first: bool = False) -> None:
        """Queues an entry, at the front when it was admitted before."""
        self._queues[entry.request.group].add(entry, first=first)
        self.pump(entry.request.group)

    def ask_now(self, entry: Entry) -> bool:
        """Asks for a pinned entry outside the queue; False when its nodes have no room. A refusal ends it."""
        self._queues[entry.request.group]  # from now on `check` looks after it
        return self._place(entry)

    def withdraw(self, request: Request) -> None:
        """Forgets a request that is over. What nodes hold of it is the caller's part."""
        for attempt in request.attempts.values():
            self.take_back(request, attempt)
        self._queues[request.group].withdraw(request)

    def forget(self, group: Group) -> None:
        """The group is no more; nobody waits in it."""
        queue = self._queues.pop(group, None)
        assert not queue, group.key
        self.intake.forget(group)
        self.stranded.forget(group)

    def take_back(self, request: Request, attempt: Attempt) -> Entry | None:
        """No answer is awaited any more for this attempt. Returns its entry, None when none was awaited."""
        entry = self._asked.pop((request.rid, attempt.number), None)
        if entry is None:
            return None
        entry.attempt = None
        if attempt.decode is not None:
            attempt.decode.pledged_pages -= (entry.need.decode_pages or 0) * len(attempt.choices)
        return entry

    def pump(self, group: Group) -> None:
        """Gives nodes to those who wait, as far as there is room."""
        now, pace = time.monotonic(), self.intake.pace(group)
        pairs, prefills = [pair for pair in group.pairs() if self._dispatcher.is_usable(*pair)], group.live("prefill")
        fits: dict[Hashable, bool] = {}  # most of those who wait need about the same
        num_under_way = 0
        for entry in list(self._queues[group]):
            if entry.request.is_over or not entry.choices or self.intake.is_late(entry, now):
                continue
            if entry.attempt is None and entry.pair is None:
                like = (entry.need, entry.needs_decode, frozenset(entry.unfit))
                if like not in fits:
                    fits[like] = entry.could_go_to(pairs, prefills)
                if not fits[like]:
                    continue  # it waits for a node that is not there, and is in nobody's way
            if (entry.attempt is None and not self._place(entry)) or entry.was_refused:
                pace.blocked(now)
                return
            num_under_way += 1
            if num_under_way == WINDOW:
                return
        pace.unblocked()

    def reserved(self, node: Node, message: Reserved, now: float) -> bool:
        """Decode's answer. False when nobody awaits it: then what it granted must be cancelled."""
        node.set_load(message.load)
        entry = self._asked.get((message.rid, message.attempt))
        if entry is None or entry.attempt is None or entry.attempt.decode is not node:
            return False
        request, attempt = entry.request, entry.attempt
        asked = attempt.choices
        self.take_back(request, attempt)
        granted = tuple(choice for choice in entry.choices if choice in asked and choice in message.granted)
        if len(granted) < len(asked):
            entry.was_refused = True
            node.mark_full(now)
            node.units.difference_update(Unit(request.rid, choice, attempt.number) for choice in asked)
            request.timeline.refused(request.sequences[choice] for choice in asked.difference(granted))
        if granted:
            self.stranded.served(request.group, now)
            attempt.choices = set(granted)
            node.units.update(Unit(request.rid, choice, attempt.number) for choice in granted)
            self._dispatch(entry, attempt, now)
        else:
            del request.attempts[attempt.number]
            self._refused(entry, node)
        self.pump(request.group)
        return True

    def check(self, now: float) -> None:
        """To be called a few times a second: overdue answers, nodes long full, requests long without nodes."""
        for entry in list(self._asked.values()):
            attempt = entry.attempt
            if attempt is not None and now - attempt.sent_at > ANSWER_S:
                self._dispatcher.unanswered(entry.request, attempt)
            elif attempt is not None and now > attempt.ask_at and attempt.decode is not None:
                attempt.ask_at = now + ASK_S
                self._dispatcher.send(attempt.decode, self._reserve(entry.request, attempt, attempt.decode))
        for group, queue in list(self._queues.items()):
            for node in group.live("decode"):
                if node.full_since is not None and now - node.full_since > FULL_S:
                    node.full_since = None
            self.intake.refuse_late(group, now)
            self.stranded.check(group, queue, now)
            self.pump(group)

    def _place(self, entry: Entry) -> bool:
        """Asks a decode node, or dispatches at once where none is needed. False when there is no room now."""
        now = time.monotonic()
        request = entry.request
        decode = self._pick_decode(entry) if entry.needs_decode else None
        if entry.needs_decode and decode is None:
            return False
        prefill = self._pick_prefill(entry, decode) if entry.needs_prefill else None
        if entry.needs_prefill and prefill is None:
            return False
        choices = entry.choices
        if decode is not None:
            room = decode.hello.capacity.max_running - len(decode.units)
            choices = choices[: min(room, entry.need.most_choices(prefill))]
        attempt = request.begin_attempt(set(choices), prefill, decode, now)
        if decode is None:
            self._dispatch(entry, attempt, now)
            return True
        entry.attempt = attempt
        self._asked[(request.rid, attempt.number)] = entry
        decode.pledged_pages += (entry.need.decode_pages or 0) * len(choices)
        decode.units.update(Unit(request.rid, choice, attempt.number) for choice in choices)
        attempt.ask_at = now + ASK_S
        if not self._dispatcher.send(decode, self._reserve(request, attempt, decode)):
            self.take_back(request, attempt)
            decode.units.difference_update(Unit(request.rid, choice, attempt.number) for choice in choices)
            del request.attempts[attempt.number]
            return False
        request.timeline.reserving((request.sequences[choice] for choice in choices), attempt, now)
        return True

    def _reserve(self, request: Request, attempt: Attempt, decode: Node) -> Reserve | Compute:
        epoch, rid, number, choices = self._epoch, request.rid, attempt.number, tuple(sorted(attempt.choices))
        wire_request = request.wire_request(choices[0])
        if attempt.prefill is None:
            return Compute(epoch, rid, number, choices, wire_request)
        return Reserve(epoch, rid, number, choices, wire_request, attempt.prefill.peer_of(decode))

    def _dispatch(self, entry: Entry, attempt: Attempt, now: float) -> None:
        """Sends the prompt to prefill, if it takes part, for the choices of `attempt`, and takes them off the entry."""
        request, prefill = entry.request, attempt.prefill
        self._strike(entry, attempt.choices)
        for choice in attempt.choices:
            request.sequences[choice].attempt = attempt
        attempt.dispatched = True
        attempt.sent_at = now
        if request.dispatched_at is None:
            request.dispatched_at = now
        self._dispatcher.dispatched(request, attempt, now)
        if not request.is_canary:
            self.intake.pace(request.group).granted(now)
        if prefill is None:
            return
        num_cached = self.affinity.num_matched(prefill.routing_id, entry.hashes) * request.group.page_size
        prefill.prefilling[(request.rid, attempt.number)] = len(request.prompt_ids) - num_cached
        self.affinity.note(prefill.routing_id, entry.hashes)
        choices = tuple(sorted(attempt.choices))
        message = Prefill(
            router_epoch=self._epoch,
            rid=request.rid,
            attempt=attempt.number,
            choices=choices,
            request=request.wire_request(choices[0]),
            decode=attempt.decode.peer_of(prefill) if attempt.decode is not None else None,
        )
        logger.log(
            logging.DEBUG if request.is_canary else logging.INFO,
            "dispatched: attempt %d, choices %s, prefill %s, decode %s, waited %.3f s",
            attempt.number,
            ",".join(map(str, choices)),
            prefill.node_id,
            attempt.decode.node_id if attempt.decode is not None else "none",
            now - request.created_at,
            extra={"rid": request.rid},
        )
        if not self._dispatcher.send(prefill, message):
            self._dispatcher.unreachable(request, attempt, prefill)

    def _strike(self, entry: Entry, choices: set[int]) -> None:
        """These choices wait no more."""
        entry.choices = tuple(choice for choice in entry.choices if choice not in choices)
        if not entry.choices:
            self._queues[entry.request.group].remove(entry)

    def _refused(self, entry: Entry, node: Node) -> None:
        """Full is no failure. An empty node that has no room is not asked again; if there is no other, the request
        fails."""
        request = entry.request
        if entry.pair is not None:
            self._dispatcher.fail(request, PairFull(f"decode node {node.node_id} is full"))
            return
        num_pages = node.hello.capacity.num_pages
        if node.units or node.load.running or node.load.free_pages < num_pages:
            return
        entry.unfit.add(node.routing_id)
        if not entry.could_go_to(request.group.pairs(), ()):
            self._dispatcher.fail(
                request,
                RequestError(
                    f"the prompt's {len(request.prompt_ids)} tokens and the room to generate do not fit an empty "
                    f"pool: the largest decode pool has {request.group.most_pages('decode')} pages of "
                    f"{request.group.page_size} tokens",
                    param="prompt",
                ),
            )

    def _pick_decode(self, entry: Entry) -> Node | None:
        if entry.pair is not None:
            nodes = [entry.pair[1]] if entry.pair[1] is not None else []
        else:
            group, need = entry.request.group, entry.need
            prefills = [node for node in group.live("prefill") if need.fits_prefill(node)]
            live = [node for node in group.live("decode") if need.fits_decode(node)]
            live = [node for node in live if node.routing_id not in entry.unfit]
            nodes = [node for node in live if any(self._dispatcher.is_usable(prefill, node) for prefill in prefills)]
            failed = entry.request.has_failed_on
            nodes = [node for node in nodes if not all(failed(prefill, node) for prefill in prefills)] or nodes
        figures = [
            DecodeFigures(
                node.load.free_pages - node.pledged_pages,
                len(node.units),
                node.hello.capacity.max_running,
                node.full_since is not None,
            )
            for node in nodes
        ]
        place = choose_decode(figures, entry.need.decode_pages or 0)
        return None if place is None else nodes[place]

    def _pick_prefill(self, entry: Entry, decode: Node | None) -> Node | None:
        request = entry.request
        if entry.pair is not None:
            nodes = [entry.pair[0]] if entry.pair[0] is not None else []
        else:
            nodes = [node for node in request.group.live("prefill") if entry.need.fits_prefill(node)]
            nodes = [node for node in nodes if self._dispatcher.is_usable(node, decode)]
            nodes = [node for node in nodes if not request.has_failed_on(node, decode)] or nodes
        page_size = request.group.page_size
        figures = [
            PrefillFigures(
                sum(node.prefilling.values()),
                len(node.prefilling),
                QUEUED_PER_SLOT * node.hello.capacity.max_running,
                self.affinity.num_matched(node.routing_id, entry.hashes) * page_size,
            )
            for node in nodes
        ]
        place = choose_prefill(figures, len(request.prompt_ids))
        return None if place is None else nodes[place]
