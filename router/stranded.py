"""Requests that no node there could take, however idle: they wait a stated time for one, then end in one error."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

from ..metadata.errors import BatonError, Unavailable
from ..metadata.wire.node_info import Role
from .availability import no_node
from .errors import NodeFault
from .node import Group, Node
from .request import Request

if TYPE_CHECKING:
    from .queue import Entry


class Life(Protocol):
    """What is asked of request_life.py."""

    def fail(self, request: Request, error: BatonError) -> None:
        """Ends a request with an error."""
        ...

    def is_usable(self, prefill: Node, decode: Node | None) -> bool:
        """Whether this pair may be given requests."""
        ...

    def why_unusable(self, group: Group) -> str:
        """Why no pair of the group works, in words."""
        ...


class Stranded:
    """Says which groups may be waited for, and who has waited long enough."""

    def __init__(self, dispatcher: Life, node_wait_s: float) -> None:
        self._dispatcher = dispatcher
        self._node_wait_s = node_wait_s
        self._served_at: dict[Group, float] = {}  # when a pair that takes requests was last there

    def may_wait(self, group: Group, now: float) -> bool:
        """Whether new requests are taken for the group: it can serve, or could lately."""
        served_at = self._served_at.get(group)
        return group.is_paired or (served_at is not None and now - served_at <= self._node_wait_s)

    def served(self, group: Group, now: float) -> None:
        """Nodes of the group have taken a request."""
        self._served_at[group] = now

    def forget(self, group: Group) -> None:
        """The group is no more."""
        self._served_at.pop(group, None)

    def check(self, group: Group, waiting: Iterable[Entry], now: float) -> None:
        """To be called a few times a second for every group, with those who wait in it."""
        pairs = [pair for pair in group.pairs() if self._dispatcher.is_usable(*pair)]
        if pairs:
            self._served_at[group] = now
        prefills = group.live("prefill")
        for entry in list(waiting):
            if entry.attempt is not None or entry.request.is_over or entry.could_go_to(pairs, prefills):
                entry.stranded_since = None
            elif entry.stranded_since is None:
                entry.stranded_since = now
            elif now - entry.stranded_since > self._node_wait_s:
                self._dispatcher.fail(entry.request, self._error(entry, pairs))

    def _error(self, entry: Entry, pairs: list[tuple[Node, Node]]) -> BatonError:
        group = entry.request.group
        words = f"no node of model {group.key.model!r} could take the request for {self._node_wait_s:g} s: "
        missing: list[Role] = [role for role in ("prefill", "decode") if not group.live(role)]
        if missing:
            return no_node(words + f"no {' and no '.join(missing)} node is left", [group], missing)
        if not pairs:
            shown = words + "its nodes cannot work together now"
            return NodeFault(words + self._dispatcher.why_unusable(group), Unavailable.code, shown)
        need = entry.need
        pages = max(need.prefill_pages, need.decode_pages or 0)
        return Unavailable(f"{words}none has room for the {pages} pages and the {need.context_len} tokens of context")
