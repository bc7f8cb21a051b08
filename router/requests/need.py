"""The need of a request: the pages, the context and the protocol that its nodes must have."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ...metadata.handoff.schema.schema import PLAIN_ROUNDS_LEN, decode_len, pages_of, prefill_pages, tail_pages
from ...metadata.wire.protocol import PROTOCOL_MIN, fields_since
from ...metadata.wire.request import SamplingParams
from ..nodes.node import Node
from .request import Request

GRAMMAR_PROTOCOL = fields_since(SamplingParams)["grammar"]  # nodes of an older protocol would ignore a grammar


class Need(NamedTuple):
    """Pages and context that idle nodes must have to serve one choice of a request."""

    prefill_pages: int
    pages_per_choice: int  # added by each further choice on the prefill node
    decode_pages: int | None  # None: no decode node is needed
    context_len: int  # tokens of the prompt and of the longest output
    local_pages: int = 0  # on a decode node that computes the prompt itself
    num_tails: int = 0  # tail pages that a decode node needs beside either
    tails_per_choice: int = 0  # added by each further choice on the prefill node, if the drafter has KV there
    protocol: int = PROTOCOL_MIN  # nodes of an older one would ignore a part of the request

    @classmethod
    def of(cls, request: Request, choice: int, *, needs_decode: bool) -> Need:
        """Return the need of a choice, with the tokens that it has received."""
        layout = request.group.layout
        prompt_len, page_size = len(request.prompt_ids), layout.page_size
        num_tokens = prompt_len + len(request.sequences[choice].received)
        one, two = (prefill_pages(num_tokens, count, page_size, layout.key_lookahead) for count in (1, 2))
        context_len = prompt_len + request.params.max_tokens
        if prompt_len == request.group.context_len and request.params.max_tokens == 1:
            context_len = prompt_len  # a prompt that is scored alone fills the context
        reserved_len = decode_len(num_tokens, PLAIN_ROUNDS_LEN, context_len)
        num_pages, tails = pages_of(reserved_len, page_size), tail_pages(layout, num_tokens)
        num_tails = num_pages - tails.start if tails else 0
        protocol = PROTOCOL_MIN if request.params.grammar is None else GRAMMAR_PROTOCOL
        decode_pages = num_pages if needs_decode else None
        of_choice = two - one if layout.draft is not None and layout.draft.window else 0
        return cls(one, two - one, decode_pages, context_len, num_pages, num_tails, of_choice, protocol)

    def fits_prefill(self, node: Node) -> bool:
        """Whether this prefill node could compute it when idle."""
        return self.prefill_pages <= node.hello.capacity.num_pages and self._fits(node)

    def fits_decode(self, node: Node) -> bool:
        """Whether this decode node could generate it when idle."""
        return (self.decode_pages or 0) <= node.hello.capacity.num_pages and self._fits(node)

    def fits_local(self, node: Node) -> bool:
        """Whether this decode node could compute the prompt and generate when idle."""
        return self.local_pages <= node.hello.capacity.num_pages and self._fits(node)

    def fits_any(self, pairs: Iterable[tuple[Node, Node]]) -> bool:
        """Whether one of these pairs could serve it when idle."""
        return any(self.fits_prefill(prefill) and self.fits_decode(decode) for prefill, decode in pairs)

    def most_choices(self, prefill: Node | None) -> int:
        """Return how many choices the prefill node has room for when idle. If it is None (the decode node computes the
        prompt itself), there is no limit."""
        if prefill is None or self.decode_pages is None or not self.pages_per_choice:
            return 1 << 30
        capacity = prefill.hello.capacity
        most = 1 + (capacity.num_pages - self.prefill_pages) // self.pages_per_choice
        if self.tails_per_choice:  # the prompt itself needs less than half of the tail pages (`tails_beside`)
            most = min(most, 1 + capacity.num_tails // 2 // self.tails_per_choice)
        return max(1, most)

    def _fits(self, node: Node) -> bool:
        fits = node.hello.capacity.max_running > 0 and self.context_len <= node.hello.model.context_len
        return fits and self.protocol <= node.protocol
