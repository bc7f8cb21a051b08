"""Mismatch of two nodes: why they cannot form a pair, in words, with the values of both.

The registry uses these words to refuse a node, and to warn a node that waits for a partner.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ...metadata.handoff.schema import schema, weights
from ...metadata.wire.membership import Hello
from .node import Node, NodeGroup

MAX_COMPARED = 3  # nodes that one refusal names


def missing_partner(node: Node, nodes: Iterable[Node]) -> str | None:
    """Return why a joined node has no partner yet, or None if it has one or no node of the other role is here.

    Such a node serves another model than the nodes of the other role, so it is not refused: its partner may still come.
    """
    others = [other for other in nodes if other.role != node.role]
    if not others or any(other.group is node.group and other.shares_protocol(node.hello) for other in others):
        return None
    return (
        f"it can be paired with nobody yet: {node.role} node {node.node_id} serves model "
        f"{node.hello.model.name!r}, the {others[0].role} nodes here {_model_names(others)}"
    )


def incompatible_nodes(hello: Hello, group: NodeGroup | None, nodes: Iterable[Node]) -> list[Node]:
    """Return the nodes of the other role that serve the model of `hello` though none of them can be its partner, or the
    nodes of its group that serve the model from another commit.

    The node that was heard last comes first. The list is empty if the node has a partner, or if no node of the other
    role serves its model. `group` is the group that the node would join, None if it would be the first one there.
    """
    unlike = [] if group is None else [node for node in group.nodes.values() if _commits(hello, node)]
    if unlike:
        return sorted(unlike, key=lambda node: node.last_seen, reverse=True)
    others = [node for node in nodes if node.role != hello.role and node.group.key.model == hello.model.name]
    if any(node.group is group and node.shares_protocol(hello) for node in others):
        return []
    return sorted(others, key=lambda node: node.last_seen, reverse=True)


def refusal(hello: Hello, incompatible: Sequence[Node]) -> str:
    """Return the reason to refuse a node because of these nodes, which incompatible_nodes has found."""
    phrases = [_differences(hello, node) for node in incompatible[:MAX_COMPARED]]
    is_of_group = any(node.role == hello.role for node in incompatible)  # nodes of one role differ in the commit alone
    words = "nodes of its group serve another commit" if is_of_group else "it can be paired with nobody"
    weights_of = {_digest(node.hello) for node in incompatible}
    if _digest(hello) not in weights_of:
        words = f"these are two models, so give one another --model-name, or both the same --model: {words}"
    return f"{words}: {'; '.join(phrases)}"


def _differences(hello: Hello, node: Node) -> str:
    """Name everything in which a new node differs from a joined one, with both values."""
    phrases = schema.differences(hello.layout, node.hello.layout)
    phrases += weights.difference("weights", hello.target_fingerprint, node.hello.target_fingerprint)
    phrases += weights.difference("draft weights", hello.draft_fingerprint, node.hello.draft_fingerprint)
    here, there = hello.model.tokenizer_digest, node.hello.model.tokenizer_digest
    if here != there:
        phrases.append(f"tokenizer: {here} here, {there} there")
    phrases += _commits(hello, node)
    if not node.shares_protocol(hello):
        phrases.append(f"protocol versions: {_protocols(hello)} here, {_protocols(node.hello)} there")
    return f"{node.role} node {node.node_id} of model {hello.model.name!r} differs in {', '.join(phrases)}"


def _digest(hello: Hello) -> str:
    """Return the digest of the weights, however they are quantized."""
    return hello.target_fingerprint.partition(" ")[0]


def _commits(hello: Hello, node: Node) -> list[str]:
    """Return one phrase that names two commits that differ; none if they are equal, or one is not known. Commits of
    equal weights may have other chat templates."""
    here, there = hello.commit, node.hello.commit
    is_known = bool(here and there)
    return [f"commit: {here} here, {there} there (give both one --revision)"] if is_known and here != there else []


def _protocols(hello: Hello) -> str:
    return f"{hello.protocol_min}..{hello.protocol_max}"


def _model_names(nodes: Iterable[Node]) -> str:
    return ", ".join(sorted({repr(node.hello.model.name) for node in nodes}))
