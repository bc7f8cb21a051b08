"""Reservations on a decode node: granted or refused. After a refusal the router is told when pages become free.

If several routers were refused, their turns follow the ages of their requests:

    refuse --> waiting --(room)--> told --grant--> served
                  |                  '--(GRANT_S)--> lapsed
                  '--(not repeated for REPEAT_S)---> lapsed

Several routers share a node, and none knows which requests wait in another one. When the node refuses a request, it
notes an ask for that router, with the age of the request. The age is a duration, because the clocks of hosts differ.
When pages are freed, the node tells the router of the oldest ask, and grants room to no other router meanwhile.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import msgspec

from ..metadata.errors import RequestError
from ..metadata.wire.messages import CapacityFreed, Compute, Reserve, Reserved, ToRouter
from ..metadata.wire.node_info import Load
from ..metadata.wire.request import Unit
from .outbox import Outbox
from .scheduler import DecodeScheduler
from .sequence import Sequence, new_sequence

GRANT_S = 2.0  # a router that was told of room has so long to ask again
REPEAT_S = 3.0  # an ask that is not repeated for so long is over; routers repeat theirs every two seconds


class Fail(Protocol):
    """A function that tells the router of this epoch that a unit has failed."""

    def __call__(self, router: str, unit: Unit, code: str, message: str, *, is_retryable: bool) -> None: ...


class Reservations:
    """Answers Reserve and Compute messages with Reserved, and sends CapacityFreed."""

    def __init__(
        self,
        scheduler: DecodeScheduler,
        outbox: Outbox,
        load: Callable[[], Load],
        send: Callable[[ToRouter, str], object],
        fail: Fail,
        *,
        vocab_size: int,
        context_len: int,
    ) -> None:
        """`vocab_size` and `context_len` are the model's: a request beyond them fails."""
        self._vocab_size, self._context_len = vocab_size, context_len
        self._scheduler = scheduler
        self._outbox = outbox
        self._load, self._send, self._fail = load, send, fail
        self._orders = itertools.count()
        self._asks = Asks()

    def grant(self, message: Reserve | Compute) -> list[Sequence]:
        """Reserve choices in order while they fit, and answer. Return the sequences that are reserved now."""
        units = [Unit(message.rid, choice, message.attempt) for choice in message.choices]
        known = [unit for unit in units if self._scheduler.get(unit) is not None or self._outbox.has_ended(unit)]
        if known:  # the message came twice, or the answer was lost
            self._answer(message, known)
            return []
        granted: list[Sequence] = []
        router, now = message.router_epoch, time.monotonic()
        is_refused = is_kept = not self._asks.may_take(router, now)
        for choice in () if is_refused else message.choices:
            try:
                sequence = new_sequence(
                    message,
                    choice,
                    next(self._orders),
                    vocab_size=self._vocab_size,
                    context_len=self._context_len,
                    scores_prompt=not granted,
                )
            except RequestError as error:
                unit = Unit(message.rid, choice, message.attempt)
                self._fail(message.router_epoch, unit, error.code, str(error), is_retryable=False)
                continue
            if not self._scheduler.reserve(sequence):
                is_refused = True
                break
            granted.append(sequence)
        if is_refused:
            self._asks.refuse(router, message.waited_s, self._scheduler.pages.num_releases, now)
        else:
            self._asks.grant(router)
        self._answer(message, [sequence.unit for sequence in granted], is_kept=is_kept)
        return granted

    def announce_capacity(self) -> None:
        """Tell the router whose turn it is that pages have become free since it was refused."""
        if not self._scheduler.is_open:
            return
        router = self._asks.next_to_tell(self._scheduler.pages.num_releases, time.monotonic())
        if router is not None:
            self._send(CapacityFreed(load=self._load()), router)

    def forget(self, router: str) -> None:
        """The router of this epoch is gone."""
        self._asks.forget(router)

    def _answer(self, message: Reserve | Compute, units: list[Unit], *, is_kept: bool = False) -> None:
        """`is_kept`: the room is another router's, whose request counts as running. A router takes a refusal by an
        empty node for a request that never fits."""
        granted, load = tuple(unit.choice for unit in units), self._load()
        if is_kept:
            load = msgspec.structs.replace(load, running=max(1, load.running))
        answer = Reserved(rid=message.rid, attempt=message.attempt, granted=granted, load=load)
        self._send(answer, message.router_epoch)


@dataclass(slots=True)
class _Ask:
    born: float  # when the request came to its router
    refused_at: float
    num_releases: int  # of the node's pages, when it was refused last
    told_at: float | None = None


class Asks:
    """The asks of all routers, one per router: that of its oldest request. The caller passes the time in monotonic
    seconds."""

    def __init__(self) -> None:
        self._asks: dict[str, _Ask] = {}

    def may_take(self, router: str, now: float) -> bool:
        """Return whether the router may get room now: no other router has an older ask."""
        oldest = self._oldest(now)
        return oldest is None or oldest == router

    def refuse(self, router: str, waited_s: float, num_releases: int, now: float) -> None:
        """Enter an ask. `waited_s`: since the request came to its router. `num_releases`: how often the node has freed
        pages so far."""
        ask = self._asks.get(router)
        born = now - waited_s if ask is None else min(ask.born, now - waited_s)
        self._asks[router] = _Ask(born, now, num_releases)

    def grant(self, router: str) -> None:
        """The router got what it asked for."""
        self._asks.pop(router, None)

    def forget(self, router: str) -> None:
        """The router is gone."""
        self._asks.pop(router, None)

    def next_to_tell(self, num_releases: int, now: float) -> str | None:
        """Return the router of the oldest ask if it is to be told that the node has freed pages since it was refused,
        else None. It counts as told."""
        router = self._oldest(now)
        if router is None:
            return None
        ask = self._asks[router]
        if ask.told_at is not None or num_releases <= ask.num_releases:
            return None
        ask.told_at = now
        return router

    def _oldest(self, now: float) -> str | None:
        """Return the router of the oldest ask. Asks that have lapsed are removed."""
        for router, ask in list(self._asks.items()):
            is_late = ask.told_at is not None and now - ask.told_at > GRANT_S
            if is_late or now - ask.refused_at > REPEAT_S:
                del self._asks[router]
        return min(self._asks, key=lambda router: self._asks[router].born, default=None)
