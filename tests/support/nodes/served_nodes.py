"""The nodes of a `Served` system, by role, and how far they are with the requests of clients."""

from __future__ import annotations

from served import Node, Served

from baton.decode_node.node import DecodeNode
from baton.engine.engine import Engine
from baton.prefill_node.node import PrefillNode


def prefill_of(served: Served) -> PrefillNode:
    """Return the only prefill node."""
    (node,) = (node for node in served.nodes.values() if isinstance(node, PrefillNode))
    return node


def decode_of(served: Served) -> DecodeNode:
    """Return the only decode node."""
    (node,) = (node for node in served.nodes.values() if isinstance(node, DecodeNode))
    return node


def engine_of(node: Node) -> Engine:
    """Return the engine that computes for the node."""
    return node.prompts.engine if isinstance(node, PrefillNode) else node.executor.engine  # type: ignore[attr-defined]


def computing(served: Served) -> str | None:
    """Return the name of a decode node that computes the prompt of a client's request."""
    for name, node in served.nodes.items():
        for sequence in node.scheduler if isinstance(node, DecodeNode) else ():
            if sequence.is_local and sequence.num_to_compute > 1 and not sequence.unit.rid.startswith("canary"):
                return name
    return None


def num_generated(served: Served) -> int:
    """Return how many tokens the decode nodes have generated for clients' requests that still run.

    A test that must meet a request under way waits for this number. The client receives tokens later, maybe after the
    nodes have finished the request."""
    nodes = [node for node in served.nodes.values() if isinstance(node, DecodeNode)]
    sequences = [sequence for node in nodes for sequence in node.scheduler]
    return sum(sequence.num_generated for sequence in sequences if not sequence.unit.rid.startswith("canary"))
