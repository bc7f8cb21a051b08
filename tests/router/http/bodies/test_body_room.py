"""Room for bodies: small ones always have it, one caller may take all of it, and the greediest gives way."""

from __future__ import annotations

import pytest

from baton.metadata.errors import Overloaded
from baton.router.http.bodies.body_room import SMALL_BODY, BodyRoom, ReceivedBody


def test_one_caller_may_take_all_and_gives_way_to_others() -> None:
    room, gone = BodyRoom(1000), list[str]()
    first = [ReceivedBody("a", lambda: gone.append("a")) for _ in range(2)]
    for body, size in zip(first, (300, 700), strict=True):
        room.add(body, SMALL_BODY + size)
    small = [ReceivedBody("a", lambda: gone.append("small")) for _ in range(100)]
    for body in small:
        room.add(body, SMALL_BODY)  # never counts
    more = ReceivedBody("a", lambda: gone.append("more"))
    with pytest.raises(Overloaded):
        room.add(more, SMALL_BODY + 1)
    room.remove(more)
    other = ReceivedBody("b", lambda: gone.append("b"))
    room.add(other, SMALL_BODY + 400)
    assert gone == ["a"] and first[1].is_displaced, "the largest of the caller with most"
    with pytest.raises(Overloaded):
        room.add(first[1], 50)  # it came before its reader knew
    room.add(other, 300)
    with pytest.raises(Overloaded):
        room.add(other, 100)  # a holds less now
    for body in (*first, *small, other):
        room.remove(body)
        room.remove(body)
    room.add(ReceivedBody("c", lambda: None), SMALL_BODY + 1000)
