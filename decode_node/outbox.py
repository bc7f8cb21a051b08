"""The outbox of a decode node: builds one message per step with new tokens, and repeats tokens if the router asks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as Seq

from ..metadata.wire.messages import Tokens
from ..metadata.wire.request import MAX_BATCH, Ended, TokenLogprobs, Unit, pack_ids
from .sequence import Sequence

_KEPT = 1024  # ended sequences


class Outbox:
    """Builds `Tokens` messages and remembers ended sequences for a while, in case a message was lost."""

    def __init__(self) -> None:
        self._ended: OrderedDict[Unit, Sequence] = OrderedDict()

    def unsent(self, sequences: Seq[Sequence]) -> list[Tokens]:
        """Return all tokens of `sequences` that were not sent yet, and mark them as sent. The first tokens after a
        local prompt have a message of their own, with the number of cached tokens."""
        messages: list[Tokens] = []
        for start in range(0, len(sequences), MAX_BATCH):
            new = [each for each in sequences[start : start + MAX_BATCH] if each.num_sent < each.num_generated]
            batch = [each for each in new if not each.owes_num_cached]
            if batch:
                messages.append(_tokens(batch, [sequence.num_sent for sequence in batch]))
            messages += [
                _tokens([each], [each.num_sent], num_cached=each.num_cached) for each in new if each.owes_num_cached
            ]
            for sequence in new:
                sequence.mark_sent()
                if sequence.ended is not None:
                    self._keep(sequence)
        return messages

    def again(self, sequence: Sequence, first: int) -> Tokens:
        """Return the sequence's generated tokens from index `first` on."""
        num_cached = sequence.num_cached if sequence.is_local else None
        return _tokens([sequence], [min(first, sequence.num_generated)], num_cached=num_cached)

    def find_ended(self, unit: Unit) -> Sequence | None:
        """Return the unit's sequence if it ended lately."""
        return self._ended.get(unit)

    def _keep(self, sequence: Sequence) -> None:
        self._ended[sequence.unit] = sequence
        while len(self._ended) > _KEPT:
            self._ended.popitem(last=False)


def _tokens(sequences: Seq[Sequence], firsts: Seq[int], *, num_cached: int | None = None) -> Tokens:
    """Return the tokens of each sequence from its index in `firsts` on. `num_cached`: tokens of the prompt that were
    found in the prefix cache, if the router needs the number."""
    ids: list[int] = []
    counts: list[int] = []
    logprobs: dict[int, tuple[TokenLogprobs, ...]] = {}
    ends: dict[int, Ended] = {}
    for i, (sequence, first) in enumerate(zip(sequences, firsts, strict=True)):
        new_ids = sequence.token_ids[sequence.prompt_len + first :]
        ids += new_ids
        counts.append(len(new_ids))
        if sequence.logprobs:
            logprobs[i] = tuple(sequence.logprobs[index] for index in range(first, first + len(new_ids)))
        if sequence.ended is not None:
            ends[i] = sequence.ended
    return Tokens(
        units=tuple(sequence.unit for sequence in sequences),
        firsts=pack_ids(firsts),
        counts=pack_ids(counts),
        ids=pack_ids(ids),
        logprobs=logprobs,
        ended=ends,
        num_cached=num_cached,
    )
