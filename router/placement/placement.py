"""Placement: chooses the nodes for a waiting request.

Decode: the least loaded node that has room; a node that has pages of the prompt in its cache may be a little fuller,
since they need not travel. Prefill: the node that would finish the prompt first, if the pages in its cache need not be
computed. Nodes tell which pages they have (nodes/told_pages.py). If this news is late, load alone decides. A request of
a session goes to the nodes of the one before: to its prefill node, unless another would finish the prompt before that
one begins it; to its decode node, unless another has a tenth more of its places free. That holds if decode nodes
compute the prompts, too. If the prompt is local, or if either role may compute it, prompt_placement.py chooses the
node. Nodes on which the request has not failed yet come first. A node that ran out of memory for the request gets it
again only if no other node of the role could take it, however busy they are.

node_choice.py and prompt_placement.py compare the figures of nodes, and say why one was chosen. Traces keep these
words.

Nodes compute prompts in the order in which they get them. So where several tenants share a group, prompts wait in the
router, whose order is fair, and a node of either role gets the next one shortly before it has none left to compute.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import NamedTuple

from ..nodes.node import Node, NodeGroup, Role
from ..nodes.prompt_role import PromptPlace
from ..waiting.entry import Entry
from .node_choice import (
    EntryFigures,
    cached_words,
    choose_decode,
    decode_reason,
    only_reason,
)
from .prompt_placement import (
    LocalFigures,
    RemoteFigures,
    choose_local,
    choose_remote,
    local_reason,
    place_sooner,
    remote_reason,
)

SHORT_QUEUE_S = 0.15  # of computing; the router looks at the queues more than twice in this time


class Chosen(NamedTuple):
    """A node for a request, and the reason for this one in words."""

    node: Node
    reason: str


class Place(NamedTuple):
    """Nodes for choices of a request. A node is None if the request needs none of its role."""

    prefill: Node | None
    decode: Node | None
    choices: tuple[int, ...]
    prompt: PromptPlace  # who computes the prompt, and why
    prefill_reason: str = ""  # why it is this prefill node
    decode_reason: str = ""


class UsablePairs:
    """The pairs of a group that may get requests. They are looked for while they are read: most readers need one."""

    def __init__(self, group: NodeGroup, is_usable: Callable[[Node | None, Node | None], bool]) -> None:
        self._group, self._is_usable = group, is_usable

    def __iter__(self) -> Iterator[tuple[Node, Node]]:
        return (pair for pair in self._group.pairs() if self._is_usable(*pair))

    def __bool__(self) -> bool:
        return next(iter(self), None) is not None


class Placement:
    """Chooses nodes. `is_usable(prefill, decode)` says whether a pair may get requests; decode is None if the prefill
    node answers alone, prefill is None if the decode node computes the prompt. `is_shared(group)`: several tenants use
    the group."""

    def __init__(
        self,
        is_usable: Callable[[Node | None, Node | None], bool],
        is_shared: Callable[[NodeGroup], bool] = lambda _: False,
    ) -> None:
        self._is_usable, self._is_shared = is_usable, is_shared
        self._held: set[NodeGroup] = set()
        self.figures = EntryFigures()

    def usable_pairs(self, group: NodeGroup) -> UsablePairs:
        """Return the pairs of a group that may get requests."""
        return UsablePairs(group, self._is_usable)

    def usable_alone(self, group: NodeGroup) -> list[Node]:
        """Return the decode nodes of a group that may get local prompts."""
        return [node for node in group.local_nodes() if self._is_usable(None, node)]

    def fitting(self, group: NodeGroup) -> Callable[[Entry], bool]:
        """Return a function that says whether nodes of the group could take an entry, however busy they are now."""
        nodes = self.usable_pairs(group), group.live("prefill"), self.usable_alone(group)
        known: dict[Hashable, bool] = {}  # most entries need about the same

        def fits(entry: Entry) -> bool:
            kind = entry.kind
            if kind not in known:
                known[kind] = entry.could_go_to(*nodes)
            return known[kind]

        return fits

    def choose(self, entry: Entry, now: float) -> Place | None:
        """Return nodes for as many choices of the entry as they have room for; None if there is no room now."""
        prompt = entry.place
        if prompt is None:
            return self._choose_sooner(entry, now)
        return (
            self._choose_local(entry, prompt, now)
            if prompt.where == "local"
            else self._choose_remote(entry, prompt, now)
        )

    def take_held(self) -> set[NodeGroup]:
        """Return the groups in which a request waits for a node to compute the prompts that it has. Forgets them."""
        held, self._held = self._held, set()
        return held

    # Who computes the prompt

    def _choose_sooner(self, entry: Entry, now: float) -> Place | None:
        """Return the nodes that bring the first two tokens soonest."""
        decode = self._choose_decode(entry, now) if entry.needs_decode else None
        fresh = [self.figures.local(node, entry, now) for node in self._local_nodes(entry, has_others=True)]
        has_others = any(not each.is_full for each in fresh)
        able: list[Node] = []
        if decode is not None or not entry.needs_decode:
            able = self._prefill_nodes(entry, decode and decode.node, has_others=has_others)
        frees = [node for node in able if node.num_prompts < node.max_prompts]
        able_locals = self._local_nodes(entry, has_others=bool(frees))
        if self._is_held(entry, [*frees, *able_locals], now):
            return None
        prefills, locals_ = self._short(entry, frees, now), self._short(entry, able_locals, now)
        remote_figures = [self.figures.remote(node, decode and decode.node, entry, now) for node in prefills]
        local_figures = [self.figures.local(node, entry, now) for node in locals_]
        prompt, index = place_sooner(remote_figures, local_figures)
        if not prefills and not self.usable_pairs(entry.request.group):
            prompt = prompt._replace(reason="no ready pair")
        if index is not None and prompt.where == "local":
            local = self._chosen_local(entry, locals_, local_figures, index, len(able_locals), now)
            return self._place_local(entry, prompt, local)
        if index is not None:
            prefill = self._chosen_remote(entry, prefills, remote_figures, index, len(able), now)
            return self._place_remote(entry, prompt, prefill, decode)
        if entry.could_go_to(self.usable_pairs(entry.request.group), entry.request.group.live("prefill")):
            return self._choose_remote(entry, prompt, now)
        return self._choose_local(entry, PromptPlace("local", "prefill nodes full"), now)

    def _choose_remote(self, entry: Entry, prompt: PromptPlace, now: float) -> Place | None:
        """Return a prefill node, and a decode node if the entry needs one."""
        decode = self._choose_decode(entry, now) if entry.needs_decode else None
        if decode is None and entry.needs_decode:
            return None
        prefill = self._choose_prefill(entry, decode and decode.node, now)
        return None if prefill is None else self._place_remote(entry, prompt, prefill, decode)

    def _place_remote(self, entry: Entry, prompt: PromptPlace, prefill: Chosen, decode: Chosen | None) -> Place:
        if decode is None:
            return Place(prefill.node, None, entry.choices, prompt, prefill.reason)
        room = min(decode.node.choice_room, entry.need.most_choices(prefill.node))
        return Place(prefill.node, decode.node, entry.choices[:room], prompt, prefill.reason, decode.reason)

    def _choose_local(self, entry: Entry, prompt: PromptPlace, now: float) -> Place | None:
        """Return a decode node that computes the prompt."""
        able = self._local_nodes(entry, has_others=False)
        if self._is_held(entry, able, now):
            return None
        nodes = self._short(entry, able, now)
        figures = [self.figures.local(node, entry, now) for node in nodes]
        index = choose_local(figures)
        if index is None:
            return None
        return self._place_local(entry, prompt, self._chosen_local(entry, nodes, figures, index, len(able), now))

    def _place_local(self, entry: Entry, prompt: PromptPlace, decode: Chosen) -> Place:
        return Place(None, decode.node, entry.choices[: decode.node.choice_room], prompt, "", decode.reason)

    # The nodes of each role

    def _local_nodes(self, entry: Entry, *, has_others: bool) -> list[Node]:
        """Return the decode nodes that may compute the prompt. `has_others`: nodes of the other role could do it,
        so that those where the request failed are left out."""
        request = entry.request
        if entry.pair is not None:
            nodes = [entry.pair[1]] if entry.pair[1] is not None else []
        else:
            nodes = [node for node in self.usable_alone(request.group) if entry.need.fits_local(node)]
            nodes = [node for node in nodes if node.routing_id not in entry.unfit]
            fresh = [node for node in nodes if not request.ran_out_on(node)]
            nodes = fresh if fresh or has_others else nodes
            fresh = [node for node in nodes if not request.has_failed_on(None, node)]
            nodes = fresh if fresh or has_others else nodes
        return nodes

    def _choose_decode(self, entry: Entry, now: float) -> Chosen | None:
        """Return a decode node for a prompt that a prefill node computes."""
        if entry.pair is not None:
            nodes = [entry.pair[1]] if entry.pair[1] is not None else []
        else:
            request, group, need = entry.request, entry.request.group, entry.need
            prefills = [node for node in group.live("prefill") if need.fits_prefill(node)]
            live = [node for node in group.live("decode") if need.fits_decode(node)]
            live = [node for node in live if node.routing_id not in entry.unfit]
            if any(map(request.ran_out_on, prefills)):
                others = [prefill for prefill in prefills if not request.ran_out_on(prefill)]
                others = [prefill for prefill in others if any(self._is_usable(prefill, node) for node in live)]
                prefills = others or prefills
            nodes = [node for node in live if any(self._is_usable(prefill, node) for prefill in prefills)]
            nodes = [node for node in nodes if not request.ran_out_on(node)] or nodes
            fresh = [node for node in nodes if not all(request.has_failed_on(prefill, node) for prefill in prefills)]
            nodes = fresh or nodes
        figures = [self.figures.decode(node, entry, now) for node in nodes]
        num_pages = entry.need.decode_pages or 0
        index = choose_decode(figures, num_pages)
        if index is None:
            return None
        return Chosen(nodes[index], self._reason(entry, "decode", len(nodes), decode_reason(figures, num_pages, index)))

    def _prefill_nodes(self, entry: Entry, decode: Node | None, *, has_others: bool = False) -> list[Node]:
        """Return the prefill nodes that may compute the prompt for this decode node. `has_others`: nodes of the other
        role could do it, so that those where the request failed are left out."""
        request = entry.request
        if entry.pair is not None:
            return [entry.pair[0]] if entry.pair[0] is not None else []
        nodes = [node for node in request.group.live("prefill") if entry.need.fits_prefill(node)]
        nodes = [node for node in nodes if self._is_usable(node, decode)]
        fresh = [node for node in nodes if not request.ran_out_on(node)]
        nodes = fresh if fresh or has_others else nodes
        fresh = [node for node in nodes if not request.has_failed_on(node, decode)]
        return fresh if fresh or has_others else nodes

    def _short(self, entry: Entry, nodes: list[Node], now: float) -> list[Node]:
        """Return the nodes that may get one more prompt: those with a short queue if several tenants share the
        group."""
        if entry.pair is not None or not self._is_shared(entry.request.group):
            return nodes
        return [node for node in nodes if self._has_short_queue(node, now)]

    def _is_held(self, entry: Entry, nodes: list[Node], now: float) -> bool:
        """Whether an entry waits until one of these nodes has computed most of its prompts. Notes its group then."""
        is_held = bool(nodes) and not self._short(entry, nodes, now)
        if is_held:
            self._held.add(entry.request.group)
        return is_held

    def _has_short_queue(self, node: Node, now: float) -> bool:
        """Whether a node will soon have no prompts left to compute. True if it has measured no times yet."""
        num_tokens = node.num_queued_tokens(now)
        return not num_tokens or node.prompt_times.token_s * num_tokens < SHORT_QUEUE_S

    def _choose_prefill(self, entry: Entry, decode: Node | None, now: float) -> Chosen | None:
        able = self._prefill_nodes(entry, decode)
        if self._is_held(entry, able, now):
            return None
        nodes = self._short(entry, able, now)
        nodes = [node for node in nodes if node.num_prompts < node.max_prompts]
        figures = [
            self.figures.remote(node, decode, entry, now)._replace(
                is_sessions=self.figures.follows_session(node, entry)
            )
            for node in nodes
        ]
        index = choose_remote(figures)
        return None if index is None else self._chosen_remote(entry, nodes, figures, index, len(able), now)

    # Reasons

    def _chosen_remote(
        self, entry: Entry, nodes: list[Node], figures: list[RemoteFigures], index: int, num_able: int, now: float
    ) -> Chosen:
        reason = self._reason(entry, "prefill", num_able, remote_reason(figures, index))
        return Chosen(nodes[index], reason + cached_words(nodes[index], entry, figures[index].num_uncached_tokens, now))

    def _chosen_local(
        self, entry: Entry, nodes: list[Node], figures: list[LocalFigures], index: int, num_able: int, now: float
    ) -> Chosen:
        reason = self._reason(entry, "decode", num_able, local_reason(figures, index))
        return Chosen(nodes[index], reason + cached_words(nodes[index], entry, figures[index].num_uncached_tokens, now))

    def _reason(self, entry: Entry, role: Role, num_able: int, compared: str) -> str:
        """Return why a node was chosen. `num_able`: nodes that could take the entry, however busy. `compared`: the
        result of their comparison, "" if only one had room."""
        if entry.pair is not None:
            return "a canary request tries this node"
        request = entry.request
        has_failed = bool(request.failed_pairs) or request.num_out_of_memory > 0
        return compared or only_reason(role, len(request.group.live(role)), num_able, has_failed=has_failed)
