"""How canaries went, as the routers of a node tell each other through it.

A node names one of its routers in its heartbeats (`Service.canary_router`): that one sends the routine canaries. It
tells the node how each of them went, and the node tells its other routers. A pair's canaries are those of its decode
node.
"""

from __future__ import annotations

from ...metadata.wire.membership import TellCanary
from ...metadata.wire.node_info import CanaryOutcome, CanaryToken
from ...metadata.wire.request import MAX_TEXT
from ..nodes.node import Node
from ..waiting.entry import Pinned
from .canary import Prompt
from .verdicts import Answer, Token

AWAITED_S = 5.0  # for so long another router's canary is awaited; then this router sends its own


def keeper_of(nodes: Pinned) -> Node:
    """Return the node that says which router sends the canaries of these nodes, and that passes on how they went."""
    prefill, decode = nodes
    keeper = decode if decode is not None else prefill
    assert keeper is not None, "a canary runs on one node at least"
    return keeper


def is_of_another(nodes: Pinned, router_epoch: str) -> bool:
    """Return whether another router sends the canaries of these nodes. A node of an older release, or one whose
    heartbeat has not come yet, names none."""
    return keeper_of(nodes).canary_router not in ("", router_epoch)


def outcome(prompt: Prompt, nodes: Pinned, answer: Answer, failure: str = "") -> tuple[Node, CanaryOutcome] | None:
    """Return the node to tell how a canary went, and what to tell it; None if that node passes nothing on."""
    keeper, (prefill, decode) = keeper_of(nodes), nodes
    partner = "" if prefill is None or decode is None else prefill.unit_epoch
    tokens = tuple(CanaryToken(token.id, None if token.ties is None else tuple(token.ties)) for token in answer)
    told = CanaryOutcome(prompt.digest, partner, tokens, failure[:MAX_TEXT])
    return (keeper, told) if keeper.knows(TellCanary) else None


def nodes_of(node: Node, told: CanaryOutcome) -> Pinned | None:
    """Return the nodes of the canary of which a node tells; None if they are not here."""
    if not told.partner:
        return (node, None) if node.role == "prefill" else (None, node)
    others = node.group.nodes.values() if node.role == "decode" else ()
    for other in others:
        if other.role == "prefill" and other.unit_epoch == told.partner:
            return other, node
    return None


def answer_of(told: CanaryOutcome) -> Answer:
    """Return the answer that is told."""
    return tuple(Token(each.id, None if each.ties is None else frozenset(each.ties)) for each in told.tokens)
