"""Generated tokens: each is sent once, and again when the router asks."""

from __future__ import annotations

import pickle

import msgspec
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


def test_tokens_say_which_are_accepted_drafts_if_the_request_asks(make_sequence: MakeSequence) -> None:
    box, plain, marked = Outbox(), make_sequence("a", 5), make_sequence("bb", 6, received=1, max_tokens=4)
    marked.request = msgspec.structs.replace(marked.request, marks_drafts=True)
    marked.drafts += b"\0"
    for sequence in (plain, marked):
        generate(sequence, 11, 12)
    (message,) = box.unsent([plain, marked])
    assert message.drafts == {1: b"\1\0"}
    generate(marked, 13, 14)
    (message,) = box.unsent([marked])
    assert message.ended and message.drafts == {0: b"\1"}, "the last token is a draft: the fifth was not wanted"
    assert box.again(marked, 2).drafts == {0: b"\0\1"}
    again = box.again_of_ended(marked.unit, 1)
    assert again is not None and again.drafts == {0: b"\1\0\1"}


def test_ended_sequences_are_kept_for_a_while(make_sequence: MakeSequence, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "_KEPT", 2)
    box, sequences = Outbox(), [make_sequence("r" * index, 3, max_tokens=1) for index in (1, 2, 3)]
    running = make_sequence("running", 3)
    for sequence in (*sequences, running):
        generate(sequence, 7)
    (message,) = box.unsent([*sequences, running])
    assert set(message.ended) == {0, 1, 2}
    assert [box.has_ended(sequence.unit) for sequence in (*sequences, running)] == [False, True, True, False]
    assert box.again_of_ended(sequences[0].unit, 0) is box.again_of_ended(running.unit, 0) is None


def test_an_ended_sequence_is_sent_again_as_it_was(make_sequence: MakeSequence) -> None:
    box, sequence = Outbox(), make_sequence("r", 6, received=1, max_tokens=4)
    generate(sequence, 11, 12, 13)
    for first in (1, 2, 4, 9):
        whole = box.again(sequence, first)
        box.unsent([sequence])
        assert box.again_of_ended(sequence.unit, first) == whole
    assert columns(whole) == [("r", 4, [])] and whole.ended


def test_no_prompt_is_kept_of_an_ended_sequence(make_sequence: MakeSequence) -> None:
    """The books of a node hold some bytes per token of the output, and none per token of the prompt."""
    sizes = list[int]()
    for prompt_len in (3, 60):
        box, sequence = Outbox(), make_sequence("r", prompt_len, max_tokens=1)
        generate(sequence, 7)
        box.unsent([sequence])
        sizes.append(len(pickle.dumps(box)))
    assert sizes[0] == sizes[1] < 1000


def test_scores_of_a_prompt_that_were_sent_are_gone(make_sequence: MakeSequence) -> None:
    box, sequence = Outbox(), make_sequence("r", 3, is_local=True, max_tokens=1)
    sequence.request = msgspec.structs.replace(sequence.request, prompt_logprobs=True)
    generate(sequence, 7)
    box.unsent([sequence])
    assert box.again_of_ended(sequence.unit, 1) is None, "the router lacks only them"
    again = box.again_of_ended(sequence.unit, 0)
    assert again is not None and columns(again) == [("r", 0, [7])]
