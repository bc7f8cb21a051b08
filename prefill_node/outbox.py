"""First tokens on their way to the router, kept for a while in case the router asks again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from ..metadata.handoff.buffers import Sampled
from ..metadata.wire.messages import Tokens
from ..metadata.wire.request import Ended, Unit, pack_ids, unpack_ids
from .job import PrefillJob

_KEPT = 1024  # units


class FirstToken(NamedTuple):
    """What a choice begins with, and how it ends if it does so at once."""

    unit: Unit
    sampled: Sampled
    ended: Ended | None


class FirstTokens:
    """Makes the message and remembers the last ones."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Unit, Tokens] = OrderedDict()

    def make(self, job: PrefillJob, choices: Sequence[FirstToken]) -> Tokens:
        """One token for each choice, at the index after those received."""
        tokens = Tokens(
            units=tuple(choice.unit for choice in choices),
            firsts=pack_ids([job.num_received] * len(choices)),
            counts=pack_ids([1] * len(choices)),
            ids=pack_ids(choice.sampled.first_token for choice in choices),
            logprobs={i: (entry,) for i, (_, (_, _, entry), _) in enumerate(choices) if entry is not None},
            ended={i: choice.ended for i, choice in enumerate(choices) if choice.ended is not None},
            num_cached=job.num_cached,
        )
        for unit in tokens.units:
            self._kept[unit] = tokens
        while len(self._kept) > _KEPT:
            self._kept.popitem(last=False)
        return tokens

    def again(self, unit: Unit, first: int) -> Tokens | None:
        """The message that held the unit's token number `first`; the router drops what it has already."""
        tokens = self._kept.get(unit)
        return None if tokens is None or unpack_ids(tokens.firsts)[0] < first else tokens
