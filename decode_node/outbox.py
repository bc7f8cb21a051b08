"""The outbox of a decode node: builds one message per step with new tokens, and repeats tokens if the router asks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as Seq
from typing import NamedTuple

from ..metadata.wire.messages import Tokens
from ..metadata.wire.request import MAX_BATCH, Ended, Ids, TokenLogprobs, Unit, pack_ids, unpack_ids
from .sequence import Sequence

_KEPT = 1024  # ended sequences


class EndedSequence(NamedTuple):
    """The output of a sequence that has ended. Its prompt is not kept: of a thousand long prompts it would take
    gigabytes, and the garbage collector would look at every token."""

    unit: Unit
    output_ids: Ids  # received and generated
    logprobs: dict[int, TokenLogprobs]  # by index into the output
    drafts: bytes  # by index into the output, if asked for
    ended: Ended
    num_cached: int | None  # prompt tokens found in the prefix cache; None: a prefill node has told
    has_sent_scores: bool  # log-probabilities of the prompt were sent from here, and are not kept

    @classmethod
    def of(cls, sequence: Sequence) -> EndedSequence:
        assert sequence.ended is not None, sequence.unit
        return cls(
            sequence.unit,
            pack_ids(sequence.token_ids[sequence.prompt_len :]),
            sequence.logprobs,
            bytes(sequence.drafts),
            sequence.ended,
            sequence.num_cached if sequence.is_local else None,
            sequence.is_local and sequence.request.prompt_logprobs,
        )

    @property
    def num_generated(self) -> int:
        return len(self.output_ids) // 4


class Outbox:
    """Builds `Tokens` messages and remembers ended sequences for a while, in case a message was lost."""

    def __init__(self) -> None:
        self._ended: OrderedDict[Unit, EndedSequence] = OrderedDict()

    def unsent(self, sequences: Seq[Sequence]) -> list[Tokens]:
        """Return all tokens of `sequences` that were not sent yet, and mark them as sent. The first tokens after a
        local prompt have a message of their own, with the number of cached tokens."""
        messages: list[Tokens] = []
        for start in range(0, len(sequences), MAX_BATCH):
            new = [each for each in sequences[start : start + MAX_BATCH] if each.num_sent < each.num_generated]
            batch = [each for each in new if not each.owes_num_cached]
            if batch:
                messages.append(_tokens([_part(each, each.num_sent) for each in batch]))
            messages += [_tokens([_part(each, each.num_sent)], each.num_cached) for each in new if each.owes_num_cached]
            for sequence in new:
                sequence.mark_sent()
                if sequence.ended is not None:
                    self._keep(sequence)
        return messages

    def again(self, sequence: Sequence, first: int) -> Tokens:
        """Return the sequence's generated tokens from index `first` on."""
        num_cached = sequence.num_cached if sequence.is_local else None
        return _tokens([_part(sequence, min(first, sequence.num_generated))], num_cached)

    def again_of_ended(self, unit: Unit, first: int) -> Tokens | None:
        """Return the generated tokens from index `first` on of a unit that ended lately. None: it did not, or the
        router has all tokens and lacks the log-probabilities of the prompt, which are gone."""
        ended = self._ended.get(unit)
        if ended is None or (ended.has_sent_scores and first >= ended.num_generated):
            return None
        first = min(first, ended.num_generated)
        ids = unpack_ids(ended.output_ids[4 * first :])
        return _tokens([_Part(unit, first, ids, ended.logprobs, ended.drafts, ended.ended)], ended.num_cached)

    def has_ended(self, unit: Unit) -> bool:
        """Whether the unit's sequence ended lately."""
        return unit in self._ended

    def _keep(self, sequence: Sequence) -> None:
        self._ended[sequence.unit] = EndedSequence.of(sequence)
        while len(self._ended) > _KEPT:
            self._ended.popitem(last=False)


class _Part(NamedTuple):
    """Tokens of one sequence in a message."""

    unit: Unit
    first: int  # index of the first one
    ids: list[int]
    logprobs: dict[int, TokenLogprobs]  # of the whole output, by index
    drafts: bytes | bytearray  # likewise
    ended: Ended | None


def _part(sequence: Sequence, first: int) -> _Part:
    """Return the tokens of a sequence from index `first` on."""
    ids = sequence.token_ids[sequence.prompt_len + first :]
    return _Part(sequence.unit, first, ids, sequence.logprobs, sequence.drafts, sequence.ended)


def _tokens(parts: Seq[_Part], num_cached: int | None = None) -> Tokens:
    """Return the message with these parts. `num_cached`: tokens of the prompt that were found in the prefix cache, if
    the router needs the number."""
    logprobs = {
        i: tuple(part.logprobs[index] for index in range(part.first, part.first + len(part.ids)))
        for i, part in enumerate(parts)
        if part.logprobs
    }
    return Tokens(
        units=tuple(part.unit for part in parts),
        firsts=pack_ids([part.first for part in parts]),
        counts=pack_ids([len(part.ids) for part in parts]),
        ids=pack_ids([token_id for part in parts for token_id in part.ids]),
        logprobs=logprobs,
        ended={i: part.ended for i, part in enumerate(parts) if part.ended is not None},
        num_cached=num_cached,
        drafts={i: bytes(part.drafts[part.first :]) for i, part in enumerate(parts) if part.drafts},
    )
