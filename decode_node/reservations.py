"""Reservations on a decode node: granted or refused. After a refusal the router is told when pages become free."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Protocol

from ..metadata.errors import RequestError
from ..metadata.wire.messages import CapacityFreed, Compute, Reserve, Reserved, ToRouter
from ..metadata.wire.node_info import Load
from ..metadata.wire.request import Unit
from .outbox import Outbox
from .scheduler import DecodeScheduler
from .sequence import Sequence, new_sequence


class Fail(Protocol):
    """A function that tells the router that a unit has failed."""

    def __call__(self, unit: Unit, code: str, message: str, *, is_retryable: bool) -> None: ...


class Reservations:
    """Answers Reserve and Compute messages with Reserved, and sends CapacityFreed."""

    def __init__(
        self,
        scheduler: DecodeScheduler,
        outbox: Outbox,
        load: Callable[[], Load],
        send: Callable[[ToRouter], object],
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
        self._refused_at: int | None = None  # scheduler.pages.num_releases when a reservation was last refused

    def grant(self, message: Reserve | Compute) -> list[Sequence]:
        """Reserve choices in order while they fit, and answer. Return the sequences that are reserved now."""
        units = [Unit(message.rid, choice, message.attempt) for choice in message.choices]
        known = [unit for unit in units if self._scheduler.get(unit) is not None or self._outbox.has_ended(unit)]
        if known:  # the message came twice, or the answer was lost
            self._answer(message, known)
            return []
        granted: list[Sequence] = []
        for choice in message.choices:
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
                self._fail(Unit(message.rid, choice, message.attempt), error.code, str(error), is_retryable=False)
                continue
            if not self._scheduler.reserve(sequence):
                self._refused_at = self._scheduler.pages.num_releases
                break
            granted.append(sequence)
        self._answer(message, [sequence.unit for sequence in granted])
        return granted

    def announce_capacity(self) -> None:
        """Tell the router that pages have become free, if a reservation was refused since the last such message."""
        has_released = self._refused_at is not None and self._scheduler.pages.num_releases > self._refused_at
        if has_released and self._scheduler.is_open:
            self._refused_at = None
            self._send(CapacityFreed(load=self._load()))

    def _answer(self, message: Reserve | Compute, units: list[Unit]) -> None:
        granted = tuple(unit.choice for unit in units)
        self._send(Reserved(rid=message.rid, attempt=message.attempt, granted=granted, load=self._load()))
