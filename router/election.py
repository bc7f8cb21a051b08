"""The vote of one group: its ballot, the prompt that it is about, and the nodes that compute it alone just now."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..metadata.wire.messages import Compute
from ..metadata.wire.request import TokenLogprobs
from .ballot import Answer, Ballot, Voter
from .node import Group, Node
from .request import Request

NUM_PAGES = 3
NUM_TOKENS = 4
TIE_GAP = {"float32": 1e-4, "bfloat16": 0.1, "float16": 0.02}  # best two log-probabilities nearer than this are a tie


class Election:
    """A group's ballot, the prompt that it is about, and the nodes that compute it alone now."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.prompt = _prompt(group)
        self.ballot = Ballot(TIE_GAP[group.layout.target.dtype])
        self.alone: dict[Voter, Request] = {}
        self.full_until: dict[Voter, float] = {}  # nodes that had no room

    def join(self, node: Node) -> None:
        """A node takes part from now on."""
        self.ballot.joined(voter_of(node), can_compute=node.role == "prefill" or node.knows(Compute))

    def node(self, voter: Voter) -> Node | None:
        """The node, if it can be asked."""
        node = self.group.nodes.get(voter.key)
        return node if node is not None and node.is_reachable and not node.is_draining else None


def voter_of(node: Node) -> Voter:
    """The node as the ballot knows it."""
    return Voter(node.role, node.node_id, node.routing_id)


def answer_of(ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> Answer:
    """Return the generated tokens, each with its lead if the node told it."""
    leads = [
        entry.top_logprobs[0] - entry.top_logprobs[1] if len(entry.top_logprobs) > 1 else math.inf for entry in logprobs
    ]
    return Answer(tuple(ids), tuple(leads + [math.inf] * (len(ids) - len(leads))))


def prompt_len(group: Group) -> int:
    """Tokens of several pages, as far as every node has room for them."""
    pages = min((node.hello.capacity.num_pages for node in group.nodes.values()), default=NUM_PAGES)
    room = min(group.context_len, pages * group.page_size) - 2 * NUM_TOKENS
    return max(1, min(NUM_PAGES * group.page_size + 1, room))


def _prompt(group: Group) -> list[int]:
    """Ordinary tokens, always the same ones."""
    special = group.tokenizer.special_ids if group.tokenizer is not None else frozenset[int]()
    ordinary = [token for token in range(min(group.card.vocab_size, 4096)) if token not in special]
    return [ordinary[(7919 * place + 101) % len(ordinary)] for place in range(prompt_len(group))]
