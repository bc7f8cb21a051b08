"""A transport works for the pairs of nodes that meet the needs of its class."""

from __future__ import annotations

from typing import Any

import pytest

from baton.metadata.errors import ProtocolError
from baton.metadata.handoff.transports.base import INBOX_SINCE
from baton.metadata.handoff.transports.cuda import CudaTransport
from baton.metadata.handoff.transports.local import LocalTransport
from baton.metadata.handoff.transports.zmq import ZmqTransport
from baton.metadata.wire.data_link import CudaWelcome, LinkHello, Pages
from baton.metadata.wire.protocol import PROTOCOL_MAX
from baton.metadata.wire.request import pack_ids

INBOX = "baton-" + "0" * 32


@pytest.mark.parametrize(
    ("changes", "works"),
    [
        ({}, (True, True, True)),
        ({"host": "elsewhere"}, (True, True, True)),  # the inbox is in reach
        ({"host": "elsewhere", "protocol": INBOX_SINCE - 1}, (False, False, True)),
        ({"host": "elsewhere", "inbox": ""}, (False, False, True)),
        ({"inbox": ""}, (False, True, True)),
        ({"protocol": CudaWelcome.since - 1}, (False, True, True)),
        ({"protocol": 0}, (False, True, True)),  # an older node does not tell
    ],
)
def test_a_transport_works_if_all_that_it_needs_is_there(
    sample: Any, changes: dict[str, Any], works: tuple[bool, bool, bool]
) -> None:
    hello = sample(LinkHello, **({"host": "here", "inbox": INBOX, "protocol": PROTOCOL_MAX} | changes))
    kinds = (CudaTransport, LocalTransport, ZmqTransport)
    assert tuple(kind.can_reach(hello, "here") for kind in kinds) == works


def test_pages_on_a_link_that_never_pulls_are_refused(sample: Any) -> None:
    transport = LocalTransport((), ())
    pages = sample(Pages, indices=pack_ids([0]))
    with pytest.raises(ProtocolError, match="on a link that uses local"):
        transport.receive(pages, memoryview(b""))
