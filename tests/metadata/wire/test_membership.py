"""Messages about a node: their bounds, and the epoch of the router that sent them."""

from __future__ import annotations

from typing import Any, get_args

import msgspec
import pytest

from baton.metadata.wire import membership
from baton.metadata.wire.membership import Hello, LedgerReport, RouterMessage
from baton.metadata.wire.messages import ToNode, to_node_decoder, to_router_decoder
from baton.metadata.wire.request import MAX_BATCH, Unit


@pytest.mark.parametrize("kind", get_args(ToNode), ids=lambda kind: kind.__name__)
def test_every_message_of_the_router_carries_its_epoch(kind: type, sample: Any) -> None:
    assert issubclass(kind, RouterMessage)
    for epoch in ("", "e" * 64):
        frame = msgspec.msgpack.encode(sample(kind, router_epoch=epoch))
        assert to_node_decoder.decode(frame).router_epoch == epoch
    with pytest.raises(msgspec.ValidationError, match="router_epoch"):
        to_node_decoder.decode(msgspec.msgpack.encode(sample(kind, router_epoch="e" * 65)))


def test_the_range_of_protocols_survives_the_wire(sample: Any) -> None:
    hello = to_router_decoder.decode(msgspec.msgpack.encode(sample(Hello, protocol_min=2, protocol_max=9)))
    assert isinstance(hello, Hello) and hello.protocols == (2, 9)


@pytest.mark.parametrize("column", ["requests", "tickets"])
def test_a_ledger_report_holds_a_bounded_number_of_units(column: str, sample: Any) -> None:
    units = tuple(Unit(str(number), 0, 0) for number in range(MAX_BATCH + 1))
    most = sample(LedgerReport, **{column: units[:-1]})
    assert to_router_decoder.decode(msgspec.msgpack.encode(most)) == most
    with pytest.raises(msgspec.ValidationError, match=column):
        to_router_decoder.decode(msgspec.msgpack.encode(sample(LedgerReport, **{column: units})))


def test_the_module_declares_no_message_that_no_direction_has() -> None:
    sent = {*get_args(ToNode), *to_router_decoder.type.__args__, RouterMessage}
    declared = {
        kind
        for kind in vars(membership).values()
        if isinstance(kind, type) and kind.__module__ == membership.__name__ and issubclass(kind, msgspec.Struct)
    }
    assert declared and declared <= sent
