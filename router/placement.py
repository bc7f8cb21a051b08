"""Placement: chooses the nodes for a waiting request.

Decode: the least loaded node that has room. Prefill: the node that would finish the prompt first, if pages that it
probably has in its cache need not be computed. Nodes on which the request has not failed yet come first. A node that
ran out of memory for the request gets it again only if no other node of the role could take it, however busy they are.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

from .affinity import PrefixAffinity
from .node import Group, Node
from .queue import Entry

QUEUED_PER_SLOT = 2  # prompts that a prefill node may hold per slot of its batch


class DecodeFigures(NamedTuple):
    """Figures by which `choose_decode` compares decode nodes."""

    free_pages: int  # without those of reservations under way
    num_running: int  # with reservations under way
    max_running: int
    is_full: bool  # it refused, and has not shown more room since


class PrefillFigures(NamedTuple):
    """Figures by which `choose_prefill` compares prefill nodes."""

    queued_tokens: int  # prompt tokens still to compute
    num_queued: int
    max_queued: int
    cached_tokens: int  # of this prompt, probably in its prefix cache


class Place(NamedTuple):
    """Nodes for choices of a request. A node is None if the request needs none of its role."""

    prefill: Node | None
    decode: Node | None
    choices: tuple[int, ...]


class Placement:
    """Chooses nodes. `is_usable(prefill, decode)` says whether a pair may get requests; decode is None if the prefill
    node answers alone, prefill is None if the decode node computes the prompt."""

    def __init__(self, is_usable: Callable[[Node | None, Node | None], bool]) -> None:
        self._is_usable = is_usable
        self._affinity = PrefixAffinity()

    def usable_pairs(self, group: Group) -> list[tuple[Node, Node]]:
        """Return the pairs of a group that may get requests."""
        return [pair for pair in group.pairs() if self._is_usable(*pair)]

    def usable_alone(self, group: Group) -> list[Node]:
        """Return the decode nodes of a group that may get local prompts."""
        return [node for node in group.local_nodes() if self._is_usable(None, node)]

    def fitting(self, group: Group) -> Callable[[Entry], bool]:
        """Return a function that says whether nodes of the group could take an entry, however busy they are now."""
        nodes = self.usable_pairs(group), group.live("prefill"), self.usable_alone(group)
        known: dict[Hashable, bool] = {}  # most entries need about the same

        def fits(entry: Entry) -> bool:
            like = (entry.need, entry.needs_decode, entry.is_local, frozenset(entry.unfit))
            if like not in known:
                known[like] = entry.could_go_to(*nodes)
            return known[like]

        return fits

    def choose(self, entry: Entry, now: float) -> Place | None:
        """Return nodes for as many choices of the entry as they have room for; None if there is no room now."""
        prefill = decode = None
        if entry.needs_decode or entry.is_local:
            decode = self._choose_decode(entry, now)
            if decode is None:
                return None
        if not entry.is_local:
            prefill = self._choose_prefill(entry, decode)
            if prefill is None:
                return None
        if decode is None:
            return Place(prefill, None, entry.choices)
        room = min(decode.max_running - decode.num_units, entry.need.most_choices(prefill))
        return Place(prefill, decode, entry.choices[:room])

    def begin_prompt(self, prefill: Node, entry: Entry, attempt: int) -> None:
        """Enter the prompt of an entry in the books of its prefill node."""
        request = entry.request
        num_cached = self._affinity.num_matched(prefill.routing_id, entry.hashes) * request.group.page_size
        prefill.begin_prompt(request.rid, attempt, len(request.prompt_ids) - num_cached)
        self._affinity.note(prefill.routing_id, entry.hashes)

    def forget_cache(self, node: Node) -> None:
        """The node is gone, or its prefix cache was emptied."""
        self._affinity.forget(node.routing_id)

    def _choose_decode(self, entry: Entry, now: float) -> Node | None:
        if entry.pair is not None:
            nodes = [entry.pair[1]] if entry.pair[1] is not None else []
        elif entry.is_local:
            nodes = [node for node in self.usable_alone(entry.request.group) if entry.need.fits_local(node)]
            nodes = [node for node in nodes if node.routing_id not in entry.unfit]
            nodes = [node for node in nodes if not entry.request.ran_out_on(node)] or nodes
            nodes = [node for node in nodes if not entry.request.has_failed_on(None, node)] or nodes
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
        figures = [
            DecodeFigures(each.free_pages, each.num_units, each.max_running, each.is_full(now)) for each in nodes
        ]
        num_pages = entry.need.local_pages if entry.is_local else entry.need.decode_pages or 0
        index = choose_decode(figures, num_pages)
        return None if index is None else nodes[index]

    def _choose_prefill(self, entry: Entry, decode: Node | None) -> Node | None:
        request = entry.request
        if entry.pair is not None:
            nodes = [entry.pair[0]] if entry.pair[0] is not None else []
        else:
            nodes = [node for node in request.group.live("prefill") if entry.need.fits_prefill(node)]
            nodes = [node for node in nodes if self._is_usable(node, decode)]
            nodes = [node for node in nodes if not request.ran_out_on(node)] or nodes
            nodes = [node for node in nodes if not request.has_failed_on(node, decode)] or nodes
        figures = [
            PrefillFigures(
                node.num_prompt_tokens,
                node.num_prompts,
                QUEUED_PER_SLOT * node.max_running,
                self._affinity.num_matched(node.routing_id, entry.hashes) * request.group.page_size,
            )
            for node in nodes
        ]
        index = choose_prefill(figures, len(request.prompt_ids))
        return None if index is None else nodes[index]


def choose_decode(figures: Sequence[DecodeFigures], num_pages: int) -> int | None:
    """Return the index of the least loaded node with room for `num_pages`, None if all are full."""
    fitting = [
        index
        for index, node in enumerate(figures)
        if not node.is_full and node.free_pages >= num_pages and node.num_running < node.max_running
    ]
    return min(
        fitting,
        key=lambda index: (figures[index].num_running / figures[index].max_running, -figures[index].free_pages),
        default=None,
    )


def choose_prefill(figures: Sequence[PrefillFigures], prompt_len: int) -> int | None:
    """Return the index of the node with the fewest tokens to compute up to this prompt's end, None if all are full."""
    return min(
        (index for index, node in enumerate(figures) if node.num_queued < node.max_queued),
        key=lambda index: (
            figures[index].queued_tokens + prompt_len - figures[index].cached_tokens,
            figures[index].num_queued,
        ),
        default=None,
    )
