"""Reservations on a decode node: granted or refused. After a refusal the router is told when pages become free. If
several routers were refused, their turns follow the ages of their requests (metadata/bus/asks.py)."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Protocol

import msgspec

from ..metadata.bus.asks import Asks
from ..metadata.errors import RequestError
from ..metadata.wire.messages import CapacityFreed, Compute, Reserve, Reserved, ToRouter
from ..metadata.wire.node_info import Load
from ..metadata.wire.request import Unit
from .outbox import Outbox
from .scheduler import DecodeScheduler
from .sequence import Sequence, new_sequence


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
