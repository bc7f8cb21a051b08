"""One canary: a run of a group's test prompt on a pair of nodes, or on one node alone.

The prompt is the same for all canaries of a group. It has several pages, and every canary has a fresh cache salt, so
that its nodes compute all pages and read none from a prefix cache. The request is greedy: all nodes that compute
correctly give the same answer. Unless they compute in float32, that holds only for tokens which are clearly likelier
than others. So their prompt repeats itself: a language model continues the repetition with confidence.

A pair and a decode node alone answer in one request of NUM_TOKENS tokens. A prefill node alone gives only the first
token of a request, so it is asked once per token.

A node names one of its routers in its heartbeats (`Service.canary_router`): that one sends the routine canaries. It
tells the node how each of them went, and the node tells its other routers. A pair's canaries are those of its decode
node.
"""

from __future__ import annotations

import secrets
from collections import abc

import xxhash

from ...metadata.errors import BatonError
from ...metadata.wire.membership import TellCanary
from ...metadata.wire.node_info import CanaryOutcome, CanaryToken
from ...metadata.wire.request import MAX_TEXT, MAX_TOP_LOGPROBS, SamplingParams, TokenLogprobs, pack_ids
from ..nodes.node import Node, NodeGroup
from ..requests.delta import Delta
from ..requests.request import Request, Sequence
from ..waiting.entry import Pinned
from .verdicts import Answer, Token

NUM_PAGES = 3
NUM_TOKENS = 4
REPEATED = 3  # tokens of the prompt that repeat, unless nodes compute in float32
IDLE_TIMEOUT_S = 30.0  # of each request, from its start or from when one of its nodes was last seen in a step
MAX_TIMEOUT_S = 300.0  # of each request: nodes may compute long prompts of others first, but a message may be lost, too
# Log-probabilities closer than this are a tie. In bfloat16 logits from 16 on are 0.125 apart, from 32 on 0.25.
TIE_GAP = {"float32": 1e-4, "bfloat16": 0.5, "float16": 0.1}
AWAITED_S = 5.0  # for so long another router's canary is awaited; then this router sends its own
COARSE_TIE_GAP = 3.0  # for nodes that round coarsely; up to 2.0 was seen with small random models


class Prompt:
    """The test prompt of a group: always the same tokens for the same length, without special tokens. `tie_gap` says
    how close the log-probabilities of two tokens must be for a tie."""

    def __init__(self, group: NodeGroup) -> None:
        special = group.tokenizer.special_ids if group.tokenizer is not None else frozenset[int]()
        ordinary = [token for token in range(min(group.card.vocab_size, 4096)) if token not in special]
        dtype, length = group.layout.target.dtype, _length(group)
        self.group, self._is_coarse = group, group.rounds_coarsely
        self.tie_gap = COARSE_TIE_GAP if self._is_coarse else TIE_GAP[dtype]
        period = length if dtype == "float32" and not self._is_coarse else REPEATED
        self.ids: list[int] = [ordinary[(7919 * (index % period) + 101) % len(ordinary)] for index in range(length)]

    @property
    def digest(self) -> str:
        """A digest of the prompt: answers to equal prompts can be compared."""
        return xxhash.xxh3_64_hexdigest(pack_ids(self.ids))

    @property
    def fits(self) -> bool:
        """Whether every node that the group has now has room for the prompt, and none rounds more coarsely than its
        ties allow for."""
        return len(self.ids) <= _length(self.group) and (self._is_coarse or not self.group.rounds_coarsely)


class Canary:
    """Makes the requests of one canary, listens to them, and collects the answer.

    The end of a request is reported to PairHealth by the caller, who knows the time; on_done and on_error do nothing.
    """

    def __init__(self, prompt: Prompt, nodes: Pinned) -> None:
        self.prompt = prompt
        self.nodes = nodes
        self.answer: Answer = ()
        # The last request has taken IDLE_TIMEOUT_S. It may still be answered, but no vote waits for it.
        self.is_late = False
        self._request: Request | None = None  # the last one
        self._cache_salt = secrets.token_hex(8)

    @property
    def is_complete(self) -> bool:
        """Whether no further request is needed once the last one is done."""
        return self.nodes[1] is not None or len(self.answer) >= NUM_TOKENS

    def next_request(self, now: float) -> Request:
        """Return a request for all tokens, or for the next one if a prefill node runs alone."""
        num_received = len(self.answer)
        params = SamplingParams(
            max_tokens=num_received + 1 if self.nodes[1] is None else NUM_TOKENS,
            temperature=0.0,
            num_logprobs=MAX_TOP_LOGPROBS,
        )
        self._request = request = Request(
            f"canary-{secrets.token_hex(6)}",
            self.prompt.group,
            self.prompt.ids,
            params,
            self,
            cache_salt=self._cache_salt,
            now=now,
            timeout_s=IDLE_TIMEOUT_S,
            is_canary=True,
        )
        if num_received:
            (sequence,) = request.sequences
            sequence.received.extend(token.id for token in self.answer)
            sequence.restart()
        return request

    def look(self, now: float) -> None:
        """Put the deadline of the last request off if a node that it waits for is in a step. Call it several times per
        second."""
        request = self._request
        self.is_late = request is not None and now - request.created_at > IDLE_TIMEOUT_S
        if request is not None and any(node.busy_since is not None for node in self._awaited(request)):
            request.deadline = min(now + IDLE_TIMEOUT_S, request.created_at + MAX_TIMEOUT_S)

    def _awaited(self, request: Request) -> list[Node]:
        """Return the nodes whose steps keep the answer waiting. While pages move between two, it may be either."""
        nodes, attempt = [node for node in self.nodes if node is not None], request.sequences[0].attempt
        if attempt is None or len(nodes) == 1 or (attempt.prefill_done and not attempt.admitted):
            return nodes
        prefill, decode = nodes
        return [prefill] if attempt.dispatched and not attempt.prefill_done else [decode]

    def on_delta(self, _sequence: Sequence, delta: Delta, /) -> None:
        self.answer += answer_of(delta.token_ids, delta.logprobs, self.prompt.tie_gap)

    def on_done(self, _request: Request, /) -> None:
        pass

    def on_error(self, _request: Request, _error: BatonError, /) -> None:
        pass


def answer_of(token_ids: abc.Sequence[int], logprobs: abc.Sequence[TokenLogprobs], tie_gap: float) -> Answer:
    """Return these tokens with their ties. If even the last of the likely tokens that a node named is a tie, there may
    be more."""
    ties: list[frozenset[int] | None] = []
    for entry in logprobs:
        near = [
            token_id
            for token_id, logprob in zip(entry.top_ids, entry.top_logprobs, strict=True)
            if entry.top_logprobs[0] - logprob < tie_gap
        ]
        ties.append(None if len(near) == len(entry.top_ids) > 1 else frozenset(near))
    ties += [frozenset()] * (len(token_ids) - len(ties))
    return tuple(map(Token, token_ids, ties))


def _length(group: NodeGroup) -> int:
    """Return the length of the test prompt: NUM_PAGES pages and a token, or less if a node has no room for that."""
    pages = min((node.hello.capacity.num_pages for node in group.nodes.values()), default=NUM_PAGES)
    room = min(group.context_len, pages * group.page_size) - 2 * NUM_TOKENS
    return max(1, min(NUM_PAGES * group.page_size + 1, room))


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


def answer_told(told: CanaryOutcome) -> Answer:
    """Return the answer that is told."""
    return tuple(Token(each.id, None if each.ties is None else frozenset(each.ties)) for each in told.tokens)
