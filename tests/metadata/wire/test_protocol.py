"""Fields and messages name their first protocol: older peers get only those they know, at no cost for others."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, get_args

import msgspec
import pytest
from golden import DIRECTIONS

from baton.metadata.wire import frames, protocol
from baton.metadata.wire.data_link import CudaWelcome
from baton.metadata.wire.frames import encode, unseal
from baton.metadata.wire.messages import Cancelled
from baton.metadata.wire.protocol import PROTOCOL_MAX, PROTOCOL_MIN, Message, Since, agreed, is_newer, known, sinces

KINDS = [kind for union in DIRECTIONS.values() for kind in get_args(union)]


class Row(msgspec.Struct, array_like=True):
    first: int
    second: Annotated[int, Since(5)] = 0
    third: Annotated[int | None, Since(6)] = None


class Inner(msgspec.Struct):
    old: int = 1
    new: Annotated[int, Since(6)] = 2


class Outer(Message, frozen=True, tag="outer"):
    name: str
    inner: Inner
    rows: tuple[Row, ...] = ()
    by_id: Annotated[dict[int, Inner], Since(5)] = {}
    late: Annotated[str, msgspec.Meta(max_length=9), Since(6)] = ""


class Late(Message, frozen=True, tag="late"):
    since: ClassVar[int] = 6

    word: str = ""


class Holder(msgspec.Struct):
    by_name: dict[str, tuple[Row, ...]] = {}


OUTER = Outer("n", Inner(), (Row(1, 2, 3),), {7: Inner(3, 4)}, "late")


@pytest.fixture(autouse=True)
def _protocol_6_is_the_newest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "PROTOCOL_MIN", 4)
    monkeypatch.setattr(protocol, "PROTOCOL_MAX", 6)


def plain(message: Message, peer: int | None) -> Any:
    body = unseal(encode(message, peer))
    assert body is not None
    return msgspec.msgpack.decode(body, strict=False)


def test_an_older_peer_gets_no_newer_field_however_deep() -> None:
    head = {"type": "outer", "name": "n"}
    newest = {"inner": {"old": 1, "new": 2}, "rows": [[1, 2, 3]], "by_id": {7: {"old": 3, "new": 4}}, "late": "late"}
    assert plain(OUTER, None) == plain(OUTER, 6) == plain(OUTER, 7) == head | newest
    assert plain(OUTER, 5) == head | {"inner": {"old": 1}, "rows": [[1, 2]], "by_id": {7: {"old": 3}}}
    assert plain(OUTER, 4) == head | {"inner": {"old": 1}, "rows": [[1]]}


def test_fields_that_an_older_peer_lacks_get_their_defaults() -> None:
    decoder = msgspec.msgpack.Decoder(Outer)
    older = decoder.decode(unseal(encode(OUTER, 4)) or b"")
    assert older == Outer("n", Inner(1, 2), (Row(1, 0, None),))


def test_a_message_that_the_peer_does_not_know_is_a_bug() -> None:
    assert plain(Late("w"), 6) == {"type": "late", "word": "w"}
    with pytest.raises(AssertionError, match="Late"):
        encode(Late("w"), 5)


def test_peers_agree_on_the_highest_common_protocol() -> None:
    assert agreed((4, 6)) == agreed((1, 9)) == agreed((6, 6)) == 6
    assert agreed((4, 5)) == agreed((4, 6), (1, 5)) == 5
    assert agreed((7, 9)) is agreed((1, 3)) is agreed((4, 4), (5, 6)) is None
    assert [known(number) for number in (0, 3, 4, 5, 6, 99)] == [4, 4, 4, 5, 6, 6]
    assert sinces(Outer) == {5, 6} and sinces(Late) == set()
    assert sinces(Holder) == {5, 6}  # of a struct in a list alone
    assert is_newer(Outer, 4, 5) and is_newer(Outer, 5, 6) and not is_newer(Outer, 6, 7)


class Required(Message, frozen=True):
    field: Annotated[int, Since(6)]


class Hidden(Message, frozen=True):
    field: tuple[Annotated[int, Since(6)], ...] = ()


class Unsorted(msgspec.Struct, array_like=True):
    field: Annotated[int, Since(6)] = 0
    other: int = 0


@pytest.mark.parametrize(
    ("kind", "words"), [(Required, "default"), (Hidden, "whole field"), (Unsorted, "must come last")]
)
def test_wrong_declarations_are_refused(kind: type[msgspec.Struct], words: str) -> None:
    with pytest.raises(AssertionError, match=words):
        sinces(kind)


@pytest.mark.parametrize("kind", KINDS)
def test_every_declaration_is_right_and_needed(kind: type[Message]) -> None:
    """A declaration older than all supported protocols says nothing. One newer than the newest protocol is wrong."""
    assert PROTOCOL_MIN <= kind.since <= PROTOCOL_MAX
    assert all(PROTOCOL_MIN < since <= PROTOCOL_MAX for since in sinces(kind))


def test_the_newest_protocol_takes_no_detour(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "_older", None)
    assert encode(OUTER, 6) == encode(OUTER)


def test_a_message_is_not_sent_to_a_peer_that_does_not_know_it(sample: Any) -> None:
    with pytest.raises(AssertionError):
        encode(sample(CudaWelcome), 5)
    assert encode(Cancelled(rid="r", attempt=0), 4) == encode(Cancelled(rid="r", attempt=0))
