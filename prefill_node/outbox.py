"""The outbox of a prefill node: builds one message with first tokens per prompt, and keeps it a while for repeats."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from ..metadata.wire.messages import Tokens
from ..metadata.wire.request import Ended, TokenLogprobs, Unit, pack_ids, unpack_ids
from .request import Request

_KEPT = 1024  # units


class FirstToken(NamedTuple):
    """The first token of a choice. `ended` is not None if it is also the last one."""

    unit: Unit
    token_id: int
    logprobs: TokenLogprobs | None
    ended: Ended | None


class Outbox:
    """Builds `Tokens` messages and remembers the latest ones."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Unit, Tokens] = OrderedDict()

    def first_tokens(self, request: Request, choices: Sequence[FirstToken]) -> Tokens:
        """Return one token per choice, at the index after the received tokens."""
        tokens = Tokens(
            units=tuple(choice.unit for choice in choices),
            firsts=pack_ids([request.num_received] * len(choices)),
            counts=pack_ids([1] * len(choices)),
            ids=pack_ids(choice.token_id for choice in choices),
            logprobs={i: (choice.logprobs,) for i, choice in enumerate(choices) if choice.logprobs is not None},
            ended={i: choice.ended for i, choice in enumerate(choices) if choice.ended is not None},
            num_cached=request.num_cached,
        )
        for unit in tokens.units:
            self._kept[unit] = tokens
        while len(self._kept) > _KEPT:
            self._kept.popitem(last=False)
        return tokens

    def again(self, unit: Unit, first: int) -> Tokens | None:
        """Return the message with the unit's token number `first`, if it is still kept.

        It may also hold tokens that the router has already, which the router drops."""
        tokens = self._kept.get(unit)
        return None if tokens is None or unpack_ids(tokens.firsts)[0] < first else tokens
