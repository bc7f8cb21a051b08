"""Why two nodes are no pair, in words that name both values."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ..metadata.handoff import schema
from ..metadata.wire.messages import Hello
from .newcomers import Obstacle

if TYPE_CHECKING:
    from .node import Group, Node


def loneliness(node: Node, nodes: Iterable[Node]) -> str | None:
    """A node whose model no node of the other role serves waits, and is told so."""
    others = [other for other in nodes if other.role != node.role]
    if not others or any(other.group is node.group and other.shares_protocol(node.hello) for other in others):
        return None
    return (
        f"it can be paired with nobody yet: {node.role} node {node.node_id} serves model "
        f"{node.hello.model.name!r}, the {others[0].role} nodes here {_names(others)}"
    )


def misfit(hello: Hello, group: Group | None, nodes: Iterable[Node]) -> Obstacle | None:
    """Why a newcomer, which would belong to `group`, can be paired with nobody though its model is served."""
    rivals = [node for node in nodes if node.role != hello.role and node.group.key.model == hello.model.name]
    if not rivals or any(node.group is group and node.shares_protocol(hello) for node in rivals):
        return None
    rivals.sort(key=lambda node: node.last_seen, reverse=True)  # the first ones live
    phrases = [distance(hello, node) for node in rivals[:3]]
    return Obstacle("it can be paired with nobody: " + "; ".join(phrases), rivals[0].last_seen)


def distance(hello: Hello, node: Node) -> str:
    """What differs between a newcomer and a node, both values named."""
    phrases = schema.differences(hello.layout, node.hello.layout)
    pairs = (
        ("weights", hello.target_fingerprint, node.hello.target_fingerprint),
        ("draft weights", hello.draft_fingerprint, node.hello.draft_fingerprint),
        ("tokenizer", hello.model.tokenizer_digest, node.hello.model.tokenizer_digest),
    )
    phrases += [f"{name}: {here} here, {there} there" for name, here, there in pairs if here != there]
    if not node.shares_protocol(hello):
        phrases.append(f"protocol versions: {_versions(hello)} here, {_versions(node.hello)} there")
    return f"{node.role} node {node.node_id} of model {hello.model.name!r} differs in {', '.join(phrases)}"


def _versions(hello: Hello) -> str:
    return f"{hello.protocol_min}..{hello.protocol_max}"


def _names(nodes: Iterable[Node]) -> str:
    return ", ".join(sorted({repr(node.hello.model.name) for node in nodes}))
