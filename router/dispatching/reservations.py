"""Reservations: asks the decode node that was chosen for pages, until it answers."""

from __future__ import annotations

from ...metadata.wire.messages import Compute, Reserve, Reserved
from ..nodes.node import Node
from ..requests.attempt import Attempt
from ..requests.request import Request
from ..waiting.entry import Entry

ASK_S = 0.5  # a decode node that has not answered is asked again after so long: less than a lease of its claims
ANSWER_S = 10.0  # a reservation without an answer is given up after so long


class Reservations:
    """Reservations under way, by request and attempt: those whose decode node has been asked for pages and has not
    answered yet."""

    def __init__(self, epoch: str) -> None:
        self._epoch = epoch
        self._entries: dict[tuple[str, int], Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def begin(self, entry: Entry, attempt: Attempt, decode: Node, now: float) -> Reserve | Compute:
        """Enter the attempt in the books of its decode node. Return the message that asks for it."""
        request = entry.request
        entry.attempt = attempt
        self._entries[request.rid, attempt.number] = entry
        num_pages = entry.need.local_pages if attempt.prefill is None else entry.need.decode_pages or 0
        decode.reserve(request.rid, attempt.number, attempt.choices, num_pages, entry.need.num_tails)
        return self._ask(request, attempt, decode, now)

    def get(self, rid: str, attempt: int) -> Entry | None:
        """Return the entry that this reservation is for, None if no answer is awaited."""
        return self._entries.get((rid, attempt))

    def answered(self, node: Node, message: Reserved) -> tuple[Entry, Attempt, tuple[int, ...]] | None:
        """Take a decode node's answer. Return the entry, its attempt and the choices that the node granted.

        Returns None if nobody awaits this answer. Then what it grants must be cancelled.
        """
        key = (message.rid, message.attempt)
        entry = self._entries.get(key)
        attempt = entry.attempt if entry is not None else None
        if entry is None or attempt is None or attempt.decode is not node:
            return None
        del self._entries[key]
        entry.attempt = None
        granted = tuple(each for each in entry.choices if each in attempt.choices and each in message.granted)
        node.grant(*key, granted)
        return entry, attempt, granted

    def take_back(self, request: Request, attempt: Attempt) -> Entry | None:
        """Await no answer any more. Return the entry of the attempt, None if none was awaited."""
        entry = self._entries.pop((request.rid, attempt.number), None)
        if entry is None:
            return None
        entry.attempt = None
        if attempt.decode is not None:
            attempt.decode.release(request.rid, attempt.number, attempt.choices)
        return entry

    def overdue(self, now: float) -> list[tuple[Request, Attempt]]:
        """Return the attempts whose decode node has not answered in time, and could have: a node in one step since it
        was asked has not read the question."""
        under_way = [(entry.request, entry.attempt) for entry in self._entries.values()]
        return [
            (request, each)
            for request, each in under_way
            if each is not None and now - each.sent_at > ANSWER_S and not _is_unread(each)
        ]

    def repeat(self, now: float) -> list[tuple[Node, Reserve | Compute]]:
        """Return the messages that ask again for answers that may have been lost."""
        due = [(entry.request, entry.attempt) for entry in self._entries.values()]
        return [
            (each.decode, self._ask(request, each, each.decode, now))
            for request, each in due
            if each is not None and each.decode is not None and now > each.ask_at
        ]

    def _ask(self, request: Request, attempt: Attempt, decode: Node, now: float) -> Reserve | Compute:
        attempt.ask_at = now + ASK_S
        attempt.num_asks += 1
        rid, number, choices = request.rid, attempt.number, tuple(sorted(attempt.choices))
        wire_request, waited_s = request.wire_request(choices[0]), max(0.0, now - request.created_at)
        if attempt.prefill is None:
            return Compute(self._epoch, rid, number, choices, wire_request, waited_s, attempt.lender)
        return Reserve(self._epoch, rid, number, choices, wire_request, attempt.prefill.peer_of(decode), waited_s)


def _is_unread(attempt: Attempt) -> bool:
    """Return whether the decode node has been in one step since it was asked."""
    busy_since = None if attempt.decode is None else attempt.decode.busy_since
    return busy_since is not None and busy_since <= attempt.sent_at + ASK_S
