"""Asks: the order of routers that a full node has refused, and when an ask is over."""

from __future__ import annotations

from baton.decode_node.reservations import GRANT_S, REPEAT_S, Asks


def two() -> Asks:
    """Return the asks of two routers at time 100, both refused when the node had freed pages 7 times."""
    asks = Asks()
    asks.refuse("young", 1.0, 7, 100.0)
    asks.refuse("old", 4.0, 7, 100.5)
    return asks


def test_the_oldest_ask_goes_first_and_is_told_once() -> None:
    asks = two()
    assert asks.next_to_tell(7, 101.0) is None, "nothing was freed"
    assert asks.next_to_tell(8, 101.0) == "old" and asks.next_to_tell(9, 101.1) is None
    assert asks.may_take("old", 101.1) and not asks.may_take("young", 101.1) and not asks.may_take("third", 101.1)
    asks.grant("old")
    assert asks.next_to_tell(8, 101.2) == "young" and asks.may_take("young", 101.2)


def test_a_grant_that_is_not_used_lapses() -> None:
    asks = two()
    assert asks.next_to_tell(8, 101.0) == "old"
    assert not asks.may_take("young", 101.0 + GRANT_S)
    assert asks.may_take("young", 101.01 + GRANT_S)


def test_an_ask_that_is_not_repeated_lapses_also_if_no_room_came() -> None:
    asks = two()
    assert not asks.may_take("young", 100.4 + REPEAT_S)
    asks.refuse("young", 4.4, 7, 100.4 + REPEAT_S)
    assert asks.may_take("young", 100.6 + REPEAT_S)


def test_a_repeated_ask_keeps_its_age() -> None:
    """Routers of older releases do not say how long a request has waited."""
    asks = Asks()
    asks.refuse("first", 0.0, 7, 100.0)
    asks.refuse("second", 0.0, 7, 100.1)
    asks.refuse("first", 0.0, 7, 102.0)
    assert asks.may_take("first", 102.0) and not asks.may_take("second", 102.0)


def test_one_router_alone_is_never_held_up() -> None:
    asks = Asks()
    asks.refuse("only", 3.0, 7, 100.0)
    assert asks.may_take("only", 100.0) and asks.next_to_tell(8, 100.1) == "only"
    assert asks.may_take("only", 110.0) and asks.may_take("other", 110.0)
