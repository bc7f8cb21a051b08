"""Tells operators which nodes take no requests, why, and how to put them back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Literal

import msgspec

from ...metadata.wire.node_info import Role
from ..errors import NoNode
from .mismatch import missing_partner
from .node import ROLES, Node, NodeGroup
from .node_history import LOSS_WORDS, NodeHistory

MAX_NAMED = 8  # nodes in one sentence


class Degraded(msgspec.Struct, frozen=True):
    """A node that is missing, takes no requests, or keeps being lost."""

    node: str
    role: str
    state: Literal["draining", "leaving", "gone", "flapping"]
    words: str


def drain_words(node: Node) -> str:
    """Return why a joined node takes no new requests, and how to undo it if that is possible."""
    name = f"{node.role} node {node.unit}"
    if node.is_leaving:
        return f"{name} is leaving, since it was told to stop"
    return f"{name} is draining, since an operator asked for it (POST /admin/nodes/{node.unit}/undrain puts it back)"


def drain_summary(nodes: Iterable[Node]) -> str:
    """Return `drain_words` of the nodes that drain, the first MAX_NAMED of them; "" if none drains. A group of ranks is
    one node here."""
    words = list(dict.fromkeys(drain_words(node) for node in nodes if node.is_draining))
    more = [f"and {len(words) - MAX_NAMED} more"] if len(words) > MAX_NAMED else []
    return "; ".join([*words[:MAX_NAMED], *more])


def no_node(shown: str, groups: Iterable[NodeGroup], roles: Iterable[Role]) -> NoNode:
    """Return the error of a request that lacks nodes of these roles.

    `shown` is the message for every client. If such nodes drain, operators also read their names and the way back.
    """
    roles = list(roles)
    draining = [node for group in groups for node in group.nodes.values() if node.is_draining and node.role in roles]
    if not draining:
        return NoNode(shown)
    num_draining = len({node.unit_key for node in draining})
    return NoNode(f"{shown}: {num_draining} draining", f"{shown}: {drain_summary(draining)}")


def missing_for_service(groups: Collection[NodeGroup]) -> str | None:
    """Return what is missing before any request can be served, None if a node of each role and a tokenizer are here."""
    nodes = [node for group in groups for node in group.nodes.values()]
    if not nodes:
        return "no node has joined"
    for node in nodes:
        reason = missing_partner(node, nodes)
        if reason is not None:
            return reason
    if not any(group.tokenizer for group in groups if group.nodes):
        return "no tokenizer has arrived yet"
    present = {node.role for node in nodes}
    missing = [role for role in ROLES if role not in present]
    return f"no {missing[0]} node has joined" if missing else None


class Expected:
    """The nodes that were started with the router: so many of each role. Until all of them have joined once, the router
    is not ready, since a node would take work that others were started for."""

    def __init__(self, counts: Mapping[Role, int]) -> None:
        self._counts = counts
        self._is_met = not counts

    def missing(self, histories: Iterable[NodeHistory]) -> str:
        """Return how many nodes of which role have not joined yet; "" once all have joined, also if some leave."""
        if self._is_met:
            return ""
        joined = Counter(role for role, _ in {(history.role, history.unit) for history in histories})
        words = [
            f"{joined[role]} of {count} {role} nodes" for role, count in self._counts.items() if joined[role] < count
        ]
        self._is_met = not words
        return f"{' and '.join(words)} have joined" if words else ""


def degraded(nodes: Iterable[Node], histories: Iterable[NodeHistory], now: float) -> list[Degraded]:
    """Return all nodes that drain, that were lost recently, or that were lost and came back several times."""
    found = [
        Degraded(node.node_id, node.role, "leaving" if node.is_leaving else "draining", drain_words(node))
        for node in nodes
        if node.is_draining
    ]
    for history in histories:
        name, num_returns = f"{history.role} node {history.node_id}", history.num_returns(now)
        if history.is_missing(now) and history.last_loss is not None:
            words = f"{name} is gone: {LOSS_WORDS[history.last_loss]}"
            words += f"; it had come back {_times(num_returns)} in the last ten minutes" if num_returns else ""
            found.append(Degraded(history.node_id, history.role, "gone", words))
        elif history.is_here and num_returns > 1:
            words = f"{name} has come back {_times(num_returns)} in the last ten minutes"
            found.append(Degraded(history.node_id, history.role, "flapping", words))
    return found


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
