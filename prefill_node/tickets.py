"""The tickets of a prefill node's requests: opened when a prompt arrives, ended by the decode node or by a lease.

A page is offered once, when its KV is computed and will not be written again. A drafter may write the slots of the
last prompt positions after the first token is sampled. The pages with these slots are offered last, with the metadata
row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ..engine.state.pages import PagePool
from ..metadata.handoff.server import HandoffServer
from ..metadata.handoff.tickets import TicketEnded, TicketFailed
from ..metadata.wire.request import Unit
from .chunk_work import PromptEnd
from .request import Request


class EndedUnit(NamedTuple):
    """A ticket that has ended, and its request."""

    request: Request
    unit: Unit


class FailedUnit(NamedTuple):
    """A ticket for whose pages the device has no memory, and its request. The ticket is open until it is revoked."""

    request: Request
    unit: Unit
    reason: str


class Tickets:
    """Opens, fills and ends the tickets of all requests by the handoff server."""

    def __init__(self, pool: PagePool, handoff: HandoffServer) -> None:
        self._pool = pool
        self._handoff = handoff
        self._requests: dict[Unit, Request] = {}  # by open ticket

    def units(self) -> tuple[Unit, ...]:
        """Return the units of all open tickets."""
        return tuple(self._requests)

    def open(self, request: Request) -> None:
        """Open a ticket for each choice. A request without a decode node has none."""
        if request.decode is None:
            return
        num_pages = -(-len(request.token_ids) // self._pool.page_size)
        num_pages += len(self._handoff.tail_pages(len(request.token_ids)))
        for unit in request.choices:
            self._handoff.open(unit, num_pages, request.decode.epoch)
            self._requests[unit] = request
            request.open_ticket(unit)

    def revoke(self, request: Request, unit: Unit, *, is_finished: bool, reason: str) -> None:
        """Take a ticket back, if it is open: the first token ended the choice (`is_finished`), or it failed."""
        if unit in request.tickets:
            self._handoff.revoke(unit, is_finished, reason)

    def poll(self) -> Iterator[EndedUnit | FailedUnit]:
        """Let the handoff server work, and yield the tickets that have ended or failed."""
        for event in self._handoff.poll():
            if isinstance(event, TicketFailed) and event.unit in self._requests:
                yield FailedUnit(self._requests[event.unit], event.unit, event.reason)
            elif isinstance(event, TicketEnded):
                request = self._requests.pop(event.unit)
                request.end_ticket(event.unit)
                yield EndedUnit(request, event.unit)

    def offer_computed(self, request: Request) -> None:
        """Offer every page of a prompt under way that will not be written again."""
        num_ready = self._num_ready(request, request.num_computed)
        self._offer(request, num_ready, dict.fromkeys(request.choices, request.pages), {})

    def digest_ahead(self, requests: Iterable[Request]) -> None:
        """Begin to compute the checksums of the pages that the chunk submitted last completes, so that the device has
        them when the pages are offered."""
        pages = [
            page
            for request in requests
            if request.tickets
            for page in request.pages[request.num_offered : self._num_ready(request, request.num_submitted)]
        ]
        self._handoff.digest_ahead(pages, self._generations(pages))

    def digest_last(self, ends: Sequence[PromptEnd]) -> None:
        """Compute the checksums of the last pages of several prompts in one pass, which saves time on a GPU."""
        pages = [
            page
            for end in ends
            if end.request.tickets
            for block_table in end.block_tables
            for page in block_table[end.request.num_offered :]
        ]
        self._handoff.digest(pages, self._generations(pages))

    def offer_last(self, end: PromptEnd, rows: Mapping[Unit, bytes]) -> None:
        """Offer the last pages of a prompt, with the metadata rows of the choices that go on, and its tail pages."""
        request, read, base = end.request, self._handoff.tail_pages(len(end.request.token_ids)), self._pool.num_pages
        tables = [
            [*table, *(base + page for page in (tails or ())[read.start : read.stop])]
            for table, tails in zip(end.block_tables, end.tail_tables, strict=True)
        ]
        self._offer(request, len(request.pages) + len(read), dict(zip(end.units, tables, strict=True)), rows)

    def _offer(
        self,
        request: Request,
        num_ready: int,
        block_tables: Mapping[Unit, Sequence[int]],
        rows: Mapping[Unit, bytes],
    ) -> None:
        """Offer the first `num_ready` pages of each choice, without those that were offered before."""
        start = request.num_offered
        if num_ready == start or not request.tickets:
            return
        indices = list(range(start, num_ready))
        for unit in request.choices:
            if unit in request.tickets:
                pages = block_tables[unit][start:num_ready]
                self._handoff.offer(unit, indices, pages, self._generations(pages), rows.get(unit))
        request.offer_pages(num_ready)

    def _num_ready(self, request: Request, num_tokens: int) -> int:
        """Return how many pages nobody writes again when the first `num_tokens` tokens are computed."""
        is_whole = num_tokens == len(request.token_ids)
        return request.num_shared if is_whole else min(num_tokens // self._pool.page_size, request.num_shared)

    def _generations(self, pages: Sequence[int]) -> list[int]:
        """Return the generations of pages."""
        return [self._pool.generation(page) for page in pages]
