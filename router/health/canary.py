"""One canary: a run of a group's test prompt on a pair of nodes, or on one node alone.

The prompt is the same for all canaries of a group. It has several pages, and every canary has a fresh cache salt, so
that its nodes compute all pages and read none from a prefix cache. The request is greedy: all nodes that compute
correctly give the same answer. Unless they compute in float32, that holds only for tokens which are clearly likelier
than others. So their prompt repeats itself: a language model continues the repetition with confidence.

A pair and a decode node alone answer in one request of NUM_TOKENS tokens. A prefill node alone gives only the first
token of a request, so it is asked once per token.
"""

from __future__ import annotations

import secrets
from collections import abc

from ...metadata.errors import BatonError
from ...metadata.wire.request import MAX_TOP_LOGPROBS, SamplingParams, TokenLogprobs
from ..nodes.node import NodeGroup
from ..requests.request import Delta, Request, Sequence
from ..waiting.queue import Pinned
from .verdicts import Answer, Rival

NUM_PAGES = 3
NUM_TOKENS = 4
REPEATED = 3  # tokens of the prompt that repeat, unless nodes compute in float32


class Canary:
    """Makes the requests of one canary, listens to them, and collects the answer.

    The end of a request is reported to PairHealth by the caller, who knows the time; on_done and on_error do nothing.
    """

    def __init__(self, group: NodeGroup, prompt_ids: list[int], nodes: Pinned) -> None:
        self.group = group
        self.nodes = nodes
        self.request: Request | None = None  # the last one
        self._prompt_ids = prompt_ids
        self._cache_salt = secrets.token_hex(8)
        self._logprobs: list[TokenLogprobs] = []
        self._looked_at = 0.0  # of `wait`
        self._idle_s = 0.0

    @property
    def is_complete(self) -> bool:
        """Whether no further request is needed once the last one is done."""
        return self.nodes[1] is not None or len(self._output_ids) >= NUM_TOKENS

    @property
    def answer(self) -> Answer:
        """The tokens that the nodes gave, and their rivals."""
        return answer_of(self._output_ids, self._logprobs)

    def next_request(self, now: float) -> Request:
        """Return a request for all tokens, or for the next one if a prefill node runs alone."""
        output_ids = self._output_ids
        self._looked_at, self._idle_s = now, 0.0
        is_prefill_alone = self.nodes[1] is None
        request = self.request = Request(
            f"canary-{secrets.token_hex(6)}",
            self.group,
            self._prompt_ids,
            SamplingParams(
                max_tokens=len(output_ids) + 1 if is_prefill_alone else NUM_TOKENS,
                temperature=0.0,
                num_logprobs=MAX_TOP_LOGPROBS,
            ),
            self,
            cache_salt=self._cache_salt,
            now=now,
            is_canary=True,
        )
        if output_ids:
            (sequence,) = request.sequences
            sequence.received.extend(output_ids)
            sequence.restart()
        return request

    def wait(self, now: float) -> float:
        """Return for how many seconds the last request has waited while none of its nodes was in a step, as far as
        calls of this method can tell. Call it several times per second."""
        if not any(node is not None and node.busy_since is not None for node in self.nodes):
            self._idle_s += now - self._looked_at
        self._looked_at = now
        return self._idle_s

    def on_delta(self, _sequence: Sequence, delta: Delta, /) -> None:
        self._logprobs += delta.logprobs

    def on_done(self, _request: Request, /) -> None:
        pass

    def on_error(self, _request: Request, _error: BatonError, /) -> None:
        pass

    @property
    def _output_ids(self) -> list[int]:
        return [] if self.request is None else self.request.sequences[0].received


def answer_of(token_ids: abc.Sequence[int], logprobs: abc.Sequence[TokenLogprobs]) -> Answer:
    """Return these tokens as an answer. A token has no rivals if the node named no likely tokens."""
    rivals = [
        tuple(
            Rival(token_id, entry.top_logprobs[0] - logprob)
            for token_id, logprob in zip(entry.top_ids[1:], entry.top_logprobs[1:], strict=True)
        )
        for entry in logprobs
    ]
    return Answer(tuple(token_ids), tuple(rivals + [()] * (len(token_ids) - len(rivals))))


def canary_prompt(group: NodeGroup) -> list[int]:
    """Return the group's test prompt: always the same tokens for the same length, without special tokens."""
    special = group.tokenizer.special_ids if group.tokenizer is not None else frozenset[int]()
    ordinary = [token for token in range(min(group.card.vocab_size, 4096)) if token not in special]
    length = canary_prompt_len(group)
    is_exact = group.layout.target.dtype == "float32" and not group.rounds_coarsely
    period = length if is_exact else REPEATED
    return [ordinary[(7919 * (index % period) + 101) % len(ordinary)] for index in range(length)]


def canary_prompt_len(group: NodeGroup) -> int:
    """Return the length of the test prompt: NUM_PAGES pages and a token, or less if a node has no room for that."""
    pages = min((node.hello.capacity.request_pages for node in group.nodes.values()), default=NUM_PAGES)
    room = min(group.context_len, pages * group.page_size) - 2 * NUM_TOKENS
    return max(1, min(NUM_PAGES * group.page_size + 1, room))
