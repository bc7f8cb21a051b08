"""Generated tokens: each is sent once, and again when the router asks."""

from __future__ import annotations

import pytest

from baton.decode_node import outbox
from baton.decode_node.outbox import Outbox
from baton.decode_node.sequence import Sequence
from baton.engine.work import Accepted
from baton.metadata.wire.messages import Tokens
from baton.metadata.wire.request import TokenLogprobs, unpack_ids

from .conftest import MakeSequence


def generate(sequence: Sequence, *token_ids: int) -> None:
    entries: list[TokenLogprobs | None] = [TokenLogprobs(-float(token), (), ()) for token in token_ids]
    sequence.accept(Accepted(list(token_ids), entries, len(token_ids) - 1, 0), 100)


def columns(tokens: Tokens) -> list[tuple[str, int, list[int]]]:
    """Return (rid, first index, ids) of each unit."""
    ids, rows = unpack_ids(tokens.ids), []
    for unit, first, count in zip(tokens.units, unpack_ids(tokens.firsts), unpack_ids(tokens.counts), strict=True):
        rows.append((unit.rid, first, ids[:count]))
        del ids[:count]
    assert not ids
    return rows


def test_each_token_is_sent_once(make_sequence: MakeSequence) -> None:
    box, one, two = Outbox(), make_sequence("a", 5), make_sequence("bb", 3)
    generate(one, 11, 12)
    (message,) = box.unsent([one, two])
    assert columns(message) == [("a", 0, [11, 12])]
    generate(one, 13)
    generate(two, 21)
    (message,) = box.unsent([one, two])
    assert columns(message) == [("a", 2, [13]), ("bb", 0, [21])]
    assert message.logprobs == {0: (TokenLogprobs(-13.0, (), ()),), 1: (TokenLogprobs(-21.0, (), ()),)}
    assert box.unsent([one, two]) == []


def test_a_large_batch_is_split(make_sequence: MakeSequence, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "MAX_BATCH", 2)
    sequences = [make_sequence("r" * index, 3) for index in (1, 2, 3)]
    for sequence in sequences:
        generate(sequence, 7)
    assert [len(message.units) for message in Outbox().unsent(sequences)] == [2, 1]


def test_the_first_tokens_of_a_local_prompt_say_how_much_was_cached(make_sequence: MakeSequence) -> None:
    box, one, two = Outbox(), make_sequence("a", 5), make_sequence("bb", 3, is_local=True)
    two.num_cached = 2
    generate(one, 11)
    generate(two, 21)
    messages = box.unsent([one, two])
    assert [columns(message) for message in messages] == [[("a", 0, [11])], [("bb", 0, [21])]]
    assert [message.num_cached for message in messages] == [None, 2]
    generate(two, 22)
    (message,) = box.unsent([one, two])
    assert columns(message) == [("bb", 1, [22])] and message.num_cached is None
    assert box.again(two, 0).num_cached == 2 and box.again(one, 0).num_cached is None


def test_tokens_are_sent_again_from_an_index(make_sequence: MakeSequence) -> None:
    box, sequence = Outbox(), make_sequence("r", 6, received=1)
    generate(sequence, 11, 12, 13)
    box.unsent([sequence])
    assert columns(box.again(sequence, 2)) == [("r", 2, [12, 13])]
    assert columns(box.again(sequence, 9)) == [("r", 4, [])], "the router may ask for a token that does not exist yet"


def test_ended_sequences_are_kept_for_a_while(make_sequence: MakeSequence, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "_KEPT", 2)
    box, sequences = Outbox(), [make_sequence("r" * index, 3, max_tokens=1) for index in (1, 2, 3)]
    running = make_sequence("running", 3)
    for sequence in (*sequences, running):
        generate(sequence, 7)
    (message,) = box.unsent([*sequences, running])
    assert set(message.ended) == {0, 1, 2}
    found = [box.find_ended(sequence.unit) for sequence in (*sequences, running)]
    assert found == [None, *sequences[1:], None]
