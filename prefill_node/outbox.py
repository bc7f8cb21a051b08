"""First tokens on their way to the router, kept for a while in case the router asks again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from ..metadata.messages import Tokens
from ..metadata.request import Ended, TokenLogprobs, Unit, pack_ids
from .job import PrefillJob

_KEPT = 1024  # units


class FirstTokens:
    """Makes the message and remembers the last ones."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Unit, Tokens] = OrderedDict()

    def make(
        self,
        job: PrefillJob,
        units: Sequence[Unit],
        ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs | None],
        ends: Sequence[Ended | None],
    ) -> Tokens:
        """One token for each unit, at the index after those received."""
        tokens = Tokens(
            units=tuple(units),
            firsts=pack_ids([job.num_received] * len(units)),
            counts=pack_ids([1] * len(units)),
            ids=pack_ids(ids),
            logprobs={i: (entry,) for i, entry in enumerate(logprobs) if entry is not None},
            ended={i: end for i, end in enumerate(ends) if end is not None},
            num_cached=job.num_cached,
        )
        for unit in units:
            self._kept[unit] = tokens
        while len(self._kept) > _KEPT:
            self._kept.popitem(last=False)
        return tokens

    def again(self, unit: Unit) -> Tokens | None:
        """The message that held the unit's first token; the router drops what it has already."""
        return self._kept.get(unit)
