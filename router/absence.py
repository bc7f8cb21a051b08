"""Which nodes do not serve though they could, in words for operators, and how to put them back."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

import msgspec

from .comings import LOSS_WORDS
from .errors import NoNode

if TYPE_CHECKING:
    from ..metadata.wire.node_info import Role
    from .node import Group, Node
    from .registry import Registry

MAX_NAMED = 8  # nodes in one sentence


class Degraded(msgspec.Struct, frozen=True):
    """A node that is missing, or not as it should be."""

    node: str
    role: str
    state: Literal["draining", "leaving", "gone", "flapping"]
    words: str


def drain_words(node: Node) -> str:
    """Why a node that is here takes nothing new."""
    name = f"{node.role} node {node.node_id}"
    if node.is_leaving:
        return f"{name} is leaving, since it was told to stop"
    return f"{name} is draining, since an operator asked for it (POST /admin/nodes/{node.node_id}/undrain puts it back)"


def drains(nodes: Iterable[Node]) -> str:
    """The same of all that drain; empty when none does."""
    words = [drain_words(node) for node in nodes if node.is_draining]
    more = [f"and {len(words) - MAX_NAMED} more"] if len(words) > MAX_NAMED else []
    return "; ".join([*words[:MAX_NAMED], *more])


def no_node(shown: str, groups: Iterable[Group], roles: Iterable[Role]) -> NoNode:
    """The error of a request for which nodes of these roles are missing. `shown` says so to everybody."""
    roles = list(roles)
    draining = [node for group in groups for node in group.nodes.values() if node.is_draining and node.role in roles]
    if not draining:
        return NoNode(shown)
    return NoNode(f"{shown}: {len(draining)} draining", f"{shown}: {drains(draining)}")


def degraded(registry: Registry, now: float) -> list[Degraded]:
    """All nodes that are missing, drain, or come and go."""
    found = [
        Degraded(node.node_id, node.role, "leaving" if node.is_leaving else "draining", drain_words(node))
        for node in registry.nodes.values()
        if node.is_draining
    ]
    for coming in registry.comings:
        name, num_returns = f"{coming.role} node {coming.node_id}", coming.num_returns(now)
        if coming.is_missing(now) and coming.last_loss is not None:
            words = f"{name} is gone: {LOSS_WORDS[coming.last_loss]}"
            words += f"; it had come back {_times(num_returns)} in the last ten minutes" if num_returns else ""
            found.append(Degraded(coming.node_id, coming.role, "gone", words))
        elif coming.is_here and num_returns > 1:
            words = f"{name} has come back {_times(num_returns)} in the last ten minutes"
            found.append(Degraded(coming.node_id, coming.role, "flapping", words))
    return found


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
